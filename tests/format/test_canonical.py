"""Protects canonical JSON: one value has one form, everything else is refused, and hostile bytes stay harmless."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.errors import IntegrityError
from tierckpt.format import canonical
from tierckpt.format.canonical import MAX_INTEGER, Fields

text = st.text(st.characters(exclude_categories=["Cs"]))
scalars = st.none() | st.booleans() | st.integers(-MAX_INTEGER, MAX_INTEGER) | text
documents = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(max_codepoint=127)), inner, max_size=4)
    ),
    max_leaves=20,
)


@given(documents)
def test_round_trip(value: Any) -> None:
    data = canonical.encode(value)
    again = canonical.decode(data, what="x")
    assert again == value
    assert canonical.encode(again) == data


@given(documents)
def test_the_form_is_that_of_rfc_8785(value: Any) -> None:
    rfc8785 = pytest.importorskip("rfc8785")
    assert canonical.encode(value) == rfc8785.dumps(value)


def test_golden() -> None:
    value: Any = {"b": [1, -2, True, None], "a": 'é\n\x01"\\/\x7f', "Z": {}}
    assert canonical.encode(value) == '{"Z":{},"a":"é\\n\\u0001\\"\\\\/\x7f","b":[1,-2,true,null]}'.encode()


class Text(str):
    pass


cycle: list[Any] = []
cycle.append(cycle)


@pytest.mark.parametrize(
    "value",
    [1.0, [0.5], MAX_INTEGER + 1, {"a": -(2**53)}, {1: 2}, {"é": 1}, "\ud800", (1,), {"a": (1,)}, b"", Text(), cycle],
    ids=repr,
)
def test_encode_refuses_what_is_not_of_the_subset(value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        canonical.encode(value)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b" 1",
        b"1 ",
        b"1\n",
        b"[1, 2]",
        b'{"b":1,"a":2}',
        b'{"a":1,"a":1}',
        b"1.0",
        b"1e3",
        b"-0",
        b"01",
        b"NaN",
        b"Infinity",
        b"9007199254740992",
        b"-9007199254740992",
        b"1" * 5000,
        b'"\\u0041"',
        b'"\\/"',
        b'"\\ud800"',
        b'"\xed\xa0\x80"',
        b'"\xff"',
        b'"a\nb"',
        b'"\\n\\u000A"',
        b"\xef\xbb\xbf1",
        '{"é":1}'.encode(),
        b"[1,]",
        b"[1",
        b"tru",
        b"1 2",
    ],
)
def test_decode_refuses_other_forms(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="the thing"):
        canonical.decode(data, what="the thing")


def test_depth_is_counted_exactly() -> None:
    def nested(depth: int) -> bytes:
        return b"[" * depth + b"]" * depth

    for depth in (1, 3, 4, 5, 64):
        assert canonical.decode(nested(depth), what="x", depth=depth) is not None
        with pytest.raises(IntegrityError, match="deeper"):
            canonical.decode(nested(depth + 1), what="x", depth=depth)
    mixed = b'{"a":[{"b":[["[[[[",{"c\\"[[":"\\\\"}]]}]}'
    assert canonical.decode(mixed, what="x", depth=6) == json.loads(mixed)
    with pytest.raises(IntegrityError, match="deeper"):
        canonical.decode(mixed, what="x", depth=5)


@pytest.mark.parametrize(
    "data",
    [
        b"[" * 4_000_000,
        b'{"a":' * 800_000,
        b'["\\"[",' * 500_000,
        b'"' * 4_000_001,
        b'"' + b"\\" * 4_000_000,
        b"[" + b"[],]" * 1_000_000,
        b"]" * 100_000 + b"[" * 100_000,
    ],
    ids=["open", "objects", "escapes", "quotes", "backslashes", "shallow", "closed"],
)
def test_hostile_bytes_are_refused_quickly(data: bytes) -> None:
    start = time.process_time()
    with pytest.raises(IntegrityError):
        canonical.decode(data, what="x")
    assert time.process_time() - start < 10  # quadratic would be hours


def test_size_is_limited() -> None:
    with pytest.raises(IntegrityError, match="12 bytes, but at most 11"):
        canonical.decode(b'"0123456789"', what="x", limit=11)


@given(documents, st.data())
def test_mutations_are_refused_or_are_other_values(value: Any, data: st.DataObject) -> None:
    """No other bytes mean the same value: whoever may change bytes cannot keep the meaning."""
    original = canonical.encode(value)
    at = data.draw(st.integers(0, len(original) - 1))
    mutated = original[:at] + data.draw(st.binary(max_size=3)) + original[at + 1 :]
    try:
        found = canonical.decode(mutated, what="x")
    except IntegrityError:
        return
    assert (mutated == original) == (canonical.encode(found) == original)


def test_fields_name_what_is_wrong() -> None:
    keys = ("a", "b")
    others: list[Any] = [[], None, {"a": 1}, {"a": 1, "b": 2, "c": 3}, {"a": 1, "c": 2}]
    for value in others:
        with pytest.raises(IntegrityError, match="the thing"):
            Fields(value, keys, what="the thing")
    fields = Fields({"a": True, "b": "x"}, keys, what="the thing")
    for wrong in (fields.integer, fields.string, fields.hex, fields.array):
        with pytest.raises(IntegrityError, match="the thing: a must be"):
            wrong("a")
    with pytest.raises(IntegrityError, match="b must be true or false"):
        fields.boolean("b")
    with pytest.raises(IntegrityError, match="the thing: b"):
        fields.fields("b", ())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": 2}, "a newer tierckpt is needed"),
        ({"format": True}, "format true is not 1"),
        ({"kind": "other"}, "kind must be 'store'"),
        ({"requires": ["erasure"]}, "requires .'erasure'., unknown here"),
        ({"requires": [1]}, "array of strings"),
        ({"more": 1}, "unknown keys .'more'."),
    ],
)
def test_documents_say_what_they_are(change: dict[str, Any], message: str) -> None:
    good: dict[str, Any] = {"format": 1, "kind": "store", "requires": []}
    assert canonical.read_document(canonical.encode(good), "store", ("requires",), what="x").array("requires") == []
    with pytest.raises(IntegrityError, match=message):
        canonical.read_document(canonical.encode(good | change), "store", ("requires",), what="x")
