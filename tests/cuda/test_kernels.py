"""What kernels copy and what they take fingerprints of, against the plain form; the same code as on a GPU, run on the CPU."""

from __future__ import annotations

import shutil
import subprocess
from array import array
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.cuda.driver import NATIVE, Gpu
from tests.native.test_copy import address_of, pattern
from tierckpt._native import Buffer, CopyTable, DeviceJob, fingerprints

MEMORY = 1 << 14
Row = tuple[int, int, tuple[int, ...], tuple[int, ...], int]  # offset, item, shape, strides, first byte


@st.composite
def rows(draw: st.DrawFn) -> list[Row]:
    """Boxes that lie one after the other in the shard, each anywhere in memory, dense or strided, of any alignment."""
    found: list[Row] = []
    offset = draw(st.integers(0, 40))
    for _ in range(draw(st.integers(1, 6))):
        item = draw(st.sampled_from([1, 2, 4, 8, 16]))
        shape = tuple(draw(st.lists(st.integers(1, 9), max_size=4)))
        steps, step, first = [0] * len(shape), item, 0
        for k in draw(st.permutations(range(len(shape)))) if draw(st.booleans()) else reversed(range(len(shape))):
            step += draw(st.sampled_from([0, 0, item]))
            steps[k] = 0 if draw(st.integers(0, 9)) == 0 else step
            step *= shape[k]
            if draw(st.integers(0, 5)) == 0:
                first += steps[k] * (shape[k] - 1)
                steps[k] = -steps[k]
        at = draw(st.integers(0, 64)) * draw(st.sampled_from([1, 2, 8]))
        if first + step + at + item > MEMORY:
            continue
        found.append((offset, item, shape, tuple(steps), first + at))
        offset += item * _count(shape)
    return found


def _count(shape: tuple[int, ...]) -> int:
    count = 1
    for n in shape:
        count *= n
    return count


def table_of(boxes: list[Row]) -> CopyTable:
    columns = [array("q") for _ in range(6)]
    for offset, item, shape, steps, _ in boxes:
        far, step = [], item
        for n in reversed(shape):
            far.insert(0, step)
            step *= n
        for column, values in zip(columns, ([offset], [item], [len(shape)], shape, far, steps), strict=True):
            column.extend(values)
    return CopyTable(*columns)


def job_of(gpu: Gpu) -> DeviceJob:
    device = gpu.device(0)
    assert device is not None and device.has_kernels
    return device.job(gpu.compute)


def pinned(gpu: Gpu, nbytes: int) -> Buffer:
    buffer, device = Buffer(nbytes), gpu.device(0)
    assert device is not None
    device.pin(buffer)
    return buffer


@given(rows(), st.integers(0, 1 << 30))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_every_box_arrives_where_the_table_says(gpu: Gpu, boxes: list[Row], seed: int) -> None:
    memory = pattern(MEMORY, seed)
    table = table_of(boxes)
    pointers = array("Q", [address_of(memory) + first for *_, first in boxes])
    end = table.span[1]
    expected = bytearray(b"\x11" * end)
    table.gather(pointers, 0, end, expected)
    to = pinned(gpu, end)
    memoryview(to)[:] = b"\x11" * end
    job = job_of(gpu)
    job.gather(table, pointers, to)
    job.mark()
    job.wait()
    assert bytes(to) == bytes(expected)


@given(rows(), st.integers(0, 1 << 30))
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_all_take_the_same_fingerprints(gpu: Gpu, boxes: list[Row], seed: int) -> None:
    memory = pattern(MEMORY, seed)
    table = table_of(boxes)
    pointers = array("Q", [address_of(memory) + first for *_, first in boxes])
    shard = bytearray(table.span[1])
    table.gather(pointers, 0, len(shard), shard)
    expected = b""
    for offset, item, shape, *_ in boxes:
        expected += plain_fingerprint(bytes(shard[offset : offset + item * _count(shape)]))
    assert fingerprints(table, pointers) == expected
    job = job_of(gpu)
    number = job.fingerprint(table, pointers)
    job.mark()
    job.wait()
    assert job.sums(number) == expected


def plain_fingerprint(data: bytes) -> bytes:
    """Word by word, in numbers without end."""
    a = b = 0
    for index in range(-(-len(data) // 8)):
        word = int.from_bytes(data[8 * index : 8 * index + 8], "little")
        for which, step in enumerate((0x9E3779B97F4A7C15, 0xC2B2AE3D27D4EB4F)):
            keyed = word ^ (step * (index + 1) % 2**64)
            product = (keyed & 0xFFFFFFFF) * (keyed >> 32)
            if which == 0:
                a += product + (word << 32 | word >> 32) % 2**64
            else:
                b += product + word
    return (a % 2**64).to_bytes(8, "little") + (b % 2**64).to_bytes(8, "little")


def run(memory: bytearray) -> tuple[CopyTable, array[int]]:
    return table_of([(0, 1, (len(memory),), (1,), 0)]), array("Q", [address_of(memory)])


@given(st.integers(1, 5000), st.integers(0, 1 << 30), st.data())
@settings(max_examples=200, deadline=None)
def test_any_bit_and_any_exchange_of_words_changes_a_fingerprint(size: int, seed: int, data: st.DataObject) -> None:
    memory = pattern(size, seed)
    before = fingerprints(*run(memory))
    bit = data.draw(st.integers(0, 8 * size - 1))
    memory[bit // 8] ^= 1 << bit % 8
    assert fingerprints(*run(memory)) != before
    memory[bit // 8] ^= 1 << bit % 8
    if size >= 16:
        i, j = (8 * data.draw(st.integers(0, size // 8 - 1)) for _ in range(2))
        one, other = bytes(memory[i : i + 8]), bytes(memory[j : j + 8])
        memory[i : i + 8], memory[j : j + 8] = other, one
        assert (fingerprints(*run(memory)) != before) == (one != other)


def test_large_boxes_are_cut_and_what_lies_together_goes_to_the_copy_engine(gpu: Gpu) -> None:
    """More than a task, and more than is copied by itself; at the exact byte."""
    size = (1 << 20) + 3
    memory = pattern(2 * size + 8, 1)
    boxes: list[Row] = [
        (5, 1, (size,), (1,), 1),
        (5 + size, 1, (300_001,), (2,), 7),
        (5 + size + 300_001, 1, (9,), (1,), 0),
    ]
    table = table_of(boxes)
    pointers = array("Q", [address_of(memory) + first for *_, first in boxes])
    end = table.span[1]
    expected = bytearray(end)
    table.gather(pointers, 0, end, expected)
    to = pinned(gpu, end)
    job = job_of(gpu)
    job.gather(table, pointers, to)
    number = job.fingerprint(table, pointers)
    job.mark()
    job.wait()
    assert bytes(to) == bytes(expected)
    assert job.sums(number) == fingerprints(table, pointers)


def test_what_cannot_be_copied_is_refused(gpu: Gpu) -> None:
    memory = bytearray(4096)
    job, to = job_of(gpu), pinned(gpu, 4096)
    table, pointers = run(memory)
    with pytest.raises(ValueError, match="not pinned"):
        job.gather(table, pointers, Buffer(4096))
    with pytest.raises(ValueError, match="larger"):
        job.gather(table_of([(4096, 8, (2,), (8,), 0)]), pointers, to)
    with pytest.raises(ValueError, match="null"):
        job.gather(table, array("Q", [0]), to)
    with pytest.raises(ValueError, match="1 entries"):
        job.gather(table, array("Q", [1, 2]), to)
    gaps = CopyTable(*(array("q", column) for column in ([0], [1], [2], [2, 2], [8, 1], [2, 1])))
    with pytest.raises(ValueError, match="gaps"):
        job.gather(gaps, pointers, to)
    with pytest.raises(ValueError, match="no such"):
        job.sums(0)
    number = job.fingerprint(table, pointers)
    with pytest.raises(ValueError, match="not waited"):
        job.sums(number)


def test_pinned_memory_is_let_go_of_with_its_buffer(gpu: Gpu) -> None:
    before = gpu.pinned
    buffer = pinned(gpu, 1 << 20)
    assert gpu.pinned == before + 1 and buffer.pinned
    device = gpu.device(0)
    assert device is not None
    device.pin(buffer)
    assert gpu.pinned == before + 1
    del buffer
    assert gpu.pinned == before


def test_memory_of_jobs_is_used_again(gpu: Gpu) -> None:
    memory = pattern(100_000, 3)
    table, pointers = run(memory)
    to = pinned(gpu, 100_000)
    counts = []
    for _ in range(20):
        job = job_of(gpu)
        job.gather(table, pointers, to)
        job.fingerprint(table, pointers)
        job.mark()
        job.wait()
        del job
        counts.append(gpu.pinned)
    assert counts[0] == counts[-1]


def test_a_job_that_is_forgotten_has_ended(gpu: Gpu) -> None:
    """Its memory may be given to somebody else at once."""
    memory, to = pattern(100_000, 4), pinned(gpu, 100_000)
    table, pointers = run(memory)
    job = job_of(gpu)
    job.gather(table, pointers, to)
    del job
    assert not gpu.busy(gpu.copies)
    assert bytes(to) == bytes(memory)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_the_kernels_compile_and_are_in_the_module(tmp_path: Path) -> None:
    from tierckpt import _native

    assert _native.__file__ is not None
    module = Path(_native.__file__).read_bytes()
    assert b"tierckpt_gather" in module and b"tierckpt_fingerprint" in module
    text = tmp_path / "kernels.ptx"
    subprocess.run(["nvcc", "-ptx", "-std=c++17", "-o", str(text), str(NATIVE / "cuda" / "kernels.cu")], check=True)
    assert text.read_text().count(".entry") == 2
