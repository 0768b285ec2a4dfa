"""A loss of power may take whatever was not synced; the store must stand in every state that this can leave.

Protects every fsync of the package: of files before they get their names, of folders before anything is built
upon the names in them. The states are rebuilt from the log of all operations (see :mod:`tests.crash.losses`).
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from tests.crash import losses
from tests.crash.conftest import Bench, Benches
from tests.crash.losses import Operation, Record, Tree
from tests.crash.scenarios import INTERRUPTED
from tests.crash.workshop import KILL


def _lost(bench: Bench, logs: list[Path] | None = None, within: str = "store", **how: Any) -> list[str]:
    """What is wrong in the states that the loss of unsynced changes below ``within`` can leave."""
    told = bench.do(
        "lose",
        template=str(bench.template),
        logs=[str(log) for log in logs or [bench.log]],
        scenario=how.pop("scenario", bench.scenario),
        within=within,
        timeout=500.0,
        **how,
    )
    assert isinstance(told, dict) and told["states"] > 0
    wrong = told["wrong"]
    assert isinstance(wrong, list)
    return wrong


@pytest.mark.parametrize("scenario", INTERRUPTED)
def test_some_losses(benches: Benches, scenario: str) -> None:
    assert _lost(benches(scenario), stride=6, samples=1, tidy_every=8, seed=1) == []


@pytest.mark.parametrize("scenario", ["first", "restart"])
def test_some_losses_in_the_users_folder(benches: Benches, scenario: str) -> None:
    bench = benches(scenario)
    assert _lost(bench, within="user", only_end=True, samples=4, tidy_every=4, seed=1) == []


@pytest.mark.acceptance
@pytest.mark.limit(600)
@pytest.mark.parametrize("folder", ["store", "user"])
@pytest.mark.parametrize("scenario", INTERRUPTED)
def test_every_loss(benches: Benches, scenario: str, folder: str) -> None:
    assert _lost(benches(scenario), within=folder, samples=8, seed=2, tidy_every=3) == []


def _after_a_kill(bench: Bench, folder: Path, point: int) -> list[str]:
    """The process is killed, the next one saves, and then the power fails: what the first had not synced may go."""
    logs = [folder / f"killed-{point}", folder / f"following-{point}"]
    bench.reset()
    bench.run("perform", scenario=bench.scenario, mode=KILL, at=point, log=str(logs[0]))
    bench.do("perform", scenario="following", log=str(logs[1]))
    wrong = _lost(bench, logs, scenario="following", only_end=True, samples=2, tidy_every=5)
    return [f"killed at [{point}] {bench.operations[point]}, saved, then {problem}" for problem in wrong]


@pytest.mark.parametrize("scenario", ["first", "further"])
def test_some_losses_after_a_kill_and_a_save(benches: Benches, tmp_path: Path, scenario: str) -> None:
    bench = benches(scenario)
    # Right after a folder was made or a file got its name, before that was synced.
    made = [i + 1 for i in bench.points("store") if bench.operations[i].name in ("mkdir", "link")]
    points = [i for i in made if i < len(bench.operations) and bench.operations[i - 1].result == 0][::2]
    assert [problem for point in points for problem in _after_a_kill(bench, tmp_path, point)] == []


@pytest.mark.acceptance
@pytest.mark.limit(600)
@pytest.mark.parametrize("scenario", ["first", "further", "restart"])
def test_every_loss_after_a_kill_and_a_save(benches: Benches, tmp_path: Path, scenario: str) -> None:
    bench = benches(scenario)
    assert [p for point in range(len(bench.operations)) for p in _after_a_kill(bench, tmp_path, point)] == []


@pytest.mark.parametrize("what", ["file", "folder"])
def test_a_save_that_syncs_nothing_is_caught(benches: Benches, tmp_path: Path, what: str) -> None:
    """The tests above can fail: the same log without the fsyncs of files, or of folders, does not pass."""
    bench = benches("further")
    log = tmp_path / "log"
    content = bench.log.read_bytes()
    for operation in bench.operations:
        is_file = "." in operation.path.rpartition("/")[2]
        if operation.name == "fsync" and operation.path.startswith("store") and is_file == (what == "file"):
            content = content.replace(_line(operation), b"", 1)
    log.write_bytes(content)
    assert len(losses.read_log(log)) < len(bench.operations)
    assert _lost(bench, [log], only_end=True, samples=0, tidy_every=1000) != []


def _line(operation: Operation) -> bytes:
    return f"{operation.name}\t{operation.ino}\t{operation.path}\t\t0\t{operation.result}\t0\n".encode()


def _operation(name: str, path: str, ino: int = 0, other: str = "", offset: int = 0, data: bytes = b"") -> Operation:
    return Operation(name, ino, path, other, offset, len(data), data)


def test_the_disk_loses_just_what_was_not_synced() -> None:
    """The model itself, by hand: a file written, synced, named, and its folder synced only afterwards."""
    log = [
        _operation("mkdir", "d", 1),
        _operation("create", "d/t", 2),
        _operation("write", "d/t", 2, data=b"abcd"),
        _operation("fsync", "d/t", 2),
        _operation("link", "d/t", other="d/x"),
        _operation("unlink", "d/t"),
    ]
    record = Record(Tree({0: {}}), log)
    assert record.after.files() == {"d": None, "d/x": b"abcd"}

    def states(length: int) -> list[dict[str, bytes | None]]:
        found = []
        for _, tree in record.losses(length, "", random.Random(0), 0):
            if tree.files() not in found:
                found.append(tree.files())
        return found

    assert states(2) == [{"d": None, "d/t": b""}, {}, {"d": None}]
    cut = [{"d": None, "d/t": data} for data in (b"abcd", b"", b"\0\0\0\0", b"ab")]
    assert all(state in states(3) for state in cut)
    assert not any(state in states(4) for state in cut[1:]), "the file has been synced"
    both = {"d": None, "d/t": b"abcd", "d/x": b"abcd"}
    assert both in states(6), "the removal of the first name is not synced"
    assert {} in states(6), "the folder itself is not"
    synced = Record(Tree({0: {}}), [*log, _operation("fsync", "d", 1), _operation("fsync", ".")])
    assert [tree.files() for _, tree in synced.losses(8, "", random.Random(0), 0)] == [record.after.files()] * 3
