//! What a recording made at an out-of-memory error says, for the flight recorder of the Python package.

use serde::Serialize;
use unhand_analyze::replay::{Fitting, Program, Run, Tried, WhatIf, room_bytes, sweep};
use unhand_analyze::{ExplainOptions, Explanation, OutOfMemory, SCHEMA_VERSION, explain};
use unhand_snapshot::{ReadOptions, Snapshot};

use crate::advice::LONG_HISTORY_EVENTS;
use crate::parallel::map_in_order;

/// What is known about the last out-of-memory error of a recording.
#[derive(Debug, Serialize)]
struct Answer {
    schema_version: u32,
    /// The whole explanation of the device.
    explanation: Explanation,
    /// Which allocator settings would have served the request; `null` without an error in the history.
    fitting: Option<Fitting>,
}

/// Explains the last out-of-memory error of a device in a pickled snapshot, as JSON.
///
/// `allowed_bytes` is what PyTorch was allowed to hold; without it the driver's figures decide.
///
/// # Errors
/// The message of the error, for a snapshot that cannot be read or says nothing about the device.
pub fn out_of_memory(pickle: &[u8], device: usize, allowed_bytes: Option<u64>) -> Result<String, String> {
    let snapshot = Snapshot::read(pickle, &ReadOptions::default()).map_err(|error| error.to_string())?;
    let options = ExplainOptions::default();
    let explanation = explain(&snapshot, device, &options).map_err(|error| error.to_string())?;
    let fitting = explanation.ooms.last().map(|oom| fitting(&snapshot, device, oom, allowed_bytes));
    serde_json::to_string(&Answer { schema_version: SCHEMA_VERSION, explanation, fitting })
        .map_err(|error| error.to_string())
}

/// Which allocator settings would have served a request that failed.
pub(crate) fn fitting(
    snapshot: &Snapshot,
    device: usize,
    oom: &OutOfMemory,
    allowed_bytes: Option<u64>,
) -> Fitting {
    let room = room_bytes(oom, allowed_bytes);
    let Some(room_bytes) = room else {
        return Fitting::unknown(oom, room, "a limit decided that the recording does not tell");
    };
    if let Some(fitting) = Fitting::without_replay(oom, room_bytes) {
        return fitting;
    }
    match replayed(snapshot, device, oom, room_bytes) {
        Ok(fitting) => fitting,
        Err(error) => Fitting::unknown(oom, room, &error.to_string()),
    }
}

fn replayed(
    snapshot: &Snapshot,
    device: usize,
    oom: &OutOfMemory,
    room: u64,
) -> Result<Fitting, unhand_analyze::Error> {
    let program = Program::of(snapshot, device)?;
    let recorded = program.recorded()?;
    let under = |conf: &str| {
        program.under(&WhatIf { conf: conf.to_owned(), memory_bytes: Some(room), ..WhatIf::default() })
    };
    let control = under("")?;
    let mut changes = sweep(program.profile(), true);
    if recorded.events > LONG_HISTORY_EVENTS {
        changes.truncate(1);
    }
    // A setting that cannot be replayed is one that was not tried.
    let runs = map_in_order(&changes, |change| Ok(under(change).ok())).unwrap_or_default();
    let others: Vec<Run> = runs.into_iter().flatten().collect();
    Ok(Fitting::of(oom, room, Tried { recorded: &recorded, control: &control, others: &others }))
}
