"""Protects the layout file: its exact bytes, its strictness, and what is looked up in it.

Every lookup has a plain oracle here, which walks over all ranks and follows docs/format.md naively.
"""

from __future__ import annotations

import json
import random
import struct
import time
from array import array
from collections.abc import Callable
from itertools import pairwise, product
from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.errors import IntegrityError, TierckptError
from tierckpt.format import canonical, columns
from tierckpt.format.boxes import Box, intersection, tiles, whole
from tierckpt.format.digest import derive
from tierckpt.format.grid import REPLICATED, Cut, Mesh
from tierckpt.format.layout import COLUMNS, KIND, LISTED, Entry, Layout
from tierckpt.format.layout_plan import Tree, ranges

TREE: canonical.JSON = ["dict", [["a", ["tensor"]]]]


def build(world: int, entries: list[Entry], blobs: list[tuple[int, int]] | None = None) -> Layout:
    return Layout.build(world, entries, [Tree([(0, world - 1)], TREE)], blobs or [(0, 0)])


def example() -> Layout:
    """HSDP over 2 x 4, replicated, aliased and listed tensors, an empty one and one without dimensions."""
    hsdp = Cut(Mesh.of(range(8), (2, 4)), (REPLICATED, 0), (1,))
    whole_on_all = Cut.replicated(range(8))
    return build(
        8,
        [
            Entry("a/w", "bfloat16", (10, 3), None, hsdp, writer=1),
            Entry("a/wt", "bfloat16", (10, 3), "a/w"),
            Entry("b", "float32", (64,), None, whole_on_all, writer=6, split=3),
            Entry("c", "int64", (), None, whole_on_all, writer=5),
            Entry("d", "float32", (0, 4), None, whole_on_all),
            Entry(
                "é",
                "float32",
                (4, 4),
                pieces=[
                    (3, Box((2, 0), (2, 4))),
                    (5, Box((0, 0), (2, 2))),
                    (3, Box((0, 2), (2, 2))),
                ],
            ),
        ],
        [(0, 0), (7, 7)],
    )


def oracle(layout: Layout, i: int) -> list[tuple[int, Box]]:
    """(rank, box) of all stored pieces of a tensor on a grid: docs/format.md, read naively."""
    cut, shape = layout.cut(i), layout.shape(i)
    assert cut is not None
    w, k = layout._first[i], layout._splits[i]
    found = []
    for coordinate in product(*map(range, cut.mesh.shape)):
        offset, size = [0] * len(shape), list(shape)
        for d in cut.order:
            p, s, n = cut.placements[d], cut.mesh.shape[d], size[cut.placements[d]]
            q = -(-n // s)
            lo, hi = min(coordinate[d] * q, n), min((coordinate[d] + 1) * q, n)
            offset[p] += lo
            size[p] = hi - lo
        replica, total = 0, 1
        for c, n, p in zip(coordinate, cut.mesh.shape, cut.placements, strict=True):
            if p < 0:
                replica, total = replica * n + c, total * n
        if 0 in size:
            continue
        dim = next((d for d, m in enumerate(size) if m >= k), None)
        for part in range(k if dim is not None else 1):
            if (w + part) % total != replica:
                continue
            start, length = list(offset), list(size)
            if dim is not None:
                m = size[dim]
                start[dim] += part * m // k
                length[dim] = (part + 1) * m // k - part * m // k
            found.append((cut.mesh.rank(coordinate), Box(tuple(start), tuple(length))))
    return found


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    world = draw(st.sampled_from([1, 2, 6, 12, 13]))
    entries = []
    for number in range(draw(st.integers(1, 5))):
        shape = draw(st.lists(st.sampled_from([0, 1, 2, 5, 7, 16]), min_size=0, max_size=3).map(tuple))
        sizes = draw(st.sampled_from([(world,), (1, world), *([(2, world // 2)] if world % 2 == 0 else [])]))
        mesh = Mesh.of(draw(st.permutations(range(world))), sizes)
        placements = tuple(
            draw(st.sampled_from([REPLICATED, *range(len(shape))])) if n >= 1 else REPLICATED for n in sizes
        )
        order = draw(st.permutations([d for d, p in enumerate(placements) if p >= 0]))
        cut = Cut(mesh, placements, tuple(order))
        entries.append(
            Entry(
                f"t{number}",
                draw(st.sampled_from(["float32", "bfloat16"])),
                shape,
                None,
                cut,
                draw(st.integers(0, cut.replicas - 1)),
                draw(st.integers(1, cut.replicas)),
            )
        )
    return build(world, entries)


@given(layouts(), st.integers(0, 10**9))
def test_pieces_are_those_of_the_formula_and_tile(layout: Layout, seed: int) -> None:
    rng = random.Random(seed)
    by_rank: dict[int, list[tuple[int, int, Box]]] = {}
    for i in range(len(layout)):
        shape = layout.shape(i)
        wanted = oracle(layout, i)
        found = layout.stored_pieces(i)
        assert sorted((p.rank, p.box) for p in found) == sorted(wanted)
        assert tiles(shape, [p.box for p in found]) is None
        assert all(p.k == -1 for p in found)
        offset = tuple(rng.randint(0, n) for n in shape)
        box = Box(offset, tuple(rng.randint(0, n - o) for n, o in zip(shape, offset, strict=True)))
        touching = [(rank, b) for rank, b in wanted if intersection(b, box) is not None]
        assert sorted((p.rank, p.box) for p in layout.pieces_in(i, box)) == sorted(touching)
        for rank, b in wanted:
            by_rank.setdefault(rank, []).append((i, -1, b))
    for rank in range(layout.world):
        assert list(layout.rank_pieces(rank)) == by_rank.get(rank, [])
    assert list(layout.writers) == sorted({0, *by_rank})


@st.composite
def with_aliases(draw: st.DrawFn) -> Layout:
    """Tensors of one geometry and tensors that share their bytes, whose names come before and after these."""
    world = draw(st.sampled_from([1, 2, 6]))
    cut = Cut.replicated(range(world))
    shapes = st.sampled_from([(), (3,), (16, 2), (0, 4)])
    entries: list[Entry] = []
    for number in range(draw(st.integers(1, 6))):
        owner = draw(st.sampled_from([None, *(entry for entry in entries if entry.alias is None)]))
        name = f"{draw(st.sampled_from('am'))}{number}"
        if owner is not None:
            entries.append(Entry(name, owner.dtype, owner.shape, owner.name))
            continue
        writer, split = draw(st.integers(0, world - 1)), draw(st.integers(1, world))
        entries.append(Entry(name, draw(st.sampled_from(["int8", "float32"])), draw(shapes), None, cut, writer, split))
    return build(world, sorted(entries, key=lambda entry: entry.name))


@given(st.one_of(layouts(), with_aliases()))
def test_what_is_known_of_all_tensors_is_what_is_known_of_each(layout: Layout) -> None:
    numbers = range(len(layout))
    own = [i for i in numbers if layout.alias(i) == i]
    assert layout.has_aliases == (len(own) < len(layout))
    assert layout.kinds == [layout.dtype(i) for i in numbers]
    assert layout.nbytes == sum(
        prod(piece.box.size) * (2 if layout.dtype(i) == "bfloat16" else 1 if layout.dtype(i) == "int8" else 4)
        for i in own
        for piece in layout.stored_pieces(i)
    )
    for i in numbers:
        pieces = oracle(layout, layout.alias(i))
        whole_at = [rank for rank, box in pieces if box.size == layout.shape(i)]
        assert layout.homes[i] == (whole_at[0] if len(pieces) == len(whole_at) == 1 else -1)
    writers = {0}
    for rank in range(layout.world):
        pieces = list(layout.rank_pieces(rank))
        writers |= {rank} if pieces else set()
        assert list(layout.shard_pieces(rank)) == [
            (layout.name(i), k, layout.dtype(i), box.size) for i, k, box in pieces
        ]
        assert [i for i, _, _ in pieces] == [i for i in own if rank in [at for at, _ in oracle(layout, i)]]
    assert list(layout.writers) == sorted(writers)


def test_a_tensor_of_the_geometry_of_an_alias_has_its_own_home() -> None:
    cut = Cut.replicated(range(2))
    layout = build(
        2,
        [
            Entry("a", "float32", (4,), "c"),
            Entry("b", "float32", (4,), None, cut, writer=0),
            Entry("c", "float32", (4,), None, cut, writer=1),
        ],
    )
    assert layout.homes == [1, 0, 1]


@given(layouts())
def test_encoding_and_decoding_are_inverse(layout: Layout) -> None:
    data = layout.encode()
    again = Layout.decode(data, what="layout")
    assert again.encode() == data
    assert again.hash == layout.hash == derive("layout", data).hex()
    assert list(again) == list(layout)
    assert [again.stored_pieces(i) for i in range(len(again))] == [layout.stored_pieces(i) for i in range(len(layout))]
    fresh = Layout(again.world, again.dtypes, again.cuts, again.trees, again.blobs, again._numbers)
    assert fresh.encode() == data


def test_listed_pieces_are_numbered_by_offset_within_a_rank() -> None:
    layout = Layout.decode(example().encode(), what="layout")
    i = layout.index("é")
    assert i == 5
    pieces = {(p.rank, p.k): p.box for p in layout.stored_pieces(i)}
    assert pieces == {
        (3, 0): Box((0, 2), (2, 2)),
        (3, 1): Box((2, 0), (2, 4)),
        (5, -1): Box((0, 0), (2, 2)),
    }
    assert list(layout.rank_pieces(3)) == [(5, 0, Box((0, 2), (2, 2))), (5, 1, Box((2, 0), (2, 4)))]
    assert list(layout.shard_pieces(5)) == [
        ("a/w", -1, "bfloat16", (3, 3)),
        ("c", -1, "int64", ()),
        ("é", -1, "float32", (2, 2)),
    ]
    assert [p.rank for p in layout.pieces_in(i, Box((1, 3), (1, 1)))] == [3]


def test_what_there_is() -> None:
    layout = Layout.decode(example().encode(), what="layout")
    assert len(layout) == 6
    assert layout.world == 8
    assert list(layout) == ["a/w", "a/wt", "b", "c", "d", "é"]
    assert [layout.index(name) for name in layout] == list(range(6))
    assert layout.index("a/") is None and layout.index("") is None and layout.index("z") is None
    assert layout.tensor(3) == ("c", "int64", ())
    assert (layout.alias(0), layout.alias(1)) == (0, 0)
    assert layout.stored_pieces(1) == layout.stored_pieces(0)
    assert layout.stored_pieces(4) == []
    # HSDP: the second replica writes, 10 rows over 4 ranks are 3, 3, 3, 1. "b": three parts on 6, 7, 0.
    assert [(p.rank, p.box.offset[0], p.box.size[0]) for p in layout.stored_pieces(0)] == [
        (4, 0, 3), (5, 3, 3), (6, 6, 3), (7, 9, 1)
    ]  # fmt: skip
    assert [(p.rank, p.box) for p in layout.stored_pieces(2)] == [
        (6, Box((0,), (21,))), (7, Box((21,), (21,))), (0, Box((42,), (22,)))
    ]  # fmt: skip
    assert list(layout.writers) == [0, 3, 4, 5, 6, 7]
    assert [layout.has_blob(rank) for rank in range(8)] == [True] + [False] * 6 + [True]
    assert layout.trees == [Tree([(0, 7)], TREE)] and layout.tree(3) == TREE
    assert layout.cut(5) is None


def test_the_bytes_are_a_safetensors_file_in_the_order_of_the_format() -> None:
    data = example().encode()
    (length,) = struct.unpack("<Q", data[:8])
    assert (8 + length) % 8 == 0
    header = json.loads(data[8 : 8 + length])
    assert header.pop("__metadata__") == {"tierckpt": "layout 1"}
    assert list(header) == list(COLUMNS)
    at = 0
    body = {}
    for name, entry in header.items():
        lo, hi = entry["data_offsets"]
        assert lo == at and entry["dtype"] == COLUMNS[name]
        at = hi
        body[name] = data[8 + length + lo : 8 + length + hi]
        assert entry["shape"] == [len(body[name]) // {"U8": 1, "U32": 4, "I64": 8}[entry["dtype"]]]
    assert 8 + length + at == len(data)
    assert struct.unpack("<9q", body["shapes"]) == (10, 3, 10, 3, 64, 0, 4, 4, 4)
    assert struct.unpack("<6I", body["cuts"]) == (0, 0, 1, 1, 1, LISTED)
    assert struct.unpack("<6I", body["aliases"]) == (0, 0, 2, 3, 4, 5)
    assert struct.unpack("<6I", body["writers"]) == (1, 0, 6, 5, 0, 0)
    assert struct.unpack("<6I", body["splits"]) == (1, 1, 3, 1, 1, 1)
    assert struct.unpack("<3I", body["piece_ranks"]) == (5, 3, 3)
    assert body["names"].decode() == "a/wa/wtbcdé"
    assert json.loads(body["plan"]) == {
        "blobs": [[0, 0], [7, 7]],
        "cuts": [
            {"mesh": 0, "order": [1], "placements": [-1, 0]},
            {"mesh": 1, "order": [], "placements": [-1]},
        ],
        "dtypes": ["bfloat16", "float32", "int64"],
        "meshes": [
            {"first": 0, "shape": [2, 4], "strides": [4, 1]},
            {"first": 0, "shape": [8], "strides": [1]},
        ],
        "trees": [{"ranks": [[0, 7]], "tree": TREE}],
        "world": 8,
    }


def test_every_flipped_bit_is_found_or_harmless() -> None:
    """A damaged layout file either is refused as such, or says what it says: never another kind of error."""
    data = example().encode()
    for at in range(len(data)):
        damaged = bytearray(data)
        damaged[at] ^= 1 << (at % 8)
        try:
            layout = Layout.decode(bytes(damaged), what="a layout")
        except IntegrityError as error:
            assert "a layout" in str(error)
        else:
            for i in range(len(layout)):
                assert tiles(layout.shape(i), [p.box for p in layout.stored_pieces(i)]) is None
    for end in range(0, len(data), 7):
        with pytest.raises(IntegrityError):
            Layout.decode(data[:end], what="a layout")
    with pytest.raises(IntegrityError):
        Layout.decode(data + b" ", what="a layout")


def changed(plan: Callable[[dict[str, Any]], object] | None = None, **numbers: list[int] | bytes) -> bytes:
    """The bytes of the example with other numbers in some columns."""
    layout = example()
    found: dict[str, array[int] | bytes] = dict(columns.unpack(KIND, COLUMNS, layout.encode(), what="example"))
    if plan is not None:
        raw = found["plan"]
        value = json.loads(raw.tobytes() if isinstance(raw, array) else raw)
        plan(value)
        found["plan"] = canonical.encode(value)
    for name, column in numbers.items():
        code = {"U8": "B", "U32": "I", "I64": "q"}[COLUMNS[name]]
        found[name] = column if isinstance(column, bytes) else array(code, column)
    return columns.pack(KIND, [(name, dtype, found[name]) for name, dtype in COLUMNS.items()])


@pytest.mark.parametrize(
    "data",
    [
        changed(lambda p: p.update(world=0)),
        changed(lambda p: p.update(world=7)),
        changed(lambda p: p.update(world=1 << 25)),
        changed(lambda p: p.update(world=True)),
        changed(lambda p: p.update(more=1)),
        changed(lambda p: p.update(dtypes=["float32", "float32", "int64"])),
        changed(lambda p: p.update(dtypes=["float32"])),
        changed(lambda p: p.update(blobs=[[1, 1]])),
        changed(lambda p: p.update(blobs=[])),
        changed(lambda p: p.update(blobs=[[0, 0], [1, 1]])),
        changed(lambda p: p.update(blobs=[[0, 8]])),
        changed(lambda p: p.update(blobs=[[0, 0, 0]])),
        changed(lambda p: p.update(trees=[])),
        changed(lambda p: p["trees"].append(p["trees"][0])),
        changed(lambda p: p["trees"][0].update(ranks=[[0, 6]])),
        changed(lambda p: p["cuts"][0].update(order=[])),
        changed(lambda p: p["cuts"][0].update(order=[1, 1])),
        changed(lambda p: p["cuts"][0].update(order=[0])),
        changed(lambda p: p["cuts"][0].update(placements=[-1, 2])),
        changed(lambda p: p["cuts"][0].update(placements=[-2, 0])),
        changed(lambda p: p["cuts"][0].update(placements=[0])),
        changed(lambda p: p["cuts"][0].update(mesh=2)),
        changed(lambda p: p["cuts"].append(p["cuts"][0])),
        changed(lambda p: p["meshes"].append(p["meshes"][0])),
        changed(lambda p: p["meshes"][0].update(strides=[0, 1])),
        changed(lambda p: p["meshes"][0].update(strides=[3, 1])),
        changed(lambda p: p["meshes"][0].update(strides=[4, -1])),
        changed(lambda p: p["meshes"][0].update(strides=[4])),
        changed(lambda p: p["meshes"][0].update(first=1)),
        changed(lambda p: p["meshes"][0].update(shape=[2, 0])),
        changed(lambda p: p["meshes"].__setitem__(1, {"ranks": [0, 1, 1], "shape": [3]})),
        changed(lambda p: p["meshes"].__setitem__(1, {"ranks": [0, 1, 8], "shape": [3]})),
        changed(lambda p: p["meshes"].__setitem__(1, {"ranks": [0, 1, 2], "shape": [2]})),
        changed(aliases=[0, 0, 2, 3, 4, 6]),
        changed(aliases=[1, 1, 2, 3, 4, 5]),
        changed(aliases=[0, 0, 0, 3, 4, 5]),
        changed(aliases=[1, 0, 2, 3, 4, 5]),
        changed(aliases=[0, 0, 2, 3, 4]),
        changed(cuts=[0, 0, 1, 1, 1, 2]),
        changed(cuts=[0, 0, 1, 0, 1, LISTED]),
        changed(cuts=[0, 0, 1, LISTED, 1, LISTED]),
        changed(writers=[2, 0, 6, 5, 0, 0]),
        changed(writers=[1, 0, 6, 5, 0, 1]),
        changed(splits=[3, 1, 3, 1, 1, 1]),
        changed(splits=[0, 1, 3, 1, 1, 1]),
        changed(dtypes=[0, 0, 1, 2, 1, 3]),
        changed(dtypes=[0, 1, 1, 2, 1, 1]),
        changed(ndims=[2, 2, 1, 1, 2, 2]),
        changed(shapes=[10, 3, 10, 3, -64, 0, 4, 4, 4]),
        changed(shapes=[10, 3, 10, 3, 64, 0, 4, 4, 5]),
        changed(shapes=[2**40, 2**40, 2**40, 2**40, 64, 0, 4, 4, 4]),
        changed(name_ends=[3, 7, 8, 9, 10, 11]),
        changed(name_ends=[3, 3, 8, 9, 10, 12]),
        changed(name_ends=[3, 7, 8, 9, 11, 12]),
        changed(names="a/wb/wtbcdé".encode()),
        changed(names="a/#a/#tbcdé".encode()),
        changed(piece_tensors=[5, 5, 6]),
        changed(piece_tensors=[5, 5, 2]),
        changed(piece_tensors=[2, 5, 5]),
        changed(piece_ranks=[5, 3, 8]),
        changed(piece_ranks=[5, 3]),
        changed(piece_offsets=[0, 0, 0, 2, 2, 1]),
        changed(piece_offsets=[0, 0, 0, 2, -2, 0]),
        changed(piece_sizes=[2, 2, 2, 2, 1, 4]),
        changed(piece_sizes=[2, 2, 2, 2, 2, 4, 1]),
        changed(piece_sizes=[2, 2, 2, 0, 2, 4]),
    ],
)
def test_a_layout_that_contradicts_itself_is_refused(data: bytes) -> None:
    with pytest.raises(IntegrityError, match="the layout"):
        Layout.decode(data, what="the layout")


@pytest.mark.parametrize(
    "header",
    [
        b"[" * 30000,
        b"{}",
        b'{"plan":1}',
        b"\xff\xfe",
        b'{"plan":{"data_offsets":[0,1e400]}}',
    ],
)
def test_hostile_headers_are_refused(header: bytes) -> None:
    with pytest.raises(IntegrityError, match="bad"):
        Layout.decode(struct.pack("<Q", len(header)) + header, what="bad")
    with pytest.raises(IntegrityError, match="bad"):
        Layout.decode(struct.pack("<Q", 1 << 63) + header, what="bad")


def test_columns_in_another_order_or_with_other_spaces_are_refused() -> None:
    data = example().encode()
    (length,) = struct.unpack("<Q", data[:8])
    text, body = data[8 : 8 + length], data[8 + length :]
    for other in (
        text + b" " * 8,
        text.replace(b',"plan"', b', "plan"', 1),
        text.replace(b'"plan"', b'"plan":0,"plan"', 1),
        text.replace(b'"dtype":"U8","shape"', b'"dtype":"I8","shape"', 1),
        text.replace(b"layout 1", b"layout 2"),
    ):
        with pytest.raises(IntegrityError):
            Layout.decode(struct.pack("<Q", len(other)) + other + body, what="bad")


def test_listed_pieces_that_do_not_tile_name_the_tensor_the_place_and_the_ranks() -> None:
    pieces = [(3, Box((0,), (5,))), (1, Box((4,), (6,)))]
    layout = build(4, [Entry("m/w", "float32", (10,), pieces=pieces)])
    with pytest.raises(IntegrityError, match=r"m/w: \[4:5\].*rank 3.*rank 1"):
        layout.check_tiling()
    with pytest.raises(TierckptError):
        Layout.decode(layout.encode(), what="layout")


def test_sixteen_thousand_ranks_cost_what_their_tensors_cost() -> None:
    world = 16384
    hsdp = Cut(Mesh.of(range(world), (4, 4096)), (REPLICATED, 0), (1,))
    norm = Cut.replicated(range(world))
    entries = [
        Entry(f"layers.{i:04}.w", "bfloat16", (8192, 1024), None, hsdp, i % 4)
        if i % 4
        else Entry(f"layers.{i:04}.w", "float32", (8192,), None, norm)
        for i in range(1000)
    ]
    began = time.process_time()
    layout = build(world, entries, [(0, world - 1)])
    data = layout.encode()
    again = Layout.decode(data, what="layout")
    assert len(list(again.rank_pieces(5000))) == 250
    assert len(again.pieces_in(1, Box((100, 0), (10, 5)))) == 5
    assert list(again.writers) == list(range(world))
    assert time.process_time() - began < 1.0
    assert len(data) < 60_000  # of which names, shapes and fixed columns are all but 2,000


def test_many_listed_pieces_are_found_by_rank_in_one_pass() -> None:
    world, rows = 2000, 3
    entries = [
        Entry(f"t{i}", "float32", (world * rows,), pieces=[(r, Box((r * rows,), (rows,))) for r in range(world)])
        for i in range(10)
    ]
    layout = build(world, entries)
    began = time.process_time()
    found = [list(layout.rank_pieces(rank)) for rank in range(world)]
    assert time.process_time() - began < 3.0
    assert found[7] == [(i, -1, Box((21,), (3,))) for i in range(10)]


@given(st.sets(st.integers(0, 60)))
def test_ranges_are_the_shortest_way_to_say_a_set(ranks: set[int]) -> None:
    spans = ranges(sorted(ranks))
    assert [r for first, last in spans for r in range(first, last + 1)] == sorted(ranks)
    assert all(a[1] + 1 < b[0] for a, b in pairwise(spans))


def test_whole_tensors_of_many_elements_are_fine() -> None:
    """Sizes beyond 2^53 elements do not pass through JSON, and 64 bits hold them."""
    shape = (1 << 30, 1 << 29)
    layout = build(2, [Entry("w", "uint8", shape, None, Cut(Mesh.of([0, 1], (2,)), (0,), (0,)))])
    again = Layout.decode(layout.encode(), what="layout")
    assert sum(prod(p.box.size) for p in again.stored_pieces(0)) == prod(whole(shape).size)
