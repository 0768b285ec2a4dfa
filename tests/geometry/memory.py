"""Tensors whose elements tell where they belong, and local memory as odd as users have it.

An element's bits say its index in the logical tensor, so a byte that lands in a wrong place cannot look right.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from math import prod

import torch

from tierckpt.format.boxes import Box
from tierckpt.format.shard import DTYPES

ALL_DTYPES = [getattr(torch, name) for name in DTYPES if hasattr(torch, name)]

_GAP = 0xA5
_WORDS = {2: torch.int16, 4: torch.int32}


def numbers(dtype: torch.dtype, shape: Sequence[int], start: int = 0) -> torch.Tensor:
    """``arange`` of any dtype, by bits: element i has the number start + i, as far as its bits can say it."""
    n = torch.arange(start, start + prod(shape))
    size = dtype.itemsize
    if dtype == torch.bool:
        flat = (n * 40503 >> 5 & 1).bool()
    elif size == 1:
        # A prime, so that shifting by a row or a chunk of any usual size is seen.
        flat = (n % 251).to(torch.uint8).view(dtype)
    elif size in _WORDS:
        flat = n.to(_WORDS[size]).view(dtype)
    else:
        words = n | (n + 1) << 32
        flat = (words if size == 8 else torch.stack([words, words + 1], 1).flatten()).view(dtype)
    return flat.reshape(shape)


def at(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    """The view of ``tensor`` that a box is."""
    return tensor[tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit of the values agree."""
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(_bits(a), _bits(b))


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    return plain.reshape(-1).view(torch.uint8)


class Local:
    """A tensor somewhere in memory of its own, which has bytes that are no part of the tensor, too."""

    def __init__(self, shape: Sequence[int], dtype: torch.dtype, rng: random.Random | None = None) -> None:
        """Without ``rng`` contiguous, else with strides, offset and lazy negation or conjugation by chance."""
        self.shape = tuple(shape)
        self.dtype = dtype
        strides, offset, extent = _strides(self.shape, rng)
        self._geometry = self.shape, strides, offset
        self._lazy = rng is not None and rng.random() < 0.3
        self._buffer = torch.full((extent * dtype.itemsize,), _GAP, dtype=torch.uint8)
        self.tensor = self._view(self._buffer)

    def _view(self, buffer: torch.Tensor) -> torch.Tensor:
        view = buffer.view(self.dtype).as_strided(*self._geometry)
        if self._lazy and self.dtype in (torch.complex64, torch.complex128):
            return view.conj()
        if self._lazy and self.dtype in (torch.float32, torch.float64):
            return torch._neg_view(view)
        return view

    def wipe(self) -> None:
        """Back to what it was when it was made."""
        self._buffer.fill_(_GAP)

    def holds(self, values: torch.Tensor) -> bool:
        """Whether the tensor has exactly these values, and no byte beside it was touched."""
        expected = torch.full_like(self._buffer, _GAP)
        self._view(expected).copy_(values)
        return torch.equal(self._buffer, expected)


def _strides(shape: tuple[int, ...], rng: random.Random | None) -> tuple[tuple[int, ...], int, int]:
    """Strides and offset of a tensor, and how many elements the buffer around it has."""
    order = list(range(len(shape)))
    odd = rng is not None and rng.random() < 0.5
    if rng is not None and odd:
        rng.shuffle(order)
    strides = [0] * len(shape)
    step = rng.choice([1, 1, 2, 3]) if rng is not None and odd else 1
    for d in reversed(order):
        strides[d] = step
        step *= max(shape[d], 1)
        if rng is not None and odd:
            step += rng.choice([0, 0, 1, 5])
    offset = rng.choice([0, 1, 7]) if rng is not None and odd else 0
    return tuple(strides), offset, offset + step
