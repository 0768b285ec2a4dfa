"""K02: memory that is used again, and plans that are kept, never bring back another step's bytes."""

from __future__ import annotations

import hashlib
import threading
from pathlib import Path

import pytest
import torch

import tierckpt
from tests.agents import until
from tests.cases.common import Faults, blank, folder_of, holds, on_write, shard_of, state
from tierckpt import Checkpointer, Disk, Ram, SkippedError


def test_c05_tensors_made_anew_for_each_step_are_saved_each_time(tmp_path: Path, agent: str) -> None:
    root = tmp_path / "s"
    live = {f"t{n}": torch.full((1000, n + 1), 1.0) for n in range(8)}
    keep = []  # no address is used twice
    with Checkpointer(root, agent=agent) as ckpt:
        for step in range(1, 6):
            assert ckpt.save(step, live).wait() is not None
            keep.append(dict(live))
            for name, tensor in list(live.items()):
                live[name] = torch.full_like(tensor, step + 1)
        for step in range(1, 6):
            found = tierckpt.read(root, step=step)
            assert all(bool((tensor == step).all()) for tensor in found.values()), step
    digests = {hashlib.sha256(shard_of(root, step).read_bytes()).hexdigest() for step in range(1, 6)}
    assert len(digests) == 5


def test_c07_memory_that_runs_ahead_of_the_disk_mixes_no_steps(tmp_path: Path, faults: Faults) -> None:
    root = tmp_path / "s"
    with Checkpointer(root, tiers=[Ram(), Disk(every=3)]) as ckpt:
        ckpt.save(0, state(0)).wait()
        held = faults.hold(folder_of(3))
        handles = {step: ckpt.save(step, state(step)) for step in range(1, 4)}
        until(held)
        handles |= {step: ckpt.save(step, state(step)) for step in range(4, 31)}
        handles[30].wait("ram")
        faults.clear()
        durable = set()
        for step, handle in handles.items():
            assert handle.error is None
            try:
                handle.wait("disk")
                durable.add(step)
            except SkippedError as skipped:
                assert f"step {step}" in str(skipped)
        # Which steps are overtaken, and which take their turn, depends on how far memory was ahead.
        assert {3, 30} <= durable
        ckpt.wait()
        assert set(tierckpt.steps(root)) == durable | {0}
        for step in tierckpt.steps(root):
            found = blank()
            assert tierckpt.load(found, root, step=step).step == step
            assert holds(found, step)
    assert tierckpt.verify(root, every=True).ok


def test_c07_without_an_agent_a_slow_disk_makes_saves_wait(tmp_path: Path) -> None:
    root = tmp_path / "s"

    go = threading.Event()
    handles: dict[int, tierckpt.Handle] = {}

    def slow(path: str) -> None:
        if "shard-" in path:
            assert go.wait(30)

    def saves(ckpt: Checkpointer) -> None:
        for step in range(31):
            handles[step] = ckpt.save(step, state(step))

    undo = on_write(slow)
    try:
        with Checkpointer(root, tiers=[Disk(every=3)], agent="off") as ckpt:
            saving = threading.Thread(target=saves, args=(ckpt,))
            saving.start()
            until(lambda: ckpt._arena.held == ckpt._arena.slots)
            assert saving.is_alive() and len(handles) <= 3 * ckpt._arena.slots
            go.set()
            saving.join(30)
    finally:
        go.set()
        undo()
    assert tierckpt.steps(root) == list(range(0, 31, 3))
    for step, handle in handles.items():
        assert handle.error is None
        if step % 3:
            with pytest.raises(SkippedError):
                handle.wait("disk")
            continue
        found = blank()
        tierckpt.load(found, root, step=step)
        assert holds(found, step)
