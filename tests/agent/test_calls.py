"""Ranks that leave out calls of save() cost the steps that they leave out, and no later one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tierckpt
from tests.agent.job import state, values
from tests.harness import run_ranks
from tierckpt import Checkpointer, Disk, Ram, config
from tierckpt.errors import OutOfStepError, TierckptError

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

LEFT_OUT = {1: {3, 6, 7, 12}, 2: {7, 9}}


def _leaves_out(rank: int, root: str, agent: str) -> dict[str, Any]:
    found: dict[int, str] = {}
    with Checkpointer(root, tiers=[Ram(), Disk()], agent=agent, timeout=30) as ckpt:
        for step in range(14):
            held: dict[str, Any] = state(step, rank)
            if step >= 10:
                held["new"] = tierckpt.PerRank(step)  # the ranks agree anew, on a call that they all number alike
            if step in LEFT_OUT.get(rank, ()):
                continue
            try:
                ckpt.save(step, held).wait()
                found[step] = "disk"
            except OutOfStepError as error:
                found[step] = str(error)
        read = state(-1, rank)
        read["new"] = tierckpt.PerRank(-1)
        info = ckpt.restore(read)
        assert info is not None
        ckpt.save(20, state(20, rank)).wait()
        return {"found": found, "step": info.step, "values": values(read, rank)}


@pytest.mark.parametrize("agent", ["auto", "off"])
def test_ranks_find_each_other_again(tmp_path: Path, agent: str) -> None:
    root = tmp_path / "s"
    told = run_ranks(_leaves_out, 3, str(root), agent)
    left_out = set().union(*LEFT_OUT.values())
    for rank, one in enumerate(told):
        good = {step for step, said in one["found"].items() if said == "disk"}
        assert good == set(range(14)) - left_out, (rank, one["found"])
        assert all("different steps" in one["found"][step] for step in left_out - LEFT_OUT.get(rank, set())), one[
            "found"
        ]
        assert (one["step"], one["values"]) == (13, {13.0})
    assert set(tierckpt.steps(root)) == {*range(14), 20} - left_out
    assert tierckpt.verify(root, every=True).ok


def _goes_on_without(rank: int, root: str, agent: str, pin: bool) -> tuple[float, list[str]]:
    """Rank 0 leaves out more calls in a row than there are slots, and training keeps the ranks together."""
    config.BEHIND_SECONDS = 0.5
    longest, told = 0.0, []
    every = 10 if agent == "auto" else 1
    with Checkpointer(root, tiers=[Ram(), Disk(every=every)], agent=agent, timeout=60) as ckpt:
        for step in range(30):
            dist.barrier()
            if rank == 0 and 5 <= step < 13:
                continue
            began = time.monotonic()
            handle = ckpt.save(step, state(step, rank), pin=pin)
            longest = max(longest, time.monotonic() - began)
            if step == 3:
                ckpt.wait()
            if step in (20, 29):
                handle.wait()
        ckpt.wait()
        told = [str(one.error) for one in [handle] if one.error is not None]
    return longest, told


@pytest.mark.parametrize("pin", [False, True])
@pytest.mark.parametrize("agent", ["auto", "off"])
def test_no_rank_stands_for_others_that_leave_calls_out(tmp_path: Path, agent: str, pin: bool) -> None:
    root = tmp_path / "s"
    for longest, told in run_ranks(_goes_on_without, 2, str(root), agent, pin):
        assert longest < 15 and not told
    assert {0, 20, 29} <= set(tierckpt.steps(root)) and not set(range(5, 13)) & set(tierckpt.steps(root))
    assert tierckpt.verify(root, every=True).ok


def _rarely_due(rank: int, root: str, agent: str, every: int) -> list[int]:
    good, tiers = [], [Ram(every=every), Disk(every=10)]
    with Checkpointer(root, tiers=tiers, agent=agent, timeout=30) as ckpt:
        for step in range(60):
            if (rank, step) in ((1, 3), (0, 14), (0, 15), (1, 37)):  # due nowhere, or only in memory
                continue
            try:
                handle = ckpt.save(step, state(step, rank))
                if "disk" in handle.due and handle.wait() is not None:
                    good.append(step)
            except OutOfStepError:
                continue
    return good


def _raises(rank: int, root: str, agent: str) -> list[str]:
    told, handles, tiers = [], [], [Ram(on_full="wait"), Disk()]
    with Checkpointer(root, tiers=tiers, agent=agent, on_error="raise", timeout=30) as ckpt:
        for step in range(12):
            if (rank, step) == (1, 5):
                continue
            try:
                handles.append(ckpt.save(step, state(step, rank)))
            except TierckptError as error:
                told.append(type(error).__name__)
        ckpt.wait()
        told += [type(handle.error).__name__ for handle in handles if handle.error is not None]
    return told


@pytest.mark.parametrize("agent", ["auto", "off"])
def test_one_failure_makes_no_other_of_another_kind(tmp_path: Path, agent: str) -> None:
    first, second = run_ranks(_raises, 2, str(tmp_path / "s"), agent)
    assert set(first) == {"OutOfStepError"} >= set(second), (first, second)
    assert len(tierckpt.steps(tmp_path / "s")) >= 8


@pytest.mark.parametrize(("agent", "every"), [("off", 1), ("auto", 10), ("auto", 2), ("auto", 1)])
def test_calls_that_were_not_due_are_left_out(tmp_path: Path, agent: str, every: int) -> None:
    assert run_ranks(_rarely_due, 2, str(tmp_path / "s"), agent, every) == [[0, 10, 20, 30, 40, 50]] * 2


def _stops(rank: int, root: str) -> int:
    with Checkpointer(root, tiers=[Ram(), Disk(every=100)], save_on_signal=True, timeout=30) as ckpt:
        for step in range(10_000):
            dist.barrier()
            if (rank, step) in ((1, 3), (0, 5), (1, 6)):
                continue
            handle = ckpt.save(step, state(step, rank))
            if step == 10:
                handle.wait("ram")
                if rank == 0:
                    os.kill(os.getpid(), signal.SIGTERM)
            if ckpt.should_stop:
                return step
    return -1


def test_they_stop_at_the_same_step_all_the_same(tmp_path: Path) -> None:
    first, second = run_ranks(_stops, 2, str(tmp_path / "s"))
    assert first == second >= 10
    assert tierckpt.latest(tmp_path / "s") == first


def _counts_down(rank: int, root: str) -> list[int]:
    good = []
    with Checkpointer(root, tiers=[Disk()], agent="off", timeout=30) as ckpt:
        for step in range(20, 10, -1):
            if (rank, step) == (1, 17):
                continue
            try:
                ckpt.save(step, state(step, rank)).wait()
                good.append(step)
            except OutOfStepError:
                pass
        assert ckpt.restore(state(-1, rank)) is not None
        ckpt.save(30, state(30, rank)).wait()
    return good


def test_steps_that_do_not_ascend_tell_nothing_and_a_restore_begins_anew(tmp_path: Path) -> None:
    root = tmp_path / "s"
    assert run_ranks(_counts_down, 2, str(root)) == [[20, 19, 18]] * 2
    assert set(tierckpt.steps(root)) == {18, 19, 20, 30} and tierckpt.verify(root, every=True).ok
