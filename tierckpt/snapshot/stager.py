"""Where a shard's bytes come from: from live state that stands still, or from a slot that holds a copy of it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import compress
from typing import TypeAlias

from tierckpt import _native
from tierckpt.config import COPY_THREADS
from tierckpt.snapshot import fence
from tierckpt.state.plan import Split

Memory: TypeAlias = "_native.Buffer | _native.Shared"
"""That of a slot, page-aligned."""


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

    def ready(self) -> None:
        """There is nothing to wait for."""

    def chunk(self, lo: int, hi: int, scratch: _native.Buffer) -> memoryview:
        """Bytes [lo, hi), gathered into ``scratch``."""
        data = memoryview(scratch)[: hi - lo]
        self._table.gather(self._pointers, lo, hi, data)
        return data

    def stage(self, memory: Memory) -> SlotSource:
        """Copy everything into ``memory``; from then on the live memory may change."""
        self._table.gather(self._pointers, 0, self.size, memoryview(memory)[: self.size], COPY_THREADS)
        return SlotSource(memory, self.size)

    def stage_behind_fence(
        self,
        memory: Memory,
        split: Split,
        watch: fence.Watch,
        also: Sequence[Callable[[], None]],
        keep: Sequence[object],
        done: Callable[[], None],
    ) -> SlotSource:
        """Copy the first part of ``split`` into ``memory``, and get the second ready, which only optimizers change: it is
        copied from `SlotSource.begin` on.

        Args:
            watch: tells whether they did so meanwhile.
            also: what else must be done before they change.
            keep: the memory of the second part.
            done: called once when all is there, from any thread.
        """
        into = memoryview(memory)[: self.size]
        fence.install()
        now = array("Q", compress(self._pointers, split.now_rows))
        later = array("Q", compress(self._pointers, split.later_rows))
        split.now.gather(now, 0, self.size, into, COPY_THREADS)
        return SlotSource(
            memory, self.size, fence.Copy(split.later, later, into, watch, also, [self._keep, memory, keep], done)
        )


class SlotSource:
    """A staged shard, or one that is being staged by ``copy``."""

    def __init__(self, memory: Memory, size: int, copy: fence.Copy | None = None) -> None:
        self.size = size
        self._data = memoryview(memory)
        self._copy = copy

    def begin(self) -> None:
        """Let what is copied late be copied."""
        if self._copy is not None:
            self._copy.start()

    def end(self) -> None:
        """Nothing is written to the memory any more."""
        if self._copy is not None:
            self._copy.help()

    def ready(self) -> None:
        """Wait until all of it is there.

        Raises:
            TornSnapshotError: the state changed while it was copied.
        """
        if self._copy is not None:
            self._copy.wait()

    @property
    def waited(self) -> float:
        """Seconds for which training stood at the fence because of it."""
        return 0.0 if self._copy is None else self._copy.waited

    def chunk(self, lo: int, hi: int, scratch: _native.Buffer) -> memoryview:
        """Bytes [lo, hi), in the slot."""
        return self._data[lo:hi]
