#!/usr/bin/env python3
"""Run the Python tests: those of this folder, or with --torch those of torch/ on the stand-in.

usage: run.py [--torch VERSION]... [WORD...]

Each script runs in a process of its own and closes with a line "N passed, M failed"; a script that ends without one
counts as a failure. Words choose scripts by a part of their names. The package is the one in python/, with the module
that `cargo xtask module` puts there. --torch needs what tests/standin/fetch.py installs, and looks where
UNHAND_STANDIN_CACHE says. A line `# stand-in: NAME=VALUE` in a script sets a variable for it, and `# packages: NAME ...`
adds folders of packages that tests/standin/fetch.py installs.
"""

import argparse
import concurrent.futures
import os
import re
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CACHE = Path(os.environ.get("UNHAND_STANDIN_CACHE") or ROOT / "tests/standin/cache")
# `bench.py`, which all scripts share, is there.
PATH = [ROOT / "python", ROOT / "tests/standin"]
CLOSING = re.compile(r"^\d+ passed, (\d+) failed$", re.MULTILINE)
SETTING = re.compile(r"^# stand-in: (\w+)=(\S+)$", re.MULTILINE)
PACKAGES = re.compile(r"^# packages: (.+)$", re.MULTILINE)
TIMEOUT_S = 900


def main():
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--torch", action="append", default=[], metavar="VERSION", help="on the stand-in, this release")
    parser.add_argument("words", nargs="*", metavar="WORD", help="only scripts with this in their names")
    options = parser.parse_args()
    if not list((ROOT / "python/unhand").glob("_native*.so")):
        sys.exit("run.py: the package has no module yet: run `cargo xtask module`")
    runs = [(script, None) for script in scripts(HERE)]
    if options.torch:
        folders = [HERE / "torch", ROOT / "tests/scenarios"]
        runs = [(script, release) for release in options.torch for folder in folders for script in scripts(folder)]
    if options.words:
        runs = [run for run in runs if any(word in run[0].name for word in options.words)]
    if not runs:
        sys.exit("run.py: no such script")
    # Each script is one process with little to wait for: as many at a time as there are processors.
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda one: run(*one), runs))
    sys.exit(0 if all(results) else 1)


def scripts(folder):
    """The scripts of a folder. What begins with an underscore is shared by them, and not run."""
    own = Path(__file__).resolve()
    return sorted(path for path in folder.glob("*.py") if path != own and not path.name.startswith("_"))


def run(script, release):
    """Run one script and pass its output on; whether all went well."""
    name = str(script.relative_to(ROOT)) + (f", torch {release}" if release else "")
    command, environment = invocation(script, release)
    start = time.monotonic()
    try:
        outcome = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                 stderr=subprocess.STDOUT, timeout=TIMEOUT_S)
        output, code = outcome.stdout, outcome.returncode
    except subprocess.TimeoutExpired as error:
        output, code = error.stdout or b"", f"none after {TIMEOUT_S} s"
    text = output.decode(errors="replace")
    text = text if text.endswith("\n") or not text else text + "\n"
    seconds = time.monotonic() - start
    failures = [int(failed) for failed in CLOSING.findall(text)]
    if code != 0 and not any(failures) or not failures:
        # It ended before, or after, what its own count says.
        text += f"{name} ended with code {code}\n0 passed, 1 failed\n"
        failures.append(1)
    # In one piece: others print meanwhile.
    print(f"-- {name}\n{text}   {seconds:.1f} s\n", end="", flush=True)
    return not any(failures)


def invocation(script, release):
    """The command and the environment that run a script."""
    path = list(PATH)
    command = [sys.executable, str(script)]
    environment = {key: value for key, value in os.environ.items() if not is_setting(key)}
    if release:
        torch = CACHE / f"torch-{release}"
        if not (torch / "torch").is_dir():
            sys.exit(f"run.py: torch {release} is not in {CACHE}: run tests/standin/fetch.py {release}")
        text = script.read_text(encoding="utf-8")
        more = [CACHE / name for line in PACKAGES.findall(text) for name in line.split()]
        for folder in more:
            if not folder.is_dir():
                sys.exit(f"run.py: {folder.name} is not in {CACHE}: run tests/standin/fetch.py")
        path = [torch, CACHE / "packages", CACHE / "checks", *more, *path]
        command = [*launcher(), "--torch", str(torch / "torch"), "--", *command]
        # A script may need a machine of its own kind: `# stand-in: UNHAND_STANDIN_DEVICES=3`.
        environment.update(SETTING.findall(text))
    else:
        # Beside these scripts is a folder named torch, which is not PyTorch.
        environment["PYTHONSAFEPATH"] = "1"
    environment["PYTHONPATH"] = os.pathsep.join(map(str, path))
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    return command, environment


def is_setting(key):
    """Whether a variable of the caller would change what a script sees."""
    return key.startswith(("PYTORCH_", "PYTHON", "CUDA_", "UNHAND_STANDIN_")) and key != "UNHAND_STANDIN_CACHE"


def launcher():
    """What runs a command on the stand-in: `unhand stand-in`, or the program named by UNHAND_STANDIN_RUN."""
    if named := os.environ.get("UNHAND_STANDIN_RUN"):
        return [named]
    return [sys.executable, "-m", "unhand", "stand-in"]


if __name__ == "__main__":
    main()
