"""Plans of saves, kept as long as the state keeps its layout."""

from __future__ import annotations

import json
import threading
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from tierckpt.collector import paused_collector
from tierckpt.errors import LayoutError
from tierckpt.format import blob as blobs
from tierckpt.format import names, values
from tierckpt.format.canonical import JSON
from tierckpt.format.digest import derive
from tierckpt.format.layout import Layout
from tierckpt.state import live
from tierckpt.state.description import Description
from tierckpt.state.devices import gpus
from tierckpt.state.flat import flat_of
from tierckpt.state.layout import Described, Describer
from tierckpt.state.marks import LiveTensor
from tierckpt.state.naming import readable
from tierckpt.state.plan import Split, WritePlan, compose_read, local_description, read_all
from tierckpt.state.recall import Recall, Recalled
from tierckpt.state.replicas import Replicas, Sample
from tierckpt.state.rows import Places
from tierckpt.state.settle import Offer, Settlement, encode_values, own_layout, settle

if TYPE_CHECKING:
    from tierckpt import _native
    from tierckpt.group import Group


Descriptions: TypeAlias = list[tuple[Description, list[int]]]
"""What groups of ranks hold, and these groups."""


@dataclass
class Planned:
    """A save of this rank.

    ``told``: what the ranks said in the vote, or only this rank's word when there was none. ``layout``: what all ranks have
    agreed on; None when this rank's state has changed since. ``replicas``, ``sample``: what ranks have in common, and
    what is to be compared; None if nothing is.
    """

    told: list[bytes]
    layout: Layout | None
    replicas: Replicas | None
    sample: Sample | None
    taken: Taken

    @property
    def has_devices(self) -> bool:
        """Whether some of what is compared is in memory of devices."""
        return self.sample is not None and any(place >= 0 for place in self.sample.places)


@dataclass
class Prepared:
    """One save of one rank, ready to be copied.

    ``split``: the rows in parts, some of which may be copied while training goes on; None if all are at the host and none may.
    ``table``, ``pointers``: None when this rank writes nothing. ``keep``: what must stay alive while the pointers are
    used. ``total``: bytes that all ranks write, roughly.
    """

    plan: WritePlan
    table: _native.CopyTable | None
    pointers: array[int]
    keep: list[object]
    total: int
    split: Split | None

    @property
    def has_devices(self) -> bool:
        """Whether some of what is written is in memory of devices."""
        return self.split is not None and any(part.place >= 0 for part in self.split.parts)


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


class _Agreed(NamedTuple):
    """What the ranks have agreed on. ``key``: the digests of all ranks' descriptions."""

    key: tuple[bytes, ...]
    layout: Layout
    replicas: Replicas


_KNOWN = 8  # layouts that are remembered: ranks are few saves apart


class Planner:
    """Plans for the ranks of ``group``. While a state keeps its layout, a save takes no collective step."""

    def __init__(self, group: Group) -> None:
        self._group = group
        self._describer = Describer(group.global_ranks)
        # Replaced as a whole: an interrupt may come at any moment.
        self._agreed: _Agreed | None = None
        self._lock = threading.Lock()
        # What is agreed on for later calls, in the order in which it was; the last call planned; whether the ranks are just
        # finding out what comes next.
        self._following: list[Settlement] = []
        self._call = 0
        self._is_settling = False
        # The layouts that the ranks agreed on last, by their hashes.
        self._known: dict[str, Layout] = {}
        self._told: set[str] = set()
        self._plan: WritePlan | None = None
        self._table: _native.CopyTable | None = None
        self._storages: set[str] = set()
        self._split: Split | None = None
        self._recall: tuple[Recall, Said, list[bool]] | None = None
        self._changes = gpus.changes
        # The recall whose tensors look as the plan wants them, and where it has their addresses.
        self._fits: Recall | None = None
        self._places: Places | None = None

    def prepare(self, state: Any) -> int:
        """Plan ahead; bytes of this rank's shard. Collective."""
        return self.prepared(self._together(state, "planning", lambda: b"")).plan.size

    def plan(self, state: Any, what: str, mine: Callable[[], bytes], call: int) -> Planned:
        """Take ``state`` apart and plan how it is written; ``mine`` is this rank's word in the vote.

        Collective the first time, then not. ``call`` is the number of the call of save: all ranks make the same ones, not
        all of which come here.

        Raises, on all ranks if it is collective:
            StateError, LayoutError: the state cannot be saved.
            Whatever ``mine`` raises.
        """
        with self._lock:
            self._call = call
            due = [each for each in self._following if each.since <= call]
            del self._following[: len(due)]
            alone = self._is_settling
        if due:
            self._agree(due[-1].key, due[-1].following, due[-1].said)
        agreed = self._agreed
        if agreed is None:
            return self._together(state, what, mine)
        with paused_collector():
            said = mine()
            taken = self._take_apart(state)
        if alone or taken.said.digest != agreed.key[self._group.rank]:
            return Planned([said], None, None, None, taken)
        return self._planned([said], agreed, taken)

    def _planned(self, told: list[bytes], agreed: _Agreed, taken: Taken) -> Planned:
        sample = agreed.replicas.sample(self._call, taken)
        return Planned(told, agreed.layout, agreed.replicas, sample, taken)

    @property
    def is_planned(self) -> bool:
        """Whether the next `plan` is not collective."""
        return self._agreed is not None

    def settle(self, ranks: Group, what: str, offers: Sequence[Offer], description: bytes) -> Settlement:
        """Make one checkpoint of what the ranks have staged, and follow later what they hold now. Collective; on ``ranks``, by
        the one thread that does so.

        Raises, on all ranks:
            LayoutError: what the ranks hold now does not cover every tensor once.
        """
        with self._lock:
            calls = self._call
            self._is_settling = True
        try:
            for offer in offers:
                if offer.layout in self._known:
                    self._know(self._known[offer.layout])
            found = settle(ranks, what, offers, description, self._known, calls)
            self._know(found.following)
            with self._lock:
                self._following.append(found)
        finally:
            with self._lock:
                self._is_settling = False
        return found

    def untold(self, lines: Sequence[str]) -> list[str]:
        """Those that were not told of an earlier save: what differs once as a rule differs in each."""
        found = [line for line in lines if line not in self._told]
        self._told.update(found)
        return found

    def _know(self, layout: Layout) -> None:
        """Other ranks may stage for it before this one does, or still."""
        with self._lock:
            others = [other for other in self._known.values() if other.hash != layout.hash]
            self._known = {each.hash: each for each in [*others, layout][-_KNOWN:]}

    @paused_collector()
    def _together(self, state: Any, what: str, mine: Callable[[], bytes]) -> Planned:
        taken: list[Taken] = []

        def part() -> bytes:
            said = mine()
            taken.append(self._take_apart(state))
            return taken[0].said.digest + said

        results = self._group.vote(what, part)
        key = tuple(result[:32] for result in results)
        agreed = self._agree(key, *self._compose(what, key, taken[0].said.description))
        return self._planned([result[32:] for result in results], agreed, taken[0])

    def _agree(self, key: tuple[bytes, ...], layout: Layout, said: Descriptions) -> _Agreed:
        agreed = self._agreed
        if agreed is None or key != agreed.key:
            agreed = _Agreed(key, layout, Replicas(layout, self._group.rank, said))
            self._know(layout)
            self._plan = None
            self._agreed = agreed
        return agreed

    @paused_collector()
    def prepared(self, planned: Planned) -> Prepared:
        """This rank's part of what was planned, or all that it holds. Not collective.

        Raises:
            LayoutError: the header of its shard would be too large.
        """
        taken, rank = planned.taken, self._group.rank
        if planned.layout is not None:
            plan, table, pointers, keep, split = self._write_plan(planned.layout, taken)
            return Prepared(plan, table, pointers, keep, _total(planned.layout), split)
        layout = own_layout(taken.said.description, rank, self._group.size)
        blob = blobs.encode({**taken.encoded, **taken.per_rank})
        plan = WritePlan(layout, rank, taken.described, len(blob))
        pointers, keep = plan.pointers(taken.tensors, blob)
        split = plan.split(taken.optimizer_storages)
        return Prepared(plan, plan.table(), pointers, keep, plan.size * self._group.size, split)

    def _take_apart(self, state: Any) -> Taken:
        if self._changes != gpus.changes:
            self._changes, self._recall, self._plan = gpus.changes, None, None
        if self._recall is not None:
            recall, said, replayed = self._recall
            found = recall.again(state)
            if found is not None and _replayed(found.values) == replayed:
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
        self._recall = None if new is None else (new, said, _replayed(flat.values))
        return Taken(
            flat.tensors,
            described,
            said,
            _encoded(flat.values),
            _encoded(flat.per_rank),
            flat.optimizer_storages,
            new,
        )

    def _compose(self, what: str, key: tuple[bytes, ...], description: bytes) -> tuple[Layout, Descriptions]:
        """Exchange what differs (the lowest rank of those who say the same speaks for them) and make the layout."""
        members: dict[bytes, list[int]] = {}
        for rank, digest in enumerate(key):
            members.setdefault(digest, []).append(rank)
        speaks = members[key[self._group.rank]][0] == self._group.rank
        said = self._group.exchange(description if speaks else b"")
        found: list[tuple[Layout, Descriptions]] = []

        def part() -> bytes:
            all_said = read_all([said[ranks[0]] for ranks in members.values()], list(members.values()), len(key))
            found.append((compose_read(all_said, len(key)), all_said))
            return json.dumps(found[0][0].hash).encode()

        hashes = self._group.vote(what, part)
        if len(set(hashes)) != 1:
            raise LayoutError(
                f"{what}: ranks made different layouts of the same descriptions; do they run the same version?"
            )
        return found[0]

    def _write_plan(
        self, layout: Layout, taken: Taken
    ) -> tuple[WritePlan, _native.CopyTable | None, array[int], list[object], Split | None]:
        rank, storages = self._group.rank, taken.optimizer_storages
        blob = encode_values(layout, rank, taken.encoded, taken.per_rank)
        plan = self._plan
        if plan is not None:
            try:
                pointers, keep = self._pointers(plan, taken, blob)
                if storages is not self._storages and storages != self._storages:
                    self._storages, self._split = storages, plan.split(storages)
                return plan, self._table, pointers, keep, self._split
            except LayoutError:
                # Strides changed, or the values outgrew their place: only this rank's shard looks different.
                self._plan = None
        self._fits = None
        plan = WritePlan(layout, rank, taken.described, None if blob is None else len(blob))
        table, split = None, None
        if plan.header is not None:
            table, split = plan.table(), plan.split(storages)
        pointers, keep = self._pointers(plan, taken, blob)
        self._plan = None
        self._table, self._storages, self._split = table, storages, split
        self._plan = plan
        return plan, table, pointers, keep, split

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


def _replayed(values: Mapping[str, Any]) -> list[bool]:
    """Which groups of optimizers may be replayed from a CUDA graph: a switch that changes what may be copied late."""
    return [
        bool(value["capturable"] if type(value) is dict else value)
        for name, value in values.items()
        if (type(value) is dict and "capturable" in value) or name.endswith("/capturable")
    ]


def _encoded(live: Mapping[str, Any]) -> dict[str, JSON]:
    # What is below a root without tensors has the name that it has beside tensors.
    return {
        name: values.encode(value, path="" if name == names.ROOT else readable(name)) for name, value in live.items()
    }


def _total(layout: Layout) -> int:
    """Bytes of all shards together, roughly: headers and blobs are estimated."""
    return layout.nbytes + len(layout) * 160 + len(layout.writers) * 8192
