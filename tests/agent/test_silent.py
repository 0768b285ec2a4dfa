"""An agent that stands still (SIGSTOP, swap) holds training up once, for its first patience; saves go on without it, and with
it once it answers again."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import tierckpt
from tests.agent.job import state, values
from tests.agents import kill, slot_ahead, status, statuses, until
from tests.harness import run_ranks
from tierckpt import Checkpointer, Disk, Ram, SkippedError, TierckptError, config
from tierckpt.agent.writing import OwnWriter

PATIENCE = 2.0
#: What one incident may cost on a machine that is busy; each of many saves would cost the patience again.
ONCE = 2.5 * PATIENCE

pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "AGENT_ANSWER", config.AGENT_ANSWER)  # tests set it once their agent has begun


def _stopped(ckpt: Checkpointer, pid: int) -> Callable[[], None]:
    """Let an agent stand still, all its threads, under no request of ``ckpt``; the result lets it go on."""
    slot_ahead(ckpt)
    config.AGENT_ANSWER = PATIENCE
    os.kill(pid, signal.SIGSTOP)
    stats = [task / "stat" for task in Path(f"/proc/{pid}/task").iterdir()]
    until(lambda: all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats))
    return lambda: os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def _standing(ckpt: Checkpointer) -> Iterator[None]:
    go_on = _stopped(ckpt, status()["pid"])
    try:
        yield
    finally:
        go_on()


def _answers(ckpt: Checkpointer) -> bool:
    return ckpt._ram_tier is not None and ckpt._ram_tier.arena.answers


def _at_ram_again(ckpt: Checkpointer, steps: range, rank: int = 0) -> None:
    """More steps than there are slots: none of these was lost."""
    until(lambda: _answers(ckpt))
    config.AGENT_ANSWER = 15.0
    for step in steps:
        ckpt.save(step, state(step, rank)).wait("ram", 20)


def test_saves_go_on_to_the_disk_and_stall_once(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with Checkpointer(root, tiers=[Ram(), Disk()]) as ckpt:
        ckpt.save(1, state(1)).wait()
        with _standing(ckpt):
            stalls = []
            for step in range(2, 12):
                handle = ckpt.save(step, state(step))
                stalls.append(handle.timings["stall"])
                info = handle.wait()
                assert info is not None and info.step == step
                with pytest.raises(SkippedError, match=r"does not answer"):
                    handle.wait("ram")
            assert sum(stalls) < ONCE, stalls
            found = state(-1)
            assert tierckpt.load(found, root).step == 11 and values(found, 0) == {11.0}
        _at_ram_again(ckpt, range(12, 20))
        assert not status()["errors"]
    assert set(range(1, 12)) <= set(tierckpt.steps(root))
    assert tierckpt.verify(root, every=True).ok


def test_a_disk_that_is_slow_meanwhile_makes_no_save_wait(tmp_path: Path) -> None:
    go = threading.Event()
    write = OwnWriter.write

    def slow(*arguments: Any) -> bytes:
        assert go.wait(50)
        return write(*arguments)

    with Checkpointer(tmp_path / "s", tiers=[Ram(), Disk()]) as ckpt:
        ckpt.save(1, state(1)).wait()
        with _standing(ckpt), pytest.MonkeyPatch.context() as patched:
            patched.setattr(OwnWriter, "write", slow)
            try:
                handles = [ckpt.save(step, state(step)) for step in range(2, 9)]
                assert sum(handle.timings["stall"] for handle in handles) < ONCE
                # One slot of the agent may have been there already, and one is this process's own.
                for handle in handles[2:]:
                    with pytest.raises(SkippedError, match="the agent does not answer, and the step before"):
                        handle.wait()
            finally:
                go.set()
            assert handles[0].wait() is not None
            # A step that is never to be retired waits for its turn.
            assert ckpt.save(9, state(9), pin=True).wait() is not None
        _at_ram_again(ckpt, range(10, 17))
    assert {1, 2, 9} <= set(tierckpt.steps(tmp_path / "s"))


def test_a_step_that_is_not_due_on_the_disk_is_skipped(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with Checkpointer(root, tiers=[Ram(), Disk(every=10)]) as ckpt:
        ckpt.save(0, state(0)).wait()
        with _standing(ckpt):
            handles = [ckpt.save(step, state(step)) for step in range(1, 12)]
            for handle in handles:
                with pytest.raises(SkippedError, match="does not answer"):
                    handle.wait("ram")
                assert handle.error is None
            assert handles[9].wait() is not None
        _at_ram_again(ckpt, range(12, 16))
    assert tierckpt.steps(root) == [0, 10, 15]


def test_the_newest_step_in_memory_goes_to_the_disk_at_the_end_all_the_same(tmp_path: Path) -> None:
    """The trainer has its bytes as well."""
    root = tmp_path / "s"
    ckpt = Checkpointer(root, tiers=[Ram(), Disk(every=1000)])
    for step in range(4):
        ckpt.save(step, state(step)).wait("ram" if step else "disk")
    with _standing(ckpt):
        began = time.monotonic()
        ckpt.close()
        assert time.monotonic() - began < ONCE
        found = state(-1)
        assert tierckpt.load(found, root).step == 3 and values(found, 0) == {3.0}
    # It takes the trainer for dead, and finds its work done.
    until(lambda: [g["durable"] for g in status()["generations"]] == [3])
    assert tierckpt.steps(root) == [0, 3] and tierckpt.verify(root, every=True).ok
    assert not status()["errors"]


def test_one_that_dies_while_it_stands_still_is_replaced(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with Checkpointer(root, tiers=[Ram(), Disk()]) as ckpt:
        ckpt.save(1, state(1)).wait()
        pid = status()["pid"]
        _stopped(ckpt, pid)
        ckpt.save(2, state(2)).wait()
        kill(pid)
        _at_ram_again(ckpt, range(3, 9))
        assert status()["pid"] != pid
    assert tierckpt.verify(root, every=True).ok


def _one_node(rank: int, root: str, flag: str) -> dict[str, Any]:
    """The agent of rank 1's node stands still while three steps are saved."""
    told: dict[str, Any] = {"stalls": [], "said": []}
    with Checkpointer(root, tiers=[Ram(), Disk(every=2)]) as ckpt:
        ckpt.save(0, state(0, rank)).wait()
        go_on = _stopped(ckpt, next(one["pid"] for one in statuses() if one["node"] == "b")) if rank else None
        if rank:
            Path(flag).touch()
        until(Path(flag).exists)
        config.AGENT_ANSWER = PATIENCE
        for step in range(1, 7):
            handle = ckpt.save(step, state(step, rank))
            told["stalls"].append(handle.timings["stall"])
            try:
                handle.wait()
                told["said"].append("disk")
            except TierckptError as error:
                told["said"].append(type(error).__name__)
        if go_on is not None:
            go_on()
        _at_ram_again(ckpt, range(7, 14), rank)
    return told


@pytest.mark.limit(120)
def test_one_node_whose_agent_stands_still(tmp_path: Path) -> None:
    root = tmp_path / "s"
    nodes = [{"TIERCKPT_NODE": "a"}, {"TIERCKPT_NODE": "b"}]
    first, second = run_ranks(_one_node, 2, str(root), str(tmp_path / "flag"), env=nodes, timeout=100)
    assert first["said"] == second["said"]
    assert first["said"][1::2] == ["disk"] * 3 and set(first["said"][::2]) <= {"SkippedError", "AgentSilentError"}
    assert sum(first["stalls"]) < ONCE and sum(second["stalls"]) < ONCE
    assert {0, 2, 4, 6, 13} <= set(tierckpt.steps(root))
    assert tierckpt.verify(root, every=True).ok


def _again_and_again(rank: int, root: str, rounds: int) -> list[str]:
    """Whatever the agent is just doing when it is stopped."""
    said = []
    with Checkpointer(root, tiers=[Ram(), Disk(every=3, keep=5, grace=0)]) as ckpt:
        ckpt.save(0, state(0, rank)).wait()
        pid, config.AGENT_ANSWER = status()["pid"], 0.5
        for number in range(rounds):
            handles = [ckpt.save(20 * number + n, state(20 * number + n, rank)) for n in range(1, 4)]
            if rank == 0:
                os.kill(pid, signal.SIGSTOP)
            handles += [ckpt.save(20 * number + n, state(20 * number + n, rank)) for n in range(4, 10)]
            for handle in handles:
                handle._ended.wait()
                said.append("" if handle.error is None else type(handle.error).__name__)
            if rank == 0:
                os.kill(pid, signal.SIGCONT)
            until(lambda: _answers(ckpt))
            step = 20 * number + 10
            handle = ckpt.save(step, state(step, rank))
            while handle.error is not None or not handle._ended.wait(
                20
            ):  # of two ranks one may still be waiting for it
                step += 1
                handle = ckpt.save(step, state(step, rank))
    return said


@pytest.mark.limit(170)
@pytest.mark.parametrize("world", [1, 2])
def test_stopped_again_and_again_it_loses_no_slot_and_mixes_nothing(tmp_path: Path, world: int) -> None:
    root = tmp_path / "s"
    for told in run_ranks(_again_and_again, world, str(root), 8, timeout=150, group=world > 1):
        # What the agent was just asked for when it was stopped may fail; not more.
        assert sum(1 for one in told if one) <= len(told) // 2, told
    report = tierckpt.verify(root, every=True)
    assert report.ok, report.problems
    for step in tierckpt.steps(root):
        found = tierckpt.read(root, step=step)
        assert found["n"] == step and found["shared"].unique().tolist() == [float(step)]
