//! Our side: the same scripts on `unhand-alloc` over the null device.

use std::collections::{BTreeMap, HashMap};
use std::fmt::Write as _;

use unhand_alloc::{
    AllocError, Allocation, BlockState, DeviceAllocator, HistoryLevel, NullDevice, PoolId, PoolKind,
    PoolOptions, Profile, Release, Request, Route, SegmentInfo, Settings, Stat, StreamId, TraceEntry,
};

use crate::Subject;
use crate::outcome::{Outcome, Step, stat_names};
use crate::script::Script;

/// `unhand-alloc` as a given release.
pub(crate) struct Ours {
    profile: Profile,
    names: Vec<String>,
}

impl Ours {
    pub(crate) fn new(version: &str) -> Ours {
        let release: Release = version.parse().unwrap_or_else(|error| panic!("{error}"));
        Ours { profile: Profile::of(release), names: stat_names() }
    }

    fn stats(&self, run: &Run) -> Vec<i64> {
        let map = run.allocator.memory_stats().to_map();
        self.names.iter().map(|name| map.get(name).copied().unwrap_or(0)).collect()
    }
}

impl Subject for Ours {
    fn run(&mut self, script: &Script) -> Result<Outcome, String> {
        let settings = Settings::parse(&script.conf, &self.profile).map_err(|error| error.to_string())?;
        let device = NullDevice::new(script.total);
        let mut run = Run {
            allocator: DeviceAllocator::with_settings(device, settings, self.profile),
            blocks: HashMap::new(),
        };
        run.clear_trace();
        let mut outcome = Outcome::default();
        for line in &script.lines {
            let answer = run.line(line)?;
            let trace = run.allocator.history().iter().map(entry).collect();
            run.clear_trace();
            run.allocator.validate().map_err(|violation| format!("after `{line}`: {violation}"))?;
            let snapshot = if line == "snapshot" { run.snapshot() } else { Vec::new() };
            outcome.steps.push(Step { answer, stats: self.stats(&run), trace, snapshot });
        }
        outcome.snapshot = run.snapshot();
        outcome.pools = pools(&run.allocator.memory_stats().reserved_by_private_pool);
        Ok(outcome)
    }
}

/// One script under way.
struct Run {
    allocator: DeviceAllocator<NullDevice>,
    blocks: HashMap<u64, Allocation>,
}

impl Run {
    fn clear_trace(&mut self) {
        self.allocator.record_memory_history(true, HistoryLevel::Never, usize::MAX, true);
    }

    fn snapshot(&self) -> Vec<String> {
        let settings = self.allocator.settings();
        let max_split = settings.max_split_size.map_or(-1, u64::cast_signed);
        let threshold = settings.garbage_collection_threshold;
        let mut first = format!("cfg {max_split} {threshold} {}", u8::from(settings.expandable_segments));
        for divisions in settings.roundup_power2_divisions {
            let _ = write!(first, " {divisions}");
        }
        let segments = self.allocator.memory_snapshot();
        std::iter::once(first).chain(segments.iter().map(segment)).collect()
    }

    /// Carries out one line; what it answers. An unknown line is an error of the script.
    fn line(&mut self, line: &str) -> Result<String, String> {
        let mut words = line.split_whitespace();
        let op = words.next().unwrap_or_default();
        let rest: Vec<&str> = words.collect();
        let number = |at: usize| -> Result<u64, String> {
            let word = rest.get(at).ok_or_else(|| format!("`{line}` lacks a number"))?;
            let parsed =
                word.strip_prefix("0x").map_or_else(|| word.parse(), |hex| u64::from_str_radix(hex, 16));
            parsed.map_err(|_| format!("`{line}`: `{word}` is no number"))
        };
        let stream = |at: usize| number(at).map(StreamId);
        let pool = || -> Result<PoolId, String> {
            let pair = rest.first().and_then(|word| word.split_once(':'));
            match pair.map(|(a, b)| (a.parse(), b.parse())) {
                Some((Ok(a), Ok(b))) => Ok(PoolId(a, b)),
                _ => number(0).map(|id| PoolId(0, id)),
            }
        };
        let allocator = &mut self.allocator;
        let done = match op {
            "malloc" => {
                return Ok(match allocator.malloc(Request::new(number(1)?).on(stream(2)?)) {
                    Ok(block) => {
                        self.blocks.insert(number(0)?, block);
                        hex(block.address())
                    }
                    Err(AllocError::OutOfMemory(_) | AllocError::TooLarge(_)) => "oom".to_owned(),
                    Err(error) => format!("error {error}"),
                });
            }
            "free" => match self.blocks.remove(&number(0)?) {
                Some(block) => allocator.free(block),
                None => return Ok("error protocol: no such block".to_owned()),
            },
            "record_stream" => match self.blocks.get(&number(0)?) {
                Some(block) => allocator.record_stream(*block, stream(1)?),
                None => return Ok("error protocol: no such block".to_owned()),
            },
            "busy" => {
                allocator.device_mut().set_busy(stream(0)?);
                Ok(())
            }
            "idle" => {
                allocator.device_mut().set_idle(stream(0)?);
                Ok(())
            }
            "empty_cache" => allocator.empty_cache(),
            "settings" => allocator.set_settings(line.strip_prefix("settings").unwrap_or_default().trim()),
            "fraction" => {
                let fraction = rest.first().and_then(|word| word.parse().ok()).ok_or(line)?;
                allocator.set_memory_fraction(fraction)
            }
            "pool_create" => {
                let flag = |flag: &str| rest.contains(&flag);
                let (use_on_oom, no_split) = (flag("use_on_oom"), flag("no_split"));
                allocator.create_pool(pool()?, PoolOptions { use_on_oom, no_split, source: None })
            }
            "pool_use_on_oom" => {
                allocator.set_use_on_oom(pool()?, number(1)? != 0);
                Ok(())
            }
            "pool_begin" => allocator.begin_allocate_to_pool(pool()?, Route::All),
            "pool_end" => allocator.end_allocate_to_pool(pool()?),
            "pool_release" => allocator.release_pool(pool()?),
            "pool_empty" => allocator.empty_pool_cache(pool()?),
            "capture_begin" => {
                allocator.device_mut().set_capturing(stream(0)?, true);
                allocator.mark_capture_begin();
                Ok(())
            }
            "capture_end" => {
                allocator.device_mut().set_capturing(stream(0)?, false);
                allocator.mark_capture_end();
                Ok(())
            }
            "reset_peak" => {
                allocator.reset_peak_memory_stats();
                Ok(())
            }
            "reset_accumulated" => {
                allocator.reset_accumulated_memory_stats();
                Ok(())
            }
            "snapshot" => {
                allocator.snapshot();
                return Ok("cfg".to_owned());
            }
            _ => return Err(format!("unknown line `{line}`")),
        };
        Ok(done.map_or_else(|error| format!("error {error}"), |()| "ok".to_owned()))
    }
}

/// As C's `%#x`, which writes 0 without a prefix.
fn hex(number: u64) -> String {
    if number == 0 { "0".to_owned() } else { format!("{number:#x}") }
}

fn entry(entry: &TraceEntry) -> String {
    let PoolId(a, b) = entry.pool_id;
    let (action, address) = (entry.action.as_str(), hex(entry.address));
    format!("{action}:{address}:{}:{}:{a}:{b}", entry.size, entry.stream.0)
}

fn segment(segment: &SegmentInfo) -> String {
    let PoolId(a, b) = segment.pool_id;
    let mut text = format!(
        "seg {} {} {} {} {} {} {} {} {a}:{b}",
        hex(segment.address),
        segment.total_size,
        segment.allocated_size,
        segment.active_size,
        segment.requested_size,
        segment.stream.0,
        u8::from(segment.kind == PoolKind::Large),
        u8::from(segment.is_expandable),
    );
    for block in &segment.blocks {
        let state = match block.state {
            BlockState::ActiveAllocated => 'a',
            BlockState::ActivePendingFree => 'p',
            BlockState::Inactive => 'i',
        };
        let _ = write!(text, " {state},{},{}", block.size, block.requested_size);
    }
    text
}

fn pools(pools: &BTreeMap<PoolId, [Stat; 3]>) -> Vec<String> {
    let mut lines: Vec<String> = pools
        .iter()
        .map(|(PoolId(a, b), stats)| {
            let numbers = stats.iter().flat_map(|stat| [stat.current, stat.peak, stat.allocated, stat.freed]);
            numbers.fold(format!("{a}:{b}"), |text, number| text + "," + &number.to_string())
        })
        .collect();
    lines.sort();
    lines
}
