"""Which rank of a hypothetical job would read what of a checkpoint, as a load plans it.

Headers and chunks are those that a load would read; that takes layout and receipts, no byte of a shard.
"""

from __future__ import annotations

import re
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from itertools import product
from math import prod
from typing import Any, NamedTuple

import click

from tierckpt.format import names, shard
from tierckpt.format.boxes import intersection
from tierckpt.format.digest import CHUNK
from tierckpt.format.grid import REPLICATED, Cut, Mesh
from tierckpt.format.layout import Stored
from tierckpt.tiers.content import Content, chunk_bytes, touched
from tierckpt.tiers.rows import Rows, strides

#: Ranks of a mesh: every one of them is looked at.
_RANKS_LIMIT = 1 << 16
#: Pieces of tensors: every one of them is looked at. So many take half a minute.
_PIECES_LIMIT = 1 << 27
#: Names among which those close to a wrong one are looked for: so many take a second.
_CLOSE_LIMIT = 1 << 13

_DIMENSION = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)=([1-9][0-9]{0,7})")
_PLACEMENT = re.compile(r"(?:Shard\(([0-9]{1,3})\)|Replicate(?:\(\))?):([A-Za-z_][A-Za-z0-9_]*)|Replicate(?:\(\))?")


class Placement(NamedTuple):
    """How tensors whose dotted names match ``pattern`` are cut: (mesh dimension, tensor dimension) in this order."""

    pattern: str
    cuts: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Job:
    """A hypothetical job: the names and sizes of its mesh's dimensions, ranks in row-major order, and placements."""

    dimensions: tuple[str, ...]
    shape: tuple[int, ...]
    placements: tuple[Placement, ...]

    def cut(self, keys: Sequence[str], shape: Sequence[int]) -> tuple[tuple[int, int], ...]:
        """How the tensor with these names is cut. By default along its first dimension over the first of the mesh.

        Raises:
            UsageError: it has not the dimensions that its placements cut.
        """
        for placement in self.placements:
            if any(names.matches((key,), [placement.pattern]) for key in keys):
                for _, d in placement.cuts:
                    if d >= len(shape):
                        raise click.UsageError(
                            f"--placements {placement.pattern}=…: Shard({d}) cannot cut {keys[0]} of shape {list(shape)}"
                        )
                return placement.cuts
        return ((0, 0),) if shape else ()

    def must_match(self, keys: Iterable[Sequence[str]]) -> None:
        """Raise UsageError for placements that speak of none of the tensors, whose names these are."""
        known = [key for shared in keys for key in shared]
        for pattern, _ in self.placements:
            if not any(names.matches((key,), [pattern]) for key in known):
                close = get_close_matches(pattern, known[:_CLOSE_LIMIT])
                raise click.UsageError(
                    f"--placements {pattern}=…: no tensor has such a name"
                    + (f"; close to it: {', '.join(close)}" if close else "")
                )


def parse(mesh: str, placements: Sequence[str]) -> Job:
    """``dp=4,tp=2`` and, each any number of times, ``GLOB=Shard(0):tp,Shard(1):dp`` or ``GLOB=Replicate``.

    Several globs may stand in one text, separated by commas; of those that match a tensor the first counts. What
    is written first cuts first, each further one what the one before it left.

    Raises:
        UsageError: says what is wrong.
    """
    found = []
    for text in mesh.split(","):
        each = _DIMENSION.fullmatch(text.strip())
        if each is None:
            raise click.UsageError(
                f"--mesh {mesh}: {text.strip()!r} is not a name and a size of at least 1, like dp=4,tp=2"
            )
        found.append(each)
    dimensions = tuple(each[1] for each in found)
    shape = tuple(int(each[2]) for each in found)
    if len(set(dimensions)) != len(dimensions):
        raise click.UsageError(f"--mesh {mesh}: expected different names, like dp=4,tp=2")
    if prod(shape) > _RANKS_LIMIT:
        raise click.UsageError(f"--mesh {mesh}: {prod(shape):,} ranks; at most {_RANKS_LIMIT:,} can be explained")
    parsed: list[Placement] = []
    for text in placements:
        for part in text.split(","):
            pattern, separator, spec = part.rpartition("=")
            if separator:
                parsed.append(Placement(pattern.strip(), ()))
            elif not parsed or not spec:
                raise click.UsageError(f"--placements {text}: expected GLOB=Shard(0):{dimensions[0]} or GLOB=Replicate")
            cuts = parsed[-1].cuts + _cuts(spec.strip(), dimensions, text)
            if len({m for m, _ in cuts}) != len(cuts):
                raise click.UsageError(f"--placements {text}: a mesh dimension can cut a tensor only once")
            parsed[-1] = parsed[-1]._replace(cuts=cuts)
    return Job(dimensions, shape, tuple(parsed))


def _cuts(spec: str, dimensions: tuple[str, ...], text: str) -> tuple[tuple[int, int], ...]:
    found = _PLACEMENT.fullmatch(spec)
    if found is None:
        raise click.UsageError(f"--placements {text}: {spec!r} is neither Shard(DIM):MESH_DIM nor Replicate")
    if found[2] is not None and found[2] not in dimensions:
        raise click.UsageError(
            f"--placements {text}: the mesh has no dimension {found[2]}, it has: {', '.join(dimensions)}"
        )
    return ((dimensions.index(found[2]), int(found[1])),) if found[1] is not None else ()


@dataclass
class Reading:
    """What each of these ranks would read. Sizes are in bytes.

    Attributes:
        ranks: they hold the same of every tensor.
        coordinate: of them in the mesh; None where they differ.
        needed: what they hold of the tensors.
        shards: by rank that saved: the number of chunks of its shard, and their bytes.
        headers: bytes of the headers of these shards.
        chunks, read: number and bytes of all chunks.
    """

    ranks: list[int]
    coordinate: tuple[int | None, ...]
    needed: int
    shards: dict[int, tuple[int, int]]
    headers: int

    @property
    def chunks(self) -> int:
        return sum(number for number, _ in self.shards.values())

    @property
    def read(self) -> int:
        return sum(nbytes for _, nbytes in self.shards.values())

    def to_json(self, dimensions: Sequence[str]) -> dict[str, Any]:
        return {
            "ranks": self.ranks,
            "coordinate": dict(zip(dimensions, self.coordinate, strict=True)),
            "needed": self.needed,
            "read": self.read,
            "headers": self.headers,
            "chunks": self.chunks,
            "shards": [
                {"rank": rank, "chunks": number, "bytes": nbytes} for rank, (number, nbytes) in self.shards.items()
            ],
        }


@dataclass
class _Alike:
    """Tensors of one shape and size of elements that are stored alike, and that ``cut`` cuts alike.

    Attributes:
        item: bytes of an element.
        offsets: by stored piece, where each tensor's begins in the shard.
    """

    tensors: list[int]
    shape: tuple[int, ...]
    item: int
    cut: Cut
    offsets: dict[tuple[int, int], array[int]] = field(default_factory=dict)

    @property
    def parts(self) -> int:
        return prod(self.cut.mesh.shape[m] for m in self.cut.sharded)

    def meetings(self, content: Content) -> int:
        """About how many stored pieces all parts of one tensor meet."""
        return self.cut.counts(self.shape)[0] + len(content.layout.stored_pieces(self.tensors[0]))

    def begins(self, content: Content, stored: Stored) -> array[int]:
        key = stored.rank, stored.k
        found = self.offsets.get(key)
        if found is None:
            found = self.offsets[key] = array("q", [content.offset(i, stored) for i in self.tensors])
        return found


def readings(content: Content, job: Job, progress: Callable[[int, int], None] | None = None) -> Iterator[Reading]:
    """What the ranks of ``job`` would read, those that hold the same together, in the order of the lowest of them.

    Every rank also reads the values, which all ranks share. Tied tensors count once.

    Args:
        progress: called with the number of readings done and in all.

    Raises:
        UsageError: there is too much to look at, or a placement is of no tensor.
        IntegrityError, IncompleteError: a receipt is damaged or missing.
    """
    layout = content.layout
    mesh = Mesh.of(range(prod(job.shape)), job.shape)
    cuts: dict[tuple[tuple[int, int], ...], Cut] = {}
    # Large states have few kinds of tensors: what they have in common is worked out once.
    alike: dict[object, _Alike] = {}
    keys: dict[int, list[str]] = {}
    for i, name in enumerate(layout):
        keys.setdefault(layout.alias(i), []).append(names.dotted(names.split(name)))
    job.must_match(keys.values())
    for i, shared in sorted(keys.items()):
        shape = layout.shape(i)
        chosen = job.cut(shared, shape)
        cut = cuts.get(chosen)
        if cut is None:
            cut = cuts[chosen] = _cut(mesh, chosen)
        item = shard.dtype(layout.dtype(i)).size
        geometry = layout.geometry(i)
        key = i if geometry is None else (geometry, item, chosen)
        alike.setdefault(key, _Alike([], shape, item, cut)).tensors.append(i)
    cutting = {m for chosen in cuts for m, _ in chosen}
    total = prod(n for m, n in enumerate(job.shape) if m in cutting)
    pieces = sum(len(each.tensors) * each.meetings(content) * (total // each.parts) for each in alike.values())
    if pieces > _PIECES_LIMIT:
        raise click.UsageError(
            f"--mesh: {len(keys):,} tensors in {pieces:,} pieces; at most {_PIECES_LIMIT:,} can be explained. Take a smaller "
            "mesh, or leave some tensors whole: --placements 'GLOB=Replicate'"
        )
    for done, part in enumerate(product(*(range(n) if m in cutting else (None,) for m, n in enumerate(job.shape)))):
        if progress is not None:
            progress(done, total)
        ranks = [
            mesh.rank(place)
            for place in product(*((c,) if c is not None else range(n) for c, n in zip(part, job.shape, strict=True)))
        ]
        yield _reading(content, ranks, part, list(alike.values()))


def _cut(mesh: Mesh, chosen: tuple[tuple[int, int], ...]) -> Cut:
    placements = [REPLICATED] * len(mesh.shape)
    for m, d in chosen:
        placements[m] = d
    return Cut(mesh, tuple(placements), tuple(m for m, _ in chosen))


def _reading(
    content: Content, ranks: list[int], coordinate: tuple[int | None, ...], alike: Sequence[_Alike]
) -> Reading:
    place = tuple(c or 0 for c in coordinate)
    needed = 0
    chunks: dict[int, set[int]] = {}
    for each in alike:
        box = each.cut.box(each.shape, place)
        nbytes = prod(box.size) * each.item
        if not nbytes:
            continue
        needed += nbytes * len(each.tensors)
        for stored in content.layout.pieces_in(each.tensors[0], box):
            part = intersection(stored.box, box)
            if part is None:
                continue
            found = chunks.setdefault(stored.rank, set())
            begins = each.begins(content, stored)
            steps = strides(stored.box.size, each.item)
            corner = zip(part.offset, stored.box.offset, steps, strict=True)
            lo = sum((o - p) * step for o, p, step in corner)
            hi = lo + sum((n - 1) * step for n, step in zip(part.size, steps, strict=True)) + each.item
            if hi - lo <= CHUNK:  # its first and its last byte are in all the chunks that it can be in
                found.update([(begin + lo) // CHUNK for begin in begins])
                found.update([(begin + hi - 1) // CHUNK for begin in begins])
                continue
            rows = Rows()
            for begin in begins:
                rows.add(begin, each.item, stored.box, part, part, 0)
            found.update(touched(rows.table(), content.receipt(stored.rank).size))
    for rank in set(content.homes.values()):
        lo, hi = content.blob(rank)
        chunks.setdefault(rank, set()).update(range(lo // CHUNK, (hi - 1) // CHUNK + 1))
    shards = {
        rank: (len(found), chunk_bytes(found, content.receipt(rank).size)) for rank, found in sorted(chunks.items())
    }
    return Reading(ranks, coordinate, needed, shards, sum(content.receipt(rank).header_size for rank in shards))
