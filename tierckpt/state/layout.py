"""What this rank holds of a tensor: its global shape, how it is cut, and the boxes of the local memory.

The box of a ``DTensor`` follows from cutting the tensor as its placements say, in the order in which they
were applied, and must have the shape of the local tensor: stock helpers for offsets are wrong for sizes
that do not divide.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from math import prod
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias, TypeGuard, cast

import torch

from tierckpt.errors import LayoutError
from tierckpt.format.boxes import Box
from tierckpt.format.grid import REPLICATED, Cut, Mesh
from tierckpt.state.marks import Pieces
from tierckpt.telling import a

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    Value: TypeAlias = torch.Tensor | DTensor | Pieces

PLAIN = frozenset({torch.Tensor, torch.nn.Parameter})
"""Types of tensors that have memory of their own and nothing else."""


class Described(NamedTuple):
    """A tensor as this rank sees it.

    ``cut``: None when it is held whole by every rank that has it; a grid of ranks (of the saving group); or
    the boxes that this rank holds. ``pieces``: those boxes of this rank that have elements, each with its
    live local tensor. ``value``: the live value itself.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    cut: Cut | tuple[Box, ...] | None
    pieces: list[tuple[Box, torch.Tensor]]
    value: Value


class Destination(NamedTuple):
    """Where a load puts a box: into ``memory``, a CPU tensor. Where that is not the memory of ``target``
    itself, ``finish`` copies it there."""

    box: Box
    memory: torch.Tensor
    target: torch.Tensor | None

    def finish(self) -> None:
        """After ``memory`` was filled: bring it into the live tensor. Does nothing when it is the live
        memory."""
        if self.target is not None:
            with torch.no_grad():
                self.target.copy_(self.memory)


class Describer:
    """Describes tensors of one group of ranks; what tensors have in common is worked out once.

    ``ranks``: the global rank of each rank of the saving group, in order; None: the group is the whole job.
    """

    def __init__(self, ranks: Sequence[int] | None = None) -> None:
        self._group = None if ranks is None else {r: i for i, r in enumerate(ranks)}
        self._wholes: dict[torch.Size, Box] = {}
        self._cuts: dict[tuple[Any, ...], tuple[Cut, tuple[int, ...] | None, Any]] = {}

    def describe(self, value: Value, *, name: str) -> Described:
        """What this rank holds of ``value``.

        Raises ``LayoutError`` naming the tensor: partial sums, meshes with ranks outside of the group,
        placements without an order of cuts, a local tensor of another shape than its box, a tensor without
        plain strided memory.
        """
        if type(value) in PLAIN:
            assert isinstance(value, torch.Tensor)
            _check_memory(value, name)
            size = value.shape
            box = self._wholes.get(size)
            if box is None:
                shape = tuple(size)
                box = self._wholes[size] = Box((0,) * len(shape), shape)
            return Described(value.dtype, box.size, None, [] if 0 in box.size else [(box, value)], value)
        if isinstance(value, Pieces):
            held = []
            for offset, tensor in value.pieces:
                _check_memory(tensor, name)
                if tensor.numel():
                    held.append((Box(offset, tuple(tensor.shape)), tensor))
            boxes = tuple([box for box, _ in held])
            return Described(value.dtype, value.global_shape, boxes, held, value)
        if _is_dtensor(value):
            return self._sharded(value, name)  # type: ignore[arg-type]
        raise LayoutError(f"{name}: {a(value)} is not a tensor with memory of its own; convert it")

    def _sharded(self, value: DTensor, name: str) -> Described:
        spec = value._spec
        shape = tuple(value.shape)
        key = (id(spec.mesh), spec.placements, getattr(spec, "shard_order", None))
        found = self._cuts.get(key)
        if found is None:
            cut, coordinate = self._cut(spec, name)
            # The mesh is kept so that its id stays its own.
            found = self._cuts[key] = cut, coordinate, spec.mesh
        cut, coordinate, _ = found
        if cut.lowest_ndim > len(shape):
            raise LayoutError(f"{name}: {spec.placements} do not fit a tensor of shape {list(shape)}")
        held = _local(value)
        if type(held) not in PLAIN:
            raise LayoutError(f"{name}: its local tensor is {a(held)}, not a plain tensor")
        _check_memory(held, name)
        if coordinate is None:
            return Described(value.dtype, shape, cut, [], value)
        box = cut.box(shape, coordinate)
        if 0 in box.size and held.numel() == 0:
            return Described(value.dtype, shape, cut, [], value)
        if tuple(held.shape) != box.size:
            raise LayoutError(
                f"{name}: rank {cut.mesh.rank(coordinate)} should hold {box} of {list(shape)}, of shape "
                f"{list(box.size)}, by {spec.placements}, but its local tensor is {list(held.shape)}; "
                "the DTensor was made from a local tensor that does not fit its placements"
            )
        return Described(value.dtype, shape, cut, [(box, held)], value)

    def _cut(self, spec: Any, name: str) -> tuple[Cut, tuple[int, ...] | None]:
        """The cut over ranks of the group, and where this rank stands in it (None: it does not)."""
        mesh = spec.mesh
        ranks = [int(rank) for rank in mesh.mesh.flatten().tolist()]
        if self._group is not None:
            outside = [rank for rank in ranks if rank not in self._group]
            if outside:
                raise LayoutError(
                    f"{name}: ranks {outside[:8]} of its mesh are not in the group; use a group that has them"
                )
            ranks = [self._group[rank] for rank in ranks]
        sizes = tuple(mesh.shape)
        placements = _placements(spec.placements, name)
        order = _order(spec, sizes, name)
        coordinate = mesh.get_coordinate()
        # Mesh dimensions of size 1 cut nothing.
        kept = [d for d, n in enumerate(sizes) if n > 1]
        if all(placements[d] == REPLICATED for d in kept):
            cut = Cut.replicated(sorted(ranks))
            return cut, None if coordinate is None else (0,) * len(cut.mesh.shape)
        cut = Cut(
            Mesh.of(ranks, [sizes[d] for d in kept]),
            tuple([placements[d] for d in kept]),
            tuple([kept.index(d) for d in order if sizes[d] > 1]),
        )
        return cut, None if coordinate is None else tuple([coordinate[d] for d in kept])


def describe(value: Value, *, name: str, ranks: Sequence[int] | None = None) -> Described:
    """What this rank holds of ``value``; see ``Describer``, which is faster for many."""
    return Describer(ranks).describe(value, name=name)


def destinations(value: Value, *, name: str, ranks: Sequence[int] | None = None) -> list[Destination]:
    """The boxes of ``value`` that a load has to fill on this rank, and where; see ``destination``."""
    return [destination(box, tensor, name=name) for box, tensor in describe(value, name=name, ranks=ranks).pieces]


def destination(box: Box, tensor: torch.Tensor, *, name: str) -> Destination:
    """Where to put ``box`` so that it ends in ``tensor``: in place, through any strides, where that is
    possible.

    Tensors on other devices and lazily conjugated or negated views get memory of their own first. Raises
    ``LayoutError`` for a tensor whose elements share memory: it cannot hold what is loaded.
    """
    tensor = tensor.detach()
    if overlaps(tensor):
        raise LayoutError(
            f"{name}: several elements of the destination (shape {list(tensor.shape)}, strides "
            f"{list(tensor.stride())}) are the same memory; load into a tensor of its own (.contiguous())"
        )
    if is_live(tensor):
        return Destination(box, tensor, None)
    return Destination(box, torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu"), tensor)


def is_live(tensor: torch.Tensor) -> bool:
    """Whether the CPU can read the values of ``tensor`` where they are."""
    return tensor.is_cpu and not tensor.is_conj() and not tensor.is_neg()


def is_dense(value: object) -> TypeGuard[torch.Tensor]:
    """Whether this is a tensor with elements whose memory has its values, all of them, in row-major order without gaps."""
    return type(value) in PLAIN and is_live(value) and is_contiguous(value)  # type: ignore[arg-type]


def is_contiguous(tensor: torch.Tensor) -> bool:
    """Whether it has elements, in row-major order without gaps."""
    return tensor.is_contiguous() and tensor.nbytes > 0


def are_dense(values: Sequence[object]) -> list[bool]:
    """The same of many, most of which are plain tensors: what only few can be is asked of all at once."""
    if not set(PLAIN).issuperset(map(type, values)):
        return [is_dense(value) for value in values]
    tensors: Sequence[torch.Tensor] = values  # type: ignore[assignment]
    found = [tensor.is_cpu and tensor.is_contiguous() and tensor.nbytes > 0 for tensor in tensors]
    if any(dtype.is_complex for dtype in {tensor.dtype for tensor in tensors}) or any(
        map(torch.Tensor.is_neg, tensors)
    ):
        return [mark and is_live(tensor) for mark, tensor in zip(found, tensors, strict=True)]
    return found


def local(value: Value) -> list[torch.Tensor]:
    """The live local tensors of ``Described.pieces``, found anew; of a ``DTensor`` that has no elements here, too."""
    if isinstance(value, Pieces):
        return [tensor for _, tensor in value.pieces if tensor.numel()]
    if type(value) in PLAIN:
        return [value]
    return [_local(cast("DTensor", value))]


def overlaps(tensor: torch.Tensor) -> bool:
    """Whether two elements of a strided tensor are the same memory."""
    dims = sorted((stride, n) for stride, n in zip(tensor.stride(), tensor.shape, strict=True) if n > 1)
    if 0 in tensor.shape:
        return False
    reach = 0
    for stride, n in dims:
        if stride <= reach:
            break
        reach += stride * (n - 1)
    else:
        return False
    # Strides that interleave may still hit different places; few tensors come here.
    if dims[0][0] == 0 or prod(tensor.shape) > 1 << 24:
        return True
    places = torch.zeros(1, dtype=torch.int64)
    for stride, n in dims:
        places = (places[:, None] + torch.arange(n) * stride).flatten()
    return bool((places.sort().values.diff() == 0).any())


@cache
def _dtensor_types() -> tuple[type, ...]:
    if not torch.distributed.is_available():
        return ()
    from torch.distributed.tensor import DTensor

    return (DTensor,)


def _is_dtensor(value: object) -> bool:
    return isinstance(value, _dtensor_types())


def _local(value: DTensor) -> torch.Tensor:
    held = value._local_tensor
    if type(held) not in PLAIN:
        # It may be the result of a collective that is still on its way.
        held = value.to_local()
        wait = getattr(held, "wait", None)
        held = wait() if wait is not None else held
    return held


def _check_memory(tensor: torch.Tensor, name: str) -> None:
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise LayoutError(f"{name}: only plain, strided tensors can be saved; convert it ({tensor.layout})")
    if tensor.is_meta:
        raise LayoutError(f"{name}: it is on the meta device and has no values; materialize it first")


def _placements(placements: Sequence[Any], name: str) -> list[int]:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    found = []
    for placement in placements:
        if isinstance(placement, (Shard, _StridedShard)):
            found.append(placement.dim)
        elif isinstance(placement, Replicate):
            found.append(REPLICATED)
        else:
            raise LayoutError(
                f"{name}: {placement!r} cannot be saved, only Shard and Replicate can; redistribute it first"
            )
    return found


def _order(spec: Any, sizes: Sequence[int], name: str) -> list[int]:
    """The sharded mesh dimensions in the order in which they cut, by tensor dimension."""
    from torch.distributed.tensor.placement_types import _StridedShard

    placements = spec.placements
    order: dict[int, list[int]] = {}
    if any(isinstance(p, _StridedShard) for p in placements):
        if getattr(spec, "use_strided_shard_as_shard_order", None) is False:
            # So torch marks what a view made of a sharded dimension: its placements say no order of cuts.
            raise LayoutError(f"{name}: a view of a sharded tensor with {placements}; save what it is a view of")
        # The split factor of a strided shard is the number of parts that there were before it cut: its
        # place in the order is behind those mesh dimensions to its right that make so many.
        for d in range(len(placements) - 1, -1, -1):
            p = placements[d]
            if getattr(p, "dim", None) is None:
                continue
            before = order.setdefault(p.dim, [])
            factor = p.split_factor if isinstance(p, _StridedShard) else 1
            place = next((i for i in range(len(before) + 1) if prod(sizes[b] for b in before[:i]) == factor), None)
            if place is None:
                raise LayoutError(
                    f"{name}: {p!r} in {placements} over a mesh of shape {list(sizes)} makes pieces that are "
                    "no boxes; redistribute it first"
                )
            before.insert(place, d)
    elif getattr(spec, "shard_order", None) is not None:
        order = {entry.tensor_dim: list(entry.mesh_dims) for entry in spec.shard_order}
    else:
        for d, p in enumerate(placements):
            if getattr(p, "dim", None) is not None:
                order.setdefault(p.dim, []).append(d)
    return [d for _, dims in sorted(order.items()) for d in dims]
