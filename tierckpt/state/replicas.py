"""Do ranks that hold the same thing hold the same bytes? The first detector of silent corruption.

Small tensors and values are compared at every save, large tensors in rotation. Each rank sends one digest for all that it
shares with the same ranks; only where these differ do names travel. Who holds the same follows from the cuts of the layout.
Of listed pieces a layout knows only who writes them, so of these the ranks tell one another once what they hold.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import TYPE_CHECKING, NamedTuple, cast

import torch
from blake3 import blake3

from tierckpt.format import canonical, shard
from tierckpt.format.boxes import Box, whole
from tierckpt.format.canonical import JSON
from tierckpt.format.digest import CHUNK, derive
from tierckpt.format.layout import Layout
from tierckpt.format.layout_plan import ranges
from tierckpt.state.description import Description
from tierckpt.state.layout import Described, host
from tierckpt.state.naming import readable
from tierckpt.tiers.rows import Rows

if TYPE_CHECKING:
    from tierckpt.group import Group

#: Bytes of this rank's part of a tensor up to which it is compared at every save.
SMALL = 64 << 10
#: Saves over which the larger ones take turns.
TURNS = 16


class Shared(NamedTuple):
    """Pieces that several ranks hold.

    Attributes:
        sets: of ranks; those of one set hold the same.
        held: for each set that this rank is in, its number, and (name, box) of the pieces. Where the layout has a cut, the
            box is None: it is the only piece of the tensor here.
    """

    sets: list[list[int]]
    held: dict[int, list[tuple[str, Box | None]]]


class Sample:
    """What one rank holds of what is to be compared, as it was when it saved.

    Args:
        turn: which of the large tensors take part.
        held: by the number of the set of ranks that hold the same, the pieces that take part.
        values: encoded, if they are to be compared.
    """

    def __init__(
        self, turn: int, held: Mapping[int, Sequence[tuple[str, torch.Tensor]]], values: Mapping[str, JSON] | None
    ) -> None:
        self.turn, self._held, self._values = turn, held, values
        self._kept: dict[int, bytearray] = {}  # by id: bytes of the small ones
        self._digests: dict[int, str] = {}

    def take(self, chosen: Callable[[str], bool] = lambda name: True) -> None:
        """Look at those of the tensors that are ``chosen`` and were not looked at before."""
        for held in self._held.values():
            for name, tensor in held:
                if id(tensor) in self._kept or id(tensor) in self._digests or not chosen(name):
                    continue
                if tensor.nbytes <= SMALL:
                    # Hashing each by itself would take longer than keeping them until all have compared the sum.
                    self._kept[id(tensor)] = _bytes(tensor)
                else:
                    self._digests[id(tensor)] = _digest(tensor)

    def summary(self) -> JSON:
        """What ranks tell each other: the turn, for each set one digest of all that it shares, and one of the values."""
        self.take()
        found: dict[str, JSON] = {}
        for number, held in self._held.items():
            hasher = blake3()
            for _, tensor in held:
                hasher.update(self._kept.get(id(tensor)) or self._digests[id(tensor)].encode())
            found[str(number)] = hasher.hexdigest()
        if self._values is not None:
            found["values"] = _value_digest(list(self._values.items()))
        return [self.turn, found]

    def listing(self, suspects: Sequence[int], *, with_values: bool) -> bytes:
        """The digest of each tensor of the sets ``suspects``, and of each value."""
        found: dict[str, dict[str, str]] = {}
        for number in suspects:
            each = found[str(number)] = {}
            for name, tensor in self._held.get(number, ()):
                kept = self._kept.get(id(tensor))
                digest = self._digests[id(tensor)] if kept is None else blake3(kept).hexdigest()
                each[name] = each.get(name, "") + digest[:16]
        if with_values:
            values = self._values or {}
            found["values"] = {name: _value_digest([(name, value)])[:16] for name, value in values.items()}
        return json.dumps(found).encode()


class Replicas:
    """What the ranks of a layout hold in common.

    Args:
        said: what groups of ranks hold, and these groups.
    """

    def __init__(self, layout: Layout, rank: int, said: Sequence[tuple[Description, Sequence[int]]]) -> None:
        self._layout = layout
        self._selected: dict[int, dict[int, list[tuple[str, Box | None]]]] = {}
        self._shared = _shared(layout, rank, said)
        self._trees = [tree for tree in layout.trees if sum(b + 1 - a for a, b in tree.ranks) > 1]

    def sample(self, turn: int, described: Mapping[str, Described], values: Mapping[str, JSON]) -> Sample | None:
        """What this rank is to compare in this save; None if no ranks have anything in common."""
        if not self._shared.sets and not self._trees:
            return None
        held = {
            number: [(name, tensor) for name, box in wanted for tensor in _pieces(described, name, box)]
            for number, wanted in self._due(turn % TURNS).items()
        }
        return Sample(turn % TURNS, held, values if self._trees else None)

    def compare(self, group: Group, what: str, mine: Sample | None, told: Sequence[JSON]) -> list[str]:
        """A line for each thing that differs, naming it and the ranks. Collective if anything does.

        Args:
            told: every rank's `Sample.summary`; None from those that changed. Then nothing is compared.
        """
        if mine is None or any(each is None for each in told):
            return []
        turns, summaries = zip(*[cast("tuple[int, dict[str, str]]", each) for each in told], strict=True)
        if len(set(turns)) > 1:
            return []
        suspects = [number for number, ranks in enumerate(self._shared.sets) if _differ(ranks, summaries, str(number))]
        trees = [tree for tree in self._trees if _differ(_members(tree.ranks), summaries, "values")]
        if not suspects and not trees:
            return []
        listed = group.vote(what, lambda: mine.listing(suspects, with_values=bool(trees)))
        return self._lines([json.loads(listing) for listing in listed], suspects, with_values=bool(trees))

    def _due(self, turn: int) -> dict[int, list[tuple[str, Box | None]]]:
        """By set, the pieces to compare in this turn."""
        found = self._selected.get(turn)
        if found is None:
            layout, numbers = self._layout, self._layout.numbers
            found = self._selected[turn] = {}
            for number, held in self._shared.held.items():
                for name, box in held:
                    i = numbers[name]
                    size = shard.dtype(layout.dtype(i)).size
                    # The largest box of a cut, so that all ranks decide alike.
                    part = prod(layout.shape(i)) * size if box is None else prod(box.size) * size
                    cut = layout.cut(i)
                    if cut is not None:
                        part = part * cut.replicas // cut.mesh.size
                    if 0 < part <= SMALL or i % TURNS == turn:
                        found.setdefault(number, []).append((name, box))
        return found

    def _lines(
        self, listings: Sequence[Mapping[str, Mapping[str, str]]], suspects: Sequence[int], *, with_values: bool
    ) -> list[str]:
        lines = []
        for number in suspects:
            ranks = self._shared.sets[number]
            for name in listings[ranks[0]][str(number)]:
                lines += _line(name, ranks, [listings[rank][str(number)].get(name) for rank in ranks])
        for tree in self._trees if with_values else ():
            ranks = _members(tree.ranks)
            for name in listings[ranks[0]]["values"]:
                lines += _line(name, ranks, [listings[rank]["values"].get(name) for rank in ranks])
        return lines


def _shared(layout: Layout, rank: int, said: Sequence[tuple[Description, Sequence[int]]]) -> Shared:
    """The sets are the same on all ranks, in the same order."""
    sets: dict[tuple[int, ...], int] = {}
    held: dict[int, list[tuple[str, Box | None]]] = {}
    of_cut: dict[int, list[tuple[int, ...]]] = {}
    for number, cut in enumerate(layout.cuts):
        alike: dict[tuple[int, ...], list[int]] = {}
        for member in cut.mesh if cut.replicas > 1 else ():
            place = cut.mesh.coordinate(member)
            assert place is not None
            alike.setdefault(tuple(place[d] for d in cut.sharded), []).append(member)
        of_cut[number] = [tuple(sorted(ranks)) for ranks in alike.values()]
        for same in of_cut[number]:
            sets.setdefault(same, len(sets))
    mine = {number: next((ranks for ranks in found if rank in ranks), None) for number, found in of_cut.items()}
    listed: list[int] = []
    for i in range(len(layout)):
        cut_number = layout.cut_number(i)
        if layout.alias(i) != i:
            continue
        if cut_number is None:
            listed.append(i)
        elif (ranks_here := mine[cut_number]) is not None:
            held.setdefault(sets[ranks_here], []).append((layout.name(i), None))
    # Of listed pieces a layout knows only who writes them.
    where = (
        [{name: number for number, name in enumerate(description.names)} for description, _ in said] if listed else []
    )
    for i in listed:
        name = layout.name(i)
        holders: dict[Box, list[int]] = {}
        for (description, ranks), numbers in zip(said, where, strict=True):
            boxes = description.cuts[numbers[name]] if name in numbers else ()
            for box in boxes if isinstance(boxes, tuple) else ():
                if 0 not in box.size:
                    holders.setdefault(box, []).extend(ranks)
        for box, holding in sorted(holders.items()):
            if len(holding) > 1:
                number = sets.setdefault(tuple(sorted(holding)), len(sets))
                if rank in holding:
                    held.setdefault(number, []).append((name, box))
    return Shared([list(ranks) for ranks in sets], held)


def _differ(ranks: Sequence[int], summaries: Sequence[Mapping[str, str]], key: str) -> bool:
    return len({summaries[rank].get(key) for rank in ranks}) > 1


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


def _pieces(described: Mapping[str, Described], name: str, box: Box | None) -> list[torch.Tensor]:
    """This rank's piece of a tensor that is this box, or the only one; none if it has no elements here."""
    found = described.get(name)
    return [] if found is None else [tensor for own, tensor in found.pieces if box is None or own == box]


def _value_digest(items: Sequence[tuple[str, JSON]]) -> str:
    return derive("values", canonical.encode([list(item) for item in items])).hex()


def _bytes(tensor: torch.Tensor) -> bytearray:
    """The bytes of a tensor, in row-major order."""
    data = bytearray(tensor.nbytes)
    _gather(tensor, 0, data)
    return data


def _digest(tensor: torch.Tensor) -> str:
    """A digest of the same bytes."""
    hasher = blake3()
    window = bytearray(min(tensor.nbytes, CHUNK))
    for lo in range(0, tensor.nbytes, CHUNK):
        data = memoryview(window)[: min(CHUNK, tensor.nbytes - lo)]
        _gather(tensor, lo, data)
        hasher.update(data)
    return hasher.hexdigest()


def _gather(tensor: torch.Tensor, lo: int, into: bytearray | memoryview) -> None:
    memory = host(tensor)[0]
    rows = Rows()
    box, item = whole(tuple(memory.shape)), memory.element_size()
    rows.add(0, item, box, box, box, memory.data_ptr(), [item * n for n in memory.stride()])
    rows.table().gather(rows.pointers, lo, lo + len(into), into)
