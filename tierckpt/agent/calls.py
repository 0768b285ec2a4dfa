"""Where the ranks meet on each save: the numbers of their calls say which of their saves belong together."""

from __future__ import annotations

import hashlib
import json
import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from tierckpt.errors import OutOfStepError, TierckptError
from tierckpt.format.canonical import MAX_INTEGER
from tierckpt.telling import by_rank, ranks, warn
from tierckpt.threads import Condition, Signal

_log = logging.getLogger("tierckpt")


class Ranks(Protocol):
    """What the drain needs of the group of processes (see :class:`tierckpt.group.Group`)."""

    rank: int
    size: int

    def vote(self, what: str, part: Callable[[], bytes], *, tag: int = 0) -> list[bytes]: ...


class Meetings:
    """How often the ranks have met. What they do after a meeting of one number, and before the next, they do in the same order
    between their steps, whatever calls each has made or left out."""

    def __init__(self) -> None:
        self._turn = Condition()
        self._held = False
        # How many there were, and whether the last was for a save.
        self._met, self._saved = 0, False
        #: What is to be done after which, and what has the thread that meets come to it.
        self._wishes: deque[tuple[int, Callable[[], None], Callable[[], None]]] = deque()

    @property
    def saved(self) -> bool:
        """Whether the last was for a save, and nothing waits to be done after it."""
        return self._saved and not self._wishes

    def hold(self) -> list[Any]:
        """How often they have met here, and whether the last time was for a save. No meeting ends from here to :meth:`go_on`."""
        with self._turn.lock:
            self._held = True
            return [self._met, self._saved]

    def go_on(self) -> None:
        """All ranks know after which meeting something is to be done."""
        with self._turn.lock:
            self._held = False
            self._turn.notify_all()

    def after(self, number: int, act: Callable[[], None], come: Callable[[], None]) -> None:
        """Have the thread that meets do something after so many meetings: no fewer than any rank has held at.

        ``come``: has that thread call :meth:`act`, should it be idle.
        """
        with self._turn.lock:
            self._wishes.append((number, act, come))
        come()

    def act(self) -> None:
        """Do what is to be done between the last meeting and the next. By the thread that meets."""
        while self._wishes and self._wishes[0][0] <= self._met:
            self._wishes.popleft()[1]()

    def passed(self, *, saves: bool) -> None:
        """The ranks have met; nothing has been done with it yet."""
        while not self._count(saves):
            self.act()
        with self._turn.lock:
            waiting = [come for number, _, come in self._wishes if number == self._met]
        for come in waiting:
            come()

    def _count(self, saves: bool) -> bool:
        """One more, unless there is something to do before."""
        with self._turn.lock:
            self._turn.wait_for(lambda: not self._held)
            if self._wishes and self._wishes[0][0] <= self._met:
                return False
            self._met, self._saved = self._met + 1, saves
            return True


class Calls:
    """The calls that all ranks make alike, in rounds: a round ends where all meet whatever they have done before.

    A rank may leave a call out: an interrupt may come before it was counted, a loop may go on too early. Where all meet at the
    same step after that, it numbers its calls as the others do theirs.
    """

    def __init__(self) -> None:
        self.meetings = Meetings()
        self._made = 0
        # The round of the last meeting, how many of its calls this rank has left out, and the step that all met at last.
        self._round = self._missed = 0
        self._last = -1
        # The step at which this rank waits for the others, and since when.
        self._waits: tuple[int, float] | None = None

    def behind(self, seconds: float) -> str:
        """That the other ranks have not come for so long to a save that this one has handed over; empty if they have."""
        waits = self._waits
        if waits is None or time.monotonic() - waits[1] < seconds:
            return ""
        return f"this rank has waited for {time.monotonic() - waits[1]:.0f} s for others to come to the save of step {waits[0]}"

    @property
    def made(self) -> int:
        """The number of the last call, as the other ranks know it."""
        return self._number(self._made)

    def next(self) -> int:
        """Count a call of ``save``; its number."""
        self._made += 1
        return self._made

    def mark(self) -> int:
        """Begin a round; the number of the call that does."""
        self._made = ((self._made >> _ROUND) + 1) << _ROUND
        return self._made

    def _number(self, call: int) -> int:
        return call + self._missed if call >> _ROUND == self._round else call

    def meet(self, group: Ranks, call: int, step: int, part: Callable[[], bytes]) -> list[bytes]:
        """The first vote on a step, where it shows whether all ranks are at the same one. Collective.

        Ranks that were given different steps do not agree on what is due, and some may have left out calls. Whoever comes with
        an earlier step than others (where steps do not ascend: with an earlier call) gives it up and comes again with the next;
        the others wait for it here.

        Raises:
            OutOfStepError: this rank's step is given up; nothing of it was written.
            What else :meth:`Ranks.vote` raises.
        """
        self._waits = step, time.monotonic()
        try:
            told = self._meet(group, call, step, part)
        finally:
            self._waits = None
        self.meetings.passed(saves=bool(call % (1 << _ROUND)))
        return told

    def _meet(self, group: Ranks, call: int, step: int, part: Callable[[], bytes]) -> list[bytes]:
        what = f"the save of step {step}"
        if call >> _ROUND != self._round:
            self._round, self._missed, self._last = call >> _ROUND, 0, -1
        # What is refused has the number of no step.
        ascends, least, differ = self._last < step < MAX_INTEGER, -1, ""

        def where() -> bytes:
            return json.dumps([self._number(call), step]).encode().ljust(_WHERE) + bytes([ascends])

        while True:
            try:
                told = group.vote(what, lambda: where() + part(), tag=_tag(self._number(call), step))
            except OutOfStepError as error:
                if not error.tags:
                    raise  # what some rank has to say of another save
                told = group.vote(f"{what}: who is where", where)
            if all(said[:_WHERE] == told[0][:_WHERE] for said in told):
                self._last = step
                return [said[_WHERE + 1 :] for said in told]
            numbers, steps = zip(*[json.loads(said[:_WHERE]) for said in told], strict=True)
            named = by_rank([f"step {one}" for one in steps])
            differ = differ or f"{what} failed: the ranks pass different steps to the same save ({named})"
            places: Sequence[int] = numbers
            if all(said[_WHERE] for said in told) and len({number >> _ROUND for number in numbers}) == 1:
                if len(set(steps)) == 1:
                    self._missed += max(numbers) - self._number(call)
                    continue
                places = steps
            mine, last, first = places[group.rank], max(places), min(places)
            early = ranks([rank for rank, place in enumerate(places) if place < last])
            if places is numbers and first == last:
                # It is the same call on all: what was wrong with it on some rank says more.
                group.vote(what, part, tag=last)
            # Who waits does so as long as the others come nearer.
            if mine < last or first <= least or first == last:
                raise OutOfStepError(f"{differ}; ranks {early} alone saved in this call" if early else differ)
            least = first
            warn(
                f"what ranks {early} alone saved before step {step} is given up: all ranks must pass the same steps to save()"
            )


@dataclass
class Mark:
    """A call at which all ranks meet without saving: what only some of them have handed over before is given up.

    Attributes:
        call: from :meth:`Calls.mark`.
        passed: the ranks have met, or have lost contact.
    """

    calls: Calls
    call: int
    passed: Signal = field(default_factory=Signal)

    def meet(self, ranks: Ranks) -> None:
        """Meet the other ranks here."""
        try:
            self.calls.meet(ranks, self.call, 0, bytes)
        except TierckptError as error:
            _log.debug("call %d: %s", self.call, error)  # who needs the others is told when it does
        finally:
            self.passed.set()


def _tag(number: int, step: int) -> int:
    """Of this step in this call: the same number alone may be another step's where a rank has made a call of its own."""
    return int.from_bytes(hashlib.blake2b(f"{number} {step}".encode(), digest_size=8).digest(), "little")


#: Bits of the number of a call within its round.
_ROUND = 32
#: Bytes of where a rank is, in what it tells the others.
_WHERE = 64
