"""What to read: the wanted boxes of every tensor, met with the pieces in which they are stored."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import compress

from tierckpt import _native
from tierckpt.format.boxes import Box, intersection
from tierckpt.format.layout import Layout
from tierckpt.format.placement import Placement
from tierckpt.state.layout import Destination
from tierckpt.tiers.rows import Rows


@dataclass
class Runs:
    """Tensors of a layout, by number, and memory that all of each goes to as it is: row-major, without gaps.

    Columns: most tensors of large states are here, and no object is made for any.
    """

    tensors: Sequence[int] = ()
    addresses: Sequence[int] = ()
    sizes: Sequence[int] = ()

    def __len__(self) -> int:
        return len(self.tensors)

    def chosen(self, marks: Sequence[bool]) -> Runs:
        """Those that are marked."""
        return Runs(*[list(compress(column, marks)) for column in (self.tensors, self.addresses, self.sizes)])


@dataclass
class Wanted:
    """Memory to fill: the destinations of tensor number ``index`` of a layout."""

    index: int
    destinations: list[Destination]


@dataclass
class ShardRead:
    """What one rank needs of one shard.

    Attributes:
        runs: tensors that go to memory as they are.
        pieces: (tensor, k, box of the stored piece, the part of it that is wanted, where to).
    """

    rank: int
    runs: Runs = field(default_factory=Runs)
    pieces: list[tuple[int, int, Box, Box, Destination]] = field(default_factory=list)

    def table(self, placement: Placement) -> tuple[_native.CopyTable, array[int]]:
        """The rows of a copy table and the pointers of everything wanted of this shard.

        Raises:
            IntegrityError: the shard does not have a piece.
        """
        rows = Rows()
        aliases, first = placement.layout.aliases, placement.first
        offsets = [first[aliases[index]] for index in self.runs.tensors]
        if -1 in offsets:
            placement.offset(aliases[self.runs.tensors[offsets.index(-1)]], -1)  # raises
        rows.runs(offsets, self.runs.sizes, self.runs.addresses)
        for index, k, piece, box, destination in self.pieces:
            tensor = destination.memory
            item = tensor.element_size()
            steps = [item * n for n in tensor.stride()]
            offset = placement.offset(aliases[index], k)
            rows.add(offset, item, piece, box, destination.box, tensor.data_ptr(), steps)
        return rows.table(), rows.pointers


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


def add_runs(reads: dict[int, ShardRead], layout: Layout, runs: Runs) -> None:
    """Add to a plan tensors of which one shard has all (``Layout.homes``)."""
    homes = list(map(layout.homes.__getitem__, runs.tensors))
    each = set(homes)
    for home in each:
        own = runs if len(each) == 1 else runs.chosen([one == home for one in homes])
        reads.setdefault(home, ShardRead(home)).runs = own
