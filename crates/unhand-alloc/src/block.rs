//! Blocks and the arena they live in. A block is one cache line; neighbours are ids, not pointers.

use std::num::NonZeroU32;

/// An opaque number the caller attaches to an allocation, for example an interned call stack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Context(pub NonZeroU32);

impl Context {
    /// `None` for 0.
    pub fn new(number: u32) -> Option<Context> {
        NonZeroU32::new(number).map(Context)
    }
}

/// A block's place in the arena, never 0. Ids are reused after a block is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct BlockId(NonZeroU32);

impl BlockId {
    #[inline]
    pub(crate) fn at(index: usize) -> BlockId {
        let number = u32::try_from(index).ok().and_then(NonZeroU32::new);
        BlockId(number.expect("between 1 and 2^32 blocks"))
    }

    #[inline]
    pub(crate) fn from_raw(raw: u32) -> Option<BlockId> {
        NonZeroU32::new(raw).map(BlockId)
    }

    #[inline]
    pub(crate) fn raw(self) -> u32 {
        self.0.get()
    }

    #[inline]
    fn index(self) -> usize {
        self.0.get() as usize
    }
}

/// The index of one block pool (small or large, of one owner) in the allocator's table.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct PoolIndex(pub(crate) u16);

/// The index of a stream in the allocator's table, in order of first use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct StreamIndex(pub(crate) u32);

/// The index of an expandable segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) struct ExpandableIndex(pub(crate) NonZeroU32);

/// The block is in the arena (not a free slot).
const LIVE: u8 = 1;
/// Handed out and not freed.
const ALLOCATED: u8 = 2;
/// Memory is behind it; only expandable blocks can be without.
const MAPPED: u8 = 4;
/// Freed, but other streams' events are pending, or streams are still recorded on it: see `Pending`.
const PENDING: u8 = 8;

/// One block: a contiguous part of one segment. Aligned, so that no block lies across two cache lines.
#[derive(Clone, Debug)]
#[repr(align(64))]
pub(crate) struct Block {
    pub(crate) address: u64,
    pub(crate) size: u64,
    /// Bytes asked for. Stale once the block is free, as in PyTorch's snapshots.
    pub(crate) requested: u64,
    /// The pool's search counter when the block entered the free set.
    pub(crate) gc_base: u64,
    pub(crate) prev: Option<BlockId>,
    pub(crate) next: Option<BlockId>,
    pub(crate) expandable: Option<ExpandableIndex>,
    pub(crate) stream: StreamIndex,
    /// The segment's number in order of creation (`registration_counter`).
    pub(crate) age: u32,
    pub(crate) context: Option<Context>,
    pub(crate) segment_context: Option<Context>,
    pub(crate) pool: PoolIndex,
    flags: u8,
}

impl Block {
    pub(crate) fn new(address: u64, size: u64, pool: PoolIndex, stream: StreamIndex, age: u32) -> Block {
        Block {
            address,
            size,
            requested: 0,
            gc_base: 0,
            prev: None,
            next: None,
            expandable: None,
            stream,
            age,
            context: None,
            segment_context: None,
            pool,
            flags: LIVE | MAPPED,
        }
    }

    #[inline]
    pub(crate) fn is_split(&self) -> bool {
        self.prev.is_some() || self.next.is_some()
    }

    #[inline]
    pub(crate) fn is_allocated(&self) -> bool {
        self.flags & ALLOCATED != 0
    }

    #[inline]
    pub(crate) fn is_mapped(&self) -> bool {
        self.flags & MAPPED != 0
    }

    /// Streams are recorded on it or events of theirs are pending.
    #[inline]
    pub(crate) fn is_pending(&self) -> bool {
        self.flags & PENDING != 0
    }

    /// Neither handed out nor waiting for other streams: may be merged.
    #[inline]
    pub(crate) fn is_idle(&self) -> bool {
        self.flags & (ALLOCATED | PENDING) == 0
    }

    /// Idle, and memory is behind it: it is in a free set.
    #[inline]
    pub(crate) fn is_idle_and_mapped(&self) -> bool {
        self.flags & (ALLOCATED | PENDING | MAPPED) == MAPPED
    }

    #[inline]
    pub(crate) fn set_allocated(&mut self, on: bool) {
        self.set(ALLOCATED, on);
    }

    #[inline]
    pub(crate) fn set_mapped(&mut self, on: bool) {
        self.set(MAPPED, on);
    }

    #[inline]
    pub(crate) fn set_pending(&mut self, on: bool) {
        self.set(PENDING, on);
    }

    #[inline]
    fn set(&mut self, flag: u8, on: bool) {
        if on { self.flags |= flag } else { self.flags &= !flag }
    }

    #[inline]
    fn is_live(&self) -> bool {
        self.flags & LIVE != 0
    }
}

/// All blocks of one device.
#[derive(Debug)]
pub(crate) struct Arena {
    /// The first place stays empty: an id is an index as it is.
    blocks: Vec<Block>,
    vacant: Vec<BlockId>,
}

impl Default for Arena {
    fn default() -> Self {
        let mut none = Block::new(0, 0, PoolIndex(0), StreamIndex(0), 0);
        none.flags = 0;
        Arena { blocks: vec![none], vacant: Vec::new() }
    }
}

impl Arena {
    #[inline]
    pub(crate) fn insert(&mut self, block: Block) -> BlockId {
        if let Some(id) = self.vacant.pop() {
            self.blocks[id.index()] = block;
            id
        } else {
            let id = BlockId::at(self.blocks.len());
            self.blocks.push(block);
            id
        }
    }

    #[inline]
    pub(crate) fn remove(&mut self, id: BlockId) {
        self.blocks[id.index()].flags = 0;
        self.vacant.push(id);
    }

    /// The block, if the id names one that is there.
    #[inline]
    pub(crate) fn get(&self, id: BlockId) -> Option<&Block> {
        self.blocks.get(id.index()).filter(|block| block.is_live())
    }

    /// All blocks, in no particular order.
    pub(crate) fn iter(&self) -> impl Iterator<Item = (BlockId, &Block)> {
        let all = self.blocks.iter().enumerate();
        all.filter(|(_, block)| block.is_live()).map(|(index, block)| (BlockId::at(index), block))
    }
}

impl std::ops::Index<BlockId> for Arena {
    type Output = Block;

    #[inline]
    fn index(&self, id: BlockId) -> &Block {
        &self.blocks[id.index()]
    }
}

impl std::ops::IndexMut<BlockId> for Arena {
    #[inline]
    fn index_mut(&mut self, id: BlockId) -> &mut Block {
        &mut self.blocks[id.index()]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_fits_one_cache_line() {
        assert_eq!((size_of::<Block>(), align_of::<Block>()), (64, 64));
    }

    #[test]
    fn ids_are_reused_and_dead_ones_found_out() {
        let mut arena = Arena::default();
        let block = || Block::new(0x1000, 512, PoolIndex(0), StreamIndex(0), 0);
        let first = arena.insert(block());
        arena.remove(first);
        assert!(arena.get(first).is_none());
        assert_eq!(arena.insert(block()), first);
        assert_eq!(arena.iter().count(), 1);
    }
}
