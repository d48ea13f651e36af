"""Calls a function once a module is imported, without importing it; leaves nothing behind in the module."""

import sys

_waiting: dict[str, list] = {}


def when_imported(name, callback):
    """Call `callback(module)` now if the module is there, otherwise right after its import. Errors are the callback's."""
    module = sys.modules.get(name)
    if module is not None and not _is_being_imported(module):
        callback(module)
        return
    _waiting.setdefault(name, []).append(callback)
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)


def forget(name, callback):
    """Do not call it any more."""
    if callback in _waiting.get(name, ()):
        _waiting[name].remove(callback)
        if not _waiting[name]:
            del _waiting[name]
            _stand_down()


def _stand_down():
    if not _waiting and _Finder in sys.meta_path:
        sys.meta_path.remove(_Finder)


def _is_being_imported(module):
    return getattr(getattr(module, "__spec__", None), "_initializing", False)


class _Finder:
    """Finds nothing itself; lets the others find, and has their loader tell when it is done."""

    @classmethod
    def find_spec(cls, name, path=None, target=None):
        """The spec that the other finders have for a module that is waited for; None for all others."""
        if name not in _waiting:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            if finder is cls or find is None:
                continue
            spec = find(name, path, target)
            if spec is not None:
                _watch(name, spec)
                return spec
        return None


def _watch(name, spec):
    loader = spec.loader
    execute = getattr(loader, "exec_module", None)
    if execute is None:
        return

    def exec_module(module):
        if module.__name__ != name:
            # Some loaders serve many modules: a zip file's.
            execute(module)
            return
        # From here on the loader is as it was made.
        del loader.exec_module
        execute(module)
        callbacks = _waiting.pop(name, [])
        _stand_down()
        for callback in callbacks:
            callback(module)

    try:
        loader.exec_module = exec_module
    except AttributeError:
        # A loader that cannot be watched, as that of a frozen module.
        pass
