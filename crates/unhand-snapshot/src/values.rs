//! Items as values of their own, for keys without a field. What was shared is copied here, so all of it is counted.

use std::collections::HashMap;

use crate::convert::form;
use crate::item::{Item, View};
use crate::machine::{Machine, Node};
use crate::trace::keys as bits;
use crate::{Error, Extra, PoolId, StackId, StringId, Value, keys};

/// Dicts up to this many items are searched for repeated keys by comparing each with each.
pub(crate) const FEW_ITEMS: usize = 64;

impl Machine<'_> {
    pub(crate) fn frame_extras(&mut self) -> Result<(), Error> {
        for place in 0..self.frame_table.extras.len() {
            let (id, items) = self.frame_table.extras[place].clone();
            let extra = self.extra(&items)?;
            self.stacks.set_frame_extra(id, extra);
        }
        Ok(())
    }

    pub(crate) fn event_extras(&mut self) -> Result<(), Error> {
        // One after the other, since an event may hold another trace's events as a value.
        for index in 0..self.traces.len() {
            let mut extras = Vec::new();
            for place in 0..self.traces[index].extras.len() {
                let items = self.traces[index].extras[place].clone();
                extras.push(self.extra(&items)?);
            }
            self.traces[index].trace.set_extras(extras);
        }
        Ok(())
    }

    fn extra(&mut self, items: &[Item]) -> Result<Extra, Error> {
        let mut entries = Vec::new();
        for (key, value) in unique(items) {
            let View::Str(id) = key.view() else {
                return Err(form("an entry", "a dict whose keys are texts"));
            };
            self.charge(size_of::<(String, Value)>() + self.strings.get(id).len())?;
            let value = self.value(value, 0)?;
            entries.push((self.strings.get(id).to_owned(), value));
        }
        Ok(Extra::from_parts(entries, 0))
    }

    /// An item as a value of its own. Shared parts are copied, so the cost is counted.
    pub(crate) fn value(&mut self, item: Item, depth: usize) -> Result<Value, Error> {
        if depth > Value::MAX_DEPTH {
            return Err(Error::TooLarge { what: "depth of nested values", offset: self.op_at as u64 });
        }
        self.charge(size_of::<Value>())?;
        let text = |id: StringId| Value::Str(self.strings.get(id).to_owned());
        Ok(match item.view() {
            View::Bool(value) => Value::Bool(value),
            View::Int(value) => Value::Int(value),
            View::Wide(index) => {
                let value = self.wide[index as usize].clone();
                self.charge_bytes(&value)?;
                value
            }
            View::Float(index) => Value::Float(self.floats[index as usize]),
            View::Bytes(index) => {
                let value = self.bytes[index as usize].clone();
                self.charge_bytes(&value)?;
                value
            }
            View::Str(id) => {
                self.charge(self.strings.get(id).len())?;
                Value::Str(self.strings.get(id).to_owned())
            }
            View::EmptyTuple => Value::Tuple(Vec::new()),
            View::EmptyList => Value::List(Vec::new()),
            View::EmptyDict => Value::Dict(Vec::new()),
            View::Pair(index) => {
                let PoolId(a, b) = self.pairs[index as usize];
                self.charge(2 * size_of::<Value>())?;
                Value::Tuple(vec![Value::from(a), Value::from(b)])
            }
            View::Frame(id) => {
                let frame = self.stacks.frame(id);
                let fixed = [
                    (keys::NAME, text(frame.name)),
                    (keys::FILENAME, text(frame.filename)),
                    (keys::LINE, Value::Int(frame.line)),
                ];
                self.charge(
                    self.strings.get(frame.name).len() + self.strings.get(frame.filename).len() + 512,
                )?;
                let mut pairs: Vec<_> = fixed.into_iter().map(|(key, value)| (known(key), value)).collect();
                // They were noted in the order of their ids.
                let others = &self.frame_table.extras;
                if let Ok(place) = others.binary_search_by_key(&id, |(other, _)| *other) {
                    let items = others[place].1.clone();
                    self.values(&mut pairs, &items, depth)?;
                }
                Value::Dict(pairs)
            }
            View::Stack(stack) => Value::Stack(stack),
            View::Trace(index) => {
                let n_events = self.traces[index as usize].trace.len();
                let mut events = Vec::new();
                for at in 0..n_events {
                    events.push(self.event_value(index, at, depth + 1)?);
                }
                Value::List(events)
            }
            View::Event(trace, at) => self.event_value(trace, at as usize, depth)?,
            View::Node(node) => {
                let (Node::List(items) | Node::Tuple(items) | Node::Dict(items)) = &self.nodes[node as usize]
                else {
                    return Ok(Value::None);
                };
                let items = items.clone();
                match &self.nodes[node as usize] {
                    Node::Dict(_) => {
                        let mut pairs = Vec::new();
                        self.values(&mut pairs, &items, depth)?;
                        Value::Dict(pairs)
                    }
                    kind => {
                        let is_list = matches!(kind, Node::List(_));
                        let mut values = Vec::new();
                        for item in items {
                            values.push(self.value(item, depth + 1)?);
                        }
                        if is_list { Value::List(values) } else { Value::Tuple(values) }
                    }
                }
            }
            View::None | View::Nil | View::Object(_) | View::Open(_) => Value::None,
        })
    }

    fn values(&mut self, pairs: &mut Vec<(Value, Value)>, items: &[Item], depth: usize) -> Result<(), Error> {
        for (key, value) in unique(items) {
            let key = self.value(key, depth + 1)?;
            let value = self.value(value, depth + 1)?;
            pairs.push((key, value));
        }
        Ok(())
    }

    /// An event as the dict it was.
    fn event_value(&mut self, trace: u32, at: usize, depth: usize) -> Result<Value, Error> {
        self.charge(1024)?;
        let build = &self.traces[trace as usize];
        let (event, shape) = (build.trace.event(at), *build.trace.shape(at));
        let text = |id: StringId| Value::Str(self.strings.get(id).to_owned());
        let action = keys::action_key(event.action).unwrap_or(event.action_name);
        let n_text =
            [action, event.compile_context, event.user_metadata].map(|id| self.strings.get(id).len());
        let has = |bit: u8| shape.keys & bit != 0;
        let fields = [
            Some((keys::ACTION, text(action))),
            has(bits::ADDR).then(|| (keys::ADDR, event.addr.into())),
            has(bits::DEVICE_FREE).then(|| (keys::DEVICE_FREE, event.addr.into())),
            has(bits::SIZE).then(|| (keys::SIZE, event.size.into())),
            has(bits::STREAM).then(|| (keys::STREAM, event.stream.into())),
            event.time_us.map(|time| (keys::TIME_US, Value::Int(time))),
            has(bits::COMPILE_CONTEXT).then(|| (keys::COMPILE_CONTEXT, text(event.compile_context))),
            has(bits::USER_METADATA).then(|| (keys::USER_METADATA, text(event.user_metadata))),
            event.pool_id.map(|pool| (keys::POOL_ID, Value::Tuple(vec![pool.0.into(), pool.1.into()]))),
            has(bits::FRAMES).then(|| match event.stack {
                StackId::NONE => (keys::FRAMES, Value::List(Vec::new())),
                stack => (keys::FRAMES, Value::Stack(stack)),
            }),
        ];
        let mut pairs: Vec<_> =
            fields.into_iter().flatten().map(|(key, value)| (known(key), value)).collect();
        let others = match shape.extra {
            0 => None,
            extra => Some(build.extras[extra as usize - 1].clone()),
        };
        self.charge(n_text.into_iter().sum())?;
        if let Some(items) = others {
            self.values(&mut pairs, &items, depth)?;
        }
        Ok(Value::Dict(pairs))
    }

    fn charge_bytes(&mut self, value: &Value) -> Result<(), Error> {
        match value {
            Value::BigInt(bytes) | Value::Bytes(bytes) | Value::ByteArray(bytes) => self.charge(bytes.len()),
            _ => Ok(()),
        }
    }
}

fn known(key: StringId) -> Value {
    Value::Str(keys::text(key).to_owned())
}

/// The items of a dict as pairs; of a key that was set twice, the last value in the first place.
pub(crate) fn unique(items: &[Item]) -> Vec<(Item, Item)> {
    let mut pairs: Vec<(Item, Item)> = Vec::with_capacity(items.len() / 2);
    if items.len() <= FEW_ITEMS {
        for pair in items.chunks_exact(2) {
            match pairs.iter_mut().find(|(key, _)| *key == pair[0]) {
                Some(earlier) => earlier.1 = pair[1],
                None => pairs.push((pair[0], pair[1])),
            }
        }
        return pairs;
    }
    let mut places = HashMap::new();
    for pair in items.chunks_exact(2) {
        let place = *places.entry(pair[0]).or_insert(pairs.len());
        match pairs.get_mut(place) {
            Some(earlier) => earlier.1 = pair[1],
            None => pairs.push((pair[0], pair[1])),
        }
    }
    pairs
}
