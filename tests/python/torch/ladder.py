"""The ladder against PyTorch's own figures, and against what `empty_cache()` then gives back.

Run it with PYTORCH_CUDA_ALLOC_CONF unset and set to `expandable_segments:True`.
"""

import gc
import json
import os
import random
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "standin"))

import torch
from bench import main, raises

from unhand import _allocator, _ladder as ladder

MIB = 1 << 20
EXPANDABLE = "expandable_segments:True" in os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")


def empty(n_bytes, **options):
    return torch.empty(n_bytes, dtype=torch.uint8, device="cuda", **options)


def released():
    gc.collect()
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()


def given_back():
    """What `empty_cache()` really gives back."""
    before = torch.cuda.memory_reserved()
    torch.cuda.empty_cache()
    return before - torch.cuda.memory_reserved()


def a_mess(seed):
    """Tensors of many sizes, most of them freed again."""
    draw = random.Random(seed)
    kept = []
    for _ in range(300):
        size = draw.choice([100, 5000, 300_000, 900_000, 3 * MIB, 11 * MIB, 25 * MIB, 70 * MIB])
        kept.append(empty(draw.randint(size // 2, size)))
        if draw.random() < 0.6:
            kept.pop(draw.randrange(len(kept)))
    return [tensor for tensor in kept if draw.random() < 0.3]


def check_nothing_is_there_before_cuda_is_started():
    assert not torch.cuda.is_initialized()
    assert _allocator.devices() == [] and ladder.ladders() == () and _allocator.stats(0) == {}
    assert _allocator.snapshot() is None and _allocator.segments(0) == [] and not _allocator.is_capturing()
    raises(RuntimeError, ladder.ladder, "has not started CUDA")
    assert not torch.cuda.is_initialized()


def check_figures_are_pytorch_s_own():
    kept = a_mess(1)
    seen = ladder.ladder()
    stats = torch.cuda.memory_stats()
    assert seen.allocated_bytes == torch.cuda.memory_allocated() == stats["allocated_bytes.all.current"]
    assert seen.reserved_bytes == torch.cuda.memory_reserved()
    assert seen.requested_bytes == stats["requested_bytes.all.current"]
    assert seen.active_bytes == stats["active_bytes.all.current"]
    free, total = torch.cuda.mem_get_info()
    assert (seen.device_free_bytes, seen.total_bytes, seen.device_used_bytes) == (free, total, total - free)
    assert seen.requested_bytes <= seen.allocated_bytes <= seen.reserved_bytes <= seen.device_used_bytes
    assert seen.cached_bytes == seen.reserved_bytes - seen.allocated_bytes
    assert seen.cached_bytes == seen.returnable_bytes + seen.stuck_bytes + seen.kept_by_pools_bytes
    assert seen.uuid == f"GPU-{torch.cuda.get_device_properties(0).uuid}" and seen.device == 0
    assert seen.settings == os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "")
    del kept


def check_segments_are_the_snapshot_s():
    kept = a_mess(2)
    seen = _allocator.segments(0)
    raw = torch.cuda.memory_snapshot()
    assert [(s.address, s.total_bytes, s.pool) for s in seen] == [
        (s["address"], s["total_size"], s["segment_pool_id"]) for s in raw
    ]
    assert [[(b.address, b.bytes, b.state) for b in s.blocks] for s in seen] == [
        [(b["address"], b["size"], b["state"]) for b in s["blocks"]] for s in raw
    ]
    assert all(sum(block.bytes for block in segment.blocks) == segment.total_bytes for segment in seen)
    assert all(block.frames is None for segment in seen for block in segment.blocks)
    cached = _allocator.cached(0, seen)
    assert cached.stuck_bytes == sum(segment.stuck_bytes for segment in cached.stuck_segments)
    addresses = {tensor.untyped_storage().data_ptr() for tensor in kept}
    for segment in cached.stuck_segments:
        assert segment.pins and all(pin.state == _allocator.ALLOCATED for pin in segment.pins)
        # Whatever else lives in the process (workspaces of checks before), most pins are of this list.
        assert any(pin.address in addresses for pin in segment.pins) or len(segment.pins) < 3
    del kept


def check_returnable_is_what_comes_back():
    for seed in range(3, 9):
        released()
        kept = a_mess(seed)
        seen = ladder.ladder()
        assert seen.returnable_bytes > 0 and seen.stuck_bytes > 0, seen
        assert given_back() == seen.returnable_bytes, seed
        after = ladder.ladder()
        assert (after.returnable_bytes, after.stuck_bytes) == (0, seen.stuck_bytes), (seed, after)
        del kept


def check_returnable_counts_what_waits_for_another_stream():
    released()
    stream = torch.cuda.Stream()
    # Expandable, the first two make two pages together, and neither makes more than one alone.
    first, block, kept = empty(10 * MIB), empty(30 * MIB), empty(5 * MIB)
    with torch.cuda.stream(stream):
        block.zero_()
        block.record_stream(stream)
    del block, first
    seen = ladder.ladder()
    assert seen.active_bytes - seen.allocated_bytes == 30 * MIB and "in use by another stream" in str(seen)
    assert seen.cached_bytes == seen.reserved_bytes - seen.allocated_bytes
    assert given_back() == seen.returnable_bytes == 40 * MIB
    del kept


def check_other_streams_are_counted():
    released()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        first, second = empty(40 * MIB), empty(1000)
    del first
    seen = ladder.ladder()
    assert {segment.stream for segment in _allocator.segments(0)} >= {stream.cuda_stream}
    assert given_back() == seen.returnable_bytes == 40 * MIB
    del second


def check_a_mem_pool_keeps_its_memory_as_long_as_it_lives():
    released()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        first, second = empty(40 * MIB), empty(20 * MIB)
    name = pool.id
    del first
    seen = ladder.ladder()
    (shown,) = [shown for shown in seen.pools if shown.id == name]
    assert (shown.kind, shown.owner, shown.allocated_bytes) == ("mempool", "torch.cuda.MemPool", 20 * MIB)
    assert seen.kept_by_pools_bytes == 40 * MIB and given_back() == seen.returnable_bytes == 0, seen
    assert "until the pool's owner is gone: torch.cuda.MemPool" in str(seen)
    if EXPANDABLE:
        # PyTorch up to 2.15 forgets an expandable pool that dies before its tensors, and crashes when they die.
        del second
        seen = ladder.ladder()
        assert seen.kept_by_pools_bytes == 60 * MIB and given_back() == 0
        del pool
        assert torch.cuda.memory_reserved() == 0
        return
    # The pool goes with what is free in it; what a tensor uses stays behind, and nobody owns the pool then.
    del pool
    seen = ladder.ladder()
    (shown,) = [shown for shown in seen.pools if shown.id == name]
    assert (shown.kind, shown.owner) == ("private", None)
    del second
    seen = ladder.ladder()
    assert seen.kept_by_pools_bytes == 0 and given_back() == seen.returnable_bytes > 0


def check_a_graph_keeps_its_pool_until_it_is_reset():
    released()
    graph, source = torch.cuda.CUDAGraph(), empty(40 * MIB)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        intermediate = source + 1
        result = intermediate[: 20 * MIB] + 1
        del intermediate
    seen = ladder.ladder()
    (shown,) = [shown for shown in seen.pools if shown.id == tuple(graph.pool())]
    assert (shown.kind, shown.owner) == ("graph", "1 CUDA graph"), shown
    assert seen.kept_by_pools_bytes >= 40 * MIB and given_back() == seen.returnable_bytes
    if EXPANDABLE:
        # For the same reason the result goes first.
        del result
        graph.reset()
    else:
        graph.reset()
        seen = ladder.ladder()
        assert seen.kept_by_pools_bytes == 0 and seen.returnable_bytes >= 20 * MIB
        assert given_back() == seen.returnable_bytes
        del result
    seen = ladder.ladder()
    assert given_back() == seen.returnable_bytes >= 20 * MIB
    assert seen.pools[-1].owner is None and seen.pools[-1].kind == "graph", seen.pools
    del source, graph


def check_a_frozen_owner_is_not_taken_for_none():
    released()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        block = empty(40 * MIB)
    del block
    gc.collect()
    gc.freeze()
    try:
        seen = ladder.ladder()
        assert seen.kept_by_pools_bytes == 40 * MIB and given_back() == seen.returnable_bytes == 0
    finally:
        gc.unfreeze()
    del pool


def check_a_capture_can_be_looked_at():
    released()
    graph, source = torch.cuda.CUDAGraph(), torch.zeros(1000, device="cuda")
    with torch.cuda.graph(graph):
        assert _allocator.is_capturing()
        result = source + 1
        seen = ladder.ladder()
        assert seen.allocated_bytes == torch.cuda.memory_allocated()
        assert seen.kept_by_pools_bytes + seen.stuck_bytes > 0
    graph.replay()
    torch.cuda.synchronize()
    assert not _allocator.is_capturing()
    del graph, result


def check_a_capture_of_another_thread_is_seen():
    import threading

    released()
    source, answers = torch.zeros(1000, device="cuda"), []

    def ask():
        answers.append((torch.cuda.is_current_stream_capturing(), _allocator.is_capturing()))

    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        result = source + 1
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join()
    assert answers == [(False, True)], answers
    graph.replay()
    torch.cuda.synchronize()
    del graph, result


def check_looking_changes_no_counter():
    kept = a_mess(20)
    stream = torch.cuda.current_stream()
    torch.cuda.reset_peak_memory_stats()
    held = empty(64 * MIB)
    del held
    before, host = torch.cuda.memory_stats(), torch.cuda.host_memory_stats()
    counts = [sys.getrefcount(tensor) for tensor in kept]
    text = str(ladder.ladder())
    assert text and ladder.ladders() and _allocator.history_is_on(0) is False
    assert torch.cuda.memory_stats() == before and torch.cuda.host_memory_stats() == host
    assert torch.cuda.max_memory_allocated() >= torch.cuda.memory_allocated() + 64 * MIB
    assert [sys.getrefcount(tensor) for tensor in kept] == counts
    assert torch.cuda.current_stream() == stream and torch.cuda.current_device() == 0
    del kept


def check_a_history_gets_one_more_entry_and_blocks_show_their_frames():
    released()
    torch.cuda.memory._record_memory_history(max_entries=100_000)
    try:
        assert _allocator.history_is_on(0) is True
        block = empty(5 * MIB)
        n_entries = len(torch.cuda.memory._snapshot()["device_traces"][0])
        seen = _allocator.segments(0)
        traces = torch.cuda.memory._snapshot()["device_traces"][0]
        assert [entry["action"] for entry in traces[n_entries:]] == ["snapshot", "snapshot"]
        (own,) = [b for s in seen for b in s.blocks if b.address == block.data_ptr()]
        assert any(frame["filename"] == __file__ for frame in own.frames), own.frames
    finally:
        torch.cuda.memory._record_memory_history(enabled=None)
    del block


def check_workspaces_are_blocks_of_nobody():
    released()
    # A tensor of that size is no workspace.
    decoy = empty(33_554_432)
    assert ladder.ladder().workspaces_bytes == 0
    product = torch.ones(64, 64, device="cuda") @ torch.ones(64, 64, device="cuda")
    blocks = [b for s in _allocator.segments(0) for b in s.blocks if b.state == _allocator.ALLOCATED]
    n_large = sum(block.requested_bytes == 33_554_432 for block in blocks)
    seen = ladder.ladder()
    assert seen.workspaces_bytes == (n_large - 1) * 33_554_432, (seen.workspaces_bytes, n_large)
    owned = {block.address for block in blocks}
    assert ladder.ladder(owned=owned).workspaces_bytes == 0
    if n_large > 1:
        assert "cuBLAS workspaces" in str(seen)
    del decoy, product


def check_a_limit_is_shown():
    released()
    assert ladder.ladder().limit_bytes is None
    torch.cuda.set_per_process_memory_fraction(0.5)
    try:
        seen = ladder.ladder()
        assert seen.limit_bytes == seen.total_bytes // 2 and "limited to" in str(seen)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def check_pinned_memory_is_shown():
    before = ladder.ladder().pinned_host_reserved_bytes
    pinned = torch.empty(3 * MIB, dtype=torch.uint8, pin_memory=True)
    seen = ladder.ladder()
    assert seen.pinned_host_reserved_bytes - before == 4 * MIB and "pinned host memory" in str(seen)
    # Frees are not counted in every release; a figure that only grows is not shown.
    if seen.pinned_host_allocated_bytes is not None:
        assert seen.pinned_host_allocated_bytes == 4 * MIB
        del pinned
        assert ladder.ladder().pinned_host_allocated_bytes == 0
    torch._C._host_emptyCache()


def check_an_answer_is_plain_data():
    block = empty(1000)
    seen = ladder.ladder()
    data = json.loads(json.dumps(seen.to_dict()))
    assert data["reserved_bytes"] == seen.reserved_bytes and data["pools"][0]["kind"] == "default"
    assert [ladder.ladder(device).device for device in (0, "cuda", "cuda:0", torch.device("cuda", 0))] == [0] * 4
    html = seen._repr_html_()
    assert html.count("<div") == html.count("</div>") and "returnable" in html
    del block


if __name__ == "__main__":
    main(globals())
