"""Rows of local tensors: where their values are, as they are now."""

from __future__ import annotations

import pytest
import torch

from tierckpt.errors import LayoutError
from tierckpt.state.devices import COPIED, HOST, place
from tierckpt.state.layout import describe
from tierckpt.state.rows import LocalRows, Wanted, host, parts

BASE = torch.arange(12.0).reshape(3, 4)
LAZY = [torch.tensor([1 + 2j, 3 - 4j]).conj(), torch._neg_view(torch.tensor([[1.0, 3.0], [5.0, 7.0]]).t())]


def rows_of(tensors: dict[str, torch.Tensor]) -> LocalRows:
    offsets, at = [], 0
    for tensor in tensors.values():
        offsets.append(at)
        at += tensor.nbytes
    described = {name: describe(tensor, name=name) for name, tensor in tensors.items()}
    return LocalRows(described, [Wanted(name, 0, at, None) for name, at in zip(tensors, offsets, strict=True)])


@pytest.mark.parametrize("view", [BASE, BASE.t(), BASE[:, ::2], torch.ones(1).expand(5), torch.tensor(1.0)])
def test_strided_memory_is_read_where_it_is(view: torch.Tensor) -> None:
    assert place(view) == HOST
    rows = rows_of({"w": view})
    pointers, keep = rows.pointers({"w": view})
    assert list(pointers) == [view.data_ptr()] and not keep


@pytest.mark.parametrize("view", LAZY)
def test_what_is_not_in_memory_as_it_is_is_copied(view: torch.Tensor) -> None:
    assert place(view) == COPIED
    memory = host(view)
    assert not memory.is_conj() and not memory.is_neg()
    assert torch.equal(memory, view) and memory.is_contiguous()
    rows = rows_of({"w": view})
    pointers, keep = rows.pointers({"w": view})
    into = bytearray(view.nbytes)
    rows.rows.table().gather(pointers, 0, len(into), into)
    assert torch.equal(torch.frombuffer(into, dtype=view.dtype).reshape(view.shape), memory)
    assert keep
    assert rows.late({"w"}) == [False]  # a copy says nothing of later changes


def test_parts_hold_every_row_once_and_copy_the_same_bytes() -> None:
    tensors = {"a": torch.arange(5.0), "b": BASE.t(), "c": torch.arange(3), "d": LAZY[1], "e": BASE[:, 1:3]}
    rows = rows_of(tensors)
    pointers, keep = rows.pointers(tensors)
    size = sum(tensor.nbytes for tensor in tensors.values())
    whole, pieces = bytearray(size), bytearray(size)
    rows.rows.table().gather(pointers, 0, size, whole)
    found = parts(rows.rows, rows.places(), rows.late({"a", "d", "e"}))
    assert sorted((part.place, part.late, sum(part.rows)) for part in found) == [(HOST, False, 3), (HOST, True, 2)]
    for part in found:
        part.table.gather(part.pointers(pointers), 0, size, pieces)
    assert whole == pieces
    assert len(keep) == 1


def test_tensors_that_look_different_are_refused() -> None:
    rows = rows_of({"w": BASE})
    for other in (BASE.t(), BASE.double(), BASE[:2], LAZY[1]):
        with pytest.raises(LayoutError, match="w: planned as"):
            rows.pointers({"w": other})
    with pytest.raises(LayoutError, match="not in the state"):
        rows.pointers({})
