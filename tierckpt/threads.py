"""Threads, and waiting for them, such that an interrupt (KeyboardInterrupt) of who waits breaks nothing for the others.

Entering a ``threading.Condition`` or waiting for a ``threading.Event`` takes their lock in a function of Python: an interrupt
that comes when the lock is held and its ``with`` block has not begun leaves it locked for ever, and whoever is to tell of
something stands there. A lock itself is taken in one instruction.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


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


class Serial(Generic[T]):
    """One thread that takes what is put, one after the other, started with the first.

    An interrupt of who puts may come when nobody knows whether the thread was started: then there may be others, which end as
    soon as they see that one is at it. What cannot be taken since the system refuses a thread is taken with what is put next.

    Args:
        take: raises nothing.
        name: of the thread.
    """

    def __init__(self, take: Callable[[T], object], name: str) -> None:
        self._take, self._name = take, name
        # Each in a list of its own, out of which it is taken once, however often that was put.
        self._queue: queue.SimpleQueue[list[T] | None] = queue.SimpleQueue()
        self._claim = threading.Lock()
        self._over = Signal()
        self._worker: Worker | None = None

    def put(self, item: T) -> None:
        """Have it taken after all before it, also where this is interrupted."""
        held = [item]
        try:
            self._queue.put(held)
            self._start()
        except BaseException:
            self._queue.put(held)  # it may be there already
            raise

    def _start(self) -> None:
        if self._worker is None:
            Worker(self._work, self._name).start()

    def _work(self) -> None:
        worker = threading.current_thread()
        if not self._claim.acquire(blocking=False) or not isinstance(worker, Worker):
            return
        self._worker = worker
        try:
            while (held := self._queue.get()) is not None:
                if held:
                    self._take(held.pop())
        finally:
            self._over.set()

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._worker is not None and self._worker.is_alive()

    def stop(self) -> None:
        """Let the thread end once all was taken; does not wait."""
        self._queue.put(None)

    def close(self) -> None:
        """Wait until all was taken and the thread has ended. Nothing is put any more."""
        if self._worker is None and self._queue.empty():
            return  # there was never anything
        self.stop()
        self._start()
        self._over.wait()
        if self._worker is not None:
            self._worker.finish()
