"""What the flight recorder costs: `python3 on_oom.py [ROUNDS]`, on a GPU or the stand-in.

CPU microseconds per allocation (made and freed again) and CPU milliseconds per training step, with the recorder off and in
its three states, by turns in one process, the best of the rounds. Then what a recording takes to write, in CPU seconds, and
how large it is, by the events in the history. Lines of JSON.
"""

import contextlib
import io
import json
import os
import sys
import tempfile
import time

import torch
from torch import nn

import unhand

N_ALLOCATIONS = 5_000
DEPTHS = (1, 30)
STATES = ("off", "on", "events", "stacks")


@contextlib.contextmanager
def state(name, folder):
    if name == "off":
        yield
        return
    with unhand.on_oom(folder, history=None if name == "on" else name):
        yield


def allocate(depth):
    if depth > 1:
        return allocate(depth - 1)
    start = time.process_time()
    for _ in range(N_ALLOCATIONS):
        torch.empty(1000, device="cuda")
    return (time.process_time() - start) / N_ALLOCATIONS * 1e6


def make_training():
    layer = nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    batch = torch.zeros(8, 128, 512, device="cuda")

    def step():
        model(batch).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def milliseconds(step, n_steps=5):
    torch.cuda.synchronize()
    start = time.process_time()
    for _ in range(n_steps):
        step()
    torch.cuda.synchronize()
    return (time.process_time() - start) / n_steps * 1e3


def n_allocations():
    return torch.cuda.memory_stats()["allocation.all.allocated"]


def write(n_events, history):
    """CPU seconds from the failed request to the program's own error, and the bytes written."""
    with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stderr(io.StringIO()):
        with unhand.on_oom(folder, history=history, max_entries=max(n_events, 1)) as recorder:
            # An allocation and a free are three events.
            for _ in range(n_events // 3):
                torch.empty(1000, device="cuda")
            start = time.process_time()
            with contextlib.suppress(torch.OutOfMemoryError):
                torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
            seconds = time.process_time() - start
        recording, = recorder.recordings
        sizes = [os.path.getsize(os.path.join(recording, name)) for name in os.listdir(recording)]
    return seconds, sum(sizes)


def say(**row):
    print(json.dumps({name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}), flush=True)


def main(n_rounds):
    step = make_training()
    # The second step has what the first one made: the optimizer's state.
    step(), step()
    before = n_allocations()
    step()
    per_step = n_allocations() - before
    best = {}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(n_rounds):
            for name in STATES:
                with state(name, folder):
                    for depth in DEPTHS:
                        key = name, f"cpu_us_per_allocation_at_depth_{depth}"
                        best[key] = min(best.get(key, 1e9), allocate(depth))
                    key = name, "cpu_ms_per_step"
                    best[key] = min(best.get(key, 1e9), milliseconds(step))
    for name in STATES:
        say(state=name, **{what: value for (of, what), value in best.items() if of == name}, allocations_per_step=per_step)
    for history, n_events in ((None, 0), ("events", 30_000), ("stacks", 30_000), ("stacks", 100_000)):
        tries = [write(n_events, history) for _ in range(n_rounds)]
        say(history=history, events=n_events, cpu_s_to_write=min(tries)[0], bytes_written=tries[0][1])


if __name__ == "__main__":
    main(int(sys.argv[1]) if sys.argv[1:] else 3)
