"""Positioned and direct file I/O against the os module."""

from __future__ import annotations

import errno
import fcntl
import os
import random
import resource
import signal
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tierckpt._native import Buffer, cached, open_direct, read_at, reserve, write_at

CREATE = os.O_RDWR | os.O_CREAT | os.O_EXCL


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[int]:
    fd = os.open(tmp_path, os.O_RDONLY | os.O_DIRECTORY)
    yield fd
    os.close(fd)


@pytest.fixture
def shm() -> Iterator[Path]:
    """A folder in memory, whose file system may refuse O_DIRECT."""
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        yield Path(name)


@settings(max_examples=50, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=20_000), st.integers(0, 10_000), st.integers(0, 30_000), st.integers(0, 30_000))
def test_plain(tmp_path: Path, data: bytes, offset: int, at: int, nbytes: int) -> None:
    fd = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT | os.O_TRUNC)
    try:
        write_at(fd, data, offset)
        assert os.pread(fd, 40_000, offset) == data
        want = os.pread(fd, nbytes, at)
        buffer = bytearray(nbytes)
        assert read_at(fd, buffer, at) == len(want)
        assert buffer == want + bytes(nbytes - len(want))
    finally:
        os.close(fd)


def test_direct(folder: int, tmp_path: Path) -> None:
    buffer = Buffer(1 << 20)
    data = random.Random(1).randbytes(1 << 20)
    view = memoryview(buffer)
    view[:] = data
    fd, direct = open_direct(folder, "file", CREATE)
    try:
        assert bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT) == direct
        assert fcntl.fcntl(fd, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        write_at(fd, buffer, 0)
        write_at(fd, view[:4096], 1 << 20)
        os.ftruncate(fd, (1 << 20) + 100)
        assert (tmp_path / "file").read_bytes() == data + data[:100]
        view[:] = bytes(1 << 20)
        assert read_at(fd, view[: 1 << 19], 1 << 19) == 1 << 19
        assert view[: 1 << 19] == data[1 << 19 :]
        # The end of the file is no multiple of anything.
        assert read_at(fd, view[:65536], 1 << 20) == 100
        assert view[:100] == data[:100]
        assert read_at(fd, view[:65536], 2 << 20) == 0
    finally:
        os.close(fd)


def test_open_in_memory(shm: Path) -> None:
    fd = os.open(shm, os.O_RDONLY)
    try:
        file, direct = open_direct(fd, "file", CREATE)
        assert bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT) == direct
        buffer = Buffer(8192)
        memoryview(buffer)[:] = b"y" * 8192
        write_at(file, buffer, 0)
        os.close(file)
        assert (shm / "file").read_bytes() == b"y" * 8192
        with pytest.raises(FileExistsError):
            open_direct(fd, "file", CREATE)
        assert (shm / "file").stat().st_size == 8192
    finally:
        os.close(fd)


def test_open_errors(folder: int, tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught:
        open_direct(folder, "missing", os.O_RDONLY)
    assert caught.value.filename == "missing"
    (tmp_path / "there").write_text("other's")
    with pytest.raises(FileExistsError):
        open_direct(folder, "there", CREATE)
    assert (tmp_path / "there").read_text() == "other's"
    with pytest.raises(OSError) as bad:
        open_direct(-5, "file", os.O_RDONLY)
    assert bad.value.errno == errno.EBADF
    with pytest.raises(ValueError):
        open_direct(folder, "a\0b", os.O_RDONLY)
    before = os.umask(0o022)
    try:
        for name, mode in ((b"bytes-\xff", 0o666), ("text-\udcff", 0o600)):
            fd, _ = open_direct(folder, name, os.O_WRONLY | os.O_CREAT, mode)
            os.close(fd)
            assert os.stat(name, dir_fd=folder).st_mode & 0o777 == mode & ~0o022
    finally:
        os.umask(before)


def test_io_errors() -> None:
    with pytest.raises(OSError) as bad:
        write_at(-1, b"data", 0)
    assert bad.value.errno == errno.EBADF
    reading, writing = os.pipe()
    try:
        with pytest.raises(OSError) as pipe:
            write_at(writing, b"data", 0)
        assert pipe.value.errno == errno.ESPIPE
        with pytest.raises(OSError) as pipe:
            read_at(reading, bytearray(4), 0)
        assert pipe.value.errno == errno.ESPIPE
    finally:
        os.close(reading)
        os.close(writing)
    with open("/dev/null", "r+b") as null, pytest.raises(OSError) as negative:
        write_at(null.fileno(), b"data", -1)
    assert negative.value.errno == errno.EINVAL
    with pytest.raises(BufferError):
        read_at(0, b"read-only", 0)


@pytest.mark.parametrize("direct", [False, True])
def test_short_write(folder: int, tmp_path: Path, direct: bool) -> None:
    """The limit on the size of files makes the kernel write a part first, then refuse."""
    limit = 5000
    buffer = Buffer(16384)
    fd = open_direct(folder, "file", CREATE)[0] if direct else os.open(tmp_path / "file", CREATE)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        with pytest.raises(OSError) as caught:
            write_at(fd, buffer, 0)
        assert caught.value.errno in (errno.EFBIG, errno.EINVAL, errno.EIO)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)
        os.close(fd)


def test_full_device() -> None:
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(OSError) as caught:
        write_at(full.fileno(), b"data", 0)
    assert caught.value.errno == errno.ENOSPC


def test_cached(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * (1 << 20))
    with path.open("r+b") as file:
        fd = file.fileno()
        warm = cached(fd, 0, 1 << 20)
        if warm is None:
            pytest.skip("no cachestat")
        assert warm == 1.0
        assert cached(fd, 5000, 10_000) == 1.0
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        cold = cached(fd, 0, 1 << 20)
        assert cold is not None and 0.0 <= cold <= 1.0
        assert cached(fd, 0, 0) == cached(fd, 1 << 20, 1 << 20) == 1.0
        # What lies behind the end of the file counts for nothing.
        assert cached(fd, 0, 2**63 - 1) == cold
        with pytest.raises(ValueError):
            cached(fd, -1, 1)
        with pytest.raises(ValueError):
            cached(fd, 0, -1)
    with pytest.raises(OSError):
        cached(-1, 0, 1)


@pytest.mark.parametrize("size", [4096, 1 << 20])
def test_reserve(folder: int, tmp_path: Path, size: int) -> None:
    fd, _ = open_direct(folder, "file", CREATE)
    try:
        if not reserve(fd, size):
            pytest.skip("this file system does not reserve")
        found = os.fstat(fd)
        assert found.st_size == size
        assert found.st_blocks * 512 >= size
        assert (tmp_path / "file").read_bytes() == bytes(size)
        assert reserve(fd, 100)  # what is there stays
        assert os.fstat(fd).st_size == size
    finally:
        os.close(fd)


def test_reserve_without_room_or_without_the_operation(folder: int) -> None:
    fd, _ = open_direct(folder, "file", CREATE)
    try:
        assert not reserve(fd, 0)
        assert os.fstat(fd).st_size == 0
        if reserve(fd, 1):
            with pytest.raises(OSError) as caught:
                reserve(fd, 1 << 62)
            assert caught.value.errno in (errno.ENOSPC, errno.EFBIG, errno.EDQUOT)
    finally:
        os.close(fd)
    reading, writing = os.pipe()
    try:
        assert not reserve(writing, 4096)
    finally:
        os.close(reading)
        os.close(writing)
