"""C113: what a load returns is private memory: no fate of the files can change it, and it can be saved again."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

import tierckpt


def files(root: Path) -> list[Path]:
    return list(root.rglob("*.safetensors"))


@pytest.fixture
def expected() -> torch.Tensor:
    return torch.arange(1_500_000, dtype=torch.float32)


def test_loaded_tensors_do_not_depend_on_files(tmp_path: Path, expected: torch.Tensor) -> None:
    root = tmp_path / "store"
    with tierckpt.Checkpointer(root, agent="off") as checkpointer:
        checkpointer.save(1, {"x": expected.clone()}).wait()
    found = tierckpt.read(root)
    live = {"x": torch.zeros_like(expected)}
    tierckpt.load(live, root)
    for path in files(root):
        os.truncate(path, 0)
        path.unlink()
    for tensor in (found["x"], live["x"]):
        assert torch.equal(tensor, expected)
        tensor += 1  # writable
        assert torch.equal(tensor, expected + 1)


def test_what_was_read_can_be_saved_over_what_it_was_read_from(tmp_path: Path, expected: torch.Tensor) -> None:
    """In a new generation the same step, and with keep=1 the old files go."""
    root = tmp_path / "store"
    with tierckpt.Checkpointer(root, agent="off") as checkpointer:
        checkpointer.save(1, {"x": expected.clone()}).wait()
    found = tierckpt.read(root)
    with tierckpt.Checkpointer(root, tiers=[tierckpt.Disk(keep=1, grace=0.0)], agent="off") as checkpointer:
        checkpointer.save(1, found).wait()
        assert torch.equal(found["x"], expected)
        checkpointer.save(2, found).wait()
    assert torch.equal(found["x"], expected)
    assert not (root / "g0001").exists()
    assert torch.equal(tierckpt.read(root)["x"], expected)
    assert tierckpt.verify(root, every=True).ok
