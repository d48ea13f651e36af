//! The pickle stack machine: opcodes in, items out. It imports nothing, calls nothing, and never recurses.
//!
//! What keeps it small and fast is that a frame, a stack and an event stop being dicts and lists as soon as another
//! list or dict takes them up (`settle.rs`). From then on they must not change, which every pickler of a tree or of
//! shared values keeps to; a file that breaks it is refused. So a cycle can never form, and what is left at the end
//! is a graph in which every reference points to something finished earlier.

use crate::hash::{IdTable, Seed};
use crate::item::{Item, Open};
use crate::refuse::looks_like;
use crate::settle::{FrameTable, TraceBuild};
use crate::{Error, PoolId, Stacks, Strings, Value, keys, opcode as op};

/// Memory that any file may use, so that small files are not judged by their ratio.
const FREE_ALLOWANCE: u64 = 64 << 20;

/// Bytes of memory allowed for each byte of input. Real snapshots need 1 to 3; the rest is distance.
const ALLOWANCE_PER_BYTE: u64 = 16;

/// A list, dict or tuple that is kept as it is.
#[derive(Debug)]
pub(crate) enum Node {
    List(Vec<Item>),
    /// Keys and values in turn.
    Dict(Vec<Item>),
    Tuple(Vec<Item>),
    /// A place to be used again.
    Free,
}

/// The machine and the tables its items refer to.
pub(crate) struct Machine<'a> {
    pub(crate) data: &'a [u8],
    pub(crate) at: usize,
    /// Where the opcode began that is being carried out.
    pub(crate) op_at: usize,
    pub(crate) stack: Vec<Item>,
    /// For each open mark, the height of the stack.
    pub(crate) marks: Vec<usize>,
    memo: Memo,
    /// What became of each list and dict.
    pub(crate) objects: Vec<Item>,
    pub(crate) nodes: Vec<Node>,
    pub(crate) free_nodes: Vec<u32>,
    /// Emptied buffers of nodes, to be used again.
    pub(crate) spare: Vec<Vec<Item>>,
    pub(crate) strings: Strings,
    pub(crate) stacks: Stacks,
    pub(crate) frame_table: FrameTable,
    pub(crate) traces: Vec<TraceBuild>,
    pub(crate) wide: Vec<Value>,
    pub(crate) floats: Vec<f64>,
    /// Bytes and bytearrays.
    pub(crate) bytes: Vec<Value>,
    pub(crate) pairs: Vec<PoolId>,
    pair_table: IdTable,
    seed: Seed,
    /// Bytes of memory that may still be used.
    allowance: u64,
    pub(crate) protocol: u8,
    pub(crate) n_lossy: u64,
    pub(crate) first_lossy: u64,
}

/// What the pickle remembers. Picklers number their entries from 0 without gaps; a file that does not pays with a
/// hash map instead of a huge vector.
#[derive(Default)]
struct Memo {
    dense: Vec<Item>,
    sparse: std::collections::HashMap<usize, Item>,
    /// How many entries are set: the number that `MEMOIZE` gives to the next one.
    n_set: usize,
}

impl Memo {
    fn get(&self, index: usize) -> Option<Item> {
        match self.dense.get(index) {
            Some(&item) => (item != Item::NIL).then_some(item),
            None => self.sparse.get(&index).copied(),
        }
    }

    fn set(&mut self, index: usize, item: Item) {
        if index == self.dense.len() && self.sparse.is_empty() {
            self.dense.push(item);
            self.n_set += 1;
        } else if let Some(place) = self.dense.get_mut(index) {
            self.n_set += usize::from(*place == Item::NIL);
            *place = item;
        } else if index <= 2 * self.dense.len() + 1024 && self.sparse.is_empty() {
            self.dense.resize(index, Item::NIL);
            self.dense.push(item);
            self.n_set += 1;
        } else {
            self.n_set += usize::from(self.sparse.insert(index, item).is_none());
        }
    }
}

impl<'a> Machine<'a> {
    pub(crate) fn new(data: &'a [u8]) -> Machine<'a> {
        Machine {
            data,
            at: 0,
            op_at: 0,
            stack: Vec::new(),
            marks: Vec::new(),
            memo: Memo::default(),
            objects: Vec::new(),
            nodes: Vec::new(),
            free_nodes: Vec::new(),
            spare: Vec::new(),
            strings: keys::strings(),
            stacks: Stacks::default(),
            frame_table: FrameTable::default(),
            traces: Vec::new(),
            wide: Vec::new(),
            floats: Vec::new(),
            bytes: Vec::new(),
            pairs: Vec::new(),
            pair_table: IdTable::default(),
            seed: Seed::default(),
            allowance: FREE_ALLOWANCE + ALLOWANCE_PER_BYTE * data.len() as u64,
            protocol: 0,
            n_lossy: 0,
            first_lossy: 0,
        }
    }

    /// Runs to `STOP` and gives what is then on top of the stack.
    pub(crate) fn run(&mut self) -> Result<Item, Error> {
        self.begin()?;
        loop {
            self.op_at = self.at;
            let opcode = self.byte()?;
            match opcode {
                op::BINGET | op::LONG_BINGET => self.get_run(opcode)?,
                op::MEMOIZE => self.put(self.memo.n_set)?,
                op::BINPUT => {
                    let index = usize::from(self.byte()?);
                    self.put(index)?;
                }
                op::LONG_BINPUT => {
                    let index = self.u32()? as usize;
                    self.put(index)?;
                }
                op::MARK => self.marks.push(self.stack.len()),
                op::EMPTY_DICT => self.push_object(Open::EmptyDict)?,
                op::EMPTY_LIST => self.push_object(Open::EmptyList)?,
                op::SETITEMS => {
                    let from = self.pop_mark()?;
                    self.set_items(from)?;
                }
                op::APPENDS => {
                    let from = self.pop_mark()?;
                    self.append_items(from)?;
                }
                op::SETITEM => {
                    let from = self.below_top(2)?;
                    self.set_items(from)?;
                }
                op::APPEND => {
                    let from = self.below_top(1)?;
                    self.append_items(from)?;
                }
                op::BININT1 => {
                    let value = self.byte()?;
                    self.push_int(value.into())?;
                }
                op::BININT2 => {
                    let value = u16::from_le_bytes(self.array()?);
                    self.push_int(value.into())?;
                }
                op::BININT => {
                    let value = i32::from_le_bytes(self.array()?);
                    self.push_int(value.into())?;
                }
                op::LONG1 => {
                    let length = usize::from(self.byte()?);
                    self.push_long(length)?;
                }
                op::LONG4 => {
                    let length = i32::from_le_bytes(self.array()?);
                    let length = usize::try_from(length).map_err(|_| self.malformed("a negative length"))?;
                    self.push_long(length)?;
                }
                op::BINFLOAT => {
                    let value = f64::from_be_bytes(self.array()?);
                    self.charge(8)?;
                    let index = self.index(self.floats.len())?;
                    self.floats.push(value);
                    self.stack.push(Item::float(index));
                }
                op::SHORT_BINUNICODE => {
                    let length = usize::from(self.byte()?);
                    self.push_text(length)?;
                }
                op::BINUNICODE => {
                    let length = self.u32()? as usize;
                    self.push_text(length)?;
                }
                op::BINUNICODE8 => {
                    let length = self.length8()?;
                    self.push_text(length)?;
                }
                op::NONE => self.stack.push(Item::NONE),
                op::NEWTRUE => self.stack.push(Item::TRUE),
                op::NEWFALSE => self.stack.push(Item::FALSE),
                op::EMPTY_TUPLE => self.stack.push(Item::EMPTY_TUPLE),
                op::TUPLE1 | op::TUPLE2 | op::TUPLE3 => {
                    let from = self.fence(usize::from(opcode - op::TUPLE1) + 1)?;
                    self.push_tuple(from)?;
                }
                op::TUPLE => {
                    let from = self.pop_mark()?;
                    self.push_tuple(from)?;
                }
                op::STOP => {
                    let root = self.fence(1)?;
                    let root = self.stack[root];
                    return Ok(self.take(root));
                }
                // The content is counted anyway, so the frame's length has nothing to say.
                op::FRAME => drop(self.take_bytes(8)?),
                op::PROTO => self.proto()?,
                _ => self.rare(opcode)?,
            }
        }
    }

    /// Opcodes that PyTorch's files do not have.
    #[cold]
    fn rare(&mut self, opcode: u8) -> Result<(), Error> {
        match opcode {
            op::POP => {
                if self.marks.last() == Some(&self.stack.len()) {
                    self.marks.pop();
                } else {
                    let from = self.fence(1)?;
                    self.stack.truncate(from);
                }
            }
            op::POP_MARK => {
                let from = self.pop_mark()?;
                self.stack.truncate(from);
            }
            op::DUP => {
                let top = self.fence(1)?;
                self.stack.push(self.stack[top]);
            }
            op::SHORT_BINSTRING => {
                let length = usize::from(self.byte()?);
                self.push_text(length)?;
            }
            op::BINSTRING => {
                let length = i32::from_le_bytes(self.array()?);
                let length = usize::try_from(length).map_err(|_| self.malformed("a negative length"))?;
                self.push_text(length)?;
            }
            op::SHORT_BINBYTES => {
                let length = usize::from(self.byte()?);
                self.push_bytes(length, Value::Bytes)?;
            }
            op::BINBYTES => {
                let length = self.u32()? as usize;
                self.push_bytes(length, Value::Bytes)?;
            }
            op::BINBYTES8 => {
                let length = self.length8()?;
                self.push_bytes(length, Value::Bytes)?;
            }
            op::BYTEARRAY8 => {
                let length = self.length8()?;
                self.push_bytes(length, Value::ByteArray)?;
            }
            _ => return Err(self.refuse(opcode)),
        }
        Ok(())
    }

    /// Checks the first bytes, so that another kind of file is named as what it is.
    fn begin(&mut self) -> Result<(), Error> {
        match self.data {
            [] => Err(Error::Truncated { offset: 0 }),
            [op::PROTO, ..] => {
                self.at = 1;
                self.proto()
            }
            data => Err(Error::NotAPickle { looks_like: looks_like(data) }),
        }
    }

    fn proto(&mut self) -> Result<(), Error> {
        self.protocol = self.byte()?;
        match self.protocol {
            2..=5 => Ok(()),
            0 | 1 => Err(Error::NotAPickle { looks_like: "a pickle of protocol 0 or 1" }),
            protocol => Err(Error::Protocol { protocol }),
        }
    }

    /// Pushes remembered values as long as they follow one another: most of a file is lists of known frames.
    #[inline]
    fn get_run(&mut self, mut opcode: u8) -> Result<(), Error> {
        loop {
            let index = if opcode == op::BINGET { usize::from(self.byte()?) } else { self.u32()? as usize };
            let Some(mut item) = self.memo.get(index) else {
                return Err(self.malformed("it refers to something that was not remembered"));
            };
            if let Some(object) = item.as_object() {
                let state = self.objects[object];
                if !state.is_open() {
                    // Next time it is found without the detour.
                    item = state;
                    if let Some(place) = self.memo.dense.get_mut(index) {
                        *place = state;
                    }
                }
            }
            self.stack.push(item);
            match self.data.get(self.at) {
                Some(&next @ (op::BINGET | op::LONG_BINGET)) => {
                    opcode = next;
                    self.op_at = self.at;
                    self.at += 1;
                }
                _ => return Ok(()),
            }
        }
    }

    fn put(&mut self, index: usize) -> Result<(), Error> {
        let top = self.fence(1)?;
        self.memo.set(index, self.stack[top]);
        Ok(())
    }

    fn push_object(&mut self, open: Open) -> Result<(), Error> {
        let index = self.index(self.objects.len())?;
        self.objects.push(Item::open(open));
        self.stack.push(Item::object(index));
        Ok(())
    }

    #[inline]
    fn push_int(&mut self, value: i64) -> Result<(), Error> {
        let item = match Item::int(value) {
            Some(item) => item,
            None => self.push_wide(Value::Int(value))?,
        };
        self.stack.push(item);
        Ok(())
    }

    fn push_wide(&mut self, value: Value) -> Result<Item, Error> {
        self.charge(size_of::<Value>())?;
        let index = self.index(self.wide.len())?;
        self.wide.push(value);
        Ok(Item::wide(index))
    }

    /// A two's complement number, little-endian.
    #[inline]
    fn push_long(&mut self, length: usize) -> Result<(), Error> {
        let mut bytes = self.take_bytes(length)?;
        // The shortest form is the one that is kept.
        while let [.., before, last] = bytes
            && ((*last == 0 && before >> 7 == 0) || (*last == 0xff && before >> 7 == 1))
        {
            bytes = &bytes[..bytes.len() - 1];
        }
        if bytes.len() > 8 {
            self.charge(bytes.len())?;
            let item = self.push_wide(Value::BigInt(bytes.to_vec()))?;
            self.stack.push(item);
            return Ok(());
        }
        let sign = bytes.last().map_or(0, |last| if last >> 7 == 1 { 0xff } else { 0 });
        let mut all = [sign; 8];
        all[..bytes.len()].copy_from_slice(bytes);
        self.push_int(i64::from_le_bytes(all))
    }

    #[inline]
    fn push_text(&mut self, length: usize) -> Result<(), Error> {
        let bytes = self.take_bytes(length)?;
        let id = match str::from_utf8(bytes) {
            Ok(text) => self.strings.intern(text),
            Err(_) => self.intern_lossy(bytes),
        };
        self.stack.push(Item::str(id));
        Ok(())
    }

    /// Python writes file names that are not UTF-8 as lone surrogates, which no Rust text can hold.
    #[cold]
    fn intern_lossy(&mut self, bytes: &[u8]) -> crate::StringId {
        if self.n_lossy == 0 {
            self.first_lossy = self.op_at as u64;
        }
        self.n_lossy += 1;
        self.strings.intern(&String::from_utf8_lossy(bytes))
    }

    fn push_bytes(&mut self, length: usize, kind: fn(Vec<u8>) -> Value) -> Result<(), Error> {
        let bytes = self.take_bytes(length)?;
        self.charge(size_of::<Value>() + length)?;
        let index = self.index(self.bytes.len())?;
        self.bytes.push(kind(bytes.to_vec()));
        self.stack.push(Item::bytes(index));
        Ok(())
    }

    fn push_tuple(&mut self, from: usize) -> Result<(), Error> {
        for index in from..self.stack.len() {
            self.stack[index] = self.take(self.stack[index]);
        }
        let tuple = match self.stack[from..] {
            [] => Item::EMPTY_TUPLE,
            [a, b] => match (self.as_u64(a), self.as_u64(b)) {
                (Some(a), Some(b)) => Item::pair(self.intern_pair(PoolId(a, b))?),
                _ => Item::node(self.new_node(Node::Tuple(vec![a, b]))?),
            },
            _ => {
                let items = self.stack[from..].to_vec();
                Item::node(self.new_node(Node::Tuple(items))?)
            }
        };
        self.stack.truncate(from);
        self.stack.push(tuple);
        Ok(())
    }

    fn intern_pair(&mut self, pair: PoolId) -> Result<u32, Error> {
        let pairs = &self.pairs;
        let hash = self.seed.pair(pair.0, pair.1);
        if let Some(index) = self.pair_table.find(hash, |index| pairs[index as usize] == pair) {
            return Ok(index);
        }
        self.charge(size_of::<PoolId>())?;
        let index = self.index(self.pairs.len())?;
        self.pairs.push(pair);
        self.pair_table.insert(hash, index);
        Ok(index)
    }

    /// The number, if the item is an int of 64 bits without sign.
    #[inline]
    pub(crate) fn as_u64(&self, item: Item) -> Option<u64> {
        match item.view() {
            crate::item::View::Int(value) => u64::try_from(value).ok(),
            crate::item::View::Wide(index) => self.wide[index as usize].as_u64(),
            _ => None,
        }
    }

    /// The number, if the item is an int of 64 bits.
    #[inline]
    pub(crate) fn as_i64(&self, item: Item) -> Option<i64> {
        match item.view() {
            crate::item::View::Int(value) => Some(value),
            crate::item::View::Wide(index) => self.wide[index as usize].as_i64(),
            _ => None,
        }
    }

    /// Pays for memory that the file makes necessary.
    #[inline]
    pub(crate) fn charge(&mut self, bytes: usize) -> Result<(), Error> {
        match self.allowance.checked_sub(bytes as u64) {
            Some(rest) => {
                self.allowance = rest;
                Ok(())
            }
            None => Err(Error::TooLarge { what: "memory for its values", offset: self.op_at as u64 }),
        }
    }

    /// A table's next index.
    #[inline]
    pub(crate) fn index(&self, length: usize) -> Result<u32, Error> {
        // One number is left free, for tables that count from 1.
        u32::try_from(length)
            .ok()
            .filter(|&index| index < u32::MAX)
            .ok_or(Error::TooLarge { what: "number of values", offset: self.op_at as u64 })
    }

    pub(crate) fn malformed(&self, what: &'static str) -> Error {
        Error::Malformed { what, offset: self.op_at as u64 }
    }

    /// The place on the stack of the uppermost `count` items, which must lie above the last mark.
    #[inline]
    fn fence(&self, count: usize) -> Result<usize, Error> {
        let floor = self.marks.last().copied().unwrap_or(0);
        match self.stack.len().checked_sub(count) {
            Some(from) if from >= floor => Ok(from),
            _ => Err(self.malformed("it needs more values than there are")),
        }
    }

    /// Like [`fence`](Machine::fence), with one more item below them.
    fn below_top(&self, count: usize) -> Result<usize, Error> {
        Ok(self.fence(count + 1)? + 1)
    }

    #[inline]
    fn pop_mark(&mut self) -> Result<usize, Error> {
        self.marks.pop().ok_or_else(|| self.malformed("there is no mark"))
    }

    #[inline]
    fn byte(&mut self) -> Result<u8, Error> {
        let Some(&byte) = self.data.get(self.at) else { return Err(self.truncated()) };
        self.at += 1;
        Ok(byte)
    }

    #[inline]
    fn array<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let Some(array) = self.data[self.at..].first_chunk() else { return Err(self.truncated()) };
        self.at += N;
        Ok(*array)
    }

    #[inline]
    fn u32(&mut self) -> Result<u32, Error> {
        Ok(u32::from_le_bytes(self.array()?))
    }

    fn length8(&mut self) -> Result<usize, Error> {
        let length = u64::from_le_bytes(self.array()?);
        usize::try_from(length).map_err(|_| self.truncated())
    }

    #[inline]
    fn take_bytes(&mut self, length: usize) -> Result<&'a [u8], Error> {
        let Some(bytes) = self.data[self.at..].get(..length) else { return Err(self.truncated()) };
        self.at += length;
        Ok(bytes)
    }

    /// How much data there is.
    pub(crate) fn length(&self) -> usize {
        self.data.len()
    }

    #[cold]
    pub(crate) fn truncated(&self) -> Error {
        Error::Truncated { offset: self.data.len() as u64 }
    }
}
