"""Makes the golden stores anew: ``python -m tests.golden.make``. Needed only when the format has changed.

What decides bytes is fixed: keys, run names and times. So a store that comes out different tells what has changed.
"""

from __future__ import annotations

import itertools
import shutil
import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

import tierckpt
from tests.golden import contents
from tests.harness import run_ranks
from tierckpt.format.chain import CheckpointRef
from tierckpt.format.keys import SigningKey
from tierckpt.tiers.disk import DiskPlace
from tierckpt.tiers.store import Store
from tierckpt.tiers.trust import TrustWarning

STORES = Path(__file__).parent / "stores"

# Not secret, so nobody else's: they sign nothing but this.
FIRST, SECOND, STRANGER = (
    SigningKey(Ed25519PrivateKey.from_private_bytes(bytes([number]) * 32)) for number in (1, 2, 3)
)


def _fix(home: str) -> None:
    """An own home without any pins, and a clock that ticks once for each link."""
    ticks = itertools.count()
    patch = pytest.MonkeyPatch()
    patch.setenv("XDG_CONFIG_HOME", home)
    patch.setattr("tierckpt.format.chain.timestamp", lambda: f"2026-01-02T03:04:{next(ticks):02d}.000005Z")


def _save(root: Path, state: Any, step: int, **keywords: Any) -> None:
    with tierckpt.Checkpointer(root, run=f"golden-{root.name}", key=FIRST, agent="off") as checkpointer:
        checkpointer.save(step, state, **keywords).wait()


def make_plain(rank: int, root: Path, home: str) -> None:
    _fix(home)
    _save(root, contents.plain(live=True), 7)


def make_mesh(rank: int, root: Path, home: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    _fix(home)
    model = contents.Model()
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, weight_decay=0.0, foreach=False)
    for weights in model.parameters():
        weights.grad = weights.detach().clone()
    optimizer.step()
    with torch.no_grad():
        for parameter, state in optimizer.state.items():
            values: Any = parameter
            state["step"].fill_(7.0)
            state["exp_avg"].to_local().copy_(values.to_local() + 0.25)
            state["exp_avg_sq"].to_local().copy_(values.to_local() + 0.5)
    right = contents.mesh()
    optimizer.param_groups[0]["lr"] = right["lr"]
    _save(root, {"model": model, "optimizer": optimizer, "data": right["data"]}, 1200)


def make_pieces(rank: int, root: Path, home: str) -> None:
    _fix(home)
    state = contents.pieces()
    for name, rows in contents.boxes(rank).items():
        held = [((first, 0), state[name][first : first + count].clone()) for first, count in rows]
        state[name] = tierckpt.Pieces(state[name].shape, held)
    state["own"] = tierckpt.PerRank(contents.own(rank))
    _save(root, state, 0, metadata=contents.METADATA)


def make_chain(rank: int, root: Path, home: str) -> None:
    """begin, commits of 10 and 20 (pinned), an endorsed key, which begins anew, commits 30 and retires 10, and then a
    key that nobody endorsed, with a commit of 40."""
    _fix(home)
    run = f"golden-{root.name}"
    with tierckpt.Checkpointer(root, run=run, key=FIRST, agent="off") as checkpointer:
        for step in (10, 20):
            checkpointer.save(step, contents.chain(step), pin=step == 20).wait()
    store = Store.open(DiskPlace(root))
    store.publish(lambda chain: chain.introduce(SECOND.public), FIRST)
    with tierckpt.Checkpointer(root, key=SECOND, agent="off") as checkpointer:
        checkpointer.restore(contents.chain(0))
        checkpointer.save(30, contents.chain(30)).wait()
    store.refresh()
    first = CheckpointRef(1, 10, store.chain.committed[1, 10])
    store.publish(lambda chain: chain.retire([first]), SECOND)
    tierckpt.prune(root, grace=0, key=SECOND)
    with pytest.warns(TrustWarning), tierckpt.Checkpointer(root, key=STRANGER, agent="off") as checkpointer:
        checkpointer.save(40, contents.chain(40)).wait()


MAKERS = {"plain": (make_plain, 1), "mesh": (make_mesh, 4), "pieces": (make_pieces, 2), "chain": (make_chain, 1)}


def make(folder: Path) -> None:
    """Make all stores in ``folder``."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, (maker, world) in MAKERS.items():
        with tempfile.TemporaryDirectory() as home:
            run_ranks(maker, world, folder / name, home)


if __name__ == "__main__":
    shutil.rmtree(STORES, ignore_errors=True)
    make(STORES)
