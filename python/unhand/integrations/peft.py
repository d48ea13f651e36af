"""PEFT: which adapters are resident and what they take, and adapters that go leave nothing behind."""

from dataclasses import dataclass

import torch
from peft import PeftModel
from peft.tuners.tuners_utils import BaseTunerLayer
from peft.utils.other import AuxiliaryTrainingWrapper
from torch import nn

from unhand import _floor
from unhand._answer import fields
from unhand._free import Freed
from unhand._native import format_bytes

__all__ = ["Adapter", "adapters", "release", "unload"]


@dataclass(frozen=True, slots=True)
class Adapter:
    """An adapter that is resident in a model."""

    name: str
    """As in `model.load_adapter(…, adapter_name=name)`."""
    requested_bytes: int
    """Bytes of its tensors on GPUs, each storage once; what other adapters share with it is counted for both."""
    n_tensors: int
    """How many tensors it has, on GPUs or not."""
    is_active: bool
    """Whether the model uses it now. Another one takes its memory all the same."""

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields."""
        return fields(self)

    def __str__(self):
        state = "active" if self.is_active else "not active"
        return f"{format_bytes(self.requested_bytes):>10}  {self.name}  ({state}, {self.n_tensors:,} tensors)"


def adapters(model) -> tuple[Adapter, ...]:
    """The adapters of a `PeftModel`, or of a model of transformers with adapters, in the order they were added."""
    active = _active(model)
    found = []
    for name in model.peft_config:
        tensors = _tensors(model, name)
        sizes = {
            tensor.untyped_storage()._cdata: tensor.untyped_storage().nbytes() for tensor in tensors if tensor.is_cuda
        }
        found.append(Adapter(name, sum(sizes.values()), len(tensors), name in active))
    return tuple(found)


def release(model, *names, optimizer=None) -> Freed:
    """Delete adapters and give back their GPU memory, whoever refers to it; without names, all that are not active.

    Do it before the next adapter is loaded: to load another and make it active takes none away. Tensors that a remaining
    adapter shares stay. `optimizer` is one that trained them: their state in it goes, and they are no longer its
    parameters. ValueError for a name that the model does not have, or an adapter that is merged into the weights.
    """
    names = names or tuple(adapter.name for adapter in adapters(model) if not adapter.is_active)
    missing = [name for name in names if name not in model.peft_config]
    if missing:
        raise ValueError(f"the model has no adapter: `{missing[0]}`")
    tensors = [tensor for name in names for tensor in _tensors(model, name)]
    for name in names:
        model.delete_adapter(name)
    return _free_tensors(model, tensors, optimizer)


def unload(model, *, optimizer=None):
    """The base model of a `PeftModel` without any adapter, whose memory goes back; the weights are what they were before."""
    tensors = [tensor for name in model.peft_config for tensor in _tensors(model, name)]
    base = model.unload()
    _free_tensors(base, tensors, optimizer)
    return base


def _free_tensors(model, tensors, optimizer) -> Freed:
    states = _forget(optimizer, tensors) if optimizer is not None else []
    # What is still in the model is a remaining adapter's, or the model's own.
    keep = [*model.parameters(), *model.buffers()]
    return _floor.release(*tensors, *states, keep=keep)


def _tensors(model, name) -> list:
    """The tensors of one adapter: what the layers and wrappers of PEFT have under its name."""
    found = {}
    for module in model.modules():
        if not isinstance(module, (BaseTunerLayer, AuxiliaryTrainingWrapper, PeftModel)):
            continue
        for container in (*module._modules.values(), *vars(module).values()):
            if isinstance(container, (nn.ModuleDict, nn.ParameterDict, dict)) or type(container).__name__ == "BufferDict":
                part = container[name] if name in container else None
                if isinstance(part, nn.Module):
                    found.update((id(tensor), tensor) for tensor in (*part.parameters(), *part.buffers()))
                elif isinstance(part, torch.Tensor):
                    found[id(part)] = part
    return list(found.values())


def _active(model) -> set:
    active = getattr(model, "active_adapters", None)
    active = active() if callable(active) else active
    return set([active] if isinstance(active, str) else active or ())


def _forget(optimizer, tensors) -> list:
    """Take parameters out of an optimizer; returns their state."""
    optimizer = getattr(optimizer, "optimizer", optimizer)
    gone = {id(tensor) for tensor in tensors}
    states = [optimizer.state.pop(tensor) for tensor in tensors if tensor in optimizer.state]
    for group in optimizer.param_groups:
        group["params"] = [tensor for tensor in group["params"] if id(tensor) not in gone]
    return states
