"""Runs a program as `python` would, records what PyTorch allocates, and leaves the history for `unhand dry-run`.

Given to Python with `-c`, so that no file of ours is in anybody's way. The first argument is JSON: `module` (a name, or
null for a script), `max_steps`, `snapshot` and `result` (files to write). The rest is the program and its arguments.
"""

import builtins
import importlib.abc
import importlib.util
import json
import os
import pickle
import runpy
import sys
import traceback
import types
import weakref

# A history without an end: a replay needs the whole of it.
EVERY_EVENT = 1 << 40
# An optimizer may wait this many times as long for another one, which steps more rarely.
PATIENCE = 10


class Enough(BaseException):
    """Ends the program after `--max-steps`; no `except Exception` takes it."""


class Steps:
    """Counts the steps of each optimizer, and ends the program once there were enough of all."""

    def __init__(self, most):
        self.most = most
        self.counts = weakref.WeakKeyDictionary()

    def count(self, optimizer, *_):
        counts = self.counts
        counts[optimizer] = counts.get(optimizer, 0) + 1
        if self.most is not None and counts[optimizer] >= self.most:
            # A program with two optimizers has made a step when both have.
            if min(counts.values()) >= self.most or counts[optimizer] >= PATIENCE * self.most:
                raise Enough

    def made(self):
        return max(self.counts.values(), default=0)


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls `act` once a module was imported, however and whenever the program imports it."""

    def __init__(self, name, act):
        self.name, self.act = name, act

    def find_spec(self, name, path=None, target=None):
        if name != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is not None and spec.loader is not None:
            execute, act = spec.loader.exec_module, self.act

            def exec_module(module):
                execute(module)
                act(module)

            spec.loader.exec_module = exec_module
        return spec


def watch(torch, steps):
    """Have the history recorded from the first allocation on, and steps counted."""
    # Not before CUDA is there: the program may still choose devices and settings.
    torch.cuda._lazy_call(lambda: record(torch))
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(steps.count)


def record(torch):
    torch.cuda.memory._record_memory_history(enabled="all", context="all", stacks="python", max_entries=EVERY_EVENT)


def run(spec, arguments):
    """Run the program as `__main__`. What ends it is given back: an exception, or nothing."""
    main = types.ModuleType("__main__")
    main.__builtins__ = builtins
    sys.modules["__main__"] = main
    try:
        if spec["module"]:
            # `-c` has put the current folder first, where `-m` wants it.
            sys.argv[:] = [spec["module"], *arguments]
            runpy._run_module_as_main(spec["module"])
        else:
            path = arguments[0]
            sys.argv[:] = arguments
            if not getattr(sys.flags, "safe_path", False):
                sys.path[0] = os.path.dirname(os.path.realpath(path))
            main.__file__ = os.path.abspath(path)
            main.__cached__ = None
            with open(path, "rb") as file:
                code = compile(file.read(), path, "exec")
            exec(code, main.__dict__)
    except BaseException as error:
        return error
    return None


def exit_code(error):
    """What Python would exit with, and what it would print, printed."""
    if error is None or isinstance(error, Enough):
        return 0
    if isinstance(error, SystemExit):
        if error.code is None or isinstance(error.code, int):
            return (error.code or 0) & 0xFF
        print(error.code, file=sys.stderr)
        return 1
    # Without the lines of this file, which `-c` gives no name.
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename in ("<string>", "<frozen runpy>"):
        trace = trace.tb_next
    traceback.print_exception(type(error), error, trace)
    return 130 if isinstance(error, KeyboardInterrupt) else 1


def facts(error, steps):
    """What the history does not tell."""
    torch = sys.modules.get("torch")
    result = {"steps": steps.made(), "stopped": isinstance(error, Enough), "torch": None, "devices": []}
    if torch is None or not hasattr(torch, "cuda"):
        return result
    result["torch"] = torch.__version__
    result["out_of_memory"] = isinstance(error, getattr(torch.cuda, "OutOfMemoryError", ()))
    if not torch.cuda.is_initialized():
        return result
    for device in range(torch.cuda.device_count()):
        stats = torch.cuda.memory_stats(device)
        # `memory_stats` of a device that was never used is empty, and asking for its memory would make a context.
        if stats.get("reserved_bytes.all.peak", 0) == 0:
            continue
        free, total = torch.cuda.mem_get_info(device)
        result["devices"].append({
            "device": device,
            "name": torch.cuda.get_device_name(device),
            "total_bytes": total,
            "outside_bytes": max(0, total - free - stats["reserved_bytes.all.current"]),
        })
    return result


def leave(spec, error, steps):
    """Write the history and the facts. If that fails, say so: there is no report without."""
    result = facts(error, steps)
    if result["devices"]:
        torch = sys.modules["torch"]
        with open(spec["snapshot"], "wb") as file:
            pickle.dump(torch.cuda.memory._snapshot(), file, protocol=4)
    return result


def main():
    spec, arguments = json.loads(sys.argv[1]), sys.argv[2:]
    steps = Steps(spec["max_steps"])
    sys.meta_path.insert(0, AfterImport("torch", lambda torch: watch(torch, steps)))
    process = os.getpid()
    error = run(spec, arguments)
    code = exit_code(error)
    if os.getpid() != process:
        # A child that the program forked, and let come to its end here.
        os._exit(code)
    try:
        result = leave(spec, error, steps)
        result["exit_code"] = code
        with open(spec["result"], "w", encoding="utf-8") as file:
            json.dump(result, file)
    except BaseException:
        print("unhand dry-run: the history cannot be written", file=sys.stderr)
        traceback.print_exc()
        code = code or 1
    sys.exit(code)


main()
