//! Which pool a recorded address belonged to: up to torch 2.11 only the segments of the snapshot say it.

use std::collections::BTreeMap;

use unhand_alloc::PoolId;
use unhand_snapshot::{Action, Event, Snapshot};

/// Recorded segments and mapped ranges at one moment, with their pools.
#[derive(Debug, Default)]
pub(super) struct MemoryMap {
    /// First byte → (bytes, pool).
    now: BTreeMap<u64, (u64, PoolId)>,
    /// First byte → (bytes, pool), of the snapshot's segments in private pools.
    private_at_end: BTreeMap<u64, (u64, PoolId)>,
    /// Index of the event in which a segment that is there in the end came, by address.
    last_alloc: BTreeMap<u64, i64>,
    peak_reserved: u64,
    /// Some pool is not the default, so looking up pays.
    pub(super) has_private: bool,
    counter: i64,
}

impl MemoryMap {
    pub(super) fn of(snapshot: &Snapshot, device: usize) -> MemoryMap {
        let mut map = MemoryMap::default();
        for segment in &snapshot.segments {
            let pool = PoolId(segment.pool_id.0, segment.pool_id.1);
            if usize::try_from(segment.device) == Ok(device) && !pool.is_default() {
                map.private_at_end.insert(segment.address, (segment.total_size, pool));
                map.has_private = true;
            }
        }
        let (mut reserved, mut number) = (0u64, 0);
        for event in snapshot.traces[device].iter() {
            match event.action {
                Action::SegmentAlloc | Action::SegmentMap => {
                    reserved += event.size;
                    map.peak_reserved = map.peak_reserved.max(reserved);
                    map.last_alloc.insert(event.addr, number);
                    number += 1;
                }
                Action::SegmentFree | Action::SegmentUnmap => reserved = reserved.saturating_sub(event.size),
                _ => {}
            }
            map.has_private |= event.pool_id.is_some_and(|id| (id.0, id.1) != (0, 0));
        }
        map
    }

    /// The most bytes that were reserved at a time since the history began.
    pub(super) fn peak_reserved(&self) -> u64 {
        self.peak_reserved
    }

    pub(super) fn insert(&mut self, event: &Event, pool: Option<PoolId>) {
        let is_last = self.last_alloc.get(&event.addr) == Some(&self.counter);
        self.counter += 1;
        if !self.has_private {
            return;
        }
        // Only the last segment at an address can be the one the snapshot shows there.
        let at_end = || {
            let (start, (size, pool)) = self.private_at_end.range(..=event.addr).next_back()?;
            // A segment is one entry of the snapshot, a mapped range part of one.
            let same = event.action == Action::SegmentMap || *start == event.addr;
            (is_last && same && event.addr < start + size).then_some(*pool)
        };
        let pool = pool.or_else(at_end).unwrap_or_default();
        self.now.insert(event.addr, (event.size, pool));
    }

    pub(super) fn remove(&mut self, event: &Event) -> PoolId {
        let pool = event.pool_id.map_or_else(|| self.pool_of(event.addr), |id| PoolId(id.0, id.1));
        if self.has_private {
            self.cut(event.addr, event.addr.saturating_add(event.size));
        }
        pool
    }

    /// Forgets what lies between two addresses; an unmapped range can be part of several mapped ones.
    fn cut(&mut self, start: u64, end: u64) {
        let first = self.now.range(..start).next_back().filter(|(at, (size, _))| *at + size > start);
        let mut touched: Vec<u64> = first.map(|(at, _)| *at).into_iter().collect();
        touched.extend(self.now.range(start..end).map(|(at, _)| *at));
        for at in touched {
            let Some((size, pool)) = self.now.remove(&at) else { continue };
            if at < start {
                self.now.insert(at, (start - at, pool));
            }
            if at + size > end {
                self.now.insert(end, (at + size - end, pool));
            }
        }
    }

    pub(super) fn pool_of(&self, address: u64) -> PoolId {
        if !self.has_private {
            return PoolId::DEFAULT;
        }
        let found = self.now.range(..=address).next_back();
        found
            .filter(|(start, (size, _))| address < **start + size)
            .map_or(PoolId::DEFAULT, |(_, (_, pool))| *pool)
    }
}
