"""C104: nothing in a store is ever unpickled or executed, whoever put it there and whoever signed it."""

from __future__ import annotations

import io
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.tamper.forge import Forger
from tests.tamper.sample import Sample, template
from tierckpt.cli import main
from tierckpt.errors import StateError, TierckptError
from tierckpt.format.layout import Entry


class Payload:
    """Unpickled, it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self.marker), "w")


def payload(marker: Path, form: str) -> bytes:
    if form == "pickle":
        return pickle.dumps(Payload(marker))
    file = io.BytesIO()
    torch.save(Payload(marker), file)
    return file.getvalue()


def try_everything(root: Path) -> list[str]:
    """All that reads a store; the names of the errors, all of them ours."""
    errors = []
    actions: list[Callable[[], Any]] = [
        lambda: tierckpt.load(template(), root),
        lambda: tierckpt.read(root),
        lambda: tierckpt.verify(root, every=True),
        lambda: tierckpt.steps(root),
        lambda: tierckpt.latest(root),
        lambda: tierckpt.prune(root, keep=1, dry_run=True),
        *[
            lambda command=command: main([*command, str(root)])
            for command in (["ls"], ["ls", "--json"], ["inspect"], ["explain"], ["verify", "--all"])
        ],
    ]
    for action in actions:
        try:
            action()
        except TierckptError as error:
            errors.append(type(error).__name__)
    return errors


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("form", ["pickle", "torch.save"])
@pytest.mark.parametrize(
    "name",
    [
        "tierckpt.json",
        "chain/000000000000.json",
        "chain/000000000006.json",
        "layout",
        "g0001/s000000000030/manifest.json",
        "g0001/s000000000030/shard-00000.receipt.json",
        "g0001/s000000000030/shard-00000.safetensors",
    ],
)
def test_a_pickle_in_place_of_a_file(sample: Sample, tmp_path: Path, name: str, form: str) -> None:
    marker = tmp_path / "marker"
    path = sample.own(sample.layout() if name == "layout" else name)
    path.write_bytes(payload(marker, form))
    try_everything(sample.root)
    with pytest.raises(TierckptError, match=path.name):
        tierckpt.load(template(), sample.root, fallback=False)
    assert main(["verify", str(sample.root)]) == 1
    assert not marker.exists()


@pytest.mark.parametrize("form", ["pickle", "torch.save"])
@pytest.mark.parametrize("where", ["layout", "header", "blob", "data", "receipt", "store"])
def test_a_pickle_that_is_signed(tmp_path: Path, where: str, form: str) -> None:
    """Digests and signatures are good: the attacker has the key."""
    marker = tmp_path / "marker"
    forger = Forger(tmp_path / "store")
    forger.describe([Entry("x", "uint8", (9000,), pieces=[])], ["dict", [["x", ["value"]]]], {"x": "text"})
    bomb = payload(marker, form)
    if where == "layout":
        forger.layout = bomb
    elif where == "header":
        forger.shards[0] = bomb.ljust(8192)
    elif where == "blob":
        forger.shards[0] = forger.shards[0][:-1024] + bomb.ljust(1024)[:1024]
    elif where == "data":
        forger.shards[0] = forger.shards[0][:4096] + bomb
    elif where == "receipt":
        forger.receipt_changes[0] = {"metadata": bomb.hex()}
    else:
        forger.store = bomb
    forger.write()
    with pytest.raises(TierckptError):
        tierckpt.load({"x": "", "y": 0}, forger.root)
    try_everything(forger.root)
    assert main(["verify", str(forger.root)]) == 1
    assert not marker.exists()


@pytest.mark.parametrize("form", ["pickle", "torch.save"])
def test_bytes_that_are_a_pickle_stay_bytes(tmp_path: Path, form: str) -> None:
    marker = tmp_path / "marker"
    bomb = payload(marker, form)
    state = {"leaf": bomb, "list": [bytearray(bomb)], "tensor": torch.frombuffer(bytearray(bomb), dtype=torch.uint8)}
    with tierckpt.Checkpointer(tmp_path / "store", agent="off") as checkpointer:
        checkpointer.save(1, state, metadata={"bytes": bomb}).wait()
    found = tierckpt.read(tmp_path / "store")
    assert found["leaf"] == bomb
    assert found["list"] == [bytearray(bomb)]
    assert bytes(found["tensor"].tolist()) == bomb
    target = {"leaf": b"", "list": [], "tensor": torch.zeros(len(bomb), dtype=torch.uint8)}
    assert tierckpt.load(target, tmp_path / "store").metadata == {"bytes": bomb}
    assert target["leaf"] == bomb
    for command in (["verify"], ["ls"], ["inspect"], ["explain"]):
        assert main([*command, str(tmp_path / "store")]) == 0
    assert not marker.exists()


def test_what_would_need_a_pickle_is_refused_by_name(tmp_path: Path) -> None:
    with (
        tierckpt.Checkpointer(tmp_path / "store", agent="off") as checkpointer,
        pytest.raises(StateError, match=r"(?s)model.*hook"),
    ):
        checkpointer.save(1, {"model": {"hook": Payload(tmp_path / "marker")}})
    assert not (tmp_path / "marker").exists()
