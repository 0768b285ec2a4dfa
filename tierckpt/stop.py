"""What a signal on one rank sets off on all: the newest complete step goes to the disk, and all stop at the same save.

The first save past the last that any rank has begun is the same on all, and ``should_stop`` becomes True there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from tierckpt import signals
from tierckpt.agent.calls import Meetings
from tierckpt.agreement import At, Place
from tierckpt.telling import warn


class Stop:
    """To be agreed on (see :class:`tierckpt.agreement.Subject`).

    Args:
        numbers: the signals that are listened to.
        wake: called from the handler of a signal.
        meetings: of the ranks.
        hasten: has the newest complete step go to the disk after so many meetings; called while none ends.
        lacks: whether that is only in memory.
    """

    def __init__(
        self,
        numbers: tuple[int, ...],
        wake: Callable[[], None],
        meetings: Meetings,
        hasten: Callable[[int], None],
        lacks: Callable[[], bool],
    ) -> None:
        self._wake, self._meetings, self._hasten, self._lacks = wake, meetings, hasten, lacks
        self._heard: int | None = None
        #: All ranks stop at the first save past this place.
        self._at: At | None = None
        #: Whether all ranks stop here, and whether they do so in the call that is under way.
        self.stops = self.now = False
        why = signals.listen(numbers, self._hear)
        if why:
            warn(
                f"save_on_signal: {why}: this process will not notice them. Make the Checkpointer in the main thread, or send "
                "the signal to another rank too",
            )

    def _hear(self, number: int) -> None:
        self._heard = number
        self._wake()

    def begin(self, place: Place | None) -> None:
        """It stops in a save only."""
        self.now = place is not None and not self.stops and self._at is not None and place.is_past(self._at)
        self.stops = self.stops or self.now

    def wants(self) -> bool:
        """Whether a signal came, or a step has become complete since then and the last save has not."""
        return self._heard is not None and not self.stops and (self._at is None or self._lacks())

    def word(self) -> list[Any]:
        """How often this rank has met the others."""
        return self._meetings.hold()

    def agree(self, at: At, words: Sequence[Any]) -> None:
        """All stop at the first save that none has begun, and hasten what is newest where all have met equally often."""
        self._at = self._at or at
        met, saved = max(words)
        try:
            # After a restore some ranks may be in the next generation, where nothing is complete yet.
            if saved:
                self._hasten(met)
        finally:
            self._meetings.go_on()

    def alone(self, lost: str) -> None:
        """Where nothing can be agreed on any more, signals end this process as they would without us."""
        self._meetings.go_on()
        if lost and self._at is None:
            signals.leave(self._hear)
            if self._heard is not None:
                signals.repeat(self._heard)

    def close(self) -> None:
        """Signals do again what they did before."""
        signals.leave(self._hear)
