"""`tierckpt prune`: retires and removes what it says, nothing in a dry run, nothing that is needed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import tierckpt
from tierckpt.format.keys import SigningKey

from .conftest import Branched, Cli


@pytest.fixture
def key(branched: Branched, tmp_path: Path) -> Path:
    path = tmp_path / "key.pem"
    branched.key.save(path)
    return path


def _files(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*") if path.is_file()}


def test_without_keep_only_left_overs_go(cli: Cli, branched: Branched) -> None:
    before = _files(branched.root)
    ran = cli("prune", branched.root, "--grace", 0, "--json")
    done = json.loads(ran.stdout)
    assert (ran.status, done["retired"]) == (0, [])
    assert before - _files(branched.root) == set(done["removed"])
    assert {name.rpartition("/")[0] for name in done["removed"]} == {"g0001/s000000000001"}


def test_grace_keeps_files_for_readers(cli: Cli, branched: Branched) -> None:
    before = _files(branched.root)
    ran = cli("prune", branched.root)
    assert ran.status == 0
    assert _files(branched.root) == before
    assert any("kept for readers" in line for line in ran.lines)


def test_keep_retires_all_but_the_newest_and_pinned(cli: Cli, branched: Branched, key: Path) -> None:
    ran = cli("prune", branched.root, "--keep", 1, "--grace", 0, "--key", key)
    assert ran.status == 0
    assert "step 5 (generation 2) retired" in ran.lines
    assert tierckpt.steps(branched.root) == [2, 6]
    verified = cli("verify", branched.root, "--all")
    assert (verified.status, verified.lines[-1]) == (0, "ok")


def test_a_dry_run_changes_nothing(cli: Cli, branched: Branched, key: Path) -> None:
    before = _files(branched.root)
    options = ("--keep", 1, "--grace", 0, "--key", key, "--dry-run")
    ran = cli("prune", branched.root, *options)
    assert ran.status == 0
    assert "step 5 (generation 2) would be retired" in ran.lines
    retired = json.loads(cli("prune", branched.root, *options, "--json").stdout)["retired"]
    assert {ref["step"] for ref in retired} == {3, 4, 5}
    assert _files(branched.root) == before


def test_nothing_is_retired_while_what_stays_is_damaged(cli: Cli, branched: Branched, shard: Path, key: Path) -> None:
    shard.unlink()
    before = _files(branched.root)
    ran = cli("prune", branched.root, "--keep", 1, "--grace", 0, "--key", key)
    assert ran.status == 1
    assert str(shard) in ran.lines[-1]
    assert _files(branched.root) == before


def test_wrong_use_is_status_2(cli: Cli, branched: Branched, tmp_path: Path) -> None:
    assert cli("prune", branched.root, "--keep", 0).status == 2
    assert cli("prune", branched.root, "--keep", 1, "--key", tmp_path / "absent").status == 2
    SigningKey.generate().write_public(tmp_path / "half.pub")
    assert cli("prune", branched.root, "--keep", 1, "--key", tmp_path / "half.pub").status == 2


def test_a_key_that_the_chain_does_not_know_signs_only_on_request(
    cli: Cli, branched: Branched, key: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = _files(branched.root)
    ran = cli("prune", branched.root, "--keep", 1)
    assert (ran.status, ran.stdout) == (2, "")
    assert "--key" in ran.stderr
    assert _files(branched.root) == before
    monkeypatch.setenv("TIERCKPT_KEY", str(key))
    assert cli("prune", branched.root, "--keep", 1).status == 0
