"""A snapshot that was restored from memory and is in no store yet: it is committed under its own name before the run goes on."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable

from tierckpt.agent.coordinator import Coordinator
from tierckpt.agent.drain import manifest_of, publish
from tierckpt.agent.roots import Roots, level
from tierckpt.agent.writing import Title
from tierckpt.config import PROBE_SECONDS
from tierckpt.errors import IncompleteError, IntegrityError, StepExistsError, StoreError
from tierckpt.format import paths
from tierckpt.format.chain import CheckpointRef
from tierckpt.format.keys import SigningKey
from tierckpt.format.manifest import Manifest
from tierckpt.group import Group
from tierckpt.restore.choice import choose
from tierckpt.restore.held import Held, all_candidates, memories
from tierckpt.tiers.base import Place
from tierckpt.tiers.store import Store


def settle(
    group: Group,
    place: Place,
    ref: CheckpointRef,
    *,
    run: str,
    key: str | os.PathLike[str] | SigningKey | None,
    grace: float,
) -> None:
    """Make sure that ``ref`` is committed; the agents that hold it write it. Collective.

    Raises:
        StoreError: it could not be made durable.
        FencedError: a newer generation has begun meanwhile.
    """
    what = f"committing step {ref.step}, which was restored from memory, at {place.url}"
    if _is_committed(group, place, ref, what):
        return
    level(group, place)
    beyond = ref.generation, ref.step - 1
    with memories(group, place, run, timeout=group.timeout, beyond=beyond) as found:
        held = found.held.get(ref)
        if held is None:
            raise IncompleteError(f"{what}: it is no longer held")

        def carry() -> bytes:
            if group.rank not in group.leaders or not held.ranks:
                return b""
            return json.dumps({rank: entry.decode() for rank, entry in found.carry(ref).items()}).encode()

        _must_be_there(group, place, held, what)
        entries = {
            rank: json.dumps([one.size, one.digest, held.manifest.layout, one.metadata]).encode()
            for rank, one in held.written.items()
        }
        for told in group.vote(what, carry):
            entries.update((int(rank), entry.encode()) for rank, entry in json.loads(told or b"{}").items())
        manifest = manifest_of(Title(run, ref.generation, ref.step, 0, held.manifest.world), entries)
        if manifest.id != ref.id:
            raise IntegrityError(f"{what}: what was written is not what was held")
        layouts = group.vote(what, lambda: found.layout(manifest.layout) if group.rank == held.source else b"")
        coordinator = Coordinator(place, run=run, key=key, grace=grace)
        coordinator.resume_all(ref.generation, group, _roots(group, place, manifest, what))
        try:
            publish(group, coordinator, what, manifest, layouts[held.source], pinned=held.pinned)
        except StepExistsError:
            # The agent, which drains it too, was faster.
            if not _is_committed(group, place, ref, what):
                raise


def settle_newest(
    group: Group,
    place: Place,
    *,
    believe: Callable[[Store], None],
    run: str | None,
    key: str | os.PathLike[str] | SigningKey | None,
    grace: float,
) -> None:
    """Commit the newest complete snapshot if it is only in memory, and the newest of all. Collective; see :func:`settle`."""
    choice = choose(group, place, step=None, believe=believe, run=run, may_be_empty=True)
    if choice is None:
        return
    with memories(group, place, choice.run, timeout=group.timeout, beyond=choice.newest) as found:
        tries = all_candidates(choice, found, place, None)
    if tries and tries[0].tier == "ram" and tries[0].ref not in choice.refs:
        settle(group, place, tries[0].ref, run=choice.run, key=key, grace=grace)


def _must_be_there(group: Group, place: Place, held: Held, what: str) -> None:
    """Raise unless what agents that have ended wrote of a step is still in some root. Collective."""
    if not held.written:
        return
    names = {rank: paths.shard(held.ref.generation, held.ref.step, rank) for rank in held.written}

    def look() -> bytes:
        if group.rank not in group.leaders:
            return b""
        return json.dumps([r for r, name in names.items() if place.size(name) == held.written[r].size]).encode()

    seen = {rank for told in group.vote(what, look) for rank in json.loads(told or b"[]")}
    if seen != names.keys():
        raise IncompleteError(f"{what}: the shards of ranks {sorted(names.keys() - seen)[:20]} are gone")


def _roots(group: Group, place: Place, manifest: Manifest, what: str) -> Roots:
    """Which folders the shards were written to: leaders of nodes that see the same ones share a folder. Collective."""
    if len(group.leaders) == 1:
        return Roots([0], [0] * manifest.world)
    wanted = {shard.rank: paths.shard(manifest.generation, manifest.step, shard.rank) for shard in manifest.shards}

    def look() -> bytes:
        if group.rank not in group.leaders:
            return b""
        deadline = time.monotonic() + PROBE_SECONDS
        while True:
            seen = [rank for rank, name in wanted.items() if place.size(name) is not None]
            if len(seen) == len(wanted) or time.monotonic() >= deadline:
                return json.dumps(seen).encode()
            time.sleep(PROBE_SECONDS / 20)  # some file systems show the files of others late

    told = group.vote(what, look)
    leaders: list[int] = []
    of: dict[int, int] = {}
    for leader in group.leaders:
        seen = json.loads(told[leader])
        if leader and seen and any(rank in of for rank in seen):
            continue
        leaders.append(leader)
        of.update(dict.fromkeys(seen, leader))
    return Roots(leaders, [of.get(rank, 0) for rank in range(manifest.world)])


def _is_committed(group: Group, place: Place, ref: CheckpointRef, what: str) -> bool:
    def look() -> bytes:
        if group.rank:
            return b""
        found = Store.open(place).chain.committed.get((ref.generation, ref.step))
        if found not in (None, ref.id):
            raise StoreError(f"{what}: another checkpoint of this name is committed")
        return b"yes" if found else b""

    return group.vote(what, look)[0] == b"yes"
