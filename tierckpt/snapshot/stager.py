"""Where a shard's bytes come from: from live state that stands still, or from a slot that holds a copy of it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from tierckpt import _native
from tierckpt.config import COPY_THREADS
from tierckpt.snapshot.arena import Slot
from tierckpt.snapshot.remote import RemoteSlot


class LiveSource:
    """A shard gathered from live memory chunk by chunk, while nobody changes it.

    Args:
        table: where each piece lies in the shard and in memory.
        pointers: addresses of the pieces, in the table's order.
        size: of the shard in bytes.
        keep: whatever must stay alive as long as this does.
    """

    def __init__(self, table: _native.CopyTable, pointers: array[int], size: int, keep: Sequence[object]) -> None:
        self.size = size
        self._table, self._pointers, self._keep = table, pointers, keep

    def chunk(self, lo: int, hi: int, scratch: _native.Buffer) -> memoryview:
        """Bytes [lo, hi), gathered into ``scratch``."""
        data = memoryview(scratch)[: hi - lo]
        self._table.gather(self._pointers, lo, hi, data)
        return data

    def stage(self, slot: Slot | RemoteSlot) -> SlotSource:
        """Copy everything into ``slot``; from then on the live memory may change."""
        self._table.gather(self._pointers, 0, self.size, memoryview(slot.buffer)[: self.size], COPY_THREADS)
        return SlotSource(slot, self.size)


class SlotSource:
    """A staged shard."""

    def __init__(self, slot: Slot | RemoteSlot, size: int) -> None:
        self.size = size
        self._data = memoryview(slot.buffer)

    def chunk(self, lo: int, hi: int, scratch: _native.Buffer) -> memoryview:
        """Bytes [lo, hi), in the slot."""
        return self._data[lo:hi]
