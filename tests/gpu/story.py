#!/usr/bin/env python3
"""The story of the README on a real device: training runs out of memory at the prompt, and two lines bring it back.

usage: story.py [--gib N]

The lines are typed into Python's own interactive interpreter, so that the traceback stays where it stays for a user:
in `sys.last_exc`. `--gib` limits the process to that much memory, for devices of any size. Needs only torch and unhand.
"""

import argparse
import code
import sys

LINES = '''
import torch, unhand
from torch import nn
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(2048, 16, 8192, batch_first=True), 24).cuda()
optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
losses = []
def train(batch):
    tokens = torch.randn(batch, 1024, 2048, device="cuda")
    optimizer.zero_grad()
    loss = model(tokens).square().mean()
    loss.backward()
    optimizer.step()
    losses.append(loss.item())

train(batch=4)
torch.cuda.empty_cache()
train(batch=128)
torch.cuda.empty_cache(); print(torch.cuda.memory_allocated() >> 20, "MiB still allocated")
print(unhand.report(limit=6))
print(unhand.free())
train(batch=4); print(losses)
print(unhand.free(model, optimizer))
'''


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gib", type=float, default=40)
    arguments = parser.parse_args()
    import torch

    torch.cuda.set_per_process_memory_fraction(arguments.gib * 2**30 / torch.cuda.get_device_properties(0).total_memory)
    # The interpreter writes tracebacks to stderr: keep both in order.
    sys.stderr = sys.stdout
    console = code.InteractiveConsole(sys.modules["__main__"].__dict__)
    more = False
    for line in LINES.strip("\n").split("\n"):
        print(("... " if more else ">>> ") + line)
        more = console.push(line)


if __name__ == "__main__":
    main()
