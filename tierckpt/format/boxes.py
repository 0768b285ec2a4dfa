"""Geometry of axis-aligned boxes of integer indices.

Everything is in elements, not bytes. A box of a tensor without dimensions is ``Box((), ())``: one element.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import NamedTuple


class Box(NamedTuple):
    """The indices ``offset[d] <= i[d] < offset[d] + size[d]``."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    def __str__(self) -> str:
        """As written in Python: ``[0:2, 3:5]``."""
        return "[" + ", ".join(f"{o}:{o + s}" for o, s in zip(self.offset, self.size, strict=True)) + "]"


def whole(shape: Sequence[int]) -> Box:
    """The box of all elements of a tensor of this shape."""
    return Box((0,) * len(shape), tuple(shape))


def volume(box: Box) -> int:
    """The number of elements of ``box``."""
    return prod(box.size)


def intersection(a: Box, b: Box) -> Box | None:
    """What two boxes of the same number of dimensions have in common; None when that is nothing."""
    offset, size = [], []
    for ao, asz, bo, bsz in zip(a.offset, a.size, b.offset, b.size, strict=True):
        lo = ao if ao > bo else bo
        hi = min(ao + asz, bo + bsz)
        if hi <= lo:
            return None
        offset.append(lo)
        size.append(hi - lo)
    return Box(tuple(offset), tuple(size))


def contains(outer: Box, inner: Box) -> bool:
    """Whether all of ``inner`` lies in ``outer``. A box without elements must keep the bounds, too."""
    return all(
        oo <= io and io + isz <= oo + osz
        for oo, osz, io, isz in zip(outer.offset, outer.size, inner.offset, inner.size, strict=True)
    )


def chunk(n: int, parts: int, i: int) -> tuple[int, int]:
    """The range [lo, hi) of part ``i`` of ``n`` indices cut into ``parts``, as ``torch.chunk`` does.

    Unlike ``torch.chunk`` it always has ``parts`` parts; the last ones may be empty.
    """
    q = -(-n // parts)
    return min(i * q, n), min((i + 1) * q, n)


def part(box: Box, i: int, k: int) -> Box | None:
    """Part ``i`` of ``box`` split into ``k`` even parts along its first dimension at least ``k`` long.

    None when no dimension is that long: the box is not split.
    """
    for d, m in enumerate(box.size):
        if m >= k:
            lo, hi = i * m // k, (i + 1) * m // k
            offset, size = box.offset, box.size
            return Box((*offset[:d], offset[d] + lo, *offset[d + 1 :]), (*size[:d], hi - lo, *size[d + 1 :]))
    return None


def flat_range(shape: Sequence[int], lo: int, hi: int) -> list[Box]:
    """The elements [lo, hi) of a row-major tensor as at most ``2 * len(shape) - 1`` boxes, in that order.

    Raises ValueError when the range is not within the tensor.
    """
    total = prod(shape)
    if not 0 <= lo <= hi <= total:
        raise ValueError(f"[{lo}, {hi}) is not a range of the {total} elements of shape {list(shape)}")
    boxes: list[Box] = []

    def add(prefix: tuple[int, ...], lo: int, hi: int) -> None:
        if lo == hi:
            return
        d = len(prefix)
        rest = tuple(shape[d + 1 :])
        if d == len(shape):
            boxes.append(Box(prefix, (1,) * d))
            return
        row = prod(rest)
        first, head = divmod(lo, row)
        last, tail = divmod(hi, row)
        if head and first == last:
            add((*prefix, first), head, tail)
            return
        if head:
            add((*prefix, first), head, row)
            first += 1
        if last > first:
            boxes.append(Box((*prefix, first, *(0,) * len(rest)), (*(1,) * d, last - first, *rest)))
        if tail:
            add((*prefix, last), 0, tail)

    add((), lo, hi)
    return boxes


def tiles(shape: Sequence[int], boxes: Sequence[Box], label: Callable[[int], str] | None = None) -> str | None:
    """None when ``boxes`` cover every element of ``shape`` exactly once; else a fault, in words.

    ``label(i)`` says whose box ``boxes[i]`` is. Time is N log N in the usual cases, bounded in all; tilings
    too irregular for that bound are refused as such.
    """
    shape = tuple(shape)

    def named(i: int) -> str:
        return f"{boxes[i]} ({label(i)})" if label else str(boxes[i])

    for i, box in enumerate(boxes):
        fits = len(box.offset) == len(box.size) == len(shape) and all(
            o >= 0 and s >= 1 and o + s <= n for o, s, n in zip(box.offset, box.size, shape, strict=True)
        )
        if not fits:
            return f"the piece {named(i)} is not a part of {list(shape)}"
    if 0 in shape or _is_grid(shape, boxes):
        return None
    try:
        found = _search(shape, boxes)
    except RecursionError:
        return f"the {len(boxes)} pieces of {list(shape)} are too irregular to check"
    if found is None:
        return None
    cell, several = found
    if not several:
        return f"{cell} of {list(shape)} is in no piece"
    more = f" and {len(several) - 4} more" if len(several) > 4 else ""
    return f"{cell} of {list(shape)} is in {len(several)} pieces: {', '.join(map(named, several[:4]))}{more}"


def _is_grid(shape: tuple[int, ...], boxes: Sequence[Box]) -> bool:
    """The fast way to yes: number the cells between all bounds and count how often each is covered."""
    edges = [
        sorted({b.offset[d] for b in boxes} | {b.offset[d] + b.size[d] for b in boxes} | {0, n})
        for d, n in enumerate(shape)
    ]
    cells = prod(len(e) - 1 for e in edges)
    if cells > 4 * len(boxes) + 16:
        return False
    places = [{edge: i for i, edge in enumerate(e)} for e in edges]
    strides = [prod(len(e) - 1 for e in edges[d + 1 :]) for d in range(len(shape))]
    seen = bytearray(cells)
    painted = 0
    for box in boxes:
        spans = [
            range(p[o] * stride, p[o + s] * stride, stride)
            for p, o, s, stride in zip(places, box.offset, box.size, strides, strict=True)
        ]
        for cell in product(*spans):
            index = sum(cell)
            if seen[index]:
                return False
            seen[index] = 1
            painted += 1
    return painted == cells


# A cell of the search: its lower and upper corner, and the boxes clipped to it.
_Clip = tuple[tuple[int, ...], tuple[int, ...], int]
_Cell = tuple[tuple[int, ...], tuple[int, ...], list[_Clip]]


def _search(shape: tuple[int, ...], boxes: Sequence[Box]) -> tuple[Box, tuple[int, ...]] | None:
    """A cell that is in no box, or in several (their indices); None when there is none.

    Halves the space at bounds of boxes until every cell is one box. A cell whose boxes do not sum up to its
    volume holds a fault; so does one of its halves: then only that half is followed. Raises RecursionError
    when too many boxes are cut in two too often.
    """
    clips: list[_Clip] = [
        (b.offset, tuple(o + s for o, s in zip(b.offset, b.size, strict=True)), i) for i, b in enumerate(boxes)
    ]
    stack: list[_Cell] = [((0,) * len(shape), shape, clips)]
    work = 64 * len(boxes) + (1 << 20)
    while stack:
        lo, hi, inside = stack.pop()
        work -= len(inside) + 1
        if work < 0:
            raise RecursionError
        cell = Box(lo, tuple(h - low for low, h in zip(lo, hi, strict=True)))
        if not inside:
            return cell, ()
        if len(inside) == 1 and inside[0][:2] == (lo, hi):
            continue
        cut = _cut(lo, hi, inside)
        if cut is None:
            return cell, tuple(sorted(i for _, _, i in inside))
        halves = list(_halves(lo, hi, inside, *cut))
        if _missum(lo, hi, inside):
            stack = [next(half for half in halves if _missum(*half))]
        else:
            stack.extend(halves)
    return None


def _missum(lo: tuple[int, ...], hi: tuple[int, ...], inside: list[_Clip]) -> bool:
    total = sum(prod(h - low for low, h in zip(a, b, strict=True)) for a, b, _ in inside)
    return total != prod(h - low for low, h in zip(lo, hi, strict=True))


def _cut(lo: tuple[int, ...], hi: tuple[int, ...], inside: list[_Clip]) -> tuple[int, int] | None:
    """The dimension with the most bounds of boxes strictly inside the cell, and the median of them."""
    best: tuple[int, int] | None = None
    most = 0
    for d, (low, high) in enumerate(zip(lo, hi, strict=True)):
        bounds = [x for a, b, _ in inside for x in (a[d], b[d]) if low < x < high]
        if len(bounds) > most:
            most = len(bounds)
            bounds.sort()
            best = d, bounds[len(bounds) // 2]
    return best


def _halves(lo: tuple[int, ...], hi: tuple[int, ...], inside: list[_Clip], d: int, at: int) -> Iterator[_Cell]:
    below: list[_Clip] = []
    above: list[_Clip] = []
    for clip in inside:
        a, b, i = clip
        if b[d] <= at:
            below.append(clip)
        elif a[d] >= at:
            above.append(clip)
        else:
            below.append((a, (*b[:d], at, *b[d + 1 :]), i))
            above.append(((*a[:d], at, *a[d + 1 :]), b, i))
    # The upper half first: the stack then looks at the lower one before it.
    yield (*lo[:d], at, *lo[d + 1 :]), hi, above
    yield lo, (*hi[:d], at, *hi[d + 1 :]), below
