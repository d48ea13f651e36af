//! Finds the memory limit a recording was made under, which a snapshot does not say.
//!
//! Only a limit makes `garbage_collection_threshold` work, so a recording that shows collections had one. A
//! limit that is too low collects too early, one that is too high too late: the first difference from the
//! recording tells which, and halving the interval finds a limit that explains all of it.

use super::engine::Conditions;
use super::program::Program;
use super::{Difference, Run};
use crate::error::Result;

/// Sizes a person would have chosen, tried first, the coarsest first.
const ROUND: [u64; 4] = [1 << 30, 1 << 29, 1 << 28, 1 << 27];

/// The limit that explains the recording, or `None` when nothing shows one.
pub(super) fn infer(program: &Program) -> Result<Option<u64>> {
    let threshold = program.settings.garbage_collection_threshold;
    let frees = program.recorded.iter().any(|(_, event)| event.action == "segment_free");
    if threshold <= 0.0 || !frees {
        return Ok(None);
    }
    let unlimited = run(program, u64::MAX >> 1)?;
    if unlimited.same_as_recorded {
        return Ok(None);
    }
    let mut low = unlimited.peak.reserved_bytes.min(peak_reserved(program)).max(1);
    let mut high = most_by_threshold(program, threshold).max(low);
    for unit in ROUND {
        let first = low.div_ceil(unit);
        for multiple in first..=(high / unit).min(first + 64) {
            if run(program, multiple * unit)?.same_as_recorded {
                return Ok(Some(multiple * unit));
            }
        }
    }
    while low < high {
        let middle = low + (high - low) / 2;
        let Some(difference) = run(program, middle)?.first_difference else { return Ok(Some(middle)) };
        if freed_too_early(&difference) { low = middle + 1 } else { high = middle }
    }
    Ok(None)
}

fn run(program: &Program, limit: u64) -> Result<Run> {
    program.run(Conditions {
        settings: program.settings.clone(),
        profile: program.profile,
        limit: Some(limit),
        as_recorded: true,
    })
}

fn freed_too_early(difference: &Difference) -> bool {
    let frees =
        |event: Option<super::SegmentEvent>| event.is_some_and(|event| event.action == "segment_free");
    frees(difference.replayed) && !frees(difference.recorded)
}

/// The most bytes held at a time: the limit cannot have been less.
fn peak_reserved(program: &Program) -> u64 {
    let (mut held, mut peak) = (0u64, 0);
    for (_, event) in &program.recorded {
        match event.action {
            "segment_alloc" | "segment_map" => held += event.size_bytes,
            "segment_free" | "segment_unmap" => held = held.saturating_sub(event.size_bytes),
            _ => {}
        }
        peak = peak.max(held);
    }
    peak
}

/// A collection happens above threshold × limit, so the bytes held at the first one bound the limit from above.
#[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
fn most_by_threshold(program: &Program, threshold: f64) -> u64 {
    let (mut held, mut most) = (0u64, u64::MAX >> 1);
    for (_, event) in &program.recorded {
        match event.action {
            "segment_alloc" | "segment_map" => held += event.size_bytes,
            "segment_free" | "segment_unmap" => {
                most = most.min((held as f64 / threshold) as u64 + 1);
                break;
            }
            _ => {}
        }
    }
    most
}
