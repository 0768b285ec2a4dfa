"""Ranks that should hold the same but do not are named: small tensors and values at every save, large ones in turns."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

from tests.harness import run_ranks
from tierckpt import Checkpointer, StateError
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
    assert tensor == ["own: ranks 0-1, 3 | 2 hold different replicas"]
    assert value == ["n: ranks 0-1 | 2-3 hold different replicas"]


def _sharded(rank: int, root: str) -> list[str]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    full = torch.arange(12.0)
    local = full.chunk(2)[rank % 2].clone()
    local[0] += rank == 3
    tensor = DTensor.from_local(local, mesh, [Replicate(), Shard(0)], run_check=False)
    with Checkpointer(root, agent="off") as ckpt:
        return _said(ckpt, 0, {"w": tensor})


def test_only_ranks_with_the_same_box_are_compared(tmp_path: Path) -> None:
    assert run_ranks(_sharded, 4, str(tmp_path / "store"))[0] == ["w: ranks 1 | 3 hold different replicas"]


def _large(rank: int, root: str) -> int:
    state = {"large": torch.zeros(SMALL), "small": torch.zeros(2)}  # float32: four times the limit
    state["large"][-1] = rank
    with Checkpointer(root, agent="off") as ckpt:
        return sum(bool(_said(ckpt, step, state)) for step in range(TURNS))


def test_large_tensors_take_turns(tmp_path: Path) -> None:
    assert run_ranks(_large, 2, str(tmp_path / "store")) == [1, 1]


def _refused(rank: int, root: str) -> tuple[str, list[int]]:
    import tierckpt

    state = {"w": torch.full((2,), float(rank))}
    with Checkpointer(root, agent="off", on_disagreement="refuse") as ckpt:
        with pytest.raises(StateError) as caught:
            ckpt.save(0, state)
        state["w"].zero_()
        ckpt.save(1, state).wait()
    return str(caught.value), tierckpt.steps(root)


def test_a_disagreement_can_be_refused(tmp_path: Path) -> None:
    for message, steps in run_ranks(_refused, 2, str(tmp_path / "store")):
        assert "w: ranks 0 | 1 hold different replicas" in message and "PerRank" in message
        assert steps == [1]
