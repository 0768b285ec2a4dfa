"""The slow and obvious form of gather and scatter: one byte at a time, through addresses."""

from __future__ import annotations

import ctypes
import itertools
from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tierckpt._native import CopyTable


@dataclass
class Box:
    """One entry of a copy table."""

    offset: int
    itemsize: int
    shape: tuple[int, ...]
    shard_strides: tuple[int, ...]
    tensor_strides: tuple[int, ...]
    pointer: int

    def bytes(self) -> Iterator[tuple[int, int]]:
        """Each byte of the box: where in the shard, at which address."""
        for index in itertools.product(*map(range, self.shape)):
            shard = self.offset + sum(i * s for i, s in zip(index, self.shard_strides, strict=True))
            address = self.pointer + sum(i * s for i, s in zip(index, self.tensor_strides, strict=True))
            for k in range(self.itemsize):
                yield shard + k, address + k


def columns(boxes: Sequence[Box]) -> list[array[int]]:
    """The arguments of `CopyTable`."""
    return [
        array("q", [box.offset for box in boxes]),
        array("q", [box.itemsize for box in boxes]),
        array("q", [len(box.shape) for box in boxes]),
        array("q", [n for box in boxes for n in box.shape]),
        array("q", [n for box in boxes for n in box.shard_strides]),
        array("q", [n for box in boxes for n in box.tensor_strides]),
    ]


def table(boxes: Sequence[Box]) -> tuple[CopyTable, array[int]]:
    """The fast form of the boxes, and their pointers."""
    return CopyTable(*columns(boxes)), array("Q", [box.pointer for box in boxes])


def gather(boxes: Sequence[Box], lo: int, hi: int, dst: bytearray) -> None:
    """Fill dst, which holds [lo, hi) of the shard."""
    for box in sorted(boxes, key=lambda box: box.offset):
        for shard, address in box.bytes():
            if lo <= shard < hi:
                dst[shard - lo] = ctypes.c_uint8.from_address(address).value


def scatter(boxes: Sequence[Box], lo: int, hi: int, src: bytes) -> None:
    """Write [lo, hi) of the shard, which src holds, to the tensors."""
    for box in boxes:
        for shard, address in box.bytes():
            if lo <= shard < hi:
                ctypes.c_uint8.from_address(address).value = src[shard - lo]


def covered(boxes: Sequence[Box], lo: int, hi: int) -> int:
    """Bytes of the boxes in [lo, hi)."""
    return sum(lo <= shard < hi for box in boxes for shard, _ in box.bytes())
