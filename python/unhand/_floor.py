"""The floor: which GPU storages exist at one moment, and the way back to it. What the integrations of other libraries share.

A mark of `_births` records allocations, and its record is overrun by a training of hours. So a floor knows the other
half: it has a weak reference to each storage that is there, and whatever is alive later and not among those was born since.
"""

import sys
from dataclasses import dataclass, field

from unhand import _allocator, _counters, _free, _heap, _see
from unhand._free import Freed
from unhand._holders import Holder, Holders
from unhand._native import format_bytes

_SHOWN = 20
"""How many holders of what stays are named."""


@dataclass(frozen=True, slots=True)
class Landing:
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
        plain = {"schema_version": 1, **{name: getattr(self, name) for name in self.__slots__}}
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

    def had(self, cdata) -> bool:
        """Whether a storage that is alive now was there."""
        known = self.storages.get(cdata)
        return known is not None and not known.expired()


def floor() -> Floor:
    """The floor here and now; empty before CUDA is started. One walk over Python's objects, some 0.1 s in a large process."""
    found = Floor()
    if not _allocator.devices():
        return found
    from torch.multiprocessing.reductions import StorageWeakRef

    with _see.looking:
        view = _heap.View()
        try:
            for cdata, storage in view.storages.items():
                wrapper = storage.wrapper()
                if wrapper is not None:
                    found.storages[cdata] = StorageWeakRef(wrapper)
                elif storage.block is not None:
                    found.blocks[storage.device, storage.block.address] = storage.block.bytes
            for address, block in view.blocks.items():
                if address not in view.block_nodes:
                    found.blocks[view.block_device[address], address] = block.bytes
        finally:
            view.close()
    found.allocated_bytes = allocated()
    return found


def allocated() -> int:
    """Allocated bytes, over all devices on which this process has a context."""
    figures = [_counters.read(device) for device in _allocator.devices()]
    return sum(each.allocated_bytes for each in figures if each is not None)


def release(*targets, keep=(), since=None, shared=False, dry_run=False) -> Freed:
    """`unhand.free`, but for what existed at the floor `since`."""
    spare = None if since is None else lambda view: {cdata for cdata in view.storages if since.had(cdata)}
    return _free.run(targets, keep, spare, shared=shared, dry_run=dry_run)


def back_to(began, name, *targets, keep=(), everything=False) -> Landing:
    """Free what was born since a floor and belongs to the targets, and name who holds the rest.

    What a dead cycle, a traceback or a cache has is given back too, as by `unhand.free()`. With `everything`, all storages
    that were born since are, whoever holds them.
    """
    freed = release(*targets, *(_born_since(began) if everything else ()), keep=keep, since=began)
    left, unattributed_bytes, left_bytes = _left(began)
    return Landing(name, began.allocated_bytes, allocated(), left_bytes, left, unattributed_bytes, freed)


def _born_since(began) -> list:
    """A tensor or the bare storage of each storage that was born since a floor."""
    if "torch" not in sys.modules:
        return []
    found = []
    with _see.looking:
        view = _heap.View()
        try:
            for cdata, storage in view.storages.items():
                if not began.had(cdata):
                    found += storage.tensors or ([storage.bare] if storage.bare is not None else [])
        finally:
            view.close()
    return found


def _left(began):
    """The holders of what was born since a floor, its bytes that nobody holds, and all its bytes."""
    if not _allocator.devices():
        return (), 0, 0
    with _see.looking:
        view = _heap.View()
        try:
            return _left_in(view, began)
        finally:
            view.close()


def _left_in(view, began):
    old = {
        storage.block.address
        for cdata, storage in view.storages.items()
        if storage.block is not None and began.had(cdata)
    }
    old |= {address for (device, address) in began.blocks if view.block_device.get(address) == device}
    holders, unattributed_bytes, left_bytes = [], 0, 0
    for device in _allocator.devices():
        found = _see.Explanation(view, device, lambda block: block.address not in old)
        holders += found.holders(_SHOWN)
        unattributed_bytes += found.unattributed_bytes
        left_bytes += sum(view.object(node).bytes for holding in found.held for node in holding[2])
        left_bytes += found.garbage_bytes + sum(block.bytes for block in found.nameless)
    holders = [holder for holder in holders if holder.kind not in ("graph pool",)]
    holders.sort(key=lambda holder: -holder.bytes)
    return tuple(holders[:_SHOWN]), unattributed_bytes, left_bytes
