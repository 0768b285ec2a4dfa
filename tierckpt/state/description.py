"""What one rank says to the others about what it holds, so that all can make the same plan.

Ranks that run the same program say the same bytes, so few have to travel; only listed pieces make them
differ.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate, chain, pairwise
from typing import Any, NamedTuple

import torch

from tierckpt.errors import IntegrityError, LayoutError
from tierckpt.format import canonical, columns
from tierckpt.format.boxes import Box
from tierckpt.format.canonical import JSON, Fields
from tierckpt.format.grid import Cut
from tierckpt.format.layout_plan import PLAN_DEPTH, decode_cuts, encode_cuts
from tierckpt.state.layout import Described

_KIND = "description 1"
_WHOLE = 2**32 - 2
_LISTED = 2**32 - 1
_COLUMNS = {
    "plan": "U8",
    "tree": "U8",
    "shapes": "I64",
    "piece_offsets": "I64",
    "piece_sizes": "I64",
    "name_ends": "I64",
    "aliases": "U32",
    "cuts": "U32",
    "piece_tensors": "U32",
    "dtypes": "U8",
    "ndims": "U8",
    "names": "U8",
}


class Description(NamedTuple):
    """What some ranks hold. Columns have one item per tensor, in ascending order of the names.

    ``aliases``: the index of the tensor that is the same memory, or the own. ``cuts``: as in ``Described``.
    ``tree``: its canonical JSON. ``per_rank``: whether they have values of their own.
    """

    names: list[str]
    dtypes: list[str]
    shapes: list[tuple[int, ...]]
    aliases: Sequence[int]
    cuts: list[Cut | tuple[Box, ...] | None]
    tree: bytes
    per_rank: bool


def local_description(described: Mapping[str, Described], *, tree: JSON, per_rank: bool, world: int) -> bytes:
    """What this rank of ``world`` holds: names, dtypes, global shapes, cuts, aliases, and the tree of its
    state.

    Raises ``LayoutError`` for tensors whose memory was freed.
    """
    names = sorted(described)  # code points sort as UTF-8 does
    rows = [described[name] for name in names]
    dtypes = _Numbers()
    cuts = _Numbers()
    numbers: dict[str, array[int] | bytes] = {
        name: array("B" if dtype == "U8" else "I" if dtype == "U32" else "q") for name, dtype in _COLUMNS.items()
    }
    listed: list[tuple[int, Box]] = []
    which = array("I")
    for i, row in enumerate(rows):
        cut = row.cut
        if cut is None:
            which.append(_WHOLE)
        elif isinstance(cut, Cut):
            which.append(cuts.number(cut))
        else:
            which.append(_LISTED)
            listed += [(i, box) for box in cut]
    texts = [name.encode() for name in names]
    numbers["names"] = b"".join(texts)
    numbers["name_ends"] = array("q", accumulate(map(len, texts)))
    numbers["shapes"] = array("q", chain.from_iterable([row.shape for row in rows]))
    numbers["ndims"] = bytes([len(row.shape) for row in rows])
    numbers["dtypes"] = bytes([dtypes.number(row.dtype) for row in rows])
    numbers["aliases"] = array("I", _aliases(names, rows))
    numbers["cuts"] = which
    numbers["piece_tensors"] = array("I", [i for i, _ in listed])
    numbers["piece_offsets"] = array("q", chain.from_iterable([box.offset for _, box in listed]))
    numbers["piece_sizes"] = array("q", chain.from_iterable([box.size for _, box in listed]))
    meshes, encoded = encode_cuts(cuts.values)
    numbers["plan"] = canonical.encode(
        {
            "cuts": encoded,
            "dtypes": [str(dtype).removeprefix("torch.") for dtype in dtypes.values],
            "meshes": meshes,
            "per_rank": per_rank,
            "world": world,
        }
    )
    numbers["tree"] = canonical.encode(tree)
    return columns.pack(_KIND, [(name, dtype, numbers[name]) for name, dtype in _COLUMNS.items()])


def read(data: bytes, world: int, *, what: str) -> Description:
    """What ``local_description`` said. Raises ``IntegrityError`` naming ``what`` for anything else."""
    numbers = columns.unpack(_KIND, _COLUMNS, data, what=what)
    plan = Fields(
        canonical.decode(numbers["plan"].tobytes(), what=what, depth=PLAN_DEPTH),
        ("cuts", "dtypes", "meshes", "per_rank", "world"),
        what=what,
    )
    if plan.integer("world") != world:
        raise IntegrityError(f"{what}: it is of a job of {plan.integer('world')} ranks, not {world}")
    cuts = decode_cuts(plan.array("meshes"), plan.array("cuts"), world, what=what)
    kinds = [str(kind) for kind in plan.array("dtypes")]
    text, ends = numbers["names"].tobytes(), numbers["name_ends"]
    stops = list(accumulate(numbers["ndims"], initial=0))
    known: dict[tuple[int, ...], tuple[int, ...]] = {}
    shapes = [known.setdefault(shape := tuple(numbers["shapes"][a:b]), shape) for a, b in pairwise(stops)]
    pieces: dict[int, list[Box]] = {}
    at = 0
    for i in numbers["piece_tensors"]:
        end = at + numbers["ndims"][i]
        offset, size = numbers["piece_offsets"][at:end], numbers["piece_sizes"][at:end]
        pieces.setdefault(i, []).append(Box(tuple(offset), tuple(size)))
        at = end
    return Description(
        [text[a:b].decode() for a, b in pairwise([0, *ends])],
        [kinds[number] for number in numbers["dtypes"]],
        shapes,
        numbers["aliases"],
        [
            None if number == _WHOLE else tuple(pieces.get(i, ())) if number == _LISTED else cuts[number]
            for i, number in enumerate(numbers["cuts"])
        ],
        numbers["tree"].tobytes(),
        bool(plan.value("per_rank")),
    )


class _Numbers:
    """Numbers for values in the order in which they come; equal values have one. Looks at identity first."""

    def __init__(self) -> None:
        self.values: list[Any] = []
        self._numbers: dict[Any, int] = {}
        self._known: dict[int, int] = {}

    def number(self, value: Any) -> int:
        found = self._known.get(id(value))
        if found is None:
            found = self._numbers.setdefault(value, len(self.values))
            if found == len(self.values):
                self.values.append(value)
            self._known[id(value)] = found
        return found


def _aliases(names: Sequence[str], rows: Sequence[Described]) -> Iterable[int]:
    """For each tensor the first one that is the same memory, seen with the same eyes."""
    found = list(range(len(rows)))
    first: dict[int, int] = {}  # by address; few tensors share one, and only they are looked at closely
    known: dict[tuple[Any, ...], int] = {}
    for i, row in enumerate(rows):
        if row.pieces:
            address = row.pieces[0][1].data_ptr()
            if not address:
                raise LayoutError(
                    f"{names[i]}: its memory was freed (a parameter that is sharded now?); save it when it has values"
                )
        elif 0 in row.shape:
            continue
        else:
            # Other ranks hold something of it, so it must be found to be an alias here as well.
            address = -id(row.value)
        before = first.setdefault(address, i)
        if before == i:
            continue
        known.setdefault(_eyes(rows[before]), before)
        found[i] = known.setdefault(_eyes(row), i)
    return found


def _eyes(row: Described) -> tuple[Any, ...]:
    return (
        row.dtype,
        row.shape,
        row.cut,
        id(row.value) if not row.pieces else None,
        *((box, t.data_ptr(), t.stride(), t.device, _lazy(t)) for box, t in row.pieces),
    )


def _lazy(tensor: torch.Tensor) -> tuple[bool, bool]:
    return tensor.is_conj(), tensor.is_neg()
