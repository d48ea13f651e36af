//! `unhand diff`: what one run holds that the other does not.

use std::path::{Path, PathBuf};

use clap::Args;
use unhand_analyze::{Diff, Explanation, TextOptions};

use crate::arguments::Shared;
use crate::explain;
use crate::failure::{Failure, Outcome};
use crate::load::load;
use crate::open;
use crate::printer::Printer;

const AFTER_HELP: &str = "\
Examples:
  unhand diff before.pickle after.pickle
  unhand diff rank0.pickle rank7.pickle --limit 3 --json";

/// Compare two snapshots: totals, and the call sites that hold more or less
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Arguments {
    /// The snapshot to compare with, or `-` for stdin
    before: PathBuf,

    /// The snapshot to look at
    after: PathBuf,

    /// Show whole call stacks instead of the line that matters
    #[arg(long)]
    stacks: bool,

    /// How many call sites to show
    #[arg(long, value_name = "N", default_value_t = 10)]
    limit: usize,

    /// Compare this device only
    #[arg(long, value_name = "INDEX")]
    device: Option<usize>,
}

pub(crate) fn run(arguments: &Arguments, shared: Shared, printer: &mut Printer) -> Result<Outcome, Failure> {
    let paths = [&arguments.before, &arguments.after];
    if paths.iter().all(|path| open::is_stdin(path)) {
        return Err(open::stdin_twice());
    }
    let [before, after] = paths.map(|path| explain_one(path, arguments, shared));
    let diff = Diff::between(&before?, &after?);
    if shared.json {
        printer.json(&diff)?;
    } else {
        let options = TextOptions {
            width: printer.width(),
            limit: arguments.limit,
            stacks: arguments.stacks,
            style: printer.style(),
        };
        write!(printer, "{}", diff.render(&options))?;
    }
    Ok(Outcome::Fine)
}

/// The explanation of one device of one file: the side of a comparison.
fn explain_one(path: &Path, arguments: &Arguments, shared: Shared) -> Result<Explanation, Failure> {
    let loaded = load(path, shared)?;
    let device = arguments.device.unwrap_or_else(|| loaded.first_device());
    explain::explain_device(&loaded, device, arguments.stacks, true)
}
