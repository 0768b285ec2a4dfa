"""Protects the header of shards: a pure function of the layout, readable by others, and strict about every byte."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.errors import IntegrityError, LayoutError
from tierckpt.format import shard
from tierckpt.format.shard import ALIGNMENT, DTYPES, Piece

LAYOUT = "ab" * 32

shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)
tensors = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="#\0"), min_size=1, max_size=8).filter(
    lambda name: name not in ("~values", "__metadata__")
)


@st.composite
def piece_lists(draw: st.DrawFn) -> list[Piece]:
    pieces: list[Piece] = []
    for tensor in draw(st.lists(tensors, max_size=6, unique=True)):
        dtype, count = draw(st.sampled_from(sorted(DTYPES))), draw(st.integers(1, 3))
        pieces += [(tensor, -1 if count == 1 else k, dtype, draw(shapes)) for k in range(count)]
    return pieces


def build(pieces: list[Piece], blob: int | None = 1024) -> shard.Header:
    return shard.build(pieces, layout=LAYOUT, rank=3, blob=blob)


@given(piece_lists(), st.randoms(use_true_random=False))
def test_build_parse_check(pieces: list[Piece], random: Any) -> None:
    header = build(pieces)
    shuffled = list(pieces)
    random.shuffle(shuffled)
    assert build(shuffled) == header
    found = shard.parse(header.data, name="x", size=header.size)
    assert (found.layout, found.rank, found.size) == (LAYOUT, 3, header.size)
    assert [(e.name, e.tensor, e.k, e.offset, e.nbytes) for e in found.entries] == [
        (e.name, e.tensor, e.k, e.offset, e.nbytes) for e in header.entries
    ]
    assert found.blob is not None and found.blob.nbytes == 1024
    checked = shard.check(header.data, pieces, layout=LAYOUT, rank=3, blob=True, name="x", size=header.size)
    assert checked == header


@given(piece_lists())
def test_entries_are_aligned_and_without_holes(pieces: list[Piece]) -> None:
    header = build(pieces)
    assert header.header_size % ALIGNMENT == 0
    at = header.header_size
    for entry in header.entries:
        assert entry.offset == at
        assert entry.dtype is None or at % DTYPES[entry.dtype].size == 0
        at += entry.nbytes
    assert at == header.size


def test_golden() -> None:
    pieces: list[Piece] = [
        ("b", -1, "uint8", (3,)),
        ("a", 1, "float32", (2, 2)),
        ("a", 0, "float32", (1,)),
        ('é"', -1, "complex64", ()),
        ("f8", -1, "float8_e4m3fnuz", (2,)),
        ("c", -1, "bfloat16", (1, 4)),
    ]
    text = (
        '{"__metadata__":{"format":"pt","tierckpt":"shard 1","layout":"' + LAYOUT + '","rank":"3"},'
        '"é\\"":{"dtype":"U8","shape":[8],"data_offsets":[0,8]},'
        '"a#0":{"dtype":"F32","shape":[1],"data_offsets":[8,12]},'
        '"a#1":{"dtype":"F32","shape":[2,2],"data_offsets":[12,28]},'
        '"c":{"dtype":"BF16","shape":[1,4],"data_offsets":[28,36]},'
        '"b":{"dtype":"U8","shape":[3],"data_offsets":[36,39]},'
        '"f8":{"dtype":"U8","shape":[2,1],"data_offsets":[39,41]},'
        '"~values":{"dtype":"U8","shape":[1024],"data_offsets":[41,1065]}}'
    ).encode()
    assert build(pieces).data == (4088).to_bytes(8, "little") + text.ljust(4088)


def test_every_dtype_of_torch_is_known() -> None:
    ours = {name: size for name, (size, _) in DTYPES.items()}
    theirs = {
        str(dtype).removeprefix("torch."): dtype.itemsize
        for dtype in vars(torch).values()
        if isinstance(dtype, torch.dtype)
    }
    missing = {name for name in theirs if name not in ours}
    # Quantized and sub-byte placeholders, which no tensor of a training state has.
    assert {name for name in missing if not name.startswith(("q", "uint", "int", "bits", "bcomplex"))} == set()
    assert all(theirs[name] == size for name, size in ours.items() if name in theirs)


def test_other_readers_open_the_file(tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.torch")
    pieces: list[Piece] = [(name, -1, name, (2, 3)) for name in DTYPES]
    header = build(pieces)
    data = bytes(range(256)) * (header.size // 256 + 1)
    path = tmp_path / "x.safetensors"
    path.write_bytes(header.data + data[: header.size - header.header_size])
    found = safetensors.load_file(path)
    assert found.keys() == {*DTYPES, "~values"}
    for name, (size, stored) in DTYPES.items():
        bytes_only = stored == "U8" and name != "uint8"
        assert found[name].dtype == (torch.uint8 if bytes_only else getattr(torch, name))
        assert found[name].shape == ((2, 3, size) if bytes_only else (2, 3))


@pytest.mark.parametrize(
    ("pieces", "blob", "message"),
    [
        ([("a", -1, "float7", (1,))], None, "float7"),
        ([("a", -1, "int8", (2, 0))], None, "no elements"),
        ([("a", -1, "int8", (1,)), ("a", -1, "int8", (1,))], None, "two pieces of one name"),
        ([], None, "has no shard"),
        ([], 1000, "capacity"),
        ([], 0, "capacity"),
    ],
)
def test_build_refuses(pieces: list[Piece], blob: int | None, message: str) -> None:
    with pytest.raises(LayoutError, match=message):
        build(pieces, blob)


def test_headers_above_the_limit_are_refused_when_planning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shard, "HEADER_LIMIT", 10_000)
    with pytest.raises(LayoutError, match="200 pieces, but at most 10000"):
        build([(f"tensor{i}", -1, "int8", (1,)) for i in range(200)], None)


@pytest.mark.parametrize(
    "first", [b"", b"\0" * 7, b"\xff" * 8, (4089).to_bytes(8, "little"), (0).to_bytes(8, "little")]
)
def test_header_size_refuses(first: bytes) -> None:
    assert shard.header_size((4088).to_bytes(8, "little") + b"more", name="x", size=5000) == 4096
    with pytest.raises(IntegrityError, match="g0001/shard: a shard of"):
        shard.header_size(first, name="g0001/shard", size=10**12)
    with pytest.raises(IntegrityError):
        shard.header_size((4088).to_bytes(8, "little"), name="x", size=4096)


ENTRIES: dict[str, Any] = {
    "__metadata__": {"format": "pt", "tierckpt": "shard 1", "layout": LAYOUT, "rank": "3"},
    "w": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "p#0": {"dtype": "U8", "shape": [4], "data_offsets": [16, 20]},
    "p#1": {"dtype": "U8", "shape": [4], "data_offsets": [20, 24]},
    "~values": {"dtype": "U8", "shape": [1024], "data_offsets": [24, 1048]},
}


def written(entries: Any, *, pad: int = 4096, separators: tuple[str, str] = (",", ":")) -> tuple[bytes, int]:
    text = json.dumps(entries, separators=separators, ensure_ascii=False).encode()
    data = (pad - 8).to_bytes(8, "little") + text.ljust(pad - 8)
    return data, pad + 1048


def with_entry(name: str, **changes: Any) -> dict[str, Any]:
    return {key: {**entry, **changes} if key == name else entry for key, entry in ENTRIES.items()}


def renamed(**names: str) -> dict[str, Any]:
    return {names.get(key.replace("#", "_"), key): entry for key, entry in ENTRIES.items()}


def reordered(*order: str) -> dict[str, Any]:
    return {key: ENTRIES[key] for key in ("__metadata__", *order)}


def test_the_example_is_good() -> None:
    data, size = written(ENTRIES)
    assert len(shard.parse(data, name="x", size=size).entries) == 4


HOSTILE: dict[str, Callable[[], tuple[bytes, int]]] = {
    "overlap": lambda: written(with_entry("p#0", data_offsets=[12, 16])),
    "hole": lambda: written(with_entry("p#1", data_offsets=[21, 25])),
    "unknown dtype": lambda: written(with_entry("w", dtype="F4")),
    "dtype size": lambda: written(with_entry("w", dtype="F64")),
    "shape": lambda: written(with_entry("w", shape=[2, 3])),
    "negative": lambda: written(with_entry("w", shape=[-2, -2])),
    "empty": lambda: written(with_entry("w", shape=[0], data_offsets=[0, 0])),
    "overflow": lambda: written(with_entry("w", shape=[2**32, 2**32, 2])),
    "huge": lambda: written(with_entry("w", shape=[10**400])),
    "boolean": lambda: written(with_entry("w", shape=[True, 4])),
    "extra key": lambda: written(with_entry("w", extra=1)),
    "extra metadata": lambda: written(with_entry("__metadata__", extra="x")),
    "rank": lambda: written(with_entry("__metadata__", rank="03")),
    "layout": lambda: written(with_entry("__metadata__", layout="x")),
    "not first": lambda: written({**reordered("w"), **ENTRIES} | {"w": 1}),
    "order of keys": lambda: written({**ENTRIES, "w": {"shape": [2, 2], "dtype": "F32", "data_offsets": [0, 16]}}),
    "single numbered": lambda: written(renamed(p_0="q#0", p_1="p")),
    "number twice": lambda: written(renamed(p_1="p#00")),
    "number skipped": lambda: written(renamed(p_1="p#2")),
    "number and none": lambda: written(renamed(p_0="p", p_1="p#0")),
    "numbered from 1": lambda: written(renamed(p_0="p#1", p_1="p#2")),
    "two signs": lambda: written(renamed(p_0="p#0#0")),
    "empty name": lambda: written(renamed(w="")),
    "blob of other size": lambda: written(with_entry("~values", shape=[512, 2])),
    "blob of other dtype": lambda: written(with_entry("~values", dtype="I8")),
    "nothing": lambda: written({"__metadata__": ENTRIES["__metadata__"]}),
    "spaces": lambda: written(ENTRIES, separators=(", ", ": ")),
    "padding": lambda: written(ENTRIES, pad=8192),
    "array": lambda: written([ENTRIES]),
    "deep": lambda: ((4088).to_bytes(8, "little") + b"[" * 4088, 5144),
    "size": lambda: (written(ENTRIES)[0], 4096 + 1049),
    "short": lambda: (written(ENTRIES)[0][:-1], 4096 + 1048),
    "duplicate": lambda: duplicated(),
    "escaped": lambda: replaced(b'"w"', b'"\\u0077"'),
    "surrogate": lambda: replaced(b'"w"', b'"\\ud800"'),
    "no utf-8": lambda: replaced(b'"w"', b'"\xff"'),
    "fraction": lambda: replaced(b"[2,2]", b"[2,2.0]"),
    "after the end": lambda: replaced(b"}} ", b"}} x"),
    "tab": lambda: replaced(b"}} ", b"}}\t"),
}


def duplicated() -> tuple[bytes, int]:
    text = written(ENTRIES)[0][8:].rstrip()
    w = b'"w":{"dtype":"F32","shape":[2,2],"data_offsets":[0,16]}'
    again = w.replace(b"[0,16]", b"[1048,1064]")
    return (4088).to_bytes(8, "little") + (text[:-1] + b"," + again + b"}").ljust(4088), 4096 + 1064


def replaced(old: bytes, new: bytes) -> tuple[bytes, int]:
    data = written(ENTRIES)[0]
    assert old in data
    return data.replace(old, new, 1)[:4096].ljust(4096), 4096 + 1048


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers_are_refused(case: str) -> None:
    data, size = HOSTILE[case]()
    with pytest.raises(IntegrityError, match="the shard"):
        shard.parse(data, name="the shard", size=size)


@given(st.integers(0, 600), st.binary(max_size=4))
def test_mutated_headers_are_refused_or_other(at: int, new: bytes) -> None:
    data, size = written(ENTRIES)
    mutated = (data[:at] + new + data[at + len(new) :])[:4096]
    with contextlib.suppress(IntegrityError):
        shard.parse(mutated, name="x", size=size)
    pieces: list[Piece] = [("w", -1, "float32", (2, 2)), ("p", 0, "uint8", (4,)), ("p", 1, "uint8", (4,))]
    try:
        shard.check(mutated, pieces, layout=LAYOUT, rank=3, blob=True, name="x", size=size)
    except IntegrityError:
        assert mutated != data
    else:
        assert mutated == data


def test_check_says_what_differs() -> None:
    pieces: list[Piece] = [("w", -1, "float32", (2, 2)), ("p", -1, "complex64", (2,))]
    header = build(pieces)

    def refused(message: str, pieces: list[Piece] = pieces, **changes: Any) -> None:
        arguments: dict[str, Any] = {
            "layout": LAYOUT,
            "rank": 3,
            "blob": True,
            "name": "the shard",
            "size": header.size,
        } | changes
        with pytest.raises(IntegrityError, match=f"the shard: .*{message}"):
            shard.check(header.data, pieces, **arguments)

    refused("rank 3", rank=4)
    refused("not of rank 3 and layout", layout="cd" * 32)
    refused("no blob", blob=False)
    refused("expected the entry 'q', found 'p'", [pieces[0], ("q", -1, "complex64", (2,))])
    refused("'p' is not where", [pieces[0], ("p", -1, "complex64", (3,))])
    refused("differ in dtype", [pieces[0], ("p", -1, "complex64", (2, 1))])
    refused("differ in dtype", [("w", -1, "int32", (2, 2)), pieces[1]])


def test_many_pieces_are_fast() -> None:
    pieces: list[Piece] = [(f"model/layers.{i}.weight", -1, "bfloat16", (16, 4)) for i in range(20_000)]
    took = []
    for _ in range(3):  # the collector may come in between, which takes longer
        start = time.process_time()
        header = build(pieces)
        built = time.process_time()
        shard.parse(header.data, name="x", size=header.size)
        took.append((built - start, time.process_time() - built))
    assert min(build for build, _ in took) < 0.5  # about 0.05 s
    assert min(parse for _, parse in took) < 0.5  # about 0.07 s
