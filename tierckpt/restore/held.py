"""What the agents of the nodes hold in memory: further candidates of a restore, and nearer sources of committed ones."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from tierckpt import config
from tierckpt.agent.client import Client
from tierckpt.agent.protocol import Message, read_document
from tierckpt.errors import AgentLostError, AgentSilentError, IntegrityError, StoreError, TierckptError
from tierckpt.format import paths
from tierckpt.format.chain import CheckpointRef
from tierckpt.format.manifest import Manifest, ShardRef
from tierckpt.group import Group
from tierckpt.restore.choice import Choice
from tierckpt.restore.written import Lack, Written, written
from tierckpt.telling import warn
from tierckpt.tiers.base import Place
from tierckpt.tiers.ram import RamPlace
from tierckpt.tiers.store import Store


@dataclass(frozen=True)
class Held:
    """A complete snapshot in the memory of the nodes, and what this rank can read of it.

    Attributes:
        ref: what it is called, or would be once committed.
        manifest: of all its shards.
        source: the lowest rank whose node has any of it, and so the layout.
        ranks: those whose shards are on this rank's node; on its leader's word.
        pinned: as passed to ``save``.
        begin: digest of the link that began its generation.
        written: of ranks whose agents have ended, what is in the store.
    """

    ref: CheckpointRef
    manifest: Manifest
    source: int
    ranks: Sequence[int]
    pinned: bool
    begin: str
    written: Mapping[int, Written] = field(default_factory=dict)


@dataclass
class Memories:
    """What is held of one store; empty where no agent runs. Its methods are not collective."""

    run: str
    place: Place
    held: dict[CheckpointRef, Held] = field(default_factory=dict)
    client: Client | None = None

    def store(self, ref: CheckpointRef) -> Store:
        """The snapshot as a store of which only this checkpoint can be read."""
        held = self.held[ref]
        generation, step = ref.generation, ref.step
        shards = {paths.shard(generation, step, rank): rank for rank in held.ranks}
        sizes = {name: _size(held.manifest, rank) for name, rank in shards.items()}
        documents: dict[str, Callable[[], bytes]] = {}
        documents.update({paths.receipt(generation, step, r): partial(self._receipt, ref, r) for r in held.ranks})
        documents[paths.manifest(generation, step)] = held.manifest.encode
        documents[paths.layout(held.manifest.layout)] = partial(self.layout, held.manifest.layout)
        names = [name(generation, step, rank) for rank in held.written for name in (paths.shard, paths.receipt)]
        place = RamPlace(
            f"memory of {self.place.url}",
            sizes,
            documents,
            lambda name: self._memory(ref, shards[name]),
            elsewhere=dict.fromkeys(names, self.place),
        )
        return Store.bare(place, self.run)

    def layout(self, digest: str) -> bytes:
        """The layout file."""
        with self._asked.request("layout", hash=digest) as reply:
            return read_document(reply.descriptors[0])

    def carry(self, ref: CheckpointRef) -> dict[int, bytes]:
        """Make the shards of this node durable in their store; what to know of each for the manifest."""
        with self._asked.request("carry", generation=ref.generation, step=ref.step) as reply:
            told: Any = reply.fields.get("entries")
        return {rank: entry.encode() for rank, entry in told}

    def _memory(self, ref: CheckpointRef, rank: int) -> int:
        with self._fetch(ref, rank) as reply:
            return reply.take()

    def _receipt(self, ref: CheckpointRef, rank: int) -> bytes:
        with self._fetch(ref, rank) as reply:
            return read_document(reply.descriptors[1])

    def _fetch(self, ref: CheckpointRef, rank: int) -> Message:
        return self._asked.request("fetch", generation=ref.generation, step=ref.step, rank=rank)

    @property
    def _asked(self) -> Client:
        if self.client is None:
            raise StoreError(f"no agent of run {self.run} runs on this node")
        return self.client


@contextlib.contextmanager
def memories(group: Group, place: Place, run: str, *, timeout: float, beyond: tuple[int, int]) -> Iterator[Memories]:
    """What the agents hold of the store of ``run`` at ``place``. Collective.

    Args:
        beyond: a generation and a step of it: of newer ones what some agents have written may be put together with what
            others hold.
    """
    found = Memories(run, place)
    client = Client(run, config.node(), timeout=timeout)
    try:
        # One rank of each node asks for all of it; what it hears is true for the node's other ranks.
        told = group.vote(f"what is held in memory of {place.url}", lambda: _ask(group, client, place))
        try:
            if any(told) and client.connect():
                found.client = client
        except TierckptError as error:
            warn(f"the agent of run {run} is left alone: {error}")
        _combine(group, told, found, beyond)
        yield found
    finally:
        client.close()  # lets the agent reuse what was read


@dataclass(frozen=True)
class Candidate:
    """A checkpoint, and where it would be read from.

    Attributes:
        store: that has it.
        source: a rank that has its documents.
        tier: of the store.
    """

    ref: CheckpointRef
    store: Store
    source: int
    tier: str


def all_candidates(choice: Choice, found: Memories, place: Place, step: int | None) -> list[Candidate]:
    """What to try, best first. The chain says what is in the lineage; what is in memory is read from there first.

    A snapshot that was not committed belongs to the generation that made it: it counts while that is the newest of the
    same chain, and only beyond what it has committed.
    """
    disk = Store.bare(place, choice.run)
    uncommitted = [
        ref
        for ref, held in found.held.items()
        if ref.generation == choice.generation
        and held.begin == choice.begin
        and ref.step > choice.last
        and step in (None, ref.step)
    ]
    newer = [ref for ref in uncommitted if all(ref.step >= other.step for other in choice.refs)]
    refs = [*sorted(newer, key=lambda ref: ref.step, reverse=True), *choice.refs]
    if step is not None and uncommitted:
        refs = [*uncommitted, *choice.refs]
    tries = []
    for ref in refs:
        if ref in found.held:
            tries.append(Candidate(ref, found.store(ref), found.held[ref].source, "ram"))
        if ref not in uncommitted:
            tries.append(Candidate(ref, disk, choice.source, "disk"))
    return tries


def _ask(group: Group, client: Client, place: Place) -> bytes:
    if group.rank not in group.leaders:
        return b""
    try:
        try:
            return _held(client, place)
        except AgentSilentError:
            raise
        except AgentLostError:
            return _held(client, place)  # one that was just ending
    except TierckptError as error:
        # Memory is a nearer source, not the only one: what is wrong with it must not stop a restore.
        warn(f"the memory of node {client.node} is not looked at: {error}")
        return b""


def _held(client: Client, place: Place) -> bytes:
    if not client.connect():
        return b""
    with client.request("held", root=place.url) as reply:
        return json.dumps(reply.fields["snapshots"]).encode()


def _combine(group: Group, told: Sequence[bytes], found: Memories, beyond: tuple[int, int]) -> None:
    """Put together what the nodes have; what is whole is held. Collective."""
    parts: dict[tuple[int, int], list[tuple[int, dict[str, Any]]]] = {}
    for rank, said in enumerate(told):
        for snapshot in json.loads(said) if said else ():
            parts.setdefault((snapshot["generation"], snapshot["step"]), []).append((rank, snapshot))
    lacks = []
    for (generation, step), nodes in list(parts.items()):
        first = nodes[0][1]
        if len({(part["world"], part["layout"], part["begin"]) for _, part in nodes}) > 1:
            del parts[generation, step]
            continue
        sealed = {rank for _, part in nodes for rank, *_ in part["shards"]}
        lacking = sorted(set(range(first["world"])) - sealed)
        if lacking and generation == beyond[0] and step > beyond[1]:
            lacks.append(Lack(generation, step, first["world"], first["layout"], nodes[0][0], lacking))
    rest = written(group, found.place, found.run, lacks, found.layout) if lacks else {}
    for (generation, step), nodes in parts.items():
        _take(group, found, generation, step, nodes, rest.get((generation, step), {}))


def _take(
    group: Group,
    found: Memories,
    generation: int,
    step: int,
    nodes: Sequence[tuple[int, dict[str, Any]]],
    rest: Mapping[int, Written],
) -> None:
    """Hold a step if all of it is known: from ``nodes``, and the ``rest`` from the store."""
    first = nodes[0][1]
    shards = {rank: (one.size, one.digest) for rank, one in rest.items()}
    for _, part in nodes:
        shards.update((rank, (size, digest)) for rank, size, digest in part["shards"])
    if set(shards) != set(range(first["world"])) or not shards[0][0]:
        return  # some rank had not sealed it, or its node is gone
    metadata = next((part["metadata"] for _, part in nodes if part["metadata"] is not None), None)
    if 0 in rest:
        metadata = rest[0].metadata
    manifest = Manifest(
        run=found.run,
        generation=generation,
        step=step,
        world=first["world"],
        layout=first["layout"],
        metadata=metadata,
        shards=tuple(ShardRef(rank, *shard) for rank, shard in sorted(shards.items()) if shard[0]),
    )
    mine = [part for leader, part in nodes if leader == group.node_of[group.rank]]
    ranks = [rank for part in mine for rank, size, _ in part["shards"] if size]
    ref = CheckpointRef(generation, step, manifest.id)
    pinned = any(part["pinned"] for _, part in nodes)
    stored = {rank: one for rank, one in rest.items() if one.size}
    found.held[ref] = Held(ref, manifest, nodes[0][0], ranks, pinned, first["begin"], stored)


def _size(manifest: Manifest, rank: int) -> int:
    shard = manifest.shard(rank)
    if shard is None:
        raise IntegrityError(f"rank {rank} has no shard in step {manifest.step}")
    return shard.size
