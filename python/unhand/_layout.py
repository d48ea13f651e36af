"""Where the blocks of one device lie, read from PyTorch's snapshot, in the units that the driver can take back.

A unit is a segment, or one page of an expandable segment. A group is what shares free blocks: one stream, small or
large requests. Private pools are counted and otherwise left alone.
"""

import bisect
import dataclasses

from . import _allocator

MIB = 1 << 20
SMALL_PAGE_BYTES = 2 * MIB


@dataclasses.dataclass(slots=True, frozen=True)
class Rules:
    """PyTorch's rules for sizes, under the settings that hold now."""

    is_expandable: bool
    max_split_bytes: int | None
    large_segment_bytes: int
    roundup_divisions: tuple[int, ...]

    def divisions(self, size):
        if not self.roundup_divisions:
            return 0
        index = min(max(size.bit_length() - 1 - 20, 0), len(self.roundup_divisions) - 1)
        return self.roundup_divisions[index]

    def round_size(self, requested):
        """The size of the block that a request asks for."""
        if requested < 512:
            return 512
        divisions = self.divisions(requested)
        if divisions > 1 and requested > 512 * divisions:
            floor = 1 << (requested.bit_length() - 1)
            if requested == floor:
                return requested
            step = floor // divisions
            return -(-requested // step) * step
        return -(-requested // 512) * 512

    def floor_size(self, size):
        """The largest request whose block is not larger than `size`, which is at least 512."""
        divisions = self.divisions(size)
        if divisions > 1 and size > 512 * divisions:
            step = (1 << (size.bit_length() - 1)) // divisions
            return size // step * step
        return size // 512 * 512

    def splits(self, rest, is_small):
        """Whether a block is cut when so much of it would remain."""
        return rest >= 512 if is_small or self.is_expandable else rest > MIB

    def page_bytes(self, is_small):
        return SMALL_PAGE_BYTES if is_small else self.large_segment_bytes


@dataclasses.dataclass(slots=True, eq=False)
class Block:
    """A block in use."""

    address: int
    size: int
    requested: int
    is_pending: bool
    storage: object = None  # of `_storages.Storage`; None: it must stay where it is
    need: int = 0  # the block that a new request for it would take
    units: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, eq=False)
class Unit:
    """What the driver takes back as a whole."""

    address: int
    size: int
    is_expandable: bool
    live_bytes: int = 0
    blocks: list = dataclasses.field(default_factory=list)


@dataclasses.dataclass(slots=True, eq=False)
class Hole:
    """A free block: where, and which units it lies in."""

    address: int
    size: int
    units: list


@dataclasses.dataclass(slots=True, eq=False)
class Group:
    """The blocks of one stream, small or large."""

    stream: int
    is_small: bool
    units: list = dataclasses.field(default_factory=list)
    holes: list = dataclasses.field(default_factory=list)

    @property
    def blocks(self):
        seen = {}
        for unit in self.units:
            for block in unit.blocks:
                seen[block.address] = block
        return list(seen.values())


@dataclasses.dataclass(slots=True)
class Layout:
    """One device at one moment."""

    groups: dict
    private: dict  # pool id -> [blocks, bytes]
    reserved_bytes: int = 0
    allocated_bytes: int = 0
    returnable_bytes: int = 0

    @property
    def stuck_bytes(self):
        return self.reserved_bytes - self.allocated_bytes - self.returnable_bytes


def read(torch, device):
    """The segments of all devices and the rules, without the history (which can be large)."""
    snapshot = _allocator.raw_snapshot(torch)
    return layout([segment for segment in snapshot["segments"] if segment["device"] == device], rules(snapshot))


def rules(snapshot):
    """The rules of a snapshot's settings."""
    settings = snapshot.get("allocator_settings", {})
    max_split = settings.get("max_split_size", -1)
    table = settings.get("roundup_power2_divisions", {})
    divisions = tuple(table[key] for key in sorted(table, key=int))
    return Rules(
        is_expandable=bool(settings.get("expandable_segments", False)),
        max_split_bytes=max_split if 0 < max_split < 1 << 60 else None,
        large_segment_bytes=_large_segment_bytes(settings.get("PYTORCH_CUDA_ALLOC_CONF", "")),
        roundup_divisions=divisions if any(divisions) else (),
    )


def _large_segment_bytes(conf):
    # Not among the settings of a snapshot, only in the string they came from.
    for part in conf.replace(" ", "").split(","):
        name, _, value = part.partition(":")
        if name == "large_segment_size_mb" and value.isdigit():
            return int(value) * MIB
    return 20 * MIB


def layout(segments, rules):
    """Groups, units, blocks and holes of one device's segments, and the rules they are under."""
    result = Layout({}, {})
    for segment in segments:
        result.reserved_bytes += segment["total_size"]
        pool = tuple(segment.get("segment_pool_id", (0, 0)))
        is_small = segment["segment_type"] == "small"
        if pool != (0, 0):
            counts = result.private.setdefault(pool, [0, 0])
            for block in segment["blocks"]:
                if block["state"] != "inactive":
                    counts[0] += 1
                    counts[1] += block["size"]
                    result.allocated_bytes += block["size"]
            continue
        key = segment["stream"], is_small
        group = result.groups.get(key)
        if group is None:
            group = result.groups[key] = Group(*key)
        _add(segment, group, result, rules)
    return result, rules


def _add(segment, group, result, rules):
    start, total = segment["address"], segment["total_size"]
    if segment.get("is_expandable", False):
        page = rules.page_bytes(group.is_small)
        units = [Unit(at, min(page, start + total - at), True) for at in range(start, start + total, page)]
    else:
        page = total
        units = [Unit(start, total, False)]
    address = start
    for raw in segment["blocks"]:
        size = raw["size"]
        address = raw.get("address", address)
        first, last = (address - start) // page, (address + size - 1 - start) // page
        if raw["state"] == "inactive":
            group.holes.append(Hole(address, size, units[first : last + 1]))
        else:
            block = Block(address, size, raw["requested_size"], raw["state"] != "active_allocated")
            block.units = units[first : last + 1]
            result.allocated_bytes += size
            for unit in block.units:
                unit.blocks.append(block)
                low, high = max(address, unit.address), min(address + size, unit.address + unit.size)
                unit.live_bytes += high - low
        address += size
    for unit in units:
        if unit.live_bytes:
            group.units.append(unit)
        else:
            result.returnable_bytes += unit.size
    _trim(group, units)


def _trim(group, units):
    """Leaves out of the holes what goes back to the driver by itself."""
    empty = [unit for unit in units if not unit.live_bytes]
    if not empty:
        return
    starts = [unit.address for unit in empty]
    kept = []
    for hole in group.holes:
        parts = [(hole.address, hole.address + hole.size)]
        for unit in empty[bisect.bisect_left(starts, hole.address) :]:
            if unit.address >= hole.address + hole.size:
                break
            low, high = parts.pop()
            if unit.address > low:
                parts.append((low, unit.address))
            if unit.address + unit.size < high:
                parts.append((unit.address + unit.size, high))
            else:
                break
        for low, high in parts:
            inside = [unit for unit in hole.units if low < unit.address + unit.size and unit.address < high]
            inside = [unit for unit in inside if unit.live_bytes]
            if inside:
                kept.append(Hole(low, high - low, inside))
    group.holes = kept
