"""Gather and scatter against their byte-by-byte form."""

from __future__ import annotations

import ctypes
import threading
from array import array

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native import oracle
from tests.native.oracle import Box
from tierckpt._native import Buffer, CopyTable, stream_copy, stream_kernels

MEMORY = 1 << 14


def address_of(memory: bytearray) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def pattern(nbytes: int, seed: int) -> bytearray:
    return bytearray(np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8).tobytes())


@st.composite
def boxes(draw: st.DrawFn, repeats: bool = True) -> Box:
    """A box in a shard of a few KiB; its pointer is relative to memory of MEMORY bytes that holds it."""
    itemsize = draw(st.sampled_from([1, 2, 3, 4, 8, 12, 16]))
    ndim = draw(st.integers(0, 5))
    sizes = st.one_of(st.sampled_from([1, 1, 2, 3]), st.integers(0, 20)) if ndim < 3 else st.integers(0, 4)
    shape = tuple(draw(sizes) for _ in range(ndim))
    # In the shard: rows of rows, in any order of the dimensions, with or without gaps.
    shard = [0] * ndim
    extent = itemsize
    for k in draw(st.permutations(range(ndim))) if draw(st.booleans()) else reversed(range(ndim)):
        shard[k] = extent + draw(st.sampled_from([0, 0, 0, 1, 5, 32]))
        extent = shard[k] * max(1, shape[k])
    # In memory: another order, gaps, mirrored dimensions, dimensions that repeat.
    tensor = [0] * ndim
    extent = itemsize
    first = 0
    for k in draw(st.permutations(range(ndim))) if draw(st.booleans()) else reversed(range(ndim)):
        kind = draw(st.sampled_from(["dense", "dense", "dense", "gap", "mirror", "repeat"]))
        if kind == "repeat" and repeats:
            continue
        tensor[k] = extent + (draw(st.integers(1, 9)) if kind == "gap" else 0)
        extent = tensor[k] * max(1, shape[k])
        if kind == "mirror":
            first += tensor[k] * max(0, shape[k] - 1)
            tensor[k] = -tensor[k]
    reach = sum(max(0, t) * max(0, n - 1) for n, t in zip(shape, tensor, strict=True)) + itemsize
    room = MEMORY - first - reach
    if room < 0:
        return Box(0, itemsize, (0,), (itemsize,), (itemsize,), 0)
    return Box(
        draw(st.integers(0, 300)),
        itemsize,
        shape,
        tuple(shard),
        tuple(tensor),
        first + draw(st.integers(0, room)),
    )


def ranges(draw: st.DrawFn, table: CopyTable) -> tuple[int, int]:
    lo, hi = table.span
    a = draw(st.integers(max(0, lo - 10), hi + 10))
    b = draw(st.integers(max(0, lo - 10), hi + 10))
    return min(a, b), max(a, b)


@settings(max_examples=400)
@given(st.data())
def test_gather(data: st.DataObject) -> None:
    memory = pattern(MEMORY, 1)
    entries = data.draw(st.lists(boxes(), max_size=4))
    for box in entries:
        box.pointer += address_of(memory)
    table, pointers = oracle.table(entries)
    lo, hi = data.draw(st.composite(ranges)(table))
    got, want = pattern(hi - lo, 2), pattern(hi - lo, 2)
    table.gather(pointers, lo, hi, got, data.draw(st.integers(1, 4)), stream=data.draw(st.booleans()))
    oracle.gather(entries, lo, hi, want)
    assert got == want
    assert memory == pattern(MEMORY, 1)
    assert table.covered(lo, hi) == oracle.covered(entries, lo, hi)
    assert table.nbytes == oracle.covered(entries, 0, 1 << 62)
    assert table.covered(*table.span) == table.nbytes


@settings(max_examples=400)
@given(st.data())
def test_scatter(data: st.DataObject) -> None:
    # Each box has memory of its own, since the order of writes to the same memory is not defined.
    entries = data.draw(st.lists(boxes(repeats=False), max_size=4))
    memories = [pattern(MEMORY, seed) for seed in range(len(entries))]
    expected = [bytearray(memory) for memory in memories]
    offsets = [box.pointer for box in entries]
    for box, memory in zip(entries, memories, strict=True):
        box.pointer += address_of(memory)
    table, pointers = oracle.table(entries)
    lo, hi = data.draw(st.composite(ranges)(table))
    src = bytes(pattern(hi - lo, 99))
    table.scatter(pointers, lo, hi, src, data.draw(st.integers(1, 4)), stream=data.draw(st.booleans()))
    for box, memory, offset in zip(entries, expected, offsets, strict=True):
        box.pointer = offset + address_of(memory)
    oracle.scatter(entries, lo, hi, src)
    assert memories == expected


@pytest.mark.parametrize("item", [1, 2, 4, 8, 16])
@pytest.mark.parametrize("rows, cols", [(64, 64), (65, 130), (7, 200), (200, 9), (33, 1000)])
@pytest.mark.parametrize("skew", [0, 1, 8])
def test_transposed(item: int, rows: int, cols: int, skew: int) -> None:
    dtype = np.dtype(f"V{item}")
    memory = Buffer(rows * cols * item + skew)
    source = np.frombuffer(memoryview(memory), dtype, rows * cols, skew).reshape(rows, cols)
    source[:] = np.frombuffer(pattern(rows * cols * item, 3), dtype).reshape(rows, cols)
    pointer = memory.address + skew
    for planes in (1, 2):
        # The same matrix in several planes: the loop around the two that cross.
        box = Box(
            5,
            item,
            (planes, cols, rows),
            (rows * cols * item, rows * item, item),
            (0, item, cols * item),
            pointer,
        )
        table, pointers = oracle.table([box])
        for stream in (False, True):
            dst = bytearray(planes * rows * cols * item)
            table.gather(pointers, 5, 5 + len(dst), dst, stream=stream)
            assert dst == source.T.tobytes() * planes
            lo, hi = 5 + len(dst) // 5, 5 + len(dst) // 2 + 3
            part = bytearray(hi - lo)
            table.gather(pointers, lo, hi, part, stream=stream)
            assert part == dst[lo - 5 : hi - 5]
    back = Box(0, item, (cols, rows), (rows * item, item), (item, cols * item), pointer)
    table, pointers = oracle.table([back])
    before = source.T.tobytes()
    for stream in (False, True):
        source[:] = np.zeros_like(source)
        table.scatter(pointers, 0, len(before), before, stream=stream)
        assert source.T.tobytes() == before


@settings(max_examples=40)
@given(st.integers(0, 2**32 - 1), st.integers(1, 400), st.booleans())
def test_many_entries(seed: int, count: int, nested: bool) -> None:
    """Spans that interleave, overlap and hold each other; every range finds exactly its boxes."""
    rng = np.random.default_rng(seed)
    memory = pattern(MEMORY, seed)
    entries = []
    for _ in range(count):
        rows = int(rng.integers(0, 4))
        stride = int(rng.choice([8, 50, 3000])) if nested else 8
        offset = int(rng.integers(0, 10_000))
        pointer = address_of(memory) + int(rng.integers(0, MEMORY - 64)) if rows else 0
        entries.append(Box(offset, 2, (rows, 3), (stride, 2), (int(rng.choice([6, 16])), 2), pointer))
    table, pointers = oracle.table(entries)
    want = bytearray(20_000)
    oracle.gather(entries, 0, 20_000, want)
    whole = bytearray(20_000)
    table.gather(pointers, 0, 20_000, whole)
    assert whole == want
    pieces = bytearray()
    for lo in range(0, 20_000, 700):
        hi = min(20_000, lo + 700)
        piece = bytearray(hi - lo)
        table.gather(pointers, lo, hi, piece)
        pieces += piece
        assert table.covered(lo, hi) == table.covered(0, hi) - table.covered(0, lo)
    assert pieces == want


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
@pytest.mark.parametrize("skew", [0, 1, 63])
def test_large(threads: int, skew: int) -> None:
    """Over the threshold of the non-temporal stores, on several threads, off every alignment."""
    sizes = [5_000_001, 30_011, 0, 1, 63, 64, 65, 2_049] * 4
    source = np.random.default_rng(4).integers(0, 256, sum(sizes) + 7 * len(sizes), dtype=np.uint8)
    entries, want, offset, at = [], [], 17, 3
    for size in sizes:
        pointer = source.ctypes.data + at if size else 0
        entries.append(Box(offset, 1, (size,), (1,), (1,), pointer))
        want.append(source[at : at + size])
        offset, at = offset + size, at + size + 5
    table, pointers = oracle.table(entries)
    assert len(table) == len(sizes)
    assert table.span == (17, offset)
    assert table.nbytes == sum(sizes)
    memory = Buffer(table.nbytes + 100)
    dst = memoryview(memory)[skew : skew + table.nbytes]
    table.gather(pointers, 17, offset, dst, threads)
    expected = np.concatenate(want)
    assert np.array_equal(np.frombuffer(dst, np.uint8), expected)
    assert not any(memoryview(memory)[skew + table.nbytes :])
    copy = source.copy()
    source[:] = 0
    table.scatter(pointers, 17, offset, dst, threads)
    filled = np.zeros_like(source)
    at = 3
    for size in sizes:
        filled[at : at + size] = copy[at : at + size]
        at += size + 5
    assert np.array_equal(source, filled)


@pytest.mark.parametrize("threads", [1, 3])
@pytest.mark.parametrize(
    "view",
    [
        np.s_[:, ::2],
        np.s_[::-1, :],
        np.s_[:, 1:-1],
        np.s_[:, ::-1],
        np.s_[10:500, 3:900],
    ],
)
def test_large_strided(view: tuple[slice, slice], threads: int) -> None:
    source = np.random.default_rng(5).integers(0, 2**31, (1200, 1100), dtype=np.int32)
    for tensor in (source[view], source[view].T):
        want = np.ascontiguousarray(tensor)
        box = Box(0, 4, want.shape, want.strides, tensor.strides, tensor.ctypes.data)
        table, pointers = oracle.table([box])
        got = np.zeros_like(want)
        table.gather(pointers, 0, want.nbytes, got.data, threads, stream=True)
        assert np.array_equal(got, want)
        other = np.zeros_like(source)
        target = other[view] if tensor.shape == source[view].shape and tensor.strides == source[view].strides else None
        if target is not None:
            expected = np.zeros_like(source)
            np.copyto(expected[view], want)
            pointers = array("Q", [target.ctypes.data])
            table.scatter(pointers, 0, want.nbytes, want.data, threads, stream=False)
            assert np.array_equal(other, expected)


def test_rows_of_a_shard_for_several_readers() -> None:
    """Sub-boxes of one piece whose spans interleave, as a load with another layout makes them."""
    piece = np.arange(64 * 48, dtype=np.float32).reshape(64, 48)
    parts = [np.zeros((64, 16), np.float32) for _ in range(3)]
    entries = [Box(k * 64, 4, (64, 16), (192, 4), (64, 4), part.ctypes.data) for k, part in enumerate(parts)]
    table, pointers = oracle.table(entries)
    raw = piece.tobytes()
    for lo in range(0, len(raw), 1000):
        chunk = raw[lo : lo + 1000]
        table.scatter(pointers, lo, lo + len(chunk), chunk)
    for k, part in enumerate(parts):
        assert np.array_equal(part, piece[:, k * 16 : k * 16 + 16])


def test_concurrent_calls() -> None:
    source = np.random.default_rng(6).integers(0, 256, 1 << 22, dtype=np.uint8)
    entries = [Box(k * 64, 1, (64,), (1,), (1,), source.ctypes.data + k * 64) for k in range(1 << 16)]
    table, pointers = oracle.table(entries)
    wrong: list[int] = []

    def work(seed: int) -> None:
        rng = np.random.default_rng(seed)
        for _ in range(20):
            lo, hi = sorted(int(n) for n in rng.integers(0, 1 << 22, 2))
            dst = bytearray(hi - lo)
            table.gather(pointers, lo, hi, dst, 2)
            if dst != source[lo:hi].tobytes():
                wrong.append(seed)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_columns_as_bytes() -> None:
    memory = bytearray(b"abcdefgh")
    box = Box(0, 1, (8,), (1,), (1,), address_of(memory))
    table = CopyTable(*(column.tobytes() for column in oracle.columns([box])))
    pointers = oracle.table([box])[1]
    dst = bytearray(8)
    unaligned = memoryview(b"x" + pointers.tobytes())[1:]
    table.gather(unaligned, 0, 8, dst)
    assert dst == memory


def test_empty() -> None:
    table, pointers = oracle.table([])
    assert (len(table), table.nbytes, table.span, table.covered(0, 100)) == (0, 0, (0, 0), 0)
    dst = bytearray(b"kept")
    table.gather(pointers, 3, 7, dst)
    table.scatter(pointers, 3, 7, dst)
    table.gather(pointers, 3, 3, bytearray())
    assert dst == b"kept"
    table, pointers = oracle.table([Box(9, 4, (3, 0, 2), (0, 0, 0), (0, 0, 0), 0)])
    assert (len(table), table.nbytes, table.span) == (1, 0, (0, 0))
    table.gather(pointers, 0, 4, dst)
    assert dst == b"kept"


HUGE = 2**62


@pytest.mark.parametrize(
    "box, message",
    [
        (Box(-1, 1, (), (), (), 1), "negative offset"),
        (Box(0, 0, (), (), (), 1), "itemsize 0"),
        (Box(0, 17, (), (), (), 1), "itemsize 17"),
        (Box(0, 1, (-1,), (1,), (1,), 1), "negative size"),
        (Box(0, 1, (2,), (-1,), (1,), 1), "negative shard stride"),
        (Box(0, 4, (2,), (3,), (4,), 1), "overlap"),
        (Box(0, 4, (2,), (0,), (4,), 1), "overlap"),
        (Box(0, 1, (2, 3), (2, 1), (3, 1), 1), "overlap"),
        (Box(0, 1, (1,) * 65, (1,) * 65, (1,) * 65, 1), "ndim 65"),
        (Box(0, 1, (HUGE, 2), (2, 1), (2, 1), 1), "overflow"),
        (Box(0, 1, (3,), (HUGE,), (1,), 1), "overflow"),
        (Box(0, 1, (3,), (1,), (HUGE,), 1), "overflow"),
        (Box(0, 1, (3,), (1,), (-HUGE - 1,), 1), "overflow"),
        (Box(0, 1, (3, 3), (3, 1), (HUGE // 2 + 9, -HUGE // 2), 1), "overflow"),
        (Box(2**63 - 1, 1, (2,), (1,), (1,), 1), "overflow"),
        (Box(2**63 - 1, 4, (), (), (), 1), "overflow"),
    ],
)
def test_bad_boxes(box: Box, message: str) -> None:
    good = Box(0, 1, (), (), (), 1)
    with pytest.raises(ValueError, match=f"entry 1: .*{message}"):
        oracle.table([good, box])


def test_bad_columns() -> None:
    def q(*values: int) -> array[int]:
        return array("q", values)

    with pytest.raises(ValueError, match="differ in length"):
        CopyTable(q(0, 1), q(1), q(0, 0), q(), q(), q())
    with pytest.raises(ValueError, match="differ in length"):
        CopyTable(q(0), q(1), q(1), q(1), q(), q(1))
    with pytest.raises(ValueError, match="fewer"):
        CopyTable(q(0), q(1), q(2), q(1), q(1), q(1))
    with pytest.raises(ValueError, match="more"):
        CopyTable(q(0), q(1), q(0), q(1), q(1), q(1))
    with pytest.raises(ValueError, match="ndim -1"):
        CopyTable(q(0), q(1), q(-1), q(), q(), q())
    for wrong in (array("d", [0.0]), array("i", [0, 0]), b"1234567"):
        with pytest.raises(ValueError, match="offsets must hold 64-bit integers"):
            CopyTable(wrong, q(1), q(0), q(), q(), q())
    with pytest.raises(TypeError):
        CopyTable([0], q(1), q(0), q(), q(), q())  # type: ignore[arg-type]


def test_bad_calls() -> None:
    memory = bytearray(b"abcd")
    boxes = [Box(0, 4, (), (), (), address_of(memory)), Box(4, 4, (), (), (), 0)]
    table, pointers = oracle.table(boxes)
    dst = bytearray(8)
    for call in (table.gather, table.scatter):
        with pytest.raises(ValueError, match="entry 1: null pointer"):
            call(pointers, 0, 8, dst)
        assert dst == bytes(8) and memory == b"abcd"
        for lo, hi in ((0, 7), (0, 9), (-1, 7), (8, 0), (0, 2**63 - 1)):
            with pytest.raises(ValueError):
                call(pointers, lo, hi, dst)
        for threads in (0, -1):
            with pytest.raises(ValueError, match="threads"):
                call(pointers, 0, 8, dst, threads)
        with pytest.raises(ValueError, match="2 entries, not 1"):
            call(array("Q", [1]), 0, 8, dst)
    with pytest.raises(BufferError):
        table.gather(pointers, 0, 8, bytes(8))
    # The null pointer does not matter where its box is not touched.
    table.gather(pointers, 1, 4, memoryview(dst)[:3])
    assert dst == b"bcd" + bytes(5)


@pytest.mark.parametrize("kernel", [None, *stream_kernels()])
def test_stream_kernels(kernel: str | None) -> None:
    source = memoryview(pattern(3000, 7))
    for skew in (0, 1, 31, 63):
        for nbytes in (*range(0, 200, 7), 255, 256, 257, 1024, 2999):
            dst = pattern(4000, 8)
            want = bytearray(dst)
            want[skew : skew + nbytes] = source[1 : 1 + nbytes]
            stream_copy(memoryview(dst)[skew : skew + nbytes], source[1 : 1 + nbytes], kernel)
            assert dst == want


def test_bad_stream_copy() -> None:
    with pytest.raises(ValueError, match="no kernel mmx"):
        stream_copy(bytearray(3), b"abc", "mmx")
    with pytest.raises(ValueError, match="differ in size"):
        stream_copy(bytearray(3), b"abcd")
    with pytest.raises(BufferError):
        stream_copy(b"abc", b"abc")
