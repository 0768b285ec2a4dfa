"""How the elements of two pieces of memory differ: by bits, and for floating-point numbers by how much.

numpy does it where it is installed; without it the work is done on large integers and by built-in functions over
whole blocks, several times slower.
"""

from __future__ import annotations

import math
import operator
import struct
import sys
from array import array
from collections.abc import Sequence
from functools import cache
from typing import Any, NamedTuple

from tierckpt.format import shard

#: Bytes that are looked at closely at once; memory that is equal is told apart before. A multiple of all item sizes.
_BLOCK = 1 << 18


class Difference(NamedTuple):
    """How many elements differ in their bits.

    Attributes:
        elements: how many.
        first: the first of them, by its position in the memory; -1 if there is none.
        largest: the largest absolute difference of two numbers; 0.0 if they differ in their bits only. Of complex
            numbers, that of the parts. None where the elements are no floating-point numbers.
        nans: elements (of complex ones: parts) that are NaN on one side and a number on the other.
    """

    elements: int = 0
    first: int = -1
    largest: float | None = None
    nans: int = 0


def compare(a: memoryview, b: memoryview, dtype: str) -> Difference:
    """Compare two memories of the same size that hold elements of ``dtype`` (as torch names it)."""
    total = Difference()
    if same(a, b):
        return total
    item = shard.dtype(dtype).size
    closely = _with_numpy if _has_numpy() else _plainly
    for lo in range(0, len(a), _BLOCK):
        x, y = a[lo : lo + _BLOCK], b[lo : lo + _BLOCK]
        if not same(x, y):
            found = closely(x, y, dtype, item)
            total = merged(total, found._replace(first=lo // item + found.first))
    return total


def merged(one: Difference, other: Difference) -> Difference:
    """Both together, if their positions are in the same memory."""
    if not one.elements or not other.elements:
        return one if one.elements else other
    largest = None if one.largest is None or other.largest is None else max(one.largest, other.largest)
    return Difference(one.elements + other.elements, min(one.first, other.first), largest, one.nans + other.nans)


def same(a: memoryview, b: memoryview) -> bool:
    """Whether two memories of the same size are equal; compared in words, which is many times as fast."""
    words = len(a) // 8 * 8
    return a[words:] == b[words:] and a[:words].cast("Q") == b[:words].cast("Q")


@cache
def _has_numpy() -> bool:
    """Whether numpy can be imported."""
    try:
        import numpy  # noqa: F401
    except ImportError:
        return False
    return True


def _with_numpy(a: memoryview, b: memoryview, dtype: str, item: int) -> Difference:
    import numpy as np

    unit = min(item, 8)
    x, y = (np.frombuffer(data, f"<u{unit}") for data in (a, b))
    where = (x != y).reshape(-1, item // unit).any(axis=1)
    count, first = int(np.count_nonzero(where)), int(where.argmax())
    kind = _KINDS.get(dtype)
    if kind is None:
        return Difference(count, first)
    with np.errstate(all="ignore"):
        parts = [_numpy_floats(np, data, kind) for data in (a, b)]
        found = np.abs(parts[0] - parts[1])
        lone = np.count_nonzero(np.isnan(parts[0]) != np.isnan(parts[1]))
    found = found[~np.isnan(found)]
    return Difference(count, first, float(found.max(initial=0.0)), int(lone))


def _numpy_floats(np: Any, data: memoryview, kind: str) -> Any:
    """The numbers as float64."""
    if kind == "bfloat16":
        wide = np.frombuffer(data, "<u2").astype("<u4") << 16
        return wide.view("<f4").astype("f8")
    if kind.startswith("float8"):
        return np.array(_table(kind))[np.frombuffer(data, "u1")]
    return np.frombuffer(data, {"float16": "<f2", "float32": "<f4", "float64": "<f8"}[kind]).astype("f8")


def _plainly(a: memoryview, b: memoryview, dtype: str, item: int) -> Difference:
    bits = int.from_bytes(a, "little") ^ int.from_bytes(b, "little")
    # Fold every item down to its lowest bit; what a shift brings in from the item above is masked away.
    ones = int.from_bytes((b"\1" + bytes(item - 1)) * (len(a) // item), "little")
    width = item * 8
    while width > 1:
        width //= 2
        bits |= (bits >> width) & (ones * ((1 << width) - 1))
    bits &= ones
    count, first = bits.bit_count(), ((bits & -bits).bit_length() - 1) // (8 * item)
    kind = _KINDS.get(dtype)
    if kind is None:
        return Difference(count, first)
    x, y = _plain_floats(a, kind), _plain_floats(b, kind)
    found = [abs(d) for d in map(operator.sub, x, y) if d == d]
    lone = map(operator.ne, map(math.isnan, x), map(math.isnan, y))
    return Difference(count, first, max(found, default=0.0), sum(lone))


def _plain_floats(data: memoryview, kind: str) -> Sequence[float]:
    if kind == "bfloat16":
        wide = bytearray(2 * len(data))
        wide[2::4], wide[3::4] = bytes(data[0::2]), bytes(data[1::2])
        return _plain_floats(memoryview(wide), "float32")
    if kind.startswith("float8"):
        return list(map(_table(kind).__getitem__, data))
    if kind == "float16":
        return struct.unpack(f"<{len(data) // 2}e", data)
    found = array("f" if kind == "float32" else "d")
    found.frombytes(data)
    if sys.byteorder == "big":
        found.byteswap()
    return found


_FLOATS = ("float16", "bfloat16", "float32", "float64")
_FLOATS8 = ("float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
_KINDS = {
    **{kind: kind for kind in (*_FLOATS, *_FLOATS8)},
    "complex32": "float16",
    "complex64": "float32",
    "complex128": "float64",
}
"""What dtypes consist of that are made of floating-point numbers."""


@cache
def _table(kind: str) -> list[float]:
    """The number that each byte of an 8-bit floating-point dtype stands for."""
    if kind == "float8_e8m0fnu":
        return [2.0 ** (byte - 127) for byte in range(255)] + [math.nan]
    mantissa = 2 if "e5m2" in kind else 3
    bias = {"float8_e5m2": 15, "float8_e4m3fn": 7, "float8_e4m3fnuz": 8, "float8_e5m2fnuz": 16}[kind]
    return [_eight_bits(byte, mantissa, bias, kind) for byte in range(256)]


def _eight_bits(byte: int, mantissa: int, bias: int, kind: str) -> float:
    sign = -1.0 if byte & 0x80 else 1.0
    exponent, fraction = (byte & 0x7F) >> mantissa, byte & ((1 << mantissa) - 1)
    if kind.endswith("uz"):
        if byte == 0x80:  # the only one that is no number
            return math.nan
    elif kind == "float8_e5m2" and exponent == 31:
        return math.nan if fraction else sign * math.inf
    elif kind == "float8_e4m3fn" and byte & 0x7F == 0x7F:
        return math.nan
    if exponent == 0:
        return sign * fraction * 2.0 ** (1 - bias - mantissa)
    return sign * (1 + fraction / (1 << mantissa)) * 2.0 ** (exponent - bias)
