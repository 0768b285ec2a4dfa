"""Ranks whose clocks differ take the same steps to a tier whose cadence is a duration, and wait for nobody to know which."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import tierckpt
from tests.agent.job import state
from tests.agents import until
from tests.harness import run_ranks, spawn
from tierckpt import Checkpointer, Disk, Ram, TierckptError
from tierckpt.agreement import Place, last
from tierckpt.clock import Clock
from tierckpt.errors import LostContactError

BOTH = pytest.mark.parametrize("agent", ["auto", "off"])


class Time:
    now = 0.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Time:
    made = Time()
    monkeypatch.setattr("tierckpt.clock.time", made)
    return made


class Rank:
    """What :class:`tierckpt.agreement.Agreement` does with it."""

    def __init__(self, rank: int, *, alone: bool = False) -> None:
        self.made = 0
        self.place = Place(lambda: self.made)
        self.clock = Clock({"disk": 10.0}, leads=rank == 0, alone=alone)

    def begin(self, step: int | None) -> None:
        self.made += 1
        self.place.begin(step)
        self.clock.begin(None if step is None else self.place)

    @property
    def due(self) -> Any:
        return self.clock.due


def _agree(ranks: list[Rank]) -> None:
    """No call begins meanwhile."""
    if any(rank.clock.wants() for rank in ranks):
        at, words = last([rank.place.told() for rank in ranks]), [rank.clock.word() for rank in ranks]
        for rank in ranks:
            rank.clock.agree(at, words)


def _begin(ranks: list[Rank], step: int | None) -> None:
    for rank in ranks:
        rank.begin(step)


def _ranks(size: int = 3) -> list[Rank]:
    return [Rank(rank) for rank in range(size)]


#: What happens: some rank makes its next call, time passes, the ranks ask each other.
EVENTS = st.lists(st.one_of(st.integers(0, 2), st.just("time"), st.just("ask")), max_size=200)


SOME = st.sets(st.integers(0, 40), max_size=3)


@given(events=EVENTS, restores=SOME, anew=SOME)
@settings(max_examples=300)
def test_all_ranks_take_the_same_steps_whatever_their_pace(
    events: list[Any], restores: set[int], anew: set[int]
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        clock = Time()
        patch.setattr("tierckpt.clock.time", clock)
        ranks = _ranks()
        # The same calls on all ranks; steps begin anew after a restore, or without one.
        calls: list[int | None] = []
        for number in range(70):
            follows = calls and calls[-1] is not None and (number not in anew or calls[-1] == 0)
            calls.append(None if number in restores else (calls[-1] + 1 if follows else 0))
        generations = [0] * 3
        done, due = [0] * 3, [[], [], []]  # type: list[int], list[list[int]]

        def goes_on(rank: int) -> None:
            ranks[rank].begin(calls[done[rank]])
            if calls[done[rank]] is None:
                generations[rank] += 1
                ranks[rank].place.continues(generations[rank])
            if "disk" in ranks[rank].due:
                due[rank].append(done[rank])
            done[rank] += 1

        for event in events:
            if event == "time":
                clock.now += 4.0
            elif event == "ask":
                _agree(ranks)
            elif done[event] < len(calls):
                goes_on(event)
        while min(done) < max(done):
            goes_on(done.index(min(done)))
        assert due[0] == due[1] == due[2]
        # And none is forgotten.
        clock.now += 10.0
        _agree(ranks)
        if max(done) < len(calls) - 1:
            before = list(due[0])
            while calls[done[0]] is None:
                for rank in range(3):
                    goes_on(rank)
            for rank in range(3):
                goes_on(rank)
            assert due[0] == due[1] == due[2] and len(due[0]) > len(before)


def test_it_counts_from_what_was_due_last(clock: Time) -> None:
    ranks = _ranks(2)
    taken = []
    for step in range(60):
        clock.now += 1.0
        _agree(ranks)
        _begin(ranks, step)
        if ranks[0].due:
            taken.append(step)
    assert taken == [9, 19, 29, 39, 49, 59]


def test_steps_that_are_set_back_without_a_restore_delay_nothing(clock: Time) -> None:
    ranks = _ranks(2)
    _begin(ranks, 1000)
    for step in range(5):
        clock.now += 10.0
        _agree(ranks)
        _begin(ranks, step)
        assert ranks[0].due == ranks[1].due == ["disk"]


def test_a_call_that_a_rank_has_left_out_disturbs_no_later_one(clock: Time) -> None:
    first, second = ranks = _ranks(2)
    for step in range(30):
        clock.now += 1.0
        _agree(ranks)
        first.begin(step)
        if step not in (3, 15, 16):
            second.begin(step)
            assert first.due == second.due


def test_a_slower_rank_keeps_what_was_agreed_on_when_others_have_closed(clock: Time) -> None:
    first, second = ranks = _ranks(2)
    _begin(ranks, 0)
    clock.now += 10.0
    _agree(ranks)
    first.begin(1)
    first.clock.alone("")
    second.clock.alone("")
    clock.now += 100.0
    second.begin(1)
    assert first.due == second.due == ["disk"]
    second.begin(2)
    assert not second.due


def test_a_restore_that_one_rank_had_to_repeat_puts_nobody_ahead(clock: Time) -> None:
    ranks = _ranks(2)
    _begin(ranks, 0)
    ranks[1].begin(None)  # refused there
    for rank in ranks:
        rank.begin(None)
        rank.place.continues(1)
    clock.now += 10.0
    _agree(ranks)
    _begin(ranks, 1)
    assert ranks[0].due == ranks[1].due == ["disk"]


def test_alone_it_goes_by_its_own_time(clock: Time) -> None:
    one = Rank(0, alone=True)
    taken = []
    for step in range(25):
        clock.now += 1.0
        one.begin(step)
        taken += [step] if one.due else []
    assert taken == [9, 19]


def _goes_ahead(rank: int, root: str, agent: str, steps: int) -> list[tuple[str, ...]]:
    """Rank 1 makes all its saves while rank 0 makes none."""
    go = Path(root).with_name("go")
    tiers = [Ram(every="1h"), Disk(every="1h")]
    with Checkpointer(root, tiers=tiers, agent=agent, timeout=30) as ckpt:
        ckpt.save(0, state(0, rank)).wait()
        if rank == 0:
            until(go.exists)
        found = [ckpt.save(step, state(step, rank)).due for step in range(1, steps)]
        if rank == 1:
            go.touch()
        return found


@BOTH
def test_a_save_waits_for_no_other_rank(tmp_path: Path, agent: str) -> None:
    assert run_ranks(_goes_ahead, 2, str(tmp_path / "s"), agent, 20) == [[()] * 19] * 2


def _at_own_pace(rank: int, root: str, agent: str, every: str, leave_out: int) -> dict[int, tuple[str, ...]]:
    found = {}
    with Checkpointer(root, tiers=[Ram(every=every), Disk(every=every)], agent=agent, timeout=30) as ckpt:
        step = 0
        # Ranks end at the same step: rank 0 says when there is enough.
        end = Path(root).with_name("end")
        while True:
            if not (rank == 1 and leave_out and step % leave_out == leave_out - 1):
                found[step] = ckpt.save(step, state(step, rank)).due
            step += 1
            if step % 50 == 0:
                if rank == 0 and len(tierckpt.steps(root)) > 3:
                    end.touch()
                dist.barrier()
                ends = end.exists()
                dist.barrier()
                if ends:
                    ckpt.wait()
                    return found


@BOTH
def test_ranks_take_the_same_steps(tmp_path: Path, agent: str) -> None:
    first, second = run_ranks(_at_own_pace, 2, str(tmp_path / "s"), agent, "0.3s", 0)
    assert first == second
    report = tierckpt.verify(tmp_path / "s", every=True)
    assert report.ok, report.problems


@BOTH
def test_they_go_on_where_one_leaves_calls_out(tmp_path: Path, agent: str) -> None:
    run_ranks(_at_own_pace, 2, str(tmp_path / "s"), agent, "0.3s", 7)
    report = tierckpt.verify(tmp_path / "s", every=True)
    assert report.ok and len(tierckpt.steps(tmp_path / "s")) > 3


def _survives(rank: int, root: str, leave: Callable[[], None]) -> str:
    warnings.simplefilter("always")
    ckpt = Checkpointer(root, tiers=Disk(every="0.3s"), agent="off", timeout=20)
    ckpt.save(0, state(0, rank)).wait()
    dist.barrier()
    if rank == 1:
        leave()
    step, told = 0, ""

    def fails() -> bool:
        nonlocal step, told
        step += 1
        try:
            ckpt.save(step, state(step, rank)).wait()
        except TierckptError as error:
            told = f"{type(error).__name__}: {error}"
        return bool(told)

    until(fails)
    return told


def _dies() -> None:
    import os
    import signal

    os.kill(os.getpid(), signal.SIGKILL)


def test_when_a_rank_has_died_saves_say_so_instead_of_never_being_due(tmp_path: Path) -> None:
    first, _ = spawn(_survives, 2, str(tmp_path / "s"), _dies)
    assert "ranks no longer agree on when a save is due" in first.output
    assert first.value is not None and first.value.startswith(LostContactError.__name__), first.describe()


def _closes(rank: int, root: str) -> int:
    with Checkpointer(root, tiers=Disk(every="0.01s"), agent="off", timeout=20) as ckpt:
        for step in range(3):
            ckpt.save(step, state(step, rank))
            dist.barrier()
    return len(tierckpt.steps(root))


def test_there_is_an_end_though_something_is_always_due(tmp_path: Path) -> None:
    assert min(run_ranks(_closes, 2, str(tmp_path / "s"))) >= 1
