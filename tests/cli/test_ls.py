"""`tierckpt ls`: every checkpoint that was ever committed, with its state; the JSON is a contract."""

from __future__ import annotations

import json
from pathlib import Path

import torch

import tierckpt
from tierckpt import Checkpointer

from .conftest import Branched, Cli


def test_json_lists_all_states_in_the_order_of_the_commits(cli: Cli, branched: Branched) -> None:
    ran = cli("ls", branched.root, "--json")
    listed = json.loads(ran.stdout)
    assert ran.status == 0
    assert [(one["generation"], one["step"], one["state"]) for one in listed["checkpoints"]] == [
        (1, 1, "retired"),
        (1, 2, "pinned"),
        (1, 3, "abandoned"),
        (1, 4, "abandoned"),
        (2, 5, "live"),
        (2, 6, "newest"),
    ]
    report = tierckpt.verify(branched.root)
    assert listed["head"] == report.head
    assert all(len(one["id"]) == 64 and one["time"].endswith("Z") for one in listed["checkpoints"])
    times = [one["time"] for one in listed["checkpoints"]]
    assert times == sorted(times)
    assert listed["checkpoints"][1]["metadata"] == {
        "day": "2026-03-02",
        "loss": {"numpy": "<f4", "shape": [], "base64": "AAAAPw=="},
    }


def test_table_has_a_row_for_each_checkpoint(cli: Cli, branched: Branched) -> None:
    ran = cli("ls", branched.root)
    assert ran.status == 0
    rows = [line.split() for line in ran.lines[2:]]
    assert [row[0] for row in rows] == ["1", "2", "3", "4", "5", "6"]
    assert "newest" in rows[-1]
    assert all(line == line.rstrip() for line in ran.lines)


def test_a_retired_checkpoint_without_files_is_no_problem(cli: Cli, branched: Branched) -> None:
    assert cli("prune", branched.root, "--grace", 0).status == 0
    ran = cli("ls", branched.root, "--json")
    first = json.loads(ran.stdout)["checkpoints"][0]
    assert ran.status == 0
    assert (first["state"], first["size"], first["metadata"]) == ("retired", None, None)


def test_a_live_checkpoint_without_manifest_is_named(cli: Cli, branched: Branched) -> None:
    manifest = branched.root / "g0002" / "s000000000005" / "manifest.json"
    manifest.unlink()
    ran = cli("ls", branched.root)
    assert ran.status == 1
    assert ran.lines[-1].startswith("incomplete: ")
    assert str(manifest) in ran.lines[-1]
    listed = json.loads(cli("ls", branched.root, "--json").stdout)
    assert len(listed["checkpoints"]) == 6
    assert [problem["kind"] for problem in listed["problems"]] == ["incomplete"]


def test_metadata_steers_no_terminal(cli: Cli, tmp_path: Path) -> None:
    metadata = "\x1b[31mred\nstep"
    with Checkpointer(tmp_path, agent="off") as checkpointer:
        checkpointer.save(1, {"a": torch.zeros(1)}, metadata=metadata).wait()
    ran = cli("ls", tmp_path)
    assert ran.status == 0
    assert "\x1b" not in ran.stdout
    assert len(ran.lines) == 3
    assert json.loads(cli("ls", tmp_path, "--json").stdout)["checkpoints"][0]["metadata"] == metadata


def test_a_chain_that_is_not_trusted_is_status_1(cli: Cli, branched: Branched) -> None:
    assert cli("verify", branched.root).status == 0  # pins the head
    max((branched.root / "chain").iterdir()).unlink()
    ran = cli("ls", branched.root)
    assert ran.status == 1
    assert ran.lines[-1].startswith("untrusted: ")
