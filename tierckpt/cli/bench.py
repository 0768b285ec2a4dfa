"""``tierckpt bench``: how fast a folder saves and loads, against plain I/O of the same bytes."""

from __future__ import annotations

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from tierckpt import _native
from tierckpt.cli.needs import needs_torch
from tierckpt.cli.output import say, say_json, size, table
from tierckpt.config import IO_THREADS
from tierckpt.errors import StoreError
from tierckpt.format.digest import CHUNK, chunk_count, chunk_range
from tierckpt.tiers.disk import ALIGNMENT
from tierckpt.tiers.workers import workers

if TYPE_CHECKING:
    import torch

_GIB = 1 << 30
#: Measurements of each kind, taken in turn; the median counts.
_ROUNDS = 3
#: Bytes of a large tensor, and of all small ones together (there are 256 of them).
_LARGE = 64 << 20
_SMALL = 16 << 20


@dataclass
class _Figure:
    """What was measured of one kind of work: seconds of each round, ours and those of the plain one."""

    name: str
    ours: list[float] = field(default_factory=list)
    plain: list[float] = field(default_factory=list)

    def to_json(self, nbytes: int) -> dict[str, Any]:
        ours, plain = (nbytes / statistics.median(times) / 1e9 for times in (self.ours, self.plain))
        return {"name": self.name, "gb_per_s": ours, "plain_gb_per_s": plain, "ratio": ours / plain}


@click.command(short_help="Measure saving and loading in a folder.")
@click.argument("root", default=".", type=click.Path(exists=True, file_okay=False, writable=True, path_type=Path))
@click.option(
    "--size",
    "gib",
    type=click.FloatRange(min=0.001),
    default=1.0,
    show_default=True,
    metavar="GIB",
    help="Size of the state; the folder needs room for two and a half times as much.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")
def command(root: Path, gib: float, as_json: bool) -> int:
    """Measure saving to and loading from the folder ROOT, by default this one.

    A state of random bytes is saved durably and loaded again, and a plain file of the same bytes is written
    and read with O_DIRECT by as many threads. Works in a temporary folder, which is removed.
    """
    needs_torch("tierckpt bench")
    nbytes = int(gib * _GIB) // ALIGNMENT * ALIGNMENT
    _must_fit(root, nbytes)
    with _workspace(root) as folder:
        figures, notes = _measure(folder, nbytes)
    found = [figure.to_json(nbytes) for figure in figures]
    if as_json:
        where = str(root.absolute())
        say_json({"root": where, "bytes": nbytes, "rounds": _ROUNDS, "figures": found, "notes": notes})
        return 0
    say(f"{size(nbytes)} in {root.absolute()}, {IO_THREADS} threads, median of {_ROUNDS}")
    speeds = ("gb_per_s", "plain_gb_per_s", "ratio")
    rows = [(str(one["name"]), *(f"{one[key]:.2f}" for key in speeds)) for one in found]
    columns = ("", "tierckpt, GB/s", "plain, GB/s", "ratio")
    table(columns, rows, right=columns[1:])
    for note in notes:
        say(f"note: {note}")
    return 0


def _must_fit(root: Path, nbytes: int) -> None:
    free, needed = shutil.disk_usage(root).free, int(2.5 * nbytes)
    if free < needed:
        raise StoreError(f"{root}: {size(needed)} of free space are needed, {size(free)} are left")


@contextmanager
def _workspace(root: Path) -> Iterator[Path]:
    """A folder on the disk to be measured, with keys and pins of its own: the user's stay as they are."""
    name = "XDG_CONFIG_HOME"
    before = os.environ.get(name)
    with tempfile.TemporaryDirectory(prefix=".tierckpt-bench-", dir=root) as folder:
        os.environ[name] = str(Path(folder) / "config")
        try:
            yield Path(folder)
        finally:
            if before is None:
                del os.environ[name]
            else:
                os.environ[name] = before


def _measure(folder: Path, nbytes: int) -> tuple[list[_Figure], list[str]]:
    from tierckpt import functional, load, prune, save
    from tierckpt.format.keys import SigningKey

    memory = memoryview(_native.Buffer(nbytes, populate=True))
    state = _state(memory)
    saves, cold, cached = _Figure("durable save"), _Figure("load from disk"), _Figure("load from page cache")
    root, raw, key = folder / "store", folder / "raw", SigningKey.generate()
    kept = 0.0
    try:
        save(state, root, 0, run="bench", key=key)  # plans, and begins a generation
        for step in range(1, _ROUNDS + 1):
            prune(root, 1, grace=0.0, key=key)
            raw.unlink(missing_ok=True)
            saves.plain.append(_timed(lambda: _write(raw, memory)))
            saves.ours.append(_timed(lambda step=step: save(state, root, step, run="bench", key=key)))  # type: ignore[misc]
            for figure, prepare, direct in ((cold, _forget, True), (cached, _remember, False)):
                files = [raw, *root.glob("g*/s*/shard-*.safetensors")]
                for file in files:
                    prepare(file)
                if direct:
                    kept = max(kept, *map(_cached, files))
                figure.plain.append(_timed(lambda direct=direct: _read(raw, memory, direct=direct)))  # type: ignore[misc]
                figure.ours.append(_timed(lambda: load(state, root)))
    finally:
        for session in functional._sessions.values():
            session.close()
    notes = []
    if kept > 0.1:
        notes.append("this file system keeps files in memory: the figures of the disk are those of memory")
    return [saves, cold, cached], notes


def _state(memory: memoryview) -> dict[str, torch.Tensor]:
    """Large and small tensors, random, that share out ``memory``."""
    import torch

    nbytes = memory.nbytes
    torch.frombuffer(memory, dtype=torch.int64).random_()
    small = min(_SMALL, nbytes // 4) // 256 // 4 * 4
    ends = [i * small for i in range(256)]
    ends += range(256 * small, nbytes, _LARGE)
    return {
        f"tensor{i}": torch.frombuffer(memory, dtype=torch.float32, offset=start, count=(end - start) // 4)
        for i, (start, end) in enumerate(pairwise([*ends, nbytes]))
    }


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


def _write(path: Path, memory: memoryview) -> None:
    """Write a new file past the page cache and make it durable."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fd, _ = _native.open_direct(folder, path.name, os.O_WRONLY | os.O_CREAT | os.O_EXCL)
        try:
            _native.reserve(fd, memory.nbytes)  # as we do: else its writes exclude each other

            def work(index: int, _: _native.Buffer) -> None:
                lo, hi = chunk_range(index, memory.nbytes)
                _native.write_at(fd, memory[lo:hi], lo)

            workers().each(chunk_count(memory.nbytes), work)
            os.fsync(fd)
        finally:
            os.close(fd)
        os.fsync(folder)
    finally:
        os.close(folder)


def _read(path: Path, memory: memoryview, *, direct: bool) -> None:
    """Read the file into ``memory``, past the page cache or through it."""
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        fd = _native.open_direct(folder, path.name, os.O_RDONLY)[0] if direct else os.open(path, os.O_RDONLY)
    finally:
        os.close(folder)
    try:

        def work(index: int, _: _native.Buffer) -> None:
            lo, hi = chunk_range(index, memory.nbytes)
            _native.read_at(fd, memory[lo:hi], lo)

        workers().each(chunk_count(memory.nbytes), work)
    finally:
        os.close(fd)


def _forget(path: Path) -> None:
    """Ask the system to drop the file from its page cache."""
    with open(path, "rb") as file:
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _remember(path: Path) -> None:
    """Bring the file into the page cache."""
    scratch = bytearray(CHUNK)
    with open(path, "rb", buffering=0) as file:
        while file.readinto(scratch):
            pass


def _cached(path: Path) -> float:
    """The fraction of the file that is in the page cache; 0 where the system cannot tell."""
    with open(path, "rb") as file:
        return _native.cached(file.fileno(), 0, os.fstat(file.fileno()).st_size) or 0.0
