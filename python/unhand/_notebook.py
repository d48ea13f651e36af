"""What IPython keeps of shown values: finds those that hold CUDA tensors and drops them. Imports neither IPython nor torch."""

import builtins
import re
import sys
import types

from unhand import _guard

_UNDERSCORES = ("_", "__", "___")
_NUMBERED = re.compile(r"_\d+")
# A value is looked into this far. What is larger is somebody's whole program, and not the result of a cell.
_MOST_OBJECTS = 100_000
# Everything can be reached through these; what a value holds is not behind them.
_OPAQUE = (types.ModuleType, type, types.FrameType, types.CodeType, str, bytes, int, float)


def running_shell():
    """IPython's shell of this process; `None` where there is none, or IPython was never imported."""
    ipython = sys.modules.get("IPython")
    get_ipython = getattr(ipython, "get_ipython", None)
    return get_ipython() if get_ipython is not None else None


def cell_of(filename):
    """What IPython calls the cell that it compiled as `filename`, as `In[7]`; `None` for a file."""
    compiler = getattr(running_shell(), "compile", None)
    name_of = getattr(compiler, "format_code_name", None)
    try:
        # `("Cell", "In[7]")` since IPython 8 (IPython/core/compilerop.py).
        name = name_of(filename) if name_of is not None else None
        return name[1] if name else None
    except Exception:  # noqa: BLE001
        return None


def drop_shown_values(shell, holds, interpreter_too=False):
    """Drops the shown values for which `holds(value)` is true, wherever the shell keeps them, and returns how many.

    The places (IPython/core/displayhook.py, `update_user_ns`): `Out`, `_1` and so on, `_`, `__`, `___`, each in the
    user's and in the hidden namespace, the display hook, and the last result. `%reset -f out` forgets the hidden one.
    Names that the user gave, `_` among them, stay. `interpreter_too` also drops `_` of the plain interpreter.
    """
    dropped = {}

    def is_unwanted(value):
        if id(value) in dropped:
            return True
        if value is None or not holds(value):
            return False
        dropped[id(value)] = value
        return True

    if shell is not None:
        _drop_from_shell(shell, is_unwanted)
    if interpreter_too and is_unwanted(getattr(builtins, "_", None)):
        # `sys.displayhook` puts it there. Under gettext it is a function, which holds nothing.
        del builtins._
    return len(dropped)


def holds_cuda_tensor(torch, value):
    """Whether a tensor on a CUDA device can be reached from a value, through containers and attributes."""
    return next(_cuda_tensors(torch, value), None) is not None


def holds_only_freed(torch, value):
    """Whether tensors that `unhand.free` freed can be reached from a value, and no CUDA tensor that still has memory."""
    is_freed = None
    for tensor in _cuda_tensors(torch, value):
        is_freed = _guard.is_freed(torch, tensor)
        if not is_freed:
            return False
    return is_freed is True


def _cuda_tensors(torch, value):
    """The tensors on CUDA devices that can be reached from a value."""
    import gc

    seen, waiting = set(), [value]
    while waiting and len(seen) < _MOST_OBJECTS:
        thing = waiting.pop()
        # By the type and not with isinstance: proxies answer that with code of their own.
        if id(thing) in seen or issubclass(type(thing), _OPAQUE):
            continue
        seen.add(id(thing))
        if issubclass(type(thing), torch.Tensor):
            with torch._C.DisableTorchFunctionSubclass():
                is_cuda = thing.device.type == "cuda"
            if is_cuda:
                yield thing
        if type(thing) is types.FunctionType:
            # Not its globals.
            waiting += [thing.__closure__, thing.__defaults__, thing.__kwdefaults__]
        else:
            waiting += gc.get_referents(thing)


def _drop_from_shell(shell, is_unwanted):
    hook = getattr(shell, "displayhook", None)
    visible = getattr(shell, "user_ns", None) or {}
    hidden = getattr(shell, "user_ns_hidden", None) or {}
    history = visible.get("_oh")
    if isinstance(history, dict):
        for number in [number for number, value in history.items() if is_unwanted(value)]:
            del history[number]
    result = getattr(shell, "last_execution_result", None)
    if result is not None and is_unwanted(getattr(result, "result", None)):
        shell.last_execution_result = None
    for name in _UNDERSCORES:
        # The user's `_` is IPython's as long as it is what the hook last put there.
        own = getattr(hook, name, None)
        shown, hidden_value = visible.get(name), hidden.get(name)
        if shown is not None and (shown is own or shown is hidden_value) and is_unwanted(shown):
            visible[name] = ""
        if hidden_value is not None and is_unwanted(hidden_value):
            hidden[name] = ""
        if own is not None and is_unwanted(own):
            setattr(hook, name, "")
    for name in [name for name in hidden if _NUMBERED.fullmatch(name)]:
        value = hidden[name]
        if is_unwanted(value):
            del hidden[name]
            if visible.get(name) is value:
                del visible[name]
