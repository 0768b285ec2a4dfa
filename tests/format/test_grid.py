"""Protects the formulas of regular cuts: each must give what cutting a tensor of element numbers gives.

A rank that is put in the wrong place here reads and writes the wrong rows without anybody noticing.
"""

from __future__ import annotations

import random
from itertools import product
from math import prod

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.format.boxes import Box, intersection, tiles, whole
from tierckpt.format.grid import REPLICATED, Cut, Mesh


@st.composite
def meshes(draw: st.DrawFn) -> Mesh:
    shape = draw(st.lists(st.sampled_from([1, 2, 3, 4, 5]), min_size=1, max_size=4).map(tuple))
    count = prod(shape)
    kind = draw(st.sampled_from(["block", "strided", "any"]))
    if kind == "block":
        first = draw(st.integers(0, 5))
        ranks = list(range(first, first + count))
    elif kind == "strided":
        ranks = [3 + 2 * r for r in range(count)]
    else:
        ranks = draw(st.permutations(range(count + 3)))[:count]
    return Mesh.of(ranks, shape)


@st.composite
def cuts(draw: st.DrawFn) -> tuple[Cut, tuple[int, ...]]:
    mesh = draw(meshes())
    shape = draw(st.lists(st.sampled_from([0, 1, 2, 3, 5, 7, 13]), min_size=1, max_size=3).map(tuple))
    choice = st.sampled_from([REPLICATED, *range(len(shape))])
    placements = tuple(draw(choice) for _ in mesh.shape)
    order = draw(st.permutations([d for d, p in enumerate(placements) if p >= 0]))
    return Cut(mesh, placements, tuple(order)), shape


@given(meshes())
def test_rank_and_coordinate_are_inverse(mesh: Mesh) -> None:
    coordinates = list(product(*map(range, mesh.shape)))
    ranks = [mesh.rank(c) for c in coordinates]
    assert ranks == list(mesh)
    assert len(set(ranks)) == len(ranks) == mesh.size
    assert [mesh.coordinate(r) for r in ranks] == coordinates
    assert all(mesh.coordinate(r) is None for r in set(range(-1, max(ranks) + 2)) - set(ranks))
    assert mesh.last == max(ranks)


@given(st.sets(st.integers(0, 40), min_size=1))
def test_a_spanning_mesh_has_exactly_its_ranks(ranks: set[int]) -> None:
    assert list(Mesh.spanning(sorted(ranks))) == sorted(ranks)


@pytest.mark.parametrize(
    "ranks",
    [
        range(16384),
        range(7, 16384, 8),
        [64 * a + b for a in range(256) for b in range(8)],
        [1000 * a + 10 * b + c for a in range(4) for b in range(5) for c in range(6)],
    ],
)
def test_regular_sets_of_ranks_are_formulas(ranks: list[int]) -> None:
    assert Mesh.spanning(list(ranks)).ranks is None


@given(cuts())
def test_boxes_are_what_chunking_leaves(made: tuple[Cut, tuple[int, ...]]) -> None:
    cut, shape = made
    numbers = torch.arange(prod(shape)).reshape(shape)
    for coordinate in product(*map(range, cut.mesh.shape)):
        left = numbers
        for d in cut.order:
            p = cut.placements[d]
            parts = left.chunk(cut.mesh.shape[d], dim=p) if left.shape[p] else ()
            empty = left.narrow(p, 0, 0)
            left = parts[coordinate[d]] if coordinate[d] < len(parts) else empty
        box = cut.box(shape, coordinate)
        assert box.size == tuple(left.shape)
        found = numbers[tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))]
        assert torch.equal(found, left)


@given(cuts(), st.integers(0, 10**9))
def test_boxes_within_a_box_are_found_without_looking_at_all(made: tuple[Cut, tuple[int, ...]], seed: int) -> None:
    cut, shape = made
    rng = random.Random(seed)
    all_boxes: dict[Box, set[int]] = {}
    for coordinate in product(*map(range, cut.mesh.shape)):
        box = cut.box(shape, coordinate)
        if 0 not in box.size:
            all_boxes.setdefault(box, set()).add(cut.mesh.rank(coordinate))
    assert tiles(shape, list(all_boxes)) is None
    assert all(len(ranks) == cut.replicas for ranks in all_boxes.values())
    offset: tuple[int, ...] = tuple(rng.randint(0, n) for n in shape)
    within = Box(offset, tuple(rng.randint(0, n - o) for n, o in zip(shape, offset, strict=True)))
    for wanted in (within, whole(shape)):
        found = [(box, coordinate) for coordinate, box in cut.boxes(shape, wanted)]
        touched = {box for box in all_boxes if intersection(box, wanted) is not None}
        assert sorted(box for box, _ in found) == sorted(touched)
        for box, corner in found:
            holders = [cut.rank(corner, r) for r in range(cut.replicas)]
            assert set(holders) == all_boxes[box]
            for r, rank in enumerate(holders):
                place = cut.mesh.coordinate(rank)
                assert place is not None and cut.replica(place) == r


def test_looking_for_a_box_does_not_walk_over_the_ranks() -> None:
    world = 1 << 24
    cut = Cut(Mesh.of(range(1 << 10), (1 << 10,)), (0,), (0,))
    huge = Cut(Mesh((world,), 0, (1,)), (0,), (0,))
    for many in (cut, huge):
        found = list(many.boxes((1 << 30, 4), Box((1 << 20, 0), (1, 4))))
        assert len(found) == 1
        assert many.box((1 << 30, 4), found[0][0]) == found[0][1]
