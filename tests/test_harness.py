"""Protects the harness: a rank's value, error, death or hang must each reach the test as what it is."""

from __future__ import annotations

import os
import signal
import subprocess
import threading
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.agents import gone
from tests.harness import RankError, RankTimeoutError, run_ranks, spawn


def _sum(rank: int, factor: int) -> torch.Tensor:
    value = torch.tensor([rank * factor])
    dist.all_reduce(value)
    return value


def test_ranks_form_a_group_and_tensors_come_back() -> None:
    assert [value.item() for value in run_ranks(_sum, 3, 10)] == [30, 30, 30]


def _node(rank: int) -> tuple[str, str, int]:
    return os.environ["TIERCKPT_NODE"], os.environ["XDG_CONFIG_HOME"], torch.get_num_threads()


def test_environment_is_the_tests_own_and_per_rank(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    values = run_ranks(_node, 2, env=[{"TIERCKPT_NODE": "a"}, {"TIERCKPT_NODE": "b"}], group=False)
    assert values == [("a", str(tmp_path), 1), ("b", str(tmp_path), 1)]


class _Local(Exception):
    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} and {two}")


def _raises(rank: int) -> int:
    print(f"rank {rank} was here")
    if rank == 1:
        raise ValueError("no")
    if rank == 2:
        raise _Local(1, 2)
    return rank


def test_errors_come_back_with_traceback_and_output() -> None:
    fine, plain, local = spawn(_raises, 3)
    assert fine.ok and fine.value == 0
    assert isinstance(plain.error, ValueError) and "_raises" in plain.traceback
    assert "rank 1 was here" in plain.output
    assert isinstance(local.error, RankError) and "1 and 2" in str(local.error)
    with pytest.raises(AssertionError, match=r"2 of 3 ranks(.|\n)*ValueError: no"):
        run_ranks(_raises, 3)


def _dies(rank: int) -> str:
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return "alive"


def test_a_death_is_no_exception() -> None:
    alive, dead = spawn(_dies, 2, group=False)
    assert alive.ok and alive.value == "alive"
    assert dead.exitcode == -signal.SIGKILL and dead.error is None and not dead.ok
    assert run_ranks(_dies, 2, group=False, dies={1}) == ["alive", None]
    with pytest.raises(AssertionError, match="1 of 2"):
        run_ranks(_dies, 2, group=False)
    with pytest.raises(AssertionError, match="1 of 2"):
        run_ranks(_dies, 2, group=False, dies={0, 1})


def _hangs(rank: int, folder: str) -> None:
    child = subprocess.Popen(["sleep", "600"])
    Path(folder, str(rank)).write_text(f"{os.getpid()} {child.pid}")
    if rank == 0:
        threading.Event().wait()


def test_a_hang_is_killed_with_its_children_and_shows_where_it_hung(tmp_path: Path) -> None:
    begun = time.monotonic()
    hung, fine = spawn(_hangs, 2, str(tmp_path), timeout=2)
    assert time.monotonic() - begun < 20
    assert isinstance(hung.error, RankTimeoutError) and "_hangs" in hung.output
    assert fine.ok
    for rank in range(2):
        for pid in (tmp_path / str(rank)).read_text().split():
            assert gone(int(pid), 2.0)


def _threads_of_the_server(rank: int) -> int:
    return len(list(Path(f"/proc/{os.getppid()}/task").iterdir()))


def test_the_server_has_no_threads_that_a_fork_would_lose() -> None:
    assert run_ranks(_threads_of_the_server, 1, group=False) == [1]
