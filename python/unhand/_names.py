"""Names for the steps of a path through the heap, as a person would write them: `trainer.history[3].grad_fn`.

A step is found out only when a path is shown. What cannot be found out is named by the type it leads to.
"""

import functools
import gc
import inspect
import types
from collections import deque
from dataclasses import dataclass

from unhand import _frames, _heap

_MAX_KEY = 40
_MODULE_DICTS = ("_parameters", "_buffers", "_modules")
_TENSOR_SLOTS = ("_backward_hooks", "_post_accumulate_grad_hooks")
_lru_cache = type(functools.lru_cache(lambda: None))


@dataclass(frozen=True, slots=True)
class Step:
    """One reference on a path: what it is called and what it leads to."""

    label: str
    """What follows the name so far, with its dot or bracket."""
    role: str
    """What sort of reference it is: attribute, key, index, local, closure, default, hook, …"""
    owner: object
    target: object


class Namer:
    """Names paths of one view."""

    def __init__(self, view: "_heap.View"):
        self.view = view

    def steps(self, anchor, path) -> list[Step]:
        """The steps of a path that begins at an owner's child, with what lies between two names folded away."""
        if anchor != _heap.ROOT and (anchor == self.view.shell or isinstance(self.view.object(anchor), type)):
            # A class is named by itself, and so is IPython's shell; their attributes are one step further.
            path = [anchor, *path]
        steps = []
        at = 0
        while at + 1 < len(path):
            label, role, width = self._step(path, at)
            if role != "none":
                target = self.view.object(path[at + width])
                steps.append(Step(label, role, self.view.object(path[at]), target))
            at += width
        return _fold(steps)

    def starts(self, anchor, child) -> list[str]:
        """What an owner, the reference from `anchor` to `child`, is called: all its names, one at least."""
        thing = self.view.object(child)
        if anchor == _heap.ROOT:
            return [self.alone(thing)]
        name = self.view.anchors[anchor]
        owner = self.view.object(anchor)
        if isinstance(owner, _frames.Running):
            locals_ = [word for word, value in owner.values if value is thing]
            return [f"{name} local `{word}`" for word in locals_ or ["?"]]
        if type(owner) is dict:
            if anchor == self.view.shown_values:
                return [f"{name}[{number!r}]" for number in _keys_of(owner, thing)] or [name]
            return [f"{name}.{word}" for word in _keys_of(owner, thing)] or [name]
        return [name]

    def alone(self, thing) -> str:
        """What an object without a named owner is called."""
        if inspect.istraceback(thing):
            code = thing.tb_frame.f_code
            return f"a traceback at {_frames.place(code, thing.tb_lineno)} {code.co_name}()"
        if isinstance(thing, BaseException):
            return f"an exception in flight: {_type_name(thing)}"
        if isinstance(thing, types.FrameType):
            return f"{_frames.place(thing.f_code, thing.f_lineno)} {thing.f_code.co_name}()"
        return f"({_type_name(thing)} held by native code or a running expression)"

    def _step(self, path, at):
        """(label, role, how many nodes further) of the step that begins at a place of the path."""
        view = self.view
        start, end = path[at], path[at + 1]
        added = view.names.get((start, end))
        if added == "":
            return "", "none", 1
        if added is not None:
            return added, "autograd" if added.startswith((".grad_fn", ".next", "._saved", ".saved")) else (
                "gradient" if added == ".grad" else "attribute"
            ), 1
        owner, target = view.object(start), view.object(end)
        if view.is_added(end) and not isinstance(target, (_frames.Running,)):
            # From a tensor to its storage, from a storage to its block: not a name.
            return "", "none", 1
        further = view.object(path[at + 2]) if at + 2 < len(path) else None
        name = _names_of(owner, target, further)
        if name is not None:
            return name
        return f".<{_type_name(target)}>", "unknown", 1


def _names_of(owner, target, further):
    """The step from `owner` to `target`, or over `target` to `further` where `target` is only a container inside."""
    if isinstance(owner, dict):
        named = _of_dict(owner, target)
        if named is not None:
            return named
    if isinstance(owner, (list, tuple, deque)):
        named = _field_of(owner, target)
        if named is not None:
            return named
        index = next((index for index, item in enumerate(list(owner)) if item is target), None)
        if index is not None:
            return f"[{index}]", "index", 1
    if isinstance(owner, (set, frozenset)):
        return "{…}", "element", 1
    if isinstance(owner, types.FunctionType):
        return _of_function(owner, target, further)
    if isinstance(owner, types.MethodType):
        return (".__self__", "bound method", 1) if owner.__self__ is target else (".__func__", "attribute", 1)
    if isinstance(owner, types.CellType):
        return "", "none", 1
    if isinstance(owner, functools.partial):
        return _of_partial(owner, target, further)
    if isinstance(owner, _lru_cache):
        return _of_cache(owner, target)
    if _type_name(owner) == "_lru_list_elem":
        return "", "none", 1
    if isinstance(owner, types.TracebackType):
        if owner.tb_frame is target:
            code = owner.tb_frame.f_code
            return f" at {_frames.place(code, owner.tb_lineno)} {code.co_name}()", "traceback", 1
        return "", "none", 1
    if isinstance(owner, types.FrameType):
        if owner.f_back is target:
            return ".f_back", "frame", 1
        if type(target) is dict and further is not None and _is_left_by_locals(owner, target):
            return f" local `{_key_of(target, further)}`", "frame", 2
        return f" local `{_local_of(owner, owner, target)}`", "frame", 1
    if isinstance(owner, (types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType)):
        return _of_generator(owner, target, further)
    if isinstance(owner, BaseException):
        for name in ("__traceback__", "__context__", "__cause__"):
            if getattr(owner, name, None) is target:
                return f".{name}", "traceback", 1
    if isinstance(owner, type):
        return _of_class(owner, target, further)
    return _of_instance(owner, target, further)


def _keys_of(mapping, value) -> list:
    """The keys of a value in a dictionary, by identity."""
    try:
        return [key for key, found in list(dict.items(mapping)) if found is value]
    except RuntimeError:
        # Another thread changed it just now.
        return []


def _key_of(mapping, value):
    """The first key of a value in a dictionary, by identity."""
    return next(iter(_keys_of(mapping, value)), None)


def _fold(steps) -> list[Step]:
    """The same steps, with `._modules['fc']` as `.fc` and a chain of graph nodes as one step."""
    folded: list[Step] = []
    for step in steps:
        last = folded[-1] if folded else None
        if last is not None and last.role == "module" and step.role == "key":
            name = _key_of(last.target, step.target)
            label = f"[{name}]" if str(name).isdigit() else f".{name}"
            role = {"._modules": "submodule", "._parameters": "parameter", "._buffers": "buffer"}[last.label]
            folded[-1] = Step(label, role, last.owner, step.target)
        elif last is not None and step.label.startswith(".next_functions") and last.role == "autograd":
            folded[-1] = Step(last.label.removesuffix(" …") + " …", "autograd", last.owner, step.target)
        else:
            folded.append(step)
    return folded


def _of_dict(owner, target):
    keys = _keys_of(owner, target)
    if keys:
        return f"[{_short(keys[0])}]", "key", 1
    try:
        is_key = any(key is target for key in list(dict.keys(owner)))
    except RuntimeError:
        is_key = False
    return (f"[key {_short(target)}]", "as key", 1) if is_key else None


def _field_of(owner, target):
    """A field of a named tuple."""
    for name in getattr(type(owner), "_fields", ()):
        if getattr(owner, name, None) is target:
            return f".{name}", "attribute", 1
    return None


def _of_function(function, target, further):
    closure = function.__closure__
    if target is closure and further is not None:
        for name, cell in zip(function.__code__.co_freevars, closure):
            if cell is further:
                return f" (closure `{name}`)", "closure", 2
        return " (closure)", "closure", 1
    if target is function.__defaults__ and further is not None:
        code = function.__code__
        names = code.co_varnames[: code.co_argcount][-len(function.__defaults__) :]
        for name, value in zip(names, function.__defaults__):
            if value is further:
                return f" (default of `{name}`)", "default", 2
    if target is function.__kwdefaults__ and further is not None:
        name = _key_of(function.__kwdefaults__, further)
        return f" (default of `{name}`)", "default", 2
    if target is function.__dict__ and further is not None:
        name = _key_of(function.__dict__, further)
        return f".{name}", "attribute", 2
    if target is function.__globals__:
        return ".__globals__", "attribute", 1
    return None


def _of_partial(partial, target, further):
    if target is partial.func:
        return ".func", "attribute", 1
    if target is partial.args and further is not None:
        index = next((index for index, item in enumerate(partial.args) if item is further), "?")
        return f".args[{index}]", "argument", 2
    if further is not None and type(target) is dict:
        name = _key_of(target, further)
        if partial.keywords.get(name) is further:
            return f".keywords[{name!r}]", "argument", 2
    return None


def _of_cache(cache, target):
    if target is getattr(cache, "__wrapped__", None):
        return ".__wrapped__", "attribute", 1
    return "[cached call]", "cache", 1


def _of_generator(generator, target, further):
    if isinstance(generator, types.CoroutineType):
        frame, word = generator.cr_frame, "coroutine"
        waits_for = generator.cr_await
    elif isinstance(generator, types.AsyncGeneratorType):
        frame, word = generator.ag_frame, "async generator"
        waits_for = generator.ag_await
    else:
        frame, word = generator.gi_frame, "generator"
        waits_for = generator.gi_yieldfrom
    if target is waits_for:
        return ".<waits for>", word, 1
    if frame is None:
        return " local", word, 1
    if type(target) is dict and further is not None and _is_left_by_locals(frame, target):
        return f" local `{_key_of(target, further)}`", word, 2
    return f" local `{_local_of(generator, frame, target)}`", word, 1


def _is_left_by_locals(frame, names) -> bool:
    """Whether a dictionary is what `f_locals` left in a frame when somebody looked at it (up to Python 3.12).

    Told by its keys: to look at `f_locals` again would bring it up to date, and so change what it holds.
    """
    code = frame.f_code
    return bool(names) and set(names) <= {*code.co_varnames, *code.co_cellvars, *code.co_freevars}


def _local_of(owner, frame, value):
    """The name of a local variable of a frame that does not run, by identity. `owner` is the frame, or what it belongs to."""
    for left in gc.get_referents(owner):
        if type(left) is dict and _is_left_by_locals(frame, left):
            # The frame's own word would bring this up to date, and let go of what only it keeps.
            return _key_of(left, value) or "?"
    for name, found in _frames.local_values(frame):
        if found is value:
            return name
    return "?"


def _of_class(kind, target, further):
    if type(target) is dict and further is not None:
        name = _key_of(target, further)
        if name is not None and kind.__dict__.get(name) is further:
            return f".{name}", "class attribute", 2
    return None


def _of_instance(owner, target, further):
    names = _instance_dict(owner)
    if target is type(owner):
        return ".__class__", "class", 1
    if names is target and further is None:
        return "", "none", 1
    if names is not None:
        width = 2 if target is names and further is not None else 1
        name = _key_of(names, further if width == 2 else target)
        if name is not None:
            return f".{name}", "module" if name in _MODULE_DICTS else "attribute", width
    for name in _TENSOR_SLOTS:
        # Attributes of tensors that are written in C.
        if type.__dict__["__name__"].__get__(type(target)) == "OrderedDict" and _plain(owner, name) is target:
            return f".{name}", "attribute", 1
    for kind in type.__dict__["__mro__"].__get__(type(owner)):
        slots = kind.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            try:
                # Straight to the slot: `getattr` could run a property.
                if kind.__dict__[name].__get__(owner) is target:
                    return f".{name}", "attribute", 1
            except Exception:
                continue
        for name, member in list(kind.__dict__.items()):
            if isinstance(member, types.MemberDescriptorType):
                try:
                    if member.__get__(owner) is target:
                        return f".{name}", "attribute", 1
                except Exception:
                    continue
    return None


def _plain(owner, name):
    try:
        return getattr(owner, name, None)
    except Exception:
        return None


def _instance_dict(owner):
    try:
        names = object.__getattribute__(owner, "__dict__")
    except Exception:
        return None
    return names if type(names) is dict else None


def _short(thing) -> str:
    """A key in few characters, without running anybody's `__repr__`."""
    if thing is None or type(thing) in (str, bytes, int, float, bool):
        text = repr(thing)
        return text if len(text) <= _MAX_KEY else text[: _MAX_KEY - 1] + "…"
    if type(thing) is tuple and len(thing) <= 4:
        return "(" + ", ".join(map(_short, thing)) + ")"
    return f"<{_type_name(thing)}>"


def _type_name(thing) -> str:
    return type.__dict__["__name__"].__get__(type(thing))
