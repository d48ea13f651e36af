#!/usr/bin/env python3
"""Measure how much GPU memory stays in everyday situations: after the usual recipes, and after unhand.

usage: situations.py [--out FILE] [--table] [--recipes del,gc,…] [-k NAME] [--fresh]
       situations.py --table FILE…        renders what was measured before

Each situation is set up as a user's script would (everyday_python.py, everyday_torch.py); then one recipe is run, in the
script's own namespace and as a user would write it, and the device's own figure is read.

    del          del NAMES; torch.cuda.empty_cache()
    gc           del NAMES; gc.collect(); torch.cuda.empty_cache()
    accelerate   NAMES = accelerate.release_memory(NAMES), as its documentation has it
    free         unhand.free(NAMES), and nothing else
    alone        del NAMES; unhand.free(): where nobody meant to keep what stays
    read         unhand.free(NAMES, …) with what the answer to `free` named as well; unhand.compact() for fragments

The floor is what the process has on the device when it has a context, has done what the situation does once, and has
released everything again. So kernels and library handles that a situation loads, and that nothing in the process can
unload, are part of the floor, and whatever a recipe leaves is not. A process measures one recipe in one situation after
another. Before each the floor is read anew; when something is still allocated or cached then, the process is given up
and the rest is measured in a new one. `--fresh` measures each pair in a process of its own.

What the recipes mean by their figures: held is used on the device, less the floor and less what the user means to keep.
One process at a time, because the driver's figure is for the whole device: nothing else may run on it.
"""

import argparse
import gc
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time
import types

HERE = pathlib.Path(__file__).resolve().parent
MIB = 1 << 20
RECIPES = ("del", "gc", "accelerate", "free", "alone", "read")
# Two small segments: the driver gives memory out in units of 2 MiB.
TOLERANCE_BYTES = 4 * MIB
WORKER_TIMEOUT_S = 300


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="where the lines of JSON go; $OUT/situations.jsonl or stdout")
    parser.add_argument("--table", nargs="*", type=pathlib.Path, help="a Markdown table of the result, or of these files")
    parser.add_argument("--recipes", default=",".join(RECIPES))
    parser.add_argument("-k", dest="words", default="", help="only situations whose name has this")
    parser.add_argument("--fresh", action="store_true", help="a process for each situation and recipe")
    parser.add_argument("--worker", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(arguments.worker[0], arguments.worker[1:])
    if arguments.table:
        records = [json.loads(line) for file in arguments.table for line in file.read_text().splitlines()]
        print(table(records))
        return 0
    out = arguments.out
    if out is None and "OUT" in os.environ:
        out = pathlib.Path(os.environ["OUT"]) / "situations.jsonl"
    names = [name for name in names_of_situations() if arguments.words in name]
    records = []
    with open(out, "w") if out else os.fdopen(os.dup(1), "w") as file:
        for recipe in arguments.recipes.split(","):
            groups = [[name] for name in names] if arguments.fresh else [names]
            for group in groups:
                for record in measure(recipe, group):
                    records.append(record)
                    file.write(json.dumps(record) + "\n")
                    file.flush()
    if arguments.table is not None:
        print(table(records))
    return int(any(record.get("error") for record in records))


def names_of_situations():
    """Their names, read from the sources, so that this process needs no torch."""
    names = []
    for file in ("everyday_python.py", "everyday_torch.py"):
        lines = (HERE / file).read_text().splitlines()
        names += [line.split("(")[0].removeprefix("def situation_") for line in lines if line.startswith("def situation_")]
    return names


def measure(recipe, names):
    """Runs workers until each situation has its record; a worker that dies has an error for its last one."""
    waiting = list(names)
    while waiting:
        command = [sys.executable, str(HERE / "situations.py"), "--worker", recipe, *waiting]
        with tempfile.TemporaryFile("w+") as errors:
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            started, done = time.monotonic(), []
            for line in process.stdout:
                if not line.startswith("{"):
                    continue
                done.append(json.loads(line))
                yield done[-1]
                if time.monotonic() - started > WORKER_TIMEOUT_S:
                    process.kill()
            process.wait()
            waiting = waiting[len(done):]
            if waiting and (not done or not done[-1]["leaves_bytes"]):
                errors.seek(0)
                tail = " | ".join(errors.read().strip().splitlines()[-6:])
                yield {"situation": waiting.pop(0), "recipe": recipe, "leaves_bytes": 0,
                       "error": f"the process ended with {process.returncode}: {tail}"}


# --- the worker -----------------------------------------------------------------------------------------------------


def worker(recipe, names):
    """Measures situations one after another; a line of JSON for each on stdout."""
    os.environ.setdefault("IPYTHONDIR", tempfile.mkdtemp())
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    sys.path.insert(0, str(HERE))
    import torch

    import everyday
    import everyday_python
    import everyday_torch

    situations = {each.name: each for each in everyday.SITUATIONS}
    warm_up(torch)
    for name in names:
        record = measure_one(torch, situations[name], recipe)
        out.write(json.dumps(record) + "\n")
        if record["leaves_bytes"]:
            break
    out.flush()
    # Threads that a situation could not end must not keep the worker.
    os._exit(0)


def warm_up(torch):
    """A context, and one product."""
    matrix = torch.ones(64, 64, device="cuda")
    matrix @ matrix
    torch.cuda.synchronize()


def measure_one(torch, situation, recipe):
    record = {"situation": situation.name, "about": situation.about, "recipe": recipe, "leaves_bytes": 0}
    statement = statement_of(situation, recipe)
    reason = skipped_because(situation, recipe)
    if reason:
        return {**record, "skipped": reason}
    # Once for the kernels and handles that it loads, which nothing can unload.
    reason = set_up(situation)
    record["leaves_bytes"] = end(torch)
    if isinstance(reason, str):
        return {**record, "skipped": reason}
    if record["leaves_bytes"]:
        # Told by the next worker, which begins with this situation.
        raise SystemExit(f"{situation.name} cannot be ended: {record['leaves_bytes']} bytes stay")
    floor, floor_host = used(torch), host_bytes(torch)
    set_up(situation)
    held_before = used(torch) - floor
    started = time.monotonic()
    try:
        freed = run_in_script(statement)
    except Exception as error:
        freed = None
        record["error"] = f"{type(error).__name__}: {error}"
    seconds = time.monotonic() - started
    torch.cuda.synchronize()
    record.update(
        statement=statement,
        floor_bytes=floor,
        keeps_bytes=situation.keeps_bytes,
        held_before_bytes=held_before - situation.keeps_bytes,
        held_bytes=used(torch) - floor - situation.keeps_bytes,
        allocated_bytes=torch.cuda.memory_allocated(),
        reserved_bytes=torch.cuda.memory_reserved(),
        held_host_bytes=host_bytes(torch) - floor_host if situation.is_host else None,
        seconds=round(seconds, 4),
    )
    if recipe in ("del", "free", "alone", "read"):
        record.update(named(situation, freed if recipe != "del" else None))
        del freed
    record["workspaces_bytes"] = workspaces(torch, recipe)
    record["leaves_bytes"] = end(torch)
    return record


def statement_of(situation, recipe):
    """What the user writes."""
    names = situation.names
    delete = f"del {names}\n" if names else ""
    if recipe == "del":
        return f"{delete}torch.cuda.empty_cache()"
    if recipe == "gc":
        return f"{delete}gc.collect()\ntorch.cuda.empty_cache()"
    if recipe == "accelerate":
        return f"{names}, = release_memory({names})" if names else "release_memory()"
    if recipe == "free":
        return f"answer = unhand.free({situation.targets})"
    if recipe == "alone":
        return f"{delete}answer = unhand.free()"
    if situation.is_fragmented:
        return f"answer = unhand.free({situation.targets})\nunhand.compact()"
    return f"answer = unhand.free({', '.join(part for part in (situation.targets, situation.then) if part)})"


def skipped_because(situation, recipe):
    if recipe == "accelerate" and not importable("accelerate"):
        return "accelerate is not installed"
    if recipe in ("free", "alone", "read") and not importable("unhand"):
        return "unhand is not installed"
    if recipe == "alone" and not situation.alone:
        return "somebody means to keep it"
    if recipe == "read" and not (situation.then or situation.is_fragmented):
        return "nothing else to name"
    if recipe == "read" and situation.is_fragmented and not hasattr_of_unhand("compact"):
        return "unhand has no compact() yet"
    return None


def importable(name):
    try:
        __import__(name)
    except ImportError:
        return False
    return True


def hasattr_of_unhand(name):
    import unhand

    try:
        return hasattr(unhand, name)
    except ImportError:
        return False


_undo = []


def set_up(situation):
    """Runs the situation in a fresh `__main__`, the user's script. Returns a reason why it cannot be run, or None."""
    # By name only: a reference in a frame of this file would be one more holder.
    sys.modules["__main__"] = types.ModuleType("__main__")
    undo = situation.set_up(sys.modules["__main__"])
    if callable(undo):
        _undo.append(undo)
        undo = None
    gc.collect(0)
    return undo


def run_in_script(statement):
    """Executes what the user writes in the user's script. Returns what it called `answer`."""
    script = sys.modules["__main__"]
    namespace = script.__dict__
    del script
    exec("import torch, gc", namespace)
    if "unhand" in statement:
        exec("import unhand", namespace)
    if "release_memory" in statement:
        exec("from accelerate.utils import release_memory", namespace)
    exec(compile(statement, "train.py", "exec"), namespace)
    return namespace.pop("answer", None)


def end(torch):
    """Takes away what a situation made. Returns the bytes that stay allocated or cached all the same."""
    while _undo:
        _undo.pop()()
    sys.modules["__main__"].__dict__.clear()
    for name in ("last_exc", "last_value", "last_traceback", "last_type"):
        if hasattr(sys, name):
            delattr(sys, name)
    gc.unfreeze()
    gc.collect()
    torch.clear_autocast_cache()
    torch.cuda.synchronize()
    torch._C._cuda_clearCublasWorkspaces()
    if torch.backends.cuda.cufft_plan_cache[0].size:
        torch.backends.cuda.cufft_plan_cache[0].clear()
    torch._C._host_emptyCache()
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved()


def used(torch):
    free, total = torch.cuda.mem_get_info()
    return total - free


def host_bytes(torch):
    return torch.cuda.host_memory_stats().get("allocated_bytes.current", 0)


def workspaces(torch, recipe):
    """How much of what stays is cuBLAS's workspaces, which the next product would take again."""
    if recipe not in ("del", "gc", "accelerate"):
        return None
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


def named(situation, freed):
    """Whether the right holder is named: in a report after the usual recipe, or by what `free` says that it left."""
    if freed is None:
        if not importable("unhand"):
            return {"holders": None}
        import unhand

        report = unhand.report(limit=20)
        holders = [holder for device in report.devices for holder in device.holders]
        extra = {"unattributed_bytes": sum(device.unattributed_bytes for device in report.devices)}
    else:
        holders = [*freed.kept, *getattr(freed, "shared", ())]
        extra = {"returned_bytes": freed.returned_bytes, "freed_bytes": freed.freed_bytes}
    words = situation.holder.split()
    right = [
        holder
        for holder in holders
        if holder.kind in situation.kinds
        and any(all(word in path for word in words) for path in paths_of(holder))
    ]
    best = max(right, key=lambda holder: holder.bytes, default=None)
    return {
        **extra,
        "holders": [{"path": holder.path, "kind": holder.kind, "bytes": holder.bytes} for holder in holders[:6]],
        "expected": {"words": situation.holder, "kinds": situation.kinds} if situation.kinds else None,
        "named": {"path": best.path, "kind": best.kind, "bytes": best.bytes} if best else None,
        "matches": bool(best) if situation.kinds else None,
        "has_to_stay": situation.stays,
    }


def paths_of(holder):
    """All its paths, and what follows its path to the parts of it."""
    return [*holder.paths, *(f"{holder.path} {part.path}" for part in holder.parts)]


# --- the table ------------------------------------------------------------------------------------------------------


def table(records):
    """A Markdown table: one situation a row, MiB that are held after each recipe, and the holder that unhand names."""
    by_situation = {}
    for record in records:
        by_situation.setdefault(record["situation"], {})[record["recipe"]] = record
    recipes = [recipe for recipe in RECIPES if any(recipe in row for row in by_situation.values())]
    lines = [f"| situation | {' | '.join(recipes)} | holder named after `del` |", f"|---|{'---:|' * len(recipes)}---|"]
    for name, row in by_situation.items():
        cells = [cell(row.get(recipe)) for recipe in recipes]
        lines.append(f"| {name.replace('_', ' ')} | {' | '.join(cells)} | {holder_cell(row.get('del'))} |")
    counts = []
    for recipe in recipes:
        measured = [row[recipe] for row in by_situation.values() if "held_bytes" in row.get(recipe, {})]
        back = sum(is_back(record) for record in measured)
        nearly = sum(is_back(record, record["workspaces_bytes"] or 0) for record in measured)
        text = f"`{recipe}`: all back in {back} of {len(measured)}"
        if nearly != back:
            text += f" ({nearly} but for cuBLAS's workspaces)"
        if recipe == "free":
            explained = sum(
                not is_back(record) and bool(record.get("matches")) and record.get("has_to_stay", False) for record in measured
            )
            text += f", in {explained} more the holder is named that has to stay"
        counts.append(text)
    measured = [row["del"] for row in by_situation.values() if row.get("del", {}).get("expected")]
    if measured:
        right = sum(bool(record["matches"]) for record in measured)
        counts.append(f"the expected holder is named after `del` in {right} of {len(measured)}")
    return "\n".join([*lines, "", *(f"- {count}" for count in counts)])


def held(record):
    return record["held_bytes"] if record.get("held_host_bytes") is None else record["held_host_bytes"]


def is_back(record, less=0):
    return held(record) - less <= TOLERANCE_BYTES and not record.get("error")


def cell(record):
    if record is None:
        return ""
    if record.get("error"):
        return "error"
    if "held_bytes" not in record:
        return "–"
    return f"{held(record) / MIB:,.0f}"


def holder_cell(record):
    if not record or not record.get("holders"):
        return ""
    if record["named"]:
        return f"{record['named']['kind']}: `{record['named']['path']}`"
    return f"**not** {record['expected']}" if record.get("expected") else ""


if __name__ == "__main__":
    sys.exit(main())
