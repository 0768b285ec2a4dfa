"""States, comparisons and storage faults that the cases share.

Faults are put where the package meets the operating system, in the process under test or in its agent; the engine has no
hooks for them.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
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


FAULTY = Path(__file__).with_name("faulty")


class Faults:
    """Storage faults in this process and in the agents that it starts, until `undo`.

    Args:
        folder: where the rules lie; processes that have the same share them.
    """

    def __init__(self, folder: str | Path) -> None:
        self._folder = Path(folder)
        self._folder.mkdir(exist_ok=True)
        os.environ["STORAGE_FAULTS"] = str(folder)
        sys.path.insert(0, str(FAULTY))  # agents look for modules where we do
        spec = importlib.util.spec_from_file_location("faulty", FAULTY / "sitecustomize.py")
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        # It would install itself; here that is undone as well.
        del os.environ["STORAGE_FAULTS"]
        spec.loader.exec_module(module)
        os.environ["STORAGE_FAULTS"] = str(folder)
        self._put_back: Callable[[], None] = module.install(str(folder))

    def _rule(self, parts: Sequence[str], do: str, number: int = 0) -> Path:
        rule = self._folder / f"{'-'.join(parts).replace('/', '_')}.rule"
        new = rule.with_suffix(".new")
        new.write_text(json.dumps({"parts": parts, "do": do, "errno": number}))
        new.rename(rule)
        return rule

    def fail(self, *parts: str, errno: int, once: bool = False) -> None:
        """Writes to files with all ``parts`` in their path fail with ``errno``."""
        self._rule(parts, "once" if once else "fail", errno)

    def hold(self, *parts: str) -> Callable[[], bool]:
        """Such writes wait; the result tells whether one has come."""
        return Path(f"{self._rule(parts, 'hold')}.met").exists

    @property
    def left(self) -> bool:
        """Whether a rule is still there."""
        return any(self._folder.glob("*.rule"))

    def clear(self) -> None:
        """Nothing fails or waits any more."""
        for rule in self._folder.glob("*.rule"):
            rule.unlink(missing_ok=True)

    def undo(self) -> None:
        """Put things back in this process."""
        self.clear()
        self._put_back()
        sys.path.remove(str(FAULTY))
        del os.environ["STORAGE_FAULTS"]


def folder_of(step: int) -> str:
    """What the paths of all files of a step have in them."""
    return f"/s{step:012d}/"
