//! The command line as a type: the commands, and the options all of them take.

use clap::{Args, Parser, Subcommand, ValueEnum};

use crate::{diff, doctor, dry_run, explain, export, flame, replay, run, stand_in};

const AFTER_HELP: &str = "\
Examples:
  unhand explain snapshot.pickle             what held the memory, and what to do about it
  unhand replay snapshot.pickle --sweep      which allocator settings would have needed less
  unhand diff before.pickle after.pickle     what one run holds that the other does not
  unhand run train.py                        a run that writes down why it ran out of memory
  unhand doctor                              what this machine allows, and what to do about the rest

FILE is a memory snapshot of PyTorch (`torch.cuda.memory._dump_snapshot`), as it is or
as .gz, .xz or .zst; a folder stands for all snapshots in it, and - for stdin. Nothing
in a file is ever executed.

Exit codes: 0 fine, 1 found what you asked to be told about, 2 bad use, 3 bad input.";

/// See what holds your GPU memory, make it let go, keep it free.
#[derive(Debug, Parser)]
#[command(name = "unhand", version, after_help = AFTER_HELP, disable_help_subcommand = true, max_term_width = 100)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    pub(crate) command: Command,

    #[command(flatten)]
    pub(crate) shared: Shared,
}

/// What every command takes.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Shared {
    /// Answer as JSON: sizes in bytes, and a `schema_version`
    #[arg(long, global = true)]
    pub(crate) json: bool,

    /// Use what there is of a file that was cut short
    #[arg(long, global = true)]
    pub(crate) partial: bool,

    /// When to use colours; `auto` looks at the terminal and at `NO_COLOR`
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub(crate) color: Color,
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    Explain(explain::Arguments),
    Replay(replay::Arguments),
    Diff(diff::Arguments),
    Flame(flame::Arguments),
    Export(export::Arguments),
    Run(run::Arguments),
    Doctor(doctor::Arguments),
    DryRun(dry_run::Arguments),
    StandIn(stand_in::Arguments),
}

/// When to use colours.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Color {
    Auto,
    Always,
    Never,
}

#[cfg(test)]
mod tests {
    use clap::CommandFactory;

    use super::Arguments;

    #[test]
    fn the_command_line_is_well_formed() {
        Arguments::command().debug_assert();
    }
}
