//! Values of keys this crate has no field for, kept so that nothing is lost when a snapshot is written back.

use crate::StackId;

/// A plain pickle value.
///
/// Values that come from [`Snapshot::read`](crate::Snapshot::read) are never nested deeper than
/// [`MAX_DEPTH`](Value::MAX_DEPTH), so walking or dropping one by recursion is safe.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// `None`.
    None,
    /// `True` or `False`.
    Bool(bool),
    /// An int that fits 64 bits.
    Int(i64),
    /// Any other int: two's complement, little-endian, no longer than needed (the payload of `LONG1`).
    BigInt(Vec<u8>),
    /// A float.
    Float(f64),
    /// A str.
    Str(String),
    /// A bytes object.
    Bytes(Vec<u8>),
    /// A bytearray.
    ByteArray(Vec<u8>),
    /// A list.
    List(Vec<Value>),
    /// A tuple.
    Tuple(Vec<Value>),
    /// A dict, in its own order. No key occurs twice.
    Dict(Vec<(Value, Value)>),
    /// A list of frames that is kept in the snapshot's own [`Stacks`](crate::Stacks), since such lists are
    /// shared by many entries and long. Never [`StackId::NONE`]: an empty list is an empty [`Value::List`].
    Stack(StackId),
}

impl Value {
    /// How deep lists, tuples and dicts may lie in one another.
    pub const MAX_DEPTH: usize = 64;

    /// The value as an unsigned 64-bit number, if it is an int in that range.
    ///
    /// ```
    /// use unhand_snapshot::Value;
    /// assert_eq!(Value::Int(7).as_u64(), Some(7));
    /// assert_eq!(Value::Int(-7).as_u64(), None);
    /// assert_eq!(Value::from(u64::MAX).as_u64(), Some(u64::MAX));
    /// ```
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Value::Int(v) => u64::try_from(*v).ok(),
            // A number between i63 and u64 takes nine bytes, the last one zero.
            Value::BigInt(bytes) => match bytes.split_last() {
                Some((0, low)) => Some(u64::from_le_bytes(low.try_into().ok()?)),
                _ => None,
            },
            _ => None,
        }
    }

    /// The value as a signed 64-bit number, if it is an int in that range.
    pub fn as_i64(&self) -> Option<i64> {
        if let Value::Int(v) = self { Some(*v) } else { None }
    }

    /// The text, if it is a str.
    pub fn as_str(&self) -> Option<&str> {
        if let Value::Str(v) = self { Some(v) } else { None }
    }

    /// The truth value, if it is a bool.
    pub fn as_bool(&self) -> Option<bool> {
        if let Value::Bool(v) = self { Some(*v) } else { None }
    }

    /// The number, if it is a float or an int that fits 64 bits.
    #[allow(clippy::cast_precision_loss)] // a ratio, not a size
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Value::Float(v) => Some(*v),
            Value::Int(v) => Some(*v as f64),
            _ => None,
        }
    }

    /// The value under a str key, if this is a dict that has it.
    pub fn get(&self, key: &str) -> Option<&Value> {
        let Value::Dict(pairs) = self else { return None };
        pairs.iter().find(|(k, _)| k.as_str() == Some(key)).map(|(_, v)| v)
    }
}

impl From<u64> for Value {
    fn from(v: u64) -> Value {
        i64::try_from(v).map_or_else(
            |_| {
                let mut bytes = v.to_le_bytes().to_vec();
                bytes.push(0);
                Value::BigInt(bytes)
            },
            Value::Int,
        )
    }
}

impl From<&str> for Value {
    fn from(v: &str) -> Value {
        Value::Str(v.to_owned())
    }
}

/// What an entry has beyond the fields of its struct, and which usual keys it lacks. One empty pointer when there
/// is nothing of the kind, which is nearly always.
///
/// A known key whose value has an unexpected type is kept here too, and the field has its default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Extra(Option<Box<Fields>>);

#[derive(Clone, Debug, Default, PartialEq)]
struct Fields {
    entries: Vec<(String, Value)>,
    /// Bit *i* is set when the *i*-th key of the entry's usual key list was absent, so that it is not invented
    /// when written back.
    absent: u32,
}

impl Extra {
    /// Whether no key is kept here.
    pub fn is_empty(&self) -> bool {
        self.0.as_ref().is_none_or(|f| f.entries.is_empty())
    }

    /// The value under a key.
    pub fn get(&self, key: &str) -> Option<&Value> {
        self.iter().find(|(k, _)| *k == key).map(|(_, v)| v)
    }

    /// The keys and values, in the order of the file.
    pub fn iter(&self) -> impl Iterator<Item = (&str, &Value)> + '_ {
        self.0.iter().flat_map(|f| f.entries.iter().map(|(k, v)| (k.as_str(), v)))
    }

    /// Sets a key.
    pub fn insert(&mut self, key: impl Into<String>, value: Value) {
        let key = key.into();
        let entries = &mut self.0.get_or_insert_default().entries;
        match entries.iter_mut().find(|(k, _)| *k == key) {
            Some(entry) => entry.1 = value,
            None => entries.push((key, value)),
        }
    }

    /// Builds from parts; `entries` has no key twice.
    pub(crate) fn from_parts(entries: Vec<(String, Value)>, absent: u32) -> Extra {
        if entries.is_empty() && absent == 0 {
            return Extra(None);
        }
        Extra(Some(Box::new(Fields { entries, absent })))
    }

    /// Whether the usual key at this place of the entry's key list is absent from the file.
    pub(crate) fn lacks(&self, key_index: usize) -> bool {
        self.0.as_ref().is_some_and(|f| f.absent >> key_index & 1 == 1)
    }
}
