"""What a signal on one rank sets off on all: the newest complete step goes to the disk, and all stop at the same save.

A thread on each rank, on channels of its own, asks the others several times a second whether one of them was told to end.
When one was, each says how many calls of save() and restore() it has begun, and begins no other until all have said so:
two words between these threads, which wait for no training loop. The call after the last that any rank has begun is then
the same on all, and ``should_stop`` becomes True there.
"""

from __future__ import annotations

import contextlib
import json
import queue
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tierckpt import signals
from tierckpt.config import STOP_SECONDS, STOP_SECONDS_PER_RANK
from tierckpt.errors import LostContactError
from tierckpt.group import Group
from tierckpt.telling import warn
from tierckpt.threads import Condition, Worker


class Stop:
    """Args:
    ranks: channels for its thread alone.
    numbers: the signals that are listened to.
    left_out: how many calls this rank is known to have left out, which the others have made.
    hasten: called once, from any thread, after the same calls on all ranks and while no other begins: takes the newest complete
        step to the disk.
    """

    def __init__(
        self, ranks: Group, numbers: tuple[int, ...], left_out: Callable[[], int], hasten: Callable[[], None]
    ) -> None:
        self._ranks, self._left_out, self._hasten = ranks, left_out, hasten
        self._pause = max(STOP_SECONDS, ranks.size * STOP_SECONDS_PER_RANK) if ranks.size > 1 else None
        self._turn = Condition()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._heard: int | None = None
        self._leaving = _THERE
        self._held = self._hastened = self._closed = False
        self._begun = self._ended = 0
        #: The first call at which all ranks stop.
        self._at: int | None = None
        #: Whether all ranks stop here.
        self.stops = False
        why = signals.listen(numbers, self._hear)
        if why:
            warn(
                f"save_on_signal: {why}: this process will not notice them. Make the Checkpointer in the main thread, or send "
                "the signal to another rank too",
            )
        self._thread = Worker(self._watch, "tierckpt-stop")
        self._thread.start()

    def _hear(self, number: int) -> None:
        self._heard = number
        self._news.put(None)

    @contextmanager
    def call(self, *, saves: bool) -> Iterator[bool]:
        """Around every call of save() and restore(), which all ranks make alike; whether all ranks stop at this one."""
        with self._turn.lock:
            self._turn.wait_for(lambda: not self._held)
            self._begun += 1
            first = saves and not self.stops and self._at is not None and self._begun >= self._at
            self.stops = self.stops or first
        try:
            yield first
        finally:
            with self._turn.lock:
                self._ended += 1
                self._hasten_in_time()

    def _hasten_in_time(self) -> None:
        if self._at is not None and self._ended >= self._at - 1 and not self._hastened:
            self._hastened = True
            self._hasten()

    def _watch(self) -> None:
        lost = False
        try:
            while not self._round():
                pass
        except LostContactError:
            lost = True
        finally:
            with self._turn.lock:
                self._held = False
                self._turn.notify_all()
            if lost and not self._closed:
                # Nothing can be agreed on any more, so signals end this process as they would without us.
                signals.leave(self._hear)
                if self._heard is not None:
                    signals.repeat(self._heard)

    def _round(self) -> bool:
        """Ask the other ranks once; whether there is nothing more to ask.

        Raises:
            LostContactError: a rank has died, or leaves after a failure.
        """
        with contextlib.suppress(queue.Empty):
            self._news.get(timeout=self._pause)

        def mine() -> bytes:
            return json.dumps([self._heard is not None, self._leaving]).encode()

        told = [json.loads(word) for word in self._ranks.vote("save_on_signal", mine)]
        leaving = {leaves for _, leaves in told}
        if _FAILED in leaving:
            raise LostContactError("a rank has failed")
        if not any(heard for heard, _ in told):
            # Who closes has made the last of the calls that all make.
            return _DONE in leaving
        with self._turn.lock:
            self._held = True
            left_out = self._left_out()
            begun = self._begun + left_out
        words = self._ranks.vote("the stop", lambda: str(begun).encode())
        with self._turn.lock:
            self._at = max(map(int, words)) + 1 - left_out
            self._hasten_in_time()
            self._held = False
            self._turn.notify_all()
        return True

    def stop(self, *, failed: bool = False) -> None:
        """Let the thread end with those of the other ranks; does not wait."""
        self._leaving = _FAILED if failed else _DONE
        self._news.put(None)

    def settle(self, *, failed: bool) -> None:
        """No call comes any more. Signals still end nothing, until :meth:`close`."""
        self._closed = True
        self.stop(failed=failed)
        self._thread.finish()

    def close(self) -> None:
        """Signals do again what they did before."""
        signals.leave(self._hear)
        self._ranks.close()


#: What a rank says while it is there, and why it leaves.
_THERE, _DONE, _FAILED = "", "done", "failed"
