//! Checkpoints of a private pool's block layout, as CUDA graph trees take and restore them.
//!
//! Source: `getCheckpointState`, `setCheckpointPoolState`, `setSegmentStateToCheckpoint`.

use super::allocate::Search;
use super::recent::Logical;
use super::{Allocation, DeviceAllocator};
use crate::block::BlockId;
use crate::device::Device;
use crate::error::AllocError;
use crate::pool::PoolId;

/// One block of a checkpointed segment; sizes in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CheckpointBlock {
    /// First byte.
    pub address: u64,
    /// Bytes.
    pub size: u64,
    /// Whether it was handed out.
    pub allocated: bool,
}

/// The layout of a private pool at one moment.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Checkpoint {
    /// The pool.
    pub pool_id: PoolId,
    /// Its segments, each the list of its blocks in order of address.
    pub segments: Vec<Vec<CheckpointBlock>>,
}

/// What restoring a checkpoint did.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Restored {
    /// Addresses that were handed out before and are not any more.
    pub freed: Vec<u64>,
    /// Blocks that are handed out now; their owner is the caller.
    pub allocated: Vec<Allocation>,
}

impl<D: Device> DeviceAllocator<D> {
    fn blocks_of_pool(&self, id: PoolId) -> Vec<BlockId> {
        let blocks = self.arena.iter().filter(|(_, block)| self.pool(block.pool).owner == id);
        let mut ids: Vec<BlockId> = blocks.map(|(id, _)| id).collect();
        ids.sort_unstable_by_key(|id| self.arena[*id].address);
        ids
    }

    /// The layout of a private pool (`getCheckpointState`).
    ///
    /// # Errors
    /// [`AllocError::NoSuchPool`]; [`AllocError::PoolState`] while blocks wait for other streams.
    pub fn checkpoint_pool(&self, id: PoolId) -> Result<Checkpoint, AllocError> {
        if !self.private.contains_key(&id) {
            return Err(AllocError::NoSuchPool(id));
        }
        let mut segments: Vec<Vec<CheckpointBlock>> = Vec::new();
        for block in self.blocks_of_pool(id) {
            let Some(Logical { block, size, .. }) = self.logical(block) else { continue };
            if block.is_pending() {
                return Err(AllocError::PoolState { id, reason: "blocks wait for other streams" });
            }
            if block.prev.is_none() {
                segments.push(Vec::new());
            }
            let is_part = CheckpointBlock { address: block.address, size, allocated: block.is_allocated() };
            // An unmapped tail is not part of the layout: it may have grown by the time of the restore.
            if block.is_mapped()
                && let Some(segment) = segments.last_mut()
            {
                segment.push(is_part);
            }
        }
        segments.retain(|segment| !segment.is_empty());
        Ok(Checkpoint { pool_id: id, segments })
    }

    /// Brings a private pool back to a checkpoint: what is handed out is freed, each segment is cut as recorded,
    /// and the recorded blocks are handed out (`setCheckpointPoolState`). Leaves ordinary entries in the
    /// history.
    ///
    /// # Errors
    /// [`AllocError::NoSuchPool`], and [`AllocError::PoolState`] when blocks wait for other streams or a
    /// recorded segment is gone.
    pub fn restore_pool(&mut self, checkpoint: &Checkpoint) -> Result<Restored, AllocError> {
        let id = checkpoint.pool_id;
        let refuse = |reason| AllocError::PoolState { id, reason };
        if !self.private.contains_key(&id) {
            return Err(AllocError::NoSuchPool(id));
        }
        self.settle();
        let blocks = self.blocks_of_pool(id);
        if blocks.iter().any(|block| self.arena[*block].is_pending()) {
            return Err(refuse("blocks wait for other streams"));
        }
        let mut restored = Restored::default();
        for block in blocks {
            // Freeing merges neighbours, so a block of the list may be gone by now; allocated ones never are.
            if self.arena.get(block).is_some_and(crate::block::Block::is_allocated) {
                restored.freed.push(self.arena[block].address);
                self.free_allocated(block, None)?;
            }
        }
        for segment in &checkpoint.segments {
            self.restore_segment(id, segment, &mut restored)?;
        }
        let live: std::collections::HashSet<u64> =
            restored.allocated.iter().map(|live| live.address()).collect();
        restored.freed.retain(|address| !live.contains(address));
        Ok(restored)
    }

    fn restore_segment(
        &mut self,
        id: PoolId,
        segment: &[CheckpointBlock],
        restored: &mut Restored,
    ) -> Result<(), AllocError> {
        let refuse = |reason| AllocError::PoolState { id, reason };
        let Some(first) = segment.first() else { return Ok(()) };
        let head =
            self.blocks_of_pool(id).into_iter().find(|block| self.arena[*block].address == first.address);
        let rest = head.ok_or_else(|| refuse("a recorded segment is gone"))?;
        let mut pieces = Vec::with_capacity(segment.len());
        for (number, piece) in segment.iter().enumerate() {
            let block = &self.arena[rest];
            // The last block of a segment that has grown since may be larger than recorded.
            let is_last = number + 1 == segment.len();
            if block.size < piece.size
                || block.address != piece.address
                || !block.is_idle()
                || !block.is_mapped()
            {
                return Err(refuse("a recorded segment has another shape now"));
            }
            let size = if is_last && block.expandable.is_none() { block.size } else { piece.size };
            let search = Search {
                pool: block.pool,
                stream: block.stream,
                size,
                expandable: block.expandable.is_some(),
                context: None,
            };
            let split = block.size > size;
            self.remove_free(rest);
            let piece_id = self.hand_out(rest, &search, size, split);
            let allocation = Allocation { address: piece.address, block: Some(piece_id) };
            pieces.push((allocation, piece.allocated));
            if !split {
                break;
            }
        }
        for (allocation, allocated) in pieces {
            if allocated {
                restored.allocated.push(allocation);
            } else {
                self.free(allocation)?;
            }
        }
        Ok(())
    }
}
