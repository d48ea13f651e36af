"""Where every byte of a GPU is, and which Python variable keeps it: `unhand.report()` and `unhand.holders(x)`.

Runs on any GPU with 1 GiB to spare. The documents show what it prints on the stand-in (docs/concepts/stand-in.md).
"""

import functools
import json

import torch
from torch import nn

import unhand

# With it, memory that no Python object leads to is shown with the line that allocated it.
torch.cuda.memory._record_memory_history(stacks="python")

model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(4)]).cuda()
optimizer = torch.optim.AdamW(model.parameters())
losses = []


@functools.lru_cache
def positions(length):
    """A table that is made once and then kept."""
    return torch.zeros(length, 1024, device="cuda")


def load_frozen():
    """A model whose weights only C++ has afterwards."""
    return torch.jit.freeze(torch.jit.script(nn.Linear(2048, 1024, bias=False).cuda().eval()))


def step(batch):
    loss = model(batch).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss)


for _ in range(3):
    step(torch.zeros(4096, 2048, device="cuda"))
positions(4096)
frozen = load_frozen()

print("== unhand.report()")
print(unhand.report())

print("\n== unhand.holders(losses[0])")
print(unhand.holders(losses[0]))

print("\n== unhand.holders(model[0].weight)")
print(unhand.holders(model[0].weight))

print("\n== the first holder, as JSON")
print(json.dumps(unhand.report().devices[0].holders[0].to_dict(), indent=1))
