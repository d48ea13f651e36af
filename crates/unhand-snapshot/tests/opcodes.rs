//! Each opcode of protocols 2 to 5 by itself, seen through an unknown key at the top of a snapshot.

#![allow(clippy::unwrap_used)] // a failing test may panic

mod support;

use support::{read, text, value_of};
use unhand_snapshot::{Error, Value};

fn int(ops: &[u8]) -> Value {
    value_of(ops).unwrap()
}

#[test]
fn reads_simple_values() {
    assert_eq!(value_of(b"N").unwrap(), Value::None);
    assert_eq!(value_of(b"\x88").unwrap(), Value::Bool(true));
    assert_eq!(value_of(b"\x89").unwrap(), Value::Bool(false));
    assert_eq!(value_of(b"G\x3f\xf8\0\0\0\0\0\0").unwrap(), Value::Float(1.5));
}

#[test]
fn reads_ints_of_every_width() {
    assert_eq!(int(b"K\xff"), Value::Int(255));
    assert_eq!(int(b"M\xff\xff"), Value::Int(65535));
    assert_eq!(int(b"J\xff\xff\xff\xff"), Value::Int(-1));
    assert_eq!(int(b"\x8a\x00"), Value::Int(0));
    assert_eq!(int(b"\x8a\x01\x80"), Value::Int(-128));
    assert_eq!(int(b"\x8a\x06\x00\x00\x00\x00\x00\x7f"), Value::Int(0x7f00_0000_0000));
    assert_eq!(int(b"\x8a\x08\xff\xff\xff\xff\xff\xff\xff\x7f"), Value::Int(i64::MAX));
    assert_eq!(int(b"\x8a\x08\x00\x00\x00\x00\x00\x00\x00\x80"), Value::Int(i64::MIN));
    assert_eq!(int(b"\x8a\x09\xff\xff\xff\xff\xff\xff\xff\xff\x00").as_u64(), Some(u64::MAX));
    assert_eq!(int(b"\x8b\x02\0\0\0\x00\x01"), Value::Int(256));
    let wide = [b"\x8a\x0a".as_slice(), &[7; 10]].concat();
    assert_eq!(int(&wide), Value::BigInt(vec![7; 10]));
}

#[test]
fn keeps_the_shortest_form_of_an_int() {
    assert_eq!(int(b"\x8a\x0c\x05\0\0\0\0\0\0\0\0\0\0\0"), Value::Int(5));
    assert_eq!(int(b"\x8a\x0a\xfe\xff\xff\xff\xff\xff\xff\xff\xff\xff"), Value::Int(-2));
}

#[test]
fn reads_texts_of_every_length_field() {
    let expected = Value::Str("äb".to_owned());
    assert_eq!(value_of(b"\x8c\x03\xc3\xa4b").unwrap(), expected);
    assert_eq!(value_of(b"X\x03\0\0\0\xc3\xa4b").unwrap(), expected);
    assert_eq!(value_of(b"\x8d\x03\0\0\0\0\0\0\0\xc3\xa4b").unwrap(), expected);
    assert_eq!(value_of(b"U\x02ab").unwrap(), Value::Str("ab".to_owned()));
    assert_eq!(value_of(b"T\x02\0\0\0ab").unwrap(), Value::Str("ab".to_owned()));
}

#[test]
fn reads_bytes_of_every_length_field() {
    assert_eq!(value_of(b"C\x02\xff\x00").unwrap(), Value::Bytes(vec![255, 0]));
    assert_eq!(value_of(b"B\x01\0\0\0\xff").unwrap(), Value::Bytes(vec![255]));
    assert_eq!(value_of(b"\x8e\x01\0\0\0\0\0\0\0\xff").unwrap(), Value::Bytes(vec![255]));
    assert_eq!(value_of(b"\x96\x01\0\0\0\0\0\0\0\xff").unwrap(), Value::ByteArray(vec![255]));
}

#[test]
fn reads_tuples_of_every_length() {
    let ints = |values: &[i64]| Value::Tuple(values.iter().map(|&value| Value::Int(value)).collect());
    assert_eq!(value_of(b")").unwrap(), ints(&[]));
    assert_eq!(value_of(b"K\x01\x85").unwrap(), ints(&[1]));
    assert_eq!(value_of(b"K\x01K\x02\x86").unwrap(), ints(&[1, 2]));
    assert_eq!(value_of(b"K\x01J\xff\xff\xff\xff\x86").unwrap(), ints(&[1, -1]));
    assert_eq!(value_of(b"K\x01K\x02K\x03\x87").unwrap(), ints(&[1, 2, 3]));
    assert_eq!(value_of(b"(K\x01K\x02K\x03K\x04t").unwrap(), ints(&[1, 2, 3, 4]));
}

#[test]
fn reads_lists_filled_at_once_or_one_by_one() {
    let expected = Value::List(vec![Value::Int(1), Value::None]);
    assert_eq!(value_of(b"](K\x01Ne").unwrap(), expected);
    assert_eq!(value_of(b"]K\x01aNa").unwrap(), expected);
    assert_eq!(value_of(b"](K\x01e(Ne").unwrap(), expected);
    assert_eq!(value_of(b"](e").unwrap(), Value::List(vec![]));
}

#[test]
fn reads_dicts_filled_at_once_or_one_by_one() {
    let expected =
        Value::Dict(vec![(Value::Int(1), Value::None), (Value::Str("a".to_owned()), Value::Bool(true))]);
    assert_eq!(value_of(b"}(K\x01N\x8c\x01a\x88u").unwrap(), expected);
    assert_eq!(value_of(b"}K\x01Ns\x8c\x01a\x88s").unwrap(), expected);
    assert_eq!(value_of(b"}(u").unwrap(), Value::Dict(vec![]));
}

#[test]
fn a_key_that_is_set_twice_has_its_last_value_in_its_first_place() {
    let expected = Value::Dict(vec![(Value::Int(1), Value::Int(3)), (Value::Int(2), Value::None)]);
    assert_eq!(value_of(b"}(K\x01NK\x02NK\x01K\x03u").unwrap(), expected);
}

#[test]
fn remembers_by_number_and_in_turn() {
    let expected = Value::List(vec![Value::Int(7), Value::Int(7)]);
    assert_eq!(value_of(b"](K\x07q\x00h\x00e").unwrap(), expected);
    assert_eq!(value_of(b"](K\x07r\x09\0\0\0j\x09\0\0\0e").unwrap(), expected);
    assert_eq!(value_of(b"](K\x07\x94h\x00e").unwrap(), expected);
    // A number far beyond the number of entries.
    assert_eq!(value_of(b"](K\x07r\xff\xff\xff\xffj\xff\xff\xff\xffe").unwrap(), expected);
}

#[test]
fn a_list_that_is_shared_is_read_in_both_places() {
    let list = Value::List(vec![Value::Int(1)]);
    assert_eq!(value_of(b"](]\x94K\x01ah\x00e").unwrap(), Value::List(vec![list.clone(), list]));
}

#[test]
fn a_remembered_list_may_grow_until_it_is_taken_up() {
    // x = []; remembered; x += [1]; dropped; fetched again; x += [2]
    let expected = Value::List(vec![Value::List(vec![Value::Int(1), Value::Int(2)])]);
    assert_eq!(value_of(b"](]\x94(K\x01e0h\x00K\x02ae").unwrap(), expected);
}

#[test]
fn drops_and_doubles() {
    assert_eq!(value_of(b"NK\x010").unwrap(), Value::None);
    assert_eq!(value_of(b"N(K\x01K\x021").unwrap(), Value::None);
    assert_eq!(value_of(b"K\x01(0").unwrap(), Value::Int(1));
    assert_eq!(value_of(b"K\x012\x86").unwrap(), Value::Tuple(vec![Value::Int(1), Value::Int(1)]));
}

#[test]
fn frames_of_any_declared_length_are_passed_over() {
    assert_eq!(value_of(b"\x95\xff\xff\xff\xff\xff\xff\xff\xffN").unwrap(), Value::None);
}

#[test]
fn refuses_everything_that_would_run_code() {
    let class = |ops: &[u8]| match value_of(ops) {
        Err(Error::Refused { name, class, offset }) => (name, class, offset),
        other => panic!("{other:?}"),
    };
    assert_eq!(class(b"cos\nsystem\n"), ("GLOBAL", "os.system".to_owned(), 32));
    assert_eq!(class(b"\x8c\x02os\x8c\x06system\x93"), ("STACK_GLOBAL", "os.system".to_owned(), 44));
    assert_eq!(class(b"(ios\nsystem\n"), ("INST", "os.system".to_owned(), 33));
    assert_eq!(class(b"Pkey\n"), ("PERSID", "persistent id key".to_owned(), 32));
    for (ops, name) in [
        (b"R".as_slice(), "REDUCE"),
        (b"b", "BUILD"),
        (b"o", "OBJ"),
        (b"\x81", "NEWOBJ"),
        (b"\x92", "NEWOBJ_EX"),
        (b"Q", "BINPERSID"),
        (b"\x82\x01", "EXT1"),
        (b"\x83\x01\x01", "EXT2"),
        (b"\x84\x01\x01\x01\x01", "EXT4"),
    ] {
        assert_eq!(class(ops).0, name);
    }
    // Names in messages are bounded and have no control characters.
    let long = [b"c\x1b[2J".as_slice(), &[b'x'; 5000], b"\ny\n"].concat();
    let (_, name, _) = class(&long);
    assert!(name.len() < 300 && name.starts_with("\\u{1b}[2J"), "{name}");
}

#[test]
fn refuses_opcodes_of_protocols_0_and_1_by_name() {
    for (ops, expected) in [
        (b"I1\n".as_slice(), "INT"),
        (b"L1L\n", "LONG"),
        (b"F1\n", "FLOAT"),
        (b"S'a'\n", "STRING"),
        (b"Va\n", "UNICODE"),
        (b"(l", "LIST"),
        (b"(d", "DICT"),
        (b"Np1\n", "PUT"),
        (b"g1\n", "GET"),
    ] {
        match value_of(ops) {
            Err(Error::OldOpcode { name, .. }) => assert_eq!(name, expected),
            other => panic!("{expected}: {other:?}"),
        }
    }
}

#[test]
fn refuses_what_no_snapshot_has() {
    for (ops, expected) in [
        (b"\x8f".as_slice(), "EMPTY_SET"),
        (b"(\x91", "FROZENSET"),
        (b"\x97", "NEXT_BUFFER"),
        (b"\x98", "READONLY_BUFFER"),
    ] {
        match value_of(ops) {
            Err(Error::Unsupported { name, .. }) => assert_eq!(name, expected),
            other => panic!("{expected}: {other:?}"),
        }
    }
    assert!(matches!(value_of(b"\xff"), Err(Error::UnknownOpcode { byte: 0xff, offset: 32 })));
}

#[test]
fn refuses_protocol_1() {
    let looks_like = |bytes: &[u8]| match read(bytes) {
        Err(Error::NotAPickle { looks_like }) => looks_like,
        other => panic!("{other:?}"),
    };
    assert_eq!(looks_like(b"}q\x00(U\x08segments]u."), "a pickle of protocol 0 or 1");
    assert_eq!(looks_like(b"(dp0\nVsegments\np1\n(lp2\ns."), "a pickle of protocol 0 or 1");
    assert_eq!(looks_like(b"\x80\x01}."), "a pickle of protocol 0 or 1");
    assert_eq!(looks_like(b"{\"segments\": []}"), "JSON");
    assert_eq!(looks_like(b"\x1f\x8b\x08"), "gzip data, which must be unpacked first");
    assert_eq!(looks_like(b"PK\x03\x04"), "a zip archive, perhaps from `torch.save`");
    assert!(matches!(read(b"\x80\x06}."), Err(Error::Protocol { protocol: 6 })));
}

#[test]
fn reads_protocols_2_to_5() {
    for protocol in 2..=5 {
        let mut bytes = vec![0x80, protocol];
        bytes.extend(b"}");
        bytes.extend(text("segments"));
        bytes.extend(b"]s.");
        assert_eq!(read(&bytes).unwrap().protocol, protocol);
    }
}
