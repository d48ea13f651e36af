"""Streams, events, graphs, pools: the order that PyTorch relies on, and CUDA's rules for stream capture."""

import ctypes
import gc
import sys

import torch
from bench import main, raises

MIB = 1 << 20


def lag(microseconds):
    ctypes.CDLL(None).unhand_standin_set_lag(ctypes.c_uint64(microseconds))


def check_events_measure_time():
    first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    first.record()
    last.record()
    torch.cuda.synchronize()
    assert 0 <= first.elapsed_time(last) < 1000


def check_without_lag_events_are_done_at_once():
    event = torch.cuda.Event()
    event.record()
    assert event.query()
    assert torch.cuda.Stream().query()


def check_with_lag_an_event_is_done_when_somebody_waits():
    lag(3_600_000_000)
    try:
        event = torch.cuda.Event()
        event.record()
        assert not event.query()
        event.synchronize()
        assert event.query()
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            event.record()
        assert not stream.query()
        torch.cuda.synchronize()
        assert stream.query() and event.query()
    finally:
        lag(0)


def check_a_recorded_stream_defers_the_free():
    torch.cuda.synchronize()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_reserved()
    side = torch.cuda.Stream()
    for microseconds, segments in ((0, 1), (3_600_000_000, 2)):
        lag(microseconds)
        try:
            block = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
            block.record_stream(side)
            with torch.cuda.stream(side):
                block.zero_()
            del block
            block = torch.empty(30 * MIB, dtype=torch.uint8, device="cuda")
            grown = torch.cuda.memory_reserved() - before
            assert grown == segments * 30 * MIB, grown
        finally:
            lag(0)
        del block
        torch.cuda.synchronize()
        torch.cuda.empty_cache()


def check_a_graph_repeats_its_copies():
    source, target = torch.arange(8.0).cuda(), torch.zeros(8, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        target.copy_(source)
    source.copy_(torch.arange(8.0) + 100)
    graph.replay()
    torch.cuda.synchronize()
    assert target.cpu().tolist() == (torch.arange(8.0) + 100).tolist()


def check_graphs_of_models():
    linear = torch.nn.Linear(64, 64).cuda()
    batch = torch.randn(8, 64, device="cuda")
    made = torch.cuda.make_graphed_callables(linear, (batch,))
    assert made(batch).shape == (8, 64)
    made(batch).sum().backward()
    assert linear.weight.grad is not None


def check_a_stream_joins_a_capture_through_an_event():
    graph, side = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    source, target = torch.arange(4.0).cuda(), torch.zeros(4, device="cuda")
    with torch.cuda.graph(graph):
        main_stream = torch.cuda.current_stream()
        side.wait_stream(main_stream)
        with torch.cuda.stream(side):
            assert torch.cuda.is_current_stream_capturing()
            target.copy_(source)
        main_stream.wait_stream(side)
    source.copy_(torch.arange(4.0) + 1)
    graph.replay()
    assert target.cpu().tolist() == [1.0, 2.0, 3.0, 4.0]


def check_pools():
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        block = torch.empty(5 * MIB, dtype=torch.uint8, device="cuda")
    assert len(pool.snapshot()) == 1
    del block, pool
    gc.collect()


def check_streams_have_priorities():
    least, greatest = torch.cuda.Stream.priority_range()
    # The device has six, PyTorch uses four.
    assert (least, greatest) == (0, -3), (least, greatest)
    assert torch.cuda.Stream(priority=-2).priority == -2


# What follows spoils a capture. PyTorch keeps traces of that, so each runs in a process of its own: see `captures`.


def forbidden_synchronize():
    captured(torch.cuda.synchronize, "capturing")


def forbidden_item():
    there = torch.ones(1, device="cuda")
    captured(lambda: there.item(), "capturing")


def forbidden_stream_wait():
    captured(lambda: torch.cuda.current_stream().synchronize(), "capturing")


def forbidden_unjoined():
    side = torch.cuda.Stream()

    def fork():
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.empty(8, device="cuda").zero_()

    graph = torch.cuda.CUDAGraph()

    def capture():
        with torch.cuda.graph(graph):
            torch.empty(8, device="cuda").zero_()
            fork()

    raises(torch.AcceleratorError if hasattr(torch, "AcceleratorError") else RuntimeError, capture, "unjoined")


def captured(call, words):
    graph = torch.cuda.CUDAGraph()
    error = torch.AcceleratorError if hasattr(torch, "AcceleratorError") else RuntimeError

    def capture():
        with torch.cuda.graph(graph):
            torch.empty(8, device="cuda").zero_()
            raises(error, call, words)

    # The context manager ends the capture, which was spoiled.
    raises(error, capture, "previous error during capture")
    # The device is as good as before.
    assert torch.arange(3).cuda().cpu().tolist() == [0, 1, 2]


def check_captures_are_strict():
    import os
    import subprocess

    for name in [name for name in globals() if name.startswith("forbidden_")]:
        program = f"import streams; streams.{name}(); print('done', flush=True); import os; os._exit(0)"
        done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120,
                              cwd=os.path.dirname(os.path.abspath(__file__)))
        assert "done" in done.stdout, f"{name}: {done.stdout[-2000:]}{done.stderr[-2000:]}"


if __name__ == "__main__":
    main(globals())
