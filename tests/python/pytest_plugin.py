"""What of the pytest plugin needs neither pytest nor PyTorch: loading it, sizes, peaks of a history, the child process."""

import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import textwrap
from pathlib import Path

from bench import main, raises
from unhand import _pytest_child, _pytest_leaks, _pytest_peaks, _pytest_standin, _sizes
from unhand.errors import StandinError

MIB = 1 << 20
# As much of pytest as the plugin needs to be imported.
PYTEST = """
class hookimpl:
    def __init__(self, **options): pass
    def __call__(self, function): return function
def fixture(function): return function
"""
HEAVY = ["torch", "numpy", "_pytest", "xdist", "IPython"]


def check_loading_the_plugin_imports_nothing_heavy():
    with tempfile.TemporaryDirectory() as folder:
        for name in HEAVY:
            Path(folder, f"{name}.py").write_text(f"print('imported {name}')\n", encoding="utf-8")
        Path(folder, "pytest.py").write_text(PYTEST, encoding="utf-8")
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([folder, os.environ["PYTHONPATH"]]))
        program = "import sys, os, unhand.pytest_plugin; print(sorted(n for n in sys.modules if n.startswith('unhand')))"
        program += "; print(len(os.listdir('/proc/self/task')))"
        done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
        assert done.stdout == "['unhand', 'unhand.pytest_plugin']\n1\n", done.stdout + done.stderr


def check_sizes():
    for text, n_bytes in {
        "2 GiB": 2 << 30, "1.5MiB": 3 << 19, "512": 512, " 7 b ": 7, "1 GB": 10**9, ".5k": 512, "3 g": 3 << 30, "0": 0,
        "0.1 KB": 100, "1.25 TiB": 5 << 38,
    }.items():
        assert _sizes.parse(text) == n_bytes, text
    assert _sizes.parse(12) == 12
    for wrong in ("", "GiB", "1 XiB", "-1", "1 GiB more", "1..5 MiB", "1e3"):
        raises(ValueError, lambda: _sizes.parse(wrong), "not a size")
    raises(ValueError, lambda: _sizes.parse(-1), "not a size")
    for wrong in (1.5, None, True, b"1"):
        raises(TypeError, lambda: _sizes.parse(wrong), "not a size")


def event(action, address, size, *frames):
    frames = [{"filename": name, "line": line, "name": function} for name, line, function in frames]
    return {"action": action, "addr": address, "size": size, "frames": frames}


def check_the_peak_of_a_history():
    here, torch = ("/x/test_a.py", 3, "test_a"), ("/site/torch/nn.py", 9, "forward")
    caller, runner = ("/x/model.py", 8, "step"), ("/site/_pytest/python.py", 1, "call")
    events = [
        # A block from before the beginning goes first.
        event("free_requested", 9, 5 * MIB),
        event("free_completed", 9, 5 * MIB),
        event("alloc", 1, 6 * MIB, torch, caller, here, runner),
        event("alloc", 2, 100, torch, here, runner),
        event("free_requested", 1, 6 * MIB),
        event("alloc", 1, 2 * MIB, here),
        event("alloc", 3, 3 * MIB, ("/site/torch/a.cpp", 1, "x")),
        event("free_requested", 3, 3 * MIB),
        event("free_completed", 3, 3 * MIB),
    ]
    best, sites = _pytest_peaks.peak_of(events)
    assert best == MIB + 512, "what was freed from before counts"
    assert [(site.place, site.requested_bytes, site.n_blocks) for site in sites] == [
        ("model.py:8 step()", 6 * MIB, 1), ("test_a.py:3 test_a()", 100, 1)
    ], sites
    _, sites = _pytest_peaks.peak_of(events[2:], n_frames=3)
    assert sites[0].place == "model.py:8 step() <- test_a.py:3 test_a()", sites
    assert _pytest_peaks.peak_of([]) == (0, ()) and _pytest_peaks.peak_of(events[:2]) == (0, ())
    _, sites = _pytest_peaks.peak_of([event("alloc", 1, 8)])
    assert sites[0].place.startswith("no Python frame"), sites


def check_pytest_s_references_are_named_as_fixtures():
    for path, words in {
        "anyio.x.session.items[0].funcargs['cache']['model']": "fixture `cache`['model']",
        "a.b._arg2fixturedefs['model'][0].cached_result[0].weight": "fixture `model`.weight",
        "x.py:3 f() local `self`._a['net'][<Module>][0].cached_result[0]": "fixture `net`",
        "test_a.cached_results[0]": "test_a.cached_results[0]",
    }.items():
        assert _pytest_leaks._in_words_of_pytest(path) == words, path


# The child process


def double(n):
    return {"double": [2 * n, WORD]}


WORD = "seen"


def child(what, *args, **more):
    """What a job does and answers, without a stand-in."""
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder, "job.json")
        words = {**_pytest_standin._job(what, args), "path": sys.path, "answer": f"{folder}/answer.json", **more}
        job.write_text(json.dumps(words), encoding="utf-8")
        command = [sys.executable, _pytest_child.__file__, str(job)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=60)
        answer = Path(folder, "answer.json")
        return done, json.loads(answer.read_text(encoding="utf-8")) if answer.exists() else None


def check_a_child_runs_functions_and_programs():
    # This file is `__main__` here, so the child is told its name.
    done, said = child(double, 4, module="pytest_plugin")
    assert said == {"value": {"double": [8, "seen"]}} and done.returncode == 0, done.stderr

    def inside(n):
        return double(n)["double"][0]

    assert child(inside, 5, module="pytest_plugin")[1] == {"value": 10}
    done, said = child("import sys\nprint('out'); print('err', file=sys.stderr)\nresult = [1, None]")
    assert said == {"value": [1, None]} and done.stdout == "out\n" and done.stderr == "err\n"
    assert child("x = 1")[1] == {"value": None}


def check_a_child_tells_what_went_wrong():
    done, said = child("def f():\n    raise KeyError('here')\nf()")
    assert done.returncode == 1 and said["error"] == done.stderr and "line 2, in f" in said["error"], said
    assert "_pytest_child" not in said["error"] and said["error"].endswith("KeyError: 'here'\n"), said
    assert "no JSON value" in child("result = {1, 2}")[1]["error"]
    done, said = child("import sys; sys.exit(7)")
    assert done.returncode == 7 and said is None
    skip = "class Skipped(BaseException):\n    allow_module_level = False\nraise Skipped('no reason')"
    assert child(skip)[1] == {"skipped": "no reason"}


def check_what_cannot_be_sent_is_refused():
    n = 3
    raises(TypeError, lambda: _pytest_standin._job(lambda: 1, ()), "neither a function")
    raises(TypeError, lambda: _pytest_standin._job(len, ()), "neither a function")

    def closes_over():
        return n

    raises(TypeError, lambda: _pytest_standin._job(closes_over, ()), "uses `n` of the function around it")


# The launcher


def with_environment(call, **values):
    """Call with other variables, and a package torch that can be found."""
    before = dict(os.environ)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "torch").mkdir()
        Path(folder, "torch", "__init__.py").write_text("raise SystemExit('imported torch')", encoding="utf-8")
        launcher = Path(folder, "launcher")
        # `--torch FOLDER -- COMMAND`, as the stand-in's.
        launcher.write_text('#!/bin/sh\necho "$2" >&2\nshift 3\nexec "$@"\n', encoding="utf-8")
        launcher.chmod(0o755)
        for name in before:
            if name.startswith("UNHAND_STANDIN_") or name in ("LD_PRELOAD", "UNHAND_PYTEST_STANDIN"):
                del os.environ[name]
        os.environ.update({name: value.format(folder=folder) for name, value in values.items()})
        sys.path.insert(0, folder)
        try:
            return call(folder)
        finally:
            sys.path.remove(folder)
            os.environ.clear()
            os.environ.update(before)


def check_the_fixture_starts_the_launcher():
    def call(folder):
        standin = _pytest_standin.Standin(folder, "test")
        program = "import os; result = sorted(v for v in os.environ.items() if v[0].startswith('UNHAND_STANDIN_'))"
        done = standin.run(program, devices=3, memory="2 GiB", gpu="t4")
        assert done.stderr == f"{folder}/torch\n" and done.exit_code == 0, done
        settings = dict(done.value)
        del settings["UNHAND_STANDIN_RUN"]
        expected = {"DEVICES": "3", "GPU": "t4", "MEMORY": str(2 << 30)}
        assert settings == {f"UNHAND_STANDIN_{name}": value for name, value in expected.items()}, settings
        text = raises(StandinError, lambda: standin.run("1 / 0"), "the program failed on the stand-in")
        assert "ZeroDivisionError" in text, text
        assert standin.run("1 / 0", check=False).exit_code == 1
        raises(StandinError, lambda: standin.run("import time; time.sleep(60)", timeout=1), "not done after 1 s")
        raises(_pytest_standin.Unavailable, lambda: standin.run("1", memory="much"), "not a size")

    with_environment(call, UNHAND_STANDIN_RUN="{folder}/launcher")


def check_where_there_is_no_stand_in_that_is_said():
    words = with_environment(lambda folder: _pytest_standin.command(), UNHAND_STANDIN_RUN="{folder}/launcher")
    assert words[0].endswith("launcher") and words[-1] == "--", words
    # On the stand-in already: children are too.
    assert with_environment(lambda folder: _pytest_standin.command(), UNHAND_STANDIN_CUDA="13", LD_PRELOAD=" ") == []
    if importlib.util.find_spec("torch") is None:
        raises(_pytest_standin.Unavailable, _pytest_standin.command, "PyTorch is not installed")


def check_a_session_starts_itself_again():
    """`restart` in place of a process: with the same arguments of the interpreter, once."""
    program = textwrap.dedent(
        """
        import sys, types
        from unhand import _pytest_standin
        config = types.SimpleNamespace(invocation_params=types.SimpleNamespace(args=tuple(sys.argv[1:])))
        options = types.SimpleNamespace(standin_gpu="t4", standin_memory=None, standin_devices="2")
        try:
            _pytest_standin.restart(config, options)
        except _pytest_standin.Unavailable as error:
            print("unavailable:", error)
        else:
            import os
            print(sys.flags.utf8_mode, sys.argv[1:], os.environ["UNHAND_STANDIN_GPU"], os.environ["UNHAND_STANDIN_DEVICES"])
        """
    )

    def call(folder, launcher='#!/bin/sh\nshift 3\nUNHAND_STANDIN_CUDA=13 LD_PRELOAD=" " exec "$@"\n'):
        Path(folder, "launcher").write_text(launcher, encoding="utf-8")
        Path(folder, "session.py").write_text(program, encoding="utf-8")
        environment = dict(os.environ, PYTHONPATH=os.pathsep.join([folder, os.environ["PYTHONPATH"]]))
        words = [sys.executable, "-X", "utf8", f"{folder}/session.py", "--standin", "a b"]
        done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=60)
        return done.stdout + done.stderr

    said = with_environment(call, UNHAND_STANDIN_RUN="{folder}/launcher")
    assert said == "1 ['--standin', 'a b'] t4 2\n", said
    idle = '#!/bin/sh\nshift 3\nexec "$@"\n'
    said = with_environment(lambda folder: call(folder, idle), UNHAND_STANDIN_RUN="{folder}/launcher")
    assert said == "unavailable: the session was started again, and is not on the stand-in\n", said


if __name__ == "__main__":
    main(globals())
