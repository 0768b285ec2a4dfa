"""What a training state is, by name and content, however many processes hold it.

Shares nothing with the engine: it gathers whole tensors with PyTorch's own means and takes their SHA-256.
"""

from __future__ import annotations

import ctypes
import hashlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

Digests = dict[str, str]


def tensor_digest(tensor: Tensor) -> str:
    """SHA-256 (hex) of dtype, shape and bytes of the whole logical tensor. Collective for a DTensor."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    whole = whole.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{whole.dtype} {list(whole.shape)} ".encode())
    # Not by .numpy(): PyTorch may come without it.
    digest.update((ctypes.c_char * whole.nbytes).from_address(whole.data_ptr()))
    return digest.hexdigest()


def state_digests(model: nn.Module, optimizer: torch.optim.Optimizer, **values: Any) -> Digests:
    """Digests of parameters, buffers and optimizer state by name, of the groups' settings and of ``values``.

    Collective: all ranks that share the model call it.
    """
    digests = {f"model/{name}": tensor_digest(tensor) for name, tensor in model.state_dict().items()}
    names = {parameter: name for name, parameter in model.named_parameters()}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            for key, value in optimizer.state[parameter].items():
                digests[f"optimizer/{names[parameter]}/{key}"] = _value_digest(value)
    settings = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    digests["optimizer/groups"] = _value_digest(settings)
    digests.update({name: _value_digest(value) for name, value in values.items()})
    return digests


def _value_digest(value: Any) -> str:
    if isinstance(value, Tensor):
        return tensor_digest(value)
    return hashlib.sha256(repr(value).encode()).hexdigest()


def combined(digests: Digests) -> str:
    """One digest (SHA-256, hex) over all names and digests."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(digests.items()))
    return hashlib.sha256(lines.encode()).hexdigest()
