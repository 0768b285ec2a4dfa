"""Protects the blob: its capacity hides small growth from the layout, and its bytes say one thing only."""

from __future__ import annotations

import pytest

from tierckpt.errors import IntegrityError, StateError
from tierckpt.format import blob, canonical


@pytest.mark.parametrize(
    ("length", "capacity"), [(0, 1024), (1, 1024), (1024, 1024), (1025, 2048), (2048, 2048), (5000, 8192)]
)
def test_capacity(length: int, capacity: int) -> None:
    assert blob.capacity(length) == capacity


def test_round_trip() -> None:
    items: dict[str, canonical.JSON] = {"z": ["list", [1]], "a/é": None, "~r": "x  "}
    data = blob.encode(items)
    assert data == '[["a/é",null],["z",["list",[1]]],["~r","x  "]]'.encode()
    padded = blob.pad(data)
    assert len(padded) == 1024 and padded.rstrip(b" ") == data
    assert blob.decode(padded, what="x") == items
    assert blob.decode(blob.pad(blob.encode({})), what="x") == {}


@pytest.mark.parametrize(
    "data",
    [
        b"[]",
        b"[]".ljust(2048),
        b" ".ljust(1024),
        b"{}".ljust(1024),
        b"[1]".ljust(1024),
        b'[["a"]]'.ljust(1024),
        b"[[1,2]]".ljust(1024),
        b'[["b",1],["a",1]]'.ljust(1024),
        b'[["a",1],["a",1]]'.ljust(1024),
        b"[]".ljust(1024, b"\0"),
        b"[]\n".ljust(1024),
    ],
)
def test_other_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="the blob"):
        blob.decode(data, what="the blob")


def test_values_nested_as_deep_as_they_may_be_fit() -> None:
    from tierckpt.format import values

    value: object = 1j
    for _ in range(84):
        value = {"k": value}
    data = blob.pad(blob.encode({"a": values.encode(value)}))
    assert values.decode(blob.decode(data, what="x")["a"], what="x") == value


def test_size_is_limited() -> None:
    with pytest.raises(StateError, match="make tensors"):
        blob.encode({"a": "x" * (canonical.SIZE_LIMIT + 1)})
