"""Protects the demo's verdict: it may say equal only when every loss, also of steps done twice, is."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tierckpt.demo.report import STEPS, Run, _compare, _workspace, main

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


@pytest.mark.parametrize(("keep", "told"), [(False, "is removed; tierckpt demo --keep leaves it"), (True, "kept in")])
def test_whether_its_folder_is_there_afterwards_is_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, keep: bool, told: str
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    with _workspace(None, keep, Console()) as space:
        assert space.is_dir()
    assert space.exists() == keep
    shown = capsys.readouterr().out
    assert told in shown and str(space) in shown


@pytest.mark.acceptance
@pytest.mark.limit(400)
def test_the_demo_shows_what_it_promises(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(tmp_path / "demo") == 0, capsys.readouterr().out
    shown = capsys.readouterr().out
    assert "from ram" in shown and "Nothing was lost and nothing differs" in shown
    assert not list((tmp_path / "demo/runtime").rglob("*.*"))
    left = [path for path in Path("/proc").glob("[0-9]*/environ") if bytes(tmp_path) in _environment(path)]
    assert not left, left
