"""What `unhand.watch` costs a step, what its look at the heap costs, and how soon it tells which loop leaks.

usage: watch.py [--steps N] [cost | clean | leaks]...

Runs with PyTorch on a GPU or on the stand-in; the loops are those of tests/python/torch/_loops.py. Prints tables. Times are
CPU times of the process, so that a busy machine does not lengthen them; the cost of a step is the best of seven rounds.
"""

import argparse
import gc
import os
import sys
import time
import warnings

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "..", "tests", "python", "torch"))

import _loops
import torch

import unhand
from unhand import _counters


def best_us(call, n=2000):
    times = []
    for _ in range(7):
        start = time.process_time()
        for _ in range(n):
            call()
        times.append((time.process_time() - start) / n * 1e6)
    return min(times)


def cost():
    torch.zeros(1, device="cuda")
    kept, blocks = [], [torch.empty(1, device="cuda") for _ in range(1000)]
    flat, tenth = unhand.watch(on_leak=None), unhand.watch(on_leak=None, every=10)
    # Nothing is looked at: it grows, and the patience is longer than the run.
    growing = unhand.watch(on_leak=None, patience=10**9)

    def grow():
        kept.append(torch.empty(1, device="cuda"))

    def watched():
        grow()
        growing.step()

    alone = best_us(grow)
    rows = [
        ("torch._C._cuda_memoryStats", best_us(lambda: torch._C._cuda_memoryStats(0))),
        ("unhand._counters.read", best_us(lambda: _counters.read(0))),
        ("step(), flat", best_us(flat.step)),
        ("step(), while it grows", best_us(watched) - alone),
        ("step(), every=10", best_us(tenth.step)),
        ("torch.cuda.memory_allocated()", best_us(torch.cuda.memory_allocated)),
    ]
    print("| what | us |\n|---|---|")
    for name, us in rows:
        print(f"| {name} | {us:.1f} |")
    del blocks
    kept.clear()


def clean(n_steps):
    print(f"\n{len(_loops.CLEAN)} loops without a leak, {n_steps:,} steps each\n\n| loop | told | verdict at the end |\n|---|---|---|")
    n_told = 0
    for loop in _loops.CLEAN:
        told = []
        watch = unhand.watch(range(n_steps), on_leak=told.append)
        loop(watch)
        n_told += bool(told)
        print(f"| {loop.__name__} | {', '.join(verdict.kind for verdict in told) or '-'} | {watch.verdict().kind} |", flush=True)
    print(f"\ntold: {n_told} of {len(_loops.CLEAN)}")


def leaks(n_steps):
    print("\n| loop | told after | kind | growth a step | holder | look, s |\n|---|---|---|---|---|---|")
    n_named, looks, delays = 0, [], []
    for loop, words in _loops.LEAKING:
        told = []
        # The first to be told ends the loop.
        watch = unhand.watch(_until(told, n_steps), on_leak=told.append)
        start = time.process_time()
        loop(watch)
        seconds = time.process_time() - start
        gc.collect()
        if not told:
            print(f"| {loop.__name__} | NOT TOLD in {n_steps} ({seconds:.0f} s) | | | | |", flush=True)
            continue
        verdict = told[0]
        path = next((path for path in verdict.growers[0].paths if words in path), None) if verdict.growers else None
        is_named = path is not None or words == verdict.kind
        n_named += is_named
        looks.append(verdict.look_seconds)
        delays.append(verdict.step - verdict.since_step)
        shown = (path or verdict.growers[0].path).replace("|", "\\|")
        print(
            f"| {loop.__name__} | {delays[-1]} steps | {verdict.kind} | {verdict.growth_bytes_per_step:,.0f} B | "
            f"{'' if is_named else 'WRONG: '}{shown} | {verdict.look_seconds:.2f} |",
            flush=True,
        )
    print(f"\nnamed: {n_named} of {len(_loops.LEAKING)}; delay {min(delays)} to {max(delays)} steps; look {min(looks):.2f} s at best")


def _until(told, n_steps):
    for index in range(n_steps):
        if told:
            return
        yield index


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=1500)
    parser.add_argument("what", nargs="*", metavar="WHAT", default=[])
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    what = options.what or ["cost", "clean", "leaks"]
    print(f"torch {torch.__version__}, Python {sys.version.split()[0]}, {torch.cuda.get_device_name()}\n")
    if "cost" in what:
        cost()
    if "clean" in what:
        clean(options.steps)
    if "leaks" in what:
        leaks(options.steps)


if __name__ == "__main__":
    main()
