"""`unhand.compact()`: rewrites live storages so that memory which fragmentation holds goes back to the driver."""

import contextlib
import dataclasses
import gc
import signal
import sys
import threading
import time

from . import _layout, _packing, _storages
from ._answer import Answer
from ._relocate import Disturbed, Relocation
from .errors import CaptureError, Error

_MIB = 1 << 20
# Waves are few: each gives the next one more room. This only ends what should have ended by itself.
_MOST_WAVES = 400
# A new layout of a group is looked for again when the last one brought less than planned, but not for ever.
_MOST_ROUNDS = 3

_TROUBLES = {
    "disturbed": "others allocate at the same time, or this was called inside use_mem_pool()",
    "full": "the device is full",
    "interrupted": "interrupted",
}


@dataclasses.dataclass(frozen=True, slots=True)
class Skipped:
    """Blocks that were left where they are, and why."""

    reason: str
    n_blocks: int
    bytes: int
    where: str


@dataclasses.dataclass(frozen=True, slots=True)
class Usage:
    """What the allocator of a device held at one moment."""

    reserved_bytes: int
    allocated_bytes: int
    stuck_bytes: int
    returnable_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Compacted(Answer):
    """What `compact()` did, or with `dry_run` what it would do."""

    device: int
    is_dry_run: bool
    before: Usage
    after: Usage
    moved_bytes: int
    n_moved: int
    n_left: int  # storages that were to be moved and were not: no room, or an error
    passes: int
    extra_limit_bytes: int
    extra_bytes: int
    returned_bytes: int | None
    peak_allocated_bytes: int  # before: the plugs count as allocated, so the allocator's own peak is spoiled
    n_other_allocations: int | None
    seconds: float
    skipped: tuple[Skipped, ...]
    note: str | None

    def to_dict(self):
        """As plain values: the field names are the JSON names."""
        return dataclasses.asdict(self)

    def __str__(self):
        verb = "would move" if self.is_dry_run else "moved"
        before, after = self.before, self.after
        rows = [("", "before", "after")]
        for name in ("reserved", "allocated", "stuck", "returnable"):
            rows.append((name, *(_size(getattr(usage, f"{name}_bytes")) for usage in (before, after))))
        moved = f"{verb} {self.n_moved} storages, {_size(self.moved_bytes)}, in {_passes(self.passes)}"
        lines = [f"cuda:{self.device}: {moved}"]
        lines += [f"  {name:<10}  {old:>10}  {new:>10}" for name, old, new in rows]
        if self.returned_bytes is not None:
            lines.append(f"  the driver got back {_size(self.returned_bytes)} in {self.seconds:.2f} s, ")
            lines[-1] += f"with {_size(self.extra_bytes)} more than before in use on the way"
        for skipped in self.skipped:
            where = f" ({skipped.where})" if skipped.where else ""
            lines.append(f"  not moved: {skipped.n_blocks} blocks, {_size(skipped.bytes)}: {skipped.reason}{where}")
        if self.note:
            lines.append(f"  {self.note}")
        return "\n".join(lines)

    def _repr_html_(self):
        from unhand import _html

        return _html.compacted_html(self)


def compact(*, device=None, extra=None, dry_run=False) -> Compacted:
    """Moves live storages together, so that the memory between them goes back to the driver.

    Every tensor, view, parameter, gradient and optimizer state keeps its identity and its values; only addresses
    change. Call it between steps: a kernel that another thread launches meanwhile can be lost.

    `extra` is how much more than before may be reserved on the way, in bytes or as in "512MiB" (default: what is free
    on the device, 1 GiB at most). With `dry_run` nothing changes, and the answer says what would.
    """
    torch = sys.modules.get("torch")
    if torch is None:
        raise Error("nothing to compact: torch is not imported")
    index = _device_index(torch, device)
    if not _has_context(torch, index):
        return _nothing(index, dry_run)
    backend = torch.cuda.get_allocator_backend()
    if backend != "native":
        raise Error(f"only PyTorch's own allocator can be compacted, and this process uses: {backend}")
    return _Compaction(torch, index, extra, dry_run).run()


class _Compaction:
    def __init__(self, torch, device, extra, dry_run):
        self.torch = torch
        self.device = device
        self.dry_run = dry_run
        self.started = time.perf_counter()
        self.extra_limit = self._extra_limit(extra)
        self.skipped = {}
        self.moved = {}
        self.moved_bytes = 0
        self.n_left = 0
        self.passes = 0
        self.extra_bytes = 0
        self.n_allocations = 0
        self.lost_streams = {}
        self.interrupted = False
        self.note = None
        self.before = self.after = None
        self.free_before = None
        self.peak_allocated = torch.cuda.max_memory_allocated(device)

    def run(self):
        torch = self.torch
        if torch.cuda.is_current_stream_capturing():
            raise CaptureError("a CUDA graph is being captured: compact after it")
        found = _storages.find(self.device)
        try:
            self._refuse_capture(found.streams)
            self.streams = _Streams(torch, self.device, found.streams)
            return self._dry_run(found) if self.dry_run else self._run(found)
        finally:
            # Nothing here may keep a tensor alive afterwards, not even until the next garbage collection.
            found.forget()

    def _run(self, found):
        torch = self.torch
        self.free_before = torch.cuda.mem_get_info(self.device)[0]
        counted = self._n_allocations_so_far()
        try:
            with _deferred_interrupt() as interrupt:
                self.interrupt = interrupt
                torch.cuda.synchronize(self.device)
                layout, rules = _layout.read(torch, self.device)
                self.before = _usage(layout)
                torch.cuda.empty_cache()
                if graphs := _graphs(found, layout):
                    self._skip_all(layout, graphs)
                else:
                    layout, rules = _layout.read(torch, self.device)
                    self._match(layout, rules, found.storages)
                    self._waves(layout, rules, found.storages)
                    self._remember_streams()
                torch.cuda.synchronize(self.device)
                torch.cuda.empty_cache()
                self.n_other = self._n_allocations_so_far() - counted - self.n_allocations
        except BaseException as error:
            # How far it came. Everything is in order: the plugs are gone, and each storage has moved or has not.
            if self.before is not None:
                self.n_other = None
                with contextlib.suppress(Exception):
                    torch.cuda.synchronize(self.device)
                    torch.cuda.empty_cache()
                    error.compacted = self._result()
            raise
        return self._result()

    # Before.

    def _extra_limit(self, extra):
        free = self.torch.cuda.mem_get_info(self.device)[0]
        if extra is None:
            return min(1 << 30, free)
        return _parse_size(extra)

    def _refuse_capture(self, streams):
        torch = self.torch
        for stream in streams:
            with torch.cuda.stream(stream):
                if torch.cuda.is_current_stream_capturing():
                    raise CaptureError(f"a CUDA graph is being captured on {stream}: compact after it")

    def _skip(self, reason, block, where):
        entry = self.skipped.setdefault(reason, [0, 0, 0, ""])
        entry[0] += 1
        entry[1] += block.size
        if block.size > entry[2]:
            entry[2:] = [block.size, where]

    def _skip_all(self, layout, graphs):
        blocks = [block for group in layout.groups.values() for block in group.blocks]
        n_private = sum(counts[0] for counts in layout.private.values())
        size = sum(block.size for block in blocks) + sum(counts[1] for counts in layout.private.values())
        where = ", ".join(graphs[:3])
        if len(graphs) > 3:
            where += f" and {len(graphs) - 3} more"
        reason = "a captured CUDA graph has addresses baked in, maybe theirs"
        self.skipped[reason] = [len(blocks) + n_private, size, 0, where]
        self.note = "nothing was moved: reset the graph, compact, and capture it again"

    def _match(self, layout, rules, storages, count=True):
        """Tells the blocks their storages, and which of them have to stay."""
        skip = self._skip if count else lambda *_: None
        by_address = {}
        for storage in storages:
            by_address.setdefault(storage.address, []).append(storage)
        shared = _shared_storages()
        for group in layout.groups.values():
            stream = self.streams.get(group.stream)
            for block in group.blocks:
                owners = by_address.get(block.address, ())
                if block.is_pending:
                    skip("freed, and waiting for another stream", block, "")
                elif not owners:
                    where = f"the largest is {_size(block.size)} on stream {group.stream:#x}"
                    skip("no Python tensor reaches them: workspaces, native code", block, where)
                elif reason := self._immovable(owners, block, stream, shared, rules, group):
                    skip(reason, block, _describe(owners[0]))
                else:
                    block.storage = owners[0]
                    block.need = rules.round_size(owners[0].nbytes)
        if count:
            for pool, (n_blocks, size) in layout.private.items():
                if n_blocks:
                    self.skipped[f"in the private pool {pool}"] = [n_blocks, size, 0, "CUDA graph or MemPool"]

    def _immovable(self, owners, block, stream, shared, rules, group):
        storage = owners[0]
        if not all(owner.untyped.resizable() for owner in owners):
            return "shared with another library (DLPack, or memory that is not PyTorch's)"
        if len(owners) > 1:
            return "two storages share them until one is written (copy on write)"
        if storage.is_exported:
            return "another library has the address"
        if storage.cdata in shared:
            return "shared with another process"
        if storage.n_owners > storage.n_known_aliases:
            return "native code holds them too (a DLPack consumer, DDP, a C++ module)"
        if stream is None:
            return "on a stream that this process cannot name"
        need = rules.round_size(storage.nbytes)
        if storage.nbytes != block.requested or (need <= _MIB) != group.is_small:
            return "of another size than their blocks"
        if rules.max_split_bytes is not None and need >= rules.max_split_bytes:
            return "larger than max_split_size_mb"
        return None

    # The work.

    def _budget(self):
        torch = self.torch
        reserved = torch.cuda.memory_reserved(self.device)
        free, total = torch.cuda.mem_get_info(self.device)
        room = min(self.before.reserved_bytes + self.extra_limit - reserved, free)
        fraction = getattr(torch.cuda, "get_per_process_memory_fraction", None)
        if fraction is not None and fraction(self.device) < 1:
            room = min(room, int(fraction(self.device) * total) - reserved)
        return max(0, room)

    def _waves(self, layout, rules, storages):
        done = set()
        rounds = 1
        shrink = 0
        while self.passes < _MOST_WAVES:
            budget = self._budget() >> shrink
            plans = []
            for group in _by_gain(layout):
                plan = _packing.plan(group, rules, budget, done)
                if plan is not None:
                    plans.append(plan)
                    budget -= plan.new_bytes
            if not plans:
                if rounds == _MOST_ROUNDS or not done:
                    break
                rounds += 1
                done = set()
                continue
            reserved = layout.reserved_bytes
            moved, trouble = self._wave(plans, rules)
            done.update(map(id, moved))
            self.passes += 1
            layout, _ = _layout.read(self.torch, self.device)
            self._match(layout, rules, storages, count=False)
            if trouble is None:
                continue
            shrink += 2
            is_useless = trouble == "disturbed" and shrink > 4 and layout.reserved_bytes >= reserved
            if trouble == "interrupted" or is_useless or shrink > 8:
                self.note = f"stopped early: {_TROUBLES[trouble]}"
                break
        wanted = [_packing.plan(group, rules, None) for group in layout.groups.values()]
        self.n_left = sum(plan.n_blocks for plan in wanted if plan is not None)
        if self.n_left and self.note is None:
            self.note = "more would move with more `extra` memory"

    def _wave(self, plans, rules):
        """Carries out one plan for each group. Says which storages moved, and what went wrong."""
        torch = self.torch
        relocation = Relocation(torch, self.device, rules)
        trouble = None
        # Dead tensors in cycles would come free in the middle, and make holes that nobody has planned.
        is_collecting = gc.isenabled()
        gc.disable()
        try:
            for plan in plans:
                relocation.carry_out(plan, self.streams.get(plan.group.stream), self.interrupt.check)
        except Disturbed:
            trouble = "disturbed"
        except torch.cuda.OutOfMemoryError:
            trouble = "full"
        except _Interrupted:
            trouble = "interrupted"
        finally:
            if is_collecting:
                gc.enable()
            reserved = torch.cuda.memory_reserved(self.device)
            self.extra_bytes = max(self.extra_bytes, reserved - self.before.reserved_bytes)
            relocation.release()
            self.n_allocations += relocation.n_allocations
            self.moved_bytes += relocation.moved_bytes
            self.moved.update((storage.cdata, storage) for storage in relocation.moved)
            self.lost_streams.update((storage.cdata, storage) for storage in relocation.lost_streams)
        torch.cuda.synchronize(self.device)
        torch.cuda.empty_cache()
        return relocation.moved, trouble

    def _remember_streams(self):
        """Blocks that were used on other streams wait for them when freed; the new blocks have to as well.

        On which streams is not to be seen from outside, so all known ones are noted. That can only delay a free.
        """
        torch = self.torch
        for storage in self.lost_streams.values():
            tensor = torch.empty(0, dtype=torch.uint8, device=f"cuda:{self.device}").set_(storage.untyped)
            for stream in self.streams.known():
                tensor.record_stream(stream)

    # After.

    def _n_allocations_so_far(self):
        return self.torch._C._cuda_memoryStats(self.device)["allocation"]["all"]["allocated"]

    def _result(self):
        layout, _ = _layout.read(self.torch, self.device)
        self.after = _usage(layout)
        returned = self.torch.cuda.mem_get_info(self.device)[0] - self.free_before
        return self._compacted(len(self.moved), self.moved_bytes, returned)

    def _compacted(self, n_moved, moved_bytes, returned):
        return Compacted(
            device=self.device,
            is_dry_run=self.dry_run,
            before=self.before,
            after=self.after,
            moved_bytes=moved_bytes,
            n_moved=n_moved,
            n_left=self.n_left,
            passes=self.passes,
            extra_limit_bytes=self.extra_limit,
            extra_bytes=self.extra_bytes,
            returned_bytes=returned,
            peak_allocated_bytes=self.peak_allocated,
            n_other_allocations=None if self.dry_run else self.n_other,
            seconds=time.perf_counter() - self.started,
            skipped=tuple(
                Skipped(reason, n_blocks, size, where)
                for reason, (n_blocks, size, _, where) in sorted(self.skipped.items(), key=lambda item: -item[1][1])
            ),
            note=self.note,
        )

    def _dry_run(self, found):
        layout, rules = _layout.read(self.torch, self.device)
        self.before = _usage(layout)
        plans = []
        if graphs := _graphs(found, layout):
            self._skip_all(layout, graphs)
        else:
            self._match(layout, rules, found.storages)
            plans = [_packing.plan(group, rules, None) for group in layout.groups.values()]
            plans = [plan for plan in plans if plan is not None]
        gained = sum(plan.gain_bytes for plan in plans)
        reserved = layout.reserved_bytes - layout.returnable_bytes - gained
        allocated = layout.allocated_bytes
        self.after = Usage(reserved, allocated, max(0, reserved - allocated), 0)
        self.passes = 1 if plans else 0
        self.extra_bytes = max(0, sum(plan.new_bytes for plan in plans) - layout.returnable_bytes)
        return self._compacted(
            sum(plan.n_blocks for plan in plans), sum(plan.moved_bytes for plan in plans), None
        )


class _Streams:
    """Stream objects for the handles that a snapshot shows."""

    def __init__(self, torch, device, found):
        self.torch = torch
        self.device = device
        self.by_handle = {stream.cuda_stream: stream for stream in found}
        default = torch.cuda.default_stream(device)
        self.by_handle[default.cuda_stream] = default
        self.drawn = 0

    def get(self, handle):
        """A stream that is known to exist, or None. A handle alone may be that of a destroyed stream."""
        while handle not in self.by_handle and self.drawn < 2:
            # PyTorch's own streams live for ever and are handed out in turn, 32 of a priority: after so many the
            # turn is where it was.
            for _ in range(32):
                stream = self.torch.cuda.Stream(device=self.device, priority=-self.drawn)
                self.by_handle.setdefault(stream.cuda_stream, stream)
            self.drawn += 1
        return self.by_handle.get(handle)

    def known(self):
        return list(self.by_handle.values())


class _Interrupted(Exception):
    pass


class _Interrupt:
    def __init__(self):
        self.arrived = None

    def check(self):
        if self.arrived is not None:
            raise _Interrupted


@contextlib.contextmanager
def _deferred_interrupt():
    """Ctrl-C ends the work between two moves, and not inside one, where a plug could be forgotten."""
    interrupt = _Interrupt()
    previous = None
    is_deferred = threading.current_thread() is threading.main_thread()
    if is_deferred:
        previous = signal.getsignal(signal.SIGINT)
        is_deferred = callable(previous)
    if not is_deferred:
        yield interrupt
        return
    signal.signal(signal.SIGINT, lambda *arguments: setattr(interrupt, "arrived", arguments))
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)
        if interrupt.arrived is not None:
            # It decides: Python's own handler raises KeyboardInterrupt, somebody else's may only take note.
            previous(*interrupt.arrived)


def _by_gain(layout):
    def stuck(group):
        return sum(unit.size - unit.live_bytes for unit in group.units)

    return sorted(layout.groups.values(), key=stuck, reverse=True)


def _graphs(found, layout):
    """The names of captured graphs, and of what may be one."""
    names = [_name(graph) for graph in found.graphs]
    # The collector does not show frozen objects. The pool of a graph is (n, 0), a MemPool is (0, n).
    if not names and gc.get_freeze_count() and any(pool[0] for pool in layout.private):
        names.append("maybe among the objects that gc.freeze() hides")
    return names


def _usage(layout):
    return Usage(layout.reserved_bytes, layout.allocated_bytes, layout.stuck_bytes, layout.returnable_bytes)


def _shared_storages():
    """StorageImpls that other processes have opened or were offered."""
    reductions = sys.modules.get("torch.multiprocessing.reductions")
    cache = getattr(reductions, "shared_cache", None)
    return {reference.cdata for reference in list(cache.values())} if cache else set()


def _device_index(torch, device):
    if device is None:
        return torch.cuda.current_device() if torch.cuda.is_initialized() else 0
    if isinstance(device, int) and not isinstance(device, bool):
        return device
    device = torch.device(device)
    if device.type != "cuda":
        raise Error(f"only a CUDA device can be compacted, not: {device}")
    return _device_index(torch, device.index)


def _has_context(torch, device):
    if not torch.cuda.is_initialized():
        return False
    if not 0 <= device < torch.cuda.device_count():
        raise Error(f"there is no such device: cuda:{device}")
    has_context = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    return has_context is None or has_context(device)


def _nothing(device, dry_run):
    usage = Usage(0, 0, 0, 0)
    return Compacted(device, dry_run, usage, usage, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0.0, (), "nothing is allocated there")


def _parse_size(text):
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise ValueError(f"a size cannot be negative: {text}")
        return text
    units = {"": 1, "b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}
    units |= {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
    if isinstance(text, str):
        number = text.strip().rstrip("kmgtiKMGTIbB").strip()
        unit = text.strip()[len(number) :].strip().lower()
        with contextlib.suppress(ValueError):
            if unit in units and float(number) >= 0:
                return int(float(number) * units[unit])
    raise ValueError(f"not a size such as 1073741824 or `512MiB`: {text!r}")


def _size(size):
    for unit, factor, digits in (("GiB", 1 << 30, 2), ("MiB", 1 << 20, 1), ("KiB", 1 << 10, 1)):
        if abs(size) >= factor:
            return f"{size / factor:,.{digits}f} {unit}"
    return f"{size} B"


def _passes(n):
    return "1 pass" if n == 1 else f"{n} passes"


def _describe(storage):
    if not storage.tensors:
        return "a storage without tensors"
    tensor = storage.tensors[0]
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _name(thing):
    """A name that a person knows an object by."""
    for holder in gc.get_referrers(thing):
        if not isinstance(holder, dict):
            continue
        name = next((key for key, value in holder.items() if value is thing and isinstance(key, str)), None)
        if name is None:
            continue
        module = holder.get("__name__")
        if isinstance(module, str) and sys.modules.get(module) is not None and vars(sys.modules[module]) is holder:
            return f"{module}.{name}"
        return name
    for frame in sys._current_frames().values():
        while frame is not None:
            if frame.f_globals.get("__name__", "").partition(".")[0] != __package__:
                for name, value in frame.f_locals.items():
                    if value is thing:
                        return f"{name} in {frame.f_code.co_name}()"
            frame = frame.f_back
    return type(thing).__qualname__
