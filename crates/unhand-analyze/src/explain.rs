//! Answers `explain`: what held the memory at the peak and at the end, what pins the cache, what leaks.

mod text;

use rustc_hash::FxHashMap;
use serde::Serialize;
use unhand_snapshot::{BlockState, PoolId, Snapshot, Warning};

use crate::bounds;
use crate::category::Category;
use crate::error::{Error, Result};
use crate::holding::{HeldBlock, Holding, LifeFacts, gather};
use crate::leaks::Leaks;
use crate::oom::{self, OutOfMemory};
use crate::pins::Cache;
use crate::places::{PoolShare, StreamShare, shares};
use crate::rounding::Rounding;
use crate::site::Sites;
use crate::spans::Spans;
use crate::timeline::{Curve, Life, Timeline};

pub use text::{TextOptions, render, render_holding};

/// The version of the JSON form of every answer of this crate.
pub const SCHEMA_VERSION: u32 = 1;

/// What to put into an [`Explanation`].
#[derive(Clone, Debug, Default)]
pub struct ExplainOptions {
    /// The name to carry in the answer, usually the path as the user gave it.
    pub file: Option<String>,
    /// The exact peak of allocated bytes, from a replay; without it only a lower bound is known.
    pub true_peaks: Option<TruePeaks>,
    /// Whether every holder lists its full stacks.
    pub stacks: bool,
}

/// What only a replay of the history knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TruePeaks {
    /// The peak of allocated bytes.
    pub allocated_bytes: u64,
    /// The event after which it was reached.
    pub allocated_event: Option<usize>,
}

/// Everything `explain` says about one device of one snapshot.
#[derive(Clone, Debug, Serialize)]
pub struct Explanation {
    /// [`SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The file, as the caller named it.
    pub file: Option<String>,
    /// The device.
    pub device: usize,
    /// What was recorded.
    pub recording: Recording,
    /// The three peaks; `None` without a history.
    pub peak: Option<Peaks>,
    /// The blocks active at the peak of requested bytes; `None` without a history.
    pub at_peak: Option<Holding>,
    /// The state when the snapshot was taken.
    pub end: End,
    /// Leak suspects; `None` without a history.
    pub leaks: Option<Leaks>,
    /// The out-of-memory errors in the history.
    pub ooms: Vec<OutOfMemory>,
    /// What to do. Filled by the caller, who can replay the history under other settings.
    pub advice: Vec<Advice>,
    /// What the reader should know about the file, in plain words.
    pub notes: Vec<String>,
}

/// What was recorded.
#[derive(Clone, Debug, Serialize)]
pub struct Recording {
    /// Number of events; 0 without a history.
    pub events: usize,
    /// Time of the first event in microseconds since the epoch.
    pub first_time_us: Option<i64>,
    /// Microseconds from the first event to the last.
    pub duration_us: Option<i64>,
    /// Whether call stacks were recorded.
    pub has_stacks: bool,
    /// Steps told by annotations; `None` when none are annotated.
    pub steps: Option<usize>,
    /// The allocator settings (`PYTORCH_CUDA_ALLOC_CONF`); `None` in files of torch before 2.3.
    pub settings: Option<String>,
    /// The releases of PyTorch that write such files.
    pub torch_release: String,
    /// Blocks that lived before the history began.
    pub blocks_older_than_history: u64,
}

/// The largest totals in the history.
#[derive(Clone, Debug, Serialize)]
pub struct Peaks {
    /// Bytes asked for by active blocks.
    pub requested: Peak,
    /// Bytes of allocated blocks.
    pub allocated: Peak,
    /// Bytes held from the driver.
    pub reserved: Peak,
}

/// One peak and when it was.
#[derive(Clone, Debug, Serialize)]
pub struct Peak {
    /// The bytes.
    pub peak_bytes: u64,
    /// Whether this is the figure itself, within the recorded history; otherwise it is the least it can be.
    pub is_exact: bool,
    /// The event after which it was first reached; `None` when that was before the history began.
    pub event_index: Option<usize>,
    /// Microseconds since the first event.
    pub since_start_us: Option<i64>,
    /// The innermost annotation open then: `Optimizer.step#AdamW.step`.
    pub during: Option<String>,
    /// The step it fell into, counted from 1; `None` without annotated steps or after the last.
    pub step: Option<usize>,
}

/// The state when the snapshot was taken.
#[derive(Clone, Debug, Serialize)]
pub struct End {
    /// Bytes asked for by active blocks.
    pub requested_bytes: u64,
    /// Bytes of allocated blocks.
    pub allocated_bytes: u64,
    /// Bytes held from the driver.
    pub reserved_bytes: u64,
    /// Bytes of blocks that were freed and wait for another stream.
    pub pending_bytes: u64,
    /// Number of such blocks.
    pub pending_blocks: u64,
    /// Number of segments (of an expandable segment, each mapped range counts).
    pub segments: u64,
    /// The blocks still active, by holder.
    pub holding: Holding,
    /// What is reserved but holds no block.
    pub cache: Cache,
    /// The same totals by stream, largest reservation first.
    pub streams: Vec<StreamShare>,
    /// The same totals by memory pool, largest reservation first.
    pub pools: Vec<PoolShare>,
}

/// One thing to do, with what it gains.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Advice {
    /// The advice as a sentence.
    pub sentence: String,
    /// The setting to use, as written in `PYTORCH_CUDA_ALLOC_CONF`, if that is the advice.
    pub settings: Option<String>,
    /// Bytes by which the reserved peak falls; `None` when that is not known.
    pub saves_bytes: Option<u64>,
}

/// The devices a snapshot says something about: those with events or segments.
pub fn devices(snapshot: &Snapshot) -> Vec<usize> {
    let mut devices: Vec<usize> =
        snapshot.segments.iter().filter_map(|s| usize::try_from(s.device).ok()).collect();
    devices.extend(snapshot.traces.iter().enumerate().filter(|(_, t)| !t.is_empty()).map(|(i, _)| i));
    devices.sort_unstable();
    devices.dedup();
    devices
}

/// Explains one device of a snapshot. Without a history the segments alone are explained.
///
/// # Errors
/// [`Error::NoSuchDevice`] when the snapshot has neither events nor segments of the device,
/// [`Error::Damaged`] when its sizes cannot be true.
pub fn explain(snapshot: &Snapshot, device: usize, options: &ExplainOptions) -> Result<Explanation> {
    let present = devices(snapshot);
    // A process that recorded and held nothing still has its (empty) device 0 explained.
    let is_known = present.contains(&device) || (present.is_empty() && device == 0);
    if !is_known {
        return Err(no_such_device(device, &present));
    }
    bounds::check(snapshot, device)?;
    let timeline = Timeline::of(snapshot, device).ok();
    let rounding = Rounding::of(&snapshot.settings);
    let spans = Spans::of(snapshot, device);
    let mut sites = Sites::new(snapshot);
    let mut facts = LifeFacts::of(timeline.as_ref());

    let peak = timeline.as_ref().map(|t| peaks(snapshot, t, &spans, options.true_peaks));
    let at_peak = timeline.as_ref().map(|t| {
        let moment = t.requested.peak_event;
        hold_at(snapshot, t, moment, &rounding, &mut sites, &mut facts, options.stacks)
    });
    let end = end(snapshot, device, timeline.as_ref(), &rounding, &mut sites, &mut facts, options.stacks);
    let leaks = timeline.as_ref().map(|t| Leaks::find(snapshot, t, &spans, &mut sites, &mut facts));
    let mut ooms = timeline.as_ref().map(|t| oom::find(snapshot, t, &rounding)).unwrap_or_default();
    for oom in &mut ooms {
        let time = snapshot.traces[device].event(oom.event_index).time_us;
        oom.during = time.and_then(|t| spans.innermost_at(t)).map(|s| s.name.clone());
        if let Some(timeline) = &timeline {
            let at = Some(oom.event_index);
            oom.holders = hold_at(snapshot, timeline, at, &rounding, &mut sites, &mut facts, false).holders;
            oom.holders.truncate(5);
        }
    }

    let gaps = timeline.as_ref().map(|t| t.gaps).unwrap_or_default();
    let recording = Recording {
        events: timeline.as_ref().map_or(0, |t| t.n_events),
        first_time_us: timeline.as_ref().and_then(|t| t.first_time_us),
        duration_us: timeline.as_ref().and_then(Timeline::duration_us),
        has_stacks: sites.has_stacks(),
        steps: Some(spans.step_ends_us().len()).filter(|&n| n > 0),
        settings: snapshot.settings.present.then(|| snapshot.settings.conf.clone()),
        torch_release: snapshot.release_guess().to_string(),
        blocks_older_than_history: gaps.frees_without_alloc + gaps.alive_without_alloc,
    };
    let notes = notes(snapshot, device, timeline.as_ref(), &end);
    Ok(Explanation {
        schema_version: SCHEMA_VERSION,
        file: options.file.clone(),
        device,
        recording,
        peak,
        at_peak,
        end,
        leaks,
        ooms,
        advice: Vec::new(),
        notes,
    })
}

pub(crate) fn no_such_device(device: usize, present: &[usize]) -> Error {
    let present = if present.is_empty() {
        "none".to_owned()
    } else {
        present.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
    };
    Error::NoSuchDevice { device, present }
}

fn peaks(snapshot: &Snapshot, timeline: &Timeline, spans: &Spans, truth: Option<TruePeaks>) -> Peaks {
    let peak = |bytes: u64, event: Option<usize>, is_exact: bool| {
        let time = event.and_then(|e| snapshot.traces[timeline.device].event(e).time_us);
        Peak {
            peak_bytes: bytes,
            is_exact,
            event_index: event,
            since_start_us: event.and_then(|e| timeline.since_start_us(snapshot, e)),
            during: time.and_then(|t| spans.innermost_at(t)).map(|s| s.name.clone()),
            step: time.and_then(|t| spans.step_at(t)),
        }
    };
    let of = |curve: Curve, is_exact| peak(curve.peak_bytes, curve.peak_event, is_exact);
    Peaks {
        requested: of(timeline.requested, true),
        allocated: match truth {
            Some(truth) => peak(truth.allocated_bytes, truth.allocated_event, true),
            None => of(timeline.allocated, false),
        },
        reserved: of(timeline.reserved, !timeline.gaps.segment_events_missing),
    }
}

/// The blocks active after an event; before the first one when there is none.
pub(crate) fn hold_at(
    snapshot: &Snapshot,
    timeline: &Timeline,
    moment: Option<usize>,
    rounding: &Rounding,
    sites: &mut Sites<'_>,
    facts: &mut LifeFacts,
    with_stacks: bool,
) -> Holding {
    let trace = &snapshot.traces[timeline.device];
    let pools = PoolLookup::new(snapshot, timeline.device);
    let now = moment.and_then(|event| trace.event(event).time_us);
    let is_active = |life: &&Life| match moment {
        Some(event) => life.is_active_after(event),
        None => life.born().is_none(),
    };
    let mut blocks = Vec::new();
    for life in timeline.lives.iter().filter(is_active) {
        let born = life.born().map(|event| trace.event(event));
        blocks.push(HeldBlock {
            stack: life.stack,
            category: facts.category(snapshot, sites, life),
            is_older: born.is_none(),
            requested_bytes: life.requested_bytes,
            allocated_bytes: rounding.block_bytes(life.requested_bytes),
            stream: life.stream,
            pool: born.and_then(|e| e.pool_id).unwrap_or_else(|| pools.at(life.address)),
            age_us: born.and_then(|e| e.time_us).zip(now).map(|(born, now)| now.saturating_sub(born)),
        });
    }
    gather(sites, blocks, with_stacks)
}

fn end(
    snapshot: &Snapshot,
    device: usize,
    timeline: Option<&Timeline>,
    rounding: &Rounding,
    sites: &mut Sites<'_>,
    facts: &mut LifeFacts,
    with_stacks: bool,
) -> End {
    let segments: Vec<_> =
        snapshot.segments.iter().filter(|s| usize::try_from(s.device) == Ok(device)).collect();
    let survivors: FxHashMap<u64, &Life> =
        timeline.iter().flat_map(|t| &t.lives).filter(|l| l.survives()).map(|l| (l.address, l)).collect();
    let mut blocks = Vec::new();
    let (mut allocated_bytes, mut pending_bytes, mut pending_blocks) = (0, 0, 0);
    for segment in &segments {
        for block in segment.blocks.iter().filter(|b| b.state != BlockState::Inactive) {
            if block.state == BlockState::ActivePendingFree {
                pending_bytes += block.size;
                pending_blocks += 1;
            } else {
                allocated_bytes += block.size;
            }
            let life = survivors.get(&block.address).copied();
            let category = match life {
                Some(life) => facts.category(snapshot, sites, life),
                None if sites.has_stacks() && !block.stack.is_none() => sites.of(block.stack).1,
                None => Category::Unknown,
            };
            let born = life.and_then(Life::born).and_then(|e| snapshot.traces.get(device)?.event(e).time_us);
            blocks.push(HeldBlock {
                stack: block.stack,
                category,
                is_older: life.is_none_or(|l| l.born().is_none()),
                requested_bytes: block.requested_size,
                allocated_bytes: block.size,
                stream: segment.stream,
                pool: segment.pool_id,
                age_us: born
                    .zip(timeline.and_then(|t| t.last_time_us))
                    .map(|(born, now)| now.saturating_sub(born)),
            });
        }
    }
    let holding = gather(sites, blocks, with_stacks);
    let (streams, pools) = shares(snapshot, device, rounding, sites);
    End {
        requested_bytes: holding.requested_bytes,
        allocated_bytes,
        reserved_bytes: segments.iter().map(|s| s.total_size).sum(),
        pending_bytes,
        pending_blocks,
        segments: segments.len() as u64,
        cache: Cache::of(segments, rounding, sites),
        holding,
        streams,
        pools,
    }
}

/// The pool of an address, told by the segment that is there at the end. Where a segment went back and
/// another came, this may be wrong; events carry their pool only since torch 2.12.
struct PoolLookup {
    ranges: Vec<(u64, u64, PoolId)>,
}

impl PoolLookup {
    fn new(snapshot: &Snapshot, device: usize) -> Self {
        let of_device = snapshot.segments.iter().filter(|s| usize::try_from(s.device) == Ok(device));
        let mut ranges: Vec<_> =
            of_device.map(|s| (s.address, s.address.saturating_add(s.total_size), s.pool_id)).collect();
        ranges.sort_unstable();
        PoolLookup { ranges }
    }

    fn at(&self, address: u64) -> PoolId {
        let next = self.ranges.partition_point(|&(start, ..)| start <= address);
        self.ranges[..next]
            .last()
            .filter(|(_, end, _)| address < *end)
            .map_or(PoolId::default(), |&(.., pool)| pool)
    }
}

fn notes(snapshot: &Snapshot, device: usize, timeline: Option<&Timeline>, end: &End) -> Vec<String> {
    let mut notes = Vec::new();
    for warning in &snapshot.warnings {
        let of_other_device = match warning {
            Warning::OrderRepaired { device: d, .. } | Warning::RingWrapped { device: d, .. } => {
                usize::try_from(*d) != Ok(device)
            }
            _ => false,
        };
        if !of_other_device {
            notes.push(format!("{warning}."));
        }
    }
    let Some(timeline) = timeline else {
        notes.push(
            "No history was recorded: only the state at the end is known. Call \
             torch.cuda.memory._record_memory_history() before the part to look at."
                .to_owned(),
        );
        return notes;
    };
    let gaps = timeline.gaps;
    let older = gaps.frees_without_alloc + gaps.alive_without_alloc;
    if older > 0 {
        notes.push(format!(
            "{} lived before the history began (it started late, or its ring buffer wrapped): peaks before that are \
             not known.",
            crate::prose::plural(older, "block")
        ));
    }
    if gaps.allocs_over_live > 0 || gaps.alive_not_in_segments > 0 {
        notes.push(format!(
            "The history has gaps: {} were not recorded (skip_actions, or recording was switched off in between).",
            crate::prose::plural(gaps.allocs_over_live + gaps.alive_not_in_segments, "free")
        ));
    }
    if gaps.segment_events_missing {
        notes.push(
            "Segment events are missing from the history: the reserved peak is a lower bound.".to_owned(),
        );
    }
    if end.segments == 0 && timeline.reserved.end_bytes > 0 {
        notes.push("The file has no segments: the state at the end is not known.".to_owned());
    }
    if snapshot.settings.expandable_segments && snapshot.settings.max_split_size.is_some() {
        notes.push(
            "PYTORCH_CUDA_ALLOC_CONF sets max_split_size_mb and expandable_segments together; the first has no \
             useful effect with the second."
                .to_owned(),
        );
    }
    notes
}
