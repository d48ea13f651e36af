"""The peak of GPU memory over a stretch of a program, and the lines that had it, without touching PyTorch's peak counters.

PyTorch keeps one peak for everybody: it is no use where an earlier stretch had a larger one, or where the code looked at
resets it. So allocations are recorded meanwhile, and the figure is what the allocator's own rules make of the record.
"""

import dataclasses
import gc
import json
import os
import pickle
import sys
import types
from dataclasses import dataclass

from unhand import _allocator, _blocks, _counters, _native
from unhand._answer import fields

# Of events, three for a block that comes and goes. An entry with its stack takes a few hundred bytes.
_MAX_ENTRIES = 600_000
# The allocator rounds up to this at least (`kMinBlockSize`, c10/cuda/CUDACachingAllocator.cpp).
_ROUNDING = 512
_NOT_THE_PROGRAM = tuple(f"{os.sep}{name}{os.sep}" for name in ("torch", "_pytest", "pluggy", "unittest", "unhand"))


@dataclass(frozen=True, slots=True)
class PeakSite:
    """A place in the program that had memory at the peak."""

    place: str
    """The line, as `file.py:12 function()`; with more frames asked for, those that called it after `<-`."""
    requested_bytes: int
    """What its blocks were asked to hold."""
    n_blocks: int
    """How many blocks those are."""

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields."""
        return fields(self)


@dataclass(frozen=True, slots=True)
class DevicePeak:
    """The most that a stretch of a program had on one device, above what was there when it began."""

    device: int
    """The index of the device."""
    allocated_bytes: int | None
    """Of allocated bytes; None where nobody can say."""
    allocated_at_most_bytes: int | None
    """The most it can have been; None where there is no bound."""
    reserved_bytes: int | None
    """Of reserved bytes; None where nobody can say."""
    is_exact: bool
    """Whether the figures are PyTorch's own to the byte; otherwise they are the least it can have been."""
    n_allocations: int | None
    """How many blocks were handed out; None where the allocator does not count them."""
    sites: tuple[PeakSite, ...]
    """Who had it at the peak of allocated bytes, the most first; empty where no history could be recorded."""

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields."""
        plain = fields(self)
        plain["sites"] = [site.to_dict() for site in self.sites]
        return plain


class Recording:
    """A stretch of a program: `start()` and `stop()`. Says nothing about devices that have no context.

    Three sources, the cheap ones first. PyTorch's counter tells the peak where it rose, and a bound where it did not; a
    reset by the program divides the stretch, and what the counter said is read before. Only where that is not enough the
    history is read: to look up lines in it, PyTorch imports its compiler, which takes seconds the first time.
    """

    def __init__(self, n_frames=1, *, with_sites=True):
        self.n_frames, self.with_sites = n_frames, with_sites
        self.before: dict[int, "_counters.Counters"] = {}
        self.look = None
        """PyTorch's snapshot with the history, where it was read."""
        self._parts: dict[int, list[tuple]] = {}
        # Counters at both ends of each part of the stretch, by device: a reset of the peaks begins a new one.
        self._begins: dict[int, "_counters.Counters"] = {}
        self._originals: dict[str, object] = {}
        self._is_open = False
        self._is_ours = False

    def start(self):
        """Note the figures, and record the history if nobody else does. Starts nothing where CUDA is not started."""
        self._is_open = True
        torch = sys.modules.get("torch")
        if _allocator.started_torch() is not None:
            self._begin()
        elif hasattr(getattr(torch, "_C", None), "_cuda_record_memory_history") and hasattr(torch.cuda, "_lazy_call"):
            # Runs when the program starts CUDA, before its first allocation.
            torch.cuda._lazy_call(self._begin)

    def stop(self, is_enough=lambda peak: False) -> tuple[DevicePeak, ...]:
        """What there was since `start()`, by device.

        The history is read unless what the counters tell of each device `is_enough`.
        """
        self._is_open = False
        torch = _allocator.started_torch()
        if torch is None:
            return ()
        for name, original in self._originals.items():
            setattr(torch._C, name, original)
        self._originals.clear()
        peaks = self._peaks(torch, is_enough)
        if self._is_ours:
            torch.cuda.memory._record_memory_history(enabled=None)
            self._is_ours = False
        return peaks

    def so_far(self, is_enough=lambda peak: False) -> tuple[DevicePeak, ...]:
        """The same in the middle of the stretch; the recording goes on."""
        torch = _allocator.started_torch()
        return self._peaks(torch, is_enough) if torch is not None else ()

    def _peaks(self, torch, is_enough):
        after = _counters.read_all()
        peaks = tuple(self._by_counters(device, figures) for device, figures in after.items())
        if not self._is_ours or all(peak.n_allocations == 0 or is_enough(peak) for peak in peaks):
            return peaks
        self.look = _look(torch)
        return tuple(self._by_history(peak, after[peak.device]) for peak in peaks)

    def _begin(self):
        torch = sys.modules["torch"]
        if not self._is_open:
            # The stretch was over before CUDA was started.
            return
        self.before = _counters.read_all()
        self._begins = dict(self.before)
        for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"):
            original = getattr(torch._C, name, None)
            if original is not None:
                self._originals[name] = original
                setattr(torch._C, name, self._noticing(original))
        record = getattr(torch.cuda.memory, "_record_memory_history", None)
        if record is None or any(_allocator.history_is_on(device) for device in list(self.before)[:1]):
            return
        try:
            context = "alloc" if self.with_sites else None
            record(enabled="all", context=context, stacks="python", max_entries=_MAX_ENTRIES)
        except (RuntimeError, TypeError):
            # Another allocator, or an older form of the call.
            return
        self._is_ours = True

    def _noticing(self, reset):
        def noticed(device, *more):
            figures = _counters.read_all((device,)).get(device)
            if figures is None:
                return reset(device, *more)
            try:
                return reset(device, *more)
            finally:
                self._parts.setdefault(device, []).append((self._begins.get(device), figures))
                self._begins[device] = _counters.read_all((device,))[device]

        return noticed

    def _by_counters(self, device, after) -> DevicePeak:
        """What the counters tell: the peak where they rose or had just been reset, otherwise a bound."""
        before = self.before.get(device)
        there = (before.allocated_bytes, before.reserved_bytes) if before is not None else (0, 0)
        n_allocations = after.n_allocations
        if n_allocations is not None and before is not None:
            n_allocations -= before.n_allocations or 0
        if n_allocations == 0:
            return DevicePeak(device, 0, 0, 0, True, 0, ())
        parts = [*self._parts.get(device, ()), (self._begins.get(device), after)]
        allocated, at_most = _peak_of_parts(parts, "allocated_bytes", there[0])
        reserved, _ = _peak_of_parts(parts, "reserved_bytes", there[1])
        return DevicePeak(device, allocated, at_most, reserved, allocated is not None, n_allocations, ())

    def _by_history(self, peak, after) -> DevicePeak:
        """The same figures from the history, where it is whole; with the lines that had memory."""
        traces = self.look["device_traces"] if self.look is not None else ()
        events = traces[peak.device] if peak.device < len(traces) else []
        # The program may have forgotten or switched the history, or it was too long: then some are missing.
        if peak.n_allocations is None or sum(event["action"] == "alloc" for event in events) != peak.n_allocations:
            return peak
        least, sites = peak_of(events, self.n_frames)
        if not self.with_sites:
            sites = ()
        if peak.is_exact and peak.reserved_bytes is not None:
            return dataclasses.replace(peak, sites=sites)
        before = self.before.get(peak.device)
        replayed = self._replayed(peak.device, after)
        if replayed is None:
            return dataclasses.replace(peak, allocated_bytes=peak.allocated_bytes or least, sites=sites)
        allocated, reserved = replayed["peak"]["allocated_bytes"], replayed["peak"]["reserved_bytes"]
        if before is not None:
            allocated, reserved = allocated - before.allocated_bytes, reserved - before.reserved_bytes
        return DevicePeak(peak.device, allocated, allocated, reserved, True, peak.n_allocations, sites)

    def _replayed(self, device, after):
        """The history through the allocator's rules; None where they do not end where PyTorch did."""
        look = {
            "segments": [segment for segment in self.look["segments"] if segment["device"] == device],
            "device_traces": [
                trace if index == device else [] for index, trace in enumerate(self.look["device_traces"])
            ],
            "allocator_settings": self.look.get("allocator_settings") or {},
        }
        try:
            run = json.loads(_native.replay(pickle.dumps(look, protocol=4), device))
        except ValueError:
            return None
        is_true = run["same_as_recorded"] and run["end"]["allocated_bytes"] == after.allocated_bytes
        return run if is_true else None


def _peak_of_parts(parts, name, there) -> tuple[int | None, int | None]:
    """(peak, bound) above `there`, each None where the counter does not tell it."""
    known, bounds = there, []
    for begin, end in parts:
        peak, now = getattr(end, f"peak_{name}"), getattr(end, name)
        if begin is None:
            # The device came into use during the stretch: everything on it is of the stretch.
            known = max(known, peak)
            continue
        earlier, was = getattr(begin, f"peak_{name}"), getattr(begin, name)
        nothing_came = begin.n_allocations is not None and begin.n_allocations == end.n_allocations
        if nothing_came:
            known = max(known, was)
        elif peak > earlier or earlier == was:
            known = max(known, peak)
        else:
            # Below an earlier peak. Lower than that it cannot become but by a reset that nobody saw.
            known = max(known, now)
            bounds.append(peak if peak == earlier else None)
    if None in bounds:
        return None, None
    at_most = max([known, *bounds])
    return (known - there if at_most == known else None), at_most - there


def _look(torch):
    """PyTorch's snapshot with the history. Nothing in it is garbage, so the collector need not look for any meanwhile."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        return torch._C._cuda_memorySnapshot(None)
    except RuntimeError:
        return None
    finally:
        if was_on:
            gc.enable()


def peak_of(events, n_frames=1) -> tuple[int, tuple[PeakSite, ...]]:
    """The peak of a history above its beginning, as far as requests tell, and who had it.

    Bytes are requests rounded up to 512: the allocator gives as much or more. A block counts until its free is
    requested, as in `allocated_bytes` of PyTorch's counters.
    """
    total = best = at = 0
    for index, event in enumerate(events):
        action = event["action"]
        if action == "alloc":
            total += _rounded(event["size"])
            if total > best:
                best, at = total, index
        elif action == "free_requested":
            total -= _rounded(event["size"])
    live = {}
    for event in events[: at + 1] if best else ():
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_requested":
            live.pop(event["addr"], None)
    return best, _sites(live.values(), n_frames)


def _rounded(n_bytes) -> int:
    return -(-n_bytes // _ROUNDING) * _ROUNDING


def _sites(events, n_frames) -> tuple[PeakSite, ...]:
    groups: dict[str, list[int]] = {}
    for event in events:
        groups.setdefault(_place(event.get("frames") or [], n_frames), []).append(event["size"])
    sites = [PeakSite(place, sum(sizes), len(sizes)) for place, sizes in groups.items()]
    return tuple(sorted(sites, key=lambda site: (-site.requested_bytes, site.place)))


def _place(frames, n_frames) -> str:
    """The innermost lines of the program: past PyTorch, and not further out than the test runner."""
    python = [frame for frame in frames if frame["filename"].endswith(".py")]
    ours = [frame for frame in python if not any(folder in frame["filename"] for folder in _NOT_THE_PROGRAM)]
    lines = [_blocks.site_of(types.SimpleNamespace(frames=[frame])) for frame in (ours or python)[:n_frames]]
    return " <- ".join(lines) or "no Python frame (the backward of autograd, or a library)"
