"""Do ranks that hold the same thing hold the same bytes? The first detector of silent corruption.

Small tensors and values are compared at every save, large tensors in rotation. Each rank sends one digest for all that it
shares with the same ranks; only where these differ do names travel.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch

from tierckpt import _native
from tierckpt.format import canonical, shard
from tierckpt.format.canonical import JSON
from tierckpt.format.digest import CHUNK, derive
from tierckpt.format.layout import Layout
from tierckpt.format.layout_plan import ranges
from tierckpt.state.layout import Described, host
from tierckpt.state.naming import readable

if TYPE_CHECKING:
    from tierckpt.group import Group

#: Bytes of this rank's part of a tensor up to which it is compared at every save.
SMALL = 64 << 10
#: Saves over which the larger ones take turns.
TURNS = 16


class Replicas:
    """What the ranks of a layout hold in common."""

    def __init__(self, group: Group, layout: Layout) -> None:
        self._group, self._layout, self._turn = group, layout, -1
        self._selected: dict[int, dict[int, list[int]]] = {}
        self._partners = {number: self._sharing(number) for number in range(len(layout.cuts))}
        self._trees = [tree for tree in layout.trees if sum(b + 1 - a for a, b in tree.ranks) > 1]

    def _sharing(self, number: int) -> list[list[int]]:
        """The sets of ranks that hold the same boxes under a cut, when there are several in a set."""
        cut = self._layout.cuts[number]
        if cut.replicas == 1:
            return []
        found: dict[tuple[int, ...], list[int]] = {}
        for rank in cut.mesh:
            place = cut.mesh.coordinate(rank)
            assert place is not None
            found.setdefault(tuple(place[d] for d in cut.sharded), []).append(rank)
        return [sorted(ranks) for ranks in found.values()]

    def compare(self, described: Mapping[str, Described], values: Mapping[str, JSON], what: str) -> list[str]:
        """Compare what is due; a line for each thing that differs, naming it and the ranks. Collective."""
        self._turn = (self._turn + 1) % TURNS
        if not any(self._partners.values()) and not self._trees:
            return []
        names = self._due()
        told = self._group.vote(what, lambda: self._summary(names, described, values))
        summaries = [json.loads(summary) for summary in told]
        suspects = [number for number in names if self._differ(self._partners[number], summaries, str(number))]
        trees = [tree for tree in self._trees if self._differ([_members(tree.ranks)], summaries, "values")]
        if not suspects and not trees:
            return []
        listed = self._group.vote(what, lambda: self._list(suspects, bool(trees), names, described, values))
        return self._name([json.loads(listing) for listing in listed], suspects, bool(trees), names)

    def _due(self) -> dict[int, list[str]]:
        """By cut, the names of the tensors to compare in this turn."""
        found = self._selected.get(self._turn)
        layout = self._layout
        if found is None:
            found = self._selected[self._turn] = {}
            for i in range(len(layout)):
                number = layout.cut_number(i)
                if number is None or layout.alias(i) != i or not self._partners[number]:
                    continue
                shape = layout.shape(i)
                part = shard.dtype(layout.dtype(i)).size
                for n in shape:
                    part *= n
                part //= max(1, len(self._partners[number]))
                if 0 < part <= SMALL or i % TURNS == self._turn:
                    found.setdefault(number, []).append(i)
        return {number: [layout.name(i) for i in numbers] for number, numbers in found.items()}

    def _summary(
        self, names: Mapping[int, list[str]], described: Mapping[str, Described], values: Mapping[str, JSON]
    ) -> bytes:
        found: dict[str, str] = {}
        for number, wanted in names.items():
            tensors = [_held(described, name) for name in wanted]
            found[str(number)] = _digest([tensor for tensor in tensors if tensor is not None])
        if self._trees:
            found["values"] = _value_digest(list(values.items()))
        return json.dumps(found).encode()

    def _differ(self, sets: Sequence[Sequence[int]], summaries: Sequence[Mapping[str, str]], key: str) -> bool:
        return any(len({summaries[rank].get(key) for rank in ranks}) > 1 for ranks in sets)

    def _list(
        self,
        suspects: Sequence[int],
        with_values: bool,
        names: Mapping[int, list[str]],
        described: Mapping[str, Described],
        values: Mapping[str, JSON],
    ) -> bytes:
        found: dict[str, dict[str, str]] = {}
        for number in suspects:
            held = {name: _held(described, name) for name in names[number]}
            found[str(number)] = {name: _digest([t])[:16] for name, t in held.items() if t is not None}
        if with_values:
            found["values"] = {name: _value_digest([(name, value)])[:16] for name, value in values.items()}
        return json.dumps(found).encode()

    def _name(
        self,
        listings: Sequence[Mapping[str, Mapping[str, str]]],
        suspects: Sequence[int],
        with_values: bool,
        names: Mapping[int, list[str]],
    ) -> list[str]:
        lines = []
        for number in suspects:
            for ranks in self._partners[number]:
                for name in names[number]:
                    lines += _line(name, ranks, [listings[rank][str(number)].get(name) for rank in ranks])
        for tree in self._trees if with_values else ():
            ranks = _members(tree.ranks)
            for name in listings[ranks[0]]["values"]:
                lines += _line(name, ranks, [listings[rank]["values"].get(name) for rank in ranks])
        return lines


def _members(spans: Sequence[tuple[int, int]]) -> list[int]:
    return [rank for first, last in spans for rank in range(first, last + 1)]


def _line(name: str, ranks: Sequence[int], digests: Sequence[str | None]) -> list[str]:
    """One line if the digests differ: who holds the same as whom."""
    groups: dict[str | None, list[int]] = {}
    for rank, digest in zip(ranks, digests, strict=True):
        groups.setdefault(digest, []).append(rank)
    if len(groups) == 1:
        return []
    told = " | ".join(
        ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in ranges(members)) for members in groups.values()
    )
    return [f"{readable(name)}: ranks {told} hold different replicas"]


def _held(described: Mapping[str, Described], name: str) -> torch.Tensor | None:
    """This rank's piece of a tensor, None if it has no elements here."""
    found = described.get(name)
    return found.pieces[0][1] if found is not None and found.pieces else None


def _value_digest(items: Sequence[tuple[str, JSON]]) -> str:
    return derive("values", canonical.encode([list(item) for item in items])).hex()


def _digest(tensors: Sequence[torch.Tensor]) -> str:
    """A digest of the bytes of tensors, one after the other, in row-major order."""
    from blake3 import blake3

    hasher = blake3()
    keep = [host(tensor)[0] for tensor in tensors]
    columns = [array("q") for _ in range(6)]
    offsets, items, ndims, shapes, far, near = columns
    at = 0
    for tensor in keep:
        item = tensor.element_size()
        offsets.append(at)
        items.append(item)
        ndims.append(tensor.ndim)
        shapes.extend(tensor.shape)
        near.extend(item * n for n in tensor.stride())
        step, inner = item, []
        for n in reversed(tensor.shape):
            inner.append(step)
            step *= n
        far.extend(reversed(inner))
        at += tensor.numel() * item
    table = _native.CopyTable(*columns)
    pointers = array("Q", [tensor.data_ptr() for tensor in keep])
    window = bytearray(min(at, CHUNK))
    for lo in range(0, at, CHUNK):
        hi = min(lo + CHUNK, at)
        data = memoryview(window)[: hi - lo]
        table.gather(pointers, lo, hi, data)
        hasher.update(data)
    return hasher.hexdigest()
