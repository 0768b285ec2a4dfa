"""A thread is waited for until it has ended, whatever interrupts whoever waits."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any

import pytest

from tierckpt import Handle, threads
from tierckpt.agent import handle as handles
from tierckpt.threads import Signal, Worker

#: Whose instructions are interrupted: those that the interpreter's own modules make in between, too.
FILES = {threads.__file__, handles.__file__, threading.__file__}


def test_an_interrupt_of_who_waits_does_not_pass_for_the_end() -> None:
    inside, go_on = threading.Event(), threading.Event()

    def work() -> None:
        inside.set()
        go_on.wait()

    worker = Worker(work, "worker")
    worker.start()
    inside.wait()
    before = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            worker.finish()
        waits = threading.Thread(target=worker.finish)
        waits.start()
        waits.join(0.05)
        assert waits.is_alive()
        go_on.set()
        waits.join(20)
        assert not waits.is_alive() and not worker.is_alive()
    finally:
        signal.signal(signal.SIGALRM, before)
        go_on.set()


def test_a_signal_wakes_all_who_wait_and_those_who_come_later() -> None:
    signal_ = Signal()
    assert not signal_.wait(0.0) and not signal_.wait(0.001)
    waiting = [threading.Thread(target=signal_.wait) for _ in range(5)]
    for thread in waiting:
        thread.start()
    signal_.set()
    for thread in waiting:
        thread.join(20)
        assert not thread.is_alive()
    signal_.set()
    assert signal_.is_set() and signal_.wait() and signal_.wait(0.0)


@pytest.mark.parametrize("wait", ["signal", "handle", "worker"])
def test_interrupts_of_who_waits_never_stop_who_tells(wait: str) -> None:
    """At every instruction of the wait: the other thread must get through, and so must a second wait."""
    interrupted = 0
    for number in range(1, 200):
        signal_, handle = Signal(), Handle(1, ("disk",), ("disk",))
        worker = Worker(lambda: None, "worker")
        waits = {"signal": signal_.wait, "handle": handle.wait, "worker": worker.finish}[wait]
        left = number

        def trace(frame: FrameType, event: str, _: Any) -> Any:
            nonlocal left
            frame.f_trace_opcodes = True
            if event == "opcode" and frame.f_code.co_filename in FILES:
                left -= 1
                if left == 0:
                    sys.settrace(None)
                    raise KeyboardInterrupt
            return trace

        def tell(signal_: Signal = signal_, handle: Handle = handle) -> None:
            signal_.set()
            handle._finish(None)

        teller = threading.Timer(0.01, tell)
        teller.start()
        if wait == "worker":
            worker.start()
        before = sys.gettrace()
        try:
            sys.settrace(trace)
            waits()
            sys.settrace(before)
        except KeyboardInterrupt:
            interrupted += 1
        finally:
            sys.settrace(before)
        teller.join(20)
        assert not teller.is_alive(), number
        waits()
        if left > 0:
            break
    assert interrupted > 10
