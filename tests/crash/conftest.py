"""The workshop, and bases from which each crash point starts."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.crash import losses
from tests.crash.workshop import KILL, Outcome, Workshop, compile_shim


@pytest.fixture(scope="session")
def shim(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compile_shim(tmp_path_factory.mktemp("shim"))


@pytest.fixture(scope="session")
def workshop(shim: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Workshop]:
    made = Workshop(tmp_path_factory.mktemp("workshop"), shim)
    yield made
    made.close()


class Bench:
    """One scenario, to be tried again and again from the same start.

    Attributes:
        base: where it plays; always the same path, since the user's pins name the store by its path.
        template: a copy of how it starts.
        log: of an undisturbed run.
        operations: in that log: all calls that change the disk.
    """

    def __init__(self, workshop: Workshop, folder: Path, scenario: str, *, large: bool = False) -> None:
        self.workshop, self.scenario, self.large = workshop, scenario, large
        self.base, self.template, self.log = folder / "base", folder / "template", folder / "log"
        self.do("make", scenario=scenario)
        if scenario == "further":
            self._leave_a_dead_save(folder)
        losses.mirror(self.base, self.template)
        told = self.do("perform", scenario=scenario, log=str(self.log))
        assert isinstance(told, dict) and not told["failed"]
        self.operations = losses.read_log(self.log)
        assert len(self.operations) == told["calls"]

    def _leave_a_dead_save(self, folder: Path) -> None:
        """The step's folder of a save that was killed with its shard and its receipt written."""
        log = folder / "dead"
        start = folder / "start"
        losses.mirror(self.base, start)
        self.do("perform", scenario="further", log=str(log))
        operations = losses.read_log(log)
        at = next(i for i, one in enumerate(operations) if "manifest" in one.path)
        losses.mirror(start, self.base)
        killed = self.run("perform", scenario="further", mode=KILL, at=at)
        assert killed.signal == 9, killed

    def points(self, folder: str) -> list[int]:
        """Numbers of the calls below ``store`` or ``user``."""
        in_user = [one.path.split("/")[0] == "user" for one in self.operations]
        return [number for number, user in enumerate(in_user) if user == (folder == "user")]

    def reset(self) -> None:
        losses.mirror(self.template, self.base)

    def run(self, task: str, **arguments: Any) -> Outcome:
        user = self.base / "user"
        return self.workshop.run(task, user=user, base=str(self.base), large=self.large, **arguments)

    def do(self, task: str, **arguments: Any) -> Any:
        user = self.base / "user"
        return self.workshop.do(task, user=user, base=str(self.base), large=self.large, **arguments)

    def look(self, **arguments: Any) -> list[str]:
        """See :func:`tests.crash.scenarios.look`."""
        found = self.do("look", scenario=self.scenario, **arguments)
        assert isinstance(found, list)
        return found


class Benches:
    """Each scenario's bench, made when it is first asked for."""

    def __init__(self, workshop: Workshop, factory: pytest.TempPathFactory) -> None:
        self._workshop, self._factory = workshop, factory
        self._made: dict[tuple[str, bool], Bench] = {}

    def __call__(self, scenario: str, *, large: bool = False) -> Bench:
        key = (scenario, large)
        if key not in self._made:
            self._made[key] = Bench(self._workshop, self._factory.mktemp(scenario), scenario, large=large)
        return self._made[key]


@pytest.fixture(scope="session")
def benches(workshop: Workshop, tmp_path_factory: pytest.TempPathFactory) -> Benches:
    return Benches(workshop, tmp_path_factory)
