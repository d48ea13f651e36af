"""From holdings in the graph to holders a person can read: names, kinds, advice."""

import re
from dataclasses import dataclass

from unhand import _frames, _heap, _kinds, _names
from unhand._answer import Answer, fields
from unhand._native import format_bytes

_SAMPLES = 6
_ENDS = 8


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of what a holder holds."""

    path: str
    """What follows the holder's path."""
    type: str
    """The type of its object; empty where that says nothing."""
    bytes: int
    """Allocated bytes that this piece retains."""
    n_storages: int
    """How many blocks those are."""


@dataclass(frozen=True, slots=True)
class Holder(Answer):
    """A reference that keeps GPU memory alive, or several that share the same memory."""

    path: str
    """The reference that names it best, for example `__main__.trainer.history`."""
    paths: tuple[str, ...]
    """All references that were found, the best first. Memory goes back only when all of them are gone."""
    kind: str
    """What sort of reference it is, for example `traceback`; docs/guides/holders.md lists them."""
    type: str
    """The type of the object that holds, for example `list`; empty where there is none."""
    bytes: int
    """Allocated bytes that come free when the references are cut."""
    n_storages: int
    """How many blocks those are; 0 where one object was asked about."""
    device: int | None
    """The index of the device; None where one object was asked about."""
    is_alone: bool
    """Whether cutting the one reference `path` frees the bytes."""
    advice: str
    """What to do, in one sentence."""
    parts: tuple[Part, ...] = ()
    """What it consists of, the largest first, if more than one thing."""

    def to_dict(self) -> dict:
        """Plain values, with the names of the fields."""
        plain = fields(self)
        plain["paths"] = list(self.paths)
        plain["parts"] = parts_to_dict(self.parts)
        return plain

    def __str__(self):
        lines = [f"{format_bytes(self.bytes):>10}  {self.kind:<16}  {self.path}{_what(self)}"]
        lines += [f"{'':30}also {path}" for path in self.paths[1:6]]
        if len(self.paths) > 6:
            lines.append(f"{'':30}and {len(self.paths) - 6} more")
        lines += parts_lines(self.parts)
        lines.append(f"{'':30}{self.advice}")
        return "\n".join(lines)


def parts_to_dict(parts) -> list[dict]:
    """Parts as plain values, with the names of the fields."""
    return [fields(part) for part in parts]


def parts_lines(parts) -> list[str]:
    """The largest parts as text, a line each, to stand below their holder."""
    return [f"{'':30}{format_bytes(part.bytes):>10}  {part.path or part.type}  ({_count(part)})" for part in parts[:5]]


def _count(holder) -> str:
    return "1 storage" if holder.n_storages == 1 else f"{holder.n_storages:,} storages"


def _what(holder) -> str:
    words = ", ".join(word for word in (holder.type, _count(holder) if holder.n_storages else "") if word)
    return f"  ({words})" if words else ""


@dataclass(slots=True)
class _Reference:
    """One of the references to a holding, worked out."""

    names: list
    text: str
    kind: str
    type: str
    rank: tuple
    n_steps: int

    def texts(self) -> list[str]:
        """The text once for each name of the variable."""
        rest = self.text.removeprefix(self.names[0])
        return [name + rest for name in self.names]

    def order(self) -> tuple:
        """What to sort by: the reference that names best comes first."""
        return (*self.rank, self.n_steps, self.text)


class Holders:
    """Makes holders of the holdings of one view."""

    def __init__(self, view: "_heap.View"):
        self.view = view
        self.namer = _names.Namer(view)

    def of(self, holding, device) -> Holder:
        """The holder for one holding, as `HeapGraph.holdings` returns it."""
        owners, _, targets, n_bytes, parts = holding
        samples, ends = self._samples(targets), self._ends(targets, parts)
        children = [child for _, child in owners]
        to = {end: self.view.graph.paths_to(end, children) for end in dict.fromkeys([*samples, *ends])}
        found = []
        for index, (anchor, child) in enumerate(owners):
            whole = [(to[node][index], self.view.object(node).bytes) for node in samples if to[node][index] is not None]
            if whole:
                common = [to[node][index] for node in ends if to[node][index] is not None]
                found.append(self._reference(anchor, child, whole, common))
        if not found:
            # Every path was lost between two questions: the heap is one moment, the objects go on.
            anchor, child = owners[0]
            found = [self._reference(anchor, child, [([child], 0)], [])]
        found.sort(key=_Reference.order)
        best = found[0]
        texts = tuple(dict.fromkeys(text for reference in found for text in reference.texts()))
        is_alone = len(texts) == 1
        # What native code has besides is no help to somebody who has names to go by; that there is more is said.
        named = tuple(text for text in texts if not text.startswith("("))
        texts = named or texts
        name = to_name(texts[0])
        if best.kind == "optimizer state":
            name = name.removesuffix(".state")
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
            parts=self._parts(owners, parts, texts[0].removeprefix(best.names[0])) if len(owners) == 1 else (),
        )

    def name(self, node) -> tuple[str, str] | None:
        """The best reference to a node, as (path, kind); None where none is found."""
        _, references = self.references_to(node)
        if not references:
            return None
        best = min((reference for _, reference in references), key=_Reference.order)
        return best.text, best.kind

    def references_to(self, node) -> tuple[list, list]:
        """The owners of one node, and as (owner, reference) those to which a path was found."""
        held, _, _ = self.view.graph.holdings([(node, 1)])
        owners = held[0][0] if held else []
        paths = self.view.graph.paths_to(node, [child for _, child in owners])
        found = [(owner, path) for owner, path in zip(owners, paths) if path is not None]
        return owners, [(owner, self._reference(*owner, [(path, 1)], [])) for owner, path in found]

    def _samples(self, targets):
        """A few targets that stand for all, the largest: the paths to them decide the kind."""
        return sorted(targets, key=lambda node: -self.view.object(node).bytes)[:_SAMPLES]

    def _ends(self, targets, parts):
        """Nodes that stand for all targets: what the paths to them have in common leads to all."""
        if len(targets) == 1:
            return targets
        pieces = _pieces(parts)
        if pieces:
            return [part[0] for part in pieces[:_ENDS]]
        return targets[:: max(1, len(targets) // _ENDS)]

    def _reference(self, anchor, child, whole, ends) -> _Reference:
        """One reference: `whole` are paths to targets with their bytes, `ends` the paths that lead to all of them."""
        names = self.namer.starts(anchor, child)
        full = [self.namer.steps(anchor, path) for path, _ in whole]
        weights: dict[str, int] = {}
        for steps, (_, weight) in zip(full, whole):
            kind = _kinds.kind_of(self.view, anchor, child, names[0], steps)
            weights[kind] = weights.get(kind, 0) + weight
        kind = max(weights, key=weights.__getitem__)
        steps = full[0]
        if ends and (len(ends) > 1 or ends[0] != whole[0][0]):
            common, first = 0, ends[0]
            while all(len(path) > common and common < len(first) and path[common] == first[common] for path in ends):
                common += 1
            steps = self.namer.steps(anchor, first[:common])
        while steps and steps[-1].role == "module":
            # The dictionary inside of a module is no name.
            steps.pop()
        text = names[0] + "".join(step.label for step in steps)
        holding = steps[-1].target if steps else self.view.object(child)
        return _Reference(names, text, kind, _type_of(holding), self._rank(anchor, names[0], kind, full[0]), len(full[0]))

    def _rank(self, anchor, name, kind, steps):
        """How well a reference names what it holds; the smallest is the best."""
        owner = self.view.object(anchor) if anchor != _heap.ROOT else None
        if owner is None:
            where = 3
        elif isinstance(owner, _frames.Running):
            where = 0 if owner.is_this_thread else 2
        else:
            # Of a shown value, `Out[4]` says where it comes from; `_` and `_4` are the same.
            is_short = kind == "notebook history" and not name.startswith("__main__.Out")
            where = 0 if name.startswith("__main__.") and not is_short else 1
        # A module says what its parameters are for, an optimizer only lists them.
        is_key = any(step.role == "as key" for step in steps)
        is_listed = kind in ("parameters", "gradients") and not any(
            step.role in ("parameter", "buffer") for step in steps
        )
        return (where, is_key, _kinds.RANK.get(kind, 9), is_listed)

    def _parts(self, owners, parts, above) -> tuple[Part, ...]:
        """The pieces of a holding with one owner, by what follows the path that the holder has."""
        (anchor, child), = owners
        shown = []
        pieces = _pieces(parts)
        if len(pieces) < 2:
            return ()
        for node, _, n_bytes, n_targets in pieces:
            path, = self.view.graph.paths_to(node, [child])
            if path is None:
                continue
            text = "".join(step.label for step in self.namer.steps(anchor, path))
            text = text.removeprefix(above)
            shown.append(Part(text, _type_of(self.view.object(node)), n_bytes, n_targets))
        if len({part.path for part in shown}) < len(shown):
            # Names that do not tell them apart, as those of an optimizer's parameters, explain nothing.
            return ()
        return tuple(shown[:8])


def _pieces(parts) -> list:
    """The parts that a holding consists of: below the one object that leads to all of it, or the topmost ones."""
    tops = [index for index, part in enumerate(parts) if part[1] is None]
    below = [part for part in parts if part[1] == tops[0]] if len(tops) == 1 else []
    return below or [parts[index] for index in tops]


def to_name(path) -> str:
    """What to write in a call to name the holder: a variable, without the module it is in, as far as it can be typed."""
    if " local `" in path:
        return path.split(" local `", 1)[1].split("`", 1)[0]
    if path.startswith("("):
        return "it"
    name = path.removeprefix("__main__.")
    # Keys are quoted, and what is in quotes can be typed: `state['a b']`.
    for mark in re.finditer(_QUOTED_OR_NOT_TYPED, name):
        if mark["end"]:
            return name[: mark.start()] or "it"
    return name or "it"


_QUOTED_OR_NOT_TYPED = re.compile(r"""'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|(?P<end> |\[<|\[key|\[cached|\.<|\{…\}|…)""")


def _type_of(thing) -> str:
    if isinstance(thing, (_frames.Running, _heap.Storage)):
        return ""
    if type(thing).__module__ == "unhand._allocator":
        return ""
    return type.__dict__["__name__"].__get__(type(thing))
