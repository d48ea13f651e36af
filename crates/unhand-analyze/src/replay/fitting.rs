//! Whether other allocator settings would have served a request that failed, judged from replays of the history.

use serde::Serialize;
use unhand_alloc::Bytes;

use super::Run;
use crate::oom::{OutOfMemory, Verdict};
use crate::prose::{Count, plural};

/// What replays say about one failed request.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Fitting {
    /// The event of the request ([`OutOfMemory::event_index`]).
    pub event_index: usize,
    /// The bytes PyTorch could hold in the end; `None` when a limit that is not recorded decided.
    pub room_bytes: Option<u64>,
    /// How many settings were tried.
    pub tried: usize,
    /// Whether the replay of the recorded settings repeats the recording, so that the others can be believed to the
    /// byte; otherwise they are estimates. `None` when nothing was replayed.
    pub is_exact: Option<bool>,
    /// The settings under which the request is served, the best first: the simplest of those that reserve least, in
    /// the order in which they were tried.
    pub fits: Vec<Fit>,
    /// All that in a sentence or two; also why there is no answer.
    pub sentence: String,
}

/// Settings under which the request is served.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Fit {
    /// As written in `PYTORCH_CUDA_ALLOC_CONF`.
    pub settings: String,
    /// The most it reserves up to the end of the history.
    pub reserved_bytes: u64,
}

/// The replays that a judgement needs.
#[derive(Clone, Copy, Debug)]
pub struct Tried<'a> {
    /// Under the recorded settings, with everything where it was.
    pub recorded: &'a Run,
    /// Under the recorded settings and with the room there was, laid out as the replay does it. It must fail as the
    /// program did, or the replay misses what made it fail.
    pub control: &'a Run,
    /// Under other settings, with the same room.
    pub others: &'a [Run],
}

/// The bytes PyTorch could hold when a request failed: what it held then and what the driver had left. `allowed_bytes`
/// is the limit of the process where the caller knows it; without it `None` when only such a limit can have decided.
pub fn room_bytes(oom: &OutOfMemory, allowed_bytes: Option<u64>) -> Option<u64> {
    let driver = oom.reserved_bytes.saturating_add(oom.device_free_bytes);
    match (oom.verdict, allowed_bytes) {
        (Verdict::Limit, None) => None,
        (_, allowed) => Some(driver.min(allowed.unwrap_or(u64::MAX))),
    }
}

impl Fitting {
    /// Judges the replays of one device's history for one failed request.
    pub fn of(oom: &OutOfMemory, room: u64, tried: Tried<'_>) -> Fitting {
        let is_exact = tried.recorded.same_as_recorded && tried.recorded.approximate.is_none();
        let is_served = |run: &Run| {
            !run.failed_events.contains(&oom.event_index) && run.ran_out.is_none_or(|out| out.as_recorded)
        };
        let mut fits: Vec<Fit> = tried
            .others
            .iter()
            .filter(|run| is_served(run))
            .map(|run| Fit { settings: run.settings.clone(), reserved_bytes: run.peak.reserved_bytes })
            .collect();
        let least = fits.iter().map(|fit| fit.reserved_bytes).min().unwrap_or(0);
        let about_least = least + least / 100;
        // Of equals the one that was named first, as the sort is stable.
        fits.sort_by_key(|fit| (fit.reserved_bytes > about_least, fit.settings.matches(',').count()));
        let mut fitting = Fitting {
            event_index: oom.event_index,
            room_bytes: Some(room),
            tried: tried.others.len(),
            is_exact: Some(is_exact),
            fits,
            sentence: String::new(),
        };
        if is_served(tried.control) {
            fitting.fits.clear();
            "Whether a setting would have served the request cannot be told: replayed with the settings \
                                and the memory there were, it does not fail, so the replay misses what made it fail."
                .clone_into(&mut fitting.sentence);
        } else {
            fitting.sentence = fitting.say(oom, room, tried.recorded);
        }
        fitting
    }

    /// The judgement that needs no replay: more was live than there was room for. `None` when it needs one.
    pub fn without_replay(oom: &OutOfMemory, room: u64) -> Option<Fitting> {
        let needed = oom.requested_bytes.saturating_add(oom.wanted_bytes);
        (needed > room).then(|| Fitting {
            event_index: oom.event_index,
            room_bytes: Some(room),
            tried: 0,
            is_exact: None,
            fits: Vec::new(),
            sentence: format!(
                "No allocator setting would have served the request: what was live and the request come to {}, and \
                 PyTorch could hold {}.",
                Bytes(needed),
                Bytes(room)
            ),
        })
    }

    /// There is no answer, and why.
    pub fn unknown(oom: &OutOfMemory, room: Option<u64>, why: &str) -> Fitting {
        Fitting {
            event_index: oom.event_index,
            room_bytes: room,
            tried: 0,
            is_exact: None,
            fits: Vec::new(),
            sentence: format!("Whether a setting would have served the request cannot be told: {why}."),
        }
    }

    fn say(&self, oom: &OutOfMemory, room: u64, recorded: &Run) -> String {
        let answer = match self.fits.first() {
            Some(best) => {
                let more = match self.fits.len() {
                    1 => String::new(),
                    n => format!(" ({} of {} settings tried would)", Count(n as u64), self.tried),
                };
                format!(
                    "PYTORCH_CUDA_ALLOC_CONF={} would have served the request: replayed with it, the same run reserves \
                     at most {} of the {} that PyTorch could hold{more}.",
                    best.settings,
                    Bytes(best.reserved_bytes),
                    Bytes(room)
                )
            }
            None => format!(
                "None of {} would have served the request of {} within the {} that PyTorch could hold.",
                plural(self.tried as u64, "setting") + " tried",
                Bytes(oom.wanted_bytes),
                Bytes(room)
            ),
        };
        match (self.is_exact, recorded.approximate) {
            (Some(true), _) => answer,
            (_, Some(_)) => format!(
                "{answer} This is an estimate: the history does not reach back to the first allocation, so what was there \
                 before is laid out anew."
            ),
            (_, None) => format!(
                "{answer} This is an estimate: the replay of the recorded settings does not repeat the recording exactly."
            ),
        }
    }
}
