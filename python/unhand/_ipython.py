"""`%load_ext unhand`: the magics, the footer of a cell, and a ladder that is brought up to date after each cell.

IPython is imported inside functions: the package names this module's two hooks, and must not need IPython for that.
"""

import re
import sys

from unhand import _footer, _magics

_HEAD = re.compile(r"%%unhand(?:[ \t]+(.*?))?\s*$")


def load_ipython_extension(shell):
    """What `%load_ext unhand` calls: registers the magics `%unhand` and `%%unhand` with IPython's shell."""
    unload_ipython_extension(shell)
    global _session
    _session = Session(shell)


def unload_ipython_extension(shell):
    """What `%unload_ext unhand` calls: takes back everything that loading registered."""
    global _session
    if _session is not None:
        _session.close()
    _session = None


_session: "Session | None" = None


class Session:
    """One loaded extension: what it has registered with the shell, and what is switched on."""

    def __init__(self, shell):
        self.shell = shell
        self.has_footers = False
        """Whether each cell gets a footer (`%unhand footer on`)."""
        self.live: Live | None = None
        """The ladder that is brought up to date after each cell (`%unhand live`)."""
        self._cells: list[_footer.Mark | None] = []
        # The cells that are running, the outermost first: a cell can run another. None for one without a footer.
        self._n_shown = 0
        self._magic = _magics.magic(self)
        self._strip = _stripper(self)
        self._events = {"pre_run_cell": self._before_cell, "post_run_cell": self._after_cell}
        shell.register_magic_function(self._magic, "line_cell", _magics.NAME)
        shell.set_hook("complete_command", self._complete, str_key=f"%{_magics.NAME}")
        shell.input_transformers_cleanup.append(self._strip)
        for event, callback in self._events.items():
            shell.events.register(event, callback)

    def close(self):
        """Takes everything back."""
        shell = self.shell
        self.has_footers, self.live = False, None
        while self._cells:
            mark = self._cells.pop()
            if mark is not None:
                mark.close()
        for event, callback in self._events.items():
            if callback in shell.events.callbacks[event]:
                shell.events.unregister(event, callback)
        if self._strip in shell.input_transformers_cleanup:
            shell.input_transformers_cleanup.remove(self._strip)
        for kind in ("line", "cell"):
            shell.magics_manager.magics[kind].pop(_magics.NAME, None)
        completers = shell.strdispatchers.get("complete_command")
        if completers is not None:
            completers.strs.pop(f"%{_magics.NAME}", None)

    @property
    def is_in_cell(self) -> bool:
        """Whether a cell is running, as far as IPython has told."""
        return bool(self._cells)

    def run_body(self, name, body):
        """`%%unhand` inside another cell: runs the body as `%%time` would, with a footer."""
        mark = _footer.mark(self.shell.user_ns, name)
        error = None
        try:
            return _magics.run(self.shell, body)
        except BaseException as raised:
            error = type(raised).__name__
            raise
        finally:
            self._safely(lambda: self._show_footer(mark, None, error))

    def _before_cell(self, info):
        head = _HEAD.match(_first_line(info.raw_cell))
        if not self._cells:
            self._n_shown = 0
        # First the place: each cell takes one away when it ends.
        self._cells.append(None)
        if head is not None or self.has_footers:
            self._safely(lambda: self._mark(None if head is None else head[1] or ""))

    def _mark(self, name):
        self._cells[-1] = _footer.mark(self.shell.user_ns, name)

    def _after_cell(self, result):
        # The cell that loaded the extension was there before, and has no mark.
        mark = self._cells.pop() if self._cells else None
        if mark is not None:
            error = getattr(result, "error_in_exec", None) or getattr(result, "error_before_exec", None)
            error = None if error is None else type(error).__name__
            self._safely(lambda: self._show_footer(mark, result, error))
        if self.live is not None and not self._cells:
            self._safely(self.live.update)

    def _show_footer(self, mark, result, error):
        if mark.name is None and self._n_shown:
            # A footer inside this cell has said it all.
            mark.close()
            return
        footer = _footer.footer(mark, self.shell.user_ns, error, skip=[] if result is None else [result])
        if mark.name is not None or footer.is_worth_a_line:
            self._n_shown += 1
            show(footer)

    def _safely(self, work):
        """The cell is somebody else's, and what goes wrong here is not its fault."""
        try:
            work()
        except KeyboardInterrupt:
            print("unhand: interrupted while looking at the memory", file=sys.stderr)
        except Exception as error:  # noqa: BLE001
            print(f"unhand: no footer: {type(error).__name__}: {error}", file=sys.stderr)

    def _complete(self, _, event):
        return _magics.complete(event.text_until_cursor, self.shell.user_ns)


class Live:
    """The ladder of each device as a bar, in one place of the notebook, brought up to date after each cell."""

    def __init__(self):
        self._shown = _bundle(None)
        self._handle = show_bundle(self._shown, display_id=True)

    def update(self):
        """Shows the present figures, if they changed."""
        bundle = _bundle(None)
        if bundle != self._shown:
            self._shown = bundle
            self._handle.update(bundle, raw=True)


def _bundle(_):
    from unhand import _html
    from unhand._ladder import ladders

    found = ladders()
    if not found:
        text = "no GPU memory yet"
        return {"text/plain": text, "text/html": _html.sheet(_html.line(text))}
    return {
        "text/plain": "\n".join(_html.bar_text(ladder) for ladder in found),
        "text/html": _html.sheet(*(_html.ladder_bar(ladder) for ladder in found)),
    }


def show(answer):
    """Shows an answer as text and HTML, so that IPython keeps nothing but words."""
    show_bundle({"text/plain": str(answer), "text/html": answer._repr_html_()})


def show_bundle(bundle, **options):
    """Shows what is given by kind of text; returns the handle if `display_id` is among the options."""
    from IPython.display import display

    return display(bundle, raw=True, **options)


def _stripper(session):
    """The transformer that takes `%%unhand` off a cell.

    What is left runs as a cell of its own, so that `await` at the top level, `%%time` below, tracebacks and the last
    value are what they always are. Inside a cell that runs (`%%time` above, a cell that runs cells), the line stays and
    is a magic like others.
    """

    def strip(lines):
        if session.is_in_cell or not lines or not _HEAD.match(lines[0]):
            return lines
        body = lines[1:]
        first = next((at for at, line in enumerate(body) if line.strip()), None)
        if first is None:
            return lines
        # An empty line in place of the head keeps the numbers of the lines in tracebacks. Another magic must be first.
        return body[first:] if body[first].startswith("%%") else ["\n", *body]

    # Whether a cell is complete is asked about the lines as they were typed: a cell magic ends with an empty line.
    strip.has_side_effects = True
    return strip


def _first_line(cell):
    return cell.lstrip().partition("\n")[0]
