"""Counting and measuring differences: the way with numpy, that without, and torch must agree on every dtype."""

from __future__ import annotations

import random

import pytest
import torch

from tests import lacks
from tierckpt.cli import elements
from tierckpt.cli.elements import Difference, compare
from tierckpt.format.shard import DTYPES

PARTS = {"complex32": torch.float16, "complex64": torch.float32, "complex128": torch.float64}


@pytest.fixture(params=["numpy", "plain"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "_has_numpy", lambda: request.param == "numpy")


def _pair(dtype: str, count: int, seed: int) -> tuple[bytes, bytes, list[int]]:
    """Random memory, the same with some elements changed, and which."""
    item = DTYPES[dtype].size
    source = random.Random(seed)
    a = source.randbytes(count * item)
    changed = sorted(source.sample(range(count), 9))
    b = bytearray(a)
    for i in changed:
        b[i * item + source.randrange(item)] ^= 1 << source.randrange(8)
    return a, bytes(b), changed


@pytest.mark.parametrize("dtype", [pytest.param(dtype, marks=lacks.dtype(dtype)) for dtype in DTYPES])
@pytest.mark.usefixtures("way")
def test_agrees_with_torch(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(elements, "_BLOCK", 1 << 10)  # several blocks, and a last one that is not full
    a, b, changed = _pair(dtype, 700, len(dtype))
    found = compare(memoryview(a), memoryview(b), dtype)
    assert (found.elements, found.first) == (len(changed), changed[0])
    kind = PARTS.get(dtype, getattr(torch, dtype))
    if not kind.is_floating_point or dtype.startswith("float4"):
        assert (found.largest, found.nans) == (None, 0)
        return
    x, y = (torch.frombuffer(bytearray(data), dtype=torch.uint8).view(kind).double() for data in (a, b))
    difference = (x - y).abs()
    expected = difference[~difference.isnan()].max().item()
    assert found.largest == pytest.approx(expected, rel=1e-12)
    assert found.nans == int((x.isnan() != y.isnan()).sum())


@pytest.mark.parametrize(
    ("a", "b", "expected"),
    [
        ([1.0, 2.0], [1.0, 2.5], Difference(1, 1, 0.5, 0)),
        ([float("nan"), 2.0], [float("nan"), 2.0], Difference()),
        ([float("nan"), 2.0], [0.0, 2.0], Difference(1, 0, 0.0, 1)),
        ([0.0], [-0.0], Difference(1, 0, 0.0, 0)),
        ([float("inf"), 1.0], [float("-inf"), 1.0], Difference(1, 0, float("inf"), 0)),
        ([float("inf"), 1.0], [float("inf"), 4.0], Difference(1, 1, 3.0, 0)),
    ],
)
@pytest.mark.usefixtures("way")
def test_nan_zero_and_infinity(a: list[float], b: list[float], expected: Difference) -> None:
    x, y = (torch.tensor(values).numpy().tobytes() for values in (a, b))
    assert compare(memoryview(x), memoryview(y), "float32") == expected


@pytest.mark.usefixtures("way")
def test_nan_with_another_payload_differs_in_bits_only() -> None:
    a, b = (bits.to_bytes(4, "little") for bits in (0x7FC00000, 0x7FC00001))
    assert compare(memoryview(a), memoryview(b), "float32") == Difference(1, 0, 0.0, 0)
