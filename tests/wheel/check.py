#!/usr/bin/env python3
"""Install a built wheel into a fresh environment of each Python, and run the command there in every way.

usage: check.py WHEEL PYTHON...      (a PYTHON is an interpreter: python3.10, a path, ...)

Needs no network: the wheel has no dependencies.
"""

import configparser
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECORDING = "tests/snapshots/leak.default.pickle.xz"
LICENCES = {"LICENSE-MIT", "LICENSE-APACHE", "NOTICE"}
FILES = {"unhand/__init__.py", "unhand/_cli.py", "unhand/_native.abi3.so", "unhand/_native.pyi", "unhand/py.typed"}


def main():
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    wheel, interpreters = Path(sys.argv[1]), sys.argv[2:]
    check_contents(wheel)
    answers = {check_in(interpreter, wheel) for interpreter in interpreters}
    assert len(answers) == 1, "the answer depends on the version of Python"


def check_contents(wheel):
    assert "-cp310-abi3-" in wheel.name, f"{wheel.name} is not for every Python from 3.10 on"
    names = set(zipfile.ZipFile(wheel).namelist())
    licences = {Path(name).name for name in names if "/licenses/" in name}
    assert licences >= LICENCES, f"missing: {LICENCES - licences}"
    assert names >= FILES, f"missing: {FILES - names}"
    native = [name for name in names if name.endswith(".so")]
    assert len(native) == 1, f"one native library serves the module and the command: {native}"
    entries = configparser.ConfigParser()
    where = next(name for name in names if name.endswith("/entry_points.txt"))
    entries.read_string(zipfile.ZipFile(wheel).read(where).decode())
    plugin = entries["pytest11"]["unhand"]
    assert plugin == "unhand.pytest_plugin" and "unhand/pytest_plugin.py" in names, f"pytest finds no plugin: {plugin}"
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes")


def check_in(interpreter, wheel):
    """The command's answer about a recording, with this interpreter."""
    with tempfile.TemporaryDirectory() as folder:
        run([interpreter, "-m", "venv", folder])
        python, unhand = f"{folder}/bin/python", f"{folder}/bin/unhand"
        run([python, "-m", "pip", "install", "--quiet", "--no-index", "--disable-pip-version-check", str(wheel)])
        version = run([unhand, "--version"])
        assert version == run([python, "-m", "unhand", "--version"]) and version.startswith("unhand "), version
        answer = run([unhand, "explain", RECORDING])
        assert answer == run([python, "-m", "unhand", "explain", RECORDING])
        assert f"{RECORDING}, device 0" in answer
        # The wheel's version is the command's.
        program = "import importlib.metadata; print('unhand', importlib.metadata.version('unhand'))"
        assert run([python, "-c", program]) == version
        print(f"{run([python, '--version']).strip()}: {version.strip()}, explains {RECORDING}")
        return answer


def run(command):
    outcome = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert outcome.returncode == 0, f"{command}: {outcome.returncode}\n{outcome.stdout}{outcome.stderr}"
    return outcome.stdout


if __name__ == "__main__":
    main()
