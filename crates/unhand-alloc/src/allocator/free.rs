//! free: let go of a block, wait for other streams if need be, merge with free neighbours.
//!
//! Source: `DeviceCachingAllocator::free`, `free_block`, `try_merge_blocks`, `insert_events`,
//! `process_events`, `synchronize_and_free_events`, `insert_events_deferred_until_no_capture`.

use std::collections::VecDeque;

use super::{Allocation, DeviceAllocator, Traced};
use crate::block::{BlockId, Context, PoolIndex, StreamIndex};
use crate::device::{Device, StreamId};
use crate::error::AllocError;
use crate::free_set::FreeKey;
use crate::history::{Action, HistoryLevel};
use crate::pool::PoolId;

/// Where a block lies and what it lies between.
#[derive(Clone, Copy, Debug)]
struct Merged {
    address: u64,
    size: u64,
    prev: Option<BlockId>,
    next: Option<BlockId>,
    segment_context: Option<Context>,
}

impl<D: Device> DeviceAllocator<D> {
    /// Takes a block back. Blocks that other streams used come free once those streams have caught up.
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] when it is not handed out; [`AllocError::Device`].
    #[inline]
    pub fn free(&mut self, allocation: Allocation) -> Result<(), AllocError> {
        self.free_with_context(allocation, None)
    }

    /// [`free`](Self::free) with the caller's context, kept at [`HistoryLevel::All`] only.
    #[inline]
    pub fn free_with_context(
        &mut self,
        allocation: Allocation,
        context: Option<Context>,
    ) -> Result<(), AllocError> {
        let Some(id) = allocation.block else { return Ok(()) };
        match self.arena.get(id) {
            Some(block) if block.is_allocated() && block.address == allocation.address => {
                self.free_allocated(id, context)
            }
            _ => Err(AllocError::InvalidPointer(allocation.address)),
        }
    }

    /// [`free`](Self::free) by address; 0 is ignored.
    #[inline]
    pub fn free_address(&mut self, address: u64) -> Result<(), AllocError> {
        if address == 0 {
            return Ok(());
        }
        let id = self.find_address(address);
        self.free_allocated(id.ok_or(AllocError::InvalidPointer(address))?, None)
    }

    /// The allocation behind a live address.
    pub fn find(&self, address: u64) -> Option<Allocation> {
        let block = self.find_address(address)?;
        Some(Allocation { address, block: Some(block) })
    }

    #[inline]
    pub(super) fn free_allocated(&mut self, id: BlockId, context: Option<Context>) -> Result<(), AllocError> {
        let context = if self.history.level == HistoryLevel::All { context } else { None };
        let pending = self.arena[id].is_pending();
        if self.is_recent(id) && !pending {
            self.free_recent(id, context);
            return Ok(());
        }
        self.forget_address(id);
        let block = &mut self.arena[id];
        block.set_allocated(false);
        let (address, size, requested) = (block.address, block.size, block.requested);
        let traced = Traced { stream: block.stream, pool: block.pool, context: context.or(block.context) };
        let kind = self.pool(traced.pool).kind;
        if pending {
            self.counters.begin_to_differ();
        }
        self.counters.block_freed(kind, size);
        self.trace(Action::FreeRequested, address, requested, &traced);
        if self.is_oversize(size) {
            self.counters.oversize_allocations.decrease(1);
        }
        if !pending {
            self.free_block(id, context);
            Ok(())
        } else if self.in_capture(self.streams.handle(traced.stream)) {
            self.deferred.push(id);
            Ok(())
        } else {
            self.insert_events(id)
        }
    }

    /// Returns a block to its pool, merged with what is free beside it.
    #[inline]
    pub(super) fn free_block(&mut self, id: BlockId, context: Option<Context>) {
        self.settle();
        let block = &mut self.arena[id];
        let (address, size, requested) = (block.address, block.size, block.requested);
        let (stream, pool, age) = (block.stream, block.pool, block.age);
        let traced = Traced { stream, pool, context: context.or(block.context) };
        let counts_splits = block.expandable.is_none();
        let (prev, next) = (block.prev, block.next);
        block.context = None;
        self.trace(Action::FreeCompleted, address, requested, &traced);

        let (mut split_change, mut split_bytes_change) = (0, 0);
        let mut merged = Merged { address, size, prev, next, segment_context: None };
        // Both neighbours are looked at before anything is done, so that the processor waits for them together.
        let is_free = |id: &BlockId| self.arena[*id].is_idle_and_mapped();
        let (free_prev, free_next) = (prev.filter(is_free), next.filter(is_free));
        if let Some(prev) = free_prev {
            let before = self.absorb(prev, stream, pool);
            split_change -= 1;
            split_bytes_change -= before.size.cast_signed();
            merged.address = before.address;
            merged.size += before.size;
            merged.prev = before.prev;
            self.arena[id].segment_context = before.segment_context;
            if let Some(prev) = before.prev {
                self.arena[prev].next = Some(id);
            }
        }
        if let Some(next) = free_next {
            let behind = self.absorb(next, stream, pool);
            split_change -= 1;
            split_bytes_change -= behind.size.cast_signed();
            merged.size += behind.size;
            merged.next = behind.next;
            if let Some(next) = behind.next {
                self.arena[next].prev = Some(id);
            }
        }
        let pool = &mut self.pools[pool.0 as usize];
        let block = &mut self.arena[id];
        block.address = merged.address;
        block.size = merged.size;
        block.prev = merged.prev;
        block.next = merged.next;
        block.gc_base = pool.searches;
        let age = if self.profile.ties_by_age { age } else { 0 };
        pool.free.insert(stream, FreeKey::new(merged.size, age, merged.address, id));
        self.recent.forget();
        let kind = pool.kind;
        if counts_splits && (prev.is_some() || next.is_some()) {
            if merged.prev.is_some() || merged.next.is_some() {
                split_change += 1;
                split_bytes_change += merged.size.cast_signed();
            }
            self.counters.split_change(kind, split_change, split_bytes_change);
        }
        self.counters.block_settled(kind, size, requested);
    }

    /// Takes a free, mapped neighbour out of the free set and the arena; what it was. The caller mends the links.
    fn absorb(&mut self, id: BlockId, stream: StreamIndex, pool: PoolIndex) -> Merged {
        let block = &self.arena[id];
        let age = if self.profile.ties_by_age { block.age } else { 0 };
        let key = FreeKey::new(block.size, age, block.address, id);
        let merged = Merged {
            address: block.address,
            size: block.size,
            prev: block.prev,
            next: block.next,
            segment_context: block.segment_context,
        };
        let found = self.pools[pool.0 as usize].free.remove(stream, key);
        debug_assert!(found, "a free block is in its pool's free set");
        self.arena.remove(id);
        merged
    }

    /// Lets `dst` absorb a free neighbour in the same state of mapping; returns the neighbour's bytes.
    #[inline]
    pub(super) fn try_merge(&mut self, dst: BlockId, src: BlockId) -> Option<u64> {
        let mapped = self.arena[dst].is_mapped();
        let source = &self.arena[src];
        if !source.is_idle() || source.is_mapped() != mapped {
            return None;
        }
        // The keys depend on size and address, so the neighbour leaves its set before anything changes.
        if mapped {
            self.remove_free(src);
        } else {
            self.remove_unmapped(src);
        }
        let source = &self.arena[src];
        let (address, size) = (source.address, source.size);
        let (prev, next, segment_context) = (source.prev, source.next, source.segment_context);
        let target = &mut self.arena[dst];
        target.size += size;
        if target.prev == Some(src) {
            target.address = address;
            target.prev = prev;
            target.segment_context = segment_context;
            if let Some(prev) = prev {
                self.arena[prev].next = Some(dst);
            }
        } else {
            target.next = next;
            if let Some(next) = next {
                self.arena[next].prev = Some(dst);
            }
        }
        self.arena.remove(src);
        Some(size)
    }

    /// Notes that a stream uses a block (`record_stream`). Ignored for the stream it was allocated on.
    ///
    /// # Errors
    /// [`AllocError::InvalidPointer`] when the address is not handed out.
    pub fn record_stream(&mut self, allocation: Allocation, stream: StreamId) -> Result<(), AllocError> {
        let Some(id) = allocation.block else { return Ok(()) };
        let index = self.streams.index(stream);
        match self.arena.get(id) {
            Some(block) if block.is_allocated() && block.address == allocation.address => {
                if block.stream == index {
                    return Ok(());
                }
            }
            _ => return Err(AllocError::InvalidPointer(allocation.address)),
        }
        self.arena[id].set_pending(true);
        let in_capture = self.in_capture(stream);
        let pending = self.pending.entry(id).or_default();
        if !pending.uses.contains(&index) {
            pending.uses.push(index);
        }
        if in_capture && !pending.capture_uses.contains(&index) {
            pending.capture_uses.push(index);
        }
        Ok(())
    }

    /// Records an event on each stream that used the block; it comes free when the last one completes.
    fn insert_events(&mut self, id: BlockId) -> Result<(), AllocError> {
        let uses = self.pending.get_mut(&id).map(|pending| std::mem::take(&mut pending.uses));
        for stream in uses.unwrap_or_default() {
            let event = self.device.record_event(self.streams.handle(stream))?;
            if let Some(pending) = self.pending.get_mut(&id) {
                pending.events += 1;
            }
            match self.events.iter_mut().find(|(owner, _)| *owner == stream) {
                Some((_, queue)) => queue.push_back((event, id)),
                None => self.events.push((stream, VecDeque::from([(event, id)]))),
            }
        }
        Ok(())
    }

    /// After a capture: uses recorded inside it are settled by the graph's own joins, earlier ones need events.
    fn process_deferred(&mut self) -> Result<(), AllocError> {
        for id in std::mem::take(&mut self.deferred) {
            if let Some(pending) = self.pending.get_mut(&id) {
                let in_capture = std::mem::take(&mut pending.capture_uses);
                pending.uses.retain(|stream| !in_capture.contains(stream));
            }
            self.insert_events(id)?;
            self.free_if_settled(id);
        }
        Ok(())
    }

    fn free_if_settled(&mut self, id: BlockId) {
        let settled =
            self.pending.get(&id).is_none_or(|pending| pending.events == 0 && pending.uses.is_empty());
        if settled {
            self.pending.remove(&id);
            self.arena[id].set_pending(false);
            self.free_block(id, None);
        }
    }

    fn event_done(&mut self, id: BlockId) {
        if let Some(pending) = self.pending.get_mut(&id) {
            pending.events -= 1;
        }
        self.free_if_settled(id);
    }

    /// Frees the blocks whose events have completed. Never waits.
    #[cold]
    pub(super) fn process_events(&mut self) -> Result<(), AllocError> {
        self.process_deferred()?;
        let mut at = 0;
        while at < self.events.len() {
            while let Some(&(event, id)) = self.events[at].1.front() {
                if !self.device.query_event(event)? {
                    break;
                }
                self.events[at].1.pop_front();
                self.device.destroy_event(event);
                self.event_done(id);
            }
            if self.events[at].1.is_empty() {
                self.events.remove(at);
            } else {
                at += 1;
            }
        }
        Ok(())
    }

    /// Looks once for completed events, as every malloc outside a capture does.
    ///
    /// # Errors
    /// [`AllocError::Device`].
    pub fn poll_events(&mut self) -> Result<(), AllocError> {
        self.process_events()
    }

    /// Waits for all events, or those of one private pool's blocks, and frees the blocks.
    pub(super) fn synchronize_and_free_events(&mut self, only: Option<PoolId>) -> Result<(), AllocError> {
        self.counters.num_sync_all_streams += 1;
        self.process_deferred()?;
        let queues = std::mem::take(&mut self.events);
        let mut kept = Vec::new();
        let mut queues = queues.into_iter();
        while let Some((stream, mut queue)) = queues.next() {
            let mut rest = VecDeque::new();
            while let Some((event, id)) = queue.pop_front() {
                let owner = self.pool(self.arena[id].pool).owner;
                if only.is_some_and(|only| only != owner) {
                    rest.push_back((event, id));
                    continue;
                }
                if let Err(error) = self.device.synchronize_event(event) {
                    // Nothing is forgotten: what was not waited for stays pending.
                    queue.push_front((event, id));
                    rest.append(&mut queue);
                    kept.push((stream, rest));
                    kept.extend(queues);
                    self.events = kept;
                    return Err(error.into());
                }
                self.device.destroy_event(event);
                self.event_done(id);
            }
            if !rest.is_empty() {
                kept.push((stream, rest));
            }
        }
        self.events = kept;
        Ok(())
    }
}
