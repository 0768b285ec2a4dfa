"""K05: retention removes what it was told to, in the right order, and never the last checkpoint."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

import tierckpt
from tests.cases.common import blank, files_of, holds, state
from tests.harness import run_ranks
from tierckpt import Checkpointer, Disk, PerRank, StoreError
from tierckpt.tiers.disk import DiskPlace

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


# Beyond what is to be kept: an agent that commits retires nothing


def _large(value: float, *, own: bool = False) -> dict[str, Any]:
    found = state(value, size=400_000)  # 4.8 MB, 6.3 MB as values
    return {"mine": PerRank(found)} if own else found


def _disk_for(monkeypatch: pytest.MonkeyPatch, root: Path, size: int) -> None:
    def free(place: DiskPlace) -> int:
        return size - sum(path.stat().st_size for path in root.rglob("*") if path.is_file())

    monkeypatch.setattr(DiskPlace, "free", free)


@pytest.mark.parametrize("own", [False, True])
def test_what_should_have_gone_goes_where_there_is_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    """Also where most of a step is values, of which the estimate knows nothing."""
    with Checkpointer(tmp_path, agent="off") as ckpt:
        for step in range(4):
            ckpt.save(step, _large(step, own=own)).wait()
    _disk_for(monkeypatch, tmp_path, 29_000_000 if own else 22_000_000)  # for keep + 1
    seen: list[list[int]] = []
    with Checkpointer(tmp_path, tiers=[Disk(keep=3)], agent="off") as ckpt:
        ckpt.restore(_large(-1, own=own))
        put = ckpt._coordinator.keep_documents

        def look(*documents: Any) -> bytes:
            seen.append(tierckpt.steps(tmp_path))
            return put(*documents)

        ckpt._coordinator.keep_documents = look  # type: ignore[method-assign]
        for step in range(4, 7):
            ckpt.save(step, _large(step, own=own)).wait()
    assert seen[0] == [1, 2, 3]
    assert tierckpt.steps(tmp_path) == [4, 5, 6]
    assert tierckpt.verify(tmp_path, every=True).ok


def test_the_newest_and_what_is_continued_stay_for_want_of_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Checkpointer(tmp_path, agent="off") as ckpt:
        for step in range(4):
            ckpt.save(step, _large(step)).wait()
    _disk_for(monkeypatch, tmp_path, 9_000_000)
    with Checkpointer(tmp_path, tiers=[Disk(keep=1)], agent="off") as ckpt:
        ckpt.restore(_large(-1), step=1)
        with pytest.raises(StoreError, match="no space for step 2"):
            ckpt.save(2, _large(2)).wait()
    assert tierckpt.steps(tmp_path) == [1]
    found = _large(-1)
    assert tierckpt.load(found, tmp_path).step == 1 and holds(found, 1)


def test_nothing_goes_that_is_to_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path, tiers=[Disk(keep=3)], agent="off") as ckpt:
        for step in range(3):
            ckpt.save(step, _large(step)).wait()
        _disk_for(monkeypatch, tmp_path, 16_000_000)
        with pytest.raises(StoreError, match="no space for step 3"):
            ckpt.save(3, _large(3)).wait()
    assert tierckpt.steps(tmp_path) == [0, 1, 2] and tierckpt.verify(tmp_path, every=True).ok


def test_nothing_goes_while_the_newest_is_not_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Checkpointer(tmp_path, agent="off") as ckpt:
        for step in range(3):
            ckpt.save(step, _large(step)).wait()
        (tmp_path / files_of(tmp_path, 2)[-1]).unlink()
        _disk_for(monkeypatch, tmp_path, 12_000_000)
        ckpt._coordinator._retention = Disk(keep=1).retention
        with pytest.warns(RuntimeWarning, match="could not be retired"), pytest.raises(StoreError, match="no space"):
            ckpt.save(3, _large(3)).wait()
    assert tierckpt.steps(tmp_path) == [0, 1, 2]
