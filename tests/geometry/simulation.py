"""Jobs of any number of ranks in one process: what each rank holds, the shards that it writes, how it loads.

Everything between a live tensor and a shard's bytes, and back, is the package's own; there are only no processes and
no files. Where the local tensors lie is worked out here on its own, with ``torch.chunk`` of element numbers.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from tests.geometry.memory import ALL_DTYPES, Local, at, numbers
from tierckpt.format import blob, shard, values
from tierckpt.format.boxes import Box, flat_range, whole
from tierckpt.format.layout import Layout
from tierckpt.format.placement import Placement
from tierckpt.restore.plan import Wanted, plan
from tierckpt.state.layout import Described, Describer, destination
from tierckpt.state.marks import PerRank, Pieces
from tierckpt.state.plan import WritePlan, compose, local_description
from tierckpt.state.tree import flatten

SIZES = [0, 1, 1, 2, 3, 4, 5, 6, 7, 11, 13, 19, 25]
KEYS: list[Any] = ["w", "b", "a/b", "x#0", "~", "7", "é.ü", "", 0, 7, -3, True, None, (1, "t"), 2.5, "w" * 90]


@dataclass
class Truth:
    """A state as the user means it: nested containers in which leaf k is ``Leaf(k)``.

    ``tied``: leaves that are the same tensor as an earlier one. ``everywhere``: leaves that every rank has.
    """

    tree: Any
    tensors: list[torch.Tensor]
    tied: dict[int, int]
    everywhere: set[int]

    @staticmethod
    def draw(rng: random.Random, tensors: int) -> Truth:
        truth = Truth(None, [], {}, set())
        count = rng.randint(1, tensors)
        for k in range(count):
            if k and rng.random() < 0.15:
                truth.tied[k] = rng.choice([i for i in range(k) if i not in truth.tied])
                truth.tensors.append(truth.tensors[truth.tied[k]])
                continue
            shape = [rng.choice(SIZES) for _ in range(rng.choice([0, 1, 1, 2, 2, 2, 3, 4]))]
            while prod(shape) > 2500:
                shape.pop()
            dtype = rng.choice(ALL_DTYPES if rng.random() < 0.5 else [torch.float32, torch.bfloat16])
            truth.tensors.append(numbers(dtype, shape, start=rng.randrange(1000)))
        truth.tree = truth._container(rng, list(range(count)), 0, loose=True)
        return truth

    def _container(self, rng: random.Random, leaves: list[int], depth: int, *, loose: bool) -> Any:
        """Containers that hold these leaves. Only of dicts (``loose``) a rank may lack items."""
        kind = rng.choice([dict, dict, OrderedDict, list, tuple])
        loose = loose and kind not in (list, tuple)
        items: list[Any] = []
        while leaves:
            if depth < 3 and rng.random() < 0.25:
                take = rng.randint(1, len(leaves))
                items.append(self._container(rng, leaves[:take], depth + 1, loose=loose))
                leaves = leaves[take:]
            else:
                if not loose:
                    self.everywhere.add(leaves[0])
                items.append(Leaf(leaves[0]))
                leaves = leaves[1:]
        if kind in (list, tuple):
            return kind(items)
        keys = rng.sample(KEYS, len(items)) if len(items) <= len(KEYS) else list(range(len(items)))
        return kind(zip(keys, items, strict=True))


@dataclass(frozen=True)
class Leaf:
    number: int


class Sharded:
    """What the package looks at of a DTensor."""

    def __init__(self, spec: Any, shape: torch.Size, local: torch.Tensor) -> None:
        self._spec = spec
        self._local_tensor = local
        self.shape = shape
        self.dtype = local.dtype


@dataclass
class Grid:
    """Ranks, in row-major order of ``sizes``, over which a tensor is cut; ``order[p]``: the mesh dimensions that cut
    tensor dimension p, in their order."""

    ranks: Sequence[int]
    sizes: tuple[int, ...]
    order: dict[int, list[int]]
    explicit: bool

    @staticmethod
    def draw(rng: random.Random, ranks: Sequence[int], ndim: int) -> Grid:
        sizes = _factors(rng, len(ranks))
        order: dict[int, list[int]] = {}
        for d in rng.sample(range(len(sizes)), len(sizes)):
            # The first dimension more often, so that several mesh dimensions cut the same one.
            p = rng.randrange(-1, ndim if rng.random() < 0.8 else min(ndim, 1))
            if p >= 0:
                order.setdefault(p, []).append(d)
        return Grid(ranks, sizes, order, rng.random() < 0.3)

    def box(self, shape: Sequence[int], rank: int) -> Box:
        """What really chunking the element numbers of each dimension, again and again, leaves for a rank."""
        coordinate = self._coordinate(rank)
        left = [torch.arange(n) for n in shape]
        for p, dims in self.order.items():
            for d in dims:
                parts = left[p].chunk(self.sizes[d]) if len(left[p]) else ()
                left[p] = parts[coordinate[d]] if coordinate[d] < len(parts) else left[p][:0]
        return Box(tuple(int(n[0]) if len(n) else 0 for n in left), tuple(map(len, left)))

    def _coordinate(self, rank: int) -> tuple[int, ...]:
        place = self.ranks.index(rank)
        found = []
        for n in reversed(self.sizes):
            place, c = divmod(place, n)
            found.append(c)
        return tuple(reversed(found))

    def spec(self, rank: int) -> Any:
        """What a DTensorSpec says of it on this rank, which need not be one of the mesh."""
        placements: list[Any] = [Replicate()] * len(self.sizes)
        for p, dims in self.order.items():
            for number, d in enumerate(dims):
                factor = prod(self.sizes[e] for e in dims[:number] if e > d)
                strided = factor > 1 and not self.explicit
                placements[d] = _StridedShard(p, split_factor=factor) if strided else Shard(p)
        coordinate = self._coordinate(rank) if rank in self.ranks else None
        mesh = SimpleNamespace(
            mesh=torch.tensor(list(self.ranks)).view(self.sizes), shape=self.sizes, get_coordinate=lambda: coordinate
        )
        order = tuple(_Order(p, tuple(dims)) for p, dims in sorted(self.order.items())) if self.explicit else None
        return SimpleNamespace(mesh=mesh, placements=tuple(placements), shard_order=order)


class _Order(NamedTuple):
    """How newer versions of torch write the order of cuts."""

    tensor_dim: int
    mesh_dims: tuple[int, ...]


def _factors(rng: random.Random, n: int) -> tuple[int, ...]:
    """Up to four sizes of a mesh of n ranks, dimensions of size 1 among them."""
    sizes = [1] * rng.randint(1, 4)
    for prime in (2, 3, 5, 7, 11, 13, 17, 19, 23):
        while n % prime == 0:
            n //= prime
            sizes[rng.randrange(len(sizes))] *= prime
    sizes[rng.randrange(len(sizes))] *= n
    return tuple(sizes)


@dataclass
class Holding:
    """How a world holds one tensor: whole on some ranks, cut over disjoint grids, or in listed boxes."""

    whole: set[int] = field(default_factory=set)
    grids: list[Grid] = field(default_factory=list)
    lookers: set[int] = field(default_factory=set)  # know the first grid, but stand in none
    boxes: dict[int, list[Box]] = field(default_factory=dict)

    @staticmethod
    def draw(rng: random.Random, shape: Sequence[int], world: int, everywhere: bool) -> Holding:
        ranks = rng.sample(range(world), world) if rng.random() < 0.3 else list(range(world))
        kind = rng.random()
        if kind < 0.15:
            count = world if everywhere else rng.randint(1, world)
            return Holding(whole=set(ranks[:count]))
        if kind < 0.35 and 0 not in shape:
            return Holding._listed(rng, shape, ranks, everywhere)
        found = Holding()
        while ranks:
            part = ranks if rng.random() < 0.7 else ranks[: rng.randint(1, len(ranks))]
            ranks = ranks[len(part) :]
            found.grids.append(Grid.draw(rng, part, len(shape)))
            rest = rng.random()
            if rest < 0.3 and len(part) <= len(ranks):
                # The same grid once more, by ranks that know nothing of the first ones.
                twin = found.grids[-1]
                found.grids.append(Grid(ranks[: len(part)], twin.sizes, twin.order, twin.explicit))
                ranks = ranks[len(part) :]
            elif rest < 0.5:
                found.whole.update(ranks)
                break
            elif rest < 0.8:
                # A rank can have a DTensor over a mesh in which it is not.
                found.lookers.update(ranks if everywhere else [rank for rank in ranks if rng.random() < 0.5])
                break
        return found

    @staticmethod
    def _listed(rng: random.Random, shape: Sequence[int], ranks: Sequence[int], everywhere: bool) -> Holding:
        if rng.random() < 0.3:
            # Flat ranges, as fully sharded data parallelism of torch's first kind has them.
            total = prod(shape)
            cuts = sorted(rng.choices(range(total + 1), k=rng.randint(0, len(ranks) - 1)))
            spans = list(zip([0, *cuts], [*cuts, total], strict=True))
            cells = [flat_range(shape, lo, hi) for lo, hi in spans]
            found = {rank: boxes for rank, boxes in zip(ranks, cells, strict=False) if boxes}
        else:
            found = {}
            for box in _shatter(rng, whole(shape), rng.choice([0.3, 0.6, 0.8])):
                for rank in {rng.choice(ranks) for _ in range(rng.choice([1, 1, 1, 2]))}:
                    found.setdefault(rank, []).append(box)
        for rank in ranks:
            rng.shuffle(found.get(rank, []))
            if rank not in found and (everywhere or rng.random() < 0.3):
                found[rank] = [Box((0,) * len(shape), (0,) * len(shape))] if shape else [whole(shape)]
        return Holding(boxes=found)

    def __contains__(self, rank: int) -> bool:
        return (
            rank in self.whole
            or rank in self.lookers
            or rank in self.boxes
            or any(rank in grid.ranks for grid in self.grids)
        )

    def value(self, rank: int, truth: torch.Tensor, rng: random.Random) -> tuple[Any, list[tuple[Box, Local]]]:
        """The live value of a rank that has it, and the memory that is in it. Its boxes are new memory."""
        if rank in self.boxes:
            held = [(box, Local(box.size, truth.dtype, rng)) for box in self.boxes[rank]]
            return Pieces(truth.shape, [(box.offset, local.tensor) for box, local in held]), held
        if rank in self.whole:
            box = whole(truth.shape)
            local = Local(truth.shape, truth.dtype, rng)
            return local.tensor, [(box, local)]
        grid = next((grid for grid in self.grids if rank in grid.ranks), self.grids[0])
        if rank in grid.ranks:
            box = grid.box(truth.shape, rank)
            local = Local(box.size, truth.dtype, rng)
            return Sharded(grid.spec(rank), truth.shape, local.tensor), [(box, local)]
        return Sharded(grid.spec(rank), truth.shape, truth.new_empty(0)), []


def _shatter(rng: random.Random, box: Box, eagerness: float) -> Iterator[Box]:
    """Boxes that tile ``box``, cut in two at random places again and again."""
    long = [d for d, n in enumerate(box.size) if n > 1]
    if not long or rng.random() > eagerness:
        yield box
        return
    d = rng.choice(long)
    cut = rng.randrange(1, box.size[d])
    for lo, hi in ((0, cut), (cut, box.size[d])):
        offset = (*box.offset[:d], box.offset[d] + lo, *box.offset[d + 1 :])
        size = (*box.size[:d], hi - lo, *box.size[d + 1 :])
        yield from _shatter(rng, Box(offset, size), eagerness * 0.85)


@dataclass
class Stored:
    """A checkpoint in memory: the bytes of its layout, and those of each rank's shard."""

    layout: bytes
    shards: dict[int, bytes]


class Rank:
    """One simulated process: its live state in a form of its own."""

    def __init__(self, rank: int, world: int, state: Any) -> None:
        self.rank = rank
        self.world = world
        self.live: dict[str, Any] = {}
        self.memory: list[tuple[str, Box, Local, torch.Tensor]] = []
        self._flat = flatten(state)
        self._describer = Describer()

    def names(self) -> dict[int, str]:
        """The name of each placeholder, by its identity."""
        return {id(tensor): name for name, tensor in self._flat.tensors.items()}

    def described(self) -> dict[str, Described]:
        found = {}
        for name in self._flat.tensors:
            value = self.live[name]
            describe = self._describer._sharded if isinstance(value, Sharded) else self._describer.describe
            found[name] = describe(value, name=name)
        return found

    def say(self, described: dict[str, Described]) -> bytes:
        own = bool(self._flat.per_rank)
        return local_description(described, tree=self._flat.tree, per_rank=own, world=self.world)

    def values(self, layout: Layout) -> bytes | None:
        """What the blob of this rank says; None: it has none."""
        if not layout.has_blob(self.rank):
            return None
        first = any(tree.ranks[0][0] == self.rank for tree in layout.trees)
        live = {**(self._flat.values if first else {}), **self._flat.per_rank}
        return blob.encode({name: values.encode(value, path=name) for name, value in live.items()})

    def write(self, layout: Layout, rng: random.Random) -> bytes | None:
        """The bytes of the shard, copied in ranges that mind no element's bounds."""
        said = self.values(layout)
        mine = WritePlan(layout, self.rank, self.described(), None if said is None else len(said))
        assert (mine.header is not None) == (self.rank in layout.writers)
        if mine.header is None:
            return None
        table = mine.table()
        assert table.span == (0, mine.size) and table.nbytes == mine.size
        pointers, _keep = mine.pointers(self.live, said)
        data = bytearray(mine.size)
        for lo, hi in _ranges(rng, mine.size):
            table.gather(pointers, lo, hi, memoryview(data)[lo:hi])
        return bytes(data)

    def read(self, layout: Layout, stored: Stored, rng: random.Random) -> None:
        """Fill all memory."""
        wanted = []
        for name, one in self.described().items():
            index = layout.index(name)
            assert index is not None, f"{name} is not in the layout"
            assert (layout.dtype(index), layout.shape(index)) == (str(one.dtype).removeprefix("torch."), one.shape)
            wanted.append(Wanted(index, [destination(box, tensor, name=name) for box, tensor in one.pieces]))
        for rank, read in plan(layout, wanted).items():
            data = stored.shards[rank]
            table, pointers = read.table(Placement.of(layout, header(layout, rank, data)))
            for lo, hi in _ranges(rng, len(data)):
                table.scatter(pointers, lo, hi, memoryview(data)[lo:hi])
        for want in wanted:
            for place in want.destinations:
                place.finish()


def header(layout: Layout, rank: int, data: bytes) -> shard.Header:
    """That of a shard, checked as readers do."""
    name = f"shard {rank}"
    size = shard.header_size(data[:8], name=name, size=len(data))
    return shard.check(
        data[:size],
        layout.shard_pieces(rank),
        layout=layout.hash,
        rank=rank,
        blob=layout.has_blob(rank),
        name=name,
        size=len(data),
    )


def _ranges(rng: random.Random, size: int) -> Iterator[tuple[int, int]]:
    cuts = sorted({0, size, *(rng.randrange(size + 1) for _ in range(rng.choice([0, 1, 4])))})
    spans = list(pairwise(cuts))
    rng.shuffle(spans)
    yield from spans


class World:
    """All ranks of a job that holds a `Truth` in a layout of its own."""

    def __init__(self, truth: Truth, size: int, rng: random.Random) -> None:
        self._rng = rng
        holdings: list[Holding] = []
        tied: dict[int, float] = {}  # leaf: on which share of the ranks its tie is real
        for k, tensor in enumerate(truth.tensors):
            everywhere = k in truth.everywhere or k in truth.tied or k in truth.tied.values()
            if k in truth.tied and rng.random() < 0.7:
                tied[k] = rng.choice([1.0, 1.0, 0.5])
                holdings.append(holdings[truth.tied[k]])
            else:
                holdings.append(Holding.draw(rng, tensor.shape, size, everywhere))
        # Tensors that are tied only here and there need not be stored once.
        self.once = set(tied.values()) <= {1.0}
        self.ties = set(tied)
        extra = rng.random() < 0.3
        self.ranks: list[Rank] = []
        for number in range(size):
            placeholders = {k: torch.empty(0) for k, held in enumerate(holdings) if number in held}
            state: dict[str, Any] = {"state": _pruned(truth.tree, placeholders), "step": 3}
            if extra:
                state["rng"] = PerRank(f"of rank {number}")
            rank = Rank(number, size, state)
            names = rank.names()
            made: dict[int, Any] = {}
            for k, placeholder in placeholders.items():
                name, tensor = names[id(placeholder)], truth.tensors[k]
                if k in tied and rng.random() < tied[k]:
                    rank.live[name] = made[k] = made[truth.tied[k]]
                    continue
                made[k], held = holdings[k].value(number, tensor, rng)
                rank.live[name] = made[k]
                rank.memory += [(name, box, local, at(tensor, box)) for box, local in held]
            self.ranks.append(rank)

    def fill(self) -> None:
        """Give every rank the values that are true."""
        for rank in self.ranks:
            for _, _, local, true in rank.memory:
                local.tensor.copy_(true)

    def wipe(self) -> None:
        for rank in self.ranks:
            for _, _, local, _ in rank.memory:
                local.wipe()

    def save(self) -> Stored:
        members: dict[bytes, list[int]] = {}
        for rank in self.ranks:
            members.setdefault(rank.say(rank.described()), []).append(rank.rank)
        groups = list(members.items())
        self._rng.shuffle(groups)
        layout = compose([said for said, _ in groups], [ranks for _, ranks in groups], len(self.ranks))
        shards = {rank.rank: rank.write(layout, self._rng) for rank in self.ranks}
        return Stored(layout.encode(), {number: data for number, data in shards.items() if data is not None})

    def load(self, stored: Stored) -> None:
        layout = Layout.decode(stored.layout, what="layout")
        assert list(layout.writers) == sorted(stored.shards)
        for rank in self.ranks:
            rank.read(layout, stored, self._rng)

    def wrong(self) -> list[str]:
        """Where memory differs from what is true."""
        return [
            f"rank {rank.rank} of {len(self.ranks)}: {name} {box}, strides {local.tensor.stride()}"
            for rank in self.ranks
            for name, box, local, true in rank.memory
            if not local.holds(true)
        ]


def _pruned(node: Any, kept: dict[int, torch.Tensor]) -> Any:
    """The same containers with the leaves that a rank has."""
    if isinstance(node, Leaf):
        return kept[node.number]
    if isinstance(node, (list, tuple)):
        return type(node)(_pruned(item, kept) for item in node)
    items = [(k, v) for k, v in node.items() if not isinstance(v, Leaf) or v.number in kept]
    return type(node)((key, _pruned(item, kept)) for key, item in items)


def stored_bytes(stored: Stored) -> int:
    """Bytes of all pieces, without headers and blobs."""
    layout = Layout.decode(stored.layout, what="layout")
    found = [entry for rank, data in stored.shards.items() for entry in header(layout, rank, data).entries]
    return sum(entry.nbytes for entry in found if entry.dtype is not None)
