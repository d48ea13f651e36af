"""A notebook's session without a notebook: IPython's shell runs cells with `%%unhand`, and shows what it would show there.

Needs IPython (`pip install ipython`). Runs on any GPU with 1 GiB to spare. The documents show what it prints on the stand-in
(docs/concepts/stand-in.md). In Jupyter, Colab and VS Code the same answers are tables.
"""

import re
import sys

from IPython.core.interactiveshell import InteractiveShell

shell = InteractiveShell.instance(colors="NoColor")
# A cell that fails is part of the story; its traceback is long, and this shows its last line.
shell.InteractiveTB.set_mode("Minimal")


class WithoutTimes:
    """Standard output without the time in a footer, which differs from run to run."""

    def write(self, text):
        """Passes text on."""
        sys.__stdout__.write(re.sub(r"(unhand: \w+), \d+\.\d\d s", r"\1", text))

    def flush(self):
        """Passes text on at once."""
        sys.__stdout__.flush()


def cell(text):
    """Runs a cell, and prints it before what it shows."""
    print(f"\n== In [{shell.execution_count}]")
    print(text)
    print("--")
    shell.run_cell(text, store_history=True)


sys.stdout = WithoutTimes()

cell("%load_ext unhand")

cell("""\
%%unhand build
import torch
model = torch.nn.Sequential(*[torch.nn.Linear(2048, 2048, bias=False) for _ in range(4)]).cuda()
optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
losses = []""")

cell("""\
%%unhand train
batch = torch.zeros(4096, 2048, device="cuda")
for _ in range(2):
    loss = model(batch).square().mean()
    loss.backward(retain_graph=True)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(loss)""")

cell("""\
%%unhand look
batch * 2""")

cell("""\
%%unhand fail
def evaluate(data):
    activations = data * 3
    raise RuntimeError("shapes do not match")

evaluate(batch)""")

cell("%unhand free")

cell("%unhand free losses loss")

cell("%unhand holders batch")

cell("%unhand free modle")
