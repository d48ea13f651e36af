"""The entry point of the `unhand` command; imports nothing of the package but `unhand._native`."""

import signal
import sys

from unhand import _native


def main():
    """Run the command with the arguments of this process and give its exit code."""
    # Python's own handler only sets a flag, which nobody looks at before the native code is done.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Not `sys.argv[0]`: with `python -m unhand` that is the path of a file, and help would show it.
    return _native.main(["unhand", *sys.argv[1:]])
