"""The chunks of one shard on their way into a file: gathered, hashed and written at the same time; and out of it."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Protocol, TypeAlias

from tierckpt import _native
from tierckpt.config import CHUNKS_AHEAD
from tierckpt.format.digest import chunk_count, chunk_digest, chunk_range
from tierckpt.tiers.base import Reader, Writer
from tierckpt.tiers.workers import Job, workers

#: The digest of chunk number ``index``, whose bytes are given: one that was taken before need not be taken again.
TakeDigest: TypeAlias = Callable[[int, memoryview], bytes]


def chunk_digest_of(index: int, data: memoryview) -> bytes:
    """Takes the digest of a chunk, whichever it is."""
    return chunk_digest(data)


class Source(Protocol):
    """Where the bytes of a shard come from: a slot that holds a copy, or live state that stands still."""

    size: int

    def chunk(self, lo: int, hi: int, scratch: _native.Buffer) -> memoryview:
        """Bytes [lo, hi) of the shard, at the beginning of ``scratch`` (page-aligned, of one chunk) or in page-aligned
        memory of its own, where they stay until the shard is written. Called from several threads, each chunk once."""


class Pipeline:
    """Carries a source into a writer, once.

    A chunk is handed to the threads that write as soon as it has been gathered, and hashed while it is on its way:
    threads that hash and then write would pause together, since the disk serves them together, and leave it idle.

    Args:
        digest: gives the digest of a chunk; one that was taken before need not be taken again.
    """

    def __init__(self, writer: Writer, source: Source, digest: TakeDigest = chunk_digest_of) -> None:
        self._writer, self._source, self._digest = writer, source, digest
        self._found = [b""] * chunk_count(source.size)
        self._threads = workers()
        self._job = Job(len(self._found), self._chunk)

    def run(self) -> bytes:
        """Write everything; the digests of the chunks. Whatever happens, nobody uses writer or source afterwards.

        Raises:
            What a thread raised first.
        """
        self._threads.do(self._job)
        return b"".join(self._found)

    def _chunk(self, index: int, _: _native.Buffer) -> None:
        buffer = _Lent(self._threads.buffers)
        try:
            if self._job.error is not None:
                return
            lo, hi = chunk_range(index, self._source.size)
            data = self._source.chunk(lo, hi, buffer.memory)
            self._write(lo, _padded(data, buffer.memory, self._writer.alignment), buffer)
            self._found[index] = self._digest(index, data)
        finally:
            buffer.give_back()

    def _write(self, offset: int, data: memoryview, buffer: _Lent) -> None:
        """Have ``data``, which may lie in ``buffer``, written while others go on."""

        def write() -> None:
            try:
                if self._job.error is None:
                    self._writer.write(offset, data)
            finally:
                buffer.give_back()

        buffer.share()
        self._threads.write(self._job.part(write))


class Intake:
    """Reads parts of a file ahead, while others of them are worked on: the other way of `Pipeline`, for the same reason.

    Neither those that read nor those that work ever wait for memory: each part that is under way has its own.

    Args:
        offsets: where the parts begin; each has at most the bytes of one chunk.
        use: called from several threads with the number of a part, its memory (page-aligned, of one chunk), and how many
            bytes of it were read.
    """

    def __init__(self, reader: Reader, offsets: Sequence[int], use: Callable[[int, memoryview, int], None]) -> None:
        self._reader, self._offsets, self._use = reader, offsets, use
        self._threads = workers()
        self._job = Job(len(offsets), self._read)

    def run(self) -> None:
        """Read everything. Whatever happens, nobody uses the reader afterwards.

        Raises:
            What a thread raised first.
        """
        buffers = self._threads.spare(min(CHUNKS_AHEAD, len(self._offsets)))

        def begin() -> None:
            for buffer in buffers:
                self._next(buffer)

        try:
            self._job.run(begin)
        finally:
            if self._job.is_over:  # else interrupts have got through: somebody may still read into them
                self._threads.keep(buffers)

    def _next(self, buffer: _native.Buffer) -> None:
        """Have the next part read into ``buffer``, if there is one when its turn comes."""
        self._threads.write(partial(self._job.one, buffer))

    def _read(self, number: int, buffer: _native.Buffer) -> None:
        got = self._reader.read_into(self._offsets[number], buffer)
        work = self._job.part(partial(self._work, number, buffer, got))
        self._threads.work(lambda _: work())

    def _work(self, number: int, buffer: _native.Buffer, got: int) -> None:
        if self._job.error is None:
            self._use(number, memoryview(buffer), got)
        self._next(buffer)


class _Lent:
    """A buffer of the pool, which has it back when all that use it are done."""

    def __init__(self, pool: queue.SimpleQueue[_native.Buffer]) -> None:
        self._pool, self._lock, self._users = pool, threading.Lock(), 1
        self.memory = pool.get()

    def share(self) -> None:
        with self._lock:
            self._users += 1

    def give_back(self) -> None:
        with self._lock:
            self._users -= 1
            last = self._users == 0
        if last:
            self._pool.put(self.memory)


def _padded(data: memoryview, buffer: _native.Buffer, alignment: int) -> memoryview:
    """The last chunk comes in whole blocks, too: the writer cuts the file to its size in the end."""
    missing = -data.nbytes % alignment
    if not missing:
        return data
    block = memoryview(buffer)[: data.nbytes + missing]
    if data.obj is not buffer:
        block[: data.nbytes] = data
    block[data.nbytes :] = bytes(missing)
    return block
