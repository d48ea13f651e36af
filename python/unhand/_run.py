"""`unhand run`: runs a program as `python` would, as the module `__main__`, with the flight recorder on.

What the program can tell from `python`: a few frames of this package at the outer end of its stack. They are in no
traceback that it prints.
"""

import builtins
import json
import os
import pkgutil
import runpy
import sys
import types

from unhand import _after_import, _frames, _on_oom


def run(plan) -> int:
    """Run the program of a plan (`_native.run_plan`), and end as it ends."""
    plan = json.loads(plan)
    # Before the program changes the folder it is in.
    plan["recordings"] = os.path.abspath(plan["recordings"])
    recorder = record(plan)
    try:
        _start(plan)
    except SystemExit:
        # Python makes the exit code of it.
        raise
    except BaseException as error:
        _show(error, recorder)
        # Told already. Python ends as it does: by the signal after Ctrl-C, with exit code 1 otherwise.
        sys.excepthook = _say_nothing
        raise
    return 0


def record(plan):
    """Switch the recorder on, here and in the processes that `multiprocessing` spawns."""
    history = None if plan["history"] == "off" else plan["history"]
    options = {"history": history, "max_entries": plan["max_entries"], "limit": plan["limit"]}
    _after_import.when_imported("multiprocessing.spawn", lambda spawn: _record_in_children(spawn, plan))
    return _on_oom.Recorder(plan["recordings"], device=None, hooks=False, **options)


def _record_in_children(spawn, plan):
    """Let the command line of spawned children switch the recorder on before all else."""
    make = getattr(spawn, "get_command_line", None)
    if make is None or getattr(sys, "frozen", False):
        return
    words = {name: plan[name] for name in ("recordings", "history", "max_entries", "limit")}
    start = f"from unhand._run import record; record({words!r}); "

    def get_command_line(**options):
        command = make(**options)
        at = command.index("-c") + 1 if "-c" in command[:-1] else None
        if at is not None:
            command[at] = start + command[at]
        return command

    spawn.get_command_line = get_command_line


def _start(plan):
    """Run the script or module in a fresh module `__main__`."""
    module, script = plan["module"], plan["script"]
    is_safe = getattr(sys.flags, "safe_path", False)
    sys.modules["__main__"] = types.ModuleType("__main__")
    sys.modules["__main__"].__builtins__ = builtins
    if module is not None:
        if not is_safe:
            sys.path[0] = os.getcwd()
        sys.argv[:] = ["-m", *plan["args"]]
        # What `python -m` itself calls, with its messages.
        runpy._run_module_as_main(module)
        return
    sys.argv[:] = [script, *plan["args"]]
    if pkgutil.get_importer(script) is not None and not os.path.isfile(script) or _is_archive(script):
        # A folder or an archive with a `__main__` in it.
        sys.path[0:0 if is_safe else 1] = [os.path.abspath(script)]
        runpy._run_module_as_main("__main__", alter_argv=False)
        return
    if not is_safe:
        sys.path[0] = os.path.dirname(os.path.realpath(script))
    exec(_code(script), sys.modules["__main__"].__dict__)


def _is_archive(script):
    import zipfile

    return os.path.isfile(script) and not script.endswith((".py", ".pyw")) and zipfile.is_zipfile(script)


def _code(script):
    """The code of a script, with its module made ready for it."""
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader

    path = os.path.abspath(script)
    main = sys.modules["__main__"]
    main.__file__ = path
    main.__cached__ = None
    if sys.version_info < (3, 14):
        main.__annotations__ = {}
    try:
        if script.endswith(".pyc"):
            main.__loader__ = SourcelessFileLoader("__main__", path)
            return main.__loader__.get_code("__main__")
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        # Python's own words and exit code.
        print(f"{sys.executable}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}", file=sys.stderr)
        sys.exit(2)
    main.__loader__ = SourceFileLoader("__main__", path)
    return compile(source, path, "exec", dont_inherit=True)


def _show(error, recorder):
    """Tell the error as Python tells it at the end of a program, without the frames of this package."""
    error.__traceback__ = _without_ours(error.__traceback__)
    # Set by Python before it calls the hook, and what finds the failed frames again.
    sys.last_type, sys.last_value, sys.last_traceback = type(error), error, error.__traceback__
    if sys.version_info >= (3, 12):
        sys.last_exc = error
    try:
        recorder.consider(error)
    except Exception as fault:
        print(f"unhand: cannot record: {type(fault).__name__}: {fault}", file=sys.stderr)
    sys.excepthook(type(error), error, error.__traceback__)


def _without_ours(traceback):
    """The traceback from the first frame of the program on."""
    step = traceback
    while step is not None and _frames.is_ours(step.tb_frame):
        step = step.tb_next
    # An error of the start itself, a file that cannot be compiled: no frame is the program's.
    return step


def _say_nothing(*_):
    pass
