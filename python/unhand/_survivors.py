"""Who holds blocks that should be gone: the births of a scope or a step, named as `unhand.report` names holders."""

import sys
from dataclasses import dataclass

from unhand import _blocks, _heap, _kinds, _reach, _see
from unhand._answer import Answer, fields
from unhand._holders import Holders, Part, parts_lines, parts_to_dict
from unhand._native import format_bytes

EXCUSED = ("workspace", "pending", "cache")
"""Kinds of blocks without a Python object for which nobody is to blame: they are for a library's next call, or about to go."""


@dataclass(frozen=True, slots=True)
class Leak(Answer):
    """A reference that keeps memory alive which was allocated inside."""

    path: str
    """The reference that names it best, as `unhand.report` writes it."""
    paths: tuple[str, ...]
    """All references that were found, the best first."""
    kind: str
    """What sort of reference it is, as docs/guides/holders.md lists them; `unattributed` where nothing in Python leads to it."""
    type: str
    """The type of the object that holds; empty where there is none."""
    bytes: int
    """Allocated bytes that were born inside and that it keeps."""
    n_storages: int
    """How many blocks those are."""
    device: int
    """The index of the device."""
    site: str | None
    """The line that allocated most of it, as `file.py:12 function()`; None where no stacks are recorded."""
    in_thread: bool | None
    """Whether the thread of the scope allocated it; None where that is not known, and another thread may have."""
    advice: str
    """What to do, in one sentence."""
    parts: tuple[Part, ...] = ()
    """What it consists of, the largest first, if more than one thing."""

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields."""
        plain = fields(self)
        return plain | {"paths": list(self.paths), "parts": parts_to_dict(self.parts)}

    def __str__(self):
        storages = "1 storage" if self.n_storages == 1 else f"{self.n_storages:,} storages"
        what = ", ".join(word for word in (self.type, storages) if word)
        lines = [f"{format_bytes(self.bytes):>10}  {self.kind:<16}  {self.path}  ({what})"]
        lines += [f"{'':30}also {path}" for path in self.paths[1:4]]
        if len(self.paths) > 4:
            lines.append(f"{'':30}and {len(self.paths) - 4} more")
        lines += parts_lines(self.parts)
        if self.site:
            lines.append(f"{'':30}allocated at {self.site}")
        lines.append(f"{'':30}{self.advice}")
        return "\n".join(lines)


@dataclass(frozen=True, slots=True)
class Found:
    """What became of some births."""

    leaks: tuple[Leak, ...] = ()
    """Who holds them, the largest first."""
    excused: tuple[Leak, ...] = ()
    """Of these nobody is to blame: workspaces, and what the exception on its way keeps."""
    kept_bytes: int = 0
    """Allocated bytes of those that were declared to be kept."""


def quick(births, things) -> Found | None:
    """The same as `find` where the things that may keep them explain all births; otherwise None, and the heap must be asked."""
    known = {(birth.device, birth.address) for birth in births}
    if known <= set(_reach.storages(things)):
        return Found(kept_bytes=sum(birth.bytes for birth in births))
    return None


def find(births, *, keep=(), storages=frozenset(), error=None, thread=None, skip=(), limit=20) -> Found:
    """Who holds births. A look at the whole heap: some tenths of a second.

    What can be reached from the objects in `keep` and the storages in `storages` (addresses of their StorageImpl) is
    meant to stay. `error` is an exception on its way, whose traceback keeps the locals of the calls it left. `thread` is the
    thread that is asked about, and `skip` are objects of the caller's whose references do not count.
    """
    with _see.looking:
        keep = tuple(keep)
        view = _heap.View([*keep, error], [keep, *skip])
        try:
            return _found(view, births, keep, storages, error, thread, limit)
        finally:
            view.close()


def unnamed(births) -> Found:
    """Births as they are, without a look at who holds them: one for each device, kind `unnamed`."""
    leaks = []
    for device in sorted({birth.device for birth in births}):
        blocks = [birth for birth in births if birth.device == device]
        n_bytes = sum(block.bytes for block in blocks)
        path = "not looked at this time"
        advice = "unhand.report() names all holders."
        leaks.append(Leak(path, (path,), "unnamed", "", n_bytes, len(blocks), device, _blocks.main_site(blocks), None, advice))
    return Found(tuple(leaks))


def _found(view, births, keep, storages, error, thread, limit) -> Found:
    alive = {birth.address: birth for birth in births if birth.address in view.blocks}
    kept = {address for address in _kept(view, keep, storages) if address in alive}
    excused_nodes = _reached(view, [error]) if error is not None else ()
    leaks, excused = [], []
    for device in sorted({birth.device for birth in alive.values()}):
        only = {address for address, birth in alive.items() if birth.device == device and address not in kept}
        for leak, nodes in _of_device(view, device, only, alive, thread, limit):
            is_on_its_way = error is not None and leak.kind in ("traceback", "native") and nodes
            if is_on_its_way and all(node in excused_nodes for node in nodes):
                leak = _of_error(leak, error)
                excused.append(leak)
            elif leak.kind in EXCUSED and not nodes:
                excused.append(leak)
            else:
                leaks.append(leak)
    order = sorted(leaks, key=lambda leak: -leak.bytes)
    excused.sort(key=lambda leak: -leak.bytes)
    return Found(tuple(order), tuple(excused), sum(alive[address].bytes for address in kept))


def _reached(view, things):
    """The nodes that objects lead to. Classes, modules and running frames have names of their own: it ends there."""
    starts = [node for node in map(view.heap.node, things) if node is not None]
    return view.graph.reachable(starts, list(set(view.anchors) - set(starts)))


def _kept(view, keep, storages) -> set:
    """The addresses of blocks that are meant to stay."""
    kept = {
        view.storages[cdata].block.address
        for cdata in storages
        if cdata in view.storages and view.storages[cdata].block is not None
    }
    if keep:
        reached = _reached(view, keep)
        kept |= {address for address, node in view.block_nodes.items() if node in reached}
        pools = {pool for pool, node in view.pool_owners().items() if node in reached}
        if pools:
            for segments in view.segments.values():
                kept |= {block.address for segment in segments if segment.pool in pools for block in segment.blocks}
    return kept


def _of_device(view, device, only, births, thread, limit):
    """The holders of some blocks on one device, with the nodes that each holds."""
    if not only:
        return
    explanation = _see.Explanation(view, device, lambda block: block.address in only)
    makers = Holders(view)
    for holding in explanation.held[:limit]:
        holder = makers.of(holding, device)
        blocks = [view.object(node) for node in holding[2]]
        yield _leak(holder, blocks, births, thread), holding[2]
    rest = explanation.held[limit:]
    if rest:
        blocks = [view.object(node) for holding in rest for node in holding[2]]
        path = f"{len(rest)} more holders"
        yield _plain(path, "more", "unhand.report() names them too.", device, blocks, births, thread), []
    if explanation.garbage:
        holder = explanation._garbage_holder()
        blocks = [view.object(node) for node in explanation.garbage]
        yield _leak(holder, blocks, births, thread), []
    groups: dict = {}
    for block in explanation.nameless:
        groups.setdefault(explanation.known.get(block.address), []).append(block)
    for known, blocks in groups.items():
        kind, path = known or ("unattributed", "no Python object leads to it")
        advice = _kinds.advice("native" if known is None else kind, path, 1, "", True)
        yield _plain(path, kind, advice, device, blocks, births, thread), []


def _leak(holder, blocks, births, thread) -> Leak:
    return Leak(
        path=holder.path,
        paths=holder.paths,
        kind=holder.kind,
        type=holder.type,
        bytes=sum(block.bytes for block in blocks),
        n_storages=len(blocks),
        device=holder.device,
        site=_blocks.main_site(blocks),
        in_thread=_in_thread(blocks, births, thread),
        advice=holder.advice,
        parts=holder.parts,
    )


def _plain(path, kind, advice, device, blocks, births, thread) -> Leak:
    n_bytes = sum(block.bytes for block in blocks)
    in_thread = _in_thread(blocks, births, thread)
    return Leak(path, (path,), kind, "", n_bytes, len(blocks), device, _blocks.main_site(blocks), in_thread, advice)


def _of_error(leak, error) -> Leak:
    """A leak that is none yet: the exception that is leaving keeps the locals of the calls it left."""
    mark = leak.path.find("at ")
    path = f"{type(error).__name__} on its way" + (f", {leak.path[mark:]}" if mark >= 0 else "")
    advice = "The traceback keeps the locals of the calls that failed until the exception is handled and forgotten."
    values = fields(leak)
    return Leak(**values | {"path": path, "paths": (path,), "kind": "traceback", "advice": advice})


def _in_thread(blocks, births, thread):
    told = {births[block.address].thread for block in blocks if block.address in births}
    if thread is None or None in told or not told:
        return None
    return told == {thread}


def storage_of(tensor):
    """A weak reference to the storage of a CUDA tensor (PyTorch's `StorageWeakRef`), or None."""
    torch = sys.modules["torch"]
    try:
        with torch._C.DisableTorchFunctionSubclass():
            if not tensor.is_cuda:
                return None
            from torch.multiprocessing.reductions import StorageWeakRef

            return StorageWeakRef(tensor.untyped_storage())
    except Exception:
        # Without a storage of its own, or freed.
        return None
