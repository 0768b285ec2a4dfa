"""Saving and loading on one folder, against the machine's limits and what a user would otherwise use.

    python benchmarks/foundation.py [--gib 2] [--rounds 5] [--root FOLDER] [--json]

All contenders of a row run one after the other in each round; a figure is the median over the rounds, a ratio the
median of the rounds' ratios. "Durable" means fsynced. "Cached" means that the files were read just before, "cold" that
they were dropped from the page cache. Every loader fills tensors that exist already. Only ratios travel to another
machine.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from blake3 import blake3
from rich.console import Console
from rich.table import Table
from safetensors.torch import load_file, save_file

import tierckpt
from tierckpt import _native
from tierckpt.checkpointer import _close_all
from tierckpt.config import IO_THREADS
from tierckpt.format.digest import CHUNK

State = dict[str, torch.Tensor]


def state_of(count: int, nbytes: int) -> State:
    """``count`` float32 tensors of ``nbytes`` in all, filled with what does not compress."""
    each = max(1, nbytes // count // 4)
    return {f"layer.{i}.weight": torch.randn(each) for i in range(count)}


def size_of(state: State) -> int:
    return sum(tensor.nbytes for tensor in state.values())


class Bench:
    """One folder; names of steps are never used twice."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self._count = itertools.count()

    def folder(self, name: str) -> Path:
        return self.root / f"{name}-{next(self._count)}"

    # Saving: each returns a function to undo it

    def raw_write(self, source: _native.Buffer) -> Path:
        """The same bytes, from as many threads, into a new file, O_DIRECT, fsync: what the disk can do."""
        path = self.folder("raw")
        view, nbytes = memoryview(source), source.nbytes
        folder = os.open(self.root, os.O_RDONLY)
        fd, _ = _native.open_direct(folder, path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        _native.reserve(fd, nbytes)  # as we do: else its writes exclude each other
        chunks = iter(range(0, nbytes, CHUNK))
        lock = threading.Lock()

        def work() -> None:
            while True:
                with lock:
                    offset = next(chunks, None)
                if offset is None:
                    return
                _native.write_at(fd, view[offset : offset + CHUNK], offset)

        _threads(work)
        os.fsync(fd)
        os.close(fd)
        os.close(folder)
        return path

    def tierckpt_save(self, state: State) -> Path:
        path = self.folder("tierckpt")
        tierckpt.save(state, path, step=0)
        return path

    def dcp_save(self, state: State) -> Path:
        path = self.folder("dcp")
        writer = dcp.FileSystemWriter(path, thread_count=IO_THREADS)  # type: ignore[attr-defined]
        dcp.save(state, storage_writer=writer, no_dist=True)  # type: ignore[attr-defined]
        return path

    def torch_save(self, state: State) -> Path:
        path = self.folder("torch")
        with path.open("wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        return path

    def safetensors_save(self, state: State) -> Path:
        path = self.folder("safetensors")
        save_file(state, path)
        with path.open("rb") as file:
            os.fsync(file.fileno())
        return path

    # Loading

    def raw_read(self, path: Path) -> None:
        """Every byte into a few buffers, O_DIRECT: what the disk can do."""
        folder = os.open(self.root, os.O_RDONLY)
        fd, _ = _native.open_direct(folder, path.name, os.O_RDONLY)
        offsets = iter(range(0, path.stat().st_size, CHUNK))
        lock = threading.Lock()

        def work() -> None:
            buffer = _native.Buffer(CHUNK, populate=True)
            while True:
                with lock:
                    offset = next(offsets, None)
                if offset is None:
                    return
                _native.read_at(fd, buffer, offset)

        _threads(work)
        os.close(fd)
        os.close(folder)

    def tierckpt_load(self, path: Path, state: State) -> None:
        tierckpt.load(state, path)

    def dcp_load(self, path: Path, state: State) -> None:
        reader = dcp.FileSystemReader(path)  # type: ignore[attr-defined]
        dcp.load(state, storage_reader=reader, no_dist=True)  # type: ignore[attr-defined]

    def torch_load(self, path: Path, state: State) -> None:
        for name, tensor in torch.load(path, weights_only=True).items():
            state[name].copy_(tensor)

    def safetensors_load(self, path: Path, state: State) -> None:
        for name, tensor in load_file(path).items():
            state[name].copy_(tensor)


def packed(state: State) -> _native.Buffer:
    """The bytes of a state one after the other, up to the next page."""
    nbytes = size_of(state)
    buffer = _native.Buffer(-(-nbytes // 4096) * 4096, populate=True)
    view, at = memoryview(buffer), 0
    for tensor in state.values():
        view[at : at + tensor.nbytes] = memoryview(tensor.numpy().data).cast("B")
        at += tensor.nbytes
    return buffer


def blake3_all_cores(state: State) -> None:
    """Digests of the bytes in memory, chunk by chunk on all cores, and nothing else."""
    views = [memoryview(tensor.numpy().data).cast("B") for tensor in state.values()]
    chunks = iter([view[lo : lo + CHUNK] for view in views for lo in range(0, len(view), CHUNK)])
    lock = threading.Lock()

    def work() -> None:
        while True:
            with lock:
                chunk = next(chunks, None)
            if chunk is None:
                return
            blake3(chunk).digest()

    _threads(work, len(os.sched_getaffinity(0)))


def one_copy(state: State, into: State) -> None:
    """Every tensor by torch's copy_, on one thread."""
    for name, tensor in state.items():
        into[name].copy_(tensor)


def _threads(work: Callable[[], None], count: int = IO_THREADS) -> None:
    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]


def warm(path: Path) -> None:
    """Read everything through the page cache."""
    for file in _files(path):
        with file.open("rb", buffering=0) as stream:
            while stream.read(1 << 24):
                continue


def drop(path: Path) -> None:
    """Out of the page cache (the files are clean: they were fsynced)."""
    for file in _files(path):
        fd = os.open(file, os.O_RDONLY)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink()


def seconds(work: Callable[[], Any]) -> tuple[float, float, Any]:
    """Wall seconds, CPU seconds, result."""
    cpu, wall = time.process_time(), time.perf_counter()
    found = work()
    return time.perf_counter() - wall, time.process_time() - cpu, found


class Row:
    """Times of several contenders over the rounds."""

    def __init__(self, title: str, nbytes: int) -> None:
        self.title, self.nbytes = title, nbytes
        self.times: dict[str, list[float]] = {}
        self.cpu: dict[str, list[float]] = {}

    def add(self, name: str, wall: float, cpu: float) -> None:
        self.times.setdefault(name, []).append(wall)
        self.cpu.setdefault(name, []).append(cpu)

    def median(self, name: str) -> float:
        return statistics.median(self.times[name])

    def ratio(self, of: str, to: str) -> float:
        """How many times as fast ``of`` is as ``to``: the median of the rounds' ratios."""
        return statistics.median(b / a for a, b in zip(self.times[of], self.times[to], strict=True))


def saves(bench: Bench, title: str, state: State, rounds: int) -> tuple[Row, dict[str, Path]]:
    """Durable saves of a state; the last files of each contender are kept."""
    nbytes = size_of(state)
    source = packed(state)
    row = Row(f"durable save, {title}", nbytes)
    kept: dict[str, Path] = {}
    contenders: dict[str, Callable[[], Path]] = {
        "raw": lambda: bench.raw_write(source),
        "tierckpt": lambda: bench.tierckpt_save(state),
        "dcp": lambda: bench.dcp_save(state),
        "torch": lambda: bench.torch_save(state),
        "safetensors": lambda: bench.safetensors_save(state),
    }
    for _ in range(rounds + 1):
        for name, contender in contenders.items():
            if name in kept:
                remove(kept[name])
            os.sync()
            wall, cpu, kept[name] = seconds(contender)
            row.add(name, wall, cpu)
    for times in (*row.times.values(), *row.cpu.values()):
        del times[0]  # the first round warms up
    return row, kept


def loads(bench: Bench, title: str, state: State, kept: dict[str, Path], rounds: int, *, cold: bool) -> Row:
    row = Row(f"{'cold' if cold else 'cached'} load, {title}", size_of(state))
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    contenders: dict[str, Callable[[], None]] = {
        "raw": lambda: bench.raw_read(kept["raw"]),
        "tierckpt": lambda: bench.tierckpt_load(kept["tierckpt"], into),
        "dcp": lambda: bench.dcp_load(kept["dcp"], into),
        "torch": lambda: bench.torch_load(kept["torch"], into),
        "safetensors": lambda: bench.safetensors_load(kept["safetensors"], into),
    }
    if not cold:
        contenders["raw"] = lambda: blake3_all_cores(state)
        contenders["copy"] = lambda: one_copy(state, into)
    for round_ in range(rounds + 1):
        for name, contender in contenders.items():
            if name in kept:
                (drop if cold else warm)(kept[name])
            wall, cpu, _ = seconds(contender)
            if round_:
                row.add(name, wall, cpu)
    assert all(torch.equal(into[name], tensor) for name, tensor in state.items())
    return row


def verifies(title: str, kept: dict[str, Path], state: State, rounds: int) -> Row:
    row = Row(f"verify, {title}", size_of(state))
    for round_ in range(rounds + 1):
        for name, contender in (
            ("raw", lambda: blake3_all_cores(state)),
            ("tierckpt", lambda: tierckpt.verify(kept["tierckpt"], deep=True)),
        ):
            warm(kept["tierckpt"])
            wall, cpu, _ = seconds(contender)
            if round_:
                row.add(name, wall, cpu)
    return row


def figures(bench: Bench, gib: float, rounds: int) -> list[Row]:
    rows = []
    nbytes = int(gib * 2**30)
    for title, count, size in (
        ("64 tensors", 64, nbytes),
        ("8,192 tensors", 8192, nbytes),
        ("20,000 keys", 20_000, 80_000),
    ):
        state = state_of(count, size)
        row, kept = saves(bench, title, state, rounds)
        rows.append(row)
        rows.append(loads(bench, title, state, kept, rounds, cold=False))
        if count != 20_000:
            rows.append(loads(bench, title, state, kept, rounds, cold=True))
            rows.append(verifies(title, kept, state, rounds))
        for path in kept.values():
            remove(path)
        del state
    return rows


CONTENDERS = ("raw", "copy", "tierckpt", "dcp", "torch", "safetensors")


def show(rows: list[Row], console: Console) -> None:
    table = Table(title="seconds; in brackets: how many times as fast tierckpt is", title_justify="left")
    table.add_column("")
    for name in ("limit", "one copy", *CONTENDERS[2:], "CPU s/GB"):
        table.add_column(name, justify="right")
    for row in rows:
        cells = [row.title]
        for name in CONTENDERS:
            if name not in row.times:
                cells.append("")
            elif name == "tierckpt":
                cells.append(f"[bold]{row.median(name):.3f}[/]")
            else:
                cells.append(f"{row.median(name):.3f} ({row.ratio('tierckpt', name):.2f}×)")
        large = row.nbytes > 1 << 26
        cells.append(f"{statistics.median(row.cpu['tierckpt']) / row.nbytes * 1e9:.2f}" if large else "")
        table.add_row(*cells)
    console.print(table)
    console.print(
        "limit: save: O_DIRECT write of the same bytes; cold: O_DIRECT read; cached, verify: BLAKE3 on all cores"
    )
    times = {row.title: row.median("tierckpt") for row in rows}
    small = times["durable save, 8,192 tensors"] / times["durable save, 64 tensors"]
    console.print(f"8,192 small against 64 large tensors: save {small:.2f}×, ", end="")
    small = times["cached load, 8,192 tensors"] / times["cached load, 64 tensors"]
    console.print(f"cached load {small:.2f}×")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=2.0, help="size of the large states")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", type=Path, help="a folder on the disk to measure (default: a temporary one)")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tierckpt-bench-", dir=arguments.root) as folder:
        os.environ["XDG_CONFIG_HOME"] = f"{folder}/config"
        rows = figures(Bench(Path(folder)), arguments.gib, arguments.rounds)
        _close_all()  # what is noted down at the end would come after the folder has gone
    if arguments.json:
        print(json.dumps([{"title": row.title, "bytes": row.nbytes, "seconds": row.times} for row in rows]))
    else:
        show(rows, Console(width=170))
    return 0


if __name__ == "__main__":
    sys.exit(main())
