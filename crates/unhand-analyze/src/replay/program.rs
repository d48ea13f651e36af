//! From a history to the calls that made it: which malloc, free and `empty_cache` left these events behind.
//!
//! One call leaves a group of events (`free_completed`*, `segment_free`*, `segment_alloc`*, `alloc`), so the
//! history is read group by group. Segments that were freed inside a malloc are told from `empty_cache` by
//! whether there was room without freeing them.

use rustc_hash::FxHashMap;
use unhand_alloc::{NullDevice, PoolId, Profile, RestoreSegment, Settings, StreamId};
use unhand_snapshot::{Action, Event, Snapshot};

use super::memory_map::MemoryMap;
use super::{SegmentEvent, recorded_settings, segment_action, start};
use crate::error::{Error, Result};

/// No entry in [`Program::details`].
const NO_DETAIL: u32 = u32::MAX;

/// One call.
#[derive(Clone, Copy, Debug)]
pub(super) enum Op {
    Malloc {
        block: u32,
        bytes: u64,
        stream: StreamId,
        pool: u32,
        detail: u32,
    },
    /// A malloc that ran out of memory; `bytes` is rounded already.
    Failed {
        bytes: u64,
        stream: StreamId,
        pool: u32,
        detail: u32,
    },
    Free {
        block: u32,
    },
    /// Freed while other streams were using it.
    FreeLater {
        block: u32,
    },
    /// Those streams have caught up.
    Complete {
        block: u32,
    },
    EmptyCache,
    /// Nobody holds this private pool any more.
    ReleasePool {
        pool: u32,
    },
}

/// What is known beside the call when it is replayed as recorded.
#[derive(Clone, Debug, Default)]
pub(super) struct Detail {
    /// Where its segments were.
    pub(super) segments: Vec<u64>,
    /// Where pages were mapped.
    pub(super) mapped: Vec<u64>,
    /// The bytes the device was willing to give on top of what was held, if it asked for some back first.
    pub(super) room: Option<i64>,
}

/// A recorded run as calls, ready to be replayed any number of times.
#[derive(Debug)]
pub struct Program {
    pub(super) device: usize,
    pub(super) ops: Vec<Op>,
    /// The event behind each call.
    pub(super) event_of: Vec<u32>,
    details: Vec<Detail>,
    /// Addresses of all mallocs, in order, to see how many land where they were.
    pub(super) addresses: Vec<u64>,
    pub(super) blocks: u32,
    pub(super) pools: Vec<PoolId>,
    pub(super) recorded: Vec<(usize, SegmentEvent)>,
    pub(super) events: usize,
    pub(super) settings: Settings,
    pub(super) profile: Profile,
    /// What was there before the first event.
    pub(super) start: Vec<RestoreSegment>,
    /// Blocks of `start` that are handed out: (block, address, requested bytes, stream).
    pub(super) start_blocks: Vec<(u32, u64, u64, StreamId)>,
    /// The bytes PyTorch was allowed to hold, if the history shows it.
    pub(super) limit: Option<u64>,
}

impl Program {
    /// Reads the history of one device.
    ///
    /// # Errors
    /// [`Error::NoHistory`] when there is none.
    pub fn of(snapshot: &Snapshot, device: usize) -> Result<Program> {
        let trace = snapshot.traces.get(device).ok_or(Error::NoHistory { device })?;
        if !trace.actions().contains(&Action::Alloc) {
            return Err(Error::NoHistory { device });
        }
        let (settings, profile) = recorded_settings(snapshot);
        let program = Program {
            device,
            ops: Vec::with_capacity(trace.len() / 2),
            event_of: Vec::with_capacity(trace.len() / 2),
            details: Vec::new(),
            addresses: Vec::new(),
            blocks: 0,
            pools: vec![PoolId::DEFAULT],
            recorded: Vec::new(),
            events: trace.len(),
            settings,
            profile,
            start: Vec::new(),
            start_blocks: Vec::new(),
            limit: None,
        };
        let mut reader = Reader::new(snapshot, device, program);
        reader.begin_with(start::reconstruct(snapshot, device));
        reader.read();
        let mut program = reader.program;
        program.limit = super::limit::infer(&program)?;
        Ok(program)
    }

    /// `PYTORCH_CUDA_ALLOC_CONF` of the recording.
    pub fn conf(&self) -> &str {
        &self.settings.conf
    }

    /// The bytes PyTorch was allowed to hold, as far as the history shows it: exact behaviour, a limit that
    /// explains every garbage collection and out-of-memory error.
    pub fn limit_bytes(&self) -> Option<u64> {
        self.limit
    }

    /// The release whose rules the recording follows.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    pub(super) fn detail(&self, index: u32) -> Option<&Detail> {
        self.details.get(index as usize)
    }
}

/// The events one malloc left.
#[derive(Debug, Default)]
struct Group {
    completed: Vec<u64>,
    freed: Vec<Event>,
    added: Vec<Event>,
}

struct Reader<'a> {
    snapshot: &'a Snapshot,
    device: usize,
    program: Program,
    /// Handed out, by recorded address.
    live: FxHashMap<u64, u32>,
    /// Freed and waiting, by recorded address.
    waiting: FxHashMap<u64, u32>,
    pool_numbers: FxHashMap<PoolId, u32>,
    map: MemoryMap,
    reserved: u64,
    peak_reserved: u64,
}

impl<'a> Reader<'a> {
    fn new(snapshot: &'a Snapshot, device: usize, program: Program) -> Reader<'a> {
        let map = MemoryMap::of(snapshot, device);
        let peak_reserved = map.peak_reserved();
        Reader {
            snapshot,
            device,
            program,
            live: FxHashMap::default(),
            waiting: FxHashMap::default(),
            pool_numbers: FxHashMap::from_iter([(PoolId::DEFAULT, 0)]),
            map,
            reserved: 0,
            peak_reserved,
        }
    }

    fn begin_with(&mut self, start: Vec<RestoreSegment>) {
        for segment in &start {
            let mut address = segment.address;
            for block in &segment.blocks {
                self.reserved += block.size;
                if block.state != unhand_alloc::BlockState::Inactive {
                    let number = self.new_block();
                    self.live.insert(address, number);
                    let known = (number, address, block.requested_size, segment.stream);
                    self.program.start_blocks.push(known);
                }
                address += block.size;
            }
        }
        self.program.start = start;
        self.peak_reserved = self.peak_reserved.max(self.reserved);
    }

    fn new_block(&mut self) -> u32 {
        self.program.blocks += 1;
        self.program.blocks - 1
    }

    fn push(&mut self, event: usize, op: Op) {
        self.program.ops.push(op);
        self.program.event_of.push(u32::try_from(event).unwrap_or(u32::MAX));
    }

    fn read(&mut self) {
        let trace = &self.snapshot.traces[self.device];
        let mut at = 0;
        while at < trace.len() {
            let event = trace.event(at);
            match event.action {
                Action::FreeRequested => {
                    let done = at + 1 < trace.len() && {
                        let next = trace.event(at + 1);
                        next.action == Action::FreeCompleted && next.addr == event.addr
                    };
                    if let Some(block) = self.live.remove(&event.addr) {
                        if done {
                            self.push(at, Op::Free { block });
                        } else {
                            self.push(at, Op::FreeLater { block });
                            self.waiting.insert(event.addr, block);
                        }
                    }
                    at += 1 + usize::from(done);
                }
                Action::Free => {
                    if let Some(block) = self.live.remove(&event.addr) {
                        self.push(at, Op::Free { block });
                    }
                    at += 1;
                }
                Action::Snapshot | Action::Annotate | Action::Other => at += 1,
                _ => at = self.read_group(at),
            }
        }
    }

    /// Reads the events of one malloc, or of an `empty_cache` before it; returns where the next begins.
    fn read_group(&mut self, first: usize) -> usize {
        let trace = &self.snapshot.traces[self.device];
        let mut group = Group::default();
        let mut at = first;
        while at < trace.len() {
            let event = trace.event(at);
            if let Some(action) = segment_action(event.action) {
                self.program.recorded.push((at, SegmentEvent { action, size_bytes: event.size }));
            }
            match event.action {
                Action::FreeCompleted if group.freed.is_empty() && group.added.is_empty() => {
                    group.completed.push(event.addr);
                }
                Action::SegmentFree | Action::SegmentUnmap => group.freed.push(event),
                Action::SegmentAlloc | Action::SegmentMap => group.added.push(event),
                Action::Alloc | Action::Oom => {
                    self.malloc(at, &group, event);
                    return at + 1;
                }
                Action::Snapshot | Action::Annotate | Action::Other => {}
                Action::FreeRequested | Action::Free | Action::FreeCompleted => break,
            }
            at += 1;
        }
        self.complete(first, &group.completed);
        self.give_back(first, &group);
        // Segments without an allocation after them: the history leaves allocations out, or ends here.
        for added in &group.added {
            self.map.insert(added, added.pool_id.map(|id| PoolId(id.0, id.1)));
            self.reserved += added.size;
        }
        at.max(first + 1)
    }

    fn complete(&mut self, event: usize, addresses: &[u64]) {
        for address in addresses {
            if let Some(block) = self.waiting.remove(address) {
                self.push(event, Op::Complete { block });
            } else if let Some(block) = self.live.remove(address) {
                // Its `free_requested` came before the history began.
                self.push(event, Op::Free { block });
            }
        }
    }

    /// An `empty_cache` that left these events behind.
    fn give_back(&mut self, event: usize, group: &Group) {
        if group.freed.is_empty() {
            return;
        }
        let mut released: Vec<PoolId> = Vec::new();
        for freed in &group.freed {
            let pool = self.map.remove(freed);
            if !pool.is_default() && !released.contains(&pool) {
                released.push(pool);
            }
            self.reserved = self.reserved.saturating_sub(freed.size);
        }
        for pool in released {
            let pool = self.pool_number(pool);
            self.push(event, Op::ReleasePool { pool });
        }
        self.push(event, Op::EmptyCache);
    }

    fn pool_number(&mut self, id: PoolId) -> u32 {
        let next = u32::try_from(self.program.pools.len()).unwrap_or(u32::MAX);
        let number = *self.pool_numbers.entry(id).or_insert(next);
        if number == next {
            self.program.pools.push(id);
        }
        number
    }

    fn malloc(&mut self, at: usize, group: &Group, event: Event) {
        let added: u64 = group.added.iter().map(|event| event.size).sum();
        let ran_out = event.action == Action::Oom;
        let collects = self.program.settings.garbage_collection_threshold > 0.0;
        // Without freeing anything there would have been more than there ever was: the device said no first.
        let no_room = self.reserved + added > self.peak_reserved;
        let inside = !group.freed.is_empty() && (ran_out || (added > 0 && (collects || no_room)));

        let mut detail = Detail::default();
        if inside || ran_out {
            let rounded = |events: &[Event]| {
                events.iter().map(|event| NullDevice::rounded(event.size).cast_signed()).sum::<i64>()
            };
            detail.room = Some(rounded(&group.added) - rounded(&group.freed));
        }
        if !inside {
            self.complete(at, &group.completed);
            self.give_back(at, group);
        }
        for added in &group.added {
            match added.action {
                Action::SegmentAlloc => detail.segments.push(added.addr),
                _ => detail.mapped.push(added.addr),
            }
        }
        let explicit = event.pool_id.map(|id| PoolId(id.0, id.1));
        for added in &group.added {
            let pool = added.pool_id.map(|id| PoolId(id.0, id.1));
            self.map.insert(added, pool);
        }
        if inside {
            for freed in &group.freed {
                self.map.remove(freed);
                self.reserved = self.reserved.saturating_sub(freed.size);
            }
        }
        self.reserved += added;
        self.peak_reserved = self.peak_reserved.max(self.reserved);

        let stream = StreamId(event.stream);
        if ran_out {
            let pool = self.pool_number(explicit.unwrap_or(PoolId::DEFAULT));
            let detail = self.keep(detail);
            self.push(at, Op::Failed { bytes: event.size, stream, pool, detail });
        } else {
            let pool = explicit.unwrap_or_else(|| self.map.pool_of(event.addr));
            let pool = self.pool_number(pool);
            let is_plain = detail.room.is_none() && group.added.is_empty();
            let detail = if is_plain { NO_DETAIL } else { self.keep(detail) };
            let block = self.new_block();
            self.program.addresses.push(event.addr);
            self.push(at, Op::Malloc { block, bytes: event.size, stream, pool, detail });
            self.live.insert(event.addr, block);
        }
        if inside {
            self.complete(at, &group.completed);
        }
    }

    fn keep(&mut self, detail: Detail) -> u32 {
        self.program.details.push(detail);
        u32::try_from(self.program.details.len() - 1).unwrap_or(NO_DETAIL)
    }
}
