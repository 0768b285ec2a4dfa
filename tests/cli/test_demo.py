"""`tierckpt demo` hands its options on; what needs PyTorch says so when there is none."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch

from tierckpt.demo import report

from .conftest import Cli


def test_options_and_status_are_passed_through(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[Path | None, bool]] = []

    def main(folder: Path | None = None, *, keep: bool = False) -> int:
        seen.append((folder, keep))
        return 1

    monkeypatch.setattr(report, "main", main)
    monkeypatch.setattr(torch.cpu.Stream, "record_event", None, raising=False)
    assert cli("demo").status == 1
    assert cli("demo", "--keep", tmp_path).status == 1
    assert seen == [(None, False), (tmp_path, True)]


@pytest.mark.parametrize("command", ["demo", "bench"])
def test_without_torch_is_one_line_and_status_2(cli: Cli, monkeypatch: pytest.MonkeyPatch, command: str) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    ran = cli(command)
    assert (ran.status, ran.stdout) == (2, "")
    assert "pip install 'tierckpt[torch]'" in ran.stderr


def test_with_a_torch_that_trains_no_fsdp2_on_cpus(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.cpu.Stream, "record_event", raising=False)
    ran = cli("demo")
    assert (ran.status, ran.stdout) == (2, "")
    assert f"torch {torch.__version__} cannot: take a newer one" in ran.stderr
