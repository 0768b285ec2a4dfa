"""Protects the demo's verdict: it may say equal only when every loss, also of steps done twice, is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tierckpt.demo.report import STEPS, Run, _compare, main

FROM_MEMORY = ({"sources": ["ram"], "seconds": 0.1},)
LOSSES = {step: float(step).hex() for step in range(STEPS)}


def _hit(**changes: float) -> Run:
    first = {step: loss for step, loss in LOSSES.items() if step < 15}
    second = {step: loss for step, loss in LOSSES.items() if step >= 10}
    for name, value in changes.items():
        attempt, step = name.split("_")[1:]
        (first, second)[int(attempt)][int(step)] = value.hex()
    return Run([first, second], {"a": "1"}, FROM_MEMORY)


def _environment(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError:  # it has ended, or is not ours
        return b""


def test_equal_runs_are_equal() -> None:
    assert _compare(Run([LOSSES], {"a": "1"}), _hit(), resumed=10)[1]


@pytest.mark.parametrize("where", ["at_0_3", "at_0_12", "at_1_12", "at_1_29"])
def test_one_different_loss_in_either_attempt_is_seen(where: str) -> None:
    assert not _compare(Run([LOSSES], {"a": "1"}), _hit(**{where: 0.5}), resumed=10)[1]


def test_a_missing_step_and_a_different_state_are_seen() -> None:
    hit = _hit()
    del hit.attempts[1][20]
    assert not _compare(Run([LOSSES], {"a": "1"}), hit, resumed=10)[1]
    assert not _compare(Run([LOSSES], {"a": "2"}), _hit(), resumed=10)[1]


@pytest.mark.parametrize(
    "restored", [(), ({"sources": ["disk"], "seconds": 0.1},), (*FROM_MEMORY, {"sources": ["disk"], "seconds": 0.1})]
)
def test_what_came_from_the_disk_is_seen(restored: tuple[dict[str, Any], ...]) -> None:
    assert not _compare(Run([LOSSES], {"a": "1"}), replace(_hit(), restored=restored), resumed=10)[1]


def test_it_touches_no_folder_that_holds_something(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "precious").touch()
    assert main(tmp_path) == 2
    assert "not empty" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["precious"]


@pytest.mark.acceptance
@pytest.mark.limit(400)
def test_the_demo_shows_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tmp_path / "demo") == 0, capsys.readouterr().out
    shown = capsys.readouterr().out
    assert "from ram" in shown and "Nothing was lost and nothing differs" in shown
    assert not list((tmp_path / "demo/runtime").rglob("*.*"))
    left = [path for path in Path("/proc").glob("[0-9]*/environ") if bytes(tmp_path) in _environment(path)]
    assert not left, left
