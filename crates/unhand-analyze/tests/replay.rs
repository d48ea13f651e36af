//! Replays of every recording in `tests/snapshots`, compared with the statistics torch reported.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use unhand_analyze::replay::{Program, Run, WhatIf};
use unhand_snapshot::{ReadOptions, Snapshot};

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tests/snapshots")
}

fn snapshot(name: &str) -> Snapshot {
    let bytes = std::fs::read(folder().join(format!("{name}.pickle.xz"))).expect("the recording is there");
    let bytes = unhand_snapshot::decompress(&bytes).expect("a whole file");
    Snapshot::read(&bytes, &ReadOptions::default()).expect("a snapshot")
}

fn stats(name: &str) -> BTreeMap<String, u64> {
    let text =
        std::fs::read_to_string(folder().join(format!("{name}.json"))).expect("the statistics are there");
    let json: serde_json::Value = serde_json::from_str(&text).expect("JSON");
    let stats = json["stats"].as_object().expect("an object");
    stats.iter().filter_map(|(key, value)| Some((key.clone(), value.as_u64()?))).collect()
}

fn names() -> Vec<String> {
    let files = std::fs::read_dir(folder()).expect("a folder");
    let mut names: Vec<String> = files
        .filter_map(|file| file.expect("readable").file_name().into_string().ok())
        .filter_map(|name| name.strip_suffix(".pickle.xz").map(str::to_owned))
        .collect();
    names.sort();
    assert!(names.len() >= 16, "recordings are missing: {names:?}");
    names
}

fn assert_equals_stats(name: &str, run: &Run) {
    let stats = stats(name);
    for (key, peak, end) in [
        ("requested_bytes", run.peak.requested_bytes, run.end.requested_bytes),
        ("allocated_bytes", run.peak.allocated_bytes, run.end.allocated_bytes),
        ("reserved_bytes", run.peak.reserved_bytes, run.end.reserved_bytes),
    ] {
        assert_eq!(peak, stats[&format!("{key}.all.peak")], "{name}: peak of {key}");
        assert_eq!(end, stats[&format!("{key}.all.current")], "{name}: end of {key}");
    }
    assert_eq!(run.driver_calls.alloc + run.driver_calls.map, stats["num_device_alloc"], "{name}");
    assert_eq!(run.driver_calls.free + run.driver_calls.unmap, stats["num_device_free"], "{name}");
    assert_eq!(run.ooms, stats["num_ooms"], "{name}");
}

#[test]
fn every_recording_replays_to_the_byte() {
    for name in names() {
        let snapshot = snapshot(&name);
        let run = Program::of(&snapshot, 0).expect("a history").recorded().expect("it can be followed");
        assert_eq!(run.first_difference, None, "{name}");
        assert!(run.same_as_recorded, "{name}");
        assert_equals_stats(&name, &run);
        assert_eq!(run.segments, snapshot.segments.len() as u64, "{name}");
        // Every block landed where it was.
        assert_eq!(run.placement.0, run.placement.1, "{name}");
    }
}

#[test]
fn replaying_a_recording_under_its_siblings_settings_gives_the_siblings_peak() {
    let mut siblings = 0;
    for workload in ["churn", "leak", "streams", "resnet", "gpt2"] {
        for (tag, conf) in [
            ("exp", "expandable_segments:True"),
            ("split64", "max_split_size_mb:64"),
            ("round4", "roundup_power2_divisions:4"),
        ] {
            let sibling = format!("{workload}.{tag}");
            if !folder().join(format!("{sibling}.json")).exists() {
                continue;
            }
            let program = Program::of(&snapshot(&format!("{workload}.default")), 0).expect("a history");
            let what_if = WhatIf { conf: conf.into(), ..WhatIf::default() };
            let run = program.under(&what_if).expect("valid settings");
            let recorded = stats(&sibling);
            // The same requests were made, so the two runs are comparable.
            assert_eq!(run.peak.requested_bytes, recorded["requested_bytes.all.peak"], "{sibling}");
            assert_eq!(run.peak.reserved_bytes, recorded["reserved_bytes.all.peak"], "{sibling}");
            siblings += 1;
        }
    }
    assert_eq!(siblings, 8);
}

#[test]
fn predicts_the_out_of_memory_error_of_the_sibling_with_a_limit() {
    let with_limit = Program::of(&snapshot("gpt2.gc"), 0).expect("a history").recorded().expect("followed");
    let recorded = with_limit.ran_out.expect("it ran out of memory");
    let what_if = WhatIf {
        conf: "garbage_collection_threshold:0.6".into(),
        memory_bytes: Some(12 << 30),
        ..WhatIf::default()
    };
    let program = Program::of(&snapshot("gpt2.default"), 0).expect("a history");
    let run = program.under(&what_if).expect("valid settings");
    let predicted = run.ran_out.expect("it runs out of memory");
    assert_eq!(predicted.requested_bytes.next_multiple_of(512), recorded.requested_bytes);
    assert_eq!(predicted.segment_bytes, recorded.segment_bytes);
    assert_eq!(predicted.allocated_bytes, recorded.allocated_bytes);
    assert_eq!(predicted.reserved_bytes, recorded.reserved_bytes);
    assert_eq!(run.placement.1, with_limit.placement.1 + 1, "the same number of mallocs before it");
}

#[test]
fn an_unlimited_run_does_not_run_out() {
    let program = Program::of(&snapshot("gpt2.default"), 0).expect("a history");
    let run = program.under(&WhatIf::default()).expect("the same settings");
    assert_eq!(run.ooms, 0);
    assert_eq!(run.ran_out, None);
}

/// The snapshot as it would be had the history begun `events` later, as after a ring buffer wrapped.
fn without_beginning(mut snapshot: Snapshot, events: usize) -> Snapshot {
    let mut rest = unhand_snapshot::Trace::default();
    snapshot.traces[0].iter().skip(events).for_each(|event| rest.push(event));
    snapshot.traces[0] = rest;
    snapshot
}

#[test]
fn a_history_without_its_beginning_replays_from_what_was_there() {
    for name in ["churn.exp", "gpt2.default", "gpt2.exp", "resnet.default", "streams.default"] {
        let whole = snapshot(name);
        let length = whole.traces[0].len();
        for begin in [length / 10, length * 3 / 4] {
            let program = Program::of(&without_beginning(whole.clone(), begin), 0).expect("a history");
            let run = program.recorded().expect("it can be followed");
            assert_eq!(run.first_difference, None, "{name} from {begin}");
            assert_ends_as(name, &run, 0);
            assert_eq!(run.segments, whole.segments.len() as u64, "{name} from {begin}");
        }
    }
}

/// Where blocks of all sizes come and go, what an unsplit block held beyond its request cannot be told from
/// free memory behind it once the block is gone.
#[test]
fn what_freed_blocks_held_beyond_their_request_is_estimated_within_two_percent() {
    let whole = snapshot("churn.default");
    let begin = whole.traces[0].len() / 10;
    let run =
        Program::of(&without_beginning(whole, begin), 0).expect("a history").recorded().expect("followed");
    assert!(run.approximate.is_some());
    assert_ends_as("churn.default", &run, 2);
}

fn assert_ends_as(name: &str, run: &Run, percent: u64) {
    let stats = stats(name);
    for (key, end) in [
        ("requested_bytes", run.end.requested_bytes),
        ("allocated_bytes", run.end.allocated_bytes),
        ("reserved_bytes", run.end.reserved_bytes),
    ] {
        let recorded = stats[&format!("{key}.all.current")];
        let apart = end.abs_diff(recorded);
        assert!(apart * 100 <= recorded * percent, "{name}: end of {key} is {end}, not {recorded}");
    }
}
