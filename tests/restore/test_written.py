"""What was written counts for a step only if it is whole and of that very step."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tierckpt.format import paths
from tierckpt.group import Group
from tierckpt.restore.written import Lack, written
from tierckpt.tiers.disk import DiskPlace
from tierckpt.tiers.store import Store


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Store, Lack]:
    tierckpt.save({"w": torch.ones(10)}, tmp_path / "s", 3, metadata={"n": 1})
    store = Store.open(DiskPlace(str(tmp_path / "s")))
    (ref,) = store.chain.live.values()
    return store, Lack(1, 3, 1, store.manifest(ref).layout, 0, [0])


def look(store: Store, lack: Lack, run: str = "") -> Any:
    found = written(Group(timeout=10.0), store.place, run or store.run, [lack], store.layout_bytes)
    return found[lack.generation, lack.step]


def test_a_whole_shard_with_its_receipt_is_found(saved: tuple[Store, Lack]) -> None:
    store, lack = saved
    (ref,) = store.chain.live.values()
    manifest = store.manifest(ref)
    (one,) = manifest.shards
    assert look(store, lack) == {0: (one.size, one.digest, manifest.metadata)}


def test_a_rank_that_writes_nothing_needs_no_receipt(saved: tuple[Store, Lack]) -> None:
    store, lack = saved
    assert look(store, replace(lack, ranks=[1])) == {1: (0, "", None)}


@pytest.mark.parametrize("other", [{"world": 2}, {"generation": 2}, {"step": 4}])
def test_what_is_of_another_step_is_not_taken(saved: tuple[Store, Lack], other: dict[str, Any]) -> None:
    store, lack = saved
    its = replace(lack, **other)
    there = Path(store.place.url) / paths.receipt(its.generation, its.step, 0)
    if not there.exists():  # a receipt says itself where it belongs
        there.parent.mkdir(parents=True)
        there.write_bytes(store.place.read(paths.receipt(1, 3, 0), 1 << 20))
    assert look(store, its) == {}


def test_what_is_of_another_run_or_layout_is_not_taken(saved: tuple[Store, Lack]) -> None:
    store, lack = saved
    assert look(store, lack, run="other") == {}
    layout = store.layout_bytes
    other = replace(lack, layout="0" * 64)
    assert written(Group(timeout=10.0), store.place, store.run, [other], lambda _: layout(lack.layout))[1, 3] == {}


@pytest.mark.parametrize("change", ["cut", "gone", "damaged"])
def test_what_is_not_whole_is_not_taken(saved: tuple[Store, Lack], change: str) -> None:
    store, lack = saved
    shard = Path(store.place.url) / paths.shard(1, 3, 0)
    if change == "cut":
        shard.write_bytes(shard.read_bytes()[:-1])
    elif change == "gone":
        shard.unlink()
    else:
        (Path(store.place.url) / paths.receipt(1, 3, 0)).write_bytes(b"{}")
        with pytest.warns(RuntimeWarning, match="step 3 is not looked at"):
            assert look(store, lack) == {}
        return
    assert look(store, lack) == {}
