"""`tierckpt inspect`: what a checkpoint holds, read from layout, headers and verified values."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

import tierckpt
from tests.harness import run_ranks
from tierckpt import Checkpointer

from .conftest import Branched, Cli, flip


def _inspect(cli: Cli, *arguments: object) -> dict[str, Any]:
    ran = cli("inspect", *arguments, "--json")
    assert ran.status == 0, ran
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_json_describes_the_newest_checkpoint(cli: Cli, branched: Branched) -> None:
    found = _inspect(cli, branched.root)
    assert found["run"] == "train-7"
    assert found["keys"] == [{"key": branched.key.public, "endorsed": True}]
    checkpoint = found["checkpoint"]
    assert (checkpoint["step"], checkpoint["generation"], checkpoint["state"]) == (6, 2, "newest")
    assert checkpoint["world"] == 1
    assert found["layout"]["tensors"] == 3
    assert found["layout"]["bytes"] == 3 * 4 * 4 + 4 * 2  # tied tensors count once
    assert found["layout"]["dtypes"]["float32"] == {"tensors": 1, "bytes": 48}
    tensors = {tensor["key"]: tensor for tensor in found["tensors"]}
    assert tensors["model.bias"]["dtype"] == "bfloat16"
    tied = tensors["model.weight"]
    assert (tied["shape"], tied["cut"], tied["shards"]) == ([3, 4], "whole", [0])
    assert {tensors["model.weight"]["alias"], tensors["model.tied"]["alias"]} in (
        {None, "model/weight"},
        {None, "model/tied"},
    )


def test_values_come_from_the_verified_blob(cli: Cli, branched: Branched, shard: Path) -> None:
    values = _inspect(cli, branched.root)["values"]
    assert values["0"]["lr"] == "nan"
    assert "lr" in cli("inspect", branched.root).stdout
    flip(shard, -1)  # the blob is last
    ran = cli("inspect", branched.root)
    assert ran.status == 1
    assert any(str(shard) in line and "chunk 0" in line for line in ran.lines)


def test_any_live_step_can_be_inspected(cli: Cli, branched: Branched) -> None:
    found = _inspect(cli, branched.root, "--step", 3)
    assert found["checkpoint"]["state"] == "abandoned"
    assert found["metadata"]["day"] == "2026-03-03"
    gone = cli("inspect", branched.root, "--step", 1)
    assert (gone.status, gone.stdout) == (2, "")
    assert "retired" in gone.stderr


def test_tensors_can_be_chosen_by_glob(cli: Cli, branched: Branched) -> None:
    assert [one["key"] for one in _inspect(cli, branched.root, "--tensors", "*bias")["tensors"]] == ["model.bias"]
    ran = cli("inspect", branched.root, "--tensors", "*bias")
    assert any(line.split()[:2] == ["model.bias", "bfloat16"] for line in ran.lines)
    assert "no tensor matches" in cli("inspect", branched.root, "--tensors", "nothing").stdout


def test_long_tables_are_cut_short_unless_asked_for(cli: Cli, tmp_path: Path) -> None:
    with Checkpointer(tmp_path, agent="off") as checkpointer:
        checkpointer.save(1, {f"t{i}": torch.zeros(1) for i in range(150)}).wait()
    short = cli("inspect", tmp_path)
    assert "… and 50 more tensors" in short.stdout
    assert sum(line.startswith("t") for line in cli("inspect", tmp_path, "--tensors", "t*").lines) == 151
    assert len(_inspect(cli, tmp_path)["tensors"]) == 150


def _save_sharded(rank: int, root: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    state = {
        "w": distribute_tensor(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)]),
        "whole": torch.ones(3),
        "mine": tierckpt.PerRank(rank),
    }
    tierckpt.save(state, root, 1)


def test_cuts_and_shards_of_two_ranks(cli: Cli, tmp_path: Path) -> None:
    root = tmp_path / "store"
    run_ranks(_save_sharded, 2, str(root))
    found = _inspect(cli, root)
    assert found["checkpoint"]["world"] == 2
    assert [shard["rank"] for shard in found["checkpoint"]["shards"]] == [0, 1]
    tensors = {tensor["key"]: tensor for tensor in found["tensors"]}
    assert (tensors["w"]["cut"], tensors["w"]["shards"]) == ("dim 0 / 2", [0, 1])
    assert tensors["whole"]["cut"] == "2 replicas"
    assert len(tensors["whole"]["shards"]) == 1
    assert "mine" in found["values"]["0"]
    assert any(line.split()[:2] == ["w", "float32"] and "0-1" in line for line in cli("inspect", root).lines)
