"""Which tensors belong to what the user named, and which of their storages somebody else needs too."""

import types
import weakref
from dataclasses import dataclass, field

from unhand import _allocator, _heap

# Behind these lies somebody else's: the namespace of a function, the instance of a method, a whole class.
_CLOSED = (
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    types.FrameType,
    types.TracebackType,
    types.CodeType,
    type,
    weakref.ref,
    weakref.ProxyType,
)


@dataclass(slots=True)
class Belongings:
    """What the targets consist of."""

    tensors: dict[int, object] = field(default_factory=dict)
    """Node to tensor."""
    storages: set[int] = field(default_factory=set)
    """The storages to release, by cdata."""
    with_graph: list = field(default_factory=list)
    """Tensors of the targets on which a graph hangs, on whatever device they are."""
    graph_bytes: int = 0
    """Allocated bytes that only those graphs keep."""
    over_the_same: list[int] = field(default_factory=list)
    """Other storages over the blocks of those, from DLPack for example."""
    shared: list[tuple[int, str, list[int]]] = field(default_factory=list)
    """Storages that somebody else needs: cdata, why, and the nodes of those who do."""


class Targets:
    """Asks a view what the targets own."""

    def __init__(self, view: "_heap.View", targets, without=()):
        self.view, self.torch = view, view.torch
        self.starts = [self._node(target) for target in targets]
        self._closed = {*view.anchors, *view.graph_nodes, *view.base_ways, *view.instances_of(*_CLOSED)}
        # What the targets use and do not own: nothing belongs to them because it can be reached from there.
        self._closed |= {view.heap.node(thing) for thing in without} - {None, *self.starts}
        self._optimizers = set(view.instances_of(self.torch.optim.Optimizer))
        self._modules = set(view.instances_of(self.torch.nn.Module))
        self._graphs = set(view.instances_of(self.torch.cuda.CUDAGraph))
        self.outside = view.graph.reachable([_heap.ROOT], self.starts)
        """What can be reached without going through a target."""
        self._named = view.graph.reachable([_heap.ROOT], [*self.starts, *view.graph_nodes])
        """The same, and without going through a graph of autograd: what somebody refers to by a name."""

    def _node(self, target):
        node = self.view.heap.node(target)
        if node is None:
            name = type(target).__name__
            raise TypeError(f"cannot free a {name}: name a tensor, a module, an optimizer, a container, or any object with tensors")
        return node

    def storages(self) -> set[int]:
        """All storages of the targets, by cdata, whoever else needs them."""
        inside = self._inside()
        storages = {cdata for node, cdata in self.view.tensor_storages.items() if node in inside}
        return storages | {cdata for _, cdata in self._bare_storages(inside)}

    def belongings(self, shared, spared=frozenset()) -> Belongings:
        """The tensors of the targets, and what may be released of them; with `shared` all of it.

        The storages `spared` are left out, with every tensor over their memory and the graphs that hang on those.
        """
        found = Belongings()
        inside = self._reached = self._inside()
        if spared:
            blocks = {self._block(cdata) for cdata in spared}
            inside -= {node for node, cdata in self.view.tensor_storages.items() if self._block(cdata) in blocks}
        for node in inside:
            if node in self.view.tensor_storages:
                found.tensors[node] = self.view.object(node)
        found.with_graph = [tensor for node, tensor in self.view.with_graph.items() if node in inside]
        owners = self._other_owners(inside)
        graphs = self._foreign_graphs(inside)
        of_storages: dict[int, list[int]] = {}
        for node in found.tensors:
            of_storages.setdefault(self.view.tensor_storages[node], []).append(node)
        for node, cdata in self._bare_storages(inside):
            if cdata not in spared:
                of_storages.setdefault(cdata, [])
        # By block and not by storage: what came through DLPack is another storage over the same memory.
        aliases: dict[int, list[int]] = {}
        blocks = {self._block(cdata) for cdata in of_storages}
        for node, cdata in self.view.tensor_storages.items():
            if self._block(cdata) in blocks and node not in found.tensors and node in self._named:
                aliases.setdefault(self._block(cdata), []).append(node)
        for cdata, nodes in of_storages.items():
            storage = self.view.storages[cdata]
            reason = None
            others: list[int] = []
            if graphs:
                # A graph replays with the addresses it saw: releasing one under it would be an error on the GPU.
                reason, others = "a CUDA graph may use its address; name the graph as well to free both", graphs
            elif shared:
                pass
            elif self._block(cdata) in aliases:
                reason, others = "another tensor shares its memory", aliases[self._block(cdata)]
            elif any(node in owners for node in nodes):
                reason = "another module has the same parameter"
                others = [owners[node] for node in nodes if node in owners]
            elif storage.block is not None and storage.block.address in self.view.foreign:
                reason, others = "an array of another library shares its memory", self.view.foreign[storage.block.address]
            elif self._unknown_aliases(storage):
                reason = "native code refers to it"
            if reason is None:
                found.storages.add(cdata)
            else:
                found.shared.append((cdata, reason, others))
        # Other storages over the same blocks lose their memory as well.
        released = {self._block(cdata) for cdata in found.storages}
        found.over_the_same = [
            cdata
            for cdata in self.view.storages
            if cdata not in found.storages and self._block(cdata) in released
        ]
        found.graph_bytes = self._graph_bytes(inside, found)
        return found

    def _graph_bytes(self, inside, found) -> int:
        """Bytes of blocks that hang on graphs of the targets, that nobody outside reaches, and that are no storage of theirs."""
        view = self.view
        starts = [node for node in view.with_graph if node in inside]
        if not starts:
            return 0
        own = {view.storages[cdata].address for cdata in found.storages}
        reached = set(view.graph.reachable(starts, list(view.anchors)).list())
        blocks = [view.object(node) for node in view.block_nodes.values() if node in reached and node not in self.outside]
        return sum(block.bytes for block in blocks if block.address not in own)

    def _block(self, cdata) -> int:
        """The address that says which memory a storage is over."""
        storage = self.view.storages[cdata]
        return storage.block.address if storage.block is not None else storage.address

    def graphs_inside(self) -> list[int]:
        """Captured CUDA graphs among the targets."""
        return [node for node in self._graphs if node in self._reached]

    def _inside(self) -> set[int]:
        view = self.view
        closed = self._closed | self._optimizers
        starts = [node for node in self.starts if node not in self._optimizers]
        # A module or a tensor refers to its trainer as well as to its parts. Other targets own what they refer to.
        parts = [node for node in starts if node in self._modules or node in view.tensor_storages]
        others = [node for node in starts if node not in parts]
        behind = closed | self._owners_of(parts)
        inside = set(view.graph.reachable(parts, list(behind - set(parts))).list())
        inside |= set(view.graph.reachable(others, list(closed - set(others))).list())
        for node in (inside | set(self.starts)) & self._optimizers:
            inside |= self._of_optimizer(view.object(node), closed, inside)
        inside -= self._keys_of_others(inside)
        for way in inside.intersection(view.base_ways):
            # A base that only its view keeps is a part of it; one that somebody else has is not.
            behind = set(view.graph.reachable([way], list(closed - {way})).list())
            if not any(node in self.outside for node in behind & view.tensor_storages.keys()):
                inside |= behind
        return inside

    def _keys_of_others(self, inside) -> set[int]:
        """Tensors that are only keys of a dictionary among the targets, such as `optimizer.state`, and their gradients."""
        view = self.view
        keys = set()
        for start in self.starts:
            thing = view.object(start)
            if isinstance(thing, dict):
                keys |= {view.heap.node(key) for key in list(dict.keys(thing))}
        keys = {node for node in keys if node in inside and node in self.outside and node in view.tensor_storages}
        owners = {id(view.object(node)) for node in keys}
        return keys | {node for node, owner in view.gradients.items() if id(owner) in owners}

    def _owners_of(self, starts) -> set[int]:
        """Objects that lead to modules and tensors of the targets, such as a trainer, but for the modules' own parts."""
        view = self.view
        parts = set()
        for node in starts:
            if node not in self._modules:
                continue
            for module in view.object(node).modules():
                names = vars(module)
                for thing in (module, names, names.get("_modules")):
                    part = view.heap.node(thing) if thing is not None else None
                    if part is not None:
                        parts.add(part)
        return set(view.graph.ancestors(starts).list()) - parts

    def _of_optimizer(self, optimizer, closed, inside) -> set[int]:
        """An optimizer's state, and its parameters where nobody else has them."""
        view = self.view
        names = dict(vars(optimizer))
        state, groups = names.pop("state", {}), names.pop("param_groups", [])
        starts = [view.heap.node(value) for value in [*names.values(), *state.values()]]
        owned = set(view.graph.reachable([node for node in starts if node is not None], list(closed)).list())
        parameters = [parameter for group in groups for parameter in group.get("params", ())]
        # References from the optimizer's other attributes to its own parameters do not make them its own.
        mine = {view.heap.node(parameter) for parameter in parameters}
        owned -= {node for node in mine if node in self.outside and node not in inside}
        alone = [node for node in mine if node is not None and node not in self.outside]
        return owned | set(view.graph.reachable(alone, list(closed)).list())

    def _bare_storages(self, inside):
        for node in inside:
            thing = self.view.object(node) if not self.view.is_added(node) else None
            if thing is not None and type(thing).__name__ in ("UntypedStorage", "TypedStorage"):
                cdata = _heap.read_cdata(thing)
                if cdata in self.view.storages:
                    yield node, cdata

    def _other_owners(self, inside) -> dict[int, int]:
        """Tensors of the targets that a module has which is neither part nor owner of them: node to that module."""
        view, found = self.view, {}
        for module in self._modules - inside:
            if module not in self.outside:
                continue
            names = vars(view.object(module))
            for group in ("_parameters", "_buffers"):
                for tensor in (names.get(group) or {}).values():
                    node = view.heap.node(tensor) if tensor is not None else None
                    if node in inside and node in view.tensor_storages:
                        found[node] = module
        wrappers = {}
        for node, module in list(found.items()):
            if module not in wrappers:
                below = view.graph.reachable([module], list(view.anchors))
                wrappers[module] = any(start in below for start in self.starts)
            if wrappers[module]:
                del found[node]
        return found

    def _foreign_graphs(self, inside) -> list[int]:
        """Captured CUDA graphs that are not among the targets."""
        alive = []
        for node in self._graphs - inside:
            try:
                self.view.object(node).pool()
            except Exception:
                # Not captured yet, or reset.
                continue
            if node in self.outside:
                alive.append(node)
        return alive

    def _unknown_aliases(self, storage) -> bool:
        """Whether more refer to a storage than tensors and wrappers that are known: DLPack, C++.

        Among frozen objects there may be some that cannot be seen, so the count says nothing then.
        """
        if _allocator.objects_are_frozen():
            return False
        count = getattr(self.torch._C, "_storage_Use_Count", None)
        return count is not None and count(storage.cdata) > storage.n_known_aliases
