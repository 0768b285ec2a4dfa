"""Bring verified bytes of shards into live memory."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierckpt import _native
from tierckpt.errors import IntegrityError
from tierckpt.format import blob
from tierckpt.format.canonical import JSON
from tierckpt.format.layout import Layout
from tierckpt.format.manifest import Manifest
from tierckpt.format.placement import Placement
from tierckpt.format.receipt import Receipt
from tierckpt.restore.plan import ShardRead
from tierckpt.tiers.base import Reader
from tierckpt.tiers.chunks import check_header, read_chunks, read_header
from tierckpt.tiers.content import touched
from tierckpt.tiers.store import Store


@dataclass(frozen=True)
class Job:
    """Chunks to read of one shard, and what to do with each once it is verified (from any thread)."""

    indices: Sequence[int]
    use: Callable[[int, int, memoryview], None]


@dataclass(frozen=True)
class ShardView:
    """What is known of one shard before any of its data is read: its verified receipt and where its pieces lie."""

    receipt: Receipt
    placement: Placement

    def fill(self, wanted: ShardRead) -> Job:
        """The job that fills the memory which ``wanted`` names."""
        table, pointers = wanted.table(self.placement)
        return Job(touched(table, self.receipt.size), lambda lo, hi, data: table.scatter(pointers, lo, hi, data))

    def values(self) -> tuple[Job, Callable[[], dict[str, JSON]]]:
        """The job that reads the blob, and the function that then gives its encoded values by name."""
        if self.placement.blob is None:
            raise IntegrityError(f"{self.receipt.name}: it has no values")
        lo, hi = self.placement.blob
        data = bytearray(hi - lo)
        table = _native.CopyTable(*(array("q", [n]) for n in (lo, 1, 1, hi - lo, 1, 1)))
        pointers = array("Q", [ctypes.addressof(ctypes.c_char.from_buffer(data))])
        job = Job(touched(table, self.receipt.size), lambda lo, hi, chunk: table.scatter(pointers, lo, hi, chunk))
        return job, lambda: blob.decode(bytes(data), what=f"{self.receipt.name}: values")


class LocalShard:
    """A shard that is in this rank's own root, open.

    Raises:
        IncompleteError: receipt or shard are missing.
        IntegrityError: receipt or header are not what the manifest and the layout say.
    """

    def __init__(self, store: Store, manifest: Manifest, layout: Layout, rank: int) -> None:
        self.url = store.url
        receipt = store.receipt(manifest, rank)
        self.reader: Reader = store.open_shard(receipt)
        try:
            self.header = read_header(self.reader, receipt, url=store.url)
            header = check_header(self.header, layout, receipt, url=store.url)
            self.view = ShardView(receipt, Placement.of(layout, header))
        except BaseException:
            self.reader.close()
            raise

    def run(self, job: Job) -> None:
        """Read, verify, use."""
        read_chunks(self.reader, self.view.receipt, job.indices, job.use, url=self.url)

    def __enter__(self) -> LocalShard:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()
