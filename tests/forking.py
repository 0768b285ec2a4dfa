"""Forks of the process that runs the tests. They end whatever happens: one that lived on would run the other tests too, or
hold the pipes by which the end of its parent is known."""

from __future__ import annotations

import ctypes
import os
import select
import signal
import traceback
from collections.abc import Callable

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None)


def forked(run: Callable[[], object], *, signals: tuple[int, ...] = (), seconds: float = 30.0) -> int:
    """How a fork that does ``run`` and is sent ``signals`` ends: 0, 1 if it raised, or the signal, negative.

    One that is not done after ``seconds`` is killed.
    """
    receives, sends = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            os.write(sends, b"x")
            run()
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    try:
        os.read(receives, 1)
        descriptor = os.pidfd_open(child)
        for number in signals:
            os.kill(child, number)
        select.select([descriptor], [], [], seconds)
        os.close(descriptor)
    finally:
        os.close(receives)
        os.close(sends)
        os.kill(child, signal.SIGKILL)
        status = os.waitpid(child, 0)[1]
    return os.waitstatus_to_exitcode(status)
