"""Memory for staged shards: a few slots, made once and used again."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar

from tierckpt import _native, machine
from tierckpt.config import MEMORY_MARGIN
from tierckpt.errors import ArenaFullError, RanksBehindError
from tierckpt.snapshot.device import pin_ahead
from tierckpt.threads import Condition

T = TypeVar("T")

_PAGE = 4096
#: Seconds of waiting for a slot between two looks whether it makes sense.
_LOOK = 1.0


class Slot:
    """Memory that holds one staged shard until it is released."""

    _arena: Arena | None = None
    _buffer: _native.Buffer | None = None

    @property
    def buffer(self) -> _native.Buffer:
        """Where the shard lies."""
        assert self._buffer is not None
        return self._buffer

    def __del__(self) -> None:
        self.release()  # one that an interrupt took from whoever had asked for it

    def release(self) -> None:
        """Give the memory back for the next shard."""
        arena, self._arena = self._arena, None
        if arena is not None:
            arena._give_back(self._buffer)


def patiently(take: Callable[[float], T], timeout: float, behind: Callable[[], str]) -> T:
    """A slot by ``take``, which waits so many seconds for one, within ``timeout`` seconds.

    Args:
        behind: why no slot will be free before other ranks come; empty if one may be.

    Raises:
        ArenaFullError: there was none, for that reason or another.
    """
    until = time.monotonic() + timeout
    while True:
        began = time.monotonic()
        wait = 0.0 if behind() else max(0.0, min(until - began, _LOOK))
        try:
            return take(wait)
        except ArenaFullError as error:
            why = behind()
            if why:
                raise RanksBehindError(f"no slot is free: {why}") from error
            # What was refused at once will be refused again.
            if time.monotonic() - began < wait or not timeout:
                raise
            if until - began <= _LOOK:
                raise ArenaFullError(f"{error} after {timeout:g} s") from error


class OwnMemory:
    """Where a step is kept in this process: nothing of it outlives that (see :class:`tierckpt.snapshot.staging.Memory`).

    Args:
        behind: see :func:`patiently`.
    """

    seals = False

    def __init__(self, arena: Arena, timeout: float, behind: Callable[[], str]) -> None:
        self._arena, self._timeout, self._behind = arena, timeout, behind

    def acquire(self, size: int) -> Slot:
        """A slot, once one is free."""
        return patiently(lambda wait: self._arena.acquire(size, wait), self._timeout, self._behind)

    def larger(self, size: int) -> None:
        """This process keeps it."""

    def seal(self, slot: object, shard: object) -> None:
        """Nobody else knows of it."""

    def drop(self) -> None:
        """Nobody else knows of it."""

    def settled(self, durable: bool) -> None:
        """Nobody else knows of it."""


class Arena:
    """At most ``slots`` slots; a slot grows to the largest shard it has held and never shrinks.

    Args:
        slots: how many shards may be held at once; who asks for one more waits.
    """

    def __init__(self, slots: int) -> None:
        self.slots = slots
        self._free: list[_native.Buffer] = []
        self._held = 0
        self._change = Condition()
        self._closed = False

    def acquire(self, size: int, timeout: float) -> Slot:
        """A slot of at least ``size`` bytes; waits until one is free.

        Raises:
            ArenaFullError: none became free within ``timeout`` seconds, or the memory is not to be had.
        """
        capacity = -(-size // _PAGE) * _PAGE
        slot = Slot()  # before it counts: an interrupt must not take what nobody gives back
        with self._change.lock:
            if not self._change.wait_for(lambda: self._may_take(capacity), timeout):
                raise ArenaFullError(
                    f"{size:,} bytes are needed, but the slots are still being drained ({self._held} of "
                    f"{self.slots}, {machine.available():,} bytes of memory are free)"
                )
            buffer = self._fitting(capacity)
            if buffer is None and not self._has_room(capacity):
                raise ArenaFullError(
                    f"{capacity:,} bytes for a slot are needed, {machine.available():,} are free in the memory that this "
                    "machine, or the job's control group, allows"
                )
            if buffer is not None:
                self._free.remove(buffer)
            elif self._held + len(self._free) >= self.slots:
                self._free.pop(0)  # too small: make room before the larger one is mapped
            self._held += 1
            slot._arena, slot._buffer = self, buffer
        try:
            if buffer is None:
                buffer = slot._buffer = _native.Buffer(capacity, populate=True)
                pin_ahead(buffer)
            return slot
        except MemoryError as error:
            slot._buffer = None
            slot.release()
            raise ArenaFullError(f"{capacity:,} bytes for a slot are not to be had: {error}") from error

    def _may_take(self, capacity: int) -> bool:
        """Whether it makes no sense to wait for a slot that is in use."""
        return self._held < self.slots and (
            not self._held or self._fitting(capacity) is not None or self._has_room(capacity)
        )

    def _fitting(self, capacity: int) -> _native.Buffer | None:
        fitting = [buffer for buffer in self._free if buffer.nbytes >= capacity]
        return min(fitting, key=lambda b: b.nbytes, default=None)

    def _has_room(self, capacity: int) -> bool:
        """Whether another slot can be made without anybody being killed for it, where memory is short."""
        makes_room = self._free and self._held + len(self._free) >= self.slots
        freed = self._free[0].nbytes if makes_room else 0
        return machine.has_room(capacity, MEMORY_MARGIN, -freed)

    @property
    def held(self) -> int:
        """Slots in use."""
        return self._held

    def _give_back(self, buffer: _native.Buffer | None) -> None:
        with self._change.lock:
            self._held -= 1
            if buffer is not None and not self._closed:
                self._free.append(buffer)
            self._change.notify()

    def close(self) -> None:
        """Let go of the free slots; those in use follow when they are released."""
        with self._change.lock:
            self._closed = True
            self._free.clear()
