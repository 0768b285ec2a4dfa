"""Parameters that ``FullyShardedDataParallel`` (FSDP1) has flattened, under the names and shapes that they had before.

A rank holds a range of the concatenated parameters of a unit, so of each parameter a flat range, which is a few
boxes. They are views of that memory: nothing is gathered, and loads fill it in place.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn

from tierckpt.errors import StateError
from tierckpt.state.adapters import FlatPart
from tierckpt.state.marks import LiveTensor
from tierckpt.telling import a

FLAT_PARAMETER = "_flat_param"
"""The name under which FSDP1 registers what it has made."""


class Flattened(NamedTuple):
    """A parameter of ``module``, called ``name`` there.

    ``part``: what this rank holds of it (None: all, in its own shape), ``value`` its memory. ``parameter``: what an
    optimizer is given for it; None without ``use_orig_params``.
    """

    module: nn.Module
    name: str
    part: FlatPart | None
    value: LiveTensor
    parameter: torch.Tensor | None


def flattened(unit: nn.Module, *, what: Callable[[], str]) -> list[Flattened]:
    """The parameters that ``unit`` itself has flattened, not those of units within it. Brings it into its sharded state.

    Raises ``StateError`` (``what`` says where the module stands) for parameters that are no row-major range of their
    elements, and while the unit computes.
    """
    handle: Any = getattr(unit, "_handle", None)
    if not hasattr(unit, "_fsdp_wrapped_module"):
        raise StateError(f"{what()}: {a(unit)} that is not torch's; use fully_shard")
    if handle is None:
        return []
    flat = handle.flat_param
    # What was gathered is kept after the forward pass of the outermost unit; it would be used again after a load.
    if handle.uses_sharded_strategy and hasattr(flat, "_local_shard") and not handle.needs_unshard():
        _shard(unit, handle, what)
    ranges = _ranges(flat)
    memory = getattr(flat, "_local_shard", flat).detach()
    found: list[Flattened] = []
    known: dict[tuple[int, str], Flattened] = {}
    for i, (name, module, _) in enumerate(flat._param_infos):
        if flat._param_extensions[i] is not None or not flat._contiguities[i]:
            raise StateError(
                f"{what()}: {flat._fqns[i]}: FSDP1 has flattened a tensor that is itself sharded, or not contiguous; "
                "use fully_shard"
            )
        at, start, count = ranges[i]
        part = FlatPart(flat._shapes[i], start, count)
        parameter = None if flat._params is None else flat._params[i]
        # With use_orig_params the parameter is what the optimizer changes, a view unless somebody has set its data.
        if parameter is None:
            item = Flattened(module, name, part, part.pieces(memory[at : at + count]), None)
        elif tuple(parameter.shape) == part.shape and not handle.uses_sharded_strategy:
            item = Flattened(module, name, None, parameter, parameter)
        elif part.fits(parameter):
            item = Flattened(module, name, part, part.pieces(parameter), parameter)
        else:
            raise StateError(f"{what()}: {flat._fqns[i]} is gathered by FSDP1; do it between steps")
        known[id(module), name] = item
        found.append(item)
    for name, module, _, first_name, first_module, _ in flat._shared_param_infos:
        first = known[id(first_module), first_name]
        found.append(first._replace(module=module, name=name))
    return found


def _ranges(flat: Any) -> list[tuple[int, int, int]]:
    """For each parameter: where in the local memory, from which of its elements on, and how many are there."""
    infos = getattr(flat, "_shard_param_infos", None)
    if infos is not None:
        return [
            (info.offset_in_shard, info.intra_param_start_idx, info.numel_in_shard) if info.in_shard else (0, 0, 0)
            for info in infos
        ]
    found = []
    at = 0
    for count, padding in zip(flat._numels_with_padding, flat._is_padding_mask, strict=True):
        if not padding:
            found.append((at, 0, count))
        at += count
    return found


def _shard(unit: nn.Module, handle: Any, what: Callable[[], str]) -> None:
    """Free what was gathered, as torch does after the backward pass."""
    from torch.distributed.fsdp._common_utils import HandleTrainingState
    from torch.distributed.fsdp._runtime_utils import _reshard

    if handle._training_state != HandleTrainingState.IDLE:
        raise StateError(f"{what()}: FSDP1 is computing with its parameters, or has them summoned; do it between steps")
    _reshard(unit, handle, True)
