"""Memory that processes share: all of it present, the same for all who map it, on huge pages where they are to be had."""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tierckpt._native import Buffer, read_at

HUGE = 2 << 20


@pytest.fixture
def memfd() -> Iterator[int]:
    descriptor = os.memfd_create("test")
    yield descriptor
    os.close(descriptor)


def mapping(name: str) -> dict[str, str]:
    """What /proc says of this process's map of a memfd."""
    found: dict[str, str] = {}
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            inside = f"memfd:{name}" in line
            if inside:
                found["Range"] = line.split()[0]
        elif inside:
            key, _, value = line.partition(":")
            found[key] = value.strip()
    return found


@pytest.mark.parametrize("nbytes", [1, 4096, 5000, HUGE - 1, HUGE, 3 * HUGE + 4096 + 17])
@pytest.mark.parametrize("fresh", [True, False])
def test_all_who_map_it_see_the_same_zeros_at_first(memfd: int, nbytes: int, fresh: bool) -> None:
    os.ftruncate(memfd, nbytes)
    one, other = Buffer.of(memfd, nbytes, fresh=fresh), Buffer.of(memfd, nbytes)
    assert len(one) == one.nbytes == memoryview(one).nbytes == nbytes
    assert bytes(memoryview(other)) == bytes(nbytes)
    memoryview(one)[nbytes - 1 :] = b"x"
    assert bytes(memoryview(other)[nbytes - 1 :]) == os.pread(memfd, 1, nbytes - 1) == b"x"


@pytest.mark.parametrize("fresh", [True, False])
def test_what_lies_there_stays(memfd: int, fresh: bool) -> None:
    data = os.urandom(3 * HUGE + 100)
    os.write(memfd, data)
    shared = Buffer.of(memfd, len(data), fresh=fresh)
    assert bytes(memoryview(shared)) == data
    back = Buffer(len(data))
    assert read_at(memfd, back, 0) == len(data) and bytes(memoryview(back)) == data


def test_it_is_present_and_begins_where_huge_pages_do(memfd: int) -> None:
    os.ftruncate(memfd, 4 * HUGE)
    shared = Buffer.of(memfd, 4 * HUGE, fresh=True)
    found = mapping("test")
    begin, end = (int(text, 16) for text in found["Range"].split("-"))
    assert begin % HUGE == 0 and end - begin == 4 * HUGE
    assert found["Rss"] == f"{4 * HUGE >> 10} kB"
    assert "dc" in found["VmFlags"].split()  # not for forked children
    del shared
    assert not mapping("test")


def collapses() -> bool:
    """Whether this system gives huge pages to who asks for them."""
    memory = mmap.mmap(-1, 2 * HUGE)
    memory.write(b"x" * (2 * HUGE))
    try:
        memory.madvise(25)
    except OSError:
        return False
    settings = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    return settings.exists() and "[deny]" not in settings.read_text()


@pytest.mark.skipif(not collapses(), reason="this system has no huge pages for who asks")
def test_what_is_new_is_on_huge_pages_in_all_maps(memfd: int) -> None:
    os.ftruncate(memfd, 8 * HUGE)
    shared = Buffer.of(memfd, 8 * HUGE, fresh=True)
    huge = int(mapping("test")["ShmemPmdMapped"].split()[0]) << 10
    if not huge:
        pytest.skip("there are none left")
    del shared
    other = Buffer.of(memfd, 8 * HUGE)
    assert int(mapping("test")["ShmemPmdMapped"].split()[0]) << 10 == huge
    assert other.nbytes == 8 * HUGE


def test_views_keep_it_mapped(memfd: int) -> None:
    os.ftruncate(memfd, HUGE)
    view = memoryview(Buffer.of(memfd, HUGE))[10:20]
    view[:] = b"0123456789"
    assert os.pread(memfd, 10, 10) == b"0123456789"
    view.release()
    assert not mapping("test")


def test_what_cannot_be_mapped_is_an_error(memfd: int, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="positive"):
        Buffer.of(memfd, 0)
    with pytest.raises(OSError):
        Buffer.of(-1, 4096)
    path = tmp_path / "file"
    path.write_bytes(b"x" * 4096)
    with path.open("rb") as file, pytest.raises(OSError):
        Buffer.of(file.fileno(), 4096)
    with pytest.raises((OSError, MemoryError)):
        Buffer.of(memfd, 1 << 62)
    os.ftruncate(memfd, 4096)
    with pytest.raises((OSError, MemoryError)):
        Buffer.of(memfd, 1 << 20)  # beyond its end
