//! The statistics of one device, with PyTorch's names, arithmetic and resets.
//!
//! Source: `c10/core/CachingDeviceAllocator.h` (`Stat`, `DeviceStats`), `torch/cuda/memory.py::memory_stats`.

use std::collections::BTreeMap;

use crate::pool::PoolId;
use crate::size::PoolKind;

/// One statistic: what is there now, the most there has been, and the totals in and out.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Stat {
    /// Now.
    pub current: i64,
    /// The most since the last [`reset_peak_memory_stats`](crate::DeviceAllocator::reset_peak_memory_stats).
    pub peak: i64,
    /// All that was added since the last
    /// [`reset_accumulated_memory_stats`](crate::DeviceAllocator::reset_accumulated_memory_stats).
    pub allocated: i64,
    /// All that was taken away since then.
    pub freed: i64,
}

/// A [`Stat`] while it is being counted: `allocated` follows from the others, and a peak is rarely new.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counter {
    current: i64,
    peak: i64,
    freed: i64,
    /// `current` when the totals were last reset.
    base: i64,
}

impl Counter {
    #[inline]
    pub(crate) fn increase(&mut self, amount: i64) {
        self.current += amount;
        if self.current > self.peak {
            self.peak = self.current;
        }
    }

    #[inline]
    pub(crate) fn decrease(&mut self, amount: i64) {
        self.current -= amount;
        self.freed += amount;
    }

    #[inline]
    pub(crate) fn current(&self) -> i64 {
        self.current
    }

    fn reset_peak(&mut self) {
        self.peak = self.current;
    }

    fn reset_accumulated(&mut self) {
        self.freed = 0;
        self.base = self.current;
    }

    pub(crate) fn stat(&self) -> Stat {
        Stat {
            current: self.current,
            peak: self.peak,
            allocated: self.current - self.base + self.freed,
            freed: self.freed,
        }
    }
}

/// The nine statistics that exist for all pools together, for small pools and for large pools.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(usize)]
pub(crate) enum Kind {
    Allocation,
    Active,
    AllocatedBytes,
    ActiveBytes,
    RequestedBytes,
    Segment,
    ReservedBytes,
    InactiveSplit,
    InactiveSplitBytes,
}

/// Every [`Kind`] with PyTorch's name, in the order of `memory_stats()` (alphabetical).
const KINDS: [(Kind, &str); 9] = [
    (Kind::Active, "active"),
    (Kind::ActiveBytes, "active_bytes"),
    (Kind::AllocatedBytes, "allocated_bytes"),
    (Kind::Allocation, "allocation"),
    (Kind::InactiveSplit, "inactive_split"),
    (Kind::InactiveSplitBytes, "inactive_split_bytes"),
    (Kind::RequestedBytes, "requested_bytes"),
    (Kind::ReservedBytes, "reserved_bytes"),
    (Kind::Segment, "segment"),
];

/// Every [`Kind`] in the order of its number.
const KIND_ORDER: [Kind; 9] = [
    Kind::Allocation,
    Kind::Active,
    Kind::AllocatedBytes,
    Kind::ActiveBytes,
    Kind::RequestedBytes,
    Kind::Segment,
    Kind::ReservedBytes,
    Kind::InactiveSplit,
    Kind::InactiveSplitBytes,
];

/// Pool kinds beside "all".
const SCOPES: [&str; 3] = ["all", "small_pool", "large_pool"];

#[inline]
fn scope(kind: PoolKind) -> usize {
    match kind {
        PoolKind::Small => 1,
        PoolKind::Large => 2,
    }
}

/// The counters themselves. Grouped by scope, so that one allocation touches two short runs of memory.
#[derive(Debug, Default)]
pub(crate) struct Counters {
    scopes: [[Counter; 9]; 3],
    /// *Active* is counted apart from *allocated*; see [`begin_to_differ`](Counters::begin_to_differ).
    active_differs: bool,
    pub(crate) oversize_allocations: Counter,
    pub(crate) oversize_segments: Counter,
    pub(crate) num_alloc_retries: i64,
    pub(crate) num_ooms: i64,
    pub(crate) num_oom_rejections: i64,
    pub(crate) num_sync_all_streams: i64,
    pub(crate) num_device_alloc: i64,
    pub(crate) num_device_free: i64,
    /// `max_split_size` when the allocator was made; later settings do not change it.
    pub(crate) max_split_size: i64,
    reserved_by_private_pool: BTreeMap<PoolId, [Counter; 3]>,
}

impl Counters {
    #[inline]
    pub(crate) fn increase(&mut self, pool: PoolKind, kind: Kind, amount: u64) {
        self.scopes[0][kind as usize].increase(amount.cast_signed());
        self.scopes[scope(pool)][kind as usize].increase(amount.cast_signed());
    }

    #[inline]
    pub(crate) fn decrease(&mut self, pool: PoolKind, kind: Kind, amount: u64) {
        self.scopes[0][kind as usize].decrease(amount.cast_signed());
        self.scopes[scope(pool)][kind as usize].decrease(amount.cast_signed());
    }

    /// Adds a net change: a rise counts as allocated, a fall as freed.
    #[inline]
    pub(crate) fn change(&mut self, pool: PoolKind, kind: Kind, net: i64) {
        if net > 0 {
            self.increase(pool, kind, net.unsigned_abs());
        } else {
            self.decrease(pool, kind, net.unsigned_abs());
        }
    }

    /// A block is handed out.
    #[inline]
    pub(crate) fn block_allocated(&mut self, pool: PoolKind, block_bytes: u64, requested_bytes: u64) {
        let (block, requested) = (block_bytes.cast_signed(), requested_bytes.cast_signed());
        for scope in [0, scope(pool)] {
            let counters = &mut self.scopes[scope];
            counters[Kind::Allocation as usize].increase(1);
            counters[Kind::AllocatedBytes as usize].increase(block);
            counters[Kind::RequestedBytes as usize].increase(requested);
            if self.active_differs {
                counters[Kind::Active as usize].increase(1);
                counters[Kind::ActiveBytes as usize].increase(block);
            }
        }
    }

    /// A block's owner lets go of it; it stays active until [`block_settled`](Counters::block_settled).
    #[inline]
    pub(crate) fn block_freed(&mut self, pool: PoolKind, block_bytes: u64) {
        for scope in [0, scope(pool)] {
            let counters = &mut self.scopes[scope];
            counters[Kind::Allocation as usize].decrease(1);
            counters[Kind::AllocatedBytes as usize].decrease(block_bytes.cast_signed());
        }
    }

    /// A block that was freed is back in its pool.
    #[inline]
    pub(crate) fn block_settled(&mut self, pool: PoolKind, block_bytes: u64, requested_bytes: u64) {
        for scope in [0, scope(pool)] {
            let counters = &mut self.scopes[scope];
            counters[Kind::RequestedBytes as usize].decrease(requested_bytes.cast_signed());
            if self.active_differs {
                counters[Kind::Active as usize].decrease(1);
                counters[Kind::ActiveBytes as usize].decrease(block_bytes.cast_signed());
            }
        }
    }

    /// Both at once, for a block that no other stream uses.
    #[inline]
    pub(crate) fn block_freed_at_once(&mut self, pool: PoolKind, block_bytes: u64, requested_bytes: u64) {
        self.block_freed(pool, block_bytes);
        self.block_settled(pool, block_bytes, requested_bytes);
    }

    /// Adds to the number and the bytes of free blocks in segments that are in use.
    #[inline]
    pub(crate) fn split_change(&mut self, pool: PoolKind, count: i64, bytes: i64) {
        if count != 0 {
            self.change(pool, Kind::InactiveSplit, count);
        }
        if bytes != 0 {
            self.change(pool, Kind::InactiveSplitBytes, bytes);
        }
    }

    /// From here on *active* and *allocated* are two things: some block waits for other streams after its free.
    /// Until then every block is freed and settled at once, and one pair of counters serves for both.
    #[inline]
    pub(crate) fn begin_to_differ(&mut self) {
        if !self.active_differs {
            self.active_differs = true;
            for counters in &mut self.scopes {
                counters[Kind::Active as usize] = counters[Kind::Allocation as usize];
                counters[Kind::ActiveBytes as usize] = counters[Kind::AllocatedBytes as usize];
            }
        }
    }

    /// The counter that has a statistic's value.
    #[inline]
    fn source(&self, kind: Kind) -> usize {
        match kind {
            Kind::Active if !self.active_differs => Kind::Allocation as usize,
            Kind::ActiveBytes if !self.active_differs => Kind::AllocatedBytes as usize,
            other => other as usize,
        }
    }

    #[inline]
    pub(crate) fn current(&self, kind: Kind) -> i64 {
        self.scopes[0][self.source(kind)].current()
    }

    pub(crate) fn private_pool(&mut self, id: PoolId, kind: PoolKind, change: i64) {
        let counters = self.reserved_by_private_pool.entry(id).or_default();
        for scope in [0, scope(kind)] {
            if change > 0 { counters[scope].increase(change) } else { counters[scope].decrease(-change) }
        }
    }

    fn each(&mut self, mut apply: impl FnMut(&mut Counter)) {
        self.scopes.iter_mut().flatten().for_each(&mut apply);
        self.reserved_by_private_pool.values_mut().flatten().for_each(&mut apply);
        apply(&mut self.oversize_allocations);
        apply(&mut self.oversize_segments);
    }

    pub(crate) fn reset_peak(&mut self) {
        self.each(Counter::reset_peak);
    }

    pub(crate) fn reset_accumulated(&mut self) {
        self.each(Counter::reset_accumulated);
        self.num_alloc_retries = 0;
        self.num_ooms = 0;
        self.num_oom_rejections = 0;
        self.num_sync_all_streams = 0;
        self.num_device_alloc = 0;
        self.num_device_free = 0;
    }

    pub(crate) fn public(&self, has_rejections: bool, by_private_pool: bool) -> DeviceStats {
        DeviceStats {
            scopes: self.scopes.map(|counters| KIND_ORDER.map(|kind| counters[self.source(kind)].stat())),
            oversize_allocations: self.oversize_allocations.stat(),
            oversize_segments: self.oversize_segments.stat(),
            num_alloc_retries: self.num_alloc_retries,
            num_ooms: self.num_ooms,
            num_oom_rejections: has_rejections.then_some(self.num_oom_rejections),
            num_sync_all_streams: self.num_sync_all_streams,
            num_device_alloc: self.num_device_alloc,
            num_device_free: self.num_device_free,
            max_split_size: self.max_split_size,
            reserved_by_private_pool: if by_private_pool {
                self.reserved_by_private_pool
                    .iter()
                    .map(|(id, counters)| (*id, counters.map(|counter| counter.stat())))
                    .collect()
            } else {
                BTreeMap::new()
            },
        }
    }
}

/// A copy of a device's statistics (`memory_stats()`); bytes and counts as PyTorch reports them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeviceStats {
    scopes: [[Stat; 9]; 3],
    /// Allocations of `max_split_size` and more.
    pub oversize_allocations: Stat,
    /// Segments of `max_split_size` and more.
    pub oversize_segments: Stat,
    /// Allocations that succeeded or failed only after the cache was given back.
    pub num_alloc_retries: i64,
    /// Out-of-memory errors.
    pub num_ooms: i64,
    /// Requests refused by `throw_on_cudamalloc_oom`; `None` before 2.12.
    pub num_oom_rejections: Option<i64>,
    /// Times all streams' events were waited for.
    pub num_sync_all_streams: i64,
    /// `cudaMalloc` and map calls that succeeded.
    pub num_device_alloc: i64,
    /// `cudaFree` and unmap calls.
    pub num_device_free: i64,
    /// `max_split_size` in bytes when the allocator was made; -1 is unlimited.
    pub max_split_size: i64,
    /// Reserved bytes of each private pool that ever existed: all, small, large. Empty before 2.13.
    pub reserved_by_private_pool: BTreeMap<PoolId, [Stat; 3]>,
}

impl DeviceStats {
    fn all(&self, kind: Kind) -> Stat {
        self.scopes[0][kind as usize]
    }

    /// Bytes asked for and alive (`requested_bytes.all`).
    pub fn requested_bytes(&self) -> Stat {
        self.all(Kind::RequestedBytes)
    }

    /// Bytes of the blocks handed out (`allocated_bytes.all`).
    pub fn allocated_bytes(&self) -> Stat {
        self.all(Kind::AllocatedBytes)
    }

    /// Bytes held from the driver (`reserved_bytes.all`).
    pub fn reserved_bytes(&self) -> Stat {
        self.all(Kind::ReservedBytes)
    }

    /// Bytes of blocks handed out or waiting for other streams (`active_bytes.all`).
    pub fn active_bytes(&self) -> Stat {
        self.all(Kind::ActiveBytes)
    }

    /// Free bytes in segments that also hold live blocks (`inactive_split_bytes.all`).
    pub fn inactive_split_bytes(&self) -> Stat {
        self.all(Kind::InactiveSplitBytes)
    }

    /// Segments held from the driver; expandable segments do not count (`segment.all`).
    pub fn segments(&self) -> Stat {
        self.all(Kind::Segment)
    }

    /// Blocks handed out (`allocation.all`).
    pub fn allocations(&self) -> Stat {
        self.all(Kind::Allocation)
    }

    /// The same numbers under PyTorch's dotted keys: 122 of them in 2.11, 123 in 2.12, and from 2.13 on 12 more
    /// for each private pool.
    ///
    /// ```
    /// use unhand_alloc::{CachingAllocator, NullDevice};
    /// let allocator = CachingAllocator::new(vec![NullDevice::new(1 << 30)]);
    /// let stats = allocator.memory_stats(0)?.to_map();
    /// assert_eq!(stats["allocated_bytes.all.current"], 0);
    /// assert_eq!(stats.len(), 123);
    /// # Ok::<(), unhand_alloc::AllocError>(())
    /// ```
    pub fn to_map(&self) -> BTreeMap<String, i64> {
        let mut map = BTreeMap::new();
        let mut put = |name: &str, stat: Stat| {
            map.insert(format!("{name}.current"), stat.current);
            map.insert(format!("{name}.peak"), stat.peak);
            map.insert(format!("{name}.allocated"), stat.allocated);
            map.insert(format!("{name}.freed"), stat.freed);
        };
        for (kind, name) in KINDS {
            for (scope, scope_name) in SCOPES.iter().enumerate() {
                put(&format!("{name}.{scope_name}"), self.scopes[scope][kind as usize]);
            }
        }
        put("oversize_allocations", self.oversize_allocations);
        put("oversize_segments", self.oversize_segments);
        for (id, stats) in &self.reserved_by_private_pool {
            for (scope, scope_name) in SCOPES.iter().enumerate() {
                put(&format!("reserved_bytes_by_private_pools.{}_{}.{scope_name}", id.0, id.1), stats[scope]);
            }
        }
        for (name, value) in [
            ("num_alloc_retries", Some(self.num_alloc_retries)),
            ("num_ooms", Some(self.num_ooms)),
            ("num_oom_rejections", self.num_oom_rejections),
            ("num_sync_all_streams", Some(self.num_sync_all_streams)),
            ("num_device_alloc", Some(self.num_device_alloc)),
            ("num_device_free", Some(self.num_device_free)),
            ("max_split_size", Some(self.max_split_size)),
        ] {
            if let Some(value) = value {
                map.insert(name.to_owned(), value);
            }
        }
        map
    }
}
