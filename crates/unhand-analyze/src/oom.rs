//! Out-of-memory errors in the history: a real shortage, holes that do not fit, or a limit.

use std::collections::BTreeMap;

use serde::Serialize;
use unhand_snapshot::{Action, Event, PoolId, SegmentKind, Snapshot};

use crate::holding::Holder;
use crate::prose::plural;
use crate::rounding::Rounding;
use crate::timeline::Timeline;
use unhand_alloc::Bytes;

/// One out-of-memory error and what stood in the way.
#[derive(Clone, Debug, Serialize)]
pub struct OutOfMemory {
    /// Index of the event.
    pub event_index: usize,
    /// Microseconds since the first event.
    pub since_start_us: Option<i64>,
    /// The innermost annotation open then.
    pub during: Option<String>,
    /// Bytes of the block that was wanted (the request, rounded).
    pub wanted_bytes: u64,
    /// Bytes of the segment PyTorch asked the driver for.
    pub segment_bytes: u64,
    /// Bytes the driver had free.
    pub device_free_bytes: u64,
    /// Requested bytes of active blocks then.
    pub requested_bytes: u64,
    /// Bytes reserved then.
    pub reserved_bytes: u64,
    /// Free bytes in all segments, whatever stream or pool they serve. At most: what blocks keep beyond their
    /// rounded size is not in the history.
    pub free_in_segments_bytes: u64,
    /// The part of them that could have served this request: same stream, same size class, default pool.
    pub usable_free_bytes: u64,
    /// Number of holes that part consists of.
    pub holes: u64,
    /// The largest of them.
    pub largest_hole_bytes: u64,
    /// What stood in the way.
    pub verdict: Verdict,
    /// Bytes by which free memory falls short, were all of it in one piece; `None` unless it is a shortage.
    pub missing_bytes: Option<u64>,
    /// The largest block that would have fitted: in a hole, or in a segment the driver still had. Under
    /// [`Verdict::Limit`] a lower bound, because the limit is not recorded.
    pub would_have_fitted_bytes: u64,
    /// The largest holders then, at most five.
    pub holders: Vec<Holder>,
    /// All that as a sentence or two.
    pub sentence: String,
}

/// What stood in the way of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// Live blocks left too little, wherever they lie.
    Shortage,
    /// Enough was free, but in pieces.
    Fragmentation,
    /// The device had room: a limit of the process, or the driver could not back it with host memory.
    Limit,
    /// A hole was large enough: PyTorch does not look again after it has waited for other streams.
    Retry,
}

/// The out-of-memory errors in a device's history. Who was live is filled in by the caller.
pub(crate) fn find(snapshot: &Snapshot, timeline: &Timeline, rounding: &Rounding) -> Vec<OutOfMemory> {
    let Some(trace) = snapshot.traces.get(timeline.device) else { return Vec::new() };
    let events = trace.actions().iter().enumerate().filter(|(_, action)| **action == Action::Oom);
    let indices: Vec<usize> = events.map(|(index, _)| index).collect();
    // Segments are known at the end and undone backwards, so the last error comes first.
    let mut ranges = Ranges::at_end(snapshot, timeline.device);
    let mut undone = trace.len();
    let mut found = Vec::new();
    for index in indices.into_iter().rev() {
        for later in (index..undone).rev() {
            ranges.undo(&trace.event(later));
        }
        undone = index;
        found.push(judge(snapshot, timeline, rounding, index, &ranges));
    }
    found.reverse();
    found
}

fn judge(
    snapshot: &Snapshot,
    timeline: &Timeline,
    rounding: &Rounding,
    index: usize,
    ranges: &Ranges,
) -> OutOfMemory {
    let trace = &snapshot.traces[timeline.device];
    let event = trace.event(index);
    let (wanted, device_free) = (event.size, event.addr);
    let segment_bytes = rounding.segment_bytes(wanted);
    let mut live: Vec<(u64, u64)> = timeline
        .active_after(index)
        .map(|life| (life.address, rounding.block_bytes(life.requested_bytes)))
        .collect();
    live.sort_unstable();
    let wants_small = Rounding::is_small(wanted);
    let mut free_all = 0;
    let (mut usable, mut holes, mut largest) = (0, 0, 0);
    for hole in ranges.holes(&live) {
        free_all += hole.bytes;
        let fits_kind = hole.stream == event.stream && hole.is_small == wants_small;
        if fits_kind && hole.pool.is_none_or(|pool| pool == event.pool_id.unwrap_or_default()) {
            usable += hole.bytes;
            holes += 1;
            largest = largest.max(hole.bytes);
        }
    }
    let reserved_bytes = ranges.total();
    let verdict = if largest >= wanted {
        Verdict::Retry
    } else if device_free >= segment_bytes {
        Verdict::Limit
    } else if usable + device_free >= wanted {
        Verdict::Fragmentation
    } else {
        Verdict::Shortage
    };
    let peak_before = reserved_peak_before(snapshot, timeline, index);
    // A limit that is not recorded was at least what had been held before.
    let from_driver =
        if verdict == Verdict::Limit { peak_before.saturating_sub(reserved_bytes) } else { device_free };
    // A segment is a multiple of 2 MiB.
    let from_driver = from_driver >> 21 << 21;
    let mut oom = OutOfMemory {
        event_index: index,
        since_start_us: timeline.since_start_us(snapshot, index),
        during: None,
        wanted_bytes: wanted,
        segment_bytes,
        device_free_bytes: device_free,
        requested_bytes: live_requested(timeline, index),
        reserved_bytes,
        free_in_segments_bytes: free_all,
        usable_free_bytes: usable,
        holes,
        largest_hole_bytes: largest,
        verdict,
        missing_bytes: (verdict == Verdict::Shortage).then(|| wanted - usable - device_free),
        would_have_fitted_bytes: largest.max(from_driver),
        holders: Vec::new(),
        sentence: String::new(),
    };
    oom.sentence = oom.say(peak_before);
    oom
}

impl OutOfMemory {
    fn say(&self, peak_before: u64) -> String {
        let wanted = Bytes(self.wanted_bytes);
        let free = Bytes(self.device_free_bytes);
        let usable = Bytes(self.usable_free_bytes);
        let largest = Bytes(self.largest_hole_bytes);
        let holes = plural(self.holes, "hole");
        match self.verdict {
            Verdict::Shortage => format!(
                "{wanted} were wanted; the segments had {usable} free and the driver {free}. This is a real shortage of \
                 {}, not fragmentation: {} were in live blocks.",
                Bytes(self.missing_bytes.unwrap_or(0)),
                Bytes(self.requested_bytes)
            ),
            Verdict::Fragmentation => format!(
                "{wanted} were wanted; {usable} were free in {holes}, the largest of {largest}, and the driver had \
                 {free}. Enough in all, but not in one piece."
            ),
            Verdict::Limit => {
                let (low, high) = (peak_before, self.reserved_bytes + self.segment_bytes);
                let only = if self.usable_free_bytes < self.wanted_bytes { "only " } else { "" };
                let inside = format!(
                    " Of the {} reserved, {only}{usable} were free for this request, in {holes} (the largest: {largest}).",
                    Bytes(self.reserved_bytes)
                );
                let cap = if low < high {
                    format!(
                        "either a limit of this process (torch.cuda.set_per_process_memory_fraction), which must lie \
                         between {} and {}, or the driver could not back the allocation with host memory",
                        Bytes(low),
                        Bytes(high)
                    )
                } else {
                    "no limit of this process explains it (it had reserved more before); the driver could not back \
                     the allocation with host memory, or another process took the memory since"
                        .to_owned()
                };
                format!("The GPU was not full ({free} free for a block of {wanted}): {cap}.{inside}")
            }
            Verdict::Retry => format!(
                "{wanted} were wanted and a hole of {largest} was free. PyTorch had just waited for blocks used on other \
                 streams and does not search its free blocks again after that; the same request succeeds when repeated."
            ),
        }
    }
}

fn live_requested(timeline: &Timeline, index: usize) -> u64 {
    timeline.active_after(index).map(|life| life.requested_bytes).sum()
}

/// The most that was reserved up to an event: a limit cannot be lower.
fn reserved_peak_before(snapshot: &Snapshot, timeline: &Timeline, index: usize) -> u64 {
    let trace = &snapshot.traces[timeline.device];
    let mut now = i128::from(timeline.reserved.start_bytes);
    let mut top = now;
    for (action, &bytes) in trace.actions().iter().zip(trace.sizes()).take(index) {
        match action {
            Action::SegmentAlloc | Action::SegmentMap => now += i128::from(bytes),
            Action::SegmentFree | Action::SegmentUnmap => now -= i128::from(bytes),
            _ => {}
        }
        top = top.max(now);
    }
    u64::try_from(top).unwrap_or(0)
}

/// The segments and mapped ranges at one moment, by address.
#[derive(Debug, Default)]
struct Ranges {
    by_start: BTreeMap<u64, Range>,
}

#[derive(Clone, Copy, Debug)]
struct Range {
    end: u64,
    stream: u64,
    is_small: bool,
    is_expandable: bool,
    /// `None` when no segment at the end tells.
    pool: Option<PoolId>,
}

#[derive(Clone, Copy, Debug)]
struct Hole {
    bytes: u64,
    stream: u64,
    is_small: bool,
    pool: Option<PoolId>,
}

impl Ranges {
    fn at_end(snapshot: &Snapshot, device: usize) -> Ranges {
        let mut ranges = Ranges::default();
        for segment in snapshot.segments.iter().filter(|s| usize::try_from(s.device) == Ok(device)) {
            let range = Range {
                end: segment.address.saturating_add(segment.total_size),
                stream: segment.stream,
                is_small: segment.kind == SegmentKind::Small,
                is_expandable: segment.is_expandable,
                pool: Some(segment.pool_id),
            };
            ranges.by_start.insert(segment.address, range);
        }
        ranges
    }

    fn undo(&mut self, event: &Event) {
        let end = event.addr.saturating_add(event.size);
        match event.action {
            Action::SegmentAlloc | Action::SegmentMap => self.cut(event.addr, end),
            Action::SegmentFree | Action::SegmentUnmap => {
                let range = Range {
                    end,
                    stream: event.stream,
                    // Small segments and pages are 2 MiB, all others at least 10 MiB; only a run of small
                    // pages unmapped together looks like a large one.
                    is_small: event.size == unhand_alloc::SMALL_BUFFER,
                    is_expandable: event.action == Action::SegmentUnmap,
                    pool: event.pool_id,
                };
                self.by_start.insert(event.addr, range);
            }
            _ => {}
        }
    }

    /// Takes `[from, to)` out; the rests of a range on both sides stay.
    fn cut(&mut self, from: u64, to: u64) {
        let before =
            self.by_start.range(..from).next_back().map(|(&s, &r)| (s, r)).filter(|(_, r)| r.end > from);
        let inside: Vec<(u64, Range)> =
            self.by_start.range(from..to.max(from)).map(|(&s, &r)| (s, r)).collect();
        for (start, range) in before.into_iter().chain(inside) {
            self.by_start.remove(&start);
            if start < from {
                self.by_start.insert(start, Range { end: from, ..range });
            }
            if range.end > to {
                self.by_start.insert(to, range);
            }
        }
    }

    fn total(&self) -> u64 {
        self.by_start.iter().map(|(start, range)| range.end - start).sum()
    }

    /// The free parts, given the sorted live blocks. Neighbouring ranges of one expandable segment are joined.
    fn holes(&self, live: &[(u64, u64)]) -> Vec<Hole> {
        let mut joined: Vec<(u64, Range)> = Vec::with_capacity(self.by_start.len());
        for (&start, &range) in &self.by_start {
            match joined.last_mut() {
                Some((_, last))
                    if last.end == start
                        && last.is_expandable
                        && range.is_expandable
                        && last.stream == range.stream
                        && last.is_small == range.is_small =>
                {
                    last.end = range.end;
                }
                _ => joined.push((start, range)),
            }
        }
        let mut holes = Vec::new();
        for (start, range) in joined {
            let mut free_from = start;
            let first = live.partition_point(|&(address, bytes)| address.saturating_add(bytes) <= start);
            for &(address, bytes) in live[first..].iter().take_while(|&&(address, _)| address < range.end) {
                if address > free_from {
                    holes.push(range.hole(address - free_from));
                }
                free_from = free_from.max(address.saturating_add(bytes));
            }
            if range.end > free_from {
                holes.push(range.hole(range.end - free_from));
            }
        }
        holes
    }
}

impl Range {
    fn hole(&self, bytes: u64) -> Hole {
        Hole { bytes, stream: self.stream, is_small: self.is_small, pool: self.pool }
    }
}
