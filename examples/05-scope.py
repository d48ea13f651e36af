"""What `unhand.scope` names: memory that was allocated inside of a block of code and outlives it.

Runs on any GPU with 1 GiB to spare. The documents show what it prints on the stand-in (docs/concepts/stand-in.md).
"""

import torch
from torch import nn

import unhand

torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(4)]).cuda()
data = [torch.zeros(2048, 1024, device="cuda") for _ in range(4)]
model(data[0]).sum().backward()
losses = []


def evaluate():
    """The mean loss over the data; the losses are kept for a plot."""
    for batch in data:
        with unhand.scope("batch"):
            losses.append(model(batch).square().mean())
    return sum(loss.item() for loss in losses) / len(losses)


print('== with unhand.scope("evaluate")')
with unhand.scope("evaluate") as s:
    evaluate()
print(s)

print("\n== s.to_folded()")
print(s.to_folded(), end="")

losses.clear()
print("\n== strict=True")
try:
    with unhand.scope("evaluate", strict=True):
        with torch.no_grad():
            cache = model(data[0])
except unhand.LeakError as error:
    print("LeakError:", error)

print("\n== keep, and what is returned")
del cache


@unhand.scope("encode", strict=True, keep="index")
def encode(batch):
    """The encoding is for the caller; the index stays on purpose."""
    global index
    with torch.no_grad():
        hidden = model(batch)
        index = hidden.argmax(dim=1)
        return hidden.half()


encoding = encode(data[0])
print(encode.scope)

print("\n== an exception on its way")


def predict(batch):
    """Fails after the first layer."""
    hidden = model[0](batch)
    raise ValueError("no such layer")


try:
    with unhand.scope("predict", strict=True) as s:
        predict(data[0])
except ValueError as error:
    print(type(error).__name__, "is what the caller gets")
print(s)

print("\n== where it was allocated")
torch.cuda.memory._record_memory_history(stacks="python")
with unhand.scope("evaluate") as s:
    evaluate()
print(s)
torch.cuda.memory._record_memory_history(None)
