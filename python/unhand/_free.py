"""`free`: the memory of what the user names goes back to the driver, and what stays is named."""

import sys
import threading
import time
import types
from dataclasses import dataclass

from unhand import _actions, _allocator, _guard, _heap, _see
from unhand._answer import Answer, fields
from unhand._holders import Holder, Holders
from unhand._ladder import Ladder, ladders
from unhand._native import format_bytes
from unhand._targets import Targets
from unhand.errors import CaptureError, Error

_turn = threading.Lock()
"""One `free` at a time."""

_KEPT = 20
"""How many holders of what stays are named."""


@dataclass(frozen=True, slots=True)
class Freed(Answer):
    """What `free` did, and what it left."""

    returned_bytes: int
    """What the driver got back, over all devices: the difference of its own figure for free memory."""
    freed_bytes: int
    """Allocated bytes that were let go, over all devices (`torch.cuda.memory_allocated`); of a dry run, that would be."""
    n_storages: int
    """How many storages of the targets were released."""
    shared: tuple[Holder, ...]
    """Storages of the targets that were not touched, with who else needs them."""
    kept: tuple[Holder, ...]
    """Who holds what is still allocated, the largest first."""
    unattributed_bytes: int
    """Allocated bytes that stayed and that no Python object leads to, over all devices."""
    before: tuple[Ladder, ...]
    """The ladder of each device with a context, before anything was done."""
    after: tuple[Ladder, ...]
    """The same afterwards; of a dry run, the ladders before."""
    actions: tuple["_actions.Action", ...]
    """What was done, in order."""
    dry_run: bool
    """Whether nothing was done, only told."""
    seconds: float
    """How long it took, on the wall clock."""

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields, and the version of their layout."""
        plain = {"schema_version": 1, **fields(self)}
        for name in ("shared", "kept", "before", "after", "actions"):
            plain[name] = [item.to_dict() for item in getattr(self, name)]
        return plain

    def __str__(self):
        if self.dry_run:
            lines = [f"would free {format_bytes(self.freed_bytes)} in {_storages(self.n_storages)} (nothing was done)"]
        else:
            lines = [
                f"returned {format_bytes(self.returned_bytes)} to the driver; "
                f"{format_bytes(self.freed_bytes)} were let go, {_storages(self.n_storages)} of the targets"
            ]
            for before, after in zip(self.before, self.after):
                lines.append(f"  cuda:{before.device}  {_change(before, after)}")
        for action in self.actions:
            if action.error or action.freed_bytes or (action.count and action.name != "synchronize"):
                lines.append(f"  {action}")
        if self.shared:
            lines.append("  not touched, because somebody else needs it:")
            lines += [f"  {line}" for holder in self.shared[:8] for line in str(holder).splitlines()]
        if self.kept:
            lines.append("  still held by")
            lines += [f"  {line}" for holder in self.kept[:8] for line in str(holder).splitlines()]
        if self.unattributed_bytes:
            lines.append(f"  {format_bytes(self.unattributed_bytes):>10}  unattributed: no Python object leads to it")
        return "\n".join(lines)

    def _repr_html_(self):
        from unhand import _html

        return _html.freed_html(self)


def _storages(n) -> str:
    return "1 storage" if n == 1 else f"{n:,} storages"


def _change(before, after) -> str:
    words = []
    for word, name in (
        ("used on the device", "device_used_bytes"),
        ("reserved", "reserved_bytes"),
        ("allocated", "allocated_bytes"),
    ):
        old, new = getattr(before, name), getattr(after, name)
        if old is not None and new is not None:
            words.append(f"{word} {format_bytes(old)} -> {format_bytes(new)}")
    return ", ".join(words)


def free(*targets, keep=(), shared=False, compile_caches=False, notebook_history=False, dry_run=False) -> Freed:
    """Give the GPU memory of the targets back to the driver, whoever still refers to them.

    A target is a tensor, a module, an optimizer, a container, or any object with tensors on it: parameters, buffers,
    gradients, optimizer state, attributes and items are released, and the autograd graph that hangs on a tensor is
    dropped. A freed tensor keeps its shape and type; using its data raises `FreedError` (or a RuntimeError from C++
    that says the same), never a CUDA error. Give it new data through `tensor.data = …` to use it again.

    Memory that a tensor or a module outside of the targets shares is left alone and listed, unless `shared` is true.
    So is memory that a captured CUDA graph may use: name the graph as well. `keep` is an object, or a list of them, whose
    memory stays although it belongs to the targets too: `free(trainer, keep=model)` gives back what else the trainer has.

    Without targets it frees only what nobody meant to keep: the locals in tracebacks of exceptions that are over, dead
    cycles, workspaces, caches. That is done with targets too. `compile_caches` also resets `torch.compile`.
    `notebook_history` also drops what IPython keeps of shown values (`Out`, `_`): those that hold CUDA tensors, or with
    targets, only what was freed. With `dry_run` nothing is done, only told.

    Needs no GPU memory itself. All sizes of the answer are in bytes. Raises `CaptureError` while a CUDA graph is being
    captured, TypeError for a target that cannot hold a tensor, and `Error` where there are targets and PyTorch is not
    imported, or is a release that cannot guard a freed tensor. docs/guides/free.md has the whole story.
    """
    return run(
        targets,
        keep=keep,
        shared=shared,
        compile_caches=compile_caches,
        notebook_history=notebook_history,
        dry_run=dry_run,
    )


def run(
    targets,
    *,
    keep=(),
    without=(),
    spare=None,
    look=None,
    shared=False,
    compile_caches=False,
    notebook_history=False,
    dry_run=False,
) -> Freed:
    """The same, with two more ways to say what stays, and with a look at the heap afterwards.

    What can be reached only through the objects `without` does not belong to the targets. `spare` tells of a view which of
    its storages, by cdata, stay as if they had been named in `keep`. `look` gets the view that the answer is made of.
    """
    started = time.perf_counter()
    targets = tuple(target for target in targets if target is not None)
    keep = tuple(thing for thing in (keep if isinstance(keep, (list, tuple)) else [keep]) if thing is not None)
    with _turn:
        scene = _actions.scene()
        if scene.is_capturing:
            raise CaptureError("a CUDA graph is being captured: call unhand.free() before or after the capture")
        before = ladders()
        actions = []
        if not dry_run:
            actions.append(_actions.tracebacks())
            if notebook_history and not targets:
                actions.append(_actions.notebook_history())
            actions.append(_actions.collect())
            if compile_caches:
                actions.append(_actions.compile_caches(scene))
            actions.append(_actions.synchronize(scene))
        outcome = _release(targets, keep, without, spare, shared, dry_run, actions)
        if targets and notebook_history and not dry_run:
            actions.append(_actions.notebook_history(only_freed=True))
        del targets, keep, without
        if not dry_run:
            actions += _let_go([ladder.device for ladder in before])
        report = _see.report_and(look, _allocator.devices(), _KEPT)
        after = before if dry_run else tuple(device.ladder for device in report.devices)
    return Freed(
        returned_bytes=sum(_difference(old, new, "device_used_bytes") for old, new in zip(before, after)),
        freed_bytes=(
            outcome.n_bytes
            if dry_run
            else sum(_difference(old, new, "allocated_bytes") for old, new in zip(before, after))
        ),
        n_storages=outcome.n_storages,
        shared=outcome.shared,
        kept=_see.by_bytes(report)[:_KEPT],
        unattributed_bytes=sum(device.unattributed_bytes for device in report.devices),
        before=before,
        after=after,
        actions=tuple(actions),
        dry_run=dry_run,
        seconds=time.perf_counter() - started,
    )


def _difference(before, after, name) -> int:
    old, new = getattr(before, name), getattr(after, name)
    return max(0, old - new) if old is not None and new is not None else 0


def _let_go(devices) -> list:
    """Everything that gives memory back without anybody's name: in an order in which each makes the next worth it."""
    done = [_actions.collect()]
    # Once for all: to look for graphs is to go through all objects.
    scene = _actions.scene()
    done += [_actions.workspaces(scene), _actions.autocast_cache(scene)]
    done += [_actions.fft_plans(device, scene) for device in devices]
    done += [_actions.ipc(scene), _actions.pinned_host_cache(scene), _actions.empty_cache(scene)]
    return done


@dataclass(slots=True)
class _Outcome:
    n_storages: int = 0
    n_bytes: int = 0
    shared: tuple = ()


def _release(targets, keep, without, spare, shared, dry_run, actions) -> _Outcome:
    torch = sys.modules.get("torch")
    if torch is None:
        if targets:
            raise Error("torch is not imported in this process, so nothing here holds GPU memory of its")
        return _Outcome()
    if targets and not _guard.is_available(torch):
        raise Error(f"torch {torch.__version__} cannot guard a freed tensor; delete the references that unhand.holders() names")
    with _see.looking:
        view = _heap.View([*targets, *keep], [targets, keep, without])
        try:
            if not dry_run:
                stored = _stored_tracebacks(view)
                if stored:
                    view.close()
                    actions += [_actions.stored_tracebacks(stored), _actions.collect()]
                    view = _heap.View([*targets, *keep], [targets, keep, without])
            if not targets:
                return _Outcome()
            # A thing to keep may know the targets, as a callback knows its trainer, without their being part of it.
            spared = Targets(view, keep, targets).storages() if keep else set()
            if spare is not None:
                spared |= spare(view)
            asked = Targets(view, targets, without)
            found = asked.belongings(shared, spared)
            n_bytes = _bytes_of(view, found.storages) + found.graph_bytes
            outcome = _Outcome(len(found.storages), n_bytes, _shared_holders(view, found))
            if not dry_run:
                _reset_graphs(view, asked)
                _release_storages(torch, view, found)
            return outcome
        finally:
            view.close()


def _stored_tracebacks(view) -> list:
    """Tracebacks that lead to GPU memory, wherever the program stored them."""
    nodes = view.heap.instances([types.TracebackType])
    if not nodes:
        return []
    leads = view.graph.ancestors(list(view.block_nodes.values()))
    return [view.object(node) for node in nodes if node in leads]


def _bytes_of(view, storages) -> int:
    blocks = {view.storages[cdata].block.address for cdata in storages if view.storages[cdata].block is not None}
    return sum(view.blocks[address].bytes for address in blocks)


def _reset_graphs(view, asked):
    """Captured graphs among the targets go first: their pools cannot be given back while they live."""
    for node in asked.graphs_inside():
        try:
            view.object(node).reset()
        except Exception:
            # A graph that holds nothing.
            continue


def _release_storages(torch, view, found):
    """Release the storages, and leave their tensors in a state that says so."""
    with torch._C.DisableTorchFunctionSubclass():
        for node, tensor in found.tensors.items():
            owner = view.gradients.get(node)
            if owner is not None and view.tensor_storages[node] in found.storages:
                owner.grad = None
        for cdata in found.storages:
            storage = view.storages[cdata]
            wrapper = storage.wrapper()
            if wrapper is None:
                continue
            if not _guard.release(torch, wrapper, _message(storage)):
                _replace(torch, storage)
            del wrapper
        for cdata in found.over_the_same:
            storage = view.storages[cdata]
            wrapper = storage.wrapper()
            if wrapper is not None:
                _guard.forbid(torch, wrapper, _message(storage))
        for cdata in [*found.storages, *found.over_the_same]:
            for tensor in view.storages[cdata].tensors:
                _guard.mark(torch, tensor)
        for tensor in found.with_graph:
            _drop_graph(torch, tensor)


def _message(storage) -> str:
    return f"the memory of this tensor on cuda:{storage.device} was given back by unhand.free"


def _replace(torch, storage):
    """For memory that cannot be resized (from IPC, DLPack or C++): let go of it tensor by tensor.

    A tensor of the host without memory of its own takes the place: using it with CUDA tensors raises PyTorch's error
    for tensors on different devices.
    """
    for tensor in storage.tensors:
        try:
            tensor.data = torch.empty((), dtype=tensor.dtype).expand(tensor.shape)
        except RuntimeError:
            continue


def _drop_graph(torch, tensor):
    """Let go of the graph that made a tensor, with all that the graph saved."""
    if tensor.grad_fn is None:
        return
    try:
        tensor.detach_()
    except RuntimeError:
        # A view cannot be detached in place. Its insides can be exchanged with those of a detached one.
        try:
            torch.utils.swap_tensors(tensor, tensor.detach())
        except Exception:
            # Something else refers to it in C++: it stays, and `kept` names it.
            return


def _shared_holders(view, found) -> tuple[Holder, ...]:
    """Who else needs storages of the targets, gathered by reason and holder."""
    groups: dict[tuple, list[int]] = {}
    for cdata, reason, others in found.shared:
        groups.setdefault((reason, tuple(others[:1])), []).append(cdata)
    makers = Holders(view)
    shown = []
    for (reason, others), storages in groups.items():
        path, kind = reason, "native"
        if others:
            named = makers.name(others[0])
            if named is not None:
                path, kind = named
        shown.append(
            Holder(
                path=path,
                paths=(path,),
                kind=kind,
                type="",
                bytes=_bytes_of(view, storages),
                n_storages=len(storages),
                device=view.storages[storages[0]].device,
                is_alone=False,
                advice=f"Not touched: {reason}" + ("." if "graph" in reason else "; shared=True frees it all the same."),
            )
        )
    return tuple(sorted(shown, key=lambda holder: -holder.bytes))
