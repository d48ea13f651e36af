//! Refuses snapshots whose sizes cannot be true, so that no sum elsewhere needs to fear an overflow.

use unhand_snapshot::{Action, Snapshot};

use crate::error::{Error, Result};

/// Checks that all sizes of a device together stay below 2^63 bytes. Then every sum of some of them does.
///
/// A billion allocations of a gigabyte each stay below; a damaged file rarely does.
pub(crate) fn check(snapshot: &Snapshot, device: usize) -> Result<()> {
    let mut sum = 0_u128;
    if let Some(trace) = snapshot.traces.get(device) {
        sum += trace.sizes().iter().map(|&bytes| u128::from(bytes)).sum::<u128>();
        let ooms = trace.actions().iter().zip(trace.addrs()).filter(|(action, _)| **action == Action::Oom);
        sum += ooms.map(|(_, &device_free)| u128::from(device_free)).sum::<u128>();
    }
    for segment in snapshot.segments.iter().filter(|s| usize::try_from(s.device) == Ok(device)) {
        sum += u128::from(segment.total_size);
        sum += segment.blocks.iter().map(|b| u128::from(b.size) + u128::from(b.requested_size)).sum::<u128>();
    }
    if sum > i64::MAX as u128 { Err(Error::Damaged { device }) } else { Ok(()) }
}
