"""Encoded values as plain data for people and for ``--json``, without torch, numpy or any class."""

from __future__ import annotations

import math
from typing import Any

from tierckpt.errors import IntegrityError
from tierckpt.format import values
from tierckpt.format.canonical import JSON
from tierckpt.format.foreign import Malformed, check_array, decode_base64, expect_array, expect_string

_SHOWN_BITS = 4096  # of integers shown in decimal; Python refuses to convert much larger ones


def to_plain(encoded: JSON, *, what: str = "value") -> Any:
    """Dicts, lists, strings, numbers, booleans and None that show an encoded value.

    Dicts with other keys than strings become lists of pairs, numbers that JSON lacks become strings, and what
    is neither a number nor text becomes ``{kind: …}``. Different values may look alike. Raises
    ``IntegrityError`` naming ``what`` for anything that is not an encoded value.
    """
    try:
        return _plain(encoded, 0, what)
    except Malformed as error:
        raise IntegrityError(f"{what}: malformed value: {error}") from None


def _plain(encoded: JSON, depth: int, what: str) -> Any:
    if type(encoded) is not list:
        return values.decode(encoded, what=what)
    values.check_tag(encoded, depth)
    tag: Any = encoded[0]
    if tag in ("list", "tuple", "set", "frozenset"):
        return [_plain(item, depth + 2, what) for item in expect_array(encoded[1])]
    if tag in ("dict", "OrderedDict", "Counter", "defaultdict"):
        return _mapping([expect_array(pair) for pair in expect_array(encoded[1])], depth, what)
    if tag == "enum":
        return _plain(encoded[3], depth + 1, what)
    if tag == "namedtuple":
        fields, items = map(expect_array, encoded[2:])
        if len(fields) != len(items):
            raise Malformed("a named tuple needs a value for each field")
        return {expect_string(key): _plain(item, depth + 2, what) for key, item in zip(fields, items, strict=True)}
    if tag in ("numpy", "ndarray"):
        shape = [] if tag == "numpy" else encoded[2]
        check_array(encoded[1], shape, encoded[-1])
        return {tag: encoded[1], "shape": shape, "base64": encoded[-1]}
    if tag in ("bytes", "bytearray"):
        decode_base64(encoded[1])
        return {tag: encoded[1]}
    if tag in ("torch.dtype", "torch.device"):
        return {tag: expect_string(encoded[1])}
    if tag == "torch.Size":
        if any(type(length) is not int for length in expect_array(encoded[1])):
            raise Malformed("the lengths of a torch.Size are integers")
        return {tag: encoded[1]}
    value = values.decode(encoded, what=what)  # needs neither torch nor numpy
    if isinstance(value, int):
        return value if value.bit_length() <= _SHOWN_BITS else hex(value)
    return value if isinstance(value, float) and math.isfinite(value) else str(value)


def _mapping(pairs: list[list[JSON]], depth: int, what: str) -> Any:
    if any(len(pair) != 2 for pair in pairs):
        raise Malformed("an item of a dict is not a pair")
    plain = [[_plain(key, depth + 3, what), _plain(item, depth + 3, what)] for key, item in pairs]
    if all(type(key) is str for key, _ in pairs):
        return dict(plain)
    return plain
