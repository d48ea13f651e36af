"""What the guides of the Python package show is what their examples print, and they name every field and every kind.

A line `...` in a document stands for any number of lines. What is shown comes from the release of PyTorch that the guides
name; with another one the examples have to run, and print the same headings.
"""
# packages: pytest jupyter integrations

import ast
import dataclasses
import functools
import os
import re
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
ROOT = os.path.normpath(os.path.join(HERE, "..", "..", ".."))
sys.path.insert(0, os.path.join(HERE, "..", "..", "standin"))

import torch
from bench import main

from unhand import _actions, _batch_size, _floor, _free, _holders, _kinds, _ladder, _recording, _scope_answer, _see
from unhand import _survivors, _verdict

SHOWN_RELEASE = "2.11"
GUIDES = ("report", "holders", "free", "scope", "install", "batches", "watch", "out-of-memory", "pytest", "notebook",
          "dry-run", "integrations")
COMMAND = re.compile(r"\$ ((?:python3|pytest|unhand dry-run) (?:.* )?(examples/\S+\.py).*)$")
# How each program is started, and how it may end: some of the tests are meant to fail, and not everything fits.
PROGRAMS = {
    "python3": ([], {0}),
    "pytest": (["-m", "pytest", "-p", "unhand.pytest_plugin", "-p", "no:cacheprovider"], {1}),
    "unhand": (["-m", "unhand"], {0, 1}),
}


def read(*path):
    with open(os.path.join(ROOT, *path), encoding="utf-8") as file:
        return file.read()


def guide(name):
    return read("docs", "guides", f"{name}.md")


def examples():
    return sorted(f"examples/{name}" for name in os.listdir(os.path.join(ROOT, "examples")) if name.endswith(".py"))


@functools.lru_cache
def output(command):
    """What a command prints, on the stand-in that this process runs on: children inherit it."""
    program, *rest = command.split()
    words, codes = PROGRAMS[program]
    done = subprocess.run([sys.executable, *words, *rest], cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode in codes, f"{command} ended with {done.returncode}:\n{done.stdout}{done.stderr}"
    return done.stdout


def blocks(text):
    """The fenced blocks of a document, as (language, lines)."""
    language, lines = None, []
    for line in text.splitlines():
        if line.strip().startswith("```"):
            if language is None:
                language, lines = line.strip().removeprefix("```"), []
            else:
                yield language, lines
                language = None
        elif language is not None:
            lines.append(line)


def shown():
    """The outputs that the guides show, as (guide, command, example, lines)."""
    for name in GUIDES:
        for language, lines in blocks(guide(name)):
            command = COMMAND.match(lines[0]) if language == "console" and lines else None
            if command:
                yield name, command[1], command[2], [line.rstrip() for line in lines[1:]]


def matches(expected, actual):
    """Whether lines are those expected, where `...` stands for any."""
    if not expected:
        return not actual
    if expected[0] == "...":
        return any(matches(expected[1:], actual[skipped:]) for skipped in range(len(actual) + 1))
    return bool(actual) and expected[0] == actual[0] and matches(expected[1:], actual[1:])


def check_the_examples_print_what_the_guides_show():
    found = list(shown())
    assert len(found) >= 8, f"only {len(found)} outputs: is the reader of the blocks broken?"
    wrong = []
    for name, command, _, expected in found:
        actual = [line.rstrip() for line in output(command).splitlines()]
        if not torch.__version__.startswith(f"{SHOWN_RELEASE}."):
            expected = [line for line in expected if line.startswith("== ")]
            if not set(expected) <= set(actual):
                wrong.append(f"docs/guides/{name}.md: {expected} is not in what {command} prints")
        elif not matches(expected, actual):
            wrong.append(f"docs/guides/{name}.md shows\n" + "\n".join(expected) + f"\n-- and {command} prints\n" + "\n".join(actual))
    assert not wrong, "\n\n".join(wrong)


def check_every_example_is_shown():
    assert set(examples()) == {example for _, _, example, _ in shown()}


def check_an_example_leaves_no_trace():
    """They are for any GPU, and say so: no path of this machine, no setting of the stand-in."""
    for example in examples():
        text = read(example)
        assert ast.get_docstring(ast.parse(text)), f"{example} does not say what it is for"
        assert "UNHAND_STANDIN" not in text, example


def check_python_in_the_guides_can_be_read():
    n_blocks = 0
    for name in GUIDES:
        for language, lines in blocks(guide(name)):
            if language == "python":
                indent = min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)
                compile("\n".join(line[indent:] for line in lines), f"docs/guides/{name}.md", "exec")
                n_blocks += 1
    assert n_blocks >= 4, n_blocks


def check_every_field_is_in_its_guide():
    for name, kinds in {
        "report": (_ladder.Ladder, _see.DeviceReport, _see.Report, _see.Site),
        "holders": (_holders.Holder, _holders.Part, _see.HolderList),
        "free": (_free.Freed, _actions.Action),
        "out-of-memory": (_recording.Recording, _recording.Failure, _recording.Line, _recording.Stuck, _batch_size.BatchSize),
        "scope": (_scope_answer.ScopeResult, _scope_answer.ScopeDevice, _scope_answer.ScopeNode, _survivors.Leak),
        "integrations": (_floor.Landing,),
        "watch": (_verdict.Verdict, _verdict.Grower, _verdict.Forecast),
    }.items():
        text = guide(name)
        fields = [field.name for kind in kinds for field in dataclasses.fields(kind)]
        missing = [field for field in fields if f"`{field}`" not in text]
        assert not missing, f"docs/guides/{name}.md does not name {missing}"


def check_every_kind_is_explained():
    text = guide("holders")
    source = read("python", "unhand", "_see.py") + read("python", "unhand", "_blocks.py")
    rules = [kind for kind in ("dead cycle", "workspace", "pending", "graph pool") if f'"{kind}"' in source]
    assert len(rules) == 4, rules
    missing = [kind for kind in (*_kinds.RANK, *rules) if not re.search(rf"^\|.*`{kind}`.*\|", text, re.MULTILINE)]
    assert not missing, f"docs/guides/holders.md does not explain {missing}"


def check_every_verdict_is_explained():
    text = guide("watch")
    missing = [kind for kind in _verdict.KINDS if not re.search(rf"^\| `{kind}` \|", text, re.MULTILINE)]
    assert not missing, f"docs/guides/watch.md does not explain {missing}"


def check_every_field_says_what_it_is():
    """Each field of an answer has a sentence after it."""
    silent = []
    answers = (_see, _holders, _ladder, _free, _actions, _survivors, _scope_answer, _verdict, _recording, _batch_size,
               _floor)
    for module in answers:
        for node in ast.parse(read("python", "unhand", os.path.basename(module.__file__))).body:
            if not isinstance(node, ast.ClassDef) or node.name.startswith("_") or not ast.get_docstring(node):
                continue
            if not dataclasses.is_dataclass(getattr(module, node.name)):
                continue
            for item, following in zip(node.body, [*node.body[1:], None]):
                if isinstance(item, ast.AnnAssign) and not (
                    isinstance(following, ast.Expr) and isinstance(getattr(following.value, "value", None), str)
                ):
                    silent.append(f"{node.name}.{item.target.id}")
    silent = [name for name in silent if not name.startswith("Scene.")]
    assert not silent, f"no sentence for {silent}"


def check_three_dots_stand_for_any_lines():
    for expected, actual in ((["a", "..."], ["a"]), (["a", "...", "d"], list("abcd")), ([], [])):
        assert matches(expected, actual), (expected, actual)
    for expected, actual in ((["a"], ["b"]), (["a", "...", "d"], ["a", "b"]), (["a"], ["a", "b"]), (["a"], [])):
        assert not matches(expected, actual), (expected, actual)


if __name__ == "__main__":
    main(globals())
