"""Makes old exceptions let go of the frames they keep: `sys.last_*`, IPython's places, and every chain from there.

An exception keeps its traceback, that keeps the frames of the failed call, and those keep all locals: activations, the
batch, `self`. Exceptions that are being handled now, and frames that run or will go on, are left alone.
"""

import gc
import sys
import types
from dataclasses import dataclass

from unhand import _allocator

LAST = ("last_exc", "last_value", "last_traceback", "last_type")
_GENERATORS = 0x20 | 0x80 | 0x200
# `frame.f_locals` is a copy kept in the frame up to CPython 3.12, and a view of it after.
_LOCALS_ARE_COPIED = sys.version_info < (3, 13)


@dataclass(slots=True)
class Forgotten:
    """What was let go of. Names only: a reference here would keep what was meant to go."""

    kinds: list[str]
    places: list[str]
    n_frames: int


def forget(shell=None):
    """Clears the frames of remembered exceptions and drops the references to them; `shell` is IPython's, if it runs."""
    forgotten = Forgotten([], [], 0)
    spared = _being_handled()
    spared_tracebacks = {id(error.__traceback__) for error in spared.values()}
    places = [*_system_places(), *(_shell_places(shell) if shell is not None else ())]
    tracebacks = []
    for name, remembered, let_go in places:
        chain = _chain(remembered)
        if id(remembered) in spared_tracebacks or any(id(error) in spared for error in chain):
            # What this exception holds will go when its handler ends. The place goes with it the next time.
            continue
        for error in chain:
            if error.__traceback__ is not None:
                tracebacks.append(error.__traceback__)
                forgotten.kinds.append(type(error).__name__)
        if isinstance(remembered, types.TracebackType):
            tracebacks.append(remembered)
        let_go()
        forgotten.places.append(name)
        del chain, remembered, let_go
        error = None
    places.clear()
    spared_frames = _frames_of(spared.values())
    forgotten.n_frames = _clear(tracebacks, spared_frames)
    spared.clear()
    return forgotten


def clear(tracebacks):
    """Clears the frames of tracebacks that somebody stored, and returns how many. The list is empty afterwards.

    The exceptions stay where they are, with their messages and lines: only the locals of the failed calls go.
    """
    spared = _being_handled()
    spared_frames = _frames_of(spared.values())
    spared.clear()
    return _clear(tracebacks, spared_frames)


def unwind(error, outer=None):
    """Takes the frames from an exception that is caught and done with: its locals, traceback, cause and context.

    Unlike `forget` it does so while the exception is being handled. `outer`, what the caller was handling before, and
    all that came from there stay whole. The message stays, so the exception can still be raised. Returns how many
    frames were cleared.
    """
    spared = {id(one): one for one in _chain(outer)}
    chain = [one for one in _chain(error) if id(one) not in spared]
    tracebacks = [one.__traceback__ for one in chain if one.__traceback__ is not None]
    spared_frames = _frames_of(spared.values())
    for one in chain:
        one.__traceback__ = None
        suppressed = one.__suppress_context__
        # To set a cause says that the context is not to be shown.
        one.__cause__ = one.__context__ = None
        one.__suppress_context__ = suppressed
    chain.clear()
    spared.clear()
    one = error = outer = None  # noqa: F841
    return _clear(tracebacks, spared_frames)


def clear_locals(error):
    """Takes the locals of the failed calls from an exception that goes on, and from what it came from; returns how many.

    The exception keeps its traceback with all lines, so it is shown as ever. Frames that run are left alone, and all are
    while a debugger is open.
    """
    if debugger_is_open():
        return 0
    tracebacks = [one.__traceback__ for one in _chain(error) if one.__traceback__ is not None]
    error = None  # noqa: F841
    return _clear(tracebacks, set())


def debugger_is_open():
    """Whether a debugger is looking at frames, live or dead, in any thread. They must stay as they are then."""
    for frame in sys._current_frames().values():
        while frame is not None:
            code = frame.f_code
            # `pdb.Pdb.interaction`, and IPython's own in debugger.py, which ipdb uses.
            if code.co_name == "interaction" and code.co_filename.endswith(("pdb.py", "debugger.py")):
                return True
            frame = frame.f_back
    return False


def _being_handled():
    """The exceptions that some thread is handling, with those they came from, by identity."""
    current = [sys.exc_info()[1]]
    for raised in sys._current_exceptions().values():
        # One exception since 3.12, what sys.exc_info() returns before.
        current.append(raised[1] if isinstance(raised, tuple) else raised)
    return {id(error): error for one in current for error in _chain(one)}


def _chain(remembered):
    """An exception and all it came from: causes, contexts, members of groups. Nothing for a bare traceback."""
    found, waiting = {}, [remembered]
    while waiting:
        error = waiting.pop()
        if not isinstance(error, BaseException) or id(error) in found:
            continue
        found[id(error)] = error
        waiting += (error.__cause__, error.__context__)
        members = getattr(error, "exceptions", None)
        if isinstance(members, tuple | list):
            waiting += members
    return list(found.values())


def _system_places():
    """`sys.last_*`: set by the interactive interpreter, IPython and pytest when an exception is printed."""
    return [(f"sys.{name}", getattr(sys, name), _deleter(name)) for name in LAST if hasattr(sys, name)]


def _deleter(name):
    def let_go():
        if hasattr(sys, name):
            delattr(sys, name)

    return let_go


def _shell_places(shell):
    """Where IPython keeps exceptions (IPython/core/interactiveshell.py, ultratb.py): 8.12 and 9.18 have the same."""
    places = []
    result = getattr(shell, "last_execution_result", None)
    for name in ("error_in_exec", "error_before_exec"):
        error = getattr(result, name, None)
        if error is not None:

            def let_go():
                # Whole, and not its exceptions alone: `success` of what is left would lie.
                shell.last_execution_result = None

            places.append((f"last_execution_result.{name}", error, let_go))
    formatter = getattr(shell, "InteractiveTB", None)
    if getattr(formatter, "tb", None) is not None:

        def let_go_of_formatter():
            formatter.tb = None

        places.append(("InteractiveTB.tb", formatter.tb, let_go_of_formatter))
    syntax = getattr(shell, "SyntaxTB", None)
    if getattr(syntax, "last_syntax_error", None) is not None:

        def let_go_of_syntax_error():
            syntax.last_syntax_error = None

        places.append(("SyntaxTB.last_syntax_error", syntax.last_syntax_error, let_go_of_syntax_error))
    debugger = getattr(formatter, "pdb", None)
    if debugger is not None and getattr(debugger, "curframe", None) is not None and hasattr(debugger, "forget"):
        # `%debug` leaves the frames it looked at in the debugger.
        places.append(("InteractiveTB.pdb", None, debugger.forget))
    return places


def _frames_of(errors):
    frames = set()
    for error in errors:
        step = error.__traceback__
        while step is not None:
            frames.add(step.tb_frame)
            step = step.tb_next
    return frames


def _clear(tracebacks, spared):
    """Clears the frames of tracebacks, and returns how many."""
    frames = set()
    for step in tracebacks:
        while step is not None:
            frames.add(step.tb_frame)
            step = step.tb_next
    tracebacks.clear()
    frames -= spared
    # Clearing the frame of a generator that waits ends the generator.
    if any(frame.f_code.co_flags & _GENERATORS for frame in frames):
        if not _allocator.objects_are_frozen():
            frames -= _suspended_frames()
        else:
            # Frozen generators cannot be found, so nobody can say which of these have ended.
            frames = {frame for frame in frames if not frame.f_code.co_flags & _GENERATORS}
    n_cleared = 0
    for frame in frames:
        try:
            frame.clear()
        except RuntimeError:
            # It is running.
            continue
        n_cleared += 1
        if _LOCALS_ARE_COPIED and frame.f_code.co_flags & 1:
            # Whoever looked at `f_locals` before (IPython's formatter, a debugger) left a copy in the frame, which
            # clear() does not empty (cpython#113939). Looking again brings it up to date: empty.
            frame.f_locals  # noqa: B018
    return n_cleared


def _suspended_frames():
    """The frames of all generators and coroutines that may go on."""
    kinds = {
        types.GeneratorType: "gi_frame",
        types.CoroutineType: "cr_frame",
        types.AsyncGeneratorType: "ag_frame",
    }
    frames = set()
    for thing in gc.get_objects():
        attribute = kinds.get(type(thing))
        if attribute is not None:
            # None once it has ended.
            frame = getattr(thing, attribute)
            if frame is not None:
                frames.add(frame)
    return frames
