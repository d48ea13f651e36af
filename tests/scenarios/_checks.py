"""Run one scenario and check it: the leak, the named holder, what cuts it, and what unhand.free() does."""

import contextlib
import gc
import importlib.util
import sys
import traceback
import types

import torch
from torch.multiprocessing.reductions import StorageWeakRef

import run as format_

MIB = 1 << 20


class Watched:
    """What a scenario watches: storages that have to go, and storages that have to stay, without keeping either."""

    def __init__(self):
        self.leaving, self.staying = [], []

    def watch(self, tensor):
        """This tensor's storage is what the scenario is about."""
        self.leaving.append((StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()))

    def keep(self, tensor):
        """This tensor's storage is not to be touched by anything that unhand does."""
        self.staying.append((StorageWeakRef(tensor.untyped_storage()), tensor.untyped_storage().nbytes()))

    def held_bytes(self):
        return sum(size_bytes(weak) for weak, _ in self.leaving)

    def watched_bytes(self):
        return sum(n_bytes for _, n_bytes in self.leaving)

    def damaged(self):
        return [n_bytes for weak, n_bytes in self.staying if size_bytes(weak) != n_bytes]


def size_bytes(weak):
    """How many bytes the storage has that this weak reference means: 0 when it is gone or was emptied."""
    if weak.expired():
        return 0
    storage = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
    return 0 if storage is None else storage.nbytes()


class Failed(Exception):
    """An expectation that did not hold."""


def run(scenario, no_unhand):
    """Runs both passes of a scenario. The answer has `failures` and `skipped`."""
    failures, skipped = [], None
    for which in (after_the_usual_recipe, instead_of_the_usual_recipe):
        if which is instead_of_the_usual_recipe and (no_unhand or not scenario.values("free")):
            continue
        watched = start()
        name = "__main__"
        try:
            condition = scenario.value("only")
            if condition and not evaluate(name, condition):
                skipped = f"only if `{condition}`"
                break
            if which is after_the_usual_recipe and not no_unhand:
                under_a_scope(scenario, name, watched)
            else:
                set_up(scenario, name)
            which(scenario, name, watched, no_unhand)
        except Failed as failed:
            failures.append(f"{which.__name__.replace('_', ' ')}: {failed}")
        except BaseException:
            failures.append(f"{which.__name__.replace('_', ' ')}: {traceback.format_exc(limit=-12)}")
        finally:
            clean(scenario, name)
    return {"failures": failures, "skipped": skipped}


def start():
    """A fresh `__main__` for the scenario, as if it were the user's script."""
    watched = Watched()
    module = types.ModuleType("__main__")
    module.__dict__.update(
        torch=torch, nn=torch.nn, gc=gc, sys=sys, watch=watched.watch, keep=watched.keep, MIB=MIB, big=big,
        allocated=torch.cuda.memory_allocated, reserved=torch.cuda.memory_reserved, importable=importable,
    )
    # By name only, so that no frame of this file is a holder.
    sys.modules["__main__"] = module
    gc.collect()
    return watched


def big(n_bytes=4 * MIB, device="cuda"):
    return torch.empty(n_bytes // 4, device=device)


def importable(name):
    return importlib.util.find_spec(name) is not None


def set_up(scenario, name):
    if scenario.value("gc") == "off":
        gc.disable()
    # As many empty lines as precede the block, so that tracebacks name lines of the document.
    code = compile("\n" * scenario.code_line + scenario.code, scenario.document.name, "exec")
    exec(code, sys.modules[name].__dict__)


def under_a_scope(scenario, name, watched):
    """The scenario is a block under a scope, at the end of which the user deletes what came to mind: what stays is named."""
    import unhand

    why_not = scenario.value("scope", "")
    with unhand.scope(scenario.title) as scope:
        set_up(scenario, name)
        for names in scenario.values("del"):
            execute(name, f"del {names}")
    result = scope.result
    unnamed = [words for words in scenario.values("holder") if not any(matches(leak, words) for leak in result.survivors)]
    if unnamed and not why_not:
        raise Failed(f"the scope does not name `{unnamed[0]}`\n{result}")
    if why_not and not unnamed:
        raise Failed(f"the scope names what it is said not to: `{why_not}`\n{result}")


def after_the_usual_recipe(scenario, name, watched, no_unhand):
    """The user has deleted what came to mind; the memory is still there; unhand says who has it; cutting it helps."""
    if no_unhand:
        for names in scenario.values("del"):
            execute(name, f"del {names}")
    if scenario.value("gc") != "off":
        gc.collect()
    leaks(scenario, name, watched)
    if not no_unhand:
        named(scenario, name, watched)
    for statement in scenario.values("cut"):
        execute(name, statement)
    if not scenario.values("cut") and no_unhand:
        return
    if no_unhand:
        gc.collect()
        torch.cuda.empty_cache()
    else:
        freed = evaluate(name, "__import__('unhand').free()")
        gone(scenario, name, watched, freed)
        return
    gone(scenario, name, watched, None)


def instead_of_the_usual_recipe(scenario, name, watched, _no_unhand):
    """The user names what is to go, and deletes nothing."""
    for arguments in scenario.values("free"):
        arguments = "" if arguments == "()" else arguments
        options = scenario.value("free-options", "")
        call = f"__import__('unhand').free({', '.join(part for part in (arguments, options) if part)})"
        freed = evaluate(name, call)
    kept = scenario.values("kept")
    for words in kept:
        if not any(matches(holder, words) for holder in (*freed.kept, *freed.shared)):
            raise Failed(f"free() kept nothing under `{words}`\n{freed}\nkept: {lines(freed.kept)}")
    if not kept:
        gone(scenario, name, watched, freed)
    for expression in scenario.values("raises"):
        try:
            evaluate(name, expression)
        except RuntimeError as error:
            if "free" not in str(error):
                raise Failed(f"`{expression}` does not say that it was freed: {error}") from None
        else:
            raise Failed(f"`{expression}` works on freed memory")
    torch.cuda.synchronize()


def leaks(scenario, name, watched):
    held, wanted = watched.held_bytes(), watched.watched_bytes()
    if held != wanted:
        raise Failed(f"no leak: {held} of {wanted} watched bytes are still there")
    for expression in scenario.values("leak"):
        if not evaluate(name, expression):
            raise Failed(f"no leak: `{expression}` is not true; {figures()}")
    if not watched.leaving and not scenario.values("leak"):
        raise Failed("the scenario watches nothing")


def named(scenario, name, watched):
    """unhand.report() names every holder that is expected, with its kind and at least the watched bytes."""
    import unhand

    report = unhand.report(limit=60)
    held_before = watched.held_bytes()
    holders = [holder for device in report.devices for holder in device.holders]
    kinds = [kind.strip() for kind in scenario.value("kind", "").split(",") if kind.strip()]
    text = scenario.value("bytes")
    at_least = watched.watched_bytes() if text is None else format_.amount(text.removeprefix(">="))
    for words in scenario.values("holder"):
        found = [holder for holder in holders if matches(holder, words)]
        if not found:
            raise Failed(f"no holder `{words}`\n{shown(report, holders)}")
        right = [holder for holder in found if not kinds or holder.kind in kinds]
        if not right:
            raise Failed(f"holder `{words}` is not of kind {kinds}\n{shown(report, holders)}")
        if max(holder.bytes for holder in right) < at_least:
            raise Failed(f"holder `{words}` has fewer than {at_least} bytes\n{shown(report, holders)}")
        if not all(holder.advice for holder in right):
            raise Failed(f"holder `{words}` comes without advice\n{shown(report, holders)}")
    for expression in scenario.values("report"):
        sys.modules[name].report = report
        if not evaluate(name, expression):
            raise Failed(f"`{expression}` is not true\n{shown(report, holders)}")
        del sys.modules[name].report
    if watched.held_bytes() != held_before:
        raise Failed("looking changed what was looked at")


def gone(scenario, name, watched, freed):
    said = "" if freed is None else f"\n{freed}\nkept: {lines(freed.kept)}"
    if watched.held_bytes():
        raise Failed(f"{watched.held_bytes()} of {watched.watched_bytes()} watched bytes are still there{said}")
    for expression in scenario.values("gone"):
        if not evaluate(name, expression):
            raise Failed(f"`{expression}` is not true; {figures()}{said}")
    if watched.damaged():
        raise Failed(f"storages that were to be kept lost their memory: {watched.damaged()}{said}")


def matches(holder, words):
    """Whether all words are in one of its paths, what follows a path to a part of it included."""
    parts = getattr(holder, "parts", ())
    paths = [*holder.paths, *(f"{holder.path} {part.path}" for part in parts)]
    return any(all(word in path for word in words.split()) for path in paths)


def shown(report, holders):
    return f"{report}\nholders: {lines(holders)}"


def lines(holders):
    return "".join(f"\n  {holder.bytes:>12} {holder.kind}: {holder.path}" for holder in holders) or "none"


def figures():
    return f"allocated {torch.cuda.memory_allocated()}, reserved {torch.cuda.memory_reserved()}"


def execute(name, statement):
    exec(compile(statement, f"<{name}>", "exec"), sys.modules[name].__dict__)


def evaluate(name, expression):
    return eval(compile(expression, f"<{name}>", "eval"), sys.modules[name].__dict__)


def clean(scenario, name):
    """Takes away what the first pass made, so that the second begins without it."""
    for statement in scenario.values("cleanup"):
        with contextlib.suppress(Exception):
            execute(name, statement)
    sys.modules[name].__dict__.clear()
    for last in ("last_exc", "last_value", "last_traceback", "last_type"):
        if hasattr(sys, last):
            delattr(sys, last)
    gc.unfreeze()
    gc.enable()
    gc.collect()
    if torch.cuda.is_initialized():
        torch._C._cuda_clearCublasWorkspaces()
    for device in range(torch.cuda.device_count()):
        if torch._C._cuda_hasPrimaryContext(device):
            with torch.cuda.device(device):
                torch.cuda.empty_cache()
