"""Reading tensors in parts without torch: what is read is what was saved, for any box, and in bounded parts."""

from __future__ import annotations

from itertools import pairwise, product
from math import prod
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import tierckpt
from tierckpt import _native
from tierckpt.errors import IntegrityError
from tierckpt.format.boxes import Box
from tierckpt.tiers.content import Content, batches, blocks
from tierckpt.tiers.disk import DiskPlace
from tierckpt.tiers.store import Store


def _content(root: Path) -> Content:
    store = Store.open(DiskPlace(root))
    assert store.chain.newest is not None
    return Content.open(store, store.chain.newest)


@given(st.lists(st.integers(0, 5), max_size=4), st.integers(1, 40))
def test_blocks_are_the_tensor_in_order(shape: list[int], limit: int) -> None:
    seen = []
    for box in blocks(shape, limit):
        assert 1 <= prod(box.size) <= limit
        seen += list(product(*(range(o, o + n) for o, n in zip(box.offset, box.size, strict=True))))
    assert seen == list(product(*map(range, shape)))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """One rank with several pieces of a tensor and a value; a tensor of more than a chunk; a tied one."""
    large = torch.arange(3 << 20, dtype=torch.int32).reshape(3, 1024, 1024)
    x = torch.arange(35, dtype=torch.float64).reshape(5, 7)
    pieces = tierckpt.Pieces((5, 7), [((0, 0), x[:, :3]), ((0, 3), x[:2, 3:]), ((2, 3), x[2:, 3:])])
    state = {"large": large, "tied": large, "pieces": pieces, "scalar": torch.tensor(7, dtype=torch.int16), "n": 1}
    tierckpt.save(state, tmp_path / "store", 1)
    return tmp_path / "store"


@pytest.mark.parametrize(
    ("name", "box"),
    [
        ("pieces", Box((0, 0), (5, 7))),
        ("pieces", Box((1, 2), (3, 3))),
        ("pieces", Box((4, 6), (1, 1))),
        ("scalar", Box((), ())),
        ("large", Box((0, 1000, 5), (3, 24, 7))),
        ("tied", Box((1, 0, 0), (2, 1024, 1024))),
    ],
)
def test_any_box_is_read_as_it_was_saved(root: Path, name: str, box: Box) -> None:
    content = _content(root)
    index = content.layout.index(name)
    assert index is not None
    [batch] = batches(content.layout, [(content.layout.index("scalar") or 0, Box((), ())), (index, box)], 1 << 24)
    memory = _native.Buffer(1 << 24)
    content.fill(batch, memory)
    region = batch[1]
    dtype = getattr(torch, content.layout.dtype(index))
    found = torch.frombuffer(memoryview(memory), dtype=torch.uint8)[region.start : region.start + region.nbytes]
    expected = tierckpt.read(root, keys=[name])[name]
    for d, (o, n) in enumerate(zip(box.offset, box.size, strict=True)):
        expected = expected.narrow(d, o, n)
    assert found.view(dtype).reshape(box.size).equal(expected)


def test_only_chunks_that_are_needed_are_read_and_all_are_verified(root: Path) -> None:
    content = _content(root)
    index = content.layout.index("large")
    assert index is not None
    memory = _native.Buffer(1 << 16)
    [batch] = batches(content.layout, [(index, Box((1, 500, 0), (1, 4, 1024)))], 1 << 16)
    content.fill(batch, memory)
    assert content.bytes_read == 4 << 20
    [shard] = root.glob("g*/s*/shard-*.safetensors")
    with open(shard, "r+b") as file:
        file.seek(6 << 20)
        byte = file.read(1)
        file.seek(6 << 20)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(IntegrityError, match=r"shard-00000.safetensors: chunk 1 .*damaged"):
        content.fill(batch, memory)


def test_batches_hold_what_fits(root: Path) -> None:
    layout = _content(root).layout
    index = layout.index("large")
    assert index is not None
    wanted = [(index, box) for box in blocks(layout.shape(index), 1000)]
    found = list(batches(layout, wanted, 10_000))
    assert [(region.tensor, region.box) for batch in found for region in batch] == wanted
    for batch in found:
        spans = [(region.start, region.start + region.nbytes) for region in batch]
        assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
        assert spans[-1][1] <= 10_000
        assert all(start % 16 == 0 for start, _ in spans)


def test_values_and_where_they_are(root: Path) -> None:
    content = _content(root)
    assert content.homes == {"n": 0}
    assert content.own == {}
    assert content.values(0) == {"n": 1}
