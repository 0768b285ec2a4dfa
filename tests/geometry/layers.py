"""A model of many small layers of awkward sizes in any parallel form, and the state that it must have.

Torch itself cuts the true values and the tensors that a load fills: both must then be the same on every rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

import tierckpt

Form = tuple[str | int, ...]
"""("plain",), ("fsdp", n), ("tp", n), ("fsdp_tp", n, tp), ("hsdp", replicas, n) or ("hsdp_tp", replicas, n, tp)."""

SIZES = tuple(range(1, 26))
LEARNING_RATE = 0.125


def world_of(form: Form) -> int:
    world = 1
    for size in form[1:]:
        assert isinstance(size, int)
        world *= size
    return world


class Layers(nn.Module):
    """For each size n a layer into n, one out of n, and a parameter of n elements."""

    def __init__(self, sizes: Sequence[int], *, true: bool) -> None:
        super().__init__()
        for n in sizes:
            self.add_module(f"into{n}", nn.Linear(5, n))
            self.add_module(f"out{n}", nn.Linear(n, 5))
            self.register_parameter(f"own{n}", nn.Parameter(torch.empty(n)))
        number_parameters(self, true=true)


def number_parameters(module: nn.Module, *, true: bool, start: int = 1) -> None:
    """``arange``, all parameters one after the other, or zeros."""
    with torch.no_grad():
        for parameter in module.parameters():
            count = parameter.numel()
            values = torch.arange(start, start + count, dtype=torch.float32).reshape(parameter.shape)
            parameter.copy_(values if true else torch.zeros_like(values))
            start += count


def parallelize(model: nn.Module, form: Form) -> None:
    """Bring the model into this form, on all ranks of the job."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    dimensions = {
        "plain": (),
        "fsdp": ("shard",),
        "tp": ("tp",),
        "fsdp_tp": ("shard", "tp"),
        "hsdp": ("replicate", "shard"),
        "hsdp_tp": ("replicate", "shard", "tp"),
    }[str(form[0])]
    if not dimensions:
        return
    mesh = init_device_mesh("cpu", form[1:], mesh_dim_names=dimensions)  # type: ignore[arg-type]
    if "tp" in dimensions:
        kinds = {"into": ColwiseParallel, "out": RowwiseParallel}
        plan = {
            name: kinds[name.rstrip("0123456789")]()
            for name, module in model.named_children()
            if isinstance(module, nn.Linear)
        }
        parallelize_module(model, mesh["tp"], plan)
    if "shard" in dimensions:
        fully_shard(model, mesh=mesh[tuple(d for d in dimensions if d != "tp")])


def local(tensor: torch.Tensor) -> torch.Tensor:
    """What this rank holds of it."""
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()


def optimizer_of(model: nn.Module, *, true: bool, stepped: bool = True) -> torch.optim.AdamW:
    """AdamW after one step that made its state; the moments then follow from the parameters, element by element."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups: list[dict[str, Any]] = [{"params": matrices}, {"params": vectors, "weight_decay": 0.5 if true else 0.0}]
    # One operation cannot take parameters of several meshes.
    optimizer = torch.optim.AdamW(groups, lr=0.0, weight_decay=0.0, foreach=False)
    if stepped:
        step(model, optimizer)
    if true:
        mark(optimizer)
    return optimizer


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Make the optimizer's state as it makes it itself; with a learning rate of 0 no parameter changes."""
    for parameter in model.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    optimizer.zero_grad()


def mark(optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:
        group["lr"] = LEARNING_RATE
        for parameter in group["params"]:
            state = optimizer.state[parameter]
            state["step"].fill_(7.0)
            local(state["exp_avg"]).copy_(local(parameter) + 1e5)
            local(state["exp_avg_sq"]).copy_(local(parameter) + 2e5)


def differences(found: dict[str, Any], right: dict[str, Any]) -> list[str]:
    """Where one {"model", "optimizer"} on this rank is not as another in the same form."""
    wrong = []
    for (name, one), (_, other) in zip(
        found["model"].named_parameters(), right["model"].named_parameters(), strict=True
    ):
        if not torch.equal(local(one), local(other)):
            wrong.append(f"{name}: {local(one)}, not {local(other)}")
        states = (found["optimizer"].state[one], right["optimizer"].state[other])
        if states[0].keys() != states[1].keys():
            wrong.append(f"{name}: has state {list(states[0])}, not {list(states[1])}")
            continue
        for key, value in states[1].items():
            if type(states[0][key]) is not type(value) or not torch.equal(local(states[0][key]), local(value)):
                wrong.append(f"{name}: {key} is {states[0][key]}, not {value}")
    hyper = [
        [{key: value for key, value in group.items() if key != "params"} for group in state["optimizer"].param_groups]
        for state in (found, right)
    ]
    if hyper[0] != hyper[1]:
        wrong.append(f"groups {hyper[0]}, not {hyper[1]}")
    return wrong


def state_in(form: Form, sizes: Sequence[int], *, true: bool, stepped: bool = True) -> dict[str, Any]:
    model = Layers(sizes, true=true)
    parallelize(model, form)
    return {"model": model, "optimizer": optimizer_of(model, true=true, stepped=stepped)}


def save_and_load(
    rank: int, form: Form, sizes: Sequence[int], save: str | None = None, loads: Sequence[str] = ()
) -> list[str]:
    """On every rank: save the true state in this form, and load what others saved; what differs is returned."""
    right = state_in(form, sizes, true=True)
    if save is not None:
        tierckpt.save(right, save, 1)
    wrong = []
    for number, root in enumerate(loads):
        # An optimizer that never stepped has no state to fill.
        found = state_in(form, sizes, true=False, stepped=number % 2 == 0)
        tierckpt.load(found, root)
        wrong += [f"rank {rank} in {form} from {root}: {line}" for line in differences(found, right)]
    return wrong
