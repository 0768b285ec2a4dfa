"""Protects restarts through a mapping: rules that a checkpoint has behind it are not applied again, and what its names cannot
tell is not guessed.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierckpt
from tierckpt import Checkpointer, Fuse, LayoutError, Mapping, Rename, Split
from tierckpt.state.direction import Direction

CHAIN = [Rename("a", "b"), Rename("b", "c")]
SWAP = [Rename("a", "b"), Rename("b", "a")]
STRIP = [Rename("m.module", "m")]
WRAP = [Rename("m", "m.module")]
GLOB = [Rename("l.*.q", "l.*.p"), Fuse(["l.*.x", "l.*.y"], "l.*.xy")]


def _decided(rules: Sequence[Any], names: Sequence[str], live: Collection[str] | None, *, named: bool) -> Direction:
    found = Direction(Mapping(rules), live, named=named)
    found.decide(names, [])
    return found


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize(
    ("rules", "names", "past"),
    [
        (CHAIN, ["a", "b", "z"], set()),
        (CHAIN, ["b", "c", "z"], {0, 1}),
        (CHAIN, ["c", "z"], {1}),
        (CHAIN, ["z"], set()),
        (GLOB, ["l.0.q", "l.1.q", "l.0.x", "l.0.y"], set()),
        (GLOB, ["l.0.p", "l.1.p", "l.0.xy"], {0, 1}),
        (GLOB, ["l.0.p", "l.1.p", "l.0.x", "l.0.y"], {0}),  # the second rule is new
        (GLOB, ["l.0.p", "l.1.q"], set()),  # half and half is for the load to refuse
        ([Split("w", ["u", "v"])], ["u", "v"], {0}),
        ([Rename("a", "a"), Rename("b", "c")], ["a", "b"], set()),
        ([Rename("a", "b.c"), Rename("c", "a")], ["a.x", "c.y"], set()),
        ([Rename("a", "b.c"), Rename("c", "a")], ["b.c.x", "a.y"], {0, 1}),
        (STRIP, ["m.module.w", "z"], set()),
        (STRIP, ["m.w", "z"], {0}),
        (WRAP, ["m.w"], set()),
        (WRAP, ["m.module.w"], {0}),
    ],
)
def test_names_tell_what_is_past(rules: list[Any], names: list[str], past: set[int], named: bool) -> None:
    found = _decided(rules, names, None, named=named)
    assert (found.past, found.undecided) == (past, [])


@pytest.mark.parametrize(
    ("rules", "names", "live", "past"),
    [
        (CHAIN, ["b"], {"c"}, set()),
        (CHAIN, ["b"], {"b"}, {0, 1}),
        (STRIP, ["m.module.w"], {"m.module.w"}, {0}),
        (WRAP, ["m.module.w"], {"m.module.module.w"}, set()),
        (SWAP, ["a", "b"], {"z"}, set()),
    ],
)
def test_the_state_tells_where_names_do_not(rules: list[Any], names: list[str], live: set[str], past: set[int]) -> None:
    found = _decided(rules, names, live, named=False)
    assert (found.past, found.undecided) == (past, [])


@pytest.mark.parametrize("live", [None, {"a", "b"}])
def test_an_exchange_is_for_the_caller_to_tell(live: set[str] | None) -> None:
    found = _decided(SWAP, ["a", "b"], live, named=False)
    assert not found.past
    [line] = found.undecided
    assert line.startswith("rules 0, 1 have") and "(a, b)" in line and "step=" in line
    assert not _decided(SWAP, ["a", "b"], live, named=True).undecided


def test_past_rules_claim_nothing() -> None:
    found = _decided(CHAIN, ["b", "c"], None, named=False)
    assert found.claim("b") is None and found.claim_after("c") is None
    found = _decided(CHAIN, ["a", "b"], None, named=False)
    assert found.claim("b") is not None and found.claim_after("c") is not None


# The usual script, started again


class _Old(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.rest = (nn.Linear(2, 2, bias=False) for _ in range(3))


class _New(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qk, self.tail = nn.Linear(2, 4, bias=False), nn.Linear(2, 2, bias=False)


def _trained(model: nn.Module, steps: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(model.parameters())
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


def test_a_script_that_restores_through_a_mapping_can_be_started_again(tmp_path: Path) -> None:
    old: Any = _Old()
    before = _trained(old, 1)
    tierckpt.save({"model": old, "optimizer": before}, tmp_path, 1)
    mapping = Mapping(
        [
            Fuse(["model.q.weight", "model.k.weight"], "net.qk.weight"),
            Rename("model.rest", "net.tail"),
            Rename("optimizer", "adam"),
        ]
    )
    for start in range(3):
        new: Any = _New()
        after = _trained(new, 0)
        with Checkpointer(tmp_path, agent="off") as checkpointer:
            info = checkpointer.restore({"net": new, "adam": after}, mapping=mapping)
            assert info is not None and info.step == start + 1
            checkpointer.save(start + 2, {"net": new, "adam": after}).wait()
        assert torch.equal(new.qk.weight, torch.cat([old.q.weight, old.k.weight]))
        moments = [before.state[module.weight]["exp_avg"] for module in (old.q, old.k)]
        assert torch.equal(after.state[new.qk.weight]["exp_avg"], torch.cat(moments))
        assert torch.equal(after.state[new.tail.weight]["exp_avg"], before.state[old.rest.weight]["exp_avg"])
    found = tierckpt.read(tmp_path, mapping=mapping)
    assert sorted(found["net"]) == ["qk.weight", "tail.weight"] == sorted(found["adam"]["state"])


def test_an_exchange_is_made_of_a_checkpoint_that_is_named_and_never_silently_again(tmp_path: Path) -> None:
    tierckpt.save({"a": torch.ones(1), "b": torch.ones(1) * 2}, tmp_path, 1)
    mapping = Mapping(SWAP)
    state = {"a": torch.zeros(1), "b": torch.zeros(1)}
    for call in (
        lambda: tierckpt.load(state, tmp_path, mapping=mapping),
        lambda: tierckpt.read(tmp_path, mapping=mapping),
        lambda: Checkpointer(tmp_path, agent="off").restore(state, mapping=mapping),
    ):
        with pytest.raises(LayoutError, match=r"whether it was saved before or after them cannot be seen.*step="):
            call()
    assert not state["a"].any()
    tierckpt.load(state, tmp_path, 1, mapping=mapping)
    assert (state["a"].item(), state["b"].item()) == (2.0, 1.0)
    assert tierckpt.read(tmp_path, 1, mapping=mapping) == {"b": torch.ones(1), "a": torch.ones(1) * 2}


def test_a_prefix_is_taken_away_once(tmp_path: Path) -> None:
    tierckpt.save({"m": {"module": {"w": torch.ones(1)}}}, tmp_path, 1)
    for step in (1, 2):
        state = {"m": {"w": torch.zeros(1)}}
        tierckpt.load(state, tmp_path, mapping=Mapping(STRIP))
        assert state["m"]["w"].all()
        assert tierckpt.read(tmp_path, mapping=Mapping(STRIP)) == {"m": {"w": torch.ones(1)}}
        tierckpt.save(state, tmp_path, step + 1)
