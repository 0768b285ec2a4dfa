"""A training job for the tests: saves numbered states, and dies as told."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tierckpt import Checkpointer, Disk, Ram


def state(value: float, rank: int = 0) -> dict[str, Any]:
    """What all ranks hold alike, and what each has of its own."""
    from tierckpt import PerRank, Pieces

    world = dist.get_world_size() if dist.is_initialized() else 1
    own = torch.full((300, 70), float(value) + rank)
    return {
        "shared": torch.full((1000,), float(value)),
        "sharded": Pieces((300 * world, 70), [((300 * rank, 0), own)]),
        "n": int(value),
        "own": PerRank(rank),
    }


def values(found: dict[str, Any], rank: int) -> set[float]:
    """All values in it, of which there should be one."""
    ((_, own),) = found["sharded"].pieces
    return {*found["shared"].tolist(), *(own - rank).flatten().tolist(), float(found["n"])}


def main() -> None:
    """``ROOT save LAST``: saves up to LAST, then rank 1 kills itself; ``ROOT restore``: writes beside ROOT what it got."""
    root, what = sys.argv[1:3]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tiers = [Ram(), Disk(every=1000)]
    if what == "save":
        ckpt = Checkpointer(root, tiers=tiers)
        ckpt.restore(state(-1, rank))
        for step in range(int(sys.argv[3]) + 1):
            ckpt.save(step, state(step, rank)).wait("ram")
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        signal.pause()
    found = state(-1, rank)
    with Checkpointer(root, tiers=tiers) as ckpt:
        info = ckpt.restore(found)
    assert info is not None
    told = json.dumps([info.step, dict(info.sources), sorted(values(found, rank))])
    Path(root).with_name(f"rank{rank}.json").write_text(told)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
