"""What a signal handler raises is the caller's, also when it is an OSError: it says nothing of the disk."""

from __future__ import annotations

import errno
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tierckpt import Checkpointer, _native
from tierckpt.errors import StoreError
from tierckpt.tiers.disk import DiskPlace
from tierckpt.tiers.trust import Pins

ERROR = TimeoutError("from a handler")


def _raise(*_: Any, **__: Any) -> Any:
    raise ERROR


@pytest.fixture
def root(tmp_path: Path) -> str:
    for step in (1, 2):
        tierckpt.save({"w": torch.full((3000,), step)}, tmp_path / "store", step)
    return str(tmp_path / "store")


@pytest.mark.parametrize(("module", "call"), [(_native, "read_at"), (os, "open")])
@pytest.mark.parametrize(
    "work",
    [lambda root: tierckpt.load({"w": torch.zeros(3000, dtype=torch.int64)}, root), tierckpt.verify],
    ids=["load", "verify"],
)
def test_it_is_raised_as_it_is(
    root: str, monkeypatch: pytest.MonkeyPatch, module: Any, call: str, work: Callable[[str], object]
) -> None:
    """At each use of a file: nothing is called damaged."""
    real, at, uses = getattr(module, call), 0, 0

    def hit(*given: Any, **named: Any) -> Any:
        nonlocal uses
        uses += 1
        return _raise() if uses == at else real(*given, **named)

    monkeypatch.setattr(module, call, hit)
    while True:
        at, uses = at + 1, 0
        try:
            work(root)
        except TimeoutError as error:
            assert error is ERROR
        else:
            assert uses < at, f"nobody was told of use {at}"
            break
    assert at > 1


@pytest.mark.parametrize(("module", "call"), [(_native, "read_at"), (os, "open")])
def test_no_older_checkpoint_is_restored(root: str, monkeypatch: pytest.MonkeyPatch, module: Any, call: str) -> None:
    real, raised = getattr(module, call), 0
    for at in range(1, 25):
        uses = itertools.count(1)

        def hit(*given: Any, at: int = at, uses: Iterator[int] = uses, **named: Any) -> Any:
            return _raise() if next(uses) == at else real(*given, **named)

        with Checkpointer(root, agent="off", max_restarts=1000) as ckpt:
            monkeypatch.setattr(module, call, hit)
            try:
                info = ckpt.restore({"w": torch.zeros(3000, dtype=torch.int64)})
            except TimeoutError as error:
                assert error is ERROR
                raised += 1
            else:
                assert info is not None and info.step == 2, at
            finally:
                monkeypatch.setattr(module, call, real)
    assert raised > 5


@pytest.mark.parametrize(
    ("module", "call"),
    [
        (os, "open"),
        (os, "mkdir"),
        (os, "link"),
        (os, "fsync"),
        (os, "unlink"),
        (_native, "write_at"),
        (_native, "reserve"),
    ],
)
def test_it_is_when_files_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, module: Any, call: str) -> None:
    place = DiskPlace(tmp_path / "store")
    monkeypatch.setattr(module, call, _raise)
    with pytest.raises(TimeoutError) as caught:
        place.prepare()
        place.create("folder/name", b"x")
        place.writer("folder/other", 5)
    assert caught.value is ERROR


def test_pins_that_were_not_read_are_not_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_bytes", _raise)
    with pytest.raises(TimeoutError, match="from a handler"):
        Pins.load("run")


def test_what_the_system_says_is_an_error_of_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def late(*_: Any) -> int:
        raise TimeoutError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))

    place = DiskPlace(tmp_path / "store")
    place.create("name", b"x")
    monkeypatch.setattr(_native, "read_at", late)
    with pytest.raises(StoreError, match=r"cannot read .*name: Connection timed out"):
        place.read("name", 1)
