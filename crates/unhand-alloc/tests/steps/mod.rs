//! One step of an allocator's life, and what must hold after each: shared by the property test and the fuzzer.

use unhand_alloc::{
    AllocError, Allocation, DeviceAllocator, HistoryLevel, NullDevice, PoolId, PoolOptions, Profile, Release,
    Request, Route, Settings, StreamId,
};

/// Something a program does to its allocator. Every value is valid; what makes no sense is skipped.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Step {
    Malloc {
        bytes: u64,
        stream: u8,
    },
    Free {
        nth: u16,
    },
    FreeNewest,
    MallocAt {
        nth: u16,
        bytes: u64,
        offset: u16,
    },
    FreeByAddress {
        nth: u16,
    },
    RecordStream {
        nth: u16,
        stream: u8,
    },
    Busy {
        stream: u8,
    },
    Idle {
        stream: u8,
    },
    EmptyCache,
    CreatePool {
        id: u8,
        use_on_oom: bool,
        no_split: bool,
    },
    Begin {
        id: u8,
    },
    End {
        id: u8,
    },
    Release {
        id: u8,
    },
    EmptyPool {
        id: u8,
    },
    Settings {
        which: u8,
    },
    Limit {
        mib: u16,
    },
    Snapshot,
    ResetPeak,
    Checkpoint {
        id: u8,
    },
    /// Allocate and free, several times over, then keep or free the last one.
    Again {
        bytes: u64,
        stream: u8,
        times: u8,
    },
}

/// Configuration strings, valid in every release.
pub(crate) const CONFS: [&str; 8] = [
    "",
    "expandable_segments:True",
    "expandable_segments:False",
    "max_split_size_mb:32",
    "max_split_size_mb:64,max_non_split_rounding_mb:40",
    "roundup_power2_divisions:8",
    "garbage_collection_threshold:0.6",
    "expandable_segments:True,garbage_collection_threshold:0.5,max_split_size_mb:40",
];

struct Live {
    allocation: Allocation,
    requested: u64,
}

/// Runs the steps on an allocator of `mib` MiB and checks everything after each.
///
/// # Panics
/// When an invariant breaks.
pub(crate) fn run(mib: u64, minor: u8, conf: u8, steps: &[Step]) {
    let profile = Profile::of(Release::new(minor).expect("a release with a profile"));
    let settings = Settings::parse(CONFS[conf as usize % CONFS.len()], &profile).expect("valid everywhere");
    let mut allocator = DeviceAllocator::with_settings(NullDevice::new(mib << 20), settings.clone(), profile);
    allocator.record_memory_history(true, HistoryLevel::All, 64, false);
    // The same life without the shortcut for blocks that come right back: setting a limit merges such a block.
    let mut eager = DeviceAllocator::with_settings(NullDevice::new(mib << 20), settings, profile);
    eager.record_memory_history(true, HistoryLevel::All, 64, false);
    let (mut live, mut eager_live): (Vec<Live>, Vec<Live>) = Default::default();
    for (number, step) in steps.iter().flat_map(singly).enumerate() {
        apply(&mut allocator, &mut live, &step);
        if let Err(violation) = allocator.validate() {
            panic!("after step {number} ({step:?}): {violation}");
        }
        apply(&mut eager, &mut eager_live, &step);
        eager.set_memory_limit(eager.memory_limit());
        assert_eq!(allocator.memory_stats(), eager.memory_stats(), "after step {number} ({step:?})");
        assert_eq!(allocator.memory_snapshot(), eager.memory_snapshot(), "after step {number} ({step:?})");
        assert_eq!(allocator.history(), eager.history(), "after step {number} ({step:?})");
        check_live(&eager, &eager_live);
        // The table of addresses is made by the first look-up: some lives do without until they end.
        if mib <= 64 {
            check_live(&allocator, &live);
        }
    }
    check_live(&allocator, &live);
}

fn stream(number: u8) -> StreamId {
    StreamId(u64::from(number % 3) * 0x1_0000)
}

fn pool(number: u8) -> PoolId {
    PoolId(0, u64::from(number % 3) + 1)
}

fn apply(allocator: &mut DeviceAllocator<NullDevice>, live: &mut Vec<Live>, step: &Step) {
    let nth = |live: &Vec<Live>, nth: u16| (!live.is_empty()).then(|| nth as usize % live.len());
    match *step {
        Step::Malloc { bytes, stream: on } => match allocator.malloc(Request::new(bytes).on(stream(on))) {
            Ok(allocation) if bytes > 0 => live.push(Live { allocation, requested: bytes }),
            Ok(allocation) => assert_eq!(allocation, Allocation::NULL),
            Err(AllocError::OutOfMemory(_) | AllocError::TooLarge(_)) => {}
            Err(error) => panic!("malloc: {error}"),
        },
        Step::Free { nth: which } => {
            if let Some(at) = nth(live, which) {
                free(allocator, &live.swap_remove(at));
            }
        }
        Step::FreeNewest => {
            if let Some(gone) = live.pop() {
                free(allocator, &gone);
            }
        }
        Step::MallocAt { nth, bytes, offset } => {
            let free: Vec<u64> = allocator
                .memory_snapshot()
                .iter()
                .flat_map(|segment| &segment.blocks)
                .filter(|block| block.state == unhand_alloc::BlockState::Inactive)
                .map(|block| block.address)
                .collect();
            if !free.is_empty() && bytes > 0 {
                let address = free[nth as usize % free.len()] + u64::from(offset % 64) * 512;
                if let Ok(allocation) = allocator.malloc_at(Request::new(bytes), address) {
                    assert_eq!(allocation.address(), address);
                    allocator.annotate(address, None).expect("it is live");
                    live.push(Live { allocation, requested: bytes });
                }
            }
        }
        Step::FreeByAddress { nth: which } => {
            if let Some(at) = nth(live, which) {
                let gone = live.swap_remove(at);
                allocator.free_address(gone.allocation.address()).expect("it is handed out");
            }
        }
        Step::RecordStream { nth: which, stream: on } => {
            if let Some(at) = nth(live, which) {
                allocator.record_stream(live[at].allocation, stream(on)).expect("it is handed out");
            }
        }
        Step::Busy { stream: which } => allocator.device_mut().set_busy(stream(which)),
        Step::Idle { stream: which } => allocator.device_mut().set_idle(stream(which)),
        Step::EmptyCache => allocator.empty_cache().expect("the device takes everything back"),
        Step::CreatePool { id, use_on_oom, no_split } => {
            let _ = allocator.create_pool(pool(id), PoolOptions { use_on_oom, no_split, source: None });
        }
        Step::Begin { id } => {
            let _ = allocator.begin_allocate_to_pool(pool(id), Route::All);
        }
        Step::End { id } => {
            let _ = allocator.end_allocate_to_pool(pool(id));
        }
        // The last hold of a pool that is still diverted to is misuse: PyTorch frees it under the request.
        Step::Release { id } if allocator.pool_use_count(pool(id)) > 1 => {
            allocator.release_pool(pool(id)).expect("it is held");
        }
        Step::Release { id } => {
            let _ = allocator.end_allocate_to_pool(pool(id));
            let _ = allocator.release_pool(pool(id));
        }
        Step::EmptyPool { id } => {
            allocator.empty_pool_cache(pool(id)).expect("the device takes everything back");
        }
        Step::Settings { which } => {
            allocator.set_settings(CONFS[which as usize % CONFS.len()]).expect("valid everywhere");
        }
        Step::Limit { mib } => allocator.set_memory_limit((mib > 0).then_some(u64::from(mib) << 20)),
        Step::Snapshot => {
            let segments = allocator.snapshot();
            let total: u64 = segments.iter().map(|segment| segment.total_size).sum();
            assert_eq!(total, allocator.memory_reserved());
            let allocated: u64 = segments.iter().map(|segment| segment.allocated_size).sum();
            assert_eq!(allocated, allocator.memory_allocated());
        }
        Step::ResetPeak => {
            allocator.reset_peak_memory_stats();
            let stats = allocator.memory_stats();
            assert_eq!(stats.reserved_bytes().peak, stats.reserved_bytes().current);
        }
        Step::Checkpoint { id } => checkpoint(allocator, live, pool(id)),
        Step::Again { .. } => {} // in parts, see `singly`
    }
}

fn free(allocator: &mut DeviceAllocator<NullDevice>, gone: &Live) {
    allocator.free(gone.allocation).expect("it is handed out");
    assert!(allocator.free(gone.allocation).is_err(), "a second free is refused");
}

/// The steps that make up one step.
fn singly(step: &Step) -> Vec<Step> {
    let Step::Again { bytes, stream, times } = *step else { return vec![*step] };
    let malloc = Step::Malloc { bytes, stream };
    let mut steps = [malloc, Step::FreeNewest].repeat(usize::from(times % 5));
    if times >= 128 {
        steps.push(malloc);
    }
    steps
}

fn checkpoint(allocator: &mut DeviceAllocator<NullDevice>, live: &mut Vec<Live>, id: PoolId) {
    let Ok(checkpoint) = allocator.checkpoint_pool(id) else { return };
    let Ok(restored) = allocator.restore_pool(&checkpoint) else { return };
    // Nothing changed in between, so the same blocks are there; only their handles are new.
    assert!(restored.freed.is_empty(), "{restored:?}");
    for live in live {
        if let Some(again) = restored.allocated.iter().find(|new| new.address() == live.allocation.address())
        {
            live.allocation = *again;
            live.requested = allocator.block_size(again.address()).expect("it is live");
        }
    }
}

fn check_live(allocator: &DeviceAllocator<NullDevice>, live: &[Live]) {
    let mut ranges: Vec<(u64, u64)> = live
        .iter()
        .map(|live| {
            let address = live.allocation.address();
            let size = allocator.block_size(address).expect("a live block can be found");
            assert!(size >= live.requested, "{size} bytes for {}", live.requested);
            (address, address + size)
        })
        .collect();
    ranges.sort_unstable();
    assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0), "live blocks overlap");
    let allocated: u64 = ranges.iter().map(|(start, end)| end - start).sum();
    assert_eq!(allocated, allocator.memory_allocated());
    assert!(allocator.memory_reserved() <= allocator.device().used_bytes());
}
