"""`on_oom`: at the first out-of-memory error everything that explains it is written into a folder.

PyTorch calls an observer when its allocator gives up, before the error is raised, on the thread that asked and with the
failing frames still running; the allocator's lock is free by then. An observer cannot be taken off again, so there is one
for the process, which asks the recorders of the moment. Errors that are not the allocator's are seen at the end of the
program, by `sys.excepthook`.
"""

import os
import re
import sys
import threading
import time

from unhand import _after_import, _recording

_recorders: list["Recorder"] = []
_writing = threading.Lock()
# Whether PyTorch has our observer, or will get it when CUDA starts.
_is_attached = False
# Whether the history that is recorded was switched on here.
_has_history = False


def on_oom(path="unhand-oom", *, history=None, max_entries=100_000, limit=1, device=None) -> "Recorder":
    """Write down, at the first out-of-memory error, what held the memory and what would have fitted.

    Each recording is a folder of its own in the folder `path`, with report.txt, report.json and snapshot.pickle; it gets
    its name when it is complete. Nothing is ever deleted. With ranks (`RANK` is set), each writes `rank3` and so on into
    the folder of its run, which is named for the launcher: no rank waits for another.

    `history` says what PyTorch is to record of each allocation from now on, which allows to say which allocator settings
    would have fitted: `"stacks"`, `"events"` (sizes without stacks), or None to leave the recording as it is; one that is
    on already is left alone. `max_entries` is how many events are kept, the newest. `limit` is how many errors are
    recorded, the first ones; those that the program catches count. `device` (an index or a name) restricts it to one.

    Starts no CUDA. ValueError for a `history`, `limit` or `device` that cannot be. An error while recording becomes a line
    on stderr, and the program's own error stays as it is.
    """
    return Recorder(path, history=history, max_entries=max_entries, limit=limit, device=device)


class Recorder:
    """What `on_oom` returns: it records until it is closed, or has recorded `limit` errors. Also a context manager."""

    def __init__(self, path, *, history, max_entries, limit, device, hooks=True):
        if history not in (None, "events", "stacks"):
            raise ValueError(f"not a kind of history: `{history}` (there are None, \"events\" and \"stacks\")")
        if limit < 1 or max_entries < 1:
            raise ValueError("`limit` and `max_entries` are 1 or more")
        self.path = os.path.abspath(os.fspath(path))
        """The folder for recordings."""
        self.recordings: list[str] = []
        """The folders written so far."""
        self.n_seen = 0
        """How many out-of-memory errors of PyTorch's allocator there were, the recorded ones included."""
        self._left = limit
        self._device = _index(device)
        self._history, self._max_entries = history, max_entries
        self._is_open = True
        self._previous_hook = None
        _recorders.append(self)
        _after_import.when_imported("torch", self._attach)
        if hooks:
            # One bound method, so that it can be found again.
            self._hook = self._on_error
            self._previous_hook, sys.excepthook = sys.excepthook, self._hook

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def __repr__(self):
        state = "open" if self._is_open else "closed"
        return f"<unhand.on_oom {state}: {len(self.recordings)} recorded in {self.path!r}>"

    def close(self):
        """Record no more. A history that was switched on here is switched off."""
        if not self._is_open:
            return
        self._is_open = False
        _recorders.remove(self)
        _after_import.forget("torch", self._attach)
        if self._previous_hook is not None:
            if sys.excepthook == self._hook:
                sys.excepthook = self._previous_hook
            # Somebody else's hook may call ours later: it passes everything on.
        if self._history is not None and not any(other._history for other in _recorders):
            _stop_history()

    def consider(self, error) -> str | None:
        """Record an error that reached the end of the program, if it is one; return the folder written."""
        torch = sys.modules.get("torch")
        # Without CUDA here it is another process that ran out, a child whose error was passed on.
        if torch is None or not torch.cuda.is_initialized() or not self._is_open or self._left < 1:
            return None
        from unhand import _oom

        kinds = [getattr(torch, "OutOfMemoryError", None), getattr(torch.cuda, "OutOfMemoryError", None)]
        is_allocators = isinstance(error, tuple(kind for kind in kinds if kind is not None))
        if (is_allocators and self.n_seen) or not _oom.is_out_of_memory(error):
            return None
        device = _device_in(str(error), torch.cuda.current_device())
        failure = _recording.Failure(device, None, None, None, f"{type(error).__name__}: {error}")
        return self._record(failure, error)

    def _attach(self, torch):
        _when_started(torch, _attach_observer)
        if self._history is not None:
            _when_started(torch, lambda: _start_history(self))

    def _on_error(self, kind, error, traceback):
        if self._is_open:
            try:
                self.consider(error)
            except Exception as fault:
                _tell(f"cannot record: {type(fault).__name__}: {fault}")
        self._previous_hook(kind, error, traceback)

    def _observe(self, device, segment_bytes, allowed_bytes, free_bytes):
        self.n_seen += 1
        if self._left > 0 and self._device in (None, device):
            self._record(_recording.Failure(device, segment_bytes, allowed_bytes, free_bytes, None), None)

    def _record(self, failure, error) -> str | None:
        # Another thread is at it: one error of the moment is enough, and nobody waits inside the allocator.
        if not _writing.acquire(blocking=False):
            return None
        start = time.monotonic()
        self._left -= 1
        try:
            parent, name = _place(self.path, os.environ)
            folder = _recording.write(failure, parent, name, error)
        except Exception as fault:
            _tell(f"cannot record the out-of-memory error: {fault if isinstance(fault, OSError) else repr(fault)}")
            return None
        finally:
            _writing.release()
        self.recordings.append(folder)
        _tell(f"out of GPU memory: recorded in {time.monotonic() - start:.1f} s: {folder}")
        return folder


def _observe(device, segment_bytes, allowed_bytes, free_bytes):
    """The one observer of the process. It must not raise: that would replace the program's own error."""
    if not _recorders:
        return
    resume = _pause_dynamo()
    try:
        for recorder in list(_recorders):
            recorder._observe(device, segment_bytes, allowed_bytes, free_bytes)
    except Exception as fault:
        _tell(f"cannot record: {type(fault).__name__}: {fault}")
    finally:
        resume()


def _pause_dynamo():
    """Keep `torch.compile` from compiling the recorder's own functions; returns what switches it on again."""
    frames = sys.modules.get("torch._C._dynamo.eval_frame")
    switch = getattr(frames, "set_eval_frame", None)
    if switch is None or "torch._dynamo" not in sys.modules:
        return lambda: None
    callback = switch(None)
    return lambda: switch(callback)


def _attach_observer():
    global _is_attached
    if _is_attached:
        return
    _is_attached = True
    torch = sys.modules["torch"]
    attach = getattr(torch._C, "_cuda_attach_out_of_memory_observer", None)
    skip = getattr(getattr(torch._C, "_dynamo", None), "eval_frame", None)
    skip = getattr(skip, "skip_code", None)
    try:
        if skip is not None:
            skip(_observe.__code__)
        if attach is not None:
            attach(_observe)
    except Exception as fault:
        # Allocators other than PyTorch's own have no observers: `backend:cudaMallocAsync`, for one.
        _tell(f"out-of-memory errors are seen at the end of the program only: {str(fault).partition(chr(10))[0]}")


def _start_history(recorder):
    global _has_history
    torch = sys.modules["torch"]
    ask = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    if not recorder._is_open or _has_history or (ask is not None and ask()):
        return
    options = {"context": None} if recorder._history == "events" else {"context": "alloc", "stacks": "python"}
    try:
        torch.cuda.memory._record_memory_history(enabled="all", max_entries=recorder._max_entries, **options)
        _has_history = True
    except Exception as fault:
        _tell(f"the history of allocations cannot be recorded: {str(fault).partition(chr(10))[0]}")


def _stop_history():
    global _has_history
    if _has_history:
        _has_history = False
        sys.modules["torch"].cuda.memory._record_memory_history(enabled=None)


def _when_started(torch, work):
    """Do `work` now if CUDA is started, otherwise as soon as it is. It must not raise: CUDA would not start."""
    if torch.cuda.is_initialized():
        work()
    else:
        # A child that is forked before has the same queue.
        torch.cuda._lazy_call(work)


def _place(path, environ) -> tuple[str, str]:
    """Where a recording goes, as (folder, name): a folder of its own, or the rank's in the folder of the run."""
    rank = environ.get("RANK", "")
    if not rank.isdigit():
        return path, f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    run = environ.get("TORCHELASTIC_RUN_ID", "none")
    # All ranks of a node have one launcher, so they agree without asking each other; the time tells runs apart.
    launcher, started = _launcher()
    if run == "none":
        run = environ.get("SLURM_JOB_ID") or str(launcher)
    started = time.strftime("%Y%m%d-%H%M%S", time.localtime(started))
    restarts = environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    again = f"-restart{restarts}" if restarts not in ("", "0") else ""
    return os.path.join(path, re.sub(r"[^\w.-]", "_", f"{started}-{run}{again}")), f"rank{rank}"


def _launcher() -> tuple[int, float]:
    """The process that launched the ranks and when it started, in seconds since the epoch.

    It is the nearest ancestor without `RANK` in its environment: a rank may have been started through other programs. Where
    that is not to be had it is the parent, and today's midnight.
    """
    pid = os.getppid()
    try:
        while pid > 1 and _has_rank(pid):
            pid = int(_stat(pid)[1])
        with open("/proc/stat", encoding="ascii") as file:
            booted = next(int(line.split()[1]) for line in file if line.startswith("btime "))
        return pid, booted + int(_stat(pid)[19]) / os.sysconf("SC_CLK_TCK")
    except (OSError, ValueError, StopIteration, IndexError):
        now = time.localtime()
        return os.getppid(), time.mktime((*now[:3], 0, 0, 0, 0, 0, -1))


def _has_rank(pid) -> bool:
    with open(f"/proc/{pid}/environ", "rb") as file:
        return any(variable.startswith(b"RANK=") for variable in file.read().split(b"\0"))


def _stat(pid) -> list[bytes]:
    """The fields of a process after its name, which is in parentheses and may have spaces: state, parent and so on."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def _index(device):
    """The index of a device, without asking CUDA: None stands for all."""
    if device is None or isinstance(device, int):
        return device
    match = re.fullmatch(r"cuda(?::(\d+))?", str(device))
    if match is None:
        raise ValueError(f"not a CUDA device: `{device}`")
    return int(match[1]) if match[1] else None


def _device_in(text, default):
    match = re.search(r"\bGPU (\d+)\b|\bcuda:(\d+)\b", text)
    return int(match[1] or match[2]) if match else default


def _tell(line):
    """A line on stderr. Nobody to tell is no reason to fail."""
    try:
        print(f"unhand: {line}", file=sys.stderr, flush=True)
    except Exception:
        pass
