"""What ``save()`` gives back: where the bytes of one step are."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from typing import Any

from tierckpt.errors import SkippedError, StateError, TierckptError


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


class Handle:
    """A save under way.

    Attributes:
        step: as passed to ``save``.
        error: why the save failed; None while it has not.
        timings: seconds by part: ``stall`` (the training loop stood still), ``copy``, ``write``, ``commit``.
    """

    def __init__(self, step: int, tier: str, *, due: bool = True) -> None:
        self.step = step
        self.error: BaseException | None = None
        self.timings: dict[str, float] = {}
        self._tier, self._due = tier, due
        self._info: SaveInfo | None = None
        self._staged, self._ended = threading.Event(), threading.Event()
        self._began = time.perf_counter()
        #: Whether somebody has been told of the error.
        self._told = False
        #: What must live until the save has ended.
        self._owner: object = None
        self._pid = os.getpid()
        if not due:
            self._staged.set()
            self._ended.set()

    def __repr__(self) -> str:
        state = "failed" if self.error else "skipped" if not self._due else "done" if self._info else "under way"
        return f"<save of step {self.step}: {state}>"

    def wait_staged(self, timeout: float | None = None) -> None:
        """Wait until the state has been copied: from then on it may change.

        Raises:
            TimeoutError: not within ``timeout`` seconds.
            TierckptError: the save has failed.
        """
        self._wait(self._staged, timeout)

    def wait(self, tier: str | None = None, timeout: float | None = None) -> SaveInfo | None:
        """Wait until the step is at ``tier``, by default the deepest that is due for it; None when none is due.

        Raises:
            SkippedError: this step is not due at ``tier`` and will never be there.
            TimeoutError: not within ``timeout`` seconds.
            TierckptError: the save has failed.
        """
        if tier is not None and tier != self._tier:
            raise StateError(f"there is no tier {tier!r} here; this run has: {self._tier}")
        if not self._due:
            if tier is None:
                return None
            raise SkippedError(f"step {self.step} is not due at tier {tier!r}")
        self._wait(self._ended, timeout)
        return self._info

    def done(self, tier: str | None = None) -> bool:
        """Whether the step is at ``tier`` (by default the deepest that is due)."""
        if tier is not None and tier != self._tier:
            return False
        return self._ended.is_set() and self.error is None and (self._due or tier is None)

    def _wait(self, event: threading.Event, timeout: float | None) -> None:
        if self._pid != os.getpid() and not event.is_set():
            raise StateError(f"step {self.step} is being saved by the process that this one was forked from")
        if not event.wait(timeout):
            raise TimeoutError(f"step {self.step}: not within {timeout:g} s")
        if self.error is not None:
            self._told = True
            raise _again(self.error)

    def _set_staged(self) -> None:
        self._staged.set()

    def _finish(self, info: SaveInfo | None, error: BaseException | None = None) -> None:
        if self._ended.is_set():
            return
        self._info, self.error = info, error
        self._owner = None
        self.timings["total"] = time.perf_counter() - self._began
        self._staged.set()
        self._ended.set()


def _again(error: BaseException) -> BaseException:
    """The same error to raise once more: a fresh object, so that tracebacks do not pile up on the first."""
    if not isinstance(error, TierckptError):
        return error
    copy = type(error)(*error.args)
    copy.__cause__ = error.__cause__ or error
    return copy
