//! Builds an allocator's state from a description of segments, for a replay that begins in the middle.

use std::collections::BTreeMap;

use super::DeviceAllocator;
use super::inspect::BlockState;
use crate::block::{Block, BlockId, Context, PoolIndex};
use crate::device::{Device, StreamId};
use crate::error::AllocError;
use crate::pool::{PoolId, PoolOptions};
use crate::size::{MIN_BLOCK_SIZE, PoolKind, SMALL_BUFFER};
use crate::stats::Kind;

/// A block to restore; sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RestoreBlock {
    /// Bytes, a multiple of 512.
    pub size: u64,
    /// Bytes asked for.
    pub requested_size: u64,
    /// Waiting blocks are restored as handed out: freeing them again lets them come free.
    pub state: BlockState,
    /// The context of the allocation.
    pub context: Option<Context>,
}

/// A segment, or a contiguous mapped range of an expandable segment, to restore.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RestoreSegment {
    /// First byte.
    pub address: u64,
    /// The stream it serves.
    pub stream: StreamId,
    /// Small or large.
    pub kind: PoolKind,
    /// The pool it belongs to; made, with one hold, if it does not exist.
    pub pool_id: PoolId,
    /// Whether it is part of an expandable segment.
    pub is_expandable: bool,
    /// Its blocks, lowest address first, without gaps.
    pub blocks: Vec<RestoreBlock>,
}

impl RestoreSegment {
    fn bytes(&self) -> u64 {
        self.blocks.iter().map(|block| block.size).sum()
    }
}

impl<D: Device> DeviceAllocator<D> {
    /// Puts segments and blocks into an allocator that holds nothing yet. The device adopts the memory
    /// ([`Device::adopt`]); statistics count everything as allocated now.
    ///
    /// Where an expandable segment began and how much it reserved is not part of a snapshot: the lowest mapped
    /// address is taken, with the usual reservation behind it.
    ///
    /// # Errors
    /// [`AllocError::BadState`] when the allocator is not empty, sizes are odd or segments overlap.
    pub fn restore(&mut self, segments: &[RestoreSegment]) -> Result<(), AllocError> {
        self.settle();
        if self.arena.iter().next().is_some() {
            return Err(AllocError::BadState("the allocator already holds memory".into()));
        }
        let mut sorted: Vec<&RestoreSegment> =
            segments.iter().filter(|segment| !segment.blocks.is_empty()).collect();
        sorted.sort_by_key(|segment| segment.address);
        for pair in sorted.windows(2) {
            if pair[0].address.saturating_add(pair[0].bytes()) > pair[1].address {
                return Err(AllocError::BadState(format!("segments overlap at {:#x}", pair[1].address)));
            }
        }
        for segment in &sorted {
            let odd = segment.blocks.iter().any(|block| block.size == 0 || block.size % MIN_BLOCK_SIZE != 0);
            if odd {
                return Err(AllocError::BadState(format!("odd block sizes at {:#x}", segment.address)));
            }
        }
        let mut ranges: BTreeMap<(PoolIndex, StreamId), Vec<&RestoreSegment>> = BTreeMap::new();
        for segment in sorted {
            let pool = self.pool_to_restore(segment)?;
            if segment.is_expandable {
                ranges.entry((pool, segment.stream)).or_default().push(segment);
            } else {
                self.device.adopt(segment.address, segment.bytes())?;
                self.restore_plain(pool, segment);
            }
        }
        for ((pool, stream), ranges) in ranges {
            self.restore_expandable(pool, stream, &ranges)?;
        }
        Ok(())
    }

    fn pool_to_restore(&mut self, segment: &RestoreSegment) -> Result<PoolIndex, AllocError> {
        if segment.pool_id.is_default() {
            return Ok(if segment.kind == PoolKind::Small { super::SMALL } else { super::LARGE });
        }
        if !self.private.contains_key(&segment.pool_id) {
            self.create_pool(segment.pool_id, PoolOptions::default())?;
        }
        Ok(self.private[&segment.pool_id].pool(segment.kind))
    }

    fn restore_plain(&mut self, pool: PoolIndex, segment: &RestoreSegment) {
        let bytes = segment.bytes();
        let stream = self.streams.index(segment.stream);
        let age = self.take_age();
        let whole = self.arena.insert(Block::new(segment.address, bytes, pool, stream, age));
        self.total += bytes;
        self.counters.increase(segment.kind, Kind::Segment, 1);
        self.counters.num_device_alloc += 1;
        self.count_reserved(pool, bytes.cast_signed());
        if let Some(private) = self.private.get_mut(&segment.pool_id) {
            private.device_allocs += 1;
        }
        if self.is_oversize(bytes) {
            self.counters.oversize_segments.increase(1);
        }
        self.restore_blocks(whole, &segment.blocks);
    }

    /// Cuts a mapped, free, unlisted block into the given blocks.
    fn restore_blocks(&mut self, whole: BlockId, blocks: &[RestoreBlock]) {
        let rest = whole;
        for (number, block) in blocks.iter().enumerate() {
            let id = if number + 1 == blocks.len() {
                rest
            } else {
                let address = self.arena[rest].address;
                let id = self.sibling(rest, address, block.size);
                self.link_before(id, rest);
                self.arena[rest].address += block.size;
                self.arena[rest].size -= block.size;
                id
            };
            self.arena[id].requested = block.requested_size;
        }
        // Walk from the first piece; the states are set once all neighbours are linked.
        let mut at = Some(self.first_piece(whole, blocks.len()));
        for block in blocks {
            let Some(id) = at else { break };
            at = self.arena[id].next;
            let kind = self.pool(self.arena[id].pool).kind;
            if block.state == BlockState::Inactive {
                self.insert_free(id);
                if self.arena[id].expandable.is_none() && self.arena[id].is_split() {
                    self.counters.increase(kind, Kind::InactiveSplit, 1);
                    self.counters.increase(kind, Kind::InactiveSplitBytes, block.size);
                }
                continue;
            }
            self.arena[id].set_allocated(true);
            self.arena[id].context = block.context;
            self.note_address(self.arena[id].address, id);
            self.counters.block_allocated(kind, block.size, block.requested_size);
            if self.is_oversize(block.size) {
                self.counters.oversize_allocations.increase(1);
            }
        }
    }

    fn first_piece(&self, last: BlockId, count: usize) -> BlockId {
        let mut first = last;
        for _ in 1..count {
            match self.arena[first].prev {
                Some(prev) => first = prev,
                None => break,
            }
        }
        first
    }

    fn restore_expandable(
        &mut self,
        pool: PoolIndex,
        stream: StreamId,
        ranges: &[&RestoreSegment],
    ) -> Result<(), AllocError> {
        let kind = self.pool(pool).kind;
        let page = if kind == PoolKind::Small { SMALL_BUFFER } else { self.settings.large_segment_size };
        let index = self.streams.index(stream);
        let mut ranges = ranges.iter().peekable();
        while let Some(first) = ranges.peek() {
            let base = first.address;
            let bytes = self.reservation_bytes(page).max(first.bytes().div_ceil(page) * page);
            self.device.adopt_reservation(base, bytes)?;
            let mut tail = self.insert_reservation(base, bytes, page, pool, index);
            while let Some(range) = ranges.next_if(|range| range.address + range.bytes() <= base + bytes) {
                if (range.address - base) % page != 0 || range.bytes() % page != 0 {
                    return Err(AllocError::BadState(format!(
                        "range at {:#x} is not whole pages",
                        range.address
                    )));
                }
                tail = self.restore_range(tail, range)?;
            }
        }
        Ok(())
    }

    /// Maps one range inside the unmapped block `tail` and cuts it into its blocks; returns the unmapped rest.
    fn restore_range(&mut self, tail: BlockId, range: &RestoreSegment) -> Result<BlockId, AllocError> {
        let gap = range.address - self.arena[tail].address;
        let target = if gap == 0 {
            tail
        } else {
            let bytes = self.arena[tail].size - gap;
            let target = self.sibling(tail, range.address, bytes);
            self.arena[target].set_mapped(false);
            self.link_after(target, tail);
            self.arena[tail].size = gap;
            self.insert_unmapped(target);
            target
        };
        if !self.map_block(target, range.bytes(), None)? {
            return Err(AllocError::BadState("the device has no memory for these pages".into()));
        }
        self.remove_free(target);
        let rest = self.arena[target].next.filter(|next| !self.arena[*next].is_mapped());
        self.restore_blocks(target, &range.blocks);
        // A range that ends with the reservation has no rest; later ranges then begin a new reservation.
        Ok(rest.unwrap_or(target))
    }
}
