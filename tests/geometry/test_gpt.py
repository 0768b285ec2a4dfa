"""Protects what resharding is for: a GPT trained with FSDP2 × tensor parallelism goes on in any other layout as if
nothing had happened: the same state, and the same losses to the last bit wherever the arithmetic is the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests import lacks
from tests.geometry.gpt import Job, Layout
from tests.harness import run_ranks
from tests.second_reader import read_store, verify_store

Losses = list[list[float]]
# Kernels that do not depend on where in memory their operands begin: shards begin anywhere.
EXACT = {"MKL_CBWR": "COMPATIBLE"}
TRAINED = Layout(dp=2, tp=2)


def _train(rank: int, layout: Layout, root: str, before: int, after: int) -> Losses:
    """Train, save, go on as if nothing were."""
    job = Job(rank, layout, seed=1)
    job.train(before)
    tierckpt.save(job.state(), root, before)
    return job.train(after)


def _resume(rank: int, layout: Layout, root: str, copy: str, steps: int) -> Losses:
    """Load into a job with other values, save what came, and go on."""
    job = Job(rank, layout, seed=0)
    job.load(root)
    tierckpt.save(job.state(), copy, job.steps)
    return job.train(steps)


def train(layout: Layout, root: Path, before: int, after: int) -> Losses:
    return _same(run_ranks(_train, layout.world, layout, str(root), before, after, env=EXACT))


def resume(layout: Layout, root: Path, steps: int) -> Losses:
    """The losses after resuming; the state that came back is bit by bit what was saved, in whatever form."""
    copy = root.with_name("-".join(map(str, ("copy", *layout))))
    losses = _same(run_ranks(_resume, layout.world, layout, str(root), str(copy), steps, env=EXACT))
    assert verify_store(copy) == []
    assert _logical(copy) == _logical(root)
    return losses


def _same(results: list[Losses]) -> Losses:
    assert all(result == results[0] for result in results)
    return results[0]


def _logical(root: Path) -> dict[str, Any]:
    """All tensors and values by name, as the reader that shares no code with the package sees them."""
    found: dict[str, Any] = {}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, dict):
            for key, value in node.items():
                walk(value, f"{path}/{key}")
        else:
            found[path] = node

    state = read_store(root)
    groups = state["optimizer"].pop("param_groups").values()
    walk(state, "")
    # Stages have groups of their own: what matters is what each parameter has.
    for group in groups:
        hyper = {key: value for key, value in group.items() if key != "params"}
        for parameter in group["params"]:
            assert parameter not in found
            found[parameter] = hyper
    return found


def close(losses: Losses, others: Losses) -> bool:
    return torch.allclose(torch.tensor(losses), torch.tensor(others), rtol=1e-5, atol=1e-6)


@lacks.fsdp2_trains_on_cpu
def test_a_gpt_resumes_in_another_layout(tmp_path: Path) -> None:
    root = tmp_path / "root"
    losses = train(TRAINED, root, before=2, after=2)
    assert resume(Layout(pp=2, tp=2), root, 2) == losses
    one = resume(Layout(), root, 2)
    assert one != losses and close(one, losses)
    assert resume(Layout(dp=3), root, 2) == one


@pytest.mark.acceptance
@pytest.mark.limit(600)
@lacks.fsdp2_trains_on_cpu
def test_a_gpt_resumes_in_every_layout(tmp_path: Path) -> None:
    root = tmp_path / "root"
    losses = train(TRAINED, root, before=5, after=5)
    assert losses[-1] < losses[0]
    for layout in (TRAINED, Layout(tp=2), Layout(dp=3, tp=2), Layout(pp=2, tp=2), Layout(dp=2, tp=2, pp=2)):
        assert resume(layout, root, 5) == losses, layout
    one = resume(Layout(), root, 5)
    assert close(one, losses)
    for layout in (Layout(dp=2), Layout(dp=3), Layout(dp=4), Layout(pp=2), Layout(pp=4), Layout(dp=2, pp=2)):
        assert resume(layout, root, 5) == one, layout
    four = resume(Layout(tp=4), root, 5)
    assert close(four, losses)
    assert resume(Layout(dp=2, tp=4), root, 5) == four
