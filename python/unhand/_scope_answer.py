"""What a scope answers: the survivors, the figures of each device, and the scopes inside as a tree."""

from dataclasses import dataclass

from unhand._answer import Answer, fields
from unhand._free import Freed
from unhand._survivors import Leak
from unhand._native import format_bytes


@dataclass(frozen=True, slots=True)
class ScopeDevice:
    """One device's figures at the ends of a scope. They are of the whole process: PyTorch counts no threads."""

    device: int
    """The index of the device."""
    allocated_before_bytes: int
    """Blocks in use at the beginning (`torch.cuda.memory_allocated`)."""
    allocated_after_bytes: int
    """Blocks in use at the end, before `free` did anything."""
    reserved_before_bytes: int
    """What PyTorch held from the driver at the beginning (`torch.cuda.memory_reserved`)."""
    reserved_after_bytes: int
    """What it held at the end."""
    peak_allocated_bytes: int | None
    """The highest figure for allocated inside; None where it stayed below a peak that was reached before."""
    peak_at_least_bytes: int
    """A bound for that peak: the highest figure that was seen inside."""
    peak_at_most_bytes: int | None
    """A bound for that peak; None where somebody reset PyTorch's peak inside."""
    handed_out_bytes: int
    """Allocated bytes of all blocks that were handed out inside, those that were freed again included."""
    n_allocations: int | None
    """How many blocks those were; None where the allocator does not count them."""
    n_ooms: int
    """How often memory ran out inside."""
    n_retries: int
    """How often the allocator had to empty its cache inside."""

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields."""
        return fields(self)


@dataclass(frozen=True, slots=True)
class ScopeNode:
    """A scope among others, on all its devices together. Calls of one name at one place are one node."""

    name: str
    """The scope's name."""
    n_calls: int
    """How often it was gone through."""
    handed_out_bytes: int
    """Allocated bytes of all blocks that were handed out inside, those of inner scopes included."""
    grown_bytes: int
    """How much more was allocated at the end than at the beginning, summed over the calls; negative where less."""
    survivors_bytes: int
    """Bytes of the survivors, summed over the calls."""
    peak_at_least_bytes: int
    """The highest figure for allocated that is known of it."""
    children: tuple["ScopeNode", ...]
    """The scopes inside, in the order in which they were first entered."""

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields."""
        plain = fields(self)
        plain["children"] = [child.to_dict() for child in self.children]
        return plain

    def to_folded(self, figure="handed_out_bytes") -> str:
        """Folded stacks, as flame graphs read them: a line `outer;inner bytes` for each scope, of its own bytes alone.

        `figure` is `handed_out_bytes`, what the scopes allocated, or `survivors_bytes`, what outlived them.
        """
        if figure not in ("handed_out_bytes", "survivors_bytes"):
            raise ValueError(f"no figure to fold: `{figure}` (there are `handed_out_bytes` and `survivors_bytes`)")
        return "".join(f"{stack} {n_bytes}\n" for stack, n_bytes in self._folded(figure, ""))

    def _folded(self, figure, above):
        stack = above + self.name.replace(";", ",").replace("\n", " ")
        own = getattr(self, figure) - sum(getattr(child, figure) for child in self.children)
        # What outlives an inner scope need not outlive the outer one.
        if own > 0:
            yield stack, own
        for child in self.children:
            yield from child._folded(figure, stack + ";")

    def lines(self, depth=0):
        """The tree as text."""
        calls = "" if self.n_calls == 1 else f"  {self.n_calls:,} times"
        left = f", {format_bytes(self.survivors_bytes)} outlived it" if self.survivors_bytes else ""
        yield f"{'  ' * depth}{format_bytes(self.handed_out_bytes):>10}  {self.name}{calls}{left}"
        for child in self.children:
            yield from child.lines(depth + 1)


@dataclass(frozen=True, slots=True)
class ScopeResult(Answer):
    """What a scope allocated, and what of it outlives the scope."""

    name: str
    """The scope's name."""
    survivors: tuple[Leak, ...]
    """Who keeps what was born inside, the largest first, apart from what is returned, yielded or declared."""
    survivors_bytes: int
    """Allocated bytes of these."""
    excused: tuple[Leak, ...]
    """What was born inside and is nobody's fault: workspaces of libraries, the locals of an exception on its way."""
    kept_bytes: int
    """Allocated bytes born inside that were returned, yielded, or declared to be kept."""
    devices: tuple[ScopeDevice, ...]
    """The figures of each device; empty where CUDA was not started."""
    tree: ScopeNode
    """This scope with those inside."""
    is_exact: bool
    """Whether the survivors are all there are; False where `notes` say what could not be seen."""
    error: str | None
    """The type of the exception that left the scope."""
    freed: Freed | None
    """What `free=True` gave back; None where there was nothing to do."""
    notes: tuple[str, ...]
    """What was not looked at, and who else may have allocated."""
    seconds: float
    """How long the scope was open, on the wall clock."""

    @property
    def grown_bytes(self) -> int:
        """How much more is allocated than before, on all devices; negative where less."""
        return sum(device.allocated_after_bytes - device.allocated_before_bytes for device in self.devices)

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields, and the version of their layout."""
        plain = {"schema_version": 1, **fields(self)}
        for name in ("survivors", "excused", "devices"):
            plain[name] = [item.to_dict() for item in getattr(self, name)]
        plain["tree"] = self.tree.to_dict()
        plain["freed"] = None if self.freed is None else self.freed.to_dict()
        plain["notes"] = list(self.notes)
        return plain

    def to_folded(self, figure="handed_out_bytes") -> str:
        """Folded stacks of the scopes; see `ScopeNode.to_folded`."""
        return self.tree.to_folded(figure)

    def headline(self) -> str:
        """The answer in one line."""
        if self.survivors:
            n = len(self.survivors)
            who = ", 1 holder keeps them" if n == 1 else f", {n} holders keep them"
            if any(leak.kind == "unnamed" for leak in self.survivors):
                who = ""
            return f"scope `{self.name}`: {format_bytes(self.survivors_bytes)} outlive it{who}"
        if not self.devices:
            return f"scope `{self.name}`: no GPU memory (CUDA was not started)"
        known = "nothing outlives it" if self.is_exact else "nothing is known to outlive it"
        return f"scope `{self.name}`: {known}"

    def __str__(self):
        lines = [self.headline()]
        for device in self.devices:
            lines.append(f"  cuda:{device.device}  {figures(device)}")
        lines += [f"  {line}" for leak in self.survivors for line in str(leak).splitlines()]
        if self.kept_bytes:
            lines.append(f"  {format_bytes(self.kept_bytes):>10}  kept: returned, yielded or declared")
        if self.excused:
            lines.append("  not counted")
            lines += [f"  {line}" for leak in self.excused for line in str(leak).splitlines()]
        if self.tree.children:
            lines.append("  allocated inside")
            lines += [f"  {line}" for line in self.tree.lines()]
        if self.freed is not None:
            lines.append("  free=True:")
            lines += [f"  {line}" for line in str(self.freed).splitlines()[:12]]
        if self.error:
            lines.append(f"  {self.error} left the scope: what its traceback keeps is not counted")
        lines += [f"  note: {note}" for note in self.notes]
        return "\n".join(lines)

    def _repr_html_(self):
        from unhand import _html

        return _html.scope_html(self)


def figures(device) -> str:
    """The figures of one device in a line."""
    words = [
        f"allocated {format_bytes(device.allocated_before_bytes)} -> {format_bytes(device.allocated_after_bytes)}",
        f"reserved {format_bytes(device.reserved_before_bytes)} -> {format_bytes(device.reserved_after_bytes)}",
        peak(device),
    ]
    if device.n_ooms:
        words.append("1 out of memory" if device.n_ooms == 1 else f"{device.n_ooms} times out of memory")
    return ", ".join(words)


def peak(device) -> str:
    """What is known of the peak, in words."""
    if device.peak_allocated_bytes is not None:
        return f"peak inside {format_bytes(device.peak_allocated_bytes)}"
    if device.peak_at_most_bytes is None:
        return f"peak inside at least {format_bytes(device.peak_at_least_bytes)}"
    return f"peak inside {format_bytes(device.peak_at_least_bytes)} to {format_bytes(device.peak_at_most_bytes)}"
