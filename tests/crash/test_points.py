"""A process killed at any call that changes the disk leaves the old checkpoint whole, the new one whole or invisible.

Protects the order in which a save, a clean-up and a restore touch the disk. ``make test`` takes each few-th call,
acceptance all of them, and cut writes too.
"""

from __future__ import annotations

import signal

import pytest

from tests.crash.conftest import Bench, Benches
from tests.crash.scenarios import INTERRUPTED
from tests.crash.workshop import KILL, SHORTEN, TEAR

#: In ``make test``, of each so many calls one is tried.
STRIDE = 7


def _killed(bench: Bench, mode: int, points: list[int]) -> list[str]:
    """What is wrong after the process was killed at each of these calls."""
    wrong = []
    for point in points:
        bench.reset()
        outcome = bench.run("perform", scenario=bench.scenario, mode=mode, at=point)
        where = f"killed at [{point}] {bench.operations[point]}"
        if outcome.signal != signal.SIGKILL:
            wrong.append(f"{where}: it was not: {outcome}")
            continue
        wrong += [f"{where}: {problem}" for problem in bench.look()]
    return wrong


@pytest.mark.parametrize("scenario", INTERRUPTED)
def test_some_crash_points(benches: Benches, scenario: str) -> None:
    bench = benches(scenario)
    bench.reset()
    bench.do("perform", scenario=scenario)
    assert bench.look(succeeded=True) == []
    assert _killed(bench, KILL, bench.points("store")[:: STRIDE if scenario != "prune" else 4]) == []


@pytest.mark.parametrize("scenario", ["first", "further"])
def test_some_crash_points_in_the_users_folder(benches: Benches, scenario: str) -> None:
    bench = benches(scenario)
    assert _killed(bench, KILL, bench.points("user")[::3]) == []


@pytest.mark.acceptance
@pytest.mark.limit(600)
@pytest.mark.parametrize("folder", ["store", "user"])
@pytest.mark.parametrize("scenario", INTERRUPTED)
def test_every_crash_point(benches: Benches, scenario: str, folder: str) -> None:
    bench = benches(scenario, large=True)
    assert _killed(bench, KILL, bench.points(folder)) == []


@pytest.mark.acceptance
@pytest.mark.limit(600)
@pytest.mark.parametrize("scenario", INTERRUPTED)
def test_every_cut_write(benches: Benches, scenario: str) -> None:
    """The kernel takes half of a write, then the process is gone."""
    bench = benches(scenario, large=True)
    points = [point for point, operation in enumerate(bench.operations) if operation.name == "write"]
    assert _killed(bench, TEAR, points) == []


@pytest.mark.parametrize("large", [False, pytest.param(True, marks=pytest.mark.acceptance)])
def test_short_writes_are_continued(benches: Benches, large: bool) -> None:
    """A write may take less than it was given; nobody may take that for all of it."""
    bench, wrong = benches("further", large=large), []
    for point, operation in enumerate(bench.operations):
        if operation.name == "write" and operation.path.startswith("store/"):
            bench.reset()
            told = bench.do("perform", scenario="further", mode=SHORTEN, at=point)
            assert isinstance(told, dict)
            wrong += [
                f"short at [{point}] {operation}: {problem}" for problem in bench.look(succeeded=True, tidy=False)
            ]
    assert wrong == []
