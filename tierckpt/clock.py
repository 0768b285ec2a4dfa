"""When a tier is due whose cadence is a duration: at the same step on all ranks, by the clock of rank 0."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from tierckpt.agreement import At, Place
from tierckpt.telling import warn


class Clock:
    """To be agreed on (see :class:`tierckpt.agreement.Subject`).

    Args:
        seconds: for each tier its cadence.
        leads: whether this is rank 0.
        alone: there is no other rank.
    """

    def __init__(self, seconds: Mapping[str, float], *, leads: bool, alone: bool) -> None:
        self._seconds, self._leads, self._alone = seconds, leads, alone
        self._since = dict.fromkeys(seconds, time.monotonic())
        #: Tiers that are due at the first save past such a place.
        self._after: dict[str, At] = {}
        #: Tiers that are due in the call that is under way.
        self.due: Collection[str] = ()

    def begin(self, place: Place | None) -> None:
        """What is due is known from here on."""
        self.due = ()
        if place is not None:
            self.due = self._over() if self._alone else [name for name, at in self._after.items() if place.is_past(at)]
            for name in self.due:
                self._after.pop(name, None)
            self.restart(self.due)

    def restart(self, tiers: Collection[str]) -> None:
        """What counts for these begins now."""
        for name in self._seconds.keys() & set(tiers):
            self._since[name] = time.monotonic()

    def _over(self) -> list[str]:
        now = time.monotonic()
        return [name for name, seconds in self._seconds.items() if now - self._since[name] >= seconds]

    def wants(self) -> bool:
        """Whether the time of some tier has come, for the first time or once more."""
        return self._leads and not self._alone and bool(self._over())

    def word(self) -> list[Any]:
        """The tiers whose time has come, and those of before whose save has not begun here."""
        return [self._over() if self._leads else [], list(self._after)]

    def agree(self, at: At, words: Sequence[Any]) -> None:
        """Due is the first save that no rank has begun. What nobody has come to in all that time is agreed on anew."""
        for name in words[0][0]:
            if len({name in waits for _, waits in words}) == 1:  # else some rank is before the save that is due there
                self._after[name] = at
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
