//! Which settings would have served a request that failed: told from shortage, from limits, from a history cut short.

use unhand_alloc::{CachingAllocator, HistoryLevel, NullDevice, Profile, Request, Settings};
use unhand_analyze::replay::{Fitting, Program, Tried, WhatIf, room_bytes};
use unhand_analyze::{ExplainOptions, OutOfMemory, Verdict, explain, snapshot_of};
use unhand_snapshot::{Snapshot, StackId};

const MIB: u64 = 1 << 20;

/// Five segments of 2 GiB with a block of 64 MiB at their ends, on a device of 12 GiB; then 3 GiB are wanted.
fn fragmented(events_kept: usize) -> Snapshot {
    let profile = Profile::default();
    let settings = Settings::parse("", &profile).expect("valid");
    let allocator = CachingAllocator::with_settings(vec![NullDevice::new(12 << 30)], &settings, profile);
    {
        let mut device = allocator.device(0).expect("exists");
        device.record_memory_history(true, HistoryLevel::Never, events_kept, false);
        let mut holes = Vec::new();
        for _ in 0..5 {
            let whole = device.malloc(Request::new(2048 * MIB)).expect("there is room");
            device.free(whole).expect("live");
            holes.push(device.malloc(Request::new(1984 * MIB)).expect("there is room"));
            let _pin = device.malloc(Request::new(64 * MIB)).expect("there is room");
        }
        for hole in holes {
            device.free(hole).expect("live");
        }
        assert!(device.malloc(Request::new(3072 * MIB)).is_err());
    }
    snapshot_of(&allocator, |_, _, _| StackId::NONE).expect("the device is there")
}

fn error_in(snapshot: &Snapshot) -> OutOfMemory {
    let explanation = explain(snapshot, 0, &ExplainOptions::default()).expect("the device is there");
    explanation.ooms.last().expect("one error").clone()
}

fn judged(snapshot: &Snapshot, confs: &[&str], room: u64) -> Fitting {
    let oom = error_in(snapshot);
    let program = Program::of(snapshot, 0).expect("a history");
    let recorded = program.recorded().expect("it can be followed");
    let under = |conf: &str| {
        let what_if = WhatIf { conf: conf.to_owned(), memory_bytes: Some(room), ..WhatIf::default() };
        program.under(&what_if).expect("it can be followed")
    };
    let others: Vec<_> = confs.iter().map(|conf| under(conf)).collect();
    Fitting::of(&oom, room, Tried { recorded: &recorded, control: &under(""), others: &others })
}

#[test]
fn names_the_setting_that_serves_the_request() {
    let snapshot = fragmented(usize::MAX);
    let oom = error_in(&snapshot);
    assert_eq!(oom.verdict, Verdict::Fragmentation);
    let room = room_bytes(&oom, None).expect("no limit decided");
    assert_eq!(room, 12 << 30);
    assert!(Fitting::without_replay(&oom, room).is_none());
    let confs = ["garbage_collection_threshold:0.8", "expandable_segments:True", "max_split_size_mb:512"];
    let fitting = judged(&snapshot, &confs, room);
    assert_eq!((fitting.tried, fitting.is_exact), (3, Some(true)));
    let fits: Vec<&str> = fitting.fits.iter().map(|fit| fit.settings.as_str()).collect();
    assert_eq!(fits, ["expandable_segments:True", "max_split_size_mb:512"]);
    assert_eq!(
        fitting.sentence,
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True would have served the request: replayed with it, the same run \
         reserves at most 10.0 GiB of the 12.0 GiB that PyTorch could hold (2 of 3 settings tried would)."
    );
}

#[test]
fn says_when_none_of_them_does() {
    let snapshot = fragmented(usize::MAX);
    let fitting = judged(&snapshot, &["garbage_collection_threshold:0.8"], 12 << 30);
    assert!(fitting.fits.is_empty());
    assert_eq!(
        fitting.sentence,
        "None of 1 setting tried would have served the request of 3.0 GiB within the 12.0 GiB that PyTorch could hold."
    );
}

#[test]
fn a_shortage_needs_no_replay() {
    let oom = error_in(&fragmented(usize::MAX));
    let fitting = Fitting::without_replay(&oom, 3 << 30).expect("more is live than that");
    assert_eq!((fitting.tried, fitting.is_exact), (0, None));
    assert_eq!(
        fitting.sentence,
        "No allocator setting would have served the request: what was live and the request come to 3.3 GiB, and PyTorch \
         could hold 3.0 GiB."
    );
}

#[test]
fn a_replay_that_does_not_fail_is_not_believed() {
    let fitting = judged(&fragmented(usize::MAX), &["expandable_segments:True"], 64 << 30);
    assert!(fitting.fits.is_empty());
    assert!(fitting.sentence.starts_with("Whether a setting would have served the request cannot be told"));
}

#[test]
fn a_history_that_begins_late_gives_an_estimate_or_nothing() {
    // The ring kept the last of the segments, the frees of the holes and the error.
    let fitting = judged(&fragmented(17), &["expandable_segments:True"], 12 << 30);
    assert_eq!(fitting.is_exact, Some(false));
    let is_estimate = fitting.sentence.contains("This is an estimate: the history does not reach back");
    assert!(is_estimate || fitting.fits.is_empty(), "{fitting:?}");
}

#[test]
fn a_limit_decides_where_it_is_known() {
    let mut oom = error_in(&fragmented(usize::MAX));
    assert_eq!(room_bytes(&oom, Some(11 << 30)), Some(11 << 30));
    oom.verdict = Verdict::Limit;
    assert_eq!(room_bytes(&oom, None), None);
    assert_eq!(room_bytes(&oom, Some(11 << 30)), Some(11 << 30));
}
