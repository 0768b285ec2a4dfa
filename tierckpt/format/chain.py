"""The chain: the signed history of a store, checked link by link (docs/format.md, section 3)."""

from __future__ import annotations

import struct
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from typing import NamedTuple, overload

from tierckpt.errors import IntegrityError, UntrustedError
from tierckpt.format import paths, store
from tierckpt.format.links import (
    Begin,
    Body,
    CheckpointRef,
    Commit,
    KeyLink,
    Link,
    Ranges,
    Retire,
    link_digest,
    timestamp,
)

__all__ = [
    "Begin",
    "Chain",
    "CheckpointRef",
    "Commit",
    "Head",
    "KeyLink",
    "Link",
    "LinkSummary",
    "Retire",
    "Retired",
    "Started",
    "timestamp",
]


class Head(NamedTuple):
    """The newest link: its number and its digest, 64 hex digits."""

    number: int
    digest: str


class LinkSummary(NamedTuple):
    """What a chain remembers of each link."""

    number: int
    action: str
    key: str
    time: str
    digest: str


class Links(Sequence[LinkSummary]):
    """The summaries of all links, in the order of the chain: 64 bytes for each, since a run of months has very many."""

    _RECORD = struct.Struct("<27s32sBI")

    def __init__(self) -> None:
        self._records = bytearray()
        self._actions: list[str] = []
        self._keys: list[str] = []

    def append(self, link: Link, digest: str) -> None:
        """The next link, and its digest."""
        action, key = _place(self._actions, link.action), _place(self._keys, link.key)
        self._records += self._RECORD.pack(link.time.encode("ascii"), bytes.fromhex(digest), action, key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Links) and list(self) == list(other)

    def __len__(self) -> int:
        return len(self._records) // self._RECORD.size

    @overload
    def __getitem__(self, index: int) -> LinkSummary: ...
    @overload
    def __getitem__(self, index: slice) -> list[LinkSummary]: ...
    def __getitem__(self, index: int | slice) -> LinkSummary | list[LinkSummary]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        time, digest, action, key = self._RECORD.unpack_from(self._records, number * self._RECORD.size)
        return LinkSummary(number, self._actions[action], self._keys[key], time.decode("ascii"), digest.hex())


def _place(known: list[str], text: str) -> int:
    """Where ``text`` is among the few that are known; it becomes one of them."""
    if text not in known:
        known.append(text)
    return known.index(text)


_BEGUN = 64  # generations that are named to tell one chain from another


class Started(NamedTuple):
    """A generation: the link that began it with its digest, and the checkpoint that it continues."""

    number: int
    origin: CheckpointRef | None
    time: str
    digest: str


class Retired(NamedTuple):
    """Which link retired a checkpoint, and its time."""

    number: int
    time: str


class Chain:
    """All that the links say up to the head. Links are appended in order, each checked against those before
    it.

    ``run`` is the run that the chain must belong to; ``None`` takes that of link 0.
    """

    def __init__(self, run: str | None = None) -> None:
        self.run = None if run is None else store.check_run_id(run)
        self.store: str | None = None
        """The store digest, which link 0 binds; ``None`` before it."""
        self.head: Head | None = None
        self.generation = 0
        """The current generation; 0 before the first link."""
        self.live: dict[int, CheckpointRef] = {}
        """The checkpoints in force by the numbers of their commit links, in ascending order of these."""
        self.begins: dict[int, Started] = {}
        """By generation."""
        self.committed: dict[tuple[int, int], str] = {}
        """The ids of all checkpoints ever committed, by generation and step."""
        self.roots: dict[CheckpointRef, tuple[Ranges, ...]] = {}
        """Of live checkpoints whose shards are in several folders: which ranks' are together."""
        self.pinned: set[CheckpointRef] = set()
        """Live checkpoints that retention keeps."""
        self.retired: dict[CheckpointRef, Retired] = {}
        self.links = Links()
        self._numbers: dict[CheckpointRef, int] = {}  # of live checkpoints: their commit links
        self._live: dict[int, dict[int, CheckpointRef]] = {}  # by generation, then by step
        self._ranges: list[tuple[int, int]] = []  # of the keys of `live`
        self._introduced: dict[str, None] = {}  # keys, in the order of the chain
        self._endorsements: list[tuple[str, str]] = []  # introduced key, signer
        self._origins: list[CheckpointRef | None] = []  # of the begin links since the last commit

    def append(self, data: bytes, *, what: str | None = None, check_signature: bool = True) -> Link:
        """Check the bytes of the next link against all rules and take it in.

        ``what`` names the link in messages, by default by its path in the store. Raises ``UntrustedError``
        when its signature, its key, its run or the digest of the link before it is wrong, ``IntegrityError``
        when it is malformed or breaks another rule. The chain is then as it was.
        """
        what = what or paths.link(len(self.links))
        link = Link.decode(data, what=what)
        self._check_place(link, what)
        self._check_key(link, what)
        if check_signature:
            link.check_signature(what=what)
        self._check_body(link.body, link.key, what)
        ranges = self._ranges_after(link.body)
        if link.live != tuple(ranges):
            raise IntegrityError(f"{what}: live is not what the links up to it make it")
        self._take(link, link_digest(data), ranges)
        return link

    def _check_place(self, link: Link, what: str) -> None:
        if link.number != len(self.links):
            raise IntegrityError(f"{what}: holds link {link.number}")
        if self.run is not None and link.run != self.run:
            raise UntrustedError(f"{what}: belongs to run {link.run}, not to {self.run}")
        previous = self.links[-1].digest if self.links else None
        if link.previous != previous:
            raise UntrustedError(f"{what}: follows a link of digest {link.previous}, but that before it has {previous}")
        if not self.links and not isinstance(link.body, Begin):
            raise IntegrityError(f"{what}: a chain starts with a begin link, not with {link.action}")

    def _check_key(self, link: Link, what: str) -> None:
        if not self.links or link.key in self._introduced:
            return
        if not isinstance(link.body, KeyLink) or link.body.introduces != link.key:
            raise UntrustedError(f"{what}: signed by key {link.key}, which no link before it introduces")

    def _check_body(self, body: Body, key: str, what: str) -> None:
        """Raise ``IntegrityError`` if the rules do not allow this now."""
        if isinstance(body, Begin):
            if body.generation != self.generation + 1:
                raise IntegrityError(f"{what}: begins generation {body.generation} after {self.generation}")
            if body.origin is not None and body.origin not in self._numbers:
                raise IntegrityError(f"{what}: continues {_name(body.origin)}, which is not live")
            if self.store is not None and body.store != self.store:
                raise IntegrityError(f"{what}: store digest {body.store}, but tierckpt.json or link 0 has {self.store}")
        elif isinstance(body, Commit):
            generation, step, _ = body.checkpoint
            if generation > self.generation:
                raise IntegrityError(f"{what}: commits {_name(body.checkpoint)} before that generation has begun")
            if (generation, step) in self.committed:
                raise IntegrityError(f"{what}: {_name(body.checkpoint)} has been committed before")
        elif isinstance(body, Retire):
            for checkpoint in body.checkpoints:
                if checkpoint not in self._numbers:
                    raise IntegrityError(f"{what}: retires {_name(checkpoint)}, which is not live")
            if len(set(body.checkpoints)) != len(body.checkpoints):
                raise IntegrityError(f"{what}: retires a checkpoint twice")
        elif body.introduces in self._introduced and key == body.introduces:
            raise IntegrityError(f"{what}: key {body.introduces} has been introduced before")

    def _ranges_after(self, body: Body) -> list[tuple[int, int]]:
        """The live ranges after the next link, if that has this body."""
        if isinstance(body, Commit):
            number = len(self.links)
            if self._ranges and self._ranges[-1][1] == number - 1:
                return [*self._ranges[:-1], (self._ranges[-1][0], number)]
            return [*self._ranges, (number, number)]
        if isinstance(body, Retire):
            return _without(self._ranges, sorted(self._numbers[checkpoint] for checkpoint in body.checkpoints))
        return self._ranges

    def _take(self, link: Link, digest: str, ranges: list[tuple[int, int]]) -> None:
        body = link.body
        self.run = link.run
        if not self.links:
            self._introduced[link.key] = None
        if isinstance(body, Begin):
            self.store = body.store
            self._origins.append(body.origin)
            self.generation = body.generation
            self.begins[body.generation] = Started(link.number, body.origin, link.time, link.digest)
        elif isinstance(body, Commit):
            checkpoint = body.checkpoint
            self._origins.clear()
            if body.pinned:
                self.pinned.add(checkpoint)
            if body.roots:
                self.roots[checkpoint] = body.roots
            self.committed[checkpoint.generation, checkpoint.step] = checkpoint.id
            self.live[link.number] = checkpoint
            self._numbers[checkpoint] = link.number
            self._live.setdefault(checkpoint.generation, {})[checkpoint.step] = checkpoint
        elif isinstance(body, Retire):
            for checkpoint in body.checkpoints:
                del self.live[self._numbers.pop(checkpoint)]
                del self._live[checkpoint.generation][checkpoint.step]
                self.pinned.discard(checkpoint)
                self.roots.pop(checkpoint, None)
                self.retired[checkpoint] = Retired(link.number, link.time)
        else:
            self._introduced[body.introduces] = None
            if link.key != body.introduces:
                self._endorsements.append((body.introduces, link.key))
        self._ranges = ranges
        self.head = Head(link.number, digest)
        self.links.append(link, digest)

    def lineage(self) -> list[CheckpointRef]:
        """The live checkpoints that the current generation continues, newest first.

        Newest is the highest step; among equal steps the higher generation.
        """
        found: list[CheckpointRef] = []
        generation, last = self.generation, None
        while generation:
            mine = self._live.get(generation, {}).values()
            found += [checkpoint for checkpoint in mine if last is None or checkpoint.step <= last]
            origin = self.begins[generation].origin
            generation, last = (origin.generation, origin.step) if origin else (0, None)
        return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.generation), reverse=True)

    @property
    def newest(self) -> CheckpointRef | None:
        """The checkpoint that a restore takes first; ``None`` if there is none."""
        lineage = self.lineage()
        return lineage[0] if lineage else None

    def begun(self, generation: int) -> list[tuple[int, str]]:
        """The generations up to this one, the newest of them, with the digests of their ``begin`` links: what tells this
        chain from another of the same run."""
        newest = range(max(1, generation - _BEGUN + 1), generation + 1)
        return [(number, self.begins[number].digest) for number in newest if number in self.begins]

    def trailing_begins(self) -> int:
        """How often in a row the run has begun from the same checkpoint, with no commit since."""
        same = 0
        while same < len(self._origins) and self._origins[-1 - same] == self._origins[-1]:
            same += 1
        return same

    @property
    def keys(self) -> dict[str, bool]:
        """All keys that may sign, each with whether it is endorsed, directly or not, by the first one."""
        endorsed = self.trusted_by([link.key for link in self.links[:1]])
        return {key: key in endorsed for key in self._introduced}

    def trusted_by(self, pinned: Iterable[str]) -> frozenset[str]:
        """The pinned keys and those that they endorsed, directly or through others."""
        trusted = set(pinned)
        pending = list(trusted)
        endorsed: dict[str, list[str]] = {}
        for introduced, signer in self._endorsements:
            endorsed.setdefault(signer, []).append(introduced)
        while pending:
            new = [key for key in endorsed.get(pending.pop(), ()) if key not in trusted]
            trusted.update(new)
            pending += new
        return frozenset(trusted)

    # Writing: the next link, still to be signed, encoded and appended

    def begin(self, *, store: str, origin: CheckpointRef | None, time: str | None = None) -> Link:
        """The link that begins the next generation, which continues ``origin``. ``store`` is the store
        digest.

        This method and the next three raise ``IntegrityError`` if the rules do not allow the link now.
        ``time`` is what `timestamp` returns, by default now.
        """
        return self._next(Begin(self.generation + 1, origin, store), time)

    def commit(
        self,
        checkpoint: CheckpointRef,
        *,
        pinned: bool = False,
        roots: Sequence[Ranges] = (),
        time: str | None = None,
    ) -> Link:
        """The link that commits a checkpoint, which retention keeps for ever if it is pinned; ``roots`` as in `Commit`."""
        return self._next(Commit(checkpoint, pinned, tuple(roots)), time)

    def retire(self, checkpoints: Iterable[CheckpointRef], *, time: str | None = None) -> Link:
        """The link that retires live checkpoints."""
        return self._next(Retire(tuple(checkpoints)), time)

    def introduce(self, key: str, *, time: str | None = None) -> Link:
        """The link that introduces a public key; unendorsed when ``key`` itself signs the link."""
        return self._next(KeyLink(key), time)

    def _next(self, body: Body, time: str | None) -> Link:
        if self.run is None:
            raise ValueError("a new chain must be told its run")
        number = len(self.links)
        if number == 0 and not isinstance(body, Begin):
            raise IntegrityError("a chain starts with a begin link")
        if isinstance(body, Retire) and not body.checkpoints:
            raise IntegrityError("a retire link needs a checkpoint")
        self._check_body(body, "", paths.link(number))
        live: Ranges = tuple(self._ranges_after(body))
        previous = self.links[-1].digest if self.links else None
        return Link(number, previous, self.run, live, time or timestamp(), body)


def _without(ranges: list[tuple[int, int]], numbers: list[int]) -> list[tuple[int, int]]:
    """The ranges without these numbers, which are ascending and all in them."""
    starts = [first for first, _ in ranges]
    touched: dict[int, list[int]] = {}
    for number in numbers:
        touched.setdefault(bisect_right(starts, number) - 1, []).append(number)
    left: list[tuple[int, int]] = []
    for index, (first, last) in enumerate(ranges):
        for number in touched.get(index, ()):
            if first < number:
                left.append((first, number - 1))
            first = number + 1
        if first <= last:
            left.append((first, last))
    return left


def _name(checkpoint: CheckpointRef) -> str:
    return f"step {checkpoint.step} of generation {checkpoint.generation} ({checkpoint.id[:12]}…)"
