//! What only a replay can add to an explanation: the exact peak, and settings that would have needed less.

use unhand_analyze::replay::{Program, Run, WhatIf, sweep};
use unhand_analyze::{Advice, Bytes, Share, TruePeaks};
use unhand_snapshot::Snapshot;

use crate::parallel::map_in_order;
use crate::replay::best_of;

/// Savings below this are not worth a changed setting.
const MIN_SAVED_BYTES: u64 = 64 << 20;
/// Nor below this share of the peak, in percent.
const MIN_SAVED_PERCENT: u64 = 2;
/// A longer history is tried with one setting instead of a dozen, so that an explanation stays a matter of seconds.
pub(crate) const LONG_HISTORY_EVENTS: usize = 500_000;

/// What replays of one device said.
#[derive(Default)]
pub(crate) struct Replayed {
    pub(crate) true_peaks: Option<TruePeaks>,
    pub(crate) advice: Vec<Advice>,
}

/// Replays the history of one device. An explanation is complete without it, so whatever cannot be replayed
/// adds nothing, and only a replay that repeats the recording exactly is believed.
pub(crate) fn replayed(snapshot: &Snapshot, device: usize) -> Replayed {
    let Ok(program) = Program::of(snapshot, device) else { return Replayed::default() };
    let Ok(recorded) = program.recorded() else { return Replayed::default() };
    if !recorded.same_as_recorded || recorded.approximate.is_some() {
        return Replayed::default();
    }
    let true_peaks = Some(TruePeaks {
        allocated_bytes: recorded.peak.allocated_bytes,
        allocated_event: recorded.peak_events.allocated,
    });
    Replayed { true_peaks, advice: better_settings(&program, &recorded).into_iter().collect() }
}

fn better_settings(program: &Program, recorded: &Run) -> Option<Advice> {
    let before = recorded.peak.reserved_bytes;
    let is_worth_it = |saved: u64| saved >= MIN_SAVED_BYTES.max(before / 100 * MIN_SAVED_PERCENT);
    // No settings reserve less than what is allocated at once.
    if !is_worth_it(before.saturating_sub(recorded.peak.allocated_bytes)) {
        return None;
    }
    let mut changes = sweep(program.profile(), program.limit_bytes().is_some());
    if recorded.events > LONG_HISTORY_EVENTS {
        changes.truncate(1);
    }
    let runs = map_in_order(&changes, |change| {
        Ok(program.under(&WhatIf { conf: change.clone(), ..WhatIf::default() }).ok())
    });
    let runs: Vec<Run> = runs.ok()?.into_iter().flatten().collect();
    let best = best_of(recorded, &runs)?;
    let saved = before - best.peak.reserved_bytes;
    is_worth_it(saved).then(|| Advice {
        sentence: format!(
            "Set PYTORCH_CUDA_ALLOC_CONF={}: replayed with it, this run reserves {} at its peak, {} ({}) less.",
            best.settings,
            Bytes(best.peak.reserved_bytes),
            Bytes(saved),
            Share(saved, before)
        ),
        settings: Some(best.settings.clone()),
        saves_bytes: Some(saved),
    })
}
