"""Where all ranks do the same: at the first save past the last that any has begun, also where some have left calls out."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tierckpt.agreement import Agreement, At, Place, last
from tierckpt.format.canonical import JSON
from tierckpt.group import Group
from tierckpt.threads import Signal

RANKS = 3


class Rank:
    """One that makes these calls; None is a restore."""

    def __init__(self, calls: Sequence[int | None]) -> None:
        self.calls, self.made, self.generation = calls, 0, 0
        self.place = Place(lambda: self.made)

    def goes_on(self) -> int | None:
        step = self.calls[self.made]
        self.made += 1
        self.place.begin(step)
        if step is None:
            self.generation += 1
            self.place.continues(self.generation)
        return step

    def stops(self, at: At) -> tuple[int, int] | None:
        """Generation and step of the first save past this place."""
        while self.made < len(self.calls):
            step = self.goes_on()
            if step is not None and self.place.is_past(at):
                return self.generation, step
        return None


PACES = st.tuples(*[st.integers(0, 25)] * RANKS)


@given(paces=PACES, left_out=st.lists(st.sets(st.integers(0, 24)), min_size=RANKS, max_size=RANKS))
@settings(max_examples=300)
def test_calls_that_some_have_left_out_shift_nothing(paces: tuple[int, ...], left_out: list[set[int]]) -> None:
    ranks = [Rank([step for step in range(30) if step not in missing]) for missing in left_out]
    begun = -1
    for rank, pace in zip(ranks, paces, strict=True):
        while rank.calls[rank.made] is not None and rank.calls[rank.made] < pace:  # type: ignore[operator]
            begun = max(begun, rank.goes_on() or 0)
    at = last([rank.place.told() for rank in ranks])
    for rank in ranks:
        assert rank.stops(at) == (0, min(step for step in rank.calls if step is not None and step > begun))


@given(paces=PACES, restores=st.sets(st.integers(1, 24), max_size=2), anew=st.sets(st.integers(1, 24), max_size=4))
@settings(max_examples=300)
def test_where_steps_are_set_back_all_stop_at_the_same_call(
    paces: tuple[int, ...], restores: set[int], anew: set[int]
) -> None:
    calls: list[int | None] = []
    for number in range(60):
        before = calls[-1] if calls else None
        calls.append(None if number in restores else 0 if before is None or (before and number in anew) else before + 1)
    ranks = [Rank(calls) for _ in paces]
    # A restore is of all ranks: none is past it that others have not come to.
    common = min([60, *[number for number in restores if number >= min(paces)]])
    for rank, pace in zip(ranks, paces, strict=True):
        while rank.made < min(pace, common):
            rank.goes_on()
    first = max(rank.made for rank in ranks)
    at = last([rank.place.told() for rank in ranks])
    found = [(rank.stops(at), rank.made) for rank in ranks]
    assert len(set(found)) == 1 and found[0][0] is not None and found[0][1] > first


class Fails:
    """Nothing can be agreed on with it."""

    def __init__(self) -> None:
        self.lost: list[str] = []
        self.over = Signal()

    def begin(self, place: Place | None) -> None: ...

    def wants(self) -> bool:
        raise ZeroDivisionError("it fails")

    def word(self) -> JSON:
        return None

    def agree(self, at: At, words: Sequence[Any]) -> None: ...

    def alone(self, lost: str) -> None:
        self.lost.append(lost)
        self.over.set()


def test_whatever_ends_it_is_told(caplog: pytest.LogCaptureFixture) -> None:
    """Who goes by what the ranks agree on would wait for it for ever."""
    fails = Fails()
    with caplog.at_level(logging.ERROR, logger="tierckpt"):
        agreement = Agreement(Group(timeout=10), Place(lambda: 0), fails)
        agreement.start()
        agreement.wake()
        assert fails.over.wait(20)
        agreement.settle(failed=False)
    assert fails.lost == ["ZeroDivisionError: it fails"] and "no longer agree" in caplog.text
