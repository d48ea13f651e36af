//! The stack machine's values: one word each, a number or a reference into one of the machine's tables.

use crate::{FrameId, StackId, StringId};

/// A value: four bits of kind, sixty of content.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Item(u64);

/// What an [`Item`] says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum View {
    /// An unused memo place.
    Nil,
    None,
    Bool(bool),
    EmptyTuple,
    EmptyList,
    EmptyDict,
    /// An int of sixty bits.
    Int(i64),
    /// Any other int.
    Wide(u32),
    Float(u32),
    Bytes(u32),
    Str(StringId),
    /// A pair of unsigned ints, which is what pool ids are.
    Pair(u32),
    /// A list, dict or tuple that cannot change any more.
    Node(u32),
    /// A dict that is a frame.
    Frame(FrameId),
    /// A list of frames; not empty.
    Stack(StackId),
    /// A list of events.
    Trace(u32),
    /// A dict that is an event of a trace.
    Event(u32, u32),
    /// A list or dict; what it is stands in the table of objects.
    Object(u32),
    /// Only in the table of objects: something that can still change.
    Open(Open),
}

/// A list or dict that no other one has taken up yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Open {
    EmptyList,
    EmptyDict,
    List(u32),
    Dict(u32),
    Stack(StackId),
    Trace(u32),
}

const NIL: u64 = 0;
const SIMPLE: u64 = 1;
const INT: u64 = 2;
const WIDE: u64 = 3;
const FLOAT: u64 = 4;
const BYTES: u64 = 5;
const STR: u64 = 6;
const PAIR: u64 = 7;
const NODE: u64 = 8;
const FRAME: u64 = 9;
const STACK: u64 = 10;
const TRACE: u64 = 11;
const EVENT: u64 = 12;
const OBJECT: u64 = 13;
const OPEN: u64 = 14;

impl Item {
    pub(crate) const NIL: Item = Item(NIL);
    pub(crate) const NONE: Item = Item(SIMPLE);
    pub(crate) const FALSE: Item = Item(SIMPLE | 1 << 4);
    pub(crate) const TRUE: Item = Item(SIMPLE | 2 << 4);
    pub(crate) const EMPTY_TUPLE: Item = Item(SIMPLE | 3 << 4);
    pub(crate) const EMPTY_LIST: Item = Item(SIMPLE | 4 << 4);
    pub(crate) const EMPTY_DICT: Item = Item(SIMPLE | 5 << 4);

    const fn new(kind: u64, content: u32) -> Item {
        Item(kind | (content as u64) << 4)
    }

    /// An int, if it fits.
    #[inline]
    pub(crate) fn int(value: i64) -> Option<Item> {
        let shifted = value << 4;
        (shifted >> 4 == value).then_some(Item(INT | shifted.cast_unsigned()))
    }

    pub(crate) fn wide(index: u32) -> Item {
        Item::new(WIDE, index)
    }

    pub(crate) fn float(index: u32) -> Item {
        Item::new(FLOAT, index)
    }

    pub(crate) fn bytes(index: u32) -> Item {
        Item::new(BYTES, index)
    }

    #[inline]
    pub(crate) const fn str(id: StringId) -> Item {
        Item::new(STR, id.0)
    }

    pub(crate) fn pair(index: u32) -> Item {
        Item::new(PAIR, index)
    }

    pub(crate) fn node(index: u32) -> Item {
        Item::new(NODE, index)
    }

    pub(crate) fn frame(id: FrameId) -> Item {
        Item::new(FRAME, id.0)
    }

    pub(crate) fn stack(id: StackId) -> Item {
        Item::new(STACK, id.0)
    }

    pub(crate) fn trace(index: u32) -> Item {
        Item::new(TRACE, index)
    }

    /// Of at most 2²⁸ traces.
    pub(crate) fn event(trace: u32, index: u32) -> Item {
        Item(EVENT | u64::from(index) << 4 | u64::from(trace) << 36)
    }

    pub(crate) fn object(index: u32) -> Item {
        Item::new(OBJECT, index)
    }

    pub(crate) fn open(open: Open) -> Item {
        let (kind, content) = match open {
            Open::EmptyList => (0, 0),
            Open::EmptyDict => (1, 0),
            Open::List(index) => (2, index),
            Open::Dict(index) => (3, index),
            Open::Stack(id) => (4, id.0),
            Open::Trace(index) => (5, index),
        };
        Item(OPEN | kind << 4 | u64::from(content) << 8)
    }

    /// The frame, if it is one: asked for each of dozens of frames an event.
    #[inline]
    pub(crate) fn as_frame(self) -> Option<FrameId> {
        if self.0 & 15 == FRAME { Some(FrameId(self.content())) } else { None }
    }

    /// The place in the table of objects, if it is there.
    #[inline]
    pub(crate) fn as_object(self) -> Option<usize> {
        if self.0 & 15 == OBJECT { Some(self.content() as usize) } else { None }
    }

    #[inline]
    pub(crate) fn is_open(self) -> bool {
        self.0 & 15 == OPEN
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation)] // that is how it was put in
    fn content(self) -> u32 {
        (self.0 >> 4) as u32
    }

    #[inline]
    #[allow(clippy::cast_possible_truncation)] // that is how it was put in
    pub(crate) fn view(self) -> View {
        let content = self.content();
        match self.0 & 15 {
            NIL => View::Nil,
            SIMPLE => match content {
                0 => View::None,
                1 => View::Bool(false),
                2 => View::Bool(true),
                3 => View::EmptyTuple,
                4 => View::EmptyList,
                _ => View::EmptyDict,
            },
            INT => View::Int(self.0.cast_signed() >> 4),
            WIDE => View::Wide(content),
            FLOAT => View::Float(content),
            BYTES => View::Bytes(content),
            STR => View::Str(StringId(content)),
            PAIR => View::Pair(content),
            NODE => View::Node(content),
            FRAME => View::Frame(FrameId(content)),
            STACK => View::Stack(StackId(content)),
            TRACE => View::Trace(content),
            EVENT => View::Event((self.0 >> 36) as u32, content),
            OBJECT => View::Object(content),
            _ => {
                let content = (self.0 >> 8) as u32;
                View::Open(match self.0 >> 4 & 15 {
                    0 => Open::EmptyList,
                    1 => Open::EmptyDict,
                    2 => Open::List(content),
                    3 => Open::Dict(content),
                    4 => Open::Stack(StackId(content)),
                    _ => Open::Trace(content),
                })
            }
        }
    }
}

impl std::fmt::Debug for Item {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.view().fmt(f)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_kind_comes_back_as_it_went_in() {
        let max = u32::MAX;
        for (item, view) in [
            (Item::NIL, View::Nil),
            (Item::NONE, View::None),
            (Item::FALSE, View::Bool(false)),
            (Item::TRUE, View::Bool(true)),
            (Item::EMPTY_TUPLE, View::EmptyTuple),
            (Item::EMPTY_LIST, View::EmptyList),
            (Item::EMPTY_DICT, View::EmptyDict),
            (Item::wide(max), View::Wide(max)),
            (Item::float(max), View::Float(max)),
            (Item::bytes(max), View::Bytes(max)),
            (Item::str(StringId(max)), View::Str(StringId(max))),
            (Item::pair(max), View::Pair(max)),
            (Item::node(max), View::Node(max)),
            (Item::frame(FrameId(max)), View::Frame(FrameId(max))),
            (Item::stack(StackId(max)), View::Stack(StackId(max))),
            (Item::trace(max), View::Trace(max)),
            (Item::event(max >> 4, max), View::Event(max >> 4, max)),
            (Item::object(max), View::Object(max)),
            (Item::open(Open::EmptyList), View::Open(Open::EmptyList)),
            (Item::open(Open::EmptyDict), View::Open(Open::EmptyDict)),
            (Item::open(Open::List(max)), View::Open(Open::List(max))),
            (Item::open(Open::Dict(max)), View::Open(Open::Dict(max))),
            (Item::open(Open::Stack(StackId(max))), View::Open(Open::Stack(StackId(max)))),
            (Item::open(Open::Trace(max)), View::Open(Open::Trace(max))),
        ] {
            assert_eq!(item.view(), view);
        }
    }

    #[test]
    fn ints_of_sixty_bits_fit_and_others_do_not() {
        for value in [0, 1, -1, (1 << 59) - 1, -(1 << 59)] {
            assert_eq!(Item::int(value).map(Item::view), Some(View::Int(value)));
        }
        for value in [1 << 59, -(1 << 59) - 1, i64::MAX, i64::MIN] {
            assert_eq!(Item::int(value), None);
        }
    }
}
