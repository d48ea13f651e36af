"""The ladder: one device's memory from the driver's figure down to what tensors asked for.

Looking changes nothing: no context is made on a device that has none, no peak is reset, nothing is kept.
"""

import dataclasses
import json
import os
import sys
from dataclasses import dataclass

from unhand import _allocator, _native
from unhand._answer import Answer


@dataclass(frozen=True, slots=True)
class Pool:
    """One memory pool of the allocator."""

    id: tuple[int, int]
    """PyTorch's number for it; (0, 0) is the default pool."""
    kind: str
    """`default`, `graph` (of CUDA graphs), `mempool` (`torch.cuda.MemPool`) or `private` (nobody is known to own it)."""
    reserved_bytes: int
    """Bytes of its segments."""
    allocated_bytes: int
    """Bytes of its blocks that are in use."""
    owner: str | None
    """What keeps it alive, in words; `None` for the default pool and where nothing was found."""


@dataclass(frozen=True, slots=True)
class Outside:
    """Something that takes memory of the device past PyTorch's allocator."""

    what: str
    """What it is, in words."""
    bytes: int | None
    """How much; `None` where nothing tells."""
    how: str
    """How the figure is known, or why it is not."""


@dataclass(frozen=True, slots=True)
class Ladder(Answer):
    """One device's memory. `used` is the driver's word, `reserved` and below are PyTorch's; `None` is not known."""

    device: int
    """The index of the device, as PyTorch counts."""
    name: str
    """The device's name (`torch.cuda.get_device_properties`)."""
    uuid: str | None
    """The device's UUID, `GPU-…`; `None` where PyTorch does not tell it."""
    total_bytes: int
    """The memory of the device."""
    device_used_bytes: int | None
    """Used by all processes together (`cudaMemGetInfo`; NVML where this process has no context)."""
    device_free_bytes: int | None
    """Free for everybody, from the same source."""
    used_bytes: int | None
    """Used by this process (NVML, by process)."""
    used_how: str
    """How that is known, or why it is not."""
    used_at_most_bytes: int | None
    """A bound where it is not known."""
    others_bytes: int | None
    """Used by other processes (NVML, by process)."""
    outside_bytes: int | None
    """used - reserved: context, kernels, libraries."""
    outside: tuple[Outside, ...]
    """What is known to be in there."""
    reserved_bytes: int | None
    """What PyTorch's allocator holds from the driver (`torch.cuda.memory_reserved`)."""
    allocated_bytes: int | None
    """Blocks in use (`torch.cuda.memory_allocated`)."""
    requested_bytes: int | None
    """What was asked for, before rounding (`requested_bytes.all.current` of `torch.cuda.memory_stats`)."""
    active_bytes: int | None
    """Allocated, and freed but waiting for another stream."""
    workspaces_bytes: int | None
    """Of the allocated bytes: workspaces of cuBLAS, which no tensor owns."""
    cached_bytes: int | None
    """reserved - allocated: returnable, stuck and kept by pools together."""
    returnable_bytes: int | None
    """What `torch.cuda.empty_cache()` would give back, by the rules of `release_cached_blocks`."""
    stuck_bytes: int | None
    """Free, beside live blocks in the same segment or page."""
    kept_by_pools_bytes: int | None
    """Free, in private pools whose owner is alive."""
    pools: tuple[Pool, ...]
    """The pools that have segments, the default pool included."""
    pinned_host_reserved_bytes: int | None
    """Pinned host memory that PyTorch holds: none of the GPU's."""
    pinned_host_allocated_bytes: int | None
    """Of it, in use."""
    limit_bytes: int | None
    """What `torch.cuda.set_per_process_memory_fraction` allows; `None` without a limit."""
    settings: str
    """The allocator's settings string; empty where none were set."""

    def to_dict(self):
        """The ladder as plain values: sizes in bytes, field names as names, None for what is not known."""
        return dataclasses.asdict(self)

    def __str__(self):
        head = f"cuda:{self.device}  {self.name}, {_bytes(self.total_bytes)}"
        table = [(" " * 2 * (depth + 1) + label, _bytes(size), note) for depth, label, size, note in rows(self)]
        label_width = max(len(label) for label, _, _ in table)
        size_width = max(len(size) for _, size, _ in table)
        lines = [f"{label:<{label_width}}  {size:>{size_width}}   {note}".rstrip() for label, size, note in table]
        return "\n".join([head, *lines])

    def _repr_html_(self):
        from unhand._html import ladder_html

        return ladder_html(self)


def ladder(device=None, owned=None):
    """The ladder of one device; of the current one by default. All sizes are in bytes.

    `device` is an index, a name such as `"cuda:1"` or a `torch.device`. RuntimeError before this process has started
    CUDA through PyTorch. Much cheaper than `report`: the heap is not looked at.

    `owned` are the addresses of the storages that something in Python reaches, if the caller knows them all. Otherwise
    the tensors that the garbage collector knows are looked at, where a block has the size of a workspace.
    """
    torch = _allocator.started_torch()
    if torch is None:
        raise RuntimeError("this process has not started CUDA through PyTorch: there is no memory of it to show")
    return _ladder(torch, _index(torch, device), _allocator.snapshot(), owned)


def ladders(owned=None):
    """The ladders of all devices on which this process has a context; none before CUDA is started."""
    torch = _allocator.started_torch()
    if torch is None:
        return ()
    look = _allocator.snapshot()
    return tuple(_ladder(torch, device, look, owned) for device in _allocator.devices())


def rows(ladder):
    """The table: `(depth, label, bytes or None, note)`, from the driver down. Text and HTML show the same."""
    table = [(0, "driver: used on the device", ladder.device_used_bytes, f"of {_bytes(ladder.total_bytes)}")]
    if ladder.used_bytes is None:
        note = ladder.used_how
        if ladder.used_at_most_bytes is not None:
            note += f"; at most {_bytes(ladder.used_at_most_bytes)}"
        table.append((1, "this process", None, note))
    else:
        if ladder.others_bytes is not None:
            table.append((1, "other processes", ladder.others_bytes, ""))
        table.append((1, "this process", ladder.used_bytes, "" if ladder.used_how == EXACT else ladder.used_how))
        names = ", ".join(row.what for row in ladder.outside)
        table.append((2, "outside PyTorch", ladder.outside_bytes, names))
    table.append((2, "reserved by PyTorch", ladder.reserved_bytes, _limit_note(ladder)))
    requested = "" if ladder.requested_bytes is None else f"{_bytes(ladder.requested_bytes)} requested"
    table.append((3, "allocated", ladder.allocated_bytes, requested))
    if ladder.workspaces_bytes:
        table.append((4, "cuBLAS workspaces", ladder.workspaces_bytes, "no tensor's; made anew when needed"))
    waiting = (ladder.active_bytes or 0) - (ladder.allocated_bytes or 0)
    note = f"{_bytes(waiting)} of it freed, in use by another stream" if waiting > 0 else ""
    table.append((3, "cached", ladder.cached_bytes, note))
    if ladder.cached_bytes is not None:
        table.append((4, "returnable", ladder.returnable_bytes, "torch.cuda.empty_cache() gives it back"))
        table.append((4, "stuck", ladder.stuck_bytes, "beside live blocks in their segments"))
        if ladder.kept_by_pools_bytes:
            owners = sorted({pool.owner for pool in ladder.pools if pool.owner is not None})
            note = f"free, until the pool's owner is gone: {', '.join(owners)}" if owners else "free, in private pools"
            table.append((4, "kept by pools", ladder.kept_by_pools_bytes, note))
    if ladder.pinned_host_reserved_bytes:
        in_use = ladder.pinned_host_allocated_bytes
        note = "host RAM" if in_use is None else f"host RAM, {_bytes(in_use)} in use"
        table.append((0, "pinned host memory", ladder.pinned_host_reserved_bytes, note))
    return table


EXACT = "exact"


def _ladder(torch, device, look, owned):
    properties = torch.cuda.get_device_properties(device)
    uuid = getattr(properties, "uuid", None)
    uuid = None if uuid is None else f"GPU-{uuid}"
    has_context = _allocator.has_context(device)
    counters = _allocator.stats(device)
    reserved = counters.get("reserved_bytes")
    allocated = counters.get("allocated_bytes")
    total, device_used, device_free = properties.total_memory, None, None
    if has_context:
        try:
            device_free, total = torch.cuda.mem_get_info(device)
            device_used = total - device_free
        except RuntimeError:
            # A context that an error has ended, or a capture, may refuse. The figures below need no driver.
            pass
    nvml, why_not = _nvml(uuid)
    if device_used is None and nvml is not None:
        device_used, device_free = nvml.get("used_bytes"), nvml.get("free_bytes")
    used, how, others = _shares(nvml, why_not, has_context, reserved)
    at_most = None if used is not None or device_used is None else device_used
    segments = None if look is None else look.segments(device)
    cached, pools = _cached(device, segments, look)
    host_reserved, host_allocated = _allocator.host_stats(look)
    outside_bytes = None if used is None or reserved is None else max(used - reserved, 0)
    return Ladder(
        device=device,
        name=properties.name,
        uuid=uuid,
        total_bytes=total,
        device_used_bytes=device_used,
        device_free_bytes=device_free,
        used_bytes=used,
        used_how=how,
        used_at_most_bytes=at_most,
        others_bytes=others,
        outside_bytes=outside_bytes,
        outside=_outside(torch, device, outside_bytes) if has_context else (),
        reserved_bytes=reserved,
        allocated_bytes=allocated,
        requested_bytes=counters.get("requested_bytes"),
        active_bytes=counters.get("active_bytes"),
        workspaces_bytes=_workspaces(torch, segments, owned),
        cached_bytes=None if cached is None else cached.cached_bytes,
        returnable_bytes=None if cached is None else cached.returnable_bytes,
        stuck_bytes=None if cached is None else cached.stuck_bytes,
        kept_by_pools_bytes=None if cached is None else cached.kept_by_pools_bytes,
        pools=pools,
        pinned_host_reserved_bytes=host_reserved,
        pinned_host_allocated_bytes=host_allocated,
        limit_bytes=_limit(torch, device, properties.total_memory),
        settings="" if look is None else look.settings.get("PYTORCH_CUDA_ALLOC_CONF", ""),
    )


def _index(torch, device):
    if device is None:
        return torch.cuda.current_device()
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return torch.cuda.current_device() if index is None else index


def _nvml(uuid):
    """What NVML says of a device, or why it says nothing. Devices are matched by UUID: the orders differ."""
    ask = getattr(_native, "devices", None)
    if ask is None:
        return None, "NVML was not asked"
    if uuid is None:
        return None, "this PyTorch does not tell which device it is"
    try:
        answer = json.loads(ask())
    except (RuntimeError, OSError, ValueError) as error:
        return None, f"no NVML: {error}"
    for device in answer.get("devices", ()):
        if _same_uuid(device.get("uuid"), uuid):
            return device, None
    return None, "NVML does not show this device (a MIG slice, or hidden from this container)"


def _same_uuid(one, other):
    # A MIG slice's UUID begins with `MIG-`, a whole device's with `GPU-`; CUDA gives the number alone.
    return one is not None and one.lower().partition("-")[2] == other.lower().partition("-")[2]


def _shares(nvml, why_not, has_context, reserved):
    """`(used_bytes, how it is known, others_bytes)`."""
    if nvml is None:
        return (None, why_not, None) if has_context else (0, "no context on this device", None)
    processes = nvml.get("processes")
    if processes is None:
        reason = "NVML does not tell processes on this device"
        return (None, reason, None) if has_context else (0, "no context on this device", None)
    me = os.getpid()
    own = [process["used_bytes"] for process in processes if process["pid"] == me]
    others = [process["used_bytes"] for process in processes if process["pid"] != me]
    others_bytes = None if None in others else sum(others)
    if not has_context:
        return 0, "no context on this device", others_bytes
    if own:
        if None in own:
            return None, "NVML does not tell sizes of processes", others_bytes
        # A process that computes and draws is listed once for each.
        return max(own), EXACT, others_bytes
    # In a container NVML shows the numbers of processes as the host knows them, and this one is among them under
    # another number. With PyTorch's share at least, it must be one that is large enough.
    fits = [size for size in others if size is not None and size >= (reserved or 0)]
    if None not in others and len(fits) == 1:
        how = "inferred: the only process that is large enough, under its number on the host"
        return fits[0], how, others_bytes - fits[0]
    return None, "NVML lists no process of this number (a container hides it)", None


def _cached(device, segments, look):
    """`(Cached, pools)` with the private pools that nobody owns any more counted as returnable."""
    if segments is None:
        return None, ()
    sizes = {}
    for segment in segments:
        reserved, allocated = sizes.get(segment.pool, (0, 0))
        live = sum(block.bytes for block in segment.blocks if block.state == _allocator.ALLOCATED)
        sizes[segment.pool] = reserved + segment.total_bytes, allocated + live
    private = [pool for pool in sizes if pool != _allocator.DEFAULT_POOL]
    ownerless = frozenset()
    owners = None
    if private:
        owners = _allocator.pool_owners()
        if owners.is_complete:
            ownerless = frozenset(p for p in private if p not in owners.graphs and p not in owners.mem_pools)
    pools = []
    for pool, (reserved, allocated) in sorted(sizes.items()):
        kind, owner = _kind_and_owner(pool, owners)
        pools.append(Pool(pool, kind, reserved, allocated, owner))
    return _allocator.cached(device, segments, look.settings, ownerless), tuple(pools)


def _kind_and_owner(pool, owners):
    if pool == _allocator.DEFAULT_POOL:
        return "default", None
    n_graphs, n_pools = owners.graphs.get(pool, 0), owners.mem_pools.get(pool, 0)
    words = []
    if n_pools:
        words.append("torch.cuda.MemPool")
    if n_graphs:
        words.append("1 CUDA graph" if n_graphs == 1 else f"{n_graphs} CUDA graphs")
    # A graph without a pool of somebody else's makes (n, 0); graph_pool_handle() and MemPool make (0, n).
    kind = "mempool" if n_pools else "graph" if n_graphs or pool[1] == 0 else "private"
    return kind, " and ".join(words) or None


def _workspaces(torch, segments, owned):
    """Bytes of blocks that have the size of a cuBLAS workspace and are no tensor's.

    `getCurrentCUDABlasHandle` (aten/src/ATen/cuda/CublasHandlePool.cpp) allocates one for each handle and stream with
    the caching allocator and keeps it. No Python object refers to it. A tensor that only C++ refers to, one that autograd
    saved for example, looks the same without `owned`.
    """
    if segments is None:
        return None
    sizes = _workspace_sizes(torch)
    found = {
        block.address: block.bytes
        for segment in segments
        for block in segment.blocks
        if block.state == _allocator.ALLOCATED
        and (block.requested_bytes in sizes or _native.is_cublas_workspace(block.requested_bytes))
    }
    if not found:
        return 0
    if owned is None:
        owned = _storage_addresses(torch)
    return sum(size for address, size in found.items() if address not in owned)


def _workspace_sizes(torch):
    """Sizes other than the usual: set with functions of PyTorch 2.13 and later."""
    ask = getattr(torch._C, "_cuda_getCublasWorkspaceSize", None)
    try:
        size = ask() if ask is not None else 0
    except RuntimeError:
        size = 0
    return {size} if size else set()


def _storage_addresses(torch):
    addresses = set()
    # Subclasses of tensors answer attributes with code of their own.
    with torch._C.DisableTorchFunctionSubclass():
        for tensor in _allocator.instances((torch.Tensor,)):
            try:
                if tensor.is_cuda:
                    addresses.add(tensor.untyped_storage().data_ptr())
            except Exception:  # noqa: BLE001, S112
                # Without a storage (sparse, fake, functorch's), or with one that was freed. It owns no block.
                continue
    return addresses


def _limit(torch, device, total_bytes):
    """What the allocator may reserve (`setMemoryFraction`, c10/cuda/CUDACachingAllocator.cpp); 1 means no limit."""
    ask = getattr(torch._C, "_cuda_getMemoryFraction", None)
    try:
        fraction = ask(device) if ask is not None else 1.0
    except RuntimeError:
        return None
    return None if fraction >= 1.0 else int(fraction * total_bytes)


def _limit_note(ladder):
    return "" if ladder.limit_bytes is None else f"limited to {_bytes(ladder.limit_bytes)}"


# Libraries that have memory of their own on the device, and where to look.
_ALLOCATORS = {
    "cupy": "CuPy, see cupy.get_default_memory_pool().total_bytes()",
    "rmm": "RMM, see rmm.statistics",
    "jax": "JAX, see jax.local_devices()[0].memory_stats()",
    "tensorflow": "TensorFlow, see tf.config.experimental.get_memory_info",
    "tensorrt": "TensorRT engines",
    "onnxruntime": "ONNX Runtime sessions",
}


def _outside(torch, device, outside_bytes):
    """What may be outside the allocator, named. One figure covers them all; PyTorch knows none of the parts."""
    rows = [Outside("context, kernels, libraries", outside_bytes, "used by this process less reserved")]
    count_plans = getattr(torch, "_cufft_get_plan_cache_size", None)
    try:
        n_plans = count_plans(device) if count_plans is not None else 0
    except RuntimeError:
        n_plans = 0
    if n_plans:
        what = "1 cuFFT plan" if n_plans == 1 else f"{n_plans} cuFFT plans"
        rows.append(Outside(what, None, "torch.backends.cuda.cufft_plan_cache; part of the figure above"))
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        rows.append(Outside("NCCL communicators", None, "torch.distributed is initialised; part of the figure above"))
    for module, how in _ALLOCATORS.items():
        if module in sys.modules:
            rows.append(Outside(module, None, f"loaded: {how}; part of the figure above"))
    return tuple(rows)


def _bytes(size):
    return "n/a" if size is None else _native.format_bytes(size)
