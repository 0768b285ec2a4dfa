"""Copies out of a GPU: first whether they are right, then what they cost. One GPU, under 5 minutes.

    python benchmarks/gpu.py [--gib 4] [--rounds 5] [--root FOLDER] [--json] [--no-tests]

A save at every step goes to the agent's memory. *Copied* is from ``save()`` to the last byte in the slot, against one plain
copy of the same bytes into memory that torch has pinned. *Returns* is what training waits for. A training step is timed by
the GPU itself, with a save in each and without any, in turns; figures are medians.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import nn

from tierckpt import Checkpointer, Disk, Ram

COUNTS = (64, 1_000, 10_000)
#: Steps go to memory and, but for the first, not to the disk.
ONLY_RAM = (Ram(), Disk(every=1_000_000_000))

Line = dict[str, Any]


def tensors(count: int, nbytes: int) -> dict[str, torch.Tensor]:
    """So many tensors on the GPU, of so many bytes in all."""
    each = max(1, nbytes // count // 4)
    return {f"t{i}": torch.full((each,), float(i), device="cuda") for i in range(count)}


def seconds(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def copies(root: Path, nbytes: int, rounds: int) -> list[Line]:
    """Bandwidth and stall for few and many tensors."""
    lines = []
    whole = torch.empty(nbytes // 4, device="cuda")
    pinned = torch.empty(nbytes // 4, pin_memory=True)

    def plain() -> None:
        pinned.copy_(whole, non_blocking=True)
        torch.cuda.synchronize()

    for count in COUNTS:
        state = tensors(count, nbytes)
        limit, staged, returned = [], [], []
        with Checkpointer(root / str(count), tiers=ONLY_RAM) as ckpt:
            for step in range(5):  # slots are made and pinned by the first saves
                ckpt.save(step, state).wait()
            for step in range(5, 5 + rounds):
                limit.append(seconds(plain))
                torch.cuda.synchronize()
                began = time.perf_counter()
                handle = ckpt.save(step, state)
                returned.append(time.perf_counter() - began)
                handle.wait_staged()
                staged.append(time.perf_counter() - began)
                handle.wait()
        ratio = statistics.median(a / b for a, b in zip(limit, staged, strict=True))
        gbs = nbytes / statistics.median(staged) / 1e9
        most = 2.0 if count <= 1000 else 10.0
        wait = statistics.median(returned) * 1e3
        lines.append(
            {
                "title": f"{count:,} tensors, {nbytes / 2**30:.2g} GiB: copied, GB/s",
                "value": gbs,
                "limit": nbytes / statistics.median(limit) / 1e9,
                "ratio": ratio,
                "goal": ">= 0.9x",
                "met": ratio >= 0.9,
            }
        )
        lines.append({"title": "  save() returns, ms", "value": wait, "goal": f"<= {most:g} ms", "met": wait <= most})
        del state
    return lines


class Training:
    """A transformer with a fused optimizer, some 3 GB with its state."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(1536, 12, 6144, dropout=0.0, batch_first=True, dtype=torch.bfloat16)
        self.model = nn.TransformerEncoder(layer, 10, enable_nested_tensor=False).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, fused=True)
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self._data = torch.randn(16, 1024, 1536, device="cuda", dtype=torch.bfloat16)

    def step(self) -> None:
        self.optimizer.zero_grad()
        torch.autograd.backward(self.model(self._data).float().square().mean())
        self.optimizer.step()

    @property
    def nbytes(self) -> int:
        moments = [value for entry in self.optimizer.state.values() for value in entry.values()]
        return sum(value.nbytes for value in [*self.model.parameters(), *moments])


def training(root: Path, rounds: int) -> list[Line]:
    """What a save at every step costs."""
    it = Training()
    for _ in range(5):
        it.step()
    plain: list[float] = []
    saved: list[float] = []
    returned: list[float] = []
    fence: list[float] = []
    count, number = 10, 0
    event: Any = torch.cuda.Event
    begin, end = event(enable_timing=True), event(enable_timing=True)
    with Checkpointer(root / "training", tiers=ONLY_RAM) as ckpt:
        for _ in range(5):
            ckpt.save(number, it.state).wait()
            number += 1
        for _ in range(rounds):
            for times, saves in ((plain, False), (saved, True)):
                torch.cuda.synchronize()
                begin.record()
                handles = []
                for _ in range(count):
                    if saves:
                        began = time.perf_counter()
                        handles.append(ckpt.save(number, it.state))
                        returned.append(time.perf_counter() - began)
                        number += 1
                    it.step()
                end.record()
                end.synchronize()
                times.append(begin.elapsed_time(end) / count)
                ckpt.wait()
                fence += [handle.timings["fence"] for handle in handles if handle.error is None]
    ratio = statistics.median(b / a for a, b in zip(plain, saved, strict=True))
    step = statistics.median(plain)
    return [
        {
            "title": f"a save at every step of {step:.0f} ms, {it.nbytes / 1e9:.1f} GB: times a step without",
            "value": ratio,
            "limit": max(1.0, it.nbytes / 50e9 * 1e3 / step),
        },
        {"title": "  save() returns, ms", "value": statistics.median(returned) * 1e3, "goal": "<= 2 ms"},
        {"title": "  the thread of training stands at the fence, ms", "value": statistics.median(fence) * 1e3},
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=4.0, help="size of the states")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", type=Path, help="a folder on the disk to write to (default: a temporary one)")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--no-tests", action="store_true", help="only measure")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        print("no GPU is to be seen", file=sys.stderr)
        return 2
    if not arguments.no_tests:
        tests = Path(__file__).resolve().parent.parent / "tests" / "gpu"
        ended = subprocess.run([sys.executable, "-m", "pytest", "-q", str(tests)], check=False, cwd=tests.parent.parent)
        if ended.returncode:
            return 1
    with tempfile.TemporaryDirectory(prefix="tierckpt-gpu-", dir=arguments.root) as folder:
        os.environ["XDG_CONFIG_HOME"] = f"{folder}/config"
        root = Path(folder)
        lines = copies(root, int(arguments.gib * 2**30), arguments.rounds) + training(root, arguments.rounds)
    if arguments.json:
        print(json.dumps(lines))
        return 0
    table = Table(title=torch.cuda.get_device_name(), title_justify="left")
    for name in ("", "tierckpt", "limit", "times", "goal", "met"):
        table.add_column(name, justify="left" if not name else "right")
    for line in lines:
        cells = [f"{line[name]:.2f}" if name in line else "" for name in ("value", "limit", "ratio")]
        table.add_row(
            line["title"], *cells, line.get("goal", ""), {True: "yes", False: "no", None: ""}[line.get("met")]
        )
    Console(width=140).print(table)
    print(
        "limit: copied: one plain pinned copy; training: as if the copies at 50 GB/s were all that a step has to wait for"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
