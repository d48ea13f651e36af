//! What an allocator answered to a script, and the first difference between two such outcomes.

use std::fmt;
use std::fmt::Write as _;

/// The state of one allocator after one operation.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Step {
    /// An address, `oom`, `ok`, or `error …`.
    pub(crate) answer: String,
    /// All statistics, ordered as in [`stat_names`].
    pub(crate) stats: Vec<i64>,
    /// The trace entries this operation made, as `action:address:size:stream:pool_a:pool_b`.
    pub(crate) trace: Vec<String>,
    /// Settings and segments, one line each, if the operation was to take a snapshot.
    pub(crate) snapshot: Vec<String>,
}

/// Everything about one run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Outcome {
    pub(crate) steps: Vec<Step>,
    /// The settings at the start are not valid for this release, or it lacks something the script needs.
    pub(crate) refused: bool,
    /// Settings and segments at the end, one line each.
    pub(crate) snapshot: Vec<String>,
    /// Reserved bytes per private pool (2.13+), sorted.
    pub(crate) pools: Vec<String>,
}

/// The nine statistics that exist for all pools, small pools and large pools.
const ARRAYS: [&str; 9] = [
    "allocation",
    "segment",
    "active",
    "inactive_split",
    "allocated_bytes",
    "reserved_bytes",
    "active_bytes",
    "inactive_split_bytes",
    "requested_bytes",
];

/// The dotted names of all statistics in the oracle's order.
pub(crate) fn stat_names() -> Vec<String> {
    let mut names = Vec::new();
    let mut four = |name: &str| {
        for part in ["current", "peak", "allocated", "freed"] {
            names.push(format!("{name}.{part}"));
        }
    };
    for array in ARRAYS {
        for scope in ["all", "small_pool", "large_pool"] {
            four(&format!("{array}.{scope}"));
        }
    }
    four("oversize_allocations");
    four("oversize_segments");
    for name in [
        "num_alloc_retries",
        "num_ooms",
        "max_split_size",
        "num_sync_all_streams",
        "num_device_alloc",
        "num_device_free",
        "num_oom_rejections",
    ] {
        names.push(name.to_owned());
    }
    names
}

/// What a number of runs went through, to see that random scripts do get around.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    scripts: usize,
    operations: usize,
    refused: usize,
    ooms: usize,
    segments: usize,
    released: usize,
    mapped: usize,
    unmapped: usize,
    in_pools: usize,
    late: usize,
}

impl Tally {
    pub(crate) fn add(&mut self, outcome: &Outcome) {
        self.scripts += 1;
        self.refused += usize::from(outcome.refused);
        for step in &outcome.steps {
            self.operations += 1;
            self.ooms += usize::from(step.answer == "oom");
            let is_free = step.trace.iter().any(|entry| entry.starts_with("free_requested"));
            for entry in &step.trace {
                let action = entry.split(':').next().unwrap_or_default();
                match action {
                    "segment_alloc" => self.segments += 1,
                    "segment_free" => self.released += 1,
                    "segment_map" => self.mapped += 1,
                    "segment_unmap" => self.unmapped += 1,
                    "free_completed" if !is_free => self.late += 1,
                    _ => {}
                }
                self.in_pools += usize::from(!entry.ends_with(":0:0"));
            }
        }
    }
}

impl fmt::Display for Tally {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Tally {
            scripts,
            operations,
            refused,
            ooms,
            segments,
            released,
            mapped,
            unmapped,
            in_pools,
            late,
        } = self;
        write!(
            f,
            "{scripts} scripts ({refused} refused) with {operations} operations: {ooms} out of memory, \
             {segments} segments, {released} released, {mapped} maps, {unmapped} unmaps, \
             {late} late frees, {in_pools} entries of private pools"
        )
    }
}

/// Makes what depends on the order of a hash table in the original comparable: runs of completed frees and of
/// released segments are sorted.
fn canonical(trace: &[String]) -> Vec<String> {
    let kind = |entry: &String| match entry.split(':').next() {
        Some("free_completed") => 1,
        Some("segment_free" | "segment_unmap") => 2,
        _ => 0,
    };
    let mut result = trace.to_vec();
    let runs = result.chunk_by_mut(|a, b| kind(a) != 0 && kind(a) == kind(b));
    runs.for_each(<[String]>::sort);
    result
}

/// A free block keeps the requested size of whichever of its parts was freed last.
fn without_stale_sizes(segment: &str) -> String {
    let word = |word: &str| {
        let mut parts = word.split(',');
        match (parts.next(), parts.next()) {
            (Some("i"), Some(size)) => format!("i,{size},_"),
            _ => word.to_owned(),
        }
    };
    segment.split(' ').map(word).collect::<Vec<_>>().join(" ")
}

/// Statistics that depend on the order in which several blocks are merged: how often, and how far up, the
/// number of split free blocks went in between.
fn depends_on_order(name: &str) -> bool {
    name.starts_with("inactive_split") && !name.ends_with(".current")
}

/// Compares two runs of the same lines; `None` if they agree.
pub(crate) fn first_difference(
    lines: &[String],
    oracle: &Outcome,
    ours: &Outcome,
    unordered: bool,
) -> Option<String> {
    let names = stat_names();
    for (at, (theirs, our)) in oracle.steps.iter().zip(&ours.steps).enumerate() {
        // PyTorch found its own rules broken; what it does from here on means nothing.
        if theirs.answer.contains("INTERNAL ASSERT FAILED") {
            return None;
        }
        let mut text = String::new();
        let answers = (theirs.answer.split(' ').next(), our.answer.split(' ').next());
        if answers.0 != answers.1 {
            let _ = writeln!(text, "  answer: PyTorch {}, unhand {}", theirs.answer, our.answer);
        }
        let trace = |step: &Step| if unordered { canonical(&step.trace) } else { step.trace.clone() };
        let (their_trace, our_trace) = (trace(theirs), trace(our));
        if their_trace != our_trace {
            let list =
                |trace: &[String]| if trace.is_empty() { "nothing".to_owned() } else { trace.join(" ") };
            let _ = writeln!(
                text,
                "  trace: PyTorch {}\n         unhand {}",
                list(&their_trace),
                list(&our_trace)
            );
        }
        for ((name, their), our) in names.iter().zip(&theirs.stats).zip(&our.stats) {
            if their != our && !(unordered && depends_on_order(name)) {
                let _ = writeln!(text, "  {name}: PyTorch {their}, unhand {our}");
            }
        }
        if theirs.stats.len() != our.stats.len() {
            let _ = writeln!(text, "  {} statistics, unhand has {}", theirs.stats.len(), our.stats.len());
        }
        text += &snapshots_differ(&theirs.snapshot, &our.snapshot, unordered);
        if !text.is_empty() {
            let line = lines.get(at).map_or("?", String::as_str);
            return Some(format!("after line {} (`{line}`):\n{text}", at + 1));
        }
    }
    if oracle.steps.len() != ours.steps.len() {
        return Some(format!("{} answers, unhand gave {}", oracle.steps.len(), ours.steps.len()));
    }
    let text = snapshots_differ(&oracle.snapshot, &ours.snapshot, unordered)
        + &lists_differ("private pools", &oracle.pools, &ours.pools);
    (!text.is_empty()).then(|| format!("at the end:\n{text}"))
}

fn snapshots_differ(theirs: &[String], ours: &[String], unordered: bool) -> String {
    let show = |lines: &[String]| -> Vec<String> {
        if unordered { lines.iter().map(|line| without_stale_sizes(line)).collect() } else { lines.to_vec() }
    };
    lists_differ("snapshot", &show(theirs), &show(ours))
}

fn lists_differ(what: &str, theirs: &[String], ours: &[String]) -> String {
    if theirs == ours {
        return String::new();
    }
    let only = |a: &[String], b: &[String]| -> String {
        a.iter().filter(|line| !b.contains(line)).fold(String::new(), |text, line| text + "\n    " + line)
    };
    format!("  {what}, only PyTorch:{}\n  {what}, only unhand:{}\n", only(theirs, ours), only(ours, theirs))
}
