//! One pass over a device's history: the life of every block, and the three totals over time.

use rustc_hash::FxHashMap;
use unhand_snapshot::{Action, BlockState, Snapshot, StackId, Trace};

use crate::bounds;
use crate::error::{Error, Result};
use crate::rounding::Rounding;

/// The history of one device, digested.
///
/// Two things are not in a history and are put back here: blocks that lived before it began (seen by a free
/// without an allocation, or alive in the segments without one), and how much was reserved then (the segments
/// at the end, minus what the history added).
#[derive(Clone, Debug)]
pub struct Timeline {
    /// The device.
    pub device: usize,
    /// Every block seen, those from before the history first, then in the order of allocation.
    pub lives: Vec<Life>,
    /// Requested bytes of active blocks: alive, or freed and waiting for a stream
    /// (`requested_bytes` of `torch.cuda.memory_stats`).
    pub requested: Curve,
    /// Rounded bytes of allocated blocks. A lower bound of `allocated_bytes`: what a block keeps because its
    /// remainder was too small to split off is not in the history.
    pub allocated: Curve,
    /// Bytes of segments and mapped pages (`reserved_bytes`).
    pub reserved: Curve,
    /// Requested bytes freed but still waiting for another stream.
    pub pending: Curve,
    /// Number of events.
    pub n_events: usize,
    /// Time of the first event in microseconds since the epoch.
    pub first_time_us: Option<i64>,
    /// Time of the last event in microseconds since the epoch.
    pub last_time_us: Option<i64>,
    /// What the history misses.
    pub gaps: Gaps,
}

/// The life of one block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Life {
    /// The address.
    pub address: u64,
    /// Requested bytes.
    pub requested_bytes: u64,
    /// The stream it was allocated on (raw handle).
    pub stream: u64,
    /// The stack of the allocation.
    pub stack: StackId,
    /// The stack of the free request; equal to `stack` when frees recorded none of their own.
    pub free_stack: StackId,
    born: u32,
    released: u32,
    died: u32,
}

/// The course of one total.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Curve {
    /// Bytes when the history begins.
    pub start_bytes: u64,
    /// The largest total.
    pub peak_bytes: u64,
    /// The event after which the total is the largest for the first time; `None` when it never rises above
    /// the start.
    pub peak_event: Option<usize>,
    /// Bytes when the history ends.
    pub end_bytes: u64,
}

/// What a history misses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Gaps {
    /// Frees of blocks that no event allocated: they are older than the history.
    pub frees_without_alloc: u64,
    /// Blocks alive at the end that no event allocated.
    pub alive_without_alloc: u64,
    /// Allocations at an address that was still taken: the free was not recorded.
    pub allocs_over_live: u64,
    /// Blocks the history leaves alive, but the segments do not show.
    pub alive_not_in_segments: u64,
    /// Whether the reserved bytes at the start would be negative: segment events are missing.
    pub segment_events_missing: bool,
}

const NEVER: u32 = u32::MAX;

/// Running total relative to the unknown start.
#[derive(Clone, Copy, Default)]
struct Running {
    now: i128,
    top: i128,
    top_event: Option<usize>,
}

impl Life {
    /// The event that allocated it; `None` when it is older than the history.
    pub fn born(&self) -> Option<usize> {
        (self.born != NEVER).then_some(self.born as usize)
    }

    /// The event in which its owner let go of it.
    pub fn released(&self) -> Option<usize> {
        (self.released != NEVER).then_some(self.released as usize)
    }

    /// The event after which its bytes were free again.
    pub fn died(&self) -> Option<usize> {
        (self.died != NEVER).then_some(self.died as usize)
    }

    /// Whether it is active after `event`: allocated, or freed and waiting.
    pub fn is_active_after(&self, event: usize) -> bool {
        (self.born == NEVER || self.born as usize <= event)
            && (self.died == NEVER || self.died as usize > event)
    }

    /// Whether it is allocated after `event`.
    pub fn is_allocated_after(&self, event: usize) -> bool {
        self.is_active_after(event) && (self.released == NEVER || self.released as usize > event)
    }

    /// Whether it is still active when the history ends.
    pub fn survives(&self) -> bool {
        self.died == NEVER
    }
}

impl Timeline {
    /// Digests the history of `device`.
    ///
    /// ```no_run
    /// # fn ask(snapshot: &unhand_snapshot::Snapshot) -> unhand_analyze::Result<()> {
    /// let timeline = unhand_analyze::Timeline::of(snapshot, 0)?;
    /// println!("reserved at most {}", unhand_analyze::Bytes(timeline.reserved.peak_bytes));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::NoHistory`] when the snapshot has no event of this device, [`Error::Damaged`] when its sizes cannot
    /// be true.
    pub fn of(snapshot: &Snapshot, device: usize) -> Result<Timeline> {
        let trace =
            snapshot.traces.get(device).filter(|t| !t.is_empty()).ok_or(Error::NoHistory { device })?;
        bounds::check(snapshot, device)?;
        let mut pass = Pass::new(Rounding::of(&snapshot.settings), trace);
        for index in 0..trace.len() {
            pass.step(index);
        }
        Ok(pass.finish(snapshot, device))
    }

    /// The blocks active after `event`.
    pub fn active_after(&self, event: usize) -> impl Iterator<Item = &Life> {
        self.lives.iter().filter(move |life| life.is_active_after(event))
    }

    /// Microseconds from the first event to `event`.
    pub fn since_start_us(&self, snapshot: &Snapshot, event: usize) -> Option<i64> {
        let time = snapshot.traces.get(self.device).filter(|t| event < t.len())?.event(event).time_us?;
        Some(time.saturating_sub(self.first_time_us?))
    }

    /// Microseconds from the first event to the last.
    pub fn duration_us(&self) -> Option<i64> {
        Some(self.last_time_us?.saturating_sub(self.first_time_us?))
    }
}

struct Pass<'a> {
    trace: &'a Trace,
    rounding: Rounding,
    lives: Vec<Life>,
    /// Lives older than the history, found when they end.
    older: Vec<Life>,
    /// Requested bytes of those among them that were freed before the history and waited when it began.
    pending_before: Vec<u64>,
    at: FxHashMap<u64, Place>,
    requested: Running,
    allocated: Running,
    reserved: Running,
    pending: Running,
    gaps: Gaps,
}

/// Where the life of the block at an address is kept.
#[derive(Clone, Copy)]
enum Place {
    Seen(u32),
    Older(u32),
}

impl<'a> Pass<'a> {
    fn new(rounding: Rounding, trace: &'a Trace) -> Self {
        Pass {
            trace,
            rounding,
            lives: Vec::with_capacity(trace.len() / 3),
            older: Vec::new(),
            pending_before: Vec::new(),
            at: FxHashMap::default(),
            requested: Running::default(),
            allocated: Running::default(),
            reserved: Running::default(),
            pending: Running::default(),
            gaps: Gaps::default(),
        }
    }

    fn step(&mut self, index: usize) {
        let event = self.trace.event(index);
        let (address, bytes) = (event.addr, event.size);
        match event.action {
            Action::Alloc => {
                if let Some(place) = self.at.remove(&address) {
                    // Its free was not recorded. It ends here at the latest.
                    self.gaps.allocs_over_live += 1;
                    self.die(place, index, StackId::NONE);
                }
                let life = Life {
                    address,
                    requested_bytes: bytes,
                    stream: event.stream,
                    stack: event.stack,
                    free_stack: StackId::NONE,
                    born: short(index),
                    released: NEVER,
                    died: NEVER,
                };
                self.at.insert(address, Place::Seen(short(self.lives.len())));
                self.lives.push(life);
                self.requested.add(bytes, index);
                self.allocated.add(self.rounding.block_bytes(bytes), index);
            }
            Action::FreeRequested => {
                let place = self.place(address, bytes, event.stream);
                self.release(place, index, event.stack);
            }
            Action::FreeCompleted => {
                let place = if let Some(place) = self.at.remove(&address) {
                    place
                } else {
                    // Requested before the history, completed in it: it was pending, not allocated, at the start.
                    let place = self.place(address, bytes, event.stream);
                    self.life(place).released = 0;
                    self.pending_before.push(bytes);
                    self.at.remove(&address);
                    place
                };
                self.die(place, index, event.stack);
            }
            Action::Free => {
                let place = self.place(address, bytes, event.stream);
                self.at.remove(&address);
                self.die(place, index, event.stack);
            }
            Action::SegmentAlloc | Action::SegmentMap => self.reserved.add(bytes, index),
            Action::SegmentFree | Action::SegmentUnmap => self.reserved.now -= i128::from(bytes),
            Action::Snapshot | Action::Oom | Action::Annotate | Action::Other => {}
        }
    }

    fn life(&mut self, place: Place) -> &mut Life {
        match place {
            Place::Seen(i) => &mut self.lives[i as usize],
            Place::Older(i) => &mut self.older[i as usize],
        }
    }

    /// The block at an address; one from before the history is made up from what its free says.
    fn place(&mut self, address: u64, bytes: u64, stream: u64) -> Place {
        if let Some(&place) = self.at.get(&address) {
            return place;
        }
        self.gaps.frees_without_alloc += 1;
        let place = Place::Older(short(self.older.len()));
        self.older.push(older_life(address, bytes, stream, StackId::NONE));
        self.at.insert(address, place);
        place
    }

    /// The owner lets go: the block waits until its free completes.
    fn release(&mut self, place: Place, index: usize, stack: StackId) {
        let life = self.life(place);
        if life.released != NEVER {
            return;
        }
        life.released = short(index);
        life.free_stack = stack;
        let bytes = life.requested_bytes;
        self.allocated.now -= i128::from(self.rounding.block_bytes(bytes));
        self.pending.add(bytes, index);
    }

    /// The block is free: it waited, or was let go and freed in one.
    fn die(&mut self, place: Place, index: usize, stack: StackId) {
        let life = self.life(place);
        let bytes = life.requested_bytes;
        life.died = short(index);
        if life.released == NEVER {
            life.released = short(index);
            life.free_stack = stack;
            self.allocated.now -= i128::from(self.rounding.block_bytes(bytes));
        } else {
            self.pending.now -= i128::from(bytes);
        }
        self.requested.now -= i128::from(bytes);
    }

    fn finish(mut self, snapshot: &Snapshot, device: usize) -> Timeline {
        let mut reserved_end = 0;
        let mut has_segments = false;
        let mut in_segments = 0_usize;
        for segment in snapshot.segments.iter().filter(|s| usize::try_from(s.device) == Ok(device)) {
            has_segments = true;
            reserved_end += i128::from(segment.total_size);
            for block in segment.blocks.iter().filter(|b| b.state != BlockState::Inactive) {
                if self.at.contains_key(&block.address) {
                    in_segments += 1;
                } else {
                    self.gaps.alive_without_alloc += 1;
                    let mut life =
                        older_life(block.address, block.requested_size, segment.stream, block.stack);
                    if block.state == BlockState::ActivePendingFree {
                        life.released = 0;
                        self.pending_before.push(block.requested_size);
                    }
                    self.older.push(life);
                }
            }
        }
        if has_segments {
            self.gaps.alive_not_in_segments = self.at.len().saturating_sub(in_segments) as u64;
        }

        let rounding = self.rounding;
        let block = |bytes: u64| i128::from(rounding.block_bytes(bytes));
        let requested_start = self.older.iter().map(|life| i128::from(life.requested_bytes)).sum();
        let pending_start = self.pending_before.iter().map(|&bytes| i128::from(bytes)).sum();
        let allocated_start = self.older.iter().map(|life| block(life.requested_bytes)).sum::<i128>()
            - self.pending_before.iter().map(|&bytes| block(bytes)).sum::<i128>();
        let mut reserved_start = reserved_end - self.reserved.now;
        if !has_segments || reserved_start < 0 {
            // Without segments at the end, all that is known is what the history itself added.
            self.gaps.segment_events_missing = has_segments;
            reserved_start = (-self.reserved.now).max(0);
        }
        let times = |index: usize| self.trace.event(index).time_us;
        let (first_time_us, last_time_us) = (times(0), times(self.trace.len() - 1));
        let mut lives = self.older;
        lives.append(&mut self.lives);
        Timeline {
            device,
            lives,
            requested: self.requested.curve(requested_start),
            allocated: self.allocated.curve(allocated_start),
            reserved: self.reserved.curve(reserved_start),
            pending: self.pending.curve(pending_start),
            n_events: self.trace.len(),
            first_time_us,
            last_time_us,
            gaps: self.gaps,
        }
    }
}

fn older_life(address: u64, bytes: u64, stream: u64, stack: StackId) -> Life {
    Life {
        address,
        requested_bytes: bytes,
        stream,
        stack,
        free_stack: StackId::NONE,
        born: NEVER,
        released: NEVER,
        died: NEVER,
    }
}

/// Event and block indices are kept in 32 bits; a history of 4 billion events does not fit memory anyway.
fn short(index: usize) -> u32 {
    u32::try_from(index).unwrap_or(NEVER - 1)
}

impl Running {
    #[inline]
    fn add(&mut self, bytes: u64, event: usize) {
        self.now += i128::from(bytes);
        if self.now > self.top {
            self.top = self.now;
            self.top_event = Some(event);
        }
    }

    fn curve(self, start: i128) -> Curve {
        let bytes = |n: i128| u64::try_from(n.max(0)).unwrap_or(u64::MAX);
        Curve {
            start_bytes: bytes(start),
            peak_bytes: bytes(start + self.top),
            peak_event: self.top_event,
            end_bytes: bytes(start + self.now),
        }
    }
}
