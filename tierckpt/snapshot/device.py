"""Copies out of GPUs, on streams of their own: what one save has under way there, and its order to training.

Work is only enqueued here. What training enqueues after `Jobs.hold` on the stream that it uses then comes after the copies,
without anybody waiting; `Jobs.wait` waits.
"""

from __future__ import annotations

import logging
from array import array
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from tierckpt import _native
from tierckpt.errors import DeviceError
from tierckpt.state.devices import gpus

_log = logging.getLogger("tierckpt")


class Jobs:
    """What one save copies from each device. Made by the thread that saves; then any thread may call it.

    Args:
        places: the numbers of the devices. All that is enqueued comes after what this thread's streams there have to do now.

    Raises:
        DeviceError: a device refused; so do all methods.
    """

    def __init__(self, places: Iterable[int] = ()) -> None:
        self._jobs: dict[int, _native.DeviceJob] = {}
        with _refusals():
            for index in sorted(places):
                device = gpus.device(index)
                if device is None:
                    raise DeviceError(f"device {index} cannot be used any more; the next save does without")
                self._jobs[index] = device.job(gpus.stream(index))

    def __bool__(self) -> bool:
        return bool(self._jobs)

    def __iter__(self) -> Iterator[int]:
        return iter(self._jobs)

    def gather(self, place: int, table: _native.CopyTable, pointers: array[int], into: _native.Buffer) -> None:
        """Enqueue the copy of all rows of a table into pinned memory."""
        with _refusals():
            self._jobs[place].gather(table, pointers, into)

    def fingerprint(self, place: int, table: _native.CopyTable, pointers: array[int]) -> Callable[[], bytes]:
        """Enqueue fingerprints of all rows; what is returned gives them after `wait`."""
        with _refusals():
            return partial(self._jobs[place].sums, self._jobs[place].fingerprint(table, pointers))

    def mark(self, place: int) -> None:
        """What was enqueued there so far is what `hold` and `wait` are about."""
        with _refusals():
            self._jobs[place].mark()

    def hold(self, places: Iterable[int] | None = None) -> None:
        """What this thread enqueues from now on, on all devices or at ``places``, comes after that."""
        with _refusals():
            for index in self._jobs if places is None else places:
                self._jobs[index].hold(gpus.stream(index))

    def wait(self) -> None:
        """Until that is done."""
        with _refusals():
            for job in self._jobs.values():
                job.wait()

    def settle(self) -> None:
        """After something went wrong: return when nothing is written any more. Never raises a `DeviceError`."""
        for place, job in self._jobs.items():
            try:
                job.settle()
            except _native.CudaError as error:
                _log.debug("nothing runs on device %d any more: %s", place, error)


def pin(buffer: _native.Buffer) -> None:
    """Have the devices in use write to ``buffer``.

    Raises:
        DeviceError: that is refused; from now on torch copies.
    """
    try:
        gpus.pin(buffer)
    except _native.CudaError as error:
        gpus.give_up()
        raise DeviceError(
            f"{buffer.nbytes:,} bytes cannot be pinned: {error}; from the next save on torch copies what is on GPUs, which "
            "training waits for"
        ) from error


def pin_ahead(buffer: _native.Buffer) -> None:
    """The same before it is needed: who needs it will ask again, and be told."""
    try:
        gpus.pin(buffer)
    except _native.CudaError as error:
        _log.debug("not pinned ahead: %s", error)


@contextmanager
def _refusals() -> Iterator[None]:
    try:
        yield
    except _native.CudaError as error:
        raise DeviceError(f"a copy from a GPU failed: {error}") from error
