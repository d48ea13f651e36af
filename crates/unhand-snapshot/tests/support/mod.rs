//! What the tests share: the recordings, and a snapshot as text without ids, for comparing two of them.

#![allow(dead_code)] // each test file uses its own part

use std::fmt::Write as _;
use std::path::PathBuf;

use unhand_snapshot::{Extra, Segment, Snapshot, StackId, Trace, Value};

/// All `*.pickle.xz` files of the repository, sorted.
pub(crate) fn recordings() -> Vec<PathBuf> {
    let directory = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/snapshots");
    let mut paths: Vec<_> =
        std::fs::read_dir(directory).unwrap().map(|entry| entry.unwrap().path()).collect();
    paths.retain(|path| path.extension().is_some_and(|extension| extension == "xz"));
    paths.sort();
    assert!(paths.len() >= 16);
    paths
}

/// Everything a snapshot says, ids replaced by what they stand for, so that equal snapshots have equal texts.
pub(crate) fn describe(snapshot: &Snapshot) -> String {
    let mut out = String::new();
    for (name, segments) in [("segment", &snapshot.segments), ("host", &snapshot.host_segments)] {
        for segment in segments {
            describe_segment(&mut out, name, segment, snapshot);
        }
    }
    for (name, traces) in [("trace", &snapshot.traces), ("host trace", &snapshot.host_traces)] {
        for trace in traces {
            writeln!(out, "{name} of {}", trace.len()).unwrap();
            describe_trace(&mut out, trace, snapshot);
        }
    }
    for a in &snapshot.annotations {
        let name = snapshot.strings.get(a.name);
        writeln!(
            out,
            "annotation {name:?} {:?} {} {} {}",
            a.stage,
            a.device,
            a.time_us,
            extra(&a.extra, snapshot)
        )
        .unwrap();
    }
    writeln!(out, "{:?}", snapshot.settings).unwrap();
    for (key, v) in &snapshot.extra {
        writeln!(out, "{key:?} = {}", value(v, snapshot)).unwrap();
    }
    writeln!(out, "{:?} {:?}", snapshot.pools, snapshot.layout).unwrap();
    out
}

fn describe_segment(out: &mut String, name: &str, segment: &Segment, snapshot: &Snapshot) {
    let mut own = segment.clone();
    own.blocks.clear();
    own.stack = StackId::NONE;
    own.extra = Extra::default();
    let (frames, others) = (stack(segment.stack, snapshot), extra(&segment.extra, snapshot));
    writeln!(out, "{name} {own:?} {frames} {others}").unwrap();
    for b in &segment.blocks {
        let (frames, others) = (stack(b.stack, snapshot), extra(&b.extra, snapshot));
        writeln!(out, "  {} {} {} {:?} {frames} {others}", b.address, b.size, b.requested_size, b.state)
            .unwrap();
    }
}

fn describe_trace(out: &mut String, trace: &Trace, snapshot: &Snapshot) {
    let text = |id| snapshot.strings.get(id);
    for (index, e) in trace.iter().enumerate() {
        writeln!(
            out,
            "  {:?} {} {} {} {:?} {:?} {:?} {:?} {:?} {} {}",
            e.action,
            e.addr,
            e.size,
            e.stream,
            e.time_us,
            text(e.compile_context),
            text(e.user_metadata),
            e.pool_id,
            text(e.action_name),
            stack(e.stack, snapshot),
            trace.extra(index).map(|others| extra(others, snapshot)).unwrap_or_default(),
        )
        .unwrap();
    }
}

fn stack(id: StackId, snapshot: &Snapshot) -> String {
    let mut out = String::from("[");
    for id in snapshot.stacks.frames(id) {
        let frame = snapshot.stacks.frame(id);
        let (name, file) = (snapshot.strings.get(frame.name), snapshot.strings.get(frame.filename));
        let others =
            snapshot.stacks.frame_extra(id).map(|others| extra(others, snapshot)).unwrap_or_default();
        write!(out, "{name}@{file}:{}{others};", frame.line).unwrap();
    }
    out + "]"
}

fn extra(extra: &Extra, snapshot: &Snapshot) -> String {
    let absent = format!("{extra:?}").rsplit("absent: ").next().unwrap_or_default().to_owned();
    extra.iter().fold(absent, |out, (key, v)| out + &format!("{key}={},", value(v, snapshot)))
}

fn value(v: &Value, snapshot: &Snapshot) -> String {
    let all = |items: &[Value]| items.iter().map(|v| value(v, snapshot)).collect::<Vec<_>>().join(",");
    match v {
        Value::Stack(id) => stack(*id, snapshot),
        Value::List(items) => format!("[{}]", all(items)),
        Value::Tuple(items) => format!("({})", all(items)),
        Value::Dict(pairs) => pairs.iter().fold("{".to_owned(), |out, (k, v)| {
            out + &format!("{}:{},", value(k, snapshot), value(v, snapshot))
        }),
        other => format!("{other:?}"),
    }
}

/// Reads bytes as they are.
pub(crate) fn read(bytes: &[u8]) -> Result<Snapshot, unhand_snapshot::Error> {
    Snapshot::read(bytes, &unhand_snapshot::ReadOptions::default())
}

/// Reads bytes that may be cut off.
pub(crate) fn read_truncated(bytes: &[u8]) -> Result<Snapshot, unhand_snapshot::Error> {
    Snapshot::read(bytes, &unhand_snapshot::ReadOptions { tolerate_truncation: true })
}

/// Opcodes for a text.
pub(crate) fn text(text: &str) -> Vec<u8> {
    let mut ops = vec![b'X'];
    ops.extend(u32::try_from(text.len()).unwrap().to_le_bytes());
    ops.extend(text.as_bytes());
    ops
}

/// A pickle of a snapshot without segments, with one more key whose value the opcodes make. They begin at byte 32.
pub(crate) fn around(ops: &[u8]) -> Vec<u8> {
    let mut bytes = b"\x80\x04}(".to_vec();
    bytes.extend(text("segments"));
    bytes.extend(b"]");
    bytes.extend(text("other_key"));
    assert_eq!(bytes.len(), 32);
    bytes.extend(ops);
    bytes.extend(b"u.");
    bytes
}

/// The value that opcodes make.
pub(crate) fn value_of(ops: &[u8]) -> Result<Value, unhand_snapshot::Error> {
    let snapshot = read(&around(ops))?;
    assert_eq!(snapshot.extra.len(), 1);
    Ok(snapshot.extra.into_iter().next().unwrap().1)
}
