"""The floor: which GPU storages exist at one moment, and the way back to it. What the integrations of other libraries share.

A mark of `_births` records allocations, and its record is overrun by a training of hours. So a floor knows the other
half: it has a weak reference to each storage that is there, and whatever is alive later and not among those was born since.
"""

import bisect
from dataclasses import dataclass, field

from unhand import _allocator, _counters, _free, _heap, _see, _storages
from unhand._answer import Answer, fields
from unhand._free import Freed
from unhand._holders import Holder
from unhand._native import format_bytes

_SHOWN = 20
"""How many holders of what stays are named."""


@dataclass(frozen=True, slots=True)
class Landing(Answer):
    """How near to the floor a run came back: what it gave back, and who holds what stays of it."""

    name: str
    """What was run, for example `trial 3`."""
    floor_bytes: int
    """Allocated bytes when it began, over all devices."""
    allocated_bytes: int
    """Allocated bytes afterwards, over all devices."""
    left_bytes: int
    """Of those, allocated bytes of storages that were born since: 0 is the floor."""
    left: tuple[Holder, ...]
    """Who holds them, the largest first."""
    unattributed_bytes: int
    """Of `left_bytes`, those that no Python object leads to."""
    freed: Freed
    """What was given back and how."""

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields, and the version of their layout."""
        plain = {"schema_version": 1, **fields(self)}
        plain["left"] = [holder.to_dict() for holder in self.left]
        plain["freed"] = self.freed.to_dict()
        del plain["freed"]["schema_version"]
        return plain

    def __str__(self):
        head = f"{self.name}: returned {format_bytes(self.freed.returned_bytes)} to the driver, "
        if not self.left_bytes:
            return head + f"back at its floor of {format_bytes(self.floor_bytes)} allocated"
        lines = [head + f"{format_bytes(self.left_bytes)} above its floor of {format_bytes(self.floor_bytes)} are left"]
        if self.left:
            lines.append("  held by")
            lines += [f"  {line}" for holder in self.left[:8] for line in str(holder).splitlines()]
        if self.unattributed_bytes:
            lines.append(f"  {format_bytes(self.unattributed_bytes):>10}  unattributed: no Python object leads to it")
        return "\n".join(lines)


@dataclass(slots=True)
class Floor:
    """The storages and blocks that are there at one moment. Keeps no memory alive."""

    storages: dict = field(default_factory=dict)
    """Weak references, by cdata. While one lives, no other storage gets that cdata."""
    blocks: dict = field(default_factory=dict)
    """(Device, address) to allocated bytes, of the blocks that no Python object leads to."""
    allocated_bytes: int = 0
    """Over all devices."""

    def had(self, storage) -> bool:
        """Whether a storage of a view was there."""
        known = self.storages.get(storage.cdata)
        if known is not None and not known.expired():
            return True
        return storage.block is not None and (storage.device, storage.block.address) in self.blocks


def floor() -> Floor:
    """The floor here and now; empty before CUDA is started. One walk over Python's objects, 0.2 us for each."""
    found = Floor(allocated_bytes=allocated())
    for device in _allocator.devices():
        from torch.multiprocessing.reductions import StorageWeakRef

        there = _storages.find(device)
        addresses = set()
        for storage in there.storages:
            found.storages[storage.cdata] = StorageWeakRef(storage.untyped)
            addresses.add(storage.address)
        storage = None  # noqa: F841
        there.forget()
        for segment in _allocator.segments(device):
            starts = sorted(address for address in addresses if 0 <= address - segment.address < segment.total_bytes)
            for block in segment.blocks:
                at = bisect.bisect_left(starts, block.address)
                is_named = at < len(starts) and starts[at] < block.address + block.bytes
                if block.state != _allocator.INACTIVE and not is_named:
                    found.blocks[device, block.address] = block.bytes
    return found


def allocated() -> int:
    """Allocated bytes, over all devices on which this process has a context."""
    return sum(figures.allocated_bytes for figures in _counters.read_all().values())


def release(*targets, keep=(), without=()) -> Freed:
    """`unhand.free` for an integration: what can be reached only through the objects `without` is not the targets'."""
    return _free.run(targets, keep=keep, without=without)


def back_to(began, name, *targets, keep=(), without=(), everything=False, spares=True) -> Landing:
    """Free what was born since a floor and belongs to the targets, and name who holds the rest.

    What a dead cycle, a traceback or a cache has is given back too, as by `unhand.free()`. With `everything`, all storages
    that were born since are, whoever holds them. Without `spares`, what the targets had before the floor goes as well.
    """
    born = _born_since(began) if everything else ()
    left = _Left(began)
    freed = _free.run(
        (*targets, *born), keep=keep, without=without, spare=left.before if spares else None, look=left.find
    )
    del born
    return Landing(name, began.allocated_bytes, allocated(), left.bytes, left.holders, left.unattributed_bytes, freed)


def _born_since(began) -> list:
    """The tensors over each storage that was born since a floor, or the bare storage."""
    if not _allocator.devices():
        return []
    found = []
    with _see.looking:
        view = _heap.View()
        try:
            for storage in view.storages.values():
                if not began.had(storage):
                    found += storage.tensors or ([storage.bare] if storage.bare is not None else [])
        finally:
            view.close()
    return found


class _Left:
    """What of the storages and blocks that were born since a floor is there, and who holds it."""

    def __init__(self, began):
        self.began = began
        self.holders, self.unattributed_bytes, self.bytes = (), 0, 0

    def before(self, view) -> set:
        """The storages of a view that were there at the floor, by cdata."""
        return {cdata for cdata, storage in view.storages.items() if self.began.had(storage)}

    def find(self, view):
        """Look for it in a view."""
        old = {view.storages[cdata].block.address for cdata in self.before(view) if view.storages[cdata].block is not None}
        old |= {address for (device, address) in self.began.blocks if view.block_device.get(address) == device}
        holders = []
        for device in _allocator.devices():
            found = _see.Explanation(view, device, lambda block: block.address not in old)
            # What a pool keeps is reserved and not allocated.
            holders += [holder for holder in found.holders(_SHOWN) if holder.kind != "graph pool"]
            self.unattributed_bytes += found.unattributed_bytes
            self.bytes += sum(holding[3] for holding in found.held) + found.garbage_bytes
            self.bytes += sum(block.bytes for block in found.nameless)
        holders.sort(key=lambda holder: -holder.bytes)
        self.holders = tuple(holders[:_SHOWN])
