"""A few threads that live as long as the process and work on one thing together.

They are daemons, so that they still work while the interpreter shuts down and a last drain finishes; a forked child makes
its own.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from functools import partial

from tierckpt import _native
from tierckpt.config import CHUNKS_AHEAD, IO_THREADS, WRITES
from tierckpt.format.digest import CHUNK
from tierckpt.threads import Signal


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
        self._tasks: queue.SimpleQueue[Callable[[_native.Buffer], object]] = queue.SimpleQueue()
        self._writes: queue.SimpleQueue[Callable[[], object]] = queue.SimpleQueue()
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
            What ``work`` raised first, or an interrupt; later items are then not begun.
        """
        self.do(Job(items, work))

    def do(self, job: Job) -> None:
        """As :meth:`each`, for a job whose items may be handed on."""

        def begin() -> None:
            for _ in range(min(self.count, job.items)):
                self._tasks.put(job.all)

        job.run(begin)

    def write(self, task: Callable[[], object]) -> None:
        """Have ``task`` done by a thread that waits for the disk, in order of beginning. It must not raise."""
        self._writes.put(task)

    def work(self, task: Callable[[_native.Buffer], object]) -> None:
        """Have ``task`` done by a thread that works, in order of beginning. It must not raise."""
        self._tasks.put(task)


class Job:
    """Items that several threads take, and the wait until nobody has one any more, whatever interrupts whoever waits.

    A thread that takes an item says so itself, under the lock under which the job is seen to be over. So nobody need know what
    of it was put into queues, which an interrupt may leave open: what comes to it later finds nothing to take.

    Args:
        work: called with the number of an item and memory of one chunk.
    """

    def __init__(self, items: int, work: Callable[[int, _native.Buffer], None]) -> None:
        self.items, self._work = items, work
        self._next = self._held = 0
        self._lock = threading.Lock()
        self._over = Signal()
        #: What was raised first; no item is taken any more.
        self.error: BaseException | None = None

    def run(self, begin: Callable[[], None]) -> None:
        """Wait until all items were taken, or one has failed, and nobody has one. ``begin`` has threads take them.

        An interrupt counts as a failure and does not end the wait: what the threads use is the caller's.

        Raises:
            What was raised first.
        """
        begun = False
        # One frame does both, and all of it in one block: there is no instruction between them at which it could be left. After
        # an interrupt there is one, where the loop goes back: a second block is around it.
        while True:
            try:
                while True:
                    try:
                        if not begun:
                            begun = True
                            begin()
                        with self._lock:
                            over = self._is_over()
                        if not over:
                            self._over.wait()
                        break
                    except BaseException as error:
                        # Without the lock, and no call: a second interrupt finds next to no room.
                        self.error = self.error or error
                break
            except BaseException as error:
                self.error = self.error or error
        # What still lies in a queue keeps nothing of the caller's alive.
        del self._work
        if self.error is not None:
            raise self.error

    def one(self, memory: _native.Buffer) -> bool:
        """Take the next item and work on it; False if there is none to be taken."""
        with self._lock:
            index = self._next
            if index == self.items or self.error is not None:
                return False
            self._next, self._held = index + 1, self._held + 1
        self._end(partial(self._work, index, memory))
        return True

    def all(self, memory: _native.Buffer) -> None:
        """Take items and work on them until there are no more."""
        while self.one(memory):
            pass

    def part(self, work: Callable[[], None]) -> Callable[[], None]:
        """A task that another thread must do, for whoever has an item: only after it, too, is the item done with."""
        with self._lock:
            self._held += 1
        return partial(self._end, work)

    @property
    def is_over(self) -> bool:
        """Whether nobody has an item any more, nor will."""
        with self._lock:
            return self._is_over()

    def fail(self, error: BaseException) -> None:
        with self._lock:
            self.error = self.error or error

    def _end(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            self.fail(error)
        with self._lock:
            self._held -= 1
            over = self._is_over()
        if over:
            self._over.set()

    def _is_over(self) -> bool:
        return self._held == 0 and (self._next == self.items or self.error is not None)


_workers: Workers | None = None
_lock = threading.Lock()


def workers() -> Workers:
    """The process's own."""
    global _workers
    with _lock:
        if _workers is None or _workers._pid != os.getpid():
            _workers = Workers(IO_THREADS, WRITES, CHUNKS_AHEAD)
        return _workers
