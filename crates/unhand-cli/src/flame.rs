//! `unhand flame`: bytes by call stack, for a flame graph viewer or as a picture.

use std::io::Write;
use std::path::PathBuf;

use clap::{Args, ValueEnum};
use unhand_analyze::{Flame, FlameOf};

use crate::arguments::Shared;
use crate::failure::{Failure, Outcome};
use crate::load::load;
use crate::output;
use crate::printer::Printer;

const AFTER_HELP: &str = "\
Examples:
  unhand flame snapshot.pickle --format svg -o peak.svg
  unhand flame snapshot.pickle --at end                   folded stacks, one a line, on stdout
  unhand flame snapshot.pickle --format speedscope -o peak.speedscope.json";

/// Show bytes by call stack as a flame graph
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Arguments {
    /// The snapshot, or `-` for stdin
    file: PathBuf,

    /// What to write; `--json` means `speedscope`
    #[arg(long, value_name = "FORMAT", default_value = "folded", conflicts_with = "json")]
    format: Format,

    /// Which bytes to show
    #[arg(long, value_name = "WHEN", default_value = "peak")]
    at: At,

    /// Show this device only
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
enum Format {
    /// One line a stack: frames separated by `;`, then the bytes
    Folded,
    /// A file for the speedscope viewer
    Speedscope,
    /// A picture for a web browser
    #[cfg(feature = "svg")]
    Svg,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum At {
    /// What was asked for and live when that was most
    Peak,
    /// What was allocated, rounding included, when that was most
    AllocatedPeak,
    /// What was live when the most was reserved
    ReservedPeak,
    /// What was live when the snapshot was taken
    End,
    /// Everything that was ever asked for
    Total,
}

impl At {
    fn of(self) -> FlameOf {
        match self {
            At::Peak => FlameOf::RequestedPeak,
            At::AllocatedPeak => FlameOf::AllocatedPeak,
            At::ReservedPeak => FlameOf::ReservedPeak,
            At::End => FlameOf::End,
            At::Total => FlameOf::Total,
        }
    }
}

pub(crate) fn run(arguments: &Arguments, shared: Shared, printer: &mut Printer) -> Result<Outcome, Failure> {
    let loaded = load(&arguments.file, shared)?;
    let device = arguments.device.unwrap_or_else(|| loaded.first_device());
    let flame = Flame::of(&loaded.snapshot, device, arguments.at.of())
        .map_err(|error| Failure::unanswered(&loaded.name, &error))?;
    // The only form that is JSON already.
    let format = if shared.json { Format::Speedscope } else { arguments.format };
    let write = |out: &mut dyn Write| draw(&flame, format, loaded.file_name(), out);
    match &arguments.output {
        Some(path) => output::write_file(path, arguments.force, write),
        None => printer.stream(write),
    }?
    .map_err(|error| Failure::unanswered(&loaded.name, &error))?;
    Ok(Outcome::Fine)
}

fn draw(flame: &Flame, format: Format, name: &str, mut out: &mut dyn Write) -> unhand_analyze::Result<()> {
    match format {
        Format::Folded => flame.write_folded(&mut out),
        Format::Speedscope => flame.write_speedscope(name, &mut out),
        #[cfg(feature = "svg")]
        Format::Svg => flame.write_svg(name, &mut out),
    }
}
