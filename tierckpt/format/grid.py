"""Regular cuts: a tensor cut over a grid of ranks, by formula (docs/format.md, section 6)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import product
from math import prod

from tierckpt.format.boxes import Box, chunk


class Mesh:
    """A grid of distinct ranks.

    Either ``ranks`` lists them in row-major order, or the rank at coordinate c is ``first + sum(c *
    strides)``, where each stride is longer than all that the shorter ones reach. ``of`` chooses: equal
    grids are then equal meshes.
    """

    __slots__ = ("_by_stride", "_hash", "_places", "first", "ranks", "shape", "size", "strides")

    def __init__(
        self,
        shape: tuple[int, ...],
        first: int,
        strides: tuple[int, ...],
        ranks: tuple[int, ...] | None = None,
    ) -> None:
        self.shape = shape
        self.size = prod(shape)
        self.first = first
        self.strides = strides
        self.ranks = ranks
        self._places: dict[int, int] | None = None
        self._by_stride = sorted(range(len(strides)), key=strides.__getitem__, reverse=True)
        self._hash = hash((shape, first, strides, ranks))

    @staticmethod
    def of(ranks: Sequence[int], shape: Sequence[int]) -> Mesh:
        """The mesh of these ranks, in row-major order of ``shape``. All sizes are at least 1."""
        shape = tuple(shape)
        below = [prod(shape[d + 1 :]) for d in range(len(shape))]
        strides = tuple(ranks[b] - ranks[0] if n > 1 else 0 for n, b in zip(shape, below, strict=True))
        mesh = Mesh(shape, ranks[0], strides)
        if mesh.nested() and all(map(int.__eq__, mesh, ranks)):
            return mesh
        return Mesh(shape, 0, (), tuple(ranks))

    @staticmethod
    def spanning(ranks: Sequence[int]) -> Mesh:
        """The mesh of these ascending ranks whose own shape does not matter: as few numbers as possible."""
        shape: list[int] = []
        count = len(ranks)
        block = 1
        # The longest run of equal steps is the innermost dimension; blocks of it are the next.
        while block < count:
            step = ranks[block] - ranks[0]
            n = 2
            while (n + 1) * block <= count and ranks[n * block] - ranks[(n - 1) * block] == step:
                n += 1
            if count % (n * block):
                return Mesh.of(ranks, (count,))
            shape.insert(0, n)
            block *= n
        found = Mesh.of(ranks, shape or (1,))
        return found if found.ranks is None else Mesh.of(ranks, (count,))

    def nested(self) -> bool:
        """Whether the strides are such that all ranks differ."""
        reach = 0
        for d in reversed(self._by_stride):
            if self.shape[d] > 1:
                if self.strides[d] <= reach:
                    return False
                reach += (self.shape[d] - 1) * self.strides[d]
        return True

    @property
    def last(self) -> int:
        """The highest rank."""
        if self.ranks is not None:
            return max(self.ranks)
        return self.first + sum((n - 1) * stride for n, stride in zip(self.shape, self.strides, strict=True))

    def rank(self, coordinate: Sequence[int]) -> int:
        if self.ranks is None:
            return self.first + sum(map(int.__mul__, coordinate, self.strides))
        index = 0
        for c, n in zip(coordinate, self.shape, strict=True):
            index = index * n + c
        return self.ranks[index]

    def coordinate(self, rank: int) -> tuple[int, ...] | None:
        """Where ``rank`` stands; None if it does not."""
        found = [0] * len(self.shape)
        if self.ranks is None:
            rest = rank - self.first
            for d in self._by_stride:
                if self.shape[d] > 1:
                    if rest < 0:
                        return None
                    found[d] = min(rest // self.strides[d], self.shape[d] - 1)
                    rest -= found[d] * self.strides[d]
            return tuple(found) if rest == 0 else None
        if self._places is None:
            self._places = {r: i for i, r in enumerate(self.ranks)}
        index = self._places.get(rank)
        if index is None:
            return None
        for d in range(len(self.shape) - 1, -1, -1):
            index, found[d] = divmod(index, self.shape[d])
        return tuple(found)

    def __iter__(self) -> Iterator[int]:
        """All ranks in row-major order."""
        if self.ranks is not None:
            return iter(self.ranks)
        if not self.shape:
            return iter((self.first,))
        spans = [range(0, n * s, s) if s else (0,) * n for n, s in zip(self.shape, self.strides, strict=True)]
        if len(spans) == 1:
            return (self.first + i for i in spans[0])
        return (self.first + sum(offsets) for offsets in product(*spans))

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Mesh)
            and self._hash == other._hash
            and (self.shape, self.first, self.strides, self.ranks)
            == (other.shape, other.first, other.strides, other.ranks)
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        where = f"first={self.first}, strides={self.strides}" if self.ranks is None else f"ranks={self.ranks}"
        return f"Mesh(shape={self.shape}, {where})"


REPLICATED = -1
"""The placement of a mesh dimension along which all ranks hold the same."""


class Cut:
    """How a tensor is cut over a mesh: one placement per mesh dimension (a tensor dimension, or
    ``REPLICATED``), and the order in which the sharded mesh dimensions cut, each what the one before it
    left."""

    __slots__ = ("_hash", "_steps", "mesh", "order", "placements", "replicas", "sharded")

    def __init__(self, mesh: Mesh, placements: tuple[int, ...], order: tuple[int, ...]) -> None:
        self.mesh = mesh
        self.placements = placements
        self.order = order
        self.sharded = tuple(d for d, p in enumerate(placements) if p >= 0)
        self.replicas = prod(n for n, p in zip(mesh.shape, placements, strict=True) if p < 0)
        # For each tensor dimension that is cut: the mesh dimensions that do it, in order.
        steps: dict[int, list[int]] = {}
        for d in order:
            steps.setdefault(placements[d], []).append(d)
        self._steps = {p: tuple(dims) for p, dims in sorted(steps.items())}
        self._hash = hash((mesh, placements, order))

    @staticmethod
    def replicated(ranks: Sequence[int]) -> Cut:
        """Whole on each of these ascending ranks."""
        mesh = Mesh.spanning(ranks)
        return Cut(mesh, (REPLICATED,) * len(mesh.shape), ())

    @property
    def lowest_ndim(self) -> int:
        """How many dimensions a tensor needs to be cut like this."""
        return max(self.placements, default=-1) + 1

    def box(self, shape: Sequence[int], coordinate: Sequence[int]) -> Box:
        """What a coordinate holds of a tensor of this shape; possibly a box without elements."""
        offset = [0] * len(shape)
        size = list(shape)
        for d in self.order:
            p = self.placements[d]
            lo, hi = chunk(size[p], self.mesh.shape[d], coordinate[d])
            offset[p] += lo
            size[p] = hi - lo
        return Box(tuple(offset), tuple(size))

    def replica(self, coordinate: Sequence[int]) -> int:
        """Which replica of its box a coordinate holds."""
        index = 0
        for n, p, c in zip(self.mesh.shape, self.placements, coordinate, strict=True):
            if p < 0:
                index = index * n + c
        return index

    def rank(self, coordinate: Sequence[int], replica: int) -> int:
        """The rank that holds this replica of what ``coordinate`` holds."""
        place = list(coordinate)
        for d in range(len(place) - 1, -1, -1):
            if self.placements[d] < 0:
                replica, place[d] = divmod(replica, self.mesh.shape[d])
        return self.mesh.rank(place)

    def boxes(self, shape: Sequence[int], within: Box) -> Iterator[tuple[list[int], Box]]:
        """The boxes that have elements in common with ``within``, each once, with the coordinate of replica
        0.

        Takes time for what it yields, not for what there is.
        """
        if any(s < 1 for s in within.size):
            return
        spans = []
        for p, dims in self._steps.items():
            lo = within.offset[p]
            spans.append(list(_spans(0, shape[p], [self.mesh.shape[d] for d in dims], lo, lo + within.size[p], ())))
        steps = list(self._steps.items())
        for chosen in product(*spans):
            coordinate = [0] * len(self.placements)
            offset = [0] * len(shape)
            size = list(shape)
            for (p, dims), (places, lo, hi) in zip(steps, chosen, strict=True):
                for d, c in zip(dims, places, strict=True):
                    coordinate[d] = c
                offset[p] = lo
                size[p] = hi - lo
            yield coordinate, Box(tuple(offset), tuple(size))

    def counts(self, shape: Sequence[int]) -> tuple[int, int]:
        """How many boxes of a tensor of this shape have elements, and how many of them at least are as large as the
        first. Does not go through them."""
        boxes = large = 1
        for p, dims in self._steps.items():
            some, full = _counts(shape[p], tuple(self.mesh.shape[d] for d in dims))
            boxes *= some
            large *= full
        return boxes, large

    def __eq__(self, other: object) -> bool:
        return self is other or (
            isinstance(other, Cut)
            and self._hash == other._hash
            and self.placements == other.placements
            and self.order == other.order
            and self.mesh == other.mesh
        )

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"Cut({self.mesh}, placements={self.placements}, order={self.order})"


def _spans(
    lo: int, hi: int, parts: Sequence[int], want_lo: int, want_hi: int, places: tuple[int, ...]
) -> Iterator[tuple[tuple[int, ...], int, int]]:
    """The pieces of [lo, hi) cut into ``parts[0]``, each of these into ``parts[1]`` …, that touch the
    wanted range."""
    if not parts:
        yield places, lo, hi
        return
    n = hi - lo
    if n == 0:
        return
    q = -(-n // parts[0])
    first = max(want_lo - lo, 0) // q
    last = (min(want_hi, hi) - lo - 1) // q
    for i in range(first, last + 1):
        yield from _spans(lo + i * q, min(lo + (i + 1) * q, hi), parts[1:], want_lo, want_hi, (*places, i))


@lru_cache(maxsize=4096)
def _counts(n: int, parts: tuple[int, ...]) -> tuple[int, int]:
    """Of ``n`` indices cut into ``parts[0]``, each of these into ``parts[1]`` …: pieces, and those of the largest size."""
    if n == 0 or not parts:
        return (1, 1) if n else (0, 0)
    q = -(-n // parts[0])
    whole, rest = divmod(n, q)
    some, full = _counts(q, parts[1:])
    return whole * some + _counts(rest, parts[1:])[0], whole * full
