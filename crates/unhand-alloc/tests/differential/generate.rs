//! Random scripts. A plan is what proptest draws and shrinks; a plan always makes a valid script, whichever of
//! its steps are taken out.

use proptest::collection::vec;
use proptest::prelude::*;
use proptest::sample::select;

use crate::script::Script;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;

/// Handles of the streams; the library takes even ones only for streams it has not made.
const STREAMS: [u64; 3] = [0, 0x10, 0x20];

/// Settings at the start and in the middle of scripts.
const CONFS: [&str; 26] = [
    "",
    "max_split_size_mb:20",
    "max_split_size_mb:64",
    "max_split_size_mb:24,max_non_split_rounding_mb:32",
    "max_split_size_mb:40,roundup_power2_divisions:4",
    "roundup_power2_divisions:8",
    "roundup_power2_divisions:[1:2,4:4,16:1,>:8]",
    "roundup_power2_divisions:16,max_non_split_rounding_mb:64",
    "garbage_collection_threshold:0.3",
    "garbage_collection_threshold:0.6",
    "garbage_collection_threshold:0.8,max_split_size_mb:30",
    "garbage_collection_threshold:0.5,expandable_segments:True",
    "expandable_segments:True",
    "expandable_segments:False",
    "expandable_segments:True,max_split_size_mb:20",
    "expandable_segments:True,roundup_power2_divisions:4",
    "expandable_segments:True,large_segment_size_mb:12",
    "large_segment_size_mb:12",
    "large_segment_size_mb:48,max_split_size_mb:48",
    "max_split_size_mb:32,garbage_collection_threshold:0.4,large_segment_size_mb:32",
    "per_process_memory_fraction:0.6,garbage_collection_threshold:0.5",
    "throw_on_cudamalloc_oom:True",
    "throw_on_cudamalloc_oom:True,per_process_memory_fraction:0.5",
    "expandable_segments:True,throw_on_cudamalloc_oom:True",
    "expandable_segments:True,expandable_segments_reserve:0.5",
    "expandable_segments:True,large_segment_size_mb:30,garbage_collection_threshold:0.4,max_split_size_mb:30",
];

/// Sizes at which a rule changes; each is used as it is, and one less and one more.
const EDGES: [u64; 16] = [
    1,
    512,
    KIB,
    4 * KIB,
    512 * KIB,
    MIB,
    2 * MIB,
    9 * MIB,
    10 * MIB,
    12 * MIB,
    18 * MIB,
    19 * MIB,
    20 * MIB,
    24 * MIB,
    32 * MIB,
    64 * MIB,
];

/// One step of a plan. `pick` chooses among what exists when the step comes to be done, if anything does.
#[derive(Clone, Debug)]
pub(crate) enum PlanStep {
    Malloc {
        bytes: u64,
        stream: usize,
    },
    /// The n-th of the script's own few sizes, so that cached blocks fit again.
    MallocUsual {
        pick: usize,
        stream: usize,
    },
    Free {
        pick: usize,
    },
    FreeNewest,
    /// One of the script's own sizes, allocated and freed several times in a row.
    Again {
        pick: usize,
        stream: usize,
        times: usize,
    },
    RecordStream {
        pick: usize,
        stream: usize,
    },
    Busy(usize),
    Idle(usize),
    EmptyCache,
    Settings(usize),
    Fraction(f64),
    PoolCreate {
        use_on_oom: bool,
        no_split: bool,
    },
    PoolBegin(usize),
    PoolEnd(usize),
    PoolDrop(usize),
    PoolEmpty(usize),
    ResetPeak,
    ResetAccumulated,
    Snapshot,
}

/// A script before its block ids are known.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    total: u64,
    conf: usize,
    fraction: Option<f64>,
    usual: Vec<u64>,
    flavour: Flavour,
    steps: Vec<PlanStep>,
}

/// What one script is about.
#[derive(Clone, Copy, Debug)]
struct Flavour {
    /// Streams that allocate.
    streams: usize,
    /// How often private pools come up.
    pools: u32,
    /// How often other streams use blocks.
    events: u32,
    /// Events on more than one stream and more than one private pool are allowed.
    unordered: bool,
}

impl Flavour {
    /// Whether the original's order of things depends on its hash tables. Frees under a diversion wait in one as
    /// well (up to 2.12), so pools together with events are enough.
    fn is_unordered(self) -> bool {
        self.unordered || (self.pools > 0 && self.events > 0)
    }
}

fn log_uniform(low: u64, high: u64) -> impl Strategy<Value = u64> {
    let (low, high) = (low.ilog2(), high.ilog2());
    (low..high).prop_flat_map(|exponent| (1 << exponent)..(2u64 << exponent))
}

fn size() -> impl Strategy<Value = u64> {
    prop_oneof![
        4 => log_uniform(1, MIB),
        3 => log_uniform(MIB, 8 * MIB),
        3 => log_uniform(8 * MIB, 64 * MIB),
        3 => (select(&EDGES[..]), -1i64..=1).prop_map(|(edge, by)| edge.saturating_add_signed(by)),
        2 => (1u64..40).prop_map(|n| n * MIB),
        1 => (1u64..4096).prop_map(|n| n * 512),
    ]
}

fn plan_step(flavour: Flavour) -> impl Strategy<Value = PlanStep> {
    let stream = || 0..flavour.streams;
    let share = |weight: u32, times: u32| (weight * times).max(1); // proptest takes no weight of 0
    let pick = || 0usize..1000;
    prop_oneof![
        2200 => (size(), stream()).prop_map(|(bytes, stream)| PlanStep::Malloc { bytes, stream }),
        2200 => (pick(), stream()).prop_map(|(pick, stream)| PlanStep::MallocUsual { pick, stream }),
        3200 => pick().prop_map(|pick| PlanStep::Free { pick }),
        500 => Just(PlanStep::FreeNewest),
        500 => (pick(), stream(), 1usize..4).prop_map(|(pick, stream, times)| PlanStep::Again { pick, stream, times }),
        share(300, flavour.events) => (pick(), pick()).prop_map(|(pick, stream)| PlanStep::RecordStream { pick, stream }),
        share(100, flavour.events) => pick().prop_map(PlanStep::Busy),
        share(100, flavour.events) => pick().prop_map(PlanStep::Idle),
        200 => Just(PlanStep::EmptyCache),
        100 => (0..CONFS.len()).prop_map(PlanStep::Settings),
        100 => select(vec![1.0, 0.9, 0.75, 0.5, 1.0 / 3.0]).prop_map(PlanStep::Fraction),
        share(100, flavour.pools) => (prop::bool::ANY, prop::bool::weighted(0.2))
            .prop_map(|(use_on_oom, no_split)| PlanStep::PoolCreate { use_on_oom, no_split }),
        share(200, flavour.pools) => pick().prop_map(PlanStep::PoolBegin),
        share(200, flavour.pools) => pick().prop_map(PlanStep::PoolEnd),
        share(100, flavour.pools) => pick().prop_map(PlanStep::PoolDrop),
        share(50, flavour.pools) => pick().prop_map(PlanStep::PoolEmpty),
        100 => Just(PlanStep::ResetPeak),
        100 => Just(PlanStep::ResetAccumulated),
        100 => Just(PlanStep::Snapshot),
    ]
}

/// Plans of up to `most` steps.
pub(crate) fn plan(most: usize) -> impl Strategy<Value = Plan> {
    let chances =
        (1usize..=3, select(vec![0u32, 0, 2, 6]), select(vec![0u32, 2, 6]), prop::bool::weighted(0.2));
    let flavour =
        chances.prop_map(|(streams, pools, events, unordered)| Flavour { streams, pools, events, unordered });
    // Tight memory is where the interesting things happen; a roomy device shows the rest.
    let total = prop_oneof![
        5 => (16u64..80).prop_map(|n| n * 2 * MIB),
        2 => (32u64..256).prop_map(|n| n * MIB),
        2 => Just(1024 * MIB),
    ];
    let fraction = prop_oneof![3 => Just(None), 1 => select(vec![0.9, 0.7, 0.5]).prop_map(Some)];
    (flavour, total, 0..CONFS.len(), fraction, vec(size(), 1..5)).prop_flat_map(
        move |(flavour, total, conf, fraction, usual)| {
            vec(plan_step(flavour), 1..most).prop_map(move |steps| Plan {
                total,
                conf,
                fraction,
                usual: usual.clone(),
                flavour,
                steps,
            })
        },
    )
}

#[derive(Clone, Copy, Debug)]
struct Pool {
    id: u64,
    diverted: bool,
}

/// Writes a plan's script, keeping track of what exists. A block whose allocation will fail counts as existing
/// here; naming it later is an error in both allocators.
struct Writer {
    script: Script,
    live: Vec<u64>,
    next_block: u64,
    pools: Vec<Pool>,
    next_pool: u64,
    has_fallback: bool,
    flavour: Flavour,
}

impl Plan {
    pub(crate) fn script(&self) -> Script {
        let mut writer = Writer {
            script: Script {
                total: self.total,
                conf: CONFS[self.conf].to_owned(),
                lines: Vec::new(),
                unordered: self.flavour.is_unordered(),
            },
            live: Vec::new(),
            next_block: 1,
            pools: Vec::new(),
            next_pool: 1,
            has_fallback: false,
            flavour: self.flavour,
        };
        if let Some(fraction) = self.fraction {
            writer.line(format!("fraction {fraction}"));
        }
        for step in &self.steps {
            writer.step(step, &self.usual);
        }
        writer.script
    }
}

impl Writer {
    fn line(&mut self, line: String) {
        self.script.lines.push(line);
    }

    /// Adds lines that might not be proper at this point; whether they were added.
    fn lines_if_proper(&mut self, lines: &[String]) -> bool {
        let before = self.script.lines.len();
        self.script.lines.extend_from_slice(lines);
        let proper = self.script.is_proper();
        if !proper {
            self.script.lines.truncate(before);
        }
        proper
    }

    fn malloc(&mut self, bytes: u64, stream: usize) {
        let (id, stream) = (self.next_block, STREAMS[stream]);
        self.next_block += 1;
        self.line(format!("malloc {id} {bytes} {stream}"));
        if bytes > 0 {
            self.live.push(id);
        }
    }

    /// The stream whose events matter: only one of them unless order is given up.
    fn event_stream(&self, pick: usize) -> u64 {
        if self.flavour.is_unordered() { STREAMS[pick % STREAMS.len()] } else { STREAMS[1] }
    }

    fn step(&mut self, step: &PlanStep, usual: &[u64]) {
        match *step {
            PlanStep::Malloc { bytes, stream } => self.malloc(bytes, stream),
            PlanStep::MallocUsual { pick, stream } => self.malloc(usual[pick % usual.len()], stream),
            PlanStep::Free { pick } => {
                if !self.live.is_empty() {
                    let id = self.live.swap_remove(pick % self.live.len());
                    self.line(format!("free {id}"));
                }
            }
            PlanStep::FreeNewest => {
                if let Some(id) = self.live.pop() {
                    self.line(format!("free {id}"));
                }
            }
            PlanStep::Again { pick, stream, times } => {
                for _ in 0..times {
                    self.malloc(usual[pick % usual.len()], stream);
                    if let Some(id) = self.live.pop() {
                        self.line(format!("free {id}"));
                    }
                }
                self.malloc(usual[pick % usual.len()], stream);
            }
            PlanStep::RecordStream { pick, stream } => {
                if self.flavour.events > 0 && !self.live.is_empty() {
                    let at = pick % self.live.len();
                    let (id, stream) = (self.live[at], self.event_stream(stream));
                    let record = format!("record_stream {id} {stream}");
                    if !self.lines_if_proper(std::slice::from_ref(&record))
                        && self.lines_if_proper(&[record, format!("free {id}")])
                    {
                        self.live.swap_remove(at);
                    }
                }
            }
            PlanStep::Busy(pick) => self.line(format!("busy {}", self.event_stream(pick))),
            PlanStep::Idle(pick) => self.line(format!("idle {}", self.event_stream(pick))),
            PlanStep::EmptyCache => self.line("empty_cache".to_owned()),
            PlanStep::Settings(which) => {
                self.lines_if_proper(&[format!("settings {}", CONFS[which])]);
            }
            PlanStep::Fraction(fraction) => self.line(format!("fraction {fraction}")),
            PlanStep::PoolCreate { use_on_oom, no_split } => {
                // Several pools to fall back on, or to release at once, are visited in hash order.
                let allowed = if self.flavour.is_unordered() { 3 } else { 1 };
                if self.flavour.pools > 0 && self.next_pool <= allowed {
                    let id = self.next_pool;
                    self.next_pool += 1;
                    let fallback = use_on_oom && !self.has_fallback;
                    self.has_fallback |= fallback;
                    self.pools.push(Pool { id, diverted: false });
                    let flags = [(fallback, " use_on_oom"), (no_split, " no_split")];
                    let flags: String = flags.iter().filter(|flag| flag.0).map(|flag| flag.1).collect();
                    self.line(format!("pool_create {id}{flags}"));
                }
            }
            PlanStep::PoolBegin(pick) => {
                if let Some(pool) = self.pool(pick).filter(|pool| !pool.diverted) {
                    pool.diverted = true;
                    let id = pool.id;
                    self.line(format!("pool_begin {id}"));
                }
            }
            PlanStep::PoolEnd(pick) => {
                if let Some(pool) = self.pool(pick).filter(|pool| pool.diverted) {
                    pool.diverted = false;
                    let id = pool.id;
                    self.line(format!("pool_end {id}"));
                    self.line(format!("pool_release {id}"));
                }
            }
            PlanStep::PoolDrop(pick) => {
                // As the destructor of a `MemPool` does it, outside of any use.
                if let Some(Pool { id, diverted: false }) = self.pool(pick).copied() {
                    let lines = [
                        format!("pool_use_on_oom {id} 0"),
                        format!("pool_release {id}"),
                        format!("pool_empty {id}"),
                    ];
                    if self.lines_if_proper(&lines) {
                        self.pools.retain(|pool| pool.id != id);
                    }
                }
            }
            PlanStep::PoolEmpty(pick) => {
                if let Some(id) = self.pool(pick).map(|pool| pool.id) {
                    self.lines_if_proper(&[format!("pool_empty {id}")]);
                }
            }
            PlanStep::ResetPeak => self.line("reset_peak".to_owned()),
            PlanStep::ResetAccumulated => self.line("reset_accumulated".to_owned()),
            PlanStep::Snapshot => self.line("snapshot".to_owned()),
        }
    }

    fn pool(&mut self, pick: usize) -> Option<&mut Pool> {
        let count = self.pools.len().max(1);
        self.pools.get_mut(pick % count)
    }
}
