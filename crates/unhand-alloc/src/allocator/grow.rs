//! Expandable segments: address space reserved once, pages mapped as a stream's pool grows.
//!
//! Source: `ExpandableSegment`, `find_expandable_block`, `try_allocate_expandable_block`, `map_block`,
//! `unmap_block`, `release_expandable_segment`.

use std::num::NonZeroU32;

use super::allocate::Search;
use super::{DeviceAllocator, Traced};
use crate::block::{Block, BlockId, Context, ExpandableIndex, PoolIndex, StreamIndex};
use crate::device::{Device, DeviceError, PhysicalHandle};
use crate::error::AllocError;
use crate::history::Action;
use crate::settings::Reserve;
use crate::size::{PoolKind, SMALL_BUFFER};

/// One reservation of address space, and the pages mapped into it.
#[derive(Debug)]
pub(super) struct Expandable {
    pub(super) base: u64,
    /// Bytes reserved, a multiple of `page`.
    pub(super) bytes: u64,
    /// Bytes of one page: 2 MiB for small pools, `large_segment_size` for large ones.
    pub(super) page: u64,
    /// Physical memory by page; grows as far as was ever mapped.
    pages: Vec<Option<PhysicalHandle>>,
}

impl Expandable {
    fn page_of(&self, address: u64) -> u64 {
        (address - self.base) / self.page
    }

    pub(super) fn is_mapped(&self, address: u64) -> bool {
        let page = usize::try_from(self.page_of(address)).unwrap_or(usize::MAX);
        self.pages.get(page).is_some_and(Option::is_some)
    }

    pub(super) fn mapped_bytes(&self) -> u64 {
        self.pages.iter().flatten().count() as u64 * self.page
    }
}

/// The expandable segments of one device.
#[derive(Debug, Default)]
pub(super) struct Expandables {
    all: Vec<Option<Expandable>>,
    live: usize,
}

impl Expandables {
    #[inline]
    pub(super) fn is_empty(&self) -> bool {
        self.live == 0
    }

    pub(super) fn insert(&mut self, segment: Expandable) -> ExpandableIndex {
        self.live += 1;
        let vacant = self.all.iter().position(Option::is_none).unwrap_or_else(|| {
            self.all.push(None);
            self.all.len() - 1
        });
        self.all[vacant] = Some(segment);
        let number = u32::try_from(vacant + 1).ok().and_then(NonZeroU32::new);
        ExpandableIndex(number.expect("fewer than 2^32 expandable segments"))
    }

    fn slot(index: ExpandableIndex) -> usize {
        index.0.get() as usize - 1
    }

    pub(super) fn get(&self, index: ExpandableIndex) -> &Expandable {
        self.all[Self::slot(index)].as_ref().expect("a block's expandable segment exists")
    }

    fn get_mut(&mut self, index: ExpandableIndex) -> &mut Expandable {
        self.all[Self::slot(index)].as_mut().expect("a block's expandable segment exists")
    }

    pub(super) fn remove(&mut self, index: ExpandableIndex) {
        self.live -= 1;
        self.all[Self::slot(index)] = None;
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Expandable> {
        self.all.iter().flatten()
    }
}

impl<D: Device> DeviceAllocator<D> {
    /// A block of at least the searched size at the lowest address of this stream's expandable segments, with
    /// as many pages mapped as that takes. `None` when the memory is not there; what was mapped on the way
    /// stays in the pool.
    pub(super) fn allocate_expandable(&mut self, search: &Search) -> Result<Option<BlockId>, AllocError> {
        let Some(mut candidate) = self.find_expandable(search)? else { return Ok(None) };
        let block = &self.arena[candidate];
        if !block.is_mapped() {
            let bytes = block.size.min(search.size);
            if !self.map_block(candidate, bytes, search.context)? {
                return Ok(None);
            }
        }
        while self.arena[candidate].size < search.size {
            let missing = search.size - self.arena[candidate].size;
            let Some(next) = self.arena[candidate].next else { return Ok(None) };
            let bytes = missing.min(self.arena[next].size);
            if !self.map_block(next, bytes, search.context)? {
                return Ok(None);
            }
            candidate = next;
        }
        self.remove_free(candidate);
        Ok(Some(candidate))
    }

    fn find_expandable(&mut self, search: &Search) -> Result<Option<BlockId>, AllocError> {
        let handle = self.streams.handle(search.stream);
        let unmapped = &self.pool(search.pool).unmapped;
        for (_, &id) in unmapped.range((handle, 0)..=(handle, u64::MAX)) {
            let before = self.arena[id].prev.filter(|prev| self.arena[*prev].is_idle());
            let start = before.unwrap_or(id);
            let (mut bytes, mut at) = (0, Some(start));
            while let Some(id) = at
                && bytes < search.size
                && self.arena[id].is_idle()
            {
                bytes += self.arena[id].size;
                at = self.arena[id].next;
            }
            if bytes >= search.size {
                return Ok(Some(start));
            }
        }
        self.reserve_expandable(search)
    }

    /// A new expandable segment: its whole reservation is one unmapped block.
    fn reserve_expandable(&mut self, search: &Search) -> Result<Option<BlockId>, AllocError> {
        let page = match self.pool(search.pool).kind {
            PoolKind::Small => SMALL_BUFFER,
            PoolKind::Large => self.settings.large_segment_size,
        };
        let bytes = self.reservation_bytes(page);
        if bytes < search.size && self.profile.reserve_keys {
            return Ok(None);
        }
        let base = match self.device.reserve(bytes) {
            Ok(base) => base,
            Err(DeviceError::OutOfMemory) => return Ok(None),
            Err(error) => return Err(error.into()),
        };
        Ok(Some(self.insert_reservation(base, bytes, page, search.pool, search.stream)))
    }

    pub(super) fn insert_reservation(
        &mut self,
        base: u64,
        bytes: u64,
        page: u64,
        pool: PoolIndex,
        stream: StreamIndex,
    ) -> BlockId {
        let expandable = self.expandables.insert(Expandable { base, bytes, page, pages: Vec::new() });
        let age = self.take_age();
        let mut block = Block::new(base, bytes, pool, stream, age);
        block.set_mapped(false);
        block.expandable = Some(expandable);
        let id = self.arena.insert(block);
        self.insert_unmapped(id);
        id
    }

    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    pub(super) fn reservation_bytes(&self, page: u64) -> u64 {
        let total = self.device.mem_info().total_bytes;
        // An eighth more than the device has, so that fragmentation at page granularity does not end a segment.
        let usual = (total + total / 8).div_ceil(page) * page;
        let configured = match self.settings.expandable_segments_reserve {
            Some(Reserve::Bytes(bytes)) => bytes,
            Some(Reserve::Fraction(fraction)) => (total as f64 * fraction) as u64,
            None => return usual,
        };
        usual.min(configured.div_ceil(page).max(1) * page)
    }

    pub(super) fn insert_unmapped(&mut self, id: BlockId) {
        let block = &self.arena[id];
        let key = (self.streams.handle(block.stream), block.address);
        self.pools[block.pool.0 as usize].unmapped.insert(key, id);
    }

    pub(super) fn remove_unmapped(&mut self, id: BlockId) {
        let block = &self.arena[id];
        let key = (self.streams.handle(block.stream), block.address);
        let found = self.pools[block.pool.0 as usize].unmapped.remove(&key);
        debug_assert_eq!(found, Some(id));
    }

    /// Maps pages for the first `bytes` of an unmapped block. Returns false when the device has no memory.
    pub(super) fn map_block(
        &mut self,
        id: BlockId,
        bytes: u64,
        context: Option<Context>,
    ) -> Result<bool, AllocError> {
        let block = &self.arena[id];
        let (address, size, index) = (block.address, block.size, block.expandable);
        let traced = Traced { stream: block.stream, pool: block.pool, context };
        let index = index.expect("an unmapped block is expandable");
        let Some(mapped) = self.map_pages(index, address, bytes)? else { return Ok(false) };
        self.remove_unmapped(id);
        self.arena[id].set_mapped(true);
        if mapped < size {
            let rest = self.sibling(id, address + mapped, size - mapped);
            self.arena[rest].set_mapped(false);
            self.link_after(rest, id);
            self.insert_unmapped(rest);
            self.arena[id].size = mapped;
        }
        self.merge_neighbours(id);
        self.insert_free(id);
        self.total += mapped;
        self.count_reserved(traced.pool, mapped.cast_signed());
        self.counters.num_device_alloc += 1;
        self.trace(Action::SegmentMap, address, mapped, &traced);
        let block = &mut self.arena[id];
        if block.prev.is_none() && block.segment_context.is_none() {
            block.segment_context = context;
        }
        Ok(true)
    }

    fn merge_neighbours(&mut self, id: BlockId) {
        if let Some(prev) = self.arena[id].prev {
            self.try_merge(id, prev);
        }
        if let Some(next) = self.arena[id].next {
            self.try_merge(id, next);
        }
    }

    /// Physical memory for whole pages from `address` on; the bytes mapped, or `None` without memory. All or
    /// nothing: pages created on the way to a failure are given back.
    fn map_pages(
        &mut self,
        index: ExpandableIndex,
        address: u64,
        bytes: u64,
    ) -> Result<Option<u64>, AllocError> {
        let segment = self.expandables.get(index);
        let (page, first) = (segment.page, segment.page_of(address));
        debug_assert_eq!(segment.base + first * page, address, "unmapped blocks start at a page");
        let count = bytes.div_ceil(page);
        let mut handles = Vec::new();
        for number in 0..count {
            match self.map_page(address + number * page, page) {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    for (number, handle) in handles.into_iter().enumerate() {
                        self.device.unmap(address + number as u64 * page, page)?;
                        self.device.release(handle)?;
                    }
                    return if error == DeviceError::OutOfMemory { Ok(None) } else { Err(error.into()) };
                }
            }
        }
        let segment = self.expandables.get_mut(index);
        let first = usize::try_from(first).expect("pages are counted in memory");
        if segment.pages.len() < first + handles.len() {
            segment.pages.resize(first + handles.len(), None);
        }
        for (slot, handle) in segment.pages[first..].iter_mut().zip(handles) {
            *slot = Some(handle);
        }
        Ok(Some(count * page))
    }

    fn map_page(&mut self, address: u64, page: u64) -> Result<PhysicalHandle, DeviceError> {
        let handle = self.device.create(page)?;
        if let Err(error) = self.device.map(address, page, handle) {
            self.device.release(handle)?;
            return Err(error);
        }
        if let Err(error) = self.device.set_access(address, page) {
            self.device.unmap(address, page)?;
            self.device.release(handle)?;
            return Err(error);
        }
        Ok(handle)
    }

    /// Unmaps the whole pages of a free block. Its parts before and after stay free; a segment that has no page
    /// left goes back.
    pub(super) fn unmap_block(&mut self, id: BlockId, context: Option<Context>) -> Result<(), AllocError> {
        let block = &self.arena[id];
        let (address, size, index) = (block.address, block.size, block.expandable);
        let traced = Traced { stream: block.stream, pool: block.pool, context };
        let index = index.expect("only expandable blocks are unmapped");
        let segment = self.expandables.get(index);
        let (base, page) = (segment.base, segment.page);
        let first = (address - base).div_ceil(page);
        let end = (address + size - base) / page;
        if first >= end {
            return Ok(());
        }
        self.device.synchronize_stream(self.streams.handle(traced.stream))?;
        self.unmap_pages(index, first, end)?;
        let (unmapped, bytes) = (base + first * page, (end - first) * page);

        self.remove_free(id);
        if unmapped > address {
            let before = self.sibling(id, address, unmapped - address);
            self.link_before(before, id);
            self.insert_free(before);
        }
        let after_bytes = (address + size) - (unmapped + bytes);
        if after_bytes > 0 {
            let after = self.sibling(id, unmapped + bytes, after_bytes);
            self.link_after(after, id);
            self.insert_free(after);
        }
        let block = &mut self.arena[id];
        block.address = unmapped;
        block.size = bytes;
        block.set_mapped(false);
        self.merge_neighbours(id);
        self.insert_unmapped(id);

        self.total -= bytes;
        self.count_reserved(traced.pool, -bytes.cast_signed());
        let owner = self.pool(traced.pool).owner;
        if let Some(private) = self.private.get_mut(&owner) {
            private.device_allocs -= 1;
        }
        self.counters.num_device_free += 1;
        self.trace(Action::SegmentUnmap, unmapped, bytes, &traced);
        if !self.arena[id].is_split() {
            self.release_expandable(id)?;
        }
        Ok(())
    }

    fn unmap_pages(&mut self, index: ExpandableIndex, first: u64, end: u64) -> Result<(), AllocError> {
        for number in first..end {
            let segment = self.expandables.get_mut(index);
            let address = segment.base + number * segment.page;
            let slot = usize::try_from(number).ok().and_then(|number| segment.pages.get_mut(number));
            let Some(handle) = slot.and_then(Option::take) else { continue };
            let page = segment.page;
            self.device.unmap(address, page)?;
            self.device.release(handle)?;
        }
        Ok(())
    }

    fn release_expandable(&mut self, id: BlockId) -> Result<(), AllocError> {
        let index = self.arena[id].expandable.expect("only expandable segments come here");
        let segment = self.expandables.get(index);
        let (base, bytes) = (segment.base, segment.bytes);
        self.device.release_reservation(base, bytes)?;
        self.remove_unmapped(id);
        self.arena.remove(id);
        self.expandables.remove(index);
        Ok(())
    }
}
