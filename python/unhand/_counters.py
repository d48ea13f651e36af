"""The counters of PyTorch's allocator, read the cheap way; nothing is reset and no context made.

`torch.cuda.memory_stats` sorts and flattens 120 figures for each call. What lies under it, `torch._C._cuda_memoryStats`,
takes a tenth of the time.
"""

from typing import NamedTuple

from unhand import _allocator


# A named tuple and no dataclass: two are made for each scope, and a frozen dataclass takes as long as the reading.
class Counters(NamedTuple):
    """One device's figures at one moment. What a backend does not count is `None`."""

    device: int
    allocated_bytes: int
    """Blocks in use (`torch.cuda.memory_allocated`)."""
    requested_bytes: int
    """What was asked for, before rounding."""
    reserved_bytes: int
    """What the allocator holds from the driver (`torch.cuda.memory_reserved`)."""
    active_bytes: int
    """Allocated, and freed but waiting for another stream."""
    handed_out_bytes: int
    """Allocated bytes of all blocks so far, freed ones included."""
    peak_allocated_bytes: int
    """The highest `allocated_bytes` since the start, or since somebody reset it (`torch.cuda.max_memory_allocated`)."""
    peak_requested_bytes: int
    """The same of `requested_bytes`."""
    peak_reserved_bytes: int
    """The same of `reserved_bytes` (`torch.cuda.max_memory_reserved`)."""
    n_live: int | None
    """Blocks in use."""
    n_allocations: int | None
    """Blocks handed out so far: the number that the next one gets."""
    n_frees: int | None
    """Blocks taken back so far."""
    n_segments: int | None
    """Pieces of memory held from the driver."""
    n_ooms: int
    """How often the allocator gave up: `OutOfMemoryError` was raised, or something like it."""
    n_retries: int
    """How often the driver refused, and the allocator emptied its cache and asked again."""


def read(device, torch=None):
    """The counters of a device, given by its index; `None` before CUDA is started and where the allocator keeps none.

    `torch` is `_allocator.started_torch()`, of callers that have asked already.
    """
    torch = torch or _allocator.started_torch()
    if torch is None:
        return None
    try:
        raw = torch._C._cuda_memoryStats(device)
        allocated = raw["allocated_bytes"]["all"]
        requested = raw["requested_bytes"]["all"]
        reserved = raw["reserved_bytes"]["all"]
        blocks = raw["allocation"]["all"]
        # The backend `cudaMallocAsync` counts bytes and no blocks.
        counts = blocks["allocated"] > 0 or allocated["allocated"] == 0
        return Counters(
            device,
            allocated["current"],
            requested["current"],
            reserved["current"],
            raw["active_bytes"]["all"]["current"],
            allocated["allocated"],
            allocated["peak"],
            requested["peak"],
            reserved["peak"],
            blocks["current"] if counts else None,
            blocks["allocated"] if counts else None,
            blocks["freed"] if counts else None,
            raw["segment"]["all"]["current"] if counts else None,
            raw["num_ooms"],
            raw["num_alloc_retries"],
        )
    except (RuntimeError, KeyError):
        return None


def read_all(devices=None, torch=None) -> dict[int, Counters]:
    """The counters of some devices, or of all with a context, as far as they have any."""
    torch = torch or _allocator.started_torch()
    found = {device: read(device, torch) for device in _allocator.devices(devices, torch)}
    return {device: figures for device, figures in found.items() if figures is not None}


def were_reset(before, after) -> bool:
    """Whether somebody reset the sums between two readings (`torch.cuda.reset_accumulated_memory_stats`).

    They only grow otherwise, and what is handed out and not taken back is alive.
    """
    if before.n_allocations is None or after.n_allocations is None:
        return after.handed_out_bytes < before.handed_out_bytes
    return (
        after.n_allocations < before.n_allocations
        or after.n_frees < before.n_frees
        or after.handed_out_bytes < before.handed_out_bytes
        or after.n_allocations - after.n_frees - after.n_live != before.n_allocations - before.n_frees - before.n_live
    )
