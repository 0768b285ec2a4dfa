"""Random streams continue where they were, for every generator of a process."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch

from tests.state.kept import Kept
from tierckpt.errors import LayoutError
from tierckpt.state.marks import PerRank
from tierckpt.state.rng import rng_state


def draw() -> list[Any]:
    return [random.random(), float(np.random.rand()), torch.rand(2).tolist()]


@pytest.fixture(autouse=True)
def _other_tests_keep_their_streams() -> Any:
    before = (random.getstate(), np.random.get_state(), torch.get_rng_state())
    yield
    random.setstate(before[0])
    np.random.set_state(before[1])
    torch.set_rng_state(before[2])


def test_all_streams_continue() -> None:
    random.seed(1)
    np.random.seed(2)
    torch.manual_seed(3)
    draw()
    random.gauss(0, 1)  # leaves half of a pair behind, which is part of the state
    np.random.standard_normal()
    state = {"rng": rng_state()}
    kept = Kept.of(state)
    expected = [draw(), random.gauss(0, 1), float(np.random.standard_normal())]
    draw()
    kept.load(state)
    assert [draw(), random.gauss(0, 1), float(np.random.standard_normal())] == expected


def test_the_state_is_taken_when_saved_not_when_made() -> None:
    state = {"rng": rng_state()}
    torch.manual_seed(5)
    kept = Kept.of(state)
    expected = torch.rand(1)
    kept.load(state)
    assert torch.equal(torch.rand(1), expected)


def test_it_is_restored_after_what_may_draw() -> None:
    class Draws:
        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            torch.rand(1)

    state = {"a": rng_state(), "b": Draws()}
    kept = Kept.of(state)
    expected = torch.rand(1)
    kept.load(state)
    assert torch.equal(torch.rand(1), expected)


def test_another_world_keeps_its_streams() -> None:
    state = {"rng": rng_state()}
    kept = Kept.of(state)
    torch.rand(1)
    before = torch.get_rng_state()
    target = kept.load(state, same_world=False)
    assert target.untouched == ["rng"]
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("saved", [5, {"python": random.getstate()}, {"python": 1, "torch": torch.ones(1)}])
def test_what_is_no_state_of_generators_is_found_before_anything_is_touched(saved: Any) -> None:
    state = {"rng": rng_state(), "t": torch.zeros(1)}
    before = torch.get_rng_state()
    problems = Kept.of({"rng": PerRank(saved), "t": torch.ones(1)}).problems(state)
    assert len(problems) == 1
    assert problems[0].startswith("rng: ")
    with pytest.raises(LayoutError, match="state of generators"):
        Kept.of({"rng": PerRank(saved), "t": torch.ones(1)}).load(state)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_look_at_a_state_draws_nothing() -> None:
    generators = rng_state().value
    state = generators.state_dict()
    expected = draw()
    generators.load_state_dict(state)
    assert generators.misfit(generators.state_dict()) is None
    assert draw() == expected
