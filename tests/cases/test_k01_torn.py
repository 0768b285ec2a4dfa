"""K01: a save holds the values of the moment at which it was called, whatever changes afterwards."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch

import tierckpt
from tests.agents import until
from tests.cases.common import Faults
from tierckpt import Checkpointer, Disk


def _tensors() -> dict[str, torch.Tensor]:
    return {f"t{n}": torch.ones(250_000) for n in range(64)}


def _is_one(found: dict[str, torch.Tensor]) -> bool:
    return len(found) == 64 and all(bool((tensor == 1).all()) for tensor in found.values())


@pytest.mark.limit(120)
@pytest.mark.parametrize("how", ["functional", "off", "auto"])
def test_c01_tensors_that_change_at_once_are_saved_as_they_were(tmp_path: Path, faults: Faults, how: str) -> None:
    state, root = _tensors(), tmp_path / "s"
    ckpt = None if how == "functional" else Checkpointer(root, agent=how, tiers=[Disk(keep=1, grace=0)])
    for step in range(20):
        for tensor in state.values():
            tensor.fill_(1.0)
        # The last one is written only after the change.
        held = faults.hold("shard-") if step == 19 else None
        handle = tierckpt.async_save(state, root, step) if ckpt is None else ckpt.save(step, state)
        handle.wait_staged()
        for tensor in state.values():
            tensor.fill_(2.0)
        if held is not None:
            until(held)
            faults.clear()
        assert handle.wait() is not None
        assert _is_one(tierckpt.read(root, step=step)), step
    if ckpt is not None:
        ckpt.close()


def test_c03_nothing_nested_changes_after_the_call(tmp_path: Path, agent: str, faults: Faults) -> None:
    first, second = torch.zeros(100_000), torch.zeros(100_000)
    state: dict[str, Any] = {
        "a": [first, {"b": (second,)}],
        "hist": [1, 2],
        "np": numpy.arange(5),
        "cnt": Counter({5: 2}),
        "ba": bytearray(b"xyz"),
    }
    with Checkpointer(tmp_path / "s", agent=agent) as ckpt:
        held = faults.hold("shard-")
        handle = ckpt.save(1, state)
        first += 1
        second += 1
        state["hist"].append(3)
        state["np"][:] = 9
        state["cnt"][5] = 7
        state["ba"][0] = 0
        state["new"] = 1
        until(held)
        faults.clear()
        handle.wait()
        found = tierckpt.read(tmp_path / "s")
        assert set(found) == {"a", "hist", "np", "cnt", "ba"}
        assert not found["a"][0].any() and not found["a"][1]["b"][0].any()
        assert type(found["a"][1]["b"]) is tuple
        assert found["hist"] == [1, 2] and found["ba"] == bytearray(b"xyz")
        assert found["np"].tolist() == [0, 1, 2, 3, 4]
        assert found["cnt"] == Counter({5: 2}) and type(found["cnt"]) is Counter
