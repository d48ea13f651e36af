"""The heap as unhand asks it: the captured graph, what native code holds beside it, and the GPU blocks at its ends."""

import bisect
import sys
from dataclasses import dataclass, field

from unhand import _allocator, _autograd, _frames, _native, _notebook

ROOT = 0


@dataclass(slots=True)
class Storage:
    """A storage of a CUDA tensor: the memory that a tensor and its views share."""

    cdata: int
    """The address of the StorageImpl: which storage it is."""
    address: int
    """Where its bytes are on the device."""
    device: int
    block: "_allocator.Block | None"
    """The allocator's block around it; None for memory that is not from PyTorch's allocator."""
    tensors: list = field(default_factory=list)
    """The tensors that look into it, as Python has them."""
    bare: object = None
    """The Python object of the storage itself, where there is one without a tensor."""
    n_known_aliases: int = 0
    """How many tensors and wrappers over it are accounted for, the saved ones of autograd included."""

    def wrapper(self):
        """The storage as Python's `UntypedStorage`; None if only native code has tensors over it."""
        for tensor in self.tensors:
            return tensor.untyped_storage()
        return getattr(self.bare, "_untyped_storage", self.bare)


class View:
    """Everything Python knows at one moment, as nodes and named edges, with one node a CUDA block.

    A view refers to every object in it. Keep it for as short a time as possible, and call `close()`.
    """

    def __init__(self, seeds=(), skip=()):
        self.frames = _frames.running()
        self.heap = _capture(self.frames, [*seeds, *skip], [*skip, seeds, self])
        self.torch = sys.modules.get("torch")
        self._kinds = [kind for kind, _ in self.heap.types()]
        self.names: dict[tuple[int, int], str] = {}
        """Labels of edges that were added, by (from, to)."""
        self.added: list = []
        """What each added node stands for, beginning with node `n_nodes`."""
        self.edges: list[tuple[int, int]] = []
        self.anchors: dict[int, str] = {}
        """Nodes with a name of their own, and the name."""
        self.shell: int | None = None
        """The node of IPython's shell, one of the anchors."""
        self.shown_values: int | None = None
        """The node of its `Out`, another one."""
        self.storages: dict[int, Storage] = {}
        self.blocks: dict[int, "_allocator.Block"] = {}
        """Address to block, of all blocks in use."""
        self.block_nodes: dict[int, int] = {}
        """Address of a block to its node."""
        self.storage_nodes: dict[int, int] = {}
        self.tensor_storages: dict[int, int] = {}
        """Node of a tensor to the cdata of its storage."""
        self.gradients: dict[int, object] = {}
        """Node of a gradient to the tensor it belongs to."""
        self.with_graph: dict[int, object] = {}
        """Node to tensor, of the tensors on which an autograd graph hangs, on whatever device."""
        self.base_ways: list[int] = []
        """The nodes between a view and its base."""
        self.graph_nodes: list[int] = []
        """The nodes of autograd's graph."""
        self.block_device: dict[int, int] = {}
        self.foreign: dict[int, list[int]] = {}
        """Address of a block to the arrays of other libraries that look into it."""
        self._own: dict[int, int] = {}
        self._find_blocks()
        self._name_modules()
        self._name_classes()
        self._name_shell()
        self._add_frames()
        if self.torch is not None:
            with self.torch._C.DisableTorchFunctionSubclass():
                self._add_tensors()
        self.graph = self.heap.graph(len(self.added), self.edges, list(self.anchors))

    def close(self):
        """Let go of every object."""
        self.__dict__.clear()

    # Nodes and edges

    def object(self, node):
        """What a node stands for: an object, or the description of an added node."""
        n_nodes = self.heap.n_nodes
        return self.added[node - n_nodes] if node >= n_nodes else self.heap.object(node)

    def is_added(self, node) -> bool:
        """Whether a node is no object that was captured."""
        return node >= self.heap.n_nodes

    def add(self, what) -> int:
        """Add a node for something that is no captured object."""
        self.added.append(what)
        return self.heap.n_nodes + len(self.added) - 1

    def link(self, start, end, label=None):
        """Add an edge, and what to call it."""
        self.edges.append((start, end))
        if label is not None:
            self.names.setdefault((start, end), label)

    def instances_of(self, *bases) -> list[int]:
        """The nodes of the objects whose class is one of these or inherits from one.

        Told by the class itself and not with `isinstance`, which may run code of the object's.
        """
        mro = type.__dict__["__mro__"].__get__
        return self.heap.instances([kind for kind in self._kinds if any(base in mro(kind) for base in bases)])

    def node(self, thing) -> int:
        """The node of an object; one is added for an object that appeared after the capture."""
        found = self.heap.node(thing)
        if found is None:
            found = self._own.get(id(thing))
        if found is None:
            # `added` keeps the object alive, so that its id stays its own.
            found = self._own[id(thing)] = self.add(thing)
        return found

    # Names

    def _name_modules(self):
        for name, module in list(sys.modules.items()):
            names = getattr(module, "__dict__", None)
            if type(names) is not dict:
                continue
            node = self.heap.node(names)
            if node is not None and node not in self.anchors:
                self.anchors[node] = name
                self.edges.append((ROOT, node))
            of_module = self.heap.node(module)
            if of_module is not None and of_module not in self.anchors:
                self.anchors[of_module] = name
                self.edges.append((ROOT, of_module))

    def _name_classes(self):
        modules, anchors, object_of = sys.modules, self.anchors, self.heap.object
        # There are ten thousands of classes.
        for node in self.instances_of(type):
            kind = object_of(node)
            try:
                module, name = kind.__module__, kind.__qualname__
                if "." in name:
                    found = modules[module]
                    for word in name.split("."):
                        found = found.__dict__[word]
                else:
                    found = modules[module].__dict__[name]
            except Exception:
                continue
            if found is kind:
                anchors[node] = f"{module}.{name}"
                self.edges.append((ROOT, node))

    def _name_shell(self):
        # A hundred ways lead to them: `exit`, `quit`, `get_ipython`, their classes, the kernel, the thread that writes the
        # history. One name is enough.
        shell = _notebook.running_shell()
        if shell is None:
            return
        self.shell = self._name("get_ipython()", shell)
        namespace = getattr(shell, "user_ns", None) or {}
        self.shown_values = self._name("__main__.Out", namespace.get("_oh"))

    def _name(self, name, thing):
        node = self.heap.node(thing) if thing is not None else None
        if node is not None:
            self.anchors[node] = name
            self.edges.append((ROOT, node))
        return node

    def _add_frames(self):
        for running in self.frames:
            node = None
            for name, value in running.values:
                target = self.heap.node(value)
                if target is None:
                    continue
                if node is None:
                    node = self.add(running)
                    self.anchors[node] = f"{running.place} {running.function}()"
                    self.edges.append((ROOT, node))
                self.link(node, target, name)

    # Memory

    def _find_blocks(self):
        self.segments: dict[int, list] = {}
        look = _allocator.snapshot()
        for device in _allocator.devices():
            self.segments[device] = look.segments(device) if look is not None else []
            for segment in self.segments[device]:
                for block in segment.blocks:
                    if block.state != _allocator.INACTIVE:
                        self.blocks[block.address] = block
                        self.block_device[block.address] = device
        self._starts = sorted(self.blocks)

    def block_at(self, address):
        """The block in use that an address is in, or None."""
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        block = self.blocks[self._starts[at]]
        return block if address < block.address + block.bytes else None

    def _add_tensors(self):
        torch = self.torch
        graphs = _autograd.Graph()
        known = self.instances_of(torch.Tensor)
        waiting = [(node, self.heap.object(node)) for node in known]
        seen = set(known)
        roots = []
        while waiting:
            node, tensor = waiting.pop()
            self._add_storage(node, tensor)
            gradient = _autograd.gradient(tensor)
            if gradient is not None:
                self._add_tensor(node, gradient, ".grad", seen, waiting)
                self.gradients[self.node(gradient)] = tensor
            base = _autograd.base(tensor)
            if base is not None:
                # Over a node of its own, so that the reference can be told from others to the same tensor.
                way = self.add("base of a view")
                self.base_ways.append(way)
                self.link(node, way, "._base")
                self._add_tensor(way, base, "", seen, waiting)
            for label, other in _components(tensor):
                self._add_tensor(node, other, label, seen, waiting)
            function = _autograd.grad_fn(tensor)
            if function is not None:
                roots.append((node, graphs.add(function)))
                self.with_graph[node] = tensor
        self._add_graphs(graphs, roots, seen)
        storages = self.instances_of(torch.UntypedStorage, torch.TypedStorage)
        self._add_foreign_arrays({*known, *storages})
        for node in storages:
            storage = self.heap.object(node)
            cdata = read_cdata(storage)
            if cdata in self.storages:
                self.storages[cdata].n_known_aliases += 1
                self._link_wrapper(node, cdata)
            elif cdata is not None:
                self._add_bare_storage(node, storage, cdata)

    def _add_tensor(self, owner, tensor, label, seen, waiting):
        node = self.node(tensor)
        self.link(owner, node, label)
        if node not in seen:
            seen.add(node)
            waiting.append((node, tensor))

    def _add_storage(self, node, tensor, is_python=True):
        """Note which storage a tensor looks into; nothing for one without memory on a GPU."""
        C = self.torch._C
        try:
            cdata = C._storage_address(tensor)
            storage = self.storages.get(cdata)
            if storage is None:
                address = C._data_address(tensor)
                if not address:
                    return
                block = self.block_at(address)
                if block is None and not tensor.is_cuda:
                    return
                storage = self._new_storage(cdata, address, block, tensor.device.index)
        except Exception:
            # No storage of its own (sparse, wrappers), or one that was freed: it holds no memory itself.
            return
        storage.n_known_aliases += 1
        if is_python:
            storage.tensors.append(tensor)
            self.tensor_storages[node] = cdata
        self.edges.append((node, self.storage_nodes[cdata]))

    def _new_storage(self, cdata, address, block, device) -> Storage:
        storage = self.storages[cdata] = Storage(cdata, address, device, block)
        node = self.storage_nodes[cdata] = self.add(storage)
        if block is not None:
            storage.device = self.block_device[block.address]
            self.edges.append((node, self._block_node(block)))
        return storage

    def _block_node(self, block) -> int:
        node = self.block_nodes.get(block.address)
        if node is None:
            node = self.block_nodes[block.address] = self.add(block)
        return node

    def _add_bare_storage(self, node, storage, cdata):
        """A storage that Python refers to without a tensor over it."""
        try:
            address = storage.data_ptr()
            if not address or storage.device.type != "cuda":
                return
            device = storage.device.index
        except Exception:
            return
        known = self._new_storage(cdata, address, self.block_at(address), device)
        known.bare = storage
        known.n_known_aliases += 1
        self._link_wrapper(node, cdata)

    def _add_foreign_arrays(self, ours):
        """Arrays of other libraries over PyTorch's memory, as far as they tell where they look."""
        mro = type.__dict__["__mro__"].__get__
        word = "__cuda_array_interface__"
        foreign = [kind for kind in self._kinds if any(word in base.__dict__ for base in mro(kind))]
        for node in self.heap.instances(foreign):
            if node in ours:
                continue
            try:
                address = getattr(self.heap.object(node), word)["data"][0]
            except Exception:
                continue
            block = self.block_at(address)
            if block is not None:
                self.edges.append((node, self._block_node(block)))
                self.foreign.setdefault(block.address, []).append(node)

    def _link_wrapper(self, node, cdata):
        """A storage and Python's object for it refer to each other: PyTorch keeps the object with the storage."""
        self.edges += [(node, self.storage_nodes[cdata]), (self.storage_nodes[cdata], node)]

    def _add_graphs(self, graphs, roots, seen):
        nodes = {key: self.node(step.function) for key, step in graphs.steps.items()}
        self.graph_nodes = list(nodes.values())
        for node, key in roots:
            self.link(node, nodes[key], ".grad_fn")
        for key, step in graphs.steps.items():
            node = nodes[key]
            for index, following in step.next:
                self.link(node, nodes[following], f".next_functions[{index}]")
            if step.wrapped is not None:
                self.link(node, nodes[step.wrapped], "._wrapped_node")
            if step.variable is not None:
                self.link(node, self.node(step.variable), ".variable")
            for name, saved in step.saved:
                self._add_saved(node, name, saved, seen)

    def _add_saved(self, node, name, saved, seen):
        target = self.node(saved)
        self.link(node, target, f".{name}")
        if isinstance(saved, self.torch.Tensor) and target not in seen:
            # A tensor that only autograd has: Python got to see it just now.
            seen.add(target)
            self._add_storage(target, saved, is_python=False)

    def pool_owners(self) -> dict[tuple[int, int], int]:
        """The private pools that a CUDA graph or a `MemPool` of Python's owns: pool to the node of its owner."""
        C = getattr(self.torch, "_C", None)
        bases = [base for base in (getattr(C, "_MemPool", None), getattr(C, "_CUDAGraph", None)) if base is not None]
        owners = {}
        for node in self.instances_of(*bases):
            owner = self.heap.object(node)
            try:
                owners[tuple(owner.id if hasattr(owner, "id") else owner.pool())] = node
            except Exception:
                # A graph that was not captured, or was reset.
                continue
        return owners

    def weights(self) -> list[tuple[int, int]]:
        """The CUDA blocks that something refers to, as (node, allocated bytes)."""
        return [(node, self.blocks[address].bytes) for address, node in self.block_nodes.items()]


def _capture(frames, seeds, skip):
    """The heap as it is but for what this package made to look at it."""
    seeds += [sys.modules, *sys.modules.values()]
    skip += [*_frames.own(), frames, seeds, skip]
    for running in frames:
        skip += [running, running.values, *running.values]
        seeds += [value for _, value in running.values]
    try:
        return _native.Heap(seeds, skip)
    finally:
        # They refer to frames of this package, which refer to them.
        skip.clear()
        seeds.clear()


def read_cdata(storage):
    """The address of the StorageImpl under a Python storage object, or None."""
    try:
        return getattr(storage, "_untyped_storage", storage)._cdata
    except Exception:
        return None


def _components(tensor):
    """The tensors that a tensor without memory of its own is made of, where they are not Python attributes."""
    try:
        layout = str(tensor.layout)
        if layout == "torch.strided":
            return ()
        if layout == "torch.sparse_coo":
            return (("._indices()", tensor._indices()), ("._values()", tensor._values()))
        if layout in ("torch.sparse_csr", "torch.sparse_bsr"):
            names = ("crow_indices", "col_indices", "values")
        elif layout in ("torch.sparse_csc", "torch.sparse_bsc"):
            names = ("ccol_indices", "row_indices", "values")
        else:
            return ()
        return [(f".{name}()", getattr(tensor, name)()) for name in names]
    except Exception:
        return ()
