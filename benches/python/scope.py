"""What a scope costs: `python3 scope.py`, in microseconds of CPU time, best of five, on any machine with PyTorch and a GPU.

Beside it, in the same run, a `with` that does nothing and the check for leaks that PyTorch's own tests use
(`CudaMemoryLeakCheck` of torch.testing; it compares totals and names nobody; `requirements.txt` has what it imports). Prints one JSON line for each figure.
"""

import contextlib
import gc
import json
import sys
import time

import torch

import unhand
from unhand import _births, _counters, _scope

N_RUNS = 5
BLOCK_BYTES = 2048
kept = []


def cost(work, n_times):
    """CPU microseconds a time, the best of some runs."""
    work()
    best = float("inf")
    for _ in range(N_RUNS):
        started = time.process_time()
        for _ in range(n_times):
            work()
        best = min(best, (time.process_time() - started) / n_times)
    return best * 1e6


def show(what, microseconds, **more):
    print(json.dumps({"what": what, "cpu_us": round(microseconds, 2), **more}), flush=True)


def block():
    return torch.empty(BLOCK_BYTES, dtype=torch.uint8, device="cuda")


def nothing():
    with contextlib.nullcontext():
        pass


def empty_scope():
    with unhand.scope("empty"):
        pass


def ten_blocks(context):
    def work():
        with context():
            for _ in range(10):
                block()

    return work


def strict_scope():
    return unhand.scope("strict", strict=True)


@unhand.scope("returns", strict=True)
def returning():
    return block()


def leaking():
    with unhand.scope("leaking", free=False):
        kept.append(block())
    kept.clear()


def pytorch_s_check():
    """PyTorch's own, as its tests use it; None where it cannot be had."""
    try:
        from torch.testing._internal.common_utils import CudaMemoryLeakCheck
    except ImportError:
        return None

    import unittest

    return lambda: CudaMemoryLeakCheck(unittest.TestCase(), "bench")


def per_allocation():
    """Microseconds of one allocation with its free, outside and inside of a scope, by turns."""
    outside, inside = [], []
    for _ in range(N_RUNS):
        outside.append(cost(block, 5_000))
        with _births.mark():
            inside.append(cost(block, 5_000))
    return min(outside), min(inside)


def crowd(n_objects):
    """Objects for the heap: lists of lists."""
    return [[[number], {"number": [number]}] for number in range(n_objects // 4)]


def main():
    block()
    live = [block() for _ in range(2000)]
    show("with nullcontext()", cost(nothing, 20_000))
    show("one reading of the counters", cost(lambda: _counters.read(0), 2_000))
    show("with unhand.scope(…), nothing inside", cost(empty_scope, 1_000))
    with unhand.scope("outer"):
        show("the same, inside of another scope", cost(empty_scope, 1_000))
    show("10 allocations, nullcontext", cost(ten_blocks(contextlib.nullcontext), 1_000))
    show("10 allocations, scope", cost(ten_blocks(lambda: unhand.scope("s")), 1_000))
    show("10 allocations, strict scope: looks at the allocator", cost(ten_blocks(strict_scope), 50), live_blocks=len(live))
    show("a function that returns a new tensor, strict", cost(returning, 50), live_blocks=len(live))
    outside, inside = per_allocation()
    show("allocate and free, alone", outside)
    show("allocate and free, inside of a scope", inside)
    check = pytorch_s_check()
    if check is None:
        show("CudaMemoryLeakCheck: not there", float("nan"))
    else:
        show("10 allocations, CudaMemoryLeakCheck", cost(ten_blocks(check), 3), objects=len(gc.get_objects()))
    _scope._ALWAYS = sys.maxsize
    for n_objects in (0, 500_000):
        more = crowd(n_objects)
        gc.collect()
        show("a scope with a leak: looks at the heap", cost(leaking, 1), objects=len(gc.get_objects()))
        del more


if __name__ == "__main__":
    main()
