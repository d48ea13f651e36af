//! The allocator's own state as a snapshot: segments and the blocks that tile them.
//!
//! Source: `DeviceCachingAllocator::snapshot`.

use super::recent::Logical;
use super::{DeviceAllocator, PoolId, PoolKind, SMALL, StreamId, Traced};
use crate::block::{BlockId, Context, StreamIndex};
use crate::device::Device;
use crate::history::Action;

/// The state of a block in a snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum BlockState {
    /// Handed out.
    ActiveAllocated,
    /// Freed by its owner, waiting for other streams.
    ActivePendingFree,
    /// Free.
    Inactive,
}

impl BlockState {
    /// The word PyTorch's snapshots use.
    pub fn as_str(self) -> &'static str {
        match self {
            BlockState::ActiveAllocated => "active_allocated",
            BlockState::ActivePendingFree => "active_pending_free",
            BlockState::Inactive => "inactive",
        }
    }
}

/// One block of a [`SegmentInfo`]; sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BlockInfo {
    /// First byte.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Bytes asked for; of a free block, what was asked for by whoever had it last.
    pub requested_size: u64,
    /// Handed out, waiting or free.
    pub state: BlockState,
    /// The context of the allocation.
    pub context: Option<Context>,
}

/// A segment, or one contiguous mapped range of an expandable segment; sizes in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SegmentInfo {
    /// First byte.
    pub address: u64,
    /// Bytes of all blocks.
    pub total_size: u64,
    /// Bytes of blocks handed out.
    pub allocated_size: u64,
    /// Bytes of blocks handed out or waiting for other streams.
    pub active_size: u64,
    /// Bytes asked for in active blocks.
    pub requested_size: u64,
    /// The stream it serves.
    pub stream: StreamId,
    /// Small or large.
    pub kind: PoolKind,
    /// The pool it belongs to.
    pub pool_id: PoolId,
    /// Whether it is part of an expandable segment.
    pub is_expandable: bool,
    /// The context of the request that brought it, if it was never split.
    pub context: Option<Context>,
    /// Its blocks, lowest address first.
    pub blocks: Vec<BlockInfo>,
}

impl SegmentInfo {
    /// Free bytes.
    pub fn inactive_size(&self) -> u64 {
        self.total_size - self.active_size
    }

    /// Whether live blocks keep the segment from going back.
    pub fn is_pinned(&self) -> bool {
        self.active_size > 0
    }
}

impl<D: Device> DeviceAllocator<D> {
    /// All segments, lowest address first (`torch.cuda.memory_snapshot()`). Changes nothing, not even the
    /// history; see [`snapshot`](Self::snapshot).
    pub fn memory_snapshot(&self) -> Vec<SegmentInfo> {
        let heads = self.arena.iter().filter(|(_, block)| {
            let after_gap = block.prev.is_none_or(|prev| !self.arena[prev].is_mapped());
            block.is_mapped() && after_gap
        });
        let mut segments: Vec<SegmentInfo> = heads.map(|(head, _)| self.segment_info(head)).collect();
        segments.sort_unstable_by_key(|segment| segment.address);
        segments
    }

    /// [`memory_snapshot`](Self::memory_snapshot) that, like PyTorch's, leaves a `snapshot` entry in the history.
    pub fn snapshot(&mut self) -> Vec<SegmentInfo> {
        let segments = self.memory_snapshot();
        let active = segments.iter().map(|segment| segment.active_size).sum();
        let traced = Traced { stream: StreamIndex(0), pool: SMALL, context: None };
        self.trace(Action::Snapshot, 0, active, &traced);
        segments
    }

    fn segment_info(&self, head: BlockId) -> SegmentInfo {
        let first = &self.arena[head];
        let pool = self.pool(first.pool);
        let mut segment = SegmentInfo {
            address: first.address,
            total_size: 0,
            allocated_size: 0,
            active_size: 0,
            requested_size: 0,
            stream: self.streams.handle(first.stream),
            kind: pool.kind,
            pool_id: pool.owner,
            is_expandable: first.expandable.is_some(),
            context: first.segment_context,
            blocks: Vec::new(),
        };
        let mut at = Some(head);
        while let Some(id) = at {
            let Some(Logical { block, size, next }) = self.logical(id) else { break };
            if !block.is_mapped() {
                break;
            }
            let state = if block.is_allocated() {
                segment.allocated_size += size;
                BlockState::ActiveAllocated
            } else if block.is_pending() {
                BlockState::ActivePendingFree
            } else {
                BlockState::Inactive
            };
            if state != BlockState::Inactive {
                segment.active_size += size;
                segment.requested_size += block.requested;
            }
            segment.total_size += size;
            segment.blocks.push(BlockInfo {
                address: block.address,
                size,
                requested_size: block.requested,
                state,
                context: block.context,
            });
            at = next;
        }
        segment
    }
}
