"""What saving costs a training loop, against the machine's limits and what a user would otherwise use.

    python benchmarks/snapshot.py [--gib 1] [--rounds 3] [--root FOLDER] [--only stall,…] [--json]

All contenders of a row run one after the other in each round, warm; a figure is the median over the rounds, a ratio the
median of the rounds' ratios. Each part runs in a process of its own, so that none finds what another has left. A
*blocking* save has copied everything when it returns; an *overlapped* one copies what only the optimizer changes while
training goes on, which then waits for the rest of the copy before the optimizer's step. "A free core" means that the
training step leaves one core alone, "none" that it uses all of them. Only ratios travel to another machine.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import importlib
import itertools
import json
import os
import resource
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.multiprocessing
from foundation import Bench, Row, blake3_all_cores, packed, remove, seconds, state_of
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

import tierckpt
from tierckpt import Checkpointer, Disk, Ram, _native
from tierckpt.agent.protocol import Channel
from tierckpt.agent.runtime import homes

COUNTS = (64, 1_000, 10_000)
SMALL = 4096  # bytes of each tensor in the rows of small ones
CORES = len(os.sched_getaffinity(0))
#: Steps go to the agent's memory and, but for the first, not to the disk.
ONLY_RAM = (Ram(), Disk(every=1_000_000_000))

Line = dict[str, Any]
CONTENDERS = ("tierckpt", "agent off", "dcp thread", "dcp process", "torch_checkpointing")


# The agent


def agent() -> dict[str, Any]:
    """What the only agent says of itself."""
    (home,) = homes()
    sock = home.connect(10.0)
    assert sock is not None
    with sock:
        channel = Channel(sock)
        channel.send({"op": "status"})
        return channel.receive().fields["status"]  # type: ignore[return-value]


def cpu_of(pid: int) -> float:
    """CPU seconds that a process has used, all its threads together."""
    return time.clock_gettime((~pid << 3) | 2)  # the kernel's name for that clock


def idle(pid: int) -> None:
    """Wait until a process has nothing to do: digests are taken after a save, and no event tells when."""
    before = -1.0
    while (now := cpu_of(pid)) - before > 0.001:
        before = now
        time.sleep(0.03)


def memory_of(pid: int) -> int:
    """Bytes of a process's own memory; its slots are shared memory, and not counted."""
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


# Contenders


class Contender(Protocol):
    """Something that saves in the background."""

    def save(self, step: int, state: Any) -> None:
        """Returns when training may go on."""

    def fence(self) -> contextlib.AbstractContextManager[object]:
        """Around what changes the state."""

    def settle(self) -> float:
        """Wait until the last save has ended; seconds for which it stood at the fence beside those seen around `fence`."""

    def close(self) -> None: ...


class Tierckpt:
    """Args: those of `Checkpointer`."""

    def __init__(self, root: Path, **arguments: Any) -> None:
        self.root = root
        self._checkpointer = Checkpointer(root, **arguments)
        self._handle: Any = None
        self._has_agent = arguments.get("agent") != "off"

    def save(self, step: int, state: Any) -> None:
        self._handle = self._checkpointer.save(step, state)

    def fence(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext()  # optimizers wait by themselves

    def settle(self) -> float:
        self._handle.wait()
        if self._handle.error is not None:
            raise self._handle.error
        if self._has_agent:
            self.pid = int(agent()["pid"])
            idle(self.pid)
        return float(self._handle.timings["fence"])

    def close(self) -> None:
        self._checkpointer.close()


class Blocking(Tierckpt):
    """`tierckpt.async_save`: nothing is overlapped, and there is no agent."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._has_agent = False

    def save(self, step: int, state: Any) -> None:
        self._handle = tierckpt.async_save(state, self.root, step)

    def close(self) -> None:
        """Its session ends with the process."""


class Dcp:
    """`dcp.async_save` with memory for the copy that is kept from save to save.

    Args:
        overlapped: the copy is made by a thread while training goes on.
    """

    def __init__(self, root: Path, kind: AsyncCheckpointerType, *, overlapped: bool) -> None:
        self.root, self._kind, self._overlapped = root, kind, overlapped
        shared = kind is AsyncCheckpointerType.PROCESS
        self._stager = DefaultStager(StagingOptions(False, shared, overlapped, False))
        self._staged: Any = None
        self._written: Any = None

    def save(self, step: int, state: Any) -> None:
        found: Any = dcp.async_save(  # type: ignore[attr-defined]
            {name: _plain(value) for name, value in state.items()},
            checkpoint_id=self.root / str(step),
            async_checkpointer_type=self._kind,
            async_stager=self._stager,
        )
        self._staged = found.staging_completion if self._overlapped else None
        self._written = found.upload_completion if self._overlapped else found

    def fence(self) -> contextlib.AbstractContextManager[object]:
        if self._staged is not None:
            self._staged.result()
        return contextlib.nullcontext()

    def settle(self) -> float:
        self._written.result()
        shutil.rmtree(self.root)
        return 0.0

    def close(self) -> None:
        self._stager.close()


class TorchCheckpointing:
    """`torch_checkpointing` with a process that writes; O_DIRECT is off, since its unaligned writes fail on ext4."""

    def __init__(self, root: Path, *, overlapped: bool) -> None:
        config = importlib.import_module("torch_checkpointing.config")
        staging = importlib.import_module("torch_checkpointing.staging")
        storage = importlib.import_module("torch_checkpointing.storage.filesystem")
        manager = importlib.import_module("torch_checkpointing").CheckpointManager
        stager = staging.CheckpointStagerConfig(
            use_pinned_memory=False, use_non_blocking_copy=False, use_async_staging=overlapped
        )
        self.root = root
        root.mkdir()
        self._manager = manager(
            manager.Config(
                save=config.AsyncCheckpointSaverConfig(staging_config=stager),
                storage_config=storage.LocalFileSystemStorageConfig(use_direct_io=False),
            )
        )
        self._written: Any = None

    def save(self, step: int, state: Any) -> None:
        # Containers of tensors are what it serializes as a whole.
        whole = {"state": {name: _plain(value) for name, value in state.items()}}
        self._written = self._manager.save(str(self.root / str(step)), whole)

    def fence(self) -> contextlib.AbstractContextManager[object]:
        return self._manager.lock()  # type: ignore[no-any-return]

    def settle(self) -> float:
        self._written.result()
        for path in self.root.iterdir():
            shutil.rmtree(path)
        return 0.0

    def close(self) -> None:
        self._manager.close()


def _plain(value: Any) -> Any:
    return value.state_dict() if hasattr(value, "state_dict") else value


def peers(bench: Bench, count: int, *, overlapped: bool) -> dict[str, Contender]:
    """What a user would otherwise use."""
    # Both hand over a descriptor for each tensor; where there are too few of them, names of files in shared memory.
    few = 4 * count > resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    strategy: Any = torch.multiprocessing.set_sharing_strategy
    strategy("file_system" if few else "file_descriptor")
    found: dict[str, Contender] = {
        "dcp thread": Dcp(bench.folder("dcp"), AsyncCheckpointerType.THREAD, overlapped=overlapped),
        "dcp process": Dcp(bench.folder("dcp"), AsyncCheckpointerType.PROCESS, overlapped=overlapped),
    }
    if importlib.util.find_spec("torch_checkpointing") is not None:
        found["torch_checkpointing"] = TorchCheckpointing(bench.folder("tc"), overlapped=overlapped)
    return found


def most_rounds(contender: Contender, count: int, rounds: int) -> int:
    """Peers take many seconds for each save of thousands of tensors."""
    return rounds if isinstance(contender, Tierckpt) or count <= 1000 else 1


@contextlib.contextmanager
def alone() -> Iterator[None]:
    """A process group of this process: the process mode of dcp wants one."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), RANK="0", WORLD_SIZE="1")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


# Limits


class Copy:
    """One memory copy of so many bytes, from one block to another, both present."""

    def __init__(self, nbytes: int) -> None:
        self._from, self._to = (_native.Buffer(nbytes, populate=True) for _ in range(2))
        self._source, self._target = (
            ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in (self._from, self._to)
        )
        self._nbytes = nbytes

    def __call__(self) -> None:
        ctypes.memmove(self._target, self._source, self._nbytes)


# Parts: each gives lines of the table


def stall(bench: Bench, mib: int, rounds: int) -> list[Line]:
    """A blocking save against one copy of the same bytes, and against the peers."""
    lines = [
        _stall(bench, f"{count:,} tensors, {mib:,} MiB", count, mib << 20, rounds, against_peers=True)
        for count in COUNTS
    ]
    few, *_, many = lines
    ratios = {name: many[name] / few[name] for name in CONTENDERS if name in few and name in many}
    lines.append(
        {
            "title": f"  {COUNTS[-1]:,} tensors against {COUNTS[0]}",
            "unit": "×",
            **ratios,
            "goal": "≤ 1.3×",
            "met": ratios["tierckpt"] <= 1.3,
        }
    )
    for count in COUNTS[1:]:
        title = f"{count:,} tensors of {SMALL >> 10} KiB"
        lines.append(_stall(bench, title, count, count * SMALL, 3 * rounds, against_peers=False))
    return lines


def _stall(bench: Bench, title: str, count: int, nbytes: int, rounds: int, *, against_peers: bool) -> Line:
    state = state_of(count, nbytes)
    copy = Copy(nbytes)
    row = Row(title, nbytes)
    with ExitStack() as stack:
        contenders: dict[str, Contender] = {
            "tierckpt": Tierckpt(bench.folder("agent"), tiers=ONLY_RAM),
            "agent off": Blocking(bench.folder("own")),
            **(peers(bench, count, overlapped=False) if against_peers else {}),
        }
        for contender in contenders.values():
            stack.callback(contender.close)
        for step in range(4):  # its slots are made by the first saves
            contenders["tierckpt"].save(step, state)
            contenders["tierckpt"].settle()
        for round_ in range(rounds + 1):
            for name, contender in contenders.items():
                if round_ > most_rounds(contender, count, rounds):
                    continue
                os.sync()
                copy()
                copied = seconds(copy)[0]  # beside each, so that it is as disturbed
                wall = seconds(partial(contender.save, 4 + round_, state))[0]
                contender.settle()
                if round_:
                    row.add(name, wall, 0.0)
                    row.add(f"copy for {name}", copied, 0.0)
                    row.add("copy", copied, 0.0)
    line: Line = {"title": f"stall of a blocking save, {title}", "unit": "ms", "limit": row.median("copy") * 1e3}
    for name in contenders:
        line[name] = row.median(name) * 1e3
        line[f"{name} ratio"] = row.ratio(f"copy for {name}", name)
    line["goal"] = "≤ 1.2×"
    line["met"] = line["tierckpt ratio"] <= 1.2
    return line


class Many(nn.Module):
    """So many parameters that with Adam's state there are ``count`` tensors of ``nbytes`` in all."""

    def __init__(self, count: int, nbytes: int) -> None:
        super().__init__()
        parameters = count // 4  # each with its two moments and its number of steps
        each = max(1, nbytes // parameters // 12)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(each)) for _ in range(parameters)])


class Busy:
    """A forward and backward pass that takes at least so many seconds on so many threads."""

    def __init__(self, least: float, threads: int) -> None:
        self._threads = threads
        torch.set_num_threads(threads)
        self._matrix = torch.randn(768, 768)
        self._out = torch.empty_like(self._matrix)
        self._times = 5
        self()
        took = min(seconds(self)[0] for _ in range(3))
        self._times = max(1, int(least / took * self._times))

    def __call__(self) -> None:
        torch.set_num_threads(self._threads)
        for _ in range(self._times):
            torch.mm(self._matrix, self._matrix, out=self._out)


def overlap(bench: Bench, mib: int, rounds: int) -> list[Line]:
    """An overlapped save in a training step: until it returns, the wait at the fence, and what the step costs more."""
    return [line for count in COUNTS for line in _overlap(bench, count, mib << 20, rounds)]


class Trained:
    """A model with its optimizer, and one training step."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.model = Many(count, nbytes)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-3)
        for parameter in self.model.parameters():
            parameter.grad = torch.full_like(parameter, 1e-3)
        self.optimizer.step()
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self._steps = itertools.count()

    def plain(self, work: Busy) -> None:
        work()
        self.optimizer.step()

    def saved(self, work: Busy, contender: Contender, *, settled: bool = True) -> tuple[float, float, float]:
        """Seconds until the save returned, at the fence, and of the whole step; ``settled``: the save has ended after it."""
        self.optimizer.step()  # caches are as cold as after any other step
        began = time.perf_counter()
        contender.save(next(self._steps), self.state)
        returned = time.perf_counter()
        work()
        at_fence = time.perf_counter()
        with contender.fence():
            waited = time.perf_counter() - at_fence
            self.optimizer.step()
        ended = time.perf_counter()
        return returned - began, waited + (contender.settle() if settled else 0.0), ended - began


def _overlap(bench: Bench, count: int, nbytes: int, rounds: int) -> list[Line]:
    lines = []
    trained, copy = Trained(count, nbytes), Copy(nbytes)
    copied = min(seconds(copy)[0] for _ in range(4))
    most = 10.0 if count > 1000 else 2.0
    with ExitStack() as stack:
        contenders: dict[str, Contender] = {
            "tierckpt": Tierckpt(bench.folder("agent"), tiers=ONLY_RAM),
            **peers(bench, count, overlapped=True),
        }
        for contender in contenders.values():
            stack.callback(contender.close)
        warm = Busy(0.01, CORES)
        for name, contender in contenders.items():
            for _ in range(4 if name == "tierckpt" else 1):
                trained.saved(warm, contender)
        modes = [("none free", CORES)] if CORES == 1 else [("a free core", CORES - 1), ("none free", CORES)]
        for mode, threads in modes:
            work = Busy(max(0.2, 2 * copied), threads)
            row = Row(mode, nbytes)
            for round_ in range(rounds):
                for name, contender in contenders.items():
                    if round_ >= most_rounds(contender, count, rounds):
                        continue
                    os.sync()
                    row.add(f"{name} plain", seconds(partial(trained.plain, work))[0], 0.0)
                    returned, fence, whole = trained.saved(work, contender)
                    row.add(name, returned, 0.0)
                    row.add(f"{name} fence", fence, 0.0)
                    row.add(f"{name} step", whole, 0.0)
            title = f"{count:,} tensors, {mode}"
            returns: Line = {"title": f"overlapped save returns, {title}", "unit": "ms", "goal": f"≤ {most:g} ms"}
            waits: Line = {"title": "  wait at the fence", "unit": "ms", "limit": copied * 1e3}
            more: Line = {"title": "  that step against one without", "unit": "×"}
            for name in contenders:
                returns[name] = row.median(name) * 1e3
                waits[name] = row.median(f"{name} fence") * 1e3
                more[name] = row.ratio(f"{name} plain", f"{name} step")
            returns["met"] = returns["tierckpt"] <= most
            free = mode == "a free core"
            waits["goal"] = "nothing" if free else "≤ one copy"
            # To find that there is nothing to wait for takes a moment, too.
            waits["met"] = waits["tierckpt"] <= (0.1 if free else copied * 1e3)
            lines += [returns, waits, more]
    return lines


def cold(bench: Bench, mib: int, rounds: int) -> list[Line]:
    """The first saves of a run, whose slots are new: the machine gives each its memory once, while training goes on if the
    next save comes later than that."""
    trained, nbytes = Trained(64, mib << 20), mib << 20
    gaps, row = (0.35, 2.0), Row("cold", nbytes)
    for _ in range(rounds):
        for gap in gaps:
            row.add("memory", seconds(partial(_native.Buffer, nbytes, populate=True))[0], 0.0)
            contender = Tierckpt(bench.folder("agent"), tiers=ONLY_RAM)
            work = Busy(gap, max(1, CORES - 1))
            returned = [trained.saved(work, contender, settled=False)[0] for _ in range(12)]
            contender.settle()
            contender.close()
            row.add("first", returned[0], 0.0)
            row.add(f"later, {gap:g}", max(returned[1:]), 0.0)
            row.add(f"last, {gap:g}", max(returned[4:]), 0.0)
    line = {"title": "first save of a run", "unit": "ms", "limit": row.median("memory") * 1e3}
    lines: list[Line] = [{**line, "tierckpt": row.median("first") * 1e3}]
    for gap in gaps:
        for name, title in (("later", "longest of the 11 after it"), ("last", "longest of the last 8")):
            value = row.median(f"{name}, {gap:g}") * 1e3
            lines.append({"title": f"  {title}, one every {gap:g} s", "unit": "ms", "tierckpt": value})
    return lines


def cpu(bench: Bench, mib: int, rounds: int) -> list[Line]:
    """CPU seconds for each GB that goes to memory and to the disk, by part; and the memory of the agent."""
    nbytes = mib << 20
    state = state_of(64, nbytes)
    source = packed(state)
    row = Row("CPU", nbytes)
    contender = Tierckpt(bench.folder("agent"), tiers=[Ram(), Disk(keep=1, grace=0)])
    for step in range(4):
        contender.save(step, state)
        contender.settle()
    before = memory_of(contender.pid)
    most = before
    for step in range(4, 5 + rounds):
        digest = seconds(partial(blake3_all_cores, state))[1]
        _, write, path = seconds(partial(bench.raw_write, source))
        remove(path)
        os.sync()
        trainer, theirs = time.process_time(), cpu_of(contender.pid)
        _, copy, _ = seconds(partial(contender.save, step, state))
        contender.settle()
        trainer, theirs = time.process_time() - trainer, cpu_of(contender.pid) - theirs
        most = max(most, memory_of(contender.pid))
        for name, value in (
            ("copy", copy),
            ("digest", digest),
            ("write", write),
            ("the rest", trainer + theirs - copy - digest - write),
            ("trainer", trainer),
            ("agent", theirs),
            ("all", trainer + theirs),
        ):
            row.add(name, value / nbytes * 1e9, 0.0)
    status = agent()
    held = sum(slot["bytes"] for generation in status["generations"] for slot in generation["slots"])
    contender.close()
    found = {name: statistics.median(times[1:]) for name, times in row.times.items()}
    parts = " · ".join(f"{name} {found[name]:.2f}" for name in ("copy", "digest", "write", "the rest"))
    return [
        {
            "title": f"CPU s/GB to memory and disk: {parts}",
            "unit": "s",
            "tierckpt": found["all"],
            "limit": found["digest"] + found["write"],
            "goal": "≤ 0.6",
            "met": found["all"] <= 0.6,
        },
        {"title": "  of the trainer", "unit": "s", "tierckpt": found["trainer"]},
        {"title": "  of the agent", "unit": "s", "tierckpt": found["agent"]},
        {
            "title": f"memory of the agent beside {held >> 20:,} MiB of slots",
            "unit": "MB",
            "tierckpt": most / 1e6,
            "goal": "≤ 80 MB",
            "met": most <= 80e6,
        },
    ]


def restore(bench: Bench, mib: int, rounds: int) -> list[Line]:
    """From the agent's memory, every byte verified."""
    return [_restore(bench, count, mib << 20, rounds) for count in COUNTS]


def _restore(bench: Bench, count: int, nbytes: int, rounds: int) -> Line:
    state = state_of(count, nbytes)
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    copy = Copy(nbytes)
    block = {"all": torch.cat(list(state.values()))}
    row = Row(f"{count}", nbytes)
    root = bench.folder("agent")
    contender = Tierckpt(root, tiers=ONLY_RAM)
    for step in range(2):
        contender.save(step, state)
        contender.settle()
    for round_ in range(rounds + 1):
        copied = seconds(copy)[0]
        hashed = seconds(partial(blake3_all_cores, block))[0]
        wall, _, info = seconds(partial(tierckpt.load, into, root))
        assert set(info.sources) == {"ram"} and info.step == 1
        if round_:
            row.add("copy", copied, 0.0)
            row.add("digest", hashed, 0.0)
            row.add("limit", max(copied, hashed), 0.0)
            row.add("tierckpt", wall, 0.0)
    contender.close()
    assert all(torch.equal(into[name], tensor) for name, tensor in state.items())
    ratio = row.ratio("tierckpt", "limit")
    parts = ", ".join(f"{name} {row.median(name) * 1e3:.0f} ms" for name in ("digest", "copy"))
    return {
        "title": f"restore from RAM, verified, {count:,} tensors ({parts})",
        "unit": "ms",
        "limit": row.median("limit") * 1e3,
        "tierckpt": row.median("tierckpt") * 1e3,
        "tierckpt ratio": ratio,
        "goal": "≥ 0.9× as fast",
        "met": ratio >= 0.9,
    }


class Training:
    """A small transformer that is trained on all cores."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(CORES)
        layer = nn.TransformerEncoderLayer(384, 6, 1536, dropout=0.0, batch_first=True)
        self.model = nn.Sequential(nn.TransformerEncoder(layer, 6, enable_nested_tensor=False), nn.Linear(384, 64))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self._data, self._wanted = torch.randn(4, 96, 384), torch.randint(0, 64, (4, 96))
        self.state = {"model": self.model, "optimizer": self.optimizer}
        self.step(contextlib.nullcontext)

    def step(self, fence: Callable[[], contextlib.AbstractContextManager[object]]) -> None:
        loss = nn.functional.cross_entropy(self.model(self._data).flatten(0, 1), self._wanted.flatten())
        torch.autograd.backward(loss)
        with fence():
            self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def nbytes(self) -> int:
        return 3 * sum(parameter.nbytes for parameter in self.model.parameters())


def training(bench: Bench, mib: int, rounds: int) -> list[Line]:
    """What saves cost a real training loop, the drain to the disk included, in seconds of the loop."""
    it = Training()
    lines = []
    with ExitStack() as stack:
        contenders: dict[str, Contender] = {
            "tierckpt": Tierckpt(bench.folder("agent"), tiers=[Ram(), Disk(keep=1, grace=0)]),
            "agent off": Tierckpt(bench.folder("own"), agent="off", tiers=Disk(keep=1, grace=0)),
            **peers(bench, 500, overlapped=True),
        }
        for contender in contenders.values():
            stack.callback(contender.close)
        steps = itertools.count()

        def run(contender: Contender | None, every: int) -> float:
            began = time.perf_counter()
            for number in range(10):
                if contender is not None and number % every == 0:
                    contender.save(next(steps), it.state)
                it.step(contender.fence if contender is not None else contextlib.nullcontext)
            took = time.perf_counter() - began
            if contender is not None:
                contender.settle()
            return took

        for name, contender in contenders.items():
            for _ in range(4 if name == "tierckpt" else 2):
                contender.save(next(steps), it.state)
                with contender.fence():
                    contender.settle()
        plan = [(name, 10) for name in contenders] + [("tierckpt", 1), ("agent off", 1)]
        rows = {key: Row(str(key), it.nbytes) for key in plan}
        for _ in range(max(1, rounds - 1)):
            before = run(None, 1)
            for name, every in plan:
                os.sync()
                took = run(contenders[name], every)
                os.sync()
                after = run(None, 1)
                rows[name, every].add("with", took, 0.0)
                rows[name, every].add("without", (before + after) / 2, 0.0)
                before = after
        plain = statistics.median(t for row in rows.values() for t in row.times["without"]) / 10
    for every, title in ((10, "a save every 10 steps"), (1, "a save every step")):
        line: Line = {"title": f"training loop, {title} of {it.nbytes >> 20} MiB", "unit": "%"}
        for name, often in plan:
            if often == every:
                line[name] = (rows[name, every].ratio("without", "with") - 1) * 100
        lines.append(line)
    lines[0]["title"] += f" ({plain * 1e3:.0f} ms a step)"
    return lines


PARTS: dict[str, Callable[[Bench, int, int], list[Line]]] = {
    "stall": stall,
    "overlap": overlap,
    "cold": cold,
    "cpu": cpu,
    "restore": restore,
    "training": training,
}


def show(lines: Sequence[Line], console: Console) -> None:
    table = Table(title="in brackets: times the limit (restore: how many times as fast)", title_justify="left")
    table.add_column("")
    for name in ("limit", *CONTENDERS, "goal", "met"):
        table.add_column(name, justify="right")
    for line in lines:
        cells = [line["title"]]
        for name in ("limit", *CONTENDERS):
            if name not in line:
                cells.append("")
                continue
            digits = 2 if line["unit"] in ("×", "s") or line[name] < 10 else 0 if line[name] >= 100 else 1
            text = f"{line[name]:.{digits}f} {line['unit']}"
            if f"{name} ratio" in line:
                text += f" ({line[f'{name} ratio']:.2f}×)"
            cells.append(f"[bold]{text}[/]" if name == "tierckpt" else text)
        cells += [line.get("goal", ""), {True: "yes", False: "[bold]no[/]", None: ""}[line.get("met")]]
        table.add_row(*cells)
    console.print(table)
    console.print(
        "limit: stall, fence: one memory copy of the same bytes; first save: to get that much new memory; CPU: digest and "
        "O_DIRECT write alone; restore: the slower of BLAKE3 on all cores and one copy"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=1.0, help="size of the states")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--root", type=Path, help="a folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--only", help=f"parts to run, of {','.join(PARTS)}")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--part", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.part:
        warnings.simplefilter("ignore", FutureWarning)
        # The process mode of dcp opens a descriptor for each tensor.
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        with alone():
            lines = PARTS[arguments.part](Bench(arguments.root), int(arguments.gib * 1024), arguments.rounds)
        (arguments.root / "lines.json").write_text(json.dumps(lines))
        return 0
    lines = []
    with tempfile.TemporaryDirectory(prefix="tierckpt-bench-", dir=arguments.root) as folder:
        for part in arguments.only.split(",") if arguments.only else PARTS:
            root = Path(folder, part)
            # Sockets need short names, and this folder's may be long.
            with tempfile.TemporaryDirectory(prefix="tc-") as runtime:
                root.mkdir()
                own = {"XDG_CONFIG_HOME": f"{folder}/config", "XDG_RUNTIME_DIR": runtime}
                command = [sys.executable, __file__, "--part", part, "--root", str(root)]
                command += ["--gib", str(arguments.gib), "--rounds", str(arguments.rounds)]
                began = time.perf_counter()
                log = root / "log"  # the peers are talkative
                with log.open("wb") as out:
                    ended = subprocess.run(command, env={**os.environ, **own}, check=False, stdout=out, stderr=out)
                told = log.read_text(errors="replace").splitlines()
                if ended.returncode:
                    print("\n".join(told[-50:]), file=sys.stderr)
                    return 1
                print(f"{part}: {time.perf_counter() - began:.0f} s", file=sys.stderr)
            lines += json.loads((root / "lines.json").read_text())
            remove(root)
    if arguments.json:
        print(json.dumps(lines))
    else:
        show(lines, Console(width=190))
    return 0


if __name__ == "__main__":
    sys.exit(main())
