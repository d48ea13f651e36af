//! `unhand export`: the events, segments or blocks of a snapshot as a table for other tools.

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use unhand_analyze::{Format, Table, export};

use crate::arguments::Shared;
use crate::failure::{Failure, Outcome};
use crate::load::{Loaded, load};
use crate::output;
use crate::printer::Printer;
use crate::progress::Progress;

const AFTER_HELP: &str = "\
Examples:
  unhand export snapshot.pickle --to csv --what segments
  unhand export snapshot.pickle --to jsonl -o events.jsonl
  unhand export snapshot.pickle --to csv | head";

/// Write the events, segments or blocks of a snapshot as a table
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Arguments {
    /// The snapshot, or `-` for stdin
    file: PathBuf,

    /// What to write; `--json` means `jsonl`
    #[arg(long, value_name = "FORMAT", required_unless_present = "json", conflicts_with = "json")]
    to: Option<To>,

    /// Which table
    #[arg(long, value_name = "TABLE", default_value = "events")]
    what: What,

    /// Add the whole call stacks; they make the table many times larger
    #[arg(long)]
    stacks: bool,

    /// Export this device only
    #[arg(long, value_name = "INDEX")]
    device: Option<usize>,

    /// Write to this file instead of stdout
    #[arg(short, long, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Replace the file if it is there
    #[arg(short, long, requires = "output")]
    force: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum To {
    /// Comma-separated values with a header line
    Csv,
    /// One JSON object a line
    Jsonl,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum What {
    /// The recorded history, one row an event
    Events,
    /// What the allocator held from the driver at the end
    Segments,
    /// The blocks of those segments, free and taken
    Blocks,
}

pub(crate) fn run(arguments: &Arguments, shared: Shared, printer: &mut Printer) -> Result<Outcome, Failure> {
    let Loaded { name, snapshot } = load(&arguments.file, shared)?;
    let table = match arguments.what {
        What::Events => Table::Events,
        What::Segments => Table::Segments,
        What::Blocks => Table::Blocks,
    };
    let format = match arguments.to {
        Some(To::Csv) => Format::Csv,
        // Without a format, clap has made sure that `--json` is there.
        Some(To::Jsonl) | None => Format::JsonLines,
    };
    let device = arguments.device;
    let write =
        |mut out: &mut dyn Write| export(&snapshot, device, table, format, arguments.stacks, &mut out);
    let _progress = arguments.output.is_some().then(|| Progress::start(format!("exporting {name}")));
    match &arguments.output {
        Some(path) => output::write_file(path, arguments.force, write),
        None => printer.stream(write),
    }?
    .map_err(|error| Failure::unanswered(&name, &error))?;
    Ok(Outcome::Fine)
}
