//! Files that are cut off, at every place.

#![allow(clippy::unwrap_used)] // a failing test may panic

mod support;

use std::fmt::Write as _;

use support::{describe, read, read_truncated, text};
use unhand_snapshot::{Error, Warning};

/// A small snapshot with everything in it: two devices, shared stacks, settings, annotations, an unknown key.
fn small() -> Vec<u8> {
    let mut ops = b"\x80\x04\x95\0\0\0\0\0\0\0\0}\x94(".to_vec();
    let frame = |name: &str| {
        [
            b"}\x94(".as_slice(),
            &text("name"),
            &text(name),
            &text("filename"),
            &text("x.py"),
            &text("line"),
            b"K\x07u",
        ]
        .concat()
    };
    let frames = [&text("frames"), b"]\x94(".as_slice(), &frame("inner"), &frame("outer"), b"e"].concat();
    let block =
        [b"}(".as_slice(), &text("size"), b"M\0\x02", &text("state"), &text("inactive"), &frames, b"u"]
            .concat();
    ops.extend(text("segments"));
    for part in
        [b"](}(".as_slice(), &text("total_size"), b"M\0\x04", &text("blocks"), b"](", &block, &block, b"eu}("]
    {
        ops.extend(part);
    }
    for part in [text("total_size"), b"K\0".to_vec(), text("blocks"), b"]ue".to_vec()] {
        ops.extend(part);
    }
    let event = |action: &str, time: u8| {
        [b"}(".as_slice(), &text("action"), &text(action), &text("time_us"), &[b'K', time], &frames, b"u"]
            .concat()
    };
    ops.extend(text("device_traces"));
    for part in
        [b"](](".as_slice(), &event("alloc", 1), &event("free_requested", 2), b"e]", &event("oom", 3), b"ae"]
    {
        ops.extend(part);
    }
    ops.extend(
        [text("allocator_settings"), b"}".to_vec(), text("expandable_segments"), b"\x88s".to_vec()].concat(),
    );
    ops.extend(
        [text("external_annotations"), b"]}".to_vec(), text("name"), text("step"), b"sa".to_vec()].concat(),
    );
    ops.extend([text("more"), b"K\x01K\x02\x86u.".to_vec()].concat());
    ops
}

#[test]
fn no_cut_panics_and_every_cut_is_an_error_unless_it_is_tolerated() {
    let bytes = small();
    let whole = read(&bytes).unwrap();
    assert_eq!(whole.traces.iter().map(unhand_snapshot::Trace::len).collect::<Vec<_>>(), [2, 1]);
    let mut seen = String::new();
    let mut last_counts = (0, 0, 0);
    for cut in 0..bytes.len() {
        assert!(matches!(read(&bytes[..cut]), Err(Error::Truncated { .. })), "{cut}");
        let Ok(part) = read_truncated(&bytes[..cut]) else { continue };
        assert_eq!(part.warnings[0], Warning::Truncated { offset: cut as u64 });
        // What is there is what the whole file has there.
        for (trace, of_whole) in part.traces.iter().zip(&whole.traces) {
            for (index, event) in trace.iter().enumerate() {
                assert_eq!(event.time_us, of_whole.event(index).time_us, "{cut}");
                assert_eq!(part.stacks.frames(event.stack).count(), 2, "{cut}");
            }
        }
        for segment in &part.segments {
            assert!(whole.segments.iter().any(|s| s.total_size == segment.total_size), "{cut}");
        }
        let n_events: usize = part.traces.iter().map(unhand_snapshot::Trace::len).sum();
        let counts = (part.segments.len(), n_events, part.annotations.len());
        assert!(counts >= last_counts, "nothing gets lost by more data: {counts:?} at {cut}");
        if counts != last_counts {
            write!(seen, "{counts:?} ").unwrap();
        }
        last_counts = counts;
    }
    assert_eq!(seen, "(1, 0, 0) (2, 0, 0) (2, 1, 0) (2, 2, 0) (2, 3, 0) (2, 3, 1) ");
    let nearly = read_truncated(&bytes[..bytes.len() - 1]).unwrap();
    assert_eq!(describe(&nearly), describe(&whole));
}

#[test]
fn a_recording_can_be_cut_anywhere() {
    let path = support::recordings()
        .into_iter()
        .find(|path| path.to_str().unwrap().contains("streams.exp"))
        .unwrap();
    let packed = std::fs::read(path).unwrap();
    let bytes = unhand_snapshot::decompress(&packed).unwrap();
    let whole = read(&bytes).unwrap();
    let mut n_events = 0;
    for cut in (5000..bytes.len()).step_by(997) {
        let part = read_truncated(&bytes[..cut]).unwrap();
        let n: usize = part.traces.iter().map(unhand_snapshot::Trace::len).sum();
        assert!(n >= n_events && n <= whole.traces[0].len(), "{cut}");
        n_events = n;
    }
    assert!(n_events > 2000);
}

#[test]
fn a_packed_file_can_be_cut_too() {
    let path = support::recordings()
        .into_iter()
        .find(|path| path.to_str().unwrap().contains("gpt2.default"))
        .unwrap();
    let packed = std::fs::read(path).unwrap();
    let (content, error) = unhand_snapshot::decompress_partial(&packed[..packed.len() / 4 * 3], 1 << 30);
    // An xz chunk is unpacked whole or not at all, and holds 64 KiB.
    assert!(matches!(error, Some(Error::Decompress { format: "xz", .. })), "{error:?}");
    assert!(read_truncated(&content).unwrap().traces[0].len() > 1000);
}
