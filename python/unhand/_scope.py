"""`scope`: what was allocated inside of a block of code and outlives it is named."""

import contextvars
import functools
import sys
import threading
import time

from unhand import _allocator, _births, _counters, _keep, _survivors
from unhand._native import format_bytes
from unhand._scope_answer import ScopeDevice, ScopeNode, ScopeResult
from unhand.errors import LeakError

_current: contextvars.ContextVar = contextvars.ContextVar("unhand.scope", default=None)
"""The innermost run of this thread, task or callback."""

_lock = threading.Lock()
_open: dict[int, "Run"] = {}
"""The runs that are open in this process, by identity."""

_ALWAYS = 8
"""So often the heap is looked at for a scope of one name. Then at powers of two: a step of training comes thousands of times."""

_NOTHING = _survivors.Found()

_looks: dict[str, int] = {}
"""How often scopes left something behind, by name."""


class Scope:
    """A scope, to go through with `with` or `async with`, or to decorate a function with; see `unhand.scope`.

    `result` is the answer of the last time it was left, a `ScopeResult`; None before. Printing the scope prints it.
    """

    def __init__(self, name, keep, strict, free, device):
        self.name = name
        # A run that left nothing behind makes its answer when somebody asks.
        self._last: Run | ScopeResult | None = None
        self._options = strict, free, device
        self._declared = _keep.Keep(keep)
        self._runs: list[Run] = []

    @property
    def result(self) -> ScopeResult | None:
        """The answer of the last time the scope was left; None before."""
        if isinstance(self._last, Run):
            self._last = self._last.answer(_survivors.Found(), None)
        return self._last

    def keep(self, thing):
        """Declare that an object may outlive the scope, and return it. It is held weakly where Python can.

        A text is the name of a variable and a function is called, both when the scope is left.
        """
        run = self._innermost()
        if run is None:
            raise RuntimeError(f"scope `{self.name}` is not open: give `keep` when making it")
        run.keep.add(thing)
        return thing

    def __enter__(self):
        self._runs.append(Run(self))
        return self

    def __exit__(self, kind, error, traceback):
        self._leave(error, sys._getframe(1))
        return False

    async def __aenter__(self):
        return self.__enter__()

    async def __aexit__(self, kind, error, traceback):
        self._leave(error, sys._getframe(1))
        return False

    def _leave(self, error, frame):
        run = self._innermost()
        if run is None:
            raise RuntimeError(f"scope `{self.name}` is not open")
        self._runs.remove(run)
        run.close(error=error, frame=frame)

    def __call__(self, function):
        """Decorate a function: each call is a scope. Of generators and coroutines, what they do themselves is."""
        if not callable(function) or isinstance(function, type):
            raise TypeError(f"a scope decorates functions, not: `{type(function).__name__}`")
        from unhand import _scope_steps

        wrapper = _scope_steps.wrapped(self, function) or self._wrapped(function)
        wrapper.scope = self
        return wrapper

    def _wrapped(self, function):
        @functools.wraps(function)
        def call(*args, **kwargs):
            run = Run(self)
            try:
                value = function(*args, **kwargs)
            except BaseException as error:
                run.close(error=error, namespace=_globals(function))
                raise
            run.close(passed=(value,), namespace=_globals(function))
            return value

        return call

    def _innermost(self):
        """The run that `with` means here: the innermost of this context, or else of this thread."""
        run = _current.get()
        while run is not None:
            if run.scope is self and run in self._runs:
                return run
            run = run.parent
        mine = [run for run in self._runs if run.thread == threading.get_ident()]
        return (mine or self._runs or [None])[-1]

    def to_dict(self) -> dict:
        """The last answer as plain values. RuntimeError before there is one."""
        return self._answer().to_dict()

    def to_folded(self, figure="handed_out_bytes") -> str:
        """The last answer as folded stacks; see `ScopeNode.to_folded`. RuntimeError before there is one."""
        return self._answer().to_folded(figure)

    def _answer(self):
        if self.result is None:
            raise RuntimeError(f"scope `{self.name}` has no answer yet: it has not been left")
        return self.result

    def __str__(self):
        if self.result is None:
            return f"scope `{self.name}`: not left yet"
        return str(self.result)

    def __repr__(self):
        return f"<unhand scope `{self.name}`>"

    def _repr_html_(self):
        from unhand import _html

        return _html.scope_html(self.result) if self.result is not None else f"<pre>{_html.escape(str(self))}</pre>"


def scope(name, *, keep=(), strict=False, free=False, device=None):
    """A scope: which GPU memory was allocated inside and outlives it, and who keeps it.

        with unhand.scope("eval") as s:
            evaluate(model)
        print(s)

        @unhand.scope("step", strict=True)
        def step(batch): ...

    The answer is `s.result`, a `ScopeResult`. Works as `with`, `async with`, and as a decorator of functions, generators,
    coroutines and async generators; nested, several at a time, in any thread or task.

    `keep` is what may outlive it besides what is returned or yielded: an object, a function that returns it, the name of a
    variable as text, or a tuple of these; `s.keep(x)` inside does the same. What hangs on these may stay too. `strict`
    raises `LeakError` when something else stays, with the answer as its text, unless an exception is on its way: that
    gets a note instead (Python 3.11 and later). It also looks where nothing grew. `free` first lets go of what only
    tracebacks, dead cycles and caches hold, as `unhand.free()` does. `device` is an index, a name or a `torch.device`; None
    stands for every device with a context.

    Some 100 us to enter and leave where nothing is left behind; some 0.3 us for each allocation inside. Where more is
    allocated than before the heap is looked at: some tenths of a second, so after eight times not each time, unless `strict`
    or `free`. No peak counter is reset. Where CUDA is not started it
    does nothing. docs/guides/scope.md has the whole story.
    """
    if callable(name) and not isinstance(name, str):
        # Without parentheses.
        return Scope(name.__qualname__, keep, strict, free, device)(name)
    return Scope(str(name), keep, strict, free, device)


class _Tally:
    """A scope of the tree while it grows."""

    def __init__(self):
        self.n_calls = self.handed_out = self.grown = self.survivors = self.peak = 0
        self.children: dict[str, _Tally] = {}

    def add(self, other):
        """One call more."""
        self.n_calls += other.n_calls
        self.handed_out += other.handed_out
        self.grown += other.grown
        self.survivors += other.survivors
        self.peak = max(self.peak, other.peak)
        for name, child in other.children.items():
            self.children.setdefault(name, _Tally()).add(child)

    def node(self, name) -> ScopeNode:
        """What it has come to."""
        children = tuple(child.node(inner) for inner, child in self.children.items())
        return ScopeNode(name, self.n_calls, self.handed_out, self.grown, self.survivors, self.peak, children)


class _Figures:
    """One device's figures, summed over the stretches in which the scope's code ran."""

    def __init__(self, before):
        self.first = self.start = self.last = before
        self.grown_bytes = self.grown_requested = self.grown_blocks = self.handed_out = self.n_allocations = 0
        self.n_ooms = self.n_retries = 0
        self.at_least, self.at_most = before.allocated_bytes, before.allocated_bytes
        self.spans: list = []

    def end(self, now):
        """A stretch ends."""
        start, self.last = self.start, now
        self.grown_bytes += now.allocated_bytes - start.allocated_bytes
        self.grown_requested += now.requested_bytes - start.requested_bytes
        self.handed_out += max(0, now.handed_out_bytes - start.handed_out_bytes)
        self.n_ooms += max(0, now.n_ooms - start.n_ooms)
        self.n_retries += max(0, now.n_retries - start.n_retries)
        if now.n_allocations is None or start.n_allocations is None:
            self.n_allocations = None
        elif self.n_allocations is not None:
            self.grown_blocks += now.n_live - start.n_live
            self.n_allocations += max(0, now.n_allocations - start.n_allocations)
            if now.n_allocations > start.n_allocations:
                self.spans.append((start.n_allocations, now.n_allocations))
        # The peak is known where it rose: it is the process's, and nobody resets it here.
        at_least, at_most = max(start.allocated_bytes, now.allocated_bytes), now.peak_allocated_bytes
        if now.peak_allocated_bytes > start.peak_allocated_bytes:
            at_least = at_most
        elif now.peak_allocated_bytes < start.peak_allocated_bytes:
            at_least, at_most = max(at_least, at_most), None
        self.at_least = max(self.at_least, at_least)
        self.at_most = None if self.at_most is None or at_most is None else max(self.at_most, at_most)

    @property
    def grew(self) -> bool:
        return self.grown_bytes > 0 or self.grown_requested > 0 or self.grown_blocks > 0

    @property
    def changed(self) -> bool:
        return self.n_allocations is None or self.n_allocations > 0

    def answer(self) -> ScopeDevice:
        at_least = self.at_least if self.at_most is None else min(self.at_least, self.at_most)
        return ScopeDevice(
            device=self.first.device,
            allocated_before_bytes=self.first.allocated_bytes,
            allocated_after_bytes=self.last.allocated_bytes,
            reserved_before_bytes=self.first.reserved_bytes,
            reserved_after_bytes=self.last.reserved_bytes,
            peak_allocated_bytes=at_least if at_least == self.at_most else None,
            peak_at_least_bytes=at_least,
            peak_at_most_bytes=self.at_most,
            handed_out_bytes=self.handed_out,
            n_allocations=self.n_allocations,
            n_ooms=self.n_ooms,
            n_retries=self.n_retries,
        )


class Run:
    """One time through a scope."""

    def __init__(self, scope, in_steps=False):
        """`in_steps` is for code that runs in stretches, between which others run: it begins suspended."""
        self.strict, self.free, device = scope._options
        self.scope = scope
        self.in_steps = in_steps
        self.thread = threading.get_ident()
        self.threads = {self.thread}
        self.is_alone = threading.active_count() == 1
        self.is_open = self.is_exact = True
        self.error, self.seconds, self.notes = None, 0.0, []
        self.tally = _Tally()
        self.beside: dict[str, bool] = {}
        self.theirs: dict[int, list] = {}
        self.keep = _keep.Keep()
        self.parent = _innermost()
        self.before = self.parent
        self.started = time.perf_counter()
        devices = None
        if device is not None and _allocator.started_torch() is not None:
            from unhand import _blocks

            devices = (_blocks.device_index(device),)
        self.mark = _births.mark(devices)
        self.figures = {index: _Figures(before) for index, before in self.mark.before.items()}
        with _lock:
            self._meet(_open.values())
            _open[id(self)] = self
        if not in_steps:
            _current.set(self)

    def _meet(self, others):
        """Note who is open at the same time without being around this one: they may have allocated what is found."""
        above = set()
        run = self.parent
        while run is not None:
            above.add(id(run))
            run = run.parent
        for other in others:
            if id(other) not in above:
                is_here = other.thread == self.thread
                self.beside[other.scope.name] = other.beside[self.scope.name] = is_here

    # Stretches

    def resume(self):
        """The code of the scope runs again, here."""
        self.before = _innermost()
        self.threads.add(threading.get_ident())
        for index, now in _counters.read_all(self.mark.devices).items():
            if index in self.figures:
                self.figures[index].start = now
            else:
                self.figures[index] = _Figures(now)
        _current.set(self)

    def pause(self):
        """It waits, and others run."""
        _current.set(_opened(self.before))
        around = set()
        run = self.before
        while run is not None:
            around.add(id(run))
            run = run.parent
        self._read()
        with _lock:
            others = [run for run in _open.values() if run is not self and id(run) not in around]
            for index, figures in self.figures.items():
                if not figures.spans or figures.spans[-1][1] != figures.last.n_allocations:
                    continue
                for other in others:
                    # What this scope did is not theirs, although it falls in their time.
                    theirs = other.theirs.setdefault(index, [])
                    if theirs[-1:] != figures.spans[-1:]:
                        theirs.append(figures.spans[-1])

    def _read(self):
        for index, now in _counters.read_all(self.mark.devices).items():
            figures = self.figures.get(index)
            if figures is None:
                # Its context was made inside: there was nothing before.
                nothing = _counters.Counters(index, *[0] * (len(now) - 1))
                figures = self.figures[index] = _Figures(nothing)
            figures.end(now)

    # The end

    def close(self, *, passed=(), error=None, frame=None, namespace=None):
        """The scope is over. Sets the scope's `result`; LeakError where it is strict and something stays."""
        if not self.is_open:
            return
        self.is_open = False
        with _lock:
            _open.pop(id(self), None)
        if not self.in_steps:
            if _current.get() is self:
                _current.set(_opened(self.parent))
            self._read()
        if isinstance(error, GeneratorExit):
            # Nobody failed: the generator is not wanted any more. There is nobody to raise to, either.
            error, is_strict = None, False
        else:
            is_strict = self.strict
        try:
            found, freed = self._look(passed, error, frame, namespace)
        finally:
            self.mark.close()
            self.keep.clear()
            self.error = None if error is None else type(error).__name__
            self.seconds = time.perf_counter() - self.started
        self._count(sum(leak.bytes for leak in found.leaks))
        self.scope._last = result = self if found is _NOTHING else self.answer(found, freed)
        if found.leaks:
            self._tell(result, error, is_strict)

    def _count(self, survivors_bytes):
        """Enter this run into the tree, and into that of the scope around it."""
        tally = self.tally
        tally.n_calls, tally.survivors = 1, survivors_bytes
        for figures in self.figures.values():
            tally.handed_out += figures.handed_out
            tally.grown += figures.grown_bytes
            tally.peak += figures.at_least
        parent = _opened(self.parent)
        if parent is None:
            return
        with _lock:
            parent.tally.children.setdefault(self.scope.name, _Tally()).add(tally)
            for index, figures in self.figures.items():
                around = parent.figures.get(index)
                if around is not None:
                    around.at_least = max(around.at_least, figures.at_least)

    def _tell(self, result, error, is_strict):
        import logging

        logging.getLogger("unhand").info("%s", result)
        if not is_strict:
            return
        if error is None:
            raise LeakError(str(result), result=result)
        if hasattr(error, "add_note"):
            error.add_note(str(result))

    def answer(self, found, freed) -> ScopeResult:
        """The run as an answer."""
        return ScopeResult(
            name=self.scope.name,
            survivors=found.leaks,
            survivors_bytes=sum(leak.bytes for leak in found.leaks),
            excused=found.excused,
            kept_bytes=found.kept_bytes,
            devices=tuple(figures.answer() for _, figures in sorted(self.figures.items())),
            tree=self.tally.node(self.scope.name),
            is_exact=self.is_exact,
            error=self.error,
            freed=freed,
            notes=tuple(self.notes),
            seconds=self.seconds,
        )

    def _look(self, passed, error, frame, namespace):
        """`(found, freed)`, as deep a look as it needs; sets `is_exact` and `notes`."""
        figures = self.figures.values()
        if not any(one.changed for one in figures):
            return _NOTHING, None
        if not self.strict and not any(one.grew for one in figures):
            self.is_exact = False
            self.notes.append("no more is allocated than before, so nothing was looked at: strict=True looks all the same")
            return _NOTHING, None
        try:
            return self._look_deeply(passed, error, frame, namespace)
        except Exception as failure:
            # After an error of the device every call fails. It has its own exception, which must not be hidden.
            if error is None and not isinstance(failure, RuntimeError):
                raise
            first = next(iter(str(failure).splitlines()), "")
            self.notes.append(f"the look failed: {type(failure).__name__}: {first}")
            self.is_exact = False
            return _NOTHING, None

    def _look_deeply(self, passed, error, frame, namespace):
        """The births first, and the heap only if there are some that nothing explains."""
        births = self._births(self.notes)
        if not births:
            return _NOTHING, None
        declared = self.scope._declared
        keep = [thing for one in (declared, self.keep) for thing in one.resolved(frame, namespace, self.notes)]
        keep += passed
        if keep:
            found = _survivors.quick(births, keep)
            if found is not None:
                return found, None
        if _allocator.is_capturing():
            self.notes.append("a CUDA graph is being captured: who holds what was not looked at")
            self.is_exact = False
            return _NOTHING, None
        if not (self.strict or self.free or _is_due(self.scope.name)):
            self.notes.append("it left something behind many times already, and who holds it is not looked at each time")
            self.is_exact = False
            return _survivors.unnamed(births), None
        found, freed = self._find(births, keep, error), None
        if self.free and found.leaks:
            from unhand import _free

            freed = _free.free()
            births = self._births([])
            found = self._find(births, keep, error) if births else _survivors.Found()
        if found.leaks:
            self._say_who_else(found, self.notes)
        return found, freed

    def _find(self, births, keep, error):
        return _survivors.find(
            births,
            keep=keep,
            storages=self.scope._declared.alive() | self.keep.alive(),
            error=error,
            thread=self.thread,
            skip=[self, self.__dict__, self.scope, self.scope.__dict__, *self.keep.parts(), *self.scope._declared.parts()],
        )

    def _births(self, notes):
        """What was born in the scope's own stretches, and is alive."""
        spans = None
        if self.in_steps:
            spans = {index: figures.spans for index, figures in self.figures.items()}
        born = _births.survivors(self.mark, spans)
        if born.why:
            lost = f": of {born.n_unknown:,} allocations it is not known whether they stayed" if born.n_unknown else ""
            notes.append(born.why + lost)
        is_alone = self.is_alone and threading.active_count() == 1
        is_theirs = {index: _births.within(spans) for index, spans in self.theirs.items()}
        mine, others_bytes = [], 0
        for birth in born.births:
            if birth.device in is_theirs and is_theirs[birth.device](birth.number):
                others_bytes += birth.bytes
            elif birth.thread is not None and birth.thread not in self.threads:
                others_bytes += birth.bytes
            elif birth.thread in self.threads or is_alone:
                mine.append(birth._replace(thread=self.thread))
            else:
                mine.append(birth)
        if others_bytes:
            notes.append(f"{format_bytes(others_bytes)} were born in scopes of other threads and tasks: not counted")
        self.is_exact = born.is_exact
        return mine

    def _say_who_else(self, found, notes):
        if any(leak.in_thread is None for leak in found.leaks):
            notes.append("other threads ran: what no thread is known of was allocated in this process, perhaps not here")
        here = [name for name, is_here in self.beside.items() if is_here]
        if here:
            names = ", ".join(f"`{name}`" for name in here)
            notes.append(f"open at the same time in this thread: {names}, whose code may have allocated it")


def _is_due(name) -> bool:
    """Whether to look at the heap once more for scopes of a name."""
    with _lock:
        n_looks = _looks[name] = _looks.get(name, 0) + 1
    return n_looks <= _ALWAYS or n_looks & (n_looks - 1) == 0


def _innermost():
    """The innermost open run of this context."""
    return _opened(_current.get())


def _opened(run):
    while run is not None and not run.is_open:
        run = run.parent
    return run


def _globals(function):
    return getattr(getattr(function, "__wrapped__", function), "__globals__", None)
