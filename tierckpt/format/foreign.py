"""Encoded values that belong to numpy and torch, neither of which is imported before it is needed."""

from __future__ import annotations

import base64
import binascii
import importlib
import math
import re
import sys
from types import ModuleType
from typing import Any

from tierckpt.errors import StateError
from tierckpt.format.canonical import JSON

ARRAY_LIMIT = 1024 * 1024  # bytes; a tree lifts arrays out far below that, but not out of sets

# The fixed-size kinds whose meaning the string holds completely: no objects, structures or long doubles.
_DTYPE = re.compile(
    r"[<>|](?:b1|[iu][1248]|f[248]|c8|c16|[SUV][0-9]{1,7}"
    r"|[mM]8(?:\[[0-9]{0,9}(?:Y|M|W|D|h|m|s|ms|us|ns|ps|fs|as)\])?)"
)
_LARGEST_CODE_POINT = 0x10FFFF


class Refused(Exception):
    """A value cannot be encoded. Collects its path, innermost first, on the way out."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.path: list[object] = []


class Malformed(Exception):
    """An encoded value is not one that the encoder returns."""


def encode(value: object) -> JSON:
    """The encoded form of a value of numpy or torch; ``None`` for everything else."""
    kind = type(value)
    torch: Any = sys.modules.get("torch")
    if torch is not None:
        if kind is torch.dtype:
            return ["torch.dtype", str(value).removeprefix("torch.")]
        if kind is torch.device:
            return ["torch.device", str(value)]
        if isinstance(value, torch.Size):
            return ["torch.Size", [int(length) for length in value]]
        if isinstance(value, torch.Tensor):
            raise Refused("a tensor inside a value; tensors may stand in dicts, lists and tuples only")
    numpy: Any = sys.modules.get("numpy")
    if numpy is not None:
        if isinstance(value, numpy.generic):
            return ["numpy", *_array(numpy.asarray(value), numpy)]
        if isinstance(value, numpy.ndarray):
            if kind is not numpy.ndarray:
                raise Refused(f"a numpy array of class {kind.__name__}; convert it with numpy.asarray")
            dtype, data = _array(value, numpy)
            return ["ndarray", dtype, list(value.shape), data]
    return None


def _array(array: Any, numpy: Any) -> tuple[str, str]:
    """dtype and base64 of the bytes, in C order and little-endian."""
    dtype = array.dtype
    if not _DTYPE.fullmatch(dtype.str) or numpy.dtype(dtype.str) != dtype:
        raise Refused(f"a numpy array or scalar of dtype {dtype} cannot be stored; convert it to a plain dtype")
    if array.nbytes > ARRAY_LIMIT:
        raise Refused(f"a numpy array of {array.nbytes} bytes inside a value; at most {ARRAY_LIMIT} may be")
    data = array.astype(dtype.newbyteorder("<"), copy=False).tobytes()
    return dtype.str, base64.b64encode(data).decode("ascii")


def decode_array(dtype: JSON, shape: JSON, data: JSON) -> Any:
    """A writable numpy array of its own."""
    name, lengths, raw = check_array(dtype, shape, data)
    numpy = _package("numpy")
    try:
        stored = numpy.dtype(name)
    except TypeError:
        raise Malformed(f"numpy dtype {name!r}") from None
    if stored.str != name:
        raise Malformed(f"numpy dtype {name!r} is not written as it should be")
    if stored.kind == "U" and raw and numpy.frombuffer(raw, "<u4").max() > _LARGEST_CODE_POINT:
        raise Malformed("a numpy string contains what is not a code point")
    try:
        array = numpy.ndarray(lengths, stored.newbyteorder("<"), raw)
        return array.astype(stored)
    except (ValueError, MemoryError) as error:  # of shapes that numpy cannot have
        raise Malformed(f"numpy array of shape {lengths}: {error}") from None


def decode_scalar(dtype: JSON, data: JSON) -> Any:
    """A numpy scalar."""
    return decode_array(dtype, [], data)[()]


def check_array(dtype: JSON, shape: JSON, data: JSON) -> tuple[str, tuple[int, ...], bytes]:
    """dtype, shape and bytes of an encoded array, checked against each other without numpy."""
    if type(dtype) is not str or not _DTYPE.fullmatch(dtype):
        raise Malformed(f"numpy dtype {dtype!r:.60}")
    if type(shape) is not list or len(shape) > 64:
        raise Malformed(f"shape of a numpy array: {shape!r:.60}")
    lengths: list[int] = []
    for length in shape:
        if type(length) is not int or length < 0:
            raise Malformed(f"shape of a numpy array: {shape!r:.60}")
        lengths.append(length)
    raw = decode_base64(data)
    digits = re.match(r"[0-9]+", dtype[2:])
    item = int(digits[0]) * (4 if dtype[1] == "U" else 1) if digits else 0
    if math.prod(lengths) * item != len(raw):
        raise Malformed(f"a numpy array of {dtype} and shape {lengths} has {len(raw)} bytes")
    return dtype, tuple(lengths), raw


def decode_dtype(name: JSON) -> Any:
    """A ``torch.dtype``."""
    if type(name) is not str or not re.fullmatch(r"[a-z][a-z0-9_]{0,40}", name):
        raise Malformed(f"torch dtype {name!r:.60}")
    torch = _package("torch")
    dtype = getattr(torch, name, None)
    if type(dtype) is not torch.dtype:
        raise StateError(f"this version of torch has no dtype {name}")
    if str(dtype) != f"torch.{name}":
        raise Malformed(f"torch dtype {name!r} is not written as it should be")
    return dtype


def decode_device(name: JSON) -> Any:
    """A ``torch.device``. It need not be present."""
    if type(name) is not str or not re.fullmatch(r"[a-z][a-z0-9_]{0,40}(:(0|[1-9][0-9]{0,2}))?", name):
        raise Malformed(f"torch device {name!r:.60}")
    torch = _package("torch")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise StateError(f"this version of torch knows no device {name}") from None
    if str(device) != name:
        raise Malformed(f"torch device {name!r} is not written as it should be")
    return device


def decode_size(lengths: JSON) -> Any:
    """A ``torch.Size``."""
    if type(lengths) is not list or any(type(length) is not int for length in lengths):
        raise Malformed(f"torch.Size {lengths!r:.60}")
    return _package("torch").Size(lengths)


def decode_base64(text: JSON) -> bytes:
    """The bytes that base64 with padding says."""
    if type(text) is not str:
        raise Malformed(f"expected base64, found {text!r:.60}")
    try:
        data = base64.b64decode(text, validate=True)
    except (ValueError, binascii.Error):
        raise Malformed(f"{text[:60]!r} is not base64") from None
    if base64.b64encode(data).decode("ascii") != text:
        raise Malformed(f"{text[:60]!r} is not base64 as it should be")
    return data


def _package(name: str) -> Any:
    try:
        module: ModuleType = importlib.import_module(name)
    except ImportError:
        raise StateError(f"a value that belongs to {name} needs it: pip install {name}") from None
    return module


def expect_string(value: JSON) -> str:
    """``value`` if it is a string. Raises ``Malformed``."""
    if type(value) is not str:
        raise Malformed(f"expected a string, found {value!r:.60}")
    return value


def expect_array(value: JSON) -> list[JSON]:
    """``value`` if it is an array. Raises ``Malformed``."""
    if type(value) is not list:
        raise Malformed(f"expected an array, found {value!r:.60}")
    return value
