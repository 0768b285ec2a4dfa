"""What children of the workshop do: the uses of a store that are interrupted, and the look at what is left.

A *base* is a folder with two in it: ``store``, and ``user`` with the user's key and pins.
"""

from __future__ import annotations

import os
import random
import shutil
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import tierckpt
from tests import second_reader
from tests.crash import losses
from tests.crash.workshop import FAIL, RECORD, Shim
from tierckpt import Checkpointer, Disk
from tierckpt.errors import StoreError

#: The step that the look at the rest saves.
NEXT = 50
#: Of each scenario: the sets of steps that may be found after an interruption; the last is that after its success.
ALLOWED: dict[str, list[list[int]]] = {
    "first": [[], [1]],
    "further": [[1], [1, 2], [2]],
    "prune": [[1, 2, 3], [3]],
    "restart": [[1]],
    "following": [[NEXT]],
}
INTERRUPTED = ["first", "further", "prune", "restart"]


def state_of(step: int, large: bool = False) -> dict[str, Any]:
    """The state saved as ``step``. ``large``: several chunks."""
    state: dict[str, Any] = {
        "weights": torch.arange(700, dtype=torch.float32).reshape(7, 100) * (step + 1),
        "counts": torch.full((33,), step, dtype=torch.int64),
        "step": step,
        "seen": list(range(step)),
    }
    if large:
        state["embedding"] = torch.arange(1_200_000, dtype=torch.int32) + step
    return state


def _exact(found: Any, wanted: Any) -> bool:
    if isinstance(wanted, torch.Tensor):
        return isinstance(found, torch.Tensor) and found.dtype == wanted.dtype and torch.equal(found, wanted)
    if isinstance(wanted, dict):
        return set(found) == set(wanted) and all(_exact(found[key], wanted[key]) for key in wanted)
    return bool(type(found) is type(wanted) and found == wanted)


def _open(base: Path) -> Checkpointer:
    return Checkpointer(base / "store", tiers=[Disk(keep=1, grace=0.0)], agent="off")


def _save(checkpointer: Checkpointer, step: int, large: bool) -> None:
    checkpointer.save(step, state_of(step, large)).wait()


# What is interrupted


def first(base: Path, large: bool) -> None:
    """A new store and its first save."""
    with _open(base) as checkpointer:
        _save(checkpointer, 1, large)


def further(base: Path, large: bool) -> None:
    """A save by a process of its own: it removes what a dead save left, saves, retires and deletes."""
    with _open(base) as checkpointer:
        _save(checkpointer, 2, large)


def prune(base: Path, large: bool) -> None:
    """Clean-up from outside."""
    tierckpt.prune(base / "store", keep=1, grace=0.0)


def restart(base: Path, large: bool) -> None:
    """A restore, which begins a generation."""
    with _open(base) as checkpointer:
        state = state_of(0, large)
        checkpointer.restore(state)
        if not _exact(state, state_of(1, large)):
            raise AssertionError("restored something else")


def following(base: Path, large: bool) -> None:
    """What comes after an interruption."""
    with _open(base) as checkpointer:
        _save(checkpointer, NEXT, large)


SCENARIOS: dict[str, Callable[[Path, bool], None]] = {
    "first": first,
    "further": further,
    "prune": prune,
    "restart": restart,
    "following": following,
}


def make(base: str, scenario: str, large: bool) -> None:
    """The base on which a scenario starts, without what a kill leaves (see :func:`die`)."""
    path = Path(base)
    shutil.rmtree(path, ignore_errors=True)
    (path / "user").mkdir(parents=True)
    if scenario in ("further", "restart"):
        first(path, large)
    if scenario == "prune":
        with Checkpointer(path / "store", agent="off") as checkpointer:
            for step in (1, 2, 3):
                _save(checkpointer, step, large)


def perform(
    base: str,
    scenario: str,
    large: bool,
    mode: int = RECORD,
    at: int = -1,
    error: int = 0,
    log: str | None = None,
    sync: bool = False,
) -> dict[str, Any]:
    """Run a scenario while calls below ``base`` are counted.

    Returns:
        ``calls``: how many there were; ``failed``: what it raised, "" if nothing; ``typed``: whether that was
        StoreError; ``warned``: the warnings.
    """
    shim = Shim()
    told = {"failed": "", "typed": True}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shim.arm(base, mode, at, error, log, sync=sync)
        try:
            SCENARIOS[scenario](Path(base), large)
        except Exception as raised:
            if mode != FAIL:
                raise
            told = {"failed": f"{type(raised).__name__}: {raised}", "typed": isinstance(raised, StoreError)}
        calls = shim.disarm()
    return {**told, "calls": calls, "warned": [str(one.message) for one in caught]}


def persevere(base: str, large: bool, at: int, error: int, removes: bool) -> list[str]:
    """A save whose call number ``at`` fails, and the next save in the same process; what is wrong with either.

    Only calls below the store count. ``removes``: the call is one that removes something.
    """
    path, shim, wrong = Path(base), Shim(), []
    store = path / "store"
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        checkpointer, before = _open(path), set(losses.walk(store))
        shim.arm(os.fspath(store), FAIL, at, error)
        failed: Exception | None = None
        try:
            _save(checkpointer, 2, large)
        except Exception as raised:
            failed = raised
        shim.disarm()
        told = [str(one.message) for one in caught]
        if failed is not None and not isinstance(failed, StoreError):
            wrong.append(f"it raised {type(failed).__name__}, not StoreError: {failed}")
        # Old checkpoints may stay if they cannot be retired, but not silently.
        stay = any("could not be retired" in one for one in told)
        wrong += look(base, "further", large, tidy=False, succeeded=failed is None, all_stay=stay)
        steps = tierckpt.steps(store) if store.is_dir() else []
        if failed is not None and 2 not in steps:
            # The files of the step are gone at once, unless it was a removal that failed.
            rest = [name for name in losses.walk(store) if "/s000000000002/" in name or name.endswith(".tmp")]
            rest = sorted({*rest} - before)
            if rest and not removes:
                wrong.append(f"the failed save ({failed}) left {rest}")
        try:
            _save(checkpointer, 3, large)
            checkpointer.close()
        except Exception as raised:
            wrong.append(f"the next save in the same process failed: {type(raised).__name__}: {raised}")
        steps = tierckpt.steps(store)
        if steps != [3]:
            wrong.append(f"after the next save in the same process there are steps {steps}, not [3]")
    return wrong + look(base, None, large)


# The look at what is left


def look(
    base: str,
    scenario: str | None,
    large: bool,
    *,
    succeeded: bool = False,
    tidy: bool = True,
    trusted: bool = True,
    all_stay: bool = False,
) -> list[str]:
    """What is wrong with a base after an interruption; empty when all is well.

    Args:
        scenario: says which steps there may be; None: any.
        succeeded: the scenario had returned, so that what it did must be there.
        tidy: also save the next step, and see that nothing else is left then.
        trusted: the user's key was kept, so that nothing is wrong with trust.
        all_stay: what should have been retired may still be there.
    """
    path, shim = Path(base), Shim()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        shim.arm(base)  # only so that nothing waits for the real disk
        try:
            wrong = _look(path, _allowed(scenario, succeeded, all_stay), large, trusted)
            if tidy and not wrong:
                wrong = _tidy(path, large, trusted)
        except Exception as raised:
            wrong = [f"{type(raised).__name__}: {raised}"]
        shim.disarm()
    if trusted:
        wrong += [f"warned: {one.message}" for one in caught]
    return wrong


def _allowed(scenario: str | None, succeeded: bool, all_stay: bool) -> list[list[int]] | None:
    if scenario is None:
        return None
    allowed = ALLOWED[scenario]
    if not succeeded:
        return allowed
    return [steps for steps in allowed if steps[-1:] == allowed[-1][-1:]] if all_stay else allowed[-1:]


def _look(base: Path, allowed: list[list[int]] | None, large: bool, trusted: bool) -> list[str]:
    root, wrong = base / "store", []
    steps = tierckpt.steps(root)
    if allowed is not None and steps not in allowed:
        wrong.append(f"there are steps {steps}, not one of {allowed}")
    for step in [None, *steps] if steps else []:
        state = state_of(0, large)
        info = tierckpt.load(state, root, step, fallback=False)
        if info.step != (steps[-1] if step is None else step) or not _exact(state, state_of(info.step, large)):
            wrong.append(f"load(step={step}) gave step {info.step}, not exactly as it was saved")
    begun = any((root / "chain").glob("[0-9]*.json"))
    if begun:
        report = tierckpt.verify(root, every=True)
        wrong += [f"verify: {one['message']}" for one in report.problems if trusted or one["kind"] != "untrusted"]
        wrong += [f"second reader: {problem}" for problem in second_reader.verify_store(os.fspath(root))]
    elif steps:
        wrong.append("steps without a chain")
    return wrong


def _tidy(base: Path, large: bool, trusted: bool) -> list[str]:
    root = base / "store"
    following(base, large)
    wrong = [f"after the next save: {problem}" for problem in _look(base, [[NEXT]], large, trusted)]
    long_ago = time.time() - 3600
    for name in losses.walk(root):
        if name.endswith(".tmp"):
            os.utime(root / name, (long_ago, long_ago))
    tierckpt.prune(root, grace=0.0)
    rest = [name for name in losses.walk(root) if not name.startswith("chain/0") and name != "tierckpt.json"]
    shards = [name for name in rest if name.startswith("g") and f"/s{NEXT:012d}/" in name]
    layouts = [name for name in rest if name.startswith("layouts/") and not name.endswith(".tmp")]
    left = sorted({*rest} - {*shards} - {*layouts})
    if left or len(shards) != 3 or len(layouts) != 1:
        wrong.append(f"after the next save and a clean-up there are {rest}")
    folders = [folder for folder in root.glob("g*/*") if folder.name != f"s{NEXT:012d}"]
    if folders:
        wrong.append(f"after the next save and a clean-up there are the folders {folders}")
    return wrong


# Loss of power


def lose(
    base: str,
    template: str,
    logs: list[str],
    scenario: str,
    large: bool,
    *,
    within: str,
    only_end: bool = False,
    samples: int = 2,
    stride: int = 1,
    seed: int = 0,
    tidy_every: int = 1,
) -> dict[str, Any]:
    """Rebuild at ``base`` all states that a loss of power may leave of ``template`` and what was done to it.

    Args:
        within: only what is below this folder of the base is lost; all else counts as safe.
        only_end: the power fails after the last operation; else after each.
        samples: random losses per length.
        stride: look at each stride-th length only (and at the last).
        tidy_every: each how many-th state is also saved to.

    Returns:
        ``states``: how many different ones there were; ``wrong``: at most 10 problems.
    """
    path, rng = Path(base), random.Random(seed)
    log = [operation for name in logs for operation in losses.read_log(Path(name))]
    record = losses.Record(losses.Tree.scan(Path(template)), log)
    seen: set[tuple[int, bool]] = set()
    wrong: list[str] = []
    lengths = [len(log)] if only_end else [*range(seed % stride, len(log), stride), len(log)]
    for length in lengths:
        done = length == len(log)
        for told, tree in record.losses(length, within, rng, samples):
            key = (losses.fingerprint(tree), done)
            if key in seen:
                continue
            seen.add(key)
            tree.build(path)
            tidy = len(seen) % tidy_every == 0
            wrong += [f"{told}: {problem}" for problem in look(base, scenario, large, succeeded=done, tidy=tidy)]
            if len(wrong) > 10:
                return {"states": len(seen), "wrong": wrong[:10]}
    return {"states": len(seen), "wrong": wrong}
