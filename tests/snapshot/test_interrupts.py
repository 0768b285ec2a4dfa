"""An interrupt may come at any moment of a save: it costs that save, and nothing that later ones need."""

from __future__ import annotations

import contextlib
import linecache
import os
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch

import tierckpt
from tests.agent.job import state, values
from tests.agents import status
from tests.harness import run_ranks
from tierckpt import Checkpointer, Disk, FencedError, Ram, TierckptError, checkpointer, group
from tierckpt.agent import client, coordinator, protocol, roots, sealing
from tierckpt.config import config_dir
from tierckpt.restore import attempt, choice, load, settle
from tierckpt.snapshot import ram, remote, staging
from tierckpt.snapshot.ram import RamTier
from tierckpt.state import planner, recall, stepping
from tierckpt.tiers import store, trust

ASKING = (client, protocol, ram, remote, staging)
PLANNING = (checkpointer, planner, recall, stepping)
BEGINNING = (checkpointer, coordinator, roots, settle, store, trust, ram, sealing, planner)
RESTORING = (*BEGINNING, attempt, choice, load)
#: Seconds for which ranks wait for each other; what takes nearly as long has waited for that.
TIMEOUT = 60


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
    kept = []  # as a REPL does with the last one: what their frames refer to must not keep slots
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
            except KeyboardInterrupt as error:
                kept.append(error)
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
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_interrupt_costs_no_other_save_in_flight(tmp_path: Path) -> None:
    """Early in a run, when nothing keeps the agent from taking this process for dead but what the interrupt spares."""
    interrupted = 0
    for number in range(1, 200, 16):
        with Checkpointer(tmp_path / f"s{number}", tiers=[Ram(on_full="wait"), Disk()]) as ckpt:
            handles = {step: ckpt.save(step, state(step)) for step in (0, 1)}
            hit, before = _Interrupt(number, ASKING), sys.gettrace()
            try:
                sys.settrace(hit)
                ckpt.save(2, state(2))
            except KeyboardInterrupt:
                interrupted += 1
            finally:
                sys.settrace(before)
            handles[3] = ckpt.save(3, state(3))
            for step, handle in handles.items():
                info = handle.wait(timeout=20)
                assert info is not None and info.step == step, hit.where
    assert interrupted > 2


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


def _goes_on(root: str, agent: str, restores: bool, number: int, rank: int = 0, *, hits: bool = True) -> str:
    """Interrupted at the ``number``-th line of the first save, or of restore(), a rank saves on. Where it was interrupted."""
    with Checkpointer(root, tiers=[Ram(), Disk()], agent=agent, timeout=TIMEOUT) as ckpt:
        hit = _Interrupt(number, RESTORING if restores else BEGINNING)
        before = sys.gettrace()
        try:
            if hits:
                sys.settrace(hit)
            if restores:
                ckpt.restore(state(-1, rank))
            else:
                ckpt.save(10, state(10, rank))
        except (KeyboardInterrupt, TierckptError):
            pass
        finally:
            sys.settrace(before)
        for step in (11, 12, 13):
            with contextlib.suppress(TierckptError):
                handle = ckpt.save(step, state(step, rank))
                handle.wait(timeout=30)
    return hit.where


def _is_whole(root: Path) -> list[int]:
    """The steps in it, which can all be read, and the newest be restored."""
    steps = tierckpt.steps(root)
    for step in steps:
        found = tierckpt.read(root, step=step)
        assert found["n"] == step and (found["shared"] == step).all()
    if steps:
        with Checkpointer(root, agent="off") as ckpt:
            info = ckpt.restore({"shared": torch.empty(1000), "n": -1}, strict=False)
            assert info is not None and info.step == steps[-1]
    return steps


def _enumerate(tmp_path: Path, agent: str, restores: bool, stride: int) -> None:
    number, interrupted = 1, 0
    while True:
        root = tmp_path / f"s{number}"
        if restores:
            with Checkpointer(root, agent="off") as ckpt:
                ckpt.save(9, state(9)).wait()
        if not _goes_on(str(root), agent, restores, number):
            break  # there are no more lines
        # Alone, nothing is lost but the save itself.
        assert set(_is_whole(root)) >= {11, 12, 13}, number
        # A first save looks through what is known of other stores: it would have more lines each time.
        shutil.rmtree(config_dir() / "known")
        interrupted += 1
        number += stride
    assert interrupted > 4


@pytest.mark.limit(120)
@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize(("agent", "stride"), [("off", 23), ("auto", 61)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_an_interrupt_while_a_generation_begins_costs_nothing_later(
    tmp_path: Path, agent: str, stride: int, restores: bool
) -> None:
    _enumerate(tmp_path, agent, restores, stride)


@pytest.mark.acceptance
@pytest.mark.limit(300)
@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize(("agent", "stride"), [("off", 5), ("auto", 19)])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_the_same_at_more_lines(tmp_path: Path, agent: str, stride: int, restores: bool) -> None:
    _enumerate(tmp_path, agent, restores, stride)


def _some_are_interrupted(rank: int, root: str, agent: str, restores: bool, number: int, who: list[int]) -> None:
    group.ANSWER_SECONDS = 0.1  # which rank is lost is not the question
    if restores:
        with Checkpointer(root, agent="off") as ckpt:
            ckpt.save(9, state(9, rank)).wait()
    _goes_on(root, agent, restores, number, rank, hits=rank in who)


@pytest.mark.parametrize("then", ["restore", "save", "close"])
@pytest.mark.parametrize("kind", [KeyboardInterrupt, FencedError])
def test_a_restore_that_ends_between_two_generations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: type[BaseException], then: str
) -> None:
    """The chain has the next one, and this process has not joined it: what is in memory goes down in none but its own."""
    root = tmp_path / "s"

    def refuses(*_: object) -> None:
        raise kind("here")

    ckpt = Checkpointer(root, tiers=[Ram(), Disk(every=100)])
    ckpt.restore(state(-1))
    ckpt.save(0, state(0)).wait()
    ckpt.save(1, state(1)).wait("ram")
    with monkeypatch.context() as patched, pytest.raises(kind):
        patched.setattr(RamTier, "join", refuses)
        ckpt.restore(state(-1))
    if then == "restore":
        found = state(-1)
        info = ckpt.restore(found)
        assert info is not None and info.step == 1 and values(found, 0) == {1.0}
    elif then == "save":
        ckpt.save(2, state(2)).wait()
    ckpt.close()
    assert set(tierckpt.steps(root)) >= {0, 1}
    assert tierckpt.verify(root, every=True).ok


def _first_is_interrupted(rank: int, root: str, every: int | str, number: int) -> str:
    """Rank 0, at the ``number``-th line of its first save; whatever it saves afterwards is not due by then."""
    group.ANSWER_SECONDS = 0.1
    hit, before = _Interrupt(number, [checkpointer]), sys.gettrace()
    with Checkpointer(root, tiers=Disk(every=every), agent="off", timeout=TIMEOUT) as ckpt:
        for step in range(4):
            try:
                if rank == 0 and step == 0:
                    sys.settrace(hit)
                ckpt.save(step, state(step, rank))
            except (KeyboardInterrupt, TierckptError):
                pass
            finally:
                sys.settrace(before)
        if rank == 0:
            Path(root).with_name("others").read_bytes()  # who reads stands until the others are through
        else:
            Path(root).with_name("others").write_bytes(b"")
    return hit.where


@pytest.mark.limit(120)
@pytest.mark.parametrize("every", [100, "1h"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_nobody_waits_at_the_start_for_whose_first_save_was_interrupted(tmp_path: Path, every: int | str) -> None:
    for number in range(2, 60, 6):
        (tmp_path / str(number)).mkdir()
        os.mkfifo(tmp_path / str(number) / "others")
        told = run_ranks(
            _first_is_interrupted, 2, str(tmp_path / str(number) / "s"), every, number, timeout=TIMEOUT - 10
        )
        assert told[0]


@pytest.mark.limit(150)
@pytest.mark.parametrize("restores", [False, True])
@pytest.mark.parametrize("agent", ["off", "auto"])
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_no_rank_waits_for_one_that_was_interrupted_there(tmp_path: Path, agent: str, restores: bool) -> None:
    for number in (3, 90, 200):
        for who in ([0], [1], [0, 1]):
            root = tmp_path / f"s{number}{who}"
            # Whoever waits for a time-out does not return in time.
            run_ranks(_some_are_interrupted, 2, str(root), agent, restores, number, who, timeout=TIMEOUT - 10)
            if root.exists():
                _is_whole(root)
