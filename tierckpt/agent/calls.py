"""Where the ranks meet on each save: the numbers of their calls say which of their saves belong together."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tierckpt.errors import OutOfStepError, TierckptError
from tierckpt.telling import by_rank, ranks, warn
from tierckpt.threads import Signal

_log = logging.getLogger("tierckpt")


class Ranks(Protocol):
    """What the drain needs of the group of processes (see :class:`tierckpt.group.Group`)."""

    rank: int
    size: int

    def vote(self, what: str, part: Callable[[], bytes], *, tag: int = 0) -> list[bytes]: ...


class Calls:
    """The calls that all ranks make alike, in rounds: a round ends where all meet whatever they have done before.

    A rank may leave a call out: an interrupt may come before it was counted, a loop may go on too early. From the next save
    on it numbers its calls as the others do theirs.
    """

    def __init__(self) -> None:
        self._made = 0
        # The round of the last meeting, how many of its calls this rank has left out, and the step that all met at last.
        self._round = self._missed = 0
        self._last = -1
        #: How many calls this rank has left out in all, as far as is known.
        self.left_out = 0

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

        Ranks that were given different steps do not agree on what is due. Whoever comes with an earlier call than others gives
        its step up and comes again with the next; the others wait for it here. Where steps ascend, who comes with a later step
        in the same call has left one out.

        Raises:
            OutOfStepError: this rank's step is given up, or others have another step in the same call; nothing of it was
                written.
            What else :meth:`Ranks.vote` raises.
        """
        what = f"the save of step {step}"
        if call >> _ROUND != self._round:
            self._round, self._missed, self._last = call >> _ROUND, 0, -1
        ascends, least = step > self._last, -1
        differ = ""

        def word() -> bytes:  # the same place for all, whatever each has to say
            return step.to_bytes(_STEP, "little") + bytes([ascends]) + part()

        while True:
            number = self._number(call)
            try:
                told = group.vote(what, word, tag=number)
            except OutOfStepError as error:
                newest = max(error.tags)
                early = ranks([rank for rank, one in enumerate(error.tags) if one < newest])
                if number < newest and differ:
                    raise OutOfStepError(differ) from error
                if number < newest:
                    later = ranks([rank for rank, one in enumerate(error.tags) if one == newest])
                    raise OutOfStepError(
                        f"{what} failed: ranks {early} alone saved in this call; ranks {later} had nothing due and went on. "
                        "All ranks must pass the same steps to save()"
                    ) from error
                warn(
                    f"what ranks {early} alone saved before step {step} is given up: all ranks must pass the same steps to save()"
                )
                continue
            steps = [int.from_bytes(said[:_STEP], "little") for said in told]
            if len(set(steps)) == 1:
                self._last = step
                return [said[_STEP + 1 :] for said in told]
            if not differ:
                which = by_rank([f"step {one}" for one in steps])
                differ = f"{what} failed: the ranks pass different steps to the same save ({which})"
            # Whoever is behind comes with later steps from time to time, or steps do not ascend.
            if not all(said[_STEP] for said in told) or min(steps) <= least:
                raise OutOfStepError(differ)
            least = min(steps)
            self._missed += step > least
            self.left_out += step > least


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


#: Bits of the number of a call within its round.
_ROUND = 32
#: Bytes of a step in what ranks tell each other.
_STEP = 8
