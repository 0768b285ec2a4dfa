"""Protects what a rank says that it holds: a box that is not the local tensor's is silent corruption.

Placements of thousands of meshes are tried without processes, against really chunking a tensor of element
numbers; torch itself is asked in a few small process groups, with shapes for which its own offsets are wrong.
"""

from __future__ import annotations

import random
from math import prod
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests import lacks
from tests.harness import run_ranks
from tierckpt.errors import LayoutError
from tierckpt.format.boxes import Box, tiles
from tierckpt.format.grid import Cut, Mesh
from tierckpt.state.layout import Describer, describe, destination, destinations, overlaps
from tierckpt.state.marks import Pieces


def at(tensor: torch.Tensor, box: Box) -> torch.Tensor:
    return tensor[tuple(slice(o, o + s) for o, s in zip(box.offset, box.size, strict=True))]


def spec(
    ranks: list[int], sizes: tuple[int, ...], placements: tuple[Any, ...], coordinate: tuple[int, ...] | None
) -> Any:
    """What a DTensorSpec has of a mesh, without processes."""
    mesh = SimpleNamespace(mesh=torch.tensor(ranks).view(sizes), shape=sizes, get_coordinate=lambda: coordinate)
    return SimpleNamespace(mesh=mesh, placements=placements, shard_order=None)


def placements_of(order: dict[int, list[int]], sizes: tuple[int, ...]) -> tuple[Any, ...]:
    """How torch writes it that mesh dimensions cut tensor dimensions in this order."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    found: list[Any] = [Replicate()] * len(sizes)
    for p, dims in order.items():
        for number, d in enumerate(dims):
            factor = prod(sizes[e] for e in dims[:number] if e > d)
            found[d] = _StridedShard(p, split_factor=factor) if factor > 1 else Shard(p)
    return tuple(found)


@pytest.mark.parametrize("seed", range(8))
def test_boxes_of_any_mesh_and_placements_are_those_of_chunking_in_order(seed: int) -> None:
    """250 meshes of up to 4 dimensions each: primes, sizes below the mesh, empty pieces, any order."""
    rng = random.Random(seed)
    for _ in range(250):
        sizes = tuple(rng.choice([1, 2, 2, 3, 4, 5]) for _ in range(rng.randint(1, 4)))
        shape = tuple(rng.choice([1, 2, 3, 5, 6, 13, 19, 25]) for _ in range(rng.randint(1, 3)))
        order: dict[int, list[int]] = {}
        for d in rng.sample(range(len(sizes)), len(sizes)):
            p = rng.randrange(-1, len(shape))
            if p >= 0:
                order.setdefault(p, []).append(d)
        world = prod(sizes)
        ranks = list(range(world)) if rng.random() < 0.7 else rng.sample(range(world + 3), world)
        numbers = torch.arange(prod(shape)).reshape(shape)
        placements = placements_of(order, sizes)
        seen: set[Box] = set()
        for index in rng.sample(range(world), min(world, 12)):
            coordinate = tuple(int(c) for c in torch.unravel_index(torch.tensor(index), sizes))
            left = numbers
            for p, dims in order.items():
                for d in dims:
                    parts = left.chunk(sizes[d], dim=p) if left.shape[p] else ()
                    left = parts[coordinate[d]] if coordinate[d] < len(parts) else left.narrow(p, 0, 0)
            cut, place = Describer()._cut(spec(ranks, sizes, placements, coordinate), "w")
            assert place is not None
            box = cut.box(shape, place)
            assert box.size == tuple(left.shape)
            assert torch.equal(at(numbers, box), left)
            if cut.order:
                assert cut.mesh.rank(place) == ranks[index]
            seen.add(box)
        if world <= 12:
            assert tiles(shape, [box for box in seen if 0 not in box.size]) is None


def test_the_default_order_of_later_torch_is_taken_from_the_spec() -> None:
    from torch.distributed.tensor import Shard

    given = spec([0, 1, 2, 3], (2, 2), (Shard(0), Shard(0)), (0, 1))
    given.shard_order = (SimpleNamespace(tensor_dim=0, mesh_dims=(1, 0)),)
    cut, place = Describer()._cut(given, "w")
    assert place is not None
    assert cut.box((8,), place) == Box((4,), (2,))


def test_ranks_of_a_mesh_become_ranks_of_the_group() -> None:
    from torch.distributed.tensor import Replicate, Shard

    on_mesh = spec([12, 14], (2,), (Shard(0),), (1,))
    cut, place = Describer([10, 12, 14])._cut(on_mesh, "w")
    assert list(cut.mesh) == [1, 2] and place == (1,)
    with pytest.raises(LayoutError, match=r"layers\.w.*\[12\]"):
        Describer([10, 14])._cut(on_mesh, "layers.w")
    replicated = spec([3, 1], (1, 2), (Shard(0), Replicate()), (0, 1))
    assert Describer()._cut(replicated, "w")[0] == Cut.replicated([1, 3])


def test_what_is_no_box_is_refused_by_name() -> None:
    from torch.distributed.tensor import Partial, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    with pytest.raises(LayoutError, match=r"grad: Partial"):
        Describer()._cut(spec([0, 1], (2,), (Partial(),), (0,)), "grad")
    with pytest.raises(LayoutError, match=r"view: .*no boxes"):
        Describer()._cut(spec([0, 1], (2,), (_StridedShard(0, split_factor=3),), (0,)), "view")
    with pytest.raises(LayoutError, match=r"view: .*no boxes"):
        placements = (_StridedShard(0, split_factor=2), Shard(0))
        Describer()._cut(spec(list(range(9)), (3, 3), placements, (0, 0)), "view")
    view = spec(list(range(4)), (2, 2), (_StridedShard(0, split_factor=2), Shard(0)), (0, 0))
    view.use_strided_shard_as_shard_order = False
    with pytest.raises(LayoutError, match=r"flat: a view"):
        Describer()._cut(view, "flat")


def test_plain_tensors_are_whole() -> None:
    parameter = nn.Parameter(torch.zeros(3, 4, dtype=torch.bfloat16))
    found = describe(parameter, name="w")
    assert found.dtype is torch.bfloat16 and found.shape == (3, 4) and type(found.shape) is tuple
    assert found.cut is None
    assert found.pieces == [(Box((0, 0), (3, 4)), parameter)] and found.pieces[0][1] is parameter
    scalar = describe(torch.tensor(3.5), name="s")
    assert scalar.shape == () and scalar.pieces[0][0] == Box((), ())
    assert describe(torch.empty(2, 0), name="e").pieces == []


def test_pieces_are_listed_without_the_empty_ones() -> None:
    a, b = torch.zeros(2, 3), torch.ones(1, 3)
    found = describe(Pieces((8, 3), [((0, 0), a), ((4, 0), torch.empty(0, 3)), ((7, 0), b)]), name="w")
    assert found.cut == (Box((0, 0), (2, 3)), Box((7, 0), (1, 3)))
    assert [tensor for _, tensor in found.pieces] == [a, b] or found.pieces[1][1] is b
    assert found.shape == (8, 3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.empty(2, device="meta"), "meta"),
        (torch.eye(2).to_sparse(), "strided"),
        ([1], "list"),
        (nn.UninitializedParameter(), "UninitializedParameter"),
    ],
)
def test_what_has_no_plain_memory_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=rf"opt/m: .*{message}"):
        describe(value, name="opt/m")


def test_destinations_are_the_live_memory_through_its_strides() -> None:
    base = torch.zeros(4, 6)
    for view in (base.t(), base[:, ::2], base[1], torch.zeros(())):
        (found,) = destinations(view, name="w")
        assert found.target is None and found.memory.data_ptr() == view.data_ptr()
        assert found.memory.stride() == view.stride()
    parameter = nn.Parameter(torch.zeros(2))
    (found,) = destinations(parameter, name="w")
    found.memory.fill_(7)
    found.finish()
    assert parameter.tolist() == [7, 7]
    assert destinations(torch.empty(0, 3), name="w") == []


def test_destinations_that_are_lazy_views_get_memory_of_their_own() -> None:
    storage = torch.zeros(2, dtype=torch.complex64)
    found = destination(Box((0,), (2,)), storage.conj(), name="w")
    found.memory.copy_(torch.tensor([1 + 2j, 3 - 4j]))
    found.finish()
    assert storage.tolist() == [1 - 2j, 3 + 4j]
    real = torch.zeros(2)
    found = destination(Box((0,), (2,)), torch._neg_view(real), name="w")
    found.memory.copy_(torch.tensor([1.0, 3.0]))
    found.finish()
    assert real.tolist() == [-1, -3]


@pytest.mark.parametrize(
    ("size", "stride", "shared"),
    [
        ((2, 3), (3, 1), False),
        ((3, 2), (1, 3), False),
        ((4, 3), (1, 1), True),
        ((1000, 1000), (0, 0), True),
        ((2, 1), (1, 0), False),
        ((0, 5), (0, 0), False),
        ((3, 2), (2, 3), False),  # 0 2 4 and 3 5 7: interleaved, but different
        ((4, 2), (2, 6), True),
        ((), (), False),
    ],
)
def test_overlaps(size: tuple[int, ...], stride: tuple[int, ...], shared: bool) -> None:
    tensor = torch.arange(100).as_strided(size, stride)
    assert overlaps(tensor) == shared
    if shared:
        with pytest.raises(LayoutError, match=r"m/w: .*same memory"):
            destinations(tensor, name="m/w")


class _Model(nn.Module):
    def __init__(self, dim: int) -> None:
        super().__init__()
        self.a = nn.Linear(5, dim)
        self.b = nn.Linear(dim, 5)
        self.one = nn.Linear(1, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(self.b(self.a(x)).sum(-1, keepdim=True))  # type: ignore[no-any-return]


def _fsdp_over_tp(rank: int, dp: int, tp: int, dim: int) -> list[tuple[str, Box, list[float], Cut | None]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
    model = _Model(dim)
    for parameter in model.parameters():
        parameter.data = torch.arange(float(parameter.numel())).view(parameter.shape)
    if tp > 1:
        parallelize_module(model, mesh["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
    if dp > 1:
        fully_shard(model, mesh=mesh["dp"])
    describer = Describer()
    found = []
    for name, parameter in model.named_parameters():
        described = describer.describe(parameter, name=name)
        assert not isinstance(described.cut, tuple)
        for box, local in described.pieces:
            assert box.size == tuple(local.shape)
            found.append((name, box, local.detach().flatten().tolist(), described.cut))
        if not described.pieces:
            found.append((name, Box((), ()), [], described.cut))
    return found


_UNEVEN = [
    pytest.param(*form, marks=lacks.fsdp2_cuts_unevenly) for form in [(3, 2, 13), (3, 2, 19), (3, 2, 25), (2, 2, 1)]
]


@pytest.mark.parametrize(("dp", "tp", "dim"), [*_UNEVEN, (2, 2, 8), (4, 1, 7), (1, 3, 8)])
def test_fsdp_and_tensor_parallel_pieces_are_where_their_values_say(dp: int, tp: int, dim: int) -> None:
    """The values are element numbers: each local tensor says itself where it was cut from. Stock torch 2.13
    computes wrong offsets for the first three."""
    shapes = {"a.weight": (dim, 5), "a.bias": (dim,), "b.weight": (5, dim), "b.bias": (5,)}
    shapes |= {"one.weight": (1, 1), "one.bias": (1,)}
    held: dict[str, set[Box]] = {name: set() for name in shapes}
    cuts: dict[str, set[Cut | None]] = {name: set() for name in shapes}
    for found in run_ranks(_fsdp_over_tp, dp * tp, dp, tp, dim):
        for name, box, values, cut in found:
            numbers = torch.arange(float(prod(shapes[name]))).view(shapes[name])
            cuts[name].add(cut)
            if values:
                assert at(numbers, box).flatten().tolist() == values, (name, box)
                held[name].add(box)
    for name, shape in shapes.items():
        assert tiles(shape, sorted(held[name])) is None
        if name.startswith("a."):
            # All ranks say the same about it.
            assert len(cuts[name]) == 1


def _dtensors(rank: int) -> dict[str, Any]:
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (4,))
    described = Describer()
    found: dict[str, Any] = {}
    for rows in (1, 2, 3, 5, 6, 7):
        tensor = torch.arange(float(rows * 3)).view(rows, 3)
        one = described.describe(distribute_tensor(tensor, mesh, [Shard(0)]), name="w")
        for box, local in one.pieces:
            assert torch.equal(at(tensor, box), local)
        found[f"rows{rows}"] = [box for box, _ in one.pieces]
    scalar = described.describe(distribute_tensor(torch.tensor(2.0), mesh, [Replicate()]), name="s")
    assert scalar.shape == () and scalar.cut == Cut.replicated(range(4)) and len(scalar.pieces) == 1
    # A mesh of two of the four ranks, as a stage of a pipeline has it.
    stage = DeviceMesh("cpu", [1, 3])
    local = torch.full((2, 2), float(rank)) if rank in (1, 3) else torch.empty(0)
    staged = DTensor.from_local(local, stage, [Shard(0)], run_check=False, shape=torch.Size((4, 2)), stride=(2, 1))
    one = described.describe(staged, name="p")
    assert one.cut == Cut(Mesh.of([1, 3], (2,)), (0,), (0,))
    found["stage"] = [box for box, _ in one.pieces]
    wrong = DTensor.from_local(
        torch.zeros(3, 2), mesh, [Shard(0)], run_check=False, shape=torch.Size((8, 2)), stride=(2, 1)
    )
    partial = DTensor.from_local(torch.zeros(3), mesh, [Partial()], run_check=False)
    found["errors"] = []
    for name, value in (("wrong", wrong), ("partial", partial)):
        with pytest.raises(LayoutError) as caught:
            described.describe(value, name=name)
        found["errors"].append(str(caught.value))
    return found


def test_dtensors_of_a_real_group() -> None:
    results = run_ranks(_dtensors, 4)
    for rows in (1, 2, 3, 5, 6, 7):
        assert tiles((rows, 3), [box for found in results for box in found[f"rows{rows}"]]) is None
    assert [found["stage"] for found in results] == [
        [], [Box((0, 0), (2, 2))], [], [Box((2, 0), (2, 2))]
    ]  # fmt: skip
    for rank, found in enumerate(results):
        wrong, partial = found["errors"]
        assert wrong.startswith(f"wrong: rank {rank} should hold") and "[2, 2]" in wrong and "[3, 2]" in wrong
        assert partial.startswith("partial: Partial")
