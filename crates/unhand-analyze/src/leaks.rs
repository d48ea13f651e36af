//! Leak suspects: lines whose live bytes grow with every repetition and never come back.
//!
//! A block that outlives the history is no leak by itself: parameters, optimizer state and the values of the
//! last step do. A leak is *regular*: the same stack leaves survivors in every repetition. So the survivors of
//! each stack are counted by the repetition that made them; the first repetition (things made once) and the
//! last (things still in use) are left out, and what remains must be spread evenly.

use rustc_hash::FxHashMap;
use serde::Serialize;
use unhand_snapshot::{Snapshot, StackId};

use crate::category::Category;
use crate::holding::{LifeFacts, SizeShare};
use crate::prose::{Count, plural};
use crate::site::{FrameText, SiteId, Sites};
use crate::spans::Spans;
use crate::timeline::{Life, Timeline};
use unhand_alloc::Bytes;

/// What was looked for and found.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Leaks {
    /// How repetitions were told; `None` when they could not be, and then nothing was checked.
    pub basis: Option<Basis>,
    /// Number of repetitions; `None` when only estimated per suspect.
    pub repetitions: Option<u64>,
    /// The suspects, fastest growth first.
    pub suspects: Vec<Suspect>,
    /// Why nothing could be checked, or what could not be seen; empty when nothing is missing.
    pub limits: String,
}

/// How repetitions were told apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Basis {
    /// By the annotations of optimizer or profiler steps.
    Steps,
    /// By the recurrence of the stacks themselves.
    Recurrence,
}

/// How sure a suspicion is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Confidence {
    /// Regular growth, but the repetitions or the line are only inferred.
    Low,
    /// Regular growth over few repetitions, or told by size instead of by line.
    Medium,
    /// The same growth in every one of ten repetitions or more.
    High,
}

/// A line that keeps more with every repetition.
#[derive(Clone, Debug, Serialize)]
pub struct Suspect {
    /// The line; `(no stack recorded)` when blocks are told apart by size alone.
    pub site: String,
    /// The whole path of its file.
    pub file: Option<String>,
    /// What the blocks are for; `None` when no stacks were recorded or no rule knows.
    pub category: Option<Category>,
    /// Blocks left by one repetition (the median).
    pub blocks_per_repetition: u64,
    /// Requested bytes left by one repetition (the median).
    pub growth_bytes: u64,
    /// Repetitions seen.
    pub repetitions: u64,
    /// Blocks left so far.
    pub blocks: u64,
    /// Requested bytes left so far.
    pub total_bytes: u64,
    /// The commonest sizes, largest total first, at most five.
    pub sizes: Vec<SizeShare>,
    /// How sure this is.
    pub confidence: Confidence,
    /// The stack that leaves most, innermost first; empty without stacks.
    pub frames: Vec<FrameText>,
    /// All that as a sentence.
    pub sentence: String,
}

/// Repetitions fewer than this show no regularity.
const MIN_REPETITIONS: usize = 5;
/// Slices of the history when no steps are annotated, and the most bins the test looks at.
const BINS: usize = 16;

/// Survivors of one key, by repetition.
#[derive(Default)]
struct Series {
    by_repetition: FxHashMap<usize, (u64, u64)>,
    sizes: FxHashMap<u64, u64>,
    blocks: u64,
    bytes: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Key {
    Stack(StackId, Category),
    /// Requested bytes and stream.
    Size(u64, u64),
}

impl Leaks {
    pub(crate) fn find(
        snapshot: &Snapshot,
        timeline: &Timeline,
        spans: &Spans,
        sites: &mut Sites<'_>,
        facts: &mut LifeFacts,
    ) -> Leaks {
        let has_stacks = sites.has_stacks();
        let trace = &snapshot.traces[timeline.device];
        let n_steps = spans.step_ends_us().len();
        let steps = n_steps >= MIN_REPETITIONS && timeline.first_time_us.is_some();
        if !steps && !has_stacks {
            let why = "neither stacks nor steps were recorded, so repetitions cannot be told apart";
            return Leaks { limits: why.to_owned(), ..Leaks::default() };
        }
        let (basis, n) = if steps { (Basis::Steps, n_steps) } else { (Basis::Recurrence, BINS) };
        let repetition_of = |life: &Life| -> Option<usize> {
            let born = life.born()?;
            if steps {
                let time = trace.event(born).time_us?;
                Some(spans.step_ends_us().partition_point(|&end| end < time))
            } else {
                Some(born * BINS / timeline.n_events.max(1))
            }
        };

        let mut series: FxHashMap<Key, Series> = FxHashMap::default();
        for life in timeline.lives.iter().filter(|life| life.survives()) {
            // A block older than the history was not made by any repetition in it.
            let Some(repetition) = repetition_of(life) else { continue };
            let key = if has_stacks {
                Key::Stack(life.stack, facts.category(snapshot, sites, life))
            } else {
                Key::Size(life.requested_bytes, life.stream)
            };
            series.entry(key).or_default().add(repetition, life.requested_bytes);
        }

        let mut groups: FxHashMap<Option<SiteId>, Vec<(Key, Series)>> = FxHashMap::default();
        for (key, series) in series {
            // A model that is being loaded grows as steadily as a leak; without steps only the category tells.
            let is_setup = matches!(key, Key::Stack(_, Category::Parameters | Category::OptimizerState));
            if series.is_regular(n) && (steps || (!is_setup && series.blocks >= MIN_REPETITIONS as u64)) {
                let group = match key {
                    Key::Stack(stack, _) => Some(sites.of(stack).0),
                    Key::Size(..) => None,
                };
                groups.entry(group).or_default().push((key, series));
            }
        }
        let mut suspects: Vec<Suspect> =
            groups.into_iter().map(|(site, members)| suspect(site, members, basis, n, sites)).collect();
        suspects.sort_by(|a, b| b.growth_bytes.cmp(&a.growth_bytes).then_with(|| a.site.cmp(&b.site)));
        let limits = if has_stacks {
            String::new()
        } else {
            "no stacks were recorded: blocks were told apart by size, so growth in blocks of changing size is not seen"
                .to_owned()
        };
        Leaks { basis: Some(basis), repetitions: steps.then_some(n as u64), suspects, limits }
    }
}

impl Series {
    fn add(&mut self, repetition: usize, bytes: u64) {
        let entry = self.by_repetition.entry(repetition).or_default();
        entry.0 += 1;
        entry.1 += bytes;
        *self.sizes.entry(bytes).or_default() += 1;
        self.blocks += 1;
        self.bytes += bytes;
    }

    /// Whether repetitions 1 … n − 2 (of 0 … n − 1) leave survivors evenly.
    ///
    /// Long histories are looked at in sixteen bins, so that a line that leaks in every tenth step counts too.
    /// Four bins of five must have survivors, and none more than four times its share: that refuses a cache
    /// filled once, and the exponential ages of a cache in steady state, whose survivors are nearly all young.
    fn is_regular(&self, n: usize) -> bool {
        if n < MIN_REPETITIONS {
            return false;
        }
        let middle = n - 2;
        let bins = middle.min(BINS);
        let mut bytes = vec![0_u64; bins];
        for (&repetition, &(_, in_it)) in &self.by_repetition {
            if (1..=middle).contains(&repetition) {
                bytes[(repetition - 1) * bins / middle] += in_it;
            }
        }
        let filled = bytes.iter().filter(|&&b| b > 0).count();
        let total: u64 = bytes.iter().sum();
        let largest = bytes.iter().copied().max().unwrap_or(0);
        filled * 5 >= bins * 4 && largest.saturating_mul(bins as u64) <= total.saturating_mul(4)
    }
}

fn suspect(
    site: Option<SiteId>,
    mut members: Vec<(Key, Series)>,
    basis: Basis,
    n: usize,
    sites: &Sites<'_>,
) -> Suspect {
    members.sort_by(|a, b| b.1.bytes.cmp(&a.1.bytes).then(a.0.cmp(&b.0)));
    let mut tally: FxHashMap<u64, u64> = FxHashMap::default();
    let mut by_repetition = vec![(0_u64, 0_u64); n + 1];
    let (mut blocks, mut total) = (0, 0);
    let mut fewest = u64::MAX;
    for (_, series) in &members {
        for (&size, &count) in &series.sizes {
            *tally.entry(size).or_default() += count;
            if count >= MIN_REPETITIONS as u64 {
                fewest = fewest.min(count);
            }
        }
        for (&repetition, &(n_blocks, bytes)) in &series.by_repetition {
            let sum = &mut by_repetition[repetition.min(n)];
            sum.0 += n_blocks;
            sum.1 += bytes;
        }
        blocks += series.blocks;
        total += series.bytes;
    }
    let (repetitions, per_blocks, per_bytes) = match basis {
        Basis::Steps => {
            let middle = &mut by_repetition[1..n - 1];
            let typical = |values: &mut Vec<u64>| -> u64 {
                values.sort_unstable();
                let median = values[values.len() / 2];
                // A line that leaks now and then has a median of nothing; its mean still says how fast.
                if median > 0 { median } else { values.iter().sum::<u64>().div_ceil(values.len() as u64) }
            };
            let mut n_blocks: Vec<u64> = middle.iter().map(|&(b, _)| b).collect();
            let mut bytes: Vec<u64> = middle.iter().map(|&(_, b)| b).collect();
            (n as u64, typical(&mut n_blocks), typical(&mut bytes))
        }
        Basis::Recurrence => {
            // The rarest size that recurs is taken to recur once per repetition.
            let repetitions = if fewest == u64::MAX { blocks } else { fewest };
            (repetitions, blocks.div_ceil(repetitions), total / repetitions)
        }
    };
    let is_even = basis == Basis::Steps
        && by_repetition[1..n - 1]
            .iter()
            .all(|&(b, bytes)| b > 0 && bytes.abs_diff(per_bytes).saturating_mul(10) <= per_bytes);
    let confidence = match (basis, site) {
        (Basis::Steps, Some(_)) if is_even && n >= 10 => Confidence::High,
        (Basis::Steps, _) => Confidence::Medium,
        (Basis::Recurrence, _) => Confidence::Low,
    };
    let mut commonest: Vec<SizeShare> =
        tally.into_iter().map(|(each_bytes, blocks)| SizeShare { each_bytes, blocks }).collect();
    commonest.sort_by_key(|s| std::cmp::Reverse((s.each_bytes.saturating_mul(s.blocks), s.each_bytes)));
    commonest.truncate(5);
    let (frames, category) = match members[0].0 {
        Key::Stack(stack, category) => {
            (sites.frames(stack), Some(category).filter(|c| *c != Category::Unknown))
        }
        Key::Size(..) => (Vec::new(), None),
    };
    let known = site.map(|id| sites.get(id));
    let (left, growth) = (plural(per_blocks, "block"), Bytes(per_bytes));
    let (count, so_far) = (Count(repetitions), Bytes(total));
    let sentence = match (known, basis) {
        (Some(site), Basis::Steps) => format!(
            "each repetition of {} leaves {left}, {growth}; {count} repetitions so far: {so_far}",
            site.place()
        ),
        (Some(site), Basis::Recurrence) => format!(
            "each repetition of {} leaves about {left}, {growth}; about {count} repetitions so far: {so_far}",
            site.place()
        ),
        (None, _) => {
            let largest = commonest.first().copied().unwrap_or(SizeShare { each_bytes: 0, blocks: 0 });
            format!(
                "each step leaves {left}, {growth}, mostly of {} each; {count} steps so far: {so_far} (no stacks were \
                 recorded, so the line is not known)",
                Bytes(largest.each_bytes)
            )
        }
    };
    Suspect {
        site: known.map_or(crate::site::NO_STACK_RECORDED, |s| &s.name).to_owned(),
        file: known.and_then(|s| s.file.clone()),
        category,
        blocks_per_repetition: per_blocks,
        growth_bytes: per_bytes,
        repetitions,
        blocks,
        total_bytes: total,
        sizes: commonest,
        confidence,
        frames,
        sentence,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn series(counts: &[u64]) -> Series {
        let mut series = Series::default();
        for (repetition, &n) in counts.iter().enumerate() {
            for _ in 0..n {
                series.add(repetition, 1024);
            }
        }
        series
    }

    #[test]
    fn steady_growth_is_regular() {
        assert!(series(&[2; 10]).is_regular(10));
        assert!(series(&[0, 1, 1, 1, 0, 1, 1]).is_regular(7));
    }

    #[test]
    fn what_is_made_once_is_not() {
        assert!(!series(&[50, 0, 0, 0, 0, 0, 0, 0]).is_regular(8));
        assert!(!series(&[0, 0, 0, 0, 0, 0, 0, 50]).is_regular(8));
        assert!(!series(&[0, 40, 0, 0, 0, 0, 0, 1]).is_regular(8));
    }

    #[test]
    fn a_cache_in_steady_state_is_not() {
        // Ages fall off exponentially: half of the survivors were made in the last repetition but one.
        let counts: Vec<u64> = (0..16).map(|i| (1_u64 << i) / 64).collect();
        assert!(!series(&counts).is_regular(16));
    }

    #[test]
    fn a_leak_in_every_tenth_step_is_regular() {
        let counts: Vec<u64> = (0..160).map(|i| u64::from(i % 10 == 3)).collect();
        assert!(series(&counts).is_regular(160));
    }

    #[test]
    fn few_repetitions_show_nothing() {
        assert!(!series(&[1; 4]).is_regular(4));
    }
}
