"""Storage faults for a test, undone after it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cases.common import Faults


@pytest.fixture
def faults(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Faults]:
    """In this process and in agents that it starts."""
    folder: Path = tmp_path_factory.mktemp("faults")
    found = Faults(folder)
    yield found
    found.undo()


@pytest.fixture(params=["off", "auto"])
def agent(request: pytest.FixtureRequest) -> str:
    """Both ways to save: in this process alone, and with the agent that outlives it."""
    found: str = request.param
    return found
