//! Any snapshot that is written reads the same.

#![allow(clippy::unwrap_used)] // a failing test may panic

mod support;

use proptest::collection::vec;
use proptest::option;
use proptest::prelude::*;
use support::{describe, read, read_truncated};
use unhand_snapshot::{
    Action, AllocatorSettings, Annotation, Block, BlockState, Event, Extra, Frame, PoolId, Segment,
    SegmentKind, Snapshot, StackId, Stage, Trace, Value,
};

fn any_value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        Just(Value::None),
        any::<bool>().prop_map(Value::Bool),
        any::<i64>().prop_map(Value::Int),
        any::<u64>().prop_map(Value::from),
        (-1e9..1e9).prop_map(Value::Float),
        "\\PC{0,5}".prop_map(Value::Str),
        vec(any::<u8>(), 0..5).prop_map(Value::Bytes),
        vec(any::<u8>(), 0..5).prop_map(Value::ByteArray),
    ];
    leaf.prop_recursive(3, 24, 4, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..4).prop_map(Value::List),
            vec(inner.clone(), 0..5).prop_map(Value::Tuple),
            proptest::collection::btree_map("[a-e]", inner, 0..4)
                .prop_map(|pairs| Value::Dict(pairs.into_iter().map(|(k, v)| (Value::Str(k), v)).collect())),
        ]
    })
}

fn any_extra() -> impl Strategy<Value = Extra> {
    proptest::collection::btree_map("x_[a-e]", any_value(), 0..2).prop_map(|entries| {
        let mut extra = Extra::default();
        for (key, value) in entries {
            extra.insert(key, value);
        }
        extra
    })
}

/// A stack by the numbers of its frames.
fn any_stack() -> impl Strategy<Value = Vec<u8>> {
    vec(0..6u8, 0..6)
}

type EventParts = (usize, (u64, u64, u64, i64), Vec<u8>, (String, String), Option<(u64, u64)>);

fn any_event() -> impl Strategy<Value = EventParts> {
    let numbers =
        (any::<u64>(), 0..1u64 << 40, prop_oneof![Just(0), any::<u64>()], any::<i32>().prop_map(i64::from));
    let texts = ("(N/A|)", "[ab]{0,2}");
    (0..12usize, numbers, any_stack(), texts, option::of((0..3u64, any::<u64>())))
}

const ACTIONS: [Action; 12] = [
    Action::Alloc,
    Action::FreeRequested,
    Action::FreeCompleted,
    Action::Free,
    Action::SegmentAlloc,
    Action::SegmentFree,
    Action::SegmentMap,
    Action::SegmentUnmap,
    Action::Snapshot,
    Action::Oom,
    Action::Annotate,
    Action::Other,
];

type BlockParts = (u64, u64, u8, Vec<u8>, Extra);

fn any_block() -> impl Strategy<Value = BlockParts> {
    (any::<u64>(), 0..1u64 << 30, 0..3u8, any_stack(), any_extra())
}

type SegmentParts = ((i32, u64, u64), (bool, bool), (u64, u64), Vec<u8>, Vec<BlockParts>, Extra);

fn any_segment() -> impl Strategy<Value = SegmentParts> {
    (
        (-1..8, any::<u64>(), any::<u64>()),
        any::<(bool, bool)>(),
        any::<(u64, u64)>(),
        any_stack(),
        vec(any_block(), 0..4),
        any_extra(),
    )
}

fn intern(snapshot: &mut Snapshot, frames: &[u8]) -> StackId {
    let filename = snapshot.strings.intern("file.py");
    let ids: Vec<_> = frames
        .iter()
        .map(|&number| {
            let name = snapshot.strings.intern(&format!("f{number}"));
            snapshot.stacks.intern_frame(Frame { name, filename, line: i64::from(number) - 1 })
        })
        .collect();
    snapshot.stacks.intern(ids)
}

fn build_segment(snapshot: &mut Snapshot, parts: SegmentParts) -> Segment {
    let ((device, address, total_size), (is_small, is_expandable), pool, stack, blocks, extra) = parts;
    let states = [BlockState::ActiveAllocated, BlockState::ActivePendingFree, BlockState::Inactive];
    let blocks = blocks
        .into_iter()
        .map(|(address, size, state, stack, extra)| Block {
            address,
            size,
            requested_size: size / 2,
            state: states[usize::from(state)],
            stack: intern(snapshot, &stack),
            extra,
        })
        .collect();
    Segment {
        device,
        address,
        total_size,
        kind: if is_small { SegmentKind::Small } else { SegmentKind::Large },
        pool_id: PoolId(pool.0, pool.1),
        is_expandable,
        stack: intern(snapshot, &stack),
        blocks,
        extra,
        ..Segment::default()
    }
}

fn any_snapshot() -> impl Strategy<Value = Snapshot> {
    let settings = (
        any::<bool>(),
        "[a-z:,]{0,9}",
        option::of(any::<u64>()),
        0.0..1.0,
        vec((any::<u64>(), 0..9u64), 0..3),
    );
    let more = (
        vec(("[xy]{1,3}", any_value()), 0..2),
        vec(("[ab]{0,2}", any::<bool>(), any::<i64>(), any_extra()), 0..4),
    );
    let traces = || vec(vec(any_event(), 0..12), 0..3);
    (vec(any_segment(), 0..3), traces(), traces(), settings, more).prop_map(
        |(
            segments,
            traces,
            host_traces,
            (present, conf, max_split_size, threshold, divisions),
            (extra, annotations),
        )| {
            let mut snapshot = Snapshot::default();
            snapshot.segments =
                segments.into_iter().map(|parts| build_segment(&mut snapshot, parts)).collect();
            let mut build_trace = |events: Vec<EventParts>| {
                let mut trace = Trace::default();
                let mut times: Vec<_> = events.iter().map(|event| event.1.3).collect();
                times.sort_unstable();
                for ((action, (addr, size, stream, _), frames, texts, pool), time) in
                    events.into_iter().zip(times)
                {
                    let action = ACTIONS[action];
                    trace.push(Event {
                        action,
                        addr,
                        size,
                        stream,
                        time_us: Some(time),
                        stack: intern(&mut snapshot, &frames),
                        compile_context: snapshot.strings.intern(&texts.0),
                        user_metadata: snapshot.strings.intern(&texts.1),
                        pool_id: pool.map(|(a, b)| PoolId(a, b)),
                        action_name: snapshot.strings.intern(if action == Action::Other {
                            "odd"
                        } else {
                            ""
                        }),
                    });
                }
                trace
            };
            let traces: Vec<_> = traces.into_iter().map(&mut build_trace).collect();
            let host_traces: Vec<_> = host_traces.into_iter().map(&mut build_trace).collect();
            snapshot.layout.has_host_traces = !host_traces.is_empty();
            (snapshot.traces, snapshot.host_traces) = (traces, host_traces);
            if present {
                snapshot.settings = AllocatorSettings {
                    conf,
                    max_split_size,
                    garbage_collection_threshold: threshold,
                    expandable_segments: present,
                    roundup_power2_divisions: divisions,
                    present,
                    entries: Vec::new(),
                };
            }
            snapshot.annotations = annotations
                .into_iter()
                .map(|(name, is_start, time_us, extra)| Annotation {
                    name: snapshot.strings.intern(&name),
                    stage: if is_start { Stage::Start } else { Stage::End },
                    device: 0,
                    time_us,
                    extra,
                })
                .collect();
            for (key, value) in extra {
                if snapshot.extra.iter().all(|(other, _)| *other != key) {
                    snapshot.extra.push((key, value));
                }
            }
            snapshot
        },
    )
}

/// What reading adds to a model made by hand.
fn completed(mut snapshot: Snapshot) -> Snapshot {
    let segments = snapshot.segments.iter().map(|segment| segment.pool_id);
    let traces = snapshot.traces.iter().chain(&snapshot.host_traces);
    let mut pools: Vec<_> =
        segments.chain(traces.flat_map(Trace::iter).filter_map(|event| event.pool_id)).collect();
    pools.sort();
    pools.dedup();
    snapshot.pools = pools;
    snapshot.settings.entries.clear();
    snapshot
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn prop_what_is_written_reads_the_same(snapshot in any_snapshot()) {
        let mut written = Vec::new();
        snapshot.write(&mut written).unwrap();
        let again = read(&written).unwrap();
        let mut second = Vec::new();
        again.write(&mut second).unwrap();
        prop_assert_eq!(describe(&read(&second).unwrap()), describe(&again));
        prop_assert_eq!(describe(&completed(again)), describe(&completed(snapshot)));
    }

    #[test]
    fn prop_damaged_bytes_never_panic(snapshot in any_snapshot(), place in any::<usize>(), byte in any::<u8>()) {
        let mut written = Vec::new();
        snapshot.write(&mut written).unwrap();
        let place = place % written.len();
        written[place] = byte;
        let _ = read(&written);
        let _ = read_truncated(&written[..place]);
    }
}

#[test]
fn values_nested_too_deep_are_not_written() {
    let deep = (0..100).fold(Value::None, |value, _| Value::List(vec![value]));
    let snapshot = Snapshot { extra: vec![("deep".to_owned(), deep)], ..Snapshot::default() };
    let error = snapshot.write(&mut Vec::new()).unwrap_err();
    assert_eq!(error.to_string(), "cannot be written: a value is nested too deep");
}

#[test]
fn a_failing_writer_is_an_error() {
    struct Full;
    impl std::io::Write for Full {
        fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
            Err(std::io::Error::other("no space"))
        }
        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    assert!(matches!(Snapshot::default().write(&mut Full), Err(unhand_snapshot::Error::Write(_))));
}
