"""What becomes of snapshots whose trainers are gone: the newest complete one is made durable, and committed where that can be."""

from __future__ import annotations

import time

from tierckpt.agent.coordinator import Coordinator
from tierckpt.agent.holdings import Holdings
from tierckpt.agent.snapshots import Generation, Snapshot, Step
from tierckpt.config import READERS_GRACE
from tierckpt.errors import IncompleteError, StepExistsError
from tierckpt.format import paths
from tierckpt.format.keys import SigningKey
from tierckpt.format.layout import Layout
from tierckpt.format.manifest import Manifest
from tierckpt.format.receipt import SIZE_LIMIT, Receipt

#: Seconds between two looks at a shared root for the receipts of other nodes.
_LOOK = 0.2


def settle(holdings: Holdings, generation: Generation, deadline: float) -> None:
    """Drain what the trainers of ``generation`` have left. What fails is noted, not raised.

    Args:
        deadline: seconds for which other nodes' receipts are waited for.
    """
    try:
        for number, step in _to_write(holdings, generation):
            try:
                if _settle(holdings, generation, number, step, deadline):
                    with holdings.change:
                        live = generation.steps.get(number)
                        if live is not None:
                            live.durable = True
                        generation.now_durable(number)
                    break
            finally:
                for snapshot in step.snapshots.values():
                    holdings.let_go(snapshot)
    except Exception as error:
        holdings.note(f"what the trainers of generation {generation.number} left could not be drained: {error}")
    finally:
        holdings.end(generation)


def _to_write(holdings: Holdings, generation: Generation) -> list[tuple[int, Step]]:
    """Steps to make durable, best first; their snapshots are held.

    Where all ranks are here that is the newest that they all have sealed. Else any step from the newest complete one on
    may be the one that all other nodes have too.
    """
    alone = len(generation.locals) == generation.world
    with holdings.change:
        whole = {n: step for n, step in generation.steps.items() if generation.whole(step)}
        newest = generation.newest_complete()
        numbers = sorted((n for n in whole if n > generation.durable and (newest is None or n >= newest)), reverse=True)
        found = []
        for number in numbers[:1] if alone else numbers:
            step = Step(dict(whole[number].snapshots), whole[number].complete)
            for snapshot in step.snapshots.values():
                snapshot.holds += 1
            found.append((number, step))
        return found


def _settle(holdings: Holdings, generation: Generation, number: int, step: Step, deadline: float) -> bool:
    """Write the shards here, and commit if that is for us; whether the step is committed now."""
    coordinator = _coordinator(generation)
    if coordinator is not None and (generation.number, number) in coordinator.store.chain.committed:
        return True
    for _, snapshot in sorted(step.snapshots.items()):
        holdings.write(snapshot)
    if coordinator is None:
        return False  # rank 0's node commits, or the next start of the run
    receipts = _receipts(coordinator, generation, number, step, deadline)
    manifest = Manifest.of(receipts)
    pinned = any(snapshot.pinned for snapshot in step.snapshots.values())
    try:
        coordinator.commit(manifest, generation.layouts[manifest.layout], pinned=pinned)
    except StepExistsError:
        return True  # the next start of the run was faster
    return True


def _coordinator(generation: Generation) -> Coordinator | None:
    signing = generation.signing
    if signing is None or generation.roots > 1:
        return None
    run = next(iter(next(iter(generation.steps.values())).snapshots.values())).title.run
    coordinator = Coordinator(generation.place, run=run, key=SigningKey.from_secret(signing.key), grace=READERS_GRACE)
    keys = frozenset(signing.keys)
    coordinator.resume(generation.number, since=signing.since, keys=keys, begin=generation.begin)
    return coordinator


def _receipts(
    coordinator: Coordinator, generation: Generation, number: int, step: Step, deadline: float
) -> list[Receipt]:
    """Those of all ranks that write, of other nodes as soon as they are on the shared root.

    Raises:
        IncompleteError: some did not come in time.
    """
    any_snapshot: Snapshot = next(iter(step.snapshots.values()))
    layout = Layout.decode(generation.layouts[any_snapshot.layout], what="the layout")
    found = {rank: snapshot.receipt() for rank, snapshot in step.snapshots.items() if snapshot.size}
    lacking = [rank for rank in layout.writers if rank not in found and rank not in step.snapshots]
    until = time.monotonic() + deadline
    place = generation.place
    while lacking:
        for rank in list(lacking):
            try:
                name = paths.receipt(generation.number, number, rank)
                found[rank] = Receipt.decode(place.read(name, SIZE_LIMIT), what=f"{place.url}/{name}")
                lacking.remove(rank)
            except FileNotFoundError:
                continue
        if lacking and time.monotonic() >= until:
            raise IncompleteError(
                f"{place.url}: step {number}: no receipts of ranks {lacking[:20]} within {deadline:g} s"
            )
        if lacking:
            coordinator.store.refresh()
            coordinator.store.must_be_current(generation.number)
            time.sleep(_LOOK)
    return [found[rank] for rank in sorted(found)]
