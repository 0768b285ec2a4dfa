"""States, comparisons and storage faults that the cases share.

Faults are put where the package meets the operating system, in the process under test; the engine has no hooks for
them.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tierckpt import _native


def state(value: float, *, size: int = 1000) -> dict[str, Any]:
    """Two tensors and plain values that all say ``value``."""
    return {
        "model": {"w": torch.full((size, 3), float(value)), "b": torch.full((7,), int(value), dtype=torch.int64)},
        "step": int(value),
        "name": f"value {value}",
    }


def blank(*, size: int = 1000) -> dict[str, Any]:
    """A template for `state` that holds none of its values."""
    return state(-1, size=size)


def holds(found: dict[str, Any], value: float) -> bool:
    """Whether every element and every plain value says ``value``."""
    model = found["model"]
    return (
        bool((model["w"] == value).all())
        and bool((model["b"] == int(value)).all())
        and found["step"] == int(value)
        and found["name"] == f"value {value}"
    )


def sharded(value: float) -> dict[str, Any]:
    """A tensor cut over all ranks of the job, and one that all of them hold, all elements ``value``."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor import full as dtensor_full

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return {
        "w": dtensor_full((12, 5), float(value), device_mesh=mesh, placements=[Shard(0)]),
        "r": torch.full((4,), float(value)),
    }


def files(root: str | Path) -> list[str]:
    """Every file below ``root``, as a sorted list of relative names."""
    return sorted(str(path.relative_to(root)) for path in Path(root).rglob("*") if not path.is_dir())


def files_of(root: str | Path, step: int) -> list[str]:
    """Those in the folders of ``step``, of any generation."""
    return [name for name in files(root) if f"/s{step:012d}/" in f"/{name}"]


def shard_of(root: str | Path, step: int, rank: int = 0, generation: int = 1) -> Path:
    """The path of a shard."""
    return Path(root) / f"g{generation:04d}" / f"s{step:012d}" / f"shard-{rank:05d}.safetensors"


def flip(path: Path, offset: int) -> None:
    """Flip one bit of the byte at ``offset``."""
    data = bytearray(path.read_bytes())
    data[offset] ^= 0x10
    path.write_bytes(data)


Fault = Callable[[str], None]
"""Called with the path of the file that is about to be written; may raise, wait or kill."""


def on_write(fault: Fault) -> Callable[[], None]:
    """Call ``fault`` before every write to a file; the result puts things back."""
    original = _native.write_at

    def write_at(fd: int, data: Any, offset: int) -> None:
        fault(os.readlink(f"/proc/self/fd/{fd}"))
        original(fd, data, offset)

    _native.write_at = write_at  # type: ignore[assignment]

    def undo() -> None:
        _native.write_at = original

    return undo


def fails_for(step: int, number: int) -> Fault:
    """Writes to files of ``step`` fail with this ``errno``."""

    def fault(path: str) -> None:
        if f"/s{step:012d}/" in path:
            raise OSError(number, os.strerror(number), path)

    return fault
