"""What was written to after it was copied, or before, is found; what was not is not."""

from __future__ import annotations

from array import array

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.native import oracle
from tests.native.oracle import Box
from tests.native.test_copy import MEMORY, address_of, boxes, pattern
from tierckpt._native import CopyTable, Samples

PHASES = st.integers(0, 2**64 - 1)


def apart(data: st.DataObject, memory: bytearray) -> list[Box]:
    """Boxes that share no byte of the shard."""
    found, end = data.draw(st.lists(boxes(), max_size=4)), 0
    for box in found:
        box.pointer += address_of(memory)
        box.offset += end
        end = max([end, *(shard + 1 for shard, _ in box.bytes())])
    return found


def changed(entries: list[Box], before: bytes, after: bytearray) -> list[int]:
    """The boxes of which a byte of memory is another."""
    start = address_of(after)
    return [
        number
        for number, box in enumerate(entries)
        if any(before[address - start] != after[address - start] for _, address in box.bytes())
    ]


def drawn(data: st.DataObject) -> tuple[bytearray, list[Box], CopyTable, array[int], bytearray]:
    """Memory, boxes in it, both as the table takes them, and room for their shard."""
    memory = pattern(MEMORY, 1)
    entries = apart(data, memory)
    table, pointers = oracle.table(entries)
    return memory, entries, table, pointers, bytearray(table.span[1])


def write(data: st.DataObject, memory: bytearray) -> None:
    for at in data.draw(st.lists(st.integers(0, MEMORY - 1), max_size=20)):
        memory[at] ^= 0xFF


@settings(max_examples=200)
@given(st.data())
def test_every_byte(data: st.DataObject) -> None:
    memory, entries, table, pointers, shard = drawn(data)
    table.gather(pointers, 0, len(shard), shard)
    before = bytes(memory)
    assert table.differing(pointers, shard, 1, data.draw(PHASES)) == []
    write(data, memory)
    assert table.differing(pointers, shard, 1, data.draw(PHASES)) == changed(entries, before, memory)


@settings(max_examples=200)
@given(st.data())
def test_samples(data: st.DataObject) -> None:
    memory, entries, table, pointers, shard = drawn(data)
    samples = Samples(table, pointers, 256, data.draw(PHASES))
    before = bytes(memory)
    write(data, memory)
    table.gather(pointers, 0, len(shard), shard)
    assert set(samples.differing(shard)) <= set(changed(entries, before, memory))
    assert set(table.differing(pointers, shard, 100, data.draw(PHASES))) == set()


@settings(max_examples=100)
@given(st.data(), st.integers(1, 1 << 20))
def test_a_tensor_that_is_written_over_is_always_found(data: st.DataObject, every: int) -> None:
    memory, entries, table, pointers, shard = drawn(data)
    samples = Samples(table, pointers, 256, data.draw(PHASES))
    before = bytes(memory)
    table.gather(pointers, 0, len(shard), shard)
    memory[:] = bytes(byte ^ 0xFF for byte in memory)
    full = changed(entries, before, memory)
    assert table.differing(pointers, shard, every, data.draw(PHASES)) == full
    table.gather(pointers, 0, len(shard), shard)
    assert samples.differing(shard) == full


def test_bad_calls() -> None:
    table = CopyTable(*(array("q", [value]) for value in (8, 4, 1, 100, 4, 4)))
    memory = bytearray(400)
    pointers, shard = array("Q", [address_of(memory)]), bytearray(408)
    with pytest.raises(ValueError, match="reach to byte 408, the buffer has 407"):
        table.differing(pointers, shard[:407], 1, 0)
    with pytest.raises(ValueError, match="every must be positive"):
        table.differing(pointers, shard, 0, 0)
    with pytest.raises(ValueError, match="null pointer"):
        table.differing(array("Q", [0]), shard, 1, 0)
    with pytest.raises(ValueError, match="1 entries, not 2"):
        Samples(table, array("Q", [1, 2]), 10, 0)
    with pytest.raises(ValueError, match="null pointer"):
        Samples(table, array("Q", [0]), 10, 0)
    with pytest.raises(ValueError, match="the buffer has 8"):
        Samples(table, pointers, 100, 0).differing(shard[:8])
    assert Samples(table, pointers, 0, 0).differing(b"") == []
