"""K13: optimizer state is whole: hyperparameters with their types, moments of frozen parameters, nothing invented."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierckpt

# C76


def _net(seed: int, layers: int = 2) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[nn.Linear(4, 4) for _ in range(layers)])


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.linspace(-1, 1, 8).reshape(2, 4)).square().sum().backward()
    optimizer.step()


def _two_groups(model: nn.Sequential, lr: Any, **more: Any) -> torch.optim.AdamW:
    first, second = ([*layer.parameters()] for layer in model)
    groups: list[dict[str, Any]] = [{"params": first}, {"params": second, "weight_decay": 0.1}]
    return torch.optim.AdamW(groups, lr=lr, **more)


def _entries(optimizer: torch.optim.Optimizer) -> list[dict[str, tuple[str, Any]]]:
    return [
        {
            key: (type(value).__name__, value.item() if isinstance(value, torch.Tensor) else value)
            for key, value in group.items()
            if key != "params"
        }
        for group in optimizer.param_groups
    ]


@pytest.mark.parametrize("tensor_lr", [False, True], ids=["float", "tensor"])
def test_c76_every_entry_of_the_groups_comes_back(tmp_path: Path, tensor_lr: bool) -> None:
    model = _net(0)
    optimizer = _two_groups(model, torch.tensor(1e-3) if tensor_lr else 1e-3, betas=(0.8, 0.99))
    _step(model, optimizer)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(1.25e-4) if tensor_lr else 1.25e-4
    tierckpt.save({"model": model, "optim": optimizer}, tmp_path, 1)
    fresh_model = _net(1)
    fresh = _two_groups(fresh_model, torch.tensor(1e-3) if tensor_lr else 1e-3)
    tierckpt.load({"model": fresh_model, "optim": fresh}, tmp_path)
    assert _entries(fresh) == _entries(optimizer)
    assert type(fresh.param_groups[0]["betas"]) is tuple
    _step(model, optimizer)
    _step(fresh_model, fresh)
    for left, right in zip(fresh_model.parameters(), model.parameters(), strict=True):
        assert torch.equal(left, right)


# C78


def _frozen(seed: int) -> tuple[nn.Sequential, torch.optim.AdamW]:
    model = _net(seed, 3)
    return model, torch.optim.AdamW(model.parameters(), lr=0.01)


def test_c78_frozen_and_stateless_parameters(tmp_path: Path) -> None:
    model, optimizer = _frozen(0)
    for parameter in model[2].parameters():
        parameter.requires_grad_(False)
    for _ in range(2):
        _step(model, optimizer)
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    tierckpt.save({"model": model, "optim": optimizer}, tmp_path, 1)

    fresh_model, fresh = _frozen(1)
    for layer in (1, 2):
        for parameter in fresh_model[layer].parameters():
            parameter.requires_grad_(False)
    tierckpt.load({"model": fresh_model, "optim": fresh}, tmp_path)
    for (name, left), right in zip(fresh_model.named_parameters(), model.parameters(), strict=True):
        assert torch.equal(left, right)
        assert left.requires_grad == right.requires_grad
        if name.startswith("2."):
            assert left not in fresh.state or not fresh.state[left]
            continue
        assert fresh.state[left].keys() == optimizer.state[right].keys()
        assert all(torch.equal(fresh.state[left][key], value) for key, value in optimizer.state[right].items())
    for net in (model, fresh_model):
        net.requires_grad_(True)
    for _ in range(2):
        _step(model, optimizer)
        _step(fresh_model, fresh)
    assert all(torch.equal(a, b) for a, b in zip(fresh_model.parameters(), model.parameters(), strict=True))


# C81


def _pair(value: float) -> tuple[nn.ParameterDict, torch.optim.AdamW]:
    model = nn.ParameterDict({"p1": nn.Parameter(torch.full((3,), value)), "p2": nn.Parameter(torch.zeros(2))})
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def test_c81_wholly_absent_state_is_legal_partly_absent_is_not(tmp_path: Path) -> None:
    model, optimizer = _pair(1.0)
    model["p1"].sum().backward()
    optimizer.step()
    tierckpt.save({"model": model, "optim": optimizer}, tmp_path, 1)
    fresh_model, fresh = _pair(5.0)
    tierckpt.load({"model": fresh_model, "optim": fresh}, tmp_path)
    assert torch.equal(fresh_model["p1"], model["p1"])
    assert torch.equal(fresh.state[fresh_model["p1"]]["exp_avg_sq"], optimizer.state[model["p1"]]["exp_avg_sq"])
    assert not fresh.state.get(fresh_model["p2"])

    # The same without one moment of p1.
    del optimizer.state[model["p1"]]["exp_avg_sq"]
    tierckpt.save({"model": model, "optim": optimizer}, tmp_path, 2)
    full_model, full = _pair(7.0)
    full_model["p1"].sum().backward()
    full.step()
    before = full_model["p1"].detach().clone(), full.state[full_model["p1"]]["exp_avg"].clone()
    with pytest.raises(tierckpt.LayoutError, match=r"p1.*exp_avg_sq"):
        tierckpt.load({"model": full_model, "optim": full}, tmp_path)
    assert torch.equal(full_model["p1"], before[0])
    assert torch.equal(full.state[full_model["p1"]]["exp_avg"], before[1])
