"""What importing the package does not do: bring in PyTorch and its like, start a thread, open a device."""

import os
import subprocess
import sys
import tempfile

from bench import main

# Packages that many have beside unhand and that take seconds to import.
HEAVY = ["torch", "numpy", "IPython", "transformers", "accelerate", "lightning", "optuna", "pytest", "pandas", "rich"]
# What the package needs to be there at once.
STATEMENTS = ["import unhand", "import unhand._cli", "from unhand import _native", "import unhand.integrations"]


def outcome_of(program, *path):
    """What a fresh interpreter prints that has `path` before everything else."""
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join([*path, os.environ["PYTHONPATH"]]))
    outcome = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=60)
    assert outcome.returncode == 0, outcome.stderr
    return outcome.stdout


def check_nothing_heavy_is_imported():
    with tempfile.TemporaryDirectory() as folder:
        # They are importable, whether or not this machine has the real ones, and say so.
        for name in HEAVY:
            with open(f"{folder}/{name}.py", "w", encoding="utf-8") as file:
                file.write(f"print('imported {name}')\n")
        assert outcome_of("import torch", folder) == "imported torch\n"
        for statement in STATEMENTS:
            assert outcome_of(statement, folder) == "", statement


def check_the_command_needs_only_the_native_module():
    program = "import sys, unhand._cli; print(sorted(name for name in sys.modules if name.startswith('unhand')))"
    assert outcome_of(program) == "['unhand', 'unhand._cli', 'unhand._native']\n"


def check_no_thread_starts():
    program = "{}; import os; print(len(os.listdir('/proc/self/task')))"
    for statement in STATEMENTS:
        assert outcome_of(program.format(statement)) == "1\n", statement


def check_no_device_is_opened():
    program = "{}; print([line for line in open('/proc/self/maps') if 'libcuda' in line or 'nvidia' in line])"
    for statement in STATEMENTS:
        assert outcome_of(program.format(statement)) == "[]\n", statement


def check_signals_are_left_alone():
    program = "import signal; before = [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM)]\n"
    program += "{}\nprint(before == [signal.getsignal(n) for n in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM)])"
    for statement in STATEMENTS:
        assert outcome_of(program.format(statement)) == "True\n", statement


if __name__ == "__main__":
    main(globals())
