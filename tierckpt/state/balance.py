"""Which replica writes what, so that every byte is written once and all ranks write about as much.

All ranks compute this for themselves from the same input, so it is integer arithmetic in a fixed order
throughout.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from math import prod
from typing import NamedTuple

import torch

from tierckpt.format.boxes import Box
from tierckpt.format.grid import Cut

SMALL = 4 << 20
"""Bytes below which a tensor is small: it is not split, and few ranks write all of them."""

SMALL_SHARE = 64 << 20
"""Bytes of small tensors for which there are two writers."""

TINY = 64 << 10
"""Bytes up to which a tensor is tiny: its first replica writes it, so that what belongs together comes from one rank where ranks
differ, as the running statistics of BatchNorm do."""

TINY_SHARE = 64 << 20
"""Bytes of tiny tensors, the smallest of them, for which that holds."""

PART = 4 << 20
"""Bytes below which a box is not split further."""

SLACK = 10
"""A rank may write so many per cent more than the level at which all would write the same."""

_WINDOWS = 1 << 16  # Additions for which every place is tried for a box that is split.


class Gridded(NamedTuple):
    """A tensor on a grid, with the bytes of an item."""

    cut: Cut
    shape: tuple[int, ...]
    item: int


class Offered(NamedTuple):
    """A listed piece of so many bytes that each of these ranks holds."""

    ranks: Sequence[int]
    nbytes: int


def choose(
    world: int, gridded: Sequence[Gridded], offered: Sequence[Offered]
) -> tuple[list[tuple[int, int]], list[int]]:
    """(first replica, number of replicas) that write each gridded tensor, and the rank that writes each
    offered piece.

    First what leaves no choice is counted; then tiny tensors, by the first replica; then small ones, two writers for each 64 MiB;
    then listed pieces; then large tensors, split over as few replicas as it takes to be level.
    """
    choices = [(0, 1)] * len(gridded)
    writers = [piece.ranks[0] for piece in offered]
    groups: dict[Cut, list[int]] = {}
    for i, tensor in enumerate(gridded):
        if tensor.cut.replicas > 1 and 0 not in tensor.shape:
            groups.setdefault(tensor.cut, []).append(i)
    if not groups and all(len(piece.ranks) == 1 for piece in offered):
        return choices, writers
    loads = torch.zeros(world, dtype=torch.int64)
    _count_fixed(loads, gridded, offered)
    # Those with the widest choice of ranks come first among the small, last among the large ones.
    order = sorted(groups, key=lambda cut: cut.mesh.size // cut.replicas)
    small = {cut: [i for i in groups[cut] if prod(gridded[i].shape) * gridded[i].item < SMALL] for cut in order}
    rest = {}
    for cut in order:
        tiny = set(_Group(cut, loads).place_tiny(gridded, small[cut]))
        rest[cut] = [i for i in small[cut] if i not in tiny]
    for cut in order:
        _Group(cut, loads).place_small(gridded, rest[cut], choices)
    level = loads.tolist()
    for number, piece in enumerate(offered):
        if len(piece.ranks) > 1:
            writers[number] = min(piece.ranks, key=lambda rank: (level[rank], rank))
            level[writers[number]] += piece.nbytes
    loads.copy_(torch.tensor(level, dtype=torch.int64))
    for cut in reversed(order):
        few = set(small[cut])
        _Group(cut, loads).place_large(gridded, [i for i in groups[cut] if i not in few], choices)
    return choices, writers


def _count_fixed(loads: torch.Tensor, gridded: Sequence[Gridded], offered: Sequence[Offered]) -> None:
    counts: dict[Gridded, int] = {}
    for tensor in gridded:
        if tensor.cut.replicas == 1:
            counts[tensor] = counts.get(tensor, 0) + 1
    ranks: dict[Cut, torch.Tensor] = {}
    for tensor, count in counts.items():
        if tensor.cut not in ranks:
            ranks[tensor.cut] = torch.tensor(list(tensor.cut.mesh), dtype=torch.int64)
        loads.index_add_(0, ranks[tensor.cut], _volumes(tensor.cut, tensor.shape) * (tensor.item * count))
    for piece in offered:
        if len(piece.ranks) == 1:
            loads[piece.ranks[0]] += piece.nbytes


def _volumes(cut: Cut, shape: Sequence[int]) -> torch.Tensor:
    """Elements that each coordinate of the mesh holds, in row-major order."""
    mesh = cut.mesh.shape
    sizes = {p: torch.tensor(n) for p, n in enumerate(shape)}
    for d in cut.order:
        p = cut.placements[d]
        n = sizes[p]
        place = torch.arange(mesh[d]).view([-1 if e == d else 1 for e in range(len(mesh))])
        step = (n + mesh[d] - 1) // mesh[d]
        sizes[p] = torch.minimum((place + 1) * step, n) - torch.minimum(place * step, n)
    total = torch.ones((), dtype=torch.int64)
    for size in sizes.values():
        total = total * size
    return total.expand(mesh).flatten()


class _Group:
    """The tensors that have one cut: all of them have the same replicas."""

    def __init__(self, cut: Cut, loads: torch.Tensor) -> None:
        self.cut = cut
        self.loads = loads
        replicated = [d for d, p in enumerate(cut.placements) if p < 0]
        ranks = torch.tensor(list(cut.mesh), dtype=torch.int64).view(cut.mesh.shape)
        # One row per replica.
        self.ranks = ranks.permute([*replicated, *cut.sharded]).reshape(cut.replicas, -1)

    def levels(self) -> torch.Tensor:
        """For each replica what the busiest of its ranks writes."""
        return self.loads[self.ranks].amax(1)

    def box(self, tensor: Gridded) -> tuple[Box, int]:
        """The largest box of a tensor, and its bytes."""
        box = self.cut.box(tensor.shape, (0,) * len(self.cut.placements))
        return box, prod(box.size) * tensor.item

    def place_small(self, gridded: Sequence[Gridded], members: list[int], choices: list[tuple[int, int]]) -> None:
        if not members:
            return
        sizes = {i: self.box(gridded[i])[1] for i in members}
        count = min(self.cut.replicas, 2 * max(1, -(-sum(sizes.values()) // SMALL_SHARE)))
        levels = self.levels().tolist()
        chosen = heapq.nsmallest(count, ((level, r) for r, level in enumerate(levels)))
        added = torch.zeros(self.cut.replicas, dtype=torch.int64)
        heapq.heapify(chosen)
        for i in sorted(members, key=lambda i: (-sizes[i], i)):
            level, r = chosen[0]
            heapq.heapreplace(chosen, (level + sizes[i], r))
            choices[i] = (r, 1)
        for level, r in chosen:
            added[r] = level - levels[r]
        self.loads[self.ranks] += added[:, None]

    def place_tiny(self, gridded: Sequence[Gridded], members: list[int]) -> list[int]:
        """Those of ``members`` that the first replica writes."""
        sizes = {i: prod(gridded[i].shape) * gridded[i].item for i in members}
        found, total = [], 0
        for i in sorted(members, key=lambda i: (sizes[i], i)):
            if sizes[i] > TINY or total + sizes[i] > TINY_SHARE:
                break
            found.append(i)
            total += self.box(gridded[i])[1]
        self.loads[self.ranks[0]] += total
        return found

    def place_large(self, gridded: Sequence[Gridded], members: list[int], choices: list[tuple[int, int]]) -> None:
        if not members:
            return
        before = self.levels()
        now = before.clone()
        boxes = {i: self.box(gridded[i]) for i in members}
        level = _level(before.tolist(), sum(nbytes for _, nbytes in boxes.values()))
        level += level * SLACK // 100
        least = [(load, r) for r, load in enumerate(now.tolist())]
        heapq.heapify(least)
        for i in sorted(members, key=lambda i: (-boxes[i][1], i)):
            box, nbytes = boxes[i]
            most = max(1, min(self.cut.replicas, nbytes // PART, max(box.size, default=1)))
            while least[0][0] != now[least[0][1]]:  # written to since
                load, r = heapq.heappop(least)
                heapq.heappush(least, (int(now[r]), r))
            load, r = least[0]
            choice = (r, 1)
            if load + nbytes > level and most > 1:
                choice = self._split(now, nbytes, most, level, level - load)
            first, count = choices[i] = choice
            share = -(-nbytes // count)
            now[first : first + count] += share
            now[: max(0, first + count - self.cut.replicas)] += share
        self.loads[self.ranks] += (now - before)[:, None]

    def _split(self, now: torch.Tensor, nbytes: int, most: int, level: int, room: int) -> tuple[int, int]:
        """The smallest number of neighbouring replicas, and the first of them, that keeps all below the
        level."""
        count = min(most, max(2, -(-nbytes // room))) if room > 0 else most
        while True:
            replicas = len(now)
            ring = torch.cat([now, now[: count - 1]])
            step = 1 if replicas * count <= _WINDOWS else count
            busiest = ring.unfold(0, count, step).amax(1)
            lowest = int(busiest.min())
            if lowest + -(-nbytes // count) <= level or count == most:
                # The first of them on every machine, which argmin does not promise.
                return int((busiest == lowest).nonzero()[0]) * step, count
            count = min(most, max(count + 1, count * 3 // 2))


def _level(loads: list[int], more: int) -> int:
    """What all would write if ``more`` bytes could be spread at will, rounded up."""
    loads = sorted(loads)
    total = more
    for count, load in enumerate(loads, 1):
        total += load
        level = -(-total // count)
        if count == len(loads) or level <= loads[count]:
            return level
    return more
