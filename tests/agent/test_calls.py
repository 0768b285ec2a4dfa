"""Ranks that leave out calls of save() cost the steps that they leave out, and no later one."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import tierckpt
from tests.agent.job import state, values
from tests.agents import until
from tests.harness import run_ranks
from tierckpt import Checkpointer, Disk, Ram, config
from tierckpt.agent.calls import Meetings
from tierckpt.errors import OutOfStepError, TierckptError

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

TIMEOUT = 30.0
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


def _agreed(ckpt: Checkpointer) -> bool:
    assert ckpt._stop is not None
    return ckpt._stop._at is not None


def _stops_behind(rank: int, root: str, agent: str, signalled: int, meets: bool) -> tuple[int, float]:
    """When the ranks agree on the stop, rank 1 is two calls behind and leaves one of them out."""
    began = time.monotonic()
    tiers = [Ram(), Disk(every=100_000)]
    with Checkpointer(root, tiers=tiers, agent=agent, save_on_signal=True, timeout=TIMEOUT) as ckpt:
        for step in range(6):
            ckpt.save(step, state(step, rank)).wait("ram" if step and agent == "auto" else None)
        dist.barrier()
        if rank == 0:
            ckpt.save(6, state(6, rank))
            ckpt.save(7, state(7, rank))
        if rank == signalled:
            os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: _agreed(ckpt))
        dist.barrier()
        step = 8 if rank == 0 else 7
        while True:
            handle = ckpt.save(step, state(step, rank))
            if ckpt.should_stop:
                handle.wait("disk")
                break
            if meets and agent == "auto":
                handle.wait("ram")
            step += 1
    return step, time.monotonic() - began


@pytest.mark.parametrize("meets", [False, True])
@pytest.mark.parametrize("signalled", [0, 1])
@pytest.mark.parametrize("agent", ["auto", "off"])
def test_a_call_left_out_right_before_the_stop_shifts_nothing(
    tmp_path: Path, agent: str, signalled: int, meets: bool
) -> None:
    root = tmp_path / "s"
    for step, seconds in run_ranks(_stops_behind, 2, str(root), agent, signalled, meets):
        assert step == 8 and seconds < TIMEOUT / 2
    assert {0, 8} <= set(tierckpt.steps(root)) <= {0, 5, 7, 8}
    assert agent == "off" or 5 in tierckpt.steps(root), "it was the newest complete step"
    assert tierckpt.verify(root, every=True).ok


def _completes_later(rank: int, root: str) -> bool:
    """The ranks agree on the stop when rank 0 has made a save that rank 1 has not."""
    with Checkpointer(root, tiers=[Ram(), Disk(every=100_000)], save_on_signal=True, timeout=TIMEOUT) as ckpt:
        for step in range(3):
            ckpt.save(step, state(step, rank)).wait("ram" if step else None)
        dist.barrier()
        if rank == 0:
            ckpt.save(3, state(3, rank))
            os.kill(os.getpid(), signal.SIGTERM)
        until(lambda: _agreed(ckpt))
        if rank == 1:
            ckpt.save(3, state(3, rank))
        until(lambda: tierckpt.steps(root) == [0, 2, 3])
        return ckpt.should_stop


def test_what_becomes_complete_before_the_stop_goes_to_the_disk_too(tmp_path: Path) -> None:
    """The loop may never come to another save."""
    assert run_ranks(_completes_later, 2, str(tmp_path / "s")) == [False, False]


#: A rank meets the others, holds, or goes on, as far as it can.
EVENTS = st.lists(st.tuples(st.integers(0, 1), st.sampled_from(["meet", "hold", "go on"])), max_size=60)


@given(events=EVENTS)
@settings(max_examples=500)
def test_what_is_agreed_on_is_done_between_the_same_meetings(events: list[tuple[int, str]]) -> None:
    """Whatever each rank has come to when it holds, and when it hears from the others."""
    ranks, done = [Meetings(), Meetings()], [[], []]  # type: list[Meetings], list[list[int | str]]
    held: list[list[int]] = [[], []]
    agreed: list[int] = []

    def does(rank: int, what: str) -> None:
        one = ranks[rank]
        if what == "hold" and not held[rank]:
            held[rank] = [one.hold()[0]]
        elif what == "go on" and all(held) and len(agreed) < 2 and rank not in agreed:
            number = max(met for (met,) in held)
            one.after(number, lambda: done[rank].append("acted"), lambda: None)
            one.go_on()
            one.act()  # as if the thread that meets were idle
            agreed.append(rank)
        # A meeting is over for one rank when the other is in it, or past it.
        elif what == "meet" and not one._held and one._met <= ranks[1 - rank]._met:
            one.passed(saves=True)
            done[rank].append(one._met)

    for rank, what in events:
        does(rank, what)
    for what in ("hold", "go on", "meet", "meet", "meet"):
        for rank in (0, 1, 0, 1):
            does(rank, what)
    first, second = sorted(done, key=len)
    assert "acted" in first and second[: len(first)] == first


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
