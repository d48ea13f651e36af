//! Files made to hurt: each must end in an error (or a model) soon, with little memory and without a panic.

#![allow(clippy::unwrap_used)] // a failing test may panic

mod support;

use support::{around, read, read_truncated, text, value_of};
use unhand_snapshot::{Error, Value};

fn many(ops: &[u8], count: usize) -> Vec<u8> {
    ops.repeat(count)
}

#[test]
fn refuses_a_list_that_contains_itself() {
    assert!(matches!(value_of(b"]\x94h\x00a"), Err(Error::ChangedAfterUse { offset: 36 })));
    assert!(matches!(value_of(b"]\x94(h\x00e"), Err(Error::ChangedAfterUse { .. })));
    assert!(matches!(value_of(b"}\x94Nh\x00s"), Err(Error::ChangedAfterUse { .. })));
}

#[test]
fn refuses_cycles_of_two() {
    // a = []; b = [a]; a.append(b)
    assert!(matches!(value_of(b"]\x94]\x94h\x00ah\x00h\x01a"), Err(Error::ChangedAfterUse { .. })));
    // The same through a tuple and through a dict.
    assert!(matches!(value_of(b"]\x94h\x00\x85a"), Err(Error::ChangedAfterUse { .. })));
    assert!(matches!(value_of(b"]\x94}Nh\x00sa"), Err(Error::ChangedAfterUse { .. })));
}

#[test]
fn refuses_a_trace_that_contains_itself() {
    let event = [b"}".as_slice(), &text("action"), &text("alloc"), b"s"].concat();
    let ops = [b"]\x94(".as_slice(), &event, b"h\x00e"].concat();
    assert!(matches!(value_of(&ops), Err(Error::ChangedAfterUse { .. })));
}

#[test]
fn refuses_values_nested_too_deep() {
    let lists = |depth| [many(b"]", depth), many(b"a", depth - 1)].concat();
    let tuples = |depth| [b"N".to_vec(), many(b"\x85", depth)].concat();
    assert!(value_of(&lists(60)).is_ok() && value_of(&tuples(60)).is_ok());
    for depth in [100, 100_000, 3_000_000] {
        assert!(matches!(value_of(&lists(depth)), Err(Error::TooLarge { .. })), "{depth}");
        assert!(matches!(value_of(&tuples(depth)), Err(Error::TooLarge { .. })), "{depth}");
    }
    // Nested and never ended, so that nothing is taken up.
    assert!(matches!(value_of(&many(b"](", 1_000_000)), Err(Error::Malformed { .. })));
    assert!(read_truncated(&[b"\x80\x04".to_vec(), many(b"](", 1_000_000)].concat()).is_err());
}

#[test]
fn refuses_a_billion_laughs() {
    // Each list holds the one before it ten times.
    let mut ops = [b"]\x94(".as_slice(), &many(&text("lol"), 10), b"e"].concat();
    for level in 0..20u8 {
        let ten = many(&[b'h', level], 10);
        ops = [b"".as_slice(), &ops, b"0]\x94(", &ten, b"e"].concat();
    }
    assert!(matches!(value_of(&ops), Err(Error::TooLarge { .. })));
}

#[test]
fn refuses_a_long_text_repeated_a_million_times() {
    let long = text(&"x".repeat(1 << 20));
    let ops = [b"](".as_slice(), &long, b"\x94", &many(b"h\x00", 100_000), b"e"].concat();
    assert!(matches!(value_of(&ops), Err(Error::TooLarge { .. })));
}

#[test]
fn refuses_one_segment_with_many_blocks_repeated() {
    let block = [b"}(".as_slice(), &text("size"), b"K\x01u"].concat();
    let blocks = [b"]\x94(".as_slice(), &block, b"\x94", &many(b"h\x01", 100_000), b"e"].concat();
    let segment = [b"}(".as_slice(), &text("blocks"), &blocks, b"u\x94"].concat();
    let bytes =
        [b"\x80\x04}".as_slice(), &text("segments"), b"](", &segment, &many(b"h\x02", 100_000), b"es."]
            .concat();
    assert!(matches!(read(&bytes), Err(Error::TooLarge { .. })));
}

#[test]
fn refuses_one_trace_repeated() {
    let event = [b"}".as_slice(), &text("action"), &text("alloc"), b"s\x94"].concat();
    let trace = [b"]\x94(".as_slice(), &event, &many(b"h\x01", 200_000), b"e"].concat();
    let traces = [b"](".as_slice(), &trace, &many(b"h\x00", 100_000), b"e"].concat();
    let bytes = [b"\x80\x04}".as_slice(), &text("device_traces"), &traces, b"s."].concat();
    assert!(matches!(read(&bytes), Err(Error::TooLarge { .. })));
}

#[test]
fn a_trace_that_two_devices_share_is_read_for_both() {
    let event = [b"}".as_slice(), &text("action"), &text("alloc"), b"s\x94"].concat();
    let trace = [b"]\x94(".as_slice(), &event, b"h\x01h\x01e"].concat();
    let traces = [b"](".as_slice(), &trace, b"h\x00e"].concat();
    let bytes = [b"\x80\x04}".as_slice(), &text("device_traces"), &traces, b"s."].concat();
    let snapshot = read(&bytes).unwrap();
    assert_eq!(snapshot.traces.iter().map(unhand_snapshot::Trace::len).collect::<Vec<_>>(), [3, 3]);
}

#[test]
fn big_dicts_in_many_lists_cost_no_more_than_their_length() {
    let mut big = b"}\x94(".to_vec();
    for number in 0..100_000u32 {
        big.push(b'J');
        big.extend(number.to_le_bytes());
        big.push(b'N');
    }
    big.push(b'u');
    let ops = [b"](".as_slice(), &big, &many(b"]h\x00a0", 200_000), b"e"].concat();
    assert!(value_of(&ops).is_ok());
    let ops = [b"](".as_slice(), &big, &many(b"h\x00", 200_000), b"e"].concat();
    assert!(matches!(value_of(&ops), Err(Error::TooLarge { .. })));
}

#[test]
fn huge_declared_lengths_allocate_nothing() {
    for ops in [
        b"X\xff\xff\xff\xff".as_slice(),
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x8d\xff\xff\xff\xff\xff\xff\xff\x7f",
        b"B\xff\xff\xff\xff",
        b"\x8e\xff\xff\xff\xff\xff\xff\xff\xff",
        b"\x96\xff\xff\xff\xff\xff\xff\xff\x00",
        b"\x8b\xff\xff\xff\x7f",
        b"\x8a\xff",
        b"T\xff\xff\xff\x7f",
    ] {
        assert!(matches!(value_of(ops), Err(Error::Truncated { .. })), "{ops:?}");
        assert!(read_truncated(&around(ops)).is_ok(), "{ops:?}");
    }
    assert!(matches!(value_of(b"\x8b\xff\xff\xff\xff"), Err(Error::Malformed { .. })));
    assert!(matches!(value_of(b"T\xff\xff\xff\xff"), Err(Error::Malformed { .. })));
}

#[test]
fn stack_and_memo_are_checked() {
    for ops in [
        b"h\x00".as_slice(),
        b"j\xff\xff\xff\xff",
        b"N(\x85",
        b"(\x86",
        b"N(K\x01a",
        b"](K\x01\x94(ee",
        b"e",
        b"Nt",
        b"}(Nu",
        b"}(]Nu",
        b"](N}ue",
        b"](}Nae",
        b"}Na",
        b"]NNs",
        b"K\x01NNs",
        b"(u",
    ] {
        assert!(value_of(ops).is_err(), "{ops:?}");
    }
    for bytes in [
        b"\x80\x04.".as_slice(),
        b"\x80\x04(.",
        b"\x80\x04\x94.",
        b"\x80\x04(0.",
        b"\x80\x04e.",
        b"\x80\x040.",
    ] {
        assert!(matches!(read(bytes), Err(Error::Malformed { .. })), "{bytes:?}");
    }
}

#[test]
fn a_list_changed_after_it_was_taken_up_is_an_error_and_not_a_guess() {
    // A list of frames is put into a dict and then gets one more.
    let frame = [
        b"}(".as_slice(),
        &text("name"),
        &text("f"),
        &text("filename"),
        &text("x.py"),
        &text("line"),
        b"K\x01u",
    ]
    .concat();
    let ops = [b"](}N]\x94(".as_slice(), &frame, b"esh\x00Nae"].concat();
    assert!(matches!(value_of(&ops), Err(Error::ChangedAfterUse { .. })));
}

#[test]
fn good_pickles_of_other_things_are_named() {
    let found = |bytes: &[u8]| match read(bytes) {
        Err(Error::NotASnapshot { found }) => found,
        other => panic!("{other:?}"),
    };
    assert_eq!(found(b"\x80\x04N."), "None");
    assert_eq!(found(b"\x80\x04K\x01."), "a number");
    assert_eq!(found(b"\x80\x04}."), "an empty dict");
    assert_eq!(found(&[b"\x80\x04}".as_slice(), &text("weights"), b"Ns."].concat()), "a dict with `weights`");
    let wrong = [b"\x80\x04}".as_slice(), &text("segments"), b"Ns."].concat();
    assert_eq!(read(&wrong).unwrap_err().to_string(), "`segments` should be a list of dicts");
    let wrong = [b"\x80\x04}".as_slice(), &text("segments"), b"]}NNsas."].concat();
    assert_eq!(read(&wrong).unwrap_err().to_string(), "`segments[0]` should be a dict whose keys are texts");
    let wrong = [b"\x80\x04}".as_slice(), &text("device_traces"), b"]K\x01as."].concat();
    assert_eq!(read(&wrong).unwrap_err().to_string(), "`device_traces[0]` should be a list of events");
}

#[test]
fn texts_that_are_not_utf8_are_replaced_with_a_warning() {
    let snapshot = read(&around(b"X\x03\0\0\0\xed\xb3\xbf")).unwrap();
    assert_eq!(snapshot.extra[0].1, Value::Str("\u{fffd}\u{fffd}\u{fffd}".to_owned()));
    assert_eq!(snapshot.warnings[0].to_string(), "1 texts are not UTF-8, the first one at byte 32");
}

#[test]
fn pseudorandom_bytes_never_panic() {
    let mut state = 0x2545_f491_4f6c_dd1d_u64;
    for _ in 0..20_000 {
        let mut bytes = vec![0x80, 4];
        for _ in 0..64 {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            // Mostly opcodes that do something.
            let ops = b"(.012JKMNXaehjqrtu})]s\x85\x86\x87\x88\x8a\x8c\x94\x00\x01\x02\x03";
            bytes.push(ops[usize::try_from(state % ops.len() as u64).unwrap()]);
        }
        let _ = read(&bytes);
        let _ = read_truncated(&bytes);
    }
}
