"""Many tensors at once are told dense as each is by itself."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import pytest
import torch
from torch import nn

from tierckpt import Pieces
from tierckpt.state.layout import are_dense, is_dense

C = torch.ones(4, 2, dtype=torch.complex64)
KINDS: dict[str, Any] = {
    "plain": torch.ones(3, 2),
    "parameter": nn.Parameter(torch.ones(2)),
    "scalar": torch.tensor(1),
    "empty": torch.empty(0, 3),
    "transposed": torch.ones(3, 2).T,
    "every other": torch.ones(6)[::2],
    "complex": C,
    "conjugate": C.conj(),
    "negative": torch._neg_view(torch.ones(3)),
    "imaginary part of a conjugate": C.conj().imag,
    "meta": torch.ones(3, device="meta"),
    "buffer": nn.Buffer(torch.ones(3)),
    "pieces": Pieces((4,), [((0,), torch.ones(4))]),
}
DENSE = {"plain", "parameter", "scalar", "complex"}


@pytest.mark.parametrize("names", [*combinations(KINDS, 2), [*KINDS], []], ids=str)
def test_dense_is_what_memory_holds_as_it_is(names: list[str]) -> None:
    values = [KINDS[name] for name in names]
    found = are_dense(values)
    assert found == [is_dense(value) for value in values]
    assert found == [name in DENSE or (name == "buffer" and type(KINDS[name]) is torch.Tensor) for name in names]
