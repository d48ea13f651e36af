"""See what holds your GPU memory, make it let go, keep it free.

    import unhand

    unhand.report()                 # where every byte is, and who holds it
    unhand.holders(model)           # every reference that keeps it alive
    unhand.free(model, optimizer)   # their memory goes back to the driver
    unhand.free()                   # what nobody meant to keep: tracebacks, dead cycles, workspaces, caches
    unhand.compact()                # no restart for fragmentation
    unhand.batches(data, size)      # pieces that shrink when memory runs out, and grow back
    with unhand.scope("eval") as s: ...         # what was allocated inside and outlives it
    for batch in unhand.watch(loader): ...      # a leak is named while the loop runs

Importing this package imports neither torch nor IPython, starts nothing and touches no GPU.
"""

import importlib

_PLACES = {
    "report": "_see",
    "Report": "_see",
    "holders": "_see",
    "Holder": "_holders",
    "ladder": "_ladder",
    "Ladder": "_ladder",
    "free": "_free",
    "Freed": "_free",
    "compact": "_compact",
    "Compacted": "_compact",
    "on_oom": "_on_oom",
    "Recorder": "_on_oom",
    "Recording": "_recording",
    "batches": "_batches",
    "adaptive": "_adaptive",
    "accumulate": "_accumulate",
    "prefetch": "_prefetch",
    "is_out_of_memory": "_oom",
    "watch": "_watch",
    "watching": "_watch",
    "Watch": "_watch",
    "Verdict": "_verdict",
    "scope": "_scope",
    "Scope": "_scope",
    "ScopeResult": "_scope_answer",
    "log_dict": "_log_dict",
    "LeakError": "errors",
    "Error": "errors",
    "FreedError": "errors",
    "CaptureError": "errors",
    "StandinError": "errors",
    # `%load_ext unhand` looks for these two.
    "load_ipython_extension": "_ipython",
    "unload_ipython_extension": "_ipython",
}

__all__ = [name for name in _PLACES if not name.endswith("ipython_extension")]


def __getattr__(name):
    place = _PLACES.get(name)
    if place is None:
        raise AttributeError(f"module `unhand` has no attribute `{name}`")
    value = getattr(importlib.import_module(f"unhand.{place}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted([*globals(), *_PLACES])
