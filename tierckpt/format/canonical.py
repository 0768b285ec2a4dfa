"""Canonical JSON: the subset of RFC 8785 in which the documents of a store are written (docs/format.md, 2).

In this subset (ASCII keys, no fractions, integers of magnitude below 2^53) the encoder of the standard
library, told to sort keys and to leave out spaces, writes exactly what RFC 8785 asks for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from itertools import accumulate, chain
from typing import NoReturn, TypeAlias

from tierckpt.errors import IntegrityError

JSON: TypeAlias = bool | int | str | list["JSON"] | dict[str, "JSON"] | None

FORMAT = 1
MAX_INTEGER = 2**53 - 1
DEPTH_LIMIT = 64  # nested arrays and objects
SIZE_LIMIT = 64 * 1024 * 1024  # bytes of one document

_encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))
_LEAVES = frozenset({type(None), bool, int, str})
_HEX = re.compile(r"[0-9a-f]{64}")


def encode(value: JSON) -> bytes:
    """The canonical bytes of ``value``.

    Raises ``TypeError`` or ``ValueError`` for what is not in the subset (fractions, large integers, keys that
    are not ASCII strings, lone surrogates, subclasses of the JSON types, cycles): a mistake of the caller.
    """
    data = _encoder.encode(value).encode("utf-8")  # first, because it finds cycles
    _check(value)
    return data


def _check(value: JSON) -> None:
    """Refuse values outside the subset, level by level: a large document has few levels and many items."""
    level: list[JSON] = [value]
    while level:
        kinds = set(map(type, level))
        if int in kinds:
            for item in level:
                if type(item) is int and not -MAX_INTEGER <= item <= MAX_INTEGER:
                    raise ValueError(f"integer {item:#x} is not below 2^53 in magnitude")
        kinds -= _LEAVES
        if not kinds <= {list, dict}:
            raise TypeError(f"not JSON: {', '.join(sorted(kind.__name__ for kind in kinds - {list, dict}))}")
        objects = [item for item in level if type(item) is dict] if dict in kinds else []
        for key in chain.from_iterable(objects):
            if type(key) is not str or not key.isascii():
                raise ValueError(f"object key {key!r} is not an ASCII string")
        arrays = [item for item in level if type(item) is list] if list in kinds else []
        level = [*chain.from_iterable(arrays), *chain.from_iterable([each.values() for each in objects])]


def decode(data: bytes, *, what: str, depth: int = DEPTH_LIMIT, limit: int = SIZE_LIMIT) -> JSON:
    """The value whose canonical bytes are ``data``.

    Raises ``IntegrityError`` naming ``what`` if ``data`` is longer than ``limit`` bytes, nested deeper than
    ``depth`` or not the canonical form of a value of the subset. Safe for hostile bytes.
    """
    if len(data) > limit:
        raise IntegrityError(f"{what}: {len(data)} bytes, but at most {limit} are allowed")
    if too_deep(data, depth):
        raise IntegrityError(f"{what}: nested deeper than {depth}")
    try:
        value: JSON = _decoder.decode(data.decode("utf-8"))
        again = _encoder.encode(value).encode("utf-8")
    except ValueError as error:  # of UTF-8, of JSON, of the hooks below, of lone surrogates
        raise IntegrityError(f"{what}: not canonical JSON: {error}") from None
    if again != data:
        raise IntegrityError(f"{what}: valid JSON, but not in its canonical form")
    return value


_SHALLOW = 4  # levels that `too_deep` peels off with replace() before it counts
_BRACKETS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")  # as signed bytes: +1, -1
_OTHERS = bytes(set(range(256)) - set(b"[]{}"))


def too_deep(data: bytes, depth: int) -> bool:
    """Whether the JSON text ``data`` nests arrays and objects deeper than ``depth``.

    The parser recurses, so this is asked before it runs. It looks at the bytes without recursion, in linear
    time and memory; for text that is not JSON the answer holds up to the place where the parser stops.
    """
    if data.count(b"[") + data.count(b"{") <= depth:
        return False
    # Without escapes every other of the parts between quotes is a string.
    bare = b"".join(data.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    brackets = bare.translate(_BRACKETS, _OTHERS)
    for _ in range(min(_SHALLOW, depth)):
        brackets = brackets.replace(b"\x01\xff", b"")
        depth -= 1
    return any(map(depth.__lt__, accumulate(memoryview(brackets).cast("b"))))


def _no_fractions(text: str) -> NoReturn:
    raise ValueError(f"number {text[:40]} is not an integer")


def _integer(text: str) -> int:
    if len(text) > 17 or not -MAX_INTEGER <= (number := int(text)) <= MAX_INTEGER:
        raise ValueError(f"integer {text[:40]} is not below 2^53 in magnitude")
    return number


def _object(pairs: list[tuple[str, JSON]]) -> dict[str, JSON]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("an object has the same key twice")
    for key in found:
        if not key.isascii():
            raise ValueError(f"object key {key[:40]!r} is not ASCII")
    return found


_decoder = json.JSONDecoder(
    object_pairs_hook=_object, parse_float=_no_fractions, parse_int=_integer, parse_constant=_no_fractions
)


class Fields:
    """An object whose keys are known exactly, and the typed values in it.

    Every method raises ``IntegrityError`` naming ``what`` and the key when the value is of another kind.
    """

    __slots__ = ("_values", "what")

    def __init__(self, value: JSON, keys: Iterable[str], *, what: str) -> None:
        if type(value) is not dict:
            raise IntegrityError(f"{what}: expected an object, found {_kind(value)}")
        if value.keys() != (wanted := set(keys)):
            missing, unknown = _some(wanted - value.keys()), _some(value.keys() - wanted)
            raise IntegrityError(f"{what}: missing keys {missing}, unknown keys {unknown}")
        self.what = what
        self._values = value

    def value(self, key: str) -> JSON:
        return self._values[key]

    def integer(self, key: str, *, low: int = 0, high: int = MAX_INTEGER) -> int:
        """An integer in [low, high]."""
        value = self._values[key]
        if type(value) is not int or not low <= value <= high:
            raise self.wrong(key, f"an integer from {low} to {high}")
        return value

    def boolean(self, key: str) -> bool:
        value = self._values[key]
        if type(value) is not bool:
            raise self.wrong(key, "true or false")
        return value

    def string(self, key: str) -> str:
        value = self._values[key]
        if type(value) is not str:
            raise self.wrong(key, "a string")
        return value

    def hex(self, key: str) -> str:
        """64 lower-case hex digits: a digest or a public key."""
        value = self._values[key]
        if type(value) is not str or not _HEX.fullmatch(value):
            raise self.wrong(key, "64 hex digits")
        return value

    def array(self, key: str) -> list[JSON]:
        value = self._values[key]
        if type(value) is not list:
            raise self.wrong(key, "an array")
        return value

    def fields(self, key: str, keys: Iterable[str]) -> Fields:
        """An object with exactly ``keys``."""
        return Fields(self._values[key], keys, what=f"{self.what}: {key}")

    def wrong(self, key: str, expected: str) -> IntegrityError:
        """The error that says what was expected under ``key`` and what stands there."""
        return IntegrityError(f"{self.what}: {key} must be {expected}, found {_kind(self._values[key])}")


def document(kind: str, **fields: JSON) -> bytes:
    """The bytes of the document of that kind with these fields beside ``format`` and ``kind``."""
    return encode({"format": FORMAT, "kind": kind, **fields})


def read_document(
    data: bytes,
    kind: str,
    keys: Iterable[str],
    *,
    what: str,
    depth: int = DEPTH_LIMIT,
    limit: int = SIZE_LIMIT,
) -> Fields:
    """The fields of a document of that kind, which has exactly ``keys`` beside ``format`` and ``kind``.

    Raises ``IntegrityError`` for anything else, also for features in ``requires`` that are unknown here.
    """
    value = decode(data, what=what, depth=depth, limit=limit)
    if type(value) is not dict:
        raise IntegrityError(f"{what}: expected an object, found {_kind(value)}")
    version, found = value.get("format"), value.get("kind")
    if type(version) is not int or version != FORMAT:
        hint = "; a newer tierckpt is needed" if type(version) is int and version > FORMAT else ""
        raise IntegrityError(f"{what}: format {_kind(version)} is not {FORMAT}{hint}")
    if found != kind:
        raise IntegrityError(f"{what}: kind must be {kind!r}, found {_kind(found)}")
    if "requires" in value and "requires" in keys:
        _no_requirements(value["requires"], what)
    return Fields(value, ("format", "kind", *keys), what=what)


def _no_requirements(value: JSON, what: str) -> None:
    """Version 1 defines no features, so the only list that can be read is the empty one."""
    if type(value) is not list or any(type(name) is not str for name in value):
        raise IntegrityError(f"{what}: requires must be an array of strings, found {_kind(value)}")
    if value:
        raise IntegrityError(f"{what}: requires {_some(value)}, unknown here; a newer tierckpt is needed")


def _some(names: Iterable[object]) -> str:
    """At most four of the names, none of them long: they may come from hostile bytes."""
    shown = sorted(str(name)[:40] for name in names)
    return str(shown[:4]) + (f" and {len(shown) - 4} more" if len(shown) > 4 else "")


def _kind(value: JSON) -> str:
    """A short account of a value for a message."""
    if type(value) is list:
        return f"an array of {len(value)}"
    if type(value) is dict:
        return "an object"
    text = json.dumps(value)
    return text if len(text) <= 80 else text[:80] + "…"
