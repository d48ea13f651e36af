"""Blocks that no tensor of Python's explains: which of them libraries and pools keep, and where the rest came from."""

import collections
import os
import sys

from unhand import _allocator, _autograd, _native


def device_index(device) -> int:
    """The index of a device given as an index, a name such as `cuda:1`, or a `torch.device`; None is the current one."""
    import torch

    if isinstance(device, int):
        if not 0 <= device < torch.cuda.device_count():
            raise ValueError(f"no such device: `{device}` (there are {torch.cuda.device_count()})")
        return device
    device = torch.device("cuda" if device is None else device)
    if device.type != "cuda":
        raise ValueError(f"not a CUDA device: `{device}`")
    return torch.cuda.current_device() if device.index is None else device.index


# cuBLASLt's workspace where nothing else was asked for (`_getWorkspaceSize`, aten/src/ATen/cuda/CUDABlas.cpp).
_LT_WORKSPACE_BYTES = 1 << 20


def known(view, device, nameless) -> dict[int, tuple[str, str]]:
    """What is known of blocks that no Python object leads to: address to (kind, path)."""
    found = {}
    # To find the owners of private pools is to go through all objects once more.
    is_private = any(segment.pool != _allocator.DEFAULT_POOL for segment in view.segments[device])
    owners = _allocator.pool_owners() if is_private else None
    pools = {block.address: segment.pool for segment in view.segments[device] for block in segment.blocks}
    expected = _expected(view, device) if nameless else []
    for block in nameless:
        pool = pools.get(block.address, _allocator.DEFAULT_POOL)
        if block.state == _allocator.PENDING:
            found[block.address] = ("pending", "freed, and waiting for another stream")
        elif pool != _allocator.DEFAULT_POOL:
            found[block.address] = ("graph pool", _pool(pool, owners))
        else:
            for sizes in expected:
                if sizes.take(block.requested_bytes):
                    found[block.address] = (sizes.kind, sizes.path)
                    break
    return found


class _Workspaces:
    """cuBLAS's workspaces, which have sizes that nothing else has."""

    kind, path = "workspace", "cuBLAS workspaces (by their size)"
    take = staticmethod(_native.is_cublas_workspace)


class _Sizes:
    """What some part of PyTorch keeps in native code, as far as the sizes of it can be told."""

    def __init__(self, kind, path, sizes, *, is_counted=False):
        self.kind, self.path = kind, path
        self._is_counted = is_counted
        self._left = collections.Counter(sizes)

    def take(self, n_bytes) -> bool:
        """Whether a block of this size may be of them. Where their number is known, each is found once."""
        if self._left[n_bytes] <= 0:
            return False
        self._left[n_bytes] -= self._is_counted
        return True


def _expected(view, device) -> list:
    """What native code may have on a device, what can be told most exactly first."""
    lt = "workspace", "a cuBLASLt workspace (by its size)", [_LT_WORKSPACE_BYTES]
    buckets = "gradient buckets of DistributedDataParallel (by their sizes)"
    on_their_way = "a backward that is running (gradients on their way, by their sizes)"
    return [
        _Sizes("native", buckets, _bucket_bytes(view, device), is_counted=True),
        _Workspaces,
        # There is one as a rule, and more where several streams multiply.
        _Sizes(*lt, is_counted=True),
        _Sizes("cache", "the autocast cache (by its size)", _autocast_bytes(view)),
        _Sizes("native", on_their_way, _gradient_bytes(view)),
        _Sizes(*lt),
    ]


def _bucket_bytes(view, device) -> list[int]:
    """The bytes of the buckets in which each `DistributedDataParallel` gathers gradients (c10d's reducer.cpp).

    Its log tells the sizes, those of the first iterations until it has rebuilt the buckets and logged that.
    """
    module = sys.modules.get("torch.nn.parallel.distributed")
    wrapper = getattr(module, "DistributedDataParallel", None)
    if wrapper is None:
        return []
    sizes = []
    for node in view.instances_of(wrapper):
        try:
            parallel = view.heap.object(node)
            if device not in {parameter.device.index for parameter in parallel.parameters()}:
                continue
            log = parallel.logger._get_ddp_logging_data().strs_map
            text = log.get("rebuilt_bucket_sizes") or log.get("bucket_sizes") or ""
            sizes += [int(word) for word in text.split(",") if word.strip()]
        except Exception:
            # Half built, or a release that logs otherwise.
            continue
    return sizes


def _autocast_bytes(view) -> set[int]:
    """The bytes of copies that an open autocast region may have made of weights (`cached_cast`, ATen/autocast_mode.cpp)."""
    torch = view.torch
    if torch is None or not torch.is_autocast_cache_enabled() or not torch.is_autocast_enabled():
        return set()
    with torch._C.DisableTorchFunctionSubclass():
        return {
            tensor.numel() * 2
            for storage in view.storages.values()
            for tensor in storage.tensors
            if tensor.is_leaf and tensor.requires_grad and tensor.dtype == torch.float32
        }


def _gradient_bytes(view) -> set[int]:
    """The bytes of gradients that the engine may carry from node to node, if a backward is running in some thread."""
    if not any(running.function == "_engine_run_backward" for running in view.frames):
        return set()
    return {size for node in view.graph_nodes for size in _autograd.gradient_bytes(view.object(node)) if size}


def _pool(pool, owners) -> str:
    n_graphs, n_pools = owners.graphs.get(pool, 0), owners.mem_pools.get(pool, 0)
    if n_graphs:
        return f"pool {pool} of {n_graphs} CUDA graph" + ("s" if n_graphs > 1 else "")
    return f"pool {pool} of a torch.cuda.MemPool" if n_pools else f"private pool {pool}"


def count(n) -> str:
    """How many blocks, in words."""
    return "1 block" if n == 1 else f"{n:,} blocks"


def site_of(block) -> str | None:
    """The line that allocated a block, if the history was recorded: the first frame outside of PyTorch."""
    if not block.frames:
        return None
    python = [frame for frame in block.frames if frame["filename"].endswith(".py")]
    outside = [frame for frame in python if f"{os.sep}torch{os.sep}" not in frame["filename"]]
    frame = next(iter(outside or python or block.frames))
    return f"{os.path.basename(frame['filename'])}:{frame['line']} {frame['name']}()"


def main_site(blocks) -> str | None:
    """The line that allocated most of the bytes of some blocks; None where no stacks are recorded."""
    sizes = collections.Counter()
    for block in blocks:
        place = site_of(block)
        if place is not None:
            sizes[place] += block.bytes
    return max(sizes, key=sizes.__getitem__) if sizes else None
