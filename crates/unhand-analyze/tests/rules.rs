//! The rules of cache, out-of-memory and export, each on the smallest snapshot that shows it.

use unhand_analyze::{
    ExplainOptions, Explanation, Flame, FlameOf, Format, Style, Table, TextOptions, Verdict, explain, export,
    render,
};
use unhand_snapshot::{
    Action, AllocatorSettings, Block, BlockState, Event, Frame, PoolId, Segment, SegmentKind, Snapshot,
    StackId, StringId, Trace,
};

const MIB: u64 = 1 << 20;

fn snapshot() -> Snapshot {
    let mut snapshot = Snapshot {
        settings: AllocatorSettings { present: true, ..Default::default() },
        ..Default::default()
    };
    snapshot.traces.push(Trace::default());
    snapshot
}

fn stack(snapshot: &mut Snapshot, frames: &[(&str, &str, i64)]) -> StackId {
    let ids: Vec<_> = frames
        .iter()
        .map(|&(name, file, line)| {
            let frame =
                Frame { name: snapshot.strings.intern(name), filename: snapshot.strings.intern(file), line };
            snapshot.stacks.intern_frame(frame)
        })
        .collect();
    snapshot.stacks.intern(ids)
}

fn push(snapshot: &mut Snapshot, action: Action, addr: u64, size: u64, stack: StackId) {
    let time_us = Some(1_000_000 + 1000 * i64::try_from(snapshot.traces[0].len()).expect("short"));
    snapshot.traces[0].push(Event {
        action,
        addr,
        size,
        stream: 0,
        time_us,
        stack,
        compile_context: StringId(0),
        user_metadata: StringId(0),
        pool_id: None,
        action_name: StringId(0),
    });
}

/// A segment with blocks of these bytes; negative ones are free.
fn segment(address: u64, blocks: &[i64], stack: StackId) -> Segment {
    let mut at = address;
    let blocks: Vec<Block> = blocks
        .iter()
        .map(|&bytes| {
            let size = bytes.unsigned_abs();
            let state = if bytes > 0 { BlockState::ActiveAllocated } else { BlockState::Inactive };
            let stack = if bytes > 0 { stack } else { StackId::NONE };
            let block = Block { address: at, size, requested_size: size, state, stack, ..Block::default() };
            at += size;
            block
        })
        .collect();
    Segment { address, total_size: at - address, kind: SegmentKind::Large, blocks, ..Segment::default() }
}

fn explained(snapshot: &Snapshot) -> Explanation {
    explain(snapshot, 0, &ExplainOptions::default()).expect("device 0 is there")
}

const fn mib(n: i64) -> i64 {
    n << 20
}

#[test]
fn survivors_that_pin_their_segments_are_named_together() {
    let mut s = snapshot();
    let line = stack(&mut s, &[("load", "/home/u/data.py", 9)]);
    for i in 0..20 {
        s.segments.push(segment((i + 1) << 32, &[3 << 19, -(mib(20) - (3 << 19))], line));
    }
    s.segments.push(segment(64 << 32, &[-mib(40)], StackId::NONE));
    let cache = explained(&s).end.cache;
    assert_eq!((cache.returnable_bytes, cache.stuck_bytes), (40 * MIB, 370 * MIB));
    assert_eq!(
        cache.pinned_by[0].sentence,
        "20 segments (400.0 MiB) are pinned by 20 blocks of 1.5 MiB allocated at data.py:9; re-creating them would \
         return 370.0 MiB."
    );
    assert_eq!(cache.stuck.len(), 20);
    assert_eq!(cache.stuck[0].pins[0].site.as_deref(), Some("data.py:9 (load)"));
}

#[test]
fn whole_free_pages_of_an_expandable_segment_are_returnable() {
    let mut s = snapshot();
    // Pages 0 to 4 of 20 MiB: live bytes in page 0 and page 3, one free block from 5 to 70 MiB, one from 75 on.
    let blocks = [mib(5), -mib(65), mib(5), -mib(25)];
    s.segments.push(Segment { is_expandable: true, ..segment(1 << 40, &blocks, StackId::NONE) });
    let cache = explained(&s).end.cache;
    // Whole pages: 20..60 of the first free block, 80..100 of the second.
    assert_eq!((cache.returnable_bytes, cache.stuck_bytes), (60 * MIB, 30 * MIB));
    assert_eq!(
        cache.pinned_by[0].sentence,
        "2 pages (40.0 MiB) are pinned by 2 blocks of 5.0 MiB; re-creating them would return 30.0 MiB."
    );
    s.settings.conf = "large_segment_size_mb:40".to_owned();
    // Pages of 40 MiB: none lies inside a free block as a whole.
    assert_eq!(explained(&s).end.cache.returnable_bytes, 0);
}

#[test]
fn free_segments_of_private_pools_do_not_count_as_returnable() {
    let mut s = snapshot();
    s.segments.push(Segment { pool_id: PoolId(0, 1), ..segment(1 << 40, &[-mib(20)], StackId::NONE) });
    let cache = explained(&s).end.cache;
    assert_eq!((cache.returnable_bytes, cache.kept_by_pools_bytes), (0, 20 * MIB));
}

/// Four segments of 1 GiB, each with a live block of `live` bytes at its start; then an error.
fn out_of_memory(live: i64, wanted: u64, device_free: u64) -> Explanation {
    let mut s = snapshot();
    for i in 1..=4_u64 {
        push(&mut s, Action::SegmentAlloc, i << 32, 1 << 30, StackId::NONE);
        push(&mut s, Action::Alloc, i << 32, live.unsigned_abs(), StackId::NONE);
        s.segments.push(segment(i << 32, &[live, -(mib(1024) - live)], StackId::NONE));
    }
    push(&mut s, Action::Oom, device_free, wanted, StackId::NONE);
    explained(&s)
}

#[test]
fn a_real_shortage_is_told_from_fragmentation() {
    let shortage = out_of_memory(mib(924), 1424 * MIB, 481 * MIB);
    let oom = &shortage.ooms[0];
    assert_eq!((oom.verdict, oom.missing_bytes), (Verdict::Shortage, Some((1424 - 400 - 481) * MIB)));
    assert_eq!(
        oom.sentence,
        "1.4 GiB were wanted; the segments had 400.0 MiB free and the driver 481.0 MiB. This is a real shortage of \
         543.0 MiB, not fragmentation: 3.6 GiB were in live blocks."
    );
    assert_eq!(oom.would_have_fitted_bytes, 480 * MIB);

    let holes = out_of_memory(mib(512), 2048 * MIB, 0);
    let oom = &holes.ooms[0];
    assert_eq!(oom.verdict, Verdict::Fragmentation);
    assert_eq!(
        oom.sentence,
        "2.0 GiB were wanted; 2.0 GiB were free in 4 holes, the largest of 512.0 MiB, and the driver had 0 B. Enough in \
         all, but not in one piece."
    );
    assert_eq!(oom.would_have_fitted_bytes, 512 * MIB);

    assert_eq!(out_of_memory(mib(512), 400 * MIB, 0).ooms[0].verdict, Verdict::Retry);
    assert_eq!(out_of_memory(mib(512), 2048 * MIB, 8 << 30).ooms[0].verdict, Verdict::Limit);
}

#[test]
fn segments_are_undone_back_to_the_error() {
    let mut s = snapshot();
    push(&mut s, Action::SegmentAlloc, 1 << 32, 40 * MIB, StackId::NONE);
    push(&mut s, Action::Oom, 0, 100 * MIB, StackId::NONE);
    push(&mut s, Action::SegmentFree, 1 << 32, 40 * MIB, StackId::NONE);
    push(&mut s, Action::SegmentMap, 2 << 32, 60 * MIB, StackId::NONE);
    push(&mut s, Action::Oom, 0, 100 * MIB, StackId::NONE);
    push(&mut s, Action::SegmentUnmap, (2 << 32) + 20 * MIB, 20 * MIB, StackId::NONE);
    for (at, bytes) in [(2 << 32, mib(20)), ((2 << 32) + 40 * MIB, mib(20))] {
        s.segments.push(Segment { is_expandable: true, ..segment(at, &[-bytes], StackId::NONE) });
    }
    let told: Vec<(u64, u64)> =
        explained(&s).ooms.iter().map(|o| (o.reserved_bytes, o.largest_hole_bytes)).collect();
    assert_eq!(told, [(40 * MIB, 40 * MIB), (60 * MIB, 60 * MIB)]);
}

#[test]
fn a_side_stream_keeps_its_cache_to_itself() {
    let mut s = snapshot();
    let line = stack(&mut s, &[("fetch", "/home/u/prefetch.py", 12)]);
    push(&mut s, Action::SegmentAlloc, 1 << 40, 1 << 30, line);
    push(&mut s, Action::Alloc, 1 << 40, 1 << 30, line);
    push(&mut s, Action::FreeRequested, 1 << 40, 1 << 30, line);
    push(&mut s, Action::FreeCompleted, 1 << 40, 1 << 30, line);
    let events: Vec<Event> = s.traces[0].iter().map(|e| Event { stream: 0x5581, ..e }).collect();
    s.traces[0] = Trace::default();
    for event in events {
        s.traces[0].push(event);
    }
    s.segments.push(Segment { stream: 0x5581, ..segment(1 << 40, &[-mib(1024)], StackId::NONE) });
    s.segments.push(segment(1 << 41, &[mib(20)], StackId::NONE));
    let streams = explained(&s).end.streams;
    assert_eq!(
        streams[0].sentence.as_deref(),
        Some(
            "1.0 GiB are cached for side stream 0x5581 (allocated at prefetch.py:12) and cannot serve another stream."
        )
    );
}

#[test]
fn conflicting_settings_are_noted() {
    let mut s = snapshot();
    push(&mut s, Action::SegmentMap, 1 << 40, 20 * MIB, StackId::NONE);
    s.settings.expandable_segments = true;
    s.settings.max_split_size = Some(64 * MIB);
    assert!(explained(&s).notes.iter().any(|n| n.contains("has no useful effect")));
}

#[test]
fn an_empty_snapshot_is_explained_too() {
    let text = render(&explained(&Snapshot::default()), &TextOptions::default());
    assert!(text.contains("0 B were allocated"), "{text}");
    assert!(text.contains("No history was recorded"), "{text}");
}

#[test]
fn escape_codes_are_written_only_when_asked_for() {
    let explanation = explained(&Snapshot::default());
    let ansi = TextOptions { style: Style::ANSI, ..TextOptions::default() };
    assert!(render(&explanation, &ansi).contains("\x1b[1m"));
    assert!(!render(&explanation, &TextOptions::default()).contains('\x1b'));
}

/// Two stacks, one of them with a semicolon and a quote in it, and a block without a stack.
fn three_blocks() -> Snapshot {
    let mut s = snapshot();
    let odd = stack(&mut s, &[("a;\"b\"", "/u/x, y.py", 3), ("main", "/u/main.py", 1)]);
    let plain =
        stack(&mut s, &[("f", "/v/site-packages/torch/nn/modules/linear.py", 7), ("main", "/u/main.py", 1)]);
    push(&mut s, Action::SegmentAlloc, 1 << 32, 20 * MIB, odd);
    push(&mut s, Action::Alloc, 1 << 32, 1000, odd);
    push(&mut s, Action::Alloc, (1 << 32) + 1024, 500, plain);
    push(&mut s, Action::Alloc, (1 << 32) + 1536, 20, StackId::NONE);
    push(&mut s, Action::FreeRequested, 1 << 32, 1000, odd);
    push(&mut s, Action::FreeCompleted, 1 << 32, 1000, odd);
    s
}

#[test]
fn folds_stacks_outermost_first() {
    let s = three_blocks();
    let folded = |of| {
        let mut out = Vec::new();
        Flame::of(&s, 0, of).expect("a history").write_folded(&mut out).expect("memory");
        String::from_utf8(out).expect("text")
    };
    let peak = "(no Python frames) 20\nmain (main.py:1);a,\"b\" (x, y.py:3) 1000\nmain (main.py:1);f \
                (torch/nn/modules/linear.py:7) 500\n";
    assert_eq!(folded(FlameOf::RequestedPeak), peak);
    assert_eq!(folded(FlameOf::Total), peak);
    assert!(folded(FlameOf::AllocatedPeak).contains("a,\"b\" (x, y.py:3) 1024\n"));
    assert_eq!(folded(FlameOf::End), "");
}

#[test]
fn speedscope_counts_bytes() {
    let mut out = Vec::new();
    let flame = Flame::of(&three_blocks(), 0, FlameOf::RequestedPeak).expect("a history");
    flame.write_speedscope("three", &mut out).expect("memory");
    let json: serde_json::Value = serde_json::from_slice(&out).expect("JSON");
    let profile = &json["profiles"][0];
    assert_eq!(profile["unit"], "bytes");
    assert_eq!(profile["type"], "sampled");
    assert_eq!(profile["endValue"], 1520);
    assert_eq!(profile["weights"], serde_json::json!([20, 1000, 500]));
    assert_eq!(profile["samples"], serde_json::json!([[0], [3, 1], [3, 2]]));
    assert_eq!(json["shared"]["frames"][3]["name"], "main (main.py:1)");
}

#[cfg(feature = "flame-svg")]
#[test]
fn draws_the_same_picture_every_time() {
    let draw = || {
        let mut out = Vec::new();
        let flame = Flame::of(&three_blocks(), 0, FlameOf::RequestedPeak).expect("a history");
        flame.write_svg("three blocks", &mut out).expect("memory");
        out
    };
    assert_eq!(draw(), draw());
    assert!(String::from_utf8(draw()).expect("text").contains("1,000 bytes"));
}

fn exported(s: &Snapshot, table: Table, format: Format) -> String {
    let mut out = Vec::new();
    export(s, None, table, format, true, &mut out).expect("memory");
    String::from_utf8(out).expect("text")
}

#[test]
fn writes_csv_as_rfc_4180_says() {
    let csv = exported(&three_blocks(), Table::Events, Format::Csv);
    let lines: Vec<&str> = csv.split("\r\n").collect();
    assert_eq!(lines[0], Table::Events.columns().join(","));
    assert_eq!(
        lines[2],
        "0,1,alloc,4294967296,1000,,0,1001000,,,\"x, y.py:3 (a;\"\"b\"\")\",unknown,\"/u/x, y.py:3 (a;\"\"b\"\") < \
         /u/main.py:1 (main)\",,"
    );
    assert_eq!(lines.len(), 1 + 6 + 1);
    assert_eq!(
        exported(&three_blocks(), Table::Blocks, Format::Csv),
        Table::Blocks.columns().join(",") + "\r\n"
    );
}

#[test]
fn column_names_are_the_field_names() {
    let mut s = three_blocks();
    s.segments.push(segment(1 << 32, &[512, -512], StackId::NONE));
    for table in [Table::Events, Table::Segments, Table::Blocks] {
        let lines = exported(&s, table, Format::JsonLines);
        let first = lines.lines().next().expect("a row");
        // serde_json keeps no order in a map, the text does.
        let mut at = 0;
        for column in table.columns() {
            let found =
                first[at..].find(&format!("\"{column}\":")).unwrap_or_else(|| panic!("{column} in {first}"));
            at += found;
        }
        let row: serde_json::Value = serde_json::from_str(first).expect("JSON");
        assert_eq!(row.as_object().expect("an object").len(), table.columns().len());
    }
}

#[test]
fn spans_name_the_moment_and_count_the_steps() {
    use unhand_snapshot::{Annotation, Stage};
    let mut s = three_blocks();
    let name = s.strings.intern("Optimizer.step#SGD.step");
    for (stage, time_us) in [(Stage::Start, 1_001_000), (Stage::End, 1_004_000), (Stage::Start, 1_004_500)] {
        s.annotations.push(Annotation { name, stage, device: 0, time_us, ..Annotation::default() });
    }
    let e = explained(&s);
    let peak = e.peak.expect("a history").requested;
    assert_eq!(peak.during.as_deref(), Some("Optimizer.step#SGD.step"));
    assert_eq!((peak.step, peak.event_index, peak.since_start_us), (Some(1), Some(3), Some(3000)));
    assert_eq!(e.recording.steps, Some(1));
}

#[test]
fn json_counts_bytes_as_integers_and_leaves_unknown_things_null() {
    fn check(path: &str, value: &serde_json::Value) {
        match value {
            serde_json::Value::Object(map) => map.iter().for_each(|(key, v)| {
                let is_bytes = key.ends_with("_bytes");
                assert!(!is_bytes || v.is_i64() || v.is_u64() || v.is_null(), "{path}.{key} is {v}");
                check(&format!("{path}.{key}"), v);
            }),
            serde_json::Value::Array(items) => items.iter().for_each(|v| check(path, v)),
            serde_json::Value::Number(n) => assert!(!n.is_f64(), "{path} is {n}"),
            _ => {}
        }
    }
    let mut s = three_blocks();
    s.segments.push(segment(1 << 32, &[512, -512], StackId::NONE));
    push(&mut s, Action::Oom, 5, 100 * MIB, StackId::NONE);
    let json = serde_json::to_value(explained(&s)).expect("JSON");
    check("", &json);
    assert_eq!(json["schema_version"], 1);
    assert_eq!(json["peak"]["requested"]["peak_bytes"], 1520 + 512);
    assert_eq!(json["peak"]["allocated"]["is_exact"], false);
    assert!(json["peak"]["requested"]["during"].is_null());
    assert!(json["recording"]["steps"].is_null());
    s.traces.clear();
    let json = serde_json::to_value(explained(&s)).expect("JSON");
    assert!(json["peak"].is_null() && json["leaks"].is_null() && json["at_peak"].is_null());
}

#[test]
fn sizes_that_cannot_be_true_are_refused() {
    let mut s = snapshot();
    push(&mut s, Action::Alloc, 1 << 32, u64::MAX, StackId::NONE);
    let error = explain(&s, 0, &ExplainOptions::default()).expect_err("no device has that much");
    assert_eq!(
        error.to_string(),
        "the snapshot is damaged: the sizes of device `0` add up to 2^63 bytes or more"
    );
    assert!(Flame::of(&s, 0, FlameOf::Total).is_err());
}

#[test]
fn the_small_workspace_is_known_by_the_large_one_beside_it() {
    let mut s = snapshot();
    let matmul = stack(
        &mut s,
        &[("forward", "/v/site-packages/torch/nn/modules/linear.py", 7), ("main", "/u/m.py", 1)],
    );
    let other =
        stack(&mut s, &[("forward", "/v/site-packages/torch/nn/modules/conv.py", 7), ("main", "/u/m.py", 2)]);
    for (at, bytes, line) in
        [(1_u64, 32 * MIB, matmul), (2, MIB, matmul), (3, MIB, other), (4, 5 * MIB, matmul)]
    {
        push(&mut s, Action::Alloc, at << 32, bytes, line);
    }
    let shares = explained(&s).at_peak.expect("a history").categories.expect("stacks");
    let told: Vec<_> = shares.iter().map(|c| (c.category.label(), c.requested_bytes / MIB)).collect();
    assert_eq!(told, [("workspace", 33), ("activations", 6)]);
}
