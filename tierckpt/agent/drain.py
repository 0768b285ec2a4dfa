"""The drain: one thread that carries staged shards into the store, step after step, and has them committed.

All ranks drain the same steps in the same order and meet in votes on channels of the drain's own, so that training's own
collectives are never in the way.
"""

from __future__ import annotations

import json
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from tierckpt.agent.coordinator import Coordinator
from tierckpt.agent.handle import Handle, SaveInfo
from tierckpt.errors import FencedError, LostContactError, StoreError
from tierckpt.format import paths
from tierckpt.format.digest import derive
from tierckpt.format.manifest import Manifest, ShardRef
from tierckpt.format.receipt import Receipt
from tierckpt.telling import warn
from tierckpt.tiers.chunks import retried, write_shard
from tierckpt.tiers.pipeline import Source
from tierckpt.tiers.store import put


class Ranks(Protocol):
    """What the drain needs of the group of processes (see :class:`tierckpt.group.Group`)."""

    rank: int
    size: int

    def vote(self, what: str, part: Callable[[], bytes], *, tag: int = 0) -> list[bytes]: ...


@dataclass
class Shard:
    """What one rank saves of one step.

    Attributes:
        source: its bytes; None when this rank writes nothing.
        header_size: bytes of the safetensors header in front.
        header_digest: of these.
        layout_hash, layout: hex, and the layout file.
        total: bytes that all ranks together are about to write, roughly.
        metadata: the user's, as an encoded value; rank 0's counts.
    """

    source: Source | None
    header_size: int
    header_digest: str
    layout_hash: str
    layout: bytes
    total: int
    metadata: Any


class Staged(Protocol):
    """What a rank has staged, or is staging (see :class:`tierckpt.snapshot.staging.Staging`)."""

    def ready(self) -> bytes:
        """Wait until all is there; what the other ranks have to know of it."""

    def settle(self, what: str, told: Sequence[bytes]) -> tuple[Shard, list[str]]:
        """What to write, given what all ranks said, and a line for each replica that differs. Collective."""

    def release(self) -> None:
        """Give back what it takes; it is not needed any more."""

    @property
    def waited(self) -> float:
        """Seconds for which training stood at the fence because of it."""


@dataclass
class _Job:
    step: int
    pinned: bool
    staged: Staged | BaseException
    handle: Handle


class Drain:
    """Args:
    ranks: channels for this thread alone.
    coordinator: of this rank.
    """

    def __init__(self, ranks: Ranks, coordinator: Coordinator) -> None:
        self._ranks, self._coordinator = ranks, coordinator
        self._queue: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def put(self, step: int, staged: Staged | BaseException, handle: Handle, *, pinned: bool) -> None:
        """Hand over a staged shard, or the reason why this rank has none: the save then fails on all ranks."""
        if self._thread is None:
            # A daemon: whoever owns the drain closes it, at the latest when the interpreter ends.
            self._thread = threading.Thread(target=self._work, name="tierckpt-drain", daemon=True)
            self._thread.start()
        self._queue.put(_Job(step, pinned, staged, handle))

    def stop(self) -> None:
        """Let the thread end once the queue is empty; does not wait."""
        self._queue.put(None)

    def close(self) -> None:
        """Finish what is queued."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            try:
                info = self._drain(job)
            except BaseException as error:
                job.handle._finish(None, error)
            else:
                job.handle._finish(info)
            finally:
                if not isinstance(job.staged, BaseException):
                    job.staged.release()
                del job

    def _drain(self, job: _Job) -> SaveInfo:
        what = f"the save of step {job.step}"
        began = time.perf_counter()
        try:
            told = self._ranks.vote(what, lambda: _ready(job), tag=job.step)
            assert not isinstance(job.staged, BaseException)
            shard, disagreements = job.staged.settle(what, told)
            entries = self._ranks.vote(what, lambda: self._write(job, shard), tag=job.step)
            manifest = self._manifest(job, entries)
        except LostContactError:
            # Rank 0 may have heard everybody and be committing: the files stay until a clean-up knows.
            raise
        except BaseException as error:
            # Every rank removes its own; nobody writes any more once the vote is over.
            self._coordinator.discard(job.step, self._ranks.rank)
            # A newer generation removes what older ones have not finished: then this is why.
            fenced = self._ranks.vote(what, lambda: self._coordinator.fenced().encode())[0].decode()
            if fenced:
                raise FencedError(fenced) from error
            raise
        written = time.perf_counter()
        commit = self._commit(what, manifest, shard.layout, pinned=job.pinned)
        job.handle.timings["write"] = written - began
        job.handle.timings["commit"] = time.perf_counter() - written
        head = commit["head"]
        for problem in (commit["problem"], disagreements and f"step {job.step}: {disagreement(disagreements)}"):
            if problem:
                warn(problem)
        size = sum(shard.size for shard in manifest.shards)
        return SaveInfo(
            job.step, manifest.generation, manifest.id, head, size, manifest.world, _plain(manifest.metadata)
        )

    def _commit(self, what: str, manifest: Manifest, layout: bytes, *, pinned: bool) -> dict[str, Any]:
        """Rank 0 publishes; with several roots the others first get the documents, then the links."""
        coordinator, rank = self._coordinator, self._ranks.rank
        others = coordinator.roots.leaders[1:]
        if others:
            self._ranks.vote(what, lambda: coordinator.keep_documents(manifest, layout) if rank in others else b"")

        def publish() -> bytes:
            return coordinator.commit(manifest, layout, pinned=pinned) if rank == 0 else b""

        told = self._ranks.vote(what, publish)[0]
        if others:
            self._ranks.vote(what, lambda: coordinator.adopt(told) if rank in others else b"")
        found: dict[str, Any] = json.loads(told)
        return found

    def _write(self, job: _Job, shard: Shard) -> bytes:
        """Make this rank's shard and then its receipt durable."""
        place = self._coordinator.place
        self._coordinator.room_for(shard.total, job.step, self._ranks.rank)
        if shard.source is None:
            return b""
        generation, rank = self._coordinator.generation, self._ranks.rank
        name = paths.shard(generation, job.step, rank)
        chunks = write_shard(place, name, shard.source)
        receipt = Receipt(
            run=self._coordinator.run,
            generation=generation,
            step=job.step,
            rank=rank,
            world=self._ranks.size,
            layout=shard.layout_hash,
            size=shard.source.size,
            header_size=shard.header_size,
            header_digest=shard.header_digest,
            chunks=chunks,
            metadata=shard.metadata if rank == 0 else None,
        )
        data = receipt.encode()

        def told() -> bytes:
            put(place, paths.receipt(generation, job.step, rank), data)
            return b""

        retried(told)
        return json.dumps([receipt.size, receipt.shard_digest, shard.layout_hash, receipt.metadata]).encode()

    def _manifest(self, job: _Job, entries: list[bytes]) -> Manifest:
        told = [(rank, *json.loads(entry)) for rank, entry in enumerate(entries) if entry]
        if not told or told[0][0] != 0:
            raise StoreError(f"step {job.step}: rank 0 wrote no shard")
        layouts = {entry[3] for entry in told}
        if len(layouts) != 1:
            raise StoreError(f"step {job.step}: ranks wrote for different layouts")
        return Manifest(
            run=self._coordinator.run,
            generation=self._coordinator.generation,
            step=job.step,
            world=self._ranks.size,
            layout=layouts.pop(),
            metadata=told[0][4],
            shards=tuple(ShardRef(rank, size, digest) for rank, size, digest, _, _ in told),
        )


def _ready(job: _Job) -> bytes:
    if isinstance(job.staged, BaseException):
        raise job.staged
    found = job.staged.ready()
    job.handle.timings["fence"] = job.staged.waited
    return found


def disagreement(lines: Sequence[str]) -> str:
    """What to tell of replicas that differ."""
    text = "ranks that should hold the same do not (mark what is a rank's own with PerRank):"
    text += "".join(f"\n  {line}" for line in lines[:50])
    return text + (f"\n  and {len(lines) - 50} more" if len(lines) > 50 else "")


def header_digest(header: bytes) -> str:
    """The digest that a receipt gives of a shard's header."""
    return derive("header", header).hex()


def _plain(metadata: Any) -> Any:
    from tierckpt.format import values

    return None if metadata is None else values.decode(metadata, what="metadata")
