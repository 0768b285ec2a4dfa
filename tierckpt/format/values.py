"""Encoded values: how leaves of a state that are not tensors are written as JSON (docs/format.md, section 8).

A closed set of types, each of which comes back as what it was. Nothing is pickled and no class is looked up
by a stored name: enums, named tuples and default factories come back only where a template supplies them.
torch and numpy are imported only when a value needs them.
"""

from __future__ import annotations

import base64
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Callable, Iterable, Mapping
from datetime import date, datetime, time, timedelta, timezone
from enum import Enum
from typing import Any

from tierckpt.errors import IntegrityError, StateError
from tierckpt.format import canonical, foreign
from tierckpt.format.canonical import JSON, MAX_INTEGER
from tierckpt.format.foreign import Malformed, Refused, expect_array, expect_string
from tierckpt.format.hints import instead_of

DEPTH_LIMIT = 256
"""Nested arrays of one encoded value. A list takes two of them, a dict three."""

ARRAY_LIMIT = 1024
"""Bytes of a numpy array up to which a tree keeps it as a value; larger ones become tensors."""

_NAN = "7ff8000000000000"


def encode(value: object, *, path: str = "") -> JSON:
    """The encoded form of ``value``, fit for `canonical.encode`.

    Raises ``StateError`` naming the place (``path`` and what is below it, with dots; without one ``value`` is the state)
    for a value that is not of the closed set, or nested too deep or in itself. Shared objects are written as often as
    they are met.
    """
    try:
        return _encode(value, 0)
    except Refused as refused:
        steps = [step[:60] if type(step) is str else shown(step) for step in reversed(refused.path)]
        if len(steps) > 12:
            steps = [*steps[:6], "…", *steps[-3:]]
        place = ".".join([path, *steps] if path else steps)
        raise StateError(f"{place or 'the state'}: {refused}") from None


class Encoded:
    """A value that was encoded before: it stands where the value does."""

    def __init__(self, json: JSON) -> None:
        self.json = json


def encoded(value: object) -> Encoded:
    """Encode a value once that is stored again and again, and never changes."""
    return Encoded(encode(value))


def shown(key: object) -> str:
    """The start of the representation of a key, for a message."""
    try:
        return f"{key!r:.60}"
    except Exception:  # a repr may raise anything: that of an integer of 5,000 digits does
        return f"<{type(key).__name__}>"


def _encode(value: object, depth: int) -> JSON:
    """``depth`` is the number of arrays around the value."""
    simple = _SIMPLE.get(type(value))
    if simple is not None:
        return simple(value)
    if depth > DEPTH_LIMIT - 5:  # a dict takes 3 levels, a complex number in it 2
        raise Refused("nested too deep, or contained in itself")
    container = _CONTAINERS.get(type(value))
    if container is not None:
        return container(value, depth)
    if isinstance(value, Enum):
        return ["enum", _class(type(value)), value.name, _encode(value.value, depth + 1)]
    if isinstance(value, tuple) and is_namedtuple(value):
        kind: Any = type(value)
        return ["namedtuple", kind.__name__, list(kind._fields), _items(value, depth + 2)]
    encoded = foreign.encode(value)
    if encoded is None:
        raise Refused(f"cannot store a value of type {_class(type(value))}; {instead_of(value)}")
    return encoded


def _text(value: str) -> JSON:
    if not value.isascii():
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise Refused("a string with a lone surrogate, which is not text; store bytes instead") from None
    return value


def _integer(value: int) -> JSON:
    return value if -MAX_INTEGER <= value <= MAX_INTEGER else ["int", f"{value:x}"]


def _float(value: float) -> JSON:
    if value == value:
        return ["float", repr(value)]
    bits = struct.pack(">d", value).hex()
    return ["float", "nan" if bits == _NAN else "nan:" + bits]


def _bytes(tag: str) -> Callable[[Any], JSON]:
    return lambda value: [tag, base64.b64encode(value).decode("ascii")]


def _clock(tag: str) -> Callable[[Any], JSON]:
    def encode_clock(value: datetime | time) -> JSON:
        if value.tzinfo is not None and type(value.tzinfo) is not timezone:
            raise Refused(f"time zone {value.tzinfo!r} is not a fixed offset; use datetime.timezone or a string")
        return [tag, value.isoformat(), 1] if value.fold else [tag, value.isoformat()]

    return encode_clock


_SIMPLE: dict[type, Callable[[Any], JSON]] = {
    type(None): lambda value: None,
    bool: lambda value: bool(value),
    int: _integer,
    float: _float,
    str: _text,
    complex: lambda value: ["complex", _float(value.real), _float(value.imag)],
    bytes: _bytes("bytes"),
    bytearray: _bytes("bytearray"),
    datetime: _clock("datetime"),
    time: _clock("time"),
    date: lambda value: ["date", value.isoformat()],
    timedelta: lambda value: ["timedelta", value.days, value.seconds, value.microseconds],
    Encoded: lambda value: value.json,
}


def _items(values: Iterable[object], depth: int) -> list[JSON]:
    """The encoded items, with ``depth`` arrays around each."""
    encoded: list[JSON] = []
    try:
        for value in values:
            encoded.append(_encode(value, depth))  # noqa: PERF401 - its length says which item was refused
    except Refused as refused:
        refused.path.append(len(encoded))
        raise
    return encoded


def _sequence(tag: str) -> Callable[[Any, int], JSON]:
    return lambda value, depth: [tag, _items(value, depth + 2)]


def _set(tag: str) -> Callable[[Any, int], JSON]:
    return lambda value, depth: [tag, sorted(_items(value, depth + 2), key=canonical.encode)]


def _mapping(tag: str) -> Callable[[Any, int], JSON]:
    def encode_mapping(value: dict[object, object], depth: int) -> JSON:
        pairs: list[JSON] = []
        key: object = None
        try:
            for key, item in value.items():
                pairs.append([_encode(key, depth + 3), _encode(item, depth + 3)])
        except Refused as refused:
            refused.path.append(key)
            raise
        return [tag, pairs]

    return encode_mapping


_CONTAINERS: dict[type, Callable[[Any, int], JSON]] = {
    list: _sequence("list"),
    tuple: _sequence("tuple"),
    set: _set("set"),
    frozenset: _set("frozenset"),
    dict: _mapping("dict"),
    OrderedDict: _mapping("OrderedDict"),
    Counter: _mapping("Counter"),
    defaultdict: _mapping("defaultdict"),
}


def _class(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def is_namedtuple(value: object) -> bool:
    """Whether the class of ``value`` was made by ``collections.namedtuple`` or ``typing.NamedTuple``."""
    kind = type(value)
    return isinstance(value, tuple) and isinstance(getattr(kind, "_fields", None), tuple) and hasattr(kind, "_make")


def decode(encoded: JSON, *, what: str, template: object = None) -> Any:
    """The value that was encoded.

    ``template`` is a live value of the same kind: it supplies the classes of enums and named tuples and the
    factories of defaultdicts, also inside containers (by key, position or field). One of another kind is
    ignored. Raises ``IntegrityError`` naming ``what`` for anything that `encode` does not return, and
    ``StateError`` when a package or a member of an enum that the value needs is not there.
    """
    try:
        return _decode(encoded, template, 0)
    except Malformed as error:
        raise IntegrityError(f"{what}: malformed value: {error}") from None
    except StateError as error:
        raise StateError(f"{what}: {error}") from None


def _decode(encoded: JSON, template: object, depth: int) -> Any:
    if type(encoded) is not list:
        if type(encoded) is dict:
            raise Malformed("an object")
        return encoded
    return check_tag(encoded, depth)(encoded, template, depth)


def check_tag(encoded: list[JSON], depth: int) -> Callable[[Any, Any, int], Any]:
    """Check the tag, the length and the depth of an encoded array. Returns what decodes it."""
    if depth >= DEPTH_LIMIT:
        raise Malformed(f"nested deeper than {DEPTH_LIMIT}")
    tag = encoded[0] if encoded else None
    found = _DECODERS.get(tag) if type(tag) is str else None
    if found is None or len(encoded) not in found[0]:
        raise Malformed(f"an array of {len(encoded)} that starts with {tag!r:.60}")
    return found[1]


def _decode_int(encoded: list[JSON], template: object, depth: int) -> Any:
    text = expect_string(encoded[1])
    value = int(text, 16) if re.fullmatch(r"-?[0-9a-f]+", text) else 0
    return _same(value, _integer(value), encoded)


def _decode_float(encoded: list[JSON], template: object, depth: int) -> Any:
    text = expect_string(encoded[1])
    bits = re.fullmatch(r"nan:([0-9a-f]{16})", text)
    value = math.nan
    if bits or text == "nan":
        (value,) = struct.unpack(">d", bytes.fromhex(bits[1] if bits else _NAN))
    elif len(text) <= 32:
        try:
            value = float(text)
        except ValueError:
            raise Malformed(f"float {text!r}") from None
    return _same(value, _float(value), encoded)


def _same(value: Any, again: JSON, encoded: list[JSON]) -> Any:
    """``value``, if it is written ``again`` as it was."""
    if not _equal(again, encoded):
        raise Malformed(f"{encoded!r:.60} is not written as it should be")
    return value


def _equal(one: JSON, other: JSON) -> bool:
    """Equality of JSON; that of Python holds ``True`` and 1 for the same."""
    return one == other and canonical.encode(one) == canonical.encode(other)


def _decode_complex(encoded: list[JSON], template: object, depth: int) -> complex:
    real, imaginary = (_decode(part, None, depth + 1) for part in encoded[1:])
    if type(real) is not float or type(imaginary) is not float:
        raise Malformed("a complex number needs two floats")
    return complex(real, imaginary)


def _decode_items(items: list[JSON], template: object, depth: int) -> list[Any]:
    """Each item with what stands at its position in the template, if that is a sequence."""
    likes = template if isinstance(template, (list, tuple)) else ()
    known = min(len(likes), len(items))
    return [_decode(item, like, depth) for item, like in zip(items, likes, strict=False)] + [
        _decode(item, None, depth) for item in items[known:]
    ]


def _decode_list(encoded: list[JSON], template: object, depth: int) -> list[Any]:
    return _decode_items(expect_array(encoded[1]), template, depth + 2)


def _decode_tuple(encoded: list[JSON], template: object, depth: int) -> tuple[Any, ...]:
    return tuple(_decode_list(encoded, template, depth))


def _decode_set(encoded: list[JSON], template: object, depth: int) -> set[Any] | frozenset[Any]:
    items = expect_array(encoded[1])
    order = [canonical.encode(item) for item in items]
    if order != sorted(order):
        raise Malformed("the items of a set are not in order")
    likes = _by_encoding(template if isinstance(template, (set, frozenset)) else (), items)
    values = [
        likes[written] if written in likes else _key(item, depth + 2)
        for item, written in zip(items, order, strict=True)
    ]
    found = set(values)
    if len(found) != len(items):
        raise _collision(items)
    return frozenset(found) if encoded[0] == "frozenset" else found


def _decode_mapping(encoded: list[JSON], template: object, depth: int) -> dict[Any, Any]:
    pairs = [expect_array(pair) for pair in expect_array(encoded[1])]
    if any(len(pair) != 2 for pair in pairs):
        raise Malformed("an item of a dict is not a pair")
    likes: Mapping[Any, Any] = template if isinstance(template, dict) else {}
    live_keys = _by_encoding(likes, [pair[0] for pair in pairs])
    found = _empty(expect_string(encoded[0]), template)
    for written, item in pairs:
        live = live_keys.get(canonical.encode(written)) if live_keys else None
        key = _key(written, depth + 3) if live is None else live
        found[key] = _decode(item, likes.get(key), depth + 3)
    if len(found) != len(pairs):
        raise _collision([pair[0] for pair in pairs])
    return found


def _empty(tag: str, template: object) -> dict[Any, Any]:
    if tag == "OrderedDict":
        return OrderedDict()
    if tag == "Counter":
        return Counter()
    if tag == "defaultdict" and isinstance(template, defaultdict):
        return defaultdict(template.default_factory)
    return {}


def _key(encoded: JSON, depth: int) -> Any:
    value = _decode(encoded, None, depth)
    try:
        hash(value)
    except TypeError:
        raise Malformed(f"a {type(value).__name__} as a key or in a set") from None
    return value


_CLASSED = (
    "enum",
    "namedtuple",
    "tuple",
    "frozenset",
)  # keys that have a class which can get lost, or hold such


def _by_encoding(likes: Iterable[object], written: list[JSON]) -> dict[bytes, Any]:
    """The keys of a template by their encoding, if any of the ``written`` ones may need a class from them."""
    if not any(type(key) is list and key and key[0] in _CLASSED for key in written):
        return {}
    return {canonical.encode(encode(like)): like for like in likes}


def _collision(written: list[JSON]) -> Exception:
    """The error for keys that are equal once decoded: corrupt, unless their classes have got lost."""
    if any(type(key) is list and key and key[0] in _CLASSED for key in written):
        return StateError("keys are equal without their classes; a template that has the classes is needed")
    return Malformed("a key occurs twice")


def _decode_enum(encoded: list[JSON], template: object, depth: int) -> Any:
    stored, name, written = expect_string(encoded[1]), encoded[2], encoded[3]
    value = _decode(written, None, depth + 1)
    if name is not None:
        expect_string(name)
    if not isinstance(template, Enum):
        return value
    kind = type(template)
    member = kind.__members__.get(name) if type(name) is str else None
    if _class(kind) != stored:  # moved or renamed, if it has the same member; else another kind
        return member if member is not None and _equal(encode(member.value), written) else value
    if member is not None:
        return member
    try:
        return kind(value)  # flags: combinations have no name of their own
    except ValueError:
        raise StateError(f"{stored} has no member {name} any more") from None


def _decode_namedtuple(encoded: list[JSON], template: object, depth: int) -> tuple[Any, ...]:
    expect_string(encoded[1])
    fields, items = [expect_string(field) for field in expect_array(encoded[2])], expect_array(encoded[3])
    if len(fields) != len(items):
        raise Malformed(f"a named tuple of {len(fields)} fields has {len(items)} values")
    kind: Any = type(template)
    if is_namedtuple(template) and kind._fields == tuple(fields):
        made: tuple[Any, ...] = kind._make(_decode_items(items, template, depth + 2))
        return made
    return tuple(_decode_items(items, None, depth + 2))


def _decode_clock(encoded: list[JSON], template: object, depth: int) -> Any:
    tag, text = encoded[0], expect_string(encoded[1])
    kind: Any = {"datetime": datetime, "time": time, "date": date}[expect_string(tag)]
    try:
        value = kind.fromisoformat(text)
    except ValueError:
        raise Malformed(f"{tag} {text[:60]!r}") from None
    if len(encoded) == 3 and type(encoded[2]) is int:
        value = value.replace(fold=1)
    return _same(value, _SIMPLE[kind](value), encoded)


def _decode_timedelta(encoded: list[JSON], template: object, depth: int) -> Any:
    numbers = [number for number in encoded[1:] if type(number) is int]
    if len(numbers) != 3:
        raise Malformed("a timedelta needs three integers")
    try:
        value = timedelta(*numbers)
    except OverflowError:
        raise Malformed(f"timedelta {encoded!r:.60}") from None
    return _same(value, _SIMPLE[timedelta](value), encoded)


_DECODERS: dict[str, tuple[tuple[int, ...], Callable[[Any, Any, int], Any]]] = {
    "int": ((2,), _decode_int),
    "float": ((2,), _decode_float),
    "complex": ((3,), _decode_complex),
    "bytes": ((2,), lambda encoded, template, depth: foreign.decode_base64(encoded[1])),
    "bytearray": ((2,), lambda encoded, template, depth: bytearray(foreign.decode_base64(encoded[1]))),
    "list": ((2,), _decode_list),
    "tuple": ((2,), _decode_tuple),
    "set": ((2,), _decode_set),
    "frozenset": ((2,), _decode_set),
    "dict": ((2,), _decode_mapping),
    "OrderedDict": ((2,), _decode_mapping),
    "Counter": ((2,), _decode_mapping),
    "defaultdict": ((2,), _decode_mapping),
    "numpy": ((3,), lambda encoded, template, depth: foreign.decode_scalar(encoded[1], encoded[2])),
    "ndarray": ((4,), lambda encoded, template, depth: foreign.decode_array(*encoded[1:])),
    "torch.dtype": ((2,), lambda encoded, template, depth: foreign.decode_dtype(encoded[1])),
    "torch.device": ((2,), lambda encoded, template, depth: foreign.decode_device(encoded[1])),
    "torch.Size": ((2,), lambda encoded, template, depth: foreign.decode_size(encoded[1])),
    "datetime": ((2, 3), _decode_clock),
    "time": ((2, 3), _decode_clock),
    "date": ((2,), _decode_clock),
    "timedelta": ((4,), _decode_timedelta),
    "enum": ((4,), _decode_enum),
    "namedtuple": ((4,), _decode_namedtuple),
}
