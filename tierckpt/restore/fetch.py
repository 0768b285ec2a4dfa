"""Bring verified bytes from a store into live memory."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from dataclasses import dataclass

from tierckpt import _native
from tierckpt.errors import IntegrityError
from tierckpt.format import blob, shard
from tierckpt.format.canonical import JSON
from tierckpt.format.digest import CHUNK
from tierckpt.format.layout import Layout
from tierckpt.format.manifest import Manifest
from tierckpt.format.receipt import Receipt
from tierckpt.restore.plan import ShardRead, touched
from tierckpt.tiers.base import Reader
from tierckpt.tiers.chunks import check_header, read_chunks, read_header
from tierckpt.tiers.store import Store


@dataclass
class ShardFetch:
    """One shard of a checkpoint, open, its receipt and header verified."""

    store: Store
    layout: Layout
    receipt: Receipt
    reader: Reader
    entries: tuple[shard.Entry, ...]
    bytes: int = 0

    @classmethod
    def open(cls, store: Store, manifest: Manifest, layout: Layout, rank: int) -> ShardFetch:
        """Raises:
        IncompleteError: receipt or shard are missing.
        IntegrityError: receipt or header are not what the manifest and the layout say.
        """
        receipt = store.receipt(manifest, rank)
        reader = store.open_shard(receipt)
        try:
            header = read_header(reader, receipt, url=store.url)
            name = f"{store.url}/{receipt.name}"
            entries = check_header(header, layout, manifest.layout, rank, name=name)
        except BaseException:
            reader.close()
            raise
        return cls(store, layout, receipt, reader, entries)

    def read(self, wanted: ShardRead) -> None:
        """Fill the memory that ``wanted`` names; every chunk is verified before a byte of it is used."""
        table, pointers = wanted.table(self.layout, self.entries)
        self._scatter(table, lambda lo, hi, data: table.scatter(pointers, lo, hi, data))

    def values(self) -> dict[str, JSON]:
        """The encoded values in this shard's blob, by name."""
        last = self.entries[-1]
        if last.name != blob.NAME:
            raise IntegrityError(f"{self.store.url}/{self.receipt.name}: it has no values")
        data = bytearray(last.nbytes)
        table = _native.CopyTable(*(array("q", [n]) for n in (last.offset, 1, 1, last.nbytes, 1, 1)))
        pointers = array("Q", [ctypes.addressof(ctypes.c_char.from_buffer(data))])
        self._scatter(table, lambda lo, hi, chunk: table.scatter(pointers, lo, hi, chunk))
        return blob.decode(bytes(data), what=f"{self.store.url}/{self.receipt.name}: values")

    def _scatter(self, table: _native.CopyTable, use: Callable[[int, int, memoryview], None]) -> None:
        indices = touched(table, self.receipt.size)
        read_chunks(self.reader, self.receipt, indices, use, url=self.store.url)
        self.bytes += len(indices) * CHUNK

    def close(self) -> None:
        self.reader.close()

    def __enter__(self) -> ShardFetch:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
