"""`tierckpt export`: other programs read exactly what was saved, and a failed export leaves nothing behind."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter, OrderedDict
from datetime import date, time, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, load_model

import tierckpt
from tests import lacks
from tests.harness import run_ranks
from tierckpt import PerRank
from tierckpt.cli import safetensors_file

from .conftest import SHAPES, Branched, Cli, flip, whole


def _export(cli: Cli, root: Path, to: str, out: Path, *more: object) -> dict[str, Any]:
    ran = cli("export", root, "--to", to, "--out", out, *more, "--json")
    assert (ran.status, ran.stderr) == (0, ""), ran
    found: dict[str, Any] = json.loads(ran.stdout)
    assert sorted(found["files"]) == sorted(str(path) for path in out.iterdir())
    return found


def _sidecar(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "model.values.json").read_text())
    return found


# safetensors


def test_tensors_are_whole_whatever_the_layout(
    cli: Cli, sharded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(safetensors_file, "BATCH", 3 << 20)  # smaller than a row of "large"
    out = tmp_path / "new" / "out"
    found = _export(cli, sharded, "safetensors", out)
    assert found["tensors"] == 5
    tensors = load_file(out / "model.safetensors")
    assert tensors.keys() == SHAPES.keys()
    for name, tensor in tensors.items():
        assert tensor.dtype == whole(name).dtype
        assert tensor.equal(whole(name))
    sidecar = _sidecar(out)
    assert sidecar["values"] == {"n": 5}
    assert [value["own"][0] for value in sidecar["per_rank"].values()] == [{"rank": rank} for rank in range(4)]
    assert sidecar["checkpoint"]["world"] == 4
    assert [path.name for path in out.parent.iterdir()] == ["out"]


def test_large_exports_have_an_index(cli: Cli, sharded: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    _export(cli, sharded, "safetensors", out, "--max-shard-size", "300B", "--keys", "[!l]*")
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    sizes = {name: whole(name).nbytes for name in ("grid", "pieces", "strided", "whole")}
    assert index["metadata"] == {"total_size": sum(sizes.values())}
    assert index["weight_map"] == {"grid": files[0], "pieces": files[1], "strided": files[1], "whole": files[1]}
    for name, file in index["weight_map"].items():
        assert load_file(out / file)[name].equal(whole(name))
    assert not (out / "model.safetensors").exists()


def test_names_are_dotted_unless_two_tensors_would_share_one(cli: Cli, tmp_path: Path) -> None:
    a, b, c = torch.zeros(1), torch.ones(1), torch.ones(2)
    state = {"m": {"a.b": a, "x": {0: b, "0": c}}, "l": [a + 5, {"w": b + 5}], "m.a": {"c": c + 5, "b": b + 6}}
    tierckpt.save(state, tmp_path / "store", 1)
    _export(cli, tmp_path / "store", "safetensors", tmp_path / "out")
    found = {name: tensor.tolist() for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items()}
    assert found == {
        "m/a.b": [0],  # "m.a.b", too, is …
        "m.a/b": [7],  # … this one
        "m/x/0": [1],
        "m/x/~s0": [1, 1],
        "l.0": [5],
        "l.1.w": [6],
        "m.a.c": [6, 6],
    }


def test_a_stored_name_that_is_the_dotted_one_of_another_tensor(cli: Cli, tmp_path: Path) -> None:
    # "a/b" is how the first is stored, and the dotted name of the last.
    state = {"a": {"b": torch.zeros(1)}, "a.b": torch.ones(1), "a/b": torch.ones(2)}
    tierckpt.save(state, tmp_path / "store", 1)
    _export(cli, tmp_path / "store", "safetensors", tmp_path / "out")
    found = {name: tensor.tolist() for name, tensor in load_file(tmp_path / "out" / "model.safetensors").items()}
    assert found == {"a/b": [0], "a.b": [1], "a~1b": [1, 1]}


def test_a_stored_name_that_is_the_dotted_one_of_another_value(cli: Cli, tmp_path: Path) -> None:
    tensor = torch.zeros(1)
    state = {"a": {"b": 1, "t": tensor}, "a.b": 2, "a/b": 3, "own": PerRank(4)}
    tierckpt.save(state, tmp_path / "store", 1)
    _export(cli, tmp_path / "store", "safetensors", tmp_path / "out")
    sidecar = _sidecar(tmp_path / "out")
    assert sidecar["values"] == {"a/b": 1, "a.b": 2, "a~1b": 3}
    assert [own["own"][0] for own in sidecar["per_rank"].values()] == [4]


def test_a_state_that_is_one_tensor(cli: Cli, tmp_path: Path) -> None:
    tierckpt.save(torch.arange(3), tmp_path / "store", 1)
    _export(cli, tmp_path / "store", "safetensors", tmp_path / "out")
    assert load_file(tmp_path / "out" / "model.safetensors")["~r"].tolist() == [0, 1, 2]


class _Tied(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(5, 3)
        self.head = torch.nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight


def test_tied_tensors_are_written_once_and_load_model_ties_them(cli: Cli, tmp_path: Path) -> None:
    model = _Tied()
    tierckpt.save(model, tmp_path / "store", 1)
    found = _export(cli, tmp_path / "store", "safetensors", tmp_path / "out")
    assert (found["tensors"], found["bytes"]) == (1, 60)
    again = _Tied()
    load_model(again, tmp_path / "out" / "model.safetensors")
    assert again.head.weight.equal(model.embed.weight)
    assert again.head.weight is again.embed.weight
    [(alias, kept)] = _sidecar(tmp_path / "out")["aliases"].items()
    # Chosen alone, either name is written.
    only = _export(cli, tmp_path / "store", "safetensors", tmp_path / "only", "--keys", alias)
    assert only["bytes"] == 60
    assert list(load_file(tmp_path / "only" / "model.safetensors")) == [alias]
    assert kept != alias


@lacks.dtype("float8_e8m0fnu")
def test_what_safetensors_lacks_is_in_the_sidecar(cli: Cli, tmp_path: Path) -> None:
    state = {
        "c": torch.tensor([1 + 2j, 3j]),
        "f8": torch.ones(3).to(torch.float8_e8m0fnu),
        "empty": torch.zeros(0, 4, dtype=torch.int16),
        "array": np.arange(500, dtype=">i4"),
        "day": date(2026, 3, 4),
        "lr": float("inf"),
        "big": 2**100,
    }
    tierckpt.save(state, tmp_path / "store", 1, metadata={"loss": 0.5})
    _export(cli, tmp_path / "store", "safetensors", tmp_path / "out")
    tensors, sidecar = load_file(tmp_path / "out" / "model.safetensors"), _sidecar(tmp_path / "out")
    assert sidecar["dtypes"] == {"c": "complex64", "f8": "float8_e8m0fnu"}
    assert tensors["c"].view(torch.complex64).squeeze(-1).equal(state["c"])  # type: ignore[arg-type]
    assert tensors["f8"].shape == (3, 1)
    assert (tensors["empty"].shape, tensors["empty"].dtype) == ((0, 4), torch.int16)
    assert sidecar["arrays"]["array"]["shape"] == [500]
    assert sidecar["values"] == {"day": "2026-03-04", "lr": "inf", "big": 2**100}
    assert sidecar["metadata"] == {"loss": 0.5}


def test_every_file_says_that_it_is_of_torch(cli: Cli, branched: Branched, tmp_path: Path) -> None:
    _export(cli, branched.root, "safetensors", tmp_path / "out", "--step", 4)
    with safe_open(tmp_path / "out" / "model.safetensors", "pt") as file:
        assert file.metadata()["format"] == "pt"
        assert file.get_tensor("model.tied").tolist() == [[4.0] * 4] * 3


# torch


def test_torch_file_is_the_state_as_read_gives_it(cli: Cli, sharded: Path, tmp_path: Path) -> None:
    _export(cli, sharded, "torch", tmp_path / "out")
    found = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert list(found) == list(tierckpt.read(sharded))
    for name in SHAPES:
        assert found[name].equal(whole(name))
    assert (found["n"], found["own"]) == (5, {"rank": 0})


def test_tied_tensors_stay_tied(cli: Cli, branched: Branched, tmp_path: Path) -> None:
    _export(cli, branched.root, "torch", tmp_path / "out", "--keys", "model.*")
    found = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert found.keys() == {"model"}
    assert found["model"]["tied"].data_ptr() == found["model"]["weight"].data_ptr()


def test_kinds_that_torch_would_refuse_are_converted_and_listed(cli: Cli, tmp_path: Path) -> None:
    values = {
        "day": date(2026, 3, 4),
        "small": np.arange(3, dtype=">i2"),
        "loss": np.float32(0.5),
        "names": np.array(["a", "b"]),
        "set": frozenset({1}),
        "kept": [(1, None), {"a", "b"}, b"x", bytearray(b"y"), 2j, 2**90, torch.float32, torch.Size([2])],
        "dicts": [Counter({7: 3, 8: 1}), Counter("aab"), OrderedDict([(2, {1: "x"}), (1, None)]), {(1, 2): Counter()}],
    }
    tierckpt.save({"t": torch.ones(1), **values}, tmp_path / "store", 1)
    told = _export(cli, tmp_path / "store", "torch", tmp_path / "out")
    found = torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True)
    assert found["small"].dtype == torch.int16
    assert found["small"].tolist() == [0, 1, 2]
    assert (found["day"], found["loss"], found["names"], found["set"]) == ("2026-03-04", 0.5, ["a", "b"], {1})
    assert found["kept"] == values["kept"]
    assert repr(found["dicts"]) == repr(values["dicts"])
    assert sorted(note.split(":")[0] for note in told["notes"]) == ["day", "loss", "names", "set", "small"]


def test_what_has_no_plain_form_is_refused_by_name(cli: Cli, tmp_path: Path) -> None:
    state = {"t": torch.ones(1), "a": {"when": np.datetime64("2026-01-01")}, "b": [np.array([b"x"], dtype="V3")]}
    tierckpt.save(state, tmp_path / "store", 1)
    ran = cli("export", tmp_path / "store", "--to", "torch", "--out", tmp_path / "out")
    assert ran.status == 2
    assert "a.when (numpy datetime64[D])" in ran.stderr
    assert "b.0 (numpy |V3)" in ran.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
    _export(cli, tmp_path / "store", "torch", tmp_path / "out", "--keys", "t")


@pytest.mark.parametrize(
    ("found", "place"),
    [
        (
            {date(2020, 1, 1): 1, "2020-01-01": 2},
            "k (datetime.date(2020, 1, 1) and '2020-01-01' would both be '2020-01-01')",
        ),
        ({timedelta(seconds=5): "a", 5.0: "b"}, "k (datetime.timedelta(seconds=5) and 5.0 would both be 5.0)"),
        ({"k": {time(1), "01:00:00"}}, "k.k ("),
        ([OrderedDict({("x", date(2020, 1, 1)): 1, ("x", "2020-01-01"): 2})], "k.0 ("),
    ],
)
def test_keys_that_would_become_one_are_refused_by_name(cli: Cli, tmp_path: Path, found: Any, place: str) -> None:
    tierckpt.save({"t": torch.ones(1), "k": found}, tmp_path / "store", 1)
    ran = cli("export", tmp_path / "store", "--to", "torch", "--out", tmp_path / "out")
    assert ran.status == 2
    assert place in ran.stderr
    assert "would both be" in ran.stderr
    # The other form has lists of pairs.
    _export(cli, tmp_path / "store", "safetensors", tmp_path / "out")


def _own(rank: int, root: str) -> None:
    tierckpt.save({"t": torch.ones(1), "all": PerRank(rank), **({"last": PerRank(5)} if rank else {})}, root, 1)


def test_values_of_other_ranks_that_are_left_out_are_told(cli: Cli, tmp_path: Path) -> None:
    run_ranks(_own, 3, str(tmp_path / "store"))
    told = _export(cli, tmp_path / "store", "torch", tmp_path / "out")
    assert torch.load(tmp_path / "out" / "checkpoint.pt", weights_only=True) == {"t": torch.ones(1), "all": 0}
    assert told["notes"] == [
        "all: a PerRank value; that of rank 0 is written, not those of ranks 1-2",
        "last: a PerRank value; left out: rank 0 has none, but ranks 1-2",
    ]
    assert _export(cli, tmp_path / "store", "torch", tmp_path / "less", "--keys", "t")["notes"] == []


# Both


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_damage_is_named_and_nothing_is_left(
    cli: Cli, branched: Branched, shard: Path, tmp_path: Path, to: str
) -> None:
    flip(shard, 4096)
    before = sorted(path.name for path in tmp_path.iterdir())
    ran = cli("export", branched.root, "--to", to, "--out", tmp_path / "out")
    assert (ran.status, ran.stderr) == (1, "")
    assert "chunk 0" in ran.stdout
    assert str(shard) in ran.stdout
    assert sorted(path.name for path in tmp_path.iterdir()) == before


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_an_untrusted_store_is_not_exported(cli: Cli, branched: Branched, tmp_path: Path, to: str) -> None:
    assert cli("verify", branched.root).status == 0  # pins the head
    max((branched.root / "chain").iterdir()).unlink()
    ran = cli("export", branched.root, "--to", to, "--out", tmp_path / "out")
    assert ran.status == 1
    assert ran.stdout.startswith("untrusted: ")
    assert not (tmp_path / "out").exists()


def test_nothing_is_overwritten(cli: Cli, branched: Branched, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    _export(cli, branched.root, "safetensors", out)  # an empty folder is taken
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    inside = branched.root / "exported"
    for target in (out, tmp_path / "file", tmp_path / "dangling", inside):
        ran = cli("export", branched.root, "--to", "safetensors", "--out", target)
        assert (ran.status, ran.stdout) == (2, ""), target
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert (tmp_path / "file").read_text() == "mine"
    assert cli("verify", branched.root).status == 0
    assert not any(path.name.startswith(".") for path in tmp_path.iterdir())


@pytest.mark.parametrize("to", ["safetensors", "torch"])
def test_keys_that_match_nothing_are_told(cli: Cli, branched: Branched, tmp_path: Path, to: str) -> None:
    ran = cli("export", branched.root, "--to", to, "--out", tmp_path / "out", "--keys", "optimizer.*")
    assert (ran.status, ran.stdout) == (2, "")
    assert "optimizer.*" in ran.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("wrong", ["", "5", "x", "5XB", "-1GB", "0GB", "1e9"])
def test_sizes_that_are_none(cli: Cli, branched: Branched, tmp_path: Path, wrong: str) -> None:
    arguments = ("--to", "safetensors", "--out", tmp_path / "out", "--max-shard-size", wrong)
    ran = cli("export", branched.root, *arguments)
    assert ran.status == (0 if wrong == "5" else 2), ran


_WITHOUT_TORCH = """
import sys
from tierckpt.cli import main

root, alone, out = sys.argv[1:]
assert main(["diff", root, root]) == 0
assert main(["diff", root, alone, "--json"]) == 1
assert main(["explain", root, "--mesh", "dp=3"]) == 0
assert main(["export", root, "--to", "safetensors", "--out", out]) == 0
assert main(["export", root, "--to", "torch", "--out", out + "2"]) == 2
"""


def test_only_the_torch_form_needs_torch(sharded: Path, tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    absent.mkdir()
    for name in ("torch", "numpy"):
        (absent / f"{name}.py").write_text(f"raise ImportError('no {name} here')\n")
    alone = tmp_path / "alone"
    tierckpt.save({"grid": whole("grid") + 1}, alone, 1)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(absent), str(Path.cwd())])}
    command = [sys.executable, "-c", _WITHOUT_TORCH, str(sharded), str(alone), str(tmp_path / "out")]
    ran = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert ran.returncode == 0, ran.stderr
    assert load_file(tmp_path / "out" / "model.safetensors")["grid"].equal(whole("grid"))
