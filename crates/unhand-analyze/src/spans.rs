//! The annotations of a recording: which span an event falls into, and the steps they mark.

use rustc_hash::FxHashMap;
use serde::Serialize;
use unhand_snapshot::{Snapshot, Stage};

/// One closed annotation.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Span {
    /// The name given to `record_function`.
    pub name: String,
    /// Start in microseconds since the epoch.
    pub start_us: i64,
    /// End in microseconds since the epoch; `None` when the recording ended inside.
    pub end_us: Option<i64>,
}

/// The annotations of one device, in the order of their start.
#[derive(Clone, Debug, Default)]
pub struct Spans {
    all: Vec<Span>,
    /// Ends of the spans that mark steps.
    steps: Vec<i64>,
    step_name: Option<String>,
}

impl Spans {
    /// Pairs the starts and ends of a snapshot's annotations.
    ///
    /// PyTorch itself annotates every optimizer step (`Optimizer.step#AdamW.step`): the ends of the optimizer
    /// that steps most often mark the steps. Where a profiler ran, its `ProfilerStep#7` spans do.
    pub fn of(snapshot: &Snapshot, device: usize) -> Spans {
        let mut open: FxHashMap<_, Vec<usize>> = FxHashMap::default();
        let mut spans: Vec<Span> = Vec::new();
        for annotation in &snapshot.annotations {
            if usize::try_from(annotation.device) != Ok(device) {
                continue;
            }
            match annotation.stage {
                Stage::Start => {
                    open.entry(annotation.name).or_default().push(spans.len());
                    spans.push(Span {
                        name: snapshot.strings.get(annotation.name).to_owned(),
                        start_us: annotation.time_us,
                        end_us: None,
                    });
                }
                Stage::End => {
                    if let Some(i) = open.get_mut(&annotation.name).and_then(Vec::pop) {
                        spans[i].end_us = Some(annotation.time_us);
                    }
                }
                Stage::Other => {}
            }
        }
        spans.sort_by_key(|s| s.start_us);
        let mut ends: FxHashMap<&str, Vec<i64>> = FxHashMap::default();
        for span in &spans {
            let Some(end) = span.end_us else { continue };
            if span.name.starts_with("ProfilerStep#") {
                ends.entry("ProfilerStep").or_default().push(end);
            } else if span.name.starts_with("Optimizer.step#") {
                ends.entry(&span.name).or_default().push(end);
            }
        }
        let most = ends.into_iter().max_by(|a, b| (a.1.len(), b.0).cmp(&(b.1.len(), a.0)));
        let (step_name, mut steps) =
            most.map_or((None, Vec::new()), |(name, ends)| (Some(name.to_owned()), ends));
        steps.sort_unstable();
        Spans { all: spans, steps, step_name }
    }

    /// The innermost span open at a time.
    pub fn innermost_at(&self, time_us: i64) -> Option<&Span> {
        let upto = self.all.partition_point(|s| s.start_us <= time_us);
        self.all[..upto].iter().rev().find(|s| s.end_us.is_none_or(|end| end >= time_us))
    }

    /// All spans, in the order of their start.
    pub fn spans(&self) -> &[Span] {
        &self.all
    }

    /// When each step ended, in microseconds since the epoch.
    pub fn step_ends_us(&self) -> &[i64] {
        &self.steps
    }

    /// What marked the steps.
    pub fn step_name(&self) -> Option<&str> {
        self.step_name.as_deref()
    }

    /// The step a time falls into, counted from 1; `None` without steps or after the last.
    pub fn step_at(&self, time_us: i64) -> Option<usize> {
        let done = self.steps.partition_point(|&end| end < time_us);
        (done < self.steps.len()).then_some(done + 1)
    }
}
