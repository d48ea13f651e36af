//! What was there when the history began: the final segments with every event undone, the last one first.
//!
//! Empty for a history that begins with the process. Otherwise (recording switched on late, a ring buffer that
//! wrapped) the layout of segments and live blocks is exact. The size of a block that was freed later is its
//! rounded request plus what can only have been its own: in a large pool a gap of up to 1 MiB behind it, which no
//! other block fits into.

use std::collections::BTreeMap;

use unhand_alloc::{
    BlockState, PoolId, PoolKind, RestoreBlock, RestoreSegment, SMALL_BUFFER, SMALL_SIZE, Settings, StreamId,
    round_size,
};
use unhand_snapshot::{Action, Event, SegmentKind, Snapshot};

use super::recorded_settings;

#[derive(Clone, Debug)]
struct Range {
    bytes: u64,
    stream: StreamId,
    kind: PoolKind,
    pool_id: PoolId,
    is_expandable: bool,
}

#[derive(Clone, Copy, Debug)]
struct Live {
    bytes: u64,
    requested: u64,
}

#[derive(Debug, Default)]
struct State {
    ranges: BTreeMap<u64, Range>,
    live: BTreeMap<u64, Live>,
}

/// The segments and blocks before the first event of a device's history.
pub(super) fn reconstruct(snapshot: &Snapshot, device: usize) -> Vec<RestoreSegment> {
    let (settings, _) = recorded_settings(snapshot);
    let mut state = State::default();
    for segment in &snapshot.segments {
        if usize::try_from(segment.device) != Ok(device) {
            continue;
        }
        let kind = if segment.kind == SegmentKind::Small { PoolKind::Small } else { PoolKind::Large };
        let range = Range {
            bytes: segment.total_size,
            stream: StreamId(segment.stream),
            kind,
            pool_id: PoolId(segment.pool_id.0, segment.pool_id.1),
            is_expandable: segment.is_expandable,
        };
        state.ranges.insert(segment.address, range);
        for block in &segment.blocks {
            if block.state != unhand_snapshot::BlockState::Inactive {
                state.live.insert(block.address, Live { bytes: block.size, requested: block.requested_size });
            }
        }
    }
    let trace = &snapshot.traces[device];
    for at in (0..trace.len()).rev() {
        state.undo(&trace.event(at), &settings);
    }
    state.segments()
}

impl State {
    fn undo(&mut self, event: &Event, settings: &Settings) {
        match event.action {
            Action::Alloc => {
                self.live.remove(&event.addr);
            }
            // A block that waits is kept like a live one: only its address and size matter here.
            Action::FreeCompleted | Action::Free => {
                let rounded = round_size(event.size.max(1), &settings.roundup_power2_divisions);
                let bytes = self.block_bytes(event.addr, rounded, settings);
                self.live.insert(event.addr, Live { bytes, requested: event.size });
            }
            Action::SegmentAlloc => {
                self.ranges.remove(&event.addr);
            }
            Action::SegmentMap => self.cut(event.addr, event.size),
            Action::SegmentFree | Action::SegmentUnmap => {
                let small = event.size == SMALL_BUFFER
                    || (event.action == Action::SegmentUnmap && !event.size.is_multiple_of(20 << 20));
                let range = Range {
                    bytes: event.size,
                    stream: StreamId(event.stream),
                    kind: if small { PoolKind::Small } else { PoolKind::Large },
                    pool_id: event.pool_id.map_or(PoolId::DEFAULT, |id| PoolId(id.0, id.1)),
                    is_expandable: event.action == Action::SegmentUnmap,
                };
                self.ranges.insert(event.addr, range);
                self.join(event.addr);
            }
            _ => {}
        }
    }

    /// The size of the block that was at `address` before it was freed.
    fn block_bytes(&self, address: u64, rounded: u64, settings: &Settings) -> u64 {
        let Some((start, range)) = self.ranges.range(..=address).next_back() else { return rounded };
        if range.is_expandable || range.kind == PoolKind::Small {
            return rounded;
        }
        let next = self.live.range(address + 1..).next().map_or(u64::MAX, |(next, _)| *next);
        let gap = next.min(start + range.bytes).saturating_sub(address);
        let is_oversize = settings.max_split_size.is_some_and(|max_split| rounded >= max_split);
        let slack = gap.saturating_sub(rounded);
        if is_oversize || slack <= SMALL_SIZE { gap.max(rounded) } else { rounded }
    }

    /// Takes `bytes` at `address` out of the mapped ranges.
    fn cut(&mut self, address: u64, bytes: u64) {
        let Some((&start, range)) = self.ranges.range(..=address).next_back() else { return };
        let range = range.clone();
        let (end, cut_end) = (start + range.bytes, address + bytes);
        if address >= end {
            return;
        }
        self.ranges.remove(&start);
        if start < address {
            self.ranges.insert(start, Range { bytes: address - start, ..range.clone() });
        }
        if cut_end < end {
            self.ranges.insert(cut_end, Range { bytes: end - cut_end, ..range });
        }
    }

    /// Joins an expandable range with those it touches.
    fn join(&mut self, address: u64) {
        let same = |a: &Range, b: &Range| {
            a.is_expandable && b.is_expandable && a.stream == b.stream && a.pool_id == b.pool_id
        };
        let mut start = address;
        if let Some((&before, range)) = self.ranges.range(..address).next_back()
            && before + range.bytes == address
            && same(range, &self.ranges[&address])
        {
            let bytes = self.ranges[&address].bytes;
            self.ranges.remove(&address);
            if let Some(range) = self.ranges.get_mut(&before) {
                range.bytes += bytes;
            }
            start = before;
        }
        let end = start + self.ranges[&start].bytes;
        if let Some(after) = self.ranges.get(&end).filter(|after| same(after, &self.ranges[&start])).cloned()
        {
            self.ranges.remove(&end);
            if let Some(range) = self.ranges.get_mut(&start) {
                range.bytes += after.bytes;
                // A neighbour from the snapshot knows its kind; an undone event only guesses it.
                range.kind = after.kind;
            }
        }
    }

    fn segments(self) -> Vec<RestoreSegment> {
        let State { ranges, live } = self;
        let mut segments = Vec::new();
        for (start, range) in ranges {
            let end = start + range.bytes;
            let mut blocks = Vec::new();
            let mut at = start;
            let free = |bytes: u64| RestoreBlock {
                size: bytes,
                requested_size: 0,
                state: BlockState::Inactive,
                context: None,
            };
            for (&address, block) in live.range(start..end) {
                // A freed block's size is a guess; one that does not fit is cut to what is there.
                let bytes = block.bytes.min(end - address);
                if address < at
                    || bytes == 0
                    || !bytes.is_multiple_of(512)
                    || !(address - at).is_multiple_of(512)
                {
                    continue;
                }
                if address > at {
                    blocks.push(free(address - at));
                }
                let next = live.range(address + 1..end).next().map_or(end, |(next, _)| *next);
                let size = bytes.min(next - address);
                blocks.push(RestoreBlock {
                    size,
                    requested_size: block.requested,
                    state: BlockState::ActiveAllocated,
                    context: None,
                });
                at = address + size;
            }
            if at < end {
                blocks.push(free(end - at));
            }
            segments.push(RestoreSegment {
                address: start,
                stream: range.stream,
                kind: range.kind,
                pool_id: range.pool_id,
                is_expandable: range.is_expandable,
                blocks,
            });
        }
        segments
    }
}
