"""`tierckpt diff`: equal means equal bit by bit whatever the layouts, and every difference is found and placed."""

from __future__ import annotations

import json
import os
from collections import OrderedDict
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

import tierckpt
from tierckpt.cli import differences

from .conftest import SHAPES, Branched, Cli, flip, whole


def _diff(cli: Cli, status: int, *arguments: object) -> dict[str, Any]:
    ran = cli("diff", *arguments, "--json")
    assert (ran.status, ran.stderr) == (status, ""), ran
    found: dict[str, Any] = json.loads(ran.stdout)
    assert found["equal"] == (status == 0)
    return found


def _steps(root: Path, *states: dict[str, Any]) -> list[object]:
    """The arguments that compare the states of two steps of one store."""
    for step, state in enumerate(states):
        tierckpt.save(state, root, step)
    return [root, root, "--step-a", 0, "--step-b", 1]


def test_a_checkpoint_equals_itself_and_nothing_is_read(cli: Cli, branched: Branched) -> None:
    found = _diff(cli, 0, branched.root, branched.root)
    assert found["tensors"]["equal"] == 3
    assert found["bytes_read"] == 0
    last = cli("diff", branched.root, branched.root).lines[-1]
    assert last == "equal: 3 tensors, all values and metadata; 0 B read, compared by digests"


def test_two_steps_of_a_store(cli: Cli, branched: Branched) -> None:
    found = _diff(cli, 1, branched.root, branched.root, "--step-a", 3)
    assert [found[side]["step"] for side in "ab"] == [3, 6]
    different = {one["key"]: one for one in found["tensors"]["different"]}
    assert different.keys() == {"model.weight", "model.tied"}
    assert different["model.tied"] == {
        "name": "model/tied",
        "key": "model.tied",
        "dtype": "float32",
        "shape": [3, 4],
        "elements": 12,
        "first": [0, 0],
        "max_abs_difference": 3.0,
        "nan_on_one_side": 0,
    }
    assert found["values"] == []
    assert found["metadata"] == {"a": {"day": "2026-03-03", "loss": found["metadata"]["a"]["loss"]}, "b": None}
    ran = cli("diff", branched.root, branched.root, "--step-a", 3)
    assert any(line.split()[:2] == ["model.weight", "float32"] and "12 of 12" in line for line in ran.lines)
    assert ran.lines[-1].startswith("different: of the tensors 2 differ, 0 only in A, 0 only in B, 1 are equal")


def _alone(root: Path, **changed: torch.Tensor) -> Path:
    """The state of ``sharded`` in a store that one rank saved, some of it changed."""
    tensors = {name: whole(name) for name in SHAPES}
    tierckpt.save({**tensors, **changed, "n": 5, "own": tierckpt.PerRank({"rank": 0})}, root, 1)
    return root


def test_layouts_do_not_matter(cli: Cli, sharded: Path, tmp_path: Path) -> None:
    found = _diff(cli, 1, sharded, _alone(tmp_path / "alone"))
    assert found["tensors"] == {**{key: [] for key in found["tensors"]}, "equal": 5}
    assert [found["values"], found["structure"], found["metadata"], found["problems"]] == [[], [], None, []]
    assert [(one["rank"], one["key"], "b" in one) for one in found["per_rank"]] == [
        (rank, "own", False) for rank in (1, 2, 3)
    ]


@pytest.mark.parametrize("aligned", [False, True])
def test_every_element_that_differs_is_found_wherever_it_is_stored(
    cli: Cli, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, aligned: bool
) -> None:
    # A batch that is smaller than a row of "large", but not than the whole of the others.
    monkeypatch.setattr(differences, "BATCH", 3 << 20)
    source = Random(5)
    changed = {}
    expected = {}
    for name, shape in SHAPES.items():
        tensor = whole(name)
        flat = tensor.view(-1)
        places = sorted(source.sample(range(flat.numel()), 3))
        for place in places:
            flat[place] += 64
        changed[name] = tensor
        expected[name] = 3, list(np.unravel_index(places[0], shape)), (tensor - whole(name)).abs().max().item()
    if aligned:
        first, other = _alone(tmp_path / "first"), _alone(tmp_path / "other", **changed)
    else:
        first, other = sharded, _alone(tmp_path / "other", **changed)
    found = _diff(cli, 1, first, other)
    different = {
        one["key"]: (one["elements"], one["first"], one["max_abs_difference"]) for one in found["tensors"]["different"]
    }
    assert different == expected


def test_under_one_layout_only_chunks_that_differ_are_read(cli: Cli, tmp_path: Path) -> None:
    large = torch.zeros(6 << 20)
    changed = large.clone()
    changed[3_000_000] = 1
    found = _diff(cli, 1, *_steps(tmp_path / "store", {"large": large, "n": 1}, {"large": changed, "n": 1}))
    [one] = found["tensors"]["different"]
    assert (one["elements"], one["first"]) == (1, [3_000_000])
    assert found["bytes_read"] == 2 * (4 << 20)  # one chunk of six, on both sides


def test_bits_count_not_numbers(cli: Cli, tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    one = {"x": torch.tensor([nan, 1.0, 0.0, nan, 2.0]), "i": torch.tensor([1, 2]), "same": torch.tensor([nan])}
    other = {"x": torch.tensor([nan, 1.0, -0.0, 5.0, inf]), "i": torch.tensor([1, 9]), "same": torch.tensor([nan])}
    found = _diff(cli, 1, *_steps(tmp_path / "store", one, other))
    integers, floats = found["tensors"]["different"]
    assert (integers["elements"], integers["first"], integers["max_abs_difference"]) == (1, [1], None)
    assert (floats["elements"], floats["first"], floats["max_abs_difference"]) == (3, [2], "inf")
    assert floats["nan_on_one_side"] == 1
    assert found["tensors"]["equal"] == 1
    assert "inf, 1 NaN on one side" in cli("diff", tmp_path / "store", tmp_path / "store", "--step-a", 0).stdout


def test_names_kinds_structure_and_values(cli: Cli, tmp_path: Path) -> None:
    t = torch.zeros(2, 3)
    one = {"gone": t, "kind": t, "shape": t, "c": {"t": t}, "v": [1, True, None], "n": 1, "odd/key": t, "only": 1}
    other = {
        "came": t,
        "kind": t.double(),
        "shape": t.T,
        "c": OrderedDict(t=t),
        "v": (1, True, None),
        "n": True,
        "odd/key": t,
        "list": {"a": [t], "n": 2**70},
    }
    found = _diff(cli, 1, *_steps(tmp_path / "store", one, other))
    tensors = found["tensors"]
    assert [tensors[side] for side in ("only_a", "only_b")] == [
        [{"name": "gone", "key": "gone"}],
        [{"name": "came", "key": "came"}, {"name": "list/a/0", "key": "list.a.0"}],
    ]
    assert [(kind["key"], kind["a"], kind["b"]) for kind in tensors["kinds"]] == [
        ("kind", {"dtype": "float32", "shape": [2, 3]}, {"dtype": "float64", "shape": [2, 3]}),
        ("shape", {"dtype": "float32", "shape": [2, 3]}, {"dtype": "float32", "shape": [3, 2]}),
    ]
    assert tensors["equal"] == 2
    assert [(one["key"], one["a"], one["b"]) for one in found["structure"]] == [("c", "dict", "OrderedDict")]
    values = {one["key"]: (one.get("a", "absent"), one.get("b", "absent")) for one in found["values"]}
    assert values == {
        "v": (["list", [1, True, None]], ["tuple", [1, True, None]]),  # alike as plain data: shown as encoded
        "n": (1, True),
        "only": (1, "absent"),
        "list.n": ("absent", 2**70),
    }
    ran = cli("diff", *_steps(tmp_path / "again", one, other))
    for line in ("only in A: gone", "kind: float32 [2, 3] in A, float64 [2, 3] in B", "c: dict in A, OrderedDict in B"):
        assert line in ran.lines
    assert "(absent)" in ran.stdout


@pytest.mark.parametrize("damaged", ["a", "b"])
def test_damage_is_named_and_the_rest_is_compared(cli: Cli, sharded: Path, tmp_path: Path, damaged: str) -> None:
    alone = _alone(tmp_path / "alone", grid=whole("grid") + 1)
    [step] = (sharded if damaged == "a" else alone).glob("g*/s*")
    shard = step / "shard-00000.safetensors"
    flip(shard, 1 << 20)  # in "large"; all tensors are in one batch
    found = _diff(cli, 1, sharded, alone)
    assert [one["key"] for one in found["tensors"]["unread"]] == ["grid", "large", "pieces", "strided", "whole"]
    [problem] = found["problems"]
    assert problem["kind"] == "damaged"
    assert f"{shard}: chunk 0" in problem["message"]
    assert [one["rank"] for one in found["per_rank"]] == [1, 2, 3]
    assert f"damaged: {problem['message']}" in cli("diff", sharded, alone).lines


def test_a_shard_that_is_missing_is_no_equality(cli: Cli, branched: Branched, shard: Path) -> None:
    shard.unlink()
    found = _diff(cli, 1, branched.root, branched.root)
    assert found["problems"][0]["kind"] == "incomplete"
    assert str(shard) in found["problems"][0]["message"]


def test_damaged_values_are_not_taken_for_absent(cli: Cli, branched: Branched, shard: Path) -> None:
    flip(shard, -1)
    found = _diff(cli, 1, branched.root, branched.root, "--step-b", 5)
    assert found["values"] == []
    assert [problem["kind"] for problem in found["problems"]] == ["damaged"]


def test_an_untrusted_store_is_not_equal(cli: Cli, branched: Branched) -> None:
    assert cli("verify", branched.root).status == 0  # pins the head
    max((branched.root / "chain").iterdir()).unlink()
    found = _diff(cli, 1, branched.root, branched.root)
    assert [problem["kind"] for problem in found["problems"]] == ["untrusted"]


def test_what_cannot_run_is_status_2(cli: Cli, branched: Branched, tmp_path: Path) -> None:
    for arguments in ((branched.root, tmp_path / "absent"), (tmp_path / "absent", branched.root), (branched.root,)):
        ran = cli("diff", *arguments)
        assert (ran.status, ran.stdout) == (2, "")
        assert len(ran.stderr.splitlines()) == 1
    ran = cli("diff", branched.root, branched.root, "--step-a", 99)
    assert (ran.status, ran.stdout) == (2, "")
    assert "no checkpoint of step 99" in ran.stderr
    assert os.listdir(branched.root)
