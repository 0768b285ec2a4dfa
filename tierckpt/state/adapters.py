"""Tensors that other libraries cut over ranks, as ``Pieces``: nothing is copied, so they are saved and filled in place.

``ShardedTensor`` of torch and the parameters of FSDP1 may stand in a state as they are; sharded state dicts of
Megatron-core go through `pieces_of` first, since where their tensors stand says nothing of what they are.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from math import prod
from typing import Any

import torch

from tierckpt.errors import StateError
from tierckpt.format.boxes import flat_range
from tierckpt.state.marks import Adapted, LiveTensor, Pieces
from tierckpt.telling import a

Piece = tuple[tuple[int, ...], torch.Tensor]


def pieces_of(value: Any) -> Any:
    """``value`` in a form that can be saved and loaded into, sharing its memory.

    * A ``ShardedTensor`` of torch or of Megatron-core becomes ``Pieces``.
    * In a tree of dicts, lists and tuples each ``ShardedTensor`` of torch does, in its place. Those of Megatron-core,
      whose place in the tree differs between ranks, stand under their ``key`` in the outermost dict, all that have
      the same key as one; its sharded objects under their ``unique_key``. The rest of the tree stays where it is.

    Load into what this returns: the tensors of the original are filled. Raises ``StateError`` naming the key for what
    cannot be converted: tensors without data, factories that were not applied (``apply_factories``), keys that clash.
    """
    if is_sharded_tensor(value):
        return of_sharded_tensor(value)
    if _is_megatron_tensor(value):
        return of_megatron([value])
    found = _Tree()
    rest = found.take(value)
    if not found.tensors and not found.objects:
        return value if rest is _GONE else rest
    if rest is not _GONE and not isinstance(rest, dict):
        raise StateError(f"pieces_of: sharded tensors in {a(value)}; give the dict that holds it")
    result: dict[Any, Any] = {} if rest is _GONE else dict(rest)
    for key, item in (*((key, of_megatron(each)) for key, each in found.tensors.items()), *found.objects.items()):
        if key in result:
            raise StateError(f"pieces_of: {key!r} is both a key of the dict and of something sharded")
        result[key] = item
    return result


# torch


def is_sharded_tensor(value: object) -> bool:
    """Whether this is a ``ShardedTensor`` of torch. Does not import what defines it."""
    package = sys.modules.get("torch.distributed._shard.sharded_tensor")
    return package is not None and isinstance(value, package.ShardedTensor)


def of_sharded_tensor(tensor: Any) -> Pieces:
    """The local shards of a ``ShardedTensor`` of torch."""
    metadata = tensor.metadata()
    shape = tuple(metadata.size)
    pieces = [(tuple(shard.metadata.shard_offsets), shard.tensor.detach()) for shard in tensor.local_shards()]
    dtype = metadata.tensor_properties.dtype
    return Adapted(shape, pieces or [_nothing(shape, torch.empty(0, dtype=dtype))], source=tensor)


def _nothing(shape: Sequence[int], like: torch.Tensor) -> Piece:
    """A piece without elements."""
    return (0,) * len(shape), like.new_empty((0,) * len(shape))


# Flat ranges: Megatron-core's distributed optimizer, FSDP1


def flat_pieces(shape: Sequence[int], start: int, flat: torch.Tensor, at: Sequence[int] = ()) -> Iterator[Piece]:
    """``flat`` as boxes of the row-major tensor of which it holds the elements from ``start`` on.

    ``at``: where that tensor lies in the logical one.
    """
    offset = at or (0,) * len(shape)
    done = 0
    for box in flat_range(shape, start, start + flat.numel()):
        count = prod(box.size)
        moved = tuple([o + b for o, b in zip(offset, box.offset, strict=True)])
        yield moved, flat[done : done + count].view(box.size)
        done += count


class FlatPart:
    """What this rank holds of a parameter that FSDP1 has flattened: elements from ``start`` on, ``count`` of them."""

    __slots__ = ("count", "shape", "start")

    def __init__(self, shape: Sequence[int], start: int, count: int) -> None:
        self.shape, self.start, self.count = tuple(shape), start, count

    def pieces(self, flat: torch.Tensor) -> Pieces:
        """``flat``, the elements that this rank holds, of the parameter itself or of its optimizer state."""
        flat = flat.detach()
        found = list(flat_pieces(self.shape, self.start, flat)) if self.count else []
        return Adapted(self.shape, found or [_nothing(self.shape, flat)], source=flat)

    def fits(self, tensor: LiveTensor) -> bool:
        """Whether this is one number for each element that this rank holds."""
        return isinstance(tensor, torch.Tensor) and tuple(tensor.shape) == (self.count,)


# Megatron-core


def _is_megatron_tensor(value: object) -> bool:
    return all(hasattr(value, name) for name in ("key", "data", "global_shape", "global_offset", "axis_fragmentations"))


def of_megatron(tensors: Sequence[Any]) -> Pieces:
    """Sharded tensors of Megatron-core that have the same key, as one. They are told by their attributes."""
    first = tensors[0]
    key, shape = first.key, tuple(first.global_shape)
    pieces: list[Piece] = []
    for tensor in tensors:
        if tuple(tensor.global_shape) != shape:
            raise StateError(f"{key}: its global shape is {shape} here, {tuple(tensor.global_shape)} there")
        if not isinstance(tensor.data, torch.Tensor):
            raise StateError(f"{key}: it has no data; give it a tensor (init_data) to save or to load into")
        pieces += _megatron_pieces(tensor)
    # Ranges without elements make no box.
    return Pieces(shape, pieces or [_nothing(shape, first.data.detach())])


def _megatron_pieces(tensor: Any) -> Iterator[Piece]:
    data, offset = tensor.data.detach(), tuple(tensor.global_offset)
    ahead = getattr(tensor, "prepend_axis_num", 0)  # dimensions that the local tensor does not have
    flattened = getattr(tensor, "flattened_range", None)
    if flattened is None:
        found: Iterator[Piece] = iter([(offset[ahead:], data)])
    else:
        local = tuple(tensor.local_shape)
        start, stop, _ = flattened.indices(prod(local))
        if data.ndim != 1 or data.numel() != stop - start:
            raise StateError(f"{tensor.key}: data of shape {list(data.shape)} is not its range {flattened} of {local}")
        found = flat_pieces(local, start, data, offset[ahead:])
    for place, piece in found:
        yield (*offset[:ahead], *place), piece[(None,) * ahead] if ahead else piece


_GONE: Any = object()
"""What is left of a container from which everything was taken."""


class _Tree:
    """A tree on its way to being saved. ``tensors`` and ``objects`` are those of Megatron-core, by key."""

    def __init__(self) -> None:
        self.tensors: dict[str, list[Any]] = {}
        self.objects: dict[str, Any] = {}

    def take(self, value: Any) -> Any:
        """``value`` without what is Megatron-core's, its containers copied where something changes."""
        if is_sharded_tensor(value):
            return of_sharded_tensor(value)
        if _is_megatron_tensor(value):
            self.tensors.setdefault(value.key, []).append(value)
            return _GONE
        if type(value).__name__ in ("ShardedObject", "ShardedTensorFactory", "LocalNonpersistentObject"):
            self._special(value)
            return _GONE
        if isinstance(value, dict):
            items = {key: self.take(item) for key, item in value.items()}
            if all(items[key] is item for key, item in value.items()):
                return value
            kept = {key: item for key, item in items.items() if item is not _GONE}
            return _like(value, kept) if kept else _GONE
        if type(value) in (list, tuple):
            found = [self.take(item) for item in value]
            if all(new is old for new, old in zip(found, value, strict=True)):
                return value
            gone = sum(item is _GONE for item in found)
            if gone == len(found):
                return _GONE
            if gone:
                raise StateError(f"pieces_of: {a(value)} has both sharded tensors and other things")
            return type(value)(found)
        return value

    def _special(self, value: Any) -> None:
        kind = type(value).__name__
        if kind == "ShardedTensorFactory":
            raise StateError(f"{value.key}: a ShardedTensorFactory; make its tensors first (apply_factories)")
        if kind == "ShardedObject":
            self.objects[value.unique_key] = value.data


def _like(old: dict[Any, Any], items: dict[Any, Any]) -> dict[Any, Any]:
    copy = old.copy()
    copy.clear()
    copy.update(items)
    return copy
