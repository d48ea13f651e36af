"""`watch` and `watching`: a leak is named while the loop runs, and told from caches, noise and periods."""

import logging
import threading
import time
import warnings
from collections import deque
from dataclasses import dataclass

from unhand import _allocator, _births, _blocks, _counters
from unhand._trend import Trend, patience, shape
from unhand._verdict import FINDINGS, Forecast, Verdict
from unhand.errors import LeakError

log = logging.getLogger("unhand")

_REPLIES = (None, "log", "warn", "raise")
_FEW = 15
"""Samples before there is a word for what they look like."""
_AGAIN = 128
"""After how many samples a growth that was told is looked at again, to see whether it is the same."""
_ALL = 0.3
"""The share of the expected growth that has to be found in blocks that outlive their step. The rest may be in batches."""


def watch(iterable=None, *, every=1, warmup=3, patience=None, on_leak="log", device=None) -> "Watch":
    """Watch the GPU memory of a loop: `for batch in unhand.watch(loader):`, or `w = unhand.watch()` and `w.step()`.

    After each step the counters of PyTorch's allocator are read (some 40 us). When their floor has risen long enough, the
    heap is looked at, once, and `on_leak` is told who holds what grows: None does nothing, `"log"` writes a warning to the
    logger `unhand`, `"warn"` warns, `"raise"` raises `unhand.LeakError` for a leak and logs the rest, a callable is called
    with the `Verdict`. `verdict()` says at any time how things stand.

    `every`: read after each so many steps. `warmup`: steps at the beginning that do not count. `patience`: steps for which
    memory has to grow before it is called a leak, 16 at least; by default an eighth of the steps until it runs out, between
    16 and 128. Give more than your longest epoch or episode if lists grow until its end. `device`: an index, a name such as
    `"cuda:1"`, a `torch.device`; None is the device that is current at the first step.

    It has the length of the iterable and keeps no batch. Iterating again, as for the next epoch, goes on watching.
    ValueError for numbers below 1 and an unknown `on_leak`; TypeError for something that cannot be iterated.
    """
    return Watch(iterable, every, warmup, patience, on_leak, device)


def watching(*, every=1, warmup=3, patience=None, on_leak="log", device=None, interval_s=None) -> "Watch":
    """The same for `with unhand.watching() as w:`, where the program calls `w.step()`.

    With `interval_s` a thread takes a sample each so many seconds instead, and a sample is a step; it is started on
    entering and has ended when the block is left. `"raise"` then raises at the end of the block.
    """
    return Watch(None, every, warmup, patience, on_leak, device, interval_s)


@dataclass(slots=True)
class _Rise:
    """A growth that went on long enough to be looked at."""

    trend: Trend
    level: int
    since: int
    """The sample with which it began."""
    base: float
    """The figure then."""
    top: float
    """The highest since."""
    flat_since: int | None = None
    """The sample since which it rises no more."""


@dataclass(slots=True)
class _Finding:
    """What a rise turned out to be."""

    kind: str
    growers: tuple = ()
    unattributed_bytes_per_step: float = 0.0
    look_seconds: float | None = None
    advice: str = ""
    per_sample: float = 0.0
    """The growth at that time."""
    look_again: int = 0
    """The sample at which to see whether it is still the same growth."""


class Watch:
    """What `watch` and `watching` return."""

    def __init__(self, iterable, every, warmup, patience, on_leak, device, interval_s=None):
        if every < 1 or warmup < 0 or (patience is not None and patience < 1):
            raise ValueError("`every` and `patience` are 1 or more, `warmup` is 0 or more")
        if on_leak not in _REPLIES and not callable(on_leak):
            raise ValueError(f'`on_leak` is a callable, None, "log", "warn" or "raise", and not: `{on_leak}`')
        if interval_s is not None and interval_s <= 0:
            raise ValueError(f"not a time: `{interval_s}`")
        if iterable is not None:
            iter_of = getattr(type(iterable), "__iter__", None) or getattr(type(iterable), "__getitem__", None)
            if iter_of is None:
                raise TypeError(f"cannot be iterated: {type(iterable).__name__}")
        self._iterable = iterable
        self._every, self._warmup, self._patience, self._on_leak = every, warmup, patience, on_leak
        self._wanted, self._device = device, None
        self._interval_s, self._thread, self._stop, self._error = interval_s, None, None, None
        self.n_steps = 0
        """Steps so far."""
        self._first_step = None
        self._n_samples = 0
        self._allocated, self._blocks, self._gap = Trend(), Trend(), Trend()
        self._recent, self._times = deque(maxlen=256), deque(maxlen=32)
        self._now, self._peak_bytes, self._transient_bytes, self._n_made = None, 0, 0, 0
        self._need, self._need_at = patience_samples(patience, every), 0
        self._longest, self._next_look, self._looked_seconds = 0, 0, 0.0
        self._look = self._look_due = self._look_span = None
        self._rise = self._finding = None

    # The loop

    def __len__(self):
        return len(self._iterable)

    def __bool__(self):
        return True

    def __iter__(self):
        if self._iterable is None:
            raise TypeError("nothing to iterate: call step() after each step, or give watch() an iterable")
        return _Steps(self, iter(self._iterable))

    def __enter__(self):
        if self._interval_s is not None:
            self._stop = threading.Event()
            self._thread = threading.Thread(target=self._sample_at_times, name="unhand.watching", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind, *_):
        self.close()
        if kind is None and self._error is not None:
            raise self._error

    def close(self):
        """End what is under way: a look at the heap, the thread. Watching goes on with the next step, if there is one."""
        if self._thread is not None:
            self._stop.set()
            if self._thread is not threading.current_thread():
                self._thread.join()
            self._thread = None
        if self._look is not None:
            self._look.close()
            self._look = None

    def __del__(self):
        # A loop that was left with `break` or by an exception.
        look = getattr(self, "_look", None)
        if look is not None:
            look.close()

    def step(self):
        """One step is done. LeakError with `on_leak="raise"`, and what the callable raises; nothing else is raised."""
        if self._thread is None:
            self._step()

    def _step(self):
        self.n_steps += 1
        if self.n_steps > self._warmup and not (self.n_steps - self._warmup - 1) % self._every:
            self._sample()

    def _sample_at_times(self):
        while not self._stop.wait(self._interval_s):
            try:
                self._step()
            except Exception as error:
                self._error = error
                if not isinstance(error, LeakError):
                    return

    # Statistics

    def _sample(self):
        if self._device is None and not self._find_device():
            return
        now = _counters.read(self._device)
        if now is None:
            return
        before, self._now = self._now, now
        n = self._n_samples = self._n_samples + 1
        self._recent.append(now.allocated_bytes)
        self._allocated.add(now.allocated_bytes)
        if now.n_live is not None:
            self._blocks.add(now.n_live)
            if before is not None:
                self._n_made = now.n_allocations - before.n_allocations
        if now.peak_allocated_bytes > self._peak_bytes:
            # Somebody may reset PyTorch's peak: the highest that was seen stays. What was before the loop is not the loop's.
            if before is not None:
                self._transient_bytes = now.peak_allocated_bytes - now.allocated_bytes
            self._peak_bytes = now.peak_allocated_bytes
        self._gap.add(now.reserved_bytes - self._peak_bytes)
        if n <= 16 or not n % 16:
            self._times.append((n, time.perf_counter() - self._looked_seconds))
        if self._rise is not None or self._allocated.rising or self._blocks.rising or self._gap.rising:
            self._consider(now)

    def _find_device(self):
        torch = _allocator.started_torch()
        if torch is None:
            return False
        self._device = _blocks.device_index(self._wanted)
        self._first_step = self.n_steps
        return True

    def _consider(self, now):
        if self._rise is not None:
            self._follow()
        if self._look is not None:
            self._go_on_looking(now)
        elif self._finding is not None:
            if self._n_samples >= self._finding.look_again:
                self._check_again()
        elif not _is_capturing():
            self._begin(now)

    def _check_again(self):
        """Look anew where a container should be full by now, or where it grows twice as fast as when it was told."""
        finding, trend = self._finding, self._rise.trend
        finding.look_again = self._n_samples + _AGAIN
        level = trend.rises(self._need)
        if level is None:
            return
        if finding.kind == "filling" or trend.growth(level).per_sample > 2 * finding.per_sample > 0:
            self._rise = self._finding = None
            self._next_look = 0

    def _begin(self, now):
        n = self._n_samples
        if n >= self._need_at:
            self._need = patience_samples(self._patience, self._every) if self._patience else patience(self._samples_left())
            self._need_at = n + 16
        need = max(self._need, 2 * self._longest)
        if n < self._next_look:
            return
        for trend in (self._allocated, self._blocks):
            level = trend.rises(need)
            if level is not None:
                if not _allocator.is_capturing():
                    self._start_look(trend, level)
                return
        level = self._gap.rises(need)
        if level is not None and self._allocated.rises(16) is None:
            self._rise = self._rise_of(self._gap, level)
            self._conclude(_Finding("fragmentation", advice=_FRAGMENTATION))

    def _rise_of(self, trend, level) -> _Rise:
        growth, floor = trend.growth(level), trend.floor(level)
        return _Rise(trend, level, growth.since, floor - growth.per_sample * max(1, self._n_samples - growth.since), floor)

    def _follow(self):
        """Notice when a rise is over: the memory came back, or nothing more is added."""
        rise, n = self._rise, self._n_samples
        floor = rise.trend.floor(rise.level)
        rise.top = max(rise.top, floor)
        if floor <= rise.base + (rise.top - rise.base) / 4:
            # Whatever is cleared after so long may be let grow for longer the next time.
            self._longest = max(self._longest, n - rise.since)
            self._over("what had grown since step %s came back at step %s", self._step_of(rise.since), self.n_steps)
        elif rise.trend.rising >> rise.level:
            rise.flat_since = None
        elif rise.flat_since is None:
            rise.flat_since = n
        elif n - rise.flat_since > 32 << rise.level:
            self._over("what grew since step %s grows no more, at step %s", self._step_of(rise.since), self.n_steps)

    def _over(self, words, *values):
        if self._finding is not None and self._finding.kind in FINDINGS and self._on_leak is not None:
            log.info("cuda:%s: " + words, self._device, *values)
        if self._look is not None:
            self._look.close()
        self._rise = self._finding = self._look = None
        self._next_look = 0

    # The heap

    def _start_look(self, trend, level):
        from unhand import _leaks

        is_second = self._rise is not None
        self._rise = self._rise_of(trend, level)
        left = self._samples_left()
        # Longer than what a loop prefetches, and two of the rises; when memory runs out soon, what there is time for; and
        # no longer than what the record of allocations holds.
        span = min(max(8, 2 * trend.scale(level)), int(_births.RING / 3 / max(1, self._n_made)) or 1)
        if left is not None:
            span = max(2, min(span, int(left / 4)))
        self._look = _leaks.Look(self._device, is_second)
        self._look_span, self._look_due = span, self._n_samples + span

    def _go_on_looking(self, now):
        if self._n_samples < self._look_due or _allocator.is_capturing():
            return
        look = self._look
        if look.is_in_first_half:
            look.middle(now)
            self._look_due = self._n_samples + self._look_span
            return
        self._look = None
        try:
            found = look.end(self._look_span * self._every)
        finally:
            look.close()
            self._looked_seconds += look.seconds
        self._judge(found, look)

    def _judge(self, found, look):
        """What the growth is, by what the look has found."""
        rise, n = self._rise, self._n_samples
        growth = rise.trend.growth(rise.level)
        expected = growth.per_sample * self._look_span * _ALL
        if found is None:
            finding = _Finding("leak", look_seconds=look.seconds, advice="This allocator does not tell which blocks are new.")
            return self._conclude(finding)
        waited, left = n - rise.since, self._samples_left()
        lasting = found.bytes if rise.trend is self._allocated else found.n_blocks
        finding = _Finding("leak", found.growers, found.unattributed_bytes / self._steps(), look.seconds)
        if lasting and lasting >= expected:
            room = self._room_bytes()
            fits = room is None or found.filling_left_bytes < room
            # A full one whose entries become larger has no limit in bytes.
            is_urgent = not found.filling_left_bytes and left is not None and left < waited
            if found.collectable_bytes > found.bytes / 2:
                finding.kind, finding.advice = "dead cycles", _dead_cycles()
            elif found.filling_bytes > found.bytes / 2 and fits and not is_urgent:
                finding.kind = "filling"
                n_to_go = found.filling_left_bytes / max(1.0, found.filling_bytes / self._look_span)
                finding.look_again = n + max(self._need, round(1.1 * n_to_go), waited if not n_to_go else 0)
            return self._conclude(finding)
        # What grows is made anew in each step. A sequence grows so until its end, and a batch while a curriculum goes on.
        if look.is_for_replaced and (found.growers or not found.is_exact) and (waited >= 4 * self._need or (left is not None and left < waited)):
            return self._conclude(finding)
        self._next_look = max(n + 16, rise.since + 4 * self._need) if not look.is_for_replaced else n + max(128, waited)
        if left is not None and left < 4 * self._need:
            self._next_look = n

    def _conclude(self, finding):
        self._finding = finding
        finding.per_sample = self._rise.trend.growth(self._rise.level).per_sample
        finding.look_again = finding.look_again or self._n_samples + _AGAIN
        verdict = self.verdict()
        if finding.kind in FINDINGS:
            self._tell(verdict)
        elif self._on_leak is not None:
            log.info("%s", verdict)

    def _tell(self, verdict):
        reply = self._on_leak
        if reply is None:
            return
        if callable(reply):
            reply(verdict)
        elif reply == "raise" and verdict.is_leak:
            raise LeakError(str(verdict), verdict)
        elif reply == "warn":
            warnings.warn(str(verdict), RuntimeWarning, stacklevel=_levels_to_the_caller())
        else:
            log.warning("%s", verdict)

    # Answers

    def verdict(self) -> Verdict:
        """How things stand after the last step. Looks at no heap."""
        now, n = self._now, self._n_samples
        rise, finding = self._rise, self._finding
        growth = level = None
        if finding is not None or rise is not None:
            trend, level = rise.trend, rise.level
        else:
            trend = next((one for one in (self._allocated, self._blocks) if one.rises(16) is not None), None)
            level = trend.rises(16) if trend is not None else None
        if trend is not None:
            growth = trend.growth(level)
        kind = finding.kind if finding is not None else "growing" if growth is not None else None
        slope = 0.0
        growers = finding.growers if finding is not None else ()
        low = high = rate = rate_blocks = None
        if growth is not None:
            in_bytes = growth if trend is not self._blocks else self._allocated.growth(level)
            rate, low, high = (figure / self._every for figure in (in_bytes.per_sample, in_bytes.low, in_bytes.high))
            slope = in_bytes.per_sample if trend is not self._gap else 0.0
            if growers and trend is self._blocks:
                # Blocks that no noise of sizes hides.
                rate = sum(grower.bytes_per_step for grower in growers) + finding.unattributed_bytes_per_step
            if self._blocks.n_samples and self._blocks.rising:
                blocks = self._blocks.growth(self._blocks.lowest_rising())
                rate_blocks = blocks.per_sample / self._every if blocks.per_sample > 0 else None
        recent = list(self._recent)
        if growth is not None:
            recent = recent[-max(_FEW, n - (rise.since if rise is not None else growth.since)) :]
        looks = shape(recent, slope)
        if kind is None:
            kind = self._kind_of(looks)
        return Verdict(
            kind=kind,
            device=self._device,
            step=self.n_steps,
            since_step=self._step_of(rise.since if rise is not None else growth.since) if growth is not None else None,
            growth_bytes_per_step=_rounded(rate),
            low_bytes_per_step=_rounded(low),
            high_bytes_per_step=_rounded(high),
            growth_blocks_per_step=_rounded(rate_blocks),
            allocated_bytes=now.allocated_bytes if now is not None else None,
            reserved_bytes=now.reserved_bytes if now is not None else None,
            spread_bytes=round(looks.spread) if n else None,
            period_steps=looks.period * self._every if looks.period is not None else None,
            growers=growers,
            unattributed_bytes_per_step=_rounded(finding.unattributed_bytes_per_step) if finding is not None else 0.0,
            forecast=self._forecast(rate, trend is self._gap) if rate and kind != "filling" else None,
            look_seconds=finding.look_seconds if finding is not None else None,
            advice=finding.advice or (growers[0].advice if growers else "") if finding is not None else "",
        )

    def _kind_of(self, looks) -> str:
        if self._n_samples < _FEW:
            return "warming up"
        if looks.kind in ("periodic", "varying", "step"):
            return looks.kind
        first = self._allocated.floors()[0][2]
        return "steady" if self._now.allocated_bytes == first else "step"

    def _step_of(self, sample) -> int:
        return self._first_step + sample * self._every

    def _steps(self):
        return self._look_span * self._every

    def _samples_left(self):
        """How many samples are left until memory runs out, at the growth that shows now; None without growth or a figure."""
        if not self._allocated.rising:
            return None
        growth = self._allocated.growth(self._allocated.lowest_rising())
        room = self._room_bytes()
        return room / growth.per_sample if room is not None and growth.per_sample > 0 else None

    def _room_bytes(self) -> int | None:
        """What can still be allocated at the peak of a step."""
        total = _capacity_bytes(self._device, self._now.reserved_bytes)
        return None if total is None else max(0, total - self._now.allocated_bytes - self._transient_bytes)

    def _forecast(self, rate, is_reserved):
        room = self._room_bytes()
        if is_reserved and room is not None:
            room = _capacity_bytes(self._device, self._now.reserved_bytes) - self._now.reserved_bytes
        if room is None or rate <= 0:
            return None
        steps = int(room / rate)
        seconds = None
        if len(self._times) > 1:
            (first, begin), (last, end) = self._times[0], self._times[-1]
            seconds = steps * (end - begin) / ((last - first) * self._every)
        return Forecast(steps, seconds, room)


class _Steps:
    """The iterator: asking for the next batch ends the step before. It refers to no batch."""

    __slots__ = ("_watch", "_iterator", "_is_in_step")

    def __init__(self, watch, iterator):
        self._watch, self._iterator, self._is_in_step = watch, iterator, False

    def __iter__(self):
        return self

    def __next__(self):
        if self._is_in_step:
            self._is_in_step = False
            self._watch.step()
        item = next(self._iterator)
        self._is_in_step = True
        return item


def patience_samples(steps, every) -> int:
    """A patience in samples; the most there is by default."""
    return 128 if steps is None else max(16, -(-steps // every))


def _rounded(figure):
    return None if figure is None else round(figure, 3)


_FRAGMENTATION = (
    "Free memory lies between live blocks, where it is no use: unhand.compact(), or set PYTORCH_ALLOC_CONF="
    "expandable_segments:True before the start."
)


def _dead_cycles() -> str:
    import gc

    if not gc.isenabled():
        return "The collector is switched off: call gc.collect() each so many steps, or gc.enable()."
    if _allocator.objects_are_frozen():
        return "gc.freeze() hides objects from the collector: gc.unfreeze(), gc.collect() and freeze again."
    return "The collector frees it when it passes, which the number of objects decides and not their bytes: break the cycle."


def _is_capturing() -> bool:
    torch = _allocator.started_torch()
    return torch is not None and torch._C._cuda_isCurrentStreamCapturing()


def _capacity_bytes(device, reserved_bytes) -> int | None:
    """What this process could reserve on a device: what it has, and what is free; less where a fraction was set."""
    torch = _allocator.started_torch()
    if torch is None or _is_capturing() or not _allocator.has_context(device):
        return None
    try:
        free, total = torch.cuda.mem_get_info(device)
        ask = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        allowed = total * ask(device) if ask is not None else total
    except Exception:
        # A context that an error has ended answers nothing.
        return None
    return int(min(free + reserved_bytes, allowed))


def _levels_to_the_caller() -> int:
    """The `stacklevel` at which a warning shows the line of the loop."""
    import sys

    from unhand import _frames

    level, frame = 0, sys._getframe(1)
    while frame is not None and _frames.is_ours(frame):
        level, frame = level + 1, frame.f_back
    return level + 1

