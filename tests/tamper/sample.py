"""A store of two ranks to be tampered with, and what a load of it must bring back."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.harness import run_ranks
from tierckpt.format.chain import CheckpointRef
from tierckpt.format.keys import SigningKey
from tierckpt.tiers.disk import DiskPlace
from tierckpt.tiers.store import Store

RUN = "sample"
RETIRED = 5
STEPS = (10, 20, 30)
#: Rank 0's shard has two chunks.
ROWS, COLUMNS = 1100, 1024
SPLIT = 1090


def state(step: int, salt: int = 0) -> dict[str, Any]:
    """What was saved at ``step``, whole."""
    generator = torch.Generator().manual_seed(step + 1000 * salt)
    whole = {
        "big": torch.rand((ROWS, COLUMNS), generator=generator),
        "small": torch.arange(7, dtype=torch.int64) * step,
        "note": f"step {step}, salt {salt}",
        "list": [step, 1.5, None, b"bytes"],
    }
    return whole | {"extra": torch.ones(3)} if step == RETIRED else whole


def template() -> dict[str, Any]:
    """What a load fills."""
    big = torch.full((ROWS, COLUMNS), -1.0)
    return {"big": big, "small": torch.zeros(7, dtype=torch.int64), "note": "", "list": []}


def same(found: Any, step: int) -> bool:
    """Whether a state is exactly that of ``step``."""
    wanted = state(step)
    return (
        set(found) == set(wanted)
        and all(torch.equal(found[name], wanted[name]) for name in ("big", "small"))
        and (found["note"], found["list"]) == (wanted["note"], wanted["list"])
    )


def save_rank(rank: int, root: str, key: str, salt: int) -> None:
    """One of the two ranks: rows of ``big`` are spread over them, everything else is replicated."""
    rows = slice(0, SPLIT) if rank == 0 else slice(SPLIT, ROWS)
    with tierckpt.Checkpointer(root, run=RUN, key=key, agent="off") as checkpointer:
        for step in (RETIRED, *STEPS):
            whole = state(step, salt)
            whole["big"] = tierckpt.Pieces((ROWS, COLUMNS), [((rows.start, 0), whole["big"][rows].clone())])
            checkpointer.save(step, whole, metadata={"loss": 0.5} if step == 20 else None).wait()


class Sample:
    """A pristine store, its keys and the pins of the user who made it, kept apart from the copy that tests damage.

    Its chain: begin, four commits, an endorsed key, and a retire link signed by that key. The copy lies where the store
    was made, because heads are pinned by place. ``fork`` is what the same key signed of the same run elsewhere.
    """

    def __init__(self, base: Path) -> None:
        self.root = base / "store"
        self.fork = base / "fork"
        self.key, self.second_key = base / "key.pem", base / "second.pem"
        self._golden, self._pins = base / "golden", base / "pins"
        SigningKey.generate().save(self.key)
        SigningKey.generate().save(self.second_key)
        self._make(self.root, 0)
        self.root.rename(self._golden)
        self._make(self.fork, 1)

    def _make(self, root: Path, salt: int) -> None:
        pins = self._pins if salt == 0 else self._pins.with_name("pins of the fork")
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("XDG_CONFIG_HOME", str(pins))
            run_ranks(save_rank, 2, str(root), str(self.key), salt, env={"XDG_CONFIG_HOME": str(pins)})
            key, second = SigningKey.load(self.key), SigningKey.load(self.second_key)
            Store.open(DiskPlace(root)).publish(lambda chain: chain.introduce(second.public), key)
            tierckpt.prune(root, keep=len(STEPS), key=str(self.second_key))
            tierckpt.verify(root)

    def fresh(self) -> Path:
        """An undamaged copy of the store, at the same path each time; its files are links until :meth:`own` is called."""
        shutil.rmtree(self.root, ignore_errors=True)
        shutil.copytree(self._golden, self.root, copy_function=os.link)
        shutil.copytree(self._pins, os.environ["XDG_CONFIG_HOME"], dirs_exist_ok=True)
        return self.root

    def pristine(self, name: str) -> Path:
        """The undamaged file of that name."""
        return self._golden / name

    def own(self, name: str) -> Path:
        """The file ``name`` of the copy, no longer shared with the pristine store."""
        path = self.root / name
        data = path.read_bytes()
        path.unlink()
        path.write_bytes(data)
        return path

    def links(self) -> list[str]:
        """Names of the links, in order."""
        return sorted(f"chain/{path.name}" for path in (self._golden / "chain").iterdir())

    def layout(self, step: int = 30) -> str:
        """Name of the layout of a step."""
        store = Store.open(DiskPlace(self._golden))
        ids = {step: id for (_, step), id in store.chain.committed.items()}
        ref = CheckpointRef(1, step, ids[step])
        return f"layouts/{store.manifest(ref).layout}.safetensors"


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Sample:
    """Made once for all modules."""
    return Sample(tmp_path_factory.mktemp("sample"))


@pytest.fixture
def sample(made: Sample) -> Sample:
    """A fresh copy of the store, and the user's pins of it."""
    made.fresh()
    return made
