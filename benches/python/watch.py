"""What `unhand.watch` costs a step, what its look at the heap costs, and how soon it tells which loop leaks.

usage: watch.py [--steps N] [cost | clean | leaks]...

Runs with PyTorch on a GPU or on the stand-in; the loops are those of tests/python/torch/_loops.py. Prints tables. Times are
CPU times of the process, so that a busy machine does not lengthen them; the cost of a step is the best of seven rounds.
"""

import argparse
import contextlib
import gc
import importlib.util
import io
import os
import sys
import tempfile
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
    watch, seconds = unhand.watch(on_leak=None, patience=16), []
    for _ in range(40):
        grow()
        start = time.process_time()
        watch.step()
        seconds.append(time.process_time() - start)
    kept.clear()
    n_objects = len(gc.get_objects())
    print(f"\nthe look at the heap: {sum(second for second in seconds if second > 0.01):.2f} CPU-s, {n_objects:,} objects")


def urgency():
    """How soon a leak of 1 MiB a step is told, by the steps that are left until memory runs out."""
    total = torch.cuda.get_device_properties(0).total_memory
    print("\n| steps until memory runs out | told at step | steps that were left |\n|---|---|---|")
    kept = []
    for n_steps in (100, 300, 1000, 10_000):
        kept.clear()
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + (n_steps << 20)) / total)
        told = []
        for _ in unhand.watch(_until(told, n_steps), on_leak=told.append):
            kept.append(torch.empty(1 << 20, dtype=torch.uint8, device="cuda"))
        print(f"| {n_steps:,} | {told[0].step if told else 'never'} | {told[0].forecast.steps if told else 0:,} |", flush=True)
    torch.cuda.set_per_process_memory_fraction(1.0)


def gpt2(steps):
    """A tiny GPT-2 under the Trainer of transformers."""
    config = transformers.GPT2Config(vocab_size=100, n_positions=64, n_embd=32, n_layer=2, n_head=2)
    rows = [dict.fromkeys(("input_ids", "labels"), torch.zeros(16, dtype=torch.long)) for _ in range(64)]
    # Each step of the Trainer takes one of the watched steps.
    left = iter(steps)

    class Watching(transformers.TrainerCallback):
        def on_step_end(self, args, state, control, **_):
            next(left, None)

    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
        arguments = transformers.TrainingArguments(
            folder, max_steps=len(steps), report_to=[], logging_steps=10, save_strategy="no", disable_tqdm=True
        )
        model = transformers.GPT2LMHeadModel(config)
        transformers.Trainer(model=model, args=arguments, train_dataset=rows, callbacks=[Watching()]).train()
        next(left, None)


def clean(n_steps):
    loops = _loops.CLEAN
    if importlib.util.find_spec("transformers") and importlib.util.find_spec("accelerate"):
        global transformers
        import transformers

        loops = (*loops, gpt2)
    print(f"\n{len(loops)} loops without a leak, {n_steps:,} steps each\n\n| loop | told | verdict at the end |\n|---|---|---|")
    n_told = 0
    for loop in loops:
        told = []
        watch = unhand.watch(range(n_steps), on_leak=told.append)
        loop(watch)
        n_told += bool(told)
        print(f"| {loop.__name__} | {', '.join(verdict.kind for verdict in told) or '-'} | {watch.verdict().kind} |", flush=True)
    print(f"\ntold: {n_told} of {len(loops)}")


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
        urgency()
    if "clean" in what:
        clean(options.steps)
    if "leaks" in what:
        leaks(options.steps)


if __name__ == "__main__":
    main()
