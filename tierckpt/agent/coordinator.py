"""The coordinator: claims the generation, commits checkpoints, retires old ones. Rank 0's does so; others follow."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import time
from base64 import b64decode, b64encode
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from tierckpt.agent.roots import Nodes, Roots, one_root, spread_begin
from tierckpt.config import FREE_MARGIN, Retention
from tierckpt.errors import (
    FencedError,
    IncompleteError,
    IntegrityError,
    StepExistsError,
    StoreError,
    TierckptError,
    UntrustedError,
)
from tierckpt.format import paths
from tierckpt.format.chain import Chain, CheckpointRef, Link, Retire
from tierckpt.format.keys import SigningKey
from tierckpt.format.links import Begin, parse_time
from tierckpt.format.manifest import Manifest
from tierckpt.telling import warn
from tierckpt.tiers import leftovers, trust
from tierckpt.tiers.base import Place
from tierckpt.tiers.store import Store, put

_log = logging.getLogger("tierckpt")


class Coordinator:
    """Args:
    place: where this rank's shards go.
    run: the run's name; None: that of the store, or a new one.
    key: the signing key, or where it is.
    believe: how far the chain of an existing store is believed.
    retention: which checkpoints stay; None: all.
    grace: seconds for which files of retired checkpoints stay.
    """

    def __init__(
        self,
        place: Place,
        *,
        run: str | None = None,
        key: str | os.PathLike[str] | SigningKey | None = None,
        trusted: frozenset[str] | None = None,
        expect_head: str | None = None,
        retention: Retention | None = None,
        grace: float,
    ) -> None:
        self.place, self.generation = place, 0
        self.run = run or ""
        #: Generation and step that this generation continues.
        self.origin: tuple[int, int] | None = None
        #: This generation and some before it, with the digests of the links that began them.
        self.begun: list[tuple[int, str]] = []
        self._given_key, self._trusted, self._expect_head = key, trusted, expect_head
        self._retention, self._grace = retention, grace
        self._store: Store | None = None
        self._key: SigningKey | None = None
        # Links seen when we began, and the keys that may sign.
        self._believed: tuple[int, frozenset[str]] = (0, frozenset())
        # Links that the other roots have.
        self._told = 0
        self._pins: Path | None = None
        # The layout that this process made durable last.
        self._layout = ""
        # Whether there may be something to clean up: a store is not searched after every save.
        self._littered = True
        # Steps that have failed here, whose files may not all be gone.
        self._given_up: set[tuple[int, int]] = set()
        #: Has the agent remove the files of steps that have failed, since it may be committing one: raises if it cannot. None
        #: where no agent holds anything of this generation.
        self.discards: Callable[[Sequence[int]], None] | None = None
        # Retired checkpoints whose files are still there, and since when.
        self._waiting: deque[tuple[float, CheckpointRef]] = deque()
        # The checkpoint that was measured last, and its bytes.
        self._measured: tuple[CheckpointRef | None, int] = None, 0
        self.roots = one_root(1)

    @property
    def store(self) -> Store:
        """The store with its chain, on the leader of each root once a generation has begun."""
        assert self._store is not None
        return self._store

    def begin(self, choose: Callable[[Chain], CheckpointRef | None]) -> bytes:
        """Claim the next generation, continuing from what ``choose`` picks of the chain. Rank 0 only.

        Returns:
            What the other ranks need for :meth:`follow`.

        Raises:
            StoreError: the place holds another run.
            UntrustedError: its chain is not to be believed.
        """
        store = Store.create(self.place, self.run or _new_run())
        store.must_hold(self.run)
        self._store = store
        key = self._key = trust.signing_key(store.run, self._given_key)
        link = None
        while link is None:
            self.believe(store)
            self._believed = len(store.chain.links), frozenset({*store.chain.keys, key.public})
            if store.chain.links and store.endorse(key):
                warn(
                    f"{store.url} was signed by another key than the one held here; signing goes on with {key.public}, "
                    "which `tierckpt verify` will not trust until told to (--trust)",
                    category=trust.TrustWarning,
                )
            link = store.publish(lambda chain: self._begin_link(chain, key.public, choose), key)
        # Of our own link: another process may have begun a newer one by the time that it was read back.
        assert isinstance(link.body, Begin)
        generation = link.body.generation
        # The folder of this moment: a last word at the end of the process goes to the same place.
        self._pins = trust.Pins.load(store.run).path.parent.parent
        trust.remember(store.chain, store.url, trusted=self._trusted)
        origin = store.chain.begins[generation].origin
        told = {
            "run": store.run,
            "generation": generation,
            "origin": None if origin is None else (origin.generation, origin.step),
            "begun": store.chain.begun(generation),
        }
        return json.dumps(told).encode()

    def _begin_link(self, chain: Chain, key: str, choose: Callable[[Chain], CheckpointRef | None]) -> Link | None:
        """None when somebody else has just begun the chain with another key: ours has to be introduced to it first."""
        if chain.links and key not in chain.keys:
            return None
        return chain.begin(store=self.store.info.digest, origin=choose(chain))

    def resume(
        self,
        generation: int,
        *,
        since: int | None = None,
        keys: frozenset[str] = frozenset(),
        begin: str | None = None,
    ) -> None:
        """Go on with a generation that has begun, to commit what it has left. Where it can sign.

        Args:
            begin: digest of the link that began it; None: whichever the chain has.
            since: number of links that were believed before; None: all that there are, which the caller believes.
            keys: that may sign.

        Raises:
            FencedError: a newer one has begun, or the chain is another one by now.
        """
        store = self._store = Store.open(self.place)
        store.must_hold(self.run)
        store.must_be_current(generation)
        if begin is not None:
            store.must_have_begun(generation, begin)
        self.run, self.generation = store.run, generation
        key = self._key = trust.signing_key(store.run, self._given_key)
        if since is None:
            since, keys = len(store.chain.links), frozenset(store.chain.keys)
        self._believed = since, keys | {key.public}
        self._told = len(store.chain.links)
        # Other steps of this generation may be on their way; the next start cleans up.
        self._littered = False

    def resume_all(self, generation: int, nodes: Nodes, roots: Roots) -> None:
        """:meth:`resume` in every root; rank 0 signs. Collective."""

        def part() -> bytes:
            if nodes.rank == 0:
                self.resume(generation)
            elif nodes.rank in roots.leaders:
                self._store = Store.open(self.place)
            return b""

        nodes.vote(f"going on with generation {generation} at {self.place.url}", part)
        self.generation, self.roots, self._littered = generation, roots, False

    @property
    def signing(self) -> tuple[str, int, list[str]]:
        """The private key (hex), how many links are believed, and the keys that may sign: for rank 0's agent."""
        assert self._key is not None
        return self._key.secret(), self._believed[0], sorted(self._believed[1])

    def follow(self, told: bytes, nodes: Nodes) -> None:
        """Take over what rank 0's :meth:`begin` said, in every root. Collective."""
        said = json.loads(told)
        self.run, self.generation = said["run"], said["generation"]
        # Nobody commits what older ones have left: the chain has a newer one.
        self.discards = None
        self._given_up.clear()
        self.origin = None if said["origin"] is None else tuple(said["origin"])
        self.begun = [(number, digest) for number, digest in said["begun"]]
        self.roots, self._store = spread_begin(nodes, self.place, self._store)
        self._told = len(self._store.chain.links) if self._store is not None else 0

        def clean() -> bytes:
            if self._store is not None:
                self._collect(())
            return b""

        nodes.vote(f"cleaning up {self.place.url}", clean)

    def believe(self, store: Store) -> None:
        """Raise UntrustedError unless the chain is to be believed."""
        held = trust.held_keys(store.run, self._given_key)
        trust.Trust(self._trusted, held, self._expect_head).check(store)

    def room_for(self, total: int, step: int, rank: int) -> None:
        """Make sure that this root's share of ``total`` bytes can be written. Retired checkpoints go at once if need be, and
        with them what should be: an agent that commits retires nothing.

        Only the leader of a root looks.

        Raises:
            StoreError: there is not enough space.
        """
        if self._store is None:
            return
        ours, of = len(self.roots.members(rank)), len(self.roots.of)
        size, saving = total * ours // of, [(self.generation, step)]
        # An estimate, which counts no values. What the newest checkpoint takes says when to make room; it refuses no save.
        wanted = max(size, self._size_of_newest() * ours // of)
        if self._is_short_of(wanted):
            self._collect(saving, grace=0.0)
            if self._is_short_of(wanted) and self._retire_overdue():
                self._collect(saving, grace=0.0)
        free = self.place.free()
        if free is not None and free < size + FREE_MARGIN:
            raise StoreError(
                f"{self.place.url}: no space for step {step}: it needs {size:,} bytes and {FREE_MARGIN:,} that stay free, "
                f"{free:,} are free: free some, keep fewer (Disk(keep=…)), or run tierckpt prune --keep N"
            ) from OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.place.url)

    def _is_short_of(self, size: int) -> bool:
        free = self.place.free()
        return free is not None and free < size + FREE_MARGIN

    def _size_of_newest(self) -> int:
        """Bytes of the newest checkpoint's shards, 0 if there is none that can be looked at."""
        newest = self.store.chain.newest
        if newest is not None and self._measured[0] != newest:
            size = 0
            with contextlib.suppress(TierckptError):  # told of by whoever reads it
                size = sum(shard.size for shard in self.store.manifest(newest).shards)
            self._measured = newest, size
        return 0 if newest is None else self._measured[1]

    def _retire_overdue(self) -> bool:
        """Retire what the policy lets go now; whether there was any. Where it can be signed, and while the newest is there."""
        newest, key = self.store.chain.newest, self._key
        if newest is None or key is None:
            return False
        try:
            return self._retire(newest, self.store.manifest(newest), key)
        except (FencedError, UntrustedError):
            raise
        except TierckptError as error:
            warn(f"{self.place.url}: there is little space, and old checkpoints could not be retired: {error}")
            return False

    def commit(self, manifest: Manifest, layout: bytes, *, pinned: bool) -> bytes:
        """Publish a checkpoint whose shards and receipts are durable, then retire what is due to go. Rank 0 only."""
        store, key = self.store, self._key
        assert key is not None
        ref = CheckpointRef(manifest.generation, manifest.step, manifest.id)
        try:
            self.keep_documents(manifest, layout)
            link = store.publish(lambda chain: self._commit_link(chain, ref, pinned=pinned), key)
        except BaseException as error:
            fenced = self.fenced()
            if fenced:
                raise FencedError(fenced) from error
            raise
        assert link is not None
        problem = None
        try:
            self._retire(ref, manifest, key)
            self._clear()
        except TierckptError as error:
            # The new checkpoint is durable; old ones that stay do no harm.
            problem = f"{self.place.url}: old checkpoints could not be retired: {error}"
        # What others have published since (prune, say) goes to the other roots as well: their chains must have no gaps.
        first, self._told = self._told, len(store.chain.links)
        links = range(first, self._told) if len(self.roots.leaders) > 1 else ()
        told = [b64encode(self.place.read(paths.link(number), 1 << 26)).decode() for number in links]
        return json.dumps({"head": link.digest, "problem": problem, "first": first, "links": told}).encode()

    def keep_documents(self, manifest: Manifest, layout: bytes) -> bytes:
        """Make layout and manifest durable in this root. On the leader of each."""
        name = paths.layout(manifest.layout)
        if manifest.layout != self._layout or self.place.size(name) != len(layout):
            put(self.place, name, layout)
            self._layout = manifest.layout  # the next steps have it too, as a rule
        put(self.place, paths.manifest(manifest.generation, manifest.step), manifest.encode())
        return b""

    def adopt(self, told: bytes) -> bytes:
        """Take over the links that rank 0's :meth:`commit` published. On the leaders of other roots."""
        said = json.loads(told)
        for number, data in enumerate(said["links"], said["first"]):
            put(self.place, paths.link(number), b64decode(data))
        news = self.store.refresh()
        for link in news:
            if isinstance(link.body, Retire):
                self._await(link.body.checkpoints)
        self._clear()
        return b""

    def _commit_link(self, chain: Chain, ref: CheckpointRef, *, pinned: bool) -> Link:
        self._must_go_on_from(chain)
        if (ref.generation, ref.step) in chain.committed:
            raise StepExistsError(
                f"{self.store.url}: step {ref.step} of generation {ref.generation} is already committed"
            )
        return chain.commit(ref, pinned=pinned, roots=self.roots.ranges())

    def _must_go_on_from(self, chain: Chain) -> None:
        """Raise unless this generation is the newest, and nothing was added to its chain that our link would vouch for."""
        self.store.must_be_current(self.generation)
        since, keys = self._believed
        link = trust.stranger(chain, chain.trusted_by(keys), since)
        if link is not None:
            raise UntrustedError(
                f"{self.store.url}/{paths.link(link.number)} was signed by key {link.key}, which nobody endorsed, since this "
                "process began: somebody else writes to this store; nothing more is committed"
            )

    def fenced(self) -> str:
        """Why this process can commit nothing any more; empty if it can, or where that cannot be told."""
        if self._store is not None:
            self.unread()  # told of when it matters
            try:
                self._store.must_be_current(self.generation)
            except FencedError as error:
                return str(error)
        return ""

    def unread(self) -> str:
        """Why the chain cannot be read to its end; empty once it has been."""
        try:
            self.store.refresh()
        except TierckptError as error:
            return str(error)
        return ""

    def committed(self, step: int) -> Manifest | None:
        """The manifest of a step of this generation, if the chain that was last read has it."""
        found = self._store.chain.committed.get((self.generation, step)) if self._store is not None else None
        return None if found is None else self.store.manifest(CheckpointRef(self.generation, step, found))

    def discard(self, step: int, rank: int) -> None:
        """Remove this rank's files of a step that has failed on some rank and is not published."""
        self._littered = True
        if self._store is not None:
            self._given_up.add((self.generation, step))
        if self.discards is not None:
            if self._store is not None:
                self._discarded()
            return
        names = [paths.receipt(self.generation, step, rank), paths.shard(self.generation, step, rank)]
        if self._store is not None:
            names.insert(0, paths.manifest(self.generation, step))
        try:
            self.place.remove(names)
        except TierckptError as error:
            if self._has_any(names):  # else nothing was written: only a folder could not be removed
                warn(f"step {step} failed, and its files stay until the next clean-up: {error}")

    def _has_any(self, names: Iterable[str]) -> bool:
        """Whether some of these files are there, or that cannot be seen."""
        try:
            return any(self.place.size(name) is not None for name in names)
        except TierckptError:
            return True

    def close(self) -> None:
        """Note down the head, so that a roll-back is noticed next time."""
        if self._store is not None and self._pins is not None:  # else the chain was not believed, or not here
            pins = trust.Pins.load(self._store.run, self._pins)
            trust.remember(self._store.chain, self._store.url, pins, self._trusted)

    def _retire(self, new: CheckpointRef, manifest: Manifest, key: SigningKey) -> bool:
        """Retire what the durable checkpoint ``new`` replaces; whether there was any."""
        going = to_retire(self.store.chain, self._retention, new)
        if going:
            check_present(self.store, manifest)
            self.store.publish(lambda chain: self._retire_link(chain, new), key)
            self._await(going)
        return bool(going)

    def _retire_link(self, chain: Chain, new: CheckpointRef) -> Link | None:
        self._must_go_on_from(chain)
        going = to_retire(chain, self._retention, new)
        return chain.retire(going) if going else None

    def _await(self, refs: Iterable[CheckpointRef]) -> None:
        """Files of these may go once the readers' grace has passed."""
        now = time.time()
        self._waiting += [(now, ref) for ref in refs]

    def _clear(self) -> None:
        """Remove what may go by now. The store is searched only after a failure: that takes time for all it holds."""
        if self._littered:
            self._collect(())
            return
        due = time.time() - self._grace
        while self._waiting and self._waiting[0][0] <= due:
            _, ref = self._waiting.popleft()
            folder = paths.step_dir(ref.generation, ref.step)
            self.place.remove(leftovers.in_order(i.name for i in self.place.list(folder) if leftovers.belongs(i.name)))

    def _collect(self, sparing: Iterable[tuple[int, int]], grace: float | None = None) -> None:
        grace = self._grace if grace is None else grace
        kept = self._discarded()
        found = leftovers.find(self.store, grace=grace, sparing={*sparing, *kept}, given_up=self._given_up - kept)
        self.place.remove(found.removable)
        self._given_up = kept
        self._littered = bool(found.underway or kept)
        retired = self.store.chain.retired
        waiting = {leftovers.step_of(info.name) for info in found.waiting}
        since = [
            (parse_time(gone.time).timestamp(), ref)
            for ref, gone in retired.items()
            if (ref.generation, ref.step) in waiting
        ]
        self._waiting = deque(sorted(since))

    def _discarded(self) -> set[tuple[int, int]]:
        """Have the agent remove the files of steps that have failed here; those that it could not be asked about."""
        if self.discards is None or not self._given_up:
            return set()
        try:
            self.discards([step for _, step in sorted(self._given_up)])
            self.store.refresh()  # it may have committed one, and leaves that alone: so do we
        except TierckptError as error:
            _log.debug("files of steps that have failed stay: %s", error)
            return set(self._given_up)
        self._given_up.clear()
        return set()


def to_retire(chain: Chain, policy: Retention | None, new: CheckpointRef) -> list[CheckpointRef]:
    """Live checkpoints to retire once ``new`` is durable: older ones of the same step, and what ``policy`` lets go.

    The policy looks at the lineage; pinned checkpoints and ``new`` always stay, what is in no lineage goes.
    """
    live = list(chain.live.values())
    pinned = chain.pinned
    going = {ref for ref in live if ref.step == new.step and ref.generation < new.generation}
    if policy is not None:
        lineage = {ref for ref in chain.lineage() if ref not in going}
        steps = policy.keep(sorted({ref.step for ref in lineage if ref not in pinned}))
        going |= {ref for ref in live if ref not in pinned and (ref not in lineage or ref.step not in steps)}
    return sorted(going - {new}, key=lambda ref: (ref.generation, ref.step))


def check_present(store: Store, manifest: Manifest) -> None:
    """Every receipt that belongs here matches the manifest and its shard is there in full size; no bytes are read."""
    wanted = set(store.ranks_here(manifest))
    for shard in manifest.shards:
        if shard.rank not in wanted:
            continue
        receipt = store.receipt(manifest, shard.rank)
        size = store.place.size(receipt.name)
        if size is None:
            raise IncompleteError(f"{store.url}/{receipt.name} is missing")
        if size != receipt.size:
            raise IntegrityError(f"{store.url}/{receipt.name}: {size} bytes, expected {receipt.size}")


def _new_run() -> str:
    import uuid

    return f"run-{uuid.uuid4().hex}"
