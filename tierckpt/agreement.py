"""What all ranks do at the same call of theirs, although only some know why: a signal came, the time of a tier has come.

A thread on each rank, on channels of its own, asks the others several times a second whether one of them wants anything.
If one does, each says which call of save() or restore() it has begun last, and begins no other until all have said so: two
words between these threads, which wait for no training loop. The first call after all of these is the same on all ranks.
"""

from __future__ import annotations

import contextlib
import json
import queue
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from tierckpt.config import AGREE_SECONDS, AGREE_SECONDS_PER_RANK
from tierckpt.errors import LostContactError
from tierckpt.format.canonical import JSON
from tierckpt.group import Group
from tierckpt.threads import Condition, Worker


class Subject(Protocol):
    """What is agreed on. Nothing here is called while another thread is in any of it."""

    def begin(self, step: int | None) -> None:
        """A call of save() begins (−1: what it was given is no step), or of restore() (None)."""

    def end(self) -> None:
        """That call has ended."""

    def wants(self) -> bool:
        """Whether this rank has anything to agree on."""

    def place(self) -> JSON:
        """Which call this rank has begun last."""

    def agree(self, places: Sequence[Any]) -> None:
        """Some rank wants it, and these are all ranks' places."""

    def alone(self, lost: str) -> None:
        """Nothing is agreed on any more; ``lost``: why, if a rank has died, or left after a failure."""


class Agreement:
    """Args:
    ranks: channels for its thread alone, which gives them back.
    subjects: the same ones on all ranks.
    """

    def __init__(self, ranks: Group, *subjects: Subject) -> None:
        self._ranks = ranks
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

    @contextmanager
    def call(self, step: int | None, count: Callable[[], int]) -> Iterator[int]:
        """Around every call of save() and restore(), which all ranks make alike; its number, by ``count``."""
        with self._turn.lock:
            self._turn.wait_for(lambda: not self._held)
            number = count()
            for subject in self._subjects:
                subject.begin(step)
        try:
            yield number
        finally:
            with self._turn.lock:
                for subject in self._subjects:
                    subject.end()

    def _watch(self) -> None:
        lost = ""
        try:
            while not self._round():
                pass
        except LostContactError as error:
            lost = str(error)
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
            self._agree(wanted)
        # Who closes has made the last of the calls that all make.
        return _DONE in leaving

    def _agree(self, wanted: Sequence[Subject]) -> None:
        with self._turn.lock:
            self._held = True
            places = [subject.place() for subject in wanted]
        words = [json.loads(word) for word in self._ranks.vote("the call", lambda: json.dumps(places).encode())]
        with self._turn.lock:
            for number, subject in enumerate(wanted):
                subject.agree([word[number] for word in words])
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
