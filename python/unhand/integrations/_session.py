"""What the integrations share: a run that ends at its floor, and the figures that they log."""

import functools
import logging
import sys
import threading
import weakref

from unhand import _allocator, _floor, _log_dict, _oom, _see, _tracebacks

logger = logging.getLogger("unhand")

returned: dict = {}
"""Name of a run to what it returned, while it is looked at: so that memory in there has a name."""

_open: "weakref.WeakSet[Session]" = weakref.WeakSet()
"""The sessions that are open now, in all threads."""


class Session:
    """A run between `with` and its end, after which `landing` says what came back and who holds the rest.

    On the way out, after an exception too, the memory goes back that `give_back` says: a function of the floor, and of the
    things that the session is about, that returns a `Landing`. Things that are gone by then are not kept alive: only the
    floor is passed then. An exception goes on; the locals of its calls are cleared, because they hold the batch that
    failed. After an out-of-memory error `report` is the report of that moment.

    What another session allocates meanwhile, in a thread of its own, cannot be told from this one's: then `is_alone` is
    false, and nothing is said of what is left.
    """

    def __init__(self, name, give_back, *things):
        self.name = name
        self._things = [_weakly(thing) for thing in things]
        self.landing = None
        self.report = None
        self.is_alone = True
        self._give_back = give_back
        self._floor = None

    def __enter__(self):
        self._floor = _floor.floor()
        # One inside another, in the same thread, ends before it and leaves nothing; beside it is another thread's.
        self._thread = threading.get_ident()
        for other in list(_open):
            if other._thread != self._thread:
                other.is_alone = self.is_alone = False
        _open.add(self)
        return self

    def __exit__(self, kind, error, trace):
        self.report = report_out_of_memory(self.name, error)
        if error is not None:
            _tracebacks.clear_locals(error)
        kind = error = trace = None  # noqa: F841
        give_back, floor = self._give_back, self._floor
        self._give_back = self._floor = None
        _open.discard(self)
        things = [thing() for thing in self._things]
        self._things = []
        self.landing = _floor.back_to(floor, self.name) if None in things else give_back(floor, *things)
        if self.landing.left_bytes and self.is_alone:
            logger.warning("%s", self.landing)
        return False


def _weakly(thing):
    """A function that returns a thing if it is there, and keeps it there only if Python has no other way."""
    try:
        return weakref.ref(thing)
    except TypeError:
        return lambda: thing


def report_out_of_memory(name, error):
    """The report of this moment, logged, if an exception says that memory ran out; None for another."""
    if not isinstance(error, Exception) or not _oom.is_out_of_memory(error):
        return None
    report = _see.report(limit=8)
    logger.warning("%s ran out of memory\n%s", name, report)
    return report


def as_list(keep) -> list:
    """`keep` as the integrations take it, one object or a list of them, as a list of those that are not None."""
    return [thing for thing in (keep if isinstance(keep, (list, tuple)) else [keep]) if thing is not None]


def run(name, function, args=(), kwargs=None, everything=False, keep=()):
    """Call a function that leaves nothing behind; returns what it returned and the `Landing`.

    Single numbers on a GPU in what it returns (the loss, with its graph) become Python's. Other memory in there stays and
    is named.
    """
    session = Session(name, lambda floor: _floor.back_to(floor, name, keep=keep, everything=everything and session.is_alone))
    try:
        with session:
            returned[name] = plain(function(*args, **(kwargs or {})))
        return returned[name], session.landing
    finally:
        returned.pop(name, None)


def plain(value):
    """The same with tensors of one element as numbers; dictionaries, lists and tuples are gone through."""
    torch = sys.modules.get("torch")
    if torch is None:
        return value
    if isinstance(value, torch.Tensor):
        return value.item() if value.numel() == 1 else value
    if type(value) is dict:
        return {key: plain(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(plain(item) for item in value)
    return value


def wrapped(function, call):
    """A function that `call(function, args, kwargs)` runs, with the name and the signature of the other."""

    @functools.wraps(function)
    def through(*args, **kwargs):
        return call(function, args, kwargs)

    return through


def figures(prefix="gpu_memory/") -> dict:
    """What the integrations log: `unhand.log_dict()` as floats, by device where there is more than one."""
    devices = _allocator.devices()
    found = {}
    for device in devices:
        found |= _log_dict.log_dict(device, f"{prefix}cuda{device}/" if len(devices) > 1 else prefix)
    return {name: float(value) for name, value in found.items()}
