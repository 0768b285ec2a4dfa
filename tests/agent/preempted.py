"""A training job for the tests of preemption: ``ROOT AGENT`` trains until it should stop, and writes down where it did."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch.distributed as dist

from tests.agent.job import state
from tests.agents import tell
from tierckpt import Checkpointer, Disk, Ram


def main() -> None:
    root, agent = Path(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tiers = [Ram(), Disk(every=100_000)]
    with Checkpointer(root, tiers=tiers, agent=agent, save_on_signal=True) as ckpt:
        info = ckpt.restore(state(-1, rank))
        step = info.step + 1 if info else 0
        first = step
        while not ckpt.should_stop:
            ckpt.save(step, state(step, rank))
            if step == first + 5:
                tell(root.with_name(f"ready{rank}"), str(os.getpid()))
            step += 1
    tell(root.with_name(f"stopped{rank}"), f"{first} {step - 1}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
