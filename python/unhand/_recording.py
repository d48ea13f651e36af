"""One recording of an out-of-memory error: gathers what can be known at that moment, words it, writes it into a folder.

It may be called from inside PyTorch's allocator, with the failing call still running, on any thread. So it allocates
nothing on a GPU, waits for nobody, and keeps no object or frame that it saw.
"""

import gc
import json
import os
import pickle
import re
import shutil
import sys
import threading
import time
from dataclasses import dataclass

from unhand import _allocator, _autograd, _batch_size, _frames, _heap, _native, _see
from unhand._answer import fields
from unhand._batch_size import BatchSize
from unhand._holders import Holder, Holders
from unhand._ladder import Ladder, ladder
from unhand._native import format_bytes

SCHEMA_VERSION = 1
# How long to wait for another look at the heap, by another thread, to end.
_PATIENCE_S = 10
_HOLDERS = 12
_STUCK = 5
_FRAMES = 64
# `unhand run`, under which a program runs.
_RUNNER = os.path.join(os.path.dirname(__file__), "_run.py")


@dataclass(frozen=True, slots=True)
class Failure:
    """What is known about an error before anything is looked at."""

    device: int
    """The index of the device."""
    segment_bytes: int | None
    """What PyTorch asked the driver for; None for an error that is not its allocator's."""
    allowed_bytes: int | None
    """What PyTorch was allowed to hold: the whole device, or the limit of the process."""
    device_free_bytes: int | None
    """What the driver had left."""
    error: str | None
    """The text of the error; None when it has not been raised yet."""


@dataclass(frozen=True, slots=True)
class Line:
    """A line of a stack."""

    file: str
    """The path of the source file."""
    line: int
    """The number of the line."""
    function: str
    """The function it is in."""

    def __str__(self):
        return f"{self.file}:{self.line} in {self.function}"

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields."""
        return fields(self)


@dataclass(frozen=True, slots=True)
class Stuck:
    """Free memory that a live block keeps from being given back, and who holds that block."""

    bytes: int
    """Free bytes in the segments."""
    n_segments: int
    """How many segments."""
    pinned_by: str
    """Who holds the blocks beside them: a path, or that no Python object leads there."""
    pin_bytes: int
    """Bytes of those blocks."""

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields."""
        return fields(self)


@dataclass(frozen=True, slots=True)
class Recording:
    """Everything a recording says. `str()` is the page of `report.txt`, `to_dict()` is `report.json`."""

    when: str
    """Local time, ISO 8601."""
    pid: int
    """The process."""
    rank: int | None
    """`RANK` of the environment; None where there is none."""
    world_size: int | None
    """`WORLD_SIZE` of the environment."""
    torch: str
    """PyTorch's version."""
    failure: Failure
    """The error."""
    requested_bytes: int | None
    """The request that failed, rounded as the allocator does; None where no history was recorded."""
    room_bytes: int | None
    """What PyTorch could have held: what it held and what was free, up to what it was allowed to hold."""
    thread: str
    """The thread on which it failed."""
    node: str | None
    """The node of autograd's graph that was running; None outside of a backward pass."""
    stack: tuple[Line, ...]
    """The Python stack of that thread, innermost first; of the main thread where that one has none."""
    stack_is_main: bool
    """Whether the stack is the main thread's instead."""
    ladder: Ladder | None
    """The device's memory then."""
    holders: tuple[Holder, ...]
    """Who held it, the largest first."""
    more_holders_bytes: int | None
    """Bytes of further holders."""
    unattributed_bytes: int | None
    """Allocated bytes that no Python object leads to."""
    stuck: tuple[Stuck, ...]
    """Who pins the stuck memory, the most first."""
    verdict: str | None
    """What stood in the way, as a sentence; None without a history."""
    settings: dict | None
    """Which allocator settings would have served the request, by replay; None without a history."""
    history: str
    """What of the history was recorded, as a sentence."""
    batch: BatchSize
    """The batch size that would have fitted."""
    inputs: tuple[_batch_size.Input, ...]
    """Tensors that look like data: what they are called, and their shapes."""
    files: tuple[str, ...]
    """The files beside the report."""
    notes: tuple[str, ...]
    """What could not be found out, and why."""

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields, and the version of their layout."""
        plain = fields(self)
        plain["failure"] = fields(self.failure)
        plain["ladder"] = self.ladder.to_dict() if self.ladder is not None else None
        for name in ("stack", "holders", "stuck"):
            plain[name] = [item.to_dict() for item in plain[name]]
        plain["batch"] = self.batch.to_dict()
        plain["inputs"] = [{"name": one.name, "shape": list(one.shape)} for one in self.inputs]
        return {"schema_version": SCHEMA_VERSION, **plain}

    def __str__(self):
        from unhand import _page

        return _page.page(self)


def write(failure, parent, name, seed=None) -> str:
    """Record the error into a folder called `name`, or `name.2` and so on, in `parent`; return its path.

    The folder gets its name when all of it is there. OSError if it cannot be written; then nothing is left.
    """
    os.makedirs(parent, exist_ok=True)
    # Beside its place and not in a temporary folder: a rename works only within one file system.
    draft = os.path.join(parent, f".{name}.{os.getpid()}-{threading.get_ident()}.part")
    shutil.rmtree(draft, ignore_errors=True)
    os.mkdir(draft)
    is_collecting = gc.isenabled()
    # A pass of the collector would free what is to be named.
    gc.disable()
    try:
        recording, pickled = gather(failure, seed)
        if pickled is not None:
            _write_file(os.path.join(draft, "snapshot.pickle"), pickled)
        del pickled
        text = json.dumps(recording.to_dict(), indent=1)
        _write_file(os.path.join(draft, "report.json"), text.encode())
        _write_file(os.path.join(draft, "report.txt"), str(recording).encode())
        return _put_in_place(draft, parent, name)
    finally:
        shutil.rmtree(draft, ignore_errors=True)
        if is_collecting:
            gc.enable()


def _write_file(path, content):
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        # The process may be gone a moment later, and the machine with it.
        os.fsync(file.fileno())


def _put_in_place(draft, parent, name):
    """Rename a finished folder to the first of its names that is free."""
    for attempt in range(1, 10_000):
        target = os.path.join(parent, name if attempt == 1 else f"{name}.{attempt}")
        if os.path.exists(target):
            continue
        try:
            os.rename(draft, target)
            return target
        except OSError:
            # Somebody was faster. A folder that has files is never replaced by a rename.
            if not os.path.exists(target):
                raise
    raise FileExistsError(f"too many recordings: `{os.path.join(parent, name)}`")


def gather(failure, seed=None):
    """Everything about an error at this moment, as a [`Recording`], and the pickled snapshot or None.

    `seed` is an error that nothing else refers to, whose traceback has the failed frames.
    """
    torch = sys.modules["torch"]
    notes = []

    def attempt(what, work, default):
        try:
            return work()
        except Exception as error:
            notes.append(f"{what}: {type(error).__name__}: {error}")
            return default

    stack, is_main = attempt("stack", lambda: _stack(seed), ((), False))
    node = attempt("autograd", lambda: _running_node(torch), None)
    pickled = attempt("snapshot", lambda: _snapshot(torch), None)
    is_started = _allocator.started_torch() is not None
    rungs = attempt("ladder", lambda: ladder(failure.device), None) if is_started else None
    analysis = attempt("analysis", lambda: _analyze(failure, pickled), {}) if pickled is not None else {}
    ooms = analysis.get("explanation", {}).get("ooms") or [None]
    requested = ooms[-1]["wanted_bytes"] if ooms[-1] and failure.segment_bytes is not None else None
    room = _room(failure, rungs)
    in_backward = node is not None or any("backward" in line.function for line in stack)
    found = attempt("holders", lambda: _look(failure, rungs, requested, room, in_backward, seed), None) or _NOTHING
    recording = Recording(
        when=time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        pid=os.getpid(),
        rank=_number("RANK"),
        world_size=_number("WORLD_SIZE"),
        torch=torch.__version__,
        failure=failure,
        requested_bytes=requested,
        room_bytes=room,
        thread=threading.current_thread().name if seed is None else "",
        node=node,
        stack=stack,
        stack_is_main=is_main,
        ladder=rungs,
        verdict=_verdict(ooms[-1], rungs) if requested is not None else None,
        settings=analysis.get("fitting") if requested is not None else None,
        history=_history(analysis.get("explanation")),
        files=("report.txt", "report.json", *(("snapshot.pickle",) if pickled is not None else ())),
        notes=tuple(notes),
        **found,
    )
    return recording, pickled


_NOTHING = {
    "holders": (),
    "more_holders_bytes": None,
    "unattributed_bytes": None,
    "stuck": (),
    "batch": BatchSize(None, None, "none", None, None, "the heap could not be looked at."),
    "inputs": (),
}


def _number(name):
    value = os.environ.get(name, "")
    return int(value) if value.isdigit() else None


def _verdict(oom, rungs):
    if oom["verdict"] != "limit" or rungs is None or rungs.limit_bytes is None:
        return oom["sentence"]
    # A snapshot does not tell the limit; the process does.
    free = "nothing was free for this request"
    if oom["usable_free_bytes"]:
        free = f"{format_bytes(oom['usable_free_bytes'])} were free for this request, in pieces of at most "
        free += format_bytes(oom["largest_hole_bytes"])
    return (
        f"A limit of this process stood against it, {format_bytes(rungs.limit_bytes)} "
        f"(torch.cuda.set_per_process_memory_fraction): of {format_bytes(oom['reserved_bytes'])} reserved {free}."
    )


def _room(failure, rungs):
    if rungs is None or rungs.reserved_bytes is None:
        return None
    free = failure.device_free_bytes if failure.device_free_bytes is not None else rungs.device_free_bytes
    if free is None:
        return None
    allowed = [size for size in (failure.allowed_bytes, rungs.limit_bytes) if size is not None]
    return min([rungs.reserved_bytes + free, *allowed])


def _stack(seed):
    """The Python stack on which it failed, innermost first, and whether it is the main thread's instead."""
    if seed is not None:
        lines = []
        step = seed.__traceback__
        while step is not None:
            if not _frames.is_ours(step.tb_frame):
                lines.append(_line(step.tb_frame.f_code, step.tb_lineno))
            step = step.tb_next
        return tuple(lines[::-1][:_FRAMES]), False
    lines = _lines(sys._getframe())
    if lines:
        return lines, False
    # A thread of autograd's: C++ all the way down. What asked for the backward pass waits in the main thread.
    return _lines(sys._current_frames().get(threading.main_thread().ident)), True


def _lines(frame):
    """The lines of a stack, innermost first, without this package and what is outside of a program that it runs."""
    lines = []
    while frame is not None and frame.f_code.co_filename != _RUNNER and len(lines) < _FRAMES:
        if not _frames.is_ours(frame):
            lines.append(_line(frame.f_code, frame.f_lineno))
        frame = frame.f_back
    return tuple(lines)


def _line(code, line):
    return Line(code.co_filename, line or code.co_firstlineno, getattr(code, "co_qualname", code.co_name))


def _running_node(torch):
    """The name of the node of autograd's graph that this thread is running, or None."""
    ask = getattr(torch._C, "_current_autograd_node", None)
    node = ask() if ask is not None else None
    return node.name() if node is not None else None


def _snapshot(torch):
    """What `torch.cuda.memory._dump_snapshot` writes, in its format; None without CUDA."""
    if _allocator.started_torch() is None:
        return None
    return pickle.dumps(_allocator.raw_snapshot(torch, with_history=True), protocol=4)


def _analyze(failure, pickled):
    return json.loads(_native.out_of_memory(pickled, failure.device, failure.allowed_bytes))


def _history(explanation):
    if not explanation or not explanation["recording"]["events"]:
        return "No history of allocations was recorded: pass history=\"stacks\" to unhand.on_oom, or use `unhand run`."
    recording = explanation["recording"]
    text = f"{recording['events']:,} events, with{'' if recording['has_stacks'] else 'out'} stacks"
    older = recording["blocks_older_than_history"]
    if older:
        return f"{text}; it does not reach back to the first allocation: {older:,} blocks are older than it."
    return f"{text}, from the first allocation on."


def _look(failure, rungs, requested, room, in_backward, seed):
    """What the heap tells, as fields of a recording."""
    if not _see.looking.acquire(timeout=_PATIENCE_S):
        raise TimeoutError("another thread was looking at the heap")
    try:
        view = _heap.View(seeds=() if seed is None else (seed,))
        try:
            explanation = _see.Explanation(view, failure.device)
            holders = sorted(explanation.holders(_HOLDERS), key=lambda holder: -holder.bytes)
            inputs = _inputs(view, failure.device)
            return {
                "holders": tuple(holders[:_HOLDERS]),
                "more_holders_bytes": explanation.more_bytes + sum(holder.bytes for holder in holders[_HOLDERS:]),
                "unattributed_bytes": explanation.unattributed_bytes,
                "stuck": _who_pins(view, explanation, failure.device),
                "batch": _batch(view, failure, rungs, requested, room, in_backward, inputs),
                "inputs": inputs,
            }
        finally:
            explanation = None
            view.close()
    finally:
        _see.looking.release()


def _who_pins(view, explanation, device) -> tuple[Stuck, ...]:
    """The stuck bytes by who holds the largest live block beside them."""
    cached = _allocator.cached(device, view.segments[device])
    makers = Holders(view)
    groups: dict[str, list] = {}
    for segment in sorted(cached.stuck_segments, key=lambda segment: -segment.stuck_bytes)[:4 * _STUCK]:
        if not segment.pins:
            continue
        pin = max(segment.pins, key=lambda block: block.bytes)
        name = "blocks that no Python object leads to"
        if pin.address in explanation.known:
            name = " ".join(explanation.known[pin.address])
        elif pin.address in view.block_nodes:
            name, _ = makers.name(view.block_nodes[pin.address]) or (name, None)
        # All of a list in one line.
        group = groups.setdefault(re.sub(r"\[\d+\]", "[…]", name), [0, 0, 0])
        group[0] += segment.stuck_bytes
        group[1] += 1
        group[2] += sum(block.bytes for block in segment.pins)
    found = [Stuck(n_bytes, n_segments, name, pins) for name, (n_bytes, n_segments, pins) in groups.items()]
    return tuple(sorted(found, key=lambda stuck: -stuck.bytes)[:_STUCK])


def _inputs(view, device) -> tuple[_batch_size.Input, ...]:
    """Leaf tensors without gradients in local variables of the program's own functions."""
    torch, found = view.torch, {}
    library = os.path.dirname(torch.__file__)
    for running in view.frames:
        if running.frame.f_code.co_filename.startswith((library, _frames.HERE)):
            continue
        values = running.values or _of_module(running.frame)
        for name, value in values:
            items = [(name, value)]
            if type(value) in (list, tuple):
                items = [(f"{name}[{index}]", item) for index, item in enumerate(value[:8])]
            elif type(value) is dict:
                items = [(f"{name}[{key!r}]", item) for key, item in list(value.items())[:8]]
            for label, item in items:
                if _is_data(torch, item, device):
                    found.setdefault(id(item), _batch_size.Input(label, tuple(item.shape)))
    # What is in a list comes after what has a name of its own.
    return tuple(sorted(found.values(), key=lambda one: "[" in one.name)[:16])


def _of_module(frame):
    """The variables of a module that is running, which is where a script keeps its data."""
    is_module = frame.f_code.co_name == "<module>" and frame.f_locals is frame.f_globals
    return list(frame.f_globals.items()) if is_module else []


def _is_data(torch, value, device):
    # By its class and not with isinstance, which may run code of the object's.
    if type(value) is not torch.Tensor:
        return False
    return value.is_cuda and value.device.index == device and value.is_leaf and not value.requires_grad and value.ndim > 0


def _batch(view, failure, rungs, requested, room, in_backward, inputs) -> BatchSize:
    torch = view.torch
    failed = requested if requested is not None else failure.segment_bytes
    if failed is None or room is None or rungs is None or rungs.allocated_bytes is None:
        return BatchSize(None, None, "none", None, None, "the request that failed, or the room there was, is not known.")
    # What Python has, and what only autograd saved.
    tensors = [(view.object(node), cdata) for node, cdata in view.tensor_storages.items()]
    for thing in view.added:
        if type(thing) is torch.Tensor:
            cdata = _cdata(torch, thing)
            if cdata in view.storages:
                tensors.append((thing, cdata))
    largest: dict[int, tuple] = {}
    parameters: dict[int, object] = {}
    for tensor, cdata in tensors:
        storage = view.storages[cdata]
        if storage.block is None or storage.device != failure.device:
            continue
        shape = tuple(tensor.shape)
        if cdata not in largest or tensor.numel() > largest[cdata][1]:
            largest[cdata] = (shape, tensor.numel())
        if issubclass(type(tensor), torch.nn.Parameter):
            parameters[id(tensor)] = tensor
    storages = [_batch_size.Shaped(view.storages[cdata].block.bytes, shape) for cdata, (shape, _) in largest.items()]
    missing = 0
    if view.with_graph:
        without = [one for one in parameters.values() if one.requires_grad and _autograd.gradient(one) is None]
        missing = sum(one.numel() * one.element_size() for one in without)
    return _batch_size.estimate(
        storages,
        {tuple(one.shape) for one in parameters.values()},
        inputs,
        allocated_bytes=rungs.allocated_bytes,
        failed_bytes=failed,
        room_bytes=room,
        missing_bytes=missing,
        in_backward=in_backward,
    )


def _cdata(torch, tensor):
    try:
        return torch._C._storage_address(tensor)
    except Exception:
        return None
