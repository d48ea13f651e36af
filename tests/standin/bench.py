"""What the scripts of this folder share: checks that are counted, and a last line that says how many passed.

A script is a list of functions named `check_…`; `main` runs them in order, prints each that fails with its traceback
and goes on. Words after the script's name choose checks by a part of their names.
"""

import sys
import traceback


def main(namespace):
    checks = [(name, check) for name, check in namespace.items() if name.startswith("check_")]
    if sys.argv[1:]:
        checks = [(name, check) for name, check in checks if any(word in name for word in sys.argv[1:])]
    failed = 0
    for name, check in checks:
        try:
            check()
        except Exception:
            failed += 1
            print(f"FAILED {name}")
            traceback.print_exc(file=sys.stdout)
    print(f"{len(checks) - failed} passed, {failed} failed", flush=True)
    sys.exit(1 if failed else 0)


def raises(kind, call, words=""):
    """Whether a call raises an error of this kind, with these words in its message."""
    try:
        call()
    except kind as error:
        if words not in str(error):
            raise AssertionError(f"`{words}` is not in: {error}") from error
        return str(error)
    raise AssertionError(f"no {kind.__name__}")
