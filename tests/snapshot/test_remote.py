"""Slots of the agent: the next one is got ready ahead, but never taken from under whoever waits for one."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.agents import end_all, slot_ahead, statuses, until
from tierckpt import Checkpointer, Disk, Ram


def _slots() -> list[dict[str, Any]]:
    return [slot for one in statuses() for generation in one["generations"] for slot in generation["slots"]]


def test_nothing_is_got_ready_while_somebody_waits(tmp_path: Path) -> None:
    """Both would ask for the slot that becomes free, and who got it ahead is heard of only by who does not wait."""
    try:
        with Checkpointer(tmp_path / "s", tiers=[Ram(slots=2), Disk(every=1000)]) as ckpt:
            ckpt.save(0, {"w": torch.zeros(1000)}).wait()
            assert ckpt._ram_tier is not None
            arena = ckpt._ram_tier.arena
            held = arena.acquire(4096, 30.0)
            found = []
            waits = threading.Thread(target=lambda: found.append(arena.acquire(4096, 30.0)))
            waits.start()
            until(lambda: arena._asking)
            arena.prepare(4096)
            assert arena._ahead is None
            held.release()
            waits.join(30)
            assert len(found) == 1
            found[0].release()
    finally:
        end_all()


def test_the_next_slot_is_ready_before_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        with Checkpointer(tmp_path / "s", tiers=[Ram(), Disk(every=1000)]) as ckpt:
            for step in range(6):
                # The agent takes the digests of the step before, and frees the slot of the one before that.
                until(lambda: len(_slots()) < 3 or any(slot["state"] == "free" for slot in _slots()))
                ckpt.save(step, {"w": torch.zeros(1000)}).wait("ram")
            assert ckpt._ram_tier is not None
            arena = ckpt._ram_tier.arena
            assert slot_ahead(ckpt)
            with monkeypatch.context() as patched:
                patched.setattr(arena, "_acquire", None)  # nobody asks the agent
                assert ckpt.save(6, {"w": torch.zeros(1000)})._staged.wait(30)
            assert len(_slots()) <= 3
    finally:
        end_all()
