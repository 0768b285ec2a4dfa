"""Named columns of plain numbers in one safetensors file.

The frame of layout files (docs/format.md, section 6). One order, no holes, nothing between or behind: the
same columns always make the same bytes, and other bytes are refused.
"""

from __future__ import annotations

import json
import sys
from array import array
from collections.abc import Mapping, Sequence

from tierckpt.errors import IntegrityError

_CODES = {"U8": "B", "U32": "I", "I64": "q"}
_SIZES = {"U8": 1, "U32": 4, "I64": 8}
_HEADER_LIMIT = 1 << 16
"""Bytes of a header; a dozen columns need one or two thousand."""

assert all(array(_CODES[kind]).itemsize == size for kind, size in _SIZES.items())


def pack(kind: str, columns: Sequence[tuple[str, str, bytes | array[int]]]) -> bytes:
    """The file of these columns: (name, dtype ``U8``, ``U32`` or ``I64``, numbers).

    ``kind`` goes into the metadata under ``tierckpt``. The numbers are an array of the right item size, or
    bytes.
    """
    bodies = [_little(numbers) for _, _, numbers in columns]
    header = _header(kind, [(name, dtype) for name, dtype, _ in columns], [len(body) for body in bodies])
    return b"".join([len(header).to_bytes(8, "little"), header, *bodies])


def unpack(kind: str, columns: Mapping[str, str], data: bytes, *, what: str) -> dict[str, array[int]]:
    """The columns of a file that ``pack`` made: the inverse, for exactly these names and dtypes in this
    order.

    Raises ``IntegrityError`` naming ``what`` for all other bytes. Safe for hostile ones: memory is at most
    twice the size of the data.
    """
    length = int.from_bytes(data[:8], "little")
    if len(data) < 8 or length > min(_HEADER_LIMIT, len(data) - 8):
        raise IntegrityError(f"{what}: not a {kind} file: a header of {length} bytes in {len(data)}")
    try:
        header = json.loads(data[8 : 8 + length])
        sizes = [header[name]["data_offsets"][1] - header[name]["data_offsets"][0] for name in columns]
    except (ValueError, TypeError, LookupError, RecursionError) as error:
        raise IntegrityError(f"{what}: not a {kind} file: {type(error).__name__} in its header") from None
    if any(
        type(size) is not int or size < 0 or size % _SIZES[dtype]
        for size, dtype in zip(sizes, columns.values(), strict=True)
    ):
        raise IntegrityError(f"{what}: not a {kind} file: columns of {sizes} bytes")
    if data[8 : 8 + length] != _header(kind, list(columns.items()), sizes):
        raise IntegrityError(f"{what}: its header is not that of a {kind} file with these columns")
    at = 8 + length
    if at + sum(sizes) != len(data):
        raise IntegrityError(f"{what}: {len(data)} bytes, but its header speaks of {at + sum(sizes)}")
    found = {}
    view = memoryview(data)
    for (name, dtype), size in zip(columns.items(), sizes, strict=True):
        numbers = array(_CODES[dtype])
        numbers.frombytes(view[at : at + size])
        if sys.byteorder == "big":
            numbers.byteswap()
        found[name] = numbers
        at += size
    return found


def _little(numbers: bytes | array[int]) -> bytes:
    if isinstance(numbers, bytes):
        return numbers
    if sys.byteorder == "big":
        numbers = array(numbers.typecode, numbers)
        numbers.byteswap()
    return numbers.tobytes()


def _header(kind: str, columns: Sequence[tuple[str, str]], sizes: Sequence[int]) -> bytes:
    entries: dict[str, object] = {"__metadata__": {"tierckpt": kind}}
    at = 0
    for (name, dtype), size in zip(columns, sizes, strict=True):
        entries[name] = {
            "dtype": dtype,
            "shape": [size // _SIZES[dtype]],
            "data_offsets": [at, at + size],
        }
        at += size
    header = json.dumps(entries, separators=(",", ":")).encode("ascii")
    return header + b" " * (-len(header) % 8)
