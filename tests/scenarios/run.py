#!/usr/bin/env python3
"""Run the scenarios of this folder: each sets up a leak, and unhand has to name its holder and make it let go.

usage: run.py [DOCUMENT…] [-k WORDS] [--no-unhand] [--jobs N]

README.md describes the format. Scenarios need a CUDA device; on a machine without one they run on the stand-in:

    unhand stand-in -- python3 tests/scenarios/run.py

With --no-unhand only the documents are checked: that the memory really stays, and that what `cut` says really frees it.
Each scenario runs in a process of its own, forked from one that has loaded torch and never asked for a device.
"""

import argparse
import faulthandler
import json
import os
import pathlib
import re
import select
import signal
import sys
import tempfile
import time

HERE = pathlib.Path(__file__).resolve().parent
# A scenario takes a second.
TIMEOUT_S = 90
KEYS = {
    "del", "holder", "kind", "bytes", "report", "leak", "gone", "cut", "free", "free-options", "kept", "raises",
    "gc", "only", "cleanup", "scope",
}


class Scenario:
    """One heading of a document, with its Python block and what it expects."""

    def __init__(self, document, line, title):
        self.document, self.line, self.title = document, line, title
        self.code, self.code_line, self.expect, self.not_run = None, 0, {}, None

    @property
    def number(self):
        return self.title.split(".", 1)[0]

    @property
    def place(self):
        return f"{self.document.name}:{self.line}"

    def values(self, key):
        return self.expect.get(key, [])

    def value(self, key, default=None):
        values = self.values(key)
        return values[0] if values else default


def parse(document):
    """The scenarios of one document, in order. Anything that is not understood is an error with its line."""
    scenarios, fence, info, body, fence_line = [], False, "", [], 0
    for number, line in enumerate(document.read_text(encoding="utf-8").splitlines(), 1):
        if line.startswith("```"):
            if not fence:
                fence, info, body, fence_line = True, line[3:].strip(), [], number
                continue
            fence = False
            if info == "python":
                if scenarios[-1].code is not None:
                    raise SystemExit(f"error: a second Python block: `{document.name}:{fence_line}`")
                scenarios[-1].code, scenarios[-1].code_line = "\n".join(body) + "\n", fence_line
            elif info == "expect":
                scenarios[-1].expect = parse_expect(document, fence_line, body)
            continue
        if fence:
            body.append(line)
        elif line.startswith("## "):
            scenarios.append(Scenario(document, number, line[3:].strip()))
        elif line.startswith("Not run:") and scenarios:
            scenarios[-1].not_run = line.removeprefix("Not run:").strip()
    for scenario in scenarios:
        if (scenario.code is None) == (scenario.not_run is None):
            raise SystemExit(f"error: needs either a Python block or a line `Not run:`: `{scenario.place}`")
        if scenario.code is not None and not scenario.expect:
            raise SystemExit(f"error: expects nothing: `{scenario.place}`")
    return scenarios


def parse_expect(document, fence_line, lines):
    expect = {}
    for number, line in enumerate(lines, fence_line + 1):
        if not line.strip():
            continue
        key, colon, value = line.partition(":")
        if not colon or key.strip() not in KEYS:
            raise SystemExit(f"error: not an expectation: `{document.name}:{number}`: `{line}`")
        expect.setdefault(key.strip(), []).append(value.strip())
    return expect


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("documents", nargs="*", type=pathlib.Path)
    parser.add_argument("-k", dest="words", default="", help="only the scenario of this number, or titles with these words")
    parser.add_argument("--no-unhand", action="store_true", help="check the documents, not unhand")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    arguments = parser.parse_args()
    scenarios = [
        scenario
        for document in arguments.documents or sorted(HERE.glob("[0-9][0-9]-*.md"))
        for scenario in parse(document.resolve())
        if wanted(scenario, arguments.words)
    ]
    runnable = [scenario for scenario in scenarios if scenario.not_run is None]
    # Two devices on the stand-in. A forked child asks for them first, so that they are set in time.
    os.environ.setdefault("UNHAND_STANDIN_DEVICES", "2")
    import _checks as checks

    n_failed = n_skipped = 0
    for scenario, result in in_children(runnable, lambda each: checks.run(each, arguments.no_unhand), arguments.jobs):
        if result["failures"]:
            n_failed += 1
            print(f"FAIL {scenario.place} {scenario.title}")
            print(*(indent(failure) for failure in result["failures"]), sep="\n", flush=True)
        elif result["skipped"]:
            n_skipped += 1
            print(f"skip {scenario.place} {scenario.title}: {result['skipped']}", flush=True)
    n_passed = len(runnable) - n_failed - n_skipped
    n_listed = len(scenarios) - len(runnable)
    print(f"{n_skipped} skipped, {n_listed} listed but not run")
    print(f"{n_passed} passed, {n_failed} failed")
    return 1 if n_failed or not runnable else 0


def wanted(scenario, words):
    return not words or (words == scenario.number if words.isdigit() else words in scenario.title)


def indent(text):
    return "\n".join("     " + line for line in text.splitlines())


def in_children(scenarios, function, n_jobs):
    """Yields each scenario with what `function` said about it in a forked child of its own."""
    waiting, running = list(scenarios), {}
    while waiting or running:
        while waiting and len(running) < n_jobs:
            child = Child(waiting.pop(0), function)
            running[child.pipe] = child
        soonest = min(child.deadline for child in running.values()) - time.monotonic()
        ready, _, _ = select.select(list(running), [], [], max(0.0, soonest))
        for pipe in list(running):
            child = running[pipe]
            if pipe in ready and not child.read():
                yield running.pop(pipe).scenario, child.result()
            elif time.monotonic() > child.deadline:
                os.kill(child.process, signal.SIGKILL)
                child.too_late = True


class Child:
    """A forked process that runs one scenario: torch is loaded, CUDA is not. Ends with a line of JSON on its pipe."""

    def __init__(self, scenario, function):
        self.scenario, self.chunks, self.too_late = scenario, [], False
        self.deadline = time.monotonic() + TIMEOUT_S
        self.pipe, write = os.pipe()
        self.errors = tempfile.TemporaryFile()
        self.process = os.fork()
        if self.process == 0:
            try:
                os.dup2(self.errors.fileno(), 1)
                os.dup2(self.errors.fileno(), 2)
                faulthandler.enable()
                answer = json.dumps(function(scenario)).encode()
                while answer:
                    answer = answer[os.write(write, answer):]
                sys.stderr.flush()
            finally:
                # Threads that a scenario left waiting must not keep the child.
                os._exit(0)
        os.close(write)

    def read(self):
        """Whether there is more to come."""
        chunk = os.read(self.pipe, 1 << 16)
        self.chunks.append(chunk)
        return bool(chunk)

    def result(self):
        os.close(self.pipe)
        _, status = os.waitpid(self.process, 0)
        try:
            return json.loads(b"".join(self.chunks))
        except ValueError:
            self.errors.seek(0)
            tail = "\n".join(self.errors.read().decode(errors="replace").strip().splitlines()[-25:])
            why = f"no end after {TIMEOUT_S} s" if self.too_late else f"the process ended with status {status}"
            return {"failures": [f"{why}\n{tail}"], "skipped": None}


def amount(text):
    """`4 MiB` as bytes."""
    match = re.fullmatch(r"(\d+)\s*(KiB|MiB|GiB)?", text.strip())
    if not match:
        raise SystemExit(f"error: not an amount: `{text}`")
    return int(match[1]) * {None: 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[match[2]]


if __name__ == "__main__":
    sys.exit(main())
