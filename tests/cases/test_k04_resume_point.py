"""K04: the resume point is the newest whole checkpoint by number, the same on all ranks, or an error that says why."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

import tierckpt
from tests.cases.common import blank, flip, holds, shard_of, sharded, state
from tests.harness import run_ranks


def test_c15_steps_are_numbers_not_names(tmp_path: Path) -> None:
    steps = [9, 10, 99, 100, 960000, 1080000]
    for step in (100, 1080000, 9, 960000, 99, 10):
        tierckpt.save(state(step), tmp_path, step)
    assert tierckpt.latest(tmp_path) == 1080000
    assert tierckpt.steps(tmp_path) == steps
    found = blank()
    assert tierckpt.load(found, tmp_path).step == 1080000
    done = tierckpt.prune(tmp_path, keep=2, grace=0)
    assert sorted(ref.step for ref in done.retired) == steps[:-2]
    assert tierckpt.steps(tmp_path) == [960000, 1080000]
    report = tierckpt.verify(tmp_path, every=True)
    assert report.ok and report.checked == [(1, 960000), (1, 1080000)]
    for step in steps[:-2]:
        assert not shard_of(tmp_path, step).parent.exists()


def _damage(root: Path, rank: int) -> Path:
    """Flip a byte in the middle of a data file of step 3, delete the manifest of step 2."""
    path = shard_of(root, 3, rank)
    flip(path, path.stat().st_size // 2)
    (shard_of(root, 2).parent / "manifest.json").unlink()
    return path


def test_c18_a_corrupt_newest_checkpoint_is_passed_over_with_reasons(tmp_path: Path) -> None:
    for step in (1, 2, 3):
        tierckpt.save(state(step), tmp_path, step)
    damaged = _damage(tmp_path, 0)
    found = blank()
    with pytest.warns(RuntimeWarning) as caught:
        info = tierckpt.load(found, tmp_path)
    assert info.step == 1 and holds(found, 1)
    assert len(info.skipped) == 2
    newest, middle = info.skipped
    assert "step 3" in newest and str(damaged) in newest and "damaged" in newest
    assert "step 2" in middle and "manifest.json" in middle and "missing" in middle
    assert sum("step 3" in str(w.message) or "step 2" in str(w.message) for w in caught) == 2

    # The file's path says which step it is.
    with pytest.raises(tierckpt.IntegrityError, match=f"{damaged}: chunk 0 .* is damaged"):
        tierckpt.load(blank(), tmp_path, fallback=False)
    # An explicit step never falls back.
    with pytest.raises(tierckpt.IntegrityError, match=str(damaged)):
        tierckpt.load(blank(), tmp_path, step=3)
    with pytest.raises(tierckpt.IncompleteError, match="manifest"):
        tierckpt.load(blank(), tmp_path, step=2)
    with pytest.warns(RuntimeWarning):
        assert holds(tierckpt.read(tmp_path), 1)
    with pytest.raises(tierckpt.IntegrityError):
        tierckpt.read(tmp_path, fallback=False)


def _saves(rank: int, root: str) -> None:
    for step in (1, 2, 3):
        tierckpt.save(sharded(float(step)), root, step)


def _falls_back(rank: int, root: str) -> tuple[int, list[str], float, str]:
    template = sharded(-1.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        info = tierckpt.load(template, root)
    value: Any = template["w"].to_local().unique()
    with pytest.raises(tierckpt.IntegrityError) as caught:
        tierckpt.load(sharded(-1.0), root, fallback=False)
    return info.step, list(info.skipped), value.item(), str(caught.value)


def test_c18_all_ranks_agree_on_the_step(tmp_path: Path) -> None:
    run_ranks(_saves, 4, str(tmp_path))
    damaged = _damage(tmp_path, 2)  # only rank 2 reads from it
    told = run_ranks(_falls_back, 4, str(tmp_path))
    assert [step for step, *_ in told] == [1] * 4
    assert [value for _, _, value, _ in told] == [1.0] * 4
    assert len({tuple(skipped) for _, skipped, _, _ in told}) == 1
    for *_, message in told:
        assert str(damaged) in message and "step 3" in message and "rank 2" in message
