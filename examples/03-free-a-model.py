"""What `unhand.free` gives back, what it leaves alone, and what a freed tensor does.

Runs on any GPU with 1 GiB to spare. The documents show what it prints on the stand-in (docs/concepts/stand-in.md).
"""

import torch
from torch import nn

import unhand


def make():
    """A model and its optimizer after one step: what a cell of a notebook leaves."""
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(4)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(4096, 2048, device="cuda")).square().mean().backward()
    optimizer.step()
    return model, optimizer


model, optimizer = make()

print("== unhand.free(model)")
print(unhand.free(model))

print("\n== unhand.free(model, optimizer)")
print(unhand.free(model, optimizer))

print("\n== a freed tensor")
weight = model[0].weight
print(weight)
try:
    weight + 1
except unhand.FreedError as error:
    print("FreedError:", error)
print(torch.ones(3, device="cuda").sum().item(), "(the device works on)")

print("\n== new data")
weight.data = torch.zeros(2048, 2048, device="cuda")
print(type(weight).__name__, tuple(weight.shape), weight.sum().item())
unhand.free(model)

print("\n== a view that somebody else has")
table = torch.zeros(4096, 2048, device="cuda")
row = table[0]
print(unhand.free(table))

print("\n== unhand.free(table, shared=True, dry_run=True)")
print(unhand.free(table, shared=True, dry_run=True))

print("\n== unhand.free(table, shared=True)")
freed = unhand.free(table, shared=True)
print(f"{freed.freed_bytes:,} bytes let go, {freed.returned_bytes:,} returned to the driver")
try:
    row.sum()
except RuntimeError as error:
    print(f"{type(error).__name__}:", error)
