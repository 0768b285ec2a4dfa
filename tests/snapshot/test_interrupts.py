"""An interrupt may come at any moment of a save: it costs that save, and nothing that later ones need."""

from __future__ import annotations

import linecache
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

import tierckpt
from tests.agent.job import state
from tests.agents import status
from tierckpt import Checkpointer, Disk, Ram, TierckptError, checkpointer
from tierckpt.agent import client, protocol
from tierckpt.snapshot import ram, remote, staging
from tierckpt.state import planner, recall, stepping

ASKING = (client, protocol, ram, remote, staging)
PLANNING = (checkpointer, planner, recall, stepping)


class _Interrupt:
    """A KeyboardInterrupt at the ``number``-th line that this thread does of some modules."""

    def __init__(self, number: int, modules: Sequence[ModuleType]) -> None:
        self.left, self.where = number, ""
        self._files = {module.__file__ for module in modules}

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
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
            hit = _Interrupt(len(interrupted) + 1, ASKING)
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


@pytest.mark.limit(120)
@pytest.mark.parametrize("agent", ["auto", "off"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_interrupted_save_has_ended(tmp_path: Path, agent: str) -> None:
    """Nobody waits for ever for what nobody does any more, and the next save works."""
    interrupted, step = 0, 0
    with Checkpointer(tmp_path / "s", tiers=[Ram(), Disk()], agent=agent) as ckpt:
        ckpt.save(0, state(0)).wait()
        while True:
            step += 1
            hit, before = _Interrupt(interrupted + 1, PLANNING), sys.gettrace()
            try:
                sys.settrace(hit)
                ckpt.save(step, state(step))
            except KeyboardInterrupt:
                pass
            finally:
                sys.settrace(before)
            ckpt.wait()
            if not hit.where:
                break  # there are no more lines
            interrupted += 1
            if interrupted % 10 == 0:
                step += 1
                ckpt.save(step, state(step)).wait(timeout=20)
    assert interrupted > 30
