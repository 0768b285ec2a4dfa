"""The RAM tier: one thread that finds out which sealed steps are complete, and which of them are to go on to the disk.

It has channels of its own, since a step is complete long before the drain has done with the one before.
"""

from __future__ import annotations

import json
import queue
import threading
from collections.abc import Callable

from tierckpt.agent.drain import Drain, Job, Ranks
from tierckpt.agent.handle import Handle
from tierckpt.agent.writing import Shard
from tierckpt.errors import SkippedError, TierckptError

#: Tells the agent that all ranks have sealed a step, and whether it is due on the disk.
TellComplete = Callable[[int, bool], None]


class Hastened:
    """That the newest complete step goes to the disk although it was not due there.

    Attributes:
        taken: whether it is known which step that is.
        handle: of that step; None if the newest is on the disk already, or on its way there.
    """

    def __init__(self) -> None:
        self.taken = threading.Event()
        self.handle: Handle | None = None


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
        self._queue: queue.SimpleQueue[Job | Hastened | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        #: The newest complete step, if it is only in memory.
        self._only_here: Job | None = None

    def hasten(self) -> Hastened:
        """Take the newest complete step to the disk whatever the cadence says. All ranks do so between the same two steps."""
        wish = Hastened()
        self.put(wish)
        return wish

    def put(self, job: Job | Hastened) -> None:
        """Hand over a step that this rank has sealed, or the reason why not."""
        self._queue.put(job)
        if self._thread is None:
            thread = threading.Thread(target=self._work, name="tierckpt-seal", daemon=True)
            thread.start()  # refused, it is tried again with the next step
            self._thread = thread

    def stop(self) -> None:
        """Let the thread end once the queue is empty; does not wait."""
        self._queue.put(None)

    def close(self) -> Job | None:
        """Finish what is queued; the newest complete step if it is on no disk and not on its way there."""
        if self._thread is not None:
            self._queue.put(None)
            self._thread.join()
            self._thread = None
        return self._only_here

    def _work(self) -> None:
        while (job := self._queue.get()) is not None:
            if isinstance(job, Hastened):
                self._hasten(job)
                continue
            try:
                self._take(job)
            except BaseException as error:
                try:
                    job.release(False)
                    self._drop(job.step)
                finally:
                    job.handle._finish(None, error)
            del job

    def _hasten(self, wish: Hastened) -> None:
        job, self._only_here = self._only_here, None
        try:
            if job is None:
                return
            wish.handle = again(job)
            try:
                self._complete(job.step, True)  # else a newer one would replace it
            except TierckptError as error:
                job.error = error  # the other ranks drain it: so must this one, to where it can tell them
            self._drain.put(job)
        finally:
            wish.taken.set()

    def _take(self, job: Job) -> None:
        what = f"the save of step {job.step}"
        told = self._ranks.vote(what, lambda: self._mine(job), tag=job.step)
        if _SKIPPED in told:
            job.release(False)
            self._drop(job.step)
            for tier in ("ram", "disk"):
                job.handle._skip(tier, f"step {job.step} was skipped: no slot was free on ranks {_where(told)}")
            job.handle._finish(None)
            return
        shard = job.settle(self._ranks, what, [said[1:] for said in told])
        self._ranks.vote(what, lambda: _seal(job, shard), tag=job.step)
        if self._drain.overtakes and any(said[:1] == _SHORT for said in told):
            self._make_room(job)
        try:
            self._complete(job.step, job.due)
        except TierckptError as error:
            # All ranks have sealed it and go on: so must this one, to where it can tell them.
            job.error = error
        else:
            job.handle._reach("ram")
        if job.due:
            self._only_here = None
            self._drain.put(job)
        else:
            self._only_here = job
            job.handle._finish(None, job.error)

    def _mine(self, job: Job) -> bytes:
        if isinstance(job.staged, SkippedError):
            return _SKIPPED
        said = job.ready()
        with self._drain.turn:
            return (_SHORT if len(self._drain.pending) + 1 >= self._slots else _ROOM) + said

    def _make_room(self, job: Job) -> None:
        """Some rank would have no slot for the next save: the oldest step that no rank has begun to write gives up its turn."""
        drain = self._drain
        with drain.turn:
            mine = [other for other in drain.pending if not other.offered and not other.pinned]
            for other in mine:
                other.withheld = True
        try:
            steps = json.dumps([other.step for other in mine]).encode()
            told = self._ranks.vote(f"making room for step {job.step}", lambda: steps, tag=job.step)
            common = set.intersection(*(set(json.loads(said)) for said in told))
            chosen = next((other for other in mine if other.step in common), None)
            if chosen is not None:
                # Its turn on the disk goes to the newer one.
                job.due = True
                drain.overtake(chosen, job)
        finally:
            with drain.turn:
                for other in mine:
                    other.withheld = False
                drain.turn.notify_all()


def _seal(job: Job, shard: Shard) -> bytes:
    assert not isinstance(job.staged, BaseException)
    job.staged.seal(shard)
    return b""


def again(job: Job) -> Handle:
    """Make a step that is only in memory, and whose save has ended, due on the disk; its new handle."""
    job.due, job.offered = True, False
    job.handle = Handle(job.step, ("disk",), ("disk",))
    return job.handle


_SKIPPED = b"skipped"
#: What stands in front of what a rank has staged: whether it will have a slot for the next save.
_ROOM, _SHORT = b"+", b"-"


def _where(told: list[bytes]) -> str:
    return ", ".join(str(rank) for rank, said in enumerate(told) if said == _SKIPPED)
