"""Protects everybody's checkpoints: the package reads stores that were made before, to the last bit.

The stores in tests/golden/stores are checked in and never made by a test; contents.py says what is in them. When one of
these tests fails, either the package lost the ability to read what it once wrote, or the format was changed on purpose
while it was not frozen yet: then ``python -m tests.golden.make``, and a line in docs/format.md, "Changes".
"""

from __future__ import annotations

import shutil
import struct
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierckpt
from tests import lacks
from tests.golden import contents
from tests.golden.make import FIRST, MAKERS, SECOND, STORES, STRANGER
from tests.harness import run_ranks
from tests.second_reader import Other, PerRank, Tensor, read_store, verify_store
from tierckpt.format.shard import DTYPES

LARGEST = 300_000  # bytes of a store: they stay in the history for ever


@pytest.fixture
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A copy of the store that the test is named for."""
    return Path(shutil.copytree(STORES / request.param, tmp_path / request.param))


def golden(name: str) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("store", [name], indirect=True)


def plain(value: Any) -> Any:
    """A value in the words of the second reader, with which equal means equal bit by bit, type by type."""
    if isinstance(value, torch.Tensor):
        bare = value.detach().resolve_conj().resolve_neg().contiguous()
        data = bytes(bare.reshape(-1).view(torch.uint8).numpy()) if bare.numel() else b""
        return Tensor(str(bare.dtype).removeprefix("torch."), tuple(bare.shape), data)
    if isinstance(value, (np.ndarray, np.generic)):
        order = value.dtype.newbyteorder("<")
        data = np.ascontiguousarray(value).astype(order).tobytes()
        if isinstance(value, np.generic):
            return Other("numpy", (value.dtype.str, (), data))
        return Other("array" if value.nbytes > 1024 else "ndarray", (value.dtype.str, value.shape, data))
    if isinstance(value, (torch.dtype, torch.device)):
        return Other(f"torch.{type(value).__name__}", str(value).removeprefix("torch."))
    if isinstance(value, torch.Size):
        return Other("torch.Size", tuple(value))
    if isinstance(value, (Tensor, Other)):
        return value
    if type(value) is float:
        return "float", struct.pack(">d", value)
    if type(value) is complex:
        return "complex", struct.pack(">dd", value.real, value.imag)
    if isinstance(value, dict):
        return type(value), [(type(key), key, plain(item)) for key, item in value.items()]
    if type(value) in (list, tuple):
        return type(value), [plain(item) for item in value]
    return type(value), value


def test_all_stores_are_there() -> None:
    assert STORES.is_dir(), "the golden stores are not checked in: python -m tests.golden.make"
    assert sorted(path.name for path in STORES.iterdir()) == sorted(MAKERS)
    for name in MAKERS:
        assert sum(path.stat().st_size for path in (STORES / name).rglob("*") if path.is_file()) < LARGEST


@pytest.mark.parametrize("store", ["plain", "mesh", "pieces"], indirect=True)
def test_they_verify(store: Path) -> None:
    report = tierckpt.verify(store, every=True, trust=FIRST.public)
    assert report.ok, report.problems
    assert verify_store(store) == []


@lacks.dtype(*DTYPES)
@golden("plain")
def test_every_value_of_one_process(store: Path) -> None:
    right = plain(contents.plain(live=False))
    assert plain(tierckpt.read(store)) == right
    assert plain(read_store(store)) == right


@lacks.dtype(*DTYPES)
@golden("plain")
def test_types_of_the_user_come_back_through_a_template(store: Path) -> None:
    found = contents.plain(live=True)
    for value in (*found["dtypes"].values(), found["bits"], found["odd keys"]["a/b"], found["tied"][0]):
        value.view(torch.uint8).zero_()
    found["shapes"] = [tensor.clone() for tensor in found["shapes"]]
    found["values"]["float"] = []
    tierckpt.load(found, store)
    right = contents.plain(live=True)
    for key in ("dtypes", "bits", "odd keys", "tied", "shapes"):
        assert plain(found[key]) == plain(right[key])
    assert type(found["named"]) is contents.Point and plain(tuple(found["named"])) == plain(tuple(right["named"]))
    values = found["values"]
    assert plain(values["float"]) == plain(right["values"]["float"])
    assert values["enum"] is contents.Color.RED and type(values["named"]) is contents.Point
    assert type(values["default"]) is defaultdict and values["default"] == {"a": [1]}


def _mesh(found: Any) -> Any:
    """What was read of the store "mesh", in the form of `contents.mesh`."""
    groups = found["optimizer"]["param_groups"]
    groups = groups if isinstance(groups, list) else list(groups.values())
    assert [group["params"] for group in groups] == [list(contents.mesh()["model"])]
    rates = {"data": found["data"], "lr": groups[0]["lr"]}
    return {"model": dict(found["model"]), "state": found["optimizer"]["state"], **rates}


@golden("mesh")
def test_fsdp_and_tensor_parallelism(store: Path) -> None:
    right = plain(contents.mesh())
    assert plain(_mesh(tierckpt.read(store))) == right
    assert plain(_mesh(read_store(store))) == right
    model = contents.Model()
    torch.nn.init.zeros_(model.up.weight)
    optimizer = torch.optim.AdamW(model.parameters())
    tierckpt.load({"model": model, "optimizer": optimizer, "data": {}}, store)
    state = {name: optimizer.state[parameter] for name, parameter in model.named_parameters()}
    assert plain(dict(model.state_dict())) == plain(contents.mesh()["model"])
    assert plain(state) == plain(contents.mesh()["state"])
    assert optimizer.param_groups[0]["lr"] == contents.mesh()["lr"]


def _load_pieces(rank: int, root: str) -> Any:
    """Into plain tensors, on as many ranks as saved."""
    state = {name: torch.zeros_like(tensor) for name, tensor in contents.pieces().items()}
    own = tierckpt.PerRank(None)
    info = tierckpt.load({**state, "own": own}, root)
    assert plain(state) == plain(contents.pieces())
    assert plain(own.value) == plain(contents.own(rank))
    return info.metadata


@golden("pieces")
def test_pieces_and_what_each_rank_has_for_itself(store: Path) -> None:
    assert run_ranks(_load_pieces, 2, str(store)) == [contents.METADATA] * 2
    found = read_store(store)
    own = found.pop("own")
    assert plain(found) == plain(contents.pieces())
    assert isinstance(own, PerRank) and sorted(own.values) == [0, 1]
    for rank, (skeleton, tensors) in own.values.items():
        right = contents.own(rank)
        (path, dtype, shape, data), tensor = tensors[0], plain(right["tensor"])
        assert (tuple(path), len(tensors)) == (("tensor",), 1)
        assert (dtype.args, shape.args, data) == (tensor.dtype, tensor.shape, tensor.data)
        assert skeleton == {**right, "tensor": None}


@golden("chain")
def test_history(store: Path) -> None:
    """Endorsed keys are trusted, others only if they are named; what was retired is gone."""
    assert [path.stem[-2:] for path in sorted((store / "chain").iterdir())] == [f"{n:02d}" for n in range(10)]
    assert tierckpt.steps(store) == list(contents.STEPS)
    trust = [FIRST.public, STRANGER.public]
    for step in contents.STEPS:
        assert plain(tierckpt.read(store, step, trust=trust)) == plain(contents.chain(step))
        assert plain(read_store(store, step)) == plain(contents.chain(step))
    report = tierckpt.verify(store, every=True, trust=trust)
    assert report.ok, report.problems
    assert verify_store(store) == []


@golden("chain")
def test_a_key_that_nobody_endorsed(store: Path) -> None:
    with pytest.raises(tierckpt.UntrustedError, match=STRANGER.public):
        tierckpt.read(store, trust=FIRST.public)
    with pytest.raises(tierckpt.UntrustedError, match=STRANGER.public):
        tierckpt.read(store, trust=SECOND.public)
    assert not tierckpt.verify(store, trust=FIRST.public).ok
