//! Sizes: PyTorch's constants, how a request is rounded, and how large a segment it asks for.
//!
//! Source: `c10/core/AllocatorConfig.h` (constants), `DeviceCachingAllocator::round_size`,
//! `get_pool` and `get_allocation_size` in `c10/cuda/CUDACachingAllocator.cpp`.

/// Every block size is a multiple of this many bytes (`kMinBlockSize`).
pub const MIN_BLOCK_SIZE: u64 = 512;
/// The largest rounded size, in bytes, that the small pool serves (`kSmallSize`).
pub const SMALL_SIZE: u64 = 1 << 20;
/// Bytes of a small-pool segment, and of a page of a small expandable segment (`kSmallBuffer`).
pub const SMALL_BUFFER: u64 = 2 << 20;
/// Rounded sizes from here on get a segment of their own size (`kMinLargeAlloc`).
pub const MIN_LARGE_ALLOC: u64 = 10 << 20;
/// Default bytes of the segment that requests between [`SMALL_SIZE`] and [`MIN_LARGE_ALLOC`] share
/// (`kLargeBuffer`, configurable as `large_segment_size_mb` since 2.11).
pub const LARGE_BUFFER: u64 = 20 << 20;
/// Segments of [`MIN_LARGE_ALLOC`] and more are rounded up to this many bytes (`kRoundLarge`).
pub const ROUND_LARGE: u64 = 2 << 20;
/// Requests of one exbibyte and more are refused before they reach a device.
pub const ONE_EXA_BYTE: u64 = 1 << 60;
/// Length of the `roundup_power2_divisions` table: one slot per power of two, 1 MiB … 32 GiB and above.
pub const ROUNDUP_SLOTS: usize = 16;

/// The divisions of `roundup_power2_divisions`, one slot per power of two starting at 1 MiB; 0 and 1 mean
/// plain rounding to [`MIN_BLOCK_SIZE`].
pub type RoundupTable = [u64; ROUNDUP_SLOTS];

/// Which of the two kinds of pool a block belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum PoolKind {
    /// Rounded sizes up to 1 MiB.
    Small,
    /// Everything above.
    Large,
}

impl PoolKind {
    /// The kind that serves a *rounded* size in bytes.
    ///
    /// ```
    /// use unhand_alloc::PoolKind;
    /// assert_eq!(PoolKind::of(1 << 20), PoolKind::Small);
    /// assert_eq!(PoolKind::of((1 << 20) + 512), PoolKind::Large);
    /// ```
    pub fn of(rounded_bytes: u64) -> Self {
        if rounded_bytes <= SMALL_SIZE { PoolKind::Small } else { PoolKind::Large }
    }

    /// The word a snapshot uses: `small` or `large`.
    pub fn as_str(self) -> &'static str {
        match self {
            PoolKind::Small => "small",
            PoolKind::Large => "large",
        }
    }
}

/// Rounds a request of `bytes` (at least 1) to the size of the block that serves it, in bytes.
///
/// ```
/// use unhand_alloc::round_size;
/// assert_eq!(round_size(1, &[0; 16]), 512);
/// assert_eq!(round_size(5000, &[8; 16]), 5120);
/// assert_eq!(round_size((3 << 20) + 1, &[8; 16]), 3_407_872);
/// ```
#[inline]
pub fn round_size(bytes: u64, table: &RoundupTable) -> u64 {
    if bytes < MIN_BLOCK_SIZE {
        return MIN_BLOCK_SIZE;
    }
    let divisions = table[roundup_slot(bytes)];
    if divisions > 1 && bytes > MIN_BLOCK_SIZE * divisions {
        round_to_power2_division(bytes, divisions)
    } else {
        (bytes + (MIN_BLOCK_SIZE - 1)) & !(MIN_BLOCK_SIZE - 1)
    }
}

/// The slot of the table that a request of `bytes` looks at: floor(log2) counted from 1 MiB, clamped.
#[inline]
pub(crate) fn roundup_slot(bytes: u64) -> usize {
    let log2 = bytes.max(1).ilog2() as usize;
    log2.saturating_sub(20).min(ROUNDUP_SLOTS - 1)
}

/// `roundup_power2_next_division`: the next multiple of (largest power of two ≤ `bytes`) / `divisions`.
#[cold]
fn round_to_power2_division(bytes: u64, divisions: u64) -> u64 {
    if bytes.is_power_of_two() {
        return bytes;
    }
    let floor = 1u64 << bytes.ilog2();
    let step = floor >> divisions.ilog2();
    if step == 0 { floor << 1 } else { (bytes + step - 1) & !(step - 1) }
}

/// Bytes to ask the driver for when no cached block serves a *rounded* size (`get_allocation_size`).
///
/// ```
/// use unhand_alloc::{segment_size, LARGE_BUFFER};
/// assert_eq!(segment_size(512, LARGE_BUFFER), 2 << 20);
/// assert_eq!(segment_size(3 << 20, LARGE_BUFFER), 20 << 20);
/// assert_eq!(segment_size((10 << 20) + 512, LARGE_BUFFER), 12 << 20);
/// ```
#[inline]
pub fn segment_size(rounded_bytes: u64, large_segment_size: u64) -> u64 {
    if rounded_bytes <= SMALL_SIZE {
        SMALL_BUFFER
    } else if rounded_bytes < MIN_LARGE_ALLOC {
        large_segment_size
    } else {
        rounded_bytes.div_ceil(ROUND_LARGE) * ROUND_LARGE
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: RoundupTable = [0; ROUNDUP_SLOTS];

    #[test]
    fn rounds_to_512_without_divisions() {
        for (bytes, rounded) in
            [(1, 512), (511, 512), (512, 512), (513, 1024), ((1 << 20) + 1, (1 << 20) + 512)]
        {
            assert_eq!(round_size(bytes, &PLAIN), rounded);
        }
    }

    #[test]
    fn rounds_to_power_of_two_divisions_like_the_real_library() {
        // Values read off libc10_cuda 2.9.1 … 2.15.0.
        let eight = [8; ROUNDUP_SLOTS];
        for (bytes, rounded) in [
            (4097, 4608),
            (4608, 4608),
            (5000, 5120),
            ((1 << 20) - 1, 1 << 20),
            ((1 << 20) + 1, 1_179_648),
            (3 << 20, 3 << 20),
            ((3 << 20) + 1, 3_407_872),
            (17 << 20, 18 << 20),
            ((100 << 20) + 1, 104 << 20),
        ] {
            assert_eq!(round_size(bytes, &eight), rounded, "{bytes}");
        }
        let four = [4; ROUNDUP_SLOTS];
        assert_eq!(round_size(1200, &four), 1536);
        assert_eq!(round_size(2049, &four), 2560);
    }

    #[test]
    fn segment_sizes_follow_the_three_ranges() {
        let mib = |n: u64| n << 20;
        assert_eq!(segment_size(round_size(mib(10) - 1, &PLAIN), LARGE_BUFFER), mib(10));
        assert_eq!(segment_size(round_size(mib(10) + 1, &PLAIN), LARGE_BUFFER), mib(12));
        assert_eq!(segment_size(mib(55), LARGE_BUFFER), mib(56));
        assert_eq!(segment_size(mib(1), LARGE_BUFFER), mib(2));
        assert_eq!(segment_size(mib(1) + 512, LARGE_BUFFER), mib(20));
    }
}
