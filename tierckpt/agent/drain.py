"""The drain: one thread that carries staged shards into the store, step after step, and has them committed.

All ranks drain the same steps in the same order and meet in votes on channels of the drain's own, so that training's own
collectives are never in the way.
"""

from __future__ import annotations

import functools
import json
import logging
import operator
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from tierckpt.agent.calls import Calls, Mark, Ranks
from tierckpt.agent.coordinator import Coordinator
from tierckpt.agent.handle import Handle, SaveInfo
from tierckpt.agent.writing import OwnWriter, Shard, Title, Writer
from tierckpt.errors import FencedError, LostContactError, OutOfStepError, StepExistsError, StoreError
from tierckpt.format.digest import derive
from tierckpt.format.manifest import Manifest, ShardRef
from tierckpt.telling import warn
from tierckpt.threads import Condition, Serial

_log = logging.getLogger("tierckpt")


class Staged(Protocol):
    """What a rank has staged, or is staging (see :class:`tierckpt.snapshot.staging.Staging`)."""

    def ready(self) -> bytes:
        """Wait until all is there; what the other ranks have to know of it."""

    def settle(self, ranks: Any, what: str, told: Sequence[bytes]) -> tuple[Shard, list[str]]:
        """What to write, given what all ranks said, and a line for each replica that differs. Collective."""

    def seal(self, shard: Shard) -> None:
        """Hand it over to memory that outlives this process."""

    def withdraw(self) -> None:
        """What was sealed does not stay: some rank could not."""

    def release(self, durable: bool) -> None:
        """Nothing more is written of it; ``durable``: it is committed."""

    @property
    def waited(self) -> float:
        """Seconds for which training stood at the fence because of it."""

    @property
    def outlives(self) -> bool:
        """Whether it can be sealed: it lies in memory that outlives this process."""


class _Committed(NamedTuple):
    """What the chain says of a step that failed here.

    Attributes:
        fenced: why this process can commit nothing any more, if so.
        unknown: why the chain cannot be read, if so.
        info: the step, if it is committed.
    """

    fenced: str = ""
    unknown: str = ""
    info: SaveInfo | None = None


#: What stands in front of what a rank has staged.
_DUE, _PINNED, _OWN = 1, 2, 4


@dataclass
class Job:
    """A step on its way down.

    Attributes:
        call: number of the call that made it, from :class:`Calls`.
        staged: this rank's part, or why it has none: the save then fails on all ranks.
        shard: what is to be written of it, once all ranks know what they have staged.
        error: why this rank cannot have it written after all.
        own: ranks whose part is in no memory that outlives them, so that each rank's process writes its part.
        due: whether the step is due on the disk.
        offered: this rank has told the others that it is about to write it.
        withheld: the ranks are just deciding whether a newer step takes its place.
        overtaken: they have decided so.
    """

    call: int
    step: int
    pinned: bool
    staged: Staged | BaseException
    handle: Handle
    due: bool = True
    shard: Shard | None = None
    error: Exception | None = None
    own: Sequence[int] = ()
    offered: bool = False
    withheld: bool = False
    overtaken: bool = False

    def release(self, durable: bool) -> None:
        """Nothing more is written of it."""
        if not isinstance(self.staged, BaseException):
            self.staged.release(durable)

    @property
    def seals(self) -> bool:
        """Whether this rank's part can be sealed."""
        return not isinstance(self.staged, BaseException) and self.staged.outlives

    def ready(self) -> bytes:
        """Wait until this rank has staged its part; what the others have to know of it.

        Raises:
            Why it has none.
        """
        if isinstance(self.staged, BaseException):
            raise self.staged
        found = self.staged.ready()
        self.handle.timings["fence"] = self.staged.waited
        flags = _DUE * self.due | _PINNED * self.pinned | _OWN * (not self.seals)
        return bytes([flags]) + found

    def agree(self, told: Sequence[bytes]) -> list[bytes]:
        """Do with it what any rank wants to, given all ranks' :meth:`ready`; what these staged."""
        flags = functools.reduce(operator.or_, (said[0] for said in told))
        # Ranks that were given other steps before may differ in what is due.
        self.due, self.pinned = bool(flags & _DUE), bool(flags & _PINNED)
        self.own = [rank for rank, said in enumerate(told) if said[0] & _OWN]
        return [said[1:] for said in told]

    def settle(self, ranks: Any, what: str, told: Sequence[bytes]) -> Shard:
        """Find out what is to be written, and tell of replicas that differ. Collective."""
        assert not isinstance(self.staged, BaseException)
        self.shard, lines = self.staged.settle(ranks, what, told)
        if lines:
            warn(f"step {self.step}: {disagreement(lines)}")
        return self.shard


class Drain:
    """Args:
    ranks: channels for this thread alone.
    coordinator: of this rank.
    calls: that its steps come from.
    """

    def __init__(self, ranks: Ranks, coordinator: Coordinator, calls: Calls) -> None:
        self._ranks, self._coordinator, self.calls = ranks, coordinator, calls
        #: Who writes the shards. Changed only while nothing is queued.
        self.writer: Writer = OwnWriter()
        # The highest step that was drained.
        self._highest = -1
        #: Whether a queued step may be overtaken.
        self.overtakes = False
        self.pending: list[Job] = []
        self.turn = Condition()
        self._line: Serial[Job | Mark] = Serial(self._next, "tierckpt-drain")

    def put(self, job: Job | Mark) -> None:
        """Hand over a step."""
        if isinstance(job, Job):
            with self.turn.lock:
                self.pending.append(job)
        self._line.put(job)

    def stop(self) -> None:
        """Let the thread end once the queue is empty; does not wait."""
        self._line.stop()

    def close(self) -> None:
        """Finish what is queued."""
        self._line.close()

    def _next(self, job: Job | Mark) -> None:
        if isinstance(job, Mark):
            job.meet(self._ranks)
            return
        try:
            info = self._drain(job) if not self.overtakes or self._offer(job) else None
        except BaseException as error:
            self._end(job, None, error)
        else:
            if info is not None:
                self._end(job, info, None)

    def _end(self, job: Job, info: SaveInfo | None, error: BaseException | None) -> None:
        try:
            job.release(info is not None)
        finally:
            with self.turn.lock:
                self.pending = [other for other in self.pending if other is not job]
                self.turn.notify_all()
            job.handle._finish(info, error)

    def _offer(self, job: Job) -> bool:
        """Whether the step is still to be written; the ranks decide, since some may know later that it is overtaken."""
        with self.turn.lock:
            self.turn.wait_for(lambda: not job.withheld)
            job.offered = True
            mine = b"" if not job.overtaken else b"overtaken"
        return not any(self._ranks.vote(f"the turn of step {job.step}", lambda: mine, tag=job.step))

    def overtake(self, job: Job, by: Job) -> None:
        """A newer step takes its place: every rank decides the same, before any has begun to write it."""
        with self.turn.lock:
            job.overtaken = True
            self.pending = [other for other in self.pending if other is not job]
        why = f"step {job.step} was overtaken by step {by.step} before its turn at tier 'disk' came"
        try:
            job.release(False)
        finally:
            job.handle._skip("disk", why)
            job.handle._finish(None)

    def _drain(self, job: Job) -> SaveInfo:
        what = f"the save of step {job.step}"
        began = time.perf_counter()
        try:
            shard = job.shard
            if shard is None:
                shard = job.settle(
                    self._ranks, what, job.agree(self.calls.meet(self._ranks, job.call, job.step, job.ready))
                )
            is_new = self._is_new(job, what)
            if is_new:
                # Before anybody writes: what others reserve meanwhile would count twice.
                self._ranks.vote(what, lambda: self._make_room(job, shard), tag=job.step)
                entries = self._ranks.vote(what, lambda: self._write(job, shard), tag=job.step)
                manifest = self._manifest(job, entries)
        except OutOfStepError:
            raise  # nothing of it was written, and other ranks are elsewhere
        except LostContactError:
            # Rank 0 may have heard everybody and be committing: the files stay until a clean-up knows.
            raise
        except BaseException as error:
            found = self._committed(job, what)
            if found.info is not None:
                return found.info
            self._discard(job, found)
            # A newer generation removes what older ones have not finished: then this is why.
            if found.fenced:
                raise FencedError(found.fenced) from error
            raise
        if not is_new:
            raise StepExistsError(f"step {job.step} is committed already, by an earlier save; each step is saved once")
        written = time.perf_counter()
        try:
            told = self._commit(what, manifest, shard.layout, pinned=job.pinned)
        except LostContactError:
            raise
        except BaseException as error:
            found = self._committed(job, what)
            if found.info is not None and isinstance(error, StepExistsError):
                return found.info
            self._discard(job, found)
            raise
        job.handle.timings["write"] = written - began
        job.handle.timings["commit"] = time.perf_counter() - written
        head = told["head"]
        if told["problem"]:
            warn(told["problem"])
        return _info(manifest, head)

    def _is_new(self, job: Job, what: str) -> bool:
        """Nobody writes over what is committed: without an agent a save may have been given up by who made it, and be made again.
        Collective, for a step that is no later than others before."""
        if job.step > self._highest:
            self._highest = job.step
            return True
        found = self._committed(job, what)
        if found.unknown:
            raise StoreError(f"it cannot be seen whether step {job.step} is committed already: {found.unknown}")
        return found.info is None

    def _discard(self, job: Job, found: _Committed) -> None:
        """Every rank removes its own files of a step that is in no chain; nobody writes any more once the vote is over."""
        if found.info is None and not found.unknown:
            self._coordinator.discard(job.step, self._ranks.rank)

    def _committed(self, job: Job, what: str) -> _Committed:
        """Whether somebody has committed the step all the same: an agent that was told to end, say. Collective."""
        told = json.loads(self._ranks.vote(what, lambda: self._look(job.step))[0])
        if "manifest" not in told:
            return _Committed(told["fenced"], told["unknown"])
        ready = Manifest.decode(told["manifest"].encode(), what=f"the manifest of step {job.step}")
        return _Committed(info=_info(ready, told["head"]))

    def _look(self, step: int) -> bytes:
        """What rank 0's chain says of a step that failed here."""
        if self._ranks.rank:
            return b"{}"
        fenced, unknown = self._coordinator.fenced(), self._coordinator.unread()
        manifest = self._coordinator.committed(step)
        if manifest is None:
            return json.dumps({"fenced": fenced, "unknown": unknown}).encode()
        head = self._coordinator.store.chain.links[-1].digest
        return json.dumps({"manifest": manifest.encode().decode(), "head": head}).encode()

    def _commit(self, what: str, manifest: Manifest, layout: bytes, *, pinned: bool) -> dict[str, Any]:
        return publish(self._ranks, self._coordinator, what, manifest, layout, pinned=pinned)

    def _make_room(self, job: Job, shard: Shard) -> bytes:
        self._coordinator.room_for(shard.total, job.step, self._ranks.rank)
        return b""

    def _write(self, job: Job, shard: Shard) -> bytes:
        """Make this rank's shard and then its receipt durable."""
        if job.error is not None:
            raise job.error
        coordinator, rank = self._coordinator, self._ranks.rank
        title = Title(coordinator.run, coordinator.generation, job.step, rank, self._ranks.size)
        writer = OwnWriter() if job.own else self.writer
        return writer.write(coordinator.place, title, shard)

    def _manifest(self, job: Job, entries: list[bytes]) -> Manifest:
        title = Title(self._coordinator.run, self._coordinator.generation, job.step, 0, self._ranks.size)
        return manifest_of(title, dict(enumerate(entries)))


def manifest_of(title: Title, entries: Mapping[int, bytes]) -> Manifest:
    """The manifest of a step of which the ranks have said what they wrote."""
    told = [(rank, *json.loads(entry)) for rank, entry in sorted(entries.items()) if entry]
    if not told or told[0][0] != 0:
        raise StoreError(f"step {title.step}: rank 0 wrote no shard")
    layouts = {entry[3] for entry in told}
    if len(layouts) != 1:
        raise StoreError(f"step {title.step}: ranks wrote for different layouts")
    return Manifest(
        run=title.run,
        generation=title.generation,
        step=title.step,
        world=title.world,
        layout=layouts.pop(),
        metadata=told[0][4],
        shards=tuple(ShardRef(rank, size, digest) for rank, size, digest, _, _ in told),
    )


def publish(
    ranks: Ranks, coordinator: Coordinator, what: str, manifest: Manifest, layout: bytes, *, pinned: bool
) -> dict[str, Any]:
    """Rank 0 commits; with several roots the others first get the documents, then the links. Collective."""
    rank = ranks.rank
    others = coordinator.roots.leaders[1:]
    if others:
        ranks.vote(what, lambda: coordinator.keep_documents(manifest, layout) if rank in others else b"")
    told = ranks.vote(what, lambda: coordinator.commit(manifest, layout, pinned=pinned) if rank == 0 else b"")[0]
    if others:
        ranks.vote(what, lambda: coordinator.adopt(told) if rank in others else b"")
    found: dict[str, Any] = json.loads(told)
    return found


def disagreement(lines: Sequence[str]) -> str:
    """What to tell of replicas that differ."""
    text = "ranks that should hold the same do not (mark what is a rank's own with PerRank):"
    text += "".join(f"\n  {line}" for line in lines[:50])
    return text + (f"\n  and {len(lines) - 50} more" if len(lines) > 50 else "")


def header_digest(header: bytes) -> str:
    """The digest that a receipt gives of a shard's header."""
    return derive("header", header).hex()


def _info(manifest: Manifest, head: str) -> SaveInfo:
    size = sum(shard.size for shard in manifest.shards)
    metadata = _plain(manifest.metadata)
    return SaveInfo(manifest.step, manifest.generation, manifest.id, head, size, manifest.world, metadata)


def _plain(metadata: Any) -> Any:
    from tierckpt.format import values

    return None if metadata is None else values.decode(metadata, what="metadata")
