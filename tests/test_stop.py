"""A signal ends no training in the middle: what is newest is saved, and all ranks stop at the same save, whoever had it."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

import tierckpt
from tests.agent.job import state, values
from tests.agents import gone, until
from tests.forking import forked
from tests.harness import run_ranks, spawn
from tierckpt import Checkpointer, Disk, Ram, StateError, signals

RARELY = Disk(every=100_000)
BOTH = pytest.mark.parametrize("agent", ["auto", "off"])


def _notice(number: int = signal.SIGTERM) -> None:
    os.kill(os.getpid(), number)


def _child_told() -> int:
    """How a forked child ends that gets SIGTERM."""

    def waits() -> None:
        while True:
            signal.pause()

    return forked(waits, signals=(signal.SIGTERM,))


def _until_it_stops(ckpt: Checkpointer, step: int, rank: int = 0) -> int:
    """Saves at every step, from ``step`` on; the step at which it stopped."""
    while True:
        ckpt.save(step, state(step, rank))
        if ckpt.should_stop:
            return step
        step += 1
        assert step < 50_000


@BOTH
def test_a_process_alone_stops_after_a_save_that_is_durable(tmp_path: Path, agent: str) -> None:
    root = tmp_path / "s"
    with Checkpointer(root, tiers=[Ram(), RARELY], agent=agent, save_on_signal=True) as ckpt:
        assert not ckpt.should_stop
        for step in range(3):
            ckpt.save(step, state(step))
        _notice()
        last = _until_it_stops(ckpt, 3)
        ckpt.wait()
        assert last in tierckpt.steps(root)
        assert ckpt.save(last + 1, state(last + 1)).due != ("ram", "disk") and ckpt.should_stop
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    found = state(-1)
    assert tierckpt.load(found, root, step=last).step == last and values(found, 0) == {float(last)}
    assert tierckpt.verify(root).ok


def test_what_is_only_in_memory_goes_to_the_disk_at_once(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with Checkpointer(root, tiers=[Ram(), RARELY], save_on_signal=True) as ckpt:
        for step in range(3):
            ckpt.save(step, state(step)).wait("ram" if step else None)
        assert tierckpt.steps(root) == [0]
        _notice()
        until(lambda: tierckpt.steps(root) == [0, 2])
        assert not ckpt.should_stop, "it changes in save() only"
        assert _until_it_stops(ckpt, 3) == 3
    assert tierckpt.steps(root) == [0, 2, 3]


def test_the_users_handler_is_called_and_given_back(tmp_path: Path) -> None:
    seen: list[int] = []

    def own(number: int, frame: Any) -> None:
        seen.append(number)

    before = signal.signal(signal.SIGUSR1, own)
    try:
        with Checkpointer(tmp_path / "s", agent="off", save_on_signal=["SIGTERM", signal.SIGUSR1]) as ckpt:
            _notice(signal.SIGUSR1)
            assert seen == [signal.SIGUSR1]
            _until_it_stops(ckpt, 0)
        assert signal.getsignal(signal.SIGUSR1) is own
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert signal.set_wakeup_fd(-1) == -1
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_one_closes_before_the_other(tmp_path: Path) -> None:
    first = Checkpointer(tmp_path / "a", agent="off", save_on_signal=True)
    second = Checkpointer(tmp_path / "b", agent="off", save_on_signal=True)
    first.close()
    _notice()
    _until_it_stops(second, 0)
    second.close()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_one_that_is_forgotten_takes_no_signals(tmp_path: Path) -> None:
    Checkpointer(tmp_path / "s", agent="off", save_on_signal=True)
    gc.collect()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_the_second_interrupt_means_now(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "s", agent="off", save_on_signal=["SIGINT"]) as ckpt:
        _notice(signal.SIGINT)
        _until_it_stops(ckpt, 0)
        with pytest.raises(KeyboardInterrupt):
            _notice(signal.SIGINT)
            threading.Event().wait(10)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_handler_set_later_stays(tmp_path: Path) -> None:
    def later(number: int, frame: Any) -> None: ...

    with Checkpointer(tmp_path / "s", agent="off", save_on_signal=True):
        signal.signal(signal.SIGTERM, later)
    try:
        assert signal.getsignal(signal.SIGTERM) is later
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)


def test_another_thread_cannot_take_signals_and_says_so(tmp_path: Path) -> None:
    def run() -> None:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            Checkpointer(tmp_path / "s", agent="off", save_on_signal=True).close()
        said.extend(str(one.message) for one in told)

    said: list[str] = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join(30)
    assert len(said) == 1 and "only the main thread" in said[0], said


def test_closed_in_another_thread_a_signal_does_what_it_did(tmp_path: Path) -> None:
    ckpt = Checkpointer(tmp_path / "s", agent="off", save_on_signal=True)
    thread = threading.Thread(target=ckpt.close)
    thread.start()
    thread.join(30)
    assert _child_told() == -signal.SIGTERM
    with Checkpointer(tmp_path / "t", agent="off", save_on_signal=True):
        pass
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_a_forked_child_dies_of_it_and_tells_nobody(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "s", agent="off", save_on_signal=True) as ckpt:
        assert _child_told() == -signal.SIGTERM
        for step in range(3):
            ckpt.save(step, state(step)).wait()
        assert not ckpt.should_stop


def test_a_forked_child_that_saves_is_told_whatever_was_under_way(tmp_path: Path) -> None:
    """Locks that were held in the moment of the fork are never given back there."""
    with Checkpointer(tmp_path / "s", agent="off", save_on_signal=True) as ckpt:

        def saves() -> None:
            with pytest.raises(StateError, match="forked"):
                ckpt.save(0, state(0))

        ckpt._agreement._held = True
        code = forked(saves)
        ckpt._agreement._held = False
        assert code == 0


@pytest.mark.parametrize("given", ["SIGKILL", "SIGSTOP", "SIGWHAT", 4711, ["SIGTERM", "TERM"], "valid_signals", [True]])
def test_what_is_no_signal_is_refused(tmp_path: Path, given: Any) -> None:
    with pytest.raises(StateError, match="save_on_signal"):
        Checkpointer(tmp_path / "s", save_on_signal=given)


def test_without_it_nothing_is_taken(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        assert not ckpt.should_stop
    assert signals.numbers(False) == () and signals.numbers(True) == (signal.SIGTERM,)
    assert signals.numbers("SIGUSR1") == (signal.SIGUSR1,)
    assert signals.numbers(15) == (signal.SIGTERM,) and signals.numbers(signal.SIGHUP) == (signal.SIGHUP,)


def _stops(rank: int, root: str, agent: str, signalled: list[int], own_pace: bool) -> int:
    with Checkpointer(root, tiers=[Ram(), RARELY], agent=agent, save_on_signal=True) as ckpt:
        for step in range(4):
            if not own_pace:
                dist.barrier()
            ckpt.save(step, state(step, rank))
        if rank in signalled:
            _notice()
        step = 4
        while True:
            if not own_pace:
                dist.barrier()
            ckpt.save(step, state(step, rank))
            if ckpt.should_stop:
                return step
            step += 1


@BOTH
@pytest.mark.parametrize("signalled", [[1], [0, 1, 2]])
@pytest.mark.parametrize("own_pace", [False, True])
def test_all_ranks_stop_at_the_same_step(tmp_path: Path, agent: str, signalled: list[int], own_pace: bool) -> None:
    root = tmp_path / "s"
    steps = set(run_ranks(_stops, 3, str(root), agent, signalled, own_pace))
    assert len(steps) == 1, steps
    (last,) = steps
    assert tierckpt.steps(root)[-1] == last and tierckpt.verify(root).ok


def _waits(rank: int, root: str) -> bool:
    with Checkpointer(root, tiers=[Ram(), RARELY], save_on_signal=True) as ckpt:
        for step in range(3):
            ckpt.save(step, state(step, rank)).wait("ram" if step else None)
        dist.barrier()
        if rank == 1:
            _notice()
        until(lambda: 2 in tierckpt.steps(root))
        return ckpt.should_stop


@pytest.mark.parametrize("nodes", [None, [{"TIERCKPT_NODE": "a"}, {"TIERCKPT_NODE": "b"}]])
def test_the_newest_step_of_all_ranks_goes_to_the_disk_while_they_train_on(tmp_path: Path, nodes: Any) -> None:
    assert run_ranks(_waits, 2, str(tmp_path / "s"), env=nodes) == [False, False]


def _restores_between(rank: int, root: str) -> int:
    with Checkpointer(root, tiers=[Ram(), RARELY], save_on_signal=True) as ckpt:
        for step in range(3):
            ckpt.save(step, state(step, rank)).wait("ram" if step else None)
        if rank == 0:
            _notice()
        found = state(-1, rank)
        info = ckpt.restore(found)
        assert info is not None and values(found, rank) == {2.0}
        return _until_it_stops(ckpt, 3, rank)


def test_a_restore_in_between_disturbs_nothing(tmp_path: Path) -> None:
    assert len(set(run_ranks(_restores_between, 2, str(tmp_path / "s")))) == 1
    assert tierckpt.verify(tmp_path / "s").ok


def test_a_restore_of_a_process_alone_leaves_nothing_of_before_to_hasten(tmp_path: Path) -> None:
    _restores_between(0, str(tmp_path / "s"))
    assert tierckpt.verify(tmp_path / "s").ok


def _waits_for_ever(rank: int, root: str) -> None:
    ckpt = Checkpointer(root, tiers=[Ram(), RARELY], save_on_signal=True, timeout=30)
    ckpt.save(0, state(0, rank)).wait()
    dist.barrier()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    # As torchrun does when a rank has died: nothing can be agreed on, so it must end the process as ever.
    _notice()
    threading.Event().wait()


def test_when_a_rank_has_died_a_signal_ends_the_others(tmp_path: Path) -> None:
    told = spawn(_waits_for_ever, 2, str(tmp_path / "s"))
    assert [one.exitcode for one in told] == [-signal.SIGTERM, -signal.SIGKILL], told[0].describe()


def _fails(rank: int, root: str) -> None:
    with contextlib.suppress(ZeroDivisionError), Checkpointer(root, agent="off", save_on_signal=True) as ckpt:
        ckpt.save(0, state(0, rank)).wait()
        if rank == 1:
            raise ZeroDivisionError
        _notice()
        threading.Event().wait()


def test_when_a_rank_has_failed_a_signal_ends_the_others(tmp_path: Path) -> None:
    told = spawn(_fails, 2, str(tmp_path / "s"))
    assert [one.exitcode for one in told] == [-signal.SIGTERM, 0], told[0].describe()


def _differ(rank: int, root: str) -> str:
    with pytest.raises(StateError) as told:
        Checkpointer(root, save_on_signal=rank == 0)
    return str(told.value)


def test_ranks_must_be_given_the_same(tmp_path: Path) -> None:
    for told in run_ranks(_differ, 2, str(tmp_path / "s")):
        assert "save_on_signal= must be the same on all ranks" in told


@BOTH
@pytest.mark.limit(150)
def test_under_torchrun(tmp_path: Path, agent: str) -> None:
    first = 0
    for _ in range(2):
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        job = subprocess.Popen(
            [*command, "-m", "tests.agent.preempted", str(tmp_path / "s"), agent],
            stderr=subprocess.PIPE,
            text=True,
            cwd=Path(__file__).parents[1],
        )
        try:
            until(lambda: all((tmp_path / f"ready{rank}").exists() for rank in range(2)), 60)
            pids = [int((tmp_path / f"ready{rank}").read_text()) for rank in range(2)]
            job.terminate()
            job.communicate(timeout=60)
        finally:
            job.kill()
            job.communicate()
        assert job.returncode != 0  # torchrun's own word for a signal, as the guide says
        assert all(gone(pid) for pid in pids)
        told = {(tmp_path / f"stopped{rank}").read_text() for rank in range(2)}
        assert len(told) == 1, told
        began, last = map(int, told.pop().split())
        assert began == first and tierckpt.steps(tmp_path / "s")[-1] == last
        first = last + 1
        for path in [*tmp_path.glob("ready*"), *tmp_path.glob("stopped*")]:
            path.unlink()
    assert tierckpt.verify(tmp_path / "s").ok
