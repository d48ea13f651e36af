//! Giving cached memory back: `empty_cache`, the retry ladder's steps, garbage collection.
//!
//! Source: `release_cached_blocks`, `release_available_cached_blocks`, `release_blocks`, `release_block`,
//! `garbage_collect_cached_blocks`.

use super::allocate::Search;
use super::{DeviceAllocator, LARGE, SMALL, Traced};
use crate::block::{BlockId, Context, PoolIndex};
use crate::device::{Device, StreamId};
use crate::error::AllocError;
use crate::free_set::FreeKey;
use crate::history::Action;
use crate::pool::PoolId;
use crate::stats::Kind;

impl<D: Device> DeviceAllocator<D> {
    /// Gives every wholly free segment and page back to the device (`torch.cuda.empty_cache()`), after waiting
    /// for pending events. Private pools give theirs back once nobody holds them.
    ///
    /// # Errors
    /// [`AllocError::Device`]; what was given back before stays given back.
    pub fn empty_cache(&mut self) -> Result<(), AllocError> {
        self.release_cached(PoolId::DEFAULT, StreamId::DEFAULT, None)
    }

    /// [`empty_cache`](Self::empty_cache) for one private pool that nobody holds any more.
    ///
    /// # Errors
    /// As [`empty_cache`](Self::empty_cache).
    pub fn empty_pool_cache(&mut self, id: PoolId) -> Result<(), AllocError> {
        self.release_cached(id, StreamId::DEFAULT, None)
    }

    pub(super) fn release_cached(
        &mut self,
        only: PoolId,
        stream: StreamId,
        context: Option<Context>,
    ) -> Result<(), AllocError> {
        self.settle();
        if only.is_default() && !self.in_capture(stream) {
            self.synchronize_and_free_events(None)?;
            self.release_blocks(LARGE, context)?;
            self.release_blocks(SMALL, context)?;
        }
        for id in self.freeable.clone() {
            if !only.is_default() {
                if id != only {
                    continue;
                }
                self.synchronize_and_free_events(Some(id))?;
            }
            let Some(private) = self.private.get(&id) else { continue };
            let (small, large) = (private.small, private.large);
            self.release_blocks(small, context)?;
            self.release_blocks(large, context)?;
            if self.private.get(&id).is_some_and(|private| private.device_allocs == 0) {
                self.forget_pool(id);
            }
        }
        Ok(())
    }

    /// A pool's free blocks in PyTorch's order: streams as unsigned integers, then size, [age,] address.
    fn free_in_order(&self, pool: PoolIndex) -> Vec<FreeKey> {
        let set = &self.pool(pool).free;
        self.streams.in_order().flat_map(|stream| set.of_stream(stream)).collect()
    }

    fn release_blocks(&mut self, pool: PoolIndex, context: Option<Context>) -> Result<(), AllocError> {
        let mut to_unmap = Vec::new();
        for key in self.free_in_order(pool) {
            let block = &self.arena[key.id()];
            if block.expandable.is_some() {
                to_unmap.push(key.id());
            } else if !block.is_split() {
                self.release_block(key.id(), context)?;
            }
        }
        for id in to_unmap {
            self.unmap_block(id, context)?;
        }
        Ok(())
    }

    /// Gives one whole segment back to where it came from.
    pub(super) fn release_block(&mut self, id: BlockId, context: Option<Context>) -> Result<(), AllocError> {
        let block = &self.arena[id];
        let (address, size) = (block.address, block.size);
        let traced =
            Traced { stream: block.stream, pool: block.pool, context: context.or(block.segment_context) };
        let (kind, owner) = (self.pool(traced.pool).kind, self.pool(traced.pool).owner);
        let stream = self.streams.handle(traced.stream);
        match self.private.get_mut(&owner).and_then(|private| private.source.as_mut()) {
            Some(source) => source.free(address, size, stream),
            None => self.device.free(address, size)?,
        }
        self.counters.num_device_free += 1;
        self.trace(Action::SegmentFree, address, size, &traced);
        self.total -= size;
        if let Some(private) = self.private.get_mut(&owner) {
            private.device_allocs -= 1;
        }
        self.counters.decrease(kind, Kind::Segment, 1);
        self.count_reserved(traced.pool, -size.cast_signed());
        if self.is_oversize(size) {
            self.counters.oversize_segments.decrease(1);
        }
        self.remove_free(id);
        self.arena.remove(id);
        Ok(())
    }

    /// With `max_split_size_mb`: releases the smallest oversize block that is large enough, else the largest
    /// ones until they add up. Returns whether enough was released.
    pub(super) fn release_oversize(&mut self, search: &Search) -> Result<bool, AllocError> {
        let Some(max_split) = self.settings.max_split_size else { return Ok(false) };
        let wanted = search.size.max(max_split);
        let set = &self.pool(search.pool).free;
        let found = set.at_least(search.stream, wanted);
        if let Some(key) = found
            && self.arena[key.id()].expandable.is_none()
        {
            // Only settings changed midway leave an oversize block that is part of a segment.
            if self.arena[key.id()].is_split() {
                return Ok(false);
            }
            self.release_block(key.id(), search.context)?;
            return Ok(true);
        }
        let mut at = match found {
            Some(key) => set.before(search.stream, key),
            None => set.last(search.stream),
        };
        let mut released = 0;
        while let Some(key) = at
            && released < wanted
            && key.size() >= max_split
        {
            at = self.pool(search.pool).free.before(search.stream, key);
            let block = &self.arena[key.id()];
            if block.expandable.is_none() && !block.is_split() {
                released += key.size();
                self.release_block(key.id(), search.context)?;
            }
        }
        Ok(released >= wanted)
    }

    /// Releases whole cached segments of the default large pool, the longest unused first, until what is held
    /// is below the threshold.
    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub(super) fn garbage_collect(&mut self, context: Option<Context>) -> Result<(), AllocError> {
        let Some(allowed) = self.allowed else { return Ok(()) };
        let threshold = (self.settings.garbage_collection_threshold * allowed as f64) as u64;
        if self.total <= threshold {
            return Ok(());
        }
        let target = self.total - threshold;
        let searches = self.pool(LARGE).searches;
        let mut candidates: Vec<(BlockId, u64)> = Vec::new();
        for key in self.free_in_order(LARGE) {
            let block = &self.arena[key.id()];
            if !block.is_split() {
                candidates.push((key.id(), searches - block.gc_base));
            }
        }
        let mut total_age: u64 = candidates.iter().map(|(_, age)| age).sum();
        let mut count = candidates.len();
        let mut reclaimed = 0;
        loop {
            if reclaimed >= target || count == 0 {
                return Ok(());
            }
            let average = total_age as f64 / count as f64;
            let mut freed = false;
            let mut kept = Vec::with_capacity(candidates.len());
            for (id, age) in std::mem::take(&mut candidates) {
                let block = &self.arena[id];
                if block.expandable.is_none() && age as f64 >= average {
                    freed = true;
                    reclaimed += block.size;
                    total_age -= age;
                    count -= 1;
                    self.release_block(id, context)?;
                } else {
                    kept.push((id, age));
                }
            }
            candidates = kept;
            if !freed {
                return Ok(());
            }
        }
    }
}
