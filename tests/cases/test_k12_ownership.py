"""K12: what is a rank's own stays its own, replicas are stored once, and ranks that disagree are found.

C73 counts the shards that a rank opens on disk; the count of requests to an object store waits for that tier.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.harness import run_ranks
from tierckpt import LayoutError, PerRank, StateError
from tierckpt.tiers.base import Reader
from tierckpt.tiers.disk import DiskPlace

# C67


def _same_name(rank: int, root: str, marked: bool) -> tuple[list[str], list[int] | None]:
    import warnings

    own = torch.tensor([2 * rank, 2 * rank + 1])
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            tierckpt.save({"w": PerRank(own) if marked else own, "t": torch.ones(2)}, root, 1)
        except (StateError, LayoutError, tierckpt.IntegrityError) as error:
            return [str(error)], None
    into = torch.zeros_like(own)
    tierckpt.load({"w": PerRank(into) if marked else into, "t": torch.zeros(2)}, root)
    return [str(w.message) for w in caught], into.tolist()


def test_c67_what_is_marked_is_each_ranks_own(tmp_path: Path) -> None:
    assert run_ranks(_same_name, 2, str(tmp_path), True) == [([], [0, 1]), ([], [2, 3])]


def test_c67_replicas_that_differ_are_told_with_name_and_ranks(tmp_path: Path) -> None:
    for messages, _ in run_ranks(_same_name, 2, str(tmp_path), False):
        assert any("w" in text and "rank" in text and "differ" in text for text in messages), messages


# C69


def _seeds(rank: int, root: str, save: bool) -> list[int]:
    torch.manual_seed(100 + rank if save else 7)
    if save:
        torch.rand(3)
        tierckpt.save({"rng": tierckpt.rng_state(), "t": torch.ones(1)}, root, 1)
    else:
        tierckpt.load({"rng": tierckpt.rng_state(), "t": torch.zeros(1)}, root)
    drawn: list[int] = torch.randint(1 << 30, (8,)).tolist()
    return drawn


def test_c69_random_streams_go_on_and_stay_different(tmp_path: Path) -> None:
    saved = run_ranks(_seeds, 4, str(tmp_path), True)
    assert run_ranks(_seeds, 4, str(tmp_path), False) == saved
    assert len({tuple(drawn) for drawn in saved}) == 4


def _other_world(rank: int, root: str) -> tuple[bool, list[str]]:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    info = tierckpt.load({"rng": tierckpt.rng_state(), "t": torch.zeros(1)}, root)
    return torch.equal(torch.get_rng_state(), before), list(info.untouched)


def test_c69_in_another_world_they_are_left_alone_and_listed(tmp_path: Path) -> None:
    run_ranks(_seeds, 4, str(tmp_path), True)
    assert run_ranks(_other_world, 3, str(tmp_path)) == [(True, ["rng"])] * 3


# C71


def _stage(number: int, value: float) -> torch.nn.ModuleDict:
    model = torch.nn.ModuleDict({f"l{number}": torch.nn.Linear(2, 2)})
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(value)
    return model


def _state_of(optimizer: torch.optim.Optimizer) -> list[list[float]]:
    return [optimizer.state[p]["exp_avg"].flatten().tolist() for g in optimizer.param_groups for p in g["params"]]


def _saves_stage(rank: int, root: str) -> list[list[float]]:
    model = _stage(rank, rank + 1.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=(0.1, 0.2)[rank])
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, rank + 1.0)
    optimizer.step()
    tierckpt.save({"model": model, "optim": optimizer}, root, 1)
    return _state_of(optimizer)


def _loads_stage(rank: int, root: str) -> tuple[float, list[list[float]]]:
    model = _stage(rank, 0.0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=9.0)
    tierckpt.load({"model": model, "optim": optimizer}, root)
    return optimizer.param_groups[0]["lr"], _state_of(optimizer)


def test_c71_pipeline_stages_keep_their_own_groups_and_moments(tmp_path: Path) -> None:
    first, second = run_ranks(_saves_stage, 2, str(tmp_path))
    assert run_ranks(_loads_stage, 2, str(tmp_path)) == [(0.1, first), (0.2, second)]
    merged = torch.nn.ModuleDict({**_stage(0, 0.0), **_stage(1, 0.0)})
    groups = [{"params": list(merged["l1"].parameters())}, {"params": list(merged["l0"].parameters())}]
    optimizer = torch.optim.AdamW(groups, lr=9.0)  # groups match by their parameters, whatever their order
    tierckpt.load({"model": merged, "optim": optimizer}, tmp_path)
    assert [group["lr"] for group in optimizer.param_groups] == [0.2, 0.1]
    assert _state_of(optimizer) == second + first


# C73


def _hybrid(world: int, *, zero: bool) -> dict[str, Any]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("replicate", "shard"))
    scale = 0 if zero else 1
    return {
        **{
            f"big{n}": distribute_tensor(
                torch.arange(40_000.0).reshape(200, 200) * scale, mesh, [Replicate(), Shard(0)]
            )
            for n in range(8)
        },
        **{f"small{n}": torch.full((50,), float(n * scale)) for n in range(40)},
    }


def _saves_hybrid(rank: int, root: str, world: int) -> None:
    tierckpt.save(_hybrid(world, zero=False), root, 1)


def _loads_hybrid(rank: int, root: str, world: int) -> list[str]:
    opened: list[str] = []
    original = DiskPlace.open

    def counted(self: DiskPlace, name: str) -> Reader:
        opened.append(name)
        return original(self, name)

    DiskPlace.open = counted  # type: ignore[method-assign]
    found, wanted = _hybrid(world, zero=True), _hybrid(world, zero=False)
    tierckpt.load(found, root)
    for name, tensor in found.items():
        left, right = (t.to_local() if name.startswith("big") else t for t in (tensor, wanted[name]))
        assert torch.equal(left, right), name
    return [name for name in opened if name.endswith(".safetensors")]


@pytest.mark.parametrize("world", [4, 8])
def test_c73_replicas_are_written_once_and_read_from_few_shards(tmp_path: Path, world: int) -> None:
    run_ranks(_saves_hybrid, world, str(tmp_path), world)
    sizes = [path.stat().st_size for path in tmp_path.rglob("shard-*.safetensors")]
    bytes_of_state = 8 * 40_000 * 4 + 40 * 50 * 4
    assert len(sizes) == world
    assert bytes_of_state < sum(sizes) < bytes_of_state + 16_384 * world
    assert max(sizes) / min(sizes) <= 1.5
    for opened in run_ranks(_loads_hybrid, world, str(tmp_path), world):
        assert len(set(opened)) <= 1 + 3
