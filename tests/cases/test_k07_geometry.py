"""K07: every way to cut a tensor over ranks, uneven, empty and strided ones too, loads into every other way.

The arms of C35 and C37 through the DCP StorageWriter wait for that adapter.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierckpt
from tests import lacks
from tests.harness import run_ranks
from tierckpt import Pieces

# C31

_ROWS = (1, 2, 3, 5, 6, 7)


def _numbers(rows: int) -> torch.Tensor:
    return torch.arange(rows * 3).reshape(rows, 3)


def _cut(dim: int | None, *, zero: bool) -> dict[str, Any]:
    """`_numbers` of all sizes, or zeros, cut over all ranks along ``dim``; None: whole."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    tensors = {f"w{rows}": torch.zeros_like(_numbers(rows)) if zero else _numbers(rows) for rows in _ROWS}
    if dim is None:
        return tensors
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {name: distribute_tensor(tensor, mesh, [Shard(dim)]) for name, tensor in tensors.items()}


def _saves_rows(rank: int, root: str) -> None:
    tierckpt.save(_cut(0, zero=False), root, 1)


def _loads_rows(rank: int, root: str, dim: int | None) -> list[tuple[int, ...]]:
    found = _cut(dim, zero=True)
    tierckpt.load(found, root)
    right = _cut(dim, zero=False)
    shapes = []
    for name, tensor in found.items():
        local, wanted = (t if dim is None else t.to_local() for t in (tensor, right[name]))
        assert local.dtype == torch.int64 and torch.equal(local, wanted), (name, local, wanted)
        shapes.append(tuple(local.shape))
    whole = tierckpt.read(root)
    assert all(torch.equal(whole[f"w{rows}"], _numbers(rows)) for rows in _ROWS)
    return shapes


def test_c31_uneven_and_empty_pieces(tmp_path: Path) -> None:
    run_ranks(_saves_rows, 4, str(tmp_path))
    assert tierckpt.verify(tmp_path).ok
    for world, dim in ((4, 0), (1, None), (2, 0), (3, 0), (5, 0), (3, 1)):
        shapes = run_ranks(_loads_rows, world, str(tmp_path), dim)
        if (world, dim) == (4, 0):
            assert [rank[_ROWS.index(6)] for rank in shapes] == [(2, 3), (2, 3), (2, 3), (0, 3)]


# C33


class _Tiny(nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.lin = nn.Linear(1, 1)
        self.p = nn.Parameter(torch.tensor([value]))
        with torch.no_grad():
            self.lin.weight.fill_(value)
            self.lin.bias.fill_(value)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.lin(x) * self.p
        return out


def _tiny(value: float, *, fsdp: bool) -> tuple[nn.Module, torch.optim.Optimizer]:
    model: nn.Module = _Tiny(value)
    if fsdp:
        import torch.distributed as dist
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _whole(tensor: Any) -> torch.Tensor:
    whole: torch.Tensor = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
    return whole.detach().clone()


def _everything(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {}
    for name, parameter in model.named_parameters():
        found[name] = _whole(parameter)
        for key, value in optimizer.state[parameter].items():
            found[f"{name}.{key}"] = _whole(value)
    return found


def _saves_tiny(rank: int, root: str) -> dict[str, torch.Tensor]:
    model, optimizer = _tiny(1.5, fsdp=True)
    model(torch.ones(2, 1)).sum().backward()
    optimizer.step()
    tierckpt.save({"model": model, "optim": optimizer}, root, 1)
    return _everything(model, optimizer)


def _loads_tiny(rank: int, root: str, fsdp: bool) -> dict[str, torch.Tensor]:
    model, optimizer = _tiny(9.0, fsdp=fsdp)
    tierckpt.load({"model": model, "optim": optimizer}, root)
    return _everything(model, optimizer)


@lacks.fsdp2_trains_on_cpu
def test_c33_one_element_parameters_under_fsdp(tmp_path: Path) -> None:
    saved = run_ranks(_saves_tiny, 2, str(tmp_path))[0]
    assert len(saved) == 3 * 4 and saved["p.step"] == 1
    for world, fsdp in ((1, False), (3, True), (2, True)):
        for found in run_ranks(_loads_tiny, world, str(tmp_path), fsdp):
            assert found.keys() == saved.keys()
            assert all(torch.equal(found[name], saved[name]) for name in saved)


# C35


def _mlp(width: int, *, zero: bool) -> nn.Module:
    model = nn.Sequential()
    model.add_module("a", nn.Linear(5, width))
    model.add_module("b", nn.Linear(width, 5))
    with torch.no_grad():
        start = 0
        for parameter in model.parameters():
            count = parameter.numel()
            values = torch.arange(start, start + count, dtype=torch.float32).reshape(parameter.shape)
            parameter.copy_(torch.zeros_like(values) if zero else values)
            start += count
    return model


def _parallel(widths: tuple[int, ...], dp: int, tp: int, *, zero: bool) -> dict[str, nn.Module]:
    """MLPs of these widths; tp=0: plain; dp=0: tensor parallel only; else FSDP2 over tensor parallel."""
    models = {f"m{width}": _mlp(width, zero=zero) for width in widths}
    if tp:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

        mesh = init_device_mesh("cpu", (dp or 1, tp), mesh_dim_names=("dp", "tp"))
        for model in models.values():
            parallelize_module(model, mesh["tp"], {"a": ColwiseParallel(), "b": RowwiseParallel()})
            if dp:
                fully_shard(model, mesh=mesh["dp"])
    return models


def _saves_mlps(rank: int, root: str, widths: tuple[int, ...], dp: int, tp: int) -> None:
    tierckpt.save(_parallel(widths, dp, tp, zero=False), root, 1)


def _loads_mlps(rank: int, root: str, widths: tuple[int, ...], dp: int, tp: int) -> None:
    models = _parallel(widths, dp, tp, zero=True)
    tierckpt.load(models, root)
    for name, model in models.items():
        right = dict(_mlp(int(name[1:]), zero=False).named_parameters())
        for key, parameter in model.named_parameters():
            assert torch.equal(_gathered(parameter), right[key]), (name, key)


def _gathered(parameter: Any) -> torch.Tensor:
    """The global values of a parameter. ``full_tensor()`` is wrong for uneven strided shards, so each rank puts its
    local values where its own cutting, by ``torch.chunk``, says."""
    import torch.distributed as dist
    from torch.distributed.tensor.placement_types import _StridedShard

    if not hasattr(parameter, "to_local"):
        return torch.as_tensor(parameter.detach())
    mesh, local = parameter.device_mesh, parameter.to_local().detach()
    places = torch.arange(parameter.numel()).reshape(parameter.shape)
    placements = list(enumerate(parameter.placements))
    if any(isinstance(placement, _StridedShard) for _, placement in placements):
        placements.reverse()
    for number, placement in placements:
        if hasattr(placement, "dim"):
            parts = torch.chunk(places, mesh.size(number), placement.dim)
            coordinate = mesh.get_local_rank(number)
            empty = places.narrow(placement.dim, 0, 0)
            places = parts[coordinate] if coordinate < len(parts) else empty
    assert places.shape == local.shape
    told: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(told, (places, local))
    whole = torch.full((parameter.numel(),), float("nan"))
    for where, values in told:
        whole[where.flatten()] = values.flatten()
    return whole.reshape(parameter.shape)


@lacks.fsdp2_cuts_unevenly
@pytest.mark.parametrize(
    ("widths", "dp", "tp", "others"),
    [((13, 19, 25), 3, 2, [(0, 0), (3, 2), (2, 3), (0, 2)]), ((20,), 3, 3, [(0, 0), (2, 2)])],
    ids=["dp3xtp2", "dp3xtp3"],
)
def test_c35_fsdp_over_tp_of_sizes_that_do_not_divide(
    tmp_path: Path, widths: tuple[int, ...], dp: int, tp: int, others: list[tuple[int, int]]
) -> None:
    run_ranks(_saves_mlps, dp * tp, str(tmp_path), widths, dp, tp)
    report = tierckpt.verify(tmp_path)
    assert report.ok, report.problems
    found = tierckpt.read(tmp_path)
    for width in widths:
        for key, value in _mlp(width, zero=False).state_dict().items():
            assert torch.equal(found[f"m{width}"][key], value)
    for dp_now, tp_now in others:
        run_ranks(_loads_mlps, max(1, dp_now) * max(1, tp_now), str(tmp_path), widths, dp_now, tp_now)


# C37

_FC1 = torch.arange(48.0).reshape(16, 3)


def _fused(rank: int, world: int, *, zero: bool) -> tuple[torch.Tensor, Pieces]:
    """What rank holds of [W; V]: its rows of W, then its rows of V, one local tensor."""
    rows = 8 // world
    local = torch.cat([_FC1[rank * rows : (rank + 1) * rows], _FC1[8 + rank * rows : 8 + (rank + 1) * rows]])
    if zero:
        local.zero_()
    return local, Pieces((16, 3), [((rank * rows, 0), local[:rows]), ((8 + rank * rows, 0), local[rows:])])


def _saves_fused(rank: int, root: str, world: int) -> None:
    tierckpt.save({"fc1": _fused(rank, world, zero=False)[1]}, root, 1)


def _loads_fused(rank: int, root: str, world: int) -> None:
    local, pieces = _fused(rank, world, zero=True)
    tierckpt.load({"fc1": pieces}, root)
    assert torch.equal(local, _fused(rank, world, zero=False)[0])


def _loads_fused_shards(rank: int, root: str, world: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (world,))
    found = distribute_tensor(torch.zeros(16, 3), mesh, [Shard(0)])
    tierckpt.load({"fc1": found}, root)
    assert torch.equal(found.to_local(), _FC1[2 * rank : 2 * rank + 2])


def test_c37_fused_weights_are_pieces_with_offsets(tmp_path: Path) -> None:
    run_ranks(_saves_fused, 2, str(tmp_path), 2)
    assert tierckpt.verify(tmp_path).ok
    whole = {"fc1": torch.zeros(16, 3)}
    tierckpt.load(whole, tmp_path)
    assert torch.equal(whole["fc1"], _FC1)
    assert torch.equal(tierckpt.read(tmp_path)["fc1"], _FC1)
    run_ranks(_loads_fused, 4, str(tmp_path), 4)
    run_ranks(_loads_fused_shards, 8, str(tmp_path), 8)


def _overlapping(rank: int, root: str) -> str:
    tensor = torch.ones(5, 3)
    offset = (rank * 4, 0)  # rows 4 twice
    with pytest.raises(tierckpt.LayoutError) as caught:
        tierckpt.save({"w": Pieces((9, 3), [(offset, tensor)])}, root, 1)
    with pytest.raises(tierckpt.LayoutError) as hole:
        tierckpt.save({"w": Pieces((9, 3), [(offset, tensor[:4])])}, root, 1)
    return f"{caught.value} {hole.value}"


def test_c35_pieces_that_do_not_tile_fail_the_save_on_all_ranks(tmp_path: Path) -> None:
    texts = run_ranks(_overlapping, 2, str(tmp_path))
    assert texts[0] == texts[1] and "w" in texts[0] and "ranks" in texts[0]
    assert tierckpt.latest(tmp_path) is None
