"""When a tier is due whose cadence is a duration: at the same step on all ranks, by the clock of rank 0."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tierckpt.telling import warn


class Clock:
    """To be agreed on (see :class:`tierckpt.agreement.Subject`): each time by the steps that the ranks have come to, which are
    the same ones also where a rank has left calls out.

    Args:
        seconds: for each tier its cadence.
        leads: whether this is rank 0.
        alone: there is no other rank.
    """

    def __init__(self, seconds: Mapping[str, float], *, leads: bool, alone: bool) -> None:
        self._seconds, self._leads, self._alone = seconds, leads, alone
        self._since = dict.fromkeys(seconds, time.monotonic())
        #: The generation, which is the same on all ranks, and the last step that has begun in it.
        self._last = [0, -1]
        # The step of the call that is under way, −1: none.
        self._now = -1
        #: Tiers that are due at the first step after such a place.
        self._after: dict[str, list[int]] = {}
        #: Tiers that are due in the call that is under way.
        self.due: Collection[str] = ()

    def begin(self, step: int | None) -> None:
        """What is due is known from here on."""
        self.due = ()
        self._now = -1 if step is None else step
        if self._now >= 0:
            self._last = [self._last[0], self._now]
            self.due = self._over() if self._alone else [name for name, at in self._after.items() if self._last > at]
            for name in self.due:
                self._after.pop(name, None)
            self.restart(self.due)

    def end(self) -> None:
        """Nothing depends on it."""

    def continues(self, generation: int) -> None:
        """A generation has begun, in the call that is under way."""
        self._last = [generation, self._now]

    def restart(self, tiers: Collection[str]) -> None:
        """What counts for these begins now."""
        for name in self._seconds.keys() & set(tiers):
            self._since[name] = time.monotonic()

    def _over(self) -> list[str]:
        now = time.monotonic()
        return [name for name, seconds in self._seconds.items() if now - self._since[name] >= seconds]

    def wants(self) -> bool:
        """Whether the time of some tier has come, for the first time or once more."""
        return self._leads and bool(self._over())

    def place(self) -> list[Any]:
        """Where this rank is, the tiers whose time has come, and those of before whose step has not begun here."""
        return [self._last, self._over() if self._leads else [], list(self._after)]

    def agree(self, places: Sequence[Any]) -> None:
        """Due is the first step that no rank has begun. What nobody has come to in all that time is agreed on anew, since steps
        may have been set back."""
        last: list[int] = max(last for last, _, _ in places)
        for name in places[0][1]:
            if (
                len({name in waits for _, _, waits in places}) == 1
            ):  # else some rank is at the step before, which is due there
                self._after[name] = last
                self.restart([name])

    def alone(self, lost: str) -> None:
        """Who has lost the others goes by its own clock: where the ranks meet in the save that is due then, they are told what is
        wrong. At a good end all that is still to be due has been agreed on: some rank has made its last call."""
        if not lost:
            return
        if self._seconds:
            warn(f"ranks no longer agree on when a save is due whose every= is a duration, and saves may fail: {lost}")
        self._alone = True
        self._after.clear()
