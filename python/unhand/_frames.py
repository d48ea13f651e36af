"""The running frames of all threads and their locals, read without leaving anything behind in them."""

import inspect
import os
import sys
import threading
from dataclasses import dataclass

from unhand import _notebook

HERE = os.path.dirname(os.path.abspath(__file__))


@dataclass(frozen=True, slots=True)
class Running:
    """A frame that is running, with what its names refer to."""

    frame: object
    thread: str
    is_this_thread: bool
    function: str
    place: str
    values: list


def is_ours(frame) -> bool:
    """Whether a frame runs code of this package."""
    folder = os.path.dirname(os.path.abspath(frame.f_code.co_filename))
    return folder == HERE or folder.startswith(HERE + os.sep)


def place(code, line) -> str:
    """Where a frame is, as `file.py:12`, or `In[7]:12` in a notebook."""
    file = _notebook.cell_of(code.co_filename) or os.path.basename(code.co_filename)
    return f"{file}:{line or code.co_firstlineno}"


def local_values(frame) -> list:
    """The local variables of a frame as (name, value), and not those of a module's namespace.

    Up to Python 3.12 `frame.f_locals` of a running function makes a dictionary that stays in the frame and keeps the
    values alive after the function let go of them (CPython, Objects/frameobject.c, `PyFrame_FastToLocalsWithError`).
    It is emptied again, unless somebody else has it, by `locals()` or as a debugger.
    """
    if frame.f_locals is frame.f_globals:
        return []
    found = frame.f_locals
    values = list(found.items())
    is_copy = sys.version_info < (3, 13) and frame.f_code.co_flags & inspect.CO_OPTIMIZED
    # The frame, the name `found` and the argument of getrefcount.
    if is_copy and frame.f_trace is None and sys.getrefcount(found) == 3:
        found.clear()
    return values


def own() -> list:
    """The running frames of this package. Empty the list before the function that has it returns.

    A frame that is kept keeps its own locals, so a list of frames in a local variable keeps itself.
    """
    frames = []
    frame = sys._getframe(1)
    while frame is not None:
        if is_ours(frame):
            frames.append(frame)
        frame = frame.f_back
    return frames


def running() -> list[Running]:
    """The running frames of every thread but those of this package, innermost first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    here = threading.get_ident()
    frames = []
    for ident, frame in sys._current_frames().items():
        while frame is not None:
            if not (ident == here and is_ours(frame)):
                code = frame.f_code
                frames.append(
                    Running(
                        frame=frame,
                        thread=names.get(ident, f"thread {ident}"),
                        is_this_thread=ident == here,
                        function=getattr(code, "co_qualname", code.co_name),
                        place=place(code, frame.f_lineno),
                        values=local_values(frame),
                    )
                )
            frame = frame.f_back
    return frames
