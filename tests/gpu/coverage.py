#!/usr/bin/env python3
"""Measure how many of the allocated bytes `unhand.report` names, in the middle of real programs.

usage: coverage.py [--out FILE] [--table] [--histories off,python] [--small] [--jobs N] [-k NAME]
       coverage.py --table FILE…        renders what was measured before

Each program (coverage_programs.py) runs in a process of its own, once for each of `--histories`: without a recording of
the allocator's history, which is how the report is timed, and with one, so that each block that stays without a name
has the place that allocated it (`python`: Python's frames; `all`: PyTorch's own too).

At each moment of a program there is one line of JSON. `named_bytes` is `unhand`'s own figure, and has three parts:

    reached_bytes    a chain of references leads to it, from a module or a running function: it has an owner
    garbage_bytes    only a dead cycle leads to it
    by_rule          nothing leads to it, and a rule says what it is: workspaces, pools of CUDA graphs, blocks that wait
                     for another stream, caches of PyTorch that are known by the sizes of what is in them

`unattributed_bytes` is the rest. `--small` is for the stand-in: short sequences and small batches.
"""

import argparse
import collections
import concurrent.futures
import json
import os
import pathlib
import subprocess
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
WORKER_TIMEOUT_S = 240
# A process that cannot run a program says why, and ends with this.
SKIPPED = 75


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=pathlib.Path, help="where the lines of JSON go; $OUT/coverage.jsonl or stdout")
    parser.add_argument("--table", nargs="*", type=pathlib.Path, help="a Markdown table of the result, or of these files")
    parser.add_argument("--histories", default="off,python")
    parser.add_argument("--small", action="store_true", help="sizes for the stand-in")
    parser.add_argument("--jobs", type=int, default=1, help="how many programs at a time; their reports take longer then")
    parser.add_argument("-k", dest="words", default="", help="only programs whose name has this")
    parser.add_argument("--worker", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.worker:
        return worker(*arguments.worker, arguments.small)
    if arguments.table:
        print(table([json.loads(line) for file in arguments.table for line in file.read_text().splitlines()]))
        return 0
    out = arguments.out
    if out is None and "OUT" in os.environ:
        out = pathlib.Path(os.environ["OUT"]) / "coverage.jsonl"
    records = []
    with open(out, "w") if out else os.fdopen(os.dup(1), "w") as file:
        names = [name for name in names_of_programs() if arguments.words in name]
        runs = [(name, history, arguments.small) for history in arguments.histories.split(",") for name in names]
        with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as threads:
            for found in threads.map(lambda run: list(measure(*run)), runs):
                for record in found:
                    records.append(record)
                    file.write(json.dumps(record) + "\n")
                    file.flush()
    if arguments.table is not None:
        print(table(records))
    return int(any(record.get("error") for record in records))


def names_of_programs():
    """Their names, read from the source, so that this process needs no torch."""
    lines = (HERE / "coverage_programs.py").read_text().splitlines()
    return [line.split("(")[0].removeprefix("def program_") for line in lines if line.startswith("def program_")]


def measure(name, history, is_small):
    """What a process that runs one program says, moment by moment."""
    command = [sys.executable, str(HERE / "coverage.py"), "--worker", name, history]
    if is_small:
        command.append("--small")
    started = time.monotonic()
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
        try:
            output, _ = process.communicate(timeout=WORKER_TIMEOUT_S)
            ending = f"the process ended with {process.returncode}"
        except subprocess.TimeoutExpired:
            process.kill()
            output, _ = process.communicate()
            ending = f"not done after {WORKER_TIMEOUT_S} s"
        errors.seek(0)
        tail = errors.read().strip().splitlines()[-6:]
    yield from (json.loads(line) for line in output.splitlines() if line.startswith("{"))
    took = {"program": name, "history": history, "process_seconds": round(time.monotonic() - started, 1)}
    if process.returncode == SKIPPED:
        yield {**took, "skipped": tail[-1] if tail else "no reason"}
    elif process.returncode:
        yield {**took, "error": f"{ending}: {' | '.join(tail)}"}
    else:
        yield took


# --- the worker -----------------------------------------------------------------------------------------------------


def worker(name, history, is_small):
    """Runs one program; a line of JSON for each moment on stdout."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    # Names of C++ frames without reading debug information, which takes minutes.
    os.environ.setdefault("TORCH_SYMBOLIZE_MODE", "dladdr")
    sys.path.insert(0, str(HERE))
    import torch

    import coverage_programs

    if history != "off":
        # By position, since the names of the parameters changed between releases.
        torch.cuda.memory._record_memory_history("state", "state", history)
    probe = Probe(name, history, is_small, out)
    try:
        getattr(coverage_programs, f"program_{name}")(probe)
    except coverage_programs.Skip as reason:
        print(reason, file=sys.stderr)
        out.flush()
        os._exit(SKIPPED)
    out.flush()
    sys.stderr.flush()
    # Threads of compilers and process groups must not keep the worker.
    os._exit(0)


class Probe:
    """Takes a report at each moment that a program names."""

    def __init__(self, program, history, is_small, out):
        self.is_small = is_small
        self._about = {"program": program, "history": history}
        self._out = out

    def __call__(self, moment):
        """One line of JSON about this moment."""
        import torch
        import unhand

        torch.cuda.synchronize()
        allocated_bytes = torch.cuda.memory_allocated()
        started = time.perf_counter()
        report = unhand.report(0)
        seconds = time.perf_counter() - started
        device = report.devices[0]
        record = {
            **self._about,
            "moment": moment,
            "allocated_bytes": allocated_bytes,
            "named_bytes": device.named_bytes,
            "unattributed_bytes": device.unattributed_bytes,
            "garbage_bytes": device.garbage_bytes,
            "seconds": round(seconds, 4),
            "holders": [" ".join(str(holder).split()) for holder in device.holders[:3]],
            "changed_bytes": torch.cuda.memory_allocated() - allocated_bytes,
        }
        del report, device
        record.update(details())
        record["reached_bytes"] = record["named_bytes"] - record["garbage_bytes"] - sum(record["by_rule"].values())
        self._out.write(json.dumps(record) + "\n")


def details():
    """What the report is made of: bytes by rule, and each block that has no name."""
    from unhand import _heap, _see

    with _see.looking:
        view = _heap.View()
        try:
            found = _see.Explanation(view, 0)
            by_rule = collections.Counter()
            for block in found.nameless:
                if block.address in found.known:
                    by_rule[": ".join(found.known[block.address])] += block.bytes
            blocks = collections.Counter(
                (block.bytes, block.requested_bytes, site_of(block)) for block in found.unattributed
            )
            return {
                "by_rule": dict(by_rule),
                "n_objects": view.heap.n_nodes,
                "n_blocks": len(view.blocks),
                "unattributed": [
                    {"n_blocks": n_blocks, "bytes": n_bytes, "requested_bytes": requested_bytes, "site": site}
                    for (n_bytes, requested_bytes, site), n_blocks in sorted(
                        blocks.items(), key=lambda item: -item[0][0] * item[1]
                    )[:20]
                ],
            }
        finally:
            view.close()


def site_of(block):
    """The innermost frames that say something, as one line."""
    dull = ("??", "_PyEval", "_PyObject", "PyObject", "_PyFunction", "cfunction", "method_", "unwind::", "CapturedTraceback")
    lines = []
    for frame in block.frames or ():
        if frame["name"] and not frame["name"].startswith(dull) and "CUDACachingAllocator" not in frame["name"]:
            where = f"{os.path.basename(frame['filename'])}:{frame['line']} " if frame["filename"].endswith(".py") else ""
            lines.append(where + frame["name"].partition("(")[0][:120])
    return " < ".join(lines[:9]) or None


# --- the table ------------------------------------------------------------------------------------------------------


def table(records):
    """Markdown: a line for each moment, and for each program that did not run."""
    lines = [
        "| program | moment | allocated | named | reached by references | by rule | garbage | unattributed | report |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    timed = [record for record in records if record["history"] == "off"] or records
    for record in timed:
        if "moment" in record:
            allocated = record["allocated_bytes"]
            lines.append(
                f"| {record['program']} | {record['moment']} | {mib(allocated)} | {share(record['named_bytes'], allocated)} "
                f"| {share(record['reached_bytes'], allocated)} | {mib(sum(record['by_rule'].values()))} "
                f"| {mib(record['garbage_bytes'])} | {mib(record['unattributed_bytes'])} | {record['seconds']:.2f} s |"
            )
        elif "skipped" in record or "error" in record:
            what = "skipped" if "skipped" in record else "error"
            lines.append(f"| {record['program']} | {what}: {record[what].replace('|', '/')} |" + " |" * 7)
    return "\n".join(lines)


def mib(n_bytes):
    return f"{n_bytes / (1 << 20):,.1f} MiB" if n_bytes else "0"


def share(part, whole):
    return f"{100 * part / whole:.2f} %" if whole else "n/a"


if __name__ == "__main__":
    sys.exit(main())
