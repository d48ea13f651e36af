//! The allocator's settings: every key of `PYTORCH_CUDA_ALLOC_CONF`, its validation and its defaults.
//!
//! Source: `c10/core/AllocatorConfig.cpp` and `c10/cuda/CUDAAllocatorConfig.cpp`; `tests/oracle` checks the
//! odd corners against the real library.

mod parse;

use crate::profile::Profile;
use crate::size::{LARGE_BUFFER, ROUNDUP_SLOTS, RoundupTable};

pub use parse::SettingsError;

/// How much address space a fresh expandable segment reserves (`expandable_segments_reserve`, 2.15+).
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Reserve {
    /// A fraction of the device's memory.
    Fraction(f64),
    /// Bytes.
    Bytes(u64),
}

/// What `PYTORCH_CUDA_ALLOC_CONF` says, parsed.
///
/// ```
/// use unhand_alloc::{Profile, Settings};
/// let settings = Settings::parse("expandable_segments:True,max_split_size_mb:64", &Profile::default())?;
/// assert!(settings.expandable_segments);
/// assert_eq!(settings.max_split_size, Some(64 << 20));
/// # Ok::<(), unhand_alloc::SettingsError>(())
/// ```
#[derive(Clone, Debug, PartialEq)]
#[expect(clippy::struct_excessive_bools, reason = "one flag per configuration key")]
pub struct Settings {
    /// The last string applied, whatever came of it.
    pub conf: String,
    /// `max_split_size_mb` in bytes; blocks and requests of this size and more are *oversize*. `None` is unlimited.
    pub max_split_size: Option<u64>,
    /// `max_non_split_rounding_mb` in bytes: an oversize request takes no block this much larger than itself.
    pub max_non_split_rounding: u64,
    /// `garbage_collection_threshold`, a fraction of the memory limit; 0 is off.
    pub garbage_collection_threshold: f64,
    /// `roundup_power2_divisions`.
    pub roundup_power2_divisions: RoundupTable,
    /// `expandable_segments`.
    pub expandable_segments: bool,
    /// `large_segment_size_mb` in bytes (2.11+).
    pub large_segment_size: u64,
    /// `per_process_memory_fraction` (2.10+), read once, when a device's allocator is made.
    pub per_process_memory_fraction: f64,
    /// `release_lock_on_cudamalloc`; it has no effect on what is allocated where.
    pub release_lock_on_cudamalloc: bool,
    /// `graph_capture_record_stream_reuse` (2.9+). Reclaiming inside a capture needs the graph's topology, which
    /// a [`Device`](crate::Device) does not know: the key is accepted and frees wait for the capture's end.
    pub graph_capture_record_stream_reuse: bool,
    /// `throw_on_cudamalloc_oom` (2.12+).
    pub throw_on_cudamalloc_oom: bool,
    /// `expandable_segments_reserve` (2.15+).
    pub expandable_segments_reserve: Option<Reserve>,
    /// Keys of the pinned host allocator and other keys this allocator only carries, as written.
    pub carried: Vec<(String, String)>,
}

impl Default for Settings {
    fn default() -> Self {
        Settings {
            conf: String::new(),
            max_split_size: None,
            max_non_split_rounding: LARGE_BUFFER,
            garbage_collection_threshold: 0.0,
            roundup_power2_divisions: [0; ROUNDUP_SLOTS],
            expandable_segments: false,
            large_segment_size: LARGE_BUFFER,
            per_process_memory_fraction: 1.0,
            release_lock_on_cudamalloc: false,
            graph_capture_record_stream_reuse: false,
            throw_on_cudamalloc_oom: false,
            expandable_segments_reserve: None,
            carried: Vec::new(),
        }
    }
}

impl Settings {
    /// Reads a configuration string over the defaults.
    ///
    /// # Errors
    /// An unknown key, a missing value, or a value its key refuses.
    pub fn parse(conf: &str, profile: &Profile) -> Result<Settings, SettingsError> {
        let mut settings = Settings::default();
        settings.apply(conf, profile)?;
        Ok(settings)
    }

    /// Applies a configuration string at run time, as `_set_allocator_settings` does.
    ///
    /// Each call first resets `max_split_size_mb`, `max_non_split_rounding_mb`, `garbage_collection_threshold`
    /// and `roundup_power2_divisions`; the other keys keep their value unless the string names them.
    ///
    /// # Errors
    /// As [`parse`](Settings::parse). Keys before the refused one **have been applied**, as in PyTorch.
    pub fn apply(&mut self, conf: &str, profile: &Profile) -> Result<(), SettingsError> {
        conf.clone_into(&mut self.conf);
        parse::apply(self, conf, profile)
    }

    /// The key names, for messages and completion.
    pub fn keys() -> impl Iterator<Item = &'static str> {
        parse::KEYS.iter().copied()
    }

    /// `max_split_size` with `u64::MAX` for unlimited, as the allocator compares it.
    #[inline]
    pub(crate) fn max_split_size_or_max(&self) -> u64 {
        self.max_split_size.unwrap_or(u64::MAX)
    }
}
