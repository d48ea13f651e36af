"""Shown values leave every place of IPython, and only those that are asked for. Needs no torch."""

import builtins
import contextlib
import io
import os
import sys
import types
import weakref

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "standin"))

from bench import main

from unhand import _notebook


class Big:
    """Stands for a tensor."""


def holds(value):
    return isinstance(value, Big)


def fake_shell():
    """What IPython 8.12 and 9.18 have after three cells showed a value, by hand."""
    values = [Big(), "text", Big()]
    hook = types.SimpleNamespace(_=values[2], __=values[1], ___=values[0])
    history = {1: values[0], 2: values[1], 3: values[2]}
    names = {"_": values[2], "__": values[1], "___": values[0], "_1": values[0], "_2": values[1], "_3": values[2]}
    return types.SimpleNamespace(
        displayhook=hook,
        user_ns={**names, "_oh": history, "Out": history, "x": 5},
        user_ns_hidden=dict(names),
        last_execution_result=types.SimpleNamespace(result=values[2]),
    ), [weakref.ref(values[0]), weakref.ref(values[2])]


def check_all_places_are_emptied():
    shell, watches = fake_shell()
    assert _notebook.drop_shown_values(shell, holds) == 2
    assert [watched() for watched in watches] == [None, None]
    assert shell.user_ns["Out"] == {2: "text"} and shell.user_ns["_2"] == "text" and shell.user_ns["x"] == 5
    assert shell.user_ns["_"] == shell.user_ns["___"] == "" and shell.user_ns["__"] == "text"
    assert shell.displayhook._ == "" and shell.displayhook.__ == "text" and shell.last_execution_result is None
    assert _notebook.drop_shown_values(shell, holds) == 0


def check_the_user_s_own_names_stay():
    shell, watches = fake_shell()
    own, numbered = Big(), Big()
    shell.user_ns["_"], shell.user_ns["_3"], shell.user_ns["_7"] = own, numbered, numbered
    assert _notebook.drop_shown_values(shell, holds) == 2
    assert shell.user_ns["_"] is own and shell.user_ns["_3"] is numbered and shell.user_ns["_7"] is numbered
    assert [watched() for watched in watches] == [None, None]


def check_the_plain_interpreter_only_when_asked():
    big = Big()
    watched = weakref.ref(big)
    builtins._ = big
    del big
    assert _notebook.drop_shown_values(None, holds) == 0 and watched() is not None
    assert _notebook.drop_shown_values(None, holds, interpreter_too=True) == 1 and watched() is None
    assert not hasattr(builtins, "_")


def check_no_shell_without_ipython():
    if "IPython" not in sys.modules:
        assert _notebook.running_shell() is None


def check_the_real_ipython():
    try:
        from IPython.core.interactiveshell import InteractiveShell
    except ImportError:
        print("IPython is not installed: its real shell was not asked")
        return
    shell = InteractiveShell.instance()
    assert _notebook.running_shell() is shell
    shell.user_ns["Big"] = Big

    def run(cell):
        with contextlib.redirect_stdout(io.StringIO()):
            shell.run_cell(cell, store_history=True)

    run("x = Big()")
    run("x")
    run("'text'")
    run("x")
    watched = weakref.ref(shell.user_ns["x"])
    run("del x")
    assert watched() is not None
    assert _notebook.drop_shown_values(shell, holds) == 1 and watched() is None
    assert "text" in shell.user_ns["Out"].values()
    # What comes later is kept as ever.
    run("'later'")
    assert shell.user_ns["_"] == "later"


if __name__ == "__main__":
    main(globals())
