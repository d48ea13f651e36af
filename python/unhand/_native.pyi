"""The types of the extension module; `tests/python/native.py` compares this file with the built one."""

from collections.abc import Sequence

def devices() -> str:
    """All devices and the processes on them as the driver sees them now, as JSON; makes no CUDA context.

    `RuntimeError` says why there is no answer: no driver, no permission.
    """

def format_bytes(bytes: int) -> str:
    """A number of bytes as people read it, for example `1.5 GiB`: the way the whole project writes sizes."""

def main(argv: Sequence[str]) -> int:
    """Run the command line `argv`, program name first, and give the exit code."""
