"""`tierckpt agent` and `tierckpt status`: an agent run by hand serves trainers, and what agents hold can be seen."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

import tierckpt
from tests.agents import kill, status, statuses, until
from tests.cases.common import state
from tierckpt import Checkpointer, Disk, Ram

from .conftest import Cli


@contextmanager
def service(*arguments: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "tierckpt", "agent", *arguments]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2])
    try:
        assert process.stderr is not None
        line = process.stderr.readline()
        assert "listens on" in line, line
        yield process
    finally:
        process.kill()
        process.communicate()


def test_a_runtime_folder_that_is_not_used_is_named(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a side-car and its trainers may never meet, and nobody is told."""
    missing, instead = tmp_path / "missing", tmp_path / f"tierckpt-{os.getuid()}"
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(missing))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    ran = cli("status")
    assert (ran.status, len(ran.lines)) == (0, 2) and f"XDG_RUNTIME_DIR={missing} is no folder" in ran.lines[1]
    ran = cli("status", "--json")
    assert json.loads(ran.stdout) == {"agents": []} and not ran.stderr
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(2):
            with Checkpointer(tmp_path / "s") as ckpt:
                ckpt.restore(state(0))
                ckpt.save(step, state(1)).wait("ram")
    (said,) = [str(one.message) for one in told if "XDG_RUNTIME_DIR" in str(one.message)]
    assert f"{missing} is no folder" in said and str(instead) in said
    command = [sys.executable, "-m", "tierckpt", "agent", "--run", "by-hand"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
        assert process.stderr is not None
        lines = [process.stderr.readline(), process.stderr.readline()]
        process.kill()
    assert f"{missing} is no folder" in lines[0] and str(instead) in lines[0] and "listens on" in lines[1]


def test_nothing_runs(cli: Cli) -> None:
    ran = cli("status")
    assert (ran.status, ran.lines) == (0, ["no agent of this user runs here"])
    assert json.loads(cli("status", "--json").stdout) == {"agents": []}


def test_what_is_held_is_shown(cli: Cli, tmp_path: Path) -> None:
    with Checkpointer(tmp_path / "s", run="train-7", tiers=[Ram(), Disk(every=10)]) as ckpt:
        ckpt.save(0, state(0)).wait()
        ckpt.save(3, state(3)).wait("ram")
        ran = cli("status")
        assert ran.status == 0
        assert "run train-7 on node" in ran.stdout and "1 of 1 alive" in ran.stdout
        (row,) = [line for line in ran.lines if str(tmp_path) in line]
        assert row.split()[-6:] == ["alive", "3", "0", "3", "3", str(tmp_path / "s")]
        (told,) = json.loads(cli("status", "--json").stdout)["agents"]
        assert told["run"] == "train-7" and told["generations"][0]["sealed"] == 3
        kill(told["pid"])
        ran = cli("status")
        assert ran.status == 1 and "no process listens" in ran.stdout


def test_an_agent_run_by_hand_is_used_and_stays(cli: Cli, tmp_path: Path) -> None:
    root, tiers = tmp_path / "s", [Ram(), Disk(every=10)]
    with service("--run", "train-7") as process, Checkpointer(root, run="train-7", tiers=tiers) as ckpt:
        ckpt.save(0, state(0)).wait()
        ckpt.save(3, state(3)).wait("ram")
        assert status()["pid"] == process.pid and status()["service"]
        command = [sys.executable, "-m", "tierckpt", "agent", str(root)]
        second = subprocess.run(command, capture_output=True, text=True, check=False)
        assert second.returncode == 2 and "already runs" in second.stderr
        os.kill(process.pid, signal.SIGTERM)
        assert process.wait(20) == 0
        assert tierckpt.steps(root) == [0, 3]
    assert not statuses()
    assert tierckpt.verify(root).ok


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_one_that_is_told_to_end_as_soon_as_it_is_there_leaves_nothing(cli: Cli, number: int) -> None:
    folder = Path(os.environ["XDG_RUNTIME_DIR"]) / "tierckpt"
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-m", "tierckpt", "agent", "--run", "train-7"], stderr=subprocess.PIPE
        )
        try:
            until(lambda: list(folder.glob("*.sock")))
            process.send_signal(number)
            assert process.wait(20) == 0
        finally:
            process.kill()
            process.communicate()
        assert not list(folder.iterdir())
        assert cli("status").lines == [f"no agent of this user runs here: there is no socket in {folder}"]


def test_it_stays_when_its_trainers_are_done(tmp_path: Path) -> None:
    with service("--run", "train-7") as process:
        for step in range(2):
            with Checkpointer(tmp_path / "s", run="train-7") as ckpt:
                ckpt.save(step, state(step)).wait()
        assert process.poll() is None
        until(lambda: not any(g["ranks"] == {"0": "alive"} for g in status()["generations"]))


def test_a_run_must_be_named(cli: Cli) -> None:
    ran = cli("agent")
    assert ran.status == 2 and "give ROOT or --run (see" in ran.stderr
    ran = cli("agent", "s", "--run", "train-7")
    assert ran.status == 2 and "give ROOT or --run, not both" in ran.stderr


def test_neither_imports_torch() -> None:
    code = "import sys, tierckpt.cli.status, tierckpt.cli.agent, tierckpt.agent.__main__; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "numpy", "asyncio", "cryptography", "ssl"} & set(ran.stdout.split())
