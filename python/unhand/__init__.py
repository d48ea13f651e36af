"""See what holds your GPU memory, make it let go, keep it free."""

_PUBLIC = {
    "compact": "compact",
    "Compacted": "compact",
    "Error": "errors",
    "CaptureError": "errors",
}


def __getattr__(name):
    module = _PUBLIC.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import importlib

    value = getattr(importlib.import_module(f".{module}", __name__), name)
    # Over the submodule of the same name, which importing it has just put here.
    globals()[name] = value
    return value


def __dir__():
    return sorted(globals() | _PUBLIC)
