//! Many threads on one front: nothing is handed out twice, nothing is lost, and the books balance at the end.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::thread;

use unhand_alloc::{
    AllocError, CachingAllocator, NullDevice, PoolId, PoolOptions, Request, Route, StreamId, ThreadToken,
};

const THREADS: u64 = 8;
const STEPS: u64 = if cfg!(miri) { 40 } else { 4_000 };

/// A generator good enough to mix sizes; each thread has its own seed, so a run can be repeated.
fn next(state: &mut u64) -> u64 {
    *state ^= *state << 13;
    *state ^= *state >> 7;
    *state ^= *state << 17;
    *state
}

#[test]
fn threads_share_two_devices() {
    let allocator = Arc::new(CachingAllocator::new(vec![NullDevice::new(1 << 31), NullDevice::new(1 << 31)]));
    // Every live range of each device; a clash means that memory was handed out twice.
    let live: Arc<[Mutex<BTreeMap<u64, u64>>; 2]> = Arc::default();
    let threads: Vec<_> = (1..=THREADS)
        .map(|seed| {
            let (allocator, live) = (Arc::clone(&allocator), Arc::clone(&live));
            thread::spawn(move || one_thread(seed, &allocator, &live))
        })
        .collect();
    for thread in threads {
        thread.join().expect("no thread panics");
    }
    for device in 0..2 {
        assert_eq!(allocator.memory_allocated(device).expect("exists"), 0);
    }
    allocator.empty_cache().expect("released");
    for device in 0..2 {
        let guard = allocator.device(device).expect("exists");
        assert_eq!(guard.memory_reserved(), 0);
        assert_eq!(guard.device().used_bytes(), 0);
    }
}

fn one_thread(seed: u64, allocator: &CachingAllocator<NullDevice>, live: &[Mutex<BTreeMap<u64, u64>>; 2]) {
    let mut random = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let mut mine: Vec<(usize, unhand_alloc::Allocation)> = Vec::new();
    for step in 0..STEPS {
        let device = usize::from(next(&mut random).is_multiple_of(2));
        if mine.len() > 40 || (next(&mut random).is_multiple_of(3) && !mine.is_empty()) {
            let index = usize::try_from(next(&mut random) >> 32).expect("32 bits") % mine.len();
            let (device, allocation) = mine.swap_remove(index);
            let mut ranges = live[device].lock().expect("not poisoned");
            ranges.remove(&address(allocation));
            allocator.free(device, allocation).expect("it is handed out");
        } else {
            let bytes = 1 + next(&mut random) % (1 << (9 + next(&mut random) % 15));
            let request = Request::new(bytes).on(StreamId(next(&mut random) % 3));
            let mut ranges = live[device].lock().expect("not poisoned");
            match allocator.malloc(device, request) {
                Ok(allocation) => {
                    let start = address(allocation);
                    let before = ranges.range(..=start).next_back();
                    assert!(before.is_none_or(|(at, size)| at + size <= start), "{start:#x} is in use");
                    let after = ranges.range(start..).next();
                    assert!(
                        after.is_none_or(|(at, _)| start + bytes <= *at),
                        "{start:#x} runs into the next"
                    );
                    ranges.insert(start, bytes);
                    drop(ranges);
                    mine.push((device, allocation));
                }
                Err(AllocError::OutOfMemory(_)) => {}
                Err(error) => panic!("{error}"),
            }
        }
        if step % 512 == 0 {
            allocator.empty_cache().expect("released");
        }
    }
    for (device, allocation) in mine {
        live[device].lock().expect("not poisoned").remove(&address(allocation));
        allocator.free(device, allocation).expect("it is handed out");
    }
}

fn address(allocation: unhand_alloc::Allocation) -> u64 {
    allocation.address()
}

#[test]
fn a_pool_takes_the_requests_of_one_thread_only() {
    let allocator = Arc::new(CachingAllocator::new(vec![NullDevice::new(1 << 31)]));
    let id = PoolId(0, 1);
    {
        let mut device = allocator.device(0).expect("exists");
        device.create_pool(id, PoolOptions::default()).expect("new");
        device.begin_allocate_to_pool(id, Route::Thread(ThreadToken::current())).expect("free to begin");
    }
    let here = allocator.malloc(0, Request::new(512)).expect("memory");
    let other = Arc::clone(&allocator);
    let there = thread::spawn(move || other.malloc(0, Request::new(512)).expect("memory"));
    let there = there.join().expect("no panic");
    let pool_of = |allocation: unhand_alloc::Allocation| {
        let segments = allocator.memory_snapshot(0).expect("exists");
        segments
            .into_iter()
            .find(|segment| segment.address == allocation.address())
            .map(|segment| segment.pool_id)
    };
    assert_eq!(pool_of(here), Some(id));
    assert_eq!(pool_of(there), Some(PoolId::DEFAULT));
}
