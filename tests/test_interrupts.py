"""Protects the simulation of interrupts: it raises where a signal does, and nowhere else."""

from __future__ import annotations

import ctypes
import threading

import pytest

from tests.interrupts import Interrupted, interrupted

LOCK = threading.Lock()
LEFT: list[int] = []
#: Nothing in it looks for signals: they are let in when the call returns.
SIGNALS_ITSELF = ctypes.CDLL(None)["raise"]


def _returns_out_of_a_block(number: int) -> int:
    try:
        with LOCK:
            return SIGNALS_ITSELF(number)
    finally:
        LEFT.append(number)


def _loops(number: int) -> None:
    for _ in range(3):
        with LOCK:
            len("x")


def test_a_signal_leaves_no_block_open() -> None:
    """Though tracing shows an instruction between the call and the end of the block."""
    LEFT.clear()
    with pytest.raises(KeyboardInterrupt):
        _returns_out_of_a_block(2)
    assert not LOCK.locked() and LEFT == [2]


@pytest.mark.parametrize("work", [_returns_out_of_a_block, _loops])
def test_nor_does_the_simulation(work: object) -> None:
    moments = []
    while where := interrupted(len(moments) + 1, [__file__], lambda: work(0), kind=Interrupted):  # type: ignore[operator]
        moments.append(where)
        assert not LOCK.locked(), where
    assert len(moments) > (5 if work is _loops else 2), moments
    assert all(where.startswith("test_interrupts.py:") for where in moments)
