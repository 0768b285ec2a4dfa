"""A call that fails once, with no space left or an I/O error, fails at most the save it belongs to.

Protects the clean-up after an error: what is raised is a StoreError, nothing half done is left, the checkpoint
before is intact and the same process saves the next step.
"""

from __future__ import annotations

import errno

import pytest

from tests.crash.conftest import Bench, Benches
from tests.crash.workshop import FAIL

CODES = [errno.ENOSPC, errno.EIO]
STRIDE = 11


def _persevered(bench: Bench, code: int, stride: int = 1) -> list[str]:
    """What is wrong when each (stride-th) call below the store fails and the process goes on."""
    wrong = []
    for number, point in enumerate(bench.points("store")):
        if number % stride == code % stride:
            bench.reset()
            operation = bench.operations[point]
            removes = operation.name in ("unlink", "rmdir")
            found = bench.do("persevere", at=number, error=code, removes=removes)
            assert isinstance(found, list)
            wrong += [f"{errno.errorcode[code]} at [{point}] {operation}: {problem}" for problem in found]
    return wrong


def _failed(bench: Bench, code: int, points: list[int]) -> list[str]:
    """As the process of the scenario ends after the error, what the next one finds."""
    wrong = []
    for point in points:
        bench.reset()
        told = bench.do("perform", scenario=bench.scenario, mode=FAIL, at=point, error=code)
        assert isinstance(told, dict)
        where = f"{errno.errorcode[code]} at [{point}] {bench.operations[point]}"
        if not told["typed"]:
            wrong.append(f"{where}: it raised {told['failed']}")
        # A key that could not be kept is warned of, and the next process signs with another one.
        kept = not any("cannot be kept" in one for one in told["warned"])
        stay = any("could not be retired" in one for one in told["warned"])
        found = bench.look(trusted=kept, succeeded=not told["failed"], all_stay=stay)
        wrong += [f"{where}: {problem}" for problem in found]
    return wrong


@pytest.mark.parametrize("code", CODES)
def test_some_errors_of_a_save(benches: Benches, code: int) -> None:
    bench = benches("further")
    assert _persevered(bench, code, STRIDE) == []


@pytest.mark.parametrize("scenario", ["first", "prune", "restart"])
def test_some_errors_of_other_uses(benches: Benches, scenario: str) -> None:
    bench = benches(scenario)
    assert _failed(bench, errno.EIO, bench.points("store")[3 :: STRIDE if scenario == "first" else 5]) == []


@pytest.mark.acceptance
@pytest.mark.limit(600)
@pytest.mark.parametrize("code", CODES)
def test_every_error_of_a_save(benches: Benches, code: int) -> None:
    bench = benches("further", large=True)
    assert _persevered(bench, code) == []


@pytest.mark.acceptance
@pytest.mark.limit(600)
@pytest.mark.parametrize("code", CODES)
@pytest.mark.parametrize("folder", ["store", "user"])
@pytest.mark.parametrize("scenario", ["first", "further", "prune", "restart"])
def test_every_error_of_a_use(benches: Benches, scenario: str, folder: str, code: int) -> None:
    bench = benches(scenario)
    assert _failed(bench, code, bench.points(folder)) == []
