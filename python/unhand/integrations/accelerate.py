"""accelerate: what an `Accelerator` prepared goes back to the driver, and offload hooks offload to the last link."""

import torch
from accelerate.hooks import AlignDevicesHook, CpuOffload, SequentialHook, UserCpuOffloadHook

from unhand import _floor
from unhand._free import Freed
from unhand.integrations._session import Session, as_list

__all__ = ["offload", "offloading", "release", "session"]

_LISTS = ("_models", "_optimizers", "_schedulers", "_custom_objects")


def release(accelerator, *objects, keep=()) -> Freed:
    """Give back the GPU memory of all that an `Accelerator` prepared, and of `objects`, whatever names refer to it.

    The lists inside the accelerator are emptied, so it can prepare the next model. Data loaders are only forgotten: their
    datasets are the user's. `keep` is an object, or a list of them, whose memory stays. Nothing depends on the caller to
    bind what it returns, as with `accelerator.free_memory(model, …)`: the bytes are with the driver when this returns.
    """
    _end_engine(accelerator)
    prepared = [thing for name in _LISTS for thing in getattr(accelerator, name, [])]
    freed = _floor.release(*objects, *prepared, keep=keep)
    forget(accelerator, keep, objects)
    return freed


def session(accelerator, *objects, keep=()) -> Session:
    """`with session(accelerator): …` releases on the way out, also after an error."""

    def give_back(floor, accelerator, *objects):
        _end_engine(accelerator)
        prepared = [thing for name in _LISTS for thing in getattr(accelerator, name, [])]
        landing = _floor.back_to(floor, "accelerate", *objects, *prepared, keep=keep, spares=False)
        forget(accelerator, keep, objects)
        return landing

    return Session("accelerate", give_back, accelerator, *objects)


def forget(accelerator, keep=(), objects=()):
    """Empty the lists of an accelerator but for what is in `keep`, and the state of the optimizers that go."""
    kept = {id(thing) for thing in as_list(keep)}
    for thing in [*getattr(accelerator, "_optimizers", []), *objects]:
        forget_state(thing, kept)
    for name in (*_LISTS, "_dataloaders"):
        things = getattr(accelerator, name, None)
        if isinstance(things, list):
            things[:] = [thing for thing in things if id(thing) in kept]
    accelerator.step = 0


def forget_state(optimizer, kept=frozenset()):
    """Empty the state of an optimizer whose memory was given back: a step of a kept model begins a new one."""
    inner = getattr(optimizer, "optimizer", optimizer)
    if isinstance(inner, torch.optim.Optimizer) and not {id(inner), id(optimizer)} & set(kept):
        inner.state.clear()


def _end_engine(accelerator):
    """DeepSpeed's engine hooks the parameters and keeps flat copies of them: it has to let go itself."""
    wrapper = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if wrapper is not None:
        wrapper.engine.destroy()
        accelerator.deepspeed_engine_wrapped = None


class offloading:
    """`with offloading(hook_1, hook_2): …` offloads all of them on the way out, also after an error.

    A hook of `cpu_offload_with_hook` offloads the model before it. The last one stays on the GPU, and after an error so
    does whichever was there. Takes hooks, models with hooks, and anything with a `components` dictionary.
    """

    def __init__(self, *things):
        self.things = things
        self.freed = None

    def __enter__(self):
        return self

    def __exit__(self, kind, error, trace):
        self.freed = offload(*self.things)
        return False


def offload(*things) -> Freed:
    """Bring models with offload hooks back to where their hooks keep them, and the memory to the driver.

    `things` are hooks that `cpu_offload_with_hook` returned, models, or pipelines. Without offload hooks nothing is moved.
    """
    for thing in things:
        if isinstance(thing, UserCpuOffloadHook):
            thing.offload()
            continue
        components = getattr(thing, "components", None)
        models = components.values() if isinstance(components, dict) else [thing]
        for model in models:
            if isinstance(model, torch.nn.Module):
                for module in model.modules():
                    _offload_module(module)
    return _floor.release()


def _offload_module(module):
    hook = getattr(module, "_hf_hook", None)
    for each in hook.hooks if isinstance(hook, SequentialHook) else [hook]:
        if isinstance(each, CpuOffload):
            each.init_hook(module)
        elif isinstance(each, AlignDevicesHook) and each.offload and _is_loaded(module):
            # What it does after `forward`, which an error left out.
            each.post_forward(module, None)


def _is_loaded(module) -> bool:
    tensors = module._parameters.values()
    return any(tensor is not None and tensor.device.type not in ("meta", "cpu") for tensor in tensors)
