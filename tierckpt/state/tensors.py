"""Which tensors can be saved, and how those that are more than plain storage are recognised."""

from __future__ import annotations

import sys

import torch
from torch import nn

from tierckpt.errors import StateError

PLAIN = (torch.Tensor, nn.Parameter)
_STRIDED = torch.strided


def is_dtensor(tensor: torch.Tensor) -> bool:
    """Whether this is a ``DTensor``. Does not import ``torch.distributed.tensor``."""
    package = sys.modules.get("torch.distributed.tensor")
    return package is not None and isinstance(tensor, package.DTensor)


def is_uninitialized(tensor: torch.Tensor) -> bool:
    """Whether this is a parameter or buffer of a lazy module that has not run yet."""
    return isinstance(tensor, (nn.UninitializedParameter, nn.UninitializedBuffer))


def kind_of_subclass(tensor: torch.Tensor) -> str:
    """One of "wrapper" (can be taken apart), "waiting" (for a collective), "plain" (has storage), "opaque"."""
    if type(tensor).__name__ == "AsyncCollectiveTensor":
        return "waiting"
    if hasattr(type(tensor), "__tensor_flatten__"):
        return "wrapper"
    try:
        storage = tensor.untyped_storage()
        storage.data_ptr()
    except RuntimeError:  # torch has no other way to ask a wrapper
        return "opaque"
    return "opaque" if storage.device != tensor.device else "plain"


def obstacle(tensor: torch.Tensor, *, meta: bool = False) -> str | None:
    """Why this tensor cannot be saved, None if it can. ``meta``: tensors on the meta device may pass.

    For plain tensors, ``DTensor`` and subclasses with storage of their own.
    """
    if tensor.layout is _STRIDED and not tensor.is_quantized and not tensor.is_nested:
        if not tensor.is_meta or meta:
            return None
        return "a tensor on the meta device has no contents; materialise it first"
    kind = "quantized" if tensor.is_quantized else "nested" if tensor.is_nested else f"of layout {tensor.layout}"
    return f"a tensor that is {kind} cannot be saved; convert it to a plain one"


def check(tensor: torch.Tensor, *, what: str) -> None:
    """Raise ``StateError`` naming ``what`` if there is an `obstacle`."""
    reason = obstacle(tensor)
    if reason is not None:
        raise StateError(f"{what}: {reason}")


def type_name(value: object) -> str:
    """How the class of ``value`` is written in a tree; it is compared, never looked up."""
    return f"{type(value).__module__}.{type(value).__qualname__}"
