"""`log_dict`: the figures of a device as a flat dictionary, for loggers of training runs."""

from unhand import _allocator, _counters


def log_dict(device=None, prefix="gpu_memory/", *, driver=False) -> dict:
    """The figures of one device, by stable names, for `wandb.log`, `mlflow.log_metrics`, TensorBoard and the like.

        run.log({"loss": loss} | unhand.log_dict())

    `device` is an index, a name or a `torch.device`; None is the current one. Sizes are in bytes, and the keys begin with
    `prefix`:

    - `allocated_bytes`, `requested_bytes`, `reserved_bytes`, `cached_bytes`: blocks in use, what was asked for, what PyTorch
      holds from the driver, and what of that is not in use;
    - `peak_allocated_bytes`, `peak_reserved_bytes`: the highest so far, or since somebody reset them;
    - `n_blocks`, `n_segments`, `n_allocations`: how many there are, and how many blocks were handed out so far;
    - `n_ooms`, `n_retries`: how often memory ran out, and how often the cache had to be emptied to go on;
    - with `driver`: `device_used_bytes`, `device_total_bytes`, of all processes, as the driver says.

    What is not known has no key: without CUDA the dictionary is empty. Some 30 us; with `driver` a call of the driver's more.
    Nothing is reset. ValueError for a device that is no CUDA device.
    """
    torch = _allocator.started_torch()
    if torch is None:
        return {}
    from unhand import _blocks

    index = _blocks.device_index(device)
    if not _allocator.has_context(index):
        return {}
    now = _counters.read(index, torch)
    values = {}
    if now is not None:
        values = {
            "allocated_bytes": now.allocated_bytes,
            "requested_bytes": now.requested_bytes,
            "reserved_bytes": now.reserved_bytes,
            "cached_bytes": now.reserved_bytes - now.allocated_bytes,
            "peak_allocated_bytes": now.peak_allocated_bytes,
            "peak_reserved_bytes": now.peak_reserved_bytes,
            "n_blocks": now.n_live,
            "n_segments": now.n_segments,
            "n_allocations": now.n_allocations,
            "n_ooms": now.n_ooms,
            "n_retries": now.n_retries,
        }
    if driver:
        try:
            free, total = torch.cuda.mem_get_info(index)
            values |= {"device_used_bytes": total - free, "device_total_bytes": total}
        except RuntimeError:
            # A context that an error has ended, or a capture, may refuse.
            pass
    return {prefix + name: value for name, value in values.items() if value is not None}
