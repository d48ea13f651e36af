"""A leak is named while the loop runs: `for batch in unhand.watch(loader)`, and what it says of loops that do not leak.

Runs on any GPU with 1 GiB to spare. The documents show what it prints on the stand-in (docs/concepts/stand-in.md).
"""

import collections

import torch
from torch import nn

import unhand


class Trainer:
    """Keeps each step's loss, for a mean that is shown at the end of the epoch. The loss has its graph."""

    def __init__(self):
        self.model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(3)]).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.outputs = []

    def step(self, batch):
        loss = self.model(batch).square().mean()
        loss.backward(retain_graph=True)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss


loader = [torch.zeros(256, 1024) for _ in range(400)]

print("== a leak")
trainer = Trainer()
for batch in unhand.watch(loader, on_leak=print):
    loss = trainer.step(batch.cuda())
    trainer.outputs.append({"loss": loss})

print("\n== the same, with loss.item()")
trainer = Trainer()
watch = unhand.watch(loader, on_leak=print)
for batch in watch:
    loss = trainer.step(batch.cuda())
    trainer.outputs.append({"loss": loss.item()})
print(watch.verdict())

print("\n== an evaluation each ten steps")
trainer = Trainer()
watch = unhand.watch(loader, on_leak=print)
for index, batch in enumerate(watch):
    loss = trainer.step(batch.cuda())
    scores = [trainer.model(batch.cuda()) for _ in range(8)] if index % 10 == 9 else None
print(watch.verdict())

print("\n== a replay buffer that is not full yet")
buffer = collections.deque(maxlen=5000)
watch = unhand.watch(loader, on_leak=print)
for batch in watch:
    buffer.append(batch[:64].cuda())
print(watch.verdict())
