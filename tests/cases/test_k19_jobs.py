"""K19: several jobs, or several groups of one job, at one root: one of them wins, and nothing is mixed.

The peer arms (C117) wait for the peer tier. By design the processes of one job are one group; groups of one job that
save apart nevertheless are like two restarts of the run: the older is fenced.
"""

from __future__ import annotations

import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import tierckpt
from tests.cases.common import files_of, holds, state
from tests.harness import run_ranks
from tierckpt import Checkpointer, FencedError, StoreError, UntrustedError
from tierckpt.tiers.disk import DiskPlace
from tierckpt.tiers.trust import Pins

_ROOTS = 20


def _job(rank: int, base: str, run: str, value: float) -> list[str]:
    """Saves step 5 to every root; says for each whether it could, or why not."""
    told = []
    for n in range(_ROOTS):
        try:
            tierckpt.save(state(value), f"{base}/{n}", 5, run=run)
        except StoreError as error:
            told.append(str(error))
        else:
            told.append("saved")
    return told


def test_c119_two_jobs_with_their_own_run_ids_do_not_share_a_root(tmp_path: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        one = pool.submit(run_ranks, _job, 2, str(tmp_path), "one", 1.0)
        two = pool.submit(run_ranks, _job, 2, str(tmp_path), "two", 2.0)
        told = {"one": one.result(), "two": two.result()}
    for n in range(_ROOTS):
        said = {run: [ranks[n] for ranks in answers] for run, answers in told.items()}
        won = [run for run, answers in said.items() if answers == ["saved"] * 2]
        assert len(won) == 1, said
        (lost,) = {"one", "two"} - set(won)
        for text in said[lost]:
            assert repr(won[0]) in text and repr(lost) in text and str(tmp_path / str(n)) in text
        report = tierckpt.verify(tmp_path / str(n), every=True)
        assert report.ok and not report.notes, (report.problems, report.notes)
        assert report.run == won[0]
        assert holds(tierckpt.read(tmp_path / str(n)), 1.0 if won[0] == "one" else 2.0)


def _one_group(rank: int, base: str) -> list[int]:
    return [tierckpt.save(state(7), f"{base}/{n}", 5).generation for n in range(_ROOTS)]


def test_c119_replicas_of_one_job_write_one_checkpoint(tmp_path: Path) -> None:
    assert run_ranks(_one_group, 4, str(tmp_path)) == [[1] * _ROOTS] * 4
    for n in range(_ROOTS):
        root = tmp_path / str(n)
        # Every replicated byte once.
        assert sum(path.stat().st_size for path in root.rglob("*.safetensors")) < 2 * 1000 * 3 * 4
        report = tierckpt.verify(root)
        assert report.ok and not report.notes, (report.problems, report.notes)
        assert holds(tierckpt.read(root), 7)


def _two_groups(rank: int, base: str) -> list[str]:
    import torch.distributed as dist

    groups: list[Any] = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    told = []
    for n in range(_ROOTS):
        try:
            tierckpt.save(state(rank // 2), f"{base}/{n}", 5, group=groups[rank // 2])
        except FencedError as error:
            told.append(str(error))
        else:
            told.append("saved")
    return told


def test_c119_two_groups_of_one_job_never_mix(tmp_path: Path) -> None:
    told = run_ranks(_two_groups, 4, str(tmp_path))
    assert told[0] == told[1] or all((a == "saved") == (b == "saved") for a, b in zip(told[0], told[1], strict=True))
    for n in range(_ROOTS):
        root = tmp_path / str(n)
        saved = [value for value in (0, 1) if told[2 * value][n] == "saved"]
        assert saved, "the newer of two generations is never fenced"
        report = tierckpt.verify(root, every=True)
        assert report.ok, report.problems
        found = tierckpt.read(root)
        assert any(holds(found, value) for value in saved)
        assert tierckpt.steps(root) == [5]
        tierckpt.prune(root, keep=1, grace=0)
        assert len({name.split("/")[0] for name in files_of(root, 5)}) == 1


def test_c119_who_begins_right_after_another_has_a_generation_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between a process's link and its reading the chain back another one begins: they must not take the same number."""
    create, begun = DiskPlace.create, []

    def create_and_then(place: DiskPlace, name: str, data: bytes) -> bool:
        done = create(place, name, data)
        if name.startswith("chain/") and not begun:
            begun.append(name)
            tierckpt.save(state(1), tmp_path, 5)
        return done

    monkeypatch.setattr(DiskPlace, "create", create_and_then)
    with Checkpointer(tmp_path, agent="off") as ckpt, pytest.raises(FencedError, match="generation 2"):
        ckpt.save(5, state(0)).wait()
    assert begun
    report = tierckpt.verify(tmp_path, every=True)
    assert report.ok, report.problems
    assert holds(tierckpt.read(tmp_path), 1)


def _with_a_key_of_its_own(rank: int, base: str) -> list[str]:
    """Begins every store at the same moment as the other process, as another user would."""
    told = []
    for n in range(_ROOTS):
        Path(base, f"{rank}-{n}").touch()
        while not Path(base, f"{1 - rank}-{n}").exists():
            pass
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                tierckpt.save(state(rank), f"{base}/stores/{n}", 5)
        except (FencedError, UntrustedError) as error:
            told.append(type(error).__name__)
        else:
            told.append("saved")
    return told


def test_c119_two_keys_that_begin_one_store_leave_a_valid_chain(tmp_path: Path) -> None:
    env = [{"XDG_CONFIG_HOME": str(tmp_path / str(rank))} for rank in range(2)]
    told = run_ranks(_with_a_key_of_its_own, 2, str(tmp_path), env=env, group=False)
    for n in range(_ROOTS):
        root = tmp_path / "stores" / str(n)
        saved = [rank for rank in range(2) if told[rank][n] == "saved"]
        assert saved, (told[0][n], told[1][n])
        # What verify may say is that one of the keys is nobody's we know.
        report = tierckpt.verify(root, every=True)
        assert {problem["kind"] for problem in report.problems} <= {"untrusted"}, report.problems
        assert tierckpt.steps(root) == [5]


def _saves(rank: int, root: str, step: int) -> None:
    tierckpt.save(state(step), root, step)


@pytest.mark.parametrize("look", ["load", "verify", "prune"])
def test_a_head_that_was_pinned_a_moment_ago_is_no_roll_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: str
) -> None:
    """Another process of the user publishes and pins between our look at the chain and our look at the pins."""
    root = str(tmp_path)
    run_ranks(_saves, 1, root, 1, group=False)
    original = Pins.load
    saved: list[int] = []

    def load(*args: Any) -> Pins:
        if not saved:
            saved.append(2)
            run_ranks(_saves, 1, root, 2, group=False)
        return original(*args)

    monkeypatch.setattr(Pins, "load", load)
    if look == "load":
        assert tierckpt.load(state(-1), root).step == 2
    elif look == "verify":
        report = tierckpt.verify(root)
        assert report.ok, report.problems
    else:
        assert tierckpt.prune(root, keep=1).retired[0].step == 1
    assert saved == [2]


@pytest.mark.parametrize("order", [[0, 1], [1, 0]], ids=str)
def test_c119_ranks_may_be_in_different_numbers_of_groups(tmp_path: Path, order: list[int]) -> None:
    """Opening channels for a group must not depend on what other groups a rank is in."""
    assert run_ranks(_lopsided, 3, str(tmp_path), order) == [1, 1, None]
    assert tierckpt.verify(tmp_path).ok


def _lopsided(rank: int, root: str, order: list[int]) -> int | None:
    import torch.distributed as dist

    group = dist.new_group(order)
    dist.new_group([1, 2])  # rank 1 knows one group more than rank 0
    saved = tierckpt.save(state(1), root, 5, group=group).generation if rank < 2 else None
    dist.barrier()  # gloo: a rank that leaves takes connections away that others are still making
    return saved
