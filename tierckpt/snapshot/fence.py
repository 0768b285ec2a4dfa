"""Copies that go on while training does, and the fence at which whoever changes the state waits for them.

Only an optimizer's step changes its parameters and its state, so these may be copied after ``save()`` has returned, until
that step begins: a global hook of torch, which runs before every step of every optimizer, waits for what is still being
copied and lends a hand. After a copy everything that tells of a change is compared with what it was at its begin: a
snapshot that may be torn is discarded.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tierckpt import _native
from tierckpt.config import CONFIRM_SECONDS, COPY_BLOCK
from tierckpt.errors import TornSnapshotError
from tierckpt.state import stepping
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

    It has *ended* when everything was copied, and is *confirmed* when it was found that nothing changed meanwhile. Torch
    counts a version after the kernel that writes has ended, so the counters are looked at only once the thread that saved
    cannot be inside of such a kernel any more: when it comes here, or has gone on to another instruction of its program.

    Args:
        table, pointers: what to copy; the rest of the slot is left alone.
        into: the slot's bytes.
        watch: tells what changed.
        also: what else has to be done before the state changes.
        keep: must live until then.
        done: called once when it is confirmed, or found to be torn, from any thread.
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
        self._tasks = deque(tasks)
        self._left = len(tasks)
        self._lock = threading.Lock()
        self._looked = False
        self._ended, self._confirmed = threading.Event(), threading.Event()
        self._saver = threading.get_ident()
        self._where: tuple[object, int] | None = None
        self._pid = os.getpid()
        self._error: Exception | None = None
        # When training came to the fence.
        self._met: float | None = None
        #: Seconds for which training stood there because of it; known once it is confirmed.
        self.waited = 0.0

    def start(self) -> None:
        """Let a thread of the process begin with it."""
        copiers = _copiers()  # before anything else: the system may refuse the thread
        with _lock:
            _active.append(self)
        if self._left == 0:
            self._ended.set()
        copiers.put(self)

    def _copy(self, lo: int, hi: int) -> None:
        self._table.gather(self._pointers, lo, hi, self._into[lo:hi])

    def work(self) -> None:
        """Do tasks until none is left to begin with."""
        while True:
            task, over = None, False
            try:
                with self._lock:
                    task = self._tasks.popleft() if self._tasks else None
                if task is None:
                    return
                try:
                    task()
                except Exception as error:
                    self._error = error
                over = True
            finally:
                if over:
                    self._count()
                elif task is not None:
                    # An interrupt of this thread, which only lent a hand: another one does it.
                    with self._lock:
                        self._tasks.append(task)
                    _copiers().put(self)

    def _count(self) -> None:
        with self._lock:
            self._left -= 1
            last = self._left == 0
        if last:
            self._where = _whereabouts(self._saver)
            self._ended.set()

    def _look(self) -> None:
        """Find out whether it is torn, once."""
        with self._lock:
            if self._looked:
                return
            self._looked = True
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
            self._keep, self._where = (), None
            with _lock:
                if self in _active:
                    _active.remove(self)
            # Before anybody learns of the end: the drain passes it on at once.
            if self._met is not None:
                self.waited = time.perf_counter() - self._met
            self._confirmed.set()
            self._done()

    def confirm(self) -> None:
        """Wait until it has ended and the thread that saved has gone on, then look whether it is torn."""
        self._ended.wait()
        while not self._confirmed.is_set():
            where = self._where
            if where is None or _whereabouts(self._saver) != where:
                self._look()
            # Nothing tells when a thread goes on.
            self._confirmed.wait(CONFIRM_SECONDS)

    def wait(self) -> None:
        """For threads that change nothing: until it is confirmed. They lend no hand, which would take a core from training.

        Raises:
            TornSnapshotError: the state changed meanwhile.
        """
        self._confirmed.wait()
        if self._error is not None:
            raise self._error

    def help(self) -> None:
        """For threads that are about to change the state, or to wait for it: until it has ended, with a hand, and is
        confirmed. Never raises."""
        if self._confirmed.is_set() or self._pid != os.getpid():
            return  # a forked child has a copy of everything as it is
        if self._met is None:
            self._met = time.perf_counter()
        self.work()
        self._ended.wait()
        self._look()
        self._confirmed.wait()


def _whereabouts(thread: int) -> tuple[object, int] | None:
    """The instruction that a thread is at; None if it has ended."""
    frame = sys._current_frames().get(thread)
    return None if frame is None else (frame, frame.f_lasti)


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
    if torch.compiler.is_compiling():
        _before_trace()
    elif _active:
        try:
            wait()
        except Exception as error:
            warn(f"the fence before an optimizer's step failed: {error!r}")


def _before_trace() -> None:
    """A step that is traced is compiled without the hook: torch.compile calls this once, while it traces."""
    stepping.compiled()
    wait()


# As torch.compiler.assume_constant_result says it, which would import the compiler into every job.
_before_trace._dynamo_marked_constant = True  # type: ignore[attr-defined]


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
            threading.Thread(target=_work, args=(tasks,), name="tierckpt-copy", daemon=True).start()
            _queue = os.getpid(), tasks
        return _queue[1]


def _work(tasks: queue.SimpleQueue[Copy]) -> None:
    while True:
        copy = tasks.get()
        copy.work()
        copy.confirm()
        del copy
