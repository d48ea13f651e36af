"""A training run that is out of memory at its second step, and the page that the flight recorder wrote about it.

Runs on any GPU with 5 GiB to spare: the process allows itself 4 GiB. The documents show what it prints on the stand-in
(docs/concepts/stand-in.md).
"""

import os
import tempfile

import torch
from torch import nn

import unhand

LIMIT_BYTES = 4 << 30


def step(model, optimizer, batch):
    loss = model(batch).square().mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def train():
    total_bytes = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(LIMIT_BYTES / total_bytes)
    model = nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(2048, 2048), nn.GELU())]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    for batch_size in (4096, 28672):
        print(f"a step with a batch of {batch_size:,}")
        step(model, optimizer, torch.zeros(batch_size, 2048, device="cuda"))


with tempfile.TemporaryDirectory() as folder:
    with unhand.on_oom(folder, history="stacks") as recorder:
        try:
            train()
        except torch.OutOfMemoryError:
            print("    OutOfMemoryError")
    recording, = recorder.recordings
    print("\n== files")
    print(*sorted(os.listdir(recording)), sep="\n")
    print("\n== report.txt")
    with open(os.path.join(recording, "report.txt"), encoding="utf-8") as page:
        print(page.read(), end="")
