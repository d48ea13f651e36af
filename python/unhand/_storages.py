"""Finding the CUDA storages that live Python tensors reach, and counting owners that nobody accounts for."""

import dataclasses
import gc
import sys
from typing import Any

# Array libraries whose objects can hold the address of a tensor that they were made from.
_FOREIGN_MODULES = ("cupy", "cupyx", "numba", "pycuda", "jax", "jaxlib", "tensorrt", "warp", "cudf", "rmm")


@dataclasses.dataclass(slots=True, eq=False)
class Storage:
    """One StorageImpl on a device, and the live Python tensors over it."""

    cdata: int
    address: int
    nbytes: int
    untyped: Any
    tensors: list
    # Owners of the storage and of the tensors over it that were found: Python objects, views, gradients, the
    # autograd graph. Compared with `n_owners` it tells whether native code holds on to the memory.
    n_known_aliases: int = 0
    n_owners: int = 0
    is_exported: bool = False


@dataclasses.dataclass(slots=True)
class Found:
    """What one walk over the Python objects found."""

    storages: list
    graphs: list
    streams: list

    def forget(self):
        """Lets go of everything that was found."""
        for storage in self.storages:
            storage.untyped = None
            storage.tensors.clear()
        for things in (self.storages, self.graphs, self.streams):
            things.clear()


def find(device):
    """All storages of a device, all captured CUDA graphs, all stream objects of the device."""
    return _Walk(device).found()


def storages(device):
    """All storages of a device that Python reaches."""
    return find(device).storages


class _Walk:
    def __init__(self, device):
        self.torch = sys.modules["torch"]
        self.device = device
        self.impls = {}  # address of a TensorImpl -> tensor
        self.explained = {}  # address of a TensorImpl -> owners of it that are known, beside Python
        self.untyped = {}  # address of a StorageImpl -> storage object
        self.tensors = {}  # address of a StorageImpl -> tensors
        self.nodes = set()
        self.foreign = []
        self.graphs = []
        self.streams = []

    def found(self):
        torch = self.torch
        # Attributes of tensor subclasses are read past their `__torch_function__`, which is somebody else's code.
        with torch._C.DisableTorchFunctionSubclass():
            pending, nodes = self._roots()
            self._walk(pending, nodes)
            result = [storage for cdata in self.untyped if (storage := self._storage(cdata)) is not None]
        exported = {id(tensor) for thing in self.foreign for tensor in gc.get_referents(thing)}
        for storage in result:
            storage.is_exported = any(id(tensor) in exported for tensor in storage.tensors)
        return Found(result, self.graphs, self.streams)

    def _roots(self):
        kinds = {}
        tensors, nodes = [], []
        lists = {
            "tensor": tensors,
            "node": nodes,
            "storage": [],
            "foreign": self.foreign,
            "graph": [],
            "stream": [],
        }
        # By type and not by isinstance, which asks `__class__` and wakes lazy proxies.
        for thing in gc.get_objects():
            kind = type(thing)
            name = kinds.get(kind)
            if name is None:
                name = kinds[kind] = self._kind(kind)
            if name:
                lists[name].append(thing)
        for storage in lists["storage"]:
            untyped = getattr(storage, "_untyped_storage", storage)
            if untyped.device.type == "cuda" and untyped.device.index == self.device:
                self.untyped.setdefault(untyped._cdata, untyped)
        self.graphs = [graph for graph in lists["graph"] if _is_captured(graph)]
        self.streams = [stream for stream in lists["stream"] if _index(stream) == self.device]
        return tensors, nodes

    def _kind(self, kind):
        torch = self.torch
        if issubclass(kind, torch.Tensor):
            return "tensor"
        if issubclass(kind, (torch.UntypedStorage, torch.storage.TypedStorage)):
            return "storage"
        if issubclass(kind, torch.cuda.CUDAGraph):
            return "graph"
        if issubclass(kind, torch.cuda.Stream):
            return "stream"
        module = getattr(kind, "__module__", None)
        if isinstance(module, str) and module.split(".", 1)[0] in _FOREIGN_MODULES:
            return "foreign"
        slots = kind.__dict__
        if ("next_functions" in slots and "name" in slots) or issubclass(kind, torch._C._FunctionBase):
            return "node"
        return ""

    def _walk(self, tensors, nodes):
        tensor_base = self.torch._C.TensorBase
        while tensors or nodes:
            while tensors:
                tensor = tensors.pop()
                try:
                    impl = tensor._cdata
                except (RuntimeError, AttributeError, ReferenceError):
                    continue
                if impl in self.impls:
                    continue
                self.impls[impl] = tensor
                self._note(tensor)
                for name in ("_base", "grad", "grad_fn"):
                    try:
                        if name == "grad" and not tensor_base.is_leaf.__get__(tensor):
                            # `.grad` of another tensor warns, and is there only after retain_grad().
                            if not tensor_base.retains_grad.__get__(tensor):
                                continue
                        other = getattr(tensor_base, name).__get__(tensor)
                    except RuntimeError:
                        continue
                    if other is None:
                        continue
                    if name == "grad_fn":
                        nodes.append(other)
                    else:
                        self._explain(other)
                        tensors.append(other)
            while nodes:
                self._visit(nodes.pop(), tensors, nodes)

    def _note(self, tensor):
        if tensor.device.type != "cuda" or tensor.device.index != self.device:
            return
        try:
            untyped = tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            return  # Sparse tensors and wrappers have no storage; what they are made of is found by itself.
        if untyped.device.type != "cuda":
            return
        self.untyped.setdefault(untyped._cdata, untyped)
        self.tensors.setdefault(untyped._cdata, []).append(tensor)

    def _explain(self, tensor):
        impl = tensor._cdata
        self.explained[impl] = self.explained.get(impl, 0) + 1

    def _visit(self, node, tensors, nodes):
        if node in self.nodes:
            return
        self.nodes.add(node)
        try:
            nodes.extend(after for after, _ in node.next_functions if after is not None)
        except (RuntimeError, AttributeError):
            pass
        variable = getattr(node, "variable", None)
        if isinstance(variable, self.torch.Tensor):
            self._explain(variable)
            tensors.append(variable)
        for name in _saved_names(type(node)):
            try:
                saved = getattr(node, name)
            except RuntimeError:
                continue  # Released by backward().
            for one in saved if isinstance(saved, (tuple, list)) else (saved,):
                try:
                    data = one.data
                except (RuntimeError, AttributeError):
                    continue
                if isinstance(data, self.torch.Tensor):
                    self._explain(data)
                    tensors.append(data)

    def _storage(self, cdata):
        untyped = self.untyped[cdata]
        try:
            address, nbytes = untyped.data_ptr(), untyped.nbytes()
        except RuntimeError:
            return None  # Freed on purpose: every access raises.
        if not nbytes or not address:
            return None
        tensors = self.tensors.get(cdata, [])
        storage = Storage(cdata, address, nbytes, untyped, tensors)
        count = getattr(self.torch._C, "_storage_Use_Count", None)
        storage.n_owners = count(cdata) if count else 1 + len(tensors)
        storage.n_known_aliases = 1 + len(tensors)
        for tensor in tensors:
            use_count = getattr(tensor, "_use_count", None)
            if use_count is None:
                continue
            known = 1 + self.explained.get(tensor._cdata, 0)
            # More known than there are (a saved tensor shares its slot) must not make up for another's unknown ones.
            storage.n_owners += max(use_count(), known)
            storage.n_known_aliases += known
        return storage


def _is_captured(graph):
    try:
        graph.pool()
    except RuntimeError:
        return False  # Not captured yet, or reset: no address is baked in.
    return True


def _index(stream):
    device = getattr(stream, "device", None)
    return getattr(device, "index", None)


_SAVED_NAMES = {}


def _saved_names(kind):
    names = _SAVED_NAMES.get(kind)
    if names is None:
        names = _SAVED_NAMES[kind] = tuple(name for name in dir(kind) if name.startswith("_raw_saved_"))
    return names
