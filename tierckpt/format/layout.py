"""Layouts: which rank's shard stores which piece of which tensor (docs/format.md, section 6).

In memory as in the file: columns. Regular cuts are formulas, so a layout grows with tensors and irregular
pieces, not with tensors times ranks, and looking something up costs what it finds.
"""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import accumulate, chain, compress, pairwise, repeat
from math import prod
from operator import lt
from typing import Any, NamedTuple

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

_RESERVED = frozenset({"~values", "__metadata__"})

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
        names = [entry.name for entry in entries]
        shapes = [entry.shape for entry in entries]
        aliased = [i for i, entry in enumerate(entries) if entry.alias is not None]
        index = {name: i for i, name in enumerate(names)} if aliased else {}
        targets = array("I", range(len(entries)))
        for i in aliased:
            targets[i] = index[entries[i].alias or ""]
        own = [entry.cut for entry in entries]
        of = own if not aliased else [own[target] for target in targets]
        # Cuts by identity first: large meshes are slow to compare.
        cuts: dict[Cut, int] = {}
        known = {
            key: LISTED if cut is None else cuts.setdefault(cut, len(cuts))
            for key, cut in {id(cut): cut for cut in of}.items()
        }
        dtypes = {kind: i for i, kind in enumerate(dict.fromkeys([entry.dtype for entry in entries]))}
        numbers = {name: array("B" if d == "U8" else "I" if d == "U32" else "q") for name, d in COLUMNS.items()}
        texts = [name.encode() for name in names]
        numbers["names"].frombytes(b"".join(texts))
        numbers["name_ends"].extend(accumulate(map(len, texts)))
        numbers["shapes"].extend(chain.from_iterable(shapes))
        numbers["ndims"].extend(map(len, shapes))
        numbers["dtypes"].extend([dtypes[entry.dtype] for entry in entries])
        numbers["aliases"] = targets
        numbers["cuts"].extend([known[id(cut)] for cut in of])
        gridded = [entry.alias is None and entry.cut is not None for entry in entries]
        numbers["writers"].extend([e.writer if cut else 0 for e, cut in zip(entries, gridded, strict=True)])
        numbers["splits"].extend([e.split if cut else 1 for e, cut in zip(entries, gridded, strict=True)])
        for i, entry in enumerate(entries):
            if entry.alias is None and entry.cut is None:
                for rank, box in sorted(entry.pieces, key=lambda piece: (piece[1].offset, piece[0])):
                    numbers["piece_tensors"].append(i)
                    numbers["piece_ranks"].append(rank)
                    numbers["piece_offsets"].extend(box.offset)
                    numbers["piece_sizes"].extend(box.size)
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

    @cached_property
    def names(self) -> list[str]:
        """All names, in order."""
        ends = [0, *self._ends]
        if self._names.isascii():
            text = self._names.decode()
            return [text[start:end] for start, end in pairwise(ends)]
        return [self._names[start:end].decode() for start, end in pairwise(ends)]

    @cached_property
    def shapes(self) -> list[tuple[int, ...]]:
        """All global shapes."""
        shapes = self._shapes.tolist()
        known: dict[tuple[int, ...], tuple[int, ...]] = {}
        return [known.setdefault(shape := tuple(shapes[a:b]), shape) for a, b in pairwise(self._starts.tolist())]

    def name(self, i: int) -> str:
        return self.names[i]

    def __iter__(self) -> Iterator[str]:
        """All names, in order."""
        return iter(self.names)

    def index(self, name: str) -> int | None:
        """The number of the tensor with this name; None if there is none."""
        return self.numbers.get(name)

    @cached_property
    def numbers(self) -> dict[str, int]:
        """The numbers of all tensors, by name."""
        return {name: i for i, name in enumerate(self.names)}

    def dtype(self, i: int) -> str:
        return self.dtypes[self._dtype_of[i]]

    @cached_property
    def kinds(self) -> list[str]:
        """The dtypes of all tensors."""
        return list(map(self.dtypes.__getitem__, self._dtype_of))

    @cached_property
    def has_aliases(self) -> bool:
        """Whether some tensor shares the bytes of another."""
        return self._aliases != array(self._aliases.typecode, range(len(self)))

    def shape(self, i: int) -> tuple[int, ...]:
        return self.shapes[i]

    def tensor(self, i: int) -> tuple[str, str, tuple[int, ...]]:
        """(name, dtype, global shape)."""
        return self.name(i), self.dtype(i), self.shape(i)

    @property
    def aliases(self) -> Sequence[int]:
        """For each tensor the one whose bytes it shares, or its own number."""
        return self._aliases

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

    def geometry(self, i: int) -> tuple[int, int, int, tuple[int, ...]] | None:
        """Equal for tensors of which the same shards store the same boxes; None for one whose pieces are listed."""
        i = self._aliases[i]
        number = self._cut_of[i]
        return None if number == LISTED else (number, self._first[i], self._splits[i], self.shape(i))

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

    @cached_property
    def _geometries(self) -> tuple[dict[tuple[int, int, int, tuple[int, ...]], int], list[int]]:
        """For each geometry one tensor that has it, and for each tensor the one that its geometry, or that of its owner, has.

        Many tensors have few geometries, so each is looked at once.
        """
        owners: dict[tuple[int, int, int, tuple[int, ...]], int] = {}
        rows = zip(self._cut_of, self._first, self._splits, self.shapes, strict=True)
        if not self.has_aliases:
            return owners, list(map(owners.setdefault, rows, range(len(self))))
        alike = [owners.setdefault(row, i) if self._aliases[i] == i else -1 for i, row in enumerate(rows)]
        return owners, list(map(alike.__getitem__, self._aliases))

    @property
    def _owners(self) -> dict[tuple[int, int, int, tuple[int, ...]], int]:
        return self._geometries[0]

    @property
    def _alike(self) -> list[int]:
        return self._geometries[1]

    @cached_property
    def homes(self) -> list[int]:
        """For each tensor the rank that stores all of it as one piece; -1 if there is none, or if pieces are listed."""
        known: dict[int, int] = {}
        for row, i in self._owners.items():
            pieces = self.stored_pieces(i) if row[0] != LISTED else []
            known[i] = pieces[0].rank if [p.box.size for p in pieces] == [row[3]] else -1
        return list(map(known.__getitem__, self._alike))

    def rank_pieces(self, rank: int) -> Iterator[tuple[int, int, Box]]:
        """(tensor, k, box) of all pieces in the shard of ``rank``, by ascending tensor and k."""
        listed = self._listed_of(rank)
        at = 0
        held: dict[tuple[int, int, int, tuple[int, ...]], Box | None] = {}
        rows = zip(self._aliases, self._cut_of, self._first, self._splits, self.shapes, strict=True)
        for i, (alias, number, first, split, shape) in enumerate(rows):
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
            key = number, first, split, shape
            if key not in held:
                held[key] = self._stored(rank, *key)
            known = held[key]
            if known is not None:
                yield i, -1, known

    def _stored(self, rank: int, number: int, first: int, split: int, shape: tuple[int, ...]) -> Box | None:
        """What ``rank`` stores of a tensor that is cut regularly; None if nothing."""
        cut = self.cuts[number]
        place = cut.mesh.coordinate(rank)
        if place is None:
            return None
        turn = (cut.replica(place) - first) % cut.replicas
        if turn >= split:
            return None
        box = cut.box(shape, place)
        if split > 1:
            some = part(box, turn, split)
            if some is None and turn:
                return None
            box = some or box
        return None if 0 in box.size else box

    def shard_pieces(self, rank: int) -> Iterator[tuple[str, int, str, tuple[int, ...]]]:
        """(name, k, dtype, shape of the box) of the same pieces: what makes up the header of the shard."""
        names, kinds = self.names, self.kinds
        if LISTED in self._cut_of:
            for i, k, box in self.rank_pieces(rank):
                yield names[i], k, kinds[i], box.size
            return
        boxes = {i: self._stored(rank, *row) for row, i in self._owners.items()}
        sizes = {i: None if box is None else box.size for i, box in boxes.items()}
        held = list(map(sizes.__getitem__, self._alike))
        found: Iterable[tuple[str, int, str, Any]] = zip(names, repeat(-1), kinds, held)
        if self.has_aliases or None in sizes.values():
            rows = enumerate(zip(self._aliases, held, strict=True))
            found = compress(found, [size is not None and alias == i for i, (alias, size) in rows])
        yield from found

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
        full = set()
        for number, first, split, shape in self._owners:
            choice = number, first, split
            if number == LISTED or choice in full or 0 in shape:
                continue
            cut = self.cuts[number]
            count = 0
            for coordinate, box in cut.boxes(shape, whole(shape)):
                parts = 1 if part(box, 0, split) is None else split
                for turn in range(parts):
                    marks[cut.rank(coordinate, (first + turn) % cut.replicas)] = 1
                count += parts
            # Every rank that could store something of such a tensor does: no other shape adds to it.
            if count == cut.mesh.size // cut.replicas * split:
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
        known = {shape: prod(shape) for shape in self.shapes}
        counts = Counter(zip(self._dtype_of, self.shapes, strict=True))
        if self.has_aliases:
            counts.subtract((self._dtype_of[i], self.shapes[i]) for i, alias in enumerate(self._aliases) if alias != i)
        return sum([known[shape] * sizes[kind] * count for (kind, shape), count in counts.items()])

    def has_blob(self, rank: int) -> bool:
        return any(first <= rank <= last for first, last in self.blobs)

    def tree(self, rank: int) -> JSON:
        """The structure of the state of ``rank``."""
        return next(t.tree for t in self.trees if any(first <= rank <= last for first, last in t.ranks))

    def check_tiling(self, *, what: str = "layout") -> None:
        """Raise ``IntegrityError`` unless the pieces of every tensor cover each of its elements exactly once.

        Regular cuts do so by construction.
        """
        if LISTED not in self._cut_of:
            return
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
    if not all(map(lt, [0, *ends], ends)) or (ends[-1] if count else 0) != len(numbers["names"]):
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
    try:
        names = layout.names
    except UnicodeDecodeError:
        raise IntegrityError(f"{what}: the name of a tensor is not UTF-8") from None
    if not all(map(lt, ["", *names], names)) or b"#" in layout._names or b"\0" in layout._names or _RESERVED & {*names}:
        before = ""
        for name in names:
            if name <= before or "#" in name or "\0" in name or name in _RESERVED:
                raise IntegrityError(f"{what}: {name[:200]!r} is out of order, or not the name of a tensor")
            before = name
    for shape in dict.fromkeys(layout.shapes):
        if prod([n or 1 for n in shape]) > ELEMENTS_LIMIT:
            raise IntegrityError(f"{what}: {layout.name(layout.shapes.index(shape))} has too many elements")
    for i, target in enumerate(numbers["aliases"] if layout.has_aliases else ()):
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
