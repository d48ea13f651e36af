//! From a path to a snapshot: opens, unpacks and reads it, and words what went wrong for a person.

use std::io::Write as _;
use std::path::Path;

use unhand_snapshot::{Error, ReadOptions, Snapshot};

use crate::arguments::Shared;
use crate::failure::Failure;
use crate::open::Input;
use crate::printer;
use crate::progress::Progress;

/// A snapshot and the name to call it by.
pub(crate) struct Loaded {
    /// As given on the command line.
    pub(crate) name: String,
    pub(crate) snapshot: Snapshot,
}

impl Loaded {
    /// The last part of the path, for tables and JSON.
    pub(crate) fn file_name(&self) -> &str {
        Path::new(&self.name).file_name().and_then(|name| name.to_str()).unwrap_or(&self.name)
    }

    /// The device to answer for when none was asked for.
    pub(crate) fn first_device(&self) -> usize {
        unhand_analyze::devices(&self.snapshot).first().copied().unwrap_or(0)
    }
}

/// Loads one file, or stdin for `-`. What a reader of the answer should know about the file goes to
/// stderr.
pub(crate) fn load(path: &Path, shared: Shared) -> Result<Loaded, Failure> {
    let input = Input::open(path)?;
    let _progress = Progress::start(format!("reading {}", input.name));
    let contents = input.contents(shared.partial)?;
    let options = ReadOptions { tolerate_truncation: shared.partial };
    let snapshot = Snapshot::read(&contents, &options).map_err(|error| unreadable(&input.name, &error))?;
    drop(contents);
    warn(&input.name, &snapshot, shared);
    Ok(Loaded { name: input.name, snapshot })
}

fn warn(name: &str, snapshot: &Snapshot, shared: Shared) {
    let stderr = std::io::stderr();
    let style = printer::style_of(shared.color, &stderr);
    for warning in &snapshot.warnings {
        let line = format!("{}: `{name}`: {warning}", style.warning("warning"));
        // Nobody to warn is no reason to stop.
        let _ = writeln!(stderr.lock(), "{}", printer::harmless(&line));
    }
}

fn unreadable(name: &str, error: &Error) -> Failure {
    let failure = Failure::bad_input(format!("not a snapshot that can be read: `{name}`")).because(error);
    match error {
        Error::NotAPickle { .. } | Error::NotASnapshot { .. } => failure.hint(
            "a snapshot is what `torch.cuda.memory._dump_snapshot(\"snapshot.pickle\")` writes; \
             docs/guides/recording.md shows how to record one",
        ),
        Error::Refused { .. } => failure.hint(
            "a snapshot holds data and nothing to run, and unhand ran nothing; \
             do not open this file with Python's `pickle`, which would",
        ),
        Error::OldOpcode { .. } => {
            failure.hint("PyTorch writes protocols 2 to 5; this file comes from something else")
        }
        Error::Protocol { .. } => failure.hint("write it again with `pickle.dump(…, protocol=4)`"),
        Error::Truncated { .. } => failure.hint(
            "the file was cut short while it was written or copied; copy it again, or pass `--partial` \
             to use what there is",
        ),
        _ => failure,
    }
}
