"""Marks that a user puts around leaves: ``PerRank`` (belongs to one rank) and ``Pieces`` (explicit boxes)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch

from tierckpt.errors import IntegrityError, StateError
from tierckpt.telling import a

LiveTensor: TypeAlias = "torch.Tensor | Pieces"


class PerRank:
    """A leaf that belongs to one rank: each rank saves its own and gets its own back.

    ``value`` is anything that can be encoded, may hold small tensors in dicts, lists and tuples (they are
    stored as bytes, in the rank's blob), or is an object with ``state_dict()`` and ``load_state_dict()``. A
    load fills tensors of the same shape and dtype in place and sets ``value`` to what was saved. In a job of
    another size the leaf is left untouched.
    """

    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"

    @property
    def stateful(self) -> bool:
        """Whether the value is captured and restored through its own ``state_dict()``."""
        return is_stateful(self.value)

    def capture(self) -> tuple[Any, list[Any]]:
        """What is encoded: the value, None for each tensor, and the tensors: ``(path, dtype, shape, bytes)``.

        A pair is used even when there are no tensors, so that no value of the user can be mistaken for it.
        """
        tensors: list[Any] = []
        skeleton = _take_out(self.value.state_dict() if self.stateful else self.value, (), tensors)
        return skeleton, tensors

    def restore(self, value: Any) -> None:
        """Set or fill ``value`` from what `rebuild` returned, or hand that to ``load_state_dict``."""
        if self.stateful:
            self.value.load_state_dict(value)
        else:
            self.value = _fill(self.value, value)


def rebuild(captured: Any, *, what: str) -> Any:
    """The value that `PerRank.capture` took, its tensors in CPU memory.

    Raises ``IntegrityError`` naming ``what`` for anything else.
    """
    try:
        value, tensors = captured
        for path, dtype, shape, data in tensors:
            value = _put(value, path, _tensor(dtype, shape, data))
    except (TypeError, ValueError, KeyError, IndexError, RuntimeError) as error:
        raise IntegrityError(f"{what}: not a value that was saved per rank: {error}") from None
    return value


def is_stateful(value: object) -> bool:
    """Whether ``value`` is an object with ``state_dict()`` and ``load_state_dict()``."""
    return (
        callable(getattr(value, "state_dict", None))
        and callable(getattr(value, "load_state_dict", None))
        and not isinstance(value, type)
    )


def _take_out(value: Any, path: tuple[Any, ...], tensors: list[Any]) -> Any:
    if isinstance(value, torch.Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.is_nested or value.is_meta:
            raise StateError(f"PerRank holds a tensor at {path!r} that is not a plain, strided one; convert it")
        plain = value.detach().cpu().resolve_conj().resolve_neg().contiguous()
        data = bytes(plain.reshape(-1).view(torch.uint8).numpy()) if plain.numel() else b""
        tensors.append((path, value.dtype, value.shape, data))
        return None
    if isinstance(value, dict) and _holds_tensors(value.values()):
        copy = value.copy()
        for key, item in value.items():
            copy[key] = _take_out(item, (*path, key), tensors)
        return copy
    if isinstance(value, (list, tuple)) and _holds_tensors(value):
        items = [_take_out(item, (*path, index), tensors) for index, item in enumerate(value)]
        return items if isinstance(value, list) else _like_tuple(value, items)
    return value


def _holds_tensors(values: Iterable[Any]) -> bool:
    return any(
        isinstance(value, torch.Tensor)
        or (isinstance(value, dict) and _holds_tensors(value.values()))
        or (isinstance(value, (list, tuple)) and _holds_tensors(value))
        for value in values
    )


def _like_tuple(like: tuple[Any, ...], items: list[Any]) -> tuple[Any, ...]:
    make: Callable[[Iterable[Any]], tuple[Any, ...]] = getattr(type(like), "_make", tuple)
    return make(items)


def _tensor(dtype: torch.dtype, shape: torch.Size, data: bytes) -> torch.Tensor:
    flat = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape)


def _put(value: Any, path: Sequence[Any], tensor: torch.Tensor) -> Any:
    """``value`` with ``tensor`` at ``path``; tuples on the way are made anew."""
    if not path:
        return tensor
    if isinstance(value, tuple):
        items = list(value)
        items[path[0]] = _put(items[path[0]], path[1:], tensor)
        return _like_tuple(value, items)
    value[path[0]] = _put(value[path[0]], path[1:], tensor)
    return value


def _fill(live: Any, saved: Any) -> Any:
    """``saved``, but with the live tensors, filled, where shape and dtype are the same."""
    if isinstance(saved, torch.Tensor):
        if isinstance(live, torch.Tensor) and live.shape == saved.shape and live.dtype == saved.dtype:
            with torch.no_grad():
                live.copy_(saved)
            return live
        return saved
    if isinstance(saved, dict) and isinstance(live, dict):
        for key in saved.keys() & live.keys():
            saved[key] = _fill(live[key], saved[key])
        return saved
    if isinstance(saved, (list, tuple)) and isinstance(live, (list, tuple)) and len(saved) == len(live):
        items = [_fill(old, new) for old, new in zip(live, saved, strict=True)]
        return items if isinstance(saved, list) else _like_tuple(saved, items)
    return saved


@dataclass(frozen=True)
class Pieces:
    """Boxes of one logical tensor that this rank holds.

    ``global_shape`` is that of the logical tensor; each piece is an offset (in elements, one number per
    dimension) and the tensor that covers the box from there on. All pieces have the same dtype and device.
    Raises ``StateError`` for a box that does not lie in the tensor.
    """

    global_shape: tuple[int, ...]
    pieces: tuple[tuple[tuple[int, ...], torch.Tensor], ...]

    def __init__(self, global_shape: Sequence[int], pieces: Iterable[tuple[Sequence[int], torch.Tensor]]) -> None:
        shape = tuple(int(length) for length in global_shape)
        boxes = tuple((tuple(int(start) for start in offset), tensor) for offset, tensor in pieces)
        _check_pieces(shape, boxes)
        object.__setattr__(self, "global_shape", shape)
        object.__setattr__(self, "pieces", boxes)

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape, under the name that tensors have for it."""
        return self.global_shape

    @property
    def dtype(self) -> torch.dtype:
        """dtype of all pieces."""
        return self.pieces[0][1].dtype

    @property
    def device(self) -> torch.device:
        """Device of all pieces."""
        return self.pieces[0][1].device


class Adapted(Pieces):
    """Pieces that stand for ``source``, an object of the state that holds their memory."""

    source: Any

    def __init__(
        self, global_shape: Sequence[int], pieces: Iterable[tuple[Sequence[int], torch.Tensor]], *, source: Any
    ) -> None:
        super().__init__(global_shape, pieces)
        object.__setattr__(self, "source", source)


def original(value: Any) -> Any:
    """What stands in the state where ``value`` is saved or loaded into."""
    return value.source if isinstance(value, Adapted) else value


def _check_pieces(shape: tuple[int, ...], boxes: tuple[tuple[tuple[int, ...], torch.Tensor], ...]) -> None:
    if not boxes:
        raise StateError("Pieces needs at least one piece; a rank that holds nothing gives one with an empty box")
    if min(shape, default=0) < 0:
        raise StateError(f"Pieces: global shape {shape} has a negative length")
    first = boxes[0][1]
    for number, (offset, tensor) in enumerate(boxes):
        where = f"Pieces: piece {number} at {offset}"
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter):
            raise StateError(f"{where} is {a(tensor)}; give plain tensors")
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
            raise StateError(f"{where} is not a plain, strided tensor; convert it")
        if len(offset) != len(shape) or tensor.ndim != len(shape):
            raise StateError(f"{where} of shape {tuple(tensor.shape)} needs {len(shape)} dimensions, like {shape}")
        if any(o < 0 or o + n > length for o, n, length in zip(offset, tensor.shape, shape, strict=True)):
            raise StateError(f"{where} of shape {tuple(tensor.shape)} does not lie in the global shape {shape}")
        if tensor.dtype != first.dtype or tensor.device != first.device:
            raise StateError(
                f"{where} is {tensor.dtype} on {tensor.device}, piece 0 is {first.dtype} on {first.device}; "
                "all pieces must agree"
            )
