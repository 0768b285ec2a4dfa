"""Ranks that should hold the same but do not are named: small tensors and values at every save, large ones in turns."""

from __future__ import annotations

import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

import tierckpt
from tests.harness import run_ranks
from tierckpt import Checkpointer, Pieces, StateError
from tierckpt.state.adapters import pieces_of
from tierckpt.state.replicas import SMALL, TURNS


def _said(ckpt: Checkpointer, step: int, state: Any) -> list[str]:
    """The lines that name what differs."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ckpt.save(step, state).wait()
    text = "\n".join(str(warning.message) for warning in caught)
    return [line.strip() for line in text.splitlines() if "hold different replicas" in line]


def _plain(rank: int, root: str) -> list[list[str]]:
    same, own = torch.arange(8.0), torch.arange(8.0)
    state = {"same": same, "own": own, "n": 3, "view": torch.arange(12.0).reshape(3, 4).t()}
    with Checkpointer(root, agent="off") as ckpt:
        found = [_said(ckpt, 0, state)]
        own[3] += rank == 2
        found.append(_said(ckpt, 1, state))
        state["n"] = 3 + (rank > 1)
        own[3] = 3
        found.append(_said(ckpt, 2, state))
    return found


def test_small_tensors_and_values_are_compared_at_every_save(tmp_path: Path) -> None:
    results = run_ranks(_plain, 4, str(tmp_path / "store"))
    assert all(result == results[0] for result in results)
    equal, tensor, value = results[0]
    assert equal == []
    assert tensor == ["own: ranks 0-1, 3 | 2 hold different replicas; saves take that of rank 0"]
    assert value == ["n: ranks 0-1 | 2-3 hold different replicas; saves take that of rank 0"]


def _all_differ(rank: int, root: str) -> list[str]:
    with Checkpointer(root, agent="off") as ckpt:
        sizes = {"mean": 8, "var": 8, "w0": 20_000, "w1": 20_001, "w2": 20_002}
        state = {**{name: torch.full((n,), float(rank)) for name, n in sizes.items()}, "n": rank}
        return [line for step in range(TURNS) for line in _said(ckpt, step, state)]


def test_what_is_said_to_be_saved_is(tmp_path: Path) -> None:
    lines = run_ranks(_all_differ, 3, str(tmp_path / "store"))[0]
    found = tierckpt.read(tmp_path / "store")
    told = {line.partition(":")[0]: int(line.rpartition("rank ")[2]) for line in lines}
    assert told == {name: int(value if name == "n" else value[0]) for name, value in found.items()}
    assert len(set(told.values())) > 1
    assert told["mean"] == told["var"] == told["n"] == 0, "what belongs together is of one rank"


def _batch_norm(rank: int, root: str) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8)
    )
    model = torch.nn.parallel.DistributedDataParallel(model)
    torch.manual_seed(rank)
    with Checkpointer(root, agent="off") as ckpt, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for step in range(3):
            model(torch.randn(16, 4) * (1 + rank)).sum().backward()
            ckpt.save(step, {"model": model}).wait()
        mine = [each.clone() for each in model.buffers()]
        ckpt.restore({"model": model})
    return [*mine, *model.buffers()]


def test_the_statistics_of_batch_norm_are_those_of_one_rank(tmp_path: Path) -> None:
    """Mean and variance of different ranks together would be those of no data at all."""
    first, second = run_ranks(_batch_norm, 2, str(tmp_path / "store"))
    saved, others, half = first[:6], second[:6], len(first) // 2
    assert not torch.equal(saved[0], others[0])
    assert all(map(torch.equal, first[half:], saved)) and all(map(torch.equal, second[half:], saved))


def _sharded(rank: int, root: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    full = torch.arange(12.0)
    local = full.chunk(2)[rank % 2].clone()
    local[0] += rank == 3
    tensor = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)
    with Checkpointer(root, agent="off") as ckpt:
        return _said(ckpt, 0, {"w": tensor})


def test_only_ranks_with_the_same_box_are_compared(tmp_path: Path) -> None:
    assert run_ranks(_sharded, 4, str(tmp_path / "store"))[0] == [
        "w: ranks 1 | 3 hold different replicas; saves take that of rank 1"
    ]


def _of_pieces(rank: int, root: str) -> list[list[str]]:
    """Ranks 0 and 2 hold the first rows of ``w``, 1 and 3 the others, in orders of their own; all hold ``norm``."""
    rows = torch.arange(12.0).reshape(6, 2)
    mine = [((3 * (rank % 2) + at, 0), rows[at : at + n].clone()) for at, n in ((0, 1), (1, 2))]
    norm = torch.ones(4)
    state = {
        "w": Pieces((6, 2), mine[:: 1 if rank < 2 else -1]),
        "norm": Pieces((4,), [((0,), norm)]),
        "own": Pieces((4,), [((rank,), torch.full((1,), float(rank)))]),
    }
    with Checkpointer(root, agent="off") as ckpt:
        found = [_said(ckpt, 0, state)]
        norm[0] += rank == 1
        found.append(_said(ckpt, 1, state))
        norm[0] = 1
        mine[1][1][0, 0] += rank == 3
        found.append(_said(ckpt, 2, state))
    return found


def test_pieces_that_several_ranks_hold_are_compared_at_every_save(tmp_path: Path) -> None:
    results = run_ranks(_of_pieces, 4, str(tmp_path / "store"))
    assert all(result == results[0] for result in results)
    assert results[0] == [
        [],
        ["norm: ranks 0, 2-3 | 1 hold different replicas; saves take that of rank 0"],
        ["w: ranks 1 | 3 hold different replicas; saves take a part of each of ranks 1, 3"],
    ]


def _shared_in_part(rank: int, root: str) -> list[str]:
    """Ranks 0 and 1 share a box, and 1 and 2 another one."""
    held = {0: ["a"], 1: ["a", "b"], 2: ["b", "c"]}[rank]
    state = {"x": Pieces((6,), [((2 * "abc".index(box),), torch.zeros(2)) for box in held])}
    state["x"].pieces[-1][1][1] = rank == 2
    state["x"].pieces[0][1][1] = rank == 2
    with Checkpointer(root, agent="off") as ckpt:
        return _said(ckpt, 0, state)


def test_ranks_compare_what_they_share_and_not_what_they_do_not(tmp_path: Path) -> None:
    assert run_ranks(_shared_in_part, 3, str(tmp_path / "store"))[0] == [
        "x: ranks 1 | 2 hold different replicas; saves take a part of each of ranks 1-2"
    ]


def _large_pieces(rank: int, root: str) -> int:
    large = torch.zeros(SMALL)
    large[-1] = rank
    state = {"large": Pieces((SMALL,), [((0,), large)]), "small": Pieces((2,), [((0,), torch.zeros(2))])}
    with Checkpointer(root, agent="off") as ckpt:
        return sum(bool(_said(ckpt, step, state)) for step in range(TURNS))


def test_large_pieces_take_turns(tmp_path: Path) -> None:
    assert run_ranks(_large_pieces, 2, str(tmp_path / "store")) == [1, 1]


def _adapted(rank: int, root: str) -> list[list[str]]:
    """Parameters that FSDP1 has flattened and not cut, and a tensor of Megatron-core."""
    from torch.distributed.fsdp import FullyShardedDataParallel, ShardingStrategy

    torch.manual_seed(0)
    module = FullyShardedDataParallel(
        torch.nn.Linear(3, 2), sharding_strategy=ShardingStrategy.NO_SHARD, device_id=torch.device("cpu")
    )
    data = torch.ones(2, 2)
    named = {"key": "mcore.w", "global_shape": (2, 2), "global_offset": (0, 0), "axis_fragmentations": None}
    state = pieces_of({"m": module, "x": SimpleNamespace(data=data, **named)})
    with Checkpointer(root, agent="off") as ckpt:
        found = [_said(ckpt, 0, state)]
        data[1, 1] += rank
        next(module.parameters()).data.view(-1)[0] += rank
        found.append(_said(ckpt, 1, state))
    return found


def test_replicas_that_other_libraries_hold_are_compared(tmp_path: Path) -> None:
    equal, differing = run_ranks(_adapted, 2, str(tmp_path / "store"))[0]
    assert equal == []
    assert sorted(line.split(":")[0] for line in differing) == ["m.weight", "mcore.w"]


def _large(rank: int, root: str) -> int:
    state = {"large": torch.zeros(SMALL), "small": torch.zeros(2)}  # float32: four times the limit
    state["large"][-1] = rank
    with Checkpointer(root, agent="off") as ckpt:
        return sum(bool(_said(ckpt, step, state)) for step in range(TURNS))


def test_large_tensors_take_turns(tmp_path: Path) -> None:
    assert run_ranks(_large, 2, str(tmp_path / "store")) == [1, 1]


def _refused(rank: int, root: str) -> tuple[str, list[int]]:
    state = {"w": torch.full((2,), float(rank))}
    with Checkpointer(root, agent="off", on_disagreement="refuse") as ckpt:
        handle = ckpt.save(0, state)
        with pytest.raises(StateError) as caught:
            handle.wait()
        state["w"].zero_()
        ckpt.save(1, state).wait()
    return str(caught.value), tierckpt.steps(root)


def test_a_disagreement_can_be_refused(tmp_path: Path) -> None:
    for message, steps in run_ranks(_refused, 2, str(tmp_path / "store")):
        assert "w: ranks 0 | 1 hold different replicas" in message and "PerRank" in message
        assert steps == [1]
