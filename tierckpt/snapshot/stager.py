"""Where a shard's bytes come from: from live state that stands still, or from a slot that holds a copy of it."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING

from tierckpt import _native
from tierckpt.config import COPY_THREADS
from tierckpt.snapshot import fence
from tierckpt.snapshot.device import Jobs, pin
from tierckpt.state.devices import HOST
from tierckpt.state.plan import Split

if TYPE_CHECKING:
    from tierckpt.state.replicas import Sample


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
        self.table, self.pointers, self._keep = table, pointers, keep

    def chunk(self, lo: int, hi: int, scratch: _native.Buffer) -> memoryview:
        """Bytes [lo, hi), gathered into ``scratch``."""
        data = memoryview(scratch)[: hi - lo]
        self.table.gather(self.pointers, lo, hi, data)
        return data

    def stage(self, memory: _native.Buffer) -> SlotSource:
        """Copy everything, all of it at the host, into ``memory``; from then on the live memory may change."""
        self.table.gather(self.pointers, 0, self.size, memoryview(memory)[: self.size], COPY_THREADS)
        return SlotSource(memory, self.size)


class Stager:
    """One shard, and what is compared with other ranks, on their way out of live memory.

    Args:
        source: the shard; None if this rank writes none.
        split: its rows in parts; None if all are at the host and none may be copied late.
        sample: what is compared; None if nothing is.

    Raises:
        DeviceError: a GPU refused.
    """

    def __init__(self, source: LiveSource | None, split: Split | None, sample: Sample | None) -> None:
        self._source, self._split, self._sample = source, split, sample
        places = set() if split is None else {part.place for part in split.parts}
        places |= set() if sample is None else sample.places
        #: What training has enqueued until now comes first.
        self._jobs = Jobs(places - {HOST})

    @property
    def ends_later(self) -> bool:
        """Whether `copy_behind_fence` has anything to do after it has returned."""
        return bool(self._jobs) or (self._split is not None and any(part.late for part in self._split.parts))

    def copy(self, memory: _native.Buffer | None) -> SlotSource | None:
        """Copy everything into ``memory``, None if there is no shard: when this returns all is there."""
        with self._settled():
            found = self._now(memory, (False, True))
            self._jobs.wait()
        return found

    def copy_behind_fence(
        self,
        memory: _native.Buffer | None,
        watch: fence.Watch,
        keep: Sequence[object],
        done: Callable[[], None],
    ) -> tuple[SlotSource | None, fence.Copy]:
        """Copy what more than optimizers change into ``memory``, and get the rest ready: it is copied from `Copy.start` on.
        What is on GPUs is only enqueued, before anything that training enqueues later.

        Args:
            watch: tells whether the rest has changed meanwhile.
            keep: the memory of the rest.
            done: called once when all is there, from any thread.
        """
        source, sample = self._source, self._sample
        with self._settled():
            found = self._now(memory, (False,))
            fence.install()
            tasks: list[Callable[[], object]] = [partial(self._enqueue, place, memory, True) for place in self._jobs]
            if sample is not None:
                tasks.append(partial(sample.take, late=True, place=HOST))
            behind = None
            if source is not None and memory is not None and self._split is not None:
                into = memoryview(memory)[: source.size]
                for part in self._split.parts:
                    if part.late and part.place == HOST:
                        names = partial(self._split.names_of, part)
                        behind = fence.Late(part.table, part.pointers(source.pointers), into, names)
            kept = [source, memory, sample, *keep]
            return found, fence.Copy(behind, watch, tasks, kept, done, self._jobs)

    @contextmanager
    def _settled(self) -> Iterator[None]:
        """After an error or an interrupt nothing is written any more: the memory goes to somebody else."""
        try:
            yield
        except BaseException:
            self._jobs.settle()
            raise

    def _now(self, memory: _native.Buffer | None, late: Sequence[bool]) -> SlotSource | None:
        """The copies of this thread: GPUs work on theirs while it makes those of the host."""
        source, sample = self._source, self._sample
        if self._jobs and memory is not None:
            pin(memory)
        places = {place for place in self._jobs for each in late if self._enqueue(place, memory, each)}
        self._jobs.hold(places)
        if source is not None and memory is not None:
            if self._split is None:
                source.stage(memory)
            else:
                into = memoryview(memory)[: source.size]
                for part in self._split.parts:
                    if part.place == HOST and part.late in late:
                        pointers = part.pointers(source.pointers)
                        part.table.gather(pointers, 0, source.size, into, COPY_THREADS)
        if sample is not None:
            for each in late:
                sample.take(late=each, place=HOST)
        return None if source is None or memory is None else SlotSource(memory, source.size)

    def _enqueue(self, place: int, memory: _native.Buffer | None, late: bool) -> bool:
        """Have a device copy its part, and take fingerprints; whether there is anything."""
        source, sample = self._source, self._sample
        any_of = False
        try:
            if source is not None and memory is not None and self._split is not None:
                for part in self._split.parts:
                    if part.place == place and part.late == late:
                        any_of = True
                        self._jobs.gather(place, part.table, part.pointers(source.pointers), memory)
            if sample is not None:
                any_of |= sample.take(late=late, place=place, jobs=self._jobs)
        finally:
            # Also what was enqueued before an error is waited for: the memory goes to somebody else.
            if any_of:
                self._jobs.mark(place)
        return any_of


class SlotSource:
    """A staged shard."""

    def __init__(self, memory: _native.Buffer, size: int) -> None:
        self.size = size
        self._data = memoryview(memory)

    def chunk(self, lo: int, hi: int, scratch: _native.Buffer) -> memoryview:
        """Bytes [lo, hi), in the slot."""
        return self._data[lo:hi]
