"""What `unhand.watch` makes of a loop's memory: the verdict, who holds what grows, and when memory runs out."""

from dataclasses import dataclass

from unhand._answer import Answer, fields
from unhand._native import format_bytes

KINDS = {
    "warming up": "too few steps for a word",
    "steady": "the same after each step",
    "step": "it changed and is flat since: a cache or state that appeared once",
    "periodic": "it repeats",
    "varying": "it varies, and its floor is flat",
    "growing": "its floor rises, not long enough to be sure",
    "filling": "it grows in containers that have a limit",
    "leak": "its floor rises, and what is made in a step outlives it",
    "dead cycles": "it grows by objects that only refer to each other, until the collector passes",
    "fragmentation": "more is reserved, and no more is allocated",
}
"""The kinds of verdicts, and what each says of the memory after a step."""

FINDINGS = ("leak", "dead cycles", "fragmentation")
"""The kinds that are told without being asked."""

_ADVICE = {
    "container": "More goes in than is taken out: clear it, give it a limit, or keep numbers (.item()) and host copies.",
    "autograd graph": "The graph of each step hangs on it: keep loss.item() or loss.detach() instead.",
    "attribute": "Each step leaves more on the object: keep .detach(), numbers or host copies, or reset it.",
    "global": "The variable reaches more with each step: rebind it to a detached value.",
    "frame": "The variable reaches more with each step: detach it, or del it when the step is done.",
    "cache": "A cache without a limit in use keeps arguments and results: give it a maxsize, or call its cache_clear().",
    "hook": "A hook keeps what it saw: remove it by its handle, or let it keep numbers.",
    "closure": "A function keeps what it closes over: drop the function, or close over numbers.",
    "class attribute": "It hangs on the class and is shared by all instances: clear it.",
    "task": "Tasks and futures keep their results: drop them when the result was used.",
    "traceback": "Exceptions that are kept keep the locals of the calls that failed: keep their text instead.",
    "notebook history": "The notebook keeps the values that it showed: %unhand free forgets them.",
    "optimizer state": "The optimizer gets state for parameters that are new in each step: make it once.",
    "parameters": "New parameters appear in each step and stay: drop the old model first.",
    "gradients": "Gradients that are new stay: optimizer.zero_grad(set_to_none=True).",
    "dead cycle": "Objects that refer to each other wait for the collector: break the cycle, or call gc.collect() at times.",
    "native": "Native code keeps it: no Python name leads to it.",
}


@dataclass(frozen=True, slots=True)
class Grower:
    """A holder of memory that each step adds to."""

    path: str
    """The reference that names it best, for example `__main__.trainer.history`."""
    paths: tuple[str, ...]
    """All references that were found, the best first."""
    kind: str
    """What sort of reference it is, as of a holder."""
    type: str
    """The type of the object that holds, for example `list`; empty where there is none."""
    bytes: int
    """Allocated bytes that were made during the look at the heap and outlived it."""
    n_storages: int
    """How many storages those are."""
    bytes_per_step: float
    """How many of those a step adds."""
    site: str | None
    """The line that allocated most of them; None unless PyTorch records a history with stacks."""
    limit: int | None
    """How many entries the container can hold, if it has a limit (`deque(maxlen=)`, `lru_cache(maxsize=)`, `Queue(maxsize=)`)."""
    n_entries: int | None
    """How many it has now; None without a limit."""
    is_replaced: bool
    """Whether it does not gather storages, but gets a larger one each step."""
    advice: str
    """What to do, in one sentence."""

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields."""
        plain = fields(self)
        plain["paths"] = list(self.paths)
        return plain

    def __str__(self):
        count = "1 storage" if self.n_storages == 1 else f"{self.n_storages:,} storages"
        what = ", ".join(word for word in (self.type, count) if word)
        lines = [f"{_rate(self.bytes_per_step):>17}  {self.kind:<16}  {self.path}  ({what})"]
        lines += [f"{'':37}also {path}" for path in self.paths[1:4]]
        if self.site:
            lines.append(f"{'':37}allocated at {self.site}")
        if self.limit is not None:
            lines.append(f"{'':37}{self.n_entries:,} of {self.limit:,} entries")
        lines.append(f"{'':37}{self.advice}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Forecast:
    """When memory runs out, if growth goes on as it does."""

    steps: int
    """Steps until then."""
    seconds: float | None
    """The same at the pace of the last steps; None where no time was taken."""
    room_bytes: int
    """Bytes that can still be allocated at the peak of a step: what is cached, and what the device has free."""

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields."""
        return fields(self)

    def __str__(self):
        return f"memory runs out in {_about(self.steps)} steps, {format_bytes(self.room_bytes)} from here"


@dataclass(frozen=True, slots=True)
class Verdict(Answer):
    """What the memory of a loop does from step to step."""

    kind: str
    """One word for it; docs/guides/watch.md lists them."""
    device: int | None
    """The index of the device; None while CUDA is not started."""
    step: int
    """The step after which this was said; the first is 1."""
    since_step: int | None
    """The step with which the growth began; None where nothing grows."""
    growth_bytes_per_step: float | None
    """Allocated (with fragmentation: reserved) bytes that a step adds; None where nothing grows."""
    low_bytes_per_step: float | None
    """The lower end of the 95 % interval of that."""
    high_bytes_per_step: float | None
    """The upper end."""
    growth_blocks_per_step: float | None
    """Allocator blocks that a step adds; None where their number does not grow."""
    allocated_bytes: int | None
    """What is allocated after this step."""
    reserved_bytes: int | None
    """What is reserved after this step."""
    spread_bytes: int | None
    """By how much the allocated bytes of the last steps differ, growth taken out."""
    period_steps: int | None
    """After how many steps they repeat; None if they do not."""
    growers: tuple[Grower, ...]
    """Who holds what grows, the fastest first; empty before the heap was looked at."""
    unattributed_bytes_per_step: float
    """Growth that no Python object leads to."""
    forecast: Forecast | None
    """When memory runs out; None where nothing grows, or where what grows has a limit."""
    look_seconds: float | None
    """What the look at the heap took, once; None if there was none."""
    advice: str
    """What to do, in one sentence; empty where there is nothing to do."""

    @property
    def is_leak(self) -> bool:
        """Whether it is a leak."""
        return self.kind == "leak"

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields, and the version of their layout."""
        plain = fields(self)
        plain["growers"] = [grower.to_dict() for grower in self.growers]
        plain["forecast"] = self.forecast.to_dict() if self.forecast is not None else None
        return {"schema_version": 1, **plain}

    def headline(self) -> str:
        """The verdict in one line."""
        where = f"cuda:{self.device}" if self.device is not None else "no device"
        if self.growth_bytes_per_step is None:
            period = f" every {self.period_steps:,} steps" if self.kind == "periodic" and self.period_steps else ""
            return f"{self.kind} on {where} at step {self.step:,}: {KINDS[self.kind]}{period}"
        what = "reserved" if self.kind == "fragmentation" else "allocated"
        line = f"{self.kind} on {where}: {_rate(self.growth_bytes_per_step)} more {what}"
        if self.since_step is not None:
            line += f" since step {self.since_step:,}"
        return f"{line}, at step {self.step:,}"

    def __str__(self):
        lines = [self.headline()]
        if self.growth_bytes_per_step is not None:
            low, high = _rate(self.low_bytes_per_step), _rate(self.high_bytes_per_step)
            if low != high:
                lines.append(f"  between {low} and {high} (95 %)")
        if self.allocated_bytes is not None:
            allocated, reserved = format_bytes(self.allocated_bytes), format_bytes(self.reserved_bytes)
            spread = f", {format_bytes(self.spread_bytes)} between steps" if self.spread_bytes else ""
            repeats = f", again every {self.period_steps:,} steps" if self.spread_bytes and self.period_steps else ""
            lines.append(f"  allocated {allocated}, reserved {reserved}{spread}{repeats}")
        if self.forecast is not None:
            lines.append(f"  {self.forecast}")
            if self.forecast.seconds is not None:
                lines.append(f"  that is {_duration(self.forecast.seconds)} at the pace of the last steps")
        if self.growers:
            lines.append("  held by")
            lines += [f"  {line}" for grower in self.growers for line in str(grower).splitlines()]
        if self.unattributed_bytes_per_step:
            lines.append(f"  {_rate(self.unattributed_bytes_per_step):>17}  unattributed: no Python object leads to it")
        if self.advice and not self.growers:
            lines.append(f"  {self.advice}")
        if self.look_seconds is not None:
            lines.append(f"  the look at the heap took {self.look_seconds:.2g} s, once")
        return "\n".join(lines)

    def _repr_html_(self):
        from unhand import _html

        return _html.verdict_html(self)


def advice_for(kind, fallback, is_replaced=False) -> str:
    """What to do about a holder that grows."""
    if is_replaced:
        return "It is made anew each step and larger each time: start it over, or write into one buffer of the final size."
    return _ADVICE.get(kind, fallback)


def _rate(bytes_per_step) -> str:
    if 0 < bytes_per_step < 1:
        return f"{bytes_per_step:.2g} B a step"
    size = round(bytes_per_step)
    return f"-{format_bytes(-size)} a step" if size < 0 else f"{format_bytes(size)} a step"


def _about(n) -> str:
    """A number of steps with two figures that count."""
    if n < 100:
        return f"{n:,}"
    unit = 10 ** (len(str(n)) - 2)
    return f"about {n // unit * unit:,}"


def _duration(seconds) -> str:
    for unit, name in ((86400, "days"), (3600, "h"), (60, "min")):
        if seconds >= unit:
            return f"{seconds / unit:.1f} {name}"
    return f"{seconds:.0f} s"
