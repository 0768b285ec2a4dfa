from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.cuda.driver import Gpu
from tierckpt.snapshot import fence
from tierckpt.state import devices


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gpu]:
    """A GPU that tensors are on; every rule of its driver is kept."""
    gpu = Gpu()
    install(monkeypatch, gpu)
    yield gpu
    gpu.break_down(0)
    gpu.capture(False)
    for stream in (gpu.compute, gpu.copies):
        gpu.open_gate(stream)
    fence.wait()
    gpu.check()


def install(monkeypatch: pytest.MonkeyPatch, gpu: Gpu) -> None:
    """Have the package use it."""
    from tierckpt.snapshot import device
    from tierckpt.state import planner

    for module in (devices, device, planner):
        monkeypatch.setattr(module, "gpus", gpu)
