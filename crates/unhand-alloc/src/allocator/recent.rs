//! A shortcut for the most common sequence of all: the newest block is freed, and the same size asked for again.
//!
//! Freeing the block that was handed out last undoes its allocation: it merges with the remainder it was cut
//! from, and the free sets are what they were before. The next search for the same rounded size, on the same
//! stream and pool, then finds that very block and cuts it the same way. So such a block is only *marked* free;
//! statistics and history are written as ever, merging and cutting are left out. The shortcut stands on:
//!
//! * The block came out of a free set ([`note_hand_out`](DeviceAllocator::note_hand_out)), so a search found it
//!   among the free blocks of that moment; what it did not merge with then it cannot merge with now.
//! * No free set has changed since: every insertion and removal forgets the note, and so does whatever changes
//!   the way blocks are chosen and cut (settings, limits, `no_split`). A neighbour cannot come free or be
//!   mapped without an insertion.
//! * Choosing does not count: garbage collection is off, and the merged block has the age of the block it was
//!   cut from (not in the release whose ages belong to blocks, [`Profile::age_per_block`](crate::Profile)).
//!
//! Everything else that changes the structure calls [`settle`](DeviceAllocator::settle) first, which does what
//! was left out. Readers see the merged block through [`logical`](DeviceAllocator::logical).

use super::allocate::Search;
use super::{Allocation, DeviceAllocator, Traced};
use crate::block::{Block, BlockId, Context, PoolIndex, StreamIndex};
use crate::device::Device;
use crate::history::Action;
use crate::size::PoolKind;

/// The block that was handed out last, if the shortcut holds for it.
#[derive(Debug)]
pub(super) struct Recent {
    block: Option<BlockId>,
    /// It has been freed again, and is not merged yet.
    is_free: bool,
    /// The rounded size it was searched with.
    size: u64,
    stream: StreamIndex,
    pool: PoolIndex,
    kind: PoolKind,
    expandable: bool,
    /// What was left over when it was cut off: its free right neighbour.
    rest: Option<BlockId>,
    /// What its free adds to *inactive split*; taking it back subtracts the same.
    split_change: i64,
    split_bytes_change: i64,
}

impl Default for Recent {
    fn default() -> Self {
        Recent {
            block: None,
            is_free: false,
            size: 0,
            stream: StreamIndex(0),
            pool: super::SMALL,
            kind: PoolKind::Small,
            expandable: false,
            rest: None,
            split_change: 0,
            split_bytes_change: 0,
        }
    }
}

impl Recent {
    /// For use where the free sets change: the note does not hold any longer. A free block is settled before.
    #[inline]
    pub(super) fn forget(&mut self) {
        debug_assert!(!self.is_free, "a block that is only marked free is settled first");
        self.block = None;
    }
}

impl<D: Device> DeviceAllocator<D> {
    /// Notes the block that a search took out of its free set and [`hand_out`](Self::hand_out) has handed out.
    #[inline]
    pub(super) fn note_hand_out(&mut self, id: BlockId, search: &Search, rest: Option<BlockId>) {
        if self.collects || self.profile.age_per_block {
            return;
        }
        let block = &self.arena[id];
        let size = block.size.cast_signed();
        let (mut split_change, mut split_bytes_change) = (0, 0);
        if block.expandable.is_none() {
            if let Some(rest) = rest {
                let rest = &self.arena[rest];
                if block.prev.is_some() || rest.next.is_some() {
                    // Part of a segment before and after: the free block only grows.
                    split_bytes_change = size;
                } else {
                    (split_change, split_bytes_change) = (-1, -rest.size.cast_signed());
                }
            } else if block.is_split() {
                (split_change, split_bytes_change) = (1, size);
            }
        }
        self.recent = Recent {
            block: Some(id),
            is_free: false,
            size: search.size,
            stream: search.stream,
            pool: search.pool,
            kind: self.pool(search.pool).kind,
            expandable: search.expandable,
            rest,
            split_change,
            split_bytes_change,
        };
    }

    /// Whether this is the block handed out last, so that [`free_recent`](Self::free_recent) will do.
    #[inline]
    pub(super) fn is_recent(&self, id: BlockId) -> bool {
        self.recent.block == Some(id)
    }

    /// Frees the noted block without merging it. The caller has made sure that it is handed out and that no
    /// stream is recorded on it.
    #[inline]
    pub(super) fn free_recent(&mut self, id: BlockId, context: Option<Context>) {
        let block = &mut self.arena[id];
        block.set_allocated(false);
        let (address, size, requested) = (block.address, block.size, block.requested);
        let context = context.or(block.context.take());
        let recent = &mut self.recent;
        recent.is_free = true;
        let traced = Traced { stream: recent.stream, pool: recent.pool, context };
        let kind = recent.kind;
        self.counters.block_freed_at_once(kind, size, requested);
        self.counters.split_change(kind, recent.split_change, recent.split_bytes_change);
        if self.is_oversize(size) {
            self.counters.oversize_allocations.decrease(1);
        }
        self.trace(Action::FreeRequested, address, requested, &traced);
        self.trace(Action::FreeCompleted, address, requested, &traced);
    }

    /// Hands the noted block out again, if it is free and a search would find it.
    #[inline]
    pub(super) fn take_recent(&mut self, search: &Search, requested: u64) -> Option<Allocation> {
        let recent = &mut self.recent;
        let is_same = recent.size == search.size
            && recent.stream == search.stream
            && recent.pool == search.pool
            && recent.expandable == search.expandable;
        if !(recent.is_free && is_same) {
            return None;
        }
        let id = recent.block?;
        recent.is_free = false;
        let (kind, rest) = (recent.kind, recent.rest);
        self.counters.split_change(kind, -recent.split_change, -recent.split_bytes_change);
        let block = &mut self.arena[id];
        block.set_allocated(true);
        block.context = search.context;
        let (address, size) = (block.address, block.size);
        let last_requested = std::mem::replace(&mut block.requested, requested);
        if let Some(rest) = rest {
            // A merged block keeps what the freed one said; cut again, that is the remainder's.
            let segment_context = block.segment_context.take();
            let rest = &mut self.arena[rest];
            rest.requested = last_requested;
            rest.segment_context = segment_context;
        }
        self.counters.block_allocated(kind, size, requested);
        if self.is_oversize(size) {
            self.counters.oversize_allocations.increase(1);
        }
        let traced = Traced { stream: search.stream, pool: search.pool, context: search.context };
        self.trace(Action::Alloc, address, requested, &traced);
        Some(Allocation { address, block: Some(id) })
    }

    /// Merges the noted block if it is free, and forgets it: what the structure looks like is true again.
    #[inline]
    pub(super) fn settle(&mut self) {
        if self.recent.is_free {
            self.settle_free();
        }
        self.recent.block = None;
    }

    fn settle_free(&mut self) {
        self.recent.is_free = false;
        let Some(id) = self.recent.block else { return };
        self.forget_address(id);
        if let Some(rest) = self.recent.rest {
            let merged = self.try_merge(id, rest);
            debug_assert!(merged.is_some(), "the remainder is free");
        }
        self.insert_free(id);
    }

    /// A block as it is to be seen: `None` for one that is merged already as far as anyone may know, and with
    /// the remainder's bytes and right neighbour for the block it is merged with.
    pub(super) fn logical(&self, id: BlockId) -> Option<Logical<'_>> {
        let block = &self.arena[id];
        let mut logical = Logical { block, size: block.size, next: block.next };
        if self.recent.is_free {
            if self.recent.rest == Some(id) {
                return None;
            }
            if self.is_recent(id)
                && let Some(rest) = self.recent.rest
            {
                logical.size += self.arena[rest].size;
                logical.next = self.arena[rest].next;
            }
        }
        Some(logical)
    }

    /// Whether a block is free, but neither merged nor listed yet.
    pub(super) fn is_unsettled(&self, id: BlockId) -> bool {
        self.recent.is_free && self.is_recent(id)
    }
}

/// See [`DeviceAllocator::logical`].
#[derive(Clone, Copy, Debug)]
pub(super) struct Logical<'a> {
    pub(super) block: &'a Block,
    pub(super) size: u64,
    pub(super) next: Option<BlockId>,
}
