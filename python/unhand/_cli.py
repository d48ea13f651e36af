"""The entry point of the `unhand` command; imports nothing of the package but `unhand._native` before it is needed."""

import signal
import sys

from unhand import _native


def main():
    """Run the command with the arguments of this process and give its exit code."""
    # Not `sys.argv[0]`: with `python -m unhand` that is the path of a file, and help would show it.
    argv = ["unhand", *sys.argv[1:]]
    plan = _native.run_plan(argv)
    if plan is not None:
        # The program of the user's, which has Python's own signals.
        from unhand import _run

        return _run.run(plan)
    # Python's own handler only sets a flag, which nobody looks at before the native code is done.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    return _native.main(argv)
