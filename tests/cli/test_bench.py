"""`tierckpt bench`: figures come out, and nothing is left behind in the folder or with the user's keys."""

from __future__ import annotations

import json
import os
from pathlib import Path

from .conftest import Cli


def test_measures_and_cleans_up(cli: Cli, tmp_path: Path) -> None:
    ran = cli("bench", tmp_path, "--size", 0.002, "--json")
    assert ran.status == 0, ran
    found = json.loads(ran.stdout)
    assert [figure["name"] for figure in found["figures"]] == [
        "durable save",
        "load from disk",
        "load from page cache",
    ]
    for figure in found["figures"]:
        assert figure["ratio"] * figure["plain_gb_per_s"] == figure["gb_per_s"] or (
            abs(figure["ratio"] * figure["plain_gb_per_s"] / figure["gb_per_s"] - 1) < 1e-9
        )
    assert list(tmp_path.iterdir()) == []
    assert list(Path(os.environ["XDG_CONFIG_HOME"]).iterdir()) == []


def test_a_folder_that_is_too_small_is_status_2(cli: Cli, tmp_path: Path) -> None:
    ran = cli("bench", tmp_path, "--size", 10_000_000)
    assert ran.status == 2
    assert "free space" in ran.stderr
    assert cli("bench", tmp_path / "absent").status == 2
