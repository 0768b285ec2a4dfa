"""An interrupt may come at any instruction of whoever waits for the threads: when it is raised, they use nothing any more."""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.interrupts import interrupted
from tierckpt import _native, threads
from tierckpt.config import IO_THREADS, WRITES
from tierckpt.format.digest import CHUNK
from tierckpt.tiers import pipeline, workers
from tierckpt.tiers.base import Reader, Writer
from tierckpt.tiers.pipeline import Intake, Pipeline

FILES = {module.__file__ for module in (pipeline, workers, threads)}
BLOCK = bytes(100_000)


def _let_others_run() -> None:
    pool = workers._workers
    for _ in range(20):
        if pool is None or (pool._tasks.empty() and pool._writes.empty()):
            break
        hashlib.sha256(BLOCK)  # without the lock of the interpreter


def _interrupted(number: int, late: bool, work: Callable[[], object]) -> str:
    """With ``late``, when others have taken what was put, as far as this thread has no lock that they need."""
    return interrupted(number, FILES, work, first=_let_others_run if late else None)


def _rest() -> None:
    """Let all threads do what was put before, and what that puts."""
    pool = workers.workers()
    for _ in range(3):
        for put, count in ((pool.write, WRITES), (pool.work, IO_THREADS)):
            all_of_them = threading.Barrier(count + 1)
            for _ in range(count):
                put(lambda *_, barrier=all_of_them: barrier.wait(30))
            all_of_them.wait(30)


class _Uses:
    """Counts the uses of the caller's things, and those that go on."""

    def __init__(self) -> None:
        self.begun = self.under_way = 0
        self._lock = threading.Lock()

    def use(self, *_: Any) -> None:
        with self._lock:
            self.begun, self.under_way = self.begun + 1, self.under_way + 1
        hashlib.sha256(BLOCK)  # without the lock of the interpreter: it may be interrupted meanwhile
        with self._lock:
            self.under_way -= 1


class _File(Reader, Writer):
    """Holds nothing."""

    name, alignment, waits, size = "file", 4096, True, 0

    def __init__(self, uses: _Uses) -> None:
        self._uses = uses

    def read_into(self, offset: int, buffer: Any) -> int:
        self._uses.use()
        return CHUNK

    def write(self, offset: int, buffer: Any) -> None:
        self._uses.use()

    def close(self) -> None:
        raise AssertionError("not closed here")

    commit = abort = close


class _Source:
    def __init__(self, uses: _Uses, size: int) -> None:
        self.size, self._uses = size, uses

    def chunk(self, lo: int, hi: int, scratch: _native.Buffer) -> memoryview:
        self._uses.use()
        return memoryview(scratch)[: hi - lo]


ITEMS = 60


def _each(uses: _Uses) -> int:
    workers.workers().each(ITEMS, uses.use)
    return ITEMS


def _write(uses: _Uses) -> int:
    Pipeline(_File(uses), _Source(uses, ITEMS * CHUNK), lambda index, data: b"").run()
    return 2 * ITEMS


def _read(uses: _Uses) -> int:
    Intake(_File(uses), [n * CHUNK for n in range(ITEMS)], uses.use).run()
    return 2 * ITEMS


@pytest.mark.limit(60)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("job", [_each, _write, _read])
def test_what_an_interrupt_leaves_uses_nothing(job: Callable[[_Uses], int], late: bool) -> None:
    """Else it would write into tensors that are the caller's again, or read memory that was freed."""
    free = workers.workers().buffers.qsize()
    interrupted = 0
    while True:
        uses = _Uses()
        where = _interrupted(interrupted + 1, late, lambda uses=uses: job(uses))
        begun, under_way = uses.begun, uses.under_way
        _rest()
        assert under_way == 0 and uses.begun == begun, where
        assert workers.workers().buffers.qsize() == free, where
        if not where:
            break
        interrupted += 1
    assert interrupted > 20
    uses = _Uses()
    assert job(uses) == uses.begun


def _forget(root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def _remember(root: Path) -> None:
    for path in root.rglob("*"):
        if path.is_file():
            path.read_bytes()


@pytest.mark.limit(60)
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("prepare", [_forget, _remember])
def test_an_interrupted_load_leaves_the_state_alone(
    tmp_path: Path, prepare: Callable[[Path], None], late: bool
) -> None:
    """It ends, nothing fills tensors after it, and the next load is whole; whether the file is read ahead or from the cache."""
    root = tmp_path / "s"
    saved = torch.arange(3 * CHUNK // 4, dtype=torch.int32)
    tierckpt.save({"t": saved}, root, step=1)
    hits = []
    while True:
        prepare(root)
        found = {"t": torch.empty_like(saved)}
        where = _interrupted(len(hits) + 1, late, lambda found=found: tierckpt.load(found, root))
        if not where:
            break
        hits.append(where)
        found["t"].fill_(-1)
        _rest()
        assert torch.equal(found["t"], torch.full_like(saved, -1)), where
        tierckpt.load(found, root)
        assert torch.equal(found["t"], saved), where
    assert len(hits) > 20
    if prepare is _forget and not any(where.startswith("pipeline.py") for where in hits):
        pytest.skip("this file system reads past no page cache")


class _TwiceInterrupted(workers.Job):
    """A second interrupt comes while the first is noted down."""

    noted: BaseException | None = None
    times = 0

    @property  # type: ignore[override]
    def error(self) -> BaseException | None:
        return self.noted

    @error.setter
    def error(self, error: BaseException | None) -> None:
        self.noted = error
        self.times += error is not None
        if self.times == 1:
            raise KeyboardInterrupt


def test_a_second_interrupt_while_the_first_is_dealt_with(monkeypatch: pytest.MonkeyPatch) -> None:
    lock, inside, begun, waited = threading.Lock(), 0, threading.Event(), threading.Event()

    def work(index: int, scratch: Any) -> None:
        nonlocal inside
        with lock:
            inside += 1
        begun.set()
        waited.wait(20)
        with lock:
            inside -= 1

    def begin() -> None:
        workers.workers()._tasks.put(job.all)
        begun.wait(20)
        raise KeyboardInterrupt

    def waits() -> bool:
        waited.set()
        return wait()

    job = _TwiceInterrupted(60, work)
    wait = job._over.wait
    monkeypatch.setattr(job._over, "wait", waits)
    try:
        with pytest.raises(KeyboardInterrupt):
            job.run(begin)
        still = inside
    finally:
        waited.set()
    assert job.times == 2 and still == 0
