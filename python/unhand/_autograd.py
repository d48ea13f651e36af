"""What autograd keeps alive: gradients, bases of views, and the graph of `grad_fn` with the tensors it saved.

None of it is a Python reference, so the collector does not see it. Nothing here unpacks a saved tensor: that may run
hooks, which copy from the host or compute anew (`torch.autograd.graph.saved_tensors_hooks`, checkpointing).
"""

import math
from dataclasses import dataclass, field

_SAVED = "_raw_saved_"


@dataclass(slots=True)
class Step:
    """A node of the autograd graph."""

    function: object
    name: str
    next: list = field(default_factory=list)
    """(index, key of the next node)"""
    wrapped: int | None = None
    """Key of the node that another one runs for a part of a tensor."""
    saved: list = field(default_factory=list)
    """(name, what was saved: a tensor, or whatever a packing hook made of it)"""
    variable: object = None
    """The leaf whose gradient the node accumulates."""


class Graph:
    """The autograd graphs that hang on some tensors, each node once."""

    def __init__(self):
        self.steps: dict[int, Step] = {}
        self._slots: dict[type, list[str]] = {}

    def add(self, function) -> int:
        """Walk the graph that begins at a node; return the key of that node."""
        start = id(function)
        waiting = [function]
        while waiting:
            function = waiting.pop()
            key = id(function)
            if key in self.steps:
                continue
            # The step keeps the wrapper alive, so that its id stays its own.
            step = self.steps[key] = Step(function, type(function).__name__)
            for index, (following, _) in enumerate(_read(function, "next_functions") or ()):
                if following is not None:
                    step.next.append((index, id(following)))
                    waiting.append(following)
            # `CopySlices`, of a view that was changed in place. Only new releases show the node that did it.
            wrapped = _read(function, "_wrapped_node")
            if wrapped is not None:
                step.wrapped = id(wrapped)
                waiting.append(wrapped)
            if step.name == "AccumulateGrad":
                step.variable = _read(function, "variable")
            for name in self._saved_names(type(function)):
                self._read_saved(step, name)
        return start

    def _saved_names(self, kind) -> list[str]:
        names = self._slots.get(kind)
        if names is None:
            names = self._slots[kind] = [name for name in dir(kind) if name.startswith(_SAVED)]
        return names

    def _read_saved(self, step, name):
        saved = _read(step.function, name)
        public = "saved_tensors" if name == "_raw_saved_tensors" else "_saved_" + name[len(_SAVED):]
        is_many = isinstance(saved, (tuple, list))
        for index, item in enumerate(saved if is_many else (saved,)):
            data = _read(item, "data") if item is not None else None
            if data is not None:
                step.saved.append((f"{public}[{index}]" if is_many else public, data))


def gradient_bytes(function) -> list[int]:
    """The sizes of the gradients that a node takes: one for each result of the operation that it belongs to."""
    sizes = []
    for about in _read(function, "_input_metadata") or ():
        try:
            sizes.append(math.prod(map(int, about.shape)) * about.dtype.itemsize)
        except Exception:
            # A nested tensor, or a result that was not there.
            continue
    return sizes


def _read(thing, name):
    """An attribute, or None where there is none or reading it fails: a released tensor raises."""
    try:
        return getattr(thing, name)
    except Exception:
        return None


def grad_fn(tensor):
    """The node that made a tensor, or None. A view changed in place may refuse to tell."""
    return _read(tensor, "grad_fn")


def gradient(tensor):
    """`tensor.grad`, without the warning that asking a tensor in the middle of a graph gives."""
    if tensor.is_leaf or tensor.retains_grad:
        return _read(tensor, "grad")
    return None


def base(tensor):
    """The tensor that a view looks into, or None."""
    return _read(tensor, "_base")
