"""Votes: all ranks get every result, or all raise; small, large, empty and lopsided words arrive whole."""

from __future__ import annotations

import os
import signal
import time
import warnings
from typing import Any

import pytest
import torch

from tests.harness import run_ranks
from tierckpt.errors import IntegrityError, LostContactError, StateError, StoreError
from tierckpt.group import Group


def _exchange(rank: int) -> list[list[int]]:
    group = Group(timeout=20)
    found = []
    world = group.size
    for sizes in ([0] * world, [3] * world, [1_000_000 if r == 1 else 0 for r in range(world)], list(range(world))):
        told = group.exchange(bytes([rank]) * sizes[rank])
        assert told == [bytes([r]) * n for r, n in enumerate(sizes)]
        found.append([len(t) for t in told])
    group.close()
    return found


@pytest.mark.parametrize("world", [1, 2, 6])
def test_exchange(world: int) -> None:
    results = run_ranks(_exchange, world)
    assert all(result == results[0] for result in results)


def _failing(rank: int) -> tuple[str, str]:
    group = Group(timeout=20)

    def part() -> bytes:
        if rank in (1, 2):
            raise IntegrityError(f"chunk {rank}")
        return b"fine"

    with pytest.raises(IntegrityError) as caught:
        group.vote("reading", part)
    assert group.vote("again", lambda: b"x") == [b"x"] * group.size
    return type(caught.value).__name__, str(caught.value)


def test_a_vote_fails_on_all_ranks_with_the_same_error() -> None:
    results = run_ranks(_failing, 4)
    assert set(results) == {("IntegrityError", "reading failed: rank 1: chunk 1; rank 2: chunk 2")}


def _untyped(rank: int) -> str:
    group = Group(timeout=20)

    def part() -> bytes:
        if rank == 1:
            raise ZeroDivisionError("by zero")
        return b""

    with pytest.raises(Exception, match="ZeroDivisionError: by zero") as caught:
        group.vote("planning", part)
    return type(caught.value).__name__


def test_unforeseen_errors_reach_all_ranks_too() -> None:
    assert set(run_ranks(_untyped, 2)) == {"TierckptError"}


def _crossing(rank: int) -> str:
    group = Group(timeout=20)

    def load() -> bytes:
        return b"[1]"

    def save() -> bytes:
        return b"words of another kind"

    with pytest.raises(StateError, match="another call") as caught:
        group.vote("the work", load if rank == 0 else save)
    return str(caught.value)


def test_votes_that_cross_do_not_read_each_others_words() -> None:
    assert run_ranks(_crossing, 3) == [
        "the work: ranks 1-2 are in another call: all ranks must make the same calls in the same order",
        "the work: rank 0 is in another call: all ranks must make the same calls in the same order",
        "the work: rank 0 is in another call: all ranks must make the same calls in the same order",
    ]


def _agreeing(rank: int) -> str:
    group = Group(timeout=20)
    group.agree("the work", root="/s", step=3, cast=False, run=None)
    with pytest.raises(StateError) as caught:
        group.agree("the work", root="/s", step=3, cast=rank == 2)
    return str(caught.value)


def test_arguments_that_differ_are_named_on_all_ranks() -> None:
    assert set(run_ranks(_agreeing, 3)) == {
        "the work: cast= must be the same on all ranks: rank 0 was given False, rank 2 True"
    }


def _with_roots(rank: int, roots: list[str]) -> str:
    group = Group(timeout=20)
    try:
        group.agree("the work", root=roots[rank])
    except StateError as error:
        return str(error)
    return ""


def test_ranks_of_one_node_share_a_root() -> None:
    """Each would write its part to its own folder, and none would hold a checkpoint. Nodes may have it anywhere."""
    nodes = [{"TIERCKPT_NODE": "a"}, {"TIERCKPT_NODE": "b"}, {"TIERCKPT_NODE": "b"}]
    assert run_ranks(_with_roots, 3, ["/a", "/b", "/b"], env=nodes) == [""] * 3
    assert run_ranks(_with_roots, 3, ["/a", "/a", "/a"], env=nodes) == [""] * 3
    (told,) = set(run_ranks(_with_roots, 3, ["/a", "/a", "/b"], env=nodes))
    assert "different roots (rank 1: /a; rank 2: /b)" in told and "the same folder" in told


def _dying(rank: int) -> str:
    group = Group(timeout=20)
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    with pytest.raises(StoreError, match="lost contact"):
        group.vote("waiting", lambda: b"")
    return "told"


def test_a_dead_rank_is_noticed() -> None:
    results = run_ranks(_dying, 3, timeout=40, dies=[1])
    assert [results[rank] for rank in (0, 2)] == ["told", "told"]


def _send(rank: int) -> bytes:
    group = Group(timeout=20)
    data = bytearray(range(256)) * 10
    if rank == 0:
        group.send(memoryview(data), 1)
        return bytes(data)
    found = bytearray(len(data))
    group.receive(memoryview(found), 0)
    return bytes(found)


def test_send_and_receive() -> None:
    sent, received = run_ranks(_send, 2)
    assert sent == received


def test_a_job_of_several_that_forgot_to_initialise_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.warns(RuntimeWarning, match="init_process_group"):
        assert Group(timeout=20).size == 1
    monkeypatch.setenv("WORLD_SIZE", "1")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Group(timeout=20)


def _is_interrupted(rank: int) -> tuple[str, float]:
    group = Group(timeout=60.0)
    group.vote("before", lambda: b"")

    def interrupt(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    began = time.monotonic()
    try:
        if rank == 0:
            with pytest.MonkeyPatch.context() as patched:
                patched.setattr(torch, "zeros", interrupt)
                with pytest.raises(KeyboardInterrupt):
                    group.vote("this", lambda: b"")
        group.vote("that", lambda: b"")
    except LostContactError as error:
        return str(error), time.monotonic() - began
    return "", 0.0


def test_an_interrupted_exchange_is_taken_for_no_other() -> None:
    """Nobody waits for the time-out, and nobody takes one answer for another."""
    for told, seconds in run_ranks(_is_interrupted, 2):
        assert "contact" in told and seconds < 30
