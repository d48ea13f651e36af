//! Runs a program through the allocator and compares what it does with the recording.

use unhand_alloc::{
    Action, AllocError, Allocation, DeviceAllocator, HistoryLevel, NullDevice, Profile, Release, Request,
    Route, Settings, StreamId,
};

use super::program::{Op, Program};
use super::{Difference, DriverCalls, Figures, PeakEvents, RanOut, Run, SegmentEvent, WhatIf, merge_conf};
use crate::error::{Error, Result};

/// More than any device has: without a limit memory never runs out.
const UNLIMITED: u64 = 1 << 44;
/// Events are recorded on streams with these handles, which no driver gives out.
const OTHER_STREAMS: u64 = 1 << 63;

/// Under which conditions a program runs.
pub(super) struct Conditions {
    pub(super) settings: Settings,
    pub(super) profile: Profile,
    pub(super) limit: Option<u64>,
    /// Segments go to their recorded addresses, and the device refuses what it refused.
    pub(super) as_recorded: bool,
}

impl Program {
    /// The run under the recorded settings.
    ///
    /// # Errors
    /// [`Error::Replay`] when the allocator cannot follow the recording.
    pub fn recorded(&self) -> Result<Run> {
        self.run(Conditions {
            settings: self.settings.clone(),
            profile: self.profile,
            limit: self.limit,
            as_recorded: true,
        })
    }

    /// The run under changed settings, memory or rules.
    ///
    /// # Errors
    /// [`Error::Settings`] when the settings are refused, and as [`recorded`](Program::recorded).
    pub fn under(&self, what_if: &WhatIf) -> Result<Run> {
        let profile = what_if.release.map_or(self.profile, Profile::of);
        // Keys may be newer than the recording; the rules stay the recording's unless a release is named.
        let parser = Profile::of(what_if.release.unwrap_or(self.profile.release.max(Release::V2_11)));
        let mut settings = self.settings.clone();
        let conf = merge_conf(&self.settings.conf, &what_if.conf);
        if !what_if.conf.is_empty() {
            let (max_split, threshold) = (settings.max_split_size, settings.garbage_collection_threshold);
            let (table, recorded_conf) = (settings.roundup_power2_divisions, settings.conf.is_empty());
            settings.apply(&conf, &parser)?;
            if recorded_conf {
                // Settings that were not made by the string stay, unless the change names them.
                let names = |key: &str| what_if.conf.contains(key);
                if !names("max_split_size_mb") {
                    settings.max_split_size = max_split;
                }
                if !names("garbage_collection_threshold") {
                    settings.garbage_collection_threshold = threshold;
                }
                if !names("roundup_power2_divisions") {
                    settings.roundup_power2_divisions = table;
                }
            }
        }
        let limit = what_if.memory_bytes.or(self.limit);
        self.run(Conditions { settings, profile, limit, as_recorded: false })
    }

    pub(super) fn run(&self, conditions: Conditions) -> Result<Run> {
        Engine::new(self, conditions)?.run()
    }
}

struct Engine<'a> {
    program: &'a Program,
    allocator: DeviceAllocator<NullDevice>,
    as_recorded: bool,
    blocks: Vec<Option<Allocation>>,
    /// Streams that are busy for one block each, by block; a handle is used again once its block is done.
    busy: rustc_hash::FxHashMap<u32, StreamId>,
    idle: Vec<StreamId>,
    streams: u64,
    held_pools: Vec<bool>,
    peak: Figures,
    peak_events: PeakEvents,
    placed: u64,
    mallocs: usize,
    ran_out: Option<RanOut>,
    failed_events: Vec<usize>,
    settings: String,
    approximate: Option<&'static str>,
}

impl<'a> Engine<'a> {
    fn new(program: &'a Program, conditions: Conditions) -> Result<Engine<'a>> {
        let settings = conditions.settings.conf.clone();
        let device = NullDevice::new(UNLIMITED);
        let mut allocator = DeviceAllocator::with_settings(device, conditions.settings, conditions.profile);
        allocator.set_memory_limit(conditions.limit);
        let mut engine = Engine {
            program,
            allocator,
            as_recorded: conditions.as_recorded,
            blocks: vec![None; program.blocks as usize],
            busy: rustc_hash::FxHashMap::default(),
            idle: Vec::new(),
            streams: 0,
            held_pools: vec![false; program.pools.len()],
            peak: Figures::default(),
            peak_events: PeakEvents::default(),
            placed: 0,
            mallocs: 0,
            ran_out: None,
            failed_events: Vec::new(),
            settings,
            approximate: None,
        };
        engine.start()?;
        engine.allocator.record_memory_history(true, HistoryLevel::Never, usize::MAX, true);
        engine.allocator.skip_history_actions(&[
            Action::Alloc,
            Action::FreeRequested,
            Action::FreeCompleted,
            Action::Snapshot,
        ]);
        Ok(engine)
    }

    /// Brings back what was there when the history began.
    fn start(&mut self) -> Result<()> {
        if self.program.start.is_empty() {
            return Ok(());
        }
        if self.as_recorded {
            self.approximate = Some(
                "the history begins in the middle of the run: how large blocks were that it only sees freed is estimated",
            );
            self.allocator.restore(&self.program.start).map_err(Error::Replay)?;
            for (block, address, ..) in &self.program.start_blocks {
                self.blocks[*block as usize] = self.allocator.find(*address);
            }
        } else {
            self.approximate = Some(
                "the history begins in the middle of the run: what was there before is laid out anew, block by block",
            );
            for (block, _, bytes, stream) in &self.program.start_blocks {
                let request = Request::new(*bytes).on(*stream);
                self.blocks[*block as usize] = self.allocator.malloc(request).ok();
            }
        }
        self.note_peaks(0);
        Ok(())
    }

    fn run(mut self) -> Result<Run> {
        for (op, event) in self.program.ops.iter().zip(&self.program.event_of) {
            self.step(*op, *event as usize).map_err(Error::Replay)?;
            if self.ran_out.is_some_and(|ran_out| !ran_out.as_recorded) {
                break;
            }
        }
        Ok(self.finish())
    }

    fn step(&mut self, op: Op, event: usize) -> Result<(), AllocError> {
        match op {
            Op::Malloc { block, bytes, stream, pool, detail } => {
                self.mallocs += 1;
                match self.malloc(bytes, stream, pool, detail) {
                    Ok(allocation) => {
                        let recorded = self.program.addresses.get(self.mallocs - 1);
                        self.placed += u64::from(recorded == Some(&allocation.address()));
                        self.blocks[block as usize] = Some(allocation);
                        self.note_peaks(event);
                    }
                    Err(AllocError::OutOfMemory(out)) => self.note_out(event, &out, false),
                    Err(error) => return Err(error),
                }
            }
            Op::Failed { bytes, stream, pool, detail } => match self.malloc(bytes, stream, pool, detail) {
                // What the program would have done with it is not known, so it goes back at once.
                Ok(allocation) => {
                    self.note_peaks(event);
                    self.allocator.free(allocation)?;
                }
                Err(AllocError::OutOfMemory(out)) => self.note_out(event, &out, true),
                Err(error) => return Err(error),
            },
            Op::Free { block } => {
                if let Some(allocation) = self.blocks[block as usize].take() {
                    self.allocator.free(allocation)?;
                }
            }
            Op::FreeLater { block } => {
                if let Some(allocation) = self.blocks[block as usize].take() {
                    let stream = self.idle.pop().unwrap_or_else(|| {
                        self.streams += 1;
                        StreamId(OTHER_STREAMS + self.streams)
                    });
                    self.allocator.device_mut().set_busy(stream);
                    self.allocator.record_stream(allocation, stream)?;
                    self.allocator.free(allocation)?;
                    self.busy.insert(block, stream);
                }
            }
            Op::Complete { block } => {
                if let Some(stream) = self.busy.remove(&block) {
                    self.allocator.device_mut().set_idle(stream);
                    self.allocator.poll_events()?;
                    self.idle.push(stream);
                }
            }
            Op::EmptyCache => self.allocator.empty_cache()?,
            Op::ReleasePool { pool } => {
                if std::mem::take(&mut self.held_pools[pool as usize]) {
                    self.allocator.release_pool(self.program.pools[pool as usize])?;
                }
            }
        }
        Ok(())
    }

    fn malloc(
        &mut self,
        bytes: u64,
        stream: StreamId,
        pool: u32,
        detail: u32,
    ) -> Result<Allocation, AllocError> {
        if self.as_recorded
            && let Some(detail) = self.program.detail(detail)
        {
            let device = self.allocator.device_mut();
            detail.segments.iter().for_each(|address| device.expect_segment(*address));
            detail.mapped.iter().for_each(|address| device.expect_reservation(*address));
            device.set_room(detail.room);
            let result = self.malloc_in_pool(bytes, stream, pool);
            let device = self.allocator.device_mut();
            device.clear_expectations();
            device.set_room(None);
            return result;
        }
        self.malloc_in_pool(bytes, stream, pool)
    }

    fn malloc_in_pool(&mut self, bytes: u64, stream: StreamId, pool: u32) -> Result<Allocation, AllocError> {
        let request = Request::new(bytes).on(stream);
        if pool == 0 {
            return self.allocator.malloc(request);
        }
        let id = self.program.pools[pool as usize];
        self.allocator.begin_allocate_to_pool(id, Route::All)?;
        let result = self.allocator.malloc(request);
        self.allocator.end_allocate_to_pool(id)?;
        // One hold stays until the recording gives the pool's memory back.
        if std::mem::replace(&mut self.held_pools[pool as usize], true) {
            self.allocator.release_pool(id)?;
        }
        result
    }

    #[inline]
    fn note_peaks(&mut self, event: usize) {
        let now = self.now();
        if now.requested_bytes > self.peak.requested_bytes {
            self.peak.requested_bytes = now.requested_bytes;
            self.peak_events.requested = Some(event);
        }
        if now.allocated_bytes > self.peak.allocated_bytes {
            self.peak.allocated_bytes = now.allocated_bytes;
            self.peak_events.allocated = Some(event);
        }
        if now.reserved_bytes > self.peak.reserved_bytes {
            self.peak.reserved_bytes = now.reserved_bytes;
            self.peak_events.reserved = Some(event);
        }
    }

    #[inline]
    fn now(&self) -> Figures {
        Figures {
            requested_bytes: self.allocator.memory_requested(),
            allocated_bytes: self.allocator.memory_allocated(),
            reserved_bytes: self.allocator.memory_reserved(),
        }
    }

    fn note_out(&mut self, event: usize, out: &unhand_alloc::OutOfMemory, recorded: bool) {
        let ran_out = RanOut {
            event,
            requested_bytes: out.requested_bytes,
            segment_bytes: out.segment_bytes,
            allocated_bytes: out.allocated_bytes,
            reserved_bytes: out.reserved_bytes,
            limit_bytes: out.allowed_bytes.unwrap_or(out.total_bytes),
            as_recorded: recorded,
        };
        self.ran_out.get_or_insert(ran_out);
        self.failed_events.push(event);
        // The latest failure that ends the run is the one to tell.
        if !recorded {
            self.ran_out = Some(ran_out);
        }
    }

    fn finish(self) -> Run {
        // A peak between two calls, inside a retry, is in the statistics only.
        let stats = self.allocator.memory_stats();
        let mut peak = self.peak;
        peak.reserved_bytes = peak.reserved_bytes.max(stats.reserved_bytes().peak.cast_unsigned());
        let mut calls = DriverCalls::default();
        let mut replayed = Vec::new();
        for entry in self.allocator.history() {
            match entry.action {
                Action::SegmentAlloc => calls.alloc += 1,
                Action::SegmentFree => calls.free += 1,
                Action::SegmentMap => calls.map += 1,
                Action::SegmentUnmap => calls.unmap += 1,
                _ => {}
            }
            replayed.push(SegmentEvent { action: entry.action.as_str(), size_bytes: entry.size });
        }
        let first_difference = self.first_difference(&replayed);
        let ended = self.ran_out.filter(|ran_out| !ran_out.as_recorded);
        Run {
            file: None,
            device: self.program.device,
            settings: self.settings.clone(),
            recorded: self.as_recorded,
            peak,
            end: self.now(),
            segments: self.allocator.memory_snapshot().len() as u64,
            driver_calls: calls,
            ooms: stats.num_ooms.cast_unsigned(),
            events: ended.map_or(self.program.events, |ran_out| ran_out.event + 1),
            same_as_recorded: first_difference.is_none(),
            first_difference,
            ran_out: self.ran_out,
            peak_events: self.peak_events,
            placement: (self.placed, self.mallocs as u64),
            failed_events: self.failed_events,
            approximate: self.approximate,
        }
    }

    fn first_difference(&self, replayed: &[SegmentEvent]) -> Option<Difference> {
        let recorded = &self.program.recorded;
        let at = (0..recorded.len().max(replayed.len()))
            .find(|&at| recorded.get(at).map(|(_, event)| event) != replayed.get(at))?;
        Some(Difference {
            event: recorded.get(at).or(recorded.last()).map_or(0, |(event, _)| *event),
            recorded: recorded.get(at).map(|(_, event)| *event),
            replayed: replayed.get(at).copied(),
        })
    }
}
