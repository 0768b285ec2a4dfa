"""What all ranks do at the same call of theirs, although only some know why: a signal came, the time of a tier has come.

A thread on each rank, on channels of its own, asks the others several times a second whether one of them wants anything.
If one does, each says where it is (:class:`Place`), and begins no other call until all have said so: two words between these
threads, which wait for no training loop. The first save after all of these places is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from tierckpt.config import AGREE_SECONDS, AGREE_SECONDS_PER_RANK
from tierckpt.errors import LostContactError
from tierckpt.format.canonical import JSON
from tierckpt.group import Group
from tierckpt.threads import Condition, Worker

_log = logging.getLogger("tierckpt")

#: What was the last place of any rank: generation, step, and the number of the call where steps do not ascend.
At = tuple[int, int, int | None]


class Place:
    """Which call this rank has begun last. Ranks that have left calls out have their steps in common; where steps do not ascend,
    only the numbers of the calls tell what comes after what.

    Args:
        made: the number of the last call, as the other ranks know it.
    """

    def __init__(self, made: Callable[[], int]) -> None:
        self._made = made
        # The generation, which is the same on all ranks, the last step that has begun in it, and whether its steps ascend.
        self._generation, self._step, self._ascends = 0, -1, True
        # The step of the call that is under way, −1: none; and whether it is below the one before.
        self._now, self._back = -1, False

    def begin(self, step: int | None) -> None:
        """A call of save() begins (−1: what it was given is no step), or of restore() (None)."""
        self._now = -1 if step is None else step
        if self._now >= 0:
            self._back = self._now < self._step
            self._ascends = self._ascends and not self._back
            self._step = self._now

    def continues(self, generation: int) -> None:
        """A generation has begun, in the call that is under way."""
        self._generation, self._step, self._ascends, self._back = generation, self._now, True, False

    def told(self) -> JSON:
        """For the other ranks."""
        return [self._generation, self._step, self._ascends, self._made()]

    def is_past(self, at: At) -> bool:
        """Whether the save that begins is one that no rank had begun then."""
        generation, step, number = at
        if self._generation != generation:
            return self._generation > generation
        if number is not None:
            return self._made() > number
        # All ranks had ascended until then: so it is the same save on all that sets steps back.
        return self._step > step or self._back


def last(places: Sequence[Any]) -> At:
    """The last of what all ranks have :meth:`Place.told`. Those of an older generation are in the call that begins this one."""
    generation = max(generation for generation, *_ in places)
    steps, ascend, numbers = zip(*[rest for begun, *rest in places if begun == generation], strict=True)
    return generation, max(steps), None if all(ascend) else max(numbers)


class Subject(Protocol):
    """What is agreed on. Nothing here is called while another thread is in any of it."""

    def begin(self, place: Place | None) -> None:
        """A call begins: a save here, or one that saves no step (None)."""

    def wants(self) -> bool:
        """Whether this rank has anything to agree on."""

    def word(self) -> JSON:
        """What the other ranks have to know of this one."""

    def agree(self, at: At, words: Sequence[Any]) -> None:
        """Some rank wants it: no rank has begun a save past ``at``, and these are all ranks' words."""

    def alone(self, lost: str) -> None:
        """Nothing is agreed on any more; ``lost``: why, if a rank has died, or left after a failure."""


class Agreement:
    """Args:
    ranks: channels for its thread alone, which gives them back.
    place: of this rank.
    subjects: the same ones on all ranks.
    """

    def __init__(self, ranks: Group, place: Place, *subjects: Subject) -> None:
        self._ranks, self._place = ranks, place
        self._pause = max(AGREE_SECONDS, ranks.size * AGREE_SECONDS_PER_RANK) if ranks.size > 1 else None
        self._turn = Condition()
        self._news: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._subjects = list(subjects)
        self._leaving = _THERE
        self._held = self._closed = False
        self._thread: Worker | None = None

    def add(self, subject: Subject) -> None:
        """One more, before :meth:`start`."""
        self._subjects.append(subject)

    def start(self) -> None:
        """Begin to ask the other ranks; before that calls are only counted."""
        self._thread = Worker(self._watch, "tierckpt-agree")
        self._thread.start()

    def wake(self) -> None:
        """This rank wants something now. From anywhere, also from a signal handler."""
        self._news.put(None)

    def begin(self, step: int | None, count: Callable[[], int]) -> int:
        """A call begins, of those that all ranks make alike (see :meth:`Place.begin`); its number, by ``count``."""
        with self._turn.lock:
            self._turn.wait_for(lambda: not self._held)
            number = count()
            self._place.begin(step)
            for subject in self._subjects:
                subject.begin(None if step is None or step < 0 else self._place)
        return number

    def continues(self, generation: int) -> None:
        """A generation has begun, in the call that is under way."""
        with self._turn.lock:
            self._place.continues(generation)

    def _watch(self) -> None:
        lost = ""
        try:
            while not self._round():
                pass
        except LostContactError as error:
            lost = str(error)
        except Exception as error:
            _log.exception("the ranks no longer agree on anything")
            lost = f"{type(error).__name__}: {error}"
        finally:
            with self._turn.lock:
                self._held = False
                for subject in self._subjects:
                    subject.alone("" if self._closed else lost)
                self._turn.notify_all()
            self._ranks.close()

    def _round(self) -> bool:
        """Ask the other ranks once; whether there is nothing more to ask.

        Raises:
            LostContactError: a rank has died, or leaves after a failure.
        """
        with contextlib.suppress(queue.Empty):
            self._news.get(timeout=self._pause)

        def mine() -> bytes:
            with self._turn.lock:
                return json.dumps([[subject.wants() for subject in self._subjects], self._leaving]).encode()

        told = [json.loads(word) for word in self._ranks.vote("whether there is anything to agree on", mine)]
        leaving = {leaves for _, leaves in told}
        if _FAILED in leaving:
            raise LostContactError("a rank has failed")
        wanted = [
            subject
            for subject, wants in zip(self._subjects, zip(*[said for said, _ in told], strict=True), strict=True)
            if any(wants)
        ]
        if wanted:
            # Whoever wants something may want it once more, of which nothing tells a process that is alone.
            self._pause = self._pause or AGREE_SECONDS
            self._agree(wanted)
        # Who closes has made the last of the calls that all make.
        return _DONE in leaving

    def _agree(self, wanted: Sequence[Subject]) -> None:
        with self._turn.lock:
            self._held = True
            mine = json.dumps([self._place.told(), [subject.word() for subject in wanted]]).encode()
        places, words = zip(*[json.loads(said) for said in self._ranks.vote("the call", lambda: mine)], strict=True)
        at = last(places)
        with self._turn.lock:
            for subject, said in zip(wanted, zip(*words, strict=True), strict=True):
                subject.agree(at, said)
            self._held = False
            self._turn.notify_all()

    def stop(self, *, failed: bool = False) -> None:
        """Let the thread end with those of the other ranks; does not wait."""
        self._leaving = _FAILED if failed else _DONE
        self._news.put(None)

    def settle(self, *, failed: bool) -> None:
        """No call comes any more."""
        self._closed = True
        self.stop(failed=failed)
        if self._thread is not None:
            self._thread.finish()


#: What a rank says while it is there, and why it leaves.
_THERE, _DONE, _FAILED = "", "done", "failed"
