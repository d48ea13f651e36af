"""diffusers: a pipeline goes and what another one shares stays; no second pipeline is loaded beside a first; offload ends."""

import gc

from diffusers import DiffusionPipeline

from unhand import _floor
from unhand._free import Freed
from unhand.integrations import _session
from unhand.integrations._session import as_list
from unhand.integrations.accelerate import offload, offloading

__all__ = ["offload", "offloading", "release", "session", "switch"]


def release(pipe, *, keep=()) -> Freed:
    """Give back the GPU memory of a pipeline's components, whatever names refer to them, and take their offload hooks off.

    A component that another living pipeline has too stays, with its hooks, and so does what belongs to `keep`, an object or
    a list of them. A use of a released component raises `unhand.FreedError`.
    """
    kept = [*_shared(pipe), *as_list(keep)]
    _remove_hooks(pipe, kept)
    return _floor.release(pipe, keep=kept)


def session(pipe, *, keep=()) -> _session.Session:
    """`with session(pipe): images = pipe(…)` releases on the way out, also after an error or an aborted call."""

    def give_back(floor, pipe):
        kept = [*_shared(pipe), *as_list(keep)]
        _remove_hooks(pipe, kept)
        return _floor.back_to(floor, type(pipe).__name__, pipe, keep=kept, spares=False)

    return _session.Session(type(pipe).__name__, give_back, pipe)


def switch(pipe, make, *, keep=()):
    """Release a pipeline, then make the next one: `pipe = switch(pipe, lambda: Other.from_pretrained(…).to("cuda"))`.

    In this order, so that the two are never on the GPU together. Components that the next pipeline takes over are named in
    `keep`. `pipe` may be None, for the first one. Returns what `make` returns.
    """
    if pipe is not None:
        release(pipe, keep=keep)
    pipe = None
    return make()


def _shared(pipe) -> list:
    """The components of a pipeline that another one has too."""
    # A pipeline in a dead cycle shares nothing with anybody.
    gc.collect()
    mine = {id(part): part for part in pipe.components.values() if part is not None}
    shared = {}
    # By its class and not with isinstance, which may run code of the object's.
    for thing in gc.get_objects():
        if thing is not pipe and issubclass(type(thing), DiffusionPipeline):
            for part in vars(thing).values():
                if id(part) in mine:
                    shared[id(part)] = part
    return list(shared.values())


def _remove_hooks(pipe, kept):
    """Take the hooks off the components that go, and the references to those off the hooks of components that stay."""
    from accelerate.hooks import CpuOffload, SequentialHook, remove_hook_from_module
    from torch import nn

    staying = {id(module) for part in kept if isinstance(part, nn.Module) for module in part.modules()}
    parts = [part for part in pipe.components.values() if isinstance(part, nn.Module)]
    going = [part for part in parts if id(part) not in staying]
    for part in going:
        for module in part.modules():
            if id(module) in staying:
                continue
            remove_hook_from_module(module)
            registry = getattr(module, "_diffusers_hook", None)
            for name in list(getattr(registry, "hooks", None) or ()):
                registry.remove_hook(name, recurse=False)
    gone = {id(part) for part in going}
    for part in parts:
        hook = getattr(part, "_hf_hook", None)
        for each in hook.hooks if isinstance(hook, SequentialHook) else [hook]:
            if isinstance(each, CpuOffload) and id(getattr(each.prev_module_hook, "model", None)) in gone:
                # The hook of a component offloads the one before it, which is not there any more.
                each.prev_module_hook = None
    if getattr(pipe, "_all_hooks", None):
        pipe._all_hooks = []
