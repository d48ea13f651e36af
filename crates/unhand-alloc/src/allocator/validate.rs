//! Walks everything the allocator knows and says what does not add up. Tests run it after every step.

use std::collections::{BTreeMap, BTreeSet};

use super::DeviceAllocator;
use super::recent::Logical;
use crate::address_table::AddressTable;
use crate::block::BlockId;
use crate::device::Device;
use crate::size::{MIN_BLOCK_SIZE, PoolKind};
use crate::stats::Kind;

/// A contradiction in the allocator's state: always a bug in this crate or in the device.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("allocator state is inconsistent: {0}")]
pub struct Violation(String);

macro_rules! ensure {
    ($condition:expr, $($message:tt)+) => {
        if !$condition {
            return Err(Violation(format!($($message)+)));
        }
    };
}

impl<D: Device> DeviceAllocator<D> {
    /// Checks every invariant: neighbours point at each other and tile their segment, no two free neighbours
    /// in one state stay unmerged, each block is in exactly the sets it belongs to, and the statistics equal
    /// what the walk counts. Takes time in proportion to the number of blocks.
    ///
    /// # Errors
    /// The first contradiction found.
    pub fn validate(&self) -> Result<(), Violation> {
        self.validate_neighbours()?;
        self.validate_sets()?;
        self.validate_pending()?;
        self.validate_counters()?;
        self.validate_expandables()
    }

    fn validate_neighbours(&self) -> Result<(), Violation> {
        for (id, block) in self.arena.iter() {
            let unsettled = self.is_unsettled(id);
            ensure!(block.size > 0 && block.size % MIN_BLOCK_SIZE == 0, "block {block:?} has an odd size");
            ensure!(block.is_mapped() || block.expandable.is_some(), "block {block:?} is unmapped");
            if let Some(next) = block.next {
                let after = self.arena.get(next);
                ensure!(after.is_some(), "block {block:?} has a dead neighbour");
                let after = &self.arena[next];
                ensure!(after.prev == Some(id), "neighbours {block:?} and {after:?} do not agree");
                ensure!(block.address + block.size == after.address, "gap between {block:?} and {after:?}");
                ensure!(
                    (block.pool, block.stream, block.expandable)
                        == (after.pool, after.stream, after.expandable),
                    "{block:?} and {after:?} are in one segment but differ"
                );
                // Growing by pages can leave two free neighbours only in different states of mapping.
                let both_free = block.is_idle() && after.is_idle() && block.is_mapped() == after.is_mapped();
                let unmerged = both_free && !(unsettled && self.logical(next).is_none());
                ensure!(!unmerged, "free neighbours {block:?} and {after:?} were not merged");
            }
            if let Some(prev) = block.prev {
                ensure!(
                    self.arena.get(prev).is_some_and(|prev| prev.next == Some(id)),
                    "{block:?} is half linked"
                );
            }
        }
        let mut by_address: BTreeMap<u64, u64> = BTreeMap::new();
        for (_, block) in self.arena.iter() {
            let clash = by_address.insert(block.address, block.address + block.size);
            ensure!(clash.is_none(), "two blocks at {:#x}", block.address);
        }
        let ends = by_address.values();
        for (end, (next, _)) in ends.zip(by_address.iter().skip(1)) {
            ensure!(end <= next, "blocks overlap at {next:#x}");
        }
        Ok(())
    }

    fn validate_sets(&self) -> Result<(), Violation> {
        let mut free: BTreeSet<BlockId> = BTreeSet::new();
        let mut unmapped: BTreeSet<BlockId> = BTreeSet::new();
        for (number, pool) in self.pools.iter().enumerate() {
            let mut count = 0;
            for stream in self.streams.in_order() {
                for key in pool.free.of_stream(stream) {
                    count += 1;
                    let block = self.arena.get(key.id());
                    ensure!(block.is_some(), "the free set holds a dead block");
                    let block = &self.arena[key.id()];
                    ensure!(key == self.key(key.id()), "the free set has an old key of {block:?}");
                    ensure!(
                        block.stream == stream && block.pool.0 as usize == number,
                        "{block:?} is in a foreign set"
                    );
                    free.insert(key.id());
                }
            }
            ensure!(count == pool.free.len(), "the free set miscounts: {count} and {}", pool.free.len());
            for ((stream, address), id) in &pool.unmapped {
                let block = self.arena.get(*id);
                let same = block.is_some_and(|block| {
                    (block.address, self.streams.handle(block.stream)) == (*address, *stream)
                        && block.pool.0 as usize == number
                });
                ensure!(same, "the unmapped set has an old key at {address:#x}");
                unmapped.insert(*id);
            }
        }
        let mut allocated = 0;
        for (id, block) in self.arena.iter() {
            ensure!(
                free.contains(&id) == (block.is_idle() && block.is_mapped() && !self.is_unsettled(id)),
                "{block:?} is in the wrong set"
            );
            ensure!(unmapped.contains(&id) != block.is_mapped(), "{block:?} is in the wrong unmapped set");
            if block.is_allocated() {
                allocated += 1;
                let is_found = |table: &AddressTable| table.find(block.address, &self.arena) == Some(id);
                ensure!(self.by_address.get().is_none_or(is_found), "{block:?} cannot be found");
            }
            allocated += usize::from(self.is_unsettled(id));
        }
        let listed = self.by_address.get().map_or(allocated, AddressTable::len);
        ensure!(allocated == listed, "the address table miscounts: {listed} and {allocated}");
        Ok(())
    }

    fn validate_pending(&self) -> Result<(), Violation> {
        let mut events: BTreeMap<BlockId, u32> = BTreeMap::new();
        for (_, queue) in &self.events {
            ensure!(!queue.is_empty(), "an empty event queue was kept");
            for (_, id) in queue {
                *events.entry(*id).or_default() += 1;
            }
        }
        for (id, block) in self.arena.iter() {
            let pending = self.pending.get(&id);
            ensure!(block.is_pending() == pending.is_some(), "{block:?} and its pending state disagree");
            let counted = events.get(&id).copied().unwrap_or(0);
            let stored = pending.map_or(0, |pending| pending.events);
            ensure!(counted == stored, "{block:?} waits for {stored} events, {counted} are queued");
            let waits = block.is_pending() && !block.is_allocated();
            ensure!(!waits || counted > 0 || self.deferred.contains(&id), "{block:?} waits for nothing");
        }
        ensure!(self.pending.keys().all(|id| self.arena.get(*id).is_some()), "a dead block is pending");
        Ok(())
    }

    fn validate_counters(&self) -> Result<(), Violation> {
        let mut sums = [[0i64; 5]; 2];
        let mut splits = [[0i64; 2]; 2];
        for (id, _) in self.arena.iter() {
            let Some(Logical { block, size, next }) = self.logical(id) else { continue };
            let scope = usize::from(self.pool(block.pool).kind == PoolKind::Large);
            let size = size.cast_signed();
            if block.is_mapped() {
                sums[scope][0] += size;
            }
            if block.is_allocated() {
                sums[scope][1] += size;
            }
            if block.is_mapped() && !block.is_idle() {
                sums[scope][2] += size;
                sums[scope][3] += block.requested.cast_signed();
                sums[scope][4] += 1;
            } else if block.is_mapped()
                && (block.prev.is_some() || next.is_some())
                && block.expandable.is_none()
            {
                splits[scope][0] += 1;
                splits[scope][1] += size;
            }
        }
        let kinds = [
            Kind::ReservedBytes,
            Kind::AllocatedBytes,
            Kind::ActiveBytes,
            Kind::RequestedBytes,
            Kind::Active,
        ];
        for (at, kind) in kinds.into_iter().enumerate() {
            let (counted, walked) = (self.counters.current(kind), sums[0][at] + sums[1][at]);
            ensure!(counted == walked, "{kind:?} is counted as {counted}, the blocks say {walked}");
        }
        for (at, kind) in [Kind::InactiveSplit, Kind::InactiveSplitBytes].into_iter().enumerate() {
            let (counted, walked) = (self.counters.current(kind), splits[0][at] + splits[1][at]);
            ensure!(counted == walked, "{kind:?} is counted as {counted}, the blocks say {walked}");
        }
        let reserved = sums[0][0] + sums[1][0];
        ensure!(
            self.total.cast_signed() == reserved,
            "the total is {}, the blocks say {reserved}",
            self.total
        );
        Ok(())
    }

    fn validate_expandables(&self) -> Result<(), Violation> {
        let mapped: u64 = self.expandables.iter().map(super::grow::Expandable::mapped_bytes).sum();
        let mut walked = 0;
        for (_, block) in self.arena.iter().filter(|(_, block)| block.is_mapped()) {
            if let Some(index) = block.expandable {
                walked += block.size;
                let segment = self.expandables.get(index);
                let (first, last) = (block.address, block.address + block.size - 1);
                ensure!(
                    segment.is_mapped(first) && segment.is_mapped(last),
                    "{block:?} has no pages behind it"
                );
            }
        }
        ensure!(mapped == walked, "{mapped} bytes are mapped, the blocks say {walked}");
        Ok(())
    }
}
