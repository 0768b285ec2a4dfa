"""Protects resharding in general: whatever state in whatever layout is saved comes back in any other one, bit by bit.

Random states on random worlds, A to B and back to A, thousands of them in one process: the planning, the headers, the
copy engine and the planning of reads are the real ones (see simulation.py), each element says where it belongs, and
memory beside the tensors must not be touched.
"""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.geometry.simulation import Stored, Truth, World, stored_bytes
from tierckpt.state import balance

WORLDS = [1, 1, 2, 2, 3, 4, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13]


@pytest.fixture(autouse=True, scope="module")
def _small_is_large() -> Iterator[None]:
    """Tensors of a few hundred bytes are spread over replicas and split among them, as those of many MiB are."""
    with pytest.MonkeyPatch.context() as patch:
        for name, size in {"SMALL": 200, "SMALL_SHARE": 1000, "PART": 50}.items():
            patch.setattr(balance, name, size)
        yield


def there_and_back(rng: random.Random, worlds: list[int], tensors: int) -> None:
    truth = Truth.draw(rng, tensors)
    first, second = (World(truth, rng.choice(worlds), rng) for _ in range(2))
    first.fill()
    assert not first.wrong()
    saved = first.save()
    check_size(truth, first, saved)
    second.load(saved)
    assert not second.wrong()
    first.wipe()
    again = second.save()
    check_size(truth, second, again)
    first.load(again)
    assert not first.wrong()
    assert first.save() == saved


def check_size(truth: Truth, world: World, stored: Stored) -> None:
    """Every byte is stored once: of replicas one, of tied tensors one."""
    own = sum(tensor.nbytes for k, tensor in enumerate(truth.tensors) if k not in world.ties)
    found = stored_bytes(stored)
    assert found == own if world.once else own <= found <= sum(tensor.nbytes for tensor in truth.tensors)


@pytest.mark.parametrize("block", range(10))
def test_random_states_survive_another_layout(block: int) -> None:
    for seed in range(20):
        print(f"random.Random('{block}/{seed}')")
        there_and_back(random.Random(f"{block}/{seed}"), WORLDS, tensors=6)


@pytest.mark.acceptance
@pytest.mark.limit(600)
@pytest.mark.parametrize("block", range(10, 18))
def test_thousands_of_states_survive_another_layout(block: int) -> None:
    for seed in range(250):
        print(f"random.Random('{block}/{seed}')")
        there_and_back(random.Random(f"{block}/{seed}"), [*WORLDS, 16, 17, 24, 36], tensors=10)


@settings(max_examples=100, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(st.randoms(use_true_random=False))
def test_the_smallest_state_that_does_not_survive_is_found(rng: random.Random) -> None:
    """The same, but hypothesis chooses, and makes what fails small."""
    there_and_back(rng, [1, 2, 3, 4, 6], tensors=3)
