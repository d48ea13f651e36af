"""`prefetch`: the next batches are copied to the device while the current one is used, with bounded memory and no thread."""

import collections
import collections.abc
import contextlib
import sys

from unhand import _fitting, _oom, _rows

# Below this the driver copies through a buffer of its own, and pinning would cost more.
_WORTH_PINNING_BYTES = 64 << 10


def prefetch(iterable, device=None, *, depth=2, limit_bytes=None, pin=True):
    """Go through batches, each on `device` when its turn comes, the next ones being copied meanwhile.

        for batch in unhand.prefetch(loader, depth=2):
            train(batch)

    A batch is a tensor or a dict, list or tuple of them (arrays of NumPy become tensors); whatever else is in it is
    passed on. At most `depth` batches wait on the device beside the one in use, and at most `limit_bytes` of them
    (requested bytes); a batch that is larger is copied when its turn comes. The source is asked for at most `depth`
    batches ahead, here, in the caller's thread.

    Copies run on a stream of their own, from pinned memory: what is not pinned is copied into such (`pin`), from
    PyTorch's cache of it. The batches lie in memory of the stream that is current when they are asked for; that stream
    waits for a batch's copy before the batch is given out. So they are ordinary tensors of that stream, no `record_stream`
    is needed, and their memory is used again for the next ones.

    Nothing here keeps a batch that was given out. When the source fails, the batches before are given out first. When
    memory runs out the batches that wait are fewer, and the error is raised only where one does not fit that is asked
    for. Leaving the loop, `close()`, or a `with` around it lets go of everything, and closes the source if it is a
    generator.

    Without `device`, the current CUDA device; without CUDA the batches are passed on as they are. `CaptureError` when a
    batch is asked for while the current stream captures a CUDA graph.
    """
    if not isinstance(depth, int) or depth < 0 or (limit_bytes is not None and limit_bytes < 0):
        raise ValueError(f"`depth` is a number of batches and `limit_bytes` of bytes: got {depth!r} and {limit_bytes!r}")
    return Prefetch(iterable, device, depth, limit_bytes, pin)


class Prefetch:
    """Batches on a device; an iterator that goes through its source once."""

    def __init__(self, iterable, device, depth, limit_bytes, pin):
        self._source = iter(iterable)
        self._length = len(iterable) if hasattr(type(iterable), "__len__") else None
        self._device = _cuda_device(device)
        self._plain_device = device if self._device is None else None
        self.depth = depth
        """How many batches wait on the device at most."""
        self._limit_bytes, self._pin = limit_bytes, pin
        # How many there is room for.
        self._room = _fitting.Size()
        self._waiting = collections.deque()
        self._stream = None
        # What the source raised, until its turn comes; StopIteration at its end.
        self._end = None

    def __iter__(self):
        return self

    def __len__(self):
        if self._length is None:
            raise TypeError("the source of this prefetch has no length")
        return self._length

    @property
    def waiting_bytes(self):
        """Requested bytes of the batches that wait on the device."""
        return sum(batch.device_bytes for batch in self._waiting if batch.event is not None)

    def __next__(self):
        if self._device is None:
            return self._passed_on()
        _fitting.refuse_capture()
        if not self._waiting:
            self._ask_source()
        if self._waiting:
            first = self._waiting.popleft()
            # Copies are started in order: where this one was not, none behind it was, and there is no more room to make.
            if first.event is None:
                first.copy(self)
            self._fill()
            return first.give_out(self)
        self._raise_end()

    def _passed_on(self):
        if self._source is None:
            raise StopIteration
        if self._plain_device is None:
            return next(self._source)
        return _rows.move(next(self._source), self._plain_device)

    def _fill(self):
        """Asks the source for more and starts copies, as far as depth and limit go."""
        while len(self._waiting) < self.depth and self._end is None:
            self._ask_source()
        outer = sys.exc_info()[1]
        n_ready = sum(batch.event is not None for batch in self._waiting)
        used_bytes = self.waiting_bytes
        room = self._room.choose(self.depth, 0)
        for batch in self._waiting:
            if batch.event is not None:
                continue
            used_bytes += batch.device_bytes
            if n_ready >= room or (self._limit_bytes is not None and used_bytes > self._limit_bytes):
                break
            try:
                batch.copy(self)
                n_ready += 1
            except Exception as error:
                if not _oom.is_out_of_memory(error):
                    raise
                # It waits on the host, and so do those that come after it.
                self._room.failed(n_ready + 1, 0, lambda n: n - 1)
                _oom.let_go(error, outer)
                return
        self._room.fits(n_ready)

    def _ask_source(self):
        if self._end is not None or self._source is None:
            return
        try:
            self._waiting.append(_Batch(next(self._source)))
        except BaseException as error:
            if not isinstance(error, Exception):
                raise
            self._end = error

    def _raise_end(self):
        end, self._end = self._end, StopIteration()
        self._source = None
        try:
            raise end if end is not None else StopIteration
        finally:
            # The traceback has this frame, and the frame would have the exception.
            del end

    def _current(self):
        return sys.modules["torch"].cuda.current_stream(self._device)

    def close(self):
        """Lets go of the batches that wait, and of the source."""
        while self._waiting:
            self._waiting.popleft().take_back()
        source, self._source, self._end = self._source, None, StopIteration()
        if hasattr(source, "close") and hasattr(source, "throw"):
            source.close()

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.close()

    def __del__(self):
        # While the interpreter ends, modules may be gone.
        if getattr(self, "_waiting", None) and not sys.is_finalizing():
            with contextlib.suppress(Exception):
                self.close()


class _Batch:
    """A batch on its way."""

    __slots__ = ("host", "device", "event", "stream", "device_bytes", "has_others")

    def __init__(self, host):
        # Arrays become tensors here, over the same memory.
        self.host = _changed(host, lambda tensor: tensor)
        self.device = self.event = self.stream = None
        self.device_bytes = sum(_bytes_of(tensor) for tensor in _rows.tensors_in(self.host) if not tensor.is_cuda)
        self.has_others = False

    def copy(self, owner):
        """Starts the copy. The memory is the current stream's, so the copying stream waits for what that did with it."""
        torch = sys.modules["torch"]
        current = owner._current()
        if owner._stream is None:
            owner._stream = torch.cuda.Stream(owner._device)
        side = owner._stream
        started = []

        def copied(tensor):
            if tensor.device == owner._device:
                return tensor
            if tensor.is_cuda or tensor.layout is not torch.strided or type(tensor) is not torch.Tensor:
                # From another GPU, or no plain memory: as PyTorch does it, when its turn comes.
                self.has_others = True
                return tensor
            if owner._pin and not tensor.is_pinned() and _bytes_of(tensor) >= _WORTH_PINNING_BYTES:
                tensor = tensor.pin_memory()
            target = torch.empty_like(tensor, device=owner._device)
            started.append((target, tensor))
            return target

        moved = _changed(self.host, copied, self._other)
        side.wait_stream(current)
        with torch.no_grad(), torch.cuda.stream(side):
            for target, tensor in started:
                # PyTorch notes on which stream a pinned block is read, and uses it again only after that.
                target.copy_(tensor, non_blocking=True)
            event = torch.cuda.Event()
            event.record(side)
        self.device, self.event, self.stream = moved, event, current

    def _other(self, thing):
        self.has_others = True
        return thing

    def give_out(self, owner):
        """The batch, for use on the stream that is current."""
        current = owner._current()
        current.wait_event(self.event)
        moved, self.device, self.host = self.device, None, None
        if current != self.stream:
            # Somebody has changed streams in the middle of the loop: the memory is another one's.
            for tensor in _rows.tensors_in(moved):
                if tensor.is_cuda:
                    tensor.record_stream(current)
        return _rows.move(moved, owner._device) if self.has_others else moved

    def take_back(self):
        """Forgets the copy. The memory is its stream's again when the copy is over, so that stream has to wait for it."""
        if self.event is not None:
            self.stream.wait_event(self.event)
            self.device = self.event = self.stream = None


def _changed(batch, function, other=lambda thing: thing):
    """A batch with other tensors; arrays of NumPy made tensors; `other` of what knows itself how to move."""
    if _rows.is_tensor(batch):
        return function(batch)
    if type(batch).__module__ == "numpy" and _rows.is_array(batch):
        return function(sys.modules["torch"].as_tensor(batch))
    if _rows.is_structure_of_things(batch):
        return _rows.map_members(batch, lambda value: _changed(value, function, other))
    return other(batch) if _rows.moves_itself(batch) else batch


def _bytes_of(tensor):
    return tensor.numel() * tensor.element_size()


def _cuda_device(device):
    """The CUDA device to copy to; `None` where it is another kind, or there is none."""
    torch = sys.modules.get("torch")
    if torch is None:
        if device is None:
            return None
        import torch
    if device is None:
        if not torch.cuda.is_available():
            return None
        return torch.device("cuda", torch.cuda.current_device())
    device = torch.device(device)
    if device.type != "cuda":
        return None
    return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
