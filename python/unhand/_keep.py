"""What a scope was told to keep: held weakly until its end, so that telling it prolongs no life."""

import functools
import os
import sys
import types
import weakref

from unhand import _frames, _survivors

_CALLED = (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
_CONTAINERS = (list, dict, set, frozenset, tuple)
_LIMIT = 500


class Keep:
    """Things, names of things, and functions that return things: those that may outlive a scope."""

    def __init__(self, declared=()):
        self.names: list[str] = []
        self.functions: list = []
        # Containers cannot be referred to weakly, and are the caller's own.
        self.strong: list = []
        self.weak: list = []
        self.storages: list = []
        self._prune_at = 64
        if isinstance(declared, tuple):
            for thing in declared:
                self.add(thing)
        else:
            self.add(declared)
            if isinstance(declared, (list, set, frozenset)):
                for thing in declared:
                    if isinstance(thing, (str, *_CALLED)):
                        self.add(thing)

    def add(self, thing):
        """Declare one more: a name as text, a function without arguments, or any object."""
        if isinstance(thing, str):
            self.names.append(thing)
        elif isinstance(thing, _CALLED):
            self.functions.append(thing)
        elif not self._add_tensor(thing):
            try:
                self.weak.append(weakref.ref(thing))
            except TypeError:
                self.strong.append(thing)

    def add_passed(self, thing):
        """Something that was yielded: the consumer has it now, and may let go of it, so that nothing of it is held."""
        waiting, seen = [thing], 0
        while waiting and seen < _LIMIT:
            thing = waiting.pop()
            seen += 1
            if isinstance(thing, dict):
                waiting += thing.values()
            elif isinstance(thing, _CONTAINERS):
                waiting += thing
            elif not self._add_tensor(thing) and not isinstance(thing, (str, bytes, int, float, type(None))):
                waiting += getattr(thing, "__dict__", {}).values()
                try:
                    self.weak.append(weakref.ref(thing))
                except TypeError:
                    continue
        if len(self.weak) + len(self.storages) > self._prune_at:
            self.weak = [reference for reference in self.weak if reference() is not None]
            self.storages = [storage for storage in self.storages if not storage.expired()]
            self._prune_at = 2 * (len(self.weak) + len(self.storages)) + 64

    def _add_tensor(self, thing) -> bool:
        torch = sys.modules.get("torch")
        if torch is None or not issubclass(type(thing), torch.Tensor):
            return False
        # The storage too: `keep(x[0])` is about memory, and the view dies at once.
        storage = _survivors.storage_of(thing)
        if storage is not None:
            self.storages.append(storage)
        self.weak.append(weakref.ref(thing))
        return True

    def resolved(self, frame, namespace, notes) -> list:
        """The objects meant, at the end. What is not found is told in `notes`.

        `frame` is that of the code that leaves the scope, `namespace` the globals of a decorated function.
        """
        things = [*self.strong, *filter(lambda thing: thing is not None, (reference() for reference in self.weak))]
        for function in self.functions:
            things.append(function())
        if self.names:
            known = _names(frame) | (namespace or {}) if frame is not None else namespace or {}
            for name in self.names:
                first, *rest = name.split(".")
                try:
                    thing = known[first]
                    for word in rest:
                        thing = getattr(thing, word)
                    things.append(thing)
                except (KeyError, AttributeError):
                    notes.append(f"keep: there is no `{name}` at the end of the scope")
        return things

    def alive(self) -> frozenset:
        """The addresses of the storages (StorageImpl) that were declared and are there."""
        return frozenset(storage.cdata for storage in self.storages if not storage.expired())

    def parts(self) -> list:
        """The objects that refer to what is kept, for a look that should not see them."""
        return [self, self.__dict__, self.strong, self.functions]

    def clear(self):
        """Let go of everything."""
        for names in (self.names, self.functions, self.strong, self.weak, self.storages):
            names.clear()


def _names(frame) -> dict:
    """The variables that code sees in the frame of the caller, behind `contextlib`'s own frames."""
    while frame is not None and os.path.basename(frame.f_code.co_filename) == "contextlib.py":
        frame = frame.f_back
    return {} if frame is None else {**frame.f_globals, **dict(_frames.local_values(frame))}
