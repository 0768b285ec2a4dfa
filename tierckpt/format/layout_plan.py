"""The column ``plan`` of a layout: what is not numbers per tensor, as canonical JSON (docs/format.md,
section 6)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import prod
from typing import NamedTuple

from tierckpt.errors import IntegrityError
from tierckpt.format import canonical
from tierckpt.format.canonical import JSON, Fields
from tierckpt.format.grid import REPLICATED, Cut, Mesh

WORLD_LIMIT = 1 << 24
"""Ranks of a layout."""

PLAN_DEPTH = 256
"""Nesting of the plan: trees are as deep as the state."""

Ranges = list[tuple[int, int]]
"""Ascending, disjoint, non-adjacent ranges [first, last] of ranks."""


class Tree(NamedTuple):
    """The structure of the state on some ranks, as in the file."""

    ranks: Ranges
    tree: JSON


class Plan(NamedTuple):
    """``world``: ranks that saved. ``dtypes``: names as in torch. ``blobs``: ranks whose shard ends with a
    blob."""

    world: int
    dtypes: list[str]
    cuts: list[Cut]
    trees: list[Tree]
    blobs: Ranges


def encode(plan: Plan) -> bytes:
    """The bytes of the column."""
    meshes, cuts = encode_cuts(plan.cuts)
    return canonical.encode(
        {
            "blobs": _spans(plan.blobs),
            "cuts": cuts,
            "dtypes": list[JSON](plan.dtypes),
            "meshes": meshes,
            "trees": [{"ranks": _spans(tree.ranks), "tree": tree.tree} for tree in plan.trees],
            "world": plan.world,
        }
    )


def decode(data: bytes, *, what: str) -> Plan:
    """The plan that these bytes say. Raises ``IntegrityError`` naming ``what``; safe for hostile bytes."""
    plan = Fields(
        canonical.decode(data, what=what, depth=PLAN_DEPTH),
        ("blobs", "cuts", "dtypes", "meshes", "trees", "world"),
        what=what,
    )
    world = plan.integer("world", low=1, high=WORLD_LIMIT)
    dtypes = [text for text in plan.array("dtypes") if type(text) is str and text]
    if len(set(dtypes)) != len(plan.array("dtypes")):
        raise plan.wrong("dtypes", "an array of different names")
    cuts = decode_cuts(plan.array("meshes"), plan.array("cuts"), world, what=what)
    blobs = _read_ranges(plan.value("blobs"), world, what=f"{what}: blobs")
    if not blobs or blobs[0][0] != 0:
        raise IntegrityError(f"{what}: rank 0 has no blob")
    trees = []
    for i, value in enumerate(plan.array("trees")):
        fields = Fields(value, ("ranks", "tree"), what=f"{what}: tree {i}")
        trees.append(Tree(_read_ranges(fields.value("ranks"), world, what=fields.what), fields.value("tree")))
    covered = sorted(span for tree in trees for span in tree.ranks)
    if [0, *(last + 1 for _, last in covered)] != [*(first for first, _ in covered), world]:
        raise IntegrityError(f"{what}: the trees are not those of every rank once")
    return Plan(world, dtypes, cuts, trees, blobs)


def ranges(ranks: Iterable[int]) -> Ranges:
    """Ascending ranks as ranges."""
    found: Ranges = []
    first = last = -2
    for rank in ranks:
        if rank != last + 1:
            if last >= 0:
                found.append((first, last))
            first = rank
        last = rank
    if last >= 0:
        found.append((first, last))
    return found


def encode_cuts(cuts: Iterable[Cut]) -> tuple[list[JSON], list[JSON]]:
    """``meshes`` and ``cuts`` of these cuts."""
    meshes: dict[Mesh, int] = {}
    found: list[JSON] = []
    for cut in cuts:
        mesh = meshes.setdefault(cut.mesh, len(meshes))
        found.append({"mesh": mesh, "order": list(cut.order), "placements": list(cut.placements)})
    return [_mesh(mesh) for mesh in meshes], found


def decode_cuts(meshes: Sequence[JSON], cuts: Sequence[JSON], world: int, *, what: str) -> list[Cut]:
    """The cuts over these meshes, of ranks below ``world``, no two of them the same."""
    grids = [decode_mesh(mesh, world, what=f"{what}: mesh {i}") for i, mesh in enumerate(meshes)]
    found = [decode_cut(cut, grids, what=f"{what}: cut {i}") for i, cut in enumerate(cuts)]
    if len(set(grids)) != len(grids) or len(set(found)) != len(found):
        raise IntegrityError(f"{what}: the same mesh or cut stands there twice")
    return found


def _mesh(mesh: Mesh) -> JSON:
    """The mesh as it stands in ``plan.meshes``."""
    if mesh.ranks is not None:
        return {"ranks": list(mesh.ranks), "shape": list(mesh.shape)}
    return {"first": mesh.first, "shape": list(mesh.shape), "strides": list(mesh.strides)}


def decode_mesh(value: JSON, world: int, *, what: str) -> Mesh:
    """The mesh that stands there, all of whose ranks are below ``world`` and differ."""
    if type(value) is dict and "ranks" in value:
        fields = Fields(value, ("ranks", "shape"), what=what)
        shape = _integers(fields, "shape", 1, world)
        listed = _integers(fields, "ranks", 0, world - 1)
        if prod(shape) != len(listed) or len(set(listed)) != len(listed):
            raise IntegrityError(f"{what}: {len(listed)} ranks do not fill {list(shape)[:8]} once each")
        return Mesh(shape, 0, (), listed)
    fields = Fields(value, ("first", "shape", "strides"), what=what)
    first = fields.integer("first", high=world - 1)
    shape = _integers(fields, "shape", 1, world)
    strides = _integers(fields, "strides", 0, world)
    if len(strides) != len(shape):
        raise IntegrityError(f"{what}: {len(shape)} sizes, but {len(strides)} strides")
    if prod(shape) > world:
        raise IntegrityError(f"{what}: it has more ranks than there are ({world})")
    mesh = Mesh(shape, first, strides)
    if mesh.last >= world or not mesh.nested():
        raise IntegrityError(f"{what}: its ranks are not all different and below {world}")
    return mesh


def decode_cut(value: JSON, meshes: Sequence[Mesh], *, what: str) -> Cut:
    """The cut that stands there, over one of these meshes."""
    fields = Fields(value, ("mesh", "order", "placements"), what=what)
    if not meshes:
        raise IntegrityError(f"{what}: there is no mesh")
    mesh = meshes[fields.integer("mesh", high=len(meshes) - 1)]
    placements = _integers(fields, "placements", REPLICATED, 254)
    order = _integers(fields, "order", 0, 254)
    if len(placements) != len(mesh.shape):
        raise IntegrityError(f"{what}: {len(placements)} placements for {len(mesh.shape)} mesh dimensions")
    if sorted(order) != [d for d, p in enumerate(placements) if p != REPLICATED]:
        raise IntegrityError(f"{what}: order must name each sharded mesh dimension once")
    return Cut(mesh, placements, order)


def _integers(fields: Fields, key: str, low: int, high: int) -> tuple[int, ...]:
    found = fields.array(key)
    numbers = tuple([n for n in found if type(n) is int and low <= n <= high])
    if len(numbers) != len(found):
        raise fields.wrong(key, f"an array of integers from {low} to {high}")
    return numbers


def _read_ranges(value: JSON, world: int, *, what: str) -> Ranges:
    """Ascending, disjoint, non-adjacent ranges below ``world``."""
    found: Ranges = []
    before = -2
    for span in value if type(value) is list else [None]:
        if type(span) is not list or len(span) != 2:
            raise IntegrityError(f"{what}: not a list of ranges of ranks")
        first, last = span
        if type(first) is not int or type(last) is not int or not before + 1 < first <= last < world:
            raise IntegrityError(f"{what}: ranges of ranks are not ascending, apart, and below {world}")
        found.append((first, last))
        before = last
    return found


def _spans(spans: Ranges) -> JSON:
    return [[first, last] for first, last in spans]
