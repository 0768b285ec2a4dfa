"""What the agent holds: sealed snapshots, by generation, step and rank."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field

from tierckpt import _native
from tierckpt.agent.slots import Slot
from tierckpt.agent.writing import Title, entry, write
from tierckpt.errors import FencedError, TierckptError
from tierckpt.format import paths
from tierckpt.format.canonical import JSON
from tierckpt.format.digest import chunk_count, chunk_digest, chunk_range
from tierckpt.format.receipt import SIZE_LIMIT, Receipt
from tierckpt.tiers.base import Place
from tierckpt.tiers.workers import workers


class Snapshot:
    """What one rank has sealed of one step. Its bytes stand still as long as it is held.

    Args:
        slot: None when the rank writes nothing.
        due: whether it still is to be written to the disk.
    """

    def __init__(
        self,
        generation: Generation,
        title: Title,
        slot: Slot | None,
        size: int,
        *,
        header_size: int,
        header_digest: str,
        layout: str,
        metadata: JSON,
        due: bool,
        pinned: bool,
    ) -> None:
        self.generation, self.title, self.slot, self.size = generation, title, slot, size
        self.header_size, self.header_digest, self.layout = header_size, header_digest, layout
        self.metadata, self.due, self.pinned = metadata, due, pinned
        #: Who uses the slot: readers, the drain, the digests.
        self.holds = 0
        #: How often it was written.
        self.writes = 0
        #: Given up: its slot is free as soon as nobody uses it.
        self.released = False
        self._digests = [b""] * chunk_count(size)
        self._memory = slot.memory[:size] if slot is not None else memoryview(b"")
        self._padded = slot.memory if slot is not None else memoryview(b"")
        self._write = threading.Lock()

    def chunk(self, lo: int, hi: int, scratch: _native.Buffer) -> memoryview:
        """Bytes [lo, hi), in the slot."""
        return self._padded[lo:hi]

    def digest(self, index: int, data: memoryview) -> bytes:
        """The digest of one chunk, taken once, by whoever needs it first."""
        found = self._digests[index]
        if not found:
            found = self._digests[index] = chunk_digest(data)
        return found

    def digest_from_the_end(self) -> None:
        """Take digests beside a drain that begins at the start: they meet in the middle."""
        for index in reversed(range(len(self._digests))):
            if self.released:
                return
            lo, hi = chunk_range(index, self.size)
            self.digest(index, self._memory[lo:hi])

    def receipt(self) -> Receipt:
        """The receipt of the shard; takes the digests that are still missing."""
        missing = [index for index, found in enumerate(self._digests) if not found]

        def work(number: int, scratch: _native.Buffer) -> None:
            lo, hi = chunk_range(missing[number], self.size)
            self.digest(missing[number], self._memory[lo:hi])

        if missing:
            workers().each(len(missing), work)
        title = self.title
        return Receipt(
            run=title.run,
            generation=title.generation,
            step=title.step,
            rank=title.rank,
            world=title.world,
            layout=self.layout,
            size=self.size,
            header_size=self.header_size,
            header_digest=self.header_digest,
            chunks=b"".join(self._digests),
            metadata=self.metadata if title.rank == 0 else None,
        )

    def write(self, place: Place) -> bytes:
        """Make shard and receipt durable, once; what the coordinator needs to know of them."""
        if self.slot is None:
            return b""
        with self._write:
            # A trainer may have made it durable, or what was written may have been taken away when another rank's part failed.
            found = self._written(place)
            if found is None or place.size(self._name) != self.size:
                receipt = write(
                    place,
                    self.title,
                    self,
                    header_size=self.header_size,
                    header_digest=self.header_digest,
                    layout=self.layout,
                    metadata=self.metadata,
                    digest=self.digest,
                )
                found = entry(receipt)
                self.writes += 1
            return found

    def _written(self, place: Place) -> bytes | None:
        """What the coordinator needs to know if there is a receipt of just this snapshot."""
        title = self.title
        try:
            data = place.read(paths.receipt(title.generation, title.step, title.rank), SIZE_LIMIT)
        except (FileNotFoundError, TierckptError):
            return None
        receipt = self.receipt()
        return entry(receipt) if data == receipt.encode() else None

    @property
    def _name(self) -> str:
        return paths.shard(self.title.generation, self.title.step, self.title.rank)

    def forget_memory(self) -> None:
        """Nothing is read of it any more."""
        self._memory = self._padded = memoryview(b"")


@dataclass
class Step:
    """What the node's ranks have sealed of one step.

    Attributes:
        complete: all ranks of the job have sealed it.
        durable: it is committed in its store.
        sealed_at: when the last of them did, by the monotonic clock.
    """

    snapshots: dict[int, Snapshot] = field(default_factory=dict)
    complete: bool = False
    durable: bool = False
    sealed_at: float = 0.0


@dataclass
class Member:
    """One trainer: the process that saves as one rank.

    Attributes:
        client: what tells it from others.
        connections: that it has open.
        left: it has said good-bye.
    """

    client: str
    connections: int = 0
    left: bool = False


@dataclass
class Signing:
    """What rank 0 gave the agent to commit with.

    Attributes:
        key: the private key, hex.
        since: links that were believed when the generation began.
        keys: public keys that may sign.
    """

    key: str
    since: int
    keys: list[str]

    def __repr__(self) -> str:
        return "Signing(…)"  # the key stands in no log


@dataclass
class Generation:
    """One start of the run as this node sees it.

    Attributes:
        begun: digests of the links that began it and some before it, by number.
        locals: ranks on this node.
        roots: folders over which the shards of a checkpoint are spread.
        slots: for each rank at most so many.
        layouts: those that are needed, by hash.
        last_layouts: of what each rank sealed last, which it sends no second time.
        by_rank: slots of each rank.
        making: slots that are just being made, by rank.
        durable: the newest step that is committed, −1: none.
        durable_at: when that was sealed, or the first step of all, by the monotonic clock; None before.
        settled: its trainers are gone, and what they left has been seen to.
        attempted: that was tried at least.
    committing: held by whoever commits a step of it, or removes one that was not.
    """

    number: int
    begun: dict[int, str]
    world: int
    root: str
    place: Place
    roots: int
    slots: int
    locals: frozenset[int]
    fenced: bool = False
    members: dict[int, Member] = field(default_factory=dict)
    steps: dict[int, Step] = field(default_factory=dict)
    layouts: dict[str, bytes] = field(default_factory=dict)
    last_layouts: dict[int, str] = field(default_factory=dict)
    by_rank: dict[int, list[Slot]] = field(default_factory=dict)
    making: dict[int, int] = field(default_factory=dict)
    signing: Signing | None = None
    durable: int = -1
    durable_at: float | None = None
    settled: bool = False
    attempted: bool = False
    committing: threading.Lock = field(default_factory=threading.Lock)

    def must_be_current(self) -> None:
        """Raise FencedError if a newer generation has begun."""
        if self.fenced:
            raise FencedError(
                f"a newer generation of the run at {self.root} has begun on this node; this process, of generation "
                f"{self.number}, can seal and commit nothing any more. If two jobs save to it, end one, or give it a root of "
                "its own"
            )

    @property
    def begin(self) -> str:
        """Digest of the link that began it."""
        return self.begun[self.number]

    def same_chain(self, other: Generation) -> bool:
        """Whether the chain of the newer of the two is that of the older one, in the same place: copies of a store have the
        same links."""
        older, newer = sorted((self, other), key=lambda generation: generation.number)
        return self.root == other.root and newer.begun.get(older.number) == older.begin

    @property
    def alive(self) -> bool:
        """Whether a trainer is connected."""
        return any(member.connections for member in self.members.values())

    @property
    def has_due(self) -> bool:
        """Whether its trainers are there and have still to have something written."""
        return self.alive and any(snapshot.due for step in self.steps.values() for snapshot in step.snapshots.values())

    @property
    def owes(self) -> bool:
        """Whether its newest complete step is only here."""
        newest = self.newest_complete()
        return newest is not None and newest > self.durable

    def now_durable(self, number: int) -> None:
        """Step ``number`` is committed."""
        step = self.steps.get(number)
        if number > self.durable:
            self.durable = number
            self.durable_at = self.durable_at if step is None else step.sealed_at

    def whole(self, step: Step) -> bool:
        """Whether all ranks of this node have sealed it."""
        return self.locals <= step.snapshots.keys()

    def newest_complete(self) -> int | None:
        """The step that must not be lost: the newest of which it is known that all ranks have sealed it.

        The ranks tell, while they live. After that, where all of them were here, it can be seen.
        """
        seen = len(self.locals) == self.world and (self.fenced or not self.alive)
        found = [number for number, step in self.steps.items() if step.complete or (seen and self.whole(step))]
        return max(found, default=None)
