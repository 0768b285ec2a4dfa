"""The agent's state: generations, their members, slots and snapshots, and what may be given up when."""

from __future__ import annotations

import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Set
from contextlib import contextmanager
from dataclasses import dataclass

from tierckpt.agent.slots import Memory, Slot, capacity
from tierckpt.agent.snapshots import Generation, Member, Snapshot, Step
from tierckpt.errors import AgentLostError, ArenaFullError, FencedError, IncompleteError, StateError, StepExistsError
from tierckpt.format.canonical import JSON

#: Seconds after which it is looked whether a trainer that waits is still there.
_LOOK = 0.25


@dataclass
class Drained:
    """What an agent has made durable since it began."""

    bytes: int = 0
    shards: int = 0
    seconds: float = 0.0
    failures: int = 0

    def status(self) -> dict[str, JSON]:
        """For ``tierckpt status``."""
        return {
            "bytes": self.bytes,
            "failures": self.failures,
            "milliseconds": int(self.seconds * 1000),
            "shards": self.shards,
        }


class Holdings:
    """Everything that one agent holds. Every method may be called from any thread."""

    def __init__(self, run: str) -> None:
        self.run = run
        self.memory = Memory()
        self.generations: dict[int, Generation] = {}
        self.errors: deque[str] = deque(maxlen=16)
        self.errors_total = 0
        #: This agent has ended: it is too late for anything.
        self.closed = False
        self.drained = Drained()
        self.change = threading.Condition()
        #: When a trainer was last there.
        self.seen = time.monotonic()
        self._to_digest: queue.SimpleQueue[tuple[Generation, Snapshot] | None] = queue.SimpleQueue()
        threading.Thread(target=self._take_digests, name="tierckpt-digest", daemon=True).start()

    @property
    def newest(self) -> int:
        """Number of the newest generation, 0 if none has begun."""
        return max(self.generations, default=0)

    # Members

    def join(
        self, generation: Generation, rank: int, client: str, budget: int, origin: tuple[int, int] | None
    ) -> Generation:
        """A trainer takes its place in ``generation``, which fences all older ones.

        Args:
            origin: generation and step that it continues, which are committed.

        Raises:
            FencedError: a newer one has begun.
            StateError: another process has this place.
        """
        with self.change:
            self._forget_other_chains(generation)
            if generation.number < self.newest:
                raise FencedError(
                    f"generation {self.newest} of run {self.run} has begun on this node; this process, of generation "
                    f"{generation.number}, can seal and commit nothing any more"
                )
            known = self.generations.setdefault(generation.number, generation)
            if (known.root, known.world) != (generation.root, generation.world):
                raise StateError(
                    f"generation {generation.number} of run {self.run} saves {known.world} ranks to {known.root}, and "
                    f"not {generation.world} to {generation.root}"
                )
            if rank not in known.locals:
                raise StateError(f"rank {rank} is not one of this node's: {sorted(known.locals)}")
            member = known.members.get(rank)
            if member is not None and member.client != client and member.connections:
                raise StateError(f"another process saves as rank {rank} of generation {generation.number}")
            if member is None or member.client != client:
                member = known.members[rank] = Member(client)
            member.connections += 1
            member.left = known.settled = known.attempted = False
            self.memory.budget = budget
            began = self.generations.get(origin[0]) if origin is not None else None
            if origin is not None and began is not None and origin[1] in began.steps:
                began.steps[origin[1]].durable = True
            for older in list(self.generations.values()):
                if older.number < generation.number and not older.fenced:
                    older.fenced = True
                    for step in older.steps.values():
                        for snapshot in step.snapshots.values():
                            snapshot.due = False  # nobody is left to write it
                    self._reap(older)
            self.change.notify_all()
            return known

    def _forget_other_chains(self, generation: Generation) -> None:
        """What was made for a store that has been removed, replaced or rolled back since counts no more."""
        for other in [one for one in self.generations.values() if not one.same_chain(generation)]:
            elsewhere = other.root != generation.root
            if other.alive or (elsewhere and not other.settled):
                what = "is another store of the same run, a copy perhaps" if elsewhere else "has another chain by now"
                raise StateError(
                    f"run {self.run} is being saved on this node to {other.root}, as generation {other.number}; "
                    f"{generation.root} {what}: end the other job, or give this one a store of its own"
                )
            other.fenced = other.settled = True
            for step in other.steps.values():
                for rank in list(step.snapshots):
                    self._release(other, step, rank)  # what somebody reads goes when he has read it
            self._reap(other)

    def leave(self, generation: Generation, rank: int, *, bye: bool) -> bool:
        """A connection of a trainer is gone; whether that was the last one of the generation on this node."""
        with self.change:
            member = generation.members[rank]
            member.connections -= 1
            member.left = member.left or bye
            self.seen = time.monotonic()
            if not member.connections:
                self._give_back_unsealed(generation, rank)
            self.change.notify_all()
            return not generation.alive

    def _give_back_unsealed(self, generation: Generation, rank: int) -> None:
        for slot in list(generation.by_rank.get(rank, ())):
            if not slot.sealed:
                self._close(generation, rank, slot)

    # Slots

    def slot(
        self,
        generation: Generation,
        rank: int,
        size: int,
        wait: float,
        gone: Callable[[], bool],
        ticket: int,
        held: Set[int],
    ) -> Slot:
        """A slot of at least ``size`` bytes for ``rank``; waits at most ``wait`` seconds until one is free.

        Args:
            gone: whether who asked is no longer there.
            ticket: what the request is called.
            held: of the tickets before, those that somebody has.

        Raises:
            ArenaFullError: says what is needed, held and the budget, or that nobody waits any more.
            FencedError: a newer generation has begun meanwhile.
        """
        deadline = time.monotonic() + wait
        with self.change:
            own = generation.by_rank.setdefault(rank, [])
            while True:
                generation.must_be_current()
                self._give_back_lost(generation, rank, ticket, held)
                free = [slot for slot in own if not slot.busy]
                fitting = min((s for s in free if s.capacity >= size), key=lambda s: s.capacity, default=None)
                if fitting is not None:
                    fitting.busy, fitting.ticket = True, ticket
                    return fitting
                for slot in free:
                    self._close(generation, rank, slot)  # too small: make room before a larger one is made
                room = self.memory.fits(size)
                if room and len(own) + generation.making.get(rank, 0) < generation.slots:
                    generation.making[rank] = generation.making.get(rank, 0) + 1
                    break
                if not room and self._give_up_durable(generation, rank):
                    continue
                if not room and (not own or not self._may_free(generation, rank)):
                    raise ArenaFullError(self._full(generation, size))
                left = deadline - time.monotonic()
                if left <= 0:
                    raise ArenaFullError(self._full(generation, size))
                if gone():
                    raise ArenaFullError(f"rank {rank} died while it waited for a slot")
                self.change.wait(min(left, _LOOK))
        made: Slot | None = None
        try:
            made = self.memory.make(size)
        finally:
            with self.change:
                generation.making[rank] -= 1
                if made is not None:
                    made.ticket = ticket
                    own.append(made)
                self.change.notify_all()
        return made

    def _may_free(self, generation: Generation, rank: int) -> bool:
        """Whether memory may become free while ``rank`` waits: others get no further than to where they wait for it."""
        return any(
            snapshot.holds or (snapshot.due and step.complete)
            for one in self.generations.values()
            for step in one.steps.values()
            for snapshot in step.snapshots.values()
        ) or any(rank in step.snapshots and not step.complete for step in generation.steps.values())

    def numbers(self, generation: Generation, rank: int) -> list[int]:
        """The slots that ``rank`` has."""
        with self.change:
            return [slot.number for slot in generation.by_rank.get(rank, ())]

    def _full(self, generation: Generation, size: int) -> str:
        lacks = self.memory.lacks(size) or f"each rank has {generation.slots} slots, which are in use (Ram(slots=…))"
        return f"{capacity(size):,} bytes are needed, {self.memory.held:,} are held and {lacks}: no slot is free"

    def give_back(self, generation: Generation, rank: int, number: int, ticket: int) -> None:
        """A slot that was not sealed is free again."""
        with self.change:
            slot = self._own(generation, rank, number, ticket)
            slot.busy = False
            self.change.notify_all()

    def _give_back_lost(self, generation: Generation, rank: int, ticket: int, held: Set[int]) -> None:
        """Slots whose replies nobody has any more are free again: an interrupt may take a reply from who asked, and a request
        to seal may be read when nobody waits for that any more. Under ``change``.

        Args:
            held: of the tickets before ``ticket``, those that somebody had.
        """
        lost = [
            slot
            for slot in generation.by_rank.get(rank, ())
            if slot.busy and slot.ticket < ticket and slot.ticket not in held
        ]
        if not lost:
            return
        for slot in lost:
            slot.busy = slot.sealed
        for step in list(generation.steps.values()):
            snapshot = step.snapshots.get(rank)
            if snapshot is not None and snapshot.slot in lost and not step.complete:
                self._release(generation, step, rank)

    def _own(self, generation: Generation, rank: int, number: int, ticket: int) -> Slot:
        """The slot that ``rank`` is filling, on this ticket: by another it may have been given out again."""
        for slot in generation.by_rank.get(rank, ()):
            if (slot.number, slot.ticket) == (number, ticket) and slot.busy and not slot.sealed:
                return slot
        raise StateError(f"slot {number} is not one that rank {rank} is filling")

    # Snapshots

    def keep_layout(self, generation: Generation, rank: int, digest: str, data: bytes) -> None:
        """``rank`` is about to seal what lies as this layout file says."""
        with self.change:
            generation.layouts[digest] = data
            generation.last_layouts[rank] = digest

    def seal(
        self,
        generation: Generation,
        rank: int,
        number: int,
        slot: int | None,
        ticket: int,
        make: Callable[[Slot | None], Snapshot],
    ) -> None:
        """Rank's part of step ``number`` is complete in ``slot``.

        Raises:
            StepExistsError: it has sealed this step before.
        """
        with self.change:
            generation.must_be_current()
            step = generation.steps.get(number)
            if step is not None and rank in step.snapshots:
                raise StepExistsError(f"rank {rank} has already sealed step {number} of generation {generation.number}")
            own = None if slot is None else self._own(generation, rank, slot, ticket)
            snapshot = make(own)
            if own is not None:
                own.sealed = True
            held = generation.steps.setdefault(number, Step())
            held.snapshots[rank] = snapshot
            held.sealed_at = time.monotonic()
            if generation.durable_at is None:
                generation.durable_at = held.sealed_at
            self.change.notify_all()
        self._to_digest.put((generation, snapshot))

    def complete(self, generation: Generation, rank: int, number: int, *, due: bool) -> None:
        """All ranks of the job have sealed step ``number``; ``due``: it is to be written to the disk.

        Raises:
            AgentLostError: nobody would write it any more.
        """
        with self.change:
            generation.must_be_current()
            if self.closed:
                raise AgentLostError(f"the agent of run {self.run} has ended")
            step, snapshot = self._snapshot(generation, rank, number)
            step.complete = True
            snapshot.due = due
            generation.settled = False  # by an agent that is ending, and has to write this one too
            self._reap(generation)

    def settle(self, generation: Generation, rank: int, number: int, *, durable: bool) -> None:
        """Nothing more is to be written of this step."""
        with self.change:
            step = generation.steps.get(number)
            if durable:
                generation.now_durable(number)
                self._forget_older(generation)
            if step is not None and rank in step.snapshots:
                step.snapshots[rank].due = False
                step.durable = step.durable or durable
                if not step.complete:  # nor will it be
                    self._release(generation, step, rank)
                self._reap(generation)

    def drop(self, generation: Generation, rank: int, number: int) -> None:
        """The save of this step has failed."""
        with self.change:
            step = generation.steps.get(number)
            if step is not None and rank in step.snapshots:
                self._release(generation, step, rank)
                self._reap(generation)

    def end(self, generation: Generation, newest: int | None, *, final: bool) -> None:
        """What the trainers of ``generation`` have left was seen to: its newest complete step stays, for the next start.

        ``newest``: the newest complete step at that time. ``final``: whether or not they are there again, since this agent ends.
        """
        with self.change:
            # A step that was being sealed may be complete by now.
            generation.settled = not generation.alive or (final and generation.newest_complete() == newest)
            self.seen = time.monotonic()
            if not generation.alive:
                for step in generation.steps.values():
                    for snapshot in step.snapshots.values():
                        snapshot.due = False
            self._reap(generation)

    def _forget_older(self, generation: Generation) -> None:
        """A newer generation has something durable: what older ones hold has served."""
        for older in [one for one in self.generations.values() if one.number < generation.number]:
            for step in older.steps.values():
                step.complete = False
                for snapshot in step.snapshots.values():
                    snapshot.due = False
            self._reap(older, spare=False)

    def _reap(self, generation: Generation, *, spare: bool = True) -> None:
        """Give up what a newer complete step has replaced and nobody needs any more."""
        newest = generation.newest_complete() if spare else None
        for number, step in list(generation.steps.items()):
            if spare and (newest is None or number >= newest):
                continue
            # Of what is just being sealed trainers have still to say what becomes of it, in whatever order steps come.
            is_open = spare and generation.alive and not step.complete
            for rank, snapshot in list(step.snapshots.items()):
                if not (snapshot.due or snapshot.holds or is_open):
                    self._release(generation, step, rank)
        for number in [number for number, step in generation.steps.items() if not step.snapshots]:
            del generation.steps[number]
        used = {snapshot.layout for step in generation.steps.values() for snapshot in step.snapshots.values()}
        if not generation.fenced:
            used |= set(generation.last_layouts.values())
        for unused in generation.layouts.keys() - used:
            del generation.layouts[unused]
        if generation.fenced:
            for rank, slots in generation.by_rank.items():
                for slot in [slot for slot in slots if not slot.busy]:
                    self._close(generation, rank, slot)
        is_over = generation.fenced and not generation.steps and not generation.alive
        # Its number may be another chain's by now, while somebody was still busy with what this one held.
        if is_over and self.generations.get(generation.number) is generation:
            del self.generations[generation.number]
        self.change.notify_all()

    def _give_up_durable(self, generation: Generation, rank: int) -> bool:
        """Where the budget has no room, what the disk has too makes some: of older generations, then of this rank."""
        candidates = [
            (older, step, snapshot)
            for older in sorted(self.generations.values(), key=lambda one: one.number)
            for step in older.steps.values()
            for snapshot in step.snapshots.values()
            if step.durable and (older.fenced or (older is generation and snapshot.title.rank == rank))
        ]
        for older, step, snapshot in candidates:
            if not snapshot.due and not snapshot.holds and snapshot.slot is not None:
                self._release(older, step, snapshot.title.rank)
                return True
        return False

    def _release(self, generation: Generation, step: Step, rank: int) -> None:
        snapshot = step.snapshots.pop(rank)
        snapshot.released = True
        if not snapshot.holds:
            self._free(generation, snapshot)

    def _free(self, generation: Generation, snapshot: Snapshot) -> None:
        slot, snapshot.slot = snapshot.slot, None
        if slot is None:
            return
        snapshot.forget_memory()
        slot.busy = slot.sealed = False
        if generation.fenced:
            self._close(generation, snapshot.title.rank, slot)

    def _close(self, generation: Generation, rank: int, slot: Slot) -> None:
        generation.by_rank[rank].remove(slot)
        self.memory.close(slot)

    @contextmanager
    def held(self, snapshot: Snapshot) -> Iterator[Snapshot]:
        """Keep the bytes of a snapshot as they are."""
        self.hold(snapshot)
        try:
            yield snapshot
        finally:
            self.let_go(snapshot)

    def hold(self, snapshot: Snapshot) -> None:
        """Keep the bytes of a snapshot as they are, until :meth:`let_go`."""
        with self.change:
            snapshot.holds += 1

    def let_go(self, snapshot: Snapshot) -> None:
        """Undo one :meth:`hold`."""
        with self.change:
            snapshot.holds -= 1
            if not snapshot.holds:
                if snapshot.released:
                    self._free(snapshot.generation, snapshot)
                self._reap(snapshot.generation)

    def find(self, generation: int, step: int, rank: int) -> Snapshot:
        """A snapshot, held for the caller.

        Raises:
            IncompleteError: it is not here.
        """
        with self.change:
            found = self.generations.get(generation)
            held = found.steps.get(step) if found else None
            snapshot = held.snapshots.get(rank) if held else None
            if snapshot is None:
                raise IncompleteError(f"the agent does not hold rank {rank} of step {step} of generation {generation}")
            snapshot.holds += 1
            return snapshot

    def _snapshot(self, generation: Generation, rank: int, number: int) -> tuple[Step, Snapshot]:
        step = generation.steps.get(number)
        if step is None or rank not in step.snapshots:
            raise StateError(f"rank {rank} has not sealed step {number} of generation {generation.number}")
        return step, step.snapshots[rank]

    def of_store(self, root: str) -> list[tuple[Generation, int, Step]]:
        """All steps held of the store at ``root``, newest first; their snapshots are held for the caller."""
        with self.change:
            found = [
                (generation, number, Step(dict(step.snapshots), step.complete, step.durable))
                for generation in self.generations.values()
                if generation.root == root
                for number, step in generation.steps.items()
            ]
            for _, _, step in found:
                for snapshot in step.snapshots.values():
                    snapshot.holds += 1
        return sorted(found, key=lambda one: (one[0].number, one[1]), reverse=True)

    def layout(self, digest: str) -> bytes:
        """A layout file. Raises IncompleteError if it is not here."""
        with self.change:
            for generation in self.generations.values():
                if digest in generation.layouts:
                    return generation.layouts[digest]
        raise IncompleteError(f"the agent has no layout {digest}")

    # Beside

    def _take_digests(self) -> None:
        while (task := self._to_digest.get()) is not None:
            _, snapshot = task
            try:
                if snapshot.slot is not None:
                    with self.held(snapshot):
                        snapshot.digest_from_the_end()
            except Exception as error:
                self.note(f"digests of step {snapshot.title.step}: {error}")
            del task, snapshot

    def write(self, snapshot: Snapshot) -> bytes:
        """Make a snapshot that is held durable (see :meth:`Snapshot.write`), and count it."""
        before, began = snapshot.writes, time.monotonic()
        try:
            entry = snapshot.write(snapshot.generation.place)
        except BaseException:
            with self.change:
                self.drained.failures += 1
            raise
        if snapshot.writes > before:
            with self.change:
                self.drained.shards += 1
                self.drained.bytes += snapshot.size
                self.drained.seconds += time.monotonic() - began
        return entry

    def note(self, text: str) -> None:
        """Remember an error for ``tierckpt status``."""
        self.errors_total += 1
        self.errors.append(f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} {text}"[:2000])

    @property
    def undone(self) -> list[Generation]:
        """Generations whose trainers are gone and of which something may still be written."""
        with self.change:
            return [g for g in self.generations.values() if not (g.alive or g.settled or g.fenced)]

    def needed(self, idle: float) -> float:
        """Seconds for which the agent is needed at least: infinite while a trainer is there."""
        with self.change:
            current = [g for g in self.generations.values() if not g.fenced]
            if any(generation.alive for generation in current):
                return float("inf")
            members = [member for generation in current for member in generation.members.values()]
            # After a good-bye of everybody nobody comes back for what the disk has; after a death they do.
            done = not any(generation.owes for generation in current)
            if done and members and all(member.left for member in members):
                return 0.0
            return max(0.0, self.seen + idle - time.monotonic())

    def status(self) -> dict[str, JSON]:
        """For ``tierckpt status``."""
        with self.change:
            return {
                "budget": self.memory.budget,
                "drained": self.drained.status(),
                "errors": list(self.errors),
                "errors_total": self.errors_total,
                "generations": [_status(generation) for generation in self.generations.values()],
                "held": self.memory.held,
                "run": self.run,
            }


def _lag(generation: Generation, complete: int | None) -> dict[str, JSON]:
    """What the disk lacks: steps, and the time between the seals of the newest complete and the newest durable one."""
    if complete is None or generation.durable_at is None or complete <= generation.durable:
        return {"milliseconds": 0, "steps": 0 if generation.durable >= 0 else None}
    seconds = max(0.0, generation.steps[complete].sealed_at - generation.durable_at)
    steps = complete - generation.durable if generation.durable >= 0 else None
    return {"milliseconds": int(seconds * 1000), "steps": steps}


def _status(generation: Generation) -> dict[str, JSON]:
    sealed = [number for number, step in generation.steps.items() if generation.whole(step)]
    complete = generation.newest_complete()
    return {
        "complete": complete,
        "durable": generation.durable if generation.durable >= 0 else None,
        "fenced": generation.fenced,
        "generation": generation.number,
        "lag": _lag(generation, complete),
        "ranks": {
            str(rank): "alive" if member.connections else "left" if member.left else "dead"
            for rank, member in sorted(generation.members.items())
        },
        "root": generation.root,
        "sealed": max(sealed, default=None),
        "slots": [
            {"bytes": slot.capacity, "rank": rank, "slot": slot.number, "state": slot.state}
            for rank, slots in sorted(generation.by_rank.items())
            for slot in slots
        ],
        "steps": [
            {
                "bytes": sum(snapshot.size for snapshot in step.snapshots.values()),
                "complete": step.complete,
                "durable": step.durable,
                "due": any(snapshot.due for snapshot in step.snapshots.values()),
                "ranks": len(step.snapshots),
                "sealed_by": list[JSON](sorted(step.snapshots)),
                "step": number,
            }
            for number, step in sorted(generation.steps.items())
        ],
        "world": generation.world,
    }
