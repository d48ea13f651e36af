"""The line after `%unhand`: its subcommands, what may follow them, and how it is completed. Registers nothing itself."""

import ast
import difflib
from dataclasses import dataclass, field

NAME = "unhand"

HELP = """\
%unhand report [DEVICE] [--limit N]      where every byte is, and who holds it
%unhand holders [EXPRESSION] [--limit N] every reference that keeps it alive; without one, who holds the GPU memory
%unhand ladder [DEVICE]                  from the driver's figure down to what tensors asked for
%unhand free [EXPRESSION ...]            their memory goes back to the driver, and IPython forgets what was freed
        [--shared] [--dry-run]           without expressions: tracebacks, shown values (Out, _), dead cycles, caches
%unhand compact [DEVICE] [--dry-run]     moves live tensors together, so that stuck memory goes back
%unhand footer on|off                    after each cell that used GPU memory: what it took, and what it left behind
%unhand live on|off                      a bar of the memory, brought up to date after each cell
%unhand help                             this text

%%unhand [NAME]                          runs the cell, with a footer: allocated and reserved, the peak, the time, the
                                         names that the cell defined, and what it left behind beside them

DEVICE is `1` or `cuda:1`. EXPRESSION is Python without spaces outside of brackets: `model`, `trainer.history[-1]`. What a
line magic answers is a value: `freed = %unhand free model`, then `freed.returned_bytes`."""


@dataclass(frozen=True, slots=True)
class Command:
    """What may follow a subcommand."""

    usage: str
    takes: str = ""
    """`device`, `expression`, `expressions`, `switch`, or nothing."""
    flags: tuple[str, ...] = ()
    """Options without a value."""
    numbers: tuple[str, ...] = ()
    """Options with a number."""


COMMANDS = {
    "report": Command("%unhand report [DEVICE] [--limit N]", "device", numbers=("--limit",)),
    "holders": Command("%unhand holders [EXPRESSION] [--limit N]", "expression", numbers=("--limit",)),
    "ladder": Command("%unhand ladder [DEVICE]", "device"),
    "free": Command("%unhand free [EXPRESSION ...] [--shared] [--dry-run]", "expressions", flags=("--shared", "--dry-run")),
    "compact": Command("%unhand compact [DEVICE] [--dry-run]", "device", flags=("--dry-run",)),
    "footer": Command("%unhand footer on|off", "switch"),
    "live": Command("%unhand live on|off", "switch"),
    "help": Command("%unhand help"),
}


@dataclass(slots=True)
class Asked:
    """A line, taken apart."""

    command: str
    words: list[str] = field(default_factory=list)
    options: dict = field(default_factory=dict)
    """Options by the name of the parameter: `dry_run`."""


class UsageProblem(ValueError):
    """What is wrong with a line, and what to write instead."""


def magic(session):
    """The function behind `%unhand` and `%%unhand`; `session` is the extension's."""
    from IPython.core.error import UsageError
    from IPython.core.magic import no_var_expand

    def unhand(line, cell=None):
        if cell is not None:
            return session.run_body(line.strip(), cell)
        try:
            return _run(session, parse(line))
        except UsageProblem as problem:
            raise UsageError(str(problem)) from None

    unhand.__doc__ = f"See what holds your GPU memory, make it let go, keep it free.\n\n{HELP}\n"
    # `{x}` and `$x` belong to the expression, and to expand them would make copies of all variables.
    return no_var_expand(unhand)


def parse(line) -> Asked:
    """A line as a command with its words and options; `UsageProblem` says what is wrong with it."""
    words = split(line)
    if not words:
        raise UsageProblem("which one: " + ", ".join(f"`%unhand {name}`" for name in COMMANDS))
    name, *rest = words
    command = COMMANDS.get(name)
    if command is None:
        close = difflib.get_close_matches(name, COMMANDS, 1)
        hint = f"; did you mean `%unhand {close[0]}`?" if close else ""
        raise UsageProblem(f"no such subcommand: `{name}`{hint} (`%unhand help` lists them)")
    asked = Asked(name)
    rest.reverse()
    while rest:
        word = rest.pop()
        if word in command.flags:
            asked.options[_parameter(word)] = True
        elif word in command.numbers:
            number = rest.pop() if rest else ""
            if not number.isdigit() or not int(number):
                raise UsageProblem(f"`{word}` needs a number from 1 on, as in `{word} 50`: `{number}`")
            asked.options[_parameter(word)] = int(number)
        elif word.startswith("--"):
            raise UsageProblem(f"no such option: `{word}` (usage: `{command.usage}`)")
        else:
            asked.words.append(word)
    most = {"": 0, "expressions": len(asked.words)}.get(command.takes, 1)
    if len(asked.words) > most:
        raise UsageProblem(f"too much: `{asked.words[most]}` (usage: `{command.usage}`)")
    if command.takes == "switch" and asked.words not in (["on"], ["off"], []):
        raise UsageProblem(f"neither `on` nor `off`: `{asked.words[0]}` (usage: `{command.usage}`)")
    return asked


def split(line) -> list[str]:
    """The words of a line: what spaces or commas part, outside of brackets and quotes."""
    words, word, open_brackets, quote, is_escaped = [], "", [], None, False
    for character in line:
        if quote is not None:
            is_end = character == quote and not is_escaped
            is_escaped = character == "\\" and not is_escaped
            quote = None if is_end else quote
        elif character in "'\"":
            quote = character
        elif character in "([{":
            open_brackets.append(character)
        elif character in ")]}" and open_brackets:
            open_brackets.pop()
        elif not open_brackets and (character.isspace() or character == ","):
            words.append(word)
            word = ""
            continue
        word += character
    return [word for word in [*words, word] if word]


def complete(text, names) -> list[str]:
    """What may come next after `text`, the line up to the cursor; `names` are the user's variables."""
    words = split(text)[1:]
    is_new = not text or text[-1].isspace()
    done = words if is_new else words[:-1]
    begun = "" if is_new or not words else words[-1]
    if not done:
        return [name for name in COMMANDS if name.startswith(begun)]
    command = COMMANDS.get(done[0])
    if command is None:
        return []
    options = [option for option in (*command.flags, *command.numbers) if option not in done]
    found = []
    if command.takes.startswith("expression") and not begun.startswith("-"):
        found = sorted(name for name in names if not name.startswith("_") and name not in _OF_IPYTHON)
    elif command.takes == "switch":
        found = ["on", "off"]
    elif command.takes == "device":
        from unhand import _allocator

        found = [f"cuda:{index}" for index in _allocator.devices()]
    return [word for word in [*found, *options] if word.startswith(begun)]


_OF_IPYTHON = {"In", "Out", "exit", "quit", "get_ipython", "open"}


def run(shell, body):
    """Runs the lines of a cell in the user's namespace, and returns the value of the last one if it is an expression.

    IPython's shell would show a traceback by itself and go on; here an exception ends the cell, as it does without
    `%%unhand`.
    """
    from IPython.core.error import UsageError

    tree = shell.transform_ast(shell.compile.ast_parse(shell.transform_cell(body)))
    last = None
    if tree.body and isinstance(tree.body[-1], ast.Expr):
        last = ast.Expression(tree.body.pop().value)
    # The shell counts on when a cell begins: this is still the one before.
    name = shell.compile.cache(body, shell.execution_count - 1, raw_code=body)
    allowed = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
    codes = [(compile(part, name, mode, allowed), mode) for part, mode in ((tree, "exec"), (last, "eval")) if part is not None]
    if any(code.co_flags & _COROUTINE for code, _ in codes):
        raise UsageError("`await` at the top level needs `%%unhand` on the first line of the cell")
    value = None
    for code, mode in codes:
        value = eval(code, shell.user_ns) if mode == "eval" else exec(code, shell.user_ns)  # noqa: S307
    return value


_COROUTINE = 0x80


def _run(session, asked):
    import unhand

    if asked.command == "help":
        print(HELP)
        return None
    if asked.command in ("footer", "live"):
        return _switch(session, asked)
    names = session.shell.user_ns
    device = _device(asked.words[0]) if COMMANDS[asked.command].takes == "device" and asked.words else None
    try:
        if asked.command == "report":
            return unhand.report(device, **asked.options)
        if asked.command == "ladder":
            return unhand.ladder(device)
        if asked.command == "compact":
            return unhand.compact(device=device, **asked.options)
        if asked.command == "holders":
            # Not over a list, and without `**`, which makes a tuple of the rest: they would be holders too.
            limit = asked.options.get("limit", 20)
            return unhand.holders(_value(asked.words[0], names) if asked.words else None, limit=limit)
        return unhand.free(*(_value(word, names) for word in asked.words), notebook_history=True, **asked.options)
    except (unhand.Error, ValueError, TypeError, RuntimeError) as error:
        raise UsageProblem(str(error)) from None


def _switch(session, asked):
    from unhand import _ipython

    is_on = asked.words != ["off"]
    if asked.command == "footer":
        session.has_footers = is_on
        print("a footer after each cell that uses GPU memory: `%unhand footer off` ends it" if is_on else "no footers any more")
        return
    if not is_on:
        session.live = None
        print("what was shown stays as it is")
    elif getattr(session.shell, "kernel", None) is None:
        raise UsageProblem("a terminal cannot bring up to date what it has shown: use `%unhand footer on`")
    else:
        session.live = _ipython.Live()


def _value(expression, names):
    """What an expression is; `UsageProblem` where it is nothing."""
    try:
        code = compile(expression, "<%unhand>", "eval")
    except SyntaxError as error:
        raise UsageProblem(f"not an expression: `{expression}` ({error.msg})") from None
    try:
        return eval(code, names)  # noqa: S307
    except NameError as error:
        name = getattr(error, "name", None) or expression
        close = difflib.get_close_matches(name, [known for known in names if not known.startswith("_")], 1)
        hint = f"; did you mean `{close[0]}`?" if close else ""
        raise UsageProblem(f"no such name: `{name}`{hint}") from None
    except Exception as error:  # noqa: BLE001
        raise UsageProblem(f"`{expression}` cannot be looked up: {type(error).__name__}: {error}") from None


def _device(word):
    if word.isdigit():
        return int(word)
    if word.removeprefix("cuda:").isdigit() or word == "cuda":
        return word
    raise UsageProblem(f"not a device: `{word}` (write `0` or `cuda:0`)")


def _parameter(option):
    return option.removeprefix("--").replace("-", "_")
