//! Lists and dicts of the stack machine, and how those that are frames, stacks and events become records.
//!
//! A list or dict is *open* until another one takes it up. Taking up is the moment to look at it: a dict with name,
//! filename and line that goes into a list is a frame, a list of nothing but frames is a stack, a list whose first
//! item is a dict with an action is a trace, and each dict that is appended to a trace goes straight into its columns.
//! Everything else stays a node. What is recognised here wrongly (frames under an unknown key, say) costs nothing:
//! every record can be turned back into the value it was.

use std::collections::HashMap;

use crate::item::{Item, Open, View};
use crate::machine::{Machine, Node};
use crate::trace::{Shape, keys as bits};
use crate::values::unique;
use crate::{Error, Frame, FrameId, StackId, StringId, Trace, keys};

/// Buffers above this many items are not kept for the next node.
const SPARE_ITEMS: usize = 4096;

/// A dict with more items than this (keys and values) is not looked at for being a frame or an event, since the same
/// dict may be put into a million lists.
const RECORD_ITEMS: usize = 128;

/// A trace being filled, and the keys of its events that have no column.
#[derive(Default)]
pub(crate) struct TraceBuild {
    pub(crate) trace: Trace,
    /// Keys and values in turn; `Shape::extra` counts these from 1.
    pub(crate) extras: Vec<Box<[Item]>>,
    extra_table: HashMap<Box<[Item]>, u32>,
}

/// Frames that have more than name, file and line: a frame is the same only if that is the same too.
#[derive(Default)]
pub(crate) struct FrameTable {
    /// By name, file, line and the rest.
    table: HashMap<Box<[Item]>, FrameId>,
    /// The keys and values beyond the three.
    pub(crate) extras: Vec<(FrameId, Box<[Item]>)>,
}

impl Machine<'_> {
    /// What an item is from now on: a list or dict that is taken up can no longer change.
    #[inline]
    pub(crate) fn take(&mut self, item: Item) -> Item {
        let Some(object) = item.as_object() else { return item };
        let View::Open(open) = self.objects[object].view() else {
            return self.objects[object];
        };
        let taken = match open {
            Open::EmptyList => Item::EMPTY_LIST,
            Open::EmptyDict => Item::EMPTY_DICT,
            Open::Dict(node) => Item::node(node),
            Open::Stack(stack) => Item::stack(stack),
            Open::Trace(trace) => Item::trace(trace),
            Open::List(node) => self.settle_list(node),
        };
        self.objects[object] = taken;
        taken
    }

    /// Like [`take`](Machine::take), for something that goes into a list: there a dict may be a frame.
    #[inline]
    fn take_element(&mut self, item: Item) -> Result<Item, Error> {
        let Some(object) = item.as_object() else { return Ok(item) };
        let (node, is_open) = match self.objects[object].view() {
            View::Open(Open::Dict(node)) => (node, true),
            View::Node(node) => (node, false),
            _ => return Ok(self.take(item)),
        };
        let Some(frame) = self.settle_frame(node)? else { return Ok(self.take(item)) };
        if is_open {
            self.free_node(node);
        }
        self.objects[object] = Item::frame(frame);
        Ok(Item::frame(frame))
    }

    /// Appends what lies on the stack from `from` on to the list below it.
    pub(crate) fn append_items(&mut self, from: usize) -> Result<(), Error> {
        let (object, open) = self.target(from)?;
        let Some(&first) = self.stack.get(from) else {
            return match open {
                Open::EmptyDict | Open::Dict(_) => Err(self.malformed("a value is appended to a dict")),
                _ => Ok(()),
            };
        };
        match open {
            Open::EmptyDict | Open::Dict(_) => return Err(self.malformed("a value is appended to a dict")),
            Open::Trace(trace) => self.append_events(object, trace, from)?,
            Open::EmptyList if self.is_event(first) => {
                self.charge(size_of::<TraceBuild>())?;
                let trace = self.index(self.traces.len())?;
                if trace >> 28 != 0 {
                    return Err(Error::TooLarge { what: "number of traces", offset: self.op_at as u64 });
                }
                self.traces.push(TraceBuild::default());
                self.objects[object] = Item::open(Open::Trace(trace));
                self.append_events(object, trace, from)?;
            }
            Open::EmptyList | Open::List(_) | Open::Stack(_) => self.append_elements(object, from)?,
        }
        self.stack.truncate(from);
        Ok(())
    }

    /// Appends anything to a list that is not a trace.
    fn append_elements(&mut self, object: usize, from: usize) -> Result<(), Error> {
        let mut are_frames = true;
        for index in from..self.stack.len() {
            let item = self.take_element(self.stack[index])?;
            are_frames &= item.as_frame().is_some();
            self.stack[index] = item;
        }
        // Asked again, since the list may have been among its own items.
        let View::Open(open) = self.objects[object].view() else { return Err(self.changed_after_use()) };
        if are_frames && open == Open::EmptyList {
            let mut stack = StackId::NONE;
            for frame in self.stack[from..].iter().rev().filter_map(|item| item.as_frame()) {
                stack = self.stacks.child(stack, frame);
            }
            self.objects[object] = Item::open(Open::Stack(stack));
            return Ok(());
        }
        let node = match open {
            Open::List(node) => node,
            Open::Stack(stack) => {
                let mut items = self.buffer();
                items.extend(self.stacks.frames(stack).map(Item::frame));
                self.new_node(Node::List(items))?
            }
            _ => {
                let items = self.buffer();
                self.new_node(Node::List(items))?
            }
        };
        self.objects[object] = Item::open(Open::List(node));
        self.charge((self.stack.len() - from) * size_of::<Item>())?;
        if let Node::List(items) = &mut self.nodes[node as usize] {
            items.extend_from_slice(&self.stack[from..]);
        }
        Ok(())
    }

    /// Appends events to a trace, or, if one of the items is something else, makes the trace a plain list again.
    fn append_events(&mut self, object: usize, trace: u32, from: usize) -> Result<(), Error> {
        for index in from..self.stack.len() {
            let item = self.stack[index];
            let state = item.as_object().map_or(item, |object| self.objects[object]);
            match state.view() {
                View::Open(Open::Dict(node)) if self.is_event(item) => {
                    let at = self.index(self.traces[trace as usize].trace.len())?;
                    self.push_event(trace, node)?;
                    self.free_node(node);
                    if let Some(object) = item.as_object() {
                        self.objects[object] = Item::event(trace, at);
                    }
                }
                View::Node(node) if self.is_event(item) => self.push_event(trace, node)?,
                View::Event(other, at) => self.copy_event(trace, other, at)?,
                _ => {
                    let n_events = self.index(self.traces[trace as usize].trace.len())?;
                    self.charge(n_events as usize * size_of::<Item>())?;
                    let items = (0..n_events).map(|at| Item::event(trace, at)).collect();
                    let node = self.new_node(Node::List(items))?;
                    self.objects[object] = Item::open(Open::List(node));
                    return self.append_elements(object, index);
                }
            }
        }
        Ok(())
    }

    /// Whether an item is, or can become, an event.
    fn is_event(&self, item: Item) -> bool {
        let state = item.as_object().map_or(item, |object| self.objects[object]);
        let (View::Open(Open::Dict(node)) | View::Node(node)) = state.view() else {
            return matches!(state.view(), View::Event(..));
        };
        let Node::Dict(pairs) = &self.nodes[node as usize] else { return false };
        let is_action =
            |pair: &[Item]| pair[0] == Item::str(keys::ACTION) && matches!(pair[1].view(), View::Str(_));
        // PyTorch writes it first.
        pairs.len() <= RECORD_ITEMS && pairs.chunks_exact(2).any(is_action)
    }

    /// Puts a dict with an action into the columns of a trace.
    fn push_event(&mut self, trace: u32, node: u32) -> Result<(), Error> {
        let mut pairs = match &mut self.nodes[node as usize] {
            Node::Dict(pairs) => std::mem::take(pairs),
            _ => Vec::new(),
        };
        if repeats_known_key(&pairs) {
            pairs = unique(&pairs).into_iter().flat_map(|(key, value)| [key, value]).collect();
        }
        let mut shape = Shape::default();
        let (mut action, mut addr, mut size) = (crate::Action::Other, 0, 0);
        let (mut time, mut stack) = (Trace::NO_TIME, StackId::NONE);
        let mut extra: Vec<Item> = Vec::new();
        for pair in pairs.chunks_exact(2) {
            let (key, value) = (pair[0], pair[1]);
            let View::Str(key_id) = key.view() else {
                extra.extend([key, value]);
                continue;
            };
            let view = value.view();
            match (key_id, view) {
                (keys::ACTION, View::Str(name)) => {
                    action = keys::action(name);
                    shape.action_name =
                        if action == crate::Action::Other { name } else { StringId::default() };
                }
                (keys::ADDR, View::Int(value @ 0..)) => {
                    addr = value.cast_unsigned();
                    shape.keys |= bits::ADDR;
                }
                (keys::SIZE, View::Int(value @ 0..)) => {
                    size = value.cast_unsigned();
                    shape.keys |= bits::SIZE;
                }
                (keys::STREAM, View::Int(value @ 0..)) => {
                    shape.stream = value.cast_unsigned();
                    shape.keys |= bits::STREAM;
                }
                (keys::TIME_US, View::Int(value)) => time = value,
                (keys::FRAMES, View::Stack(id)) => {
                    stack = id;
                    shape.keys |= bits::FRAMES;
                }
                (keys::FRAMES, View::EmptyList) => {
                    stack = StackId::NONE;
                    shape.keys |= bits::FRAMES;
                }
                (keys::COMPILE_CONTEXT, View::Str(id)) => {
                    shape.compile_context = id;
                    shape.keys |= bits::COMPILE_CONTEXT;
                }
                (keys::USER_METADATA, View::Str(id)) => {
                    shape.user_metadata = id;
                    shape.keys |= bits::USER_METADATA;
                }
                (keys::POOL_ID, View::Pair(index)) => shape.pool_id = Some(self.pairs[index as usize]),
                (keys::ADDR, View::Wide(_)) if self.as_u64(value).is_some() => {
                    addr = self.as_u64(value).unwrap_or_default();
                    shape.keys |= bits::ADDR;
                }
                (keys::SIZE, View::Wide(_)) if self.as_u64(value).is_some() => {
                    size = self.as_u64(value).unwrap_or_default();
                    shape.keys |= bits::SIZE;
                }
                (keys::STREAM, View::Wide(_)) if self.as_u64(value).is_some() => {
                    shape.stream = self.as_u64(value).unwrap_or_default();
                    shape.keys |= bits::STREAM;
                }
                _ => extra.extend([key, value]),
            }
        }
        if !extra.is_empty() {
            // The free bytes of an out-of-memory event take the place of the address it has not.
            let place = extra.chunks_exact(2).rposition(|pair| pair[0] == Item::str(keys::DEVICE_FREE));
            if let Some(place) = place
                && shape.keys & bits::ADDR == 0
                && let Some(value) = self.as_u64(extra[2 * place + 1])
            {
                addr = value;
                shape.keys |= bits::DEVICE_FREE;
                extra.drain(2 * place..2 * place + 2);
            }
            shape.extra = self.intern_extra(trace, extra)?;
        }
        self.traces[trace as usize].trace.push_parts(action, addr, size, time, stack, shape);
        if let Node::Dict(place) = &mut self.nodes[node as usize] {
            *place = pairs;
        }
        Ok(())
    }

    fn copy_event(&mut self, trace: u32, from: u32, at: u32) -> Result<(), Error> {
        let other = &self.traces[from as usize];
        let event = other.trace.event(at as usize);
        let mut shape = *other.trace.shape(at as usize);
        if shape.extra != 0 && trace != from {
            let extra = other.extras[shape.extra as usize - 1].to_vec();
            self.charge(size_of_val(extra.as_slice()))?;
            shape.extra = self.intern_extra(trace, extra)?;
        }
        let time = event.time_us.unwrap_or(Trace::NO_TIME);
        let target = &mut self.traces[trace as usize].trace;
        target.push_parts(event.action, event.addr, event.size, time, event.stack, shape);
        Ok(())
    }

    /// Keeps keys without a column once for all events that have the same ones.
    fn intern_extra(&mut self, trace: u32, extra: Vec<Item>) -> Result<u32, Error> {
        if extra.is_empty() {
            return Ok(0);
        }
        let build = &mut self.traces[trace as usize];
        if let Some(&id) = build.extra_table.get(extra.as_slice()) {
            return Ok(id);
        }
        let bytes = 2 * size_of_val(extra.as_slice()) + 64;
        build.extras.push(extra.clone().into_boxed_slice());
        let id = u32::try_from(build.extras.len());
        let id = id.map_err(|_| Error::TooLarge { what: "number of keys", offset: self.op_at as u64 })?;
        build.extra_table.insert(extra.into_boxed_slice(), id);
        self.charge(bytes)?;
        Ok(id)
    }

    /// Puts what lies on the stack from `from` on, keys and values in turn, into the dict below it.
    pub(crate) fn set_items(&mut self, from: usize) -> Result<(), Error> {
        let n_items = self.stack.len() - from.min(self.stack.len());
        if n_items % 2 == 1 {
            return Err(self.malformed("a key has no value"));
        }
        let (object, _) = self.target(from)?;
        for index in (from..self.stack.len()).step_by(2) {
            let key = self.stack[index];
            if !self.is_hashable(key) {
                return Err(self.malformed("a list or dict is used as a key"));
            }
            self.stack[index + 1] = self.take(self.stack[index + 1]);
        }
        // Asked only now, since the dict may have been among its own values.
        let node = match self.objects[object].view() {
            View::Open(Open::EmptyDict) if n_items == 0 => return Ok(()),
            View::Open(Open::EmptyDict) => {
                let items = self.buffer();
                self.new_node(Node::Dict(items))?
            }
            View::Open(Open::Dict(node)) => node,
            View::Open(_) => return Err(self.malformed("an item is set in a list")),
            _ => return Err(self.changed_after_use()),
        };
        self.objects[object] = Item::open(Open::Dict(node));
        self.charge(n_items * size_of::<Item>())?;
        if let Node::Dict(items) = &mut self.nodes[node as usize] {
            items.extend_from_slice(&self.stack[from..]);
        }
        self.stack.truncate(from);
        Ok(())
    }

    /// The list or dict right below a place of the stack.
    #[inline]
    fn target(&self, from: usize) -> Result<(usize, Open), Error> {
        let item = from.checked_sub(1).and_then(|below| self.stack.get(below));
        let Some(item) = item else { return Err(self.malformed("there is no list or dict below the mark")) };
        let Some(object) = item.as_object() else {
            return Err(match item.view() {
                View::Node(_) | View::Frame(_) | View::Stack(_) | View::Trace(_) | View::Event(..) => {
                    self.changed_after_use()
                }
                View::EmptyList | View::EmptyDict => self.changed_after_use(),
                _ => self.malformed("there is no list or dict below the mark"),
            });
        };
        match self.objects[object].view() {
            View::Open(open) => Ok((object, open)),
            _ => Err(self.changed_after_use()),
        }
    }

    /// Whether Python lets it be a key; tuples are not looked into.
    #[inline]
    pub(crate) fn is_hashable(&self, item: Item) -> bool {
        match item.view() {
            View::Object(_)
            | View::Frame(_)
            | View::Stack(_)
            | View::Trace(_)
            | View::Event(..)
            | View::EmptyList
            | View::EmptyDict => false,
            View::Node(node) => matches!(self.nodes[node as usize], Node::Tuple(_)),
            _ => true,
        }
    }

    pub(crate) fn is_open_list(&self, item: Item) -> bool {
        let state = item.as_object().map(|object| self.objects[object].view());
        matches!(state, Some(View::Open(Open::EmptyList | Open::List(_) | Open::Stack(_) | Open::Trace(_))))
    }

    pub(crate) fn is_empty_dict(&self, item: Item) -> bool {
        item.as_object().is_some_and(|object| self.objects[object].view() == View::Open(Open::EmptyDict))
    }

    pub(crate) fn is_open_dict(&self, item: Item) -> bool {
        let state = item.as_object().map(|object| self.objects[object].view());
        matches!(state, Some(View::Open(Open::EmptyDict | Open::Dict(_))))
    }

    #[cold]
    fn changed_after_use(&self) -> Error {
        Error::ChangedAfterUse { offset: self.op_at as u64 }
    }

    /// A list that came in several pieces may be nothing but frames all the same.
    fn settle_list(&mut self, node: u32) -> Item {
        let Node::List(items) = &self.nodes[node as usize] else { return Item::node(node) };
        if items.is_empty() || items.iter().any(|item| item.as_frame().is_none()) {
            return Item::node(node);
        }
        let mut stack = StackId::NONE;
        for frame in items.iter().rev().filter_map(|item| item.as_frame()) {
            stack = self.stacks.child(stack, frame);
        }
        self.free_node(node);
        Item::stack(stack)
    }

    /// The frame that a dict is, if it is one.
    fn settle_frame(&mut self, node: u32) -> Result<Option<FrameId>, Error> {
        let Node::Dict(pairs) = &self.nodes[node as usize] else { return Ok(None) };
        if pairs.len() < 6 || pairs.len() > RECORD_ITEMS {
            return Ok(None);
        }
        let (mut name, mut filename, mut line, mut n_others) = (None, None, None, 0);
        for pair in pairs.chunks_exact(2) {
            let View::Str(key) = pair[0].view() else {
                n_others += 1;
                continue;
            };
            match (key, pair[1].view()) {
                (keys::NAME, View::Str(text)) => name = Some(text),
                (keys::FILENAME, View::Str(text)) => filename = Some(text),
                (keys::LINE, View::Int(number)) => line = Some(number),
                _ => n_others += 1,
            }
        }
        let (Some(name), Some(filename), Some(line)) = (name, filename, line) else { return Ok(None) };
        let frame = Frame { name, filename, line };
        if pairs.len() > 6 && repeats_known_key(pairs) {
            return Ok(None);
        }
        if n_others == 0 {
            return Ok(Some(self.stacks.intern_frame(frame)));
        }
        let is_other = |pair: &&[Item]| {
            let is_known = matches!(
                (pair[0].view(), pair[1].view()),
                (View::Str(keys::NAME | keys::FILENAME), View::Str(_))
                    | (View::Str(keys::LINE), View::Int(_))
            );
            !is_known
        };
        let others: Vec<Item> = pairs.chunks_exact(2).filter(is_other).flatten().copied().collect();
        let mut whole = vec![Item::str(name), Item::str(filename)];
        whole.extend(Item::int(line));
        whole.extend(&others);
        if let Some(&id) = self.frame_table.table.get(whole.as_slice()) {
            return Ok(Some(id));
        }
        self.charge(2 * size_of_val(whole.as_slice()) + 64)?;
        let id = self.stacks.push_frame(frame);
        self.frame_table.extras.push((id, others.into_boxed_slice()));
        self.frame_table.table.insert(whole.into_boxed_slice(), id);
        Ok(Some(id))
    }

    /// An empty buffer, used before if possible.
    fn buffer(&mut self) -> Vec<Item> {
        self.spare.pop().unwrap_or_default()
    }

    pub(crate) fn new_node(&mut self, node: Node) -> Result<u32, Error> {
        let (Node::List(items) | Node::Dict(items) | Node::Tuple(items)) = &node else {
            return Err(self.malformed("no node"));
        };
        self.charge(size_of::<Node>() + size_of_val(items.as_slice()))?;
        if let Some(index) = self.free_nodes.pop() {
            self.nodes[index as usize] = node;
            return Ok(index);
        }
        let index = self.index(self.nodes.len())?;
        self.nodes.push(node);
        Ok(index)
    }

    /// Gives a node's place and buffer to the next one. Nothing may refer to it any more: an open node is referred
    /// to by its object alone.
    fn free_node(&mut self, node: u32) {
        let old = std::mem::replace(&mut self.nodes[node as usize], Node::Free);
        self.free_nodes.push(node);
        if let Node::List(mut items) | Node::Dict(mut items) = old
            && items.capacity() <= SPARE_ITEMS
        {
            items.clear();
            self.spare.push(items);
        }
    }
}

/// Whether a dict sets a key of PyTorch's twice. The last value counts, and may be of another type than the first.
fn repeats_known_key(pairs: &[Item]) -> bool {
    const { assert!(keys::LAST.0 < 64) };
    let mut seen = 0u64;
    pairs.chunks_exact(2).any(|pair| match pair[0].view() {
        View::Str(StringId(id @ 0..64)) => {
            let is_again = seen >> id & 1 == 1;
            seen |= 1 << id;
            is_again
        }
        _ => false,
    })
}
