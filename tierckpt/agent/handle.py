"""What ``save()`` gives back: where the bytes of one step are."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from tierckpt.errors import SkippedError, StateError, TierckptError
from tierckpt.threads import Signal


@dataclass(frozen=True)
class SaveInfo:
    """A checkpoint that is durable.

    Attributes:
        step, generation: its name within the run.
        id: hex digest of its manifest.
        head: hex digest of the chain's head after the commit; note it down to detect a roll-back later (``expect_head=``).
        size: bytes of all shards together.
        world: ranks that saved.
        metadata: as passed to ``save``.
    """

    step: int
    generation: int
    id: str
    head: str
    size: int
    world: int
    metadata: Any = None


#: Why a step whose save has failed cannot be saved again.
SAVED_ONCE = (
    "was saved before, and that save failed or was interrupted: memory may still hold it, and it may become durable yet. Each "
    "step is saved once; go on with the next number"
)


class Handle:
    """A save under way.

    Attributes:
        step: as passed to ``save``.
        error: why the save failed; None while it has not.
        timings: seconds by part: ``stall`` (the training loop stood still), ``copy``, ``write``, ``commit``.
    """

    def __init__(self, step: int, tiers: Sequence[str], due: Collection[str]) -> None:
        """``tiers``: those of this run, from the nearest down; ``due``: those that the step is due at."""
        self.step = step
        self.error: BaseException | None = None
        self.timings: dict[str, float] = {}
        self._tiers = tuple(tiers)
        self._due = tuple(tier for tier in tiers if tier in due)
        self._info: SaveInfo | None = None
        #: Tiers that the step is at, and why it will never be at others.
        self._at: set[str] = set()
        self._skipped = {tier: f"step {step} is not due at tier {tier!r}" for tier in tiers if tier not in due}
        self._staged, self._ended = Signal(), Signal()
        # Whether it is known what becomes of it at each tier.
        self._decided = {tier: Signal() for tier in self._tiers}
        self._began = time.perf_counter()
        #: Whether somebody has been told of the error.
        self._told = False
        #: What whoever waits does first: the wait may be for what he is doing.
        self._lend: Callable[[], object] = _nothing
        #: Whether another thread has it, and finishes it.
        self._handed_over = False
        #: What must live until the save has ended.
        self._owner: object = None
        self._pid = os.getpid()
        if not self._due:
            self._staged.set()
            self._ended.set()

    def __repr__(self) -> str:
        if self.error:
            state = "failed"
        elif not self._ended.is_set():
            state = "under way"
        else:
            state = "done" if self._at else "skipped"
        return f"<save of step {self.step}: {state}>"

    @property
    def due(self) -> tuple[str, ...]:
        """The tiers at which the step is due, from the nearest down."""
        return self._due

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the state has been copied: from then on it may change.

        Raises:
            TimeoutError: not within ``timeout`` seconds.
            TierckptError: the save has failed.
        """
        self._must_be_ours(self._staged.is_set())
        self._lend()
        if not self._staged.wait(timeout):
            raise TimeoutError(f"step {self.step}: not within {timeout:g} s")
        self._raise()

    def wait(self, tier: str | None = None, timeout: float | None = None) -> SaveInfo | None:
        """Wait until the step is at ``tier``, by default the deepest that is due for it; None when none is due.

        Returns:
            What is durable; None for a tier of memory.

        Raises:
            SkippedError: this step was not due at ``tier``, or overtaken by a newer one, and will never be there.
            TimeoutError: not within ``timeout`` seconds.
            TierckptError: the save has failed.
        """
        if tier is not None and tier not in self._tiers:
            raise StateError(f"there is no tier {tier!r} here; this run has: {', '.join(self._tiers)}")
        if tier is None:
            if not self._due:
                return None
            tier = self._due[-1]
        self._must_be_ours(self._over(tier))
        self._lend()
        if not (self._over(tier) or self._decided[tier].wait(timeout)):
            raise TimeoutError(f"step {self.step}: not within {timeout:g} s")
        if tier in self._at:
            return self._info if tier == self._tiers[-1] else None
        if tier in self._skipped:
            raise SkippedError(self._skipped[tier])
        self._raise()
        raise StateError(f"step {self.step} ended before it was at tier {tier!r}")

    def done(self, tier: str | None = None) -> bool:
        """Whether the step is at ``tier`` (by default the deepest that is due)."""
        self._lend()
        if tier is None:
            return not self._due or self._due[-1] in self._at
        return tier in self._at

    def _over(self, tier: str) -> bool:
        return tier in self._at or tier in self._skipped or self._ended.is_set()

    def _must_be_ours(self, over: bool) -> None:
        if self._pid != os.getpid() and not over:
            raise StateError(f"step {self.step} is being saved by the process that this one was forked from")

    def _raise(self) -> None:
        if self.error is not None:
            self._told = True
            raise _again(self.error)

    def _set_staged(self) -> None:
        self._staged.set()

    def _reach(self, tier: str) -> None:
        """The step is at a tier of memory."""
        self._at.add(tier)
        self._decide([tier])

    def _skip(self, tier: str, why: str) -> None:
        """The step will never be at ``tier``."""
        self._skipped.setdefault(tier, why)
        self._decide([tier])

    def _finish(self, info: SaveInfo | None, error: BaseException | None = None) -> None:
        """Nothing more happens: the step is at all tiers where it is due and was not skipped, or has failed."""
        if self._ended.is_set():
            return
        self._info, self.error = info, error
        self._owner, self._lend = None, _nothing
        self.timings["total"] = time.perf_counter() - self._began
        self._staged.set()
        if error is None:
            self._at.update(tier for tier in self._due if tier not in self._skipped)
        self._ended.set()
        self._decide(self._tiers)

    def _decide(self, tiers: Sequence[str]) -> None:
        for tier in tiers:
            if tier in self._decided:  # a run may be without this tier
                self._decided[tier].set()


def _nothing() -> None:
    """There is nothing to lend a hand with."""


def _again(error: BaseException) -> BaseException:
    """The same error to raise once more: a fresh object, so that tracebacks do not pile up on the first."""
    if not isinstance(error, TierckptError):
        return error
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__ or error
    return copy
