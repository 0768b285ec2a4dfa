"""`tierckpt explain`: which checkpoint a restore would take, and a reason for every newer step."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch

from tierckpt import Checkpointer, Disk, Ram

from .conftest import Branched, Cli


def _explain(cli: Cli, root: Path, status: int) -> dict[str, Any]:
    ran = cli("explain", root, "--json")
    assert ran.status == status, ran
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


def test_names_the_newest_its_place_and_what_was_left_behind(cli: Cli, branched: Branched) -> None:
    found = _explain(cli, branched.root, 0)
    restore = found["restore"]
    assert (restore["step"], restore["generation"], restore["tier"]) == (6, 2, "disk")
    assert restore["place"] == str(branched.root / "g0002" / "s000000000006")
    assert [ref["step"] for ref in found["lineage"]] == [6, 5, 2]
    reasons = {(other["generation"], other["step"]): other for other in found["others"]}
    assert [reasons[1, step]["state"] for step in (1, 3, 4)] == ["retired", "abandoned", "abandoned"]
    assert reasons[1, 4]["reason"] == "abandoned: generation 2 began from step 2 (generation 1)"
    ran = cli("explain", branched.root)
    assert "a restore would take step 6 (generation 2)" in ran.stdout
    assert "behind it: 2 older checkpoints: 5, 2" in ran.lines


def test_what_only_memory_has_comes_first(cli: Cli, tmp_path: Path) -> None:
    state = {"w": torch.arange(10.0)}
    with Checkpointer(tmp_path, tiers=[Ram(), Disk(every=10)]) as ckpt:
        ckpt.save(0, state).wait()
        ckpt.save(3, state).wait("ram")
        found = _explain(cli, tmp_path, 0)
        assert found["restore"]["step"] == 0
        assert [(one["step"], one["generation"]) for one in found["memory"]] == [(3, 1)]
        lines = cli("explain", tmp_path).lines
    assert lines[1] == "a restore would take step 3 (generation 1)"
    assert lines[2].startswith("from memory of this machine's agents")
    assert lines[3].startswith("where a node of the job has lost its memory, it would take step 0 (generation 1), ")
    assert lines[4] == f"from disk: {tmp_path}/g0001/s000000000000"
    assert not any("nothing newer" in line for line in lines)


def test_a_save_that_did_not_finish_is_why_nothing_newer_is_taken(cli: Cli, branched: Branched, shard: Path) -> None:
    begun = branched.root / "g0002" / "s000000000007"
    begun.mkdir()
    (begun / shard.name).write_bytes(b"x" * 100)
    [other] = [one for one in _explain(cli, branched.root, 0)["others"] if one["step"] == 7]
    assert other["state"] == "uncommitted"
    assert "shards of ranks 0, no receipts" in other["reason"]
    ran = cli("explain", branched.root)
    assert any(line.startswith("step 7 (generation 2): never committed") for line in ran.lines)


@pytest.mark.parametrize("damage", ["manifest", "receipt", "shard", "short"])
def test_a_damaged_newest_is_passed_over_with_the_reason(
    cli: Cli, branched: Branched, shard: Path, damage: str
) -> None:
    if damage == "short":
        os.truncate(shard, 5000)
        broken = shard
    else:
        broken = {
            "manifest": shard.with_name("manifest.json"),
            "receipt": shard.with_name("shard-00000.receipt.json"),
            "shard": shard,
        }[damage]
        broken.unlink()
    found = _explain(cli, branched.root, 1)
    assert found["restore"]["step"] == 5
    assert [(one["step"], one["usable"]) for one in found["candidates"]] == [(6, False), (5, True)]
    assert str(broken) in found["problems"][0]["message"]
    ran = cli("explain", branched.root)
    assert ran.status == 1
    assert "step 6 (generation 2) cannot be used:" in ran.lines
    assert str(broken) in ran.stdout


def test_nothing_is_restored_from_a_chain_that_is_not_trusted(cli: Cli, branched: Branched) -> None:
    assert cli("verify", branched.root).status == 0  # pins the head
    max((branched.root / "chain").iterdir()).unlink()
    found = _explain(cli, branched.root, 1)
    assert found["restore"] is None
    assert [problem["kind"] for problem in found["problems"]] == ["untrusted"]
    assert "a restore would fail" in cli("explain", branched.root).lines


def test_a_checkpoint_that_stops_the_run_is_put_last(cli: Cli, branched: Branched) -> None:
    for _ in range(3):
        with Checkpointer(branched.root, key=branched.key, agent="off") as checkpointer:
            checkpointer.restore({"lr": 0.0}, strict=False)
    found = _explain(cli, branched.root, 0)
    assert found["restore"]["step"] == 5
    assert "restarted from it 3 times" in found["notes"][0]
    assert any(line.startswith("put last: step 6 (generation 2)") for line in cli("explain", branched.root).lines)
