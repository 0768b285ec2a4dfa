"""What becomes of snapshots whose trainers are gone: the newest complete one is made durable, and committed where that can be."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Mapping, Sequence

from tierckpt.agent.coordinator import Coordinator, check_present
from tierckpt.agent.holdings import Holdings
from tierckpt.agent.snapshots import Generation, Snapshot, Step
from tierckpt.config import READERS_GRACE
from tierckpt.errors import IncompleteError, StepExistsError
from tierckpt.format import paths
from tierckpt.format.keys import SigningKey
from tierckpt.format.layout import Layout
from tierckpt.format.manifest import Manifest
from tierckpt.format.receipt import SIZE_LIMIT, Receipt
from tierckpt.tiers import leftovers
from tierckpt.tiers.store import Store

#: Seconds between two looks at a shared root for the receipts of other nodes.
_LOOK = 0.2


def settle(holdings: Holdings, generation: Generation, deadline: float) -> bool:
    """Drain what the trainers of ``generation`` have left; whether nothing of that is left to do. What fails is noted, not
    raised.

    Args:
        deadline: seconds for which other nodes' receipts are waited for.
    """
    steps = _to_write(holdings, generation)
    try:
        return not steps or _settle(holdings, generation, steps, deadline)
    except Exception as error:
        holdings.note(f"what the trainers of generation {generation.number} left could not be drained: {error}")
        return False
    finally:
        for step in steps.values():
            for snapshot in step.snapshots.values():
                holdings.let_go(snapshot)


def _to_write(holdings: Holdings, generation: Generation) -> dict[int, Step]:
    """Steps to make durable, newest first; their snapshots are held.

    Where all ranks are here that is the newest that they all have sealed. Else any step from the newest complete one on
    may be the one that all other nodes have too.
    """
    alone = len(generation.locals) == generation.world
    with holdings.change:
        whole = {n: step for n, step in generation.steps.items() if generation.whole(step)}
        newest = generation.newest_complete()
        numbers = sorted((n for n in whole if n > generation.durable and (newest is None or n >= newest)), reverse=True)
        found = {}
        for number in numbers[:1] if alone else numbers:
            found[number] = Step(dict(whole[number].snapshots), whole[number].complete)
            for snapshot in found[number].snapshots.values():
                snapshot.holds += 1
        return found


def _settle(holdings: Holdings, generation: Generation, steps: Mapping[int, Step], deadline: float) -> bool:
    """Write the shards here, and commit, if that is for us, the newest step of which other nodes have written theirs.

    Raises:
        IncompleteError: they have not in time, of one that all ranks had sealed.
    """
    coordinator = _coordinator(generation)
    if coordinator is not None:
        committed = [step for number, step in coordinator.store.chain.committed if number == generation.number]
        steps = _newer(holdings, generation, steps, committed)
    elif any(snapshot.size for step in steps.values() for snapshot in step.snapshots.values()):
        # It may be put together with what others write: nobody else looks whether it is of this chain.
        Store.open(generation.place).must_have_begun(generation.number, generation.begin)
    for step in steps.values():
        for _, snapshot in sorted(step.snapshots.items()):
            holdings.write(snapshot)
    if coordinator is None:
        return True  # rank 0's node commits, or the next start of the run
    until = time.monotonic() + deadline
    writers = {number: _writers(generation, step) for number, step in steps.items()}
    while steps:
        for number, step in steps.items():
            receipts, lacking = _receipts(generation, number, step, writers[number])
            if not lacking:
                _commit(coordinator, generation, step, Manifest.of(receipts))
                steps = _newer(holdings, generation, steps, [number])
                break
        else:
            if time.monotonic() >= until:
                _give_up(generation, steps, lacking, deadline)
                return True
            time.sleep(_LOOK)
            coordinator.store.refresh()
            coordinator.store.must_be_current(generation.number)
    return True


def _newer(
    holdings: Holdings, generation: Generation, steps: Mapping[int, Step], committed: Collection[int]
) -> Mapping[int, Step]:
    """Those of ``steps`` that are newer than what is committed, of which the agent takes note."""
    newest = max(committed, default=-1)
    with holdings.change:
        for number in committed:
            if number in generation.steps:
                generation.steps[number].durable = True
        generation.now_durable(newest)
    return {number: step for number, step in steps.items() if number > newest}


def _give_up(generation: Generation, steps: Mapping[int, Step], lacking: Sequence[int], deadline: float) -> None:
    """Raise if a step is known to be missing: of others ranks may have died before they sealed them.

    ``lacking``: ranks of which nothing is there of the oldest of ``steps``.
    """
    number, step = list(steps.items())[-1]
    if step.complete or generation.durable < 0:
        raise IncompleteError(
            f"{generation.root}: step {number}: no receipts of ranks {lacking[:20]} within {deadline:g} s"
        )


def _commit(coordinator: Coordinator, generation: Generation, step: Step, manifest: Manifest) -> None:
    pinned = any(snapshot.pinned for snapshot in step.snapshots.values())
    with generation.committing:
        # Whoever else writes to the store has removed what it took for left over, perhaps.
        check_present(coordinator.store, manifest)
        with contextlib.suppress(StepExistsError):  # the next start of the run was faster
            coordinator.commit(manifest, generation.layouts[manifest.layout], pinned=pinned)


def discard(generation: Generation, steps: Collection[int]) -> None:
    """Remove the files of steps whose saves have failed, but for what has become durable all the same."""
    place = generation.place
    with generation.committing:
        store = Store.open(place)
        store.must_have_begun(generation.number, generation.begin)
        for step in steps:
            if (generation.number, step) not in store.chain.committed:
                found = place.list(paths.step_dir(generation.number, step))
                place.remove(leftovers.in_order(info.name for info in found if leftovers.belongs(info.name)))


def _coordinator(generation: Generation) -> Coordinator | None:
    signing = generation.signing
    if signing is None or generation.roots > 1:
        return None
    run = next(iter(next(iter(generation.steps.values())).snapshots.values())).title.run
    coordinator = Coordinator(generation.place, run=run, key=SigningKey.from_secret(signing.key), grace=READERS_GRACE)
    keys = frozenset(signing.keys)
    coordinator.resume(generation.number, since=signing.since, keys=keys, begin=generation.begin)
    return coordinator


def _writers(generation: Generation, step: Step) -> Sequence[int]:
    """The ranks that have a shard of this step."""
    any_snapshot: Snapshot = next(iter(step.snapshots.values()))
    return Layout.decode(generation.layouts[any_snapshot.layout], what="the layout").writers


def _receipts(
    generation: Generation, number: int, step: Step, writers: Sequence[int]
) -> tuple[list[Receipt], list[int]]:
    """Those of all ranks that write, in rank order, of other nodes if they are on the shared root; and the ranks whose is not."""
    found = {rank: snapshot.receipt() for rank, snapshot in step.snapshots.items() if snapshot.size}
    lacking, place = [], generation.place
    for rank in writers:
        if rank not in step.snapshots:
            name = paths.receipt(generation.number, number, rank)
            try:
                found[rank] = Receipt.decode(place.read(name, SIZE_LIMIT), what=f"{place.url}/{name}")
            except FileNotFoundError:
                lacking.append(rank)
    return [found[rank] for rank in sorted(found)], lacking
