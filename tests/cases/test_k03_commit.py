"""K03: no checkpoint is seen before it is whole, and none goes before its successor is."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from pathlib import Path
from typing import Any

import pytest

import tierckpt
from tests.agents import kill, status, until
from tests.cases.common import Faults, blank, files, files_of, folder_of, holds, on_write, shard_of, sharded, state
from tests.harness import run_ranks
from tierckpt import Checkpointer, Disk, Ram


def _dies_while_writing(rank: int, root: str, part: str) -> None:
    """Saves 1, then 2, whose first write to a file with ``part`` in its name never returns; looks on, and is killed."""
    ckpt = Checkpointer(root, tiers=[Disk(keep=1, grace=0)], agent="off")
    ckpt.save(1, state(1)).wait()
    blocked = threading.Event()

    def fault(path: str) -> None:
        if part in path:
            blocked.set()
            threading.Event().wait()

    on_write(fault)
    handle = ckpt.save(2, state(2))
    assert blocked.wait(20)
    assert not handle.done()
    for _ in range(5):
        assert tierckpt.latest(root) == 1
        assert tierckpt.steps(root) == [1]
        assert tierckpt.verify(root).ok
    os.kill(os.getpid(), signal.SIGKILL)


@pytest.mark.parametrize("part", ["shard-00000.safetensors", "receipt", "manifest", "/chain/"])
def test_c10_latest_moves_when_the_bytes_are_there_and_not_before(tmp_path: Path, part: str) -> None:
    root = str(tmp_path / "store")
    run_ranks(_dies_while_writing, 1, root, part, group=False, dies={0})
    assert tierckpt.latest(root) == 1
    report = tierckpt.verify(root)
    assert report.ok, report.problems
    found = blank()
    assert tierckpt.load(found, root).step == 1
    assert holds(found, 1)
    # The next start clears up after the dead one and saves the same step.
    tierckpt.save(state(2), root, 2)
    assert tierckpt.steps(root) == [1, 2]
    assert not [name for name in files_of(root, 2) if name.startswith("g0001/")]
    assert tierckpt.load(found, root).step == 2
    assert holds(found, 2)


def _dies_while_the_agent_writes(rank: int, root: str, rules: str, kills_agent: bool) -> None:
    """As above, with the bytes in the agent's memory, and the agent held at the first write of step 2."""
    faults = Faults(rules)
    ckpt = Checkpointer(root, tiers=[Ram(), Disk(keep=1, grace=0)])
    ckpt.save(1, state(1)).wait()
    held = faults.hold(folder_of(2), "shard-")
    handle = ckpt.save(2, state(2))
    handle.wait("ram")
    until(held)
    assert not handle.done()
    for _ in range(5):
        assert tierckpt.latest(root) == 1
        assert tierckpt.steps(root) == [1]
        assert tierckpt.verify(root).ok
    if kills_agent:
        kill(status()["pid"])
    os.kill(os.getpid(), signal.SIGKILL)


def test_c10_what_is_only_in_memory_is_not_durable_and_not_lost(tmp_path: Path) -> None:
    root, rules = tmp_path / "store", tmp_path / "rules"
    run_ranks(_dies_while_the_agent_writes, 1, str(root), str(rules), False, group=False, dies={0})
    # The agent lives, and is still held.
    assert tierckpt.latest(root) == 1 and tierckpt.steps(root) == [1]
    assert tierckpt.verify(root).ok
    found = blank()
    info = tierckpt.load(found, root)
    assert (info.step, set(info.sources)) == (2, {"ram"}) and holds(found, 2)
    assert tierckpt.load(found, root, step=1).step == 1 and holds(found, 1)
    for rule in rules.glob("*.rule"):
        rule.unlink()
    until(lambda: tierckpt.latest(root) == 2)
    report = tierckpt.verify(root, every=True)
    assert report.ok, report.problems
    assert tierckpt.load(found, root).step == 2 and holds(found, 2)


def test_c10_with_the_agent_killed_too_the_older_one_is_there(tmp_path: Path) -> None:
    root = tmp_path / "store"
    run_ranks(_dies_while_the_agent_writes, 1, str(root), str(tmp_path / "rules"), True, group=False, dies={0})
    # In its last moment the trainer may have started another agent, which is held as the first one was.
    for rule in (tmp_path / "rules").glob("*.rule"):
        rule.unlink()
    assert tierckpt.latest(root) == 1
    found = blank()
    with Checkpointer(root, tiers=[Ram(), Disk(keep=1, grace=0)]) as ckpt:
        info = ckpt.restore(found)
        assert info is not None and info.step == 1 and holds(found, 1)
        assert tierckpt.steps(root) == [1]
        ckpt.save(2, state(2)).wait()
    assert tierckpt.steps(root) == [2]
    assert tierckpt.load(found, root).step == 2 and holds(found, 2)


def _dies_while_retiring(rank: int, root: str) -> None:
    ckpt = Checkpointer(root, tiers=[Disk(keep=1, grace=0)], agent="off")
    ckpt.save(1, state(1)).wait()
    blocked, links = threading.Event(), set()

    def fault(path: str) -> None:
        if "/chain/" in path:
            links.add(path)
            if len(links) == 2:  # the first is the commit of step 2
                blocked.set()
                threading.Event().wait()

    on_write(fault)
    ckpt.save(2, state(2))
    assert blocked.wait(20)
    os.kill(os.getpid(), signal.SIGKILL)


def test_c10_step_1_goes_only_after_step_2_is_committed(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    run_ranks(_dies_while_retiring, 1, root, group=False, dies={0})
    assert tierckpt.steps(root) == [1, 2]
    report = tierckpt.verify(root, every=True)
    assert report.ok, report.problems
    for step in (1, 2):
        found = blank()
        tierckpt.load(found, root, step=step)
        assert holds(found, step)


def test_c12_a_folder_with_a_number_for_a_name_is_no_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "store"
    tierckpt.save(state(1), root, 1)
    tierckpt.save(state(2), root, 2)
    good = shard_of(root, 2).parent
    names = sorted(path.name for path in good.iterdir())
    half, cut, empty = (good.parent / f"s{step:012d}" for step in (3, 4, 5))
    half.mkdir()
    for name in names[: len(names) // 2]:
        shutil.copy(good / name, half / name)
    shutil.copytree(good, cut)
    data = cut / "shard-00000.safetensors"
    os.truncate(data, data.stat().st_size // 2)
    empty.mkdir()

    assert tierckpt.latest(root) == 2
    found = blank()
    assert tierckpt.load(found, root).step == 2
    assert holds(found, 2)
    for step, reason in ((3, "never committed"), (4, "never committed"), (5, "never saved")):
        template = blank()
        with pytest.raises(tierckpt.IncompleteError, match=f"(?s)step {step}.*{reason}"):
            tierckpt.load(template, root, step=step)
        assert holds(template, -1)
        with pytest.raises(tierckpt.IncompleteError, match=f"step {step}"):
            tierckpt.read(root, step=step)
        report = tierckpt.verify(root, step=step)
        assert [problem["kind"] for problem in report.problems] == ["incomplete"]
        assert f"step {step}" in report.problems[0]["message"]
    assert tierckpt.verify(root, step=2).ok
    report = tierckpt.verify(root, every=True)
    assert report.ok
    assert "not committed" in "; ".join(report.notes)  # left-overs: reported, no fault


def _saves(rank: int, root: str, step: int, value: float) -> Any:
    return tierckpt.save(sharded(value), root, step).generation


def _loads(rank: int, root: str, value: float) -> tuple[int, bool]:
    template = sharded(-1)
    step = tierckpt.load(template, root).step
    return step, bool((template["w"].to_local() == value).all()) and bool((template["r"] == value).all())


def test_c14_a_step_saved_again_by_fewer_ranks_leaves_no_shard_of_the_first(tmp_path: Path) -> None:
    root = str(tmp_path / "store")
    assert run_ranks(_saves, 4, root, 5, 1.0) == [1] * 4
    assert run_ranks(_saves, 2, root, 5, 2.0) == [2] * 2
    assert tierckpt.steps(root) == [5]
    for world in (1, 2, 3):
        assert run_ranks(_loads, world, root, 2.0) == [(5, True)] * world
    report = tierckpt.verify(root, every=True)
    assert report.ok, report.problems
    assert report.checked == [(2, 5)]
    stale = [name for name in files_of(root, 5) if name.startswith("g0001/")]
    assert len(stale) == 1 + 2 * 4 or not stale
    if stale:
        assert any("retired" in note and str(len(stale)) in note for note in report.notes)
    done = tierckpt.prune(root, keep=1, grace=0)
    assert set(done.removed) >= set(stale)
    # The only checkpoint stays, and nothing else does.
    assert all(name.startswith("g0002/") for name in files_of(root, 5))
    assert len([name for name in files(root) if name.startswith("layouts/")]) == 1
    assert tierckpt.verify(root).ok
