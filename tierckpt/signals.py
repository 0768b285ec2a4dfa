"""Signals that ask this process to end: whoever wants to know is told, and whoever had a handler keeps it.

They are told by a thread of their own, as soon as the signal has come: a training loop that stands in a collective or in a
compiler runs no handler of Python for a long time.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from types import FrameType
from typing import Any

from tierckpt.errors import StateError

#: Told the number of a signal, from a thread. Must not raise.
Hear = Callable[[int], None]


@dataclass
class _Taken:
    """A signal that is ours: what was there before, who is told, how often it came."""

    before: Any
    hears: tuple[Hear, ...] = ()
    count: int = 0


_lock = threading.RLock()
_taken: dict[int, _Taken] = {}
#: Its numbers go in at one end, from whatever the main thread is doing; a thread reads the other.
_pipe: tuple[int, int] | None = None
_pid = os.getpid()


def numbers(given: bool | int | str | Iterable[int | str]) -> tuple[int, ...]:
    """The signals that ``save_on_signal=`` stands for: True is SIGTERM, else numbers or names.

    Raises:
        StateError: there is no such signal, or nobody can take it.
    """
    if isinstance(given, bool):
        return (signal.SIGTERM,) if given else ()
    if given == 1 and given is not signal.SIGHUP:  # it may be meant as True
        raise StateError("save_on_signal=1: it takes True for SIGTERM, or the name of a signal; signal 1 is 'SIGHUP'")
    many = [given] if isinstance(given, (int, str)) else list(given)
    found = [_number(one) for one in many]
    return tuple(sorted(set(found)))


def _number(given: int | str) -> int:
    number: Any = getattr(signal, given, None) if isinstance(given, str) else given
    if number not in signal.valid_signals() or isinstance(number, bool):
        raise StateError(f"save_on_signal: there is no signal {given!r}; it takes True, or signals such as 'SIGTERM'")
    if number in (signal.SIGKILL, signal.SIGSTOP):
        raise StateError(f"save_on_signal: no process can take {signal.Signals(number).name}")
    return int(number)


def listen(given: Iterable[int], hear: Hear) -> str:
    """Have ``hear`` told of these signals from now on; why that cannot be, empty if it can."""
    global _pipe
    if threading.current_thread() is not threading.main_thread():
        return "only the main thread of a process can take signals, and this is another one"
    with _lock:
        given = list(given)
        foreign = [number for number in given if signal.getsignal(number) is None]
        if foreign:
            return f"{_name(foreign[0])} has a handler that was not set from Python"
        if _pipe is None:
            _pipe = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
            os.set_blocking(_pipe[0], True)
            threading.Thread(target=_tell, args=(_pipe[0],), name="tierckpt-signal", daemon=True).start()
        for number in given:
            # One that could not be given back (see leave) is still ours, with what was there before us.
            taken = _taken.get(number)
            now = signal.getsignal(number)
            if taken is None or now is not _handle:
                taken = _taken[number] = _Taken(now)
            taken.hears = (*taken.hears, hear)
            signal.signal(number, _handle)
        other = signal.set_wakeup_fd(_pipe[1], warn_on_full_buffer=False)
        if other not in (-1, _pipe[1]):
            signal.set_wakeup_fd(other)  # an event loop's: then our handler tells, as soon as it is run
    return ""


def leave(hear: Hear) -> None:
    """Tell ``hear`` no more; a signal of which nobody is told does again what it did before."""
    with _lock:
        for number, taken in list(_taken.items()):
            taken.hears = tuple(other for other in taken.hears if other is not hear and other != hear)
            if not taken.hears and signal.getsignal(number) is _handle:
                _give_back(number, taken)
        if not any(taken.hears for taken in _taken.values()) and _in_main_thread() and _pipe is not None:
            other = signal.set_wakeup_fd(-1)
            if other not in (-1, _pipe[1]):
                signal.set_wakeup_fd(other)


def repeat(number: int) -> None:
    """Have the signal do what it would have done without us, if that is to end the process."""
    taken = _taken.get(number)
    if taken is not None and not taken.hears and taken.before is signal.SIG_DFL:
        os.kill(os.getpid(), number)


def _give_back(number: int, taken: _Taken) -> None:
    if _in_main_thread():
        signal.signal(number, taken.before)
        del _taken[number]
    elif taken.before is signal.SIG_DFL:
        # Python lets only its main thread do this, which may hang in a collective for ever.
        libc = ctypes.CDLL(None)
        libc.signal.argtypes, libc.signal.restype = (ctypes.c_int, ctypes.c_void_p), ctypes.c_void_p
        libc.signal(number, None)


def _in_main_thread() -> bool:
    return threading.current_thread() is threading.main_thread()


def _handle(number: int, frame: FrameType | None) -> None:
    """The handler. It may interrupt anything, so it takes no lock."""
    taken = _taken.get(number)
    if taken is None or _pid != os.getpid():
        # It came while a child was being forked, which gives the signals back (see _forked).
        before = signal.getsignal(number) if taken is None else taken.before
        if before is signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        return
    told = bool(taken.hears)
    if told and _pipe is not None:
        taken.count += 1
        with contextlib.suppress(BlockingIOError):  # full: they have been told
            os.write(_pipe[1], bytes([number]))
    before = taken.before
    if before is signal.default_int_handler:
        # Python's own: the first Ctrl-C is what we were asked to take, the next one means now.
        if not told or taken.count > 1:
            before(number, frame)
    elif callable(before):
        before(number, frame)
    elif before is signal.SIG_DFL and not told:
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _tell(descriptor: int) -> None:
    while data := os.read(descriptor, 512):
        for number in set(data):
            taken = _taken.get(number)
            for hear in taken.hears if taken is not None else ():
                hear(number)


def _name(number: int) -> str:
    return signal.Signals(number).name


def _forked() -> None:
    """A child (of a data loader, say) hears of nothing, and dies of a signal as it would without us."""
    global _pipe, _lock, _pid
    _lock = threading.RLock()
    if _pipe is None:
        _pid = os.getpid()
        return
    ours, _pipe = _pipe, None
    other = signal.set_wakeup_fd(-1)
    if other not in (-1, ours[1]):
        signal.set_wakeup_fd(other)
    for number, taken in list(_taken.items()):
        if signal.getsignal(number) is _handle:
            signal.signal(number, taken.before)
    _taken.clear()
    _pid = os.getpid()
    for descriptor in ours:
        os.close(descriptor)


os.register_at_fork(after_in_child=_forked)
