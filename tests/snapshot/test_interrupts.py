"""An interrupt may come at any moment of a save: it costs that save, and nothing that later ones need."""

from __future__ import annotations

import linecache
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import tierckpt
from tests.agent.job import state
from tests.agents import status
from tierckpt import Checkpointer, Disk, Ram, TierckptError
from tierckpt.agent import client, protocol
from tierckpt.snapshot import ram, remote, staging

FILES = {module.__file__ for module in (client, protocol, ram, remote, staging)}


class _Interrupt:
    """A KeyboardInterrupt at the ``number``-th line that this thread does of what asks the agent."""

    def __init__(self, number: int) -> None:
        self.left, self.where = number, ""

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in FILES:
            return None
        line = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        # Between the end of a block and its __exit__ Python lets no signal in, though it traces the line.
        if event == "line" and not line.lstrip().startswith("with "):
            self.left -= 1
            if self.left == 0:
                self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                sys.settrace(None)
                raise KeyboardInterrupt
        return self


@pytest.mark.limit(120)
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_interrupts_take_no_slot(tmp_path: Path) -> None:
    root = tmp_path / "s"
    interrupted = []
    with Checkpointer(root, tiers=[Ram(on_full="wait"), Disk(every=10_000)]) as ckpt:
        for step in range(6):
            ckpt.save(step, state(step)).wait("ram")
        while True:
            step += 1
            hit = _Interrupt(len(interrupted) + 1)
            before = sys.gettrace()
            try:
                sys.settrace(hit)
                handle = ckpt.save(step, state(step))
                sys.settrace(before)
            except KeyboardInterrupt:
                interrupted.append(hit.where)
                for _ in range(4 if len(interrupted) % 10 == 0 else 1):  # one slot more than there are
                    step += 1
                    ckpt.save(step, state(step)).wait("ram", 20)
                continue
            finally:
                sys.settrace(before)
            try:
                handle.wait("ram", 20)
            except TierckptError:
                assert hit.where  # it was caught on its way, and told on the handle
                interrupted.append(hit.where)
                continue
            if not hit.where:
                break  # there are no more lines
            interrupted.append(hit.where)
        slots = [slot["state"] for g in status()["generations"] for slot in g["slots"]]
        # One may be there for the next save.
        assert len(slots) <= 3 and slots.count("sealed") == 1 and slots.count("filling") <= 1, slots
    assert len(interrupted) > 50 and any(where.startswith("client.py") for where in interrupted)
    assert tierckpt.verify(root, every=True).ok
