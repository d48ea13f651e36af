"""Exceptions that let go of their frames: `sys.last_*`, chains, groups, IPython's places. Needs no torch.

With IPython installed, its real shell is asked too; a shell made of plain objects is asked in any case.
"""

import builtins
import code
import contextlib
import gc
import io
import os
import sys
import threading
import types
import weakref

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "standin"))

from bench import main

from unhand import _tracebacks


class Big:
    """Stands for a tensor."""


def fail(watches, words="out of memory"):
    big = Big()
    watches.append(weakref.ref(big))
    raise RuntimeError(words)


def failed(watches):
    try:
        fail(watches)
    except RuntimeError as error:
        return error


def alive(watches):
    return [watched() is not None for watched in watches]


def ipython():
    """IPython's shell, or nothing if it is not installed."""
    try:
        from IPython.core.interactiveshell import InteractiveShell
    except ImportError:
        return None
    return InteractiveShell.instance()


def run(shell, cell):
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        return shell.run_cell(cell, store_history=True)


def check_what_the_plain_interpreter_keeps():
    watches = []
    interpreter = code.InteractiveInterpreter({"fail": fail, "watches": watches})
    with contextlib.redirect_stderr(io.StringIO()):
        interpreter.runsource("fail(watches)")
    assert alive(watches) == [True]
    answer = _tracebacks.forget()
    assert alive(watches) == [False]
    assert not [name for name in dir(sys) if name.startswith("last_")]
    assert answer.n_frames >= 1 and set(answer.kinds) == {"RuntimeError"}
    assert "sys.last_value" in answer.places


def check_causes_contexts_and_members_go_too():
    watches = []

    def chained():
        try:
            fail(watches)
        except RuntimeError:
            try:
                fail(watches)
            except RuntimeError as second:
                raise ValueError("wrapped") from second

    try:
        chained()
    except ValueError as error:
        sys.last_value = error.with_traceback(None)
    assert alive(watches) == [True, True]
    answer = _tracebacks.forget()
    assert alive(watches) == [False, False] and answer.kinds.count("RuntimeError") == 2

    kind = getattr(builtins, "ExceptionGroup", None)
    if kind is None:
        return
    watches = []
    sys.last_value = kind("several", [failed(watches), kind("inner", [failed(watches)])])
    assert alive(watches) == [True, True]
    _tracebacks.forget()
    assert alive(watches) == [False, False]


def check_a_chain_that_bites_its_tail_ends():
    watches = []
    first, second = failed(watches), failed(watches)
    first.__cause__, second.__cause__ = second, first
    sys.last_value = first
    del first, second
    _tracebacks.forget()
    assert alive(watches) == [False, False]


def check_frames_are_emptied_whoever_else_keeps_the_exception():
    watches = []
    kept = failed(watches)
    sys.last_value = kept
    _tracebacks.forget()
    assert alive(watches) == [False] and kept.__traceback__ is not None


def check_a_look_at_the_locals_does_not_keep_them():
    """Up to CPython 3.12 the look leaves a copy in the frame, which clear() does not empty."""
    watches = []
    kept = failed(watches)
    step = kept.__traceback__
    while step is not None:
        step.tb_frame.f_locals  # noqa: B018
        step = step.tb_next
    sys.last_value = kept
    _tracebacks.forget()
    assert alive(watches) == [False]


def check_what_is_being_handled_stays():
    watches = []
    try:
        fail(watches)
    except RuntimeError as error:
        sys.last_value = error
        answer = _tracebacks.forget()
        assert alive(watches) == [True] and sys.last_value is error and answer.places == []
        try:
            fail(watches)
        except RuntimeError as inner:
            # The outer one is in its context, so it is looked after by the same rule.
            sys.last_value = inner
            sys.last_exc = error
            assert _tracebacks.forget().places == [] and alive(watches) == [True, True]
            del sys.last_exc
        sys.last_traceback = error.__traceback__
        assert _tracebacks.forget().n_frames >= 0
        assert alive(watches)[0] and hasattr(sys, "last_traceback")
    assert _tracebacks.forget().places
    assert alive(watches) == [False, False]


def check_a_frame_shared_with_one_that_is_handled_stays():
    watches = []

    def twice():
        local = Big()
        watches.append(weakref.ref(local))
        sys.last_value = None
        try:
            fail(watches, "first")
        except RuntimeError as error:
            sys.last_value = error
        raise RuntimeError("second")

    try:
        twice()
    except RuntimeError as error:
        # Not in a chain with the first, which it came after; the frame of `twice` is in both tracebacks.
        assert error.__context__ is None
        assert _tracebacks.forget().places == ["sys.last_value"]
        assert alive(watches) == [True, False]
        assert "local" in error.__traceback__.tb_next.tb_frame.f_locals
    assert alive(watches) == [False, False]


def check_what_another_thread_handles_stays():
    watches, ready, go_on, seen = [], threading.Event(), threading.Event(), []

    def handle():
        try:
            fail(watches)
        except RuntimeError as error:
            sys.last_value = error
            ready.set()
            go_on.wait(10)
            seen.append("big" in error.__traceback__.tb_next.tb_frame.f_locals)

    thread = threading.Thread(target=handle)
    thread.start()
    assert ready.wait(10)
    assert _tracebacks.forget().places == [] and alive(watches) == [True]
    go_on.set()
    thread.join()
    assert seen == [True]
    _tracebacks.forget()
    assert alive(watches) == [False]


def check_frames_that_run_stay():
    watches = []

    def outer():
        local = Big()
        watches.append(weakref.ref(local))
        try:
            fail(watches)
        except RuntimeError as error:
            sys.last_value = error
        # `outer` is in the traceback, and runs.
        _tracebacks.forget()
        return local, alive(watches)

    local, states = outer()
    assert states == [True, False] and local is not None


def check_generators_that_wait_go_on():
    watches = []

    def steps():
        try:
            fail(watches)
        except RuntimeError as error:
            sys.last_value = error
        yield 1
        yield 2

    generator = steps()
    assert next(generator) == 1
    _tracebacks.forget()
    assert alive(watches) == [False]
    # Its frame is the first of the traceback. Cleared, it would have ended.
    assert list(generator) == [2]

    generator = steps()
    next(generator)
    gc.freeze()
    try:
        _tracebacks.forget()
    finally:
        gc.unfreeze()
    assert list(generator) == [2] and alive(watches) == [False, False]


def check_generators_that_ended_are_cleared():
    watches = []

    def steps():
        big = Big()
        watches.append(weakref.ref(big))
        yield 1
        raise RuntimeError("ended")

    generator = steps()
    kept = None
    try:
        list(generator)
    except RuntimeError as error:
        kept = error
    sys.last_value = kept
    assert alive(watches) == [True]
    _tracebacks.forget()
    assert alive(watches) == [False] and kept is not None


def check_an_open_debugger_is_seen():
    import pdb

    watches, seen = [], []

    class Quiet(pdb.Pdb):
        def cmdloop(self, intro=None):
            seen.append(_tracebacks.debugger_is_open())

    assert not _tracebacks.debugger_is_open()
    debugger = Quiet(stdin=io.StringIO(), stdout=io.StringIO())
    debugger.reset()
    debugger.interaction(None, failed(watches).__traceback__)
    assert seen == [True] and not _tracebacks.debugger_is_open()


def check_a_shell_of_plain_objects():
    watches = []
    error = failed(watches)
    result = types.SimpleNamespace(error_in_exec=error, error_before_exec=None, result=None)
    forgotten = []
    debugger = types.SimpleNamespace(curframe=1, forget=lambda: forgotten.append(True))
    shell = types.SimpleNamespace(
        last_execution_result=result,
        last_execution_succeeded=False,
        InteractiveTB=types.SimpleNamespace(tb=error.__traceback__, pdb=debugger),
        SyntaxTB=types.SimpleNamespace(last_syntax_error=failed(watches)),
    )
    del error, result
    assert alive(watches) == [True, True]
    answer = _tracebacks.forget(shell)
    assert alive(watches) == [False, False] and forgotten == [True]
    assert shell.last_execution_result is None and shell.last_execution_succeeded is False
    assert shell.InteractiveTB.tb is None and shell.SyntaxTB.last_syntax_error is None
    assert "last_execution_result.error_in_exec" in answer.places and "InteractiveTB.tb" in answer.places


def check_a_shell_without_these_places():
    assert _tracebacks.forget(types.SimpleNamespace()).places == []


def check_a_failed_cell_of_the_real_ipython():
    shell = ipython()
    if shell is None:
        print("IPython is not installed: its real shell was not asked")
        return
    watches = []
    shell.user_ns.update(fail=fail, watches=watches)
    run(shell, "fail(watches)")
    assert alive(watches) == [True] and shell.last_execution_result.error_in_exec is not None
    answer = _tracebacks.forget(shell)
    gc.collect()
    assert alive(watches) == [False], answer
    assert "last_execution_result.error_in_exec" in answer.places and shell.last_execution_succeeded is False
    # The shell goes on, and says that there is nothing to debug.
    assert run(shell, "1 + 1").result == 2
    run(shell, "%tb")


if __name__ == "__main__":
    main(globals())
