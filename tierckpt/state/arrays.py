"""numpy arrays that are large enough to be kept as tensors ("array" nodes of the tree)."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from tierckpt.errors import StateError
from tierckpt.format.values import ARRAY_LIMIT

Array = numpy.ndarray[Any, Any]

_SHARED_KINDS = frozenset("biufc")  # of numpy.dtype.kind; those that torch may have
_STORED_KINDS = _SHARED_KINDS | frozenset("mMSUV")


def is_large(array: Array) -> bool:
    """Whether ``array`` becomes a tensor; smaller ones are values."""
    return array.nbytes > ARRAY_LIMIT


def describe(array: Array) -> tuple[str, tuple[int, ...]]:
    """torch's dtype name and the shape of the tensor that stands for ``array``.

    A dtype that torch lacks is kept as bytes: uint8, with the item size as one more dimension.
    """
    native = _native(array.dtype)
    if native is not None:
        return native, tuple(array.shape)
    return "uint8", (*array.shape, array.dtype.itemsize)


def to_tensor(array: Array, *, what: str) -> torch.Tensor:
    """A CPU tensor with the contents of ``array``; it shares the memory where torch can.

    Raises ``StateError`` naming ``what`` for objects, structures and long doubles.
    """
    dtype = array.dtype
    if dtype.kind not in _STORED_KINDS or numpy.dtype(dtype.str) != dtype or dtype.str[1:] in ("f16", "c32"):
        raise StateError(f"{what}: a numpy array of dtype {dtype} cannot be stored; convert it to a plain dtype")
    if _native(dtype) is None:
        # Not a view: the uint8 view of a strided or foreign-endian array does not exist in general.
        raw = numpy.frombuffer(bytearray(array.tobytes()), dtype=numpy.uint8)
        return torch.from_numpy(raw.reshape(*array.shape, dtype.itemsize))
    return torch.from_numpy(array if shares_memory(array) else array.copy())


def shares_memory(array: Array) -> bool:
    """Whether `to_tensor` returns a view, so that writing to the tensor fills the array."""
    return (
        _native(array.dtype) is not None
        and array.flags.writeable
        and all(stride >= 0 and stride % array.itemsize == 0 for stride in array.strides)
    )


def from_tensor(tensor: torch.Tensor, dtype: str, shape: tuple[int, ...]) -> Array:
    """The array that was saved as ``tensor`` (on CPU) with this numpy dtype (``dtype.str``) and shape."""
    if _native(numpy.dtype(dtype)) is not None:
        return tensor.numpy().reshape(shape)
    return numpy.frombuffer(bytearray(tensor.numpy().tobytes()), dtype=dtype).reshape(shape)


def _native(dtype: numpy.dtype[Any]) -> str | None:
    """The name of torch's dtype for ``dtype``, None where torch has none or the byte order is foreign."""
    if dtype.kind not in _SHARED_KINDS or not dtype.isnative:
        return None
    name = dtype.name
    return name if isinstance(getattr(torch, name, None), torch.dtype) else None
