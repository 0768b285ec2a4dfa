"""The agent's memory: one memfd per slot, made present here, so that it is charged to the agent, and mapped by one trainer."""

from __future__ import annotations

import fcntl
import os
import threading
from dataclasses import dataclass, field

from tierckpt import _native, machine
from tierckpt.config import MEMORY_MARGIN
from tierckpt.errors import ArenaFullError

_PAGE = 4096
_HUGE = 2 << 20
_ADD_SEALS = 1033  # F_ADD_SEALS; the fcntl module has it since Python 3.8, but not on every libc
_SEALS = 0x1 | 0x2 | 0x4  # F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW


@dataclass
class Slot:
    """Memory of one rank of one generation.

    Attributes:
        number: unique within the agent.
        capacity: bytes.
        descriptor: of the memfd.
        busy: filling, or holding a shard.
        sealed: holding a shard.
        ticket: of the request that it was given to.
    """

    number: int
    capacity: int
    descriptor: int
    memory: memoryview = field(repr=False)
    busy: bool = True
    sealed: bool = False
    ticket: int = 0

    @property
    def state(self) -> str:
        """What it is doing: ``"free"``, ``"filling"``, ``"sealed"``."""
        return "sealed" if self.sealed else "filling" if self.busy else "free"


class Memory:
    """Makes slots within a budget of bytes; all generations share it."""

    def __init__(self) -> None:
        self.budget, self.held = 0, 0
        self._making = 0
        self._numbers = 0
        self._lock = threading.Lock()

    def fits(self, size: int) -> bool:
        """Whether there is room for a slot of ``size`` bytes now."""
        return not self.lacks(size)

    def lacks(self, size: int) -> str:
        """Why there is no room for a slot of ``size`` bytes now; empty if there is.

        Nobody may be killed for it: where the machine or a control group is short of memory, whoever takes the last of it may not
        be the one that ends.
        """
        wanted = capacity(size)
        if self.held + wanted > self.budget:
            return f"the budget of the agent is {self.budget:,} (Ram(budget=…))"
        if not machine.has_room(wanted, MEMORY_MARGIN, self._making):
            free = max(0, machine.available() - self._making)
            return f"{free:,} are free in the memory that this machine, or the job's control group, allows"
        return ""

    def make(self, size: int) -> Slot:
        """A new slot of at least ``size`` bytes, all present.

        Raises:
            ArenaFullError: the budget or the machine does not have them.
        """
        wanted = capacity(size)
        with self._lock:
            lacks = self.lacks(size)
            if lacks:
                raise ArenaFullError(f"a slot of {wanted:,} bytes is needed, {self.held:,} are held and {lacks}")
            self.held += wanted
            self._making += wanted
            self._numbers += 1
            number = self._numbers
        try:
            return _make(number, wanted)
        except (OSError, MemoryError) as error:
            with self._lock:
                self.held -= wanted
            raise ArenaFullError(
                f"{wanted:,} bytes for a slot are not to be had beside {self.held:,} that are held: {error}"
            ) from error
        finally:
            with self._lock:
                self._making -= wanted

    def close(self, slot: Slot) -> None:
        """Give a slot back to the system; a trainer that still has it mapped keeps its own view."""
        os.close(slot.descriptor)
        slot.memory = memoryview(b"")
        with self._lock:
            self.held -= slot.capacity


def capacity(size: int) -> int:
    """Bytes of a slot for ``size`` bytes: whole pages, large ones whole huge pages."""
    unit = _HUGE if size >= _HUGE else _PAGE
    return max(unit, -(-size // unit) * unit)


def _make(number: int, size: int) -> Slot:
    descriptor = os.memfd_create(f"tierckpt-slot-{number}", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, size)
        fcntl.fcntl(descriptor, _ADD_SEALS, _SEALS)
        mapped = _native.Buffer.of(descriptor, size, fresh=True)
    except BaseException:
        os.close(descriptor)
        raise
    return Slot(number, size, descriptor, memoryview(mapped))
