//! What a recorded history did, to the byte: the allocator's own rules over events that Python hands in.

use unhand_analyze::replay::Program;
use unhand_snapshot::{ReadOptions, Snapshot};

/// Reads a snapshot with its history and answers with the run as recorded, in JSON.
pub(crate) fn recorded(pickle: &[u8], device: usize) -> Result<String, String> {
    let snapshot = Snapshot::read(pickle, &ReadOptions::default()).map_err(|error| error.to_string())?;
    let run = Program::of(&snapshot, device)
        .and_then(|program| program.recorded())
        .map_err(|error| error.to_string())?;
    serde_json::to_string(&run).map_err(|error| error.to_string())
}
