"""What steps leave behind: the blocks that outlive the step that made them, and who holds those."""

import collections
import dataclasses
import functools
import queue
import time
from dataclasses import dataclass

from unhand import _births, _blocks, _heap, _see
from unhand._holders import Holders
from unhand._native import format_bytes
from unhand._verdict import Grower, advice_for

_LIMIT = 8
"""How many holders are named."""
_THROUGH_GRAD = (
    "A gradient made with create_graph=True refers to its graph, which refers to the parameter; the collector cannot see "
    "that: use torch.autograd.grad, or set .grad to None when done."
)


@dataclass(frozen=True, slots=True)
class Found:
    """What a look has found."""

    growers: tuple[Grower, ...]
    is_exact: bool
    """Whether the record of allocations has everything that was made meanwhile."""
    n_blocks: int
    """Blocks made in the first half of the look that were there at its end."""
    bytes: int
    collectable_bytes: int
    """Of these bytes: those of dead cycles that a pass of the collector frees."""
    filling_bytes: int
    """Of these bytes: those in containers that have a limit."""
    filling_left_bytes: int
    """What these containers will take beyond that until they are full."""
    unattributed_bytes: int


class Look:
    """One look at what grows: a mark, some steps, a middle, as many steps again, and then the blocks and their holders.

    Blocks made before the middle that are there at the end have outlived as many steps as lie between. Batches, losses and
    what else a loop makes anew in each step have not.
    """

    def __init__(self, device, is_for_replaced):
        """`is_for_replaced`: also name what is made anew in each step. That takes a second look at the heap."""
        self.device = device
        self.seconds = 0.0
        self.is_for_replaced = is_for_replaced
        self._first = self._middle = None
        self._before = {}
        with _Clock(self):
            self._mark = _births.mark((device,))
            counters = self._mark.before.get(device)
            self._first = counters.n_allocations if counters is not None else None

    @property
    def is_in_first_half(self) -> bool:
        """Whether the middle is still to come."""
        return self._middle is None

    def close(self):
        """End the recording of allocations. A second time does nothing."""
        self._mark.close()

    def middle(self, counters):
        """Note what was made until here."""
        self._middle = counters.n_allocations
        if self.is_for_replaced:
            with _Clock(self):
                self._before = {grower.path: grower for grower in self._named(self._first, self._middle, 1).growers}

    def end(self, n_steps) -> Found | None:
        """What of it is still there; `n_steps` lie between begin and middle. None where this allocator does not tell."""
        if self._first is None or self._middle is None:
            return None
        with _Clock(self):
            found = self._named(self._first, self._middle, n_steps)
            if self.is_for_replaced:
                growers = sorted([*found.growers, *self._replaced(n_steps)], key=lambda grower: -grower.bytes_per_step)
                found = dataclasses.replace(found, growers=tuple(growers[:_LIMIT]))
        self.close()
        return found

    def _replaced(self, n_steps):
        """Holders whose young blocks are larger than at the middle."""
        for grower in self._named(self._middle, None, 1).growers:
            before = self._before.get(grower.path)
            more = grower.bytes - before.bytes if before is not None else 0
            if more > 0:
                advice = advice_for(grower.kind, "", is_replaced=True)
                yield dataclasses.replace(grower, bytes_per_step=more / n_steps, is_replaced=True, advice=advice)

    def _named(self, first, end, n_steps) -> Found:
        """The live blocks with numbers from `first` on and below `end`, by their holders."""
        span = (first, end if end is not None else 1 << 62)
        born = _births.survivors(self._mark, {self.device: [span]})
        if not born.births:
            return Found((), born.is_exact, 0, 0, 0, 0, 0, 0)
        with _see.looking:
            view = _heap.View()
            try:
                return _found(view, self.device, born, n_steps)
            finally:
                view.close()


class _Clock:
    """Adds the time of a block to the seconds of a look."""

    def __init__(self, look):
        self._look = look

    def __enter__(self):
        self._start = time.perf_counter()

    def __exit__(self, *_):
        self._look.seconds += time.perf_counter() - self._start


def _found(view, device, born, n_steps) -> Found:
    addresses = {birth.address for birth in born.births}
    what = _see.Explanation(view, device, lambda block: block.address in addresses)
    makers = Holders(view)
    growers, filling, filling_left = [], 0, 0
    for holding in what.held[:_LIMIT]:
        limit, n_entries = _limit_of(view, holding)
        of_holding = _growers_of(view, makers, holding, device, n_steps, limit, n_entries)
        if limit is not None:
            left = round(holding[3] / len(holding[2]) * (limit - n_entries))
            filling, filling_left = filling + holding[3], filling_left + left
            advice = f"It has a limit, and takes {format_bytes(left)} more until it is full, if an entry is a storage."
            if not left:
                advice = "It has a limit and is full: what goes in is larger than what goes out."
            of_holding = [dataclasses.replace(grower, advice=advice) for grower in of_holding]
        growers += of_holding
    is_beyond_gc = _is_beyond_gc(view, what.garbage)
    for holder in what.holders_without_names():
        grower = _grower(holder, n_steps)
        if is_beyond_gc and holder.kind == "dead cycle":
            path = "a dead cycle through .grad and its graph"
            grower = dataclasses.replace(grower, path=path, paths=(path,), advice=_THROUGH_GRAD)
        growers.append(grower)
    growers = _merged(growers)
    known = [block.bytes for block in what.nameless]
    return Found(
        growers=tuple(growers[:_LIMIT]),
        is_exact=born.is_exact,
        n_blocks=sum(len(holding[2]) for holding in what.held) + len(what.garbage) + len(known),
        bytes=sum(holding[3] for holding in what.held) + what.garbage_bytes + sum(known),
        collectable_bytes=0 if is_beyond_gc else what.garbage_bytes,
        filling_bytes=filling,
        filling_left_bytes=filling_left,
        unattributed_bytes=what.unattributed_bytes,
    )


def _is_beyond_gc(view, garbage) -> bool:
    """Whether dead cycles go through a gradient that has a graph (`create_graph=True`): native code, which no pass sees."""
    dead = set(garbage)
    for node in view.gradients:
        storage = view.storages.get(view.tensor_storages.get(node))
        if node in view.with_graph and storage is not None and storage.block is not None:
            if view.block_nodes[storage.block.address] in dead:
                return True
    return False


def _merged(growers) -> list[Grower]:
    """Those with the same path as one: native code has no better name than another native code. The largest first."""
    found: dict[tuple, Grower] = {}
    for grower in growers:
        key = grower.kind, grower.path
        before = found.get(key)
        if before is not None:
            grower = dataclasses.replace(
                before,
                bytes=before.bytes + grower.bytes,
                n_storages=before.n_storages + grower.n_storages,
                bytes_per_step=before.bytes_per_step + grower.bytes_per_step,
            )
        found[key] = grower
    return sorted(found.values(), key=lambda grower: -grower.bytes)


def _growers_of(view, makers, holding, device, n_steps, limit, n_entries) -> list[Grower]:
    """One for the holding, or, where a single owner gathers in a few places, one for each place."""
    holder = makers.of(holding, device)
    grower = _grower(
        holder,
        n_steps,
        site=_blocks.main_site([view.object(node) for node in holding[2]]),
        limit=limit,
        n_entries=n_entries,
    )
    if not 2 <= len(holder.parts) <= 4 or any(not part.path or part.n_storages < 2 for part in holder.parts):
        return [grower]
    return [
        dataclasses.replace(
            grower,
            path=holder.path + part.path,
            paths=(holder.path + part.path,),
            type=part.type,
            bytes=part.bytes,
            n_storages=part.n_storages,
            bytes_per_step=part.bytes / n_steps,
        )
        for part in holder.parts
    ]


def _grower(holder, n_steps, site=None, limit=None, n_entries=None) -> Grower:
    return Grower(
        path=holder.path,
        paths=holder.paths,
        kind=holder.kind,
        type=holder.type,
        bytes=holder.bytes,
        n_storages=holder.n_storages,
        bytes_per_step=holder.bytes / n_steps,
        site=site,
        limit=limit,
        n_entries=n_entries,
        is_replaced=False,
        advice=advice_for(holder.kind, holder.advice),
    )


def _limit_of(view, holding) -> tuple[int | None, int | None]:
    """The limit of a container on the way to the blocks, and how many entries it has; (None, None) without one."""
    owners, _, targets, _, _ = holding
    children = [child for _, child in owners]
    for target in (targets[0], targets[-1]):
        paths = [path for path in view.graph.paths_to(target, children) if path]
        found = [next(filter(None, (_limit(view, node) for node in path)), None) for path in paths]
        # Each way has to be limited.
        if not found or None in found:
            return None, None
    return min(found, key=lambda pair: pair[0] - pair[1])


def _limit(view, node) -> tuple[int, int] | None:
    if view.is_added(node):
        return None
    thing = view.object(node)
    limit = n_entries = None
    try:
        if issubclass(type(thing), collections.deque):
            limit, n_entries = thing.maxlen, len(thing)
        elif type(thing) is _LRU:
            limit, n_entries = thing.cache_info()[2:4]
        elif issubclass(type(thing), queue.Queue):
            limit, n_entries = thing.maxsize or None, len(thing.queue)
    except Exception:
        # Subclasses have code of their own.
        return None
    return (limit, n_entries) if limit is not None else None


_LRU = type(functools.lru_cache(int))
