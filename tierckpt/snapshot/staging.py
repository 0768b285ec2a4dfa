"""One rank's part of a save between ``save()`` and the store: being copied, then compared with what other ranks staged."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tierckpt.agent.drain import Shard, disagreement, header_digest
from tierckpt.errors import StateError
from tierckpt.format.canonical import JSON
from tierckpt.format.layout import Layout
from tierckpt.snapshot.arena import Slot
from tierckpt.snapshot.stager import LiveSource, SlotSource
from tierckpt.state.layout import local
from tierckpt.state.plan import WritePlan
from tierckpt.state.planner import Planned, Planner, Prepared
from tierckpt.state.settle import Offer, Recut, encode_values, offer, settle, settled

if TYPE_CHECKING:
    from tierckpt.group import Group


class Staging:
    """Args:
    channels: the ranks, for the thread of the drain.
    metadata: the user's, encoded.
    refuse: whether ranks that hold different replicas make the save fail.
    """

    def __init__(
        self, planner: Planner, channels: Group, planned: Planned, prepared: Prepared, metadata: JSON, *, refuse: bool
    ) -> None:
        self._planner, self._channels, self._metadata, self._refuse = planner, channels, metadata, refuse
        self._layout, self._replicas, self._sample = planned.layout, planned.replicas, planned.sample
        self._plan, self._total = prepared.plan, prepared.total
        taken = planned.taken
        self._encoded, self._per_rank, self._description = taken.encoded, taken.per_rank, taken.description
        # What is live is let go of once it was copied.
        self._live: tuple[Planned, Prepared] | None = planned, prepared
        self._source: LiveSource | SlotSource | None = None
        self._slot: Slot | None = None
        if self._plan.header is not None:
            assert prepared.table is not None
            keep = [*prepared.keep, taken]
            self._source = LiveSource(prepared.table, prepared.pointers, self._plan.size, keep)

    def stage(self, acquire: Callable[[int], Slot], done: Callable[[], None], *, overlap: bool) -> None:
        """Copy everything into a slot, so that the state may change.

        Args:
            acquire: gives a slot of so many bytes.
            done: called once when all is there, from any thread.
            overlap: what only an optimizer's step changes may be copied after this has returned.
        """
        assert self._live is not None
        planned, prepared = self._live
        sample, split, flat = self._sample, prepared.split, planned.taken.flat
        source, self._live = self._source, None
        if isinstance(source, LiveSource):
            slot = self._slot = acquire(source.size)
            if overlap and split is not None:
                storages, tensors = flat.optimizer_storages, flat.tensors
                if sample is not None:
                    sample.take(lambda name: name not in storages)
                watched = [(name, tensor) for name in dict.fromkeys(split.names) for tensor in local(tensors[name])]
                also = [] if sample is None else [sample.take]
                self._source = source.stage_behind_fence(slot, split, watched, flat.optimizers, also, done)
                return
            self._source = source.stage(slot)
        if sample is not None:
            sample.take()
        done()

    @property
    def waited(self) -> float:
        """Seconds for which training stood at the fence because of it."""
        return self._source.waited if isinstance(self._source, SlotSource) else 0.0

    def ready(self) -> bytes:
        """Wait until all is there; what the other ranks have to know of it.

        Raises:
            TornSnapshotError: the state changed while it was copied.
        """
        if self._source is not None:
            self._source.ready()
        mine = offer(self._description, self._layout)
        summary = None if self._sample is None else self._sample.summary()
        return json.dumps([mine.layout, mine.description, summary]).encode()

    def settle(self, what: str, told: Sequence[bytes]) -> tuple[Shard, list[str]]:
        """What to write, and a line for each replica that differs between ranks. Collective.

        Args:
            told: every rank's :meth:`ready`.

        Raises, on all ranks:
            LayoutError: what the ranks have staged is no whole checkpoint.
            StateError: replicas differ, and that is refused.
        """
        said = [json.loads(each) for each in told]
        offers = [Offer(layout, description) for layout, description, _ in said]
        if not settled(offers):
            return self._recut(what, offers), []
        lines: list[str] = []
        if self._replicas is not None:
            summaries = [summary for *_, summary in said]
            lines = self._replicas.compare(self._channels, what, self._sample, summaries)
        if lines and self._refuse:
            raise StateError(disagreement(lines))
        return self._shard(self._plan, self._source), lines

    def _recut(self, what: str, offers: Sequence[Offer]) -> Shard:
        found = settle(self._channels, what, offers, self._description, self._planner.known)
        self._planner.adopt(self._description, found)
        made: list[Shard] = []

        def part() -> bytes:
            made.append(self._cut(found.layout))
            return b""

        self._channels.vote(what, part)
        return made[0]

    def _cut(self, layout: Layout) -> Shard:
        """This rank's shard of another layout than the one it staged for."""
        staged, rank = self._plan, self._channels.rank
        if self._live is not None:
            taken = self._live[0].taken  # the live state stands still
            blob = self._values(layout)
            plan = WritePlan(layout, rank, taken.described, None if blob is None else len(blob))
            pointers, keep = plan.pointers(taken.flat.tensors, blob)
        else:
            assert self._slot is not None
            assert staged.header is not None
            memory = memoryview(self._slot.buffer)[: staged.size]
            plan, tensors, blob = Recut(staged.layout, rank, staged.header, memory, self._values).plan(layout)
            pointers, keep = plan.pointers(tensors, blob)
            keep.append(tensors)
        source = None if plan.header is None else LiveSource(plan.table(), pointers, plan.size, keep)
        return self._shard(plan, source)

    def _values(self, layout: Layout) -> bytes | None:
        return encode_values(layout, self._channels.rank, self._encoded, self._per_rank)

    def _shard(self, plan: WritePlan, source: LiveSource | SlotSource | None) -> Shard:
        header = plan.header
        return Shard(
            source=source,
            header_size=header.header_size if header else 0,
            header_digest=header_digest(header.data) if header else "",
            layout_hash=plan.layout_hash,
            layout=plan.layout_bytes,
            total=self._total,
            metadata=self._metadata,
        )

    def release(self) -> None:
        """Give the slot back."""
        slot, self._slot = self._slot, None
        self._source = self._live = self._sample = None
        if slot is not None:
            slot.release()
