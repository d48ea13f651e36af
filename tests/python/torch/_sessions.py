"""Sessions of pytest with unhand's plugin, for the scripts that check it: in this process, or in one of their own."""

import contextlib
import gc
import io
import os
import subprocess
import sys
import tempfile
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

MIB = 1 << 20
FOLDER = tempfile.TemporaryDirectory()
HEAD = """
import gc, sys, unittest
import pytest, torch
MIB = 1 << 20
def big(mib, device="cuda"):
    return torch.empty(mib * MIB, dtype=torch.uint8, device=device)
"""
OPTIONS = ["-p", "unhand.pytest_plugin", "--capture=sys", "-p", "no:anyio", "-q", "-rN"]


@dataclass
class Ran:
    """A session of pytest."""

    code: int
    text: str
    outcomes: dict
    """(name of the test, phase) to outcome."""
    words: dict
    """Name of the test to all that its reports say."""
    figures: dict

    def section(self):
        """The section at the end, without its title."""
        if "GPU memory ====" not in self.text:
            return ""
        lines = self.text.split("GPU memory ====", 1)[1].splitlines()[1:]
        # The last one counts the tests.
        return "\n".join(lines[:-1])


class Reports:
    def __init__(self):
        self.outcomes, self.words, self.figures = {}, {}, {}

    def pytest_runtest_logreport(self, report):
        name = report.nodeid.partition("::")[2]
        self.outcomes[name, report.when] = report.outcome
        self.words[name] = self.words.get(name, "") + report.longreprtext
        if hasattr(report, "unhand_gpu"):
            self.figures[name] = report.unhand_gpu


def write(source, name):
    path = Path(FOLDER.name, f"test_{name}.py")
    path.write_text(HEAD + textwrap.dedent(source), encoding="utf-8")
    return path


def run(source, *options, name=None):
    """A session on one file, in this process. With a name there is a cache from one session to the next."""
    cache = [] if name else ["-p", "no:cacheprovider"]
    name = name or f"session{len(os.listdir(FOLDER.name))}"
    path, reports, said = write(source, name), Reports(), io.StringIO()
    options = [*OPTIONS, f"--rootdir={FOLDER.name}", "-c", os.devnull, *cache, *options]
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = pytest.main([*options, str(path)], plugins=[reports])
    sys.modules.pop(f"test_{name}", None)
    for word in ("last_type", "last_value", "last_traceback", "last_exc"):
        if hasattr(sys, word):
            delattr(sys, word)
    gc.collect()
    return Ran(int(code), said.getvalue(), reports.outcomes, reports.words, reports.figures)


def child(path, *options, **environment):
    """A session in a process of its own."""
    words = [sys.executable, "-m", "pytest", *OPTIONS, f"--rootdir={FOLDER.name}", "-c", os.devnull, *options, str(path)]
    environment = {**os.environ, "UNHAND_PYTEST_STANDIN": "", **environment}
    return subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300, cwd=FOLDER.name)


def passes(ran, *names):
    for name in names:
        for phase in ("setup", "call", "teardown"):
            assert ran.outcomes[name, phase] == "passed", f"{name} {phase}\n{ran.text}"
