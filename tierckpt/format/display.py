"""Encoded values as plain data for people and for ``--json``, without torch, numpy or any class."""

from __future__ import annotations

import math
from typing import Any

from tierckpt.errors import IntegrityError
from tierckpt.format import values
from tierckpt.format.canonical import JSON
from tierckpt.format.foreign import Malformed, check_array


def to_plain(encoded: JSON, *, what: str = "value") -> Any:
    """Dicts, lists, strings, numbers, booleans and None that show an encoded value.

    Dicts with other keys than strings become lists of pairs, numbers that JSON lacks become strings, and what
    is neither a number nor text becomes ``{kind: …}``. Different values may look alike. Raises
    ``IntegrityError`` naming ``what`` for anything that is not an encoded value.
    """
    try:
        return _plain(encoded, 0)
    except Malformed as error:
        raise IntegrityError(f"{what}: malformed value: {error}") from None


def _plain(encoded: JSON, depth: int) -> Any:
    if type(encoded) is not list:
        return values.decode(encoded, what="value")
    values.check_tag(encoded, depth)
    tag: Any = encoded[0]
    if tag in ("list", "tuple", "set", "frozenset"):
        return [_plain(item, depth + 2) for item in _array(encoded[1])]
    if tag in ("dict", "OrderedDict", "Counter", "defaultdict"):
        return _mapping([_array(pair) for pair in _array(encoded[1])], depth)
    if tag == "enum":
        return _plain(encoded[3], depth + 1)
    if tag == "namedtuple":
        return {
            str(name): _plain(item, depth + 2) for name, item in zip(*map(_array, encoded[2:]), strict=False)
        }
    if tag in ("numpy", "ndarray"):
        shape = [] if tag == "numpy" else encoded[2]
        check_array(encoded[1], shape, encoded[-1])
        return {tag: encoded[1], "shape": shape, "base64": encoded[-1]}
    if tag in ("bytes", "bytearray", "torch.dtype", "torch.device", "torch.Size"):
        return {tag: encoded[1]}
    value = values.decode(encoded, what="value")  # needs neither torch nor numpy
    if isinstance(value, int) or (isinstance(value, float) and math.isfinite(value)):
        return value
    return str(value)


def _mapping(pairs: list[list[JSON]], depth: int) -> Any:
    if any(len(pair) != 2 for pair in pairs):
        raise Malformed("an item of a dict is not a pair")
    plain = [[_plain(key, depth + 3), _plain(item, depth + 3)] for key, item in pairs]
    if all(type(key) is str for key, _ in pairs):
        return dict(plain)
    return plain


def _array(value: JSON) -> list[JSON]:
    if type(value) is not list:
        raise Malformed(f"expected an array, found {value!r:.60}")
    return value
