"""A process to be looked at: a million Python objects, and three CUDA storages that somebody keeps on the quiet.

`registry` leads over an object, its dictionary and what a function closes over to a list with a tensor. A suspended
generator has another one in a local variable. A graph of autograd saved a third, which no Python object stands for.
"""

import random

import torch

MIB = 1 << 20

HIDDEN_BYTES = 64 * MIB
LOCAL_BYTES = 32 * MIB
SAVED_BYTES = 16 * MIB

registry = {}
pending = []
losses = []
crowd = []


class Item:
    """One of many: an instance with a list, a dictionary and a tuple."""

    def __init__(self, number, other):
        self.name = f"item {number}"
        self.values = [number, other]
        self.extra = {"pair": (self.values, other), "number": number}


class Service:
    """Has handlers by name."""

    def __init__(self):
        self.handlers = {}


def make_crowd(n_objects):
    """About so many objects that the collector tracks, each with references to others at random."""
    draw = random.Random(1)
    for number in range(n_objects // 4):
        other = crowd[draw.randrange(number)] if number else None
        crowd.append(Item(number, other))


def _tensor(n_bytes):
    return torch.empty(n_bytes, dtype=torch.uint8, device="cuda")


def _handler(history):
    def handle():
        return len(history)

    return handle


def _generate():
    inside = _tensor(LOCAL_BYTES)
    yield inside.shape


def _loss():
    leaf = torch.zeros(1, device="cuda", requires_grad=True)
    # `exp` saves its result. No name of Python's refers to it, and the tensor that was one is gone.
    return leaf.expand(SAVED_BYTES // 4).exp().sum()


def plant():
    """Make the holders. Returns nothing: this module only has the tensors."""
    service = Service()
    service.handlers["on_step"] = _handler([None, _tensor(HIDDEN_BYTES)])
    registry["jobs"] = service
    pending.append(_generate())
    next(pending[0])
    losses.append(_loss())


def hidden():
    """The tensor behind the registry."""
    return registry["jobs"].handlers["on_step"].__closure__[0].cell_contents[1]


def clear():
    """Let go of everything that was planted."""
    registry.clear()
    pending.clear()
    losses.clear()
