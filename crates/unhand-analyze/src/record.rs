//! From an allocator's own state to a snapshot: what a Rust program allocates opens wherever PyTorch's files do.

use unhand_alloc::{CachingAllocator, Context, Device, DeviceAllocator, SegmentInfo, TraceEntry};
use unhand_snapshot::{
    Action, AllocatorSettings, Block, BlockState, Event, Extra, PoolId, Segment, SegmentKind, Snapshot,
    StackId, Stacks, StringId, Strings, Trace, Value,
};

use crate::error::{Error, Result};

/// The segments and the history of every device, as a snapshot that [`Snapshot::write`] saves.
///
/// `stack_of` turns the numbers the program attached to its requests into stacks; return [`StackId::NONE`] where
/// there is none.
///
/// ```
/// use unhand_alloc::{CachingAllocator, HistoryLevel, NullDevice, Request};
/// use unhand_snapshot::StackId;
/// let allocator = CachingAllocator::new(vec![NullDevice::new(1 << 30)]);
/// allocator.device(0)?.record_memory_history(true, HistoryLevel::Alloc, 100_000, false);
/// let tensor = allocator.malloc(0, Request::new(3 << 20))?;
/// let snapshot = unhand_analyze::snapshot_of(&allocator, |_, _, _| StackId::NONE)?;
/// assert_eq!(snapshot.segments[0].allocated_size, 3 << 20);
/// assert_eq!(snapshot.traces[0].len(), 2);
/// allocator.free(0, tensor)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`Error::Replay`] never happens in practice: it would mean that a device vanished between two calls.
pub fn snapshot_of<D: Device>(
    allocator: &CachingAllocator<D>,
    mut stack_of: impl FnMut(Context, &mut Stacks, &mut Strings) -> StackId,
) -> Result<Snapshot> {
    let mut snapshot = Snapshot::default();
    for device in 0..allocator.device_count() {
        let guard = allocator.device(device).map_err(Error::Replay)?;
        if device == 0 {
            let minor = guard.profile().release.minor();
            snapshot.settings = settings(&guard);
            // The keys a file has tell which release's rules it follows, so it gets that release's keys.
            snapshot.layout.has_host_segments = minor >= 14;
            snapshot.layout.has_host_traces = minor >= 14;
        }
        let mut stack = |context: Option<Context>, snapshot: &mut Snapshot| {
            context.map_or(StackId::NONE, |context| {
                stack_of(context, &mut snapshot.stacks, &mut snapshot.strings)
            })
        };
        for info in guard.memory_snapshot() {
            let segment = segment(device, &info, |context| stack(context, &mut snapshot));
            if !snapshot.pools.contains(&segment.pool_id) {
                snapshot.pools.push(segment.pool_id);
            }
            snapshot.segments.push(segment);
        }
        let unknown = snapshot.strings.intern("N/A");
        let names_pools = guard.profile().trace_has_pool_id;
        let mut trace = Trace::default();
        for entry in guard.history() {
            let stack = stack(entry.context, &mut snapshot);
            trace.push(event(&entry, stack, unknown, names_pools));
        }
        snapshot.traces.push(trace);
    }
    snapshot.pools.sort_unstable();
    Ok(snapshot)
}

fn segment(device: usize, info: &SegmentInfo, mut stack: impl FnMut(Option<Context>) -> StackId) -> Segment {
    let blocks = info.blocks.iter().map(|block| Block {
        address: block.address,
        size: block.size,
        requested_size: block.requested_size,
        state: match block.state {
            unhand_alloc::BlockState::ActiveAllocated => BlockState::ActiveAllocated,
            unhand_alloc::BlockState::ActivePendingFree => BlockState::ActivePendingFree,
            unhand_alloc::BlockState::Inactive => BlockState::Inactive,
        },
        stack: stack(block.context),
        extra: Extra::default(),
    });
    let blocks = blocks.collect();
    Segment {
        device: i32::try_from(device).unwrap_or(i32::MAX),
        address: info.address,
        total_size: info.total_size,
        allocated_size: info.allocated_size,
        active_size: info.active_size,
        requested_size: info.requested_size,
        stream: info.stream.0,
        kind: match info.kind {
            unhand_alloc::PoolKind::Small => SegmentKind::Small,
            unhand_alloc::PoolKind::Large => SegmentKind::Large,
        },
        pool_id: PoolId(info.pool_id.0, info.pool_id.1),
        is_expandable: info.is_expandable,
        stack: stack(info.context),
        blocks,
        extra: Extra::default(),
    }
}

fn event(entry: &TraceEntry, stack: StackId, compile_context: StringId, names_pools: bool) -> Event {
    Event {
        action: match entry.action {
            unhand_alloc::Action::Alloc => Action::Alloc,
            unhand_alloc::Action::FreeRequested => Action::FreeRequested,
            unhand_alloc::Action::FreeCompleted => Action::FreeCompleted,
            unhand_alloc::Action::SegmentAlloc => Action::SegmentAlloc,
            unhand_alloc::Action::SegmentFree => Action::SegmentFree,
            unhand_alloc::Action::SegmentMap => Action::SegmentMap,
            unhand_alloc::Action::SegmentUnmap => Action::SegmentUnmap,
            unhand_alloc::Action::Snapshot => Action::Snapshot,
            unhand_alloc::Action::Oom => Action::Oom,
            unhand_alloc::Action::Annotate => Action::Annotate,
        },
        addr: entry.address,
        size: entry.size,
        stream: entry.stream.0,
        time_us: Some(entry.time_us),
        stack,
        compile_context,
        user_metadata: StringId::default(),
        pool_id: names_pools.then_some(PoolId(entry.pool_id.0, entry.pool_id.1)),
        action_name: StringId::default(),
    }
}

fn settings<D: Device>(allocator: &DeviceAllocator<D>) -> AllocatorSettings {
    let settings = allocator.settings();
    let int = |number: u64| Value::Int(i64::try_from(number).unwrap_or(i64::MAX));
    let divisions: Vec<(u64, u64)> = settings
        .roundup_power2_divisions
        .iter()
        .enumerate()
        .map(|(slot, divisions)| (1 << slot, *divisions))
        .collect();
    let table =
        divisions.iter().map(|(mib, divisions)| (Value::Str(mib.to_string()), int(*divisions))).collect();
    let minor = allocator.profile().release.minor();
    let entries = [
        ("PYTORCH_CUDA_ALLOC_CONF", Value::Str(settings.conf.clone())),
        ("max_split_size", settings.max_split_size.map_or(Value::Int(-1), int)),
        ("garbage_collection_threshold", Value::Float(settings.garbage_collection_threshold)),
        ("expandable_segments", Value::Bool(settings.expandable_segments)),
        ("pinned_num_register_threads", Value::Int(1)),
        ("release_lock_on_cudamalloc", Value::Bool(settings.release_lock_on_cudamalloc)),
        ("pinned_use_cuda_host_register", Value::Bool(false)),
        ("graph_capture_record_stream_reuse", Value::Bool(settings.graph_capture_record_stream_reuse)),
        ("max_round_threshold", Value::Int(-1)),
        ("max_cached_size", Value::Int(-1)),
        ("roundup_power2_divisions", Value::Dict(table)),
    ];
    AllocatorSettings {
        conf: settings.conf.clone(),
        max_split_size: settings.max_split_size,
        garbage_collection_threshold: settings.garbage_collection_threshold,
        expandable_segments: settings.expandable_segments,
        roundup_power2_divisions: divisions,
        present: true,
        entries: entries
            .into_iter()
            .filter(|(key, _)| since(key) <= minor)
            .map(|(key, value)| (key.to_owned(), value))
            .collect(),
    }
}

/// The minor release that brought a key of `allocator_settings`.
fn since(key: &str) -> u8 {
    match key {
        "max_round_threshold" | "max_cached_size" => 13,
        "graph_capture_record_stream_reuse" => 9,
        _ => 0,
    }
}
