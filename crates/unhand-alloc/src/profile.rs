//! Where PyTorch releases differ in behaviour: one small value per release, nothing else knows versions.
//!
//! Source: the same scripts run on the `libc10_cuda.so` of each release; `tests/oracle` repeats it.

use std::fmt;
use std::str::FromStr;

/// A PyTorch minor release, 2.4 … 2.15.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Release {
    minor: u8,
}

impl Release {
    /// The oldest release with a profile.
    pub const OLDEST: Release = Release { minor: 4 };
    /// The newest release with a profile.
    pub const NEWEST: Release = Release { minor: 15 };
    /// torch 2.11, the release the recordings in `tests/snapshots` were made with.
    pub const V2_11: Release = Release { minor: 11 };

    /// `2.minor`, or `None` outside 2.4 … 2.15.
    pub fn new(minor: u8) -> Option<Release> {
        (Self::OLDEST.minor..=Self::NEWEST.minor).contains(&minor).then_some(Release { minor })
    }

    /// The number after `2.`.
    pub fn minor(self) -> u8 {
        self.minor
    }

    /// All releases, oldest first.
    pub fn all() -> impl Iterator<Item = Release> {
        (Self::OLDEST.minor..=Self::NEWEST.minor).map(|minor| Release { minor })
    }
}

impl Default for Release {
    fn default() -> Self {
        Self::NEWEST
    }
}

impl fmt::Display for Release {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "2.{}", self.minor)
    }
}

/// A text that names no release with a profile.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("unknown torch release: `{0}` (known: 2.4 to 2.15)")]
pub struct UnknownRelease(String);

impl FromStr for Release {
    type Err = UnknownRelease;

    /// Reads `2.11`, `2.11.0` and `2.11.0+cu130` alike.
    fn from_str(text: &str) -> Result<Self, UnknownRelease> {
        let unknown = || UnknownRelease(text.to_owned());
        let mut parts = text.trim().split(['.', '+']);
        if parts.next() != Some("2") {
            return Err(unknown());
        }
        let minor = parts.next().and_then(|minor| minor.parse().ok()).ok_or_else(unknown)?;
        Release::new(minor).ok_or_else(unknown)
    }
}

/// Which of the two configuration parsers a release has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Parser {
    /// Up to 2.9: separators are enforced, `>` fills from the last named slot, `max_split_size_mb` > 20.
    Strict,
    /// From 2.10: separators are not enforced, `>` fills after the last named slot, `max_split_size_mb` ≥ 20.
    Lenient,
}

/// The behaviours that changed between releases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::struct_excessive_bools, reason = "each flag is one documented difference between releases")]
pub struct Profile {
    /// The release this profile describes.
    pub release: Release,
    /// 2.12+: among equal sizes the oldest segment wins, then the lowest address (before: lowest address).
    pub ties_by_age: bool,
    /// 2.12 only: age is not the segment's but the block's own, so that what a split leaves over is older than
    /// what it cut off.
    pub age_per_block: bool,
    /// 2.11+: pools with `use_on_oom` are tried before anything cached is released (before: last of all).
    pub fallback_before_release: bool,
    /// Up to 2.9: that fallback may take blocks of expandable segments too.
    pub fallback_takes_expandable: bool,
    /// Up to 2.12: an active pool diversion counts as a graph capture and disables event polling, the default
    /// part of `empty_cache` and the last retry.
    pub diversion_is_capture: bool,
    /// 2.13+: memory fraction × total is rounded (before: truncated).
    pub fraction_rounds: bool,
    /// 2.10+: a memory fraction of 1 lifts the limit (before: it limits to the whole of the device, and garbage
    /// collection works).
    pub whole_fraction_is_no_limit: bool,
    /// 2.14+: a pool's `no_split` flag is forgotten when the pool is released.
    pub no_split_forgotten: bool,
    /// 2.10+: of several diversions that take a request the one begun last wins (before: the one begun first).
    pub last_diversion_wins: bool,
    /// Which configuration parser reads `PYTORCH_CUDA_ALLOC_CONF`.
    pub parser: Parser,
    /// 2.11+: `large_segment_size_mb` is a key.
    pub large_segment_key: bool,
    /// 2.12+: `throw_on_cudamalloc_oom` is a key and `num_oom_rejections` a statistic.
    pub oom_rejection: bool,
    /// 2.13+: reserved bytes are counted per private pool.
    pub reserved_by_private_pool: bool,
    /// 2.12+: trace entries of a snapshot carry `pool_id`.
    pub trace_has_pool_id: bool,
    /// 2.15+: a reservation smaller than the request is an out-of-memory error.
    pub reserve_keys: bool,
}

impl Profile {
    /// The profile of a release.
    pub fn of(release: Release) -> Profile {
        let since = |minor: u8| release.minor >= minor;
        Profile {
            release,
            ties_by_age: since(12),
            age_per_block: release.minor == 12,
            fallback_before_release: since(11),
            fallback_takes_expandable: !since(10),
            diversion_is_capture: !since(13),
            fraction_rounds: since(13),
            whole_fraction_is_no_limit: since(10),
            no_split_forgotten: since(14),
            last_diversion_wins: since(10),
            parser: if since(10) { Parser::Lenient } else { Parser::Strict },
            large_segment_key: since(11),
            oom_rejection: since(12),
            reserved_by_private_pool: since(13),
            trace_has_pool_id: since(12),
            reserve_keys: since(15),
        }
    }
}

impl Default for Profile {
    fn default() -> Self {
        Profile::of(Release::default())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reads_the_usual_spellings() {
        for text in ["2.11", "2.11.0", " 2.11.0+cu130 "] {
            assert_eq!(text.parse::<Release>(), Ok(Release::V2_11));
        }
        for text in ["2.3", "2.16", "3.1", "eleven", ""] {
            assert!(text.parse::<Release>().is_err(), "{text}");
        }
    }

    #[test]
    fn every_difference_switches_at_its_release() {
        let at = |minor| Profile::of(Release::new(minor).expect("known"));
        assert!(!at(11).ties_by_age && at(12).ties_by_age);
        assert!(!at(10).fallback_before_release && at(11).fallback_before_release);
        assert!(at(12).diversion_is_capture && !at(13).diversion_is_capture);
        assert!(!at(13).no_split_forgotten && at(14).no_split_forgotten);
        assert_eq!(at(9).parser, Parser::Strict);
    }
}
