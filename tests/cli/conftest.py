"""Stores to run commands on, and a way to run them."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path

import numpy as np
import pytest
import torch

import tierckpt
from tests.harness import run_ranks
from tierckpt import Checkpointer
from tierckpt.cli import main
from tierckpt.format.keys import SigningKey


@dataclass
class Ran:
    """What a command printed, and its exit status."""

    status: int
    stdout: str
    stderr: str

    @property
    def lines(self) -> list[str]:
        return self.stdout.splitlines()


Cli = Callable[..., Ran]


@dataclass
class Branched:
    """A store whose run went on from step 2 although step 3 was there, and has retired step 1.

    Generation 1 saved the steps 1 to 4 (2 is pinned); generation 2 continued step 2 and saved 5 and 6.
    """

    root: Path
    key: SigningKey


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    """Runs the command line in this process."""

    def run(*argv: object) -> Ran:
        capsys.readouterr()
        status = main([str(argument) for argument in argv])
        return Ran(status, *capsys.readouterr())

    return run


@pytest.fixture(scope="session")
def _branched(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Branched]:
    folder = tmp_path_factory.mktemp("cli")
    root, key = folder / "store", SigningKey.generate()

    def state(step: int) -> dict[str, object]:
        weight = torch.full((3, 4), float(step))
        return {
            "model": {"weight": weight, "tied": weight, "bias": torch.arange(4, dtype=torch.bfloat16)},
            "lr": float("nan"),
            "sizes": np.arange(3, dtype=np.int16),
        }

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CONFIG_HOME", str(folder / "config"))
        with Checkpointer(root, run="train-7", key=key, agent="off") as one:
            for step in (1, 2, 3, 4):
                metadata = {"day": date(2026, 3, step), "loss": np.float32(0.5)}
                one.save(step, state(step), metadata=metadata, pin=step == 2).wait()
        with Checkpointer(root, key=key, agent="off") as two:
            two.restore(state(0), step=2)
            for step in (5, 6):
                two.save(step, state(step)).wait()
            store = two._coordinator.store
            first = next(ref for ref in store.chain.live.values() if ref.step == 1)
            store.publish(lambda chain: chain.retire([first]), key)
    yield Branched(root, key)


@pytest.fixture
def branched(_branched: Branched, tmp_path: Path) -> Branched:
    """A copy that the test may damage. Nothing of it is pinned."""
    root = tmp_path / "store"
    shutil.copytree(_branched.root, root)
    return Branched(root, _branched.key)


@pytest.fixture
def shard(branched: Branched) -> Path:
    """The shard of the newest checkpoint."""
    return branched.root / "g0002" / "s000000000006" / "shard-00000.safetensors"


#: Of the tensors of ``sharded``; "large" has more than one chunk in each of two shards.
SHAPES = {"grid": (7, 10), "strided": (7, 3), "whole": (5,), "pieces": (6, 4), "large": (3, 1 << 20)}


def whole(name: str) -> torch.Tensor:
    """A tensor of ``sharded``, all of it."""
    shape = SHAPES[name]
    found = torch.arange(torch.Size(shape).numel()).reshape(shape) + len(name)
    return found.to(torch.bfloat16 if name == "whole" else torch.float32)


def _save_sharded(rank: int, root: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Placement, Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    placements: dict[str, list[Placement]] = {
        "grid": [Shard(0), Shard(1)],
        "strided": [Shard(0), Shard(0)],
        "whole": [Replicate(), Replicate()],
        "large": [Shard(0), Replicate()],
    }
    state = {name: distribute_tensor(whole(name), mesh, places) for name, places in placements.items()}
    pieces = whole("pieces")
    offsets = {0: [(0, 0), (5, 2)], 1: [(0, 2), (5, 0)], 2: [(3, 0)], 3: [(3, 2)]}[rank]
    mine = [(o, pieces[o[0] : o[0] + (1 if o[0] == 5 else 3 if o[0] == 0 else 2), o[1] : o[1] + 2]) for o in offsets]
    own = tierckpt.PerRank({"rank": rank})
    tierckpt.save({**state, "pieces": tierckpt.Pieces((6, 4), mine), "n": 5, "own": own}, root, 1)


@pytest.fixture(scope="session")
def _sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sharded") / "store"
    run_ranks(_save_sharded, 4, str(root))
    return root


@pytest.fixture
def sharded(_sharded: Path, tmp_path: Path) -> Path:
    """A copy of a store that four ranks saved, dp2 × tp2; nothing of it is pinned."""
    root = tmp_path / "sharded"
    shutil.copytree(_sharded, root)
    return root


def flip(path: Path, at: int) -> None:
    """Damage one byte."""
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)
