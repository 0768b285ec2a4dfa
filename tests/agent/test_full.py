"""A disk with room for little more than what it keeps, and a save that fails on it: the next ones do not."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tierckpt
from tests.harness import run_ranks
from tierckpt import Checkpointer, Disk, Pieces, Ram, TierckptError
from tierckpt.errors import StoreError
from tierckpt.format import paths
from tierckpt.tiers.disk import DiskPlace

_ROWS, _MB = 12, 1 << 20


def _state(value: int, rank: int) -> dict[str, Any]:
    own = torch.full((_ROWS, _MB // 4), float(value))
    whole = (_ROWS * dist.get_world_size(), _MB // 4)
    return {"sharded": Pieces(whole, [((_ROWS * rank, 0), own)]), "n": value}


def _fails_at_three(rank: int, root: str, agent: str) -> list[int]:
    """The steps that are durable: the last rank cannot write the receipt of step 3."""
    warnings.simplefilter("ignore")
    tiers = [Ram(), Disk(keep=1)] if agent == "auto" else [Disk(keep=1)]
    durable = []
    with Checkpointer(root, tiers=tiers, agent=agent, timeout=30) as ckpt:
        for step in range(8):
            in_the_way = Path(root, paths.receipt(1, step, rank), "x")
            if step == 3 and rank == 1:
                in_the_way.mkdir(parents=True)
            dist.barrier()
            try:
                ckpt.save(step, _state(step, rank)).wait("disk")
                durable.append(step)
            except TierckptError as error:
                assert "not a regular file" in str(error)
            dist.barrier()
            if step == 3 and rank == 1:
                shutil.rmtree(in_the_way.parent)
    return durable


@pytest.mark.acceptance
@pytest.mark.parametrize("agent", ["auto", "off"])
def test_a_failed_save_takes_no_room_from_the_next(tmp_path: Path, agent: str) -> None:
    """Two checkpoints and a third of one: room is made before anybody writes, and what was written of step 3 goes at once."""
    inside = f'mount -t tmpfs -o size=58m tmpfs {tmp_path} && exec "$0" -m tests.agent.test_full {tmp_path}/s {agent}'
    done = subprocess.run(
        ["unshare", "-rm", "sh", "-c", inside, sys.executable],
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_what_may_be_committed_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The link of a step is written and cannot be read back: nobody knows whether it is committed, so its files stay."""
    create, read = DiskPlace.create, DiskPlace.read
    link, hidden = "", False

    def creates(place: DiskPlace, name: str, data: bytes) -> bool:
        nonlocal hidden
        done = create(place, name, data)
        hidden = hidden or name == link
        return done

    def reads(place: DiskPlace, name: str, limit: int) -> bytes:
        if hidden and name == link:
            raise StoreError(f"cannot read {name}")
        return read(place, name, limit)

    monkeypatch.setattr(DiskPlace, "create", creates)
    monkeypatch.setattr(DiskPlace, "read", reads)
    root = tmp_path / "s"
    state = {"x": torch.ones(3000)}
    with Checkpointer(root, agent="off") as ckpt:
        ckpt.save(0, state).wait()
        link = paths.link(len(ckpt._coordinator.store.chain.links))
        with pytest.raises(StoreError, match="cannot read"):
            ckpt.save(1, state).wait()
        with pytest.raises(StoreError, match=r"cannot be seen whether step 1 is committed"):
            ckpt.save(1, state).wait()
        link = ""
        ckpt.save(2, state).wait()
    assert tierckpt.steps(root) == [0, 1, 2]
    assert tierckpt.verify(root, every=True).ok


if __name__ == "__main__":
    os.environ["PYTHONPATH"] = os.getcwd()
    from tests.agent.test_full import _fails_at_three as fails  # by the name under which ranks find it

    assert run_ranks(fails, 2, *sys.argv[1:]) == [[0, 1, 2, 4, 5, 6, 7]] * 2
    assert tierckpt.verify(sys.argv[1], every=True).ok
