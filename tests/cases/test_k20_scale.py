"""K20: planning does not grow with the number of keys as badly as everywhere else."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.cases.common import files
from tests.harness import run_ranks

_KEYS = 20_000


def _many(*, zero: bool) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    scale = 0 if zero else 1
    values = torch.arange(float(_KEYS)) * scale
    return {
        "small": {f"layer.{n}.weight": values[n : n + 1].clone() for n in range(_KEYS)},
        "large": [
            distribute_tensor(torch.arange(1_000_000.0).reshape(1000, 1000) * scale, mesh, [Shard(0)]) for _ in range(2)
        ],
    }


def _peak() -> int:
    """Bytes."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _saves_and_loads(rank: int, root: str) -> tuple[list[float], int]:
    state = _many(zero=False)
    tierckpt.save({"warm": torch.ones(1)}, f"{root}/warm", 1)
    before, seconds = _peak(), []
    for step in (1, 2):
        began = time.monotonic()
        tierckpt.save(state, f"{root}/store", step)
        seconds.append(time.monotonic() - began)
    into = _many(zero=True)
    began = time.monotonic()
    tierckpt.load(into, f"{root}/store")
    seconds.append(time.monotonic() - began)
    grown = _peak() - before
    for name, tensor in state["small"].items():
        assert into["small"][name].item() == tensor.item()
    for left, right in zip(into["large"], state["large"], strict=True):
        assert torch.equal(left.to_local(), right.to_local())
    return seconds, grown


@pytest.mark.limit(120)
def test_c121_20_000_keys_on_4_ranks(tmp_path: Path) -> None:
    for (first, second, load), grown in run_ranks(_saves_and_loads, 4, str(tmp_path), timeout=100):
        # Not a measurement: these are several times what an idle machine with two cores takes.
        assert first < 10 and second < 5 and load < 10, (first, second, load)
        assert grown < 200 << 20
    assert len(files(tmp_path / "store")) == 1 + 1 + 3 + 2 * (1 + 2 * 4)
