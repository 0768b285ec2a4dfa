"""Protects the spread of the writing: every rank computes the same choice, few files are needed to read small
tensors, and no rank writes much more than another where sizes allow it.
"""

from __future__ import annotations

import random
import time
from math import prod

import pytest

from tierckpt.format.boxes import part, whole
from tierckpt.format.grid import REPLICATED, Cut, Mesh
from tierckpt.state.balance import SMALL, Gridded, Offered, choose

MIB = 1 << 20


def written(world: int, tensors: list[Gridded], choices: list[tuple[int, int]]) -> list[int]:
    """Bytes that each rank writes."""
    found = [0] * world
    for tensor, (first, split) in zip(tensors, choices, strict=True):
        for coordinate, box in tensor.cut.boxes(tensor.shape, whole(tensor.shape)):
            parts = [part(box, i, split) for i in range(split)]
            for turn, some in enumerate(parts if parts[0] is not None else [box]):
                assert some is not None
                rank = tensor.cut.rank(coordinate, (first + turn) % tensor.cut.replicas)
                found[rank] += prod(some.size) * tensor.item
    return found


def replicated(world: int) -> Cut:
    return Cut.replicated(range(world))


def hsdp(replicas: int, shards: int) -> Cut:
    return Cut(Mesh.of(range(replicas * shards), (replicas, shards)), (REPLICATED, 0), (1,))


@pytest.mark.parametrize(("replicas", "shards"), [(2, 2), (2, 4)])
@pytest.mark.parametrize("rows", [64, 1024, 4096])
def test_hsdp_with_small_replicated_tensors_is_level(replicas: int, shards: int, rows: int) -> None:
    world = replicas * shards
    tensors = [Gridded(hsdp(replicas, shards), (rows, 1024), 4)] * 8
    tensors += [Gridded(replicated(world), (64,), 4)] * 40
    choices, _ = choose(world, tensors, [])
    total = written(world, tensors, choices)
    assert sum(total) == 8 * rows * 4096 + 40 * 256
    assert max(total) <= 1.5 * min(total)
    # What a rank reads back when nothing changed: its own shard and at most three others.
    for rank in range(world):
        column = rank % shards
        sources = {tensors[0].cut.rank((0, column), first) for first, _ in choices[:8]}
        sources |= {first for first, _ in choices[8:]}
        assert len(sources - {rank}) <= 3


def test_small_tensors_have_two_writers_for_each_64_mib() -> None:
    tensors = [Gridded(replicated(16), (1 << 18,), 4)] * 63  # 1 MiB each
    choices, _ = choose(16, tensors, [])
    assert {first for first, _ in choices} == {0, 1} and {split for _, split in choices} == {1}
    choices, _ = choose(16, tensors * 3, [])
    assert len({first for first, _ in choices}) == 6
    assert max(written(16, tensors * 3, choices)) <= 33 * MIB


def test_small_tensors_go_to_ranks_that_have_less_to_write() -> None:
    # Rows of 6 over 4 ranks: 2, 2, 2, 0.
    cut = Cut(Mesh.of(range(4), (4,)), (0,), (0,))
    tensors = [Gridded(cut, (6, MIB), 1), Gridded(replicated(4), (100_000,), 4)]
    choices, _ = choose(4, tensors, [])
    assert choices == [(0, 1), (3, 1)]


def test_large_tensors_are_not_split_when_whole_ones_are_level() -> None:
    tensors = [Gridded(replicated(4), (8 * MIB,), 1)] * 8
    choices, _ = choose(4, tensors, [])
    assert {split for _, split in choices} == {1}
    assert written(4, tensors, choices) == [16 * MIB] * 4


def test_large_tensors_are_split_as_far_as_it_takes() -> None:
    tensors = [Gridded(replicated(2), (8 * MIB,), 1)] * 3
    choices, _ = choose(2, tensors, [])
    assert sorted(split for _, split in choices) == [1, 1, 2]
    assert written(2, tensors, choices) == [12 * MIB] * 2
    choices, _ = choose(8, [Gridded(replicated(8), (64 * MIB,), 1)], [])
    assert choices == [(0, 8)]
    # Not into parts of less than 4 MiB, and not along dimensions that are too short.
    choices, _ = choose(64, [Gridded(replicated(64), (64 * MIB,), 1)], [])
    assert choices == [(0, 16)]
    choices, _ = choose(8, [Gridded(replicated(8), (2, 2, 16 * MIB), 1)], [])
    assert choices == [(0, 8)]
    choices, _ = choose(8, [Gridded(replicated(8), (3,) * 16, 4)], [])
    assert choices[0][1] == 3


@pytest.mark.parametrize("seed", range(20))
def test_any_mixture_is_about_as_level_as_it_can_be(seed: int) -> None:
    rng = random.Random(seed)
    shards = rng.choice([1, 2, 4])
    world = shards * rng.choice([2, 3, 4])
    cuts = [
        hsdp(world // shards, shards),
        replicated(world),
        Cut(Mesh.of(range(world), (world,)), (0,), (0,)),
    ]
    tensors = [
        Gridded(rng.choice(cuts), (rng.choice([64, 128, 1000]), rng.choice([1, 1024, 65536])), 4)
        for _ in range(rng.randint(10, 60))
    ]
    choices, _ = choose(world, tensors, [])
    assert choose(world, tensors, []) == (choices, [])
    for tensor, (first, split) in zip(tensors, choices, strict=True):
        assert 0 <= first < tensor.cut.replicas and 1 <= split <= tensor.cut.replicas
        if prod(tensor.shape) * 4 < SMALL:
            assert split == 1
    total = written(world, tensors, choices)
    assert sum(total) == sum(prod(t.shape) * 4 for t in tensors)
    assert max(total) <= 1.3 * sum(total) / world + SMALL


def test_offered_pieces_are_spread_and_written_once() -> None:
    offered = [Offered([0, 1, 2], 100)] * 6 + [Offered([1], 1000)]
    _, writers = choose(3, [], offered)
    assert writers[6] == 1
    assert sorted(writers[:6]) == [0, 0, 0, 2, 2, 2]


def test_tensors_without_choice_or_elements_are_left_alone() -> None:
    cut = Cut(Mesh.of(range(4), (4,)), (0,), (0,))
    tensors = [Gridded(cut, (8,), 4), Gridded(replicated(4), (0, 3), 4)]
    assert choose(4, tensors, [Offered([2], 8)]) == ([(0, 1), (0, 1)], [2])


def test_sixteen_thousand_replicas_of_a_thousand_large_tensors_take_no_time() -> None:
    tensors = [Gridded(replicated(16384), (8192 + 1000 * (i % 5), 8192), 2) for i in range(1000)]
    began = time.process_time()
    choices, _ = choose(16384, tensors, [])
    assert time.process_time() - began < 2
    total = written(16384, tensors, choices)
    assert max(total) <= 1.3 * sum(total) / 16384


def test_what_is_tiny_comes_from_the_first_replica() -> None:
    """The statistics of BatchNorm, which differ between the ranks of DDP, must be those of one rank."""
    sizes = [(512,), (512,), (), (1 << 14,)] * 50
    tensors = [Gridded(replicated(4), (1 << 20,), 4)] * 40 + [Gridded(replicated(4), shape, 4) for shape in sizes]
    tensors += [Gridded(hsdp(2, 2), (64,), 4)] * 3
    choices, _ = choose(4, tensors, [])
    assert choices[40:] == [(0, 1)] * (len(tensors) - 40)
    assert len({first for first, _ in choices[:40]}) > 1
    total = written(4, tensors, choices)
    assert max(total) <= 1.1 * min(total), "large tensors make up for it"


def test_very_many_tiny_tensors_are_spread() -> None:
    tensors = [Gridded(replicated(4), (1 << 14,), 4)] * 4000
    total = written(4, tensors, choose(4, tensors, [])[0])
    assert max(total) <= sum(total) // 2
