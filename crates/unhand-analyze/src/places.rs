//! Memory by stream and by memory pool: free memory of one cannot serve another.

use rustc_hash::FxHashMap;
use serde::Serialize;
use unhand_snapshot::{Action, BlockState, PoolId, Snapshot};

use crate::pins::free_parts;
use crate::rounding::Rounding;
use crate::site::{SiteId, Sites};
use unhand_alloc::Bytes;

/// The memory of one stream at the end.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize)]
pub struct StreamShare {
    /// The raw stream handle; 0 is the default stream.
    pub stream: u64,
    /// Number of segments.
    pub segments: u64,
    /// Bytes held from the driver.
    pub reserved_bytes: u64,
    /// Bytes of allocated blocks.
    pub allocated_bytes: u64,
    /// Bytes of blocks that were freed and wait for another stream.
    pub pending_bytes: u64,
    /// Free bytes: returnable and stuck.
    pub cached_bytes: u64,
    /// The line that allocated most on this stream over the whole history; `None` without stacks or history.
    pub allocated_at: Option<String>,
    /// What that means, when free memory of a side stream is out of reach for the default stream.
    pub sentence: Option<String>,
}

/// The memory of one pool at the end.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct PoolShare {
    /// The pool's id; `[0, 0]` is the default pool.
    pub pool: (u64, u64),
    /// Whose pool it is.
    pub kind: PoolOwner,
    /// Number of segments.
    pub segments: u64,
    /// Bytes held from the driver.
    pub reserved_bytes: u64,
    /// Bytes of allocated blocks.
    pub allocated_bytes: u64,
    /// Bytes of blocks that were freed and wait for another stream.
    pub pending_bytes: u64,
    /// Free bytes.
    pub cached_bytes: u64,
}

/// Whose memory pool it is, told by its id.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum PoolOwner {
    /// Everybody's.
    Default,
    /// A CUDA graph made it for itself: `(n, 0)`.
    CudaGraph,
    /// `torch.cuda.MemPool` or `graph_pool_handle()`: `(0, n)`.
    MemPool,
}

impl PoolOwner {
    /// Judges an id.
    pub fn of(pool: (u64, u64)) -> PoolOwner {
        match pool {
            (0, 0) => PoolOwner::Default,
            (_, 0) => PoolOwner::CudaGraph,
            _ => PoolOwner::MemPool,
        }
    }

    /// The words for a sentence.
    pub fn words(self) -> &'static str {
        match self {
            PoolOwner::Default => "default pool",
            PoolOwner::CudaGraph => "CUDA graph pool",
            PoolOwner::MemPool => "MemPool",
        }
    }
}

pub(crate) fn shares(
    snapshot: &Snapshot,
    device: usize,
    rounding: &Rounding,
    sites: &mut Sites<'_>,
) -> (Vec<StreamShare>, Vec<PoolShare>) {
    let mut streams: FxHashMap<u64, StreamShare> = FxHashMap::default();
    let mut pools: FxHashMap<PoolId, PoolShare> = FxHashMap::default();
    for segment in snapshot.segments.iter().filter(|s| usize::try_from(s.device) == Ok(device)) {
        let of_state = |state: BlockState| -> u64 {
            segment.blocks.iter().filter(|b| b.state == state).map(|b| b.size).sum()
        };
        let allocated = of_state(BlockState::ActiveAllocated);
        let pending = of_state(BlockState::ActivePendingFree);
        let free = free_parts(segment, rounding);
        let cached = free.returnable_bytes + free.stuck_bytes;
        let stream = streams
            .entry(segment.stream)
            .or_insert_with(|| StreamShare { stream: segment.stream, ..StreamShare::default() });
        stream.segments += 1;
        stream.reserved_bytes += segment.total_size;
        stream.allocated_bytes += allocated;
        stream.pending_bytes += pending;
        stream.cached_bytes += cached;
        let id = (segment.pool_id.0, segment.pool_id.1);
        let pool = pools.entry(segment.pool_id).or_insert_with(|| PoolShare {
            pool: id,
            kind: PoolOwner::of(id),
            segments: 0,
            reserved_bytes: 0,
            allocated_bytes: 0,
            pending_bytes: 0,
            cached_bytes: 0,
        });
        pool.segments += 1;
        pool.reserved_bytes += segment.total_size;
        pool.allocated_bytes += allocated;
        pool.pending_bytes += pending;
        pool.cached_bytes += cached;
    }

    let mut streams: Vec<StreamShare> = streams.into_values().collect();
    streams.sort_by_key(|s| (std::cmp::Reverse(s.reserved_bytes), s.stream));
    if streams.len() > 1 {
        let lines = lines_by_stream(snapshot, device, sites);
        for share in &mut streams {
            share.allocated_at = lines.get(&share.stream).map(|&site| sites.get(site).place().to_owned());
            share.sentence = share.say();
        }
    }
    let mut pools: Vec<PoolShare> = pools.into_values().collect();
    pools.sort_by_key(|p| (std::cmp::Reverse(p.reserved_bytes), p.pool));
    (streams, pools)
}

impl StreamShare {
    fn say(&self) -> Option<String> {
        if self.stream == 0 || self.cached_bytes == 0 {
            return None;
        }
        let line =
            self.allocated_at.as_ref().map(|line| format!(" (allocated at {line})")).unwrap_or_default();
        Some(format!(
            "{} are cached for side stream {:#x}{line} and cannot serve another stream.",
            Bytes(self.cached_bytes),
            self.stream
        ))
    }
}

/// For each stream the line that allocated most bytes on it.
fn lines_by_stream(snapshot: &Snapshot, device: usize, sites: &mut Sites<'_>) -> FxHashMap<u64, SiteId> {
    let mut bytes: FxHashMap<(u64, SiteId), u64> = FxHashMap::default();
    if sites.has_stacks() {
        for event in snapshot.traces.get(device).into_iter().flat_map(unhand_snapshot::Trace::iter) {
            if event.action == Action::Alloc && !event.stack.is_none() {
                *bytes.entry((event.stream, sites.of(event.stack).0)).or_default() += event.size;
            }
        }
    }
    let mut largest: FxHashMap<u64, (u64, SiteId)> = FxHashMap::default();
    for ((stream, site), bytes) in bytes {
        let best = largest.entry(stream).or_insert((bytes, site));
        // Equal sums: the line seen first, so that the answer never depends on the order of a hash map.
        if (bytes, std::cmp::Reverse(site)) > (best.0, std::cmp::Reverse(best.1)) {
            *best = (bytes, site);
        }
    }
    largest.into_iter().map(|(stream, (_, site))| (stream, site)).collect()
}
