"""Two checkpoints, compared by value, whatever the layouts in which they were saved.

Under the same layout chunks with equal digests are equal, and are not read.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from math import prod
from typing import Any

from tierckpt import _native
from tierckpt.cli.elements import Difference, compare, merged
from tierckpt.cli.target import DATA_ERRORS, Problem, problem_of
from tierckpt.format import canonical, shard, tree
from tierckpt.format.boxes import Box, flat_range
from tierckpt.format.canonical import JSON
from tierckpt.format.digest import CHUNK
from tierckpt.tiers.content import BATCH, Content, Region, batches, blocks

Progress = Callable[[int, int], None]

Pair = tuple[Any, Any]
"""What A has and what B has."""

ABSENT: Any = object()
"""In a pair: that side has nothing of this name."""


@dataclass
class Differences:
    """What differs between A and B. Names are as stored.

    Attributes:
        kinds: tensors of another dtype or shape: (dtype, shape) of both.
        tensors: those whose elements differ; ``first`` is a position in the whole tensor, in row-major order.
        equal: number of tensors that are equal bit by bit.
        unread: tensors that could not be compared; ``problems`` say why.
        values, own: encoded values that differ; the latter by rank and name.
        structure: names at which the states are built differently.
        metadata: None if it is equal.
    """

    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    kinds: dict[str, Pair] = field(default_factory=dict)
    tensors: dict[str, Difference] = field(default_factory=dict)
    equal: int = 0
    unread: list[str] = field(default_factory=list)
    values: dict[str, Pair] = field(default_factory=dict)
    own: dict[tuple[int, str], Pair] = field(default_factory=dict)
    structure: dict[str, tuple[str, str]] = field(default_factory=dict)
    metadata: Pair | None = None
    problems: list[Problem] = field(default_factory=list)

    @property
    def none(self) -> bool:
        """Whether A and B are equal, as far as could be seen, and nothing is damaged."""
        found: Iterable[Any] = (self.only_a, self.only_b, self.kinds, self.tensors, self.unread, self.values)
        return not (any(found) or self.own or self.structure or self.problems or self.metadata)

    def damaged(self, error: Exception) -> None:
        """Record what is wrong, once."""
        problem = problem_of(error)
        if problem not in self.problems:
            self.problems.append(problem)


def differences(a: Content, b: Content, progress: Progress | None = None) -> Differences:
    """Everything that differs. Damage is recorded, and what it touches left out."""
    found = Differences()
    _compare_tensors(a, b, found, progress)
    _compare_structure(a, b, found)
    _compare_values(a, b, found)
    if _differ(a.manifest.metadata, b.manifest.metadata):
        found.metadata = a.manifest.metadata, b.manifest.metadata
    return found


# Tensors


def _compare_tensors(a: Content, b: Content, found: Differences, progress: Progress | None) -> None:
    """Each pair of tensors that have bytes of their own once, whatever names share them."""
    names: dict[tuple[int, int], list[str]] = {}
    for name, i, j in _paired(a, b):
        if i is None:
            found.only_b.append(name)
        elif j is None:
            found.only_a.append(name)
        else:
            kinds = a.layout.tensor(i)[1:], b.layout.tensor(j)[1:]
            if kinds[0] != kinds[1]:
                found.kinds[name] = kinds
            else:
                names.setdefault((a.layout.alias(i), b.layout.alias(j)), []).append(name)
    if a.manifest.layout == b.manifest.layout:
        wanted = [(pair, box) for pair, box in _unequal(a, b) if pair in names]
    else:
        wanted = [(pair, box) for pair in sorted(names) for box in _blocks(a, pair[0])]
    results: dict[tuple[int, int], Difference] = {}
    unread: set[tuple[int, int]] = set()
    memory = _native.Buffer(BATCH), _native.Buffer(BATCH)
    total = sum(_nbytes(a, pair[0], box) for pair, box in wanted)
    done = at = 0
    for batch in batches(a.layout, ((pair[0], box) for pair, box in wanted), BATCH):
        pairs = [pair for pair, _ in wanted[at : at + len(batch)]]
        at += len(batch)
        try:
            a.fill(batch, memory[0])
            b.fill([region._replace(tensor=j) for region, (_, j) in zip(batch, pairs, strict=True)], memory[1])
        except DATA_ERRORS as error:
            found.damaged(error)
            unread.update(pairs)
            continue
        for region, pair in zip(batch, pairs, strict=True):
            more = _compare_region(a, region, memory)
            if more.elements:
                results[pair] = merged(results.get(pair, Difference()), more)
            done += region.nbytes
        if progress is not None:
            progress(done, total)
    for pair, same in names.items():
        if pair in results:
            found.tensors.update(dict.fromkeys(same, results[pair]))
        if pair in unread:
            found.unread += same
        elif pair not in results:
            found.equal += len(same)
    found.tensors = dict(sorted(found.tensors.items()))
    found.unread.sort()


def _paired(a: Content, b: Content) -> Iterator[tuple[str, int | None, int | None]]:
    """All names of tensors in order, with the number of the tensor in each layout."""

    def named(content: Content, side: int) -> Iterator[tuple[str, int, int]]:
        return ((name, side, i) for i, name in enumerate(content.layout))

    for name, group in groupby(heapq.merge(named(a, 0), named(b, 1)), key=lambda each: each[0]):
        numbers: list[int | None] = [None, None]
        for _, side, i in group:
            numbers[side] = i
        yield name, numbers[0], numbers[1]


def _nbytes(content: Content, index: int, box: Box) -> int:
    return prod(box.size) * shard.dtype(content.layout.dtype(index)).size


def _blocks(content: Content, index: int) -> Iterator[Box]:
    return blocks(content.layout.shape(index), BATCH // shard.dtype(content.layout.dtype(index)).size)


def _compare_region(a: Content, region: Region, memory: tuple[_native.Buffer, _native.Buffer]) -> Difference:
    """How the region differs in the two memories; ``first`` is a position in the whole tensor."""
    x, y = (memoryview(each)[region.start : region.start + region.nbytes] for each in memory)
    found = compare(x, y, a.layout.dtype(region.tensor))
    if not found.elements:
        return found
    index, rest = 0, found.first
    shape = a.layout.shape(region.tensor)
    for d, n in enumerate(region.box.size):
        here, rest = divmod(rest, prod(region.box.size[d + 1 :]))
        assert here < n
        index = index * shape[d] + region.box.offset[d] + here
    return found._replace(first=index)


def _unequal(a: Content, b: Content) -> Iterator[tuple[tuple[int, int], Box]]:
    """Under one layout: the parts of tensors that lie in chunks whose digests differ."""
    layout = a.layout
    for rank in layout.writers:
        spans = _unequal_spans(a, b, rank)
        if not spans:
            continue
        kinds = {layout.name(i): i for i, _, _ in layout.rank_pieces(rank)}
        boxes = {(i, k): box for i, k, box in layout.rank_pieces(rank)}
        at = 0
        for entry in a.header(rank).entries:
            if entry.dtype is None:
                break
            item = shard.dtype(entry.dtype).size
            while at < len(spans) and spans[at][1] <= entry.offset:
                at += 1
            i = kinds[entry.tensor]
            piece = boxes[i, entry.k]
            for lo, hi in spans[at:]:
                if lo >= entry.offset + entry.nbytes:
                    break
                first = max(lo - entry.offset, 0) // item
                last = -(-min(hi - entry.offset, entry.nbytes) // item)
                for box in flat_range(piece.size, first, last):
                    for part in blocks(box.size, BATCH // item):
                        yield (i, i), _within(piece, _within(box, part))


def _within(outer: Box, inner: Box) -> Box:
    """``inner``, whose offset is relative to that of ``outer``."""
    return Box(tuple(o + p for o, p in zip(outer.offset, inner.offset, strict=True)), inner.size)


def _unequal_spans(a: Content, b: Content, rank: int) -> list[tuple[int, int]]:
    """The bytes [lo, hi) of a shard in chunks that differ, ascending and apart; all, if their headers differ in size.

    Both shards have to be there, although those that are equal are not read.
    """
    one, other = a.receipt(rank), b.receipt(rank)
    for content, receipt in ((a, one), (b, other)):
        content.store.open_shard(receipt).close()
    if one.header_size != other.header_size:
        return [(0, one.size)]
    found: list[tuple[int, int]] = []
    for index in range(-(-one.size // CHUNK)):
        lo, hi = index * CHUNK, min((index + 1) * CHUNK, one.size)
        if hi <= other.size and one.chunk(index) == other.chunk(index):
            continue
        if found and found[-1][1] == lo:
            found[-1] = found[-1][0], hi
        else:
            found.append((lo, hi))
    return found


# Everything else


def _compare_structure(a: Content, b: Content, found: Differences) -> None:
    for name in sorted(a.nodes.keys() & b.nodes.keys()):
        kinds = _described(a.nodes[name]), _described(b.nodes[name])
        if kinds[0] != kinds[1]:
            found.structure[name] = kinds


def _described(node: tree.Node) -> str:
    """What a node is, without what it holds."""
    if node[0] == "array":
        return f"array {node[1]} {node[2]}"
    if node[0] == "namedtuple":
        return f"namedtuple {node[1]}({', '.join(node[2])})"
    if node[0] == "subclass":
        return f"subclass {node[1]} {canonical.encode(node[3]).decode()}"
    return str(node[0])


def _compare_values(a: Content, b: Content, found: Differences) -> None:
    sides = a, b
    needed = [{*content.homes.values(), *content.own} for content in sides]
    shared: tuple[dict[str, JSON], dict[str, JSON]] = {}, {}
    lost: set[str] = set()
    for rank in sorted(needed[0] | needed[1]):
        try:
            if all(rank in ranks for ranks in needed) and _same_blob(a, b, rank):
                continue
            blobs = [
                content.values(rank) if rank in ranks else {} for content, ranks in zip(sides, needed, strict=True)
            ]
            own = []
            for content, blob, mine in zip(sides, blobs, shared, strict=True):
                mine.update((name, content.pick(blob, name, rank)) for name in _at_home(content, rank))
                own.append({name: content.pick(blob, name, rank) for name in content.own.get(rank, ())})
        except DATA_ERRORS as error:
            found.damaged(error)
            lost.update(name for content in sides for name in _at_home(content, rank))
            continue
        found.own.update({(rank, name): pair for name, pair in _pairs(*own)})
    found.values.update((name, pair) for name, pair in _pairs(*shared) if name not in lost)


def _at_home(content: Content, rank: int) -> list[str]:
    """The values, of no rank in particular, that are in the blob of ``rank``."""
    return [name for name, home in content.homes.items() if home == rank]


def _same_blob(a: Content, b: Content, rank: int) -> bool:
    """Whether the blobs of a rank are known to be the same without reading them."""
    if a.manifest.layout != b.manifest.layout or a.blob(rank) != b.blob(rank):
        return False
    lo, hi = a.blob(rank)
    return not any(first < hi and lo < last for first, last in _unequal_spans(a, b, rank))


def _pairs(one: dict[str, JSON], other: dict[str, JSON]) -> Iterator[tuple[str, Pair]]:
    """What differs of two sets of encoded values."""
    for name in sorted(one.keys() | other.keys()):
        pair = one.get(name, ABSENT), other.get(name, ABSENT)
        if ABSENT in pair or _differ(*pair):
            yield name, pair


def _differ(one: JSON, other: JSON) -> bool:
    """Whether two encoded values differ; for Python ``True`` and 1 are equal."""
    return canonical.encode(one) != canonical.encode(other)
