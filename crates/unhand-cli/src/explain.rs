//! `unhand explain`: what held the memory at the peak and at the end, what pins the cache, what leaks.

use std::path::{Path, PathBuf};

use clap::{Args, ValueEnum};
use serde::Serialize;
use unhand_analyze::{
    ExplainOptions, Explanation, RankFacts, Ranks, SCHEMA_VERSION, TextOptions, devices, explain, render,
};
use unhand_snapshot::Snapshot;

use crate::advice::{Replayed, replayed};
use crate::arguments::Shared;
use crate::failure::{Failure, Outcome};
use crate::load::{Loaded, load};
use crate::open;
use crate::parallel::map_in_order;
use crate::printer::Printer;
use crate::progress::Progress;

/// What the flight recorder calls its report.
const REPORT: &str = "report.json";

const AFTER_HELP: &str = "\
Examples:
  unhand explain snapshot.pickle
  unhand explain --stacks --limit 3 snapshot.pickle     the whole call stacks of the three largest
  unhand explain snapshots/                             one row for each rank, and the odd one out
  unhand explain --fail-on leak,oom snapshot.pickle     for CI: exit code 1 if it leaks or ran out";

/// Say what held the memory at the peak and at the end, what pins the cache, and what leaks
#[derive(Debug, Args)]
#[command(after_help = AFTER_HELP)]
pub(crate) struct Arguments {
    /// Snapshots, folders of snapshots, or `-` for stdin
    #[arg(required = true, value_name = "FILE")]
    files: Vec<PathBuf>,

    /// Show whole call stacks instead of the line that matters
    #[arg(long)]
    stacks: bool,

    /// How many holders, leaks and pins to show
    #[arg(long, value_name = "N", default_value_t = 10)]
    limit: usize,

    /// Answer for this device only
    #[arg(long, value_name = "INDEX")]
    device: Option<usize>,

    /// Exit with code 1 if this is found
    #[arg(long, value_name = "WHAT", value_delimiter = ',')]
    fail_on: Vec<FailOn>,
}

/// What `--fail-on` can look for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum FailOn {
    /// Memory that grows from step to step and is not given back
    Leak,
    /// An out-of-memory error in the recording
    Oom,
}

/// The JSON answer: the same shape for one file and for many.
#[derive(Serialize)]
struct Answer<'a> {
    schema_version: u32,
    explanations: &'a [Explanation],
    /// The files side by side; `null` when there is one.
    comparison: Option<&'a Ranks>,
}

pub(crate) fn run(arguments: &Arguments, shared: Shared, printer: &mut Printer) -> Result<Outcome, Failure> {
    let paths = open::expand(&arguments.files)?;
    // The comparison of several files needs nothing that a replay adds.
    let is_replayed = shared.json || paths.len() == 1;
    let explanations =
        map_in_order(&paths, |path| explain_file(path, arguments, shared, is_replayed))?.concat();
    let comparison = (paths.len() > 1).then(|| Ranks::with_facts(&explanations, &facts_of(&explanations)));
    if shared.json {
        let explanations = &explanations;
        printer.json(&Answer {
            schema_version: SCHEMA_VERSION,
            explanations,
            comparison: comparison.as_ref(),
        })?;
    } else {
        let options = TextOptions {
            width: printer.width(),
            limit: arguments.limit,
            stacks: arguments.stacks,
            style: printer.style(),
        };
        match &comparison {
            Some(comparison) => write!(printer, "{}", comparison.render(&options))?,
            None => {
                for (index, explanation) in explanations.iter().enumerate() {
                    let gap = if index == 0 { "" } else { "\n" };
                    write!(printer, "{gap}{}", render(explanation, &options))?;
                }
            }
        }
    }
    let is_found = explanations.iter().any(|explanation| is_found(explanation, &arguments.fail_on));
    Ok(if is_found { Outcome::Found } else { Outcome::Fine })
}

/// What the flight recorder wrote beside each file; nothing where it did not, or it cannot be read.
fn facts_of(explanations: &[Explanation]) -> Vec<RankFacts> {
    let beside = |explanation: &Explanation| {
        let path = Path::new(explanation.file.as_deref()?).with_file_name(REPORT);
        let facts: RankFacts = serde_json::from_slice(&fs_err::read(path).ok()?).ok()?;
        Some(facts)
    };
    explanations.iter().map(|explanation| beside(explanation).unwrap_or_default()).collect()
}

/// One explanation for each device of one file.
fn explain_file(
    path: &Path,
    arguments: &Arguments,
    shared: Shared,
    is_replayed: bool,
) -> Result<Vec<Explanation>, Failure> {
    let loaded = load(path, shared)?;
    let devices = arguments.device.map_or_else(|| devices_of(&loaded.snapshot), |device| vec![device]);
    let explain_device = |device| explain_device(&loaded, device, arguments.stacks, is_replayed);
    devices.into_iter().map(explain_device).collect()
}

/// The explanation of one device; if `is_replayed`, with what only a replay of the history can tell.
pub(crate) fn explain_device(
    loaded: &Loaded,
    device: usize,
    stacks: bool,
    is_replayed: bool,
) -> Result<Explanation, Failure> {
    let Loaded { name, snapshot } = loaded;
    let _progress = Progress::start(format!("explaining {name}"));
    let Replayed { true_peaks, advice } =
        if is_replayed { replayed(snapshot, device) } else { Replayed::default() };
    let options = ExplainOptions { file: Some(name.clone()), true_peaks, stacks };
    let mut explanation =
        explain(snapshot, device, &options).map_err(|error| Failure::unanswered(name, &error))?;
    explanation.advice.extend(advice);
    Ok(explanation)
}

/// The devices to answer for. A process that recorded and held nothing still has its device 0.
fn devices_of(snapshot: &Snapshot) -> Vec<usize> {
    let devices = devices(snapshot);
    if devices.is_empty() { vec![0] } else { devices }
}

fn is_found(explanation: &Explanation, fail_on: &[FailOn]) -> bool {
    fail_on.iter().any(|what| match what {
        FailOn::Leak => explanation.leaks.iter().any(|leaks| !leaks.suspects.is_empty()),
        FailOn::Oom => !explanation.ooms.is_empty(),
    })
}
