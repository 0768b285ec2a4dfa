"""Do ranks that hold the same thing hold the same bytes? The first detector of silent corruption.

Small tensors and values are compared at every save, large tensors in rotation. Each rank sends one digest for all that it
shares with the same ranks; only where these differ do names travel. Who holds the same follows from the cuts of the layout.
Of listed pieces a layout knows only who writes them, so of these the ranks tell one another once what they hold.
"""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from math import prod
from typing import TYPE_CHECKING, NamedTuple, Protocol, cast

import numpy
from blake3 import blake3

from tierckpt import _native
from tierckpt.format import canonical, shard
from tierckpt.format.boxes import Box
from tierckpt.format.canonical import JSON
from tierckpt.format.digest import derive
from tierckpt.format.layout import Layout
from tierckpt.state.description import Description
from tierckpt.state.devices import HOST, can_fingerprint
from tierckpt.state.layout import Described
from tierckpt.state.naming import readable
from tierckpt.state.rows import LocalRows, Part, Places, Wanted, parts
from tierckpt.telling import ranks as in_words

if TYPE_CHECKING:
    from tierckpt.group import Group
    from tierckpt.state.planner import Taken
    from tierckpt.state.recall import Recall

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


class Jobs(Protocol):
    """Takes fingerprints of what is in memory of devices."""

    def fingerprint(self, place: int, table: _native.CopyTable, pointers: array[int]) -> Callable[[], bytes]:
        """Have those of a table taken; what is returned gives them once all that was enqueued is done."""


class Selection:
    """The pieces that are compared in one turn.

    Args:
        described: what this rank holds.
        wanted: for each set of ranks that hold the same, its number and (name, box) of the pieces, as in `Shared`.
        late: names of tensors that only optimizers change.
    """

    def __init__(
        self,
        described: Mapping[str, Described],
        wanted: Mapping[int, Sequence[tuple[str, Box | None]]],
        late: Container[str],
    ) -> None:
        held = {number: list(_held(described, names)) for number, names in wanted.items()}
        rows, at = [], 0
        for name, piece in dict.fromkeys(chain.from_iterable(held.values())):
            rows.append(Wanted(name, piece, at, None))
            at += described[name].pieces[piece][1].nbytes
        local = self.local = LocalRows(described, rows)
        places = local.places()
        self.parts = parts(local.rows, places, local.late(late))
        #: Whether some of them cannot be looked at where they are.
        self.blind = any(place >= 0 and not can_fingerprint(place) for place in places)
        where = {key: row for row, key in enumerate(zip(local.names, local.numbers, strict=True))}
        #: By set, the names of its pieces and their rows.
        self.sets = {
            number: ([name for name, _ in keys], numpy.array([where[key] for key in keys], dtype=numpy.int64))
            for number, keys in held.items()
        }


class Sample:
    """What one rank holds of what is to be compared, as it was when it saved.

    Args:
        turn: which of the large tensors take part.
        selection: the pieces that take part.
        pointers: their addresses.
        keep: what must stay alive while these are used.
        values: encoded, if they are to be compared.
    """

    def __init__(
        self,
        turn: int,
        selection: Selection,
        pointers: array[int],
        keep: Sequence[object],
        values: Mapping[str, JSON] | None,
    ) -> None:
        self.turn, self._selection, self._values = turn, selection, values
        self._keep: Sequence[object] = keep
        every = [] if selection.blind else selection.parts
        self._pointers = {i: part.pointers(pointers) for i, part in enumerate(every)}
        self._prints = numpy.zeros((len(selection.local), 2), dtype=numpy.uint64)
        self._coming: list[tuple[Part, Callable[[], bytes]]] = []

    @property
    def places(self) -> set[int]:
        """Where what is still to be taken is."""
        return {self._selection.parts[i].place for i in self._pointers}

    def take(self, *, late: bool, place: int, jobs: Jobs | None = None) -> bool:
        """Look at what is at ``place`` and was not looked at before; ``late``: at what only optimizers change.

        Returns:
            Whether there was anything.
        """
        any_of = False
        for i, part in enumerate(self._selection.parts):
            if part.place != place or part.late != late or i not in self._pointers:
                continue
            pointers = self._pointers[i]
            any_of = True
            if place == HOST:
                self._put(part, _native.fingerprints(part.table, pointers))
            else:
                assert jobs is not None
                self._coming.append((part, jobs.fingerprint(place, part.table, pointers)))
            del self._pointers[i]  # not before: an interrupt must not leave it untaken
        return any_of

    def _put(self, part: Part, prints: bytes) -> None:
        self._prints[numpy.array(part.rows)] = numpy.frombuffer(prints, dtype=numpy.uint64).reshape(-1, 2)

    def summary(self) -> JSON:
        """What ranks tell each other: the turn, for each set one digest of all that it shares, and one of the values.

        What is at the host and was not taken is taken now.
        """
        for late in (False, True):
            self.take(late=late, place=HOST)
        for part, prints in self._coming:
            self._put(part, prints())
        self._coming, self._keep = [], ()
        found: dict[str, JSON] = {}
        for number, (_, rows) in self._selection.sets.items():
            found[str(number)] = None if self._selection.blind else blake3(self._prints[rows].tobytes()).hexdigest()
        if self._values is not None:
            found["values"] = _value_digest(list(self._values.items()))
        return [self.turn, found]

    def listing(self, suspects: Sequence[int], *, with_values: bool) -> bytes:
        """The digest of each tensor of the sets ``suspects``, and of each value."""
        found: dict[str, dict[str, str]] = {}
        for number in suspects:
            each = found[str(number)] = {}
            names, rows = self._selection.sets.get(number, ((), ()))
            for name, row in zip(names, rows, strict=True):
                each[name] = each.get(name, "") + self._prints[row].tobytes().hex()
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
        self._kept: dict[int, _Kept] = {}
        self._shared = _shared(layout, rank, said)
        self._trees = [tree for tree in layout.trees if sum(b + 1 - a for a, b in tree.ranks) > 1]

    def sample(self, turn: int, taken: Taken) -> Sample | None:
        """What this rank is to compare in this save; None if no ranks have anything in common."""
        if not self._shared.sets and not self._trees:
            return None
        turn %= TURNS
        kept, found = self._kept.get(turn), taken.found
        if (
            kept is None
            or found is None
            or kept.recall is not taken.recall
            or kept.late is not taken.optimizer_storages
        ):
            selection = Selection(taken.described, self._due(turn), taken.optimizer_storages)
            self._kept[turn] = kept = _Kept(selection, taken.recall, taken.optimizer_storages)
            pointers, keep = selection.local.pointers(taken.tensors)
        else:
            assert taken.recall is not None
            if kept.places is None:
                kept.places = kept.selection.local.at(taken.recall.places)
            pointers, keep = kept.selection.local.pointers_at(found.addresses, kept.places), []
        return Sample(turn, kept.selection, pointers, [*keep, taken], taken.encoded if self._trees else None)

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
        layout, numbers = self._layout, self._layout.numbers
        found: dict[int, list[tuple[str, Box | None]]] = {}
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
                told = [listings[rank][str(number)].get(name) for rank in ranks]
                lines += _line(name, ranks, told, self._writers(name, ranks))
        for tree in self._trees if with_values else ():
            ranks = _members(tree.ranks)
            for name in listings[ranks[0]]["values"]:
                lines += _line(name, ranks, [listings[rank]["values"].get(name) for rank in ranks], ranks[:1])
        return lines

    def _writers(self, name: str, ranks: Sequence[int]) -> list[int]:
        """Those of ``ranks`` that write what they share of a tensor, or a part of it each."""
        return sorted({stored.rank for stored in self._layout.stored_pieces(self._layout.numbers[name])} & {*ranks})


@dataclass
class _Kept:
    """A selection, what it was made of, and where its tensors are among those that the recall finds."""

    selection: Selection
    recall: Recall | None
    late: Container[str]
    places: Places | None = None


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


def _differ(ranks: Sequence[int], summaries: Sequence[Mapping[str, str | None]], key: str) -> bool:
    told = {summaries[rank].get(key) for rank in ranks}
    return len(told) > 1 and None not in told  # some rank could not look


def _members(spans: Sequence[tuple[int, int]]) -> list[int]:
    return [rank for first, last in spans for rank in range(first, last + 1)]


def _line(name: str, ranks: Sequence[int], digests: Sequence[str | None], writers: Sequence[int]) -> list[str]:
    """One line if the digests differ: who holds the same as whom, and whose is saved."""
    groups: dict[str | None, list[int]] = {}
    for rank, digest in zip(ranks, digests, strict=True):
        groups.setdefault(digest, []).append(rank)
    if len(groups) == 1:
        return []
    told = " | ".join(map(in_words, groups.values()))
    saved = f"that of rank {writers[0]}" if len(writers) == 1 else f"a part of each of ranks {in_words(writers)}"
    return [f"{readable(name)}: ranks {told} hold different replicas; saves take {saved}"]


def _held(described: Mapping[str, Described], wanted: Iterable[tuple[str, Box | None]]) -> Iterator[tuple[str, int]]:
    """Name and number of this rank's pieces that are these boxes, or the only ones; none where it has no elements."""
    for name, box in wanted:
        found = described.get(name)
        for number, (own, _) in enumerate(found.pieces if found is not None else ()):
            if box is None or own == box:
                yield name, number


def _value_digest(items: Sequence[tuple[str, JSON]]) -> str:
    return derive("values", canonical.encode([list(item) for item in items])).hex()
