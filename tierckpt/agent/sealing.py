"""The RAM tier: one thread that finds out which sealed steps are complete, and which of them are to go on to the disk.

It has channels of its own, since a step is complete long before the drain has done with the one before.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from tierckpt.agent.calls import Mark, Ranks
from tierckpt.agent.drain import Drain, Job
from tierckpt.agent.handle import SAVED_ONCE, Handle
from tierckpt.agent.writing import Shard
from tierckpt.errors import AgentLostError, SkippedError, StepExistsError, TierckptError
from tierckpt.telling import named
from tierckpt.threads import Serial, Signal

#: Tells the agent that all ranks have sealed a step, and whether it is due on the disk.
TellComplete = Callable[[int, bool], None]


class Sealing:
    """Args:
    ranks: channels for this thread alone.
    drain: takes what is due on the disk.
    slots: that each rank has.
    complete, drop: tell this rank's agent that all ranks have sealed a step, or that its save has failed.
    """

    def __init__(
        self,
        ranks: Ranks,
        drain: Drain,
        *,
        slots: int,
        complete: TellComplete,
        drop: Callable[[int], None],
    ) -> None:
        self._ranks, self._drain, self._slots = ranks, drain, slots
        self._complete, self._drop = complete, drop
        self._line: Serial[Job | Mark | Signal] = Serial(self._next, "tierckpt-seal")
        #: The newest complete step, if it is only in memory.
        self._only_here: Job | None = None
        #: Of steps that went to the disk although they were not due there.
        self.hastened: deque[Handle] = deque()
        #: Steps that the ranks have agreed to save, each once, until it is known what became of them; and those that failed.
        self._taken: dict[int, Handle] = {}
        self._spent: set[int] = set()

    def hasten(self, after: int) -> Signal:
        """Take the newest complete step to the disk whatever the cadence says, after so many meetings of the ranks.

        Returns: whether the thread has come to it. It has still to do it if it has met the others less often.
        """
        come = Signal()
        self._drain.calls.meetings.after(after, self._hasten, lambda: self.put(come))
        return come

    @property
    def lacks(self) -> bool:
        """Whether the newest complete step is only in memory."""
        return self._only_here is not None

    def has(self, step: int) -> bool:
        """Whether the ranks have agreed to save this step, and the save is under way or has failed. From any thread."""
        return step in self._taken or step in self._spent

    def put(self, job: Job | Mark | Signal) -> None:
        """Hand over a step that this rank has sealed, or the reason why not."""
        self._line.put(job)

    def stop(self) -> None:
        """Let the thread end once the queue is empty; does not wait."""
        self._line.stop()

    def close(self) -> Job | None:
        """Finish what is queued; the newest complete step if it is on no disk and not on its way there."""
        self._line.close()
        return self._only_here

    def _next(self, job: Job | Mark | Signal) -> None:
        if isinstance(job, Signal):
            try:
                self._drain.calls.meetings.act()
            finally:
                job.set()
            return
        if isinstance(job, Mark):
            job.meet(self._ranks)
            return
        try:
            self._take(job)
        except BaseException as error:
            try:
                job.release(False)
                if self._taken.get(job.step) is job.handle:  # else an earlier save has this step
                    self._drop(job.step)
            finally:
                job.handle._finish(None, error)

    def _hasten(self) -> None:
        job, self._only_here = self._only_here, None
        if job is None:
            return
        self.hastened.append(again(job))
        try:
            self._complete(job.step, True)  # else a newer one would replace it
        except AgentLostError:
            job.own = [self._ranks.rank]  # the bytes are here as well
        except TierckptError as error:
            job.error = error  # the other ranks drain it: so must this one, to where it can tell them
        self._drain.put(job)

    def _take(self, job: Job) -> None:
        what = f"the save of step {job.step}"
        told = self._drain.calls.meet(self._ranks, job.call, job.step, lambda: self._mine(job))
        skipped = {rank: said[1:].decode() for rank, said in enumerate(told) if said[:1] == _SKIPPED}
        if skipped:
            self._skip(job, ("ram", "disk"), f"step {job.step} was skipped: {_where(skipped)}")
            return
        offers = job.agree([said[1:] for said in told])
        if job.due or not job.own:
            shard = job.settle(self._ranks, what, offers)
        self._taken[job.step] = job.handle
        if not job.own:
            sealed = self._ranks.vote(what, lambda: _seal(job, shard), tag=job.step)
            job.own = [rank for rank, said in enumerate(sealed) if said == _SILENT]
        if job.own:
            self._pass_on(job, told)
            return
        self._make_room(job, told)
        try:
            self._complete(job.step, job.due)
        except AgentLostError as error:
            # The bytes are here as well.
            job.own = [self._ranks.rank]
            job.handle._skip("ram", str(error))
        except TierckptError as error:
            # All ranks have sealed it and go on: so must this one, to where it can tell them.
            job.error = error
        else:
            job.handle._reach("ram")
        if job.due:
            self._put(job)
            return
        self._replace(job, job)
        job.handle._finish(None, job.error)

    def _put(self, job: Job) -> None:
        """On its way to the disk; older ones need not get there any more."""
        self._replace(job, None)
        self._drain.put(job)

    def _replace(self, by: Job, stays: Job | None) -> None:
        """A step is complete; ``stays``: the same if it is only in memory."""
        before = self._only_here
        if before is not None and before.step > by.step:
            return
        self._only_here = stays
        if before is not None and before.own and before.step != by.step:
            self._drop(before.step)  # its agent does not know that it is complete, so nor that this one takes its place

    def _pass_on(self, job: Job, told: Sequence[bytes]) -> None:
        """A step that some rank cannot seal: each writes its own part, if it is due on the disk, as where there is no agent."""
        assert not isinstance(job.staged, BaseException)
        job.staged.withdraw()
        why = (
            f"step {job.step} is in no memory that outlives the trainers: the agent of {named(job.own)} does not "
            "answer, has died or was told to end, or has no room"
        )
        if not job.due:
            self._skip(job, ("ram",), why)
            return
        self._make_room(job, told)
        job.handle._skip("ram", why)
        self._put(job)

    def _skip(self, job: Job, tiers: Sequence[str], why: str) -> None:
        job.release(False)
        self._drop(job.step)
        for tier in tiers:
            job.handle._skip(tier, why)
        job.handle._finish(None)

    def _mine(self, job: Job) -> bytes:
        self._must_be_new(job.step)
        if isinstance(job.staged, SkippedError):
            return _SKIPPED + str(job.staged).encode()
        said = job.ready()
        with self._drain.turn.lock:
            short = job.seals and len(self._drain.pending) + 1 >= self._slots
        return (_SHORT if short else _ROOM) + said

    def _must_be_new(self, step: int) -> None:
        """Raise StepExistsError if this rank knows of an earlier save of ``step`` that may be in some memory or on its way to the
        disk: two of one name could be put together, or one be written over the other."""
        for other, handle in list(self._taken.items()):
            if handle._ended.is_set():
                if handle.error is not None:  # else whoever made it knows
                    self._spent.add(other)
                del self._taken[other]
        if self.has(step):
            raise StepExistsError(f"step {step} {SAVED_ONCE}")

    def _make_room(self, job: Job, told: Sequence[bytes]) -> None:
        """Where some rank has no slot for the next save, the oldest step that none has begun to write gives up its turn."""
        drain = self._drain
        if not drain.overtakes or all(said[:1] != _SHORT for said in told):
            return
        with drain.turn.lock:
            mine = [other for other in drain.pending if not other.offered and not other.pinned]
            for other in mine:
                other.withheld = True
        try:
            steps = json.dumps([other.step for other in mine]).encode()
            known = self._ranks.vote(f"making room for step {job.step}", lambda: steps, tag=job.step)
            common = set.intersection(*(set(json.loads(said)) for said in known))
            chosen = next((other for other in mine if other.step in common), None)
            if chosen is not None:
                # Its turn on the disk goes to the newer one.
                job.due = True
                drain.overtake(chosen, job)
        finally:
            with drain.turn.lock:
                for other in mine:
                    other.withheld = False
                drain.turn.notify_all()


def _seal(job: Job, shard: Shard) -> bytes:
    assert not isinstance(job.staged, BaseException)
    try:
        job.staged.seal(shard)
    except AgentLostError:
        return _SILENT
    return b""


def again(job: Job) -> Handle:
    """Make a step that is only in memory, and whose save has ended, due on the disk; its new handle."""
    job.handle, job.offered = Handle(job.step, ("disk",), ("disk",)), False
    job.due = True
    return job.handle


#: What stands in front of what a rank has staged: whether it will have a slot for the next save; or of why it has none.
_ROOM, _SHORT, _SKIPPED = b"+", b"-", b"0"
#: What a rank says whose agent did not answer when it was to seal.
_SILENT = b"silent"


def _where(skipped: Mapping[int, str]) -> str:
    reasons = dict.fromkeys(skipped.values())
    return "; ".join(
        f"{reason} on {named([rank for rank, other in skipped.items() if other == reason])}" for reason in reasons
    )
