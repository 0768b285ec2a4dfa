"""An interrupt of training at the fence, wherever Python takes one: nothing is lost that others wait for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from tests.interrupts import Interrupted, interrupted
from tierckpt.snapshot import fence
from tierckpt.snapshot.device import Jobs


def _interrupted(number: int, call: Callable[[], object]) -> bool:
    """Whether ``call`` was interrupted, at the place of that number in the fence."""
    return bool(interrupted(number, [fence.__file__], call, kind=Interrupted))


def test_an_interrupt_anywhere_at_the_fence_lets_nobody_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    number = 0
    while True:
        number += 1
        did: list[int] = []
        ended = threading.Event()
        # A thread of the process comes to it later: until then training is alone with it.
        copiers: Any = type("", (), {"put": lambda self, copy: None})()
        monkeypatch.setattr(fence, "_copiers", lambda copiers=copiers: copiers)
        tasks = [partial(did.append, k) for k in range(3)]
        watch = fence.Watch(lambda: ["changed"], ())
        copy = fence.Copy(None, watch, tasks, (), ended.set, Jobs())
        copy.start()
        more = _interrupted(number, fence.wait)
        thread = threading.Thread(target=lambda copy=copy: (copy.work(), copy.confirm()), daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive() and ended.is_set(), number
        assert set(did) == {0, 1, 2}, number
        assert copy not in fence._active
        with pytest.raises(fence.TornSnapshotError):  # an interrupted look finds nothing: it is looked again
            copy.wait()
        if not more:
            return
