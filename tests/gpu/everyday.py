"""What an everyday situation is: a leak as people make it, what they would delete or free, and what has to be named.

The situations are in everyday_python.py and everyday_torch.py; situations.py measures them.
"""

import torch
from torch import nn

MIB = 1 << 20
SITUATIONS = []
"""All of them, in the order in which they are defined."""


class Situation:
    """One situation. `set_up(user)` makes it, with `user` as the namespace of the user's script."""

    def __init__(self, set_up, **options):
        self.name = set_up.__name__.removeprefix("situation_")
        self.about = set_up.__doc__.split("\n")[0]
        self.set_up = set_up
        self.names = options.pop("names", "")
        """What the user deletes, as one would write it after `del`."""
        self.targets = options.pop("targets", self.names)
        """What the user gives to `unhand.free`: the same, if not said otherwise."""
        self.holder = options.pop("holder", "")
        """Words that are all in the path of the holder that has to be named after the names were deleted."""
        self.kinds = options.pop("kinds", ())
        """The kinds of which that holder is one."""
        self.stays = options.pop("stays", False)
        """Whether `free(targets)` has to leave memory: it is somebody else's, and has to be named."""
        self.then = options.pop("then", "")
        """What the user names as well, having read that."""
        self.alone = options.pop("alone", False)
        """Whether `free()` without targets has to give it back, after the names were deleted."""
        self.keeps_bytes = options.pop("keeps_bytes", 0)
        """What the user means to keep on the device."""
        self.is_fragmented = options.pop("is_fragmented", False)
        """Whether what stays is free memory in segments that survivors pin: `compact()` is for that."""
        self.is_host = options.pop("is_host", False)
        """Whether the memory in question is pinned memory of the host."""
        if options:
            raise TypeError(f"not an option of a situation: {options}")


def situation(**options):
    """Registers a function as a situation. It may return a function that ends what it began: a thread, a region."""

    def register(set_up):
        SITUATIONS.append(Situation(set_up, **options))
        return set_up

    return register


def build_model(n_layers=4, width=4096):
    """A model of 64 MiB a layer, for the default width."""
    return nn.Sequential(*(nn.Linear(width, width, device="cuda") for _ in range(n_layers)))


def make_batch(n_rows=4096, width=4096):
    """64 MiB, for the default shape."""
    return torch.randn(n_rows, width, device="cuda")


class Trainer:
    """Owns a model and its optimizer, as trainers do, and knows its callbacks."""

    def __init__(self, model, optimizer=None):
        self.model = model
        self.optimizer = optimizer
        self.state = {"epoch": 0, "best": None}
        self.callbacks = []

    def step(self, batch):
        loss = self.model(batch).square().mean()
        loss.backward()
        self.optimizer.step()
        return loss
