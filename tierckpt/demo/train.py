"""One process of the demo's training job: ``torchrun … -m tierckpt.demo.train ROOT --folder FOLDER``.

With ``--load`` it trains nothing: it loads the newest checkpoint into the processes that there are – FSDP2
under torchrun, a plain model without – and says what it got.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional

import tierckpt
from tierckpt import Checkpointer, Disk, Ram
from tierckpt.demo.digest import state_digests
from tierckpt.demo.gpt import GPT, Shape
from tierckpt.demo.text import Windows, library_sources

SEED = 20
BATCH = 2


class Job:
    """All that a restart must bring back, and nothing else."""

    def __init__(self, rank: int, world: int, steps: int) -> None:
        shape = Shape()
        self.rank = rank
        self.world = world
        torch.manual_seed(SEED)
        self.model: nn.Module = GPT(shape)
        if dist.is_initialized():
            mesh = init_device_mesh("cpu", (world,))
            for block in self.model.get_submodule("blocks").children():
                fully_shard(block, mesh=mesh)
            fully_shard(self.model, mesh=mesh)
        # From here on each rank draws its own dropout masks.
        torch.manual_seed(SEED + 1 + rank)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=2e-3, weight_decay=0.1)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, max_lr=2e-3, total_steps=steps + 1)
        self.windows = Windows(library_sources(), shape.context, SEED)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "data": self.windows,
            "rng": tierckpt.rng_state(),
        }

    def step(self) -> float:
        """One training step; returns the loss, averaged over all ranks."""
        tokens, targets = self.windows.next(self.rank, self.world, BATCH)
        loss = functional.cross_entropy(self.model(tokens).flatten(0, 1), targets.flatten())
        torch.autograd.backward(loss)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / self.world

    def write_digests(self, path: Path) -> None:
        digests = state_digests(
            self.model,
            self.optimizer,
            scheduler=sorted(self.scheduler.state_dict().items()),
            data=self.windows.state_dict(),
        )
        if self.rank == 0:
            path.write_text(json.dumps(digests, indent=1))


def train(job: Job, root: Path, log: Path, steps: int, every: int, attempt: int) -> None:
    """Trains to the end from wherever the newest checkpoint is; writes what happened to ``log``, a folder."""
    (log / f"pid-{attempt}-{job.rank}").write_text(str(os.getpid()))
    state = job.state()
    tiers: list[Ram | Disk] = [Ram(), Disk(every=every)]
    with Checkpointer(root, tiers=tiers) as ckpt, open(log / f"steps-{attempt}-{job.rank}", "w") as lines:
        began = time.perf_counter()
        info = ckpt.restore(state)
        if info is not None:
            took = time.perf_counter() - began
            told = {"step": info.step, "sources": sorted(info.sources), "seconds": took}
            (log / f"restored-{attempt}-{job.rank}").write_text(json.dumps(told))
        for step in range(info.step + 1 if info else 0, steps):
            loss = job.step()
            # hex: a decimal number could hide the last bit.
            print(step, loss.hex(), file=lines, flush=True)
            ckpt.save(step, state)
    job.write_digests(log / "digests.json")


def load(job: Job, root: Path, log: Path) -> None:
    """Loads the newest checkpoint, in whatever layout this job has, and writes its digests."""
    tierckpt.load(job.state(), root)
    job.write_digests(log / "digests.json")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("root", type=Path)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--attempt", type=int, default=0)
    parser.add_argument("--load", action="store_true")
    options = parser.parse_args()

    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    world = int(os.environ.get("WORLD_SIZE", "0"))
    if world:
        dist.init_process_group("gloo")
    job = Job(int(os.environ.get("RANK", "0")), max(world, 1), options.steps)
    if options.load:
        load(job, options.root, options.folder)
    else:
        train(job, options.root, options.folder, options.steps, options.every, options.attempt)
    if world:
        # The group's threads must let go of all tensors, and end, while Python still hands out its lock: so
        # no rank leaves early, and the mesh, which holds the group, goes with the model.
        dist.barrier()
        del job
        gc.collect()
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
