//! From requested bytes to block and segment bytes, by the settings the snapshot recorded.

use unhand_alloc::{LARGE_BUFFER, ROUNDUP_SLOTS, RoundupTable, SMALL_BUFFER, SMALL_SIZE};
use unhand_snapshot::AllocatorSettings;

/// The rounding rules that were in force, as far as the snapshot tells.
#[derive(Clone, Copy, Debug)]
pub struct Rounding {
    table: RoundupTable,
    large_segment_bytes: u64,
}

impl Rounding {
    /// Reads the recorded settings. `large_segment_size_mb` is not a field of its own in a snapshot; it is
    /// taken from the configuration string.
    pub fn of(settings: &AllocatorSettings) -> Self {
        let mut table: RoundupTable = [0; ROUNDUP_SLOTS];
        for &(mib, divisions) in &settings.roundup_power2_divisions {
            if let Some(log2) = mib.checked_ilog2() {
                table[(log2 as usize).min(ROUNDUP_SLOTS - 1)] = divisions;
            }
        }
        let large_segment_bytes = settings
            .conf
            .split(',')
            .filter_map(|pair| pair.split_once(':'))
            .find(|(key, _)| key.trim() == "large_segment_size_mb")
            .and_then(|(_, mib)| mib.trim().parse::<u64>().ok())
            .and_then(|mib| mib.checked_mul(1 << 20))
            .unwrap_or(LARGE_BUFFER);
        Rounding { table, large_segment_bytes }
    }

    /// Bytes of the block that serves a request, when nothing is left unsplit: the least it can be.
    #[inline]
    pub fn block_bytes(&self, requested: u64) -> u64 {
        // A request beyond 2^60 never reaches the allocator; a damaged file may hold one all the same.
        if requested > unhand_alloc::ONE_EXA_BYTE {
            requested
        } else {
            unhand_alloc::round_size(requested, &self.table)
        }
    }

    /// Bytes the driver is asked for when no cached block serves a rounded size.
    pub fn segment_bytes(&self, rounded: u64) -> u64 {
        unhand_alloc::segment_size(rounded, self.large_segment_bytes)
    }

    /// Bytes of one page of an expandable segment of the small or the large pool.
    pub fn page_bytes(&self, is_small: bool) -> u64 {
        if is_small { SMALL_BUFFER } else { self.large_segment_bytes }
    }

    /// Whether a rounded size is served by the small pool.
    pub fn is_small(rounded: u64) -> bool {
        rounded <= SMALL_SIZE
    }
}
