//! What the recorded run would have reserved: the same requests, through the same allocator, under any settings.
//!
//! [`Program::of`] turns a history into the calls that made it; [`Program::recorded`] runs them under the
//! recorded settings and says whether every segment event came out as recorded; [`Program::under`] runs them
//! under others. The allocator is `unhand-alloc` itself, over a device of addresses only.
//!
//! What a replay cannot know: where the driver would have put segments (it follows the placement read off
//! recordings, which decides ties between equal blocks), and what the program would have done after running out
//! of memory (a run ends there).

mod engine;
mod fitting;
mod limit;
mod memory_map;
mod program;
mod start;
mod sweep;

use serde::Serialize;
use unhand_alloc::{Profile, Release, Settings};
use unhand_snapshot::{Action, Snapshot};

use crate::error::Result;
use crate::export::action_word;

pub use fitting::{Fit, Fitting, Tried, room_bytes};
pub use program::Program;
pub use sweep::{merge_conf, sweep};

/// Bytes in the three senses, at one moment.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct Figures {
    /// Asked for.
    pub requested_bytes: u64,
    /// In blocks handed out.
    pub allocated_bytes: u64,
    /// Held from the driver.
    pub reserved_bytes: u64,
}

/// How often the driver was asked; each call costs time.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct DriverCalls {
    /// `cudaMalloc`.
    pub alloc: u64,
    /// `cudaFree`.
    pub free: u64,
    /// Ranges of pages mapped.
    pub map: u64,
    /// Ranges of pages unmapped.
    pub unmap: u64,
}

impl DriverCalls {
    /// All calls.
    pub fn total(self) -> u64 {
        self.alloc + self.free + self.map + self.unmap
    }
}

/// A segment event, as recorded or as replayed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct SegmentEvent {
    /// `segment_alloc`, `segment_free`, `segment_map`, `segment_unmap` or `oom`.
    pub action: &'static str,
    /// Bytes.
    pub size_bytes: u64,
}

/// Where a replay first did something else than the recording.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct Difference {
    /// The index of the recorded event, or of the last one if the replay did more than the recording.
    pub event: usize,
    /// What was recorded; `None` if nothing was left.
    pub recorded: Option<SegmentEvent>,
    /// What the replay did; `None` if nothing was left.
    pub replayed: Option<SegmentEvent>,
}

/// Where a replay ran out of memory; it ends there, because nobody knows what the program would have done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct RanOut {
    /// The index of the event whose request failed.
    pub event: usize,
    /// Bytes asked for by the program.
    pub requested_bytes: u64,
    /// Bytes asked for from the device.
    pub segment_bytes: u64,
    /// Bytes in blocks handed out at that moment.
    pub allocated_bytes: u64,
    /// Bytes held from the driver at that moment.
    pub reserved_bytes: u64,
    /// The limit that stood against it.
    pub limit_bytes: u64,
    /// Whether the recorded run failed at the same request.
    pub as_recorded: bool,
}

/// One replay of one device of one file. The field names are the JSON names.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Run {
    /// The file, as the caller names it.
    pub file: Option<String>,
    /// The device.
    pub device: usize,
    /// `PYTORCH_CUDA_ALLOC_CONF` of this run.
    pub settings: String,
    /// Whether these are the settings of the recording.
    pub recorded: bool,
    /// The most there was, of each.
    pub peak: Figures,
    /// What there was in the end.
    pub end: Figures,
    /// Segments in the end; contiguous mapped ranges for expandable segments.
    pub segments: u64,
    /// Driver calls.
    pub driver_calls: DriverCalls,
    /// Out-of-memory errors.
    pub ooms: u64,
    /// Events of the history that were replayed.
    pub events: usize,
    /// Whether every segment event (action, size, order) is as recorded.
    pub same_as_recorded: bool,
    /// The first one that is not.
    pub first_difference: Option<Difference>,
    /// Where memory ran out; left out if it did not.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ran_out: Option<RanOut>,
    /// Events after which the three peaks were reached.
    #[serde(skip)]
    pub peak_events: PeakEvents,
    /// Allocations that landed at the recorded address, and all of them.
    #[serde(skip)]
    pub placement: (u64, u64),
    /// The events whose request was refused.
    #[serde(skip)]
    pub failed_events: Vec<usize>,
    /// Why the figures are approximate, if they are.
    #[serde(skip)]
    pub approximate: Option<&'static str>,
}

/// Events after which the peaks of a [`Run`] were reached; `None` when there was nothing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PeakEvents {
    /// Of requested bytes.
    pub requested: Option<usize>,
    /// Of allocated bytes.
    pub allocated: Option<usize>,
    /// Of reserved bytes.
    pub reserved: Option<usize>,
}

/// What is different from the recording in a what-if run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WhatIf {
    /// Keys over the recorded settings, in the form of `PYTORCH_CUDA_ALLOC_CONF`.
    pub conf: String,
    /// The bytes PyTorch may hold; without it the limit of the recording, if it shows one.
    pub memory_bytes: Option<u64>,
    /// Follow this release instead of the recording's.
    pub release: Option<Release>,
}

/// The answer of `unhand replay`: the recorded run first, then the others.
#[derive(Clone, Debug, Serialize)]
pub struct Replay {
    /// [`crate::SCHEMA_VERSION`].
    pub schema_version: u32,
    /// The runs.
    pub runs: Vec<Run>,
}

/// Replays one device of a snapshot: as recorded, then under each of the given changes.
///
/// # Errors
/// [`crate::Error::NoSuchDevice`], [`crate::Error::NoHistory`], refused settings, or a history no allocator can
/// follow.
pub fn replay(snapshot: &Snapshot, device: usize, what_ifs: &[WhatIf]) -> Result<Vec<Run>> {
    let program = Program::of(snapshot, device)?;
    let mut runs = vec![program.recorded()?];
    for what_if in what_ifs {
        runs.push(program.under(what_if)?);
    }
    Ok(runs)
}

/// The settings and the release a snapshot was recorded with, as far as it tells.
pub(crate) fn recorded_settings(snapshot: &Snapshot) -> (Settings, Profile) {
    let guess = snapshot.release_guess();
    let release = guess.max.or(guess.min).and_then(|(_, minor)| Release::new(u8::try_from(minor).ok()?));
    let profile = Profile::of(release.unwrap_or(Release::OLDEST));
    let recorded = &snapshot.settings;
    // The string may have come from a release with other keys; what it could not say is in the fields below.
    let mut settings = Settings::parse(&recorded.conf, &profile).unwrap_or_default();
    recorded.conf.clone_into(&mut settings.conf);
    if recorded.present {
        settings.max_split_size = recorded.max_split_size;
        settings.garbage_collection_threshold = recorded.garbage_collection_threshold;
        settings.expandable_segments = recorded.expandable_segments;
        for (mib, divisions) in &recorded.roundup_power2_divisions {
            let slot = mib.checked_ilog2().and_then(|slot| usize::try_from(slot).ok());
            if let Some(slot) = slot.and_then(|slot| settings.roundup_power2_divisions.get_mut(slot)) {
                *slot = *divisions;
            }
        }
    }
    (settings, profile)
}

/// The word of a segment event, or `None` for other events.
pub(crate) fn segment_action(action: Action) -> Option<&'static str> {
    use Action::{Oom, SegmentAlloc, SegmentFree, SegmentMap, SegmentUnmap};
    matches!(action, SegmentAlloc | SegmentFree | SegmentMap | SegmentUnmap | Oom)
        .then(|| action_word(action))
}
