"""What to read: the wanted boxes of every tensor, met with the pieces in which they are stored."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from tierckpt import _native
from tierckpt.errors import IntegrityError
from tierckpt.format import shard
from tierckpt.format.boxes import Box, intersection
from tierckpt.format.layout import Layout
from tierckpt.state.layout import Destination


@dataclass
class Wanted:
    """Memory to fill: the destinations of tensor number ``index`` of a layout."""

    index: int
    destinations: list[Destination]


@dataclass
class ShardRead:
    """What one rank needs of one shard: rows of a copy table, and the chunks that hold them.

    ``pieces``: (tensor, k, box of the stored piece, the part of it that is wanted, where to).
    """

    rank: int
    pieces: list[tuple[int, int, Box, Box, Destination]] = field(default_factory=list)

    def table(self, layout: Layout, entries: Sequence[shard.Entry]) -> tuple[_native.CopyTable, array[int]]:
        """The table and the pointers of everything wanted of this shard, given its entries."""
        places = {(entry.tensor, entry.k): entry for entry in entries}
        offsets, items, ndims = array("q"), array("q"), array("q")
        shapes, far, near = array("q"), array("q"), array("q")
        pointers = array("Q")
        for index, k, piece, box, destination in self.pieces:
            entry = places.get((layout.name(layout.alias(index)), k))
            if entry is None:
                raise IntegrityError(f"shard {self.rank}: there is no piece {k} of {layout.name(index)!r}")
            tensor = destination.memory
            item = tensor.element_size()
            strides = [item * n for n in accumulate(reversed(piece.size[1:]), lambda a, b: a * b, initial=1)][::-1]
            steps = [item * n for n in tensor.stride()]
            offset, address = entry.offset, tensor.data_ptr()
            if piece != box or destination.box != box:
                for o, p, d, s, t in zip(box.offset, piece.offset, destination.box.offset, strides, steps, strict=True):
                    offset += (o - p) * s
                    address += (o - d) * t
            offsets.append(offset)
            items.append(item)
            ndims.append(len(box.size))
            shapes.extend(box.size)
            far.extend(strides if box.size else ())
            near.extend(steps)
            pointers.append(address)
        return _native.CopyTable(offsets, items, ndims, shapes, far, near), pointers


def plan(layout: Layout, wanted: Iterable[Wanted]) -> dict[int, ShardRead]:
    """For each rank whose shard is needed, what is needed of it."""
    reads: dict[int, ShardRead] = {}
    for want in wanted:
        for destination in want.destinations:
            if 0 in destination.box.size:
                continue
            for stored in layout.pieces_in(want.index, destination.box):
                box = intersection(stored.box, destination.box)
                if box is None:
                    continue
                read = reads.get(stored.rank)
                if read is None:
                    read = reads[stored.rank] = ShardRead(stored.rank)
                read.pieces.append((want.index, stored.k, stored.box, box, destination))
    return reads
