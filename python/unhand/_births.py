"""Which blocks were allocated since a mark, and are alive: told exactly, from PyTorch's own record of allocations.

The record numbers nothing, but the allocator counts what it hands out. So the last entry of the record belongs to the last
block counted, and each block gets its number: the birth order of the process. A mark is a number.

    with _births.mark() as mark:
        ...
        born = _births.survivors(mark)

Where nobody records, the record is switched on while a mark is open: without stacks, and of allocations only where
PyTorch can leave out the rest. Where the user records, that record is used as it is. A user who begins or ends a recording
meanwhile gets exactly what they asked for: the call goes through `_Recording.turned`, which reads what there is first.
"""

import bisect
import sys
import threading
from dataclasses import dataclass, field
from typing import NamedTuple

from unhand import _allocator, _counters

RING = 1 << 18
"""How many entries the record has that is switched on here. Full, it takes 40 MB of host memory, and goes with its mark."""

_SKIPPED = ["free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap", "oom"]
"""What tells nothing here: an address that is alive was last handed out by the last allocation with that address."""

_NAMES = ("_cuda_record_memory_history", "_cuda_record_memory_history_legacy")

# How often to look again where another thread allocates between the look and the counter.
_TRIES = 3


class Birth(NamedTuple):
    """A live block, and when it came."""

    device: int
    address: int
    bytes: int
    """Allocated."""
    requested_bytes: int
    number: int
    """How many blocks its device had handed out before; -1 where the record does not tell."""
    thread: int | None
    """Which thread asked for it (`threading.get_ident`); None where that is not known."""
    frames: list | None
    """The recorded stack, innermost first, where the user records stacks."""


@dataclass(frozen=True, slots=True)
class Born:
    """The survivors of a mark."""

    births: tuple[Birth, ...]
    """In the order they were born, by device."""
    n_unknown: int
    """How many allocations since the mark the record no longer has. Survivors of these are not among the births."""
    why: str
    """Why some are unknown; empty where none are."""

    @property
    def is_exact(self) -> bool:
        """Whether these are all survivors."""
        return not self.why

    @property
    def bytes(self) -> int:
        """Allocated bytes of the births."""
        return sum(birth.bytes for birth in self.births)


@dataclass(slots=True)
class Mark:
    """A moment in the allocator's life. While it is open, allocations are recorded: close it, or use `with`."""

    before: dict[int, _counters.Counters]
    """The counters at that moment, by device; of the devices that had a context."""
    devices: tuple[int, ...] | None
    """Which devices it is about; None for all."""
    is_open: bool = True
    thread: int = field(default_factory=threading.get_ident)

    def close(self):
        """Let go of the record. A second time does nothing."""
        if self.is_open:
            self.is_open = False
            _recording.leave()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()


def mark(devices=None) -> Mark:
    """A mark here and now, about some devices (indices), or about all on which there is a context.

    Some 40 us with one device, with its close. Until it is closed each allocation takes some 0.3 us longer (PyTorch 2.11;
    2 us before). Before CUDA is started it costs nothing, and everything that comes afterwards is born after it.
    """
    torch = _allocator.started_torch()
    _recording.join(torch)
    return Mark(_counters.read_all(devices, torch), devices)


def survivors(mark, spans=None) -> Born:
    """The blocks that were born since a mark, and are alive.

    `spans` narrows that to ranges of numbers, `{device: [(first, end), …]}`. About 0.5 us for each live block and 1 us for
    each allocation recorded. Blocks that were freed and wait for another stream are dead. Looks at the allocator and not at
    Python's objects, so it may be asked at any time.
    """
    births, n_unknown, reasons = [], 0, []
    for device, look in _recording.look(_allocator.devices(mark.devices)).items():
        before = mark.before.get(device)
        start = before.n_allocations if before is not None else 0
        # Where nothing was alive at the mark, all that lives came later.
        all_are_new = before is None or before.n_live == 0
        if look.counters.n_allocations is None or start is None:
            reasons.append("this allocator counts no blocks")
            continue
        if before is not None and _counters.were_reset(before, look.counters):
            reasons.append("the allocator's sums were reset meanwhile")
            if not all_are_new:
                continue
        ranges = spans.get(device, []) if spans is not None else [(0 if all_are_new else start, sys.maxsize)]
        if not (all_are_new and spans is None):
            first = min((first for first, end in ranges if end > first), default=sys.maxsize)
            lost = min(max(0, look.known_from - first), look.counters.n_allocations - start)
            if lost:
                n_unknown += lost
                reasons.append(look.why)
        is_within = within(ranges)
        for block in look.blocks:
            number, thread = look.numbers.get(block["address"], (-1, None))
            if is_within(number) or (number < 0 and all_are_new and spans is None):
                births.append(
                    Birth(
                        device,
                        block["address"],
                        block["size"],
                        block["requested_size"],
                        number,
                        thread,
                        block.get("frames") or None,
                    )
                )
    births.sort(key=lambda birth: (birth.device, birth.number))
    return Born(tuple(births), n_unknown, "; ".join(dict.fromkeys(reasons)))


def within(ranges):
    """A function that says whether a number is in one of some ranges, of which there may be many: a step makes one."""
    starts, ends = [], []
    for first, end in sorted(ranges):
        if ends and first <= ends[-1]:
            ends[-1] = max(ends[-1], end)
        else:
            starts.append(first)
            ends.append(end)

    def is_within(number):
        at = bisect.bisect_right(starts, number) - 1
        return at >= 0 and number < ends[at]

    return is_within


@dataclass(slots=True)
class _Look:
    """What is known of one device."""

    counters: _counters.Counters
    blocks: list
    """The live blocks, as PyTorch's dictionaries."""
    numbers: dict
    """Address to (number, thread) of the last allocation there."""
    known_from: int
    """All allocations from this number on are in `numbers`, unless they are dead."""
    why: str = "the record does not reach back so far"


class _Recording:
    """PyTorch's record of allocations, of which a process has one. It is on while there are marks."""

    def __init__(self):
        # Reentrant: switching the record goes through `turned` too.
        self.lock = threading.RLock()
        self.n_marks = 0
        self.is_ours = False
        self.is_switching = False
        self.originals = {}
        # By device: what was read of a record before it was given up. (numbers, known from, known until)
        self.read = {}

    def join(self, torch):
        """One mark more."""
        with self.lock:
            self.n_marks += 1
            if torch is not None and not self.originals:
                self._begin(torch)
        if torch is not None and self.is_ours:
            _sign(torch, 1)

    def leave(self):
        """One mark less. With the last one the record goes, if it is ours."""
        torch = _allocator.started_torch()
        if torch is not None:
            _sign(torch, -1)
        with self.lock:
            self.n_marks -= 1
            if self.n_marks == 0 and torch is not None:
                self._end(torch)

    def look(self, devices) -> dict:
        """What is known now, by device."""
        torch = _allocator.started_torch()
        if torch is None:
            return {}
        with self.lock:
            return self._look(torch, devices)

    def _begin(self, torch):
        self.read.clear()
        self.is_ours = False
        for name in _NAMES:
            original = getattr(torch._C, name, None)
            if original is not None:
                self.originals[name] = original
                setattr(torch._C, name, self.turned(original))
        if not torch._C._cuda_isHistoryEnabled():
            self._switch(torch, True)

    def _end(self, torch):
        if self.is_ours:
            self._switch(torch, False)
        for name, original in self.originals.items():
            # Whoever wrapped it meanwhile calls ours, which passes on.
            if getattr(getattr(torch._C, name), "unhand", None) is self:
                setattr(torch._C, name, original)
        self.originals.clear()
        self.read.clear()

    def _switch(self, torch, on):
        self.is_switching = True
        try:
            if on:
                torch.cuda.memory._record_memory_history(
                    enabled="all", context=None, max_entries=RING, **_options(torch)
                )
            else:
                torch.cuda.memory._record_memory_history(None)
            self.is_ours = on
        except (RuntimeError, TypeError):
            # The other allocators record nothing.
            self.is_ours = False
        finally:
            self.is_switching = False

    def turned(self, original):
        """PyTorch's function that begins and ends a recording, with a look at the record before it is gone."""

        def record(*args, **kwargs):
            with self.lock:
                if self.is_switching:
                    return original(*args, **kwargs)
                torch = _allocator.started_torch()
                if torch is None or self.n_marks == 0:
                    return original(*args, **kwargs)
                self.read = {
                    device: (look.numbers, look.known_from, look.counters.n_allocations)
                    for device, look in self._look(torch, _allocator.devices()).items()
                }
                if self.is_ours:
                    # Theirs begins empty, as it would have without ours.
                    self._switch(torch, False)
                    _unsign(torch)
                try:
                    return original(*args, **kwargs)
                finally:
                    if not torch._C._cuda_isHistoryEnabled():
                        self._switch(torch, True)

        record.unhand = self
        return record

    def _look(self, torch, devices):
        for _ in range(_TRIES):
            before = {device: _counters.read(device) for device in devices}
            try:
                raw = torch._C._cuda_memorySnapshot(None)
            except RuntimeError:
                return {}
            after = {device: _counters.read(device) for device in devices}
            stood_still = all(_number(before[device]) == _number(after[device]) for device in devices)
            if stood_still:
                break
        blocks = {device: [] for device in devices}
        for segment in raw["segments"]:
            live = blocks.get(segment["device"])
            if live is not None:
                live += [block for block in segment["blocks"] if block["state"] == _allocator.ALLOCATED]
        found = {}
        for device in devices:
            if before[device] is None:
                continue
            look = found[device] = _Look(before[device], blocks[device], {}, _number(before[device]))
            traces = raw["device_traces"]
            if device < len(traces):
                self._number(look, traces[device])
            if not stood_still:
                look.known_from, look.why = sys.maxsize, "another thread kept allocating during the look"
        return found

    def _number(self, look, trace):
        """Number the entries of a record by counting back from the last."""
        if look.counters.n_allocations is None:
            return
        entries = [entry for entry in trace if entry["action"] == "alloc"]
        times = [entry.get("time_us", 0) for entry in entries]
        if any(one > other for one, other in zip(times, times[1:])):
            # A ring whose size was changed begins anywhere.
            entries.sort(key=lambda entry: entry["time_us"])
        first = look.counters.n_allocations - len(entries)
        numbers, known_from, until = self.read.get(look.counters.device, ({}, 0, -1))
        alive = {block["address"] for block in look.blocks}
        look.numbers = {address: number for address, number in numbers.items() if address in alive}
        look.known_from = known_from if first <= until else first
        for number, entry in enumerate(entries, first):
            address = entry["addr"]
            if address in alive:
                look.numbers[address] = number, _thread_of(entry.get("user_metadata"))


_recording = _Recording()


def _number(figures):
    return None if figures is None else figures.n_allocations


def _options(torch) -> dict:
    """Since 2.11 a record can leave entries out; since 2.8 any thread can end it, if its annotations are global."""
    import inspect

    global _known_options
    if _known_options is None:
        wanted = {"skip_actions": _SKIPPED, "global_record_annotations": True}
        known = inspect.signature(torch.cuda.memory._record_memory_history).parameters
        _known_options = {name: value for name, value in wanted.items() if name in known}
    return _known_options


_known_options = None

# Since 2.10 an entry says what its thread was told to say (`torch.cuda.memory._set_memory_metadata`), and each thread has a
# word of its own. Threads with a mark say who they are, in a record of ours.
_signed = threading.local()


def _sign(torch, change):
    """One mark more or less of this thread's."""
    say = getattr(torch._C, "_cuda_setMemoryMetadata", None)
    if say is None:
        return
    n_marks = getattr(_signed, "n_marks", 0) + change
    _signed.n_marks = max(0, n_marks)
    if change > 0 and n_marks == 1 and not torch._C._cuda_getMemoryMetadata():
        say(_signature())
    elif change < 0 and n_marks <= 0:
        _unsign(torch)


def _unsign(torch):
    ask = getattr(torch._C, "_cuda_getMemoryMetadata", None)
    if ask is not None and ask() == _signature():
        torch._C._cuda_setMemoryMetadata("")


def _signature():
    # Short enough for C++ to keep it without an allocation.
    return f"u{threading.get_ident():x}"


def _thread_of(words):
    if not words or words[0] != "u":
        return None
    try:
        return int(words[1:], 16)
    except ValueError:
        return None
