"""Tests on the stand-in: a whole session that starts itself again there, or one function in a process of its own."""

import functools
import importlib.util
import inspect
import json
import os
import subprocess
import sys
import textwrap
import types
from dataclasses import dataclass
from pathlib import Path

from unhand import _sizes
from unhand.errors import StandinError

# Set for the process that `--standin` starts, so that it is not started for ever where a launcher does nothing.
_STARTED = "UNHAND_PYTEST_STANDIN"


class Unavailable(Exception):
    """Why there is no stand-in here."""


@dataclass(frozen=True, slots=True)
class Result:
    """What a process on the stand-in did."""

    value: object
    """What the function returned, or the variable `result` of a program; None if there was none."""
    stdout: str
    """What it printed."""
    stderr: str
    """What it printed to stderr."""
    exit_code: int
    """The exit code of the process."""


class Standin:
    """Runs code under the real PyTorch on the stand-in, in a process of its own."""

    def __init__(self, folder, name):
        self._folder, self._name = Path(folder), name
        self._n_runs = 0

    def run(self, what, *args, devices=None, memory=None, gpu=None, timeout=300, check=True) -> Result:
        """Run a function, or the source of a program, and wait for its end.

        The file that the function is in is imported there, with the same `sys.path`; a function inside of another one may
        use its globals, and nothing of the function around it: pass that in `args`. Arguments and what it returns have to
        be JSON values. A program is executed, and its variable `result` is the value.

        `devices` is how many, `memory` the memory of each such as `"8 GiB"`, `gpu` a name such as `"h200"`; None leaves
        what the environment says. StandinError with the traceback of the process when it fails, or takes longer than
        `timeout` seconds; with `check=False` a failure is told by `exit_code` and `stderr` only. Where the code calls
        `pytest.skip`, the test is skipped.
        """
        __tracebackhide__ = True
        self._n_runs += 1
        job = self._folder / f"standin-{self._n_runs}.json"
        answer = job.with_suffix(".answer.json")
        job.write_text(json.dumps({**_job(what, args), "path": sys.path, "answer": str(answer)}), encoding="utf-8")
        words = [*command(), sys.executable, "-m", "unhand._pytest_child", str(job)]
        try:
            done = subprocess.run(
                words, env=_environment(gpu, memory, devices), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                timeout=timeout,
            )
        except subprocess.TimeoutExpired as error:
            raise StandinError(f"not done after {timeout} s on the stand-in: {_name(what)}") from error
        said = json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else {}
        if "skipped" in said:
            import pytest

            pytest.skip(said["skipped"])
        if check and (done.returncode != 0 or "value" not in said):
            reason = said.get("error") or done.stderr[-4000:] or f"exit code {done.returncode}"
            raise StandinError(f"{_name(what)} failed on the stand-in:\n{reason.rstrip()}")
        return Result(said.get("value"), done.stdout, done.stderr, done.returncode)


def restart(config, options):
    """Start this pytest again on the stand-in, in place of this process; nothing where it is there already."""
    wanted = {
        name: value
        for name, value in _settings(options.standin_gpu, options.standin_memory, options.standin_devices).items()
        if os.environ.get(name) != value
    }
    if is_here() and not wanted:
        return
    if _STARTED in os.environ and not is_here():
        raise Unavailable("the session was started again, and is not on the stand-in")
    if list(config.invocation_params.args) != sys.argv[1:]:
        raise Unavailable("pytest was called by a program: start that program with `unhand stand-in --`")
    words = [*command(), sys.executable, *sys.orig_argv[1:]]
    sys.stdout.flush()
    sys.stderr.flush()
    try:
        os.execvpe(words[0], words, {**os.environ, **wanted, _STARTED: "1"})
    except OSError as error:
        raise Unavailable(f"cannot start `{words[0]}`: {error.strerror}") from None


def is_here() -> bool:
    """Whether this process is on the stand-in: the launcher leaves word in the environment."""
    return "UNHAND_STANDIN_CUDA" in os.environ and bool(os.environ.get("LD_PRELOAD"))


def command() -> list[str]:
    """What to put before a command so that it runs on the stand-in; nothing where children do anyway.

    Unavailable where there is no PyTorch, or no launcher.
    """
    found = importlib.util.find_spec("torch")
    if found is None or found.origin is None:
        raise Unavailable("PyTorch is not installed")
    if is_here():
        return []
    launcher = os.environ.get("UNHAND_STANDIN_RUN")
    if launcher:
        return [launcher, "--torch", os.path.dirname(found.origin), "--"]
    if not _has_command():
        raise Unavailable("this installation has no `unhand stand-in`, and UNHAND_STANDIN_RUN names no launcher")
    return [sys.executable, "-m", "unhand", "stand-in", "--"]


@functools.lru_cache
def _has_command() -> bool:
    words = [sys.executable, "-m", "unhand", "stand-in", "--help"]
    return subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True).returncode == 0


def _environment(gpu, memory, devices):
    return {**os.environ, **_settings(gpu, memory, devices)}


def _settings(gpu, memory, devices) -> dict[str, str]:
    """Variables of the stand-in. Unavailable for what is no size or number."""
    found = {}
    try:
        if gpu is not None:
            found["UNHAND_STANDIN_GPU"] = str(gpu)
        if memory is not None:
            found["UNHAND_STANDIN_MEMORY"] = str(_sizes.parse(memory))
        if devices is not None:
            found["UNHAND_STANDIN_DEVICES"] = str(int(devices))
    except (TypeError, ValueError) as error:
        raise Unavailable(str(error)) from None
    return found


def _job(what, args) -> dict:
    """What the process is told."""
    if isinstance(what, str):
        return {"program": textwrap.dedent(what), "args": args}
    if not isinstance(what, types.FunctionType) or what.__name__ == "<lambda>":
        raise TypeError(f"neither a function of a file nor source: `{what!r}`")
    if what.__code__.co_freevars:
        names = ", ".join(f"`{name}`" for name in what.__code__.co_freevars)
        raise TypeError(f"`{what.__name__}` uses {names} of the function around it: pass what it needs as arguments")
    module = sys.modules[what.__module__]
    job = {"module": module.__name__, "file": module.__file__, "function": what.__qualname__, "args": args}
    if "<locals>" in what.__qualname__:
        job["source"] = textwrap.dedent(inspect.getsource(what))
        job["function"] = what.__name__
    return job


def _name(what) -> str:
    return "the program" if isinstance(what, str) else f"`{what.__name__}`"
