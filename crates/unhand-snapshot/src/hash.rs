//! The hash behind the interning tables: a folded multiply, seeded per table so that a file cannot be made to collide.

use std::hash::{BuildHasher, RandomState};

const ODD: u64 = 0x9e37_79b9_7f4a_7c15;

/// A hash function of its own: two seeds hash differently.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seed(u64);

impl Default for Seed {
    fn default() -> Seed {
        // The standard library's keys are random for each process; no other source of randomness is needed.
        Seed(RandomState::new().hash_one(ODD))
    }
}

fn fold(a: u64, b: u64) -> u64 {
    let wide = u128::from(a) * u128::from(b);
    #[allow(clippy::cast_possible_truncation)] // both halves are used
    let (low, high) = (wide as u64, (wide >> 64) as u64);
    low ^ high
}

impl Seed {
    /// Hashes two numbers.
    pub(crate) fn pair(self, a: u64, b: u64) -> u64 {
        fold(a ^ self.0, b ^ ODD).wrapping_add(fold(b ^ self.0.rotate_left(32), ODD))
    }

    /// Hashes bytes.
    pub(crate) fn bytes(self, bytes: &[u8]) -> u64 {
        let (words, rest) = bytes.as_chunks::<8>();
        let mut hash = self.0 ^ (bytes.len() as u64);
        for word in words {
            hash = fold(hash ^ u64::from_le_bytes(*word), self.0 ^ ODD).wrapping_add(ODD);
        }
        let mut last = [0; 8];
        last[..rest.len()].copy_from_slice(rest);
        fold(hash ^ u64::from_le_bytes(last), self.0.rotate_left(17) ^ ODD)
    }
}

/// An open-addressing table of ids, smaller than a `HashMap` since the keys stay where the ids point.
#[derive(Clone, Debug, Default)]
pub(crate) struct IdTable {
    /// `id + 1`, or 0 for a free slot; a power of two long.
    slots: Vec<u32>,
    used: usize,
}

impl IdTable {
    /// The id for which `is_equal` holds among those that were inserted under this hash.
    #[inline]
    pub(crate) fn find(&self, hash: u64, mut is_equal: impl FnMut(u32) -> bool) -> Option<u32> {
        if self.slots.is_empty() {
            return None;
        }
        let mask = self.slots.len() - 1;
        let mut at = slot(hash, mask);
        loop {
            match self.slots[at] {
                0 => return None,
                id if is_equal(id - 1) => return Some(id - 1),
                _ => at = (at + 1) & mask,
            }
        }
    }

    /// Inserts an id that is not in the table. `hash_of` gives the hash of ids inserted before.
    #[inline]
    pub(crate) fn insert(&mut self, hash: u64, id: u32, hash_of: impl Fn(u32) -> u64) {
        if (self.used + 1) * 3 > self.slots.len() * 2 {
            self.grow(hash_of);
        }
        self.place(hash, id);
        self.used += 1;
    }

    fn place(&mut self, hash: u64, id: u32) {
        let mask = self.slots.len() - 1;
        let mut at = slot(hash, mask);
        while self.slots[at] != 0 {
            at = (at + 1) & mask;
        }
        self.slots[at] = id + 1;
    }

    #[cold]
    fn grow(&mut self, hash_of: impl Fn(u32) -> u64) {
        let length = (self.slots.len() * 2).max(16);
        let old = std::mem::replace(&mut self.slots, vec![0; length]);
        for id in old.into_iter().filter(|&id| id != 0) {
            self.place(hash_of(id - 1), id - 1);
        }
    }
}

#[allow(clippy::cast_possible_truncation)] // masked
fn slot(hash: u64, mask: usize) -> usize {
    (hash ^ hash >> 32) as usize & mask
}
