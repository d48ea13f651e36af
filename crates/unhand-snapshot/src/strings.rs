//! The texts of one snapshot, each kept once.

use std::fmt;

use crate::StringId;
use crate::hash::{IdTable, Seed};

/// The interned texts of one snapshot, in one buffer.
///
/// ```
/// use unhand_snapshot::Strings;
/// let mut strings = Strings::default();
/// let id = strings.intern("forward");
/// assert_eq!(strings.intern("forward"), id);
/// assert_eq!(strings.get(id), "forward");
/// ```
#[derive(Clone)]
pub struct Strings {
    text: String,
    /// Where each text ends; it begins where the one before ends.
    ends: Vec<usize>,
    table: IdTable,
    seed: Seed,
}

impl Default for Strings {
    fn default() -> Strings {
        let mut strings = Strings {
            text: String::new(),
            ends: Vec::new(),
            table: IdTable::default(),
            seed: Seed::default(),
        };
        strings.intern("");
        strings
    }
}

impl Strings {
    /// The text of an id; empty for an id that was not given out by this table.
    pub fn get(&self, id: StringId) -> &str {
        let index = id.0 as usize;
        let Some(&end) = self.ends.get(index) else { return "" };
        let start = if index == 0 { 0 } else { self.ends[index - 1] };
        &self.text[start..end]
    }

    /// The id of a text, new or known.
    ///
    /// # Panics
    ///
    /// After 2³² − 1 different texts.
    pub fn intern(&mut self, text: &str) -> StringId {
        let hash = self.seed.bytes(text.as_bytes());
        if let Some(id) = self.table.find(hash, |id| self.get(StringId(id)) == text) {
            return StringId(id);
        }
        let id =
            u32::try_from(self.ends.len()).ok().filter(|&id| id < u32::MAX).expect("fewer than 2^32 texts");
        self.text.push_str(text);
        self.ends.push(self.text.len());
        self.table.insert(hash, id);
        StringId(id)
    }

    /// The id of a text that is already here.
    pub fn find(&self, text: &str) -> Option<StringId> {
        let hash = self.seed.bytes(text.as_bytes());
        self.table.find(hash, |id| self.get(StringId(id)) == text).map(StringId)
    }

    /// How many different texts there are, the empty one included.
    pub fn len(&self) -> usize {
        self.ends.len()
    }

    /// Never: the empty text is always there.
    pub fn is_empty(&self) -> bool {
        self.ends.is_empty()
    }
}

impl fmt::Debug for Strings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Strings({} texts, {} bytes)", self.ends.len(), self.text.len())
    }
}
