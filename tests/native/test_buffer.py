"""Page-aligned memory."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest

from tierckpt._native import Buffer, populate


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * mmap.PAGESIZE


@pytest.mark.parametrize("nbytes", [0, 1, 4096, 4097, 3 << 20])
@pytest.mark.parametrize("present", [False, True])
def test_buffer(nbytes: int, present: bool) -> None:
    buffer = Buffer(nbytes, populate=present)
    view = memoryview(buffer)
    assert (view.nbytes, view.format, view.ndim, view.readonly) == (nbytes, "B", 1, False)
    assert buffer.nbytes == len(buffer) == nbytes
    assert buffer.address != 0 and buffer.address % 4096 == 0
    assert not any(view[:4096])
    view[:] = b"x" * nbytes
    assert bytes(buffer) == b"x" * nbytes


def test_populate_makes_pages_present() -> None:
    before = resident()
    buffer = Buffer(200 << 20, populate=True)
    assert resident() - before > 190 << 20
    del buffer
    gc.collect()
    assert resident() - before < 20 << 20


def test_view_keeps_memory() -> None:
    buffer = Buffer(1 << 20)
    view = memoryview(buffer)
    del buffer
    gc.collect()
    view[-1] = 7
    assert view[-1] == 7


def test_populate_changes_nothing() -> None:
    shared = mmap.mmap(-1, 1 << 20)
    shared[5000:5003] = b"abc"
    populate(memoryview(shared)[10 : (1 << 20) - 10])
    assert shared[5000:5003] == b"abc"
    populate(bytearray(0))
    populate(bytearray(b"small"))
    with pytest.raises(BufferError):
        populate(b"read-only")


def test_refused() -> None:
    with pytest.raises(MemoryError, match=str(1 << 55)):
        Buffer(1 << 55)
    with pytest.raises(MemoryError, match=str(2**63 - 1)):
        Buffer(2**63 - 1)
    with pytest.raises(ValueError, match="negative"):
        Buffer(-1)
    with pytest.raises(TypeError):
        Buffer(1 << 64)
