//! Files of other releases than the recordings', out of order, wrapped, compressed.

#![allow(clippy::unwrap_used)] // a failing test may panic

mod support;

use std::fmt::Write as _;
use std::io::Write as _;
use std::process::{Command, Stdio};

use support::{describe, read, text, value_of};
use unhand_snapshot::{
    Action, BlockState, Error, Snapshot, Stage, Value, Warning, decompress, decompress_limited,
};

/// The pickle of a Python expression, or nothing on a machine without Python.
fn pickled(expression: &str, protocol: u8) -> Option<Vec<u8>> {
    let program =
        format!("import pickle, sys; sys.stdout.buffer.write(pickle.dumps({expression}, {protocol}))");
    let output = Command::new("python3").args(["-c", &program]).stderr(Stdio::inherit()).output().ok()?;
    assert!(output.status.success());
    Some(output.stdout)
}

/// Reads, and checks that writing loses nothing by letting Python compare.
fn read_expression(expression: &str) -> Option<Snapshot> {
    let mut first = None;
    for protocol in 2..=5 {
        let bytes = pickled(expression, protocol)?;
        let snapshot = read(&bytes).unwrap();
        assert_eq!(snapshot.protocol, protocol);
        let mut written = Vec::new();
        snapshot.write(&mut written).unwrap();
        assert_eq!(describe(&read(&written).unwrap()), describe(&snapshot));
        if first.is_none() {
            let hex = written.iter().fold(String::new(), |mut out, byte| {
                write!(out, "{byte:02x}").unwrap();
                out
            });
            let program = format!(
                "import pickle; a = {expression}; b = pickle.loads(bytes.fromhex('{hex}')); assert a == b, (a, b)"
            );
            let mut child = Command::new("python3").arg("-").stdin(Stdio::piped()).spawn().ok()?;
            child.stdin.take().unwrap().write_all(program.as_bytes()).unwrap();
            assert!(child.wait().unwrap().success());
        }
        first = Some(snapshot);
    }
    first
}

#[test]
fn reads_dumps_of_torch_2_0_with_history_and_without_addresses() {
    let Some(snapshot) = read_expression(
        "{'segments': [{'device': 0, 'address': 4096, 'total_size': 3072, 'allocated_size': 1024, 'active_size': 1024,
          'stream': 0, 'segment_type': 'small', 'blocks': [
          {'size': 1024, 'state': 'active_allocated',
           'history': [{'addr': 4096, 'frames': [{'name': 'f', 'filename': 'x.py', 'line': 3}], 'real_size': 1000}]},
          {'size': 2048, 'state': 'inactive'}]}],
          'device_traces': [[{'action': 'free', 'addr': 1, 'size': 2, 'stream': 0, 'frames': []}]]}",
    ) else {
        return;
    };
    let segment = &snapshot.segments[0];
    let addresses: Vec<_> = segment.blocks.iter().map(|block| block.address).collect();
    assert_eq!(addresses, [4096, 5120]);
    assert_eq!(segment.requested_size, 1000, "summed up over active blocks");
    let block = &segment.blocks[0];
    assert_eq!((block.requested_size, block.state), (1000, BlockState::ActiveAllocated));
    let frame = snapshot.stacks.frame(snapshot.stacks.innermost(block.stack).unwrap());
    assert_eq!((snapshot.strings.get(frame.name), frame.line), ("f", 3));
    assert!(matches!(block.extra.get("history"), Some(Value::List(_))));
    assert!(!snapshot.settings.present);
    assert_eq!(snapshot.traces[0].event(0).action, Action::Free);
    assert_eq!(snapshot.traces[0].event(0).time_us, None);
    assert_eq!(snapshot.release_guess().to_string(), "2.2 or earlier");
}

#[test]
fn reads_a_list_of_segments() {
    let Some(snapshot) =
        read_expression("[{'device': 1, 'address': 1 << 63, 'total_size': 512, 'blocks': []}]")
    else {
        return;
    };
    assert!(snapshot.layout.is_segment_list);
    assert_eq!((snapshot.segments[0].device, snapshot.segments[0].address), (1, 1 << 63));
    assert!(read_expression("[]").unwrap().segments.is_empty());
}

#[test]
fn reads_everything_torch_2_15_adds() {
    let Some(snapshot) = read_expression(
        "(lambda fx: {'segments': [], 'device_traces': [[], [
          {'action': 'alloc', 'addr': 512, 'size': 7, 'stream': 2**63 + 1, 'time_us': 5, 'compile_context': 'N/A',
           'user_metadata': '', 'internal_metadata': 'mallocWithAddress', 'pool_id': (0, 3), 'frames': [fx],
           'forward_frames': ['a', 'b'], 'category': 'TEMPORARY'},
          {'action': 'oom', 'device_free': 99, 'size': 1 << 40, 'stream': 0, 'time_us': 6, 'pool_id': (0, 0),
           'frames': [fx, fx]},
          {'action': 'annotate', 'addr': 512, 'size': 7, 'stream': -1, 'time_us': 7, 'user_metadata': 'mine'},
          {'action': 'brand_new', 'addr': 'text', 'size': 7, 'stream': 0, 'time_us': None}]],
         'host_segments': [{'device': -1, 'address': 1, 'total_size': 2, 'segment_type': 'odd', 'blocks': [
           {'address': 1, 'size': 2, 'state': 'odd', 'frames': None, 'note': 1.5}]}],
         'host_traces': [[{'action': 'alloc', 'addr': 1, 'size': 2, 'stream': 0, 'time_us': 1}]],
         'allocator_settings': {'PYTORCH_CUDA_ALLOC_CONF': 'max_split_size_mb:64', 'max_split_size': 64 << 20,
           'garbage_collection_threshold': 0.5, 'expandable_segments': True, 'max_cached_size': -1,
           'roundup_power2_divisions': {'1': 0, '32768': 4}, 'new': {'deep': [1, (2, None), 2**70, -2**80]}},
         'external_annotations': [{'stage': 'START', 'name': 'step', 'device': 0, 'time_us': 4, 'odd': True},
           {'stage': 'MIDDLE', 'name': 'step', 'device': 0, 'time_us': 4}],
         'brand_new': [fx, {'action': 'not', 'a': 'trace'}, [{'action': 'but'}, 1], [{'action': 'a list'}]]})(
         {'name': 'g', 'filename': 'y.py', 'line': 1, 'fx_node_op': 'call_module', 'fx_node_name': 'conv'})",
    ) else {
        return;
    };
    let trace = &snapshot.traces[1];
    let first = trace.event(0);
    assert_eq!(first.stream, (1 << 63) + 1);
    assert_eq!(first.pool_id.unwrap().to_string(), "(0, 3)");
    let extra = trace.extra(0).unwrap();
    assert_eq!(extra.get("category").unwrap().as_str(), Some("TEMPORARY"));
    assert_eq!(extra.iter().count(), 3);
    let frame = snapshot.stacks.innermost(first.stack).unwrap();
    let fx = snapshot.stacks.frame_extra(frame).unwrap();
    assert_eq!(fx.get("fx_node_op").unwrap().as_str(), Some("call_module"));
    let oom = trace.event(1);
    assert_eq!((oom.action, oom.addr, oom.size), (Action::Oom, 99, 1 << 40));
    assert_eq!(snapshot.stacks.frames(oom.stack).collect::<Vec<_>>(), [frame, frame]);
    assert_eq!(trace.event(2).action, Action::Annotate);
    assert_eq!(
        trace.extra(2).unwrap().get("stream"),
        Some(&Value::Int(-1)),
        "kept, since no stream is negative"
    );
    let new = trace.event(3);
    assert_eq!((new.action, snapshot.strings.get(new.action_name)), (Action::Other, "brand_new"));
    assert_eq!(snapshot.host_segments[0].device, -1);
    assert_eq!(snapshot.host_traces[0].len(), 1);
    assert_eq!(snapshot.settings.max_split_size, Some(64 << 20));
    assert_eq!(snapshot.settings.roundup_power2_divisions, [(1, 0), (32768, 4)]);
    assert_eq!(snapshot.annotations[1].stage, Stage::Other);
    assert_eq!(snapshot.extra[0].0, "brand_new");
    assert_eq!(snapshot.pools.len(), 2);
    assert_eq!(snapshot.release_guess().to_string(), "2.15 or later");
}

#[test]
fn changed_settings_are_what_is_written() {
    let Some(mut snapshot) = read_expression(
        "{'segments': [], 'allocator_settings': {'expandable_segments': False, 'other': 1, 'max_split_size': -1}}",
    ) else {
        return;
    };
    snapshot.settings.expandable_segments = true;
    snapshot.settings.conf = "expandable_segments:True".to_owned();
    let mut written = Vec::new();
    snapshot.write(&mut written).unwrap();
    let again = read(&written).unwrap().settings;
    assert!(again.expandable_segments);
    assert_eq!(again.conf, "expandable_segments:True");
    let keys: Vec<_> = again.entries.iter().map(|(key, _)| key.as_str()).collect();
    assert_eq!(keys, ["expandable_segments", "other", "max_split_size", "PYTORCH_CUDA_ALLOC_CONF"]);
}

#[test]
fn events_out_of_order_are_sorted_and_keep_their_order_within_one_time() {
    let Some(bytes) = pickled(
        "{'device_traces': [[{'action': 'alloc', 'addr': a, 'size': 1, 'stream': 0, 'time_us': t, 'category': str(a)}
          for a, t in ((1, 30), (2, 30), (3, 10), (4, 20), (5, 10))]]}",
        4,
    ) else {
        return;
    };
    let snapshot = read(&bytes).unwrap();
    assert_eq!(snapshot.traces[0].addrs(), [3, 5, 4, 1, 2]);
    assert_eq!(snapshot.traces[0].extra(0).unwrap().get("category").unwrap().as_str(), Some("3"));
    assert_eq!(snapshot.warnings, [Warning::OrderRepaired { device: 0, n_early: 2 }]);
}

#[test]
fn a_free_without_an_allocation_tells_of_a_wrapped_ring() {
    let events = |pairs: &str| {
        format!(
            "{{'device_traces': [[{{'action': a, 'addr': p, 'size': 1, 'stream': 0}} for a, p in {pairs}]]}}"
        )
    };
    let warnings = |pairs| Some(read(&pickled(&events(pairs), 4)?).unwrap().warnings);
    let Some(wrapped) = warnings("(('alloc', 1), ('free_requested', 2), ('free_completed', 2))") else {
        return;
    };
    assert_eq!(wrapped, [Warning::RingWrapped { device: 0, first_index: 1 }]);
    assert_eq!(warnings("(('alloc', 1), ('free_requested', 1), ('alloc', 1), ('free', 1))").unwrap(), []);
    assert_eq!(
        warnings("(('free_requested', 1), ('free_completed', 1))").unwrap(),
        [],
        "`skip_actions` of alloc"
    );
}

#[test]
fn of_a_key_that_an_event_or_frame_sets_twice_the_last_value_counts() {
    let pair = |key: &str, value: &[u8]| [text(key), value.to_vec()].concat();
    let event = |pairs: &[Vec<u8>]| {
        let event = [b"}(".as_slice(), &pair("action", &text("oom")), &pairs.concat(), b"u"].concat();
        [b"\x80\x04}".as_slice(), &text("device_traces"), b"]](", &event, b"eas."].concat()
    };
    let twice = |key: &str, first: &[u8], last: &[u8]| event(&[pair(key, first), pair(key, last)]);
    for (bytes, addr) in [
        (twice("device_free", b"K\x09", b"K\x01"), 1),
        (twice("addr", b"N", b"K\x02"), 2),
        (twice("addr", b"K\x02", b"N"), 0),
    ] {
        let snapshot = read(&bytes).unwrap();
        assert_eq!(snapshot.traces[0].event(0).addr, addr);
        assert_eq!(snapshot.traces[0].extra(0).is_some(), addr == 0);
        let mut written = Vec::new();
        snapshot.write(&mut written).unwrap();
        assert_eq!(describe(&read(&written).unwrap()), describe(&snapshot));
    }
    let frame =
        [pair("name", b"N"), pair("name", &text("f")), pair("filename", &text("x")), pair("line", b"K\x01")];
    let frames = [b"](}(".as_slice(), &frame.concat(), b"ue"].concat();
    let snapshot = read(&event(&[pair("frames", &frames)])).unwrap();
    let Some(Value::List(frames)) = snapshot.traces[0].extra(0).unwrap().get("frames") else {
        panic!("a list")
    };
    assert_eq!(frames[0].get("name").unwrap().as_str(), Some("f"));
}

#[test]
fn an_overflow_the_settings_tell_of_is_a_warning() {
    let Some(snapshot) =
        read_expression("{'segments': [], 'allocator_settings': {'trace_alloc_overflowed': True}}")
    else {
        return;
    };
    assert_eq!(snapshot.warnings, [Warning::RingWrapped { device: 0, first_index: 0 }]);
}

#[test]
fn a_list_of_more_than_a_thousand_frames_is_one_stack() {
    let Some(snapshot) = read_expression(
        "{'segments': [], 'device_traces': [[{'action': 'alloc', 'addr': 0, 'size': 1, 'stream': 0, 'frames':
          [{'name': str(i), 'filename': 'f', 'line': i} for i in range(2500)]}]]}",
    ) else {
        return;
    };
    let lines: Vec<_> = snapshot
        .stacks
        .frames(snapshot.traces[0].event(0).stack)
        .map(|id| snapshot.stacks.frame(id).line)
        .collect();
    assert_eq!(lines, (0..2500).collect::<Vec<_>>());
}

#[test]
fn reads_the_pickles_of_the_torchscript_pickler() {
    // Protocol 2; texts are remembered by BINPUT, shared containers only after they are filled.
    let ops =
        b"](}q\x00(X\x04\0\0\0nameq\x01X\x01\0\0\0fX\x08\0\0\0filenamex.X\x01\0\0\0gX\x04\0\0\0lineK\x01u";
    assert!(value_of(ops).is_err(), "a torn one");
    let mut bytes = b"\x80\x02}(X\x08\0\0\0segmentsq\x00](e".to_vec();
    bytes.extend(b"X\x0d\0\0\0device_tracesq\x01](](");
    bytes.extend(
        b"}(X\x06\0\0\0actionq\x02X\x05\0\0\0allocq\x03X\x04\0\0\0addrq\x04\x8a\x08\0\0\0\0\0\x7f\0\0",
    );
    bytes.extend(b"X\x04\0\0\0sizeq\x05M\0\x02X\x06\0\0\0streamq\x06K\0X\x06\0\0\0framesq\x07](");
    bytes.extend(b"}(X\x04\0\0\0nameq\x08X\x01\0\0\0fq\x09X\x08\0\0\0filenameq\x0aX\x01\0\0\0gq\x0bX\x04\0\0\0lineq\x0cK\x05uq\x0d");
    bytes.extend(b"eq\x0eu}(h\x02h\x03h\x04K\x01h\x05K\x02h\x06K\0h\x07h\x0eueeu.");
    let snapshot = read(&bytes).unwrap();
    let trace = &snapshot.traces[0];
    assert_eq!(trace.len(), 2);
    assert_eq!(trace.event(0).addr, 0x7f00_0000_0000);
    assert_eq!(trace.event(0).stack, trace.event(1).stack);
    assert!(!trace.event(0).stack.is_none());
}

fn packed(program: &str, bytes: &[u8]) -> Option<Vec<u8>> {
    let program = format!("import sys, {program}");
    let child =
        Command::new("python3").args(["-c", &program]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = child.ok()?;
    child.stdin.take()?.write_all(bytes).ok()?;
    let output = child.wait_with_output().ok()?;
    output.status.success().then_some(output.stdout)
}

#[test]
fn unpacks_by_the_first_bytes() {
    let bytes = b"\x80\x04].".repeat(1000);
    for module in ["gzip", "lzma"] {
        let program =
            format!("{module}; sys.stdout.buffer.write({module}.compress(sys.stdin.buffer.read()))");
        let Some(packed) = packed(&program, &bytes) else { return };
        assert_eq!(*decompress(&packed).unwrap(), bytes);
        assert!(matches!(
            decompress_limited(&packed, 3999),
            Err(Error::DecompressedTooLarge { limit: 3999, .. })
        ));
        assert!(decompress_limited(&packed, 4000).is_ok());
        for cut in 6..packed.len() {
            assert!(
                matches!(decompress(&packed[..cut]), Err(Error::Decompress { .. })),
                "{module} cut at {cut}"
            );
        }
        let mut damaged = packed.clone();
        let middle = damaged.len() / 2;
        damaged[middle] ^= 0xff;
        assert!(decompress(&damaged).is_err(), "{module}");
        let twice = [packed.clone(), packed].concat();
        assert_eq!(decompress(&twice).unwrap().len(), 8000, "{module}");
    }
}

#[test]
fn unpacks_zstd() {
    let bytes = b"\x80\x04].".repeat(1000);
    let packed =
        ruzstd::encoding::compress_to_vec(bytes.as_slice(), ruzstd::encoding::CompressionLevel::Fastest);
    assert_eq!(*decompress(&packed).unwrap(), bytes);
    assert!(matches!(
        decompress_limited(&packed, 3999),
        Err(Error::DecompressedTooLarge { limit: 3999, .. })
    ));
    let skipped = b"\x50\x2a\x4d\x18\x02\0\0\0ab";
    let twice = [packed.as_slice(), skipped, &packed].concat();
    assert_eq!(decompress(&twice).unwrap().len(), 8000);
    for cut in 4..packed.len() {
        assert!(decompress(&packed[..cut]).is_err(), "cut at {cut}");
    }
}
