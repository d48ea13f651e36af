"""Reads PyTorch's CUDA caching allocator: segments, blocks, counters. Changes nothing: no context, no peak, no block.

Nothing here imports torch or starts CUDA. Where the process has not done that itself there is nothing to read, and the
functions say so with an empty list or `None`.
"""

import gc
import inspect
import json
import os
import pickle
import sys
from dataclasses import dataclass, field
from typing import NamedTuple

from unhand import _native

ALLOCATED = "active_allocated"
PENDING = "active_pending_free"
INACTIVE = "inactive"

DEFAULT_POOL = (0, 0)


# A named tuple and no dataclass: there are tens of thousands of them, and tuples are made ten times as fast.
class Block(NamedTuple):
    """A piece of a segment."""

    address: int
    bytes: int
    # What was asked for. Of an inactive block: what its last tenant asked for.
    requested_bytes: int
    # `active_allocated`, `active_pending_free` (freed, waits for another stream) or `inactive`.
    state: str
    # The recorded stack, innermost first; `None` when none was recorded.
    frames: list | None


@dataclass(frozen=True, slots=True)
class Segment:
    """Memory as the driver gave it; of an expandable segment, one contiguous mapped range."""

    address: int
    total_bytes: int
    stream: int
    # `small` or `large`: the half of the pool that it belongs to.
    kind: str
    pool: tuple[int, int]
    is_expandable: bool
    blocks: list[Block]


@dataclass(frozen=True, slots=True)
class StuckSegment:
    """A segment with free bytes that `empty_cache()` cannot give back, and the live blocks that pin them."""

    address: int
    total_bytes: int
    stuck_bytes: int
    stream: int
    pool: tuple[int, int]
    is_expandable: bool
    pins: list[Block]


@dataclass(frozen=True, slots=True)
class Cached:
    """What is reserved and not allocated: returnable, stuck and kept by pools make up the whole."""

    cached_bytes: int
    returnable_bytes: int
    stuck_bytes: int
    kept_by_pools_bytes: int
    stuck_segments: list[StuckSegment]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """One look at the allocator of all devices, as PyTorch's dictionaries."""

    # The settings in effect, as PyTorch names them.
    settings: dict
    # Whether frees of pinned host memory are counted. They are not in some releases.
    knows_host_blocks: bool
    _segments: list = field(repr=False)

    def segments(self, device):
        """The segments of one device, by address."""
        return [_segment(raw) for raw in self._segments if raw["device"] == device]

    def pools(self):
        """The pools that have segments, on any device."""
        return {tuple(raw.get("segment_pool_id", DEFAULT_POOL)) for raw in self._segments}


def devices(wanted=None, torch=None):
    """The devices on which this process has a context, of those wanted; none if it has not started CUDA through PyTorch.

    `torch` is `started_torch()`, of callers that have asked already.
    """
    torch = torch or started_torch()
    if torch is None:
        return []
    asked = getattr(torch._C, "_cuda_hasPrimaryContext", has_context)
    there = [device for device in range(torch.cuda.device_count()) if asked(device)]
    return there if wanted is None else [device for device in there if device in wanted]


def has_context(device):
    """Whether this process has a context on a device. Asking makes none.

    `c10::cuda::hasPrimaryContext` (c10/cuda/CUDAFunctions.cpp) asks the driver for the state of the primary context.
    Where PyTorch does not offer it to Python, the driver itself is asked, if it is loaded.
    """
    torch = started_torch()
    if torch is None:
        return False
    ask = getattr(torch._C, "_cuda_hasPrimaryContext", None)
    if ask is not None:
        return bool(ask(device))
    is_active = _driver_context_state(device)
    if is_active is not None:
        return is_active
    # Memory of PyTorch's is there, so a context is. The other way round is not certain, and nobody is asked to
    # believe it: a device left out is shown nowhere, and touched by nothing.
    return torch.cuda.memory_stats(device).get("reserved_bytes.all.current", 0) > 0


def snapshot():
    """One look at all segments, without the history; `None` where the allocator in use has none to show.

    The allocators behind `backend:cudaMallocAsync` and `CUDAPluggableAllocator` refuse. PyTorch notes every look in a
    history that is being recorded, as an entry `snapshot`; nothing else changes.
    """
    torch = started_torch()
    if torch is None:
        return None
    try:
        raw = raw_snapshot(torch)
    except RuntimeError:
        return None
    return Snapshot(
        settings=raw.get("allocator_settings") or {},
        knows_host_blocks="host_segments" in raw,
        _segments=raw["segments"],
    )


def raw_snapshot(torch, *, with_history=False):
    """PyTorch's own dictionaries, without the history where it can be left out. RuntimeError from other allocators.

    `torch.cuda.memory_snapshot()` takes the segments out of this answer. The settings lie beside them. With the history it
    is what `torch.cuda.memory._snapshot()` returns.
    """
    options = (0, 0, False) if not with_history and _can_leave_traces_out(torch) else None
    names = torch.__dict__
    if "torch._inductor" in sys.modules or "_inductor" in names:
        return torch._C._cuda_memorySnapshot(options)
    # To name the lines of recorded stacks PyTorch asks `hasattr(torch, "_inductor")` (torch/csrc/profiler/python/
    # combined_traceback.cpp), which imports the compiler: seconds, and thousands of modules, for no line of it.
    stand_in = names["_inductor"] = object()
    try:
        return torch._C._cuda_memorySnapshot(options)
    finally:
        # Unless another thread has imported it meanwhile.
        if names.get("_inductor") is stand_in:
            del names["_inductor"]


def segments(device):
    """The segments of one device, by address; empty where the allocator in use has none to show."""
    look = snapshot()
    return [] if look is None else look.segments(device)


def cached(device, segments, settings=None, ownerless=frozenset()):
    """What of the cache goes back with `torch.cuda.empty_cache()`, what does not, and which blocks pin it.

    The rules are those of `release_cached_blocks` and `unmap_block` (c10/cuda/CUDACachingAllocator.cpp): whole free
    segments go back, and whole free pages of expandable ones. Blocks that were freed and wait for another stream count
    as free: `empty_cache` waits for them first (`synchronize_and_free_events`). Free segments of private pools are kept
    as long as the pool has an owner. `ownerless` names the pools that have none any more: theirs go back (`pool_owners`).
    """
    known = {block.address: block for segment in segments for block in segment.blocks}
    pools = {segment.address: segment.pool for segment in segments}
    look = {
        "segments": [_as_torch_writes_it(device, segment, ownerless) for segment in segments],
        "device_traces": [],
        "allocator_settings": settings if settings is not None else _settings_of_environment(),
    }
    answer = json.loads(_native.cache(pickle.dumps(look, protocol=4)))
    for entry in answer["devices"]:
        if entry["device"] == device:
            return _cached(entry["cache"], known, pools)
    return Cached(0, 0, 0, 0, [])


def stats(device):
    """Counters of one device; empty where the allocator in use keeps none."""
    torch = started_torch()
    if torch is None:
        return {}
    try:
        counters = torch.cuda.memory_stats(device)
    except RuntimeError:
        return {}
    if not counters:
        return {}
    return {
        "allocated_bytes": counters.get("allocated_bytes.all.current"),
        "requested_bytes": counters.get("requested_bytes.all.current"),
        "reserved_bytes": counters.get("reserved_bytes.all.current"),
        "active_bytes": counters.get("active_bytes.all.current"),
        "n_blocks": counters.get("allocation.all.current"),
        "n_allocs": counters.get("allocation.all.allocated"),
        "n_ooms": counters.get("num_ooms"),
        "n_retries": counters.get("num_alloc_retries"),
    }


def host_stats(look=None):
    """Pinned host memory: `(reserved_bytes, allocated_bytes)`, each `None` where it is not counted.

    `torch.cuda.host_memory_stats` (ATen/core/CachingHostAllocator.h) calls `allocated` what it holds from the driver
    and `active` what is in use. Up to 2.11 frees are not counted in `active`, so it only grows: it is believed where
    frees have been counted, or where a snapshot shows that this release looks after host memory.
    """
    torch = started_torch()
    ask = getattr(torch.cuda, "host_memory_stats", None) if torch is not None else None
    if ask is None:
        return None, None
    try:
        counters = ask()
    except (RuntimeError, AttributeError):
        return None, None
    reserved = counters.get("allocated_bytes.current")
    active = counters.get("active_bytes.current")
    counts_frees = counters.get("active_bytes.freed", 0) > 0 or (look is not None and look.knows_host_blocks)
    if active is None or reserved is None or (active > 0 and not counts_frees):
        return reserved, None
    return reserved, active


def history_is_on(device):
    """Whether allocations of a device are being recorded; `None` where that cannot be asked.

    `NativeCachingAllocator::isHistoryEnabled` asks the allocator of the current device, so that is changed meanwhile.
    """
    torch = started_torch()
    ask = getattr(torch._C, "_cuda_isHistoryEnabled", None) if torch is not None else None
    if ask is None or not has_context(device):
        return None
    try:
        with torch.cuda.device(device):
            return bool(ask())
    except RuntimeError:
        return None


@dataclass(frozen=True, slots=True)
class PoolOwners:
    """The Python objects that keep private pools alive."""

    # Pool → how many CUDA graphs have memory in it.
    graphs: dict
    # Pool → how many `torch.cuda.MemPool` there are of it.
    mem_pools: dict
    # Whether a pool without an owner here surely has none.
    is_complete: bool


def pool_owners(capturing=None):
    """Who owns which private pool: the live `CUDAGraph` and `MemPool` objects.

    A pool's memory goes back when its use count is 0 (`releasePool` in c10/cuda/CUDACachingAllocator.cpp), which these
    objects count up and down. The count itself cannot be asked for. What is not seen: owners written in C++, and
    objects that `gc.freeze()` took out of sight; with frozen objects, and during a capture (whose graph does not tell
    its pool yet), the answer is not complete. `capturing` is `is_capturing()`, of callers that have asked already.
    """
    torch = started_torch()
    graphs, mem_pools = {}, {}
    if torch is None:
        return PoolOwners(graphs, mem_pools, True)
    capturing = is_capturing() if capturing is None else capturing
    is_complete = not objects_are_frozen() and not capturing
    graph_kind = getattr(torch._C, "_CUDAGraph", None)
    mem_pool_kind = getattr(torch._C, "_MemPool", None)
    kinds = tuple(kind for kind in (graph_kind, mem_pool_kind) if kind is not None)
    for owner in instances(kinds):
        try:
            if graph_kind is not None and issubclass(type(owner), graph_kind):
                pool = tuple(owner.pool())
                graphs[pool] = graphs.get(pool, 0) + 1
            else:
                pool = tuple(owner.id)
                mem_pools[pool] = mem_pools.get(pool, 0) + 1
        except RuntimeError:
            # A graph that was not captured, or was reset. It has no pool.
            pass
    return PoolOwners(graphs, mem_pools, is_complete)


def is_capturing():
    """Whether a CUDA graph is being captured, by this thread or on a stream that a Python object stands for.

    `torch.cuda.is_current_stream_capturing()` asks about this thread's current stream only. During a capture elsewhere
    the driver refuses `cudaFree` and that spoils the capture (`cudaErrorStreamCaptureUnsupported`), so all stream objects
    are asked: `torch.cuda.graph` keeps the stream it captures on. Not seen: a capture that C++ code began on a stream of
    its own, and stream objects hidden by `gc.freeze()`, of which only the one that `torch.cuda.graph` uses by default
    is known.
    """
    torch = started_torch()
    if torch is None:
        return False
    here = torch._C._cuda_isCurrentStreamCapturing
    if here():
        return True
    streams = {stream for stream in instances((torch.cuda.Stream,)) if type(stream) is torch.cuda.Stream}
    default = getattr(torch.cuda.graph, "default_capture_stream", None)
    if default is not None:
        streams.add(default)
    for stream in streams:
        if has_context(stream.device_index):
            # The device first: to leave a stream of another device, `torch.cuda.stream` sets the device that was
            # current, and that makes a context there.
            with torch.cuda.device(stream.device_index), torch.cuda.stream(stream):
                if here():
                    return True
    return False


def instances(kinds):
    """The objects of some classes that the garbage collector knows. Nothing keeps them afterwards."""
    if not kinds:
        return []
    things = gc.get_objects()
    # By their types and not with isinstance: proxies answer that with code of their own. There are few types.
    types = list(map(type, things))
    try:
        wanted = {kind for kind in set(types) if issubclass(kind, kinds)}
        return [thing for thing, kind in zip(things, types, strict=True) if kind in wanted] if wanted else []
    except TypeError:
        # A metaclass whose classes cannot be hashed.
        return [thing for thing, kind in zip(things, types, strict=True) if issubclass(kind, kinds)]


def objects_are_frozen():
    """Whether somebody called `gc.freeze()`, which takes every object there is out of the collector's sight.

    Python 3.12 freezes a few hundred objects of its own when it starts; a program with PyTorch has over a hundred
    thousand.
    """
    return gc.get_freeze_count() > 5_000


def started_torch():
    """The module torch, if this process has imported it and started CUDA with it.

    In a child that was forked after that, CUDA cannot be used; `is_initialized` says no there.
    """
    torch = sys.modules.get("torch")
    cuda = getattr(torch, "cuda", None)
    is_initialized = getattr(cuda, "is_initialized", None)
    if is_initialized is None or not hasattr(torch._C, "_cuda_memoryStats"):
        return None
    return torch if is_initialized() else None


def _can_leave_traces_out(torch):
    """Since 2.11. Before, a copy of the whole history comes along."""
    return "include_traces" in inspect.signature(torch.cuda.memory_snapshot).parameters


def _driver_context_state(device):
    """The driver's own answer; `None` if the driver is not loaded."""
    import ctypes

    try:
        # Only if it is loaded already.
        driver = ctypes.CDLL("libcuda.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        handle, flags, is_active = ctypes.c_int(), ctypes.c_uint(), ctypes.c_int()
        if driver.cuDeviceGet(ctypes.byref(handle), ctypes.c_int(device)) != 0:
            return False
        if driver.cuDevicePrimaryCtxGetState(handle, ctypes.byref(flags), ctypes.byref(is_active)) != 0:
            return False
    except (OSError, AttributeError):
        return None
    return is_active.value != 0


def _segment(raw):
    blocks = []
    at = raw["address"]
    for block in raw["blocks"]:
        size = block["size"]
        at = block.get("address", at)
        blocks.append(Block(at, size, block["requested_size"], block["state"], block.get("frames") or None))
        at += size
    return Segment(
        address=raw["address"],
        total_bytes=raw["total_size"],
        stream=raw["stream"],
        kind=raw["segment_type"],
        pool=tuple(raw.get("segment_pool_id", DEFAULT_POOL)),
        is_expandable=raw.get("is_expandable", False),
        blocks=blocks,
    )


def _as_torch_writes_it(device, segment, ownerless):
    """A segment's dictionary after `empty_cache` has waited: freed blocks are free, and merged with their neighbours."""
    blocks = []
    for block in segment.blocks:
        is_free = block.state != ALLOCATED
        if is_free and blocks and blocks[-1]["state"] == INACTIVE:
            blocks[-1]["size"] += block.bytes
        else:
            blocks.append(
                {
                    "address": block.address,
                    "size": block.bytes,
                    "requested_size": block.requested_bytes,
                    "state": INACTIVE if is_free else block.state,
                }
            )
    return {
        "device": device,
        "address": segment.address,
        "total_size": segment.total_bytes,
        "stream": segment.stream,
        "segment_type": segment.kind,
        "segment_pool_id": DEFAULT_POOL if segment.pool in ownerless else segment.pool,
        "is_expandable": segment.is_expandable,
        "blocks": blocks,
    }


def _cached(cache, known, pools):
    stuck = [
        StuckSegment(
            address=segment["address"],
            total_bytes=segment["total_bytes"],
            stuck_bytes=segment["stuck_bytes"],
            stream=segment["stream"],
            pool=pools[segment["address"]],
            is_expandable=segment["is_expandable"],
            pins=[known[pin["address"]] for pin in segment["pins"]],
        )
        for segment in cache["stuck"]
    ]
    return Cached(
        cached_bytes=cache["cached_bytes"],
        returnable_bytes=cache["returnable_bytes"],
        stuck_bytes=cache["stuck_bytes"],
        kept_by_pools_bytes=cache["kept_by_pools_bytes"],
        stuck_segments=stuck,
    )


def _settings_of_environment():
    """The settings string for callers that have segments and no snapshot; it may tell the size of pages."""
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    conf = next((os.environ[name] for name in names if os.environ.get(name)), "")
    return {"PYTORCH_CUDA_ALLOC_CONF": conf}
