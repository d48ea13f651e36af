"""Devices that this process does not use stay unused, whatever is looked at or given back.

Run it with UNHAND_STANDIN_DEVICES=3. Work is on cuda:1; the current device is cuda:0.
"""

# stand-in: UNHAND_STANDIN_DEVICES=3

import os
import sys
import threading

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "standin"))

import torch
from bench import main

from unhand import _actions, _allocator, _ladder as ladder

MIB = 1 << 20


def contexts():
    return [torch._C._cuda_hasPrimaryContext(device) for device in range(torch.cuda.device_count())]


def in_a_new_thread(work):
    """A thread begins on device 0, and what it calls would begin a context there."""
    results = []
    thread = threading.Thread(target=lambda: results.append(work()))
    thread.start()
    thread.join()
    return results[0]


def check_looking_makes_no_context():
    assert torch.cuda.device_count() == 3
    torch.cuda.init()
    assert contexts() == [False] * 3 and _allocator.devices() == []
    block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda:1")
    stream = torch.cuda.Stream(device=1)
    for look in (
        _allocator.devices,
        _allocator.snapshot,
        _allocator.is_capturing,
        _allocator.pool_owners,
        lambda: _allocator.history_is_on(1),
        lambda: _allocator.history_is_on(0),
        ladder.ladders,
        lambda: ladder.ladder(1),
        lambda: ladder.ladder(0),
        _actions.scene,
    ):
        look()
        in_a_new_thread(look)
        assert contexts() == [False, True, False], look
    assert _allocator.devices() == [1] and torch.cuda.current_device() == 0
    assert [seen.device for seen in ladder.ladders()] == [1]
    del block, stream


def check_a_device_without_a_context_has_a_ladder_of_zeros():
    seen = ladder.ladder(2)
    assert (seen.used_bytes, seen.used_how) == (0, "no context on this device")
    assert (seen.reserved_bytes, seen.allocated_bytes, seen.cached_bytes) == (0, 0, 0)
    assert seen.device_used_bytes is None or seen.device_used_bytes == 0
    assert str(seen) and contexts() == [False, True, False]


def check_giving_back_makes_no_context():
    for action in (
        _actions.tracebacks,
        _actions.notebook_history,
        _actions.collect,
        _actions.synchronize,
        _actions.workspaces,
        _actions.pinned_host_cache,
        _actions.ipc,
        _actions.autocast_cache,
        _actions.compile_caches,
        _actions.cudnn_dropout_state,
        lambda: _actions.fft_plans(0),
        lambda: _actions.fft_plans(1),
        _actions.empty_cache,
    ):
        for call in (action, lambda: in_a_new_thread(action)):
            block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda:1")
            # From the thread that allocated, the driver's current device is still 1.
            del block
            answer = call()
            assert contexts() == [False, True, False], answer
    assert torch.cuda.memory_reserved(1) == 0
    block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda:1")
    del block
    assert in_a_new_thread(_actions.empty_cache).freed_bytes == 64 * MIB
    assert torch.cuda.current_device() == 0


def check_a_capture_on_another_device_is_seen():
    answers = []

    def ask():
        answers.append(_allocator.is_capturing())

    with torch.cuda.device(1):
        graph = torch.cuda.CUDAGraph()
        source = torch.zeros(1000, device="cuda:1")
        with torch.cuda.graph(graph, stream=torch.cuda.Stream(device=1), capture_error_mode="thread_local"):
            result = source + 1
            thread = threading.Thread(target=ask)
            thread.start()
            thread.join()
        graph.replay()
        torch.cuda.synchronize(1)
    assert answers == [True] and contexts() == [False, True, False]
    del graph, result


def check_the_plain_call_does_make_one():
    """Why all this: the reason for the guard, so that the checks above can fail."""
    block = torch.empty(64 * MIB, dtype=torch.uint8, device="cuda:1")
    del block
    in_a_new_thread(torch.cuda.empty_cache)
    assert contexts() == [True, True, False]


if __name__ == "__main__":
    main(globals())
