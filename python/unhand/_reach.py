"""What a few objects keep, without a look at the whole heap: for return values, batches and the like."""

import gc
import sys
import types

from unhand import _autograd

_LIMIT = 3000
"""After so many objects the whole heap is the better question."""

_CLOSED = (type, types.ModuleType, types.FrameType, types.CodeType, types.BuiltinFunctionType)
_PLAIN = (str, bytes, int, float, complex, bool, type(None))


def storages(things) -> list:
    """The addresses of the CUDA storages that objects lead to, some perhaps left out where there is too much to see.

    Goes through containers, attributes, closures, gradients and autograd graphs, and stops at modules and classes. Takes
    some microseconds for each object; keeps none, unpacks no saved tensor.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    found, seen, graphs = [], {}, _autograd.Graph()
    waiting = list(things)
    with torch._C.DisableTorchFunctionSubclass():
        while waiting and len(seen) < _LIMIT:
            thing = waiting.pop()
            kind = type(thing)
            if kind in _PLAIN or id(thing) in seen or issubclass(kind, _CLOSED):
                continue
            # Kept, so that its id stays its own.
            seen[id(thing)] = thing
            if issubclass(kind, types.FunctionType):
                waiting += [thing.__closure__, thing.__defaults__, thing.__kwdefaults__, thing.__dict__]
                continue
            if issubclass(kind, (torch.Tensor, torch.UntypedStorage)):
                _read(torch, thing, found, waiting, graphs)
            if kind is not dict or not _is_namespace(thing):
                waiting += gc.get_referents(thing)
    return found


def _read(torch, thing, found, waiting, graphs):
    try:
        storage = thing if issubclass(type(thing), torch.UntypedStorage) else thing.untyped_storage()
        if storage.device.type == "cuda":
            found.append((storage.device.index, storage.data_ptr()))
    except Exception:
        # Sparse, a wrapper, or freed. Its parts are attributes, or too rare to be quick about.
        pass
    if not issubclass(type(thing), torch.Tensor):
        return
    waiting += [_autograd.gradient(thing), _autograd.base(thing)]
    function = _autograd.grad_fn(thing)
    if function is not None and len(graphs.steps) < _LIMIT:
        n_known = len(graphs.steps)
        graphs.add(function)
        for step in list(graphs.steps.values())[n_known:]:
            waiting += [step.variable, *(saved for _, saved in step.saved)]


def _is_namespace(thing) -> bool:
    name = thing.get("__name__")
    return type(name) is str and getattr(sys.modules.get(name), "__dict__", None) is thing
