"""Layouts: which rank's shard stores which piece of which tensor (docs/format.md, section 6).

In memory as in the file: columns. Regular cuts are formulas, so a layout grows with tensors and irregular
pieces, not with tensors times ranks, and looking something up costs what it finds.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, compress, pairwise
from math import prod
from typing import NamedTuple

from tierckpt.errors import IntegrityError
from tierckpt.format import columns, layout_plan, shard
from tierckpt.format.boxes import Box, intersection, part, tiles, whole
from tierckpt.format.canonical import JSON
from tierckpt.format.digest import derive
from tierckpt.format.grid import Cut
from tierckpt.format.layout_plan import Plan, Ranges, Tree

KIND = "layout 1"
LISTED = 2**32 - 1
"""In the column ``cuts``: this tensor's pieces are listed."""

ELEMENTS_LIMIT = 1 << 60
"""Elements of a tensor; bytes then fit into 64 bits."""

COLUMNS = {
    "plan": "U8",
    "shapes": "I64",
    "piece_offsets": "I64",
    "piece_sizes": "I64",
    "name_ends": "I64",
    "aliases": "U32",
    "cuts": "U32",
    "writers": "U32",
    "splits": "U32",
    "piece_tensors": "U32",
    "piece_ranks": "U32",
    "dtypes": "U8",
    "ndims": "U8",
    "names": "U8",
}


class Entry(NamedTuple):
    """One tensor of a layout that is being made.

    With ``alias`` (the name of the tensor whose bytes this one shares) nothing else counts; with ``cut``
    the pieces follow from it; else ``pieces`` lists (rank, box), boxes without elements left out.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    alias: str | None = None
    cut: Cut | None = None
    writer: int = 0
    split: int = 1
    pieces: Sequence[tuple[int, Box]] = ()


class Stored(NamedTuple):
    """A piece of a tensor: the rank whose shard has it, its number there (-1: it is the only one), and its
    box."""

    rank: int
    k: int
    box: Box


class Layout:
    """Which tensors there are and where their bytes are. Immutable.

    ``world``: ranks that saved. ``dtypes``: names as in torch. ``cuts``: the regular cuts. ``trees``: the
    state's structure. ``blobs``: ranges of the ranks whose shard ends with a blob. Tensors are numbered in
    ascending order of the UTF-8 bytes of their names.
    """

    def __init__(
        self,
        world: int,
        dtypes: Sequence[str],
        cuts: Sequence[Cut],
        trees: Sequence[Tree],
        blobs: Ranges,
        numbers: dict[str, array[int]],
    ) -> None:
        """Takes the columns of the file but ``plan`` as they are; see ``build`` and ``decode``."""
        self.world = world
        self.dtypes = list(dtypes)
        self.cuts = list(cuts)
        self.trees = list(trees)
        self.blobs = blobs
        self._names = numbers["names"].tobytes()
        self._numbers = numbers
        self._ends = numbers["name_ends"]
        self._shapes = numbers["shapes"]
        self._aliases = numbers["aliases"]
        self._cut_of = numbers["cuts"]
        self._first = numbers["writers"]
        self._splits = numbers["splits"]
        self._dtype_of = numbers["dtypes"]
        self._piece_tensors = numbers["piece_tensors"]
        self._piece_ranks = numbers["piece_ranks"]
        self._starts = array("q", accumulate(numbers["ndims"], initial=0))

    # Making and encoding

    @staticmethod
    def build(world: int, entries: Iterable[Entry], trees: Sequence[Tree], blobs: Ranges) -> Layout:
        """The layout of these tensors, in ascending order of the UTF-8 bytes of their names."""
        entries = list(entries)
        index = {entry.name: i for i, entry in enumerate(entries)}
        dtypes: dict[str, int] = {}
        cuts: dict[Cut, int] = {}
        known: dict[int, int] = {}  # by identity: large meshes are slow to compare
        numbers = {name: array("B" if d == "U8" else "I" if d == "U32" else "q") for name, d in COLUMNS.items()}
        ends, shapes = numbers["name_ends"], numbers["shapes"]
        names: list[bytes] = []
        end = 0
        for i, entry in enumerate(entries):
            source = entry if entry.alias is None else entries[index[entry.alias]]
            name = entry.name.encode()
            names.append(name)
            end += len(name)
            ends.append(end)
            shapes.extend(entry.shape)
            numbers["ndims"].append(len(entry.shape))
            numbers["dtypes"].append(dtypes.setdefault(entry.dtype, len(dtypes)))
            numbers["aliases"].append(i if entry.alias is None else index[entry.alias])
            if source.cut is None:
                number = LISTED
            else:
                found = known.get(id(source.cut))
                number = cuts.setdefault(source.cut, len(cuts)) if found is None else found
                known[id(source.cut)] = number
            numbers["cuts"].append(number)
            plain = entry.alias is not None or entry.cut is None
            numbers["writers"].append(0 if plain else entry.writer)
            numbers["splits"].append(1 if plain else entry.split)
            if source is entry and entry.cut is None:
                for rank, box in sorted(entry.pieces, key=lambda piece: (piece[1].offset, piece[0])):
                    numbers["piece_tensors"].append(i)
                    numbers["piece_ranks"].append(rank)
                    numbers["piece_offsets"].extend(box.offset)
                    numbers["piece_sizes"].extend(box.size)
        numbers["names"].frombytes(b"".join(names))
        return Layout(world, list(dtypes), list(cuts), trees, blobs, numbers)

    @cached_property
    def encoded(self) -> bytes:
        """The bytes of the layout file."""
        plan = layout_plan.encode(Plan(self.world, self.dtypes, self.cuts, self.trees, self.blobs))
        return columns.pack(
            KIND,
            [(name, dtype, plan if name == "plan" else self._numbers[name]) for name, dtype in COLUMNS.items()],
        )

    @staticmethod
    def decode(data: bytes, *, what: str) -> Layout:
        """The layout that these bytes of a layout file say, its listed pieces checked to tile their tensors.

        Raises ``IntegrityError`` naming ``what``. Safe for hostile bytes: memory is bounded by their number.
        """
        numbers = columns.unpack(KIND, COLUMNS, data, what=what)
        plan = layout_plan.decode(numbers["plan"].tobytes(), what=f"{what}: plan")
        _check_columns(numbers, plan, what)
        layout = Layout(*plan, numbers)
        _check_tensors(layout, numbers, what)
        layout.check_tiling(what=what)
        layout.encoded = data
        return layout

    def encode(self) -> bytes:
        """The bytes of the layout file."""
        return self.encoded

    @cached_property
    def hash(self) -> str:
        """The layout hash, 64 hex digits: the name of the file."""
        return derive("layout", self.encoded).hex()

    # Tensors

    def __len__(self) -> int:
        """Number of tensors, aliases included."""
        return len(self._ends)

    def name(self, i: int) -> str:
        return self._name(i).decode()

    def _name(self, i: int) -> bytes:
        return self._names[self._ends[i - 1] if i else 0 : self._ends[i]]

    def __iter__(self) -> Iterator[str]:
        """All names, in order."""
        start = 0
        for end in self._ends:
            yield self._names[start:end].decode()
            start = end

    def index(self, name: str) -> int | None:
        """The number of the tensor with this name; None if there is none."""
        wanted = name.encode()
        lo, hi = 0, len(self._ends)
        while lo < hi:
            mid = (lo + hi) // 2
            if self._name(mid) < wanted:
                lo = mid + 1
            else:
                hi = mid
        return lo if lo < len(self._ends) and self._name(lo) == wanted else None

    def dtype(self, i: int) -> str:
        return self.dtypes[self._dtype_of[i]]

    def shape(self, i: int) -> tuple[int, ...]:
        return tuple(self._shapes[self._starts[i] : self._starts[i + 1]])

    def tensor(self, i: int) -> tuple[str, str, tuple[int, ...]]:
        """(name, dtype, global shape)."""
        return self.name(i), self.dtype(i), self.shape(i)

    def alias(self, i: int) -> int:
        """The tensor whose bytes tensor ``i`` shares; ``i`` itself when it has its own."""
        return self._aliases[i]

    def cut(self, i: int) -> Cut | None:
        """How tensor ``i`` is cut; None when its pieces are listed."""
        number = self._cut_of[i]
        return None if number == LISTED else self.cuts[number]

    def cut_number(self, i: int) -> int | None:
        """The index in ``cuts`` of how tensor ``i`` is cut; None when its pieces are listed."""
        number = self._cut_of[i]
        return None if number == LISTED else number

    # Pieces

    def stored_pieces(self, i: int) -> list[Stored]:
        """All pieces of tensor ``i`` (of its target, if it is an alias) that have elements."""
        return self.pieces_in(i, whole(self.shape(i)))

    def pieces_in(self, i: int, box: Box) -> list[Stored]:
        """Those pieces of tensor ``i`` that have elements in common with ``box``.

        For regular cuts it takes time for what it returns; for listed pieces, for those of the tensor.
        """
        i = self._aliases[i]
        cut = self.cut(i)
        shape = self.shape(i)
        if cut is None:
            pieces = self._listed(i)
            return [piece for piece in pieces if intersection(piece.box, box) is not None]
        if 0 in shape:
            return []
        first, split = self._first[i], self._splits[i]
        found = []
        for coordinate, held in cut.boxes(shape, box):
            if split == 1 or part(held, 0, split) is None:
                found.append(Stored(cut.rank(coordinate, first), -1, held))
                continue
            for number in range(split):
                some = part(held, number, split)
                if some is not None and intersection(some, box) is not None:
                    found.append(Stored(cut.rank(coordinate, (first + number) % cut.replicas), -1, some))
        return found

    def rank_pieces(self, rank: int) -> Iterator[tuple[int, int, Box]]:
        """(tensor, k, box) of all pieces in the shard of ``rank``, by ascending tensor and k."""
        listed = self._listed_of(rank)
        at = 0
        held: dict[tuple[int, tuple[int, ...]], Box] = {}
        places = [cut.mesh.coordinate(rank) for cut in self.cuts]
        numbers = [-1 if place is None else cut.replica(place) for cut, place in zip(self.cuts, places, strict=True)]
        replicas = [cut.replicas for cut in self.cuts]
        stop = self._starts[0]
        rows = zip(self._aliases, self._cut_of, self._first, self._splits, self._numbers["ndims"], strict=True)
        shapes = self._shapes
        for i, (alias, number, first, split, ndim) in enumerate(rows):
            start = stop
            stop += ndim
            if alias != i:
                continue
            if number == LISTED:
                end = at
                while end < len(listed) and listed[end][0] == i:
                    end += 1
                for k, (_, box) in enumerate(listed[at:end]):
                    yield i, k if end - at > 1 else -1, box
                at = end
                continue
            turn = numbers[number]
            if turn < 0:
                continue
            turn = (turn - first) % replicas[number]
            if turn >= split:
                continue
            shape = tuple(shapes[start:stop])
            known = held.get((number, shape))
            if known is None:
                place = places[number]
                assert place is not None
                known = held[number, shape] = self.cuts[number].box(shape, place)
            box = known
            if split > 1:
                some = part(box, turn, split)
                if some is None and turn:
                    continue
                box = some or box
            if 0 not in box.size:
                yield i, -1, box

    def shard_pieces(self, rank: int) -> Iterator[tuple[str, int, str, tuple[int, ...]]]:
        """(name, k, dtype, shape of the box) of the same pieces: what makes up the header of the shard."""
        for i, k, box in self.rank_pieces(rank):
            yield self.name(i), k, self.dtype(i), box.size

    def _listed(self, i: int) -> list[Stored]:
        lo, hi = self._span(i)
        boxes = [self._piece(p) for p in range(lo, hi)]
        by_rank: dict[int, list[Box]] = {}
        for rank, box in zip(self._piece_ranks[lo:hi], boxes, strict=True):
            by_rank.setdefault(rank, []).append(box)
        found = []
        for rank, own in by_rank.items():
            own.sort()
            found += [Stored(rank, k if len(own) > 1 else -1, box) for k, box in enumerate(own)]
        return found

    def _listed_of(self, rank: int) -> list[tuple[int, Box]]:
        """(tensor, box) of the listed pieces of a rank, by tensor and offset."""
        order, ends = self._by_rank
        lo, hi = ends.get(rank, (0, 0))
        return sorted((self._piece_tensors[p], self._piece(p)) for p in order[lo:hi])

    @cached_property
    def _by_rank(self) -> tuple[array[int], dict[int, tuple[int, int]]]:
        ranks = self._piece_ranks
        order = array("I", sorted(range(len(ranks)), key=ranks.__getitem__))
        spans = {}
        lo = 0
        for hi in range(1, len(order) + 1):
            if hi == len(order) or ranks[order[hi]] != ranks[order[lo]]:
                spans[ranks[order[lo]]] = (lo, hi)
                lo = hi
        return order, spans

    def _span(self, i: int) -> tuple[int, int]:
        return self._piece_spans.get(i, (0, 0))

    @cached_property
    def _piece_spans(self) -> dict[int, tuple[int, int]]:
        spans = {}
        tensors = self._piece_tensors
        lo = 0
        for hi in range(1, len(tensors) + 1):
            if hi == len(tensors) or tensors[hi] != tensors[lo]:
                spans[tensors[lo]] = (lo, hi)
                lo = hi
        return spans

    @cached_property
    def _piece_starts(self) -> array[int]:
        ndims = self._numbers["ndims"]
        return array("q", accumulate((ndims[i] for i in self._piece_tensors), initial=0))

    def _piece(self, p: int) -> Box:
        lo, hi = self._piece_starts[p], self._piece_starts[p + 1]
        return Box(tuple(self._numbers["piece_offsets"][lo:hi]), tuple(self._numbers["piece_sizes"][lo:hi]))

    @cached_property
    def writers(self) -> Sequence[int]:
        """The ranks that have a shard, ascending: all that store a piece or have a blob."""
        marks = bytearray(self.world)
        for first, last in self.blobs:
            marks[first : last + 1] = b"\1" * (last + 1 - first)
        for rank in self._piece_ranks:
            marks[rank] = 1
        seen = set()
        full = set()
        for i, (alias, number) in enumerate(zip(self._aliases, self._cut_of, strict=True)):
            if alias != i or number == LISTED:
                continue
            choice = number, self._first[i], self._splits[i]
            if choice in full:
                continue
            shape = self.shape(i)
            if (choice, shape) in seen or 0 in shape:
                continue
            seen.add((choice, shape))
            cut = self.cuts[number]
            count = 0
            for coordinate, box in cut.boxes(shape, whole(shape)):
                parts = 1 if part(box, 0, choice[2]) is None else choice[2]
                for turn in range(parts):
                    marks[cut.rank(coordinate, (choice[1] + turn) % cut.replicas)] = 1
                count += parts
            # Every rank that could store something of such a tensor does: no other shape adds to it.
            if count == cut.mesh.size // cut.replicas * choice[2]:
                full.add(choice)
        return array("I", compress(range(self.world), marks))

    @property
    def fewest_writers(self) -> int:
        """At least so many ranks are among the writers; known in time that does not grow with their number."""
        seen: set[tuple[int, int, tuple[int, ...]]] = set()
        most = 1
        for i, (number, split) in enumerate(zip(self._cut_of, self._splits, strict=True)):
            if number == LISTED or self._aliases[i] != i:
                continue
            shape = self.shape(i)
            if (number, split, shape) in seen or 0 in shape:
                continue
            seen.add((number, split, shape))
            cut = self.cuts[number]
            boxes, large = cut.counts(shape)
            first = cut.box(shape, [0] * len(cut.placements))
            most = max(most, boxes, large if part(first, 0, split) is None else large * split)
        return most

    @cached_property
    def nbytes(self) -> int:
        """Bytes of all tensors, each once. Raises ``LayoutError`` for a dtype that this version does not know."""
        sizes = [shard.dtype(name).size for name in self.dtypes]
        starts, shapes = self._starts, self._shapes
        return sum(
            prod(shapes[starts[i] : starts[i + 1]]) * sizes[kind]
            for i, (kind, alias) in enumerate(zip(self._dtype_of, self._aliases, strict=True))
            if alias == i
        )

    def has_blob(self, rank: int) -> bool:
        return any(first <= rank <= last for first, last in self.blobs)

    def tree(self, rank: int) -> JSON:
        """The structure of the state of ``rank``."""
        return next(t.tree for t in self.trees if any(first <= rank <= last for first, last in t.ranks))

    def check_tiling(self, *, what: str = "layout") -> None:
        """Raise ``IntegrityError`` unless the pieces of every tensor cover each of its elements exactly once.

        Regular cuts do so by construction.
        """
        for i, (alias, number) in enumerate(zip(self._aliases, self._cut_of, strict=True)):
            if alias == i and number == LISTED:
                pieces = self._listed(i)
                wrong = tiles(
                    self.shape(i),
                    [p.box for p in pieces],
                    lambda p, of=pieces: f"rank {of[p].rank}",  # type: ignore[misc]
                )
                if wrong is not None:
                    raise IntegrityError(f"{what}: {self.name(i)}: {wrong}")


def _check_columns(numbers: dict[str, array[int]], plan: Plan, what: str) -> None:
    """That the columns fit to one another, and all indices are within their bounds."""
    count = len(numbers["name_ends"])
    for name in ("aliases", "cuts", "writers", "splits", "dtypes", "ndims"):
        if len(numbers[name]) != count:
            raise IntegrityError(f"{what}: {len(numbers[name])} {name} for {count} tensors")
    ends = numbers["name_ends"]
    if any(b <= a for a, b in pairwise([0, *ends])) or (ends[-1] if count else 0) != len(numbers["names"]):
        raise IntegrityError(f"{what}: name_ends are not where names end")
    if sum(numbers["ndims"]) != len(numbers["shapes"]) or min(numbers["shapes"], default=0) < 0:
        raise IntegrityError(f"{what}: shapes do not fit to ndims, or are negative")
    if max(numbers["dtypes"], default=-1) >= len(plan.dtypes):
        raise IntegrityError(f"{what}: a dtype is not in the list")
    for number, ndim, first, split in set(
        zip(numbers["cuts"], numbers["ndims"], numbers["writers"], numbers["splits"], strict=True)
    ):
        if number == LISTED:
            fits = first == 0 and split == 1
        else:
            fits = number < len(plan.cuts) and (
                plan.cuts[number].lowest_ndim <= ndim and first < plan.cuts[number].replicas >= split >= 1
            )
        if not fits:
            raise IntegrityError(f"{what}: cut {number}, writer {first} and split {split} do not fit {ndim} dimensions")
    tensors, ranks = numbers["piece_tensors"], numbers["piece_ranks"]
    if len(tensors) != len(ranks) or any(b < a for a, b in pairwise(tensors)):
        raise IntegrityError(f"{what}: pieces are not in the order of their tensors")
    if (tensors and tensors[-1] >= count) or max(ranks, default=0) >= plan.world:
        raise IntegrityError(f"{what}: a piece of a tensor or rank that is not there")
    for i in set(tensors):
        if numbers["cuts"][i] != LISTED or numbers["aliases"][i] != i:
            raise IntegrityError(f"{what}: tensor {i} has pieces, but its pieces are not listed")
    length = sum(numbers["ndims"][i] for i in tensors)
    if len(numbers["piece_offsets"]) != length or len(numbers["piece_sizes"]) != length:
        raise IntegrityError(f"{what}: the pieces' boxes have not the dimensions of their tensors")


def _check_tensors(layout: Layout, numbers: dict[str, array[int]], what: str) -> None:
    """Names, sizes and aliases of the tensors."""
    before = b""
    try:
        for i in range(len(layout)):
            name = layout._name(i)
            text = name.decode()
            if name <= before or "#" in text or "\0" in text or text in ("~values", "__metadata__"):
                raise IntegrityError(f"{what}: {text[:200]!r} is out of order, or not the name of a tensor")
            before = name
    except UnicodeDecodeError:
        raise IntegrityError(f"{what}: the name of tensor {i} is not UTF-8") from None
    stop = 0
    for i, ndim in enumerate(numbers["ndims"]):
        start, stop = stop, stop + ndim
        elements = 1
        for n in numbers["shapes"][start:stop]:
            elements *= n or 1
            if elements > ELEMENTS_LIMIT:
                raise IntegrityError(f"{what}: {layout.name(i)} has too many elements")
    for i, target in enumerate(numbers["aliases"]):
        if target == i:
            continue
        if (
            target >= len(layout)
            or numbers["aliases"][target] != target
            or layout.tensor(target)[1:] != layout.tensor(i)[1:]
            or numbers["cuts"][target] != numbers["cuts"][i]
            or (numbers["writers"][i], numbers["splits"][i]) != (0, 1)
        ):
            raise IntegrityError(f"{what}: {layout.name(i)} cannot be an alias of tensor {target}")
