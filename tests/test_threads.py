"""A thread is waited for until it has ended, whatever interrupts whoever waits."""

from __future__ import annotations

import signal
import threading

import pytest

from tests.interrupts import interrupted
from tierckpt import Handle, threads
from tierckpt.agent import handle as handles
from tierckpt.threads import Serial, Signal, Worker

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
    for number in range(1, 200):
        signal_, handle = Signal(), Handle(1, ("disk",), ("disk",))
        worker = Worker(lambda: None, "worker")
        waits = {"signal": signal_.wait, "handle": handle.wait, "worker": worker.finish}[wait]

        def tell(signal_: Signal = signal_, handle: Handle = handle) -> None:
            signal_.set()
            handle._finish(None)

        teller = threading.Timer(0.01, tell)
        teller.start()
        if wait == "worker":
            worker.start()
        where = interrupted(number, FILES, waits, anywhere=True)
        teller.join(20)
        assert not teller.is_alive(), number
        waits()
        if not where:
            break
    assert number > 11


def test_interrupts_of_who_puts_never_make_two_take() -> None:
    """At every instruction of the first ``put``, with which the thread starts: what was put is taken in order, by one thread.

    Not in the interpreter's own start of a thread, whose locks are taken in one instruction.
    """
    for number in range(1, 2000):
        taken: list[int] = []
        by: set[int] = set()

        def take(item: int, taken: list[int] = taken, by: set[int] = by) -> None:
            by.add(threading.get_ident())
            taken.append(item)

        serial: Serial[int] = Serial(take, "serial")
        where = interrupted(number, {threads.__file__}, lambda serial=serial: serial.put(1), anywhere=True)
        serial.put(2)
        serial.put(3)
        serial.close()
        assert taken in ([1, 2, 3], [2, 3]) and len(by) == 1, number
        assert not serial.is_alive
        serial.close()
        if not where:
            break
    assert number > 11 and not where


def test_an_interrupt_when_the_thread_has_just_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """It comes while whoever starts the thread waits to hear that it runs."""
    inside, go_on = threading.Event(), threading.Event()
    taken: list[int] = []
    by: set[int] = set()

    def take(item: int) -> None:
        by.add(threading.get_ident())
        inside.set()
        go_on.wait(20)
        taken.append(item)

    serial: Serial[int] = Serial(take, "serial")
    start = Worker.start

    def interrupted(worker: Worker) -> None:
        start(worker)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            serial.put(1)
    serial.put(2)
    assert inside.wait(20)
    go_on.set()
    serial.close()
    assert taken == [1, 2] and len(by) == 1


def test_what_is_taken_where_a_thread_was_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    serial: Serial[int] = Serial(taken.append, "serial")

    def refuses(_: Worker) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patch:
        patch.setattr(Worker, "start", refuses)
        with pytest.raises(RuntimeError):
            serial.put(1)
    serial.put(2)
    serial.close()
    assert taken == [1, 2]
