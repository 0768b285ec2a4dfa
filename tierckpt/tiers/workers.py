"""A few threads that live as long as the process and work on one thing together.

They are daemons, so that they still work while the interpreter shuts down and a last drain finishes; a forked child makes
its own.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable

from tierckpt import _native
from tierckpt.config import IO_THREADS
from tierckpt.format.digest import CHUNK


class Workers:
    """``count`` threads, each with a page-aligned scratch buffer of one chunk."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pid = os.getpid()
        self._tasks: queue.SimpleQueue[Callable[[_native.Buffer], None]] = queue.SimpleQueue()
        for number in range(count):
            threading.Thread(target=self._work, name=f"tierckpt-io-{number}", daemon=True).start()

    def _work(self) -> None:
        scratch = _native.Buffer(CHUNK)
        while True:
            self._tasks.get()(scratch)

    def each(self, items: int, work: Callable[[int, _native.Buffer], None]) -> None:
        """``work(i, scratch)`` for i < ``items``, in order of beginning; returns when all have ended.

        Raises:
            What ``work`` raised first; later items are then not begun.
        """
        job = _Job(items, work)
        for _ in range(min(self.count, items)):
            self._tasks.put(job.run)
        job.wait(min(self.count, items))


class _Job:
    def __init__(self, items: int, work: Callable[[int, _native.Buffer], None]) -> None:
        self._items, self._work = items, work
        self._next = 0
        self._lock = threading.Lock()
        self._ended = threading.Semaphore(0)
        self._error: BaseException | None = None

    def run(self, scratch: _native.Buffer) -> None:
        try:
            while True:
                with self._lock:
                    index = self._next
                    if index >= self._items or self._error is not None:
                        return
                    self._next = index + 1
                self._work(index, scratch)
        except BaseException as error:
            with self._lock:
                self._error = self._error or error
        finally:
            self._ended.release()

    def wait(self, threads: int) -> None:
        for _ in range(threads):
            self._ended.acquire()
        if self._error is not None:
            raise self._error


_workers: Workers | None = None
_lock = threading.Lock()


def workers() -> Workers:
    """The process's own."""
    global _workers
    with _lock:
        if _workers is None or _workers._pid != os.getpid():
            _workers = Workers(IO_THREADS)
        return _workers
