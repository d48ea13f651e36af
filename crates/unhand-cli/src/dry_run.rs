//! `unhand dry-run`: what a training script would need on a GPU, found out without one.

mod answer;
mod bisect;
mod program;
mod text;

use std::ffi::OsString;
use std::io::Write as _;
use std::path::{Path, PathBuf};

use clap::Args;
use unhand_analyze::Bytes;
use unhand_standin::{PROFILES, Profile};

use crate::arguments::Shared;
use crate::failure::{Failure, Outcome};
use crate::output::{OutputFile, write_file};
use crate::printer::{self, Printer};
use crate::stand_in::Machine;
use answer::{Answer, Target};
use bisect::Range;
use program::{Output, Program};

const AFTER_HELP: &str = "\
Examples:
  unhand dry-run train.py --config small.yaml       what would it need, and where would it fit?
  unhand dry-run --gpu l4 --max-steps 3 train.py    would it fit an L4? exit code 1 if not
  unhand dry-run --gpu a100-40 --bisect batch_size=8..512 train.py
                                                    the largest --batch_size that fits
  unhand dry-run --record run.pickle -m pkg.train   keep the history for explain, replay and flame

The script runs with the real PyTorch on a GPU that is not there (see `unhand stand-in --help`)
and is never refused memory, so that its peak is found wherever that is. Whether it fits a GPU is
worked out from the recorded history, by PyTorch's own rules. Nothing is computed: a script that
waits for its loss to fall waits for ever; give --max-steps.

Exit codes: 0 it fits, or nothing was asked; 1 it does not fit; 2 bad use; 3 it cannot be run here;
otherwise the script's own, if it failed.";

/// Say what a script would need on a GPU, who holds it, and where it fits, without having one
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Arguments {
    #[command(flatten)]
    machine: Machine,

    /// Stop after so many optimizer steps
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..))]
    max_steps: Option<u64>,

    /// Write the recorded history there, as a snapshot of PyTorch
    #[arg(long, value_name = "FILE")]
    record: Option<PathBuf>,

    /// Replace an existing file
    #[arg(long)]
    force: bool,

    /// Find the largest value of an option of the script that fits: it is run with `--NAME VALUE`, or with the value in
    /// the place of `{NAME}` where its arguments have that
    #[arg(long, value_name = "NAME=LO..HI")]
    bisect: Option<Range>,

    /// How many holders to show
    #[arg(long, value_name = "N", default_value_t = 8)]
    limit: usize,

    /// The script, or `-m` and a module, with its arguments
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, required = true, value_name = "SCRIPT")]
    program: Vec<OsString>,
}

/// `own_python` is the interpreter that runs us, if one does.
pub(crate) fn run(
    arguments: &Arguments,
    own_python: Option<&Path>,
    shared: Shared,
    printer: &mut Printer,
) -> Result<Outcome, Failure> {
    let program = Program::of(&arguments.program, own_python)?;
    let machine = &arguments.machine;
    let target = Target::of(machine);
    let environment = program.environment(machine)?;
    if let Some(range) = &arguments.bisect {
        return bisect::run(&program, &environment, range, &target, arguments.max_steps, shared, printer);
    }
    if let Some(path) = &arguments.record {
        // Refused before the work, not after it.
        drop(OutputFile::create(path, arguments.force)?);
    }
    say(
        shared,
        &format!(
            "unhand dry-run: a stand-in for {}, {}; nothing is computed, and no GPU is used",
            target.device_name(),
            Bytes(target.memory_bytes)
        ),
    );
    let output = if shared.json { Output::ToStderr } else { Output::Shown };
    let outcome = program.run(&environment, &[], arguments.max_steps, output)?;
    if let Some(path) = &arguments.record {
        let Some(pickle) = &outcome.pickle else {
            return Err(
                Failure::bad_input("there is no history to write").because_text(outcome.without_history())
            );
        };
        write_file(path, arguments.force, |out| out.write_all(pickle))?.map_err(|error| {
            Failure::bad_input(format!("cannot write: `{}`", path.display())).because(&error)
        })?;
    }
    let answer = Answer::of(&outcome, &target)?;
    if shared.json {
        printer.json(&answer)?;
    } else {
        text::print(&answer, &target, arguments.limit, printer)?;
    }
    Ok(match outcome.exit_code {
        0 if target.is_asked && !answer.fits() => Outcome::Found,
        0 => Outcome::Fine,
        code => Outcome::Program(code),
    })
}

/// The profile that is run on, and whether somebody asked about it.
impl Target {
    fn of(machine: &Machine) -> Target {
        let profile: &'static Profile = machine.gpu.unwrap_or(PROFILES[0]);
        let memory_bytes = machine.memory.map_or(profile.memory_bytes, |Bytes(n)| n);
        Target { profile, memory_bytes, is_asked: machine.gpu.is_some() || machine.memory.is_some() }
    }
}

/// One line to stderr: stdout belongs to the script and to the answer.
fn say(shared: Shared, line: &str) {
    let stderr = std::io::stderr();
    let style = printer::style_of(shared.color, &stderr);
    let _ = writeln!(stderr.lock(), "{}", printer::harmless(&style.strong(line).to_string()));
}
