"""The data position: whatever happens to the number of ranks, an epoch is every sample once, in one global order.

Prefetching must not move it, and a save between two steps must resume with exactly the next batch.
"""

from __future__ import annotations

from itertools import chain, pairwise
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset

import tierckpt
from tests.harness import run_ranks
from tierckpt import DataPosition, PerRank
from tierckpt.errors import LayoutError, StateError
from tierckpt.state.position import _permuted


def _copy(position: DataPosition, **more: Any) -> DataPosition:
    """As a new process has it after a load."""
    found = DataPosition(position.size, seed=-1, shuffle=position.shuffle, drop_last=position.drop_last, **more)
    found.load_state_dict(position.state_dict())
    return found


def _step(ranks: list[DataPosition], global_batch: int) -> list[int]:
    """One global batch: what all ranks get, in the order of the ranks."""
    world = len(ranks)
    parts = []
    for rank, position in enumerate(ranks):
        consuming = position.batches(global_batch=global_batch, rank=rank, world=world).consume()
        parts.append(next(consuming))
    return list(chain.from_iterable(parts))


# The order


@given(st.one_of(st.integers(1, 300), st.integers(16_000, 17_000)), st.integers(), st.integers(0, 10**6))
def test_the_order_is_a_permutation(size: int, seed: int, epoch: int) -> None:
    found = DataPosition(size, seed=seed).indices(epoch, 0, size)
    assert sorted(found) == list(range(size))


@given(st.integers(1, 2**62), st.integers(0, 2**62), st.integers(0, 50))
def test_the_order_begins_anywhere_in_any_size(size: int, first: int, count: int) -> None:
    position = DataPosition(size, seed=3)
    first %= size
    last = min(first + count, size)
    found = position.indices(2, first, last)
    assert found == [position.indices(2, i, i + 1)[0] for i in range(first, last)]
    assert len(set(found)) == len(found)
    assert all(type(i) is int and 0 <= i < size for i in found)


def test_the_order_never_changes_between_versions() -> None:
    # A run that was saved by an older version goes on in this order. Do not change these numbers: name a new order.
    assert DataPosition(10, seed=0).indices(0, 0, 10) == [6, 2, 7, 0, 1, 9, 5, 4, 3, 8]
    assert DataPosition(10**12, seed=-(10**20)).indices(5, 7 * 10**11, 7 * 10**11 + 3) == [
        889726907063,
        368526573080,
        500239367441,
    ]


def test_all_orders_of_a_few_samples_are_about_as_likely() -> None:
    counts: dict[tuple[int, ...], int] = {}
    for epoch in range(2400):
        order = tuple(_permuted(0, 4, 4, f"7 {epoch}").tolist())
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 24
    assert sum((n - 100) ** 2 / 100 for n in counts.values()) < 50  # chi², 23 degrees of freedom: p = 0.001


def test_seeds_and_epochs_have_orders_of_their_own_that_look_random() -> None:
    size = 20_000
    orders = [DataPosition(size, seed=seed).indices(epoch, 0, size) for seed, epoch in ((0, 0), (0, 1), (1, 0))]
    for order in orders:
        assert abs(numpy.corrcoef(order, range(size))[0, 1]) < 0.05
        assert sum(b == a + 1 for a, b in pairwise(order)) < 10
    for i, j in ((0, 1), (0, 2), (1, 2)):
        assert sum(map(int.__eq__, orders[i], orders[j])) < 12  # 1 is expected
    assert DataPosition(5, shuffle=False).indices(3, 1, 4) == [1, 2, 3]


# Coverage


@settings(max_examples=40)
@given(
    st.integers(1, 60),
    st.booleans(),
    st.lists(st.tuples(st.integers(1, 7), st.integers(1, 17), st.integers(1, 9)), min_size=1, max_size=8),
)
def test_changes_of_world_and_batch_neither_repeat_nor_skip(
    size: int, shuffle: bool, phases: list[tuple[int, int, int]]
) -> None:
    position = DataPosition(size, seed=11, shuffle=shuffle)
    seen: list[int] = []
    steps = 0
    for world, global_batch, count in phases:
        ranks = [_copy(position) for _ in range(world)]
        for _ in range(count):
            seen += _step(ranks, global_batch)
        steps += count
        assert all(rank.state_dict() == ranks[0].state_dict() for rank in ranks)
        position = ranks[0]
    order = DataPosition(size, seed=11, shuffle=shuffle)
    expected = chain.from_iterable(order.indices(epoch, 0, size) for epoch in range(position.epoch + 1))
    assert seen == list(expected)[: position.epoch * size + position.consumed]
    assert position.step == steps


@settings(max_examples=25)
@given(st.integers(1, 60), st.integers(1, 17), st.lists(st.integers(1, 6), min_size=1, max_size=6))
def test_with_drop_last_every_epoch_is_its_whole_batches(size: int, global_batch: int, worlds: list[int]) -> None:
    global_batch = min(global_batch, size)
    position = DataPosition(size, seed=5, drop_last=True)
    per_epoch = size // global_batch
    for step, world in enumerate(worlds * per_epoch):
        ranks = [_copy(position) for _ in range(world)]
        found = _step(ranks, global_batch)
        epoch, at = divmod(step, per_epoch)
        assert found == position.indices(epoch, at * global_batch, (at + 1) * global_batch)
        position = ranks[0]


def _two_left() -> DataPosition:
    """8 of 10 samples were consumed by batches of 2, and what a batch of 5 leaves is dropped."""
    position = DataPosition(10, drop_last=True)
    for _ in range(4):
        position.advance(2)
    return position


@pytest.mark.parametrize("epochs", [1, 3])
@pytest.mark.parametrize("by_hand", [False, True])
def test_what_a_larger_batch_would_drop_ends_its_epoch_and_no_other(epochs: int, by_hand: bool) -> None:
    position = _two_left()
    larger = position.batches(global_batch=5, rank=0, world=1)
    assert len(larger) == 0
    ended, seen = [], []
    while position.epoch < epochs:
        ended.append(position.epoch)
        if by_hand:
            for indices in larger:
                seen.append(indices)
                position.advance(5)
        else:
            seen.extend(larger.consume())
        assert len(ended) <= epochs
    assert ended == list(range(epochs))
    assert seen == [position.indices(epoch, at, at + 5) for epoch in range(1, epochs) for at in (0, 5)]
    assert (position.epoch, position.consumed, position.step) == (epochs, 0, 4 + len(seen))


def test_nothing_is_taken_from_a_loader_for_what_is_dropped() -> None:
    position = _two_left()
    batches = position.batches(global_batch=5, rank=0, world=1)
    assert list(batches.consume(DataLoader(_Numbers(), batch_sampler=batches))) == []
    assert (position.epoch, position.consumed) == (1, 0)
    assert len(list(batches.consume(DataLoader(_Numbers(), batch_sampler=batches)))) == 2


def test_the_last_batch_is_shared_as_evenly_as_it_can_be() -> None:
    position = DataPosition(10, shuffle=False)
    parts = [list(position.batches(global_batch=8, rank=rank, world=4)) for rank in range(4)]
    assert parts == [[[0, 1], []], [[2, 3], [8]], [[4, 5], []], [[6, 7], [9]]]


# Loaders


class _Numbers(Dataset[int]):
    def __len__(self) -> int:
        return 23

    def __getitem__(self, index: int) -> int:
        return index * 10


def _tens(indices: list[int]) -> list[int]:
    return [10 * index for index in indices]


@pytest.mark.parametrize("workers", [0, 2])
def test_prefetching_does_not_move_the_position(workers: int) -> None:
    position = DataPosition(23, seed=1)
    batches = position.batches(global_batch=4, rank=1, world=2)
    loader: DataLoader[int] = DataLoader(
        _Numbers(),
        batch_sampler=batches,
        num_workers=workers,
        prefetch_factor=3 if workers else None,
        persistent_workers=bool(workers),
    )
    assert len(loader) == 6
    for epoch in range(2):
        expected = list(batches)
        for number, batch in enumerate(batches.consume(loader)):
            assert batch.tolist() == _tens(expected[number])
            done = min(4 * (number + 1), 23)
            assert (position.epoch, position.consumed) == ((epoch, done) if done < 23 else (epoch + 1, 0))
    assert position.step == 12


def test_a_save_in_the_middle_of_an_epoch_resumes_with_the_next_batch() -> None:
    position = DataPosition(23, seed=1)
    loader = DataLoader(_Numbers(), batch_sampler=position.batches(global_batch=4, rank=0, world=1), num_workers=1)
    batches = position.batches(global_batch=4, rank=0, world=1)
    whole = [batch.tolist() for batch in loader]
    consuming = batches.consume(loader)
    before = [next(consuming).tolist() for _ in range(2)]
    saved = position.state_dict()
    consuming.close()  # type: ignore[attr-defined]
    again = DataPosition(23, seed=99)
    again.load_state_dict(saved)
    after = list(again.batches(global_batch=4, rank=0, world=1).consume())
    assert before + [_tens(indices) for indices in after] == whole


def test_data_sets_that_take_lists_use_it_as_a_sampler() -> None:
    class Lists(Dataset[torch.Tensor]):
        def __getitem__(self, indices: list[int]) -> torch.Tensor:
            return torch.tensor(indices)

    position = DataPosition(7)
    batches = position.batches(global_batch=3, rank=0, world=1)
    loader = DataLoader(Lists(), sampler=batches, batch_size=None)
    assert [batch.tolist() for batch in loader] == list(batches)


def test_a_loader_of_something_else_is_told() -> None:
    position = DataPosition(23)
    batches = position.batches(global_batch=4, rank=0, world=1)
    with pytest.raises(StateError, match="gave 2 batches, 6 were left"):
        list(batches.consume([1, 2]))
    with pytest.raises(StateError, match="more than the 4 batches left"):
        list(batches.consume(range(9)))
    position = DataPosition(23)
    with pytest.raises(StateError, match="was moved"):
        for _ in position.batches(global_batch=4, rank=0, world=1).consume():
            position.advance(4)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("both", [False, True])
def test_torchdata_resumes_with_the_next_batch(workers: int, both: bool) -> None:
    """Whether the loader's own state is saved beside the position or not."""
    stateful = pytest.importorskip("torchdata.stateful_dataloader")

    def start() -> tuple[DataPosition, Any, Any]:
        position = DataPosition(23, seed=1)
        batches = position.batches(global_batch=4, rank=0, world=1)
        return position, batches, stateful.StatefulDataLoader(_Numbers(), batch_sampler=batches, num_workers=workers)

    position, batches, loader = start()
    whole = [_tens(indices) for indices in batches]
    for taken in (2, 5):
        position, batches, loader = start()
        consuming = batches.consume(loader)
        before = [next(consuming).tolist() for _ in range(taken)]
        saved = position.state_dict(), loader.state_dict()
        del consuming
        position, batches, loader = start()
        position.load_state_dict(saved[0])
        if both:
            loader.load_state_dict(saved[1])
        after = [batch.tolist() for batch in batches.consume(loader)]
        assert before + after == whole
        following = [batch.tolist() for batch in batches.consume(loader)]
        assert sorted(chain.from_iterable(following)) == _tens(list(range(23)))


# In a checkpoint


def _consume_and_save(rank: int, root: str) -> list[int]:
    position = DataPosition(50, seed=4)
    consuming = position.batches(global_batch=9, rank=rank, world=3).consume()
    mine = list(chain.from_iterable(next(consuming) for _ in range(3)))
    tierckpt.save({"data": position}, root, position.step)
    return mine


def test_three_ranks_save_and_one_goes_on(tmp_path: Path) -> None:
    root = tmp_path / "store"
    results = run_ranks(_consume_and_save, 3, str(root))
    seen = list(chain.from_iterable(results))
    position = DataPosition(50)
    tierckpt.load({"data": position}, root)
    assert (position.epoch, position.step, position.consumed, position.seed) == (0, 3, 27, 4)
    seen += chain.from_iterable(position.batches(global_batch=9, rank=0, world=1).consume())
    assert sorted(seen) == list(range(50))


# What is refused


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"size": 24}, "size 24"),
        ({"shuffle": False}, "shuffle False"),
        ({"order": "other 1"}, "order 'other 1'"),
        ({"consumed": 24}, "24 of 23"),
        ({"more": 1}, "expected the keys"),
        ({7: 1}, "expected the keys"),
        ({"epoch": 1.5}, "epoch cannot be 1.5"),
        ({"epoch": "1"}, "epoch cannot be '1'"),
        ({"epoch": -1}, "epoch cannot be -1"),
        ({"step": None}, "step cannot be None"),
        ({"consumed": True}, "consumed cannot be True"),
        ({"seed": 0.0}, "seed cannot be 0.0"),
        ({"size": 23.0}, "size cannot be 23.0"),
    ],
)
def test_a_state_of_other_data_is_refused(change: dict[str, Any], message: str) -> None:
    position = DataPosition(23)
    before = position.state_dict()
    with pytest.raises(StateError, match=message):
        position.load_state_dict({**before, **change})
    assert position.state_dict() == before


def test_impossible_numbers_are_refused() -> None:
    with pytest.raises(StateError, match="size=0"):
        DataPosition(0)
    position = DataPosition(10, drop_last=True)
    for wrong in ({"global_batch": 0}, {"rank": 2}, {"rank": -1}, {"global_batch": 11}):
        with pytest.raises(StateError, match="batch"):
            position.batches(**{"global_batch": 2, "rank": 0, "world": 2, **wrong})
    with pytest.raises(StateError, match="no range"):
        position.indices(0, 5, 11)
    for batch in (0, -2, 11):
        with pytest.raises(StateError, match="have no such batch"):
            position.advance(batch)
    assert (position.epoch, position.step) == (0, 0)


@pytest.mark.parametrize("wrong", ["x", 1.0, None, True])
def test_what_is_no_integer_is_refused_by_name(wrong: Any) -> None:
    position = DataPosition(10)
    for refused, name in (
        (lambda: DataPosition(wrong), "size"),
        (lambda: DataPosition(10, seed=wrong), "seed"),
        (lambda: position.batches(global_batch=wrong, rank=0, world=1), "global_batch"),
        (lambda: position.batches(global_batch=2, rank=wrong, world=1), "rank"),
        (lambda: position.batches(global_batch=2, rank=0, world=wrong), "world"),
        (lambda: position.advance(wrong), "advance"),
        (lambda: position.indices(wrong, 0, 1), "epoch"),
        (lambda: position.indices(0, wrong, 1), "first"),
        (lambda: position.indices(0, 0, wrong), "last"),
    ):
        with pytest.raises(StateError, match=f"{name}.* must be an integer"):
            refused()


def test_integers_of_numpy_count_as_others_do() -> None:
    size = 20_000
    found = DataPosition(numpy.int64(size), seed=numpy.int32(3), shuffle=numpy.True_)  # type: ignore[arg-type]
    expected = DataPosition(size, seed=3)
    assert found.indices(numpy.int64(0), numpy.int8(0), numpy.uint64(5)) == expected.indices(0, 0, 5)  # type: ignore[arg-type]
    found.advance(numpy.int64(4))  # type: ignore[arg-type]
    expected.advance(4)
    assert found.state_dict() == expected.state_dict()
    assert all(type(value) in (int, bool, str) for value in found.state_dict().values())


def _other_data(rank: int, root: str) -> tuple[str, list[float], str, list[float]]:
    """Rank 1 begins with a data set of another size."""
    saved = DataPosition(100)
    saved.advance(8)
    tierckpt.save({"p": saved, "own": PerRank(saved), "t": torch.ones(4)}, root, step=1)
    found: list[Any] = []
    for wrap in (lambda position: position, PerRank):
        position, tensor = DataPosition(100 + rank), torch.zeros(4)
        key = "own" if wrap is PerRank else "p"
        with pytest.raises(LayoutError) as caught:
            tierckpt.load({key: wrap(position), "t": tensor}, root, strict=False)
        found += [str(caught.value), tensor.tolist()]
        assert (position.epoch, position.step, position.consumed) == (0, 0, 0)
    return tuple(found)  # type: ignore[return-value]


def test_other_data_on_one_rank_are_found_before_anything_is_touched(tmp_path: Path) -> None:
    for said, tensor, said_of_own, other in run_ranks(_other_data, 2, str(tmp_path / "store")):
        assert "\n  p: saved with size 100, here it is 101" in said
        assert "\n  own: saved with size 100, here it is 101" in said_of_own
        assert tensor == other == [0.0] * 4


class _Counted(DataPosition):
    """Saves one thing more than its class."""

    seen = 0

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "seen": self.seen}

    def load_state_dict(self, state: Any) -> None:
        state = dict(state)
        self.seen = state.pop("seen")
        super().load_state_dict(state)


def test_a_derived_class_says_itself_what_it_takes(tmp_path: Path) -> None:
    position = _Counted(10)
    position.seen = 7
    tierckpt.save({"p": position}, tmp_path, step=1)
    again = _Counted(10)
    tierckpt.load({"p": again}, tmp_path)
    assert again.seen == 7
