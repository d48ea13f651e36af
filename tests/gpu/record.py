#!/usr/bin/env python3
"""Run a workload and record every event of PyTorch's CUDA allocator.

usage: record.py WORKLOAD FOLDER TAG [stacks]

Writes FOLDER/WORKLOAD.TAG.pickle.xz, the snapshot, and FOLDER/WORKLOAD.TAG.json, the figures that PyTorch itself
reports. With `stacks` the events carry Python stacks. PYTORCH_CUDA_ALLOC_CONF sets the allocator up;
FRACTION_GB limits it to so many GiB.

The recordings in tests/snapshots were made with these workloads on an H200, and the same script on the stand-in has
to repeat their events. So seeds, the order of calls and how long a name keeps its tensor are part of the result:
a name that is assigned again frees the old tensor only after the new one is made.
"""

import collections
import json
import lzma
import os
import pickle
import random
import sys
import time

import torch
from torch import nn

DEVICE = "cuda"
# More events than any workload has.
ENTRIES = {False: 4_000_000, True: 2_000_000}


def churn():
    """Replace one of 300 buffers at random, 60,000 times."""
    live = [None] * 300
    for _ in range(60_000):
        index = random.randrange(300)
        live[index] = None
        live[index] = torch.empty(int(2 ** random.uniform(9, 26)), dtype=torch.uint8, device=DEVICE)
    return live


def leak():
    """Train with a loss that is added up, and keep outputs: every graph stays alive."""
    layers = [nn.Sequential(nn.Linear(1024, 4096), nn.GELU(), nn.Linear(4096, 1024)) for _ in range(8)]
    model = nn.Sequential(*layers).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters())
    total = 0
    history = []
    for _ in range(40):
        batch = torch.randn(256, 1024, device=DEVICE)
        loss = model(batch).pow(2).mean()
        loss.backward(retain_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        total = total + loss
        history.append(model(batch).mean())
    torch.cuda.synchronize()
    return model, optimizer, total, history


def streams():
    """Allocate on three streams, share blocks between them, capture a graph, use a memory pool."""
    side = [torch.cuda.Stream() for _ in range(3)]
    keep = []
    for step in range(400):
        stream = random.choice(side)
        with torch.cuda.stream(stream):
            first = torch.randn(random.randrange(1, 4_000_000), device=DEVICE)
            second = first * 2
            keep.append(second)
        if step % 3 == 0:
            second.record_stream(torch.cuda.current_stream())
        if len(keep) > 20:
            keep.pop(random.randrange(20))
        if step % 50 == 49:
            torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    batch = torch.randn(1024, 1024, device=DEVICE)
    linear = nn.Linear(1024, 1024).to(DEVICE)
    linear(batch)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        output = linear(batch).relu().sum()
    graph.replay()
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        pooled = [
            torch.empty(random.randrange(1, 9_000_000), dtype=torch.uint8, device=DEVICE) for _ in range(50)
        ]
    torch.cuda.synchronize()
    return keep, graph, batch, linear, output, pool, pooled


def gpt2():
    """Train GPT-2 small for 12 steps with batches of changing size."""
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=12, n_embd=768, n_head=12, vocab_size=50257)
    model = GPT2LMHeadModel(config).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for _ in range(12):
        length = random.choice([128, 200, 333, 512, 640, 1000])
        size = random.choice([4, 6, 8])
        batch = torch.randint(0, 50257, (size, length), device=DEVICE)
        loss = model(batch, labels=batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    return model, optimizer


def resnet():
    """Train ResNet-50 for 6 steps under autocast."""
    import torchvision

    model = torchvision.models.resnet50().to(DEVICE)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(6):
        images = torch.randn(64, 3, 224, 224, device=DEVICE)
        labels = torch.randint(0, 1000, (64,), device=DEVICE)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    return model, optimizer


WORKLOADS = {function.__name__: function for function in (churn, leak, streams, gpt2, resnet)}


def main():
    if len(sys.argv) not in (4, 5) or sys.argv[1] not in WORKLOADS:
        raise SystemExit(f"{__doc__}\nworkloads: {', '.join(WORKLOADS)}")
    workload, folder, tag = sys.argv[1:4]
    has_stacks = len(sys.argv) == 5
    torch.manual_seed(0)
    random.seed(0)
    torch.backends.cudnn.benchmark = False
    torch.cuda.init()
    context = "all" if has_stacks else None
    torch.cuda.memory._record_memory_history(max_entries=ENTRIES[has_stacks], context=context, stacks="python")
    if os.environ.get("FRACTION_GB"):
        wanted = float(os.environ["FRACTION_GB"]) * 2**30
        torch.cuda.set_per_process_memory_fraction(wanted / torch.cuda.mem_get_info()[1])

    began = time.time()
    try:
        kept = WORKLOADS[workload]()
    except torch.cuda.OutOfMemoryError as error:
        print("out of memory:", str(error)[:200])
        kept = None
    seconds = time.time() - began

    stats = torch.cuda.memory_stats()
    snapshot = torch.cuda.memory._snapshot()
    torch.cuda.memory._record_memory_history(enabled=None)
    events = collections.Counter(event["action"] for event in snapshot["device_traces"][0])
    data = pickle.dumps(snapshot)
    path = os.path.join(folder, f"{workload}.{tag}")
    with lzma.open(path + ".pickle.xz", "wb", preset=1) as file:
        file.write(data)
    figures = {
        "workload": workload,
        "tag": tag,
        "conf": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "seconds": seconds,
        "events": dict(events),
        "stats": stats,
        "raw_bytes": len(data),
    }
    with open(path + ".json", "w") as file:
        json.dump(figures, file)
    peaks = {name: stats[f"{name}_bytes.all.peak"] >> 20 for name in ("allocated", "reserved")}
    print(f"{workload} {tag}: {seconds:.1f} s, {sum(events.values())} events, peak MiB {peaks}", flush=True)
    del kept


if __name__ == "__main__":
    main()
