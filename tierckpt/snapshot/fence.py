"""Copies that go on while training does, and the fence at which whoever changes the state waits for them.

Only an optimizer's step changes its parameters and its state, so these may be copied after ``save()`` has returned, until
that step begins: a global hook of torch, which runs before every step of every optimizer, waits for what is still being
copied and lends a hand. At the end of a copy everything that tells of a change is compared with what it was at its begin: a
snapshot that may be torn is discarded.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tierckpt import _native
from tierckpt.config import COPY_BLOCK
from tierckpt.errors import TornSnapshotError
from tierckpt.state.naming import readable
from tierckpt.telling import warn


class Watch:
    """What tells that tensors were changed: version counters, addresses, and the step counts of optimizers.

    Fused optimizers and writes through ``.data`` bump no version; step counts find the former.

    Args:
        changed: the names of tensors of which version or address are not as they were.
        steps: some step counts, of one element each, in CPU memory.
    """

    def __init__(self, changed: Callable[[], list[str]], steps: Sequence[torch.Tensor]) -> None:
        self._changed, self._steps = changed, steps
        self._before = [step.item() for step in steps]

    def changes(self) -> list[str]:
        """What may have changed since this was made."""
        found = [readable(name) for name in self._changed()]
        if not found and [step.item() for step in self._steps] != self._before:
            return ["the state of an optimizer"]
        return found


class Versions:
    """The version counters and addresses of local tensors, by name."""

    def __init__(self, tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
        self._tensors = tensors
        self._before = self._look()

    def _look(self) -> list[tuple[int, int]]:
        # Tensors made in inference mode count no versions.
        return [(0 if t.is_inference() else t._version, t.data_ptr()) for _, t in self._tensors]

    def changed(self) -> list[str]:
        """Names of those that are not as they were."""
        rows = zip(self._tensors, self._before, self._look(), strict=True)
        return [name for (name, _), before, now in rows if before != now]


class Copy:
    """A part of a shard on its way from live memory into a slot.

    Args:
        table, pointers: what to copy; the rest of the slot is left alone.
        into: the slot's bytes.
        watch: looked at when everything was copied.
        also: what else has to be done before the state changes.
        keep: must live until then.
        done: called once at the end, from any thread.
    """

    def __init__(
        self,
        table: _native.CopyTable,
        pointers: Any,
        into: memoryview,
        watch: Watch,
        also: Sequence[Callable[[], None]],
        keep: Sequence[object],
        done: Callable[[], None],
    ) -> None:
        self._table, self._pointers, self._into, self._watch, self._keep = table, pointers, into, watch, keep
        self._done = done
        lo, hi = table.span
        tasks: list[Callable[[], None]] = list(also)
        tasks += [partial(self._copy, at, min(at + COPY_BLOCK, hi)) for at in range(lo, hi, COPY_BLOCK)]
        self._tasks = iter(tasks)
        self._lock = threading.Lock()
        self._left = len(tasks)
        self._ended = threading.Event()
        self._pid = os.getpid()
        self._error: Exception | None = None
        # When training came to the fence.
        self._met: float | None = None
        #: Seconds for which training stood there because of it; known once it has ended.
        self.waited = 0.0

    def start(self) -> None:
        """Let a thread of the process begin with it."""
        with _lock:
            _active.append(self)
        if self._left == 0:
            self._finish()
        else:
            _copiers().put(self)

    def _copy(self, lo: int, hi: int) -> None:
        self._table.gather(self._pointers, lo, hi, self._into[lo:hi])

    def work(self) -> None:
        """Do tasks until none is left to begin with."""
        while True:
            with self._lock:
                task = next(self._tasks, None)
            if task is None:
                return
            try:
                task()
            except Exception as error:
                self._error = error
            with self._lock:
                self._left -= 1
                last = self._left == 0
            if last:
                self._finish()

    def _finish(self) -> None:
        try:
            changed = self._watch.changes()
            if changed and self._error is None:
                more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
                self._error = TornSnapshotError(
                    f"{', '.join(changed[:3])}{more}: changed while being copied, other than by an optimizer's step(); call "
                    "Checkpointer.fence() before changing the state, or use tierckpt.async_save"
                )
        except Exception as error:
            self._error = error
        finally:
            self._keep = ()
            with _lock:
                if self in _active:
                    _active.remove(self)
            # Before anybody learns of the end: the drain passes it on at once.
            if self._met is not None:
                self.waited = time.perf_counter() - self._met
            self._ended.set()
            self._done()

    def wait(self) -> None:
        """Until everything was copied. Whoever waits here does not help: that would take one more core from training.

        Raises:
            TornSnapshotError: the state changed meanwhile.
        """
        self._ended.wait()
        if self._error is not None:
            raise self._error

    def help(self) -> None:
        """The fence: until everything was copied, with this thread's help, since training stands still meanwhile."""
        if self._ended.is_set() or self._pid != os.getpid():
            return  # a forked child has a copy of everything as it is
        if self._met is None:
            self._met = time.perf_counter()
        self.work()
        self._ended.wait()


_lock = threading.Lock()
_active: list[Copy] = []
_queue: tuple[int, queue.SimpleQueue[Copy]] | None = None
_hooked = False


def wait() -> float:
    """Until nothing of this process's state is being copied any more; the seconds it took. Never raises."""
    if not _active:
        return 0.0
    began = time.perf_counter()
    with _lock:
        copies = list(_active)
    for copy in copies:
        copy.help()
    return time.perf_counter() - began


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """The hook. Whatever goes wrong in here must not stop a training step."""
    if _active:
        try:
            wait()
        except Exception as error:
            warn(f"the fence before an optimizer's step failed: {error!r}")


def install() -> None:
    """Have every optimizer of this process wait at the fence, from now on."""
    global _hooked
    with _lock:
        if not _hooked:
            register_optimizer_step_pre_hook(_before_step)
            _hooked = True


def _copiers() -> queue.SimpleQueue[Copy]:
    """The queue of the process's own copying thread."""
    global _queue
    with _lock:
        if _queue is None or _queue[0] != os.getpid():
            tasks: queue.SimpleQueue[Copy] = queue.SimpleQueue()
            _queue = os.getpid(), tasks
            threading.Thread(target=_work, args=(tasks,), name="tierckpt-copy", daemon=True).start()
        return _queue[1]


def _work(tasks: queue.SimpleQueue[Copy]) -> None:
    while True:
        tasks.get().work()
