"""Which rank of a hypothetical job would read what of a checkpoint, as a load plans it.

Headers and chunks are those that a load would read; that takes layout and receipts, no byte of a shard.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from typing import Any, NamedTuple

import click

from tierckpt.format import names, shard
from tierckpt.format.boxes import Box
from tierckpt.format.digest import CHUNK
from tierckpt.format.grid import REPLICATED, Cut, Mesh
from tierckpt.tiers.content import Content, Region, chunk_bytes, touched

#: Ranks of a mesh: every one of them is looked at.
_RANKS_LIMIT = 1 << 16

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


def parse(mesh: str, placements: Sequence[str]) -> Job:
    """``dp=4,tp=2`` and, each any number of times, ``GLOB=Shard(0):tp,Shard(1):dp`` or ``GLOB=Replicate``.

    Several globs may stand in one text, separated by commas; of those that match a tensor the first counts. What
    is written first cuts first, each further one what the one before it left.

    Raises:
        UsageError: says what is wrong.
    """
    found = [_DIMENSION.fullmatch(text.strip()) for text in mesh.split(",")]
    dimensions = tuple(each[1] for each in found if each)
    shape = tuple(int(each[2]) for each in found if each)
    if len(dimensions) != len(found) or len(set(dimensions)) != len(dimensions):
        raise click.UsageError(f"--mesh {mesh}: expected different names and sizes, like dp=4,tp=2")
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
        raise click.UsageError(f"--placements {text}: the mesh has no dimension {found[2]}: {', '.join(dimensions)}")
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


def readings(content: Content, job: Job) -> Iterator[Reading]:
    """What the ranks of ``job`` would read, those that hold the same together, in the order of the lowest of them.

    Every rank also reads the values, which all ranks share. Tied tensors count once.

    Raises:
        IntegrityError, IncompleteError: a receipt is damaged or missing.
    """
    layout = content.layout
    mesh = Mesh.of(range(prod(job.shape)), job.shape)
    cuts: dict[tuple[tuple[int, int], ...], Cut] = {}
    wanted: list[tuple[int, tuple[int, ...], int, Cut]] = []
    keys: dict[int, list[str]] = {}
    for i, name in enumerate(layout):
        keys.setdefault(layout.alias(i), []).append(names.dotted(names.split(name)))
    for i, shared in sorted(keys.items()):
        shape = layout.shape(i)
        chosen = job.cut(shared, shape)
        if chosen not in cuts:
            cuts[chosen] = _cut(mesh, chosen)
        wanted.append((i, shape, shard.dtype(layout.dtype(i)).size, cuts[chosen]))
    cutting = {m for chosen in cuts for m, _ in chosen}
    for part in product(*(range(n) if m in cutting else (None,) for m, n in enumerate(job.shape))):
        ranks = [
            mesh.rank(place)
            for place in product(*((c,) if c is not None else range(n) for c, n in zip(part, job.shape, strict=True)))
        ]
        place = tuple(c or 0 for c in part)
        yield _reading(content, ranks, part, [(i, cut.box(shape, place), item) for i, shape, item, cut in wanted])


def _cut(mesh: Mesh, chosen: tuple[tuple[int, int], ...]) -> Cut:
    placements = [REPLICATED] * len(mesh.shape)
    for m, d in chosen:
        placements[m] = d
    return Cut(mesh, tuple(placements), tuple(m for m, _ in chosen))


def _reading(
    content: Content, ranks: list[int], coordinate: tuple[int | None, ...], boxes: list[tuple[int, Box, int]]
) -> Reading:
    needed = 0
    regions = []
    for i, box, item in boxes:
        nbytes = prod(box.size) * item
        if nbytes:
            regions.append(Region(i, box, needed, nbytes))
            needed += nbytes
    chunks: dict[int, set[int]] = {}
    for rank, rows in content.rows(regions).items():
        chunks[rank] = set(touched(rows.table(), content.receipt(rank).size))
    for rank in set(content.homes.values()):
        lo, hi = content.blob(rank)
        chunks.setdefault(rank, set()).update(range(lo // CHUNK, (hi - 1) // CHUNK + 1))
    shards = {
        rank: (len(found), chunk_bytes(found, content.receipt(rank).size)) for rank, found in sorted(chunks.items())
    }
    return Reading(ranks, coordinate, needed, shards, sum(content.receipt(rank).header_size for rank in shards))
