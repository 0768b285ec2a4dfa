"""`tierckpt keygen`: a pair of files that saving and trusting take, never overwritten."""

from __future__ import annotations

import stat
from pathlib import Path

from tierckpt.format.keys import SigningKey, read_public

from .conftest import Cli


def test_writes_both_halves_and_prints_the_public_one(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "run.pem"
    ran = cli("keygen", path)
    assert (ran.status, ran.stderr) == (0, "")
    assert ran.stdout.strip() == SigningKey.load(path).public == read_public(tmp_path / "run.pem.pub")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_never_overwrites_either_file(cli: Cli, tmp_path: Path) -> None:
    path = tmp_path / "run.pem"
    for taken in (path, tmp_path / "run.pem.pub"):
        taken.write_text("precious")
        ran = cli("keygen", path)
        assert (ran.status, ran.stdout) == (2, "")
        assert str(taken) in ran.stderr
        assert [one.name for one in tmp_path.iterdir()] == [taken.name]
        assert taken.read_text() == "precious"
        taken.unlink()


def test_a_path_that_cannot_be_written_is_status_2(cli: Cli, tmp_path: Path) -> None:
    ran = cli("keygen", tmp_path / "absent" / "run.pem")
    assert ran.status == 2
    assert len(ran.stderr.splitlines()) == 1
