//! Which releases of PyTorch can have written a snapshot, judged by the keys it has and lacks.

use std::fmt;

use crate::trace::{Trace, keys};
use crate::{Action, Snapshot};

/// A range of PyTorch releases, as `(major, minor)`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ReleaseRange {
    /// The earliest that fits; `None` if unknown.
    pub min: Option<(u16, u16)>,
    /// The latest that fits; `None` if there is no upper limit.
    pub max: Option<(u16, u16)>,
}

impl fmt::Display for ReleaseRange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (self.min, self.max) {
            (None, None) => write!(f, "unknown"),
            (Some((a, b)), None) => write!(f, "{a}.{b} or later"),
            (None, Some((a, b))) => write!(f, "{a}.{b} or earlier"),
            (Some(min), Some(max)) if min == max => write!(f, "{}.{}", min.0, min.1),
            (Some(min), Some(max)) => write!(f, "{}.{} to {}.{}", min.0, min.1, max.0, max.1),
        }
    }
}

impl Snapshot {
    /// Guesses the release of PyTorch from what is recorded and what is not.
    ///
    /// A key that is there proves a release at least as new; a missing one bounds it from above. If the two
    /// contradict each other (a file that was put together by other means), the keys that are there are believed.
    pub fn release_guess(&self) -> ReleaseRange {
        let mut min = (0, 0);
        let mut max = (u16::MAX, u16::MAX);
        let mut sees = |minor: u16, is_there: bool| {
            if is_there {
                min = min.max((2, minor));
            } else {
                max = max.min((2, minor - 1));
            }
        };
        let layout = self.layout;
        if !layout.is_segment_list {
            sees(3, self.settings.present);
            sees(5, layout.has_annotations);
            sees(14, layout.has_host_segments || layout.has_host_traces);
            if self.settings.present {
                let has = |key: &str| self.settings.entries.iter().any(|(k, _)| k == key);
                sees(9, has("graph_capture_record_stream_reuse"));
                sees(13, has("max_cached_size") || has("max_round_threshold"));
            }
        }
        let shapes: Vec<_> = self.traces.iter().chain(&self.host_traces).flat_map(Trace::shapes).collect();
        if !shapes.is_empty() {
            let times = self.traces.iter().chain(&self.host_traces).flat_map(Trace::times_us);
            sees(3, times.take(1).any(|&time| time != Trace::NO_TIME));
            sees(8, shapes.iter().any(|shape| shape.keys & keys::COMPILE_CONTEXT != 0));
            sees(10, shapes.iter().any(|shape| shape.keys & keys::USER_METADATA != 0));
            sees(12, shapes.iter().any(|shape| shape.pool_id.is_some()));
        }
        // These two appear only when used, so their absence says nothing.
        if self.traces.iter().any(|trace| trace.actions().contains(&Action::Annotate)) {
            sees(14, true);
        }
        if self.traces.iter().flat_map(Trace::extras).any(|extra| extra.get("internal_metadata").is_some()) {
            sees(15, true);
        }
        let known = |release: (u16, u16), nothing: (u16, u16)| (release != nothing).then_some(release);
        ReleaseRange {
            min: known(min, (0, 0)),
            max: known(max, (u16::MAX, u16::MAX)).filter(|&max| max >= min),
        }
    }
}
