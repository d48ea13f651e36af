//! Free blocks in PyTorch's exact order (stream, size, [age,] address), in constant time for common sizes.
//!
//! Each stream has bins by size: exact multiples of 512 bytes up to 32 KiB, then 64 bins for every power of
//! two. A bin keeps its blocks sorted, bins are in order of size, and a two-level bitmap finds the next bin
//! that is not empty, so "the smallest block that fits" is two bit scans and a look at one short sorted list.
//! That is the order of a tree over all blocks (`BlockComparatorSize`), without the tree. A bin that grows
//! long, as when thousands of blocks have one size, turns into a tree of its own.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use crate::block::{BlockId, StreamIndex};
use crate::size::MIN_BLOCK_SIZE;

/// Bits of a key's first word that hold the age; the size, in units of 512 bytes, sits above them.
const AGE_BITS: u32 = 28;
/// The largest block the order can hold: 32 TiB.
pub(crate) const MAX_BLOCK_BYTES: u64 = (1 << (64 - AGE_BITS)) * MIN_BLOCK_SIZE - MIN_BLOCK_SIZE;
/// log2 of the bins per power of two.
const SUB_BITS: u32 = 6;
/// A sorted list longer than this becomes a tree …; moving some kilobytes is quicker than walking a tree that
/// is not in the cache. Tests get to trees sooner.
const LIST_MOST: usize = if cfg!(test) { 48 } else { 384 };
/// … and a tree shorter than this a list again.
const TREE_LEAST: usize = LIST_MOST / 2;
/// In a list as short as this, walking beats a binary search.
const SHORT: usize = 4;
/// Words of 64 bins; [`MAX_BLOCK_BYTES`] is in the last.
const WORDS: usize = 32;

/// A free block's place in the order. The stream is not part of it: each stream has its own bins.
#[derive(Clone, Copy, Debug)]
pub(crate) struct FreeKey {
    size_and_age: u64,
    address: u64,
    id: BlockId,
}

impl PartialEq for FreeKey {
    fn eq(&self, other: &FreeKey) -> bool {
        self.order() == other.order()
    }
}

impl Eq for FreeKey {}

impl PartialOrd for FreeKey {
    fn partial_cmp(&self, other: &FreeKey) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for FreeKey {
    fn cmp(&self, other: &FreeKey) -> Ordering {
        self.order().cmp(&other.order())
    }
}

impl FreeKey {
    /// `age` is 0 for releases that break ties by address alone.
    #[inline]
    pub(crate) fn new(size: u64, age: u32, address: u64, id: BlockId) -> FreeKey {
        debug_assert!(size <= MAX_BLOCK_BYTES);
        let age = u64::from(age) & ((1 << AGE_BITS) - 1);
        FreeKey { size_and_age: (size / MIN_BLOCK_SIZE) << AGE_BITS | age, address, id }
    }

    /// One number to compare; addresses are unique, so the id needs no part in it.
    #[inline]
    fn order(self) -> u128 {
        u128::from(self.size_and_age) << 64 | u128::from(self.address)
    }

    #[inline]
    pub(crate) fn size(self) -> u64 {
        (self.size_and_age >> AGE_BITS) * MIN_BLOCK_SIZE
    }

    #[inline]
    pub(crate) fn id(self) -> BlockId {
        self.id
    }

    #[inline]
    fn bin(self) -> usize {
        bin_of(self.size_and_age >> AGE_BITS)
    }
}

/// The bin of a size in units of 512 bytes: exact below 64 units, then 64 bins per power of two.
#[inline]
#[expect(clippy::cast_possible_truncation, reason = "a bin is below 2048")]
fn bin_of(units: u64) -> usize {
    let log2 = (units | 1).ilog2();
    if log2 < SUB_BITS {
        return units as usize;
    }
    let octave = log2 - SUB_BITS;
    (((u64::from(octave) + 1) << SUB_BITS) + ((units >> octave) - (1 << SUB_BITS))) as usize
}

/// The blocks of one bin.
#[derive(Debug)]
enum Bin {
    /// Sorted from last to first, so that taking the first is a pop.
    List(Vec<FreeKey>),
    Tree(BTreeSet<FreeKey>),
}

/// Where in a sorted list `order` belongs: in front of all that come before it.
#[inline]
fn position(list: &[FreeKey], order: u128) -> usize {
    list.partition_point(|other| other.order() > order)
}

#[cold]
fn first_of(tree: &BTreeSet<FreeKey>) -> Option<FreeKey> {
    tree.first().copied()
}

#[cold]
fn first_from(tree: &BTreeSet<FreeKey>, size_and_age: u64) -> Option<FreeKey> {
    let from = FreeKey { size_and_age, address: 0, id: BlockId::at(1) };
    tree.range(from..).next().copied()
}

impl Bin {
    /// Returns whether the bin was empty.
    #[inline]
    fn insert(&mut self, key: FreeKey) -> bool {
        let Bin::List(list) = self else {
            self.insert_into_tree(key);
            return false;
        };
        let len = list.len();
        if len <= SHORT {
            list.push(key);
            let mut at = len;
            while at > 0 && list[at - 1].order() < key.order() {
                list[at] = list[at - 1];
                at -= 1;
            }
            list[at] = key;
            return len == 0;
        }
        list.insert(position(list, key.order()), key);
        if len >= LIST_MOST {
            self.turn_into_tree();
        }
        false
    }

    #[cold]
    fn insert_into_tree(&mut self, key: FreeKey) {
        if let Bin::Tree(tree) = self {
            tree.insert(key);
        }
    }

    #[cold]
    fn turn_into_tree(&mut self) {
        if let Bin::List(list) = self {
            *self = Bin::Tree(std::mem::take(list).into_iter().collect());
        }
    }

    /// Returns whether the key was there, and whether the bin is empty now.
    #[inline]
    fn remove(&mut self, key: FreeKey) -> (bool, bool) {
        let Bin::List(list) = self else { return (self.remove_from_tree(key), false) };
        // Addresses are unique.
        let is_it = |other: &FreeKey| other.address == key.address;
        let found = if list.len() <= SHORT {
            list.iter().rposition(is_it)
        } else {
            Some(position(list, key.order())).filter(|at| list.get(*at).is_some_and(is_it))
        };
        if let Some(at) = found {
            if at + 1 == list.len() {
                list.pop();
            } else {
                list.remove(at);
            }
        }
        (found.is_some(), list.is_empty())
    }

    #[cold]
    fn remove_from_tree(&mut self, key: FreeKey) -> bool {
        let Bin::Tree(tree) = self else { return false };
        let found = tree.remove(&key);
        if tree.len() < TREE_LEAST {
            *self = Bin::List(std::mem::take(tree).into_iter().rev().collect());
        }
        found
    }

    #[inline]
    fn first(&self) -> Option<FreeKey> {
        match self {
            Bin::List(list) => list.last().copied(),
            Bin::Tree(tree) => first_of(tree),
        }
    }

    fn last(&self) -> Option<FreeKey> {
        match self {
            Bin::List(list) => list.first().copied(),
            Bin::Tree(tree) => tree.last().copied(),
        }
    }

    /// The first block of at least `size_and_age`.
    #[inline]
    fn at_least(&self, size_and_age: u64) -> Option<FreeKey> {
        match self {
            Bin::List(list) if list.len() <= SHORT => {
                list.iter().rev().find(|other| other.size_and_age >= size_and_age).copied()
            }
            Bin::List(list) => {
                let at = list.partition_point(|other| other.size_and_age >= size_and_age);
                at.checked_sub(1).map(|at| list[at])
            }
            Bin::Tree(tree) => first_from(tree, size_and_age),
        }
    }

    fn after(&self, key: FreeKey) -> Option<FreeKey> {
        match self {
            Bin::List(list) => {
                let at = position(list, key.order());
                at.checked_sub(1).map(|at| list[at])
            }
            Bin::Tree(tree) => {
                tree.range((std::ops::Bound::Excluded(key), std::ops::Bound::Unbounded)).next().copied()
            }
        }
    }

    fn before(&self, key: FreeKey) -> Option<FreeKey> {
        match self {
            Bin::List(list) => {
                let at = list.partition_point(|other| other.order() >= key.order());
                list.get(at).copied()
            }
            Bin::Tree(tree) => tree.range(..key).next_back().copied(),
        }
    }

    fn push_all(&self, into: &mut Vec<FreeKey>) {
        match self {
            Bin::List(list) => into.extend(list.iter().rev()),
            Bin::Tree(tree) => into.extend(tree),
        }
    }
}

/// The free blocks of one stream.
#[derive(Debug, Default)]
struct StreamBins {
    bins: Vec<Bin>,
    /// One bit per bin: not empty.
    occupied: [u64; WORDS],
    /// One bit per word of `occupied`: not zero.
    summary: u32,
}

impl StreamBins {
    #[inline]
    fn insert(&mut self, key: FreeKey) {
        let bin = key.bin();
        if bin >= self.bins.len() {
            self.grow(bin);
        }
        if self.bins[bin].insert(key) {
            self.occupied[bin / 64 % WORDS] |= 1 << (bin % 64);
            self.summary |= 1 << (bin / 64 % WORDS);
        }
    }

    #[cold]
    fn grow(&mut self, bin: usize) {
        self.bins.resize_with((bin + 1).next_multiple_of(64), || Bin::List(Vec::new()));
    }

    #[inline]
    fn remove(&mut self, key: FreeKey) -> bool {
        let bin = key.bin();
        let Some(blocks) = self.bins.get_mut(bin) else { return false };
        let (found, empty) = blocks.remove(key);
        if empty {
            self.mark_empty(bin);
        }
        found
    }

    #[inline]
    fn mark_empty(&mut self, bin: usize) {
        let word = &mut self.occupied[bin / 64 % WORDS];
        *word &= !(1 << (bin % 64));
        if *word == 0 {
            self.summary &= !(1 << (bin / 64 % WORDS));
        }
    }

    /// Removes a key that was found in `bin`.
    #[inline]
    fn take(&mut self, bin: usize, key: FreeKey) {
        // The block that fits best is most often the first of its bin.
        if let Bin::List(list) = &mut self.bins[bin]
            && list.last().is_some_and(|first| first.order() == key.order())
        {
            list.pop();
            if list.is_empty() {
                self.mark_empty(bin);
            }
        } else {
            self.remove(key);
        }
    }

    /// The first bin from `bin` on that is not empty.
    #[inline]
    fn occupied_from(&self, bin: usize) -> Option<usize> {
        let word = bin / 64 % WORDS;
        let here = self.occupied[word] & (u64::MAX << (bin % 64));
        if here != 0 {
            return Some(word * 64 + here.trailing_zeros() as usize);
        }
        // Two shifts, for there may be 32 words to leave out.
        let later = self.summary & (u32::MAX << word << 1);
        if later == 0 {
            return None;
        }
        let word = later.trailing_zeros() as usize % WORDS;
        Some(word * 64 + self.occupied[word].trailing_zeros() as usize)
    }

    /// The last bin before `bin` that is not empty.
    fn occupied_before(&self, bin: usize) -> Option<usize> {
        let bin = bin.min(self.bins.len());
        let (word, bit) = (bin / 64, bin % 64);
        let here = self.occupied.get(word).map_or(0, |bits| bits & !(u64::MAX << bit));
        if here != 0 {
            return Some(word * 64 + 63 - here.leading_zeros() as usize);
        }
        let earlier = if word < WORDS { self.summary & !(u32::MAX << word) } else { self.summary };
        if earlier == 0 {
            return None;
        }
        let word = 31 - earlier.leading_zeros() as usize;
        Some(word * 64 + 63 - self.occupied[word].leading_zeros() as usize)
    }

    /// The first block of at least `size` bytes, and its bin.
    #[inline]
    fn at_least(&self, size: u64) -> Option<(usize, FreeKey)> {
        let units = size.div_ceil(MIN_BLOCK_SIZE);
        let bin = bin_of(units);
        let mut found = self.occupied_from(bin)?;
        if found == bin && bin >= 1 << SUB_BITS {
            // A bin above 32 KiB holds several sizes: those below the request come first.
            if let Some(key) = self.bins[bin].at_least(units << AGE_BITS) {
                return Some((bin, key));
            }
            found = self.occupied_from(bin + 1)?;
        }
        Some((found, self.bins[found].first()?))
    }
}

/// The free blocks of one pool.
#[derive(Debug, Default)]
pub(crate) struct FreeSet {
    streams: Vec<Option<Box<StreamBins>>>,
    len: usize,
}

impl FreeSet {
    #[inline]
    fn stream(&self, stream: StreamIndex) -> Option<&StreamBins> {
        self.streams.get(stream.0 as usize)?.as_deref()
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    #[inline]
    pub(crate) fn insert(&mut self, stream: StreamIndex, key: FreeKey) {
        let index = stream.0 as usize;
        if index >= self.streams.len() {
            self.streams.resize_with(index + 1, || None);
        }
        self.streams[index].get_or_insert_default().insert(key);
        self.len += 1;
    }

    /// Returns whether the block was there.
    #[inline]
    pub(crate) fn remove(&mut self, stream: StreamIndex, key: FreeKey) -> bool {
        let bins = self.streams.get_mut(stream.0 as usize).and_then(Option::as_deref_mut);
        let found = bins.is_some_and(|bins| bins.remove(key));
        self.len -= usize::from(found);
        found
    }

    /// The first block of `stream` with at least `size` bytes (`std::set::lower_bound` of the search key).
    #[inline]
    pub(crate) fn at_least(&self, stream: StreamIndex, size: u64) -> Option<FreeKey> {
        self.stream(stream)?.at_least(size).map(|(_, key)| key)
    }

    /// Takes the block that [`at_least`](FreeSet::at_least) finds, if `accept` does.
    #[inline]
    pub(crate) fn take_at_least(
        &mut self,
        stream: StreamIndex,
        size: u64,
        accept: impl FnOnce(FreeKey) -> bool,
    ) -> Option<FreeKey> {
        let bins = self.streams.get_mut(stream.0 as usize)?.as_deref_mut()?;
        let (bin, key) = bins.at_least(size)?;
        if !accept(key) {
            return None;
        }
        bins.take(bin, key);
        self.len -= 1;
        Some(key)
    }

    /// The next block of the same stream.
    pub(crate) fn after(&self, stream: StreamIndex, key: FreeKey) -> Option<FreeKey> {
        let bins = self.stream(stream)?;
        let bin = key.bin();
        let here = bins.bins.get(bin).and_then(|blocks| blocks.after(key));
        here.or_else(|| bins.bins[bins.occupied_from(bin + 1)?].first())
    }

    /// The block before `key` of the same stream.
    pub(crate) fn before(&self, stream: StreamIndex, key: FreeKey) -> Option<FreeKey> {
        let bins = self.stream(stream)?;
        let bin = key.bin();
        let here = bins.bins.get(bin).and_then(|blocks| blocks.before(key));
        here.or_else(|| bins.bins[bins.occupied_before(bin)?].last())
    }

    /// The last block of a stream.
    pub(crate) fn last(&self, stream: StreamIndex) -> Option<FreeKey> {
        let bins = self.stream(stream)?;
        bins.bins[bins.occupied_before(bins.bins.len())?].last()
    }

    /// All blocks of a stream, in order.
    pub(crate) fn of_stream(&self, stream: StreamIndex) -> Vec<FreeKey> {
        let mut keys = Vec::new();
        if let Some(bins) = self.stream(stream) {
            let mut bin = 0;
            while let Some(found) = bins.occupied_from(bin) {
                bins.bins[found].push_all(&mut keys);
                bin = found + 1;
            }
        }
        keys
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const STREAM: StreamIndex = StreamIndex(0);

    #[test]
    fn bins_are_monotonic_in_size_and_fit_the_summary() {
        let mut last = 0;
        for units in
            (0..100_000u64).chain((17..36).flat_map(|bit| [(1 << bit) - 1, 1 << bit, (1 << bit) + 1]))
        {
            let bin = bin_of(units);
            assert!(bin >= last || units < 100_000, "{units}");
            last = bin;
        }
        assert!(bin_of(MAX_BLOCK_BYTES / MIN_BLOCK_SIZE) < 64 * WORDS);
    }

    #[derive(Clone, Debug)]
    enum Step {
        Insert { units: u64, age: u32, address: u64 },
        RemoveNth(usize),
        Ask(u64),
        Take(u64),
    }

    fn step() -> impl Strategy<Value = Step> {
        let units = prop_oneof![1..80u64, 1..5000u64, Just(7u64), 1..(1u64 << 30)];
        prop_oneof![
            4 => (units.clone(), 0..3u32, 0..4000u64)
                .prop_map(|(units, age, address)| Step::Insert { units, age, address }),
            2 => (0..500usize).prop_map(Step::RemoveNth),
            2 => units.clone().prop_map(Step::Ask),
            1 => units.prop_map(Step::Take),
        ]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]
        #[test]
        fn prop_same_order_as_one_tree(steps in prop::collection::vec(step(), 1..600)) {
            let mut set = FreeSet::default();
            let mut model: BTreeSet<FreeKey> = BTreeSet::new();
            for (number, step) in steps.into_iter().enumerate() {
                match step {
                    Step::Insert { units, age, address } => {
                        // No two blocks are at one address.
                        let address = (address * 1024 + number as u64) * 512;
                        let key = FreeKey::new(units * 512, age, address, BlockId::at(number + 1));
                        set.insert(STREAM, key);
                        model.insert(key);
                    }
                    Step::RemoveNth(nth) => {
                        if let Some(key) = model.iter().nth(nth).copied() {
                            model.remove(&key);
                            prop_assert!(set.remove(STREAM, key));
                            prop_assert!(!set.remove(STREAM, key));
                        }
                    }
                    Step::Take(units) => {
                        let from = FreeKey::new(units * 512, 0, 0, BlockId::at(1));
                        let expected = model.range(from..).next().copied();
                        prop_assert_eq!(set.take_at_least(STREAM, units * 512, |_| false), None);
                        prop_assert_eq!(set.take_at_least(STREAM, units * 512, |_| true), expected);
                        expected.map(|key| model.remove(&key));
                    }
                    Step::Ask(units) => {
                        let from = FreeKey::new(units * 512, 0, 0, BlockId::at(1));
                        let expected = model.range(from..).next().copied();
                        prop_assert_eq!(set.at_least(STREAM, units * 512), expected);
                        if let Some(key) = expected {
                            let after = model.range((std::ops::Bound::Excluded(key), std::ops::Bound::Unbounded));
                            prop_assert_eq!(set.after(STREAM, key), after.clone().next().copied());
                            prop_assert_eq!(set.before(STREAM, key), model.range(..key).next_back().copied());
                        }
                    }
                }
                prop_assert_eq!(set.len(), model.len());
            }
            prop_assert_eq!(set.last(STREAM), model.last().copied());
            prop_assert_eq!(set.of_stream(STREAM), model.into_iter().collect::<Vec<_>>());
        }
    }
}
