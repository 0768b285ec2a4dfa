"""What a signal on one rank sets off on all: the newest complete step goes to the disk, and all stop at the same save.

The call after the last that any rank has begun is the same on all, and ``should_stop`` becomes True there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tierckpt import signals
from tierckpt.telling import warn


class Stop:
    """To be agreed on (see :class:`tierckpt.agreement.Subject`).

    Args:
        numbers: the signals that are listened to.
        wake: called from the handler of a signal.
        made: the number of the last call that has begun, as the other ranks know it.
        hasten: called once, from any thread, after the same calls on all ranks and while no other begins: takes the newest
            complete step to the disk.
    """

    def __init__(
        self,
        numbers: tuple[int, ...],
        wake: Callable[[], None],
        made: Callable[[], int],
        hasten: Callable[[], None],
    ) -> None:
        self._wake, self._made, self._hasten = wake, made, hasten
        self._heard: int | None = None
        self._hastened = self._is_inside = False
        #: The first call at which all ranks stop.
        self._at: int | None = None
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

    def begin(self, step: int | None) -> None:
        """It stops in a call of save() only."""
        self._is_inside = True
        self.now = step is not None and not self.stops and self._at is not None and self._made() >= self._at
        self.stops = self.stops or self.now

    def end(self) -> None:
        """What is newest is known where the calls before the stop have ended."""
        self._is_inside = False
        self._hasten_in_time()

    def _hasten_in_time(self) -> None:
        if self._at is not None and not (self._is_inside or self._hastened) and self._made() >= self._at - 1:
            self._hastened = True
            self._hasten()

    def wants(self) -> bool:
        """Whether a signal came."""
        return self._heard is not None and self._at is None

    def place(self) -> int:
        """The number of the last call that this rank has begun."""
        return self._made()

    def agree(self, places: Sequence[int]) -> None:
        """All stop at the call that none has begun."""
        self._at = max(places) + 1
        self._hasten_in_time()

    def alone(self, lost: str) -> None:
        """Where nothing can be agreed on any more, signals end this process as they would without us."""
        if lost and self._at is None:
            signals.leave(self._hear)
            if self._heard is not None:
                signals.repeat(self._heard)

    def close(self) -> None:
        """Signals do again what they did before."""
        signals.leave(self._hear)
