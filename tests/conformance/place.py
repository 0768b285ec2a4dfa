"""The contract of ``tierckpt.tiers.base.Place`` as a suite: inherit it, and provide a ``place`` fixture.

It protects what the commit protocol rests on: a name is given once, whole and durable, whoever else tries at the same time.
"""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tierckpt import _native
from tierckpt.errors import IntegrityError
from tierckpt.tiers.base import FileInfo, Place, Writer


def write(writer: Writer, offset: int, data: bytes) -> None:
    """Write ``data`` as the engine does: from aligned memory, padded up to the alignment."""
    block = _native.Buffer(len(data) + -len(data) % writer.alignment)
    memoryview(block)[: len(data)] = data
    writer.write(offset, block)


def pattern(size: int, seed: int = 0) -> bytes:
    """``size`` bytes that repeat only after 251."""
    block = bytes((i + seed) % 251 for i in range(251))
    return (block * (size // 251 + 1))[:size]


def names(place: Place, folder: str = "") -> list[str]:
    return sorted(info.name for info in place.list(folder))


class PlaceConformance:
    """What every place promises. ``place`` is an empty one, prepared."""

    # create

    def test_created_bytes_come_back(self, place: Place) -> None:
        assert place.create("a/b/c.json", b"contents")
        assert place.read("a/b/c.json", 8) == b"contents"
        assert place.size("a/b/c.json") == 8

    def test_an_empty_file_can_be_created(self, place: Place) -> None:
        assert place.create("empty", b"")
        assert place.read("empty", 0) == b""

    def test_a_name_is_given_once(self, place: Place) -> None:
        assert place.create("name", b"first")
        assert not place.create("name", b"second")
        assert place.read("name", 100) == b"first"

    def test_a_loser_leaves_nothing(self, place: Place) -> None:
        place.create("f/name", b"first")
        place.create("f/name", b"second")
        assert names(place) == ["f/name"]

    def test_of_many_that_create_one_wins(self, place: Place) -> None:
        """16 threads, each with contents of its own, for each of ten names in a folder that none of them has made."""
        barrier = threading.Barrier(16)

        def contender(number: int) -> list[bool]:
            won = []
            for name in range(10):
                barrier.wait(30)
                won.append(place.create(f"race/{name}", b"%d" % number * 1000))
            return won

        with ThreadPoolExecutor(16) as threads:
            results = list(threads.map(contender, range(16)))
        for name in range(10):
            winners = [number for number, won in enumerate(results) if won[name]]
            assert len(winners) == 1
            assert place.read(f"race/{name}", 1 << 20) == b"%d" % winners[0] * 1000

    def test_a_file_is_visible_whole_or_not_at_all(self, place: Place) -> None:
        """Whoever looks while files appear sees all of their bytes."""
        data = pattern(1 << 20)
        done = threading.Event()
        seen: list[int] = []

        def look() -> None:
            while not done.is_set():
                for number in range(10):
                    try:
                        found = place.read(f"whole/{number}", 1 << 21)
                    except FileNotFoundError:
                        continue
                    seen.append(len(found))
                    if found != data:
                        return

        with ThreadPoolExecutor(1) as thread:
            looking = thread.submit(look)
            for number in range(10):
                place.create(f"whole/{number}", data)
            done.set()
            looking.result(30)
        assert set(seen) <= {len(data)}

    # read, open, size

    @pytest.mark.parametrize("name", ["absent", "absent/deeper", "file/below-a-file"])
    def test_what_is_not_there(self, place: Place, name: str) -> None:
        place.create("file", b"x")
        with pytest.raises(FileNotFoundError):
            place.read(name, 10)
        with pytest.raises(FileNotFoundError):
            place.open(name)
        assert place.size(name) is None

    def test_a_folder_is_no_file(self, place: Place) -> None:
        place.create("folder/file", b"x")
        assert place.size("folder") is None
        with pytest.raises((IntegrityError, FileNotFoundError)):
            place.read("folder", 10)

    def test_the_limit_is_the_largest_size_that_is_read(self, place: Place) -> None:
        place.create("name", b"12345")
        assert place.read("name", 5) == b"12345"
        with pytest.raises(IntegrityError, match=r"name.*5 bytes.*4"):
            place.read("name", 4)

    @pytest.mark.parametrize("size", [1, 4095, 4096, 4097, 1_000_003])
    def test_ranges_are_read_from_any_thread(self, place: Place, size: int) -> None:
        data = pattern(size)
        place.create("name", data)
        with place.open("name") as reader, ThreadPoolExecutor(4) as threads:
            assert reader.size == size

            def read(offset: int) -> bool:
                buffer = bytearray(5000)
                got = reader.read_into(offset, buffer)
                return got == min(5000, size - offset) and bytes(buffer[:got]) == data[offset : offset + got]

            assert all(threads.map(read, range(0, size, max(1, size // 40))))

    def test_reads_stop_at_the_end(self, place: Place) -> None:
        place.create("name", pattern(5000))
        with place.open("name") as reader:
            assert reader.read_into(4096, _native.Buffer(4096)) == 904
            assert reader.read_into(8192, _native.Buffer(4096)) == 0
            assert reader.read_into(0, bytearray()) == 0

    def test_a_reader_may_be_closed_twice(self, place: Place) -> None:
        place.create("name", b"x")
        reader = place.open("name")
        reader.close()
        reader.close()

    # writer

    @pytest.mark.parametrize("size", [1, 511, 4096, 4097, 12_288, 1_048_577])
    def test_written_bytes_come_back_with_their_size(self, place: Place, size: int) -> None:
        """Blocks in any order; what pads the last one is cut off."""
        data = pattern(size)
        writer = place.writer("f/shard", size)
        for offset in sorted(range(0, size, 4096), reverse=True):
            write(writer, offset, data[offset : offset + 4096])
        writer.commit()
        assert place.size("f/shard") == size
        assert place.read("f/shard", size) == data

    def test_writes_may_be_concurrent(self, place: Place) -> None:
        size = 1 << 22
        data = pattern(size)
        writer = place.writer("shard", size)
        with ThreadPoolExecutor(8) as threads:
            list(
                threads.map(lambda offset: write(writer, offset, data[offset : offset + 65536]), range(0, size, 65536))
            )
        writer.commit()
        assert place.read("shard", size) == data

    def test_two_files_at_once_do_not_mix(self, place: Place) -> None:
        writers = [place.writer(f"shard-{i}", 8192) for i in range(2)]
        for offset in (0, 4096):
            for number, writer in enumerate(writers):
                write(writer, offset, bytes([number + 1]) * 4096)
        for writer in writers:
            writer.commit()
        assert [place.read(f"shard-{i}", 8192) for i in range(2)] == [b"\1" * 8192, b"\2" * 8192]

    def test_an_aborted_file_is_gone(self, place: Place) -> None:
        writer = place.writer("f/shard", 4096)
        write(writer, 0, b"x" * 4096)
        writer.abort()
        assert names(place) == []
        writer.abort()

    def test_a_file_stays_whole_until_another_has_its_name(self, place: Place) -> None:
        """Two processes may write the same shard at once, and the one that is late may be killed at any moment."""
        old, new = pattern(8192), pattern(8192, seed=1)
        for data in (old, new):
            late = place.writer("f/shard", 8192)
            write(late, 0, data[:4096])
            if place.size("f/shard") is not None:
                assert place.read("f/shard", 8192) == old
            other = place.writer("f/shard", 8192)
            write(other, 0, data)
            other.commit()
            assert place.read("f/shard", 8192) == data
            late.abort()
            assert place.read("f/shard", 8192) == data
        assert names(place) == ["f/shard"]

    def test_an_unfinished_file_is_replaced(self, place: Place) -> None:
        """What a process that died left is not mixed with what the next one writes."""
        first = place.writer("shard", 8192)
        write(first, 0, b"old" * 1000)
        second = place.writer("shard", 5)
        write(second, 0, b"new!!")
        second.commit()
        assert place.read("shard", 8192) == b"new!!"

    # list

    def test_all_levels_are_listed(self, place: Place) -> None:
        for name in ("top", "a/one", "a/b/two", "c/three"):
            place.create(name, b"1234")
        assert names(place) == ["a/b/two", "a/one", "c/three", "top"]
        assert names(place, "a") == ["a/b/two", "a/one"]
        assert names(place, "absent") == []
        assert {(info.size, info.kind) for info in place.list()} == {(4, "file")}
        assert all(isinstance(info, FileInfo) and info.modified > 0 for info in place.list())

    # remove

    def test_removed_names_are_gone_with_their_empty_folders(self, place: Place) -> None:
        for name in ("a/b/one", "a/b/two", "a/three"):
            place.create(name, b"x")
        place.remove(["a/b/one"])
        assert names(place) == ["a/b/two", "a/three"]
        place.remove(["a/b/two", "a/three", "never/was"])
        assert names(place) == []
        assert place.exists()

    def test_a_removed_name_is_free_again(self, place: Place) -> None:
        place.create("name", b"first")
        place.remove(["name"])
        assert place.create("name", b"second")
        assert place.read("name", 10) == b"second"

    def test_an_open_file_outlives_its_name(self, place: Place) -> None:
        """Readers that have begun when a checkpoint is pruned finish, or get an error; never other bytes."""
        place.create("name", b"first")
        with place.open("name") as reader:
            place.remove(["name"])
            place.create("name", b"other")
            buffer = bytearray(5)
            assert reader.read_into(0, buffer) == 5
            assert buffer == b"first"

    # the place itself

    def test_it_exists_and_can_be_prepared_again(self, place: Place) -> None:
        place.create("name", b"x")
        place.prepare()
        assert place.exists()
        assert names(place) == ["name"]

    def test_free_space(self, place: Place) -> None:
        free = place.free()
        assert free is None or free > 0

    def test_names_that_are_hard_for_file_systems(self, place: Place) -> None:
        for name in ("with space", "ü中😀", "%2F", "a\nb", "CON", "x" * 200):
            assert place.create(f"hard/{name}", name.encode())
            assert place.read(f"hard/{name}", 1000) == name.encode()
        assert len(names(place, "hard")) == 6
