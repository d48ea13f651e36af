//! malloc: find a cached block, or climb the ladder of ways to get memory; split; hand out.
//!
//! Source: `DeviceCachingAllocator::malloc`, `get_free_block`, `should_split`, `alloc_block`,
//! `alloc_found_block`, `try_mempool_fallback`.

use super::{Allocation, DeviceAllocator, LARGE, Request, SMALL, Traced};
use crate::block::{Block, BlockId, Context, PoolIndex, StreamIndex};
use crate::device::{Device, DeviceError};
use crate::error::{AllocError, OutOfMemory};
use crate::free_set::{FreeKey, MAX_BLOCK_BYTES};
use crate::history::Action;
use crate::size::{MIN_BLOCK_SIZE, ONE_EXA_BYTE, PoolKind, SMALL_SIZE, round_size, segment_size};
use crate::stats::Kind;

/// What is being looked for (`AllocParams`).
#[derive(Clone, Copy, Debug)]
pub(super) struct Search {
    pub(super) pool: PoolIndex,
    pub(super) stream: StreamIndex,
    /// The rounded size.
    pub(super) size: u64,
    /// Expandable segments apply to this request.
    pub(super) expandable: bool,
    pub(super) context: Option<Context>,
}

/// Why `alloc_block` brought nothing.
enum Refusal {
    OutOfMemory,
    /// `throw_on_cudamalloc_oom`: the ladder ends here.
    Rejected,
}

impl<D: Device> DeviceAllocator<D> {
    /// Hands out a block of at least `request.bytes` bytes.
    ///
    /// # Errors
    /// [`AllocError::OutOfMemory`] when neither the cache nor the device has it, after everything that may be
    /// given back has been; [`AllocError::TooLarge`]; [`AllocError::Device`].
    #[inline]
    pub fn malloc(&mut self, request: Request) -> Result<Allocation, AllocError> {
        if request.bytes == 0 {
            return Ok(Allocation::NULL);
        }
        if request.bytes >= ONE_EXA_BYTE {
            return Err(AllocError::TooLarge(request.bytes));
        }
        let stream = self.streams.index(request.stream);
        let waits = !self.events.is_empty() || !self.deferred.is_empty();
        if waits && !self.in_capture(request.stream) {
            self.process_events()?;
        }
        let size = round_size(request.bytes, &self.settings.roundup_power2_divisions);
        let pool = self.pool_for(size, request.stream);
        let expandable = self.settings.expandable_segments && !self.has_source(pool);
        let mut search = Search { pool, stream, size, expandable, context: request.context };
        if let Some(allocation) = self.take_recent(&search, request.bytes) {
            return Ok(allocation);
        }
        self.settle();
        let cached = self.get_free_block(&search);
        let found = match cached {
            Some(id) => id,
            None => self.malloc_uncached(&mut search, request)?,
        };
        let split = self.should_split(found, &search);
        let id = self.hand_out(found, &search, request.bytes, split);
        if cached.is_some() {
            self.note_hand_out(id, &search, split.then_some(found));
        }
        Ok(Allocation { address: self.arena[id].address, block: Some(id) })
    }

    #[inline]
    pub(super) fn pool_for(&self, size: u64, stream: crate::StreamId) -> PoolIndex {
        let kind = PoolKind::of(size);
        if !self.diversions.is_empty()
            && let Some(private) = self.diverted(stream)
        {
            return private.pool(kind);
        }
        match kind {
            PoolKind::Small => SMALL,
            PoolKind::Large => LARGE,
        }
    }

    /// The best cached block for a request, taken out of the free set.
    #[inline]
    pub(super) fn get_free_block(&mut self, search: &Search) -> Option<BlockId> {
        if self.collects {
            self.pool_mut(search.pool).searches += 1;
        }
        let max_split = self.settings.max_split_size_or_max();
        let too_large = if search.size < max_split {
            max_split
        } else {
            search.size.saturating_add(self.settings.max_non_split_rounding)
        };
        if self.expandables.is_empty() {
            self.recent.forget();
            let free = &mut self.pools[search.pool.0 as usize].free;
            return Some(free.take_at_least(search.stream, search.size, |key| key.size() < too_large)?.id());
        }
        // A block with no pages to grow by is not stepped over: what follows is at least as large.
        let arena = &self.arena;
        let is_final = |key: FreeKey| {
            let block = &arena[key.id()];
            let can_grow = || block.next.is_some_and(|next| !arena[next].is_mapped());
            key.size() < too_large && (block.expandable.is_none() || (search.expandable && !can_grow()))
        };
        let free = &mut self.pools[search.pool.0 as usize].free;
        if let Some(key) = free.take_at_least(search.stream, search.size, is_final) {
            self.recent.forget();
            return Some(key.id());
        }
        let pool = self.pool(search.pool);
        let mut key = pool.free.at_least(search.stream, search.size)?;
        if self.arena[key.id()].expandable.is_some() {
            key = self.step_over_expandable(search, key)?;
        }
        if key.size() >= too_large {
            return None;
        }
        self.recent.forget();
        let found = self.pool_mut(search.pool).free.remove(search.stream, key);
        debug_assert!(found);
        Some(key.id())
    }

    /// Chooses among expandable blocks: the one that can grow least; or, for a request that may not use them,
    /// the first that is not expandable.
    fn step_over_expandable(&self, search: &Search, mut key: FreeKey) -> Option<FreeKey> {
        let set = &self.pool(search.pool).free;
        if search.expandable {
            let grown = |id: BlockId| {
                let block = &self.arena[id];
                let tail = block.next.map(|next| &self.arena[next]).filter(|next| !next.is_mapped());
                block.size + tail.map_or(0, |next| next.size)
            };
            while self.arena[key.id()].expandable.is_some()
                && let Some(next) = set.after(search.stream, key)
                && grown(next.id()) < grown(key.id())
            {
                key = next;
            }
            Some(key)
        } else {
            loop {
                key = set.after(search.stream, key)?;
                if self.arena[key.id()].expandable.is_none() {
                    return Some(key);
                }
            }
        }
    }

    #[inline]
    pub(super) fn should_split(&self, id: BlockId, search: &Search) -> bool {
        let block = &self.arena[id];
        let remaining = block.size - search.size;
        if remaining == 0 {
            return false;
        }
        let pool = self.pool(block.pool);
        if !self.no_split.is_empty() && self.no_split.contains(&pool.owner) {
            return false;
        }
        if pool.kind == PoolKind::Small || search.expandable {
            remaining >= MIN_BLOCK_SIZE
        } else {
            search.size < self.settings.max_split_size_or_max() && remaining > SMALL_SIZE
        }
    }

    /// Marks a block as handed out, after giving what is left over back to the pool.
    #[inline]
    pub(super) fn hand_out(
        &mut self,
        found: BlockId,
        search: &Search,
        requested: u64,
        split: bool,
    ) -> BlockId {
        let kind = self.pool(search.pool).kind;
        let young = if split && self.profile.age_per_block { Some(self.take_age()) } else { None };
        let ties_by_age = self.profile.ties_by_age;
        let block = &mut self.arena[found];
        let counts_splits = block.expandable.is_none();
        let was_split = block.is_split();
        let address = block.address;
        let (id, size) = if split {
            let mut front =
                Block::new(address, search.size, block.pool, block.stream, young.unwrap_or(block.age));
            front.expandable = block.expandable;
            front.set_allocated(true);
            front.requested = requested;
            front.context = search.context;
            front.prev = block.prev;
            front.next = Some(found);
            // What is left over goes back to the pool.
            block.address += search.size;
            block.size -= search.size;
            let rest_size = block.size;
            let key = FreeKey::new(rest_size, if ties_by_age { block.age } else { 0 }, block.address, found);
            let pool = &mut self.pools[block.pool.0 as usize];
            block.gc_base = pool.searches;
            pool.free.insert(block.stream, key);
            self.recent.forget();
            let prev = front.prev;
            let id = self.arena.insert(front);
            self.arena[found].prev = Some(id);
            if let Some(prev) = prev {
                self.arena[prev].next = Some(id);
            }
            if counts_splits {
                if was_split {
                    self.counters.decrease(kind, Kind::InactiveSplitBytes, search.size);
                } else {
                    self.counters.increase(kind, Kind::InactiveSplit, 1);
                    self.counters.increase(kind, Kind::InactiveSplitBytes, rest_size);
                }
            }
            (id, search.size)
        } else {
            block.set_allocated(true);
            block.requested = requested;
            block.context = search.context;
            let size = block.size;
            if counts_splits && was_split {
                self.counters.decrease(kind, Kind::InactiveSplit, 1);
                self.counters.decrease(kind, Kind::InactiveSplitBytes, size);
            }
            (found, size)
        };
        self.note_address(address, id);
        self.counters.block_allocated(kind, size, requested);
        if self.is_oversize(size) {
            self.counters.oversize_allocations.increase(1);
        }
        let traced = Traced { stream: search.stream, pool: search.pool, context: search.context };
        self.trace(Action::Alloc, address, requested, &traced);
        id
    }

    /// The ladder: collect garbage, ask the device, look into `use_on_oom` pools, release what is oversize,
    /// release everything and ask once more.
    #[cold]
    fn malloc_uncached(&mut self, search: &mut Search, request: Request) -> Result<BlockId, AllocError> {
        let segment_bytes = segment_size(search.size, self.settings.large_segment_size);
        if self.collects {
            self.garbage_collect(search.context)?;
        }
        match self.alloc_block(search, segment_bytes, false)? {
            Ok(id) => return Ok(id),
            Err(Refusal::Rejected) => return Err(self.out_of_memory(request, segment_bytes, true)),
            Err(Refusal::OutOfMemory) => {}
        }
        if self.profile.fallback_before_release
            && let Some(id) = self.use_on_oom_block(search)
        {
            return Ok(id);
        }
        // Only a rejection at the first step ends the ladder; a later one makes the end of it a rejection.
        let mut rejected = false;
        if self.release_oversize(search)? {
            match self.alloc_block(search, segment_bytes, false)? {
                Ok(id) => return Ok(id),
                Err(refusal) => rejected |= matches!(refusal, Refusal::Rejected),
            }
        }
        if !self.in_capture(request.stream) {
            self.release_cached(crate::PoolId::DEFAULT, request.stream, search.context)?;
            match self.alloc_block(search, segment_bytes, true)? {
                Ok(id) => return Ok(id),
                Err(refusal) => rejected |= matches!(refusal, Refusal::Rejected),
            }
        }
        if !self.profile.fallback_before_release
            && let Some(id) = self.use_on_oom_block(search)
        {
            return Ok(id);
        }
        if rejected {
            return Err(self.out_of_memory(request, segment_bytes, true));
        }
        let free_bytes = self.device.mem_info().free_bytes;
        let traced = Traced { stream: search.stream, pool: search.pool, context: search.context };
        self.trace(Action::Oom, free_bytes, search.size, &traced);
        self.counters.num_ooms += 1;
        Err(self.out_of_memory(request, segment_bytes, false))
    }

    fn out_of_memory(&self, request: Request, segment_bytes: u64, rejected: bool) -> AllocError {
        let info = self.device.mem_info();
        let in_private = |block: &Block| !self.pool(block.pool).owner.is_default();
        let free = self.arena.iter().map(|(_, block)| block);
        let free = free.filter(|block| block.is_idle() && block.is_mapped() && in_private(block));
        AllocError::OutOfMemory(Box::new(OutOfMemory {
            requested_bytes: request.bytes,
            segment_bytes,
            total_bytes: info.total_bytes,
            free_bytes: info.free_bytes,
            allowed_bytes: self.allowed,
            allocated_bytes: self.memory_allocated(),
            reserved_bytes: self.memory_reserved(),
            private_pool_free_bytes: free.map(|block| block.size).sum(),
            rejected,
        }))
    }

    /// A new segment from the device, or the growth of an expandable one.
    fn alloc_block(
        &mut self,
        search: &Search,
        segment_bytes: u64,
        is_retry: bool,
    ) -> Result<Result<BlockId, Refusal>, AllocError> {
        if is_retry {
            self.counters.num_alloc_retries += 1;
        }
        let wanted = self.total.saturating_add(segment_bytes);
        if self.allowed.is_some_and(|allowed| wanted > allowed) || segment_bytes > MAX_BLOCK_BYTES {
            return Ok(Err(Refusal::OutOfMemory));
        }
        let may_reject = self.profile.oom_rejection && self.settings.throw_on_cudamalloc_oom;
        if may_reject && wanted > self.configured_fraction_of_total() {
            self.counters.num_oom_rejections += 1;
            return Ok(Err(Refusal::Rejected));
        }
        let owner = self.pool(search.pool).owner;
        if search.expandable {
            let Some(id) = self.allocate_expandable(search)? else { return Ok(Err(Refusal::OutOfMemory)) };
            if let Some(private) = self.private.get_mut(&owner) {
                private.device_allocs += 1;
            }
            return Ok(Ok(id));
        }
        let Some(address) = self.segment_from_device(search, segment_bytes)? else {
            return Ok(Err(Refusal::OutOfMemory));
        };
        if let Some(private) = self.private.get_mut(&owner) {
            private.device_allocs += 1;
        }
        self.total += segment_bytes;
        let kind = self.pool(search.pool).kind;
        self.counters.increase(kind, Kind::Segment, 1);
        self.count_reserved(search.pool, segment_bytes.cast_signed());
        if self.is_oversize(segment_bytes) {
            self.counters.oversize_segments.increase(1);
        }
        self.counters.num_device_alloc += 1;
        let age = self.take_age();
        let mut block = Block::new(address, segment_bytes, search.pool, search.stream, age);
        block.segment_context = search.context;
        let id = self.arena.insert(block);
        let traced = Traced { stream: search.stream, pool: search.pool, context: search.context };
        self.trace(Action::SegmentAlloc, address, segment_bytes, &traced);
        Ok(Ok(id))
    }

    fn segment_from_device(&mut self, search: &Search, bytes: u64) -> Result<Option<u64>, AllocError> {
        let owner = self.pool(search.pool).owner;
        let stream = self.streams.handle(search.stream);
        if let Some(source) = self.private.get_mut(&owner).and_then(|private| private.source.as_mut()) {
            return Ok(source.alloc(bytes, stream));
        }
        match self.device.malloc(bytes) {
            Ok(address) => Ok(Some(address)),
            Err(DeviceError::OutOfMemory) => Ok(None),
            Err(error) => Err(error.into()),
        }
    }

    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fn configured_fraction_of_total(&self) -> u64 {
        let total = self.device.mem_info().total_bytes as f64;
        (self.settings.per_process_memory_fraction * total) as u64
    }

    /// Changes the bytes held from the device, in all the statistics that count them.
    pub(super) fn count_reserved(&mut self, pool: PoolIndex, change: i64) {
        let (kind, owner) = (self.pool(pool).kind, self.pool(pool).owner);
        self.counters.change(kind, Kind::ReservedBytes, change);
        if !owner.is_default() {
            self.counters.private_pool(owner, kind, change);
        }
    }

    /// A cached block of a pool that may serve others when memory is short.
    fn use_on_oom_block(&mut self, search: &mut Search) -> Option<BlockId> {
        if !self.pool(search.pool).owner.is_default() {
            return None;
        }
        for id in self.use_on_oom.clone() {
            let Some(private) = self.private.get(&id) else { continue };
            let pool = private.pool(PoolKind::of(search.size));
            let expandable = search.expandable && self.profile.fallback_takes_expandable;
            let candidate = Search { pool, expandable, ..*search };
            if let Some(block) = self.get_free_block(&candidate) {
                *search = candidate;
                return Some(block);
            }
        }
        None
    }
}
