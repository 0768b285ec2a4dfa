"""One checkpoint out of what the ranks have staged, should their layouts have changed between two saves.

A save that finds its state as it was planned takes no collective step. A rank whose state has changed (lazily created
optimizer state, say) stages everything that it holds, under a layout of its own, and goes on; whether all ranks staged for
one layout shows when their drains meet. If not, the layout of this checkpoint is composed of the pieces that were staged,
each rank cuts its shard anew from its slot, and later saves follow a plan made of the ranks' new descriptions.

What is staged for two layouts that were each agreed on may leave out a piece, of which either says that the other rank has
it; what is staged for one of them by some, and in full by the others, is whole. So all ranks begin to follow the new plan
with the same call of ``save``, one that none of them has made when they settle; who makes it before it knows stages in full.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tierckpt.errors import LayoutError
from tierckpt.format import blob as blobs
from tierckpt.format.boxes import Box, intersection, whole
from tierckpt.format.digest import derive
from tierckpt.format.grid import Cut
from tierckpt.format.layout import Entry, Layout
from tierckpt.format.layout_plan import Tree
from tierckpt.format.shard import Header
from tierckpt.state.description import Description, read
from tierckpt.state.layout import Described
from tierckpt.state.marks import Pieces
from tierckpt.state.plan import WritePlan, compose_read, read_all

if TYPE_CHECKING:
    from collections.abc import Callable

    from tierckpt.format.canonical import JSON
    from tierckpt.group import Group


@dataclass(frozen=True)
class Offer:
    """What a rank has staged: all that ``layout`` says of it, or, as None, all that its description says."""

    layout: str | None
    description: str


def offer(description: bytes, layout: Layout | None) -> Offer:
    return Offer(None if layout is None else layout.hash, derive("description", description).hex())


def settled(offers: Sequence[Offer]) -> bool:
    """Whether all ranks staged for one layout that all had agreed on."""
    return len({each.layout for each in offers}) == 1 and offers[0].layout is not None


@dataclass(frozen=True)
class Settlement:
    """``layout``: of this checkpoint, or why there is none. ``following``: for saves from call ``since`` on. ``said``: what
    groups of ranks hold now; ``key``: the digest of each rank's description."""

    layout: Layout | LayoutError
    following: Layout
    since: int
    said: list[tuple[Description, list[int]]]
    key: tuple[bytes, ...]


def settle(
    group: Group, what: str, offers: Sequence[Offer], description: bytes, known: Mapping[str, Layout], calls: int
) -> Settlement:
    """Make one checkpoint of what was offered. Collective.

    Args:
        description: this rank's own.
        known: layouts that the ranks have agreed on, by their hashes.
        calls: how many calls of save this rank has made. In those that it makes until this returns it stages all it holds.

    Raises, on all ranks:
        LayoutError: what the ranks hold now does not cover every tensor once.
    """
    world = len(offers)
    members: dict[str, list[int]] = {}
    for rank, each in enumerate(offers):
        members.setdefault(each.description, []).append(rank)
    speaks = members[offers[group.rank].description][0] == group.rank
    told = group.exchange(calls.to_bytes(_CALLS, "little") + (description if speaks else b""))
    since = max(int.from_bytes(each[:_CALLS], "little") for each in told) + 1
    found: list[Settlement] = []

    def part() -> bytes:
        said = read_all([told[ranks[0]][_CALLS:] for ranks in members.values()], list(members.values()), world)
        following = compose_read(said, world)
        layout: Layout | LayoutError = following
        if any(each.layout is not None for each in offers):
            of = {rank: description for description, ranks in said for rank in ranks}
            layouts = {each.layout: known.get(each.layout) for each in offers if each.layout is not None}
            staged = [(_offered(rank, of[rank], each, layouts), [rank]) for rank, each in enumerate(offers)]
            try:
                layout = compose_read(staged, world)
            except LayoutError as error:
                layout = error
        key = tuple(bytes.fromhex(each.description) for each in offers)
        found.append(Settlement(layout, following, since, said, key))
        return (str(layout) if isinstance(layout, LayoutError) else layout.hash + following.hash).encode()

    if len(set(group.vote(what, part))) != 1:
        raise LayoutError(
            f"{what}: ranks made different layouts of the same descriptions; do they run the same version?"
        )
    return found[0]


_CALLS = 8  # bytes of a number of calls


def _offered(rank: int, said: Description, offered: Offer, layouts: Mapping[str, Layout | None]) -> Description:
    """A rank's description, with the boxes that it has staged for cuts; ``layouts``: what any rank has staged for."""
    if offered.layout is not None:
        layout = layouts[offered.layout]
        if layout is None:
            raise LayoutError(f"rank {rank} staged for a layout that is not known here; the next save is planned anew")
        staged: dict[str, list[Box]] = {}
        for i, _, box in layout.rank_pieces(rank):
            staged.setdefault(layout.name(i), []).append(box)
        return said._replace(cuts=[tuple(staged.get(name, ())) for name in said.names])
    cuts: list[Cut | tuple[Box, ...] | None] = []
    for i, cut in enumerate(said.cuts):
        boxes = _held(rank, cut, said.shapes[i])
        # Others may have staged parts of the same boxes: the same parts are offered, so that any of them can be taken.
        for layout in layouts.values():
            number = None if layout is None else layout.index(said.names[i])
            if (
                layout is not None
                and number is not None
                and layout.tensor(number)[1:] == (said.dtypes[i], said.shapes[i])
            ):
                boxes = [
                    part
                    for box in boxes
                    for stored in layout.pieces_in(number, box)
                    if (part := intersection(stored.box, box)) is not None
                ]
        cuts.append(tuple(boxes))
    return said._replace(cuts=cuts)


def _held(rank: int, cut: Cut | tuple[Box, ...] | None, shape: tuple[int, ...]) -> list[Box]:
    """The boxes with elements that a rank holds."""
    if isinstance(cut, tuple):
        return [box for box in cut if 0 not in box.size]
    if cut is None:
        return [] if 0 in shape else [whole(shape)]
    place = cut.mesh.coordinate(rank)
    box = None if place is None else cut.box(shape, place)
    return [] if box is None or 0 in box.size else [box]


def own_layout(description: bytes, rank: int, world: int) -> Layout:
    """A layout that says of ``rank`` all that it holds, and nothing of the others. Never published."""
    said = read(description, world, what=f"description of rank {rank}")
    entries = [
        Entry(name, dtype, shape, pieces=[(rank, box) for box in _held(rank, cut, shape)])
        for i, (name, dtype, shape, cut) in enumerate(zip(said.names, said.dtypes, said.shapes, said.cuts, strict=True))
        if said.aliases[i] == i
    ]
    return Layout.build(world, entries, [Tree([(0, world - 1)], ["value"])], [(rank, rank)])


class Recut:
    """A shard of another layout, made of what a rank has staged.

    Args:
        layout, header: what was staged, and where it lies in ``memory``.
        memory: the slot; it must not change.
        values: encodes this rank's values for a layout (None where it stores none).
    """

    def __init__(
        self, layout: Layout, rank: int, header: Header, memory: memoryview, values: Callable[[Layout], bytes | None]
    ) -> None:
        self._layout, self._rank, self._header, self._memory, self._values = layout, rank, header, memory, values

    def plan(self, layout: Layout) -> tuple[WritePlan, Mapping[str, Pieces], bytes | None]:
        """How to write the shard of ``layout``, from these tensors and this blob."""
        boxes = {(self._layout.name(i), k): box for i, k, box in self._layout.rank_pieces(self._rank)}
        held: dict[str, list[tuple[Box, torch.Tensor]]] = {}
        for (name, k, kind, shape), offset in zip(self._header.pieces, self._header.offsets, strict=False):
            dtype: torch.dtype = getattr(torch, kind)
            count = torch.Size(shape).numel()
            tensor = torch.frombuffer(self._memory, dtype=dtype, count=count, offset=offset).reshape(shape)
            held.setdefault(name, []).append((boxes[name, k], tensor))
        numbers = self._layout.numbers
        tensors: dict[str, Pieces] = {}
        described: dict[str, Described] = {}
        for name, pieces in held.items():
            shape = self._layout.shape(numbers[name])
            value = tensors[name] = Pieces(shape, [(box.offset, tensor) for box, tensor in pieces])
            described[name] = Described(pieces[0][1].dtype, shape, None, pieces, value)
        blob = self._values(layout)
        return WritePlan(layout, self._rank, described, None if blob is None else len(blob)), tensors, blob


def encode_values(layout: Layout, rank: int, shared: Mapping[str, JSON], own: Mapping[str, JSON]) -> bytes | None:
    """The blob of a rank: its own values, and those of all ranks with its tree if it is the lowest of them."""
    if not layout.has_blob(rank):
        return None
    speaks = any(tree.ranks[0][0] == rank for tree in layout.trees)
    return blobs.encode({**(shared if speaks else {}), **own})
