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
///
/// Half of each hash is kept beside the id: nearly all comparisons of different keys end there, without a look at the
/// keys (a cache miss each), and the table grows without one.
#[derive(Clone, Debug, Default)]
pub(crate) struct IdTable {
    /// Half a hash above `id + 1`, or 0 for a free slot; a power of two long.
    slots: Vec<u64>,
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
        let mut at = place(hash) & mask;
        loop {
            let slot = self.slots[at];
            if slot == 0 {
                return None;
            }
            if place(slot) == place(hash) && is_equal(id(slot)) {
                return Some(id(slot));
            }
            at = (at + 1) & mask;
        }
    }

    /// Inserts an id that is not in the table; below 2³² − 1.
    #[inline]
    pub(crate) fn insert(&mut self, hash: u64, id: u32) {
        if (self.used + 1) * 3 > self.slots.len() * 2 {
            self.grow();
        }
        self.put(hash >> 32 << 32 | u64::from(id + 1));
        self.used += 1;
    }

    fn put(&mut self, slot: u64) {
        let mask = self.slots.len() - 1;
        let mut at = place(slot) & mask;
        while self.slots[at] != 0 {
            at = (at + 1) & mask;
        }
        self.slots[at] = slot;
    }

    #[cold]
    fn grow(&mut self) {
        let length = (self.slots.len() * 2).max(16);
        let old = std::mem::replace(&mut self.slots, vec![0; length]);
        for slot in old.into_iter().filter(|&slot| slot != 0) {
            self.put(slot);
        }
    }
}

/// Where a hash would like to be: its upper half.
#[allow(clippy::cast_possible_truncation)] // 32 bits
fn place(hash: u64) -> usize {
    (hash >> 32) as usize
}

#[allow(clippy::cast_possible_truncation)] // that is how it was put in
fn id(slot: u64) -> u32 {
    slot as u32 - 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn finds_what_was_inserted_among_equal_hashes() {
        // Long chains are slow under Miri.
        let n_ids = if cfg!(miri) { 60 } else { 1000 };
        let mut table = IdTable::default();
        assert_eq!(table.find(7, |_| true), None);
        for id in 0..n_ids {
            table.insert(u64::from(id % 3) << 40, id);
        }
        for id in 0..n_ids {
            assert_eq!(table.find(u64::from(id % 3) << 40, |other| other == id), Some(id));
        }
        assert_eq!(table.find(5 << 40, |_| true), None);
    }

    #[test]
    fn length_and_every_byte_count() {
        let seed = Seed::default();
        let texts: [&[u8]; 6] = [b"", b"\0", b"\0\0", b"12345678", b"12345678\0", b"123456789"];
        let mut hashes: Vec<_> = texts.iter().map(|text| seed.bytes(text)).collect();
        hashes.sort_unstable();
        hashes.dedup();
        assert_eq!(hashes.len(), texts.len());
        assert_ne!(seed.pair(1, 2), seed.pair(2, 1));
    }
}
