"""K11: tied tensors are stored once and come back under all of their names."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierckpt
from tests.cases.test_k10_tensors import payload
from tests.harness import run_ranks


class _Language(nn.Module):
    def __init__(self, value: float, *, tied: bool) -> None:
        super().__init__()
        self.emb = nn.Embedding(1000, 64)
        self.head = nn.Linear(64, 1000, bias=False)
        if tied:
            self.head.weight = self.emb.weight
        with torch.no_grad():
            for number, parameter in enumerate(self.parameters()):
                parameter.copy_(torch.arange(64_000.0).reshape(1000, 64) * value + number)
        self.register_buffer("scale", torch.full((5000,), value))
        self.register_buffer("alias", self.get_buffer("scale"))


def _right(model: nn.Module) -> bool:
    wanted = torch.arange(64_000.0).reshape(1000, 64)
    weights = (model.emb.weight, model.head.weight)  # type: ignore[union-attr]
    buffers = (model.scale, model.alias)
    return all(torch.equal(w, wanted) for w in weights) and all(bool((b == 1).all()) for b in buffers)  # type: ignore[arg-type, union-attr]


def test_c63_tied_weights(tmp_path: Path) -> None:
    model = _Language(1.0, tied=True)
    tierckpt.save({"model": model}, tmp_path, 1)
    assert payload(tmp_path) < 1.1 * (64_000 + 5000) * 4
    found = tierckpt.read(tmp_path)["model"]
    assert torch.equal(found["emb.weight"], model.emb.weight)
    assert torch.equal(found["head.weight"], model.emb.weight)
    assert torch.equal(found["alias"], found["scale"])
    tied = _Language(2.0, tied=True)
    tierckpt.load({"model": tied}, tmp_path)
    assert tied.head.weight is tied.emb.weight and tied.alias is tied.scale
    assert _right(tied)
    untied = _Language(2.0, tied=False)
    tierckpt.load({"model": untied}, tmp_path)
    assert untied.head.weight is not untied.emb.weight
    assert _right(untied)


def _loads_tied(rank: int, root: str, tied: bool) -> bool:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model: Any = _Language(2.0, tied=tied)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    tierckpt.load({"model": model}, root)
    weights = [parameter.full_tensor() for parameter in (model.emb.weight, model.head.weight)]
    wanted = torch.arange(64_000.0).reshape(1000, 64)
    return all(torch.equal(w, wanted) for w in weights) and bool((model.alias == 1).all())


@pytest.mark.parametrize("tied", [True, False])
def test_c63_tied_weights_in_another_layout(tmp_path: Path, tied: bool) -> None:
    tierckpt.save({"model": _Language(1.0, tied=True)}, tmp_path, 1)
    assert run_ranks(_loads_tied, 2, str(tmp_path), tied) == [True, True]


def test_c65_partly_overlapping_tensors(tmp_path: Path) -> None:
    a = torch.arange(6).reshape(2, 3)
    state = {"A": a, "B": a[:1], "C": a.t(), "D": a[:, ::2]}
    tierckpt.save(state, tmp_path, 1)
    found = tierckpt.read(tmp_path)
    assert all(torch.equal(found[name], tensor) for name, tensor in state.items())
    # What overlaps in part comes back untied; the whole under two names would come back tied.
    found["A"] += 100
    assert all(torch.equal(found[name], state[name]) for name in "BCD")


def test_c65_halves_of_one_storage_cost_one_half_each(tmp_path: Path) -> None:
    storage = torch.arange(100_000)
    state = {"x": storage[:50_000], "y": storage[50_000:]}
    tierckpt.save(state, tmp_path, 1)
    assert payload(tmp_path) < 800_000 + (64 << 10)
    found = tierckpt.read(tmp_path)
    assert torch.equal(found["x"], state["x"]) and torch.equal(found["y"], state["y"])


def test_c65_the_same_tensor_twice_comes_back_tied(tmp_path: Path) -> None:
    a = torch.arange(5.0)
    tierckpt.save({"one": a, "two": a}, tmp_path, 1)
    found = tierckpt.read(tmp_path)
    found["one"] += 1
    assert torch.equal(found["two"], a + 1)
