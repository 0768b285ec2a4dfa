"""What one checkpoint holds, read without torch: boxes of logical tensors in bounded memory, and values.

Whatever the layout that saved, a tensor is read as a whole, piece by piece. No byte is handed on before its chunk was
verified.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property, lru_cache
from itertools import product
from math import prod
from typing import NamedTuple

from tierckpt import _native
from tierckpt.errors import IntegrityError, LayoutError
from tierckpt.format import blob, paths, shard, tree
from tierckpt.format.boxes import Box, intersection
from tierckpt.format.canonical import JSON
from tierckpt.format.chain import CheckpointRef
from tierckpt.format.digest import CHUNK, chunk_range, derive
from tierckpt.format.layout import Layout, Stored
from tierckpt.format.manifest import Manifest
from tierckpt.format.placement import Placement
from tierckpt.format.receipt import Receipt
from tierckpt.tiers.chunks import read_chunks
from tierckpt.tiers.rows import Rows
from tierckpt.tiers.store import Store
from tierckpt.tiers.verify import check_layout

BATCH = 64 << 20
"""Bytes of tensors that are read at once. More of them read fewer chunks twice."""

#: Regions of one batch: their bookkeeping takes memory, too.
_BATCH_REGIONS = 1 << 15
#: Where a region may begin in memory: a multiple of every item size.
_ALIGNMENT = 16
#: Shards of which it is kept where their pieces are.
_LOCATED = 128


class Region(NamedTuple):
    """A box of tensor number ``tensor``; in memory it is row-major, ``nbytes`` bytes from ``start`` on."""

    tensor: int
    box: Box
    start: int
    nbytes: int


def blocks(shape: Sequence[int], elements: int) -> Iterator[Box]:
    """A tensor in row-major order, as boxes that are contiguous in it and have at most ``elements`` elements."""
    if 0 in shape:
        return
    inner = [prod(shape[d + 1 :]) for d in range(len(shape))]
    d = next((d for d, n in enumerate(inner) if n <= elements), None)
    if d is None:  # no dimensions
        yield Box((), ())
        return
    rows = max(1, elements // inner[d])
    rest = tuple(shape[d + 1 :])
    zeros = (0,) * len(rest)
    for outer in product(*map(range, shape[:d])):
        for at in range(0, shape[d], rows):
            yield Box((*outer, at, *zeros), ((1,) * d + (min(rows, shape[d] - at), *rest)))


def batches(layout: Layout, wanted: Iterable[tuple[int, Box]], limit: int) -> Iterator[list[Region]]:
    """Boxes of tensors, each of at most ``limit`` bytes, in their order, as many at once as ``limit`` bytes hold."""
    batch: list[Region] = []
    at = 0
    for index, box in wanted:
        nbytes = prod(box.size) * shard.dtype(layout.dtype(index)).size
        if batch and (at + nbytes > limit or len(batch) >= _BATCH_REGIONS):
            yield batch
            batch, at = [], 0
        batch.append(Region(index, box, at, nbytes))
        at = -(-(at + nbytes) // _ALIGNMENT) * _ALIGNMENT
    if batch:
        yield batch


def touched(table: _native.CopyTable, size: int) -> list[int]:
    """Indices of the chunks of a shard of ``size`` bytes that hold at least one byte of the table."""
    lo, hi = table.span
    if hi <= lo:
        return []
    found = range(lo // CHUNK, (hi - 1) // CHUNK + 1)
    if table.nbytes == hi - lo:
        return list(found)
    return [i for i in found if table.covered(i * CHUNK, min((i + 1) * CHUNK, size)) > 0]


class Content:
    """A committed checkpoint of a store whose chain is believed.

    Attributes:
        bytes_read: of shards, all of them verified.
    """

    def __init__(self, store: Store, manifest: Manifest, layout: Layout) -> None:
        self.store, self.manifest, self.layout = store, manifest, layout
        self.bytes_read = 0
        self.receipt = lru_cache(maxsize=None)(self._receipt)
        self._places = lru_cache(maxsize=_LOCATED)(self._find_places)

    @classmethod
    def open(cls, store: Store, ref: CheckpointRef) -> Content:
        """Read manifest and layout.

        Raises:
            IntegrityError, IncompleteError: they are damaged or missing.
        """
        manifest = store.manifest(ref)
        layout = store.layout(manifest.layout)
        try:
            check_layout(store, manifest, layout)
        except LayoutError as error:
            raise IntegrityError(f"{store.url}/{paths.layout(manifest.layout)}: {error}") from None
        return cls(store, manifest, layout)

    # Tensors

    def fill(self, regions: Sequence[Region], memory: _native.Buffer) -> None:
        """Read these boxes of tensors into ``memory``.

        Raises:
            IntegrityError: a chunk is damaged, it is named; ``memory`` is then undefined.
            IncompleteError: a shard is missing.
        """
        needed = self.rows(regions, memory.address)
        for rank in sorted(needed):
            rows = needed[rank]
            table = rows.table()

            def scatter(
                lo: int, hi: int, data: memoryview, table: _native.CopyTable = table, rows: Rows = rows
            ) -> None:
                table.scatter(rows.pointers, lo, hi, data)

            receipt = self.receipt(rank)
            chunks = touched(table, receipt.size)
            with self.store.open_shard(receipt) as reader:
                read_chunks(reader, receipt, chunks, scatter, url=self.store.url)
            self.bytes_read += chunk_bytes(chunks, receipt.size)

    def rows(self, regions: Iterable[Region], address: int = 0) -> dict[int, Rows]:
        """What to read of which rank's shard for these boxes, if memory begins at ``address``."""
        layout = self.layout
        found: dict[int, Rows] = {}
        for index, box, start, _ in regions:
            owner = layout.alias(index)
            item = shard.dtype(layout.dtype(owner)).size
            for stored in layout.pieces_in(owner, box):
                part = intersection(stored.box, box)
                if part is None:
                    continue
                rows = found.get(stored.rank)
                if rows is None:
                    rows = found[stored.rank] = Rows()
                rows.add(self.offset(owner, stored), item, stored.box, part, box, address + start)
        return found

    def offset(self, index: int, stored: Stored) -> int:
        """The byte of its rank's shard at which a stored piece of tensor ``index`` begins."""
        return self._places(stored.rank).offset(index, stored.k)

    def _receipt(self, rank: int) -> Receipt:
        return self.store.receipt(self.manifest, rank)

    def header(self, rank: int) -> shard.Header:
        """The header of a shard: layout and receipt say every byte of it, so none has to be read.

        Raises:
            IntegrityError: the shard has another header.
        """
        layout, receipt = self.layout, self.receipt(rank)
        name = f"{self.store.url}/{receipt.name}"
        pieces = list(layout.shard_pieces(rank))
        data = sum(prod(shape) * shard.dtype(kind).size for _, _, kind, shape in pieces)
        capacity = receipt.size - receipt.header_size - data if layout.has_blob(rank) else None
        try:
            if capacity is not None and capacity <= 0:
                raise LayoutError("there is no room for its values")
            header = shard.build(pieces, layout=self.manifest.layout, rank=rank, blob=capacity)
        except LayoutError as error:
            raise IntegrityError(f"{name}: its size is not one that its layout allows: {error}") from None
        digest = derive("header", header.data).hex()
        if header.size != receipt.size or digest != receipt.header_digest:
            raise IntegrityError(f"{name}: expected a header with digest {digest}, found {receipt.header_digest}")
        return header

    def _find_places(self, rank: int) -> Placement:
        return Placement.of(self.layout, self.header(rank))

    # Values

    @cached_property
    def nodes(self) -> dict[str, tree.Node]:
        """The nodes of all trees by name; where trees differ, that of the lowest rank."""
        found: dict[str, tree.Node] = {}
        for each in self.layout.trees:
            for name, node in tree.walk(each.tree):
                found.setdefault(name, node)
        return found

    @cached_property
    def homes(self) -> dict[str, int]:
        """For each value that is no rank's own, the rank whose blob has it."""
        found: dict[str, int] = {}
        for each in self.layout.trees:
            for name, node in tree.walk(each.tree):
                if node[0] == "value":
                    found.setdefault(name, each.ranks[0][0])
        return found

    @cached_property
    def own(self) -> dict[int, list[str]]:
        """By rank, ascending, the names of the values that are the rank's own; ranks without any are left out."""
        found: dict[int, list[str]] = {}
        for each in self.layout.trees:
            names = [name for name, node in tree.walk(each.tree) if node[0] == "per_rank"]
            if names:
                found.update((rank, names) for first, last in each.ranks for rank in range(first, last + 1))
        return dict(sorted(found.items()))

    def values(self, rank: int) -> dict[str, JSON]:
        """The encoded values by name in the blob of a rank.

        Raises:
            IntegrityError, IncompleteError: it is damaged or missing.
        """
        lo, hi = self.blob(rank)
        receipt = self.receipt(rank)
        data = bytearray(hi - lo)

        def take(first: int, last: int, chunk: memoryview) -> None:
            begin, end = max(first, lo), min(last, hi)
            data[begin - lo : end - lo] = chunk[begin - first : end - first]

        chunks = range(lo // CHUNK, (hi - 1) // CHUNK + 1)
        with self.store.open_shard(receipt) as reader:
            read_chunks(reader, receipt, chunks, take, url=self.store.url)
        self.bytes_read += chunk_bytes(chunks, receipt.size)
        return blob.decode(bytes(data), what=f"{self.store.url}/{receipt.name}: values")

    def pick(self, found: dict[str, JSON], name: str, rank: int) -> JSON:
        """The value ``name`` among those of a rank. Raises ``IntegrityError`` if it is not there."""
        if name not in found:
            raise IntegrityError(f"{self.store.url}: the values of rank {rank} lack {name!r}, which its layout names")
        return found[name]

    def blob(self, rank: int) -> tuple[int, int]:
        """The bytes [lo, hi) of a rank's shard that are its blob. Raises ``IntegrityError`` if it has none."""
        if not self.layout.has_blob(rank):
            raise IntegrityError(f"{self.store.url}: rank {rank} has no values, although its layout needs them")
        found = self._places(rank).blob
        assert found is not None  # the header of such a rank has one
        return found


def chunk_bytes(chunks: Iterable[int], size: int) -> int:
    """Bytes that these chunks of a shard of ``size`` bytes have."""
    return sum(hi - lo for lo, hi in (chunk_range(index, size) for index in chunks))
