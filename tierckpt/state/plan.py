"""The plan of a save: which rank writes which piece, and where in its shard.

``local_description`` is what ranks tell one another; ``compose`` makes of it the layout, the same on every
rank; a ``WritePlan`` is one rank's part of it.
"""

from __future__ import annotations

from array import array
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from itertools import chain, compress
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple

from tierckpt.errors import LayoutError
from tierckpt.format import blob as blobs
from tierckpt.format import shard
from tierckpt.format.boxes import Box, contains, tiles
from tierckpt.format.canonical import decode as decode_json
from tierckpt.format.grid import REPLICATED, Cut, Mesh
from tierckpt.format.layout import Entry, Layout
from tierckpt.format.layout_plan import PLAN_DEPTH, Tree, ranges
from tierckpt.state import balance
from tierckpt.state.description import Description, local_description, read
from tierckpt.state.devices import HOST
from tierckpt.state.layout import Described
from tierckpt.state.rows import LocalRows, Part, Places, Wanted, parts
from tierckpt.telling import named

if TYPE_CHECKING:
    from tierckpt import _native
    from tierckpt.state.layout import Value

__all__ = ["WritePlan", "compose", "local_description"]


def compose(descriptions: Sequence[bytes], members: Sequence[Sequence[int]], world: int) -> Layout:
    """The layout of a save: ``members[i]`` are the ranks that gave ``descriptions[i]``; each rank is in one
    of them.

    The order of the descriptions does not matter. Every rank computes it for itself and gets the same.

    Raises ``LayoutError`` listing everything that does not fit: a name with different dtypes or shapes,
    pieces that do not cover a tensor exactly once.
    """
    return compose_read(read_all(descriptions, members, world), world)


def read_all(
    descriptions: Sequence[bytes], members: Sequence[Sequence[int]], world: int
) -> list[tuple[Description, list[int]]]:
    """What groups of ranks said, and these groups, in ascending order of their lowest ranks."""
    order = sorted(range(len(descriptions)), key=lambda i: min(members[i]))
    groups = [sorted(members[i]) for i in order]
    if sorted(chain.from_iterable(groups)) != list(range(world)):
        raise ValueError(f"members must name each of {world} ranks once")
    return [
        (read(descriptions[i], world, what=f"description of rank {group[0]}"), group)
        for i, group in zip(order, groups, strict=True)
    ]


def compose_read(said: Sequence[tuple[Description, list[int]]], world: int) -> Layout:
    """The same as `compose`, of what `read_all` returns."""
    descriptions, groups = [description for description, _ in said], [group for _, group in said]
    composer = _Composer(descriptions, groups)
    entries = composer.entries()
    if composer.problems:
        raise LayoutError(f"the state does not fit together on {world} ranks:\n  " + "\n  ".join(composer.problems))
    trees: dict[bytes, list[int]] = {}
    writers = {0}
    for description, group in said:
        trees.setdefault(description.tree, []).extend(group)
        if description.per_rank:
            writers.update(group)
    writers.update(min(group) for group in trees.values())
    return Layout.build(
        world,
        composer.assign(world, entries),
        [
            Tree(ranges(sorted(group)), decode_json(tree, what="tree", depth=PLAN_DEPTH))
            for tree, group in trees.items()
        ],
        ranges(sorted(writers)),
    )


class _Composer:
    """Brings together what groups of ranks said about each name. A *row* is (group, number of the tensor in
    it)."""

    def __init__(self, said: list[Description], groups: list[list[int]]) -> None:
        self.said = said
        self.groups = groups
        self.problems: list[str] = []
        self._merged: dict[tuple[tuple[int, int], ...], Cut | str] = {}
        self._alone: dict[int, Cut] = {}
        self._offered: list[list[tuple[Box, list[int]]]] = []

    def entries(self) -> list[Entry]:
        """All tensors in order, grids without their writers. Pieces of listed ones: see ``assign``."""
        targets = self._targets()
        found = []
        for name, held in self._rows():
            g, i = held[0]
            dtype, shape = self.said[g].dtypes[i], self.said[g].shapes[i]
            if len(held) > 1 and self._differ(name, held):
                continue
            if dtype not in shard.DTYPES:
                self.problems.append(f"{name}: dtype {dtype} cannot be stored")
                continue
            if name in targets:
                found.append(Entry(name, dtype, shape, targets[name]))
                continue
            cuts = [self.said[g].cuts[i] for g, i in held]
            listed = sum(isinstance(cut, tuple) for cut in cuts)
            if not listed:
                merged = self._merge(held)
                if isinstance(merged, str):
                    self.problems.append(f"{name}: {merged}")
                else:
                    found.append(Entry(name, dtype, shape, None, merged))
            elif listed == len(held):
                self._offer(name, shape, held)
                found.append(Entry(name, dtype, shape))
            else:
                pieces = [row for row, cut in zip(held, cuts, strict=True) if isinstance(cut, tuple)]
                others = [row for row in held if row not in pieces]
                self.problems.append(
                    f"{name}: Pieces on {self._ranks(pieces)}, a tensor on {self._ranks(others)}; use the same on all"
                )
        return found

    def _rows(self) -> Iterator[tuple[str, list[tuple[int, int]]]]:
        """Names in order, each with the rows that have it."""
        if len(self.said) == 1:
            for i, name in enumerate(self.said[0].names):
                yield name, [(0, i)]
            return
        rows: dict[str, list[tuple[int, int]]] = {}
        for g, description in enumerate(self.said):
            for i, name in enumerate(description.names):
                rows.setdefault(name, []).append((g, i))
        yield from sorted(rows.items())

    def assign(self, world: int, entries: list[Entry]) -> list[Entry]:
        """The same tensors with those who write them."""
        grids = [entry for entry in entries if entry.alias is None and entry.cut is not None]
        sizes = {kind: known.size for kind, known in shard.DTYPES.items()}
        gridded = [
            balance.Gridded(entry.cut, entry.shape, sizes[entry.dtype]) for entry in grids if entry.cut is not None
        ]
        listed = [entry for entry in entries if entry.alias is None and entry.cut is None]
        offered = [
            balance.Offered(ranks, prod(box.size) * sizes[entry.dtype])
            for entry, pieces in zip(listed, self._offered, strict=True)
            for box, ranks in pieces
        ]
        choices, writers = balance.choose(world, gridded, offered)
        choice, writer, pieces_of = iter(choices), iter(writers), iter(self._offered)
        found = []
        for entry in entries:
            if entry.alias is None and entry.cut is None:
                pieces = [(next(writer), box) for box, _ in next(pieces_of)]
                entry = entry._replace(pieces=pieces)
            elif entry.alias is None:
                first, split = next(choice)
                if first or split > 1:
                    entry = entry._replace(writer=first, split=split)
            found.append(entry)
        return found

    def _ranks(self, rows: Iterable[tuple[int, int]]) -> str:
        return named(sorted(chain.from_iterable(self.groups[g] for g, _ in rows)))

    def _differ(self, name: str, held: list[tuple[int, int]]) -> bool:
        """Whether groups disagree on dtype or shape: a problem."""
        kinds: dict[tuple[str, tuple[int, ...]], list[tuple[int, int]]] = {}
        for g, i in held:
            kinds.setdefault((self.said[g].dtypes[i], self.said[g].shapes[i]), []).append((g, i))
        if len(kinds) == 1:
            return False
        each = [f"{kind} {list(shape)} on {self._ranks(rows)}" for (kind, shape), rows in kinds.items()]
        self.problems.append(f"{name}: {', but '.join(each)}")
        return True

    def _targets(self) -> dict[str, str]:
        """Aliases and their targets: those on which all groups that have the name agree."""
        said: dict[str, set[str]] = {}
        for description in self.said:
            for i, target in enumerate(description.aliases):
                if target != i:
                    said.setdefault(description.names[i], set()).add(description.names[target])
        if len(self.said) > 1:
            for description in self.said:
                for i, target in enumerate(description.aliases):
                    if target == i and description.names[i] in said:
                        said[description.names[i]].add(description.names[i])
        # A target is no alias in the group that names it, so groups never agree that it is one.
        return {name: next(iter(targets)) for name, targets in said.items() if len(targets) == 1}

    def _merge(self, held: list[tuple[int, int]]) -> Cut | str:
        """One cut of what several groups hold as grids or as a whole, or what is wrong."""
        if len(held) == 1:
            g, i = held[0]
            cut = self.said[g].cuts[i]
            if cut is None:
                if g not in self._alone:
                    self._alone[g] = Cut.replicated(self.groups[g])
                return self._alone[g]
        key = tuple([(g, id(self.said[g].cuts[i])) for g, i in held])
        found = self._merged.get(key)
        if found is None:
            cuts = [(g, cut) for g, i in held if not isinstance(cut := self.said[g].cuts[i], tuple)]
            found = self._merged[key] = _merge(cuts, self.groups)
        return found

    def _offer(self, name: str, shape: tuple[int, ...], held: list[tuple[int, int]]) -> None:
        """Collect listed pieces. The same box on several ranks is one piece that any of them can write."""
        pieces: dict[Box, list[int]] = {}
        for g, i in held:
            boxes = self.said[g].cuts[i]
            assert isinstance(boxes, tuple)
            if len(set(boxes)) != len(boxes):
                self.problems.append(f"{name}: the same box twice on {self._ranks([(g, i)])}")
            for box in boxes:
                pieces.setdefault(box, []).extend(self.groups[g])
        # A rank that gave the same box twice counts once.
        offered = [(box, sorted(set(ranks))) for box, ranks in sorted(pieces.items())]
        wrong = tiles(shape, [box for box, _ in offered], lambda p: named(offered[p][1]))
        if wrong is not None:
            self.problems.append(f"{name}: {wrong}; held by {self._ranks(held)}")
        self._offered.append(offered)


def _merge(cuts: list[tuple[int, Cut | None]], groups: list[list[int]]) -> Cut | str:
    by_cut: dict[Cut, set[int]] = {}
    whole: set[int] = set()
    for g, cut in cuts:
        if cut is None:
            whole.update(groups[g])
        else:
            by_cut.setdefault(cut, set()).update(groups[g])
    stacks: dict[tuple[Any, ...], list[Cut]] = {}
    for cut, ranks in by_cut.items():
        spanned = set(cut.mesh)
        if not spanned <= ranks:
            return (
                f"it is cut over {named(sorted(spanned))}, but not held, or not cut like that, by "
                f"{named(sorted(spanned - ranks))} of these"
            )
        if cut.order:
            stacks.setdefault((cut.mesh.shape, cut.placements, cut.order), []).append(cut)
        else:
            whole |= spanned
    if whole:
        # Those who hold all of it are enough, whoever else holds a part.
        return Cut.replicated(sorted(whole))
    # Each of these grids holds all of the tensor. Equal ones on different ranks are replicas.
    stack = min(stacks.values(), key=lambda stack: min(min(cut.mesh) for cut in stack))
    if len(stack) == 1:
        return stack[0]
    stack.sort(key=lambda cut: min(cut.mesh))
    first = stack[0]
    mesh = Mesh.of(list(chain.from_iterable(cut.mesh for cut in stack)), (len(stack), *first.mesh.shape))
    return Cut(mesh, (REPLICATED, *first.placements), tuple([d + 1 for d in first.order]))


class WritePlan:
    """What one rank writes: its shard as rows of a copy table, in the order of the shard.

    ``header``: of the shard; None when this rank writes nothing. ``blob``: the capacity of the blob in
    bytes; None when there is none. The first rows are the pieces, then come the header and the blob.
    """

    def __init__(self, layout: Layout, rank: int, described: Mapping[str, Described], blob: int | None = None) -> None:
        """``blob``: bytes of this rank's encoded values, before padding; only looked at when the layout
        wants them.

        Raises ``LayoutError`` when the header would be too large, or when ``described`` is not what the
        layout was composed of.
        """
        self.layout = layout
        self.layout_bytes = layout.encode()
        self.layout_hash = layout.hash
        self.rank = rank
        self.blob: int | None = None
        if layout.has_blob(rank):
            if blob is None:
                raise LayoutError(f"rank {rank} stores values, but was given none")
            self.blob = blobs.capacity(blob)
        self.header: shard.Header | None = None
        # Of pieces that are not all of the only local tensor: the box, and the number of the local piece that has it.
        inside: dict[tuple[str, int], tuple[Box, int]] = {}
        places: dict[str, dict[Box, int]] = {}
        pieces: list[shard.Piece] = []
        names = layout.names
        for i, k, box in layout.rank_pieces(rank):
            name = names[i]
            found = described.get(name)
            held = [] if found is None else found.pieces
            if len(held) != 1 or held[0][0] != box:
                if name not in places:
                    places[name] = {own: number for number, (own, _) in enumerate(held)}
                number = places[name].get(box, -1)
                if number < 0:
                    number = next((n for n, (own, _) in enumerate(held) if contains(own, box)), -1)
                if number < 0:
                    raise LayoutError(f"{name}: rank {rank} should write {box}, which it does not hold")
                inside[name, k] = box, number
            pieces.append((name, k, layout.dtype(i), box.size))
        if not pieces and self.blob is None:
            return
        self.header = shard.build(pieces, layout=self.layout_hash, rank=rank, blob=self.blob)
        self._head = array("B", self.header.data)
        self._local = LocalRows(described, _wanted(self.header, inside))
        #: In the order of the table: the local tensors, the header, the blob.
        self._rows = self._local.rows
        self._rows.runs([0], [self.header.header_size], [0])
        if self.blob is not None:
            self._rows.runs([self.header.offsets[-1]], [self.blob], [0])

    @property
    def size(self) -> int:
        """Bytes of the shard; 0 when this rank writes nothing."""
        return self.header.size if self.header is not None else 0

    def table(self) -> _native.CopyTable:
        """The geometry of all rows, for any number of copies."""
        return self._rows.table()

    def split(self, names: Container[str]) -> Split | None:
        """The rows in parts: by where their memory is, and apart those of the tensors ``names``, where the live memory itself is
        copied. None if all is at the host and none are such."""
        if self.header is None:
            return None
        others = len(self._rows.pointers) - len(self._local)
        late = self._local.late(names)
        places = [*self._local.places(), *[HOST] * others]
        if not any(late) and set(places) == {HOST}:
            return None
        chosen = list(compress(self._local.names, late))
        counts = [name for name in chosen if name.endswith("/step")]
        return Split(parts(self._rows, places, [*late, *[False] * others]), chosen, counts)

    def pointers(self, tensors: Mapping[str, Value], blob: bytes | None = None) -> tuple[array[int], list[object]]:
        """The address of the first element of each row as it is now, and what must be kept alive while they
        are used.

        ``tensors``: the live values, by name; ``blob``: the encoded values, not padded. Tensors whose
        values our engine cannot read where they are are copied to memory of their own.

        Raises ``LayoutError`` naming a tensor that is not there any more or has other shape, strides or
        dtype than when this was planned, and for a blob that has outgrown its capacity: then it must be
        planned anew.
        """
        if self.header is None:
            return array("Q"), []
        found, keep = self._local.pointers(tensors)
        self._finish(found, blob, keep)
        return found, keep

    def places(self, rows: Mapping[tuple[str, int], int]) -> Places | None:
        """For `pointers_at`; see `LocalRows.at`."""
        return None if self.header is None else self._local.at(rows)

    def pointers_at(
        self, addresses: array[int], places: Places | None, blob: bytes | None = None
    ) -> tuple[array[int], list[object]]:
        """The same as `pointers`, of tensors that are known to look as they did.

        Raises ``LayoutError`` for a blob that has outgrown its capacity.
        """
        if self.header is None or places is None:
            return array("Q"), []
        keep: list[object] = []
        found = self._local.pointers_at(addresses, places)
        self._finish(found, blob, keep)
        return found, keep

    def _finish(self, found: array[int], blob: bytes | None, keep: list[object]) -> None:
        """The addresses of the header and of the padded blob, if there is one."""
        found.append(self._head.buffer_info()[0])
        keep.append(self._head)
        if self.blob is None:
            return
        if blob is None or blobs.capacity(len(blob)) != self.blob:
            raise LayoutError(f"{len(blob or b'')} bytes of values do not belong into {self.blob}; plan anew")
        padded = array("B", blobs.pad(blob, self.blob))
        keep.append(padded)
        found.append(padded.buffer_info()[0])


def _wanted(header: shard.Header, inside: Mapping[tuple[str, int], tuple[Box, int]]) -> Iterator[Wanted]:
    """The rows of a header's pieces."""
    for (name, k, _, _), offset in zip(header.pieces, header.offsets, strict=False):
        box, number = inside.get((name, k), (None, 0)) if inside else (None, 0)
        yield Wanted(name, number, offset, box)


class Split(NamedTuple):
    """The parts of a plan's rows.

    ``names``: of the tensors that may be copied late. ``counts``: those that count an optimizer's steps.
    """

    parts: list[Part]
    names: list[str]
    counts: list[str]

    def names_of(self, part: Part) -> list[str]:
        """The tensors of the rows of one late part, in its order."""
        late = [any(rows) for rows in zip(*(each.rows for each in self.parts if each.late), strict=True)]
        return list(compress(self.names, compress(part.rows, late)))
