"""Out of memory at 2 a.m.: the cell failed, everything was deleted, the GPU is still full.

Runs on any GPU with 3 GiB to spare. The documents show what it prints on the stand-in (docs/concepts/stand-in.md).
"""

import gc
import sys

import torch
from torch import nn

import unhand


def used(what):
    free, total = torch.cuda.mem_get_info()
    print(f"{(total - free) / 2**20:8,.0f} MiB used on the device  {what}")


def train(model):
    """A step that needs more memory than any GPU has, after it has taken a good deal."""
    hidden = torch.zeros(65536, 2048, device="cuda")
    for layer in model:
        hidden = layer(hidden)
    return torch.empty(2**20, 2**20, device="cuda"), hidden


def run_cell():
    """What a notebook does with a cell that fails: it shows the error and remembers it in `sys.last_value`."""
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(3)]).cuda()
    used("with the model")
    try:
        train(model)
    except torch.OutOfMemoryError as error:
        sys.last_value = error
        print("    OutOfMemoryError")


run_cell()
used("after the error: `model` is gone")
gc.collect()
used("gc.collect()")
torch.cuda.empty_cache()
used("torch.cuda.empty_cache()")

print("\n== unhand.report()")
print(unhand.report())

print("\n== unhand.free()")
print(unhand.free())
