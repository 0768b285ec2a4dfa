"""Threads whose end can be waited for whatever interrupts the wait."""

from __future__ import annotations

import threading
from collections.abc import Callable


class Worker(threading.Thread):
    """A daemon thread: whoever owns it waits for its end, at the latest when the interpreter ends.

    Before Python 3.13 a ``join`` that is interrupted takes a thread that runs for one that has ended (bpo-45274).
    """

    def __init__(self, target: Callable[[], object], name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._work = target
        self._over = threading.Event()

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
