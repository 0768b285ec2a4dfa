"""What an ``Optimizer`` saves, keyed by the names of its parameters.

It flattens to ``{"state": {name: {key: …}}, "param_groups": {group: {"params": [names], **hyper}}}``. A group
is keyed by a digest of its parameters' names, so that groups of different pipeline stages never share a name
(empty groups of a stage are told apart by their order).
Names are the qualified names of the parameters within the one module of the state that holds them all; if it
takes several modules, with the dotted path of the module before each. An optimizer none of whose parameters
is in a module of the state uses the ``param_names`` of its groups (``torch >= 2.6``), and where there are
none positions: then ``"positions"`` has the shapes of all parameters, and a load needs the same. If only some
are in a module, and there are no ``param_names``, it is refused.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch.optim import Optimizer

from tierckpt.errors import StateError
from tierckpt.format.values import Encoded
from tierckpt.state.adapters import FlatPart
from tierckpt.state.marks import LiveTensor
from tierckpt.state.modules import Contents
from tierckpt.state.tensors import is_dtensor

ParameterName: TypeAlias = str | int

NOT_HYPER = frozenset({"params", "param_names"})
"""Entries of a group that are not hyperparameters; ``param_names`` stays what the live optimizer says."""


@dataclass
class Groups:
    """Names of an optimizer's parameters, group by group, and the key under which each group is stored."""

    names: list[list[ParameterName]]
    keys: list[str]
    by_position: bool
    flat: Mapping[int, FlatPart] = field(default_factory=dict)
    """By id, what this rank holds of parameters that FSDP1 has flattened."""


def is_walkable(optimizer: Optimizer) -> bool:
    """Whether ``state`` and ``param_groups`` are all there is to save; others take their state_dict()."""
    return type(optimizer).state_dict is Optimizer.state_dict and not (
        optimizer._optimizer_state_dict_pre_hooks
        or optimizer._optimizer_state_dict_post_hooks
        or optimizer._optimizer_load_state_dict_pre_hooks
        or optimizer._optimizer_load_state_dict_post_hooks
    )


def name_groups(optimizer: Optimizer, modules: Sequence[tuple[str, Contents]], *, what: Callable[[], str]) -> Groups:
    """Names for all parameters. ``modules`` are those of the state, in order, with their dotted paths.

    Raises ``StateError`` (``what`` names the optimizer) when only some parameters have names, or two share
    one.
    """
    groups = [group["params"] for group in optimizer.param_groups]
    if any(getattr(parameter, "_is_flat_param", False) for group in groups for parameter in group):
        raise StateError(
            f"{what()}: the optimizer has flat parameters of FSDP1 that say nothing of the parameters in them; "
            "wrap with use_orig_params=True"
        )
    found = _by_module(groups, modules)
    if found is None:
        given = [group.get("param_names") for group in optimizer.param_groups]
        if all(given[i] is not None for i in range(len(groups))):
            found = [[str(name) for name in group] for group in given if group is not None]
    if found is not None:
        flat = [name for group in found for name in group]
        if len(set(flat)) != len(flat):
            twice = sorted({str(name) for name in flat if flat.count(name) > 1})
            raise StateError(f"{what()}: several parameters of the optimizer are called {', '.join(twice[:5])}")
        parts = {identity: part for _, contents in modules for identity, part in contents.flat.items()}
        return Groups(found, group_keys(found), by_position=False, flat=parts)
    known = {identity for _, contents in modules for identity in contents.parameters}
    nameless = [
        f"group {g}, parameter {i}"
        for g, group in enumerate(groups)
        for i, parameter in enumerate(group)
        if id(parameter) not in known
    ]
    if len(nameless) < sum(map(len, groups)):
        raise StateError(
            f"{what()}: parameters of the optimizer that are in no module of the state: "
            f"{'; '.join(nameless[:10])}; put their module into the state, or give the optimizer named_parameters()"
        )
    start = 0
    positions: list[list[ParameterName]] = []
    for group in groups:
        positions.append(list(range(start, start + len(group))))
        start += len(group)
    return Groups(positions, group_keys(positions), by_position=True)


def _by_module(
    groups: list[list[torch.Tensor]], modules: Sequence[tuple[str, Contents]]
) -> list[list[ParameterName]] | None:
    for _, contents in modules:
        named = contents.parameters
        if all(id(parameter) in named for group in groups for parameter in group):
            return [[named[id(parameter)] for parameter in group] for group in groups]
    everywhere: dict[int, str] = {}
    for path, contents in modules:
        for identity, name in contents.parameters.items():
            everywhere.setdefault(identity, f"{path}.{name}" if path else name)
    if all(id(parameter) in everywhere for group in groups for parameter in group):
        return [[everywhere[id(parameter)] for parameter in group] for group in groups]
    return None


def group_keys(groups: Sequence[Sequence[ParameterName]]) -> list[str]:
    """The keys under which groups with these parameters are stored."""
    keys: list[str] = []
    empty = 0
    for names in groups:
        # The second empty group has the key of two parameters without names, which cannot be, and so on.
        keys.append(_digest(names or [""] * (empty + 1)))
        empty += not names
    return keys


def _digest(names: Sequence[ParameterName]) -> str:
    return "g" + hashlib.sha256("\0".join(map(str, names)).encode()).hexdigest()[:16]


def states(optimizer: Optimizer, groups: Groups, *, what: Callable[[], str]) -> dict[ParameterName, Any]:
    """State of each parameter that has any, by name, in the order of the groups."""
    found: dict[ParameterName, Any] = {}
    state = optimizer.state
    for group, names in zip(optimizer.param_groups, groups.names, strict=True):
        for parameter, name in zip(group["params"], names, strict=True):
            entry = state.get(parameter)
            if entry:
                found[name] = entry
    if len(found) != sum(map(bool, state.values())):
        raise StateError(f"{what()}: the optimizer has state that belongs to no parameter of its groups")
    return found


def written_groups(optimizer: Optimizer, groups: Groups) -> dict[str, dict[str, Any]]:
    """Each group as it is stored."""
    return {
        key: written_group(group, names)
        for group, names, key in zip(optimizer.param_groups, groups.names, groups.keys, strict=True)
    }


def written_group(group: Mapping[str, Any], names: Sequence[ParameterName] | Encoded) -> dict[str, Any]:
    """One group as it is stored."""
    return {"params": names, **{k: v for k, v in group.items() if k not in NOT_HYPER}}


def positions(optimizer: Optimizer) -> list[list[list[int]]]:
    """The global shape of every parameter, group by group."""
    return [[list(parameter.shape) for parameter in group["params"]] for group in optimizer.param_groups]


def place_steps(optimizer: Optimizer) -> None:
    """Move ``step`` to where fused and capturable optimizers need it: float32, beside the parameter."""
    for group in optimizer.param_groups:
        if not (group.get("fused") or group.get("capturable")):
            continue
        for parameter in group["params"]:
            state = optimizer.state.get(parameter)
            step = state.get("step") if state else None
            if state and isinstance(step, torch.Tensor) and step.ndim == 0:
                state["step"] = step.to(device=parameter.device, dtype=torch.float32)


def new_state_tensor(
    parameter: torch.Tensor, key: Any, dtype: torch.dtype, shape: tuple[int, ...], flat: FlatPart | None = None
) -> LiveTensor:
    """Memory for one state tensor of a parameter that has none yet.

    Of the saved dtype, so that nothing is rounded. ``step`` on the CPU (see `place_steps`); what has the
    shape of the parameter like the parameter (the same ``DTensor`` placements); the rest on the parameter's
    device, whole on each rank of a ``DTensor``'s mesh. ``flat``: what this rank holds of a parameter that FSDP1 has
    flattened.
    """
    if key == "step":
        return torch.empty(shape, dtype=dtype)
    if flat is not None and shape == flat.shape:
        return flat.pieces(torch.empty(flat.count, dtype=dtype, device=parameter.device))
    if tuple(parameter.shape) == shape and shape:
        return torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    if not shape or not is_dtensor(parameter):
        return torch.empty(shape, dtype=dtype, device=parameter.device)
    from torch.distributed.tensor import DTensor, Replicate

    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    local = torch.empty(shape, dtype=dtype, device=parameter.device)
    return DTensor.from_local(local, mesh, [Replicate()] * mesh.ndim, run_check=False)
