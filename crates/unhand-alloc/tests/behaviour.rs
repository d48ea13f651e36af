//! The allocator's documented behaviour, rule by rule; the differential test compares it with the real library.

use unhand_alloc::{
    Action, AllocError, BlockState, DeviceAllocator, HistoryLevel, HostDevice, NullDevice, PoolId,
    PoolOptions, Profile, Release, Request, Route, Settings, StreamId,
};

const MIB: u64 = 1 << 20;

fn allocator(mib: u64, conf: &str, minor: u8) -> DeviceAllocator<NullDevice> {
    let profile = Profile::of(Release::new(minor).expect("a known release"));
    let settings = Settings::parse(conf, &profile).expect("valid settings");
    let mut allocator = DeviceAllocator::with_settings(NullDevice::new(mib * MIB), settings, profile);
    allocator.record_memory_history(true, HistoryLevel::Never, 10_000, false);
    allocator
}

fn actions(allocator: &DeviceAllocator<NullDevice>) -> Vec<Action> {
    allocator.history().iter().map(|entry| entry.action).collect()
}

macro_rules! malloc {
    ($allocator:expr, $bytes:expr) => {{
        let allocation = $allocator.malloc(Request::new($bytes)).expect("there is memory");
        $allocator.validate().expect("consistent");
        allocation
    }};
}

macro_rules! free {
    ($allocator:expr, $allocation:expr) => {{
        $allocator.free($allocation).expect("it is handed out");
        $allocator.validate().expect("consistent");
    }};
}

#[test]
fn ties_go_to_the_lowest_address_or_the_oldest_segment() {
    for (minor, same_as_c) in [(11, true), (12, false)] {
        let mut allocator = allocator(1024, "", minor);
        let (a, b) = (malloc!(allocator, 20 * MIB), malloc!(allocator, 20 * MIB));
        // The later segment lies below or above depending on placement: make the low one the young one.
        let (low, high) = if a.address() < b.address() { (a, b) } else { (b, a) };
        free!(allocator, low);
        allocator.empty_cache().expect("released");
        let c = malloc!(allocator, 20 * MIB);
        assert_eq!(c.address(), low.address());
        free!(allocator, high);
        free!(allocator, c);
        let next = malloc!(allocator, 20 * MIB);
        assert_eq!(next.address() == c.address(), same_as_c, "2.{minor}");
    }
}

#[test]
fn a_remainder_of_exactly_one_mebibyte_is_not_split_off() {
    let mut allocator = allocator(1024, "", 15);
    let whole = malloc!(allocator, 21 * MIB);
    assert_eq!(allocator.block_size(whole.address()), Some(22 * MIB));
    free!(allocator, whole);
    let split = malloc!(allocator, 20 * MIB + MIB - 512);
    assert_eq!(allocator.block_size(split.address()), Some(21 * MIB - 512));
}

#[test]
fn an_oom_after_waiting_for_events_succeeds_when_repeated() {
    let side = StreamId(7);
    let mut allocator = allocator(20, "", 11);
    let big = malloc!(allocator, 8 * MIB);
    let _other = malloc!(allocator, 8 * MIB);
    allocator.device_mut().set_busy(side);
    allocator.record_stream(big, side).expect("live");
    free!(allocator, big);
    let error = allocator.malloc(Request::new(8 * MIB)).expect_err("the freed block was not searched again");
    assert!(matches!(error, AllocError::OutOfMemory(_)));
    allocator.validate().expect("consistent");
    let _now = malloc!(allocator, 8 * MIB);
}

#[test]
fn deferred_frees_come_before_the_next_allocation() {
    use Action::{Alloc, FreeCompleted, FreeRequested, SegmentAlloc};
    let side = StreamId(7);
    let mut allocator = allocator(1024, "", 15);
    let block = malloc!(allocator, 5 * MIB);
    allocator.device_mut().set_busy(side);
    allocator.record_stream(block, side).expect("live");
    free!(allocator, block);
    let segments = allocator.memory_snapshot();
    assert_eq!(segments[0].blocks[0].state, BlockState::ActivePendingFree);
    let _other = malloc!(allocator, 5 * MIB);
    allocator.device_mut().set_idle(side);
    let again = malloc!(allocator, 5 * MIB);
    assert_eq!(again.address(), block.address());
    assert_eq!(actions(&allocator), [SegmentAlloc, Alloc, FreeRequested, Alloc, FreeCompleted, Alloc]);
}

#[test]
fn expandable_segments_grow_by_pages_and_shrink_by_whole_pages() {
    let mut allocator = allocator(200, "expandable_segments:True", 15);
    let small = malloc!(allocator, 5 * MIB);
    let grown = malloc!(allocator, 30 * MIB);
    assert_eq!(grown.address(), small.address() + 5 * MIB);
    assert_eq!(allocator.memory_reserved(), 40 * MIB);
    free!(allocator, small);
    allocator.empty_cache().expect("nothing whole to give back");
    assert_eq!(allocator.memory_reserved(), 40 * MIB);
    free!(allocator, grown);
    allocator.empty_cache().expect("released");
    allocator.validate().expect("consistent");
    assert_eq!(allocator.memory_reserved(), 0);
    assert_eq!(allocator.device().used_bytes(), 0);
    assert_eq!(allocator.memory_stats().segments().current, 0);
}

#[test]
fn expandable_and_plain_blocks_live_side_by_side() {
    let mut allocator = allocator(200, "expandable_segments:True", 15);
    let old = malloc!(allocator, 10 * MIB);
    allocator.set_settings("expandable_segments:False").expect("valid");
    free!(allocator, old);
    let plain = malloc!(allocator, 10 * MIB);
    assert_ne!(plain.address(), old.address());
    allocator.set_settings("expandable_segments:True").expect("valid");
    let expandable = malloc!(allocator, 10 * MIB);
    assert_eq!(expandable.address(), old.address());
}

#[test]
fn oversize_blocks_are_kept_for_oversize_requests() {
    let mut allocator = allocator(1024, "max_split_size_mb:20", 15);
    let big = malloc!(allocator, 40 * MIB);
    free!(allocator, big);
    let small = malloc!(allocator, 15 * MIB);
    assert_ne!(small.address(), big.address());
    let near = malloc!(allocator, 36 * MIB);
    assert_eq!(near.address(), big.address());
    assert_eq!(allocator.block_size(near.address()), Some(40 * MIB));
    let stats = allocator.memory_stats();
    assert_eq!((stats.oversize_segments.current, stats.oversize_allocations.current), (1, 1));
}

#[test]
fn garbage_collection_releases_the_longest_unused_first() {
    let mut allocator = allocator(1000, "garbage_collection_threshold:0.5", 15);
    allocator.set_memory_fraction(0.2).expect("a fraction");
    let blocks: Vec<_> = [12, 20, 22, 30].map(|mib| malloc!(allocator, mib * MIB)).into();
    for block in blocks.iter().take(3) {
        free!(allocator, *block);
    }
    for _ in 0..10 {
        let touch = malloc!(allocator, 30 * MIB);
        free!(allocator, touch);
    }
    free!(allocator, blocks[3]);
    let before = actions(&allocator).len();
    let _trigger = malloc!(allocator, 60 * MIB);
    let freed: Vec<u64> = allocator.history()[before..]
        .iter()
        .filter(|entry| entry.action == Action::SegmentFree)
        .map(|entry| entry.size / MIB)
        .collect();
    assert_eq!(freed, [12, 20, 22]);
}

#[test]
fn private_pools_keep_their_memory_until_released() {
    let id = PoolId(0, 1);
    let mut allocator = allocator(1024, "", 15);
    allocator.create_pool(id, PoolOptions::default()).expect("new");
    allocator.begin_allocate_to_pool(id, Route::All).expect("free to begin");
    let inside = malloc!(allocator, 3 * MIB);
    allocator.end_allocate_to_pool(id).expect("begun");
    allocator.release_pool(id).expect("held");
    free!(allocator, inside);
    allocator.empty_cache().expect("nothing of this pool");
    assert_eq!(allocator.memory_reserved(), 20 * MIB);
    let outside = malloc!(allocator, 3 * MIB);
    assert_ne!(outside.address(), inside.address());
    allocator.release_pool(id).expect("held");
    allocator.empty_cache().expect("released");
    allocator.validate().expect("consistent");
    assert_eq!(allocator.memory_reserved(), 20 * MIB);
    assert_eq!(allocator.pool_use_count(id), 0);
}

#[test]
fn no_split_pools_hand_out_whole_segments() {
    let id = PoolId(0, 1);
    let mut allocator = allocator(1024, "", 15);
    allocator.create_pool(id, PoolOptions { no_split: true, ..PoolOptions::default() }).expect("new");
    allocator.begin_allocate_to_pool(id, Route::All).expect("free to begin");
    let _one = malloc!(allocator, 100);
    assert_eq!(allocator.memory_allocated(), 2 * MIB);
}

#[test]
fn pools_with_use_on_oom_help_the_default_pool() {
    let id = PoolId(0, 1);
    let mut allocator = allocator(40, "", 15);
    allocator.create_pool(id, PoolOptions { use_on_oom: true, ..PoolOptions::default() }).expect("new");
    allocator.begin_allocate_to_pool(id, Route::All).expect("free to begin");
    let lent = malloc!(allocator, 30 * MIB);
    allocator.end_allocate_to_pool(id).expect("begun");
    free!(allocator, lent);
    let borrowed = malloc!(allocator, 30 * MIB);
    assert_eq!(borrowed.address(), lent.address());
}

#[test]
fn diversions_count_as_captures_up_to_2_12() {
    for (minor, succeeds) in [(12, false), (13, true)] {
        let mut allocator = allocator(80, "", minor);
        let cached = malloc!(allocator, 60 * MIB);
        free!(allocator, cached);
        allocator.begin_allocate_to_pool(PoolId(0, 1), Route::All).expect("free to begin");
        assert_eq!(allocator.malloc(Request::new(60 * MIB)).is_ok(), succeeds, "2.{minor}");
        allocator.validate().expect("consistent");
    }
}

#[test]
fn frees_inside_a_capture_wait_for_its_end() {
    let (main, side) = (StreamId(0), StreamId(9));
    let mut allocator = allocator(1024, "", 15);
    let block = malloc!(allocator, 5 * MIB);
    allocator.device_mut().set_capturing(main, true);
    allocator.device_mut().set_capturing(side, true);
    allocator.mark_capture_begin();
    allocator.record_stream(block, side).expect("live");
    free!(allocator, block);
    let _inside = malloc!(allocator, 512);
    assert!(!actions(&allocator).contains(&Action::FreeCompleted));
    allocator.device_mut().set_capturing(main, false);
    allocator.device_mut().set_capturing(side, false);
    allocator.mark_capture_end();
    let _outside = malloc!(allocator, 512);
    assert!(actions(&allocator).contains(&Action::FreeCompleted));
}

#[test]
fn refuses_what_was_not_handed_out() {
    let mut allocator = allocator(64, "", 15);
    let block = malloc!(allocator, 512);
    free!(allocator, block);
    assert_eq!(allocator.free(block), Err(AllocError::InvalidPointer(block.address())));
    assert_eq!(allocator.free_address(12345), Err(AllocError::InvalidPointer(12345)));
    assert_eq!(allocator.free_address(0), Ok(()));
    assert_eq!(allocator.malloc(Request::new(1 << 60)), Err(AllocError::TooLarge(1 << 60)));
    assert!(matches!(allocator.malloc(Request::new(1 << 59)), Err(AllocError::OutOfMemory(_))));
}

#[test]
fn a_checkpoint_restores_the_layout_of_a_pool() {
    let id = PoolId(3, 0);
    let mut allocator = allocator(1024, "", 15);
    allocator.begin_allocate_to_pool(id, Route::All).expect("free to begin");
    let (a, b) = (malloc!(allocator, 3 * MIB), malloc!(allocator, 5 * MIB));
    free!(allocator, a);
    let checkpoint = allocator.checkpoint_pool(id).expect("nothing waits");
    free!(allocator, b);
    let c = malloc!(allocator, 10 * MIB - 512);
    let restored = allocator.restore_pool(&checkpoint).expect("same segments");
    allocator.validate().expect("consistent");
    assert_eq!(restored.freed, [c.address()]);
    assert_eq!(restored.allocated.iter().map(|live| live.address()).collect::<Vec<_>>(), [b.address()]);
    assert_eq!(allocator.checkpoint_pool(id).expect("nothing waits"), checkpoint);
}

#[test]
fn a_block_can_be_had_at_an_exact_address() {
    let mut allocator = allocator(1024, "", 15);
    let whole = malloc!(allocator, 9 * MIB);
    let base = whole.address();
    free!(allocator, whole);
    let there = allocator.malloc_at(Request::new(3 * MIB), base + 4 * MIB).expect("it is free");
    allocator.validate().expect("consistent");
    assert_eq!(there.address(), base + 4 * MIB);
    let refused = allocator.malloc_at(Request::new(512), base + 4 * MIB);
    assert_eq!(refused, Err(AllocError::NotFree { address: base + 4 * MIB, bytes: 512 }));
    let odd = allocator.malloc_at(Request::new(2 * MIB), base + 100);
    assert!(matches!(odd, Err(AllocError::NotFree { .. })));
    let before = malloc!(allocator, 3 * MIB);
    assert_eq!(before.address(), base, "the memory in front is free again");
    free!(allocator, there);
    free!(allocator, before);
    allocator.empty_cache().expect("released");
    assert_eq!(allocator.memory_reserved(), 0);
}

#[test]
fn the_host_device_has_real_bytes_and_gives_them_back() {
    for conf in ["", "expandable_segments:True"] {
        let device = HostDevice::new(256 * MIB);
        let memory = device.memory();
        let profile = Profile::default();
        let settings = Settings::parse(conf, &profile).expect("valid");
        let mut allocator = DeviceAllocator::with_settings(device, settings, profile);
        let block = malloc!(allocator, 3 * MIB);
        assert!(memory.write(block.address() + 100, b"hello"));
        assert_eq!(memory.read(block.address() + 100, 5).as_deref(), Some(&b"hello"[..]));
        free!(allocator, block);
        assert_eq!(memory.used_bytes(), 20 * MIB);
        allocator.empty_cache().expect("released");
        assert_eq!(memory.used_bytes(), 0);
        assert_eq!(memory.read(block.address(), 1), None);
    }
}

#[test]
fn resets_start_peaks_and_totals_anew() {
    let mut allocator = allocator(1024, "", 15);
    let block = malloc!(allocator, 3 * MIB);
    free!(allocator, block);
    allocator.reset_peak_memory_stats();
    allocator.reset_accumulated_memory_stats();
    let stats = allocator.memory_stats();
    assert_eq!(stats.allocated_bytes(), unhand_alloc::Stat::default());
    let reserved = stats.reserved_bytes();
    assert_eq!((reserved.peak, reserved.allocated, reserved.freed), (20 << 20, 0, 0));
    assert_eq!(stats.num_device_alloc, 0);
}
