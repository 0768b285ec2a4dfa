"""K05: retention removes what it was told to, in the right order, and never the last checkpoint."""

from __future__ import annotations

import time
from pathlib import Path

import tierckpt
from tests.cases.common import blank, files_of, holds, state
from tests.harness import run_ranks
from tierckpt import Checkpointer, Disk

_STEPS = range(1, 7)


def _saves_or_looks(rank: int, root: str, end: str) -> int:
    """Rank 0 saves with ``keep=1``; rank 1 counts the moments at which nothing whole was there."""
    if rank == 1:
        return _look_on(root, end)
    try:
        with Checkpointer(root, tiers=[Disk(keep=1, grace=0)], agent="off") as ckpt:
            for step in _STEPS:
                ckpt.save(step, state(step)).wait()
                assert tierckpt.steps(root) == [step]
                report = tierckpt.verify(root, every=True)
                assert report.ok and report.checked == [(1, step)], report.problems
                found = blank()
                assert tierckpt.load(found, root).step == step
                assert holds(found, step)
                assert not files_of(root, step - 1)
    finally:
        Path(end).touch()
    return 0


def _look_on(root: str, end: str) -> int:
    looks = empty = 0
    seen = False
    while not Path(end).exists():
        before = tierckpt.latest(root)
        if before is not None:
            seen = True
            looks += 1
            # What is retired while we look has a successor: only an unchanged and broken newest one counts.
            if not tierckpt.verify(root, step=before).ok and tierckpt.latest(root) == before:
                empty += 1
        elif seen:
            empty += 1
        time.sleep(0.005)
    assert looks > 5
    return empty


def test_c20_keep_1_keeps_one(tmp_path: Path) -> None:
    assert run_ranks(_saves_or_looks, 2, str(tmp_path / "store"), str(tmp_path / "end"), group=False) == [0, 0]


def test_c20_prune_keeps_the_only_checkpoint(tmp_path: Path) -> None:
    tierckpt.save(state(1), tmp_path, 1)
    done = tierckpt.prune(tmp_path, keep=1, grace=0)
    assert (done.retired, done.removed) == ([], [])
    assert tierckpt.latest(tmp_path) == 1 and tierckpt.verify(tmp_path).ok


def test_c22_a_pinned_checkpoint_stays_beside_those_that_are_kept(tmp_path: Path) -> None:
    listed = []
    with Checkpointer(tmp_path, tiers=[Disk(keep=2, grace=0)], agent="off") as ckpt:
        for step in range(1, 6):
            ckpt.save(step, state(step), pin=step == 1).wait()
            listed.append(tierckpt.steps(tmp_path))
    assert listed == [[1], [1, 2], [1, 2, 3], [1, 3, 4], [1, 4, 5]]
    found = blank()
    assert tierckpt.load(found, tmp_path, step=1).step == 1 and holds(found, 1)
    # Nor does prune touch it.
    tierckpt.prune(tmp_path, keep=1, grace=0)
    assert tierckpt.steps(tmp_path) == [1, 5]
    assert tierckpt.verify(tmp_path, every=True).ok
