//! What our own allocator records is a snapshot like any other: saved, read, replayed and explained.

use unhand_alloc::{
    CachingAllocator, Context, HistoryLevel, NullDevice, PoolId, Profile, Request, Route, Settings, StreamId,
};
use unhand_analyze::replay::Program;
use unhand_analyze::{ExplainOptions, explain, snapshot_of};
use unhand_snapshot::{Frame, ReadOptions, Snapshot, StackId};

fn a_run(conf: &str) -> CachingAllocator<NullDevice> {
    let profile = Profile::default();
    let settings = Settings::parse(conf, &profile).expect("valid");
    let allocator = CachingAllocator::with_settings(vec![NullDevice::new(1 << 34)], &settings, profile);
    {
        let mut device = allocator.device(0).expect("exists");
        device.record_memory_history(true, HistoryLevel::All, usize::MAX, false);
        let mut live = Vec::new();
        let mut random = 88_172_645_463_325_252_u64;
        for step in 0..4_000u64 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let in_pool = random.is_multiple_of(50);
            if in_pool {
                device.begin_allocate_to_pool(PoolId(0, 1), Route::All).expect("free to begin");
            }
            let bytes = 1 + random % (1 << (9 + random % 17));
            let context = Context::new(u32::try_from(step % 7 + 1).expect("small"));
            let request = Request::new(bytes).on(StreamId(random % 3 * 16)).with_context(context);
            live.push(device.malloc(request).expect("there is memory"));
            if in_pool {
                device.end_allocate_to_pool(PoolId(0, 1)).expect("begun");
            }
            if random % 5 < 3 || live.len() > 300 {
                let gone = live.swap_remove((random >> 20) as usize % live.len());
                device.free(gone).expect("live");
            }
            if step == 2_500 {
                device.empty_cache().expect("released");
            }
        }
    }
    allocator
}

#[test]
fn a_recorded_run_of_ours_replays_exactly() {
    for conf in ["", "expandable_segments:True", "max_split_size_mb:32", "roundup_power2_divisions:8"] {
        let allocator = a_run(conf);
        let snapshot = snapshot_of(&allocator, |context, stacks, strings| {
            let name = strings.intern(&format!("line_{}", context.0));
            let filename = strings.intern("train.rs");
            let frame = stacks.intern_frame(Frame { name, filename, line: i64::from(context.0.get()) });
            stacks.intern([frame])
        })
        .expect("the device is there");
        let mut file = Vec::new();
        snapshot.write(&mut file).expect("memory can be written");
        let read = Snapshot::read(&file, &ReadOptions::default()).expect("our own file");

        let run = Program::of(&read, 0).expect("a history").recorded().expect("it can be followed");
        let stats = allocator.memory_stats(0).expect("exists");
        assert_eq!(run.first_difference, None, "{conf}");
        assert_eq!(run.peak.reserved_bytes, stats.reserved_bytes().peak.cast_unsigned(), "{conf}");
        assert_eq!(run.peak.allocated_bytes, stats.allocated_bytes().peak.cast_unsigned(), "{conf}");
        assert_eq!(run.end.requested_bytes, stats.requested_bytes().current.cast_unsigned(), "{conf}");
        assert_eq!(run.placement.0, run.placement.1, "{conf}");

        let explanation = explain(&read, 0, &ExplainOptions::default()).expect("it can be explained");
        assert_eq!(explanation.end.reserved_bytes, allocator.memory_reserved(0).expect("exists"));
    }
}

#[test]
fn without_stacks_nothing_is_invented() {
    let snapshot = snapshot_of(&a_run(""), |_, _, _| StackId::NONE).expect("the device is there");
    assert!(snapshot.traces[0].stacks().iter().all(|stack| stack.is_none()));
}
