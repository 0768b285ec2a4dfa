"""One rank's part of a save between ``save()`` and the store: being copied, then compared with what other ranks staged."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from tierckpt import _native
from tierckpt.agent.drain import disagreement, header_digest
from tierckpt.agent.writing import Shard
from tierckpt.errors import LayoutError, StateError
from tierckpt.format.canonical import JSON
from tierckpt.format.layout import Layout
from tierckpt.snapshot import fence
from tierckpt.snapshot.arena import Slot
from tierckpt.snapshot.remote import RemoteSlot
from tierckpt.snapshot.stager import LiveSource, SlotSource, Stager
from tierckpt.state.layout import local
from tierckpt.state.plan import Split, WritePlan
from tierckpt.state.planner import Planned, Planner, Prepared, Taken
from tierckpt.state.settle import Offer, Recut, encode_values, offer, settled

if TYPE_CHECKING:
    from tierckpt.group import Group


AnySlot: TypeAlias = Slot | RemoteSlot


class Memory(Protocol):
    """Where one step of one rank is kept, in this process or in the node's agent."""

    @property
    def seals(self) -> bool:
        """Whether a sealed shard outlives this process."""

    def acquire(self, size: int) -> AnySlot:
        """A slot of at least so many bytes."""

    def larger(self, size: int) -> AnySlot | None:
        """Another one, for what has outgrown its slot; None if none is free, so that this process keeps it."""

    def seal(self, slot: AnySlot | None, shard: Shard) -> None:
        """The shard is complete in its slot; None: this rank writes nothing."""

    def drop(self) -> None:
        """What was sealed is of no use."""

    def settled(self, durable: bool) -> None:
        """Nothing more is written of what was sealed; ``durable``: it is committed."""


class Staging:
    """Args:
    memory: where slots are; None: the state is not copied, and stands still until the end.
    metadata: the user's, encoded.
    refuse: whether ranks that hold different replicas make the save fail.
    """

    def __init__(
        self,
        planner: Planner,
        memory: Memory | None,
        planned: Planned,
        prepared: Prepared,
        metadata: JSON,
        *,
        refuse: bool,
    ) -> None:
        self._planner, self._memory, self._metadata, self._refuse = planner, memory, metadata, refuse
        self._sealed = self._withdrawn = False
        self._failure: Exception | None = None
        self._layout, self._replicas, self._sample = planned.layout, planned.replicas, planned.sample
        self._plan, self._total = prepared.plan, prepared.total
        taken = planned.taken
        self._encoded, self._per_rank, self._description = taken.encoded, taken.per_rank, taken.said.description
        # What is live is let go of once it was copied.
        self._live: tuple[Planned, Prepared] | None = planned, prepared
        self._source: LiveSource | SlotSource | None = None
        self._slot: AnySlot | None = None
        self._copy: fence.Copy | None = None
        if self._plan.header is not None:
            assert prepared.table is not None
            keep = [*prepared.keep, taken]
            self._source = LiveSource(prepared.table, prepared.pointers, self._plan.size, keep)

    def stage(self, done: Callable[[], None], *, overlap: bool) -> None:
        """Copy everything into a slot, so that the state may change.

        Args:
            done: called once when all is there, from any thread.
            overlap: what only an optimizer's step changes may be copied after this has returned.
        """
        assert self._live is not None
        assert self._memory is not None
        planned, prepared = self._live
        split, taken = prepared.split, planned.taken
        source, self._live = self._source, None
        assert not isinstance(source, SlotSource)
        stager = Stager(source, split, self._sample)
        memory = None
        if source is not None:
            slot = self._slot = self._memory.acquire(source.size)
            memory = slot.buffer
        if not overlap or not stager.ends_later:
            self._source = stager.copy(memory)
            done()
            return
        # A parameter may get other memory meanwhile (``p.data = …``): what is being copied must not go away.
        keep: list[object] = [] if split is None else [_storages(split, taken)]
        keep.append(self._slot)  # and nobody else gets this one
        watch = fence.Watch(list, ()) if split is None else _watch(split, taken)
        # Known before it begins: an interrupt must not leave a copy that nobody waits for.
        self._source, self._copy = stager.copy_behind_fence(memory, watch, keep, done)
        self._copy.start()

    def fail(self, error: Exception) -> None:
        """This rank could not stage its part. The others hear of it where the drains meet, and of what its state looks like."""
        self.release(False)
        self._failure = error

    @property
    def waited(self) -> float:
        """Seconds for which training stood at the fence because of it."""
        return 0.0 if self._copy is None else self._copy.waited

    @property
    def outlives(self) -> bool:
        """Whether it can be sealed: it lies in memory that outlives this process."""
        return self._memory is not None and self._memory.seals

    def ready(self) -> bytes:
        """Wait until all is there; what the other ranks have to know of it.

        Raises:
            TornSnapshotError: the state changed while it was copied.
        """
        mine = offer(self._description, self._layout)
        if self._failure is not None:
            return json.dumps([mine.layout, mine.description, None, True]).encode()
        if self._copy is not None:
            self._copy.wait()
        summary = None if self._sample is None else self._sample.summary()
        return json.dumps([mine.layout, mine.description, summary, False]).encode()

    def seal(self, shard: Shard) -> None:
        """Hand over what :meth:`settle` returned to memory that outlives this process.

        Raises:
            AgentLostError: it is gone; the next save goes on with a new agent.
        """
        assert self._memory is not None
        self._memory.seal(self._slot, shard)
        self._sealed = True

    def withdraw(self) -> None:
        """What was sealed does not stay: some rank could not. It goes when it has been written."""
        self._withdrawn = True

    def settle(self, ranks: Group, what: str, told: Sequence[bytes]) -> tuple[Shard, list[str]]:
        """What to write, and a line for each replica that differs between ranks, if that was not told before. Collective.

        Args:
            told: every rank's :meth:`ready`.

        Raises, on all ranks:
            LayoutError: what the ranks have staged is no whole checkpoint.
            StateError: replicas differ, and that is refused.
        """
        said = [json.loads(each) for each in told]
        offers = [Offer(layout, description) for layout, description, *_ in said]
        failed = any(failed for *_, failed in said)
        if not settled(offers):
            # Whatever becomes of this save, later ones follow what all ranks hold now.
            found = self._planner.settle(ranks, what, offers, self._description)
            if isinstance(found.layout, LayoutError):
                raise found.layout
            if not failed:
                return self._recut(ranks, what, found.layout), []
        if failed:
            ranks.vote(what, self._must_have_staged)
        lines: list[str] = []
        if self._replicas is not None:
            summaries = [summary for _, _, summary, _ in said]
            lines = self._replicas.compare(ranks, what, self._sample, summaries)
        if lines and self._refuse:
            raise StateError(disagreement(lines))
        return self._shard(self._plan, self._source), self._planner.untold(lines)

    def _must_have_staged(self) -> bytes:
        if self._failure is not None:
            raise self._failure
        return b""

    def _recut(self, ranks: Group, what: str, layout: Layout) -> Shard:
        made: list[Shard] = []

        def part() -> bytes:
            plan, cut = self._cut(layout, ranks.rank)
            source: LiveSource | SlotSource | None = cut
            if cut is not None and self._memory is not None and self._memory.seals:
                # Whoever holds sealed shards holds them as they are to be written.
                self._source = source = self._put_back(cut)
            elif cut is None and self._slot is not None:
                # Others write all that it has staged.
                slot, self._slot, self._source = self._slot, None, None
                slot.release()
            made.append(self._shard(plan, source))
            return b""

        ranks.vote(what, part)
        return made[0]

    def _put_back(self, source: LiveSource) -> SlotSource:
        """A shard that was cut out of the slot, in that slot again or in a larger one. Nobody waits for that: ranks may be
        ahead and have filled all others, which are free once this step is sealed."""
        assert self._memory is not None
        between = _native.Buffer(source.size)
        whole = source.stage(between)
        if self._slot is None or len(self._slot.buffer) < source.size:
            larger = self._memory.larger(source.size)
            if larger is None:
                return whole
            if self._slot is not None:
                self._slot.release()
            self._slot = larger
        into = memoryview(self._slot.buffer)[: source.size]
        _native.stream_copy(into, whole.chunk(0, source.size, between))
        return SlotSource(self._slot.buffer, source.size)

    def _cut(self, layout: Layout, rank: int) -> tuple[WritePlan, LiveSource | None]:
        """This rank's shard of another layout than the one it staged for."""
        staged = self._plan
        if self._live is not None:
            taken = self._live[0].taken  # the live state stands still
            blob = self._values(layout, rank)
            plan = WritePlan(layout, rank, taken.described, None if blob is None else len(blob))
            pointers, keep = plan.pointers(taken.tensors, blob)
        else:
            header = staged.header
            if header is None or self._slot is None:
                # This rank had nothing to stage, so nothing is wanted of it but perhaps a layout's empty share.
                blob = self._values(layout, rank)
                plan = WritePlan(layout, rank, {}, None if blob is None else len(blob))
                pointers, keep = plan.pointers({}, blob)
            else:
                memory = memoryview(self._slot.buffer)[: staged.size]
                recut = Recut(staged.layout, rank, header, memory, lambda of: self._values(of, rank))
                plan, tensors, blob = recut.plan(layout)
                pointers, keep = plan.pointers(tensors, blob)
                keep.append(tensors)
        source = None if plan.header is None else LiveSource(plan.table(), pointers, plan.size, keep)
        return plan, source

    def _values(self, layout: Layout, rank: int) -> bytes | None:
        return encode_values(layout, rank, self._encoded, self._per_rank)

    def _shard(self, plan: WritePlan, source: LiveSource | SlotSource | None) -> Shard:
        header = plan.header
        return Shard(
            source=source,
            size=plan.size,
            header_size=header.header_size if header else 0,
            header_digest=header_digest(header.data) if header else "",
            layout_hash=plan.layout_hash,
            layout=plan.layout_bytes,
            total=self._total,
            metadata=self._metadata,
        )

    def release(self, durable: bool) -> None:
        """Nothing more is written of it; ``durable``: it is committed."""
        if self._copy is not None:
            self._copy.end()
        slot, self._slot = self._slot, None
        self._source = self._live = self._sample = None
        sealed, self._sealed = self._sealed, False
        if not sealed and slot is not None:
            slot.release()
        if self._memory is not None and sealed and self._withdrawn:
            self._memory.drop()
            sealed = False
        if self._memory is not None and (sealed or durable):
            self._memory.settled(durable)


#: So many step counts are compared; those of one group are equal.
_STEPS = 16


def _storages(split: Split, taken: Taken) -> Sequence[object]:
    """What keeps the memory of the tensors that are copied late."""
    if taken.found is not None:
        return taken.found.storages
    return [tensor.untyped_storage() for name in split.names for tensor in local(taken.tensors[name])]


def _watch(split: Split, taken: Taken) -> fence.Watch:
    """What tells that one of the tensors that are copied late has changed."""
    tensors, found = taken.tensors, taken.found
    counts = [tensors[name] for name in split.counts[:_STEPS]]
    steps = [step for step in counts if type(step) is torch.Tensor and step.is_cpu and step.numel() == 1]
    if found is not None:
        late = taken.optimizer_storages
        return fence.Watch(lambda: [name for name in found.changed() if name in late], steps)
    watched = [(name, tensor) for name in dict.fromkeys(split.names) for tensor in local(tensors[name])]
    return fence.Watch(fence.Versions(watched).changed, steps)
