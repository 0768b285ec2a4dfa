"""Protects the geometry that every plan and every load rests on: a wrong box is wrong bytes in a model.

Oracles are arrays of element numbers that are really cut, and counting how often each element is covered.
"""

from __future__ import annotations

import random
import time
from itertools import pairwise
from math import prod

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.format.boxes import Box, chunk, contains, flat_range, intersection, part, tiles, volume, whole

shapes = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


def index(box: Box) -> tuple[slice, ...]:
    return tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))


@st.composite
def boxes_in(draw: st.DrawFn, shape: tuple[int, ...]) -> Box:
    offset = tuple(draw(st.integers(0, n - 1)) for n in shape)
    return Box(offset, tuple(draw(st.integers(1, n - o)) for n, o in zip(shape, offset, strict=True)))


@given(st.data())
def test_intersection_and_contains_agree_with_sets(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    a, b = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    numbers = np.arange(prod(shape)).reshape(shape)
    ours = set(numbers[index(a)].flat), set(numbers[index(b)].flat)
    common = intersection(a, b)
    assert (set() if common is None else set(numbers[index(common)].flat)) == ours[0] & ours[1]
    assert contains(a, b) == (ours[1] <= ours[0])
    assert volume(a) == len(ours[0])


def test_a_tensor_without_dimensions_is_one_element() -> None:
    scalar = whole(())
    assert volume(scalar) == 1
    assert intersection(scalar, scalar) == scalar
    assert flat_range((), 0, 1) == [scalar]
    assert tiles((), [scalar]) is None
    assert tiles((), []) is not None
    assert part(scalar, 0, 2) is None


@given(st.integers(0, 40), st.integers(1, 12))
def test_chunk_is_that_of_torch(n: int, parts: int) -> None:
    real = [t.tolist() for t in torch.arange(n).chunk(parts)] if n else []
    real += [[]] * (parts - len(real))
    assert [list(range(*chunk(n, parts, i))) for i in range(parts)] == real


@given(st.data())
def test_parts_tile_a_box_evenly_along_the_first_dimension_that_is_long_enough(data: st.DataObject) -> None:
    shape = data.draw(shapes)
    k = data.draw(st.integers(1, 8))
    box = Box(tuple(3 for _ in shape), shape)
    parts = [part(box, i, k) for i in range(k)]
    if all(n < k for n in shape):
        assert parts == [None] * k
        return
    found = [p for p in parts if p is not None]
    assert tiles(shape, [Box(tuple(o - 3 for o in p.offset), p.size) for p in found]) is None
    cut = next(d for d, n in enumerate(shape) if n >= k)
    lengths = [p.size[cut] for p in found]
    assert len(found) == k and max(lengths) - min(lengths) <= 1


@given(st.data())
def test_a_flat_range_is_few_boxes_in_order(data: st.DataObject) -> None:
    shape = data.draw(st.lists(st.integers(0, 6), min_size=0, max_size=4).map(tuple))
    total = prod(shape)
    lo = data.draw(st.integers(0, total))
    hi = data.draw(st.integers(lo, total))
    boxes = flat_range(shape, lo, hi)
    numbers = np.arange(total).reshape(shape)
    assert [int(n) for box in boxes for n in numbers[index(box)].flat] == list(range(lo, hi))
    assert len(boxes) <= max(1, 2 * len(shape) - 1)


def test_a_flat_range_outside_of_the_tensor_is_refused() -> None:
    with pytest.raises(ValueError, match="6 elements"):
        flat_range((2, 3), 2, 7)


def random_tiling(rng: random.Random, shape: tuple[int, ...], cuts: int) -> list[Box]:
    boxes = [whole(shape)]
    for _ in range(cuts):
        box = boxes.pop(rng.randrange(len(boxes)))
        long = [d for d, n in enumerate(box.size) if n > 1]
        if not long:
            boxes.append(box)
            continue
        d = rng.choice(long)
        at = rng.randrange(1, box.size[d])
        low, high = list(box.size), list(box.size)
        low[d], high[d] = at, box.size[d] - at
        start = list(box.offset)
        start[d] += at
        boxes += [Box(box.offset, tuple(low)), Box(tuple(start), tuple(high))]
    rng.shuffle(boxes)
    return boxes


def counts(shape: tuple[int, ...], boxes: list[Box]) -> np.ndarray:
    covered = np.zeros(shape, dtype=int)
    for box in boxes:
        covered[index(box)] += 1
    return covered


@given(st.integers(0, 10**9))
def test_tiles_tells_tilings_from_everything_else(seed: int) -> None:
    rng = random.Random(seed)
    shape = tuple(rng.randint(1, 6) for _ in range(rng.randint(1, 4)))
    boxes = random_tiling(rng, shape, rng.randint(0, 30))
    assert tiles(shape, boxes) is None
    for _ in range(rng.randint(1, 3)):
        # Break it: take one away, double one, or put one box somewhere else (which may repair it).
        move = rng.randrange(3)
        if move == 0 and boxes:
            boxes.pop()
        elif move == 1 and boxes:
            boxes.append(rng.choice(boxes))
        elif boxes:
            box = boxes.pop()
            offset = tuple(rng.randint(0, n - s) for n, s in zip(shape, box.size, strict=True))
            boxes.append(Box(offset, box.size))
        covered = counts(shape, boxes)
        problem = tiles(shape, boxes)
        assert (problem is None) == bool((covered == 1).all())
        if problem is not None:
            # The place that it names is really wrong.
            spans = problem[1 : problem.index("]")].split(", ")
            named = tuple(slice(*map(int, span.split(":"))) for span in spans)
            expected = 0 if "in no piece" in problem else int(covered[named].flat[0])
            assert expected != 1
            assert (covered[named] == expected).all()


def test_tiles_names_the_pieces_that_overlap_and_those_that_do_not_fit() -> None:
    rows = [Box((0, 0), (2, 4)), Box((1, 0), (3, 4))]
    problem = tiles((4, 4), rows, lambda i: f"rank {i + 7}")
    assert problem is not None
    assert "[1:2, 0:4]" in problem and "rank 7" in problem and "rank 8" in problem
    for wrong in (Box((3,), (2,)), Box((-1,), (2,)), Box((0,), (0,)), Box((0, 0), (1, 1))):
        assert "is not a part of" in str(tiles((4,), [wrong], None))
    assert tiles((0, 3), []) is None


@pytest.mark.parametrize("faulty", [False, True])
def test_time_does_not_grow_with_the_square(faulty: bool) -> None:
    """A quadratic check of 10,000 boxes would take 50 million comparisons, minutes of work."""
    rng = random.Random(1)
    grid = [Box((3 * i, 5 * j), (3, 5)) for i in range(100) for j in range(100)]
    flat = flat_ranges((60, 50, 40), 5000, rng)
    irregular = random_tiling(rng, (400, 300), 5000)
    began = time.process_time()
    for shape, boxes in (((300, 500), grid), ((60, 50, 40), flat), ((400, 300), irregular)):
        if faulty:
            boxes = boxes[:-1]
        assert (tiles(shape, boxes) is None) != faulty
    assert time.process_time() - began < 10


def flat_ranges(shape: tuple[int, ...], count: int, rng: random.Random) -> list[Box]:
    bounds = [0, *sorted(rng.sample(range(1, prod(shape)), count - 1)), prod(shape)]
    return [box for lo, hi in pairwise(bounds) for box in flat_range(shape, lo, hi)]


def test_what_is_hostile_stays_bounded() -> None:
    """Boxes in many dimensions that all cross one another must neither be accepted nor take for ever."""
    ndim = 30
    shape = (4,) * ndim
    bars = [
        Box(tuple(0 if d == e else 1 for e in range(ndim)), tuple(4 if d == e else 2 for e in range(ndim)))
        for d in range(ndim)
    ]
    assert tiles(shape, bars) is not None
