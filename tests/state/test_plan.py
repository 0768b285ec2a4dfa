"""Protects the plan of a save: all ranks make the same one, every byte is written once and into the right place, and
a state that does not fit together is refused with everything that is wrong.

Ranks are simulated: each is described by hand, writes its shard with the native copy engine, and the tensors are put
together again from the shards by the layout alone.
"""

from __future__ import annotations

import random
import time
from math import prod
from typing import Any

import pytest
import torch
from torch import nn

from tests import lacks
from tests.harness import run_ranks
from tierckpt.errors import IntegrityError, LayoutError
from tierckpt.format import blob, shard
from tierckpt.format.boxes import Box, tiles
from tierckpt.format.canonical import JSON
from tierckpt.format.grid import REPLICATED, Cut, Mesh
from tierckpt.format.layout import Layout
from tierckpt.state.layout import Described, Describer
from tierckpt.state.marks import Pieces
from tierckpt.state.plan import WritePlan, compose, local_description

State = dict[str, Any]
"""Of one rank: values that `Describer` takes, or ready descriptions."""


def describe(state: State) -> dict[str, Described]:
    describer = Describer()
    return {
        name: value if isinstance(value, Described) else describer.describe(value, name=name)
        for name, value in state.items()
    }


def piece(tensor: torch.Tensor, cut: Cut, rank: int, value: object = None) -> Described:
    """What ``rank`` holds of ``tensor``, a copy of its own."""
    coordinate = cut.mesh.coordinate(rank)
    if coordinate is None:
        return Described(tensor.dtype, tuple(tensor.shape), cut, [], value or object())  # type: ignore[arg-type]
    box = cut.box(tensor.shape, coordinate)
    local = at(tensor, box).clone()
    return Described(tensor.dtype, tuple(tensor.shape), cut, [(box, local)] if local.numel() else [], local)


def at(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))]


def plan(states: list[State], trees: list[JSON] | None = None, per_rank: frozenset[int] = frozenset()) -> Layout:
    """The layout of these ranks; ranks that say the same are one group."""
    world = len(states)
    members: dict[bytes, list[int]] = {}
    for rank, state in enumerate(states):
        said = local_description(
            describe(state),
            tree=trees[rank] if trees else ["tensor"],
            per_rank=rank in per_rank,
            world=world,
        )
        members.setdefault(said, []).append(rank)
    groups = list(members.items())
    layout = compose([said for said, _ in groups], [ranks for _, ranks in groups], world)
    # The order in which descriptions arrive must not matter.
    again = compose([said for said, _ in groups[::-1]], [ranks[::-1] for _, ranks in groups[::-1]], world)
    assert again.encode() == layout.encode()
    assert Layout.decode(layout.encode(), what="layout").encode() == layout.encode()
    return layout


def save(layout: Layout, states: list[State], values: bytes = b"[]") -> dict[int, bytes]:
    """The shards that the ranks write."""
    shards = {}
    for rank, state in enumerate(states):
        described = describe(state)
        mine = WritePlan(layout, rank, described, len(values) if layout.has_blob(rank) else None)
        assert (mine.header is not None) == (rank in layout.writers)
        if mine.header is None:
            continue
        live = {name: one.value for name, one in described.items()}
        pointers, keep = mine.pointers(live, values if layout.has_blob(rank) else None)
        data = bytearray(b"\xee" * mine.size)
        table = mine.table()
        assert table.span == (0, mine.size) and table.nbytes == mine.size
        table.gather(pointers, 0, mine.size, data)
        del keep
        shards[rank] = bytes(data)
    return shards


def load(layout: Layout, shards: dict[int, bytes]) -> dict[str, torch.Tensor]:
    """All tensors, whole, from the bytes of the shards."""
    entries: dict[tuple[int, str, int], tuple[int, int]] = {}
    for rank, data in shards.items():
        size = shard.header_size(data[:8], name=str(rank), size=len(data))
        header = shard.parse(data[:size], name=str(rank), size=len(data))
        shard.check(
            data[:size],
            layout.shard_pieces(rank),
            layout=layout.hash,
            rank=rank,
            blob=layout.has_blob(rank),
            name=str(rank),
            size=len(data),
        )
        for entry in header.entries:
            entries[rank, entry.tensor, entry.k] = (entry.offset, entry.nbytes)
    found = {}
    for i, name in enumerate(layout):
        dtype = getattr(torch, layout.dtype(i))
        tensor = torch.empty(layout.shape(i), dtype=dtype)
        pieces = layout.stored_pieces(i)
        assert tiles(layout.shape(i), [p.box for p in pieces]) is None
        for p in pieces:
            offset, nbytes = entries[p.rank, layout.name(layout.alias(i)), p.k]
            raw = torch.frombuffer(bytearray(shards[p.rank][offset : offset + nbytes]), dtype=dtype)
            at(tensor, p.box).copy_(raw.view(p.box.size))
        found[name] = tensor
    return found


def numbers(*shape: int, dtype: torch.dtype = torch.float32, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + prod(shape)).reshape(shape).to(dtype)


@pytest.mark.parametrize("seed", range(15))
def test_every_byte_is_written_once_and_found_again(seed: int) -> None:
    """Random meshes, placements, replicas, plain tensors and pieces on up to 12 ranks."""
    rng = random.Random(seed)
    sizes = tuple(rng.choice([1, 2, 3]) for _ in range(rng.randint(1, 3)))
    world = prod(sizes)
    truth: dict[str, torch.Tensor] = {}
    states: list[State] = [{} for _ in range(world)]
    for number in range(20):
        name = f"t/{number}"
        shape = tuple(rng.choice([1, 2, 3, 5, 8, 13]) for _ in range(rng.randint(0, 3)))
        dtype = rng.choice([torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
        tensor = truth[name] = numbers(*shape, dtype=dtype, start=number)
        kind = rng.randrange(3)
        placements = tuple(rng.randrange(-1, len(shape)) for _ in sizes)
        order = [d for d, p in enumerate(placements) if p >= 0]
        rng.shuffle(order)
        cut = Cut(Mesh.of(range(world), sizes), placements, tuple(order))
        for rank, state in enumerate(states):
            if kind == 0:
                state[name] = tensor.clone()
            elif kind == 1:
                state[name] = piece(tensor, cut, rank)
            else:
                # Pieces of the same boxes, replicas included; some in two.
                coordinate = cut.mesh.coordinate(rank)
                assert coordinate is not None
                box = cut.box(shape, coordinate)
                state[name] = Pieces(shape, [(box.offset, at(tensor, box).clone())])
    layout = plan(states)
    shards = save(layout, states)
    found = load(layout, shards)
    assert found.keys() == truth.keys()
    for name, tensor in truth.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    payload = sum(len(data) for data in shards.values()) - sum(
        shard.header_size(data[:8], name="", size=len(data)) for data in shards.values()
    )
    assert payload == sum(t.numel() * t.element_size() for t in truth.values()) + 1024


def test_large_replicated_tensors_are_written_in_parts_of_live_strided_memory() -> None:
    tensor = numbers(1024, 5000)
    states = [{"w": tensor.t().contiguous().t(), "v": tensor} for _ in range(4)]
    layout = plan(states)
    assert {p.rank for p in layout.stored_pieces(0)} | {p.rank for p in layout.stored_pieces(1)} == {0, 1, 2, 3}
    shards = save(layout, states)
    assert max(map(len, shards.values())) <= 1.2 * min(map(len, shards.values()))
    found = load(layout, shards)
    assert torch.equal(found["w"], tensor) and torch.equal(found["v"], tensor)


def test_views_are_saved_by_value_and_no_more_than_the_view() -> None:
    base = numbers(20000)
    state: State = {
        "small": base[10:20],
        "transposed": numbers(3, 4).t(),
        "strided": numbers(4, 6)[::2, ::3],
        "permuted": numbers(2, 3, 4).permute(2, 0, 1),
        "expanded": torch.ones(1, 1).expand(50, 40),
        "windows": numbers(6).as_strided((4, 3), (1, 1)),
        "conj": torch.tensor([[1 + 2j, 3 - 4j], [5j, 6]])[:, ::2].conj(),
        "neg": torch._neg_view(numbers(3, 2)).t(),
        "scalar": torch.tensor(3.5),
        "bits": torch.tensor([0x7FC00001, -1], dtype=torch.int32).view(torch.float32),
    }
    layout = plan([state])
    shards = save(layout, [state])
    found = load(layout, shards)
    for name, tensor in state.items():
        if name == "bits":
            assert torch.equal(found[name].view(torch.int32), tensor.view(torch.int32))
        else:
            assert torch.equal(found[name], tensor.resolve_conj().resolve_neg()), name
    assert len(shards[0]) < 20000


def test_pieces_of_fused_weights_are_numbered_within_their_shard() -> None:
    """Two pieces per rank at offsets that are not neighbours: [W; V] split over tensor-parallel ranks."""
    tensor = numbers(16, 3)
    states: list[State] = [
        {"fc1": Pieces((16, 3), [((8 + r * 4, 0), tensor[8 + r * 4 :][:4]), ((r * 4, 0), tensor[r * 4 :][:4])])}
        for r in range(2)
    ]
    layout = plan(states)
    assert [(p.rank, p.k, p.box.offset[0]) for p in layout.stored_pieces(0)] == [
        (0, 0, 0), (0, 1, 8), (1, 0, 4), (1, 1, 12)
    ]  # fmt: skip
    assert torch.equal(load(layout, save(layout, states))["fc1"], tensor)


def test_replicas_of_pieces_are_written_by_one_rank() -> None:
    tensor = numbers(8)
    states: list[State] = [{"w": Pieces((8,), [((rank % 2 * 4,), tensor[rank % 2 * 4 :][:4])])} for rank in range(4)]
    layout = plan(states)
    assert len(layout.stored_pieces(0)) == 2
    assert torch.equal(load(layout, save(layout, states))["w"], tensor)


def test_the_same_program_says_the_same_on_all_ranks() -> None:
    cut = Cut(Mesh.of(range(6), (2, 3)), (REPLICATED, 0), (1,))
    said = {
        local_description(
            describe({"w": piece(numbers(4, 2), cut, rank), "b": numbers(3)}),
            tree=["dict", []],
            per_rank=True,
            world=6,
        )
        for rank in range(6)
    }
    assert len(said) == 1


# Tied tensors


def aliases(layout: Layout) -> dict[str, str]:
    return {name: layout.name(layout.alias(i)) for i, name in enumerate(layout) if layout.alias(i) != i}


def test_two_names_of_the_same_memory_are_one() -> None:
    weight = nn.Parameter(numbers(10, 4))
    state: State = {"b": weight, "a": weight.detach(), "c": weight.data, "d": weight.t(), "e": weight[:1]}
    layout = plan([state])
    # Another shape or other strides are other eyes on the memory: saved for themselves.
    assert aliases(layout) == {"b": "a", "c": "a"}
    shards = save(layout, [state])
    found = load(layout, shards)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    assert len(shards[0]) == 4096 + 160 + 160 + 16 + 1024


def test_what_only_looks_tied_is_not() -> None:
    base = numbers(10)
    state: State = {
        "x": base[:5],
        "y": base[5:],
        "f": base.view(torch.int32),
        "g": base.clone(),
        "h": torch._neg_view(base),
        "i": base,
        "e1": torch.empty(0),
        "e2": torch.empty(0),
        "e3": base[:0],
    }
    layout = plan([state])
    assert aliases(layout) == {}
    found = load(layout, save(layout, [state]))
    assert found["h"].tolist() == [-float(n) for n in range(10)]


def test_tied_shards_are_found_also_by_ranks_that_hold_nothing_of_them() -> None:
    cut = Cut(Mesh.of(range(4), (4,)), (0,), (0,))
    states: list[State] = []
    for rank in range(4):
        one = piece(numbers(3, 2), cut, rank)
        states.append({"emb": one, "head": one, "other": piece(numbers(3, 2), cut, rank)})
    assert aliases(plan(states)) == {"head": "emb"}


def test_ranks_that_do_not_agree_on_a_tie_save_both() -> None:
    tied = numbers(4)
    states: list[State] = [{"a": tied, "b": tied}, {"a": tied.clone(), "b": tied.clone()}]
    layout = plan(states)
    assert aliases(layout) == {}
    assert torch.equal(load(layout, save(layout, states))["b"], tied)
    # b is a's on rank 0 only, so it has bytes of its own, and c can be its alias.
    states = [{"a": tied, "b": tied}, {"b": tied, "c": tied}]
    layout = plan(states)
    assert aliases(layout) == {"c": "b"}


def test_a_freed_storage_is_refused_by_name() -> None:
    tensor = numbers(4)
    tensor.untyped_storage().resize_(0)
    with pytest.raises(LayoutError, match=r"m/w: .*freed"):
        plan([{"m/w": tensor}])


# Ranks that hold different things


def test_stages_of_a_pipeline_and_their_trees() -> None:
    """Ranks 0 and 1 have one stage, 2 and 3 another; a tensor is on all but one."""
    states: list[State] = [{f"stage{rank // 2}": numbers(4, start=rank // 2), "all": numbers(2)} for rank in range(4)]
    states[3].pop("all")
    trees: list[JSON] = [["dict", [[str(rank // 2), ["tensor"]]]] for rank in range(4)]
    layout = plan(states, trees)
    assert [tree.ranks for tree in layout.trees] == [[(0, 1)], [(2, 3)]]
    assert layout.tree(3) == trees[3]
    assert layout.blobs == [(0, 0), (2, 2)]
    assert layout.cut(0) == Cut.replicated([0, 1, 2])
    found = load(layout, save(layout, states))
    assert found["stage1"].tolist() == [1, 2, 3, 4]


def test_blobs_are_those_of_rank_0_of_trees_and_of_ranks_with_values_of_their_own() -> None:
    states: list[State] = [{"w": numbers(2)} for _ in range(5)]
    assert plan(states).blobs == [(0, 0)]
    assert plan(states, per_rank=frozenset({2, 3})).blobs == [(0, 0), (2, 3)]
    trees: list[JSON] = [["a"], ["b"], ["a"], ["c"], ["b"]]
    layout = plan(states, trees)
    assert layout.blobs == [(0, 1), (3, 3)]
    assert [tree.ranks for tree in layout.trees] == [[(0, 0), (2, 2)], [(1, 1), (4, 4)], [(3, 3)]]


def test_equal_grids_on_different_ranks_are_replicas() -> None:
    """Tensor parallel groups that know nothing of each other: meshes [0, 1], [2, 3] and [4, 5]."""
    tensor = numbers(8, 3)
    states: list[State] = []
    for rank in range(6):
        first = rank // 2 * 2
        mesh = Mesh.of([first, first + 1], (2,))
        states.append(
            {
                "w": piece(tensor, Cut(mesh, (0,), (0,)), rank),
                "norm": piece(tensor, Cut.replicated([first, first + 1]), rank),
            }
        )
    layout = plan(states)
    assert layout.cut(1) == Cut(Mesh.of(range(6), (3, 2)), (REPLICATED, 0), (1,))
    assert layout.cut(0) == Cut.replicated(range(6))
    found = load(layout, save(layout, states))
    assert torch.equal(found["w"], tensor) and torch.equal(found["norm"], tensor)


def test_whole_copies_are_enough_where_others_hold_shards() -> None:
    tensor = numbers(8)
    cut = Cut(Mesh.of([2, 3], (2,)), (0,), (0,))
    states: list[State] = [{"w": tensor.clone()}, {"w": tensor.clone()}]
    states += [{"w": piece(tensor, cut, rank)} for rank in (2, 3)]
    layout = plan(states)
    assert layout.cut(0) == Cut.replicated([0, 1])
    assert torch.equal(load(layout, save(layout, states))["w"], tensor)


def test_everything_that_does_not_fit_is_listed_at_once() -> None:
    cut = Cut(Mesh.of([0, 1, 2, 3], (4,)), (0,), (0,))
    states: list[State] = [
        {
            "fine": numbers(3),
            "shape": numbers(2, 3 if rank < 3 else 4),
            "dtype": numbers(2).to(torch.float16 if rank == 1 else torch.float32),
            "hole": Pieces((8,), [((rank * 2,), numbers(2 if rank != 2 else 1))]),
            "overlap": Pieces((8,), [((rank,), numbers(5))]),
            "both": Pieces((4,), [((0,), numbers(4))]) if rank == 0 else numbers(4),
            "twice": Pieces((4,), [((rank,), numbers(1)), ((rank,), numbers(1))]),
            "odd": numbers(2).to(torch.float32),
        }
        for rank in range(4)
    ]
    for rank in range(3):
        states[rank]["mesh"] = piece(numbers(8), cut, rank)
    with pytest.raises(LayoutError) as caught:
        plan(states)
    lines = {line.split(":")[0].strip(): line for line in str(caught.value).splitlines()[1:]}
    assert lines.keys() == {"shape", "dtype", "hole", "overlap", "both", "twice", "mesh"}
    assert "float32 [2, 3] on ranks 0-2" in lines["shape"] and "[2, 4] on rank 3" in lines["shape"]
    assert "float16 [2] on rank 1" in lines["dtype"] and "float32 [2] on ranks 0, 2-3" in lines["dtype"]
    assert "[5:6]" in lines["hole"] and "no piece" in lines["hole"]
    assert "pieces" in lines["overlap"] and "ranks 0" in lines["overlap"]
    assert "Pieces on rank 0" in lines["both"] and "1-3" in lines["both"]
    assert "same box twice" in lines["twice"]
    assert "ranks 0-3" in lines["mesh"] and "not held, or not cut like that, by rank 3" in lines["mesh"]


def test_a_dtype_that_cannot_be_stored_is_named() -> None:
    strange = Described(torch.qint8, (1,), None, [(Box((0,), (1,)), numbers(1))], numbers(1))
    with pytest.raises(LayoutError, match="w: dtype qint8"):
        plan([{"w": strange}])


def test_damaged_descriptions_are_refused() -> None:
    said = local_description(describe({"w": numbers(3)}), tree=None, per_rank=False, world=2)
    with pytest.raises(IntegrityError, match="rank 0"):
        compose([said], [[0]], 1)
    with pytest.raises(IntegrityError, match="rank 0"):
        compose([said[:-1]], [[0, 1]], 2)
    with pytest.raises(ValueError, match="once"):
        compose([said], [[0]], 2)


# Writing again and again


def planned(state: State, values: bytes = b"[]") -> WritePlan:
    layout = plan([state])
    return WritePlan(layout, 0, describe(state), len(values))


def test_addresses_are_read_anew_for_every_save() -> None:
    state: State = {"w": numbers(4), "b": numbers(2)}
    mine = planned(state)
    first, _ = mine.pointers(state, b"[]")
    state["w"] = numbers(4) + 1
    second, _ = mine.pointers(state, b"[]")
    # Rows: b, w, header, blob.
    assert first[0] == second[0] == state["b"].data_ptr()
    assert second[1] == state["w"].data_ptr() != first[1]
    conjugate: State = {"w": torch.tensor([1 + 2j]).conj()}
    mine = planned(conjugate)
    pointers, keep = mine.pointers(conjugate, b"[]")
    assert any(isinstance(kept, torch.Tensor) and kept.data_ptr() == pointers[0] for kept in keep)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w": numbers(3, 4)}, r"w: .*\[4, 3\].*\[3, 4\]"),
        ({"w": numbers(3, 4).t()}, r"w: .*strides"),
        ({"w": numbers(4, 3).double()}, r"w: .*float64"),
        ({"w": torch._neg_view(numbers(4, 3))}, r"w: .*plan anew"),
        ({}, r"w: .*not in the state"),
    ],
)
def test_a_state_that_changed_its_form_is_refused(change: State, message: str) -> None:
    mine = planned({"w": numbers(4, 3)})
    with pytest.raises(LayoutError, match=message):
        mine.pointers(change, b"[]")


def test_values_may_grow_within_their_capacity() -> None:
    state: State = {"w": numbers(2)}
    mine = planned(state, b"x" * 900)
    assert mine.blob == 1024
    pointers, _keep = mine.pointers(state, b"y" * 1024)
    data = bytearray(mine.size)
    mine.table().gather(pointers, 0, mine.size, data)
    assert bytes(data[-1024:]) == b"y" * 1024
    pointers, _keep = mine.pointers(state, b"z")
    mine.table().gather(pointers, 0, mine.size, data)
    assert bytes(data[-1024:]) == blob.pad(b"z", 1024)
    for values in (b"y" * 1025, None):
        with pytest.raises(LayoutError, match="1024"):
            mine.pointers(state, values)


def test_a_plan_for_another_state_is_refused() -> None:
    layout = plan([{"w": numbers(4)}])
    with pytest.raises(LayoutError, match=r"w: rank 0 should write"):
        WritePlan(layout, 0, describe({"v": numbers(4)}), 2)
    with pytest.raises(LayoutError, match="values"):
        WritePlan(layout, 0, describe({"w": numbers(4)}))


def test_twenty_thousand_tensors_are_planned_quickly() -> None:
    """Goal: 0.4 s on an idle core, of which the collector of a process with torch takes a third."""
    state: State = {f"model/layers.{i}.weight": torch.zeros(16, 4) if i % 2 else torch.zeros(64) for i in range(20_000)}
    began = time.process_time()
    described = describe(state)
    said = local_description(described, tree=["tensor"], per_rank=False, world=1)
    layout = compose([said], [[0]], 1)
    mine = WritePlan(layout, 0, described, 100)
    mine.pointers(state, b"[]")
    assert time.process_time() - began < 1.5


def test_sixteen_thousand_ranks_are_planned_quickly() -> None:
    world = 16384
    cut = Cut(Mesh.of(range(world), (16, 128, 8)), (REPLICATED, 0, 0), (2, 1))
    described = {
        f"layers.{i}.w": Described(torch.bfloat16, (8192, 8192), cut, [], object())  # type: ignore[arg-type]
        if i % 10
        else Described(torch.float32, (8192,), None, [], object())  # type: ignore[arg-type]
        for i in range(1000)
    }
    began = time.process_time()
    said = local_description(described, tree=["tensor"], per_rank=True, world=world)
    layout = compose([said], [range(world)], world)
    assert time.process_time() - began < 2
    assert len(said) < 100_000 and len(layout.encode()) < 100_000
    assert len(layout.writers) == world


def _real(rank: int) -> tuple[bytes, dict[int, bytes]]:
    from torch import distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = nn.Sequential(nn.Linear(3, 7), nn.LayerNorm(7))
    for parameter in model.parameters():
        parameter.data = torch.arange(float(parameter.numel())).view(parameter.shape)
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    state: State = dict(model.named_parameters())
    state["tied"] = state["0.weight"]
    described = describe(state)
    said = local_description(described, tree=["tensor"], per_rank=False, world=4)
    everything: list[Any] = [None] * 4
    dist.all_gather_object(everything, said)
    members: dict[bytes, list[int]] = {}
    for other, theirs in enumerate(everything):
        members.setdefault(theirs, []).append(other)
    layout = compose(list(members), list(members.values()), 4)
    mine = WritePlan(layout, rank, described, 2 if layout.has_blob(rank) else None)
    shards = {}
    if mine.header is not None:
        pointers, _keep = mine.pointers(state, b"[]" if layout.has_blob(rank) else None)
        data = bytearray(mine.size)
        mine.table().gather(pointers, 0, mine.size, data)
        shards[rank] = bytes(data)
    return layout.encode(), shards


@lacks.fsdp2_cuts_unevenly
def test_a_real_group_of_fsdp_over_tensor_parallel() -> None:
    results = run_ranks(_real, 4)
    assert len({data for data, _ in results}) == 1
    layout = Layout.decode(results[0][0], what="layout")
    found = load(layout, {rank: data for _, shards in results for rank, data in shards.items()})
    assert aliases(layout) == {"tied": "0.weight"}
    shapes = {"0.weight": (7, 3), "0.bias": (7,), "1.weight": (7,), "1.bias": (7,), "tied": (7, 3)}
    assert {name: tuple(tensor.shape) for name, tensor in found.items()} == shapes
    for name, shape in shapes.items():
        assert torch.equal(found[name], numbers(*shape)), name
