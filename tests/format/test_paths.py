"""Protects file names: what is written is found again, and other spellings are not taken for it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tierckpt.format import paths

numbers = st.integers(0, 10**13) | st.integers(0, 2**53 - 1)


@given(numbers, numbers, numbers)
def test_round_trip(generation: int, step: int, rank: int) -> None:
    generation = max(generation, 1)
    where = (generation, step)
    assert paths.parse_link(paths.link(step)) == step
    assert paths.parse_generation_dir(paths.generation_dir(generation)) == generation
    assert paths.parse_step_dir(paths.step_dir(*where)) == where
    assert paths.parse_manifest(paths.manifest(*where)) == where
    assert paths.parse_shard(paths.shard(*where, rank)) == (*where, rank)
    assert paths.parse_receipt(paths.receipt(*where, rank)) == (*where, rank)


def test_golden() -> None:
    assert paths.link(42) == "chain/000000000042.json"
    assert paths.link(10**12) == "chain/1000000000000.json"
    assert paths.layout("ab" * 32) == f"layouts/{'ab' * 32}.safetensors"
    assert paths.shard(3, 1200, 0) == "g0003/s000000001200/shard-00000.safetensors"
    assert paths.receipt(3, 1200, 100_000) == "g0003/s000000001200/shard-100000.receipt.json"
    assert paths.manifest(10_000, 0) == "g10000/s000000000000/manifest.json"


@pytest.mark.parametrize(
    "name",
    [
        "chain/42.json",
        "chain/0000000000042.json",
        "chain/00000000004٢.json",
        "chain/000000000042.json\n",
        "chain/.000000000042.json.tmp",
        "../chain/000000000042.json",
        "chain/9999999999999999999.json",
        "g0000/s000000000001",
        "g001/s000000000001",
        "g00001/s000000000001",
        "g0001/s1",
        "g0001/s-00000000001",
        "g0001/s000000000001/",
        "g0001/s000000000001/shard-0.safetensors",
        "g0001/s000000000001/shard-00000.safetensors.tmp",
        "g9999999999999999/s000000000001",
        "layouts/" + "AB" * 32 + ".safetensors",
        "layouts/" + "ab" * 31 + ".safetensors",
        "",
    ],
)
def test_other_spellings_are_not_taken(name: str) -> None:
    for parse in (
        paths.parse_link,
        paths.parse_layout,
        paths.parse_generation_dir,
        paths.parse_step_dir,
        paths.parse_manifest,
        paths.parse_shard,
        paths.parse_receipt,
    ):
        assert parse(name) is None


def test_temporary_files() -> None:
    assert paths.is_temporary("chain/.000000000042.json.abc.tmp")
    assert not paths.is_temporary("chain/000000000042.tmp")
    assert not paths.is_temporary(".hidden.tmp/file")
    assert paths.parse_layout(paths.layout("ab" * 32)) == "ab" * 32
