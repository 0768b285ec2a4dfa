"""`tierckpt demo` hands its options on; what needs PyTorch says so when there is none."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

from tierckpt.demo import report

from .conftest import Cli


def test_options_and_status_are_passed_through(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Path | None, bool]] = []

    def main(folder: Path | None = None, *, keep: bool = False) -> int:
        seen.append((folder, keep))
        return 1

    monkeypatch.setattr(report, "main", main)
    assert cli("demo").status == 1
    assert cli("demo", "--keep", tmp_path).status == 1
    assert seen == [(None, False), (tmp_path, True)]


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_without_torch_is_one_line_and_status_2(cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ran = cli(command)
    assert (ran.status, ran.stdout) == (2, "")
    assert "pip install 'tierckpt[torch]'" in ran.stderr
