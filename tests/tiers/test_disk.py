"""The disk tier keeps the contract of places, and the manners of file systems: modes, races, missing features."""

from __future__ import annotations

import errno
import gc
import os
import stat
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.conformance.place import PlaceConformance, names, pattern, write
from tests.harness import run_ranks
from tests.interrupts import interrupted
from tierckpt import _native
from tierckpt.errors import IntegrityError, StoreError
from tierckpt.tiers import disk
from tierckpt.tiers.disk import DiskPlace


@pytest.fixture
def place(tmp_path: Path) -> DiskPlace:
    found = DiskPlace(tmp_path / "store")
    found.prepare()
    return found


class TestDisk(PlaceConformance):
    """On the file system of the temporary folder."""


class TestDiskWithoutDirectIO(PlaceConformance):
    """On a file system whose files are opened without O_DIRECT."""

    @pytest.fixture
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskPlace:
        def buffered(folder: int, name: str, flags: int, mode: int = 0o666) -> tuple[int, bool]:
            return os.open(name, flags | os.O_CLOEXEC, mode, dir_fd=folder), False

        monkeypatch.setattr(_native, "open_direct", buffered)
        found = DiskPlace(tmp_path / "store")
        found.prepare()
        return found

    def test_nothing_needs_to_be_aligned(self, place: DiskPlace) -> None:
        writer = place.writer("name", 7)
        assert writer.alignment == 1
        writer.write(3, b"4567")
        writer.write(0, b"123")
        writer.commit()
        assert place.read("name", 7) == b"1234567"


class TestDiskWithoutHardLinks(PlaceConformance):
    """On a file system that refuses link(): names are given by renameat2(RENAME_NOREPLACE)."""

    @pytest.fixture
    def place(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> DiskPlace:
        def refuse(*_: Any, **__: Any) -> None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

        monkeypatch.setattr(os, "link", refuse)
        found = DiskPlace(tmp_path / "store")
        found.prepare()
        return found


@pytest.mark.skipif(not os.access("/dev/shm", os.W_OK), reason="there is no /dev/shm")
class TestDiskInMemory(PlaceConformance):
    """On tmpfs, which takes or refuses O_DIRECT depending on the kernel."""

    @pytest.fixture
    def place(self) -> Iterator[DiskPlace]:
        import tempfile

        with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="tierckpt-test-") as folder:
            yield DiskPlace(folder)


# Races between processes


def contend(rank: int, root: str) -> list[bool]:
    place = DiskPlace(root)
    return [place.create(f"race/{name}", b"%d" % rank * 4096) for name in range(50)]


def test_of_processes_that_create_one_wins(tmp_path: Path) -> None:
    results = run_ranks(contend, 4, str(tmp_path / "store"), group=False)
    place = DiskPlace(tmp_path / "store")
    for name in range(50):
        winners = [rank for rank in range(4) if results[rank][name]]
        assert len(winners) == 1
        assert place.read(f"race/{name}", 1 << 20) == b"%d" % winners[0] * 4096
    assert len(names(place)) == 50


def test_folders_that_others_make_at_the_same_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """C107: mkdir says that the folder exists while nobody can see it yet, as network file systems do."""
    real, late = os.mkdir, threading.Lock()
    refused: set[str] = set()

    def mkdir(path: str, mode: int = 0o777) -> None:
        with late:
            first = path not in refused
            refused.add(path)
        real(path, mode)
        if first:
            raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), path)

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(Path, "is_dir", lambda self: False)
    monkeypatch.setattr(os.path, "isdir", lambda path: False)

    def save(number: int) -> bool:
        place = DiskPlace(tmp_path / f"root-{number % 20}")
        place.prepare()
        return place.create(f"deep/er/{number}", b"x")

    with ThreadPoolExecutor(16) as threads:
        assert all(threads.map(save, range(320)))


# Modes


@pytest.mark.parametrize(
    ("umask", "file", "folder"), [(0o022, 0o644, 0o755), (0o002, 0o664, 0o775), (0o077, 0o600, 0o700)]
)
def test_the_umask_is_respected(tmp_path: Path, umask: int, file: int, folder: int) -> None:
    """C111: colleagues can read what the umask lets them read; the temporary file's mode is not what stays."""
    before = os.umask(umask)
    try:
        place = DiskPlace(tmp_path / "store")
        place.prepare()
        place.create("f/document.json", b"{}")
        writer = place.writer("f/shard", 5)
        write(writer, 0, b"12345")
        writer.commit()
    finally:
        os.umask(before)
    modes = {path.relative_to(tmp_path).as_posix(): stat.S_IMODE(path.stat().st_mode) for path in tmp_path.rglob("*")}
    assert modes == {"store": folder, "store/f": folder, "store/f/document.json": file, "store/f/shard": file}


def test_the_group_of_a_setgid_folder_is_passed_on(tmp_path: Path) -> None:
    parent = tmp_path / "shared"
    parent.mkdir()
    parent.chmod(0o2775)
    place = DiskPlace(parent / "store")
    place.prepare()
    place.create("f/document.json", b"{}")
    for path in (parent / "store", parent / "store/f"):
        assert path.stat().st_mode & stat.S_ISGID
        assert path.stat().st_gid == parent.stat().st_gid


# What is in the way


@pytest.mark.parametrize("kind", ["symlink", "dangling", "fifo", "folder", "loop"])
def test_what_is_no_regular_file_is_refused(place: DiskPlace, kind: str) -> None:
    """Without following it and without waiting for it."""
    path = place.root / "name"
    place.create("target", b"x")
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to({"symlink": "target", "dangling": "nothing", "loop": "name"}[kind])
    assert place.size("name") is None
    for look in (lambda: place.read("name", 10), lambda: place.open("name")):
        with pytest.raises(IntegrityError, match="name: not a regular file"):
            look()
    assert not place.create("name", b"y")
    kinds = {info.name: info.kind for info in place.list()}
    assert kinds.get("name") == (None if kind == "folder" else "other" if kind == "fifo" else "link")
    assert place.read("target", 10) == b"x"


def test_links_to_folders_are_not_entered(place: DiskPlace, tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "file").write_bytes(b"not in the store")
    (place.root / "link").symlink_to(elsewhere)
    (place.root / "up").symlink_to("..")
    assert sorted((info.name, info.kind) for info in place.list()) == [("link", "link"), ("up", "link")]


def test_errors_name_the_file_and_the_reason(place: DiskPlace, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_native, "write_at", full)
    with pytest.raises(StoreError, match=r"cannot write .*/f/name: No space left") as raised:
        place.create("f/name", b"x")
    assert isinstance(raised.value.__cause__, OSError)
    assert raised.value.__cause__.errno == errno.ENOSPC
    assert names(place) == []


def test_a_shard_for_which_there_is_no_room_is_refused_at_once(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(_native, "reserve", full)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(StoreError, match=r"cannot write .*/f/shard: No space left"):
        place.writer("f/shard", 10_000)
    assert names(place) == []
    assert os.listdir("/proc/self/fd") == before


def test_a_file_system_that_reserves_nothing_is_written_all_the_same(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_native, "reserve", lambda *_: False)
    writer = place.writer("shard", 5)
    write(writer, 0, b"12345")
    writer.commit()
    assert place.read("shard", 5) == b"12345"


def test_a_file_system_that_can_neither_link_nor_rename_says_so(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A plain rename would overwrite what another process has published."""

    def refuse(*_: Any, **__: Any) -> None:
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    class Libc:
        @staticmethod
        def renameat2(*_: Any) -> int:
            import ctypes

            ctypes.set_errno(errno.EINVAL)
            return -1

    monkeypatch.setattr(os, "link", refuse)
    monkeypatch.setattr("tierckpt.tiers.disk.ctypes.CDLL", lambda *_, **__: Libc)
    with pytest.raises(StoreError, match=r"cannot write .*name"):
        place.create("name", b"x")
    assert names(place) == []


def test_an_uncached_file_is_read_past_the_cache(place: DiskPlace) -> None:
    """Unaligned buffers and the end of the file too."""
    data = pattern(1_000_003)
    writer = place.writer("shard", len(data))
    write(writer, 0, data)
    writer.commit()
    fd = os.open(place.root / "shard", os.O_RDONLY)
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(fd)
    with place.open("shard") as reader:
        block = _native.Buffer(1 << 20)
        assert reader.read_into(0, block) == len(data)
        assert bytes(memoryview(block)[: len(data)]) == data
        unaligned = bytearray(4096)
        assert reader.read_into(4096, unaligned) == 4096
        assert unaligned == data[4096:8192]


def test_a_file_that_is_exchanged_while_it_is_opened_is_not_read_by_halves(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The direct descriptor is opened by name a second time; it must be of the same file."""
    writer = place.writer("shard", 8192)
    write(writer, 0, b"1" * 8192)
    writer.commit()
    (place.root / "other").write_bytes(b"2" * 8192)
    real = _native.open_direct

    def exchanged(folder: int, name: str, flags: int, mode: int = 0o666) -> tuple[int, bool]:
        os.replace(place.root / "other", place.root / "shard")
        return real(folder, name, flags, mode)

    monkeypatch.setattr(_native, "cached", lambda *_: 0.0)
    monkeypatch.setattr(_native, "open_direct", exchanged)
    with place.open("shard") as reader:
        block = _native.Buffer(8192)
        assert reader.read_into(0, block) == 8192
        assert bytes(memoryview(block)) == b"1" * 8192


# Interrupts


@pytest.mark.parametrize("direct", [True, False])
@pytest.mark.parametrize("work", ["read", "open", "create", "writer"])
@pytest.mark.filterwarnings("ignore::ResourceWarning")
def test_an_interrupt_leaves_no_descriptor_open(
    place: DiskPlace, monkeypatch: pytest.MonkeyPatch, work: str, direct: bool
) -> None:
    if direct:
        monkeypatch.setattr(_native, "cached", lambda *_: 0.0)
    place.create("name", bytes(8192))

    def use() -> None:
        if work == "read":
            place.read("name", 8192)
        elif work == "open":
            with place.open("name") as reader:
                reader.read_into(0, bytearray(8192))
        elif work == "create":
            place.create("folder/name", b"x")
        else:
            place.writer("other", 8192).commit()

    number, before = 0, len(os.listdir("/proc/self/fd"))
    while where := interrupted(number := number + 1, {disk.__file__}, use):
        gc.collect()
        assert len(os.listdir("/proc/self/fd")) == before, where
    assert number > 10
