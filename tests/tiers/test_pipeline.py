"""A shard's way into a file and out of it: exact bytes and digests, and an end to everything at the first error of any stage."""

from __future__ import annotations

import errno
import itertools
import os
import random
import signal
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tierckpt import _native
from tierckpt.config import CHUNKS_AHEAD, WRITE_ATTEMPTS
from tierckpt.errors import StoreError
from tierckpt.format.digest import CHUNK, SIZE, chunk_count, chunk_digest, chunk_range
from tierckpt.tiers import chunks, pipeline
from tierckpt.tiers.base import Reader, Writer
from tierckpt.tiers.chunks import write_shard
from tierckpt.tiers.disk import DiskPlace
from tierckpt.tiers.pipeline import Intake, Pipeline
from tierckpt.tiers.workers import workers

SIZES = [1, 4095, 4096, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK, (CHUNKS_AHEAD + 5) * CHUNK + 12_345]


class Bytes:
    """A source of random bytes, in memory of its own or gathered into scratch; ``before`` sees each chunk's offset."""

    def __init__(self, size: int, *, gathers: bool = True, before: Callable[[int], None] = lambda lo: None) -> None:
        self.size, self._gathers, self._before = size, gathers, before
        self._memory = _native.Buffer(-(-size // 4096) * 4096)
        self.data = memoryview(self._memory)[:size]
        # Every chunk differs from every other one.
        block = random.Random(size).randbytes(min(size, CHUNK + 1001))
        for lo in range(0, size, len(block)):
            self.data[lo : lo + len(block)] = block[: size - lo]

    def chunk(self, lo: int, hi: int, scratch: _native.Buffer) -> memoryview:
        self._before(lo)
        if not self._gathers:
            return self.data[lo:hi]
        found = memoryview(scratch)[: hi - lo]
        found[:] = self.data[lo:hi]
        return found

    @property
    def digests(self) -> bytes:
        ranges = [chunk_range(index, self.size) for index in range(chunk_count(self.size))]
        return b"".join(chunk_digest(self.data[lo:hi]) for lo, hi in ranges)


class Watched(Writer):
    """A writer that keeps nothing; ``before`` sees each write's offset and may raise."""

    name, alignment = "watched", 4096

    def __init__(self, before: Callable[[int], None]) -> None:
        self._before, self._lock = before, threading.Lock()
        self.begun = self.under_way = 0

    def write(self, offset: int, buffer: Any) -> None:
        with self._lock:
            self.begun += 1
            self.under_way += 1
        try:
            self._before(offset)
        finally:
            with self._lock:
                self.under_way -= 1

    def commit(self) -> None:
        raise AssertionError("a pipeline does not commit")

    def abort(self) -> None:
        raise AssertionError("a pipeline does not abort")


class Odd(Exception):
    """An error that no code of the package knows."""


@pytest.fixture
def place(tmp_path: Path) -> DiskPlace:
    found = DiskPlace(tmp_path / "store")
    found.prepare()
    return found


@pytest.fixture(autouse=True)
def _every_buffer_comes_back() -> Any:
    yield
    assert workers().buffers.qsize() == CHUNKS_AHEAD


def fails(wanted: int, error: BaseException) -> Callable[[int], None]:
    """Raises ``error`` at the chunk of this number."""

    def before(lo: int) -> None:
        if lo == wanted * CHUNK:
            raise error

    return before


# Exactness


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("gathers", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_bytes_and_digests(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch, size: int, gathers: bool, direct: bool
) -> None:
    if not direct:

        def buffered(folder: int, name: str, flags: int, mode: int = 0o666) -> tuple[int, bool]:
            return os.open(name, flags | os.O_CLOEXEC, mode, dir_fd=folder), False

        monkeypatch.setattr(_native, "open_direct", buffered)
    source = Bytes(size, gathers=gathers)
    assert write_shard(place, "shard", source) == source.digests
    assert place.read("shard", size) == source.data


@pytest.mark.parametrize("gathers", [True, False])
def test_known_digests_are_not_taken_again(place: DiskPlace, monkeypatch: pytest.MonkeyPatch, gathers: bool) -> None:
    source = Bytes(5 * CHUNK + 77, gathers=gathers)
    digests = source.digests

    def hashed(_: Any) -> bytes:
        raise AssertionError("hashed again")

    monkeypatch.setattr(pipeline, "chunk_digest", hashed)
    known = [digests[at : at + SIZE] for at in range(0, len(digests), SIZE)]
    assert write_shard(place, "shard", source, lambda index, data: known[index]) == digests
    assert place.read("shard", source.size) == source.data


def test_what_lies_in_scratch_behind_a_short_chunk_is_not_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes of another chunk must not be in the file, not even before it is cut."""
    seen = []

    class Last(Watched):
        def write(self, offset: int, buffer: Any) -> None:
            seen.append(bytes(memoryview(buffer)[5:]))

    for _ in range(CHUNKS_AHEAD):  # whichever buffer is next
        Pipeline(Watched(lambda offset: None), Bytes(CHUNK)).run()
        Pipeline(Last(lambda offset: None), Bytes(5)).run()
    assert seen == [bytes(4091)] * CHUNKS_AHEAD


# Concurrency


def test_a_chunk_is_hashed_while_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    both = threading.Barrier(2)

    def hashed(data: memoryview) -> bytes:
        both.wait(30)
        return chunk_digest(data)

    monkeypatch.setattr(pipeline, "chunk_digest", hashed)
    source = Bytes(1000)
    assert Pipeline(Watched(lambda offset: void(both.wait(30))), source).run() == source.digests


def void(_: object) -> None:
    """For lambdas that return nothing."""


def test_many_shards_at_once(place: DiskPlace) -> None:
    """They share threads and buffers, and none waits for ever for what another one holds."""
    sources = [Bytes((3 + number) * CHUNK + number, gathers=number % 2 == 0) for number in range(6)]
    with ThreadPoolExecutor(len(sources)) as threads:
        found = list(threads.map(lambda n: write_shard(place, f"shard-{n}", sources[n]), range(len(sources))))
    for number, source in enumerate(sources):
        assert found[number] == source.digests
        assert place.read(f"shard-{number}", source.size) == source.data


# Errors


@pytest.mark.parametrize("number", [0, 3, CHUNKS_AHEAD + 4])
@pytest.mark.parametrize("stage", ["gather", "hash", "write"])
def test_an_error_of_any_stage_is_raised_as_it_is(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch, stage: str, number: int
) -> None:
    error = Odd(stage)
    raiser = fails(number, error)
    source = Bytes(SIZES[-1], before=raiser if stage == "gather" else lambda lo: None)
    if stage == "hash":
        lo, hi = chunk_range(number, source.size)
        wrong = bytes(source.data[lo:hi])

        def hashed(data: memoryview) -> bytes:
            if data == wrong:
                raise error
            return chunk_digest(data)

        monkeypatch.setattr(pipeline, "chunk_digest", hashed)
    elif stage == "write":
        real = _native.write_at

        def written(fd: int, data: Any, offset: int) -> None:
            raiser(offset)
            real(fd, data, offset)

        monkeypatch.setattr(_native, "write_at", written)
    with pytest.raises(Odd) as raised:
        write_shard(place, "shard", source)
    assert raised.value is error
    assert place.size("shard") is None
    monkeypatch.undo()
    again = Bytes(SIZES[-1])
    assert write_shard(place, "shard", again) == again.digests


def test_an_error_of_the_disk_names_the_file(place: DiskPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_native, "write_at", full)
    with pytest.raises(StoreError, match=r"cannot write .*/f/shard: No space left"):
        write_shard(place, "f/shard", Bytes(SIZES[-1]))
    assert place.size("f/shard") is None


def test_no_chunk_is_begun_after_an_error_and_few_before_the_first_write() -> None:
    """While the disk stands still, memory is bounded; once it has failed nothing more is gathered or written."""
    gathered, full, lock = [], threading.Event(), threading.Lock()

    def gather(lo: int) -> None:
        with lock:
            gathered.append(lo)
            if len(gathered) == CHUNKS_AHEAD:
                full.set()

    def write(offset: int) -> None:
        assert full.wait(30)
        raise Odd

    writer = Watched(write)
    with pytest.raises(Odd):
        Pipeline(writer, Bytes(SIZES[-1], before=gather)).run()
    assert len(gathered) == CHUNKS_AHEAD
    assert writer.begun < CHUNKS_AHEAD


@pytest.mark.parametrize("stage", ["gather", "write"])
def test_nobody_writes_any_more_after_an_error(stage: str) -> None:
    """The caller closes the file then: its number may be another file's."""
    broken = threading.Event()
    writes = itertools.count()

    def fail() -> None:
        broken.set()
        raise Odd

    def gather(lo: int) -> None:
        if stage == "gather" and lo == CHUNK:
            fail()

    def write(offset: int) -> None:
        if stage == "write" and next(writes) == 1:  # whichever it is: others of them may wait already, on all threads
            fail()
        assert broken.wait(30)

    writer = Watched(write)
    with pytest.raises(Odd):
        Pipeline(writer, Bytes(SIZES[-1], before=gather)).run()
    assert writer.under_way == 0
    assert writer.begun < chunk_count(SIZES[-1])


def test_an_interrupt_waits_for_the_threads() -> None:
    main = threading.main_thread()
    assert threading.current_thread() is main

    def interrupt(offset: int) -> None:
        if offset == 0:
            signal.pthread_kill(main.ident, signal.SIGINT)

    writer = Watched(interrupt)
    with pytest.raises(KeyboardInterrupt):
        Pipeline(writer, Bytes(SIZES[-1])).run()
    assert writer.under_way == 0


def test_errors_that_pass_are_retried(place: DiskPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "WRITE_BACKOFF", 0.0)
    real, refused, lock = _native.write_at, [errno.ESTALE, errno.EAGAIN], threading.Lock()

    def sometimes(fd: int, data: Any, offset: int) -> None:
        with lock:
            code = refused.pop() if offset == 2 * CHUNK and refused else 0
        if code:
            raise OSError(code, os.strerror(code))
        real(fd, data, offset)

    monkeypatch.setattr(_native, "write_at", sometimes)
    source = Bytes(4 * CHUNK + 1)
    assert write_shard(place, "shard", source) == source.digests
    assert not refused
    assert place.read("shard", source.size) == source.data


def test_retries_come_to_an_end(place: DiskPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunks, "WRITE_BACKOFF", 0.0)
    attempts = []

    def never(fd: int, data: Any, offset: int) -> None:
        attempts.append(fd)
        raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    monkeypatch.setattr(_native, "write_at", never)
    with pytest.raises(StoreError, match="timed out"):
        write_shard(place, "shard", Bytes(10))
    assert len(attempts) == WRITE_ATTEMPTS
    assert place.size("shard") is None


# Out of a file


class File(Reader):
    """A file in memory; ``before`` sees each read's offset and may raise."""

    name, waits = "file", True

    def __init__(self, data: memoryview, before: Callable[[int], None] = lambda offset: None) -> None:
        self.size, self._data, self._before = len(data), data, before
        self._lock = threading.Lock()
        self.begun = self.under_way = 0

    def read_into(self, offset: int, buffer: Any) -> int:
        with self._lock:
            self.begun += 1
            self.under_way += 1
        try:
            self._before(offset)
            view = memoryview(buffer)
            found = self._data[offset : offset + len(view)]
            view[: len(found)] = found
            return len(found)
        finally:
            with self._lock:
                self.under_way -= 1

    def close(self) -> None:
        raise AssertionError("an intake does not close")


def offsets(size: int) -> list[int]:
    return [chunk_range(index, size)[0] for index in range(chunk_count(size))]


@pytest.mark.parametrize("size", SIZES)
def test_every_part_is_read_once_and_handed_on_whole(size: int) -> None:
    source, found = Bytes(size), {}

    def use(number: int, memory: memoryview, got: int) -> None:
        assert number not in found
        found[number] = bytes(memory[:got])

    Intake(File(source.data), offsets(size), use).run()
    assert b"".join(found[number] for number in range(chunk_count(size))) == source.data


def test_nothing_wanted_is_nothing_read() -> None:
    file = File(Bytes(1).data)
    Intake(file, [], lambda number, memory, got: None).run()
    assert file.begun == 0


@pytest.mark.parametrize("number", [0, 3, CHUNKS_AHEAD + 4])
@pytest.mark.parametrize("stage", ["read", "use"])
def test_an_error_on_the_way_out_is_raised_as_it_is_and_ends_the_reading(stage: str, number: int) -> None:
    error, size = Odd(stage), 40 * CHUNK
    data = memoryview(bytearray(CHUNK)) if stage == "use" else Bytes(CHUNK).data
    file = File(data, fails(number, error) if stage == "read" else lambda offset: None)

    def use(at: int, memory: memoryview, got: int) -> None:
        if stage == "use" and at == number:
            raise error

    intake = Intake(file, offsets(size), use)
    known: list[int] = []
    tell = intake._job.fail

    def told(error: BaseException) -> None:
        tell(error)
        known.append(file.begun)

    intake._job.fail = told  # type: ignore[method-assign]
    with pytest.raises(Odd) as raised:
        intake.run()
    assert raised.value is error
    assert file.under_way == 0
    # Others may go far before the one that fails has told of it, but not afterwards.
    assert file.begun <= known[0] + CHUNKS_AHEAD


def test_reads_go_on_while_parts_are_worked_on_and_memory_is_bounded() -> None:
    ahead, lock, reading = threading.Event(), threading.Lock(), []

    def read(offset: int) -> None:
        with lock:
            reading.append(offset)
            if len(reading) == CHUNKS_AHEAD:
                ahead.set()

    def use(number: int, memory: memoryview, got: int) -> None:
        assert ahead.wait(30)  # others are read before the first is done with
        with lock:
            assert len(reading) <= CHUNKS_AHEAD + done[0]
            done[0] += 1

    done = [0]
    size = 3 * CHUNKS_AHEAD * CHUNK
    Intake(File(memoryview(b""), read), offsets(size), use).run()
    assert done == [3 * CHUNKS_AHEAD]


def test_a_save_and_a_load_at_once_do_not_wait_for_each_others_memory(place: DiskPlace) -> None:
    """Every thread that works may be waiting for a buffer of the save, every one that waits for the disk has a read."""
    source = Bytes(SIZES[-1])
    with ThreadPoolExecutor(8) as threads:
        saves = [threads.submit(write_shard, place, f"shard-{n}", source) for n in range(4)]
        loads = [
            threads.submit(Intake(File(source.data), offsets(source.size), lambda *_: None).run) for _ in range(12)
        ]
        assert [save.result(60) for save in saves] == [source.digests] * 4
        assert [load.result(60) for load in loads] == [None] * 12


def test_an_interrupt_waits_for_the_reading_threads() -> None:
    main = threading.main_thread()

    def interrupt(offset: int) -> None:
        if offset == 0:
            signal.pthread_kill(main.ident or 0, signal.SIGINT)

    file = File(Bytes(SIZES[-1]).data, interrupt)
    with pytest.raises(KeyboardInterrupt):
        Intake(file, offsets(SIZES[-1]), lambda *_: None).run()
    assert file.under_way == 0


def test_a_file_that_is_not_cached_is_read_ahead(place: DiskPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    source = Bytes(3 * CHUNK + 5)
    write_shard(place, "shard", source)
    monkeypatch.setattr(_native, "cached", lambda *_: 0.0)
    with place.open("shard") as reader:
        if not reader.waits:
            pytest.skip("this file system reads past no page cache")
        found: dict[int, bytes] = {}
        Intake(reader, offsets(source.size), lambda n, memory, got: found.update({n: bytes(memory[:got])})).run()
    assert b"".join(found[number] for number in sorted(found)) == source.data
