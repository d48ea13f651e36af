"""Deciding which units to empty and where their blocks go. Pure: sizes in, a plan out.

Whoever carries the plan out keeps every hole of the group occupied but the one that the next block goes to. So the
plan says where each block goes, and the allocator's own choice (best fit) does not matter.
"""

import bisect
import dataclasses

from ._layout import MIB, SMALL_PAGE_BYTES, Block, Group, Hole, Rules

# A plan has to bring back at least this part of what it copies.
_LEAST_GAIN = 0.004
# A new segment is good enough when so little of it stays empty.
_GOOD_WASTE = 0.008


@dataclasses.dataclass(slots=True, eq=False)
class Space:
    """Where blocks go, from its low end up: a hole that is there, or a segment to be made."""

    size: int
    hole: Hole | None
    blocks: list = dataclasses.field(default_factory=list)
    rest: int = 0
    new_bytes: int = 0  # what the driver has to give for it


@dataclasses.dataclass(slots=True)
class Plan:
    """What to empty, and where it goes."""

    group: Group
    units: list
    spaces: list
    n_blocks: int
    moved_bytes: int
    freed_bytes: int
    new_bytes: int

    @property
    def gain_bytes(self):
        return self.freed_bytes - self.new_bytes


def plan(group: Group, rules: Rules, budget_bytes: int | None, done=frozenset()) -> Plan | None:
    """The best that can be done for a group with so much new memory (None: as much as it takes)."""
    candidates = _candidates(group, rules, done)
    if not candidates:
        return None
    best = _best(group, rules, candidates)
    if best is None:
        return None
    if budget_bytes is None or best.new_bytes <= budget_bytes:
        return best
    # Not all at once. First with the holes of what stays in the end, so that nothing moves twice.
    largest = max([budget_bytes, *(hole.size for hole in group.holes)])
    final = [unit for unit in best.units if all(block.need <= largest for block in unit.blocks)]
    part = _largest(group, rules, final, budget_bytes, set(map(id, final)), least_gain=0)
    if part is None:
        # Nothing fits there: the holes of units that will be emptied later have to serve.
        part = _largest(group, rules, final, budget_bytes, set(), least_gain=1)
    return part


def _candidates(group, rules, done):
    chosen = []
    for unit in group.units:
        if unit.live_bytes >= unit.size:
            continue
        if not all(block.storage is not None and id(block.storage) not in done for block in unit.blocks):
            continue
        # A page at the end of a block of many pages is not worth the copy of all of them.
        if unit.size - unit.live_bytes > sum(block.need for block in unit.blocks) * _LEAST_GAIN:
            chosen.append(unit)
    # The emptiest first; of equal ones the highest, so that what stays is at low addresses.
    chosen.sort(key=lambda unit: (unit.live_bytes / unit.size, -unit.address))
    return chosen


def _best(group, rules, candidates):
    """How many of the candidates to empty: the fewest that bring nearly the most."""
    n = len(candidates)
    counts = {1 << power for power in range(max(n // 8, 1).bit_length())} | {n * part // 8 for part in range(1, 9)}
    counts = sorted(counts - {0})
    gains = {count: _estimate(group, rules, candidates[:count]) for count in counts}
    most = max(gains.values())
    if most <= 0:
        return None
    for count in counts:
        if gains[count] >= most - most // 300:
            result = _pack(group, rules, candidates[:count], set())
            if result.gain_bytes > result.moved_bytes * _LEAST_GAIN:
                return result
    return None


def _largest(group, rules, units, budget_bytes, closed, least_gain):
    """The longest beginning of `units` that needs no more new memory than that."""
    low, high, found = 0, len(units), None
    while low < high:
        middle = (low + high + 1) // 2
        part = _pack(group, rules, units[:middle], closed)
        if part.new_bytes <= budget_bytes:
            low = middle
            if part.gain_bytes >= least_gain:
                found = part
        else:
            high = middle - 1
    return found


def _estimate(group, rules, units):
    spaces, left = _fill(group, rules, units, set())
    granule = rules.page_bytes(group.is_small) if rules.is_expandable else SMALL_PAGE_BYTES
    new_bytes = -(-sum(block.need for block in left) // granule) * granule
    return sum(unit.size for unit in units) - new_bytes


def _pack(group, rules, units, closed):
    spaces, left = _fill(group, rules, units, closed)
    new = _segments(left, rules, group.is_small)
    blocks = _blocks(units)
    return Plan(
        group=group,
        units=units,
        spaces=[space for space in spaces if space.blocks] + new,
        n_blocks=len(blocks),
        moved_bytes=sum(block.storage.nbytes for block in blocks),
        freed_bytes=sum(unit.size for unit in units),
        new_bytes=sum(space.new_bytes for space in new),
    )


def _blocks(units):
    seen: dict[int, Block] = {}
    for unit in units:
        for block in unit.blocks:
            seen[block.address] = block
    return sorted(seen.values(), key=lambda block: -block.need)


def _fill(group, rules, units, closed):
    """Best fit, the largest first, into the holes of units that are neither emptied nor closed."""
    emptied = set(map(id, units)) | closed
    spaces = []
    for hole in group.holes:
        if any(id(unit) in emptied for unit in hole.units):
            continue
        # What the allocator never gives to such requests: holes of expandable segments while those are off, and
        # of oversize segments.
        if hole.units[0].is_expandable and not rules.is_expandable:
            continue
        if rules.max_split_bytes is not None and hole.size >= rules.max_split_bytes:
            continue
        if hole.size > MIB or group.is_small:
            spaces.append(Space(hole.size, hole, rest=hole.size))
    order = sorted((space.rest, index) for index, space in enumerate(spaces))
    left = []
    for block in _blocks(units):
        at = bisect.bisect_left(order, (block.need, -1))
        if at == len(order):
            left.append(block)
            continue
        _, index = order.pop(at)
        _place(block, spaces[index], rules, group.is_small)
        if spaces[index].rest:
            bisect.insort(order, (spaces[index].rest, index))
    return spaces, left


def _place(block, space, rules, is_small):
    space.blocks.append(block)
    rest = space.rest - block.need
    space.rest = rest if rules.splits(rest, is_small) else 0


def _segments(blocks, rules, is_small):
    """New segments for blocks (the largest first), made to measure so that little of them stays empty."""
    needs = [block.need for block in reversed(blocks)]
    left = list(reversed(blocks))
    spaces = []
    while left:
        best = None
        for size in _sizes(needs, rules, is_small):
            chosen, total = _greedy(needs, size)
            waste = (size - total) / size
            if best is None or waste < best[0]:
                best = waste, size, chosen
            if waste <= _GOOD_WASTE:
                break
        _, size, chosen = best
        page = rules.page_bytes(is_small) if rules.is_expandable else SMALL_PAGE_BYTES
        space = Space(size, None, rest=size, new_bytes=-(-size // page) * page)
        for at in chosen:
            _place(left[at], space, rules, is_small)
            del left[at], needs[at]
        spaces.append(space)
    return spaces


def _greedy(needs, size):
    """Which of ascending sizes to take: always the largest that still fits. The places are descending."""
    chosen, total, end = [], 0, len(needs)
    while end:
        end = bisect.bisect_right(needs, size - total, 0, end)
        if not end:
            break
        end -= 1
        chosen.append(end)
        total += needs[end]
    return chosen, total


def _sizes(needs, rules, is_small):
    """The sizes that a segment for the largest of these blocks may have, the most welcome first."""
    if is_small:
        return [SMALL_PAGE_BYTES]
    largest = needs[-1]
    if rules.is_expandable:
        page = rules.large_segment_bytes
        first = -(-largest // page)
        enough = max(first, -(-sum(needs[-400:]) // page))
        last = max(first + 2, 16)
        sizes = [enough] if enough <= last else []
        sizes += range(max(first, 8), last + 1)
        # One request makes the pages, and rounding (`roundup_power2_divisions`) must not make more of them.
        sizes = [pages * page for pages in sizes]
        return [size for size in sizes if size - rules.floor_size(size) < page] or [first * page]
    least = max(10 * MIB, -(-largest // SMALL_PAGE_BYTES) * SMALL_PAGE_BYTES)
    most = max(least + 12 * MIB, 32 * MIB)
    sizes = list(range(max(least, 20 * MIB), most + 1, SMALL_PAGE_BYTES))
    sizes += range(min(18 * MIB, most), least - 1, -SMALL_PAGE_BYTES)
    return _allowed(sizes, rules, least)


def _allowed(sizes, rules, least):
    limit = rules.max_split_bytes
    allowed = [size for size in sizes if rules.round_size(size) == size and (limit is None or size < limit)]
    return allowed or [rules.round_size(least)]
