"""What was sealed survives its trainer: real processes, killed at every moment that matters."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.agent.job import state, values
from tests.agents import at_the_next_write, gone, kill, slot_ahead, status, statuses, tell, until
from tests.harness import run_ranks, spawn
from tierckpt import Checkpointer, Disk, FencedError, Ram, SkippedError
from tierckpt.agent.runtime import runtime_folder
from tierckpt.restore.held import Memories
from tierckpt.snapshot.remote import RemoteArena

RARELY = Disk(every=1000)


def _dies_after(rank: int, root: str, last: int, deadly: int = 0) -> None:
    ckpt = Checkpointer(root, tiers=[Ram(), RARELY])
    ckpt.restore(state(-1, rank))
    for step in range(last + 1):
        ckpt.save(step, state(step, rank)).wait("ram" if step else None)
    os.kill(os.getpid(), signal.SIGKILL)


def _restores(rank: int, root: str, **more: Any) -> dict[str, Any]:
    found = state(-1, rank)
    with Checkpointer(root, tiers=[Ram(), RARELY]) as ckpt:
        info = ckpt.restore(found, **more)
        assert info is not None
        return {
            "step": info.step,
            "sources": dict(info.sources),
            "values": values(found, rank),
            "skipped": info.skipped,
            "own": found["own"].value,
            "next": ckpt.save(info.step + 1, state(info.step + 1, rank)).wait("ram"),
        }


def _drained(root: Path, step: int) -> None:
    until(lambda: step in tierckpt.steps(root))


def test_killed_after_the_seal_it_is_drained_and_restored_from_memory(tmp_path: Path) -> None:
    root = tmp_path / "s"
    spawn(_dies_after, 1, str(root), 5, group=False)
    _drained(root, 5)
    assert tierckpt.steps(root) == [0, 5] and tierckpt.verify(root).ok
    # The disk has lost the step's files: memory has them all.
    for step in (0, 5):
        shutil.rmtree(root / f"g0001/s{step:012d}")
    shutil.rmtree(root / "layouts")
    (told,) = run_ranks(_restores, 1, str(root), group=False)
    assert told["step"] == 5 and told["values"] == {5.0}
    assert set(told["sources"]) == {"ram"}


def _dies_while_copying(rank: int, root: str) -> None:
    ckpt = Checkpointer(root, tiers=[Ram(), RARELY])
    for step in range(3):
        ckpt.save(step, state(step, rank)).wait("ram" if step else None)

    def seal(*_: Any, **__: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    RemoteArena.seal = seal  # type: ignore[method-assign]
    ckpt.save(3, state(3, rank))


def _saves_on(rank: int, root: str) -> int:
    with Checkpointer(root, tiers=[Ram(), Disk()]) as ckpt:
        info = ckpt.save(10, state(10)).wait()
        assert info is not None
        return info.generation


def test_a_start_without_restore_goes_on_from_what_is_in_memory(tmp_path: Path) -> None:
    root = tmp_path / "s"
    spawn(_dies_after, 1, str(root), 3, group=False)
    assert run_ranks(_saves_on, 1, str(root), group=False) == [2]
    assert tierckpt.steps(root) == [0, 3, 10] and tierckpt.verify(root).ok


def test_another_number_of_ranks_restores_from_memory(tmp_path: Path) -> None:
    root = tmp_path / "s"
    spawn(_dies_after, 2, str(root), 2)
    found = {"sharded": torch.zeros(600, 70), "n": 0}
    with Checkpointer(root, tiers=[Ram(), RARELY]) as ckpt:
        info = ckpt.restore(found, strict=False)
        assert info is not None and (info.step, set(info.sources)) == (2, {"ram"})
    assert found["n"] == 2
    assert found["sharded"][:300].unique().tolist() == [2.0] and found["sharded"][300:].unique().tolist() == [3.0]


def test_killed_while_it_copied_nothing_was_sealed(tmp_path: Path) -> None:
    root = tmp_path / "s"
    spawn(_dies_while_copying, 1, str(root), group=False)
    _drained(root, 2)
    (generation,) = status()["generations"]
    assert [held["step"] for held in generation["steps"]] == [2]
    (told,) = run_ranks(_restores, 1, str(root), group=False)
    assert told["step"] == 2 and told["values"] == {2.0}


@pytest.mark.limit(120)
def test_it_outlives_torchrun(tmp_path: Path) -> None:
    def torchrun(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        return subprocess.run(
            [*command, "-m", "tests.agent.job", str(tmp_path / "s"), *arguments],
            capture_output=True,
            text=True,
            timeout=100,
            check=False,
            cwd=Path(__file__).parents[2],
        )

    first = torchrun("save", "4")
    assert first.returncode != 0 and "SIGKILL" in first.stderr, first.stderr
    _drained(tmp_path / "s", 4)
    shutil.rmtree(tmp_path / "s/g0001")
    second = torchrun("restore")
    assert second.returncode == 0, second.stderr
    for rank in range(2):
        step, sources, found = json.loads((tmp_path / f"rank{rank}.json").read_text())
        assert (step, set(sources), found) == (4, {"ram"}, [4.0])


NODES = [{"TIERCKPT_NODE": "a"}, {"TIERCKPT_NODE": "b"}]


@pytest.mark.limit(120)
def test_nodes_restore_from_each_others_memory(tmp_path: Path) -> None:
    root = tmp_path / "s"
    spawn(_dies_after, 2, str(root), 3, env=NODES)
    # The agent of rank 0's node commits once it sees the receipts of the other one.
    _drained(root, 3)
    assert tierckpt.verify(root).ok
    shutil.rmtree(root / "g0001")
    for told, rank in zip(run_ranks(_restores, 2, str(root), env=NODES[::-1]), range(2), strict=True):
        assert (told["step"], told["values"], told["own"]) == (3, {3.0}, rank)
        assert set(told["sources"]) == {"ram"}
    until(lambda: not statuses())


def _folder_of_node(root: str) -> str:
    return f"{root}/{os.environ['TIERCKPT_NODE']}"


def _local_dies(rank: int, root: str) -> None:
    _dies_after(rank, _folder_of_node(root), 3)


def _local_restores(rank: int, root: str) -> dict[str, Any]:
    return _restores(rank, _folder_of_node(root))


@pytest.mark.limit(120)
def test_with_a_root_on_each_node_the_next_start_commits(tmp_path: Path) -> None:
    spawn(_local_dies, 2, str(tmp_path), env=NODES)
    told = run_ranks(_local_restores, 2, str(tmp_path), env=NODES)
    assert [(one["step"], one["values"]) for one in told] == [(3, {3.0})] * 2
    for node in "ab":
        assert 3 in tierckpt.steps(tmp_path / node)
        report = tierckpt.verify(tmp_path / node)
        assert report.ok, report.problems


def _half_sealed(rank: int, root: str) -> None:
    """Rank 1 dies before it has sealed step 2; rank 0 has."""
    ckpt = Checkpointer(root, tiers=[Ram(), RARELY])
    for step in range(2):
        ckpt.save(step, state(step, rank)).wait("ram" if step else None)
    if rank == 1:
        RemoteArena.seal = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign, misc, assignment]
    ckpt.save(2, state(2, rank))
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.limit(120)
@pytest.mark.parametrize("nodes", [None, NODES])
def test_a_step_that_one_rank_has_not_sealed_is_not_restored(tmp_path: Path, nodes: Any) -> None:
    root = tmp_path / "s"
    spawn(_half_sealed, 2, str(root), env=nodes)
    if nodes is None:
        _drained(root, 1)
    told = run_ranks(_restores, 2, str(root), env=nodes)
    assert [(one["step"], one["values"]) for one in told] == [(1, {1.0})] * 2
    assert tierckpt.verify(root).ok


def test_a_stopped_trainer_that_comes_back_is_fenced(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with Checkpointer(root, tiers=[Ram(), RARELY]) as old:
        old.save(1, state(1)).wait("ram")
        (told,) = run_ranks(_restores, 1, str(root), group=False)
        assert told["step"] == 1 and set(told["sources"]) == {"ram"}
        # The other one has ended, and drained what it had last.
        assert tierckpt.steps(root) == [1, 2]
        until(lambda: not statuses())  # a new agent, which knows nothing of the other generation, would let it in
        with pytest.raises(FencedError):
            for step in range(2, 5):
                old.save(step, state(10 * step))
                old.wait()
    found = state(-1)
    assert tierckpt.load(found, root).step == 2 and values(found, 0) == {2.0}


def _is_stopped(rank: int, root: str) -> str:
    ckpt = Checkpointer(root, tiers=[Ram(), Disk()])
    for step in range(3):
        ckpt.save(step, state(step)).wait()
    tell(Path(root).with_name("pid"), str(os.getpid()))
    os.kill(os.getpid(), signal.SIGSTOP)
    try:
        for step in range(3, 6):
            ckpt.save(step, state(100)).wait()
    except tierckpt.TierckptError as error:
        ckpt.close()
        return type(error).__name__
    return "nothing"


def test_a_trainer_that_was_really_stopped_touches_nothing(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with ThreadPoolExecutor(1) as pool:
        stopped = pool.submit(run_ranks, _is_stopped, 1, str(root), group=False)
        pid = int(until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text()))
        until(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
        with Checkpointer(root, tiers=[Ram(), Disk()]) as ckpt:
            found = state(-1)
            info = ckpt.restore(found)
            assert info is not None and info.step == 2 and values(found, 0) == {2.0}
            for step in range(3, 6):
                ckpt.save(step, state(step)).wait()
            os.kill(pid, signal.SIGCONT)
            assert stopped.result() == ["FencedError"]
            assert tierckpt.load(found, root).step == 5 and values(found, 0) == {5.0}
    assert tierckpt.steps(root) == [0, 1, 2, 3, 4, 5] and tierckpt.verify(root, every=True).ok


def test_one_process_restores_again_and_again(tmp_path: Path) -> None:
    root, found = tmp_path / "s", state(-1)
    with Checkpointer(root, tiers=[Ram(), RARELY]) as ckpt:
        for start in range(4):
            for step in range(3 * start, 3 * start + 3):
                ckpt.save(step, state(step))
            info = ckpt.restore(found)
            assert info is not None
            assert (info.step, info.generation, set(info.sources)) == (step, start + 1, {"ram"})
            assert values(found, 0) == {float(step)}
        assert len(statuses()) == 1
    assert tierckpt.steps(root) == [0, 2, 5, 8, 11] and tierckpt.verify(root).ok


def test_without_an_agent_it_goes_on_as_with_agent_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Checkpointer(tmp_path / "s", tiers=[Ram(), Disk(every=2)]) as ckpt:
        with pytest.warns(RuntimeWarning, match="do not outlive this process"):
            handle = ckpt.save(0, state(0))
        assert handle.wait() is not None
        with pytest.raises(SkippedError, match="no agent"):
            handle.wait("ram")
        assert ckpt.save(1, state(1)).wait() is None
        assert ckpt.save(2, state(2)).wait() is not None
    assert tierckpt.steps(tmp_path / "s") == [0, 2]


def test_a_forked_child_does_not_keep_a_dead_trainer_alive(tmp_path: Path) -> None:
    root = tmp_path / "s"
    spawn(_forks, 1, str(root), group=False)
    child = int((tmp_path / "child").read_text())
    try:
        _drained(root, 2)
        assert Path(f"/proc/{child}").exists()
    finally:
        os.kill(child, signal.SIGKILL)


def _forks(rank: int, root: str) -> None:
    ckpt = Checkpointer(root, tiers=[Ram(), RARELY])
    for step in range(3):
        ckpt.save(step, state(step)).wait("ram" if step else None)
    child = os.fork()
    if not child:
        os.setsid()
        signal.pause()
    tell(Path(root).with_name("child"), str(child))
    os.kill(os.getpid(), signal.SIGKILL)


def test_a_dead_agent_costs_what_it_held_and_no_more(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with Checkpointer(root, tiers=[Ram(), Disk()]) as ckpt:
        ckpt.save(1, state(1)).wait()
        kill(status()["pid"])
        ckpt.save(2, state(2)).wait()
        pid = status()["pid"]
        os.kill(pid, signal.SIGSTOP)
        os.kill(pid, signal.SIGKILL)
        assert gone(pid)
        assert ckpt.save(3, state(3)).wait() is not None
    assert tierckpt.steps(root) == [1, 2, 3]
    assert tierckpt.verify(root).ok


def test_a_step_that_is_due_gets_to_the_disk_though_its_agent_dies(tmp_path: Path) -> None:
    """The trainer still has what it has sealed."""
    root = tmp_path / "s"
    with Checkpointer(root, tiers=[Ram(), Disk()]) as ckpt:
        ckpt.save(1, state(1)).wait()
        killed: list[int] = []

        def dies() -> None:
            killed.append(status()["pid"])
            kill(killed[0])

        at_the_next_write(ckpt, dies)
        assert ckpt.save(2, state(2)).wait() is not None
        assert killed
        assert ckpt.save(3, state(3)).wait() is not None
    assert tierckpt.steps(root) == [1, 2, 3] and tierckpt.verify(root).ok


@pytest.mark.parametrize("lacking", ["executable", "folder"])
def test_a_dead_agent_that_cannot_be_replaced_costs_its_tier_until_it_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lacking: str
) -> None:
    """A Python that was updated away, a runtime folder that was taken away with the user's last login."""
    root, base = tmp_path / "s", Path(os.environ["XDG_RUNTIME_DIR"])
    with Checkpointer(root, tiers=[Ram(), Disk(every=2)]) as ckpt:
        ckpt.save(0, state(0)).wait()
        slot_ahead(ckpt)
        kill(status()["pid"])
        with monkeypatch.context() as patched:
            if lacking == "executable":
                patched.setattr(sys, "executable", str(tmp_path / "nothing"))
            else:
                shutil.rmtree(base / "tierckpt")
                (base / "tierckpt").write_text("")
            with pytest.warns(RuntimeWarning, match="no agent keeps the steps of this rank") as told:
                for step in range(1, 7):
                    handle = ckpt.save(step, state(step))
                    if step % 2 == 0:
                        assert handle.wait() is not None
                    else:
                        with pytest.raises(SkippedError, match="was skipped"):
                            handle.wait()
            assert len([one for one in told if "no agent keeps" in str(one.message)]) == 1
        if lacking == "folder":
            (base / "tierckpt").unlink()
        ckpt.save(7, state(7)).wait("ram")
    assert tierckpt.steps(root) == [0, 2, 4, 6, 7] and tierckpt.verify(root, every=True).ok


def test_a_signal_after_its_agent_has_died_saves_the_last_step_all_the_same(tmp_path: Path) -> None:
    """The newest step was due nowhere but in memory; its trainer still has it."""
    root = tmp_path / "s"
    with Checkpointer(root, tiers=[Ram(), RARELY], save_on_signal=True) as ckpt:
        ckpt.save(0, state(0)).wait()
        ckpt.save(1, state(1)).wait("ram")
        kill(status()["pid"])
        ckpt._hasten(2)
        ckpt.wait()
        assert tierckpt.steps(root) == [0, 1]
    assert tierckpt.verify(root, every=True).ok


def test_nothing_is_left_after_the_idle_time(tmp_path: Path) -> None:
    before = set(os.listdir("/dev/shm"))
    (result,) = spawn(_idle, 1, str(tmp_path / "s"), group=False)
    assert result.exitcode == -signal.SIGKILL, result.describe()
    pid = int((tmp_path / "pid").read_text())
    assert gone(pid)
    folder = runtime_folder(make=False)
    assert folder is not None and not list(folder.iterdir())
    assert set(os.listdir("/dev/shm")) <= before
    assert tierckpt.steps(tmp_path / "s") == [0, 2]


def _idle(rank: int, root: str) -> None:
    ckpt = Checkpointer(root, tiers=[Ram(idle=0.1), RARELY])
    for step in range(3):
        ckpt.save(step, state(step)).wait("ram" if step else None)
    tell(Path(root).with_name("pid"), str(status()["pid"]))
    os.kill(os.getpid(), signal.SIGKILL)


def test_sigterm_to_the_agent_drains_first(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with Checkpointer(root, tiers=[Ram(), RARELY]) as ckpt:
        for step in range(3):
            ckpt.save(step, state(step)).wait("ram" if step else None)
        pid = status()["pid"]
        os.kill(pid, signal.SIGTERM)
        assert gone(pid)
        assert tierckpt.steps(root) == [0, 2]
        # What the trainer then cannot write again is not taken away.
    assert tierckpt.verify(root).ok


def test_the_last_step_is_durable_after_close(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with Checkpointer(root, tiers=[Ram(), RARELY]) as ckpt:
        for step in range(4):
            ckpt.save(step, state(step))
    assert tierckpt.steps(root) == [0, 3]
    until(lambda: not statuses())


def _closes(rank: int, root: str) -> None:
    with Checkpointer(_folder_of_node(root), tiers=[Ram(), RARELY]) as ckpt:
        for step in range(4):
            ckpt.save(step, state(step, rank))


def test_the_last_step_is_durable_after_close_on_every_node(tmp_path: Path) -> None:
    run_ranks(_closes, 2, str(tmp_path), env=NODES)
    for node in "ab":
        assert tierckpt.steps(tmp_path / node) == [0, 3]
        assert tierckpt.verify(tmp_path / node).ok
    until(lambda: not statuses())


def test_after_an_error_memory_waits_for_the_next_start(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with pytest.raises(ZeroDivisionError), Checkpointer(root, tiers=[Ram(), RARELY]) as ckpt:
        for step in range(4):
            ckpt.save(step, state(step)).wait("ram" if step else None)
        raise ZeroDivisionError
    (told,) = run_ranks(_restores, 1, str(root), group=False)
    assert told["step"] == 3 and set(told["sources"]) == {"ram"}


def test_load_and_read_look_into_memory_too(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with Checkpointer(root, tiers=[Ram(), RARELY]) as ckpt:
        for step in range(4):
            ckpt.save(step, state(step)).wait("ram" if step else None)
        found = state(-1)
        info = tierckpt.load(found, root)
        assert (info.step, set(info.sources), values(found, 0)) == (3, {"ram"}, {3.0})
        assert tierckpt.read(root, keys=["n"]) == {"n": 3}
        assert tierckpt.load(found, root, step=0).sources.keys() == {"disk"}
        assert tierckpt.load(found, root, step=3).step == 3
        # Reading has kept no slot.
        for step in range(4, 10):
            ckpt.save(step, state(step)).wait("ram", 20)


def _all_on_the_disk(rank: int, root: str) -> None:
    ckpt = Checkpointer(root, tiers=[Ram(), Disk()])
    for step in range(3):
        ckpt.save(step, state(step, rank)).wait()
    os.kill(os.getpid(), signal.SIGKILL)


def _restores_while_it_dies(rank: int, root: str, how: str, number: int) -> tuple[int, set[float]]:
    asked = getattr(Memories, how)

    def dies(self: Memories, *arguments: Any) -> Any:
        if rank == 0:
            for pid in [one["pid"] for one in statuses()]:
                os.kill(pid, number)
                assert gone(pid)
        return asked(self, *arguments)

    with pytest.MonkeyPatch.context() as patched, Checkpointer(root, tiers=[Ram(), Disk()]) as ckpt:
        patched.setattr(Memories, how, dies)
        found = state(-1, rank)
        info = ckpt.restore(found)
        assert info is not None
        return info.step, values(found, rank)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("how", ["layout", "_fetch"])
def test_what_its_agent_takes_with_it_under_a_restore_is_read_from_the_disk(
    tmp_path: Path, how: str, number: int
) -> None:
    root = tmp_path / "s"
    spawn(_all_on_the_disk, 2, str(root))
    assert run_ranks(_restores_while_it_dies, 2, str(root), how, int(number)) == [(2, {2.0})] * 2


def test_what_is_damaged_in_memory_is_read_from_the_disk(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with Checkpointer(root, tiers=[Ram(), Disk()]) as ckpt:
        ckpt.save(1, state(1)).wait()
        tierckpt.load(state(-1), root)
        assert ckpt._ram_tier is not None
        for memory in ckpt._ram_tier.arena._mapped.values():
            memoryview(memory)[5000] ^= 1
        found = state(-1)
        with pytest.warns(RuntimeWarning, match="memory of.*chunk 0.*is damaged"):
            info = tierckpt.load(found, root)
        assert set(info.sources) == {"disk"} and values(found, 0) == {1.0}


class _Slow:
    """A writer that waits to be let go."""

    def __init__(self, remote: RemoteArena) -> None:
        self.remote, self.go, self.begun = remote, threading.Event(), threading.Event()

    def write(self, *arguments: Any) -> bytes:
        self.begun.set()
        assert self.go.wait(50)
        return self.remote.write(*arguments)


def _slow(ckpt: Checkpointer) -> _Slow:
    ckpt.save(0, state(0)).wait()
    assert ckpt._ram_tier is not None
    slow = ckpt._drain.writer = _Slow(ckpt._ram_tier.arena)
    return slow


def test_a_step_that_waits_for_the_disk_is_overtaken_by_a_newer_one(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with Checkpointer(root, tiers=[Ram(), Disk()]) as ckpt:
        slow = _slow(ckpt)
        handles = [ckpt.save(1, state(1))]
        assert slow.begun.wait(20)
        for step in range(2, 8):
            handles.append(ckpt.save(step, state(step)))
            handles[-1].wait("ram", 20)
        slow.go.set()
        assert handles[0].wait() is not None and handles[-1].wait() is not None
        for handle in handles[1:-1]:
            with pytest.raises(SkippedError, match="overtaken by step"):
                handle.wait()
            assert handle.done("ram") and not handle.done("disk") and handle.error is None
    assert tierckpt.steps(root) == [0, 1, 7]


def test_a_pinned_step_is_not_overtaken(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "s", tiers=[Ram(slots=4), Disk()]) as ckpt:
        slow = _slow(ckpt)
        ckpt.save(1, state(1))
        assert slow.begun.wait(20)
        ckpt.save(2, state(2), pin=True).wait("ram")
        for step in range(3, 6):
            ckpt.save(step, state(step)).wait("ram", 20)
        slow.go.set()
    assert tierckpt.steps(tmp_path / "s") == [0, 1, 2, 5]


def test_skip_leaves_a_step_out(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "s", tiers=[Ram(on_full="skip", slots=2), Disk()]) as ckpt:
        slow = _slow(ckpt)
        ckpt.save(1, state(1)).wait("ram")
        assert slow.begun.wait(20)
        ckpt.save(2, state(2)).wait("ram")
        handle = ckpt.save(3, state(3))
        with pytest.raises(SkippedError, match="no slot was free on rank 0"):
            handle.wait("ram")
        slow.go.set()
    assert tierckpt.steps(tmp_path / "s") == [0, 1, 2]


def test_wait_waits(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "s", tiers=[Ram(on_full="wait", slots=2), Disk()]) as ckpt:
        slow = _slow(ckpt)
        ckpt.save(1, state(1)).wait("ram")
        ckpt.save(2, state(2)).wait("ram")
        saving = threading.Thread(target=ckpt.save, args=(3, state(3)))
        saving.start()
        assert slow.begun.wait(20) and saving.is_alive()
        slow.go.set()
        saving.join(20)
    assert tierckpt.steps(tmp_path / "s") == [0, 1, 2, 3]


def _over_budget(rank: int, root: str, slots: float) -> list[int]:
    """The budget holds so many slots of all ranks: what is due on the disk gets there, the rest is told on the handle."""
    live = {"w": torch.full((500_000,), 0.0), "rank": tierckpt.PerRank(rank)}
    size = 2 << 20  # of a slot: one huge page
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Checkpointer(root, tiers=[Ram(budget=int(slots * size)), Disk(every=3)], timeout=40) as ckpt:
            for step in range(10):
                live["w"].fill_(step)
                handle = ckpt.save(step, live)
                if step % 3:
                    with contextlib.suppress(tierckpt.ArenaFullError, SkippedError):
                        handle.wait("ram")
                    continue
                handle.wait("disk")
    return tierckpt.steps(root)


@pytest.mark.parametrize(("ranks", "slots"), [(1, 0.5), (1, 1), (1, 2), (2, 1), (2, 2), (2, 3)])
def test_what_is_due_on_the_disk_gets_there_whatever_the_budget_of_memory(
    tmp_path: Path, ranks: int, slots: float
) -> None:
    root = str(tmp_path / "s")
    for steps in run_ranks(_over_budget, ranks, root, slots, group=ranks > 1):
        assert {0, 3, 6, 9} <= set(steps)
    assert tierckpt.verify(root, every=True).ok
    for step in (3, 9):
        assert (tierckpt.read(root, step=step)["w"] == step).all()


def test_what_does_not_fit_the_budget_is_told(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "s", tiers=[Ram(budget=1 << 16), Disk(every=10)]) as ckpt:
        with pytest.warns(RuntimeWarning, match=r"no room for two steps.*65,536"):
            assert ckpt.save(0, state(0)).wait() is not None
        handle = ckpt.save(1, state(1))
        with pytest.raises(tierckpt.ArenaFullError, match="65,536"):
            handle.wait()
        handle._told = True


def test_a_budget_that_is_too_small_is_told_once_and_other_failures_each_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(ckpt: Checkpointer, *steps: int) -> list[str]:
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for step in steps:
                ckpt.save(step, state(step))._ended.wait()
            ckpt._surface()
        return [str(one.message) for one in told if "the save of" in str(one.message)]

    with Checkpointer(tmp_path / "s", tiers=[Ram(budget=1 << 16), Disk(every=10)]) as ckpt:
        (told,) = said(ckpt, *range(13))
        assert told.startswith("the save of step 1 failed") and "65,536" in told and "on their handles only" in told
        assert ckpt._ram_tier is not None
        with monkeypatch.context() as patched:
            patched.setattr(ckpt._ram_tier, "acquire", _full)
            assert [len(said(ckpt, step)) for step in (13, 14)] == [1, 0]
        assert [len(said(ckpt, step)) for step in (15, 16)] == [1, 0]
        with monkeypatch.context() as patched:  # what was due on the disk is lost there, too
            patched.setattr(ckpt._ram_tier, "acquire_here", _full)
            assert [len(said(ckpt, step)) for step in (20, 30, 31, 40)] == [1, 1, 0, 1]
        assert tierckpt.steps(tmp_path / "s") == [0, 10]


def _full(*_: Any, **__: Any) -> Any:
    raise tierckpt.ArenaFullError("it is full for another reason")


def _numbers(pid: int) -> tuple[int, int, int]:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    anonymous = int(fields["RssAnon"].split()[0])
    return len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"]), anonymous


@pytest.mark.limit(120)
def test_nothing_grows_over_many_saves(tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "s", tiers=[Ram(), Disk(every=10, keep=2, grace=0)]) as ckpt:

        def run(first: int, last: int) -> None:
            for step in range(first, last):
                handle = ckpt.save(step, state(step))
            handle.wait("ram")
            ckpt.wait()

        run(0, 300)
        agent, mine = status()["pid"], os.getpid()
        seen = [(_numbers(agent), _numbers(mine))]
        for first in (300, 600, 900):
            run(first, first + 300)
            seen.append((_numbers(agent), _numbers(mine)))
        assert ckpt._ram_tier is not None
        arena = ckpt._ram_tier.arena
        assert max(map(len, (arena._sealed, arena._open, arena._tickets, arena._mapped, arena._untold))) < 10
    for each in zip(*seen, strict=True):  # of the agent, and of the trainer
        files, threads, memory = zip(*each, strict=True)
        assert max(files) <= files[0] + 2 and max(threads) <= threads[0] + 2, each
        # A buffer that is touched for the first time is 4 MiB, once; what leaks does so all the time.
        assert min(after - before for before, after in pairwise(memory)) <= 256, each
        assert max(memory) <= memory[0] + (24 << 10), each


def _one_fails(rank: int, root: str) -> list[str]:
    told = []
    with Checkpointer(root, tiers=[Ram(), Disk()]) as ckpt:
        ckpt.save(1, state(1, rank)).wait()
        seal = RemoteArena.seal
        if rank == 1:

            def fails(*_: Any, **__: Any) -> None:
                raise tierckpt.StoreError("no, not now")

            RemoteArena.seal = fails  # type: ignore[method-assign]
        handle = ckpt.save(2, state(2, rank))
        try:
            handle.wait("ram")
        except tierckpt.StoreError as error:
            told.append(str(error))
        RemoteArena.seal = seal  # type: ignore[method-assign]
        ckpt.save(3, state(3, rank)).wait()
        told.append(str([held["step"] for g in status()["generations"] for held in g["steps"]]))
    return told


def test_what_one_rank_cannot_seal_fails_on_all(tmp_path: Path) -> None:
    for told in run_ranks(_one_fails, 2, str(tmp_path / "s")):
        assert "no, not now" in told[0] and "rank 1" in told[0]
        assert told[1] in ("[3]", "[1, 3]"), told
    assert tierckpt.steps(tmp_path / "s") == [1, 3]


def _life(root: str, first: int, last: int, value: float) -> None:
    found = {"w": torch.zeros(100)}
    ckpt = Checkpointer(root, run="named", tiers=[Ram(), Disk(every=1000)])
    ckpt.restore(found)
    for step in range(first, last):
        found["w"].fill_(value + step)
        ckpt.save(step, found).wait("ram")
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("how", ["removed", "rolled back"])
def test_a_store_that_was_taken_away_does_not_get_its_former_life_back(tmp_path: Path, how: str) -> None:
    root, life = (
        tmp_path / "s",
        "from tests.agent.test_outlives import _life; import sys; _life(sys.argv[1], *map(int, sys.argv[2:]))",
    )

    def run(first: int, last: int, value: int) -> None:
        done = subprocess.run([sys.executable, "-c", life, str(root), str(first), str(last), str(value)], timeout=60)
        assert done.returncode == -signal.SIGKILL
        until(lambda: "alive" not in json.dumps(status()["generations"]))

    run(0, 3, 1000)
    until(lambda: tierckpt.latest(root) == 2)
    shutil.copytree(root, tmp_path / "backup")
    run(3, 6, 1000)
    until(lambda: tierckpt.latest(root) == 5)
    # The agent may still be busy in there.
    until(lambda: (shutil.rmtree(root, ignore_errors=True), not root.exists())[1])
    shutil.rmtree(Path(os.environ["XDG_CONFIG_HOME"], "tierckpt", "known"))
    if how == "rolled back":
        shutil.copytree(tmp_path / "backup", root)
    found = {"w": torch.zeros(100)}
    with Checkpointer(root, run="named", tiers=[Ram(), Disk(every=1000)]) as ckpt:
        info = ckpt.restore(found)
        assert (None if info is None else info.step) == (2 if how == "rolled back" else None)
        assert set(found["w"].tolist()) == ({1002.0} if how == "rolled back" else {0.0})
        found["w"].fill_(2001)
        ckpt.save(7, found).wait("ram")
    assert tierckpt.read(root)["w"].unique().tolist() == [2001.0]
    report = tierckpt.verify(root, every=True)
    assert report.ok, report.problems


def test_a_runtime_folder_that_cannot_be_used_costs_the_agent_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", "/proc")  # there, and nothing can be made in it
    with pytest.warns(RuntimeWarning, match="do not outlive this process"), Checkpointer(tmp_path / "s") as ckpt:
        ckpt.save(1, state(1)).wait()
    assert tierckpt.steps(tmp_path / "s") == [1]
