"""That nothing grows: many saves of a small state in one go, and what trainer and agent hold on the way.

    python benchmarks/growth.py [--saves 10000] [--ranks 1] [--agent auto|off] [--every 1] [--root FOLDER] [--json]

Memory is the proportional set size (what several processes map is shared out among them), and of it what is the process's own
and anonymous. The chain of a store has a link for each checkpoint, of which each process that commits keeps a summary: that part
grows with the checkpoints on the disk (``--every``), by about 1.5 kB for each.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from tierckpt import Checkpointer, Disk, Ram
from tierckpt.agent.listing import agents
from tierckpt.config import Tier

MARKS = (100, 1_000, 2_000, 5_000, 10_000, 20_000, 50_000, 100_000)


def held(pid: int) -> dict[str, int]:
    """What a process holds: KiB of memory, descriptors, threads, children."""
    rollup = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    memory = {line.split(":")[0]: int(line.split()[1]) for line in rollup if line.endswith("kB")}
    threads = list(Path(f"/proc/{pid}/task").iterdir())
    return {
        "PSS KiB": memory["Pss"],
        "anonymous KiB": memory.get("Pss_Anon", 0),
        "descriptors": len(os.listdir(f"/proc/{pid}/fd")),
        "threads": len(threads),
        "children": sum(map(children, threads)),
    }


def children(thread: Path) -> int:
    """How many processes a thread has started that are there."""
    try:
        return len((thread / "children").read_text().split())
    except FileNotFoundError:  # it has just ended
        return 0


def train(rank: int, options: argparse.Namespace, folder: str) -> None:
    """Save, and print what is held at some of the steps."""
    torch.set_num_threads(1)
    torch.manual_seed(0)  # all ranks alike
    if options.ranks > 1:
        meeting = f"file://{folder}/meeting"
        dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=options.ranks)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(8)))
    optimizer = torch.optim.AdamW(model.parameters())
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "step": 0}
    tiers: list[Tier] = [Ram(), Disk(every=options.every, keep=2, grace=0)]
    began = time.monotonic()
    with Checkpointer(f"{folder}/run", tiers=tiers, agent=options.agent) as ckpt:
        for step in range(1, options.saves + 1):
            model(torch.ones(2, 64)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            state["step"] = step
            handle = ckpt.save(step, state)
            if step in MARKS or step == options.saves:
                if handle.due:
                    handle.wait(handle.due[0])
                ckpt.wait()
                if rank == 0:
                    tell(step, time.monotonic() - began, options.json)
                if options.ranks > 1:
                    dist.barrier()
    if options.ranks > 1:
        dist.destroy_process_group()


def tell(step: int, seconds: float, as_json: bool) -> None:
    """Print what this process and the agents hold."""
    found = {"trainer": held(os.getpid())}
    for one in agents():
        found["agent"] = held(int(one["pid"]))
    if as_json:
        print(json.dumps({"saves": step, "seconds": round(seconds, 1), **found}), flush=True)
        return
    for name, values in found.items():
        told = "  ".join(f"{value:>8,} {what}" for what, value in values.items())
        print(f"{step:>7,} saves, {seconds:6.0f} s  {name:<8}{told}", flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--agent", choices=("auto", "off"), default="auto")
    parser.add_argument("--every", type=int, default=1, help="of the disk, in saves")
    parser.add_argument("--root", help="a folder for the store, which is removed in the end")
    parser.add_argument("--json", action="store_true")
    options = parser.parse_args()
    folder = tempfile.mkdtemp(prefix="growth-", dir=options.root)
    for variable in ("XDG_RUNTIME_DIR", "XDG_CONFIG_HOME"):  # no other run's agent, and no pins that stay
        os.environ[variable] = f"{folder}/{variable}"
        os.mkdir(os.environ[variable], 0o700)
    try:
        if options.ranks == 1:
            train(0, options, folder)
        else:
            spawn(train, (options, folder), nprocs=options.ranks)  # type: ignore[no-untyped-call]
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
