"""Whether a test left GPU memory behind, and who holds it. Looks at counters first, and at the heap only if they grew."""

import gc
import re
import sys
from contextlib import contextmanager
from dataclasses import dataclass

from unhand import _allocator, _blocks, _counters, _heap, _kinds, _see, _tracebacks
from unhand._answer import fields
from unhand._holders import Holders
from unhand._native import format_bytes

# Libraries and PyTorch make these once and keep them for the next call: workspaces, copies of weights for autocast.
_KEPT_FOR_THE_NEXT = ("workspace", "cache")
# How pytest keeps the value of a fixture: in the item, or where the fixture is defined.
_FIXTURE = re.compile(r"^.*(?:funcargs\['(\w+)'\]|\['(\w+)'\](?:\[[^\]]*\])*\.cached_result\[0\])(.*)$")


@dataclass(frozen=True, slots=True)
class Survivor:
    """Memory that a test left behind, and who holds it."""

    path: str
    """The reference that names it best, as in `unhand.holders`; a fixture is named as such."""
    kind: str
    """What sort of reference it is; docs/guides/holders.md lists them."""
    allocated_bytes: int
    """What it holds of the test's blocks."""
    n_blocks: int
    """How many those are."""
    n_more_paths: int
    """How many other references hold the same."""
    advice: str
    """What to do, in one sentence."""

    def __str__(self):
        more = f", and {self.n_more_paths} more references" if self.n_more_paths > 1 else ""
        more = ", and 1 more reference" if self.n_more_paths == 1 else more
        what = f"{self.path}  ({_blocks.count(self.n_blocks)}{more})"
        line = f"{format_bytes(self.allocated_bytes):>10}  {self.kind:<15}  {what}"
        return f"{line}\n{'':31}{self.advice}" if self.advice else line


@dataclass(frozen=True, slots=True)
class Leak:
    """What a test left on one device."""

    device: int
    """The index of the device."""
    allocated_bytes: int
    """Bytes of blocks that were born during the test and are alive after it, without what libraries keep."""
    allowed_bytes: int
    """What the test may leave."""
    survivors: tuple[Survivor, ...]
    """Who holds them, the most first."""

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields."""
        plain = fields(self)
        plain["survivors"] = [fields(one) for one in self.survivors]
        return plain

    def __str__(self):
        allowed = f", {format_bytes(self.allowed_bytes)} are allowed" if self.allowed_bytes else ""
        head = f"left {format_bytes(self.allocated_bytes)} of GPU memory behind on cuda:{self.device}{allowed}; held by"
        return "\n".join([head, *(f"  {one}" for one in self.survivors)])


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the look after a test found."""

    leaks: tuple[Leak, ...]
    """One for each device on which too much was left."""
    collected_bytes: int
    """What only a pass of the collector freed: dead cycles, on all devices together; 0 where no pass was needed."""


class Watch:
    """One test from before its setup to after its teardown."""

    def __init__(self, adopted):
        self._adopted: dict[object, tuple[dict, dict]] = adopted
        """What belongs to owners that outlive tests: (bytes, blocks) by device. Shared by the watches of a session."""
        self._before: dict[int, int] = {}
        """Device to allocated bytes."""
        self._old: dict[int, dict[int, int]] = {}
        """Device to the blocks that are not of the test, address to bytes."""
        self._released: dict[int, dict[int, int]] = {}
        """The blocks of owners that were torn down during the test: these have to go."""

    def start(self):
        """Note what is there."""
        self._before = _allocated()
        self._old = live_blocks() if any(self._before.values()) else {}

    @contextmanager
    def adopting(self, owner=None):
        """What is allocated inside is not the test's but `owner`'s: a fixture that lives longer, or a warm-up."""
        before = _allocated()
        old = live_blocks() if any(before.values()) else {}
        try:
            yield
        finally:
            added = {device: n_bytes - before.get(device, 0) for device, n_bytes in _allocated().items()}
            if any(added.values()):
                new = {}
                for device, blocks in live_blocks().items():
                    there = old.get(device, {})
                    new[device] = {address: size for address, size in blocks.items() if address not in there}
                    self._old.setdefault(device, {}).update(new[device])
                self._shift(added, 1)
                if owner is not None:
                    self._adopted[owner] = added, new

    def release(self, owner):
        """The owner is being torn down: what it had has to go."""
        added, blocks = self._adopted.pop(owner, ({}, {}))
        self._shift(added, -1)
        for device, of_device in blocks.items():
            self._released.setdefault(device, {}).update(of_device)

    def rebase(self, change):
        """`change` frees memory that is not the test's: it does not count in its favour."""
        before = _allocated()
        change()
        self._shift({device: n_bytes - before.get(device, 0) for device, n_bytes in _allocated().items()}, 1)

    def grown_bytes(self) -> dict[int, int]:
        """How much more is allocated than before the test, by device."""
        return {device: n_bytes - self._before.get(device, 0) for device, n_bytes in _allocated().items()}

    def finish(self, allowed_bytes=0, *, collect=True, let_go=None) -> Verdict:
        """What was left. `let_go` drops what only pytest still holds. Costs one read of counters if nothing grew."""
        if not self._has_grown(allowed_bytes):
            return Verdict((), 0)
        if let_go is not None:
            let_go()
        collected = 0
        if collect and self._has_grown(allowed_bytes):
            before = sum(_allocated().values())
            gc.collect()
            collected = max(before - sum(_allocated().values()), 0)
        if not self._has_grown(allowed_bytes):
            return Verdict((), collected)
        leaks = []
        with _see.looking:
            view = _heap.View()
            try:
                for device, n_bytes in self.grown_bytes().items():
                    if n_bytes > allowed_bytes:
                        leaks += self._leaks(view, device, allowed_bytes)
            finally:
                view.close()
        return Verdict(tuple(leaks), collected)

    def _shift(self, added, sign):
        for device, n_bytes in added.items():
            self._before[device] = self._before.get(device, 0) + sign * n_bytes

    def _has_grown(self, allowed_bytes) -> bool:
        return any(n_bytes > allowed_bytes for n_bytes in self.grown_bytes().values())

    def _leaks(self, view, device, allowed_bytes):
        old, released = self._old.get(device, {}), self._released.get(device, {})
        new = [
            block
            for address, block in view.blocks.items()
            if view.block_device[address] == device and block.state == _allocator.ALLOCATED
            # An address may have been given to another block since; most have another size.
            and (old.get(address) != block.bytes or released.get(address) == block.bytes)
        ]
        survivors, kept_bytes = _survivors(view, device, new)
        left = sum(block.bytes for block in new) - kept_bytes
        if left > allowed_bytes:
            yield Leak(device, left, allowed_bytes, survivors)


def _survivors(view, device, new) -> tuple[tuple[Survivor, ...], int]:
    """Who holds new blocks, and how many bytes of them are kept for the next call."""
    nodes = [(view.block_nodes[block.address], block.bytes) for block in new if block.address in view.block_nodes]
    held, unheld, _ = view.graph.holdings(nodes)
    makers = Holders(view)
    found = [_survivor(makers.of(holding, device)) for holding in sorted(held, key=lambda holding: -holding[3])[:_SHOWN]]
    shown = sum(one.allocated_bytes for one in found)
    more = sum(holding[3] for holding in held) - shown
    if more:
        found.append(Survivor("in more holders", "", more, sum(len(holding[2]) for holding in held[_SHOWN:]), 0, ""))
    if unheld:
        n_bytes = sum(view.object(node).bytes for node in unheld)
        found.append(_unnamed("dead cycle", "a dead cycle", n_bytes, len(unheld)))
    nameless = [block for block in new if block.address not in view.block_nodes]
    known = _blocks.known(view, device, nameless) if nameless else {}
    kept = 0
    groups: dict[tuple[str, str], list[int]] = {}
    for block in nameless:
        kind, path = known.get(block.address, ("native", "no Python object leads to it"))
        if kind in _KEPT_FOR_THE_NEXT:
            kept += block.bytes
        else:
            groups.setdefault((kind, path), []).append(block.bytes)
    found += [_unnamed(kind, path, sum(sizes), len(sizes)) for (kind, path), sizes in groups.items()]
    return tuple(sorted(found, key=lambda one: -one.allocated_bytes)), kept


_SHOWN = 10
_ADVICE_FOR_FIXTURES = "The fixture outlives the test: undo in the test what it did to it, or allow as much."


def _unnamed(kind, path, n_bytes, n_blocks) -> Survivor:
    return Survivor(path, kind, n_bytes, n_blocks, 0, _kinds.advice(kind, path, 1, "", True))


def _survivor(holder) -> Survivor:
    paths = list(dict.fromkeys(_in_words_of_pytest(path) for path in holder.paths))
    # What pytest itself keeps on the way to a fixture is no news.
    paths.sort(key=lambda path: not path.startswith("fixture `"))
    kind = "fixture" if paths[0].startswith("fixture `") else holder.kind
    advice = _ADVICE_FOR_FIXTURES if kind == "fixture" else holder.advice
    return Survivor(paths[0], kind, holder.bytes, holder.n_storages, len(paths) - 1, advice)


def _in_words_of_pytest(path) -> str:
    found = _FIXTURE.match(path)
    return f"fixture `{found[1] or found[2]}`{found[3]}" if found else path


def _allocated() -> dict[int, int]:
    return {device: figures.allocated_bytes for device, figures in _counters.read_all().items()}


def live_blocks() -> dict[int, dict[int, int]]:
    """By device, the blocks in use, address to allocated bytes: half a millisecond for a thousand."""
    torch = _allocator.started_torch()
    found: dict[int, dict[int, int]] = {}
    try:
        segments = _allocator.raw_snapshot(torch)["segments"] if torch is not None else ()
    except RuntimeError:
        return found
    for segment in segments:
        blocks, at = found.setdefault(segment["device"], {}), segment["address"]
        for block in segment["blocks"]:
            at, size = block.get("address", at), block["size"]
            if block["state"] != _allocator.INACTIVE:
                blocks[at] = size
            at += size
    return found


def forget_last_error():
    """What pytest does at the beginning of the next test: the traceback of the last failure goes, and its locals."""
    for name in _tracebacks.LAST:
        if hasattr(sys, name):
            delattr(sys, name)
    gc.collect()
