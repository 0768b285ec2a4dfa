"""A thread is waited for until it has ended, whatever interrupts whoever waits."""

from __future__ import annotations

import signal
import threading

import pytest

from tierckpt.threads import Worker


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
