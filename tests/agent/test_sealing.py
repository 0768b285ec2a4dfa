"""Ranks that were not given the same steps: where they meet it shows, is told on all of them, and costs nothing else."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tierckpt
from tests.agent.job import state, values
from tests.agents import status
from tests.harness import run_ranks
from tierckpt import Checkpointer, Disk, Ram, SkippedError, StepExistsError, StoreError, TierckptError

TIMEOUT = 40.0


def _outcome(handle: tierckpt.Handle, tier: str | None = None) -> str:
    try:
        handle.wait(tier)
    except SkippedError:
        return "skipped"
    except TierckptError as error:
        return str(error)
    return "" if handle.due else "not due"


def _saves(rank: int, root: str, agent: str, disk: int, calls: list[tuple[int, int]]) -> tuple[list[str], float]:
    """Each rank passes its own of two steps to each save, and waits for all in the end."""
    began = time.monotonic()
    tiers = [Ram(on_full="wait"), Disk(every=disk)]
    with Checkpointer(root, tiers=tiers, agent=agent, timeout=TIMEOUT) as ckpt:
        ckpt.save(0, state(0, rank)).wait()
        handles = [ckpt.save(call[rank], state(call[rank], rank)) for call in calls]
        told = [_outcome(handle) for handle in handles]
    return told, time.monotonic() - began


def _ran(root: Path, agent: str, disk: int, calls: list[tuple[int, int]]) -> list[list[str]]:
    found = run_ranks(_saves, 2, str(root), agent, disk, calls)
    assert all(seconds < TIMEOUT / 2 for _, seconds in found), found
    report = tierckpt.verify(root, every=True)
    assert report.ok, report.problems
    return [told for told, _ in found]


@pytest.mark.parametrize("agent", ["auto", "off"])
def test_different_steps_in_one_save_fail_it_on_all_ranks(tmp_path: Path, agent: str) -> None:
    first, second = _ran(tmp_path / "s", agent, 1, [(1, 2), (3, 3), (4, 5), (6, 6)])
    for told in (first, second):
        for number, (a, b) in ((0, (1, 2)), (2, (4, 5))):
            assert f"different steps to the same save (rank 0: step {a}; rank 1: step {b})" in told[number]
        assert told[1] == told[3] == ""
    assert {3, 6} <= set(tierckpt.steps(tmp_path / "s")) <= {0, 3, 6}


@pytest.mark.parametrize("agent", ["auto", "off"])
def test_what_is_due_on_some_ranks_only_is_settled_where_they_meet(tmp_path: Path, agent: str) -> None:
    """Rank 1 has been at step 10 before, so that for it step 11 is not due on the disk: for rank 0 it is."""
    first, second = _ran(tmp_path / "s", agent, 10, [(9, 10), (11, 11), (12, 12), (20, 20), (30, 30)])
    if agent == "auto":
        assert all("rank 0: step 9; rank 1: step 10" in told[0] for told in (first, second))
        assert first[1:] == second[1:] == [""] * 4
        assert {11, 20, 30} <= set(tierckpt.steps(tmp_path / "s"))
    else:
        # Without an agent what is not due is nowhere: the ranks meet in the next save that is due to all.
        assert first[0] == "not due" and "rank 1 alone" in second[0].replace("ranks 1", "rank 1")
        assert "alone saved in this call" in first[1] and second[1] == "not due"
        assert first[3:] == second[3:] == ["", ""]
        assert tierckpt.steps(tmp_path / "s") == [0, 20, 30]


def _restores(rank: int, root: str, agent: str) -> tuple[int, set[float], str, float]:
    """Rank 1 alone has saved something that it waits to have met for."""
    began = time.monotonic()
    found = state(-1, rank)
    with Checkpointer(root, tiers=[Ram(every=10), Disk(every=10)], agent=agent, timeout=TIMEOUT) as ckpt:
        ckpt.save(0, state(0, rank)).wait()
        handle = ckpt.save(9 + rank, state(9, rank))
        info = ckpt.restore(found)
        assert info is not None
        ckpt.save(20, state(20, rank)).wait("disk")
    return info.step, values(found, rank), _outcome(handle), time.monotonic() - began


@pytest.mark.parametrize("agent", ["auto", "off"])
def test_a_restore_waits_for_no_step_that_one_rank_alone_has_saved(tmp_path: Path, agent: str) -> None:
    for step, found, _, seconds in (told := run_ranks(_restores, 2, str(tmp_path / "s"), agent)):
        assert (step, found) == (0, {0.0}) and seconds < TIMEOUT / 2
    assert told[0][2] == "not due" and "ranks 1 alone saved in this call" in told[1][2]
    assert tierckpt.steps(tmp_path / "s") == [0, 20]


def _refuses(rank: int, root: str, agent: str, odd: Any) -> list[str]:
    """Rank 1 passes a step that its ``save`` refuses at once, where nothing is due to the others."""
    told = []
    with Checkpointer(root, tiers=[Ram(every=10), Disk(every=10)], agent=agent, timeout=TIMEOUT) as ckpt:
        ckpt.save(0, state(0, rank)).wait()
        try:
            told.append(_outcome(ckpt.save(odd if rank else 1, state(1, rank))))
        except TierckptError as error:
            told.append(str(error))
        told.append(_outcome(ckpt.save(10, state(10, rank))))
    return told


@pytest.mark.parametrize("agent", ["auto", "off"])
@pytest.mark.parametrize("odd", [-1, "x", 0])
def test_a_call_that_one_rank_refuses_does_not_put_the_next_one_out_of_step(
    tmp_path: Path, agent: str, odd: Any
) -> None:
    first, second = run_ranks(_refuses, 2, str(tmp_path / "s"), agent, odd)
    assert first == ["not due", ""] and second[0] and second[1] == ""
    assert tierckpt.steps(tmp_path / "s") == [0, 10]


def _pins(rank: int, root: str, agent: str, who: int) -> list[str]:
    """Only rank ``who`` pins."""
    with Checkpointer(root, tiers=[Ram(), Disk(every=100, keep=1, grace=0)], agent=agent, timeout=TIMEOUT) as ckpt:
        ckpt.save(0, state(0, rank)).wait()
        told = [_outcome(ckpt.save(1, state(1, rank), pin=rank == who))]
        told += [_outcome(ckpt.save(step, state(step, rank)), "disk") for step in (100, 200)]
    return told


@pytest.mark.parametrize("who", [0, 1])
def test_a_step_that_one_rank_pins_is_pinned(tmp_path: Path, who: int) -> None:
    assert run_ranks(_pins, 2, str(tmp_path / "s"), "auto", who) == [[""] * 3] * 2
    assert tierckpt.steps(tmp_path / "s") == [1, 200]


def _fails_once(rank: int, root: str, agent: str) -> tuple[str, str]:
    """Step 1 fails on its way to the disk, on one rank, and is saved again with other values; what became of both."""
    with Checkpointer(root, tiers=[Ram(), Disk()], agent=agent, timeout=TIMEOUT) as ckpt:
        ckpt.save(0, state(0, rank)).wait()
        room_for = ckpt._coordinator.room_for

        def refuses(*_: Any) -> None:
            raise StoreError("no room")

        if rank == 1:
            ckpt._coordinator.room_for = refuses  # type: ignore[method-assign]
        first = _outcome(ckpt.save(1, state(1, rank)))
        ckpt._coordinator.room_for = room_for  # type: ignore[method-assign]
        try:
            second = _outcome(ckpt.save(1, state(11, rank)))
        except StepExistsError as error:
            second = str(error)
            assert [one["complete"] for g in status()["generations"] for one in g["steps"] if one["step"] == 1] == [
                True
            ]
        dist.barrier()
        ckpt.save(2, state(2, rank)).wait()
        return first, second


def test_a_step_that_failed_is_saved_again_where_no_memory_may_hold_it(tmp_path: Path) -> None:
    root = tmp_path / "s"
    for first, second in run_ranks(_fails_once, 2, str(root), "off"):
        assert "no room" in first and not second
    assert tierckpt.steps(root) == [0, 1, 2]
    assert (tierckpt.read(root, step=1)["shared"] == 11).all()


def test_a_step_that_memory_may_hold_is_saved_once(tmp_path: Path) -> None:
    """A second save of its name could be put together with the first, whose files go with the next step that is durable."""
    root = tmp_path / "s"
    for first, second in run_ranks(_fails_once, 2, str(root), "auto"):
        assert "no room" in first and "go on with the next number" in second
    assert tierckpt.steps(root) == [0, 2]
    assert tierckpt.verify(root, every=True).ok
    assert sorted(path.name for path in (root / "g0001").iterdir()) == ["s000000000000", "s000000000002"]


def _interrupted_and_again(rank: int, root: str, agent: str) -> str:
    """The save of step 1 is interrupted when it has been handed over already, and made again with other values."""
    with Checkpointer(root, tiers=[Ram(), Disk()], agent=agent, timeout=TIMEOUT) as ckpt:
        ckpt.save(0, state(0, rank)).wait()
        hand_over = ckpt._hand_over

        def interrupted(job: Any) -> None:
            hand_over(job)
            job.handle._handed_over = False
            raise KeyboardInterrupt

        ckpt._hand_over = interrupted  # type: ignore[method-assign]
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(1, state(1, rank))
        ckpt._hand_over = hand_over  # type: ignore[method-assign]
        try:
            told = _outcome(ckpt.save(1, state(11, rank)))
        except StepExistsError as error:  # it was known by then that the first was handed over
            told = str(error)
        ckpt.save(2, state(2, rank)).wait()
        return told


@pytest.mark.parametrize("agent", ["auto", "off"])
def test_what_is_committed_is_not_written_over_by_a_second_save(tmp_path: Path, agent: str) -> None:
    root = tmp_path / "s"
    for told in run_ranks(_interrupted_and_again, 2, str(root), agent):
        assert ("committed already" if agent == "off" else "go on with the next number") in told
    assert tierckpt.steps(root) == [0, 1, 2]
    assert (tierckpt.read(root, step=1)["shared"] == 1).all()
    assert tierckpt.verify(root, every=True).ok
