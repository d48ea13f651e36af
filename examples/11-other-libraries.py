"""What other libraries leave on the GPU, and how it goes back: an accelerator, and the trials of a search.

Needs accelerate and Optuna, and runs on any GPU with 1 GiB to spare. The documents show what it prints on the stand-in
(docs/concepts/stand-in.md).
"""

import gc
import logging
import sys
import warnings

import accelerate
import optuna
import torch
from torch import nn

from unhand.integrations import accelerate as accelerator_memory
from unhand.integrations import optuna as trials

# The integrations say what a trial left, as a warning of the logger `unhand`.
logging.basicConfig(stream=sys.stdout, format="%(message)s")
optuna.logging.set_verbosity(optuna.logging.ERROR)
warnings.simplefilter("ignore")


def show(what):
    print(f"{torch.cuda.memory_reserved() / 2**20:8,.0f} MiB reserved  {what}")


def make():
    """A model and its optimizer, prepared and after one step."""
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(4)])
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.zeros(512, 2048, device="cuda")).square().mean())
    optimizer.step()
    return model, optimizer


print("== an accelerator")
accelerator = accelerate.Accelerator()
model, optimizer = make()
show("after a step of training")
del model, optimizer
gc.collect()
torch.cuda.empty_cache()
show("del model, optimizer; gc.collect(); torch.cuda.empty_cache()")
freed = accelerator_memory.release(accelerator)
show("unhand.integrations.accelerate.release(accelerator)")

print("\n== trials")
best = []


@trials.trial
def objective(trial):
    show(f"trial {trial.number} begins")
    model = nn.Linear(4096, 4096, bias=False).cuda()
    model.trainer = model
    loss = model(torch.zeros(8, 4096, device="cuda")).square().mean() + trial.suggest_float("x", 0.0, 1.0)
    if trial.number == 1:
        raise optuna.TrialPruned()
    if trial.number == 2:
        best.append(model)
    return loss


study = optuna.create_study()
study.optimize(objective, n_trials=4)
