"""The magics without a GPU: how a line is taken apart and completed, what is said when it is wrong, and, where IPython is
installed, that loading registers everything and unloading takes it all back. Needs no torch.
"""

import contextlib
import io
import os
import sys

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "standin"))

from bench import main, raises

import unhand
from unhand import _footer, _holders, _ipython, _magics

try:
    from IPython.core.interactiveshell import InteractiveShell
except ImportError:
    InteractiveShell = None
    print("IPython is not installed: only what needs none was checked (tests/python/torch/jupyter.py has the rest)")


def with_ipython(check):
    """The check, or one that does nothing without IPython."""
    return check if InteractiveShell is not None else lambda: None


def check_words_are_parted_outside_of_brackets_and_quotes():
    assert _magics.split(" free  model, optimizer ") == ["free", "model", "optimizer"]
    assert _magics.split("holders d['a b'][f(1, 2)]") == ["holders", "d['a b'][f(1, 2)]"]
    assert _magics.split("holders d[\"it's\"] x") == ["holders", 'd["it\'s"]', "x"]
    assert _magics.split(r"free d['a\' b'] y") == ["free", r"d['a\' b']", "y"]
    assert _magics.split("") == _magics.split(" , ") == []
    assert _magics.split("free a[") == ["free", "a["] and _magics.split("free a] b") == ["free", "a]", "b"]


def check_a_line_is_understood():
    assert _magics.parse("report cuda:1 --limit 5") == _magics.Asked("report", ["cuda:1"], {"limit": 5})
    assert _magics.parse("free model optimizer --dry-run --shared") == _magics.Asked(
        "free", ["model", "optimizer"], {"dry_run": True, "shared": True}
    )
    assert _magics.parse("footer on").words == ["on"] and _magics.parse("live").words == []


def check_what_is_wrong_is_said_with_what_to_do():
    for line, words in {
        "": "which one: `%unhand report`",
        "repot": "did you mean `%unhand report`?",
        "quux": "`%unhand help` lists them",
        "report 0 1": "too much: `1` (usage: `%unhand report [DEVICE] [--limit N]`)",
        "report --limit": "`--limit` needs a number from 1 on, as in `--limit 50`: ``",
        "report --limit 0": "needs a number",
        "free x --harder": "no such option: `--harder`",
        "footer maybe": "neither `on` nor `off`: `maybe`",
        "help me": "too much: `me`",
    }.items():
        raises(_magics.UsageProblem, lambda line=line: _magics.parse(line), words)
    names = {"model": 1, "_x": 2}
    raises(_magics.UsageProblem, lambda: _magics._value("modle", names), "did you mean `model`?")
    raises(_magics.UsageProblem, lambda: _magics._value("a[", names), "not an expression: `a[`")
    raises(_magics.UsageProblem, lambda: _magics._value("model.x", names), "cannot be looked up: AttributeError")
    raises(_magics.UsageProblem, lambda: _magics._device("gpu"), "write `0` or `cuda:0`")
    assert _magics._device("1") == 1 and _magics._device("cuda:1") == "cuda:1"


def check_completion():
    names = {"model": 1, "models": 2, "_hidden": 3, "In": 4}
    assert _magics.complete("%unhand ", names) == list(_magics.COMMANDS)
    assert _magics.complete("%unhand re", names) == ["report"]
    assert _magics.complete("%unhand free mo", names) == ["model", "models"]
    assert _magics.complete("%unhand free model --s", names) == ["--shared"]
    assert _magics.complete("%unhand free model --shared --", names) == ["--dry-run"]
    assert _magics.complete("%unhand holders ", names) == ["model", "models", "--limit"]
    assert _magics.complete("%unhand footer o", names) == ["on", "off"]
    assert _magics.complete("%unhand quux x", names) == []


def check_the_help_names_every_subcommand_and_option():
    for name, command in _magics.COMMANDS.items():
        assert f"%unhand {name}" in _magics.HELP
        assert all(option in _magics.HELP and option in command.usage for option in (*command.flags, *command.numbers))


def check_names_of_the_cell_are_told_from_others():
    namespace = {"__name__": "__main__", "old": [1], "same": [2], "_": 5, "Out": {}, "exit": 1}
    mark = _footer.mark(namespace, "x")
    assert not any(value is namespace["old"] for value in mark.names.values()), "a mark keeps no value"
    namespace.update(old=[3], new=[4], _=6, _7=7, _i7="")
    defined, known = _footer._names(mark, namespace)
    assert defined == {"old", "new"} and known >= {"old", "new", "same"} and not known & {"_", "_7", "Out", "exit"}
    mark.births.close()
    assert _footer._root("__main__.model[0].weight", "__main__.") == "model"
    assert _footer._root("lib.model", "__main__.") is None


def check_what_can_be_typed_of_a_path():
    for path, name in {
        "__main__.model[0].weight": "model[0].weight",
        "__main__.state['a b'].x": "state['a b'].x",
        "__main__.state['it\\'s … [<'][key <Parameter>]": "state['it\\'s … [<']",
        "__main__.optimizer.state[<Parameter>]": "optimizer.state",
        "__main__.losses[2].grad_fn …._saved_self": "losses[2].grad_fn",
        "train.py:3 f() local `x`": "x",
        "(Tensor held by native code)": "it",
        "": "it",
    }.items():
        assert _holders.to_name(path) == name, (path, _holders.to_name(path))


def check_the_hooks_are_not_among_the_names_for_users():
    assert callable(unhand.load_ipython_extension) and callable(unhand.unload_ipython_extension)
    assert not {"load_ipython_extension", "unload_ipython_extension"} & set(unhand.__all__)


def shell():
    return InteractiveShell.instance(colors="NoColor")


def run(cell):
    """What a cell prints, and its result."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        result = shell().run_cell(cell, store_history=True)
    return out.getvalue() + err.getvalue(), result


@with_ipython
def check_loading_registers_and_unloading_takes_back():
    def state():
        one = shell()
        return (
            {event: list(callbacks) for event, callbacks in one.events.callbacks.items()},
            list(one.input_transformers_cleanup),
            {kind: set(magics) for kind, magics in one.magics_manager.magics.items()},
            set(one.strdispatchers["complete_command"].strs),
        )

    before = state()
    run("%load_ext unhand")
    loaded = state()
    assert all(old != new for old, new in zip(before, loaded))
    run("%reload_ext unhand")
    assert [len(part) for part in state()[1:2]] == [len(part) for part in loaded[1:2]], "not twice"
    run("%unload_ext unhand")
    assert state() == before
    assert "not found" in run("%unhand help")[0]


def loaded(check):
    """The check with the extension loaded, and unloaded afterwards."""

    def checked():
        run("%load_ext unhand")
        try:
            check()
        finally:
            run("%unload_ext unhand")

    return with_ipython(checked)


@loaded
def check_a_cell_has_its_footer_and_its_value():
    text, result = run("%%unhand named\nvalue = 6 * 7\nvalue")
    assert result.result == 42 and "unhand: named, " in text and "no GPU memory" in text
    assert text.index("42") < text.index("unhand: named"), "the footer comes after"
    assert "unhand:" in run("\n%%unhand\n1")[0]
    assert "unhand:" not in run("value")[0] and "unhand:" not in run("text = '''\n%%unhand\n'''")[0]


@loaded
def check_exceptions_end_the_cell_with_their_line():
    text, result = run("%%unhand\n\n1 / 0")
    assert isinstance(result.error_in_exec, ZeroDivisionError) and "failed with ZeroDivisionError" in text
    assert "line 3" in text, text
    text, result = run("%%unhand\nif:\n")
    assert isinstance(result.error_before_exec, SyntaxError) and "failed with SyntaxError" in text
    assert "cell body is empty" in run("%%unhand\n")[0]


@loaded
def check_await_at_the_top_level():
    text, result = run("%%unhand\nimport asyncio\nawait asyncio.sleep(0)\n'slept'")
    assert result.result == "slept" and "unhand:" in text
    assert "first line of the cell" in run("%%time\n%%unhand\nawait asyncio.sleep(0)")[0]


@loaded
def check_with_other_cell_magics():
    text, result = run("%%unhand outer\n%%time\n6 * 7")
    assert "Wall time" in text and "unhand: outer" in text and result.result == 42
    text, result = run("%%time\n%%unhand inner\nnumber = 6\nnumber * 7")
    assert "Wall time" in text and text.count("unhand: inner") == 1 and result.result == 42
    assert shell().user_ns["number"] == 6
    text, result = run("%%time\n%%unhand inner\n1 / 0")
    # IPython 8 shows the exception in `%%time` itself, and later ones let it end the cell.
    assert "failed with ZeroDivisionError" in text and "division by zero" in text
    assert _ipython._session._cells == []


@loaded
def check_lines():
    text, result = run("%unhand report")
    assert "no GPU memory" in text and type(result.result).__name__ == "Report"
    assert "no GPU memory" in run("report = %unhand report\nprint(report)")[0]
    assert "UsageError" in run("%unhand ladder")[0] and "has not started CUDA" in run("%unhand ladder")[0]
    text, result = run("%unhand repot")
    assert "UsageError: no such subcommand: `repot`" in text and "Traceback" not in text
    assert "%unhand free" in run("%unhand help")[0]
    assert "a terminal cannot" in run("%unhand live on")[0]
    assert "See what holds your GPU memory" in shell().find_line_magic("unhand").__doc__


@loaded
def check_expressions_are_not_expanded():
    run("answers = {'a b': [1]}")
    text, result = run("%unhand holders answers['a b']")
    assert result.result.of == "list" and "answers['a b']" in str(result.result), text
    assert "not an expression" in run("%unhand holders {answers")[0]


@loaded
def check_the_shell_completes():
    run("model_of_mine = []")
    line = "%unhand free model_of"
    assert "model_of_mine" in shell().complete("model_of", line, len(line))[1]
    line = "%unhand re"
    assert "report" in shell().complete("re", line, len(line))[1]


@loaded
def check_typing_goes_on_after_the_head():
    assert shell().check_complete("%%unhand\nx = 1")[0] == "incomplete"


@loaded
def check_footers_are_silent_without_a_gpu():
    run("%unhand footer on")
    assert "unhand:" not in run("1 + 1")[0]
    assert run("%%unhand\n1")[0].count("unhand:") == 1
    assert "no footers" in run("%unhand footer off")[0]


@loaded
def check_a_broken_footer_breaks_no_cell():
    for name in ("mark", "footer"):
        real = getattr(_footer, name)
        setattr(_footer, name, lambda *arguments, **options: 1 / 0)
        try:
            text, result = run("%%unhand\n6 * 7")
        finally:
            setattr(_footer, name, real)
        assert result.result == 42 and result.success and text.count("no footer: ZeroDivisionError") == 1, text
        assert _ipython._session._cells == []


if __name__ == "__main__":
    main(globals())
