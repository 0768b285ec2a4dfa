"""Protects encoded values: each comes back as it was, by type and by bits; anything else is refused by name."""

from __future__ import annotations

import enum
import math
import random
import re
import struct
import subprocess
import sys
from argparse import Namespace
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from datetime import date, datetime, time, timedelta, timezone
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from zoneinfo import ZoneInfo

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.errors import IntegrityError, StateError
from tierckpt.format import canonical, display, values

Point = namedtuple("Point", "x y")


class Size(NamedTuple):
    x: int
    y: Any


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


class Level(enum.IntEnum):
    LOW = 1


class Access(enum.Flag):
    READ = 1
    WRITE = 2


def round_trip(value: Any, template: Any = None) -> Any:
    """Through the bytes, which must be canonical and the same again."""
    data = canonical.encode(values.encode(value))
    encoded = canonical.decode(data, what="x", depth=values.DEPTH_LIMIT)
    found = values.decode(encoded, what="x", template=template)
    assert canonical.encode(values.encode(found)) == data or template is not value
    display.to_plain(encoded)
    return found


def canonical_form(value: Any) -> bytes:
    return canonical.encode(values.encode(value))


def same(one: Any, other: Any) -> bool:
    """Equal in type and bits, all the way down, dicts in their order too."""
    if type(one) is not type(other):
        return False
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, (set, frozenset)):
        return sorted(map(canonical_form, one)) == sorted(map(canonical_form, other))
    if isinstance(one, (np.ndarray, np.generic)):
        return bool(one.dtype == other.dtype) and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, (datetime, time)):
        return bool(one == other) and one.fold == other.fold and one.tzinfo == other.tzinfo
    return bool(one == other)


zones = st.none() | st.integers(-1439, 1439).map(lambda minutes: timezone(timedelta(minutes=minutes)))
any_float = st.binary(min_size=8, max_size=8).map(lambda b: struct.unpack("<d", b)[0]) | st.floats()
hashable = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | any_float
    | st.text(st.characters(exclude_categories=["Cs"]))
    | st.binary()
    | st.datetimes(timezones=zones)
    | st.times(timezones=zones)
    | st.dates()
    | st.timedeltas(),
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=5,
)
leaves = hashable | st.builds(complex, any_float, any_float) | st.binary().map(bytearray)
trees = st.recursive(
    leaves,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4).map(OrderedDict)
        | st.dictionaries(hashable, inner, max_size=4).map(Counter)
        | st.sets(hashable, max_size=4)
    ),
    max_leaves=15,
)


@given(trees)
def test_round_trip(value: Any) -> None:
    assert same(round_trip(value), value)


@given(st.binary(min_size=8, max_size=8))
def test_floats_keep_their_bits(bits: bytes) -> None:
    (value,) = struct.unpack(">d", bits)
    assert struct.pack(">d", round_trip(value)) == bits


@pytest.mark.parametrize(
    "value",
    [
        0,
        -0.0,
        math.inf,
        -math.inf,
        math.nan,
        5e-324,
        2**53,
        -(2**53),
        2**53 - 1,
        10**5000,  # more digits than Python converts to decimal
        -(1 << 100_000),
        "",
        "\0",
        "\U0001f600",
        {1: "x", -3: "y", (1, 2): "t", None: "n", 2.5: "f", "1": 0},
        {True: "z"},
        Counter({25: 2}),
        [[], {}, (), set(), frozenset(), OrderedDict(), Counter(), b"", bytearray()],
        datetime(2026, 10, 25, 2, 30, fold=1),
        datetime(1, 1, 1, tzinfo=timezone.utc),
        time(2, 30, fold=1, tzinfo=timezone(timedelta(seconds=-1))),
        timedelta.min,
        np.float32(1.1),
        np.bool_(True),
        np.int64(-5),
        np.str_("né"),
        np.str_(""),
        np.bytes_(b"ab"),
        np.datetime64("2026-01-01", "ns"),
        np.timedelta64(3),
        np.complex128(1 - 0j),
        np.arange(6, dtype=">i4").reshape(2, 3),
        np.arange(24.0).reshape(2, 3, 4).transpose(2, 0, 1),
        np.array(3.5, dtype=np.float16),
        np.zeros((0, 5), dtype=np.uint8),
        np.array(["a", "bcd"]),
        np.array([], dtype="U3"),
        np.array([b"x\0y"], dtype="V3"),
        {np.int32(7): np.array([True])},
        torch.float8_e4m3fn,
        torch.device("cuda:3"),
        torch.device("cpu"),
        torch.Size([2, 0, 3]),
        torch.Size([]),
        {torch.bfloat16: {torch.device("meta")}},
    ],
    ids=lambda value: f"{type(value).__name__}-{values.shown(value)}",
)
def test_examples_come_back(value: Any) -> None:
    assert same(round_trip(value), value)


def test_arrays_come_back_writable_and_their_own() -> None:
    value = np.arange(4)
    found = round_trip(value)
    value[:] = 9
    found += 1
    assert found.tolist() == [1, 2, 3, 4]


GOLDEN: list[tuple[Any, str]] = [
    (1, "1"),
    (True, "true"),
    (2**53, '["int","20000000000000"]'),
    (-(2**64), '["int","-10000000000000000"]'),
    (0.1, '["float","0.1"]'),
    (1e22, '["float","1e+22"]'),
    (math.nan, '["float","nan"]'),
    (struct.unpack(">d", bytes.fromhex("fff8000000000001"))[0], '["float","nan:fff8000000000001"]'),
    (1 - 2j, '["complex",["float","1.0"],["float","-2.0"]]'),
    (b"\xff", '["bytes","/w=="]'),
    ([(1,)], '["list",[["tuple",[1]]]]'),
    ({"b", "a"}, '["set",["a","b"]]'),
    ({"k": None}, '["dict",[["k",null]]]'),
    (np.float32(1), '["numpy","<f4","AACAPw=="]'),
    (np.arange(2, dtype=">i2"), '["ndarray",">i2",[2],"AAABAA=="]'),
    (torch.bfloat16, '["torch.dtype","bfloat16"]'),
    (torch.device("cuda", 1), '["torch.device","cuda:1"]'),
    (torch.Size([2, 3]), '["torch.Size",[2,3]]'),
    (datetime(2026, 1, 2, 3, 4, 5, 6, timezone.utc), '["datetime","2026-01-02T03:04:05.000006+00:00"]'),
    (date(2026, 1, 2), '["date","2026-01-02"]'),
    (timedelta(-1, 2, 3), '["timedelta",-1,2,3]'),
    (Color.RED, f'["enum","{__name__}.Color","RED",1]'),
    (Point(1, 2), '["namedtuple","Point",["x","y"],[1,2]]'),
]


@pytest.mark.parametrize(("value", "text"), GOLDEN, ids=[text[:30] for _, text in GOLDEN])
def test_golden(value: Any, text: str) -> None:
    assert canonical.encode(values.encode(value)).decode() == text


def test_classes_come_back_only_through_a_template() -> None:
    value = {"c": Color.BLUE, "p": [Point(1, Color.RED)], "d": defaultdict(list, a=[1]), "l": Level.LOW}
    plain = round_trip(value)
    assert same(plain, {"c": "b", "p": [(1, 1)], "d": {"a": [1]}, "l": 1})
    template = {"c": Color.RED, "p": [Point(0, Color.BLUE)], "d": defaultdict(list), "l": Level.LOW}
    found = round_trip(value, template)
    assert found == value and type(found["p"][0]) is Point and type(found["l"]) is Level
    assert found["d"].default_factory is list


def test_keys_get_their_classes_from_a_template() -> None:
    value = {Color.RED: 1, Point(1, 2): {Color.BLUE}}
    found = round_trip(value, {Color.RED: 0, Point(1, 2): {Color.BLUE}})
    assert found == value and {type(key) for key in found} == {Color, Point}
    assert round_trip(value) == {1: 1, (1, 2): {"b"}}


def test_keys_that_only_their_classes_tell_apart_need_the_template() -> None:
    value = {Color.RED: "a", 1: "b"}
    assert round_trip(value, value) == value
    with pytest.raises(StateError, match="classes"):
        round_trip(value)
    with pytest.raises(StateError, match="classes"):
        round_trip({Color.RED, 1})


def test_flags_come_back_in_combination() -> None:
    both = Access.READ | Access.WRITE
    assert round_trip(both, Access.READ) is both
    assert round_trip(both) == 3
    assert round_trip(Access(0), both) is Access(0)


OTHER_KINDS = [None, 1, "x", [], {}, Size(1, 2), Level.LOW, torch.float32, object()]


@pytest.mark.parametrize("template", OTHER_KINDS, ids=lambda value: type(value).__name__)
def test_templates_of_another_kind_are_ignored(template: Any) -> None:
    for value in ({"a": 1}, [1, 2], 3.5, {1}, "s", b"x"):
        assert same(round_trip(value, template), value)
    assert round_trip(Color.BLUE, template) == "b"
    assert type(round_trip(Point(1, 2), Color.RED)) is tuple


def test_a_member_that_is_gone_is_said() -> None:
    encoded: Any = ["enum", f"{__name__}.Color", "GREEN", 5]
    assert values.decode(encoded, what="x") == 5
    with pytest.raises(StateError, match=r"x: .*Color has no member GREEN"):
        values.decode(encoded, what="x", template=Color.RED)


class Unknown:
    pass


class Sub(dict):  # type: ignore[type-arg]
    pass


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (Unknown(), r"state\.k\.1: .*test_values\.Unknown"),
        (Sub(), "Sub"),
        (lambda: 1, "function"),
        (object, "type"),
        ("\ud800", "surrogate"),
        (torch.zeros(1), "tensor"),
        (np.array([None]), "dtype object"),
        (np.zeros(2, dtype="i4,f4"), "dtype"),
        (np.longdouble(1), "dtype"),
        (np.zeros(1 << 20), "bytes inside a value"),
        (np.ma.array([1]), "MaskedArray"),
        (datetime(2026, 1, 1, tzinfo=ZoneInfo("UTC")), "fixed offset"),
        (np.random.default_rng(), "Generator"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_other_values_are_refused_by_name(value: Any, message: str) -> None:
    for nested in ({"k": (0, value)}, {"k": [0, value]}):
        with pytest.raises(StateError, match=message) as caught:
            values.encode(nested, path="state")
        assert str(caught.value).startswith("state.k.1: ")


class OnlySaves:
    def state_dict(self) -> dict[str, int]:
        return {}


class OnlyLoads:
    def load_state_dict(self, state: dict[str, int]) -> None: ...


@pytest.mark.parametrize(
    ("value", "hint"),
    [
        (Unknown(), r"dates, enums.*tensors, modules, and objects with both state_dict\(\) and load_state_dict\(\)"),
        (OnlySaves(), r"has state_dict\(\) but no load_state_dict\(\)"),
        (OnlyLoads(), r"has load_state_dict\(\) but no state_dict\(\)"),
        (OnlySaves, "code"),
        (Sub(), r"dict\(…\)"),
        (deque(), r"list\(…\)"),
        (Namespace(), r"vars\(…\)"),
        (SimpleNamespace(), r"vars\(…\)"),
        (Path("x"), r"str\(…\)"),
        (random.Random(), r"getstate\(\)"),
        (torch.Generator(), r"get_state\(\)"),
        (np.random.default_rng(), r"bit_generator\.state"),
        (np.random.RandomState(), r"get_state\(\)"),
        (torch.utils.data.DataLoader([0]), r"tierckpt\.DataPosition"),
        (lambda: 1, "code"),
        (len, "code"),
        (OnlySaves().state_dict, "code"),
        (torch, "code"),
        (partial(len), "code"),
    ],
    ids=lambda x: str(x)[:20],
)
def test_what_to_store_instead_is_told(value: Any, hint: str) -> None:
    with pytest.raises(StateError, match=f"^x: cannot store a value of type .*; .*{hint}"):
        values.encode(value, path="x")


@pytest.mark.parametrize(
    "instead",
    [
        vars(Namespace(lr=1.5)),
        random.Random(1).getstate(),
        np.random.default_rng(1).bit_generator.state,
        np.random.RandomState(1).get_state(),
    ],
)
def test_what_is_told_to_store_can_be_stored(instead: Any) -> None:
    assert same(round_trip(instead), instead)


def test_cycles_and_depth_are_errors() -> None:
    loop: dict[str, Any] = {}
    loop["a"] = [loop, loop]
    with pytest.raises(StateError, match=r"^state\.a\.0\.a\..*: .*contained in itself"):
        values.encode(loop, path="state")
    deep: Any = 1j
    for _ in range(84):
        deep = {"a": deep}
    assert same(round_trip(deep), deep)
    for _ in range(10):
        deep = {"a": deep}
    with pytest.raises(StateError, match="too deep"):
        values.encode(deep)


MALFORMED: list[Any] = [
    {},
    [],
    [1],
    [None],
    [["list", []]],
    ["list"],
    ["list", {}],
    ["list", [], []],
    ["nope", 1],
    ["int", "5"],
    ["int", 5],
    ["int", "0x20000000000000"],
    ["int", "020000000000000"],
    ["int", "2000_0000000000"],
    ["int", "+20000000000000"],
    ["int", "-"],
    ["int", "A0000000000000"],
    ["float", "1"],
    ["float", "1.00"],
    ["float", " 1.0"],
    ["float", "1_0.0"],
    ["float", "NaN"],
    ["float", "-nan"],
    ["float", "nan:7ff8000000000000"],
    ["float", "nan:3ff0000000000000"],
    ["float", "nan:7FF8000000000001"],
    ["float", "1" * 40],
    ["float", 1],
    ["complex", 1, 2],
    ["complex", ["float", "1.0"], True],
    ["bytes", "/w="],
    ["bytes", "/x=="],
    ["bytes", "/w==\n"],
    ["bytes", "_w=="],
    ["bytes", None],
    ["set", ["b", "a"]],
    ["set", ["a", "a"]],
    ["set", [1, True]],
    ["set", [["list", []]]],
    ["dict", [["a"]]],
    ["dict", [["a", 1, 2]]],
    ["dict", [["a", 1], ["a", 2]]],
    ["dict", [[1, 1], [True, 2]]],
    ["dict", [[["list", []], 1]]],
    ["dict", ["ab"]],
    ["numpy", "<f4", "AAAA"],
    ["numpy", "|O", "AAAAAAAAAAA="],
    ["numpy", "f4", "AACAPw=="],
    ["numpy", "<f16", "AAAAAAAAAAAAAAAAAAAAAA=="],
    ["numpy", "<U1", "////fw=="],
    ["numpy", "|f4", "AACAPw=="],
    ["ndarray", "<f4", [-1], ""],
    ["ndarray", "<f4", [2], "AACAPw=="],
    ["ndarray", "<f4", [True], "AACAPw=="],
    ["ndarray", "<f4", [0] * 65, ""],
    ["ndarray", "|V9999999", [9999999, 99999999, 9999999], ""],
    ["torch.dtype", "Tensor"],
    ["torch.dtype", "os.system"],
    ["torch.dtype", "float"],
    ["torch.device", "cuda:01"],
    ["torch.device", "cuda:-1"],
    ["torch.device", 5],
    ["torch.Size", [1.5]],
    ["torch.Size", [True]],
    ["datetime", "2026-01-02"],
    ["datetime", "2026-01-02 03:04:05"],
    ["datetime", "2026-01-02T03:04:05", True],
    ["datetime", "2026-01-02T03:04:05", 0],
    ["date", "20260102"],
    ["date", "2026-01-02", 1],
    ["time", "25:00:00"],
    ["timedelta", 0, 86400, 0],
    ["timedelta", 0, True, 0],
    ["timedelta", 10**12, 0, 0],
    ["enum", 1, "RED", 1],
    ["enum", "a.B", 5, 1],
    ["enum", "a.B", "RED", ["no"]],
    ["namedtuple", "P", ["x"], [1, 2]],
    ["namedtuple", "P", [1], [1]],
]


@pytest.mark.parametrize("encoded", MALFORMED, ids=lambda e: str(e)[:40])
def test_malformed_values_are_refused(encoded: Any) -> None:
    try:
        canonical.encode(encoded)
    except (TypeError, ValueError):
        return  # cannot come out of a document
    with pytest.raises((IntegrityError, StateError), match="the thing"):
        values.decode(encoded, what="the thing")


def test_display_refuses_malformed_values_too() -> None:
    for encoded in MALFORMED[:20]:
        with pytest.raises(IntegrityError, match="the thing"):
            display.to_plain(encoded, what="the thing")


@given(trees, st.data())
def test_mutations_raise_only_what_they_should(value: Any, data: st.DataObject) -> None:
    original = canonical.encode(values.encode(value))
    at = data.draw(st.integers(0, len(original) - 1))
    mutated = original[:at] + data.draw(st.binary(max_size=2)) + original[at + 1 :]
    try:
        encoded = canonical.decode(mutated, what="x", depth=values.DEPTH_LIMIT)
        display.to_plain(encoded)
        found = values.decode(encoded, what="x")
    except (IntegrityError, StateError):
        return
    assert canonical.encode(values.encode(found)) == mutated or b"enum" in mutated or b"namedtuple" in mutated


def test_hostile_depth_does_not_reach_the_stack() -> None:
    encoded: Any = 1
    for _ in range(5000):
        encoded = ["list", [encoded]]
    with pytest.raises(IntegrityError, match="deeper"):
        values.decode(encoded, what="x")
    with pytest.raises(IntegrityError, match="deeper"):
        display.to_plain(encoded)


def test_plain_shows_everything_without_packages() -> None:
    value = {
        "a": (1, 2.5, math.inf, 2**60),
        "n": np.arange(2, dtype="<i2"),
        "d": torch.float32,
        "k": {1: b"x"},
        "t": date(2026, 1, 2),
        "p": Point(Color.RED, None),
    }
    assert display.to_plain(values.encode(value)) == {
        "a": [1, 2.5, "inf", 2**60],
        "n": {"ndarray": "<i2", "shape": [2], "base64": "AAABAA=="},
        "d": {"torch.dtype": "float32"},
        "k": [[1, {"bytes": "eA=="}]],
        "t": "2026-01-02",
        "p": {"x": 1, "y": None},
    }


def test_neither_torch_nor_numpy_is_imported_before_it_is_needed() -> None:
    code = """
import sys
from tierckpt.errors import StateError
from tierckpt.format import values, display, chain, manifest, shard, names
display.to_plain(["numpy", "<f4", "AACAPw=="])
values.encode({"a": [1, 2.5]})
assert not {"torch", "numpy", "cryptography"} & set(sys.modules), sys.modules.keys()
sys.modules["numpy"] = None
try:
    values.decode(["list", [["numpy", "<f4", "AACAPw=="]]], what="the thing")
except StateError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert re.search("the thing: .*pip install numpy", done.stdout), done.stderr
