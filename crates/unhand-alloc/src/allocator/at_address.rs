//! Calls that name an address: a block at an exact place, and a remark about a live block.
//!
//! Source: `DeviceCachingAllocator::mallocWithAddress` (`allocateWithAddress`, 2.13+), `annotateMemory` (2.14+).

use super::allocate::Search;
use super::{Allocation, DeviceAllocator, Request, Traced};
use crate::block::Context;
use crate::device::Device;
use crate::error::AllocError;
use crate::history::Action;
use crate::size::{MIN_BLOCK_SIZE, round_size};

impl<D: Device> DeviceAllocator<D> {
    /// Hands out a block that begins at `address`. The free memory in front of it is handed out and taken back
    /// again, so the history has two entries more.
    ///
    /// # Errors
    /// [`AllocError::NotFree`] when no free block of the request's pool and stream holds the range, or when the
    /// address is not a multiple of 512 bytes from that block's begin.
    pub fn malloc_at(&mut self, request: Request, address: u64) -> Result<Allocation, AllocError> {
        self.settle();
        let size = round_size(request.bytes.max(1), &self.settings.roundup_power2_divisions);
        let refuse = AllocError::NotFree { address, bytes: size };
        let stream = self.streams.index(request.stream);
        let pool = self.pool_for(size, request.stream);
        let found = self.arena.iter().find(|(_, block)| {
            block.is_idle()
                && block.is_mapped()
                && (block.pool, block.stream) == (pool, stream)
                && block.address <= address
                && address < block.address + block.size
        });
        let Some((id, block)) = found else { return Err(refuse) };
        let before = address - block.address;
        if !before.is_multiple_of(MIN_BLOCK_SIZE) || block.size - before < size {
            return Err(refuse);
        }
        let expandable = block.expandable.is_some();
        let search = Search { pool, stream, size, expandable, context: request.context };
        let prefix = (before > 0).then(|| {
            self.remove_free(id);
            self.hand_out(id, &Search { size: before, ..search }, before, true)
        });
        // After the split, the block that was found is the part from `address` on.
        self.remove_free(id);
        let split = self.should_split(id, &search);
        let block = self.hand_out(id, &search, request.bytes, split);
        if let Some(prefix) = prefix {
            self.free_allocated(prefix, None)?;
        }
        Ok(Allocation { address, block: Some(block) })
    }

    /// Leaves an `annotate` entry for the live block at `address` in the history; the context says what about it.
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] when nothing is handed out there.
    pub fn annotate(&mut self, address: u64, context: Option<Context>) -> Result<(), AllocError> {
        let id = self.find(address).and_then(|allocation| allocation.block);
        let block = &self.arena[id.ok_or(AllocError::InvalidPointer(address))?];
        let traced = Traced { stream: block.stream, pool: block.pool, context };
        let requested = block.requested;
        self.trace(Action::Annotate, address, requested, &traced);
        Ok(())
    }
}
