"""`report` and `holders`: where every byte is, and who keeps it."""

import threading
from dataclasses import dataclass

from unhand import _allocator, _blocks, _heap, _kinds
from unhand._answer import Answer, fields
from unhand._holders import Holder, Holders, to_name
from unhand._native import format_bytes
from unhand._ladder import Ladder, ladder

looking = threading.Lock()
"""The turn of one look at the heap: two at once would see each other."""


@dataclass(frozen=True, slots=True)
class DeviceReport(Answer):
    """What one device's memory is, and who holds it."""

    ladder: Ladder
    """From the driver's figure down to what was asked for."""
    holders: tuple[Holder, ...]
    """By retained bytes, the largest first, as many as were asked for."""
    more_holders_bytes: int
    """Bytes of the holders beyond the limit."""
    named_bytes: int
    """Bytes of blocks that a holder explains, dead cycles and blocks that wait for another stream included."""
    garbage_bytes: int
    """Of the named bytes: those that only dead cycles refer to. The next pass of the collector frees them."""
    unattributed_bytes: int
    """Allocated bytes that no Python object reaches and no rule explains."""
    unattributed: tuple["Site", ...]
    """Where those were allocated, when the history of allocations is recorded."""

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields."""
        plain = fields(self)
        plain["ladder"] = self.ladder.to_dict()
        plain["holders"] = [holder.to_dict() for holder in self.holders]
        plain["unattributed"] = [fields(site) for site in self.unattributed]
        return plain

    def __str__(self):
        lines = [str(self.ladder)]
        if self.holders:
            lines.append("  held by")
            lines += [f"  {line}" for holder in self.holders for line in str(holder).splitlines()]
        if self.more_holders_bytes:
            lines.append(f"  {format_bytes(self.more_holders_bytes):>10}  in more holders")
        if self.unattributed_bytes:
            lines.append(f"  {format_bytes(self.unattributed_bytes):>10}  unattributed: no Python object leads to it")
            if _allocator.objects_are_frozen():
                lines.append(f"{'':14}gc.freeze() hides dead cycles: unhand.free() looks among the frozen objects")
            for site in self.unattributed:
                lines.append(f"{'':14}{format_bytes(site.bytes):>10}  {site.place}  ({_blocks.count(site.n_blocks)})")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Site:
    """A place that allocated blocks nobody in Python refers to."""

    place: str
    """The line, as `file.py:12 function()`."""
    bytes: int
    """Allocated bytes of those blocks."""
    n_blocks: int
    """How many there are."""


@dataclass(frozen=True, slots=True)
class Report(Answer):
    """The ladder and the holders of each device this process has a context on."""

    devices: tuple[DeviceReport, ...]
    """By index; empty where this process has not started CUDA through PyTorch."""

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields, and the version of their layout."""
        return {"schema_version": 1, "devices": [device.to_dict() for device in self.devices]}

    def __str__(self):
        if not self.devices:
            return "no GPU memory: this process has no CUDA context (torch is not imported, or was not asked for one)"
        return "\n\n".join(map(str, self.devices))

    def _repr_html_(self):
        from unhand import _html

        return _html.report_html(self)


def report(device=None, *, limit=20) -> Report:
    """Where every byte is and who holds it.

    `device` is an index, a name such as `"cuda:1"` or a `torch.device`; None stands for every device on which this
    process has a context; without any, the report is empty. At most `limit` holders are named for each. All sizes are in
    bytes. ValueError for a device that is no CUDA device. Nothing is changed and nothing kept: no peak counter, no
    context, no reference.
    """
    wanted = _allocator.devices()
    if device is not None and wanted:
        wanted = [index for index in wanted if index == _blocks.device_index(device)]
    return report_and(None, wanted, limit)


def report_and(look, wanted, limit) -> Report:
    """The report of some devices; `look` gets to see the same view, for another question about the same moment."""
    if not wanted:
        return Report(())
    with looking:
        view = _heap.View()
        try:
            if look is not None:
                look(view)
            return Report(tuple(_device_report(view, index, limit) for index in wanted))
        finally:
            view.close()


def _device_report(view, device, limit) -> DeviceReport:
    found = Explanation(view, device)
    holders = sorted(found.holders(limit), key=lambda holder: -holder.bytes)
    shown = tuple(holders[:limit])
    explained = sum(holder.bytes for holder in holders) + found.more_bytes
    return DeviceReport(
        ladder=ladder(device, owned={storage.address for storage in view.storages.values()}),
        holders=shown,
        more_holders_bytes=explained - sum(holder.bytes for holder in shown),
        # What a pool keeps is reserved and not allocated.
        named_bytes=explained - found.kept_by_pools_bytes,
        garbage_bytes=found.garbage_bytes,
        unattributed_bytes=found.unattributed_bytes,
        unattributed=found.sites(),
    )


class Explanation:
    """Who holds the blocks of one device, before it is put in words."""

    def __init__(self, view, device, wanted=lambda block: True):
        """`wanted` says of a block whether it is to be explained."""
        self.view, self.device = view, device
        weights = [
            (node, n_bytes)
            for node, n_bytes in view.weights()
            if view.block_device[view.object(node).address] == device and wanted(view.object(node))
        ]
        held, unheld, _ = view.graph.holdings(weights)
        self.held = sorted(_by_sort(view, held), key=lambda holding: -holding[3])
        self.garbage = unheld
        blocks = [block for address, block in view.blocks.items() if view.block_device[address] == device and wanted(block)]
        self.nameless = [block for block in blocks if block.address not in view.block_nodes]
        self.garbage_bytes = sum(view.object(node).bytes for node in unheld)
        self.more_bytes = 0
        self.kept_by_pools_bytes = 0
        self.known = _blocks.known(view, device, self.nameless)
        self.unattributed = [block for block in self.nameless if block.address not in self.known]
        self.unattributed_bytes = sum(block.bytes for block in self.unattributed)

    def holders(self, limit) -> list[Holder]:
        """The holders, the largest `limit` of those with a path worked out."""
        makers = Holders(self.view)
        found = [makers.of(holding, self.device) for holding in self.held[:limit]]
        self.more_bytes = sum(holding[3] for holding in self.held[limit:])
        return found + self._pool_holders(makers) + self.holders_without_names()

    def holders_without_names(self) -> list[Holder]:
        """Dead cycles, and what PyTorch and its libraries are known to keep."""
        found = [self._garbage_holder()] if self.garbage else []
        groups: dict[tuple[str, str], list] = {}
        for block in self.nameless:
            if block.address in self.known:
                groups.setdefault(self.known[block.address], []).append(block)
        return found + [self._plain_holder(kind, path, blocks) for (kind, path), blocks in groups.items()]

    def _pool_holders(self, makers) -> list[Holder]:
        """Private pools that keep free segments while their owner, a CUDA graph or a `MemPool`, lives."""
        free: dict[tuple, int] = {}
        for segment in self.view.segments[self.device]:
            if segment.pool != _allocator.DEFAULT_POOL:
                in_use = sum(block.bytes for block in segment.blocks if block.state != _allocator.INACTIVE)
                free[segment.pool] = free.get(segment.pool, 0) + segment.total_bytes - in_use
        shown = []
        for pool, node in self.view.pool_owners().items():
            n_bytes = free.get(pool, 0)
            if not n_bytes:
                continue
            path, _ = makers.name(node) or (f"pool {pool}", None)
            kind = type(self.view.object(node)).__name__
            name = path.removeprefix("__main__.")
            text = "Its pool keeps free memory while it lives: "
            text += f"unhand.free({name}) resets it." if "Graph" in kind else f"del {name} and what else refers to it."
            shown.append(Holder(path, (path,), "graph pool", kind, n_bytes, 0, self.device, True, text))
        self.kept_by_pools_bytes = sum(holder.bytes for holder in shown)
        return shown

    def _plain_holder(self, kind, path, blocks):
        return Holder(
            path=path,
            paths=(path,),
            kind=kind,
            type="",
            bytes=sum(block.bytes for block in blocks),
            n_storages=len(blocks),
            device=self.device,
            is_alone=True,
            advice=_kinds.advice(kind, path, 1, "", True),
        )

    def _garbage_holder(self):
        blocks = [self.view.object(node) for node in self.garbage]
        types = self._garbage_types()
        path = "a dead cycle" + (f" of {', '.join(types)}" if types else "")
        return self._plain_holder("dead cycle", path, blocks)

    def _garbage_types(self) -> list[str]:
        """The types of the objects that refer to garbage tensors, the nearest first."""
        seen, names = set(), []
        waiting = list(self.garbage)
        while waiting and len(names) < 4 and len(seen) < 10_000:
            node = waiting.pop(0)
            if node in seen:
                continue
            seen.add(node)
            if not self.view.is_added(node):
                name = type(self.view.object(node)).__name__
                if name not in ("dict", "tuple", "cell", "Tensor", "Parameter") and name not in names:
                    names.append(name)
            waiting.extend(self.view.graph.referrers(node))
        return names

    def sites(self) -> tuple[Site, ...]:
        """The places that allocated what is unattributed, the largest first."""
        groups: dict[str, list] = {}
        for block in self.unattributed:
            place = _blocks.site_of(block)
            if place is not None:
                groups.setdefault(place, []).append(block.bytes)
        sites = [Site(place, sum(sizes), len(sizes)) for place, sizes in groups.items()]
        return tuple(sorted(sites, key=lambda site: -site.bytes)[:5])


# A sort with less of a holding than this stays with the rest: one row says more than two then.
_APART = 0.05


def _by_sort(view, holdings):
    """The same holdings, with gradients and parameters apart from what else the same owners hold."""
    parameter = getattr(getattr(view.torch, "nn", None), "Parameter", ())
    sorts = {}
    for node, cdata in view.tensor_storages.items():
        block = view.storages[cdata].block
        if block is not None:
            if node in view.gradients:
                sorts[view.block_nodes[block.address]] = "gradient"
            elif issubclass(type(view.object(node)), parameter):
                sorts[view.block_nodes[block.address]] = "parameter"
    for holding in holdings:
        owners, more, targets, n_bytes, _ = holding
        groups: dict[str | None, list[int]] = {}
        for node in targets:
            groups.setdefault(sorts.get(node), []).append(node)
        sizes = {sort: sum(view.object(node).bytes for node in nodes) for sort, nodes in groups.items()}
        largest = max(sizes, key=sizes.__getitem__)
        for sort in list(groups):
            if sort != largest and sizes[sort] < _APART * n_bytes:
                groups[largest] += groups.pop(sort)
        if len(groups) == 1:
            yield holding
            continue
        for nodes in groups.values():
            yield owners, more, nodes, sum(view.object(node).bytes for node in nodes), []


def by_bytes(report) -> tuple[Holder, ...]:
    """The holders on all devices together, the largest first."""
    found = [holder for device in report.devices for holder in device.holders]
    return tuple(sorted(found, key=lambda holder: -holder.bytes))


@dataclass(frozen=True, slots=True)
class HolderList(Answer):
    """Who holds something: a sequence of holders."""

    of: str
    """What was asked about."""
    bytes: int | None
    """GPU bytes that are reachable from it; None where the question was about everything."""
    items: tuple[Holder, ...]
    """The holders, as many as were asked for."""

    def __len__(self):
        return len(self.items)

    def __getitem__(self, index):
        return self.items[index]

    def __iter__(self):
        return iter(self.items)

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields, and the version of their layout."""
        items = [holder.to_dict() for holder in self.items]
        return {"schema_version": 1, "of": self.of, "bytes": self.bytes, "items": items}

    def __str__(self):
        head = self.of + (f", {format_bytes(self.bytes)} on GPUs" if self.bytes is not None else "")
        if not self.items:
            return f"{head}: nothing holds it"
        return "\n".join([f"{head}, held by", *map(str, self.items)])

    def _repr_html_(self):
        from unhand import _html

        return _html.holders_html(self)


def holders(x=None, *, limit=20) -> HolderList:
    """Who holds `x`, or without it, who holds the GPU memory of this process.

    For an object (a tensor, a module, anything the collector tracks) there is one holder for each reference that
    keeps it alive, the shortest path first; `bytes` is what cutting that one reference frees on GPUs: 0 when another
    one holds it too. None asks about everything. TypeError for what Python does not track, such as a number. At most
    `limit` are returned. Nothing is changed and nothing kept.
    """
    if x is None:
        return HolderList("all GPU memory", None, by_bytes(report(limit=limit))[:limit])
    with looking:
        view = _heap.View([x])
        try:
            return _holders_of(view, x, limit)
        finally:
            view.close()


def _holders_of(view, x, limit) -> HolderList:
    name = type(x).__name__
    node = view.heap.node(x)
    if node is None:
        raise TypeError(f"Python does not track who refers to a {name}: ask about an object that contains it")
    closed = list(view.anchors)
    block_of = dict(view.weights())
    reached = view.graph.reachable([node], closed).list()
    n_bytes = sum(block_of.get(found, 0) for found in reached)
    owners, references = Holders(view).references_to(node)
    retained = _freed_by(view, [(found, block_of[found]) for found in reached if found in block_of])
    items = []
    for owner, reference in references:
        for text in reference.texts():
            frees = retained.get(owner, 0) if len(reference.names) == 1 else 0
            is_alone = len(owners) == 1 and len(reference.names) == 1
            advice = _kinds.advice(reference.kind, text, len(owners), to_name(text), is_alone)
            items.append((reference.n_steps, Holder(text, (text,), reference.kind, reference.type, frees, 0, None, is_alone, advice)))
    items.sort(key=lambda item: item[0])
    return HolderList(name, n_bytes, tuple(holder for _, holder in items[:limit]))


def _freed_by(view, weights):
    """What each owner holds alone, by owner."""
    _, _, retained = view.graph.holdings(weights)
    return {(anchor, child): n_bytes for anchor, child, n_bytes in retained}
