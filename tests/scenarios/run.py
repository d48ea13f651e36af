#!/usr/bin/env python3
"""Run the scenarios of this folder: each sets up a leak, and unhand has to name its holder and make it let go.

usage: run.py [DOCUMENT…] [-k WORDS] [--no-unhand] [--jobs N]

README.md describes the format. Scenarios need a CUDA device; on a machine without one they run on the stand-in:

    standin-run --torch FOLDER/torch -- python3 tests/scenarios/run.py

With --no-unhand only the documents are checked: that the memory really stays, and that what `cut` says really frees it.
The parent imports no torch. A document runs in one child process; a scenario marked `fresh`, in its own.
"""

import argparse
import concurrent.futures
import json
import os
import pathlib
import re
import subprocess
import sys

HERE = pathlib.Path(__file__).resolve().parent
# A child that says nothing for so long hangs.
CHILD_TIMEOUT_S = 150
KEYS = {
    "del", "holder", "kind", "bytes", "report", "leak", "gone", "cut", "free", "free-options", "kept", "raises",
    "gc", "only", "fresh", "cleanup",
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


# --- the parent -----------------------------------------------------------------------------------------------------


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("documents", nargs="*", type=pathlib.Path)
    parser.add_argument("-k", dest="words", default="", help="only scenarios whose title or number has these words")
    parser.add_argument("--no-unhand", action="store_true", help="check the documents, not unhand")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1))
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return child(pathlib.Path(arguments.child[0]), arguments.child[1:], arguments.no_unhand)
    documents = arguments.documents or sorted(HERE.glob("[0-9][0-9]-*.md"))
    groups, n_not_run = [], 0
    for document in documents:
        together = []
        for scenario in parse(document.resolve()):
            if arguments.words and arguments.words not in scenario.title and arguments.words != scenario.number:
                continue
            if scenario.not_run is not None:
                n_not_run += 1
            elif scenario.value("fresh"):
                groups.append((document, [scenario.number]))
            else:
                together.append(scenario.number)
        if together:
            groups.append((document, together))
    with concurrent.futures.ThreadPoolExecutor(arguments.jobs) as pool:
        results = [result for batch in pool.map(lambda group: run_group(*group, arguments.no_unhand), groups)
                   for result in batch]
    for result in results:
        for failure in result["failures"]:
            print(f"FAIL {result['place']} {result['title']}\n{indent(failure)}")
        if result["skipped"]:
            print(f"skip {result['place']} {result['title']}: {result['skipped']}")
        if result.get("left"):
            print(f"note {result['place']} left {result['left']} bytes behind; the next ran in a new process")
    n_failed = sum(bool(result["failures"]) for result in results)
    n_skipped = sum(bool(result["skipped"]) for result in results)
    n_passed = len(results) - n_failed - n_skipped
    print(f"{n_passed} passed, {n_failed} failed, {n_skipped} skipped, {n_not_run} listed but not runnable here")
    return 1 if n_failed or not results else 0


def indent(text):
    return "\n".join("     " + line for line in text.splitlines())


def run_group(document, numbers, no_unhand):
    """Runs scenarios of one document in a child, and in another one after a scenario that left memory behind."""
    results, waiting = [], list(numbers)
    while waiting:
        command = [sys.executable, str(HERE / "run.py"), *(["--no-unhand"] if no_unhand else [])]
        environment = {"UNHAND_STANDIN_DEVICES": "2", "PYTHONDONTWRITEBYTECODE": "1", **os.environ}
        try:
            done = subprocess.run([*command, "--child", str(document), *waiting], env=environment, timeout=CHILD_TIMEOUT_S,
                                  capture_output=True, text=True, errors="replace")
            output, errors, code = done.stdout, done.stderr, done.returncode
        except subprocess.TimeoutExpired as expired:
            output, errors, code = (expired.stdout or b"").decode(), f"no end after {CHILD_TIMEOUT_S} s", None
        records = [json.loads(line[1:]) for line in output.split("\n") if line.startswith("\x1e")]
        finished = [record for record in records if "failures" in record]
        started = [record for record in records if "start" in record]
        results += finished
        waiting = waiting[len(finished):]
        if waiting and (not finished or not finished[-1].get("left")):
            # The child died: that is the failure of the scenario it was in.
            last = started[-1] if len(started) > len(finished) else {"place": document.name, "title": "the child process"}
            tail = "\n".join(errors.strip().splitlines()[-25:])
            results.append({"place": last["place"], "title": last["title"], "skipped": None,
                            "failures": [f"the process ended with {code}\n{tail}"]})
            waiting = waiting[1:]
    return results


# --- the child ------------------------------------------------------------------------------------------------------


def child(document, numbers, no_unhand):
    """Runs scenarios one after another; a line of JSON before and after each."""
    out = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    import checks

    by_number = {scenario.number: scenario for scenario in parse(document)}
    for number in numbers:
        scenario = by_number[number]
        about = {"place": scenario.place, "title": scenario.title}
        out.write("\x1e" + json.dumps({"start": number, **about}) + "\n")
        result = checks.run(scenario, no_unhand)
        out.write("\x1e" + json.dumps({**about, **result}) + "\n")
        if result["left"]:
            break
    out.flush()
    # Threads that a scenario left waiting must not keep the child.
    os._exit(0)


def amount(text):
    """`4 MiB` as bytes."""
    match = re.fullmatch(r"(\d+)\s*(KiB|MiB|GiB)?", text.strip())
    if not match:
        raise SystemExit(f"error: not an amount: `{text}`")
    return int(match[1]) * {None: 1, "KiB": 1 << 10, "MiB": 1 << 20, "GiB": 1 << 30}[match[2]]


if __name__ == "__main__":
    sys.exit(main())
