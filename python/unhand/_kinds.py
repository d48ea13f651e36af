"""What sort of holder a path is, and the one sentence that says what to do about it."""

import re

from unhand import _frames, _heap

_HISTORY = re.compile(r"^__main__\.(Out(\[.*\])?|_oh|_dh|_+|_\d+|_i+\d*)$")
_HISTORY_OF_SHELL = (".user_ns_hidden", ".displayhook", ".last_execution_result")
_HOOKS = re.compile(r"hooks(_with_kwargs|_always_called)?$")

RANK = {
    "parameters": 0,
    "optimizer state": 1,
    "gradients": 2,
    "attribute": 3,
    "container": 4,
    "global": 5,
    "frame": 6,
    "class attribute": 7,
    "generator": 8,
    "task": 9,
    "cache": 10,
    "closure": 11,
    "hook": 12,
    "autograd graph": 13,
    "thread": 14,
    "notebook history": 15,
    "traceback": 16,
    "native": 17,
}
"""Which of several paths to the same bytes names them best: the smaller."""


def _is(thing, name) -> bool:
    return any(kind.__name__ == name for kind in type.__dict__["__mro__"].__get__(type(thing)))


def kind_of(view: "_heap.View", anchor, child, start, steps) -> str:
    """The kind of a path: the most telling step on it decides."""
    roles = [step.role for step in steps]
    first = view.object(child)
    owner = view.object(anchor) if anchor != _heap.ROOT else None
    is_frame = isinstance(owner, _frames.Running)
    things = [first, *(step.target for step in steps)]
    if "traceback" in roles or any(isinstance(thing, BaseException) for thing in things[:-1]):
        return "traceback"
    if start.startswith(("sys.last_", "a traceback")):
        return "traceback"
    if _HISTORY.match(start) or anchor == view.shell and any(step.label in _HISTORY_OF_SHELL for step in steps[:1]):
        return "notebook history"
    if "cache" in roles:
        return "cache"
    if any(step.role == "attribute" and _HOOKS.search(step.label) for step in steps):
        return "hook"
    if any(_is(thing, "Task") or _is(thing, "Future") for thing in things) or "coroutine" in roles:
        return "task"
    if "generator" in roles or "async generator" in roles:
        return "generator"
    if "autograd" in roles:
        return "autograd graph"
    if "gradient" in roles:
        return "gradients"
    for step, following in zip(steps, steps[1:]):
        # The keys of the state are the parameters, which are not the optimizer's.
        if step.label == ".state" and _is(step.owner, "Optimizer") and following.role != "as key":
            return "optimizer state"
    if "parameter" in roles or "buffer" in roles:
        return "parameters"
    if "closure" in roles or "default" in roles or "argument" in roles:
        return "closure"
    if is_frame and not owner.is_this_thread:
        return "thread"
    if "class attribute" in roles:
        return "class attribute"
    if any(_is(step.owner, "Optimizer") for step in steps):
        # The parameters themselves, as the optimizer lists them.
        return "parameters"
    if any(role in ("index", "key", "element") for role in roles):
        return "container"
    if "attribute" in roles:
        return "attribute"
    if anchor == _heap.ROOT:
        return "native"
    return "frame" if is_frame else "global"


def advice(kind, path, n_paths, name, is_alone) -> str:
    """What to do, in one sentence. `name` is what to pass to `unhand.free`."""
    if kind == "traceback":
        return "A traceback keeps the locals of the calls that failed: unhand.free() clears them."
    if kind == "notebook history":
        return "The notebook keeps the values that it showed: %unhand free, or unhand.free(notebook_history=True), forgets them."
    if kind == "dead cycle":
        return "Nothing refers to it but itself: a pass of the collector frees it, unhand.free() makes one."
    if kind == "workspace":
        return "Libraries keep it for their next call: unhand.free() releases it."
    if kind == "pending":
        return "It was freed while another stream used it, and comes back when that stream has got so far."
    if kind == "graph pool":
        return "The pool gives it back when its CUDA graph or MemPool is gone: drop the graph and what it returned."
    if kind == "native":
        return "No Python name leads to it: native code or a running expression has it."
    if not is_alone and n_paths > 1:
        return (
            f"{n_paths} references hold it, and cutting one of them frees nothing: "
            f"unhand.free({name}) releases the memory whoever refers to it."
        )
    if kind == "autograd graph":
        return f"A graph hangs on it: keep loss.item() or loss.detach() instead, or unhand.free({name})."
    if kind == "optimizer state":
        return f"The optimizer keeps its state for each parameter: drop it, or unhand.free({name})."
    if kind == "gradients":
        return "Gradients stay until optimizer.zero_grad(set_to_none=True)."
    if kind == "hook":
        return "A hook keeps it: remove the hook through the handle that registering it returned."
    if kind == "cache" and path.startswith("the autocast cache"):
        return "It goes when the autocast region ends: leave it, or torch.clear_autocast_cache()."
    if kind == "cache":
        return "A cache keeps the arguments and results of its calls: call its cache_clear()."
    if kind == "closure":
        return "A function keeps what it closes over, its defaults or its arguments: drop the function."
    if kind == "generator":
        return "A suspended generator keeps its locals: close() it, or run it to its end."
    if kind == "task":
        return "A task that has not ended keeps its locals: await or cancel it."
    if kind == "thread":
        return "A local variable of another running thread: end that function, or del the name there."
    if kind == "class attribute":
        return "It hangs on the class and lives as long as the class: set the attribute to None."
    if kind == "frame":
        return f"A local variable of a function that is running: del {name} there, or unhand.free({name})."
    return f"unhand.free({name}) gives it back; del alone does if nothing else refers to it."
