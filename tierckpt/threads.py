"""Threads, and waiting for them, such that an interrupt (KeyboardInterrupt) of who waits breaks nothing for the others.

Entering a ``threading.Condition`` or waiting for a ``threading.Event`` takes their lock in a function of Python: an interrupt
that comes when the lock is held and its ``with`` block has not begun leaves it locked for ever, and whoever is to tell of
something stands there. A lock itself is taken in one instruction.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Condition(threading.Condition):
    """To be entered by its lock: ``with condition.lock:``."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        super().__init__(self.lock)


class Signal:
    """An event that happens once. Who waits and who sets it share no lock."""

    def __init__(self) -> None:
        self._is_set = False
        self._waiting: dict[Any, None] = {}

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        self._is_set = True
        while self._waiting:
            try:
                one, _ = self._waiting.popitem()
            except KeyError:  # he has just gone
                break
            one.release()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it, at most so many seconds; whether it has happened."""
        if self._is_set:
            return True
        mine = threading.Lock()
        mine.acquire()
        try:
            self._waiting[mine] = None
            # It may have been set before that.
            return self._is_set or mine.acquire(timeout=-1 if timeout is None else max(0.0, timeout)) or self._is_set
        finally:
            self._waiting.pop(mine, None)


class Worker(threading.Thread):
    """A daemon thread: whoever owns it waits for its end, at the latest when the interpreter ends.

    Before Python 3.13 a ``join`` that is interrupted takes a thread that runs for one that has ended (bpo-45274).
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = target
        self._over = Signal()

    def run(self) -> None:
        try:
            self._work()
        finally:
            del self._work  # which may refer to whoever owns this
            self._over.set()

    def finish(self) -> None:
        """Wait until it has ended."""
        self._over.wait()
        self.join()
