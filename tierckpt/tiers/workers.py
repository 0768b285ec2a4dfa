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
from tierckpt.config import CHUNKS_AHEAD, IO_THREADS, WRITES
from tierckpt.format.digest import CHUNK
from tierckpt.threads import Condition


class Workers:
    """Threads that work on chunks, and threads that wait for the disk.

    Args:
        count: those that work, each with a page-aligned scratch buffer of one chunk.
        writes: those that wait.
        ahead: buffers of one chunk that are handed from the ones to the others.
    """

    def __init__(self, count: int, writes: int, ahead: int) -> None:
        self.count = count
        self._pid = os.getpid()
        self._tasks: queue.SimpleQueue[Callable[[_native.Buffer], None]] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        #: Taken with get() and given back with put(). Whoever has one must not wait for another.
        self.buffers: queue.SimpleQueue[_native.Buffer] = queue.SimpleQueue()
        for _ in range(ahead):
            self.buffers.put(_native.Buffer(CHUNK))
        for number in range(count):
            threading.Thread(target=self._work, name=f"tierckpt-io-{number}", daemon=True).start()
        for number in range(writes):
            threading.Thread(target=self._write, name=f"tierckpt-write-{number}", daemon=True).start()

        self._spare: list[_native.Buffer] = []
        self._ahead = ahead
        self._lock = threading.Lock()

    def spare(self, count: int) -> list[_native.Buffer]:
        """So many buffers of one chunk, beside `buffers`; to be given back with :meth:`keep`."""
        with self._lock:
            found = [self._spare.pop() for _ in range(min(count, len(self._spare)))]
        return found + [_native.Buffer(CHUNK) for _ in range(count - len(found))]

    def keep(self, buffers: list[_native.Buffer]) -> None:
        """Keep some of these for the next."""
        with self._lock:
            self._spare += buffers[: self._ahead - len(self._spare)]

    def _work(self) -> None:
        scratch = _native.Buffer(CHUNK)
        while True:
            self._tasks.get()(scratch)

    def _write(self) -> None:
        while True:
            self._writes.get()()

    def each(self, items: int, work: Callable[[int, _native.Buffer], None]) -> None:
        """``work(i, scratch)`` for i < ``items``, in order of beginning; returns when all have ended.

        Raises:
            What ``work`` raised first; later items are then not begun.
        """
        job = _Job(items, work)
        threads = min(self.count, items)
        for _ in range(threads):
            self._tasks.put(job.run)
        job.wait(threads)

    def write(self, task: Callable[[], None]) -> None:
        """Have ``task`` done by a thread that waits for the disk, in order of beginning. It must not raise."""
        self._writes.put(task)

    def work(self, task: Callable[[_native.Buffer], None]) -> None:
        """Have ``task`` done by a thread that works, in order of beginning. It must not raise."""
        self._tasks.put(task)


class Failure:
    """The first error of several threads, and the wait for all of them."""

    def __init__(self) -> None:
        self.change = Condition()
        self.error: BaseException | None = None

    def set(self, error: BaseException) -> None:
        with self.change.lock:
            self.error = self.error or error

    def wait(self, ended: Callable[[], bool]) -> None:
        """Wait for a ``change`` after which all have ``ended``, then raise what the first one raised.

        An interrupt counts as an error and does not end the wait: what the threads use is the caller's.
        """
        while True:
            try:
                with self.change.lock:
                    self.change.wait_for(ended)
                break
            except BaseException as error:
                self.set(error)
        if self.error is not None:
            raise self.error


class _Job:
    def __init__(self, items: int, work: Callable[[int, _native.Buffer], None]) -> None:
        self._items, self._work = items, work
        self._next = self._ended = 0
        self._failure = Failure()

    def run(self, scratch: _native.Buffer) -> None:
        failure = self._failure
        try:
            while True:
                with failure.change.lock:
                    index = self._next
                    if index >= self._items or failure.error is not None:
                        return
                    self._next = index + 1
                self._work(index, scratch)
        except BaseException as error:
            failure.set(error)
        finally:
            with failure.change.lock:
                self._ended += 1
                failure.change.notify()

    def wait(self, threads: int) -> None:
        self._failure.wait(lambda: self._ended == threads)


_workers: Workers | None = None
_lock = threading.Lock()


def workers() -> Workers:
    """The process's own."""
    global _workers
    with _lock:
        if _workers is None or _workers._pid != os.getpid():
            _workers = Workers(IO_THREADS, WRITES, CHUNKS_AHEAD)
        return _workers
