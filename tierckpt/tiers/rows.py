"""Parts of the pieces of one shard, on their way to memory: the rows of a copy table."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import accumulate, chain, compress, repeat
from operator import mul

from tierckpt import _native
from tierckpt.format.boxes import Box


class Rows:
    """Attributes:
    pointers: the address of the first element of each row, in the order of the table.
    """

    def __init__(self) -> None:
        self.pointers = array("Q")
        self._offsets, self._items, self._ndims = array("q"), array("q"), array("q")
        self._shapes, self._far, self._near = array("q"), array("q"), array("q")

    def add(
        self,
        offset: int,
        item: int,
        piece: Box,
        box: Box,
        outer: Box,
        address: int,
        steps: Sequence[int] | None = None,
    ) -> None:
        """The part ``box`` of a piece, which begins at byte ``offset`` of the shard.

        ``item``: bytes of an element. It goes to where it is in ``outer``, whose first element is at ``address``;
        ``steps`` are the strides there in bytes (default: row-major).
        """
        far = strides(piece.size, item)
        near = strides(outer.size, item) if steps is None else steps
        if piece != box or outer != box:
            for o, p, q, f, n in zip(box.offset, piece.offset, outer.offset, far, near, strict=True):
                offset += (o - p) * f
                address += (o - q) * n
        self._offsets.append(offset)
        self._items.append(item)
        self._ndims.append(len(box.size))
        self._shapes.extend(box.size)
        self._far.extend(far)
        self._near.extend(near)
        self.pointers.append(address)

    def runs(self, offsets: Sequence[int], sizes: Sequence[int], addresses: Sequence[int]) -> None:
        """Ranges of the shard, in bytes, that go to memory as they are."""
        ones = array("q", [1]) * len(offsets)
        self._offsets.extend(offsets)
        self._shapes.extend(sizes)
        self.pointers.extend(addresses)
        for column in (self._items, self._ndims, self._far, self._near):
            column.extend(ones)

    def table(self, chosen: Sequence[bool] | None = None) -> _native.CopyTable:
        """Of all rows, or of those that are ``chosen``; pointers have to be chosen likewise."""
        rows = self._offsets, self._items, self._ndims
        dims = self._shapes, self._far, self._near
        if chosen is None:
            return _native.CopyTable(*rows, *dims)
        each = list(chain.from_iterable(map(repeat, chosen, self._ndims)))
        return _native.CopyTable(
            *[array("q", compress(column, chosen)) for column in rows],
            *[array("q", compress(column, each)) for column in dims],
        )


def strides(size: Sequence[int], item: int) -> tuple[int, ...]:
    """Row-major strides in bytes."""
    return tuple(accumulate(size[:0:-1], mul, initial=item))[::-1] if size else ()
