"""Lets go of a storage under the tensors that look into it, so that each later use raises instead of failing on the GPU.

The memory goes back through `resize_(0)`, whoever refers to the storage: views, gradients, tensors that autograd saved,
C++. After that alone a tensor would read address 0 (`resize_bytes_cuda`, aten/src/ATen/native/cuda/Resize.cpp), so the
storage is told to raise when its data is asked for (`StorageImpl::release_data_and_set_meta_custom_data_ptr_error_msg_`,
c10/core/StorageImpl.h; PyTorch does the same for outputs of CUDA graphs that were overwritten).
"""

import sys
import weakref
from contextlib import contextmanager

from unhand.errors import FreedError

_MARK = "[freed by unhand] "
_classes: "weakref.WeakKeyDictionary[type, type]" = weakref.WeakKeyDictionary()


@contextmanager
def _alone():
    """Let no other Python thread in for a moment: between two calls of Python's a storage has no memory and no guard."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1_000_000)
    try:
        yield
    finally:
        sys.setswitchinterval(interval)


def is_available(torch) -> bool:
    """Whether this release of PyTorch can guard a storage."""
    return hasattr(torch._C, "_set_storage_data_ptr_access_error_msg")


def release(torch, storage, message) -> bool:
    """Give the memory of an `UntypedStorage` back to the allocator and guard it; False if it cannot be resized."""
    if not storage.resizable():
        return False
    with _alone():
        storage.resize_(0)
        torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, _MARK + message)
    return True


def forbid(torch, storage, message):
    """Guard a storage whose memory another storage gave back, so that its tensors raise as well."""
    torch._C._set_storage_data_ptr_access_error_msg(storage._cdata, _MARK + message)


def mark(torch, tensor):
    """Give a tensor whose storage was released a class that says so in its `repr` and raises `FreedError`.

    The class is a subclass of the tensor's own, so that `isinstance` still says what it said.
    """
    kind = type(tensor)
    if issubclass(kind, _freed_base(torch)):
        return
    try:
        tensor.__class__ = _freed_class(torch, kind)
    except TypeError:
        # A class of a shape that cannot be changed: the guard of the storage raises all the same.
        pass


def is_freed(torch, tensor) -> bool:
    """Whether a tensor was marked as freed, and was not given new data since."""
    return issubclass(type(tensor), _freed_base(torch)) and _is_empty(torch, tensor)


def _freed_class(torch, kind):
    made = _classes.get(kind)
    if made is None:
        try:
            made = type(kind)(f"Freed{kind.__name__}", (_freed_base(torch), kind), {"__module__": "unhand", "_kind": kind})
        except Exception as error:
            raise TypeError(str(error)) from error
        _classes[kind] = made
    return made


def _is_empty(torch, tensor) -> bool:
    with torch._C.DisableTorchFunctionSubclass():
        try:
            torch._C._data_address(tensor)
        except RuntimeError:
            return True
    return False


def _freed_base(torch):
    """The class that freed tensors share. Made once PyTorch is there, because importing unhand must not import it."""
    global _base
    if _base is not None:
        return _base

    data = torch.Tensor.data

    class Freed(torch.Tensor):
        """A tensor whose memory `unhand.free` gave back. Its shape and type are left; using its data raises."""

        def __repr__(self, **options):
            if not _is_empty(torch, self):
                with torch._C.DisableTorchFunctionSubclass():
                    return torch.Tensor.__repr__(self, **options)
            with torch._C.DisableTorchFunctionSubclass():
                shape, dtype, device = tuple(self.shape), self.dtype, self.device
            name = self._kind.__name__
            return f"<freed {name}: shape {shape}, {dtype}, its memory on {device} was given back by unhand.free>"

        __str__ = __repr__

        def __format__(self, specification):
            return format(repr(self), specification)

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            with torch._C.DisableTorchFunctionSubclass():
                try:
                    result = function(*args, **kwargs)
                except RuntimeError as error:
                    text = str(error)
                    if _MARK not in text and "setStorage" not in text:
                        raise
                    freed = next((arg for arg in _tensors(args, kwargs) if isinstance(arg, Freed)), None)
                    what = repr(freed) if freed is not None else text.removeprefix(_MARK)
                    raise FreedError(f"{what}: `{getattr(function, '__name__', function)}` cannot use its data") from None
            is_new_data = getattr(function, "__self__", None) is data and function.__name__ == "__set__"
            if is_new_data and not _is_empty(torch, args[0]):
                # It has memory again: it is what it was.
                args[0].__class__ = args[0]._kind
            return result

    _base = Freed
    return Freed


_base = None


def _tensors(args, kwargs):
    for thing in (*args, *kwargs.values()):
        if isinstance(thing, (list, tuple)):
            yield from _tensors(thing, {})
        else:
            yield thing
