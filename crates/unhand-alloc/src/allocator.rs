//! The caching allocator of one device: its state, and the calls that do not fit one of the parts below.
//!
//! The parts follow PyTorch's `DeviceCachingAllocator`: [`allocate`](self) (malloc, split, retry ladder),
//! `free` (free, merge, pending events), `release` (empty cache, garbage collection), `grow` (expandable
//! segments), `pools` (private pools, diversions, captures), `inspect` (snapshot) and `validate`. `recent` is a
//! shortcut PyTorch does not have.

mod allocate;
mod at_address;
mod checkpoint;
mod free;
mod grow;
mod inspect;
mod pools;
mod recent;
mod release;
mod restore;
mod streams;
mod validate;

use std::collections::{BTreeMap, VecDeque};
use std::sync::OnceLock;

use rustc_hash::FxHashMap;

use crate::address_table::AddressTable;
use crate::block::{Arena, Block, BlockId, Context, PoolIndex, StreamIndex};
use crate::device::{Device, EventId, MemInfo, StreamId};
use crate::error::AllocError;
use crate::free_set::FreeKey;
use crate::history::{Action, History, HistoryLevel, TraceEntry};
use crate::pool::{BlockPool, PoolId, PrivatePool, Route};
use crate::profile::Profile;
use crate::settings::Settings;
use crate::size::PoolKind;
use crate::stats::{Counters, DeviceStats, Kind};

pub use checkpoint::{Checkpoint, CheckpointBlock, Restored};
pub use inspect::{BlockInfo, BlockState, SegmentInfo};
pub use restore::{RestoreBlock, RestoreSegment};
pub use validate::Violation;

use grow::Expandables;
use recent::Recent;
use streams::Streams;

/// A block that was handed out. Give it to [`DeviceAllocator::free`]; keeping only the address works too
/// ([`free_address`](DeviceAllocator::free_address)), at the price of a look-up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[must_use = "memory that is dropped without `free` stays allocated"]
pub struct Allocation {
    address: u64,
    block: Option<BlockId>,
}

impl Allocation {
    /// What a request of 0 bytes returns: address 0, nothing behind it.
    pub const NULL: Allocation = Allocation { address: 0, block: None };

    /// The device address.
    pub fn address(self) -> u64 {
        self.address
    }
}

/// A request for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// Bytes wanted.
    pub bytes: u64,
    /// The stream that will use them first; the block is cached for this stream.
    pub stream: StreamId,
    /// Kept with the block and its history entries.
    pub context: Option<Context>,
}

impl Request {
    /// `bytes` on the default stream.
    pub fn new(bytes: u64) -> Request {
        Request { bytes, stream: StreamId::DEFAULT, context: None }
    }

    /// The same on another stream.
    #[must_use]
    pub fn on(mut self, stream: StreamId) -> Request {
        self.stream = stream;
        self
    }

    /// The same with a context.
    #[must_use]
    pub fn with_context(mut self, context: Option<Context>) -> Request {
        self.context = context;
        self
    }
}

/// What keeps a block from being free though its owner let go, or will when the owner does.
#[derive(Debug, Default)]
struct Pending {
    /// Streams recorded on it (`stream_uses`), in order of recording.
    uses: Vec<StreamIndex>,
    /// Those of `uses` that were recorded during a capture.
    capture_uses: Vec<StreamIndex>,
    /// Events recorded after it was freed that have not completed (`event_count`).
    events: u32,
}

/// PyTorch's caching allocator for one device, not synchronised; [`CachingAllocator`](crate::CachingAllocator)
/// puts a lock around it.
#[derive(Debug)]
pub struct DeviceAllocator<D> {
    device: D,
    profile: Profile,
    settings: Settings,
    /// Bytes of segments and mapped pages that may be held (`allowed_memory_maximum`).
    allowed: Option<u64>,
    /// Garbage collection is on: a limit and a threshold are set.
    collects: bool,
    arena: Arena,
    /// Made by the first look-up: a caller that keeps its [`Allocation`]s never pays for it.
    by_address: OnceLock<AddressTable>,
    recent: Recent,
    pools: Vec<BlockPool>,
    vacant_pools: Vec<PoolIndex>,
    private: BTreeMap<PoolId, PrivatePool>,
    /// Freeable private pools, in the order they became so (`graph_pools_freeable`).
    freeable: Vec<PoolId>,
    /// Pools whose cached blocks may serve the default pools, in the order they were made so.
    use_on_oom: Vec<PoolId>,
    no_split: Vec<PoolId>,
    /// Active diversions; the last one that takes a request wins (`captures_underway`).
    diversions: Vec<(PoolId, Route)>,
    /// Captures announced by `mark_capture_begin`.
    captures: u32,
    streams: Streams,
    expandables: Expandables,
    pending: FxHashMap<BlockId, Pending>,
    /// Events not yet known to be complete, per stream, the oldest first.
    events: Vec<(StreamIndex, VecDeque<(EventId, BlockId)>)>,
    /// Blocks freed during a capture while streams were recorded on them.
    deferred: Vec<BlockId>,
    /// Bytes of segments and mapped pages (`total_allocated_memory`).
    total: u64,
    next_age: u32,
    counters: Counters,
    history: History,
}

/// The default pools' places in the table.
const SMALL: PoolIndex = PoolIndex(0);
const LARGE: PoolIndex = PoolIndex(1);

impl<D: Device> DeviceAllocator<D> {
    /// An allocator with default settings, behaving as the newest release.
    pub fn new(device: D) -> DeviceAllocator<D> {
        DeviceAllocator::with_settings(device, Settings::default(), Profile::default())
    }

    /// An allocator with its settings and the release it behaves as.
    pub fn with_settings(device: D, settings: Settings, profile: Profile) -> DeviceAllocator<D> {
        let mut counters = Counters::default();
        counters.max_split_size =
            settings.max_split_size.map_or(-1, |bytes| i64::try_from(bytes).unwrap_or(-1));
        let fraction = settings.per_process_memory_fraction;
        let mut allocator = DeviceAllocator {
            device,
            profile,
            settings,
            allowed: None,
            collects: false,
            arena: Arena::default(),
            by_address: OnceLock::new(),
            recent: Recent::default(),
            pools: vec![
                BlockPool::new(PoolKind::Small, PoolId::DEFAULT),
                BlockPool::new(PoolKind::Large, PoolId::DEFAULT),
            ],
            vacant_pools: Vec::new(),
            private: BTreeMap::new(),
            freeable: Vec::new(),
            use_on_oom: Vec::new(),
            no_split: Vec::new(),
            diversions: Vec::new(),
            captures: 0,
            streams: Streams::default(),
            expandables: Expandables::default(),
            pending: FxHashMap::default(),
            events: Vec::new(),
            deferred: Vec::new(),
            total: 0,
            next_age: 0,
            counters,
            history: History::default(),
        };
        if fraction < 1.0 {
            allocator.allowed = Some(allocator.fraction_of_total(fraction));
            allocator.settings_changed();
        }
        allocator
    }

    /// The device below.
    pub fn device(&self) -> &D {
        &self.device
    }

    /// The device below, to change what it answers. Memory must not be taken from under the allocator.
    pub fn device_mut(&mut self) -> &mut D {
        &mut self.device
    }

    /// The settings in force.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// The release this allocator behaves as.
    pub fn profile(&self) -> &Profile {
        &self.profile
    }

    /// Changes settings at run time (`_set_allocator_settings`); see [`Settings::apply`] for what is kept.
    ///
    /// # Errors
    /// As [`Settings::apply`]; keys before the refused one are in force.
    pub fn set_settings(&mut self, conf: &str) -> Result<(), AllocError> {
        self.settle();
        let result = self.settings.apply(conf, &self.profile);
        self.settings_changed();
        Ok(result?)
    }

    fn settings_changed(&mut self) {
        self.settle();
        self.collects = self.allowed.is_some() && self.settings.garbage_collection_threshold > 0.0;
    }

    /// Limits the bytes held to a fraction of the device's memory (`set_per_process_memory_fraction`); 1 lifts
    /// the limit. Only what this allocator holds counts, not what else is on the device.
    ///
    /// # Errors
    /// [`AllocError::BadFraction`] outside 0 … 1.
    pub fn set_memory_fraction(&mut self, fraction: f64) -> Result<(), AllocError> {
        if !(0.0..=1.0).contains(&fraction) {
            return Err(AllocError::BadFraction);
        }
        let limits = fraction < 1.0 || !self.profile.whole_fraction_is_no_limit;
        self.allowed = limits.then(|| self.fraction_of_total(fraction));
        self.settings_changed();
        Ok(())
    }

    /// Limits the bytes held, without the detour over a fraction; `None` lifts the limit.
    pub fn set_memory_limit(&mut self, bytes: Option<u64>) {
        self.allowed = bytes;
        self.settings_changed();
    }

    /// The limit in bytes, if one is set.
    pub fn memory_limit(&self) -> Option<u64> {
        self.allowed
    }

    #[expect(clippy::cast_precision_loss, clippy::cast_possible_truncation, clippy::cast_sign_loss)]
    fn fraction_of_total(&self, fraction: f64) -> u64 {
        let bytes = fraction * self.device.mem_info().total_bytes as f64;
        if self.profile.fraction_rounds { bytes.round() as u64 } else { bytes as u64 }
    }

    /// Free and total bytes of the device (`cudaMemGetInfo`).
    pub fn mem_get_info(&self) -> MemInfo {
        self.device.mem_info()
    }

    /// Bytes of blocks handed out.
    pub fn memory_allocated(&self) -> u64 {
        self.counters.current(Kind::AllocatedBytes).cast_unsigned()
    }

    /// Bytes asked for in blocks handed out or waiting for other streams.
    pub fn memory_requested(&self) -> u64 {
        self.counters.current(Kind::RequestedBytes).cast_unsigned()
    }

    /// Bytes held from the device.
    pub fn memory_reserved(&self) -> u64 {
        self.counters.current(Kind::ReservedBytes).cast_unsigned()
    }

    /// All statistics.
    pub fn memory_stats(&self) -> DeviceStats {
        self.counters.public(self.profile.oom_rejection, self.profile.reserved_by_private_pool)
    }

    /// Peaks start anew from what is there now (`reset_peak_memory_stats`).
    pub fn reset_peak_memory_stats(&mut self) {
        self.counters.reset_peak();
    }

    /// Totals in and out start anew (`reset_accumulated_memory_stats`).
    pub fn reset_accumulated_memory_stats(&mut self) {
        self.counters.reset_accumulated();
    }

    /// Turns the event history on or off (`_record_memory_history`). Turning it off, or `clear`, empties it.
    pub fn record_memory_history(&mut self, on: bool, level: HistoryLevel, max_entries: usize, clear: bool) {
        self.history.record(on, level, max_entries, clear);
    }

    /// Actions the history leaves out from now on (`skip_actions`, 2.11+).
    pub fn skip_history_actions(&mut self, actions: &[Action]) {
        self.history.skip(actions);
    }

    /// The history, the oldest entry first as far as the ring knows.
    pub fn history(&self) -> Vec<TraceEntry> {
        self.history.entries()
    }

    /// The context a live block was allocated with (`getContextForPointer`, 2.12+).
    pub fn context_of(&self, address: u64) -> Option<Context> {
        self.arena[self.find_address(address)?].context
    }

    /// Bytes of the block behind a live address.
    pub fn block_size(&self, address: u64) -> Option<u64> {
        Some(self.arena[self.find_address(address)?].size)
    }

    /// The block handed out at an address.
    #[inline]
    fn find_address(&self, address: u64) -> Option<BlockId> {
        let table = self.by_address.get_or_init(|| {
            let mut table = AddressTable::default();
            for (id, block) in self.arena.iter() {
                if block.is_allocated() || self.is_unsettled(id) {
                    table.insert(block.address, id, &self.arena);
                }
            }
            table
        });
        // A block that is only marked free stays in the table until it is merged.
        table.find(address, &self.arena).filter(|id| self.arena[*id].is_allocated())
    }

    #[inline]
    fn note_address(&mut self, address: u64, id: BlockId) {
        if let Some(table) = self.by_address.get_mut() {
            table.insert(address, id, &self.arena);
        }
    }

    #[inline]
    fn forget_address(&mut self, id: BlockId) {
        if let Some(table) = self.by_address.get_mut() {
            table.remove(self.arena[id].address, id);
        }
    }

    #[inline]
    fn trace(&mut self, action: Action, address: u64, size: u64, of: &Traced) {
        if self.history.stores(action) {
            self.trace_enabled(action, address, size, of);
        }
    }

    #[cold]
    fn trace_enabled(&mut self, action: Action, address: u64, size: u64, of: &Traced) {
        let entry = TraceEntry {
            action,
            address,
            size,
            stream: self.streams.handle(of.stream),
            time_us: self.device.now_us(),
            pool_id: self.pools[of.pool.0 as usize].owner,
            context: of.context,
        };
        self.history.push(entry);
    }

    #[inline]
    fn pool(&self, index: PoolIndex) -> &BlockPool {
        &self.pools[index.0 as usize]
    }

    #[inline]
    fn pool_mut(&mut self, index: PoolIndex) -> &mut BlockPool {
        &mut self.pools[index.0 as usize]
    }

    #[inline]
    fn key(&self, id: BlockId) -> FreeKey {
        let block = &self.arena[id];
        FreeKey::new(block.size, if self.profile.ties_by_age { block.age } else { 0 }, block.address, id)
    }

    /// Puts a free block where searches find it (`insert_into_blocks`).
    #[inline]
    fn insert_free(&mut self, id: BlockId) {
        self.recent.forget();
        let key = self.key(id);
        let block = &mut self.arena[id];
        let pool = &mut self.pools[block.pool.0 as usize];
        block.gc_base = pool.searches;
        pool.free.insert(block.stream, key);
    }

    #[inline]
    fn remove_free(&mut self, id: BlockId) {
        self.recent.forget();
        let key = self.key(id);
        let block = &self.arena[id];
        let found = self.pools[block.pool.0 as usize].free.remove(block.stream, key);
        debug_assert!(found, "a free block is in its pool's free set");
    }

    /// Links `new` in front of `id`.
    fn link_before(&mut self, new: BlockId, id: BlockId) {
        let prev = self.arena[id].prev;
        self.arena[new].prev = prev;
        self.arena[new].next = Some(id);
        self.arena[id].prev = Some(new);
        if let Some(prev) = prev {
            self.arena[prev].next = Some(new);
        }
    }

    /// Links `new` behind `id`.
    fn link_after(&mut self, new: BlockId, id: BlockId) {
        let next = self.arena[id].next;
        self.arena[new].next = next;
        self.arena[new].prev = Some(id);
        self.arena[id].next = Some(new);
        if let Some(next) = next {
            self.arena[next].prev = Some(new);
        }
    }

    /// A block beside `id`, in the same segment, not linked yet.
    fn sibling(&mut self, id: BlockId, address: u64, size: u64) -> BlockId {
        let young = self.profile.age_per_block.then(|| self.take_age());
        let of = &self.arena[id];
        let mut block = Block::new(address, size, of.pool, of.stream, young.unwrap_or(of.age));
        block.expandable = of.expandable;
        self.arena.insert(block)
    }

    /// A number for a new segment.
    fn take_age(&mut self) -> u32 {
        let age = self.next_age;
        self.next_age = self.next_age.wrapping_add(1);
        age
    }

    /// Whether a segment of this size counts as oversize.
    fn is_oversize(&self, bytes: u64) -> bool {
        bytes >= self.settings.max_split_size_or_max()
    }
}

/// What a trace entry says beside action, address and size.
#[derive(Clone, Copy, Debug)]
struct Traced {
    stream: StreamIndex,
    pool: PoolIndex,
    context: Option<Context>,
}
