"""Plans of saves, kept as long as the state keeps its layout."""

from __future__ import annotations

import json
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from tierckpt.collector import paused_collector
from tierckpt.errors import LayoutError
from tierckpt.format import blob as blobs
from tierckpt.format import values
from tierckpt.format.canonical import JSON
from tierckpt.format.digest import derive
from tierckpt.format.layout import Layout
from tierckpt.state import live
from tierckpt.state.flat import flat_of
from tierckpt.state.layout import Described, Describer
from tierckpt.state.marks import LiveTensor
from tierckpt.state.naming import readable
from tierckpt.state.plan import Places, WritePlan, compose, local_description
from tierckpt.state.recall import Recall, Recalled
from tierckpt.state.replicas import Replicas

if TYPE_CHECKING:
    from tierckpt import _native
    from tierckpt.group import Group


@dataclass
class Planned:
    """A save that all ranks have agreed on.

    ``told``: what the ranks said in the vote. ``disagreements``: a line for each replica that differs between ranks.
    """

    told: list[bytes]
    layout: Layout
    disagreements: list[str]
    taken: Taken


@dataclass
class Prepared:
    """One save of one rank, ready to be copied.

    ``table``, ``pointers``: None when this rank writes nothing. ``keep``: what must stay alive while the pointers are
    used. ``total``: bytes that all ranks write, roughly.
    """

    plan: WritePlan
    table: _native.CopyTable | None
    pointers: array[int]
    keep: list[object]
    total: int


@dataclass
class Taken:
    """A state taken apart: what it holds and what this rank says of it.

    ``optimizer_storages``: as in `Flat`. ``recall`` finds the same again, if it can be found. ``found`` is None when the
    state was taken apart in full.
    """

    tensors: Mapping[str, LiveTensor]
    described: Mapping[str, Described]
    said: Said
    encoded: dict[str, JSON]
    per_rank: dict[str, JSON]
    optimizer_storages: set[str]
    recall: Recall | None
    found: Recalled | None = None


class Said(NamedTuple):
    """What this rank says of a state. ``digest``: of the description."""

    description: bytes
    digest: bytes


class Planner:
    """Plans for the ranks of ``group``. The plan of the last layout is kept: while it lasts, a save takes one vote."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._describer = Describer(group.global_ranks)
        self._key: tuple[bytes, ...] = ()
        self._layout: Layout | None = None
        self._replicas: Replicas | None = None
        self._plan: WritePlan | None = None
        self._table: _native.CopyTable | None = None
        self._total = 0
        self._recall: tuple[Recall, Said] | None = None
        # The recall whose tensors look as the plan wants them, and where it has their addresses.
        self._fits: Recall | None = None
        self._places: Places | None = None

    def prepare(self, state: Any) -> None:
        """Plan ahead. Collective."""
        self.prepared(self.plan(state, "planning", lambda: b""))

    @paused_collector()
    def plan(self, state: Any, what: str, mine: Callable[[], bytes]) -> Planned:
        """Take ``state`` apart and plan how it is written; ``mine`` is this rank's word in the vote. Collective.

        Raises, on all ranks:
            StateError, LayoutError: the state cannot be saved.
            Whatever ``mine`` raises.
        """
        taken: list[Taken] = []

        def part() -> bytes:
            said = mine()
            taken.append(self._take_apart(state))
            return taken[0].said.digest + said

        results = self._group.vote(what, part)
        key = tuple(result[:32] for result in results)
        if key != self._key or self._layout is None:
            self._compose(what, key, taken[0].said.description)
        layout = self._layout
        assert layout is not None
        assert self._replicas is not None
        disagreements = self._replicas.compare(taken[0].described, taken[0].encoded, what)
        return Planned([result[32:] for result in results], layout, disagreements, taken[0])

    @paused_collector()
    def prepared(self, planned: Planned) -> Prepared:
        """This rank's part of what was planned. Not collective.

        Raises:
            LayoutError: the header of its shard would be too large.
        """
        plan, table, pointers, keep = self._write_plan(planned.layout, planned.taken)
        return Prepared(plan, table, pointers, keep, self._total)

    def _take_apart(self, state: Any) -> Taken:
        if self._recall is not None:
            recall, said = self._recall
            found = recall.again(state)
            if found is not None:
                return Taken(
                    found.by_name(),
                    found.described(),
                    said,
                    _encoded(found.values),
                    _encoded(found.per_rank),
                    recall.optimizer_storages,
                    recall,
                    found,
                )
            self._recall = None
        root = live.walk(state)
        flat = flat_of(root)
        describe = self._describer.describe
        described = {name: describe(tensor, name=name) for name, tensor in flat.tensors.items()}
        description = local_description(described, tree=flat.tree, per_rank=bool(flat.per_rank), world=self._group.size)
        said = Said(description, derive("description", description))
        new = Recall.of(root, flat, described)
        self._recall = None if new is None else (new, said)
        return Taken(
            flat.tensors,
            described,
            said,
            _encoded(flat.values),
            _encoded(flat.per_rank),
            flat.optimizer_storages,
            new,
        )

    def _compose(self, what: str, key: tuple[bytes, ...], description: bytes) -> None:
        """Exchange what differs (the lowest rank of those who say the same speaks for them) and make the layout."""
        members: dict[bytes, list[int]] = {}
        for rank, digest in enumerate(key):
            members.setdefault(digest, []).append(rank)
        speaks = members[key[self._group.rank]][0] == self._group.rank
        said = self._group.exchange(description if speaks else b"")
        found: list[Layout] = []

        def part() -> bytes:
            found.append(compose([said[ranks[0]] for ranks in members.values()], list(members.values()), len(key)))
            return json.dumps(found[0].hash).encode()

        hashes = self._group.vote(what, part)
        if len(set(hashes)) != 1:
            raise LayoutError(
                f"{what}: ranks made different layouts of the same descriptions; do they run the same version?"
            )
        self._layout, self._key, self._plan = found[0], key, None
        self._replicas = Replicas(self._group, found[0])
        self._total = _total(found[0])

    def _write_plan(
        self, layout: Layout, taken: Taken
    ) -> tuple[WritePlan, _native.CopyTable | None, array[int], list[object]]:
        rank = self._group.rank
        blob = None
        if layout.has_blob(rank):
            own = dict(taken.encoded) if _speaks_for_tree(layout, rank) else {}
            blob = blobs.encode({**own, **taken.per_rank})
        plan = self._plan
        if plan is not None and (plan.blob is None) == (blob is None):
            try:
                pointers, keep = self._pointers(plan, taken, blob)
                return plan, self._table, pointers, keep
            except LayoutError:
                # Strides changed, or the values outgrew their place: only this rank's shard looks different.
                self._plan = None
        self._fits = None
        plan = WritePlan(layout, rank, taken.described, None if blob is None else len(blob))
        table = plan.table() if plan.header is not None else None
        pointers, keep = self._pointers(plan, taken, blob)
        self._plan, self._table = plan, table
        return plan, table, pointers, keep

    def _pointers(self, plan: WritePlan, taken: Taken, blob: bytes | None) -> tuple[array[int], list[object]]:
        """Raises ``LayoutError`` when ``plan`` was made for tensors that look different, or for a smaller blob."""
        recall = taken.recall
        if taken.found is None or recall is None or recall is not self._fits:
            self._fits = None
            found = plan.pointers(taken.tensors, blob)
            # What the recall finds looks like what these have been compared with.
            self._fits, self._places = recall, None
            return found
        if self._places is None:
            self._places = plan.places(recall.places)
        return plan.pointers_at(taken.found.addresses, self._places, blob)


def _encoded(live: Mapping[str, Any]) -> dict[str, JSON]:
    return {name: values.encode(value, path=readable(name)) for name, value in live.items()}


def _speaks_for_tree(layout: Layout, rank: int) -> bool:
    return any(tree.ranks[0][0] == rank for tree in layout.trees)


def _total(layout: Layout) -> int:
    """Bytes of all shards together, roughly: headers and blobs are estimated."""
    return layout.nbytes + len(layout) * 160 + len(layout.writers) * 8192
