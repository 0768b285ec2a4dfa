"""`tierckpt verify`: every kind of damage ends with status 1 and a line that names it, wrong use with 2."""

from __future__ import annotations

import errno
import json
import os
import pty
import subprocess
import sys
from pathlib import Path

import pytest

from tierckpt.format.keys import SigningKey

from .conftest import Branched, Cli, flip


def test_says_what_was_checked_and_ends_with_ok(cli: Cli, branched: Branched) -> None:
    ran = cli("verify", branched.root)
    assert (ran.status, ran.stderr) == (0, "")
    assert "checked step 6 (generation 2)" in ran.lines
    assert ran.lines[-1] == "ok"


def test_names_file_and_chunk_of_a_flipped_byte(cli: Cli, branched: Branched, shard: Path) -> None:
    flip(shard, -1)
    ran = cli("verify", branched.root)
    assert ran.status == 1
    [line] = [line for line in ran.lines if line.startswith("damaged: ")]
    assert str(shard) in line
    assert "chunk 0" in line
    assert ran.lines[-1] == "1 problem"


def test_each_problem_is_a_line_and_the_last_line_counts_them(cli: Cli, branched: Branched, shard: Path) -> None:
    shard.with_name("shard-00000.receipt.json").unlink()
    (branched.root / "notes.txt").write_text("mine")
    ran = cli("verify", branched.root)
    assert ran.status == 1
    assert [line.partition(":")[0] for line in ran.lines[-3:-1]] == ["incomplete", "foreign"]
    assert ran.lines[-1] == "2 problems"


@pytest.mark.parametrize("json_option", [(), ("--json",)])
@pytest.mark.parametrize("name", ["shard-00000.safetensors", "shard-00000.receipt.json"])
def test_a_file_that_may_not_be_read_is_status_2_unless_something_is_wrong(
    cli: Cli, branched: Branched, shard: Path, monkeypatch: pytest.MonkeyPatch, name: str, json_option: tuple[str, ...]
) -> None:
    """It may be sound: nobody has looked."""
    opens = os.open

    def refuses(path: str, *more: int, **others: int) -> int:
        if os.fspath(path) == str(shard.with_name(name)):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), path)
        return opens(path, *more, **others)

    monkeypatch.setattr(os, "open", refuses)
    ran = cli("verify", branched.root, *json_option)
    assert (ran.status, ran.stdout) == (2, "")
    assert "not verified" in ran.stderr and name in ran.stderr and "Permission denied" in ran.stderr
    (branched.root / "notes.txt").write_text("mine")
    ran = cli("verify", branched.root)
    assert ran.status == 1
    assert {line.partition(":")[0] for line in ran.lines[-3:-1]} == {"unread", "foreign"}


def test_other_checkpoints_are_checked_when_asked_for(cli: Cli, branched: Branched) -> None:
    flip(branched.root / "g0001" / "s000000000003" / "shard-00000.safetensors", -1)
    assert cli("verify", branched.root).status == 0
    assert cli("verify", branched.root, "--step", 2).status == 0
    assert cli("verify", branched.root, "--step", 3).status == 1
    everything = cli("verify", branched.root, "--all")
    assert everything.status == 1
    assert sum(line.startswith("checked step") for line in everything.lines) == 5


@pytest.mark.parametrize("json_option", [(), ("--json",)])
@pytest.mark.parametrize(("step", "reason"), [(1, "it was retired"), (9, "it was never saved, or only to memory")])
def test_a_step_that_is_not_there_is_status_2_unless_something_is_wrong(
    cli: Cli, branched: Branched, step: int, reason: str, json_option: tuple[str, ...]
) -> None:
    ran = cli("verify", branched.root, "--step", step, *json_option)
    assert (ran.status, ran.stdout) == (2, "")
    assert f"no checkpoint of step {step}: {reason}" in ran.stderr
    (branched.root / "g0002" / "x").write_text("")
    ran = cli("verify", branched.root, "--step", step, *json_option)
    assert (ran.status, ran.stderr) == (1, "")
    assert reason in ran.stdout and "g0002/x" in ran.stdout


def test_quick_reads_no_tensors(cli: Cli, branched: Branched, shard: Path) -> None:
    flip(shard, -1)
    assert cli("verify", branched.root, "--quick").status == 0
    os.truncate(shard, shard.stat().st_size - 1)
    assert cli("verify", branched.root, "--quick").status == 1


def test_foreign_files_can_be_allowed(cli: Cli, branched: Branched) -> None:
    (branched.root / "notes.txt").write_text("mine")
    assert cli("verify", branched.root).status == 1
    allowed = cli("verify", branched.root, "--allow-extra")
    assert allowed.status == 0
    assert any("notes.txt" in line for line in allowed.lines)


def test_a_name_cannot_forge_the_last_line(cli: Cli, branched: Branched) -> None:
    (branched.root / "x\nok\n\x1b[2J").write_text("")
    ran = cli("verify", branched.root)
    assert ran.status == 1
    assert "ok" not in ran.lines
    assert "\x1b" not in ran.stdout


def test_json_is_the_report_and_nothing_else(cli: Cli, branched: Branched, shard: Path) -> None:
    good = json.loads(cli("verify", branched.root, "--json").stdout)
    assert good["ok"] is True
    assert good["checked"] == [{"generation": 2, "step": 6}]
    flip(shard, -1)
    ran = cli("verify", branched.root, "--json")
    bad = json.loads(ran.stdout)
    assert ran.status == 1
    assert bad["ok"] is False
    assert [problem["kind"] for problem in bad["problems"]] == ["damaged"]


def test_trusts_the_keys_that_are_named(cli: Cli, branched: Branched, tmp_path: Path) -> None:
    other = SigningKey.generate()
    branched.key.write_public(tmp_path / "ours.pub")
    other.write_public(tmp_path / "other.pub")
    assert cli("verify", branched.root, "--trust", branched.key.public).status == 0
    assert cli("verify", branched.root, "--trust", tmp_path / "ours.pub").status == 0
    both = cli("verify", branched.root, "--trust", tmp_path / "other.pub", "--trust", branched.key.public)
    assert both.status == 0
    wrong = cli("verify", branched.root, "--trust", tmp_path / "other.pub")
    assert wrong.status == 1
    assert any(line.startswith("untrusted: ") and branched.key.public in line for line in wrong.lines)


def test_a_head_can_be_expected(cli: Cli, branched: Branched) -> None:
    head = json.loads(cli("verify", branched.root, "--json").stdout)["head"]
    assert cli("verify", branched.root, "--expect-head", head).status == 0
    newest = max((branched.root / "chain").iterdir())
    newest.unlink()
    ran = cli("verify", branched.root, "--expect-head", head)
    assert ran.status == 1
    assert any(head in line for line in ran.lines if line.startswith("untrusted: "))


@pytest.mark.parametrize(
    "options",
    [
        ("--step", "6", "--all"),
        ("--quick", "--deep"),
        ("--expect-head", "abc"),
        ("--trust", "nonsense"),
        ("--step", "-1"),
    ],
)
def test_wrong_use_is_status_2(cli: Cli, branched: Branched, options: tuple[str, ...]) -> None:
    ran = cli("verify", branched.root, *options)
    assert (ran.status, ran.stdout) == (2, "")
    assert ran.stderr.startswith("tierckpt verify: ")
    assert len(ran.stderr.splitlines()) == 1


def test_progress_is_shown_on_a_terminal_only(branched: Branched) -> None:
    command = [sys.executable, "-m", "tierckpt", "verify", str(branched.root)]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)  # pins the key, which is worth a note once
    piped = subprocess.run(command, capture_output=True, check=True)
    assert piped.stderr == b""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    shown = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, check=True)
    os.close(theirs)
    with open(ours, "rb", buffering=0) as terminal:
        assert b"verifying" in terminal.read(1 << 16)
    assert shown.stdout == piped.stdout
