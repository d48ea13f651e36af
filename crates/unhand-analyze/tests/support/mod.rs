//! Loads the recordings, with what torch itself reported about them.
#![allow(dead_code, reason = "each test file uses its own part")]

use std::path::PathBuf;

use unhand_snapshot::{ReadOptions, Snapshot, decompress};

/// Every recording in `tests/snapshots`.
pub(crate) const RECORDINGS: [&str; 16] = [
    "churn.default",
    "churn.exp",
    "gpt2.default",
    "gpt2.exp",
    "gpt2.gc",
    "gpt2.round4",
    "gpt2.split64",
    "gpt2.stacks",
    "leak.default",
    "leak.exp",
    "leak.stacks",
    "resnet.default",
    "resnet.exp",
    "streams.default",
    "streams.exp",
    "streams.split64",
];

fn folder() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../../tests/snapshots")
}

pub(crate) fn recording(name: &str) -> Snapshot {
    let bytes = std::fs::read(folder().join(format!("{name}.pickle.xz"))).expect("the recording is there");
    let pickle = decompress(&bytes).expect("it is a whole xz file");
    Snapshot::read(&pickle, &ReadOptions::default()).expect("it is a snapshot")
}

/// A statistic of `torch.cuda.memory_stats()` at the end of the recording.
pub(crate) fn reported(name: &str, statistic: &str) -> u64 {
    let text =
        std::fs::read_to_string(folder().join(format!("{name}.json"))).expect("the statistics are there");
    let json: serde_json::Value = serde_json::from_str(&text).expect("they are JSON");
    json["stats"][statistic].as_u64().unwrap_or_else(|| panic!("{name} reports no {statistic}"))
}
