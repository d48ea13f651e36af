"""What gives memory back: small functions that each do one thing, say what came of it, and never raise.

None imports a library, or makes a context on a device that has none. During a capture of a CUDA graph those that would
spoil it refuse. Those that PyTorch or the user would have to pay for later are only called when asked for.
"""

import gc
import sys
from dataclasses import dataclass

from unhand import _allocator, _native, _notebook, _tracebacks
from unhand._answer import fields


@dataclass(frozen=True, slots=True)
class Action:
    """What one action did."""

    name: str
    """The function of this module that did it."""
    detail: str
    """What came of it, in words."""
    freed_bytes: int | None
    """GPU memory that it freed; of `pinned_host_cache` host memory. `None` where it cannot be told from what others did."""
    error: str | None
    """Why it did not do it, or not all."""
    count: int | None = None
    """How many things it dropped: objects, entries, frames, plans."""

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields."""
        return fields(self)

    def __str__(self):
        words = [self.name.replace("_", " ")]
        if self.error:
            words.append(f"not done: {self.error}")
        elif self.detail:
            words.append(self.detail)
        if self.freed_bytes:
            words.append(_native.format_bytes(self.freed_bytes))
        return ", ".join(words)


@dataclass(frozen=True, slots=True)
class Scene:
    """What several actions need to know first; to look costs a walk over the objects, so callers look once."""

    is_capturing: bool
    # Captured CUDA graphs that are alive. `None`: there may be some.
    n_graphs: int | None


def scene():
    """Looks whether a capture is under way, and whether there are CUDA graphs."""
    torch = _allocator.started_torch()
    if torch is None:
        return Scene(False, 0)
    capturing = _allocator.is_capturing()
    owners = _allocator.pool_owners(capturing)
    n_graphs = sum(owners.graphs.values())
    if n_graphs == 0 and _allocator.objects_are_frozen():
        # A frozen graph cannot be seen, but its pool can.
        look = _allocator.snapshot()
        pools = set() if look is None else look.pools()
        if look is None or pools - {_allocator.DEFAULT_POOL, *owners.mem_pools}:
            n_graphs = None
    return Scene(capturing, n_graphs)


def is_capturing():
    """Whether a graph capture is under way that this thread can see; see `_allocator.is_capturing` for the limits."""
    return _allocator.is_capturing()


def tracebacks():
    """Clears what the last exceptions keep: `sys.last_*`, IPython's places, and all chains from there.

    Afterwards `%debug` and `pdb.pm()` have nothing to look at. While a debugger is open, nothing is touched.
    """

    def work(report):
        if _tracebacks.debugger_is_open():
            raise _Refused("a debugger is looking at frames")
        forgotten = _tracebacks.forget(_notebook.running_shell())
        report.count = forgotten.n_frames
        if not forgotten.places:
            report.detail = "no exception is remembered"
        else:
            kinds = ", ".join(dict.fromkeys(forgotten.kinds)) or "traceback"
            report.detail = f"{kinds} in {', '.join(forgotten.places)}"

    return _act("tracebacks", work, _allocated_bytes)


def stored_tracebacks(found):
    """Clears the locals in tracebacks of exceptions that the program stored; `found` is emptied.

    The exceptions keep their messages and lines. While a debugger is open, nothing is touched.
    """

    def work(report):
        if _tracebacks.debugger_is_open():
            raise _Refused("a debugger is looking at frames")
        n_stored = len(found)
        report.count = _tracebacks.clear(found)
        report.detail = f"locals of {_count(report.count, 'failed call')} in {_count(n_stored, 'stored traceback')}"

    return _act("stored_tracebacks", work, _allocated_bytes)


def notebook_history(shell_too=False, only_freed=False):
    """Drops shown values that hold CUDA tensors: `Out[…]`, `_`, `__`, `___`, `_1` and so on, in all places.

    `shell_too` also drops `_` of the plain interpreter, `only_freed` drops only values all of whose tensors were freed.
    Only for users who ask: they can see these values.
    """

    def work(report):
        torch = sys.modules.get("torch")
        shell = _notebook.running_shell()
        if torch is None or (shell is None and not shell_too):
            report.count, report.detail = 0, "no notebook"
            return
        holds = _notebook.holds_only_freed if only_freed else _notebook.holds_cuda_tensor
        report.count = _notebook.drop_shown_values(shell, lambda value: holds(torch, value), interpreter_too=shell_too)
        report.detail = _count(report.count, "shown value")

    return _act("notebook_history", work, _allocated_bytes)


def collect():
    """Collects dead cycles, until nothing more is found but at most three times; also with the collector switched off.

    Frozen objects (`gc.freeze()`) are skipped by every collection, so they are thawed, collected and frozen again. Python
    does not tell which were frozen: afterwards everything alive is, what came since the first freeze included.
    """

    def work(report):
        n_frozen = gc.get_freeze_count() if _allocator.objects_are_frozen() else 0
        if n_frozen:
            gc.unfreeze()
        try:
            n_objects = 0
            for _ in range(3):
                n_found = gc.collect()
                n_objects += n_found
                if n_found == 0:
                    break
        finally:
            if n_frozen:
                gc.freeze()
        report.count = n_objects
        notes = [_count(n_objects, "unreachable object")]
        if n_frozen:
            notes.append(f"{n_frozen} frozen objects looked at, and frozen again")
        if not gc.isenabled():
            notes.append("automatic collection is off")
        if gc.garbage:
            notes.append(f"{_count(len(gc.garbage), 'object')} in gc.garbage")
        report.detail = "; ".join(notes)

    return _act("collect", work, _allocated_bytes)


def synchronize(scene=None):
    """Waits for every device on which this process has a context.

    `torch.cuda.synchronize` (torch/cuda/__init__.py) goes back to the device before without making a context there.
    """

    def work(report):
        torch = _started(scene)
        devices = _allocator.devices()
        for device in devices:
            torch.cuda.synchronize(device)
        report.count, report.detail = len(devices), _count(len(devices), "device")

    return _act("synchronize", work)


def workspaces(scene=None):
    """Frees the workspaces of cuBLAS and cuBLASLt, which no tensor owns; the next product makes new ones.

    `clearCublasWorkspaces` (aten/src/ATen/cuda/CublasHandlePool.cpp) drops those of all devices and streams. The devices
    are waited for first, since work on them may use a workspace. So may every replay of a CUDA graph, which has its
    address inside: as long as a graph lives, nothing is cleared.
    """

    def work(report):
        _clear_idle(_started(scene, graphs_may_use="workspaces"), "_cuda_clearCublasWorkspaces")
        report.detail = "cuBLAS"

    return _act("workspaces", work, _allocated_bytes)


def fft_plans(device, scene=None):
    """Drops the cuFFT plans of a device; plans keep memory outside the allocator.

    `cufft_clear_plan_cache_impl` (aten/src/ATen/native/cuda/SpectralOps.cpp). A captured graph may use a plan's tables,
    so nothing is dropped while a graph lives.
    """

    def work(report):
        torch = _started(scene, graphs_may_use="plans")
        count = getattr(torch, "_cufft_get_plan_cache_size", None)
        if count is None or not _allocator.has_context(device):
            report.count, report.detail = 0, "no plans"
            return
        report.count = count(device)
        report.detail = f"{_count(report.count, 'plan')} on cuda:{device}"
        if report.count:
            with torch.cuda.device(device):
                torch.cuda.synchronize(device)
                torch._cufft_clear_plan_cache(device)

    return _act("fft_plans", work, lambda: _driver_free_bytes([device]), grows=True)


def pinned_host_cache(scene=None):
    """Gives cached pinned memory back to the operating system: host memory, none of the GPU's.

    `CachingHostAllocatorImpl::empty_cache` (aten/src/ATen/core/CachingHostAllocator.h); since PyTorch 2.5.
    """

    def work(report):
        torch = _started(scene, graphs_may_use="pinned buffers")
        empty = getattr(torch._C, "_host_emptyCache", None)
        empty = empty or getattr(getattr(torch, "accelerator", None), "empty_host_cache", None)
        if empty is None:
            raise _Refused("this PyTorch has no call for it")
        devices = _allocator.devices()
        if not devices:
            return
        # `cudaFreeHost` needs a context, and takes the current device's.
        with torch.cuda.device(devices[0]):
            empty()
        report.detail = "host memory"

    return _act("pinned_host_cache", work, lambda: _allocator.host_stats()[0])


def ipc(scene=None):
    """Frees what was sent to other processes and is done with there.

    `CudaIPCCollect` (torch/csrc/CudaIPCTypes.cpp). What a consumer still uses stays.
    """

    def work(report):
        torch = _started(scene)
        if _allocator.devices():
            torch.cuda.ipc_collect()
        report.detail = "memory sent to other processes"

    return _act("ipc", work, _allocated_bytes)


def autocast_cache(scene=None):
    """Drops the copies of weights that autocast keeps until its region ends; a region that is open makes them anew.

    `clear_cache` (aten/src/ATen/autocast_mode.cpp).
    """

    def work(report):
        torch = _started(scene)
        torch.clear_autocast_cache()
        report.detail = "low-precision copies of weights"

    return _act("autocast_cache", work, _allocated_bytes)


def cudnn_dropout_state(scene=None):
    """Drops cuDNN's random state for dropout; the next dropout seeds a new one, so only for users who ask.

    `clearDropoutState` (aten/src/ATen/native/cudnn/RNN.cpp), in newer releases.
    """

    def work(report):
        _clear_idle(_started(scene, graphs_may_use="dropout state"), "_cudnn_clear_dropout_state")
        report.detail = "cuDNN's dropout state"

    return _act("cudnn_dropout_state", work, _allocated_bytes)


def compile_caches(scene=None):
    """Drops what `torch.compile` keeps, CUDA graphs included; functions compile again, so only for users who ask.

    `torch._dynamo.reset` (torch/_dynamo/__init__.py), then `reset_cudagraph_trees` (torch/_inductor/cudagraph_trees.py),
    which older releases do not call from there.
    """

    def work(report):
        _started(scene)
        done = []
        dynamo = sys.modules.get("torch._dynamo")
        if dynamo is not None:
            dynamo.reset()
            done.append("torch._dynamo.reset()")
        trees = sys.modules.get("torch._inductor.cudagraph_trees")
        if trees is not None:
            trees.reset_cudagraph_trees()
            done.append("reset_cudagraph_trees()")
        report.detail = ", ".join(done) or "torch.compile was not used"

    return _act("compile_caches", work, _allocated_bytes)


def empty_cache(scene=None):
    """Gives cached memory back to the driver, on all devices with a context; `freed_bytes` is the driver's figure.

    `torch.cuda.empty_cache` frees with `cudaFree` (`release_block`, c10/cuda/CUDACachingAllocator.cpp), and that makes a
    context on the thread's current device, whoever's memory it is. So a device that has one is made current meanwhile. A
    private pool whose last owner (graph, `MemPool`) and tensors are gone goes back with it, others keep theirs.

    It refuses where PyTorch would crash later: `unmap_block` counts an expandable segment as gone when some of its pages
    are, `release_cached_blocks` then forgets an ownerless pool although a tensor lives in it, and the free of that tensor
    is a segmentation fault (2.11 to 2.15).
    """
    reserved = {}

    def work(report):
        torch = _started(scene)
        if _has_doomed_pool():
            raise _Refused(
                "a tensor lives in an expandable segment of a pool without an owner: empty_cache() would make PyTorch "
                "crash when the tensor dies; delete the tensor first"
            )
        devices = _allocator.devices()
        if not devices:
            report.detail = "no context"
            return
        before = {device: _allocator.stats(device).get("reserved_bytes") for device in devices}
        # One call walks the allocators of all devices.
        with torch.cuda.device(devices[0]):
            torch.cuda.empty_cache()
        for device in devices:
            after = _allocator.stats(device).get("reserved_bytes")
            if after is not None and before[device] is not None:
                reserved[device] = before[device] - after
        report.detail = ", ".join(
            f"cuda:{device} {_native.format_bytes(size)} less reserved" for device, size in reserved.items() if size > 0
        )

    return _act("empty_cache", work, lambda: _driver_free_bytes(_allocator.devices()), grows=True)


class _Refused(Exception):
    """A reason not to act."""


@dataclass(slots=True)
class _Report:
    detail: str = ""
    count: int | None = None


def _act(name, work, measure=None, grows=False):
    """Runs an action between two measurements, and turns everything that goes wrong into a sentence.

    `measure` is of memory that falls when some is freed, or, with `grows`, of free memory.
    """
    report, error = _Report(), None
    before = _try(measure)
    try:
        work(report)
    except _Refused as refusal:
        error = str(refusal)
    except Exception as failure:  # noqa: BLE001
        # After a device error (an assertion in a kernel, for example) every call fails; the report must not.
        error = (str(failure).strip().splitlines() or [""])[0]
        error = f"{type(failure).__name__}: {error}".removesuffix(": ")
    after = _try(measure)
    freed = None
    if before is not None and after is not None:
        freed = after - before if grows else before - after
        # Less than nothing: something else in this process, or another one, allocated meanwhile.
        freed = None if freed < 0 else freed
    return Action(name, report.detail, freed, error, report.count)


def _try(measure):
    if measure is None:
        return None
    try:
        return measure()
    except Exception:  # noqa: BLE001
        return None


def _started(scene_seen, graphs_may_use=None):
    """torch, if the action may act: CUDA is started, nothing is captured, and no graph needs what would go."""
    torch = _allocator.started_torch()
    if torch is None:
        raise _Refused("this process has not started CUDA through PyTorch")
    seen = scene() if scene_seen is None else scene_seen
    if seen.is_capturing:
        raise _Refused("a CUDA graph is being captured")
    if graphs_may_use is not None and seen.n_graphs != 0:
        graphs = "CUDA graphs that may be there" if seen.n_graphs is None else _count(seen.n_graphs, "live CUDA graph")
        raise _Refused(f"{graphs} may use these {graphs_may_use} when replayed")
    return torch


def _clear_idle(torch, name):
    """Waits for all devices and calls a function of PyTorch's that drops what work on them may use."""
    clear = getattr(torch._C, name, None)
    if clear is None:
        raise _Refused("this PyTorch has no call for it")
    for device in _allocator.devices():
        torch.cuda.synchronize(device)
    clear()


def _has_doomed_pool():
    look = _allocator.snapshot()
    if look is None or look.pools() <= {_allocator.DEFAULT_POOL}:
        return False
    owners = _allocator.pool_owners()
    owned = {_allocator.DEFAULT_POOL, *owners.graphs, *owners.mem_pools}
    for device in _allocator.devices():
        orphans = [s for s in look.segments(device) if s.is_expandable and s.pool not in owned]
        in_use = {s.pool for s in orphans if any(block.state == _allocator.ALLOCATED for block in s.blocks)}
        doomed = [segment for segment in orphans if segment.pool in in_use]
        if doomed:
            cached = _allocator.cached(device, doomed, look.settings, frozenset(in_use))
            if cached.returnable_bytes:
                return True
    return False


def _allocated_bytes():
    """Allocated on all devices together; `None` without CUDA."""
    if _allocator.started_torch() is None:
        return None
    figures = [_allocator.stats(device).get("allocated_bytes") for device in _allocator.devices()]
    return None if None in figures else sum(figures)


def _driver_free_bytes(devices):
    torch = _allocator.started_torch()
    if torch is None:
        return None
    return sum(torch.cuda.mem_get_info(device)[0] for device in devices if _allocator.has_context(device))


def _count(n, noun):
    return f"1 {noun}" if n == 1 else f"{n} {noun}s"
