"""The footer of a notebook's cell: what it took of the GPU, what it defined, and what it left behind. Shows nothing itself.

Between the mark and the footer nothing of the user's is referred to: of names there are the numbers that `id` gives, of
memory the counters and the order of births.
"""

import re
import time
from dataclasses import dataclass

from unhand import _births, _counters, _survivors
from unhand._answer import Answer, fields
from unhand._native import format_bytes
from unhand._survivors import Leak

LIMIT = 8
"""How many holders of a group are named."""

_NAMED = 64
"""How many holders are worked out, the largest: each takes a millisecond."""

_WORTH_A_LOOK = 1 << 20
"""A footer that nobody asked for looks at the heap from this many new bytes on."""

# IPython's own, which hold what was shown and typed (IPython/core/displayhook.py, history.py).
_OF_IPYTHON = re.compile(r"In|Out|_{1,3}|_\d+|_i{1,3}|_i\d+|_[iod]h|exit|quit|get_ipython|open")


@dataclass(frozen=True, slots=True)
class CellDevice:
    """One device before and after the cell."""

    device: int
    """Its index."""
    allocated_before_bytes: int
    """Blocks in use before the cell; 0 where CUDA was not started."""
    allocated_bytes: int
    """Blocks in use after it."""
    reserved_before_bytes: int
    """What the allocator held from the driver before the cell."""
    reserved_bytes: int
    """What it holds after it."""
    peak_allocated_bytes: int | None
    """The most that was allocated during the cell; None where an earlier peak was higher, which nobody may reset."""
    peak_at_most_bytes: int
    """That earlier peak, or the peak itself."""
    n_allocations: int | None
    """Blocks handed out during the cell; None where the allocator does not count them."""


@dataclass(frozen=True, slots=True)
class Footer(Answer):
    """What a cell did with the GPU's memory. What it allocated and is alive is in one of the three groups of holders."""

    name: str | None
    """What stood behind `%%unhand`; None for a footer that nobody asked for."""
    seconds: float
    """How long the cell took, on the wall clock."""
    error: str | None
    """The name of the exception that ended the cell; None where it came to its end."""
    devices: tuple[CellDevice, ...]
    """Those with a context."""
    defined: tuple[Leak, ...]
    """Held by names that the cell bound: its results."""
    added: tuple[Leak, ...]
    """Held by names that earlier cells bound: a model that was moved, the state of an optimizer, a list that grew."""
    left: tuple[Leak, ...]
    """Held by nothing that has a name of the user's: shown values, tracebacks, caches, dead cycles, native code."""
    unattributed_bytes: int
    """Allocated bytes of the cell that no Python object leads to and no rule explains."""
    note: str
    """What could not be told; empty where everything was."""

    @property
    def is_worth_a_line(self) -> bool:
        """Whether the cell changed anything on a GPU."""
        return any(
            device.n_allocations != 0
            or device.allocated_bytes != device.allocated_before_bytes
            or device.reserved_bytes != device.reserved_before_bytes
            for device in self.devices
        )

    @property
    def traceback_bytes(self) -> int:
        """Allocated bytes that only the traceback of the cell's exception holds."""
        return sum(holder.bytes for holder in self.left if holder.kind == "traceback")

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields, and the version of their layout."""
        plain = {"schema_version": 1, **fields(self)}
        plain["devices"] = [fields(device) for device in self.devices]
        for name in ("defined", "added", "left"):
            plain[name] = [holder.to_dict() for holder in plain[name]]
        return plain

    def __str__(self):
        lines = [f"unhand: {head(self)}"]
        if not self.devices:
            lines.append("  no GPU memory: this process has not started CUDA through PyTorch")
        for device in self.devices:
            lines.append(f"  cuda:{device.device}  {', '.join(figures(device))}")
        for title, holders in groups(self):
            lines.append(f"  {_TITLES[title]}")
            for holder in holders[:LIMIT]:
                path, *more = paths(holder)
                lines.append(f"  {format_bytes(holder.bytes):>10}  {holder.kind:<16}  {path}")
                lines += [f"{'':32}{words}" for words in (*more, advice(footer=self, holder=holder)) if words]
            if holders[LIMIT:]:
                rest = sum(holder.bytes for holder in holders[LIMIT:])
                lines.append(f"  {format_bytes(rest):>10}  in {len(holders) - LIMIT} more")
        if self.unattributed_bytes:
            lines.append(f"  {format_bytes(self.unattributed_bytes):>10}  unattributed: no Python object leads to it")
        lines += [f"  {sentence}" for sentence in sentences(self)]
        return "\n".join(lines)

    def _repr_html_(self):
        from unhand import _html

        return _html.footer_html(self)


def head(footer) -> str:
    """What cell it was, how long it took and how it ended."""
    words = [footer.name] if footer.name else []
    words.append(f"{footer.seconds:.2f} s")
    if footer.error:
        words.append("interrupted" if footer.error == "KeyboardInterrupt" else f"failed with {footer.error}")
    return ", ".join(words)


def figures(device) -> tuple[str, str, str]:
    """Allocated, reserved and the peak, in words."""
    if device.peak_allocated_bytes is None:
        peak = f"peak at most {format_bytes(device.peak_at_most_bytes)} (an earlier one)"
    else:
        peak = f"peak {format_bytes(device.peak_allocated_bytes)}"
    return (
        f"allocated {format_bytes(device.allocated_bytes)} ({change(device.allocated_before_bytes, device.allocated_bytes)})",
        f"reserved {format_bytes(device.reserved_bytes)} ({change(device.reserved_before_bytes, device.reserved_bytes)})",
        peak,
    )


def change(before, after) -> str:
    """A difference with its sign."""
    return f"{'-' if after < before else '+'}{format_bytes(abs(after - before))}"


def groups(footer):
    """The groups that have somebody in them, with what to call them."""
    named = (
        ("defined", footer.defined),
        ("added", footer.added),
        ("left behind", footer.left),
    )
    return [(title, holders) for title, holders in named if holders]


def paths(holder) -> list[str]:
    """The reference that names it best, with what it is, and a line for the others."""
    short = [path.removeprefix("__main__.") for path in holder.paths]
    if holder.kind == "traceback":
        # They all lead to the same call.
        short[1:] = [path.split(" at ", 1)[0].removesuffix(".__traceback__") for path in short[1:]]
    what = [word for word in (holder.type, f"{holder.n_storages:,} storages" if holder.n_storages > 1 else "") if word]
    lines = [short[0] + (f"  ({', '.join(what)})" if what else "")]
    if short[1:]:
        rest = f" and {len(short) - 4} more" if len(short) > 4 else ""
        lines.append(f"also {', '.join(short[1:4])}{rest}")
    if holder.site:
        lines.append(f"allocated at {holder.site}")
    return lines


def advice(footer, holder) -> str:
    """What to do about a holder, in one sentence; empty for what the user has a name for and may well want."""
    return holder.advice if holder in footer.left or holder.kind == "autograd graph" else ""


_TITLES = {"defined": "defined by the cell", "added": "added to what was there", "left behind": "left behind"}


def sentences(footer) -> list[str]:
    """What else is to be said, and done."""
    found = []
    if footer.error and footer.traceback_bytes:
        size = format_bytes(footer.traceback_bytes)
        found.append(f"IPython keeps the traceback, whose calls have {size} in their variables: `%unhand free` lets go of it")
    if footer.note:
        found.append(footer.note)
    return found


@dataclass(slots=True)
class Mark:
    """The moment before a cell."""

    name: str | None
    births: _births.Mark
    names: dict[str, int]
    """The user's names, and which object each was."""
    started: float

    def close(self):
        """Let go of PyTorch's record of allocations, if no footer follows. A second time does nothing."""
        self.births.close()


def mark(namespace, name=None) -> Mark:
    """Marks the moment before a cell. Nothing of `namespace` is kept but its names, and `id` of what they refer to."""
    names = {known: id(value) for known, value in list(namespace.items())}
    return Mark(name, _births.mark(), names, time.perf_counter())


def footer(mark, namespace, error=None, skip=()) -> Footer:
    """The footer of the cell that began at `mark`, which is closed.

    `error` is the name of the exception that ended it. Objects in `skip` do not count as holders: IPython has the result
    of the cell in its hands while it asks. The heap is looked at only where something that the cell allocated is alive,
    and for a footer without a name, only where that is 1 MiB or more.
    """
    seconds = time.perf_counter() - mark.started
    try:
        after = _counters.read_all()
        devices = tuple(_device(mark.births.before.get(device), figures) for device, figures in after.items())
        born = _births.survivors(mark.births) if any(device.n_allocations != 0 for device in devices) else None
    finally:
        mark.close()
    defined, added, left, unattributed, more_bytes = [], [], [], 0, 0
    if born is not None and born.births and (mark.name is not None or born.bytes >= _WORTH_A_LOOK):
        holders, unattributed, more_bytes = _holders(born, skip)
        defined_names, user_names = _names(mark, namespace)
        start = f"{namespace.get('__name__', '__main__')}."
        for holder in holders:
            roots = {_root(path, start) for path in holder.paths}
            group = defined if roots & defined_names else added if roots & user_names else left
            group.append(holder)
    return Footer(
        name=mark.name,
        seconds=seconds,
        error=error,
        devices=devices,
        defined=tuple(defined),
        added=tuple(added),
        left=tuple(left),
        unattributed_bytes=unattributed,
        note="; ".join(_notes(born, more_bytes)),
    )


def _notes(born, more_bytes):
    if born is not None and born.why:
        yield f"not all could be told: {born.why}"
    if more_bytes:
        yield f"{format_bytes(more_bytes)} are in more holders than were looked at"


def _device(before, after) -> CellDevice:
    has_new_peak = before is None or after.peak_allocated_bytes > before.peak_allocated_bytes
    counted = after.n_allocations is not None and (before is None or before.n_allocations is not None)
    is_reset = before is not None and _counters.were_reset(before, after)
    return CellDevice(
        device=after.device,
        allocated_before_bytes=0 if before is None else before.allocated_bytes,
        allocated_bytes=after.allocated_bytes,
        reserved_before_bytes=0 if before is None else before.reserved_bytes,
        reserved_bytes=after.reserved_bytes,
        peak_allocated_bytes=after.peak_allocated_bytes if has_new_peak else None,
        peak_at_most_bytes=after.peak_allocated_bytes,
        n_allocations=(
            after.n_allocations - (0 if before is None else before.n_allocations) if counted and not is_reset else None
        ),
    )


def _holders(born, skip):
    """The holders of what was born, the largest first; the bytes that none explains, and those in more holders."""
    found = _survivors.find(born.births, skip=skip, limit=_NAMED)
    every = sorted([*found.leaks, *found.excused], key=lambda holder: -holder.bytes)
    unattributed, more_bytes = (sum(one.bytes for one in every if one.kind == kind) for kind in ("unattributed", "more"))
    return [one for one in every if one.kind not in ("unattributed", "more")], unattributed, more_bytes


def _names(mark, namespace):
    """The names that the cell bound, and all names of the user's."""
    user = {name: id(value) for name, value in list(namespace.items()) if not _OF_IPYTHON.fullmatch(name)}
    return {name for name, number in user.items() if mark.names.get(name) != number}, set(user)


def _root(path, start):
    """The variable that a path begins with; None if it begins elsewhere."""
    rest = path.removeprefix(start)
    return None if rest == path else re.split(r"\W", rest, maxsplit=1)[0]
