"""From holdings in the graph to holders a person can read: names, kinds, advice."""

from dataclasses import dataclass

from unhand import _frames, _heap, _kinds, _names
from unhand._native import format_bytes

_REPRESENTATIVES = 4


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of what a holder holds."""

    path: str
    """What follows the holder's path."""
    type: str
    bytes: int
    """Allocated bytes that this piece retains."""
    n_storages: int


@dataclass(frozen=True, slots=True)
class Holder:
    """A reference that keeps GPU memory alive, or several that share the same memory."""

    path: str
    """The reference that names it best, for example `__main__.trainer.history`."""
    paths: tuple[str, ...]
    """All references that were found, the best first. Memory goes back only when all of them are gone."""
    kind: str
    type: str
    """The type of the object that holds, for example `list`."""
    bytes: int
    """Allocated bytes that come free when the references are cut."""
    n_storages: int
    device: int | None
    is_alone: bool
    """Whether cutting the one reference `path` frees the bytes."""
    advice: str
    parts: tuple[Part, ...] = ()

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields."""
        plain = {name: getattr(self, name) for name in self.__slots__}
        plain["paths"] = list(self.paths)
        plain["parts"] = [{name: getattr(part, name) for name in part.__slots__} for part in self.parts]
        return plain

    def __str__(self):
        lines = [f"{format_bytes(self.bytes):>10}  {self.kind:<16}  {self.path}{_what(self)}"]
        lines += [f"{'':30}also {path}" for path in self.paths[1:6]]
        if len(self.paths) > 6:
            lines.append(f"{'':30}and {len(self.paths) - 6} more")
        for part in self.parts[:5]:
            lines.append(f"{'':30}{format_bytes(part.bytes):>10}  {part.path or part.type}  ({_count(part)})")
        lines.append(f"{'':30}{self.advice}")
        return "\n".join(lines)


def _count(holder) -> str:
    return "1 storage" if holder.n_storages == 1 else f"{holder.n_storages:,} storages"


def _what(holder) -> str:
    return f"  ({holder.type}, {_count(holder)})" if holder.type else f"  ({_count(holder)})"


@dataclass(slots=True)
class _Reference:
    """One of the references to a holding, worked out."""

    names: list
    text: str
    kind: str
    type: str
    rank: tuple
    n_steps: int


class Holders:
    """Makes holders of the holdings of one view."""

    def __init__(self, view: "_heap.View"):
        self.view = view
        self.namer = _names.Namer(view)

    def of(self, holding, device) -> Holder:
        """The holder for one holding, as `HeapGraph.holdings` returns it."""
        owners, _, targets, n_bytes, parts = holding
        samples = self._samples(targets)
        paths = [self.view.graph.paths_to(target, [child for _, child in owners]) for target in samples]
        found = []
        for index, (anchor, child) in enumerate(owners):
            own = [to_target[index] for to_target in paths if to_target[index] is not None]
            if own:
                found.append(self._reference(anchor, child, own, len(targets) > 1))
        found.sort(key=lambda reference: (*reference.rank, reference.n_steps, reference.text))
        best = found[0]
        texts = [name + best.text.removeprefix(best.names[0]) for name in best.names]
        for other in found[1:]:
            texts += [name + other.text.removeprefix(other.names[0]) for name in other.names]
        texts = tuple(dict.fromkeys(texts))
        is_alone = len(texts) == 1
        name = _to_name(texts[0])
        return Holder(
            path=texts[0],
            paths=texts,
            kind=best.kind,
            type=best.type,
            bytes=n_bytes,
            n_storages=len(targets),
            device=device,
            is_alone=is_alone,
            advice=_kinds.advice(best.kind, texts[0], len(texts), name, is_alone),
            parts=self._parts(owners, parts) if len(owners) == 1 else (),
        )

    def name(self, node) -> tuple[str, str] | None:
        """The best reference to a node, as (path, kind); None where none is found."""
        held, _, _ = self.view.graph.holdings([(node, 1)])
        if not held:
            return None
        owners = held[0][0]
        paths = self.view.graph.paths_to(node, [child for _, child in owners])
        found = [
            self._reference(anchor, child, [path], False)
            for (anchor, child), path in zip(owners, paths)
            if path is not None
        ]
        if not found:
            return None
        best = min(found, key=lambda reference: (*reference.rank, reference.n_steps, reference.text))
        return best.text, best.kind

    def _samples(self, targets):
        """A few targets that stand for all, the largest first: it decides the kind."""
        ordered = sorted(targets, key=lambda node: -self.view.object(node).bytes)
        if len(targets) <= _REPRESENTATIVES:
            return ordered
        return list(dict.fromkeys([ordered[0], ordered[-1], targets[0], targets[-1]]))

    def _reference(self, anchor, child, paths, is_many) -> _Reference:
        full = self.namer.steps(anchor, paths[0])
        names = self.namer.starts(anchor, child)
        kind = _kinds.kind_of(self.view, anchor, child, names[0], full)
        steps = full
        if is_many:
            # What the paths have in common leads to what holds all of them.
            common = 0
            while all(len(path) > common + 1 and path[common] == paths[0][common] for path in paths):
                common += 1
            steps = self.namer.steps(anchor, paths[0][:common]) if common > 1 else []
            while steps and steps[-1].role == "module":
                # The dictionary inside of a module is no name.
                steps.pop()
        text = names[0] + "".join(step.label for step in steps)
        holding = steps[-1].target if steps else self.view.object(child)
        return _Reference(names, text, kind, _type_of(holding), self._rank(anchor, names[0], kind, full), len(full))

    def _rank(self, anchor, name, kind, steps):
        """How well a reference names what it holds; the smallest is the best."""
        if anchor == _heap.ROOT:
            where = 3
        elif name.startswith("__main__.") or isinstance(self.view.object(anchor), _frames.Running):
            where = 0
        else:
            where = 1
        # A module says what its parameters are for, an optimizer only lists them.
        is_listed = kind in ("parameters", "gradients") and not any(step.role in ("parameter", "buffer") for step in steps)
        return (where == 3, _kinds.RANK.get(kind, 9), where, is_listed)

    def _parts(self, owners, parts) -> tuple[Part, ...]:
        """The pieces of a holding with one owner, by what follows the path to the first of them."""
        (anchor, child), = owners
        shown = []
        tops = [index for index, part in enumerate(parts) if part[1] is None]
        inner = [part for part in parts if len(tops) > 1 and part[1] is None or len(tops) == 1 and part[1] == tops[0]]
        if len(inner) < 2:
            return ()
        for node, _, n_bytes, n_targets in inner:
            path, = self.view.graph.paths_to(node, [child])
            if path is None:
                continue
            text = "".join(step.label for step in self.namer.steps(anchor, path))
            shown.append(Part(text, _type_of(self.view.object(node)), n_bytes, n_targets))
        return tuple(shown[:8])


def _to_name(path) -> str:
    """What to write in a call to name the holder: a variable without the module it is in."""
    if " local `" in path:
        return path.split(" local `", 1)[1].split("`", 1)[0]
    return path.removeprefix("__main__.")


def _type_of(thing) -> str:
    if isinstance(thing, (_frames.Running, _heap.Storage)):
        return ""
    if type(thing).__module__ == "unhand._allocator":
        return ""
    return type.__dict__["__name__"].__get__(type(thing))
