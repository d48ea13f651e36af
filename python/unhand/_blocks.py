"""Blocks that no tensor of Python's explains: which of them libraries and pools keep, and where the rest came from."""

import os

from unhand import _allocator, _native


def device_index(device) -> int:
    """The index of a device given as an index, a name such as `cuda:1`, or a `torch.device`; None is the current one."""
    import torch

    if isinstance(device, int):
        return device
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda":
        raise ValueError(f"not a CUDA device: `{device}`")
    return torch.cuda.current_device() if device.index is None else device.index


# cuBLASLt's workspace where nothing else was asked for (`_getWorkspaceSize`, aten/src/ATen/cuda/CUDABlas.cpp).
_LT_WORKSPACE_BYTES = 1 << 20


def known(segments, nameless, owners, half_sizes=frozenset()) -> dict[int, tuple[str, str]]:
    """What is known of blocks that no Python object leads to: address to (kind, path).

    `half_sizes` are the bytes that copies of weights in half precision have, while an autocast region may keep some.
    """
    found = {}
    pools = {block.address: segment.pool for segment in segments for block in segment.blocks}
    for block in nameless:
        pool = pools.get(block.address, _allocator.DEFAULT_POOL)
        if block.state == _allocator.PENDING:
            found[block.address] = ("pending", "freed, and waiting for another stream")
        elif pool != _allocator.DEFAULT_POOL:
            found[block.address] = ("graph pool", _pool(pool, owners))
        elif block.requested_bytes in half_sizes:
            found[block.address] = ("cache", "the autocast cache (by its size)")
        elif _native.is_cublas_workspace(block.requested_bytes):
            found[block.address] = ("workspace", "cuBLAS workspaces (by their size)")
        elif block.requested_bytes == _LT_WORKSPACE_BYTES:
            found[block.address] = ("workspace", "a cuBLASLt workspace (by its size)")
    return found


def _pool(pool, owners) -> str:
    n_graphs, n_pools = owners.graphs.get(pool, 0), owners.mem_pools.get(pool, 0)
    if n_graphs:
        return f"pool {pool} of {n_graphs} CUDA graph" + ("s" if n_graphs > 1 else "")
    return f"pool {pool} of a torch.cuda.MemPool" if n_pools else f"private pool {pool}"


def site_of(block) -> str | None:
    """The line that allocated a block, if the history was recorded: the first frame outside of PyTorch."""
    if not block.frames:
        return None
    python = [frame for frame in block.frames if frame["filename"].endswith(".py")]
    outside = [frame for frame in python if f"{os.sep}torch{os.sep}" not in frame["filename"]]
    frame = next(iter(outside or python or block.frames))
    return f"{os.path.basename(frame['filename'])}:{frame['line']} {frame['name']}()"
