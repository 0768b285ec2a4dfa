"""Copies that go on while training does, and the fence at which whoever changes the state waits for them.

Only an optimizer's step changes its parameters and its state, so these may be copied after ``save()`` has returned, until
that step begins: a global hook of torch, which runs before every step of every optimizer, waits for what is still being
copied and lends a hand. After a copy everything that tells of a change is compared with what it was at its begin: a
snapshot that may be torn is discarded.
"""

from __future__ import annotations

import itertools
import os
import queue
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tierckpt import _native
from tierckpt.config import ASLEEP_SECONDS, COMPARE_EVERY, COMPARE_LINES, CONFIRM_SECONDS, COPY_BLOCK, KERNEL_SECONDS
from tierckpt.errors import TornSnapshotError
from tierckpt.snapshot.device import Jobs
from tierckpt.state import stepping
from tierckpt.state.naming import readable
from tierckpt.telling import warn
from tierckpt.threads import Signal


class Watch:
    """What tells that tensors were changed: version counters, addresses, and the step counts of optimizers.

    Fused optimizers and writes through ``.data`` bump no version; step counts find the former, :class:`Late` the latter.

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


class Late:
    """What is copied late at the host: from where, and where to.

    Args:
        table, pointers: where it lies in the shard and in memory.
        into: the slot's bytes.
        names: of the tensors, in the table's order; asked for when one has changed.
    """

    _phases = itertools.count(1)

    def __init__(
        self, table: _native.CopyTable, pointers: array[int], into: memoryview, names: Callable[[], Sequence[str]]
    ) -> None:
        self._table, self._pointers, self._into, self._names = table, pointers, into, names
        self._before = _native.Samples(table, pointers, COMPARE_LINES, next(self._phases))

    def tasks(self) -> list[Callable[[], object]]:
        """The copy, in blocks."""
        lo, hi = self._table.span
        return [partial(self._copy, at, min(at + COPY_BLOCK, hi)) for at in range(lo, hi, COPY_BLOCK)]

    def _copy(self, lo: int, hi: int) -> None:
        self._table.gather(self._pointers, lo, hi, self._into[lo:hi])

    def changes(self) -> list[str]:
        """What was copied otherwise than it was when this was made, or than it is now, as far as samples tell: somebody wrote
        through ``.data`` or numpy meanwhile."""
        found = self._before.differing(self._into)
        found = found or self._table.differing(self._pointers, self._into, COMPARE_EVERY, next(self._phases))
        if not found:
            return []
        names = self._names()
        return [readable(name) for name in dict.fromkeys(names[row] for row in found)]


#: Seconds between two looks for what an interrupt may have kept somebody from saying.
_LOOK_SECONDS = 0.5


class Copy:
    """What is still to be copied of a shard from live memory into a slot after ``save()`` has returned.

    It has *ended* when nothing at the host is left to be copied, and all that GPUs are to do was enqueued; it is *judged* when it
    was found out whether anything changed meanwhile, and *confirmed* when that is known and all bytes are there. Torch counts a
    version after the kernel that writes has ended, or was launched, so the counters are looked at only once the thread that saved
    cannot be inside of such a call any more: when it comes here, has gone on to another instruction of its program, or
    waits for something (`_GoneOn`).

    Args:
        late: what is copied at the host, None if nothing; the rest of the slot is left alone.
        watch: tells what changed.
        tasks: what else has to be done before the state changes.
        keep: must live until then.
        done: called when it is confirmed, or found to be torn, from any thread; twice after an interrupt.
        jobs: what GPUs copy.
    """

    def __init__(
        self,
        late: Late | None,
        watch: Watch,
        tasks: Sequence[Callable[[], object]],
        keep: Sequence[object],
        done: Callable[[], None],
        jobs: Jobs,
    ) -> None:
        self._late, self._watch, self._keep, self._done, self._jobs = late, watch, keep, done, jobs
        blocks = [] if late is None else late.tasks()
        self._tasks: deque[Callable[[], object]] = deque([*tasks, *blocks])
        # Those that are not done.
        self._left = set(self._tasks)
        self._judging, self._concluding, self._concluded = threading.RLock(), threading.RLock(), False
        self._ended, self._judged, self._confirmed = Signal(), Signal(), Signal()
        self._saver, self._saver_native = threading.get_ident(), threading.get_native_id()
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
        self._look_for_end()
        copiers.put(self)

    def work(self) -> None:
        """Do tasks until none is left to begin with. An interrupt of this thread loses none."""
        try:
            # A loop over an iterator of C: no interrupt comes between the taking of a task and its name.
            for task in iter(self._tasks.popleft, None):
                try:
                    try:
                        task()
                    except Exception as error:
                        self._error = error
                    self._left.discard(task)
                finally:
                    if task in self._left:
                        # An interrupt of this thread, which only lent a hand: another one does it.
                        self._tasks.append(task)
                        _copiers().put(self)
        except IndexError:
            self._look_for_end()

    def _look_for_end(self) -> None:
        if not self._left:
            self._ended.set()

    def _judge(self) -> None:
        """Find out whether it is torn, once. If that is interrupted the next one does it."""
        with self._judging:
            if self._judged.is_set():
                return
            try:
                changed = self._watch.changes()
                if not changed and self._late is not None and self._error is None:
                    changed = self._late.changes()
                if changed and self._error is None:
                    more = f" and {len(changed) - 3} more" if len(changed) > 3 else ""
                    self._error = TornSnapshotError(
                        f"{', '.join(changed[:3])}{more}: changed while being copied, other than by an optimizer's step(), "
                        "through .data perhaps; call Checkpointer.fence() before changing the state, or use tierckpt.async_save"
                    )
            except Exception as error:
                self._error = error
            self._judged.set()

    def _conclude(self) -> None:
        """All bytes are there, and it is known whether they are good; once. If that is interrupted the next one does it."""
        with self._concluding:
            if self._concluded:
                return
            self._keep, self._late = (), None
            with _lock:
                if self in _active:
                    _active.remove(self)
            self._confirmed.set()
            self._done()
            self._concluded = True

    def confirm(self) -> None:
        """Wait until it has ended and the thread that saved has gone on, then look whether it is torn."""
        while not self._ended.wait(_LOOK_SECONDS):
            self._look_for_end()  # whoever did the last task may have been interrupted before it said so
        self._finish_jobs()
        if not self._judged.is_set():
            gone_on = _GoneOn(self._saver, self._saver_native)
            while not self._judged.is_set() and not gone_on:
                # Nothing tells when a thread goes on.
                self._judged.wait(CONFIRM_SECONDS)
            self._judge()
        self._conclude()

    def wait(self) -> None:
        """For threads that change nothing: until it is confirmed. They lend no hand, which would take a core from training.

        Raises:
            TornSnapshotError: the state changed meanwhile.
            DeviceError: a GPU refused.
        """
        self._confirmed.wait()
        if self._error is not None:
            raise self._error

    def help(self) -> None:
        """For threads that are about to change the state, or to wait for it: until it has ended, with a hand, and is judged.
        What they have GPUs do from now on comes after the copies. Never raises."""
        if self._confirmed.is_set() or self._pid != os.getpid():
            return  # a forked child has a copy of everything as it is
        if self._met is None:
            self._met = time.perf_counter()
        self.work()
        while not self._ended.wait(_LOOK_SECONDS):
            self._look_for_end()
        try:
            self._jobs.hold()
        except Exception as error:
            self._error = self._error or error
        self._judge()
        # Before anybody learns of the end: the drain passes it on at once.
        self.waited = time.perf_counter() - self._met
        if not self._jobs:
            self._conclude()

    def end(self) -> None:
        """Return when nothing is written to the slot any more. Never raises."""
        self.help()
        if self._pid != os.getpid():
            return
        self._finish_jobs()
        self._conclude()

    def _finish_jobs(self) -> None:
        """Until GPUs write nothing any more."""
        try:
            self._jobs.wait()
        except Exception as error:
            self._error = self._error or error
        if self._error is not None:
            self._jobs.settle()  # what was enqueued before a call failed may be under way


class _GoneOn:
    """Whether a thread has gone on to another instruction of its program since this was made, or writes to nothing.

    One that waits for others (a barrier, a lock, `Handle.wait`) may wait for what we have yet to say: it sleeps and takes no time
    of a core, which no kernel does for as long as `ASLEEP_SECONDS`, and none lasts for `KERNEL_SECONDS`.
    """

    def __init__(self, thread: int, native: int) -> None:
        self._thread, self._where = thread, _whereabouts(thread)
        self._told: list[bool] = []
        self._stat = f"/proc/self/task/{native}/stat"
        self._began = self._since = time.monotonic()
        self._used = ""
        if thread == threading.main_thread().ident:
            # A loop over one call stands at the same instruction whenever one looks.
            _native.call_soon(partial(self._told.append, True))

    def __bool__(self) -> bool:
        if self._told or self._where is None or _whereabouts(self._thread) != self._where:
            return True
        now = time.monotonic()
        return now - self._began >= KERNEL_SECONDS or self._asleep(now)

    def _asleep(self, now: float) -> bool:
        try:
            with open(self._stat) as file:
                fields = file.read().rpartition(")")[2].split()
        except OSError:
            return True  # it has ended
        used = f"{fields[11]} {fields[12]}"  # of a core, by itself and for it
        if fields[0] != "S" or used != self._used:
            self._used, self._since = used, now
        return now - self._since >= ASLEEP_SECONDS


def _whereabouts(thread: int) -> tuple[object, int] | None:
    """The instruction that a thread is at; None if it has ended."""
    frame = sys._current_frames().get(thread)
    return None if frame is None else (frame, frame.f_lasti)


_lock = threading.Lock()
_active: list[Copy] = []
_queue: queue.SimpleQueue[Copy] | None = None
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
        if _queue is None:
            tasks: queue.SimpleQueue[Copy] = queue.SimpleQueue()
            threading.Thread(target=_work, args=(tasks,), name="tierckpt-copy", daemon=True).start()
            _queue = tasks
        return _queue


def _forked() -> None:
    """A child has none of the copies, nor of the threads, and may have been forked while somebody held the lock."""
    global _lock, _queue
    _lock, _queue = threading.Lock(), None
    _active.clear()


os.register_at_fork(after_in_child=_forked)


def _work(tasks: queue.SimpleQueue[Copy]) -> None:
    while True:
        copy = tasks.get()
        copy.work()
        copy.confirm()
        del copy
