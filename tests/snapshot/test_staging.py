"""Saves of which only the first is collective: whatever changes between two saves, on whichever ranks, is saved whole."""

from __future__ import annotations

import random
import time
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate, Shard, init_device_mesh

import tierckpt
from tests.harness import run_ranks
from tierckpt import ArenaFullError, Checkpointer, Disk, LayoutError, PerRank, Pieces, Ram, StateError, StepExistsError
from tierckpt.group import Group
from tierckpt.snapshot.arena import Arena
from tierckpt.state import planner


def _equal(found: Any, state: dict[str, Any]) -> bool:
    return all(torch.equal(found[name], value) for name, value in state.items() if isinstance(value, torch.Tensor))


def _without_a_word(rank: int, root: str) -> list[int]:
    """Ranks save at different times, each without hearing of the others."""
    state = {"w": torch.arange(1000.0), "n": 0, "own": PerRank(rank)}
    with Checkpointer(root, agent="off") as ckpt:
        ckpt.save(0, state).wait()
        calls: list[str] = []
        vote, exchange = Group.vote, Group.exchange
        mine = ckpt._group

        def counted_vote(group: Group, what: str, *args: Any, **more: Any) -> Any:
            if group is mine:
                calls.append(what)
            return vote(group, what, *args, **more)

        def counted_exchange(group: Group, *args: Any) -> Any:
            if group is mine:
                calls.append("exchange")
            return exchange(group, *args)

        Group.vote, Group.exchange = counted_vote, counted_exchange  # type: ignore[method-assign]
        handles = []
        for turn in range(2):
            if turn == rank:  # rank 1 begins when rank 0 has made all of its saves
                for step in range(1, 3):  # as many as there are slots
                    state["w"] += 1
                    state["n"] = step
                    handles.append(ckpt.save(step, state))
            dist.barrier()
        steps = [handle.wait().step for handle in handles]  # type: ignore[union-attr]
        assert calls == []
    return steps


def test_from_the_second_save_on_no_rank_waits_for_another(tmp_path: Path) -> None:
    assert run_ranks(_without_a_word, 2, str(tmp_path / "s")) == [[1, 2], [1, 2]]
    assert tierckpt.read(tmp_path / "s")["n"] == 2


def _momentum(rank: int, root: str, live: bool) -> str:
    """Optimizer state appears between two saves, on all ranks; large replicated tensors are split over writers."""
    torch.manual_seed(0)
    model = torch.nn.Linear(1500, 1500)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    state = {"m": model, "o": optimizer, "rank": PerRank(rank)}
    kept = {}
    with Checkpointer(root, agent="off") as ckpt:
        for step in range(4):
            if live:
                tierckpt.save(state, root + "live", step=step)
            handle = ckpt.save(step, state)
            handle.wait()
            kept[step] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            model(torch.ones(2, 1500)).sum().backward()
            optimizer.step()
    for step in range(4):
        for path in [root, root + "live"] if live else [root]:
            found = tierckpt.read(path, step=step)
            assert _equal(found["m"], kept[step]), step
            assert len(found["o"]["state"]) == (2 if step else 0)
            assert found["rank"] == rank
    report = tierckpt.verify(root, every=True)
    assert report.ok, report.problems
    # Stored once: the step in which the layout changed as well as those before and after it.
    sizes = [
        sum(path.stat().st_size for path in Path(root, f"g0001/s{step:012}").glob("*.safetensors")) for step in range(4)
    ]
    assert sizes[1] < 2.2 * sizes[0]
    assert abs(sizes[1] - sizes[3]) < 100_000
    return "fine"


@pytest.mark.parametrize("live", [False, True])
def test_state_that_appears_on_all_ranks(tmp_path: Path, live: bool) -> None:
    assert set(run_ranks(_momentum, 3, str(tmp_path / "s"), live)) == {"fine"}


def _some(rank: int, root: str) -> list[str]:
    """One rank's state changes: it gets tensors of its own, others keep what they have in common."""
    mesh = init_device_mesh("cpu", (4,))
    whole = torch.arange(4 * 6000.0).reshape(4 * 6, 1000)
    state: dict[str, Any] = {
        "sharded": DTensor.from_local(whole.chunk(4)[rank].clone(), mesh, [Shard(0)]),
        "replicated": DTensor.from_local(torch.arange(50.0), mesh, [Replicate()]),
        "large": torch.arange(2_000_000.0),  # split over several writers
        "tied": None,
        "n": 1,
    }
    state["tied"] = state["large"]
    told = []
    with Checkpointer(root, agent="off") as ckpt:
        ckpt.save(0, state).wait()
        if rank == 2:
            state["extra"] = torch.full((7, 3), 2.0)
            state["values"] = {"a": 1}
        handle = ckpt.save(1, state)
        handle.wait()
        state["large"] += 1
        ckpt.save(2, state).wait()  # planned anew, nothing is collective about it
        if rank == 2:
            del state["extra"]
        ckpt.save(3, state).wait()
        if rank in (0, 3):
            state["more"] = torch.ones(5)
        ckpt.save(4, state).wait()
        for step in range(5):
            found = tierckpt.read(root, step=step)
            told.append(f"{step}: {', '.join(sorted(found))}")
            assert torch.equal(found["sharded"], whole)
            assert torch.equal(found["replicated"], torch.arange(50.0))
            assert torch.equal(found["large"], torch.arange(2_000_000.0) + (step > 1))
            assert found["tied"] is found["large"]
            assert found.get("values", {"a": 1}) == {"a": 1}
    report = tierckpt.verify(root, every=True)
    assert report.ok, report.problems
    return told


def test_state_that_changes_on_some_ranks(tmp_path: Path) -> None:
    found = run_ranks(_some, 4, str(tmp_path / "s"))
    base = "large, n, replicated, sharded, tied"
    assert found[0] == [
        f"0: {base}",
        "1: extra, large, n, replicated, sharded, tied, values",
        "2: extra, large, n, replicated, sharded, tied, values",
        f"3: {base}, values",
        "4: large, more, n, replicated, sharded, tied, values",
    ]
    assert all(each == found[0] for each in found)


def _impossible(rank: int, root: str) -> tuple[str, list[int]]:
    """A tensor whose shape changes on one rank only fails that save on all ranks, and nothing else."""
    mesh = init_device_mesh("cpu", (2,))
    state: dict[str, Any] = {"w": DTensor.from_local(torch.full((2, 3), float(rank)), mesh, [Shard(0)]), "n": 0}
    with Checkpointer(root, agent="off") as ckpt:
        ckpt.save(0, state).wait()
        good = state["w"]
        if rank == 1:
            state["w"] = torch.zeros(3, 3)
        handle = ckpt.save(1, state)
        with pytest.raises(LayoutError, match="w") as caught:
            handle.wait()
        state["w"] = good
        ckpt.save(2, state).wait()
        if rank == 0:
            state["bad"] = object()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            handle = ckpt.save(3, state)
        with pytest.raises(StateError, match="bad"):
            handle.wait()
        state.pop("bad", None)
        ckpt.save(4, state).wait()
    return str(caught.value), tierckpt.steps(root)


def test_what_does_not_fit_together_fails_alike_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(_impossible, 2, str(tmp_path / "s"))
    assert first == second
    assert first[1] == [0, 2, 4]


def _no_room(rank: int, root: str) -> list[int]:
    """A rank that cannot stage all it holds fails that save; all ranks then plan anew, and each stages its part again."""
    state: dict[str, Any] = {"w": torch.arange(50_000.0), "n": 0}
    with Checkpointer(root, agent="off") as ckpt:
        ckpt.save(0, state).wait()
        state["more"] = torch.ones(300_000)
        acquire = Arena.acquire

        def refuses(arena: Arena, size: int, timeout: float) -> Any:
            if rank == 1 and size > 1_000_000:
                raise ArenaFullError("no room")
            return acquire(arena, size, timeout)

        Arena.acquire = refuses  # type: ignore[method-assign]
        handle = ckpt.save(1, state)
        with pytest.raises(ArenaFullError, match="no room"):
            handle.wait()
        ckpt.save(2, state).wait()
        Arena.acquire = acquire  # type: ignore[method-assign]
        found = tierckpt.read(root)
        assert _equal(found, state)
    return tierckpt.steps(root)


def test_what_cannot_be_staged_whole_is_staged_in_parts_the_next_time(tmp_path: Path) -> None:
    assert run_ranks(_no_room, 2, str(tmp_path / "s")) == [[0, 2], [0, 2]]


def _no_budget(rank: int, root: str) -> tuple[list[int], float]:
    """The same where it is the budget of the agent that has no room for what all ranks hold."""
    state: dict[str, Any] = {"w": torch.arange(50_000.0), "n": 0}
    began = time.monotonic()
    with Checkpointer(root, tiers=[Ram(budget=2_900_000), Disk(every=1000)], timeout=40) as ckpt:
        ckpt.save(0, state).wait()
        for step in (1, 2, 3):
            ckpt.save(step, state).wait("ram")
        state["more"] = torch.ones(300_000)
        handle = ckpt.save(4, state)
        assert handle.timings["stall"] < 20
        with pytest.raises(ArenaFullError, match="budget of the agent is 2,900,000"):
            handle.wait("ram")
        ckpt.save(5, state).wait("ram")
        found = {"w": torch.zeros(50_000), "n": 0, "more": torch.zeros(300_000)}
        assert tierckpt.load(found, root).step == 5 and _equal(found, state)
    return tierckpt.steps(root), time.monotonic() - began


def test_what_has_no_room_in_the_agent_waits_for_no_rank_that_waits_for_it(tmp_path: Path) -> None:
    for steps, seconds in run_ranks(_no_budget, 2, str(tmp_path / "s")):
        assert steps == [0, 5] and seconds < 20


def _overlapping(rank: int, root: str) -> tuple[str, list[int]]:
    """What was staged does not fit together, though what the ranks hold does: the next save is planned anew."""
    w = torch.arange(6.0)
    state: dict[str, Any] = {"w": Pieces((6,), [((0,), w)]), "n": 0}
    with Checkpointer(root, agent="off") as ckpt:
        ckpt.save(0, state).wait()
        if rank == 1:
            state["w"] = Pieces((6,), [((0,), w[:4].clone()), ((4,), w[4:].clone())])
        else:
            state["w"] = Pieces((6,), [((0,), w[:4].clone())])
        handle = ckpt.save(1, state)
        handle.wait()
        ckpt.save(2, state).wait()
        assert torch.equal(tierckpt.read(root)["w"], w)
    return "fine", tierckpt.steps(root)


def test_pieces_that_move_between_ranks(tmp_path: Path) -> None:
    assert run_ranks(_overlapping, 2, str(tmp_path / "s")) == [("fine", [0, 1, 2])] * 2


def _refused_call(rank: int, root: str, agent: str, wrong: int) -> list[str]:
    """A call that only one rank makes wrongly costs that save, on all ranks, and nothing of steps that exist."""
    state: dict[str, Any] = {"w": torch.ones(3), "n": 0}
    told = []
    with Checkpointer(root, agent=agent, timeout=20) as ckpt:
        for step in (0, 1):
            ckpt.save(step, state).wait()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                ckpt.save(wrong if rank == 1 else 2, state).wait()
            except (StateError, StepExistsError) as error:
                told.append(type(error).__name__)
        ckpt.save(3, state).wait()
        # The same mistake on all ranks is raised on all, at once.
        with pytest.raises((StateError, StepExistsError)):
            ckpt.save(wrong, state)
        ckpt.save(4, state).wait()
    report = tierckpt.verify(root, every=True)
    assert report.ok, report.problems
    return [*told, str(tierckpt.steps(root))]


@pytest.mark.parametrize("agent", ["off", "auto"])
@pytest.mark.parametrize(("wrong", "kind"), [(-1, "StateError"), (1, "StepExistsError")])
def test_a_call_that_one_rank_makes_wrongly(tmp_path: Path, agent: str, wrong: int, kind: str) -> None:
    assert run_ranks(_refused_call, 2, str(tmp_path / "s"), agent, wrong) == [[kind, "[0, 1, 3, 4]"]] * 2


def _one_rank_changes(rank: int, root: str, agent: str) -> tuple[list[int], list[int]]:
    """Rank 0's structure changes when the other one, which has nothing to write, has made all of its next saves."""
    settled: list[int] = []
    original = planner.settle

    def settle(group: Group, what: str, *args: Any) -> Any:
        settled.append(int(what.rpartition(" ")[2]))
        return original(group, what, *args)

    planner.settle = settle
    state: dict[str, Any] = {"w": torch.arange(100.0), "n": 0}
    # What both hold is written by the lowest rank.
    with Checkpointer(root, tiers=[Ram(on_full="wait"), Disk()] if agent == "auto" else Disk(), agent=agent) as ckpt:
        ckpt.save(0, state).wait()
        handles = []
        for turn in (1, 0):
            if rank == turn:
                for step in range(1, 8):
                    if rank == 0 and step == 3:
                        state["own"] = torch.ones(5)
                    state["w"] += 1
                    state["n"] = step
                    handles.append(ckpt.save(step, state))
            dist.barrier()
        for step in range(8, 14):
            state["w"] += 1
            state["n"] = step
            handles.append(ckpt.save(step, state))
            handles[-1].wait()
        for handle in handles:
            handle.wait()
    for step in range(14):
        found = tierckpt.read(root, step=step)
        assert found["n"] == step and torch.equal(found["w"], torch.arange(100.0) + step)
        assert ("own" in found) is (step >= 3)
    return tierckpt.steps(root), settled


@pytest.mark.parametrize("agent", ["off", "auto"])
def test_ranks_follow_a_new_plan_from_the_same_save_on(tmp_path: Path, agent: str) -> None:
    """Of two plans either may say that the other rank has a tensor: half of each is none."""
    steps, settled = run_ranks(_one_rank_changes, 2, str(tmp_path / "s"), agent)[0]
    assert steps == list(range(14))
    # Rank 1 had made 8 calls of save when the ranks settled first, and may have been in the ninth when they did so last.
    assert settled in (list(range(3, 8)), list(range(3, 9)))


_FLIPS = 20


def _flipping(rank: int, root: str, agent: str, seed: int) -> list[int]:
    """Structures change and change back, on all ranks or on some, which are ahead of each other."""
    mine, common = random.Random(f"{seed} {rank}"), random.Random(seed)
    state: dict[str, Any] = {"w": torch.zeros(100), "large": torch.zeros(1_500_000), "text": "x" * 50}
    state |= {f"s{i}": torch.zeros(1000 + i) for i in range(20)}
    tensors = [value for value in state.values() if isinstance(value, torch.Tensor)]
    held: dict[int, float | None] = {}
    with Checkpointer(root, tiers=[Ram(on_full="wait"), Disk()] if agent == "auto" else Disk(), agent=agent) as ckpt:
        handles = []
        for step in range(_FLIPS):
            for random_, name in ((mine, f"own{rank}"), (common, "common")):
                chance = random_.random()
                if chance < 0.15:
                    state[name] = torch.full((5 + rank if random_ is mine else 5,), float(step))
                elif chance < 0.3:
                    state.pop(name, None)
            for tensor in tensors:
                tensor += 1
            held[step] = float(state[f"own{rank}"][0]) if f"own{rank}" in state else None
            handles.append(ckpt.save(step, state))
            if mine.random() < 0.15:
                handles[-1].wait()
        for handle in handles:
            handle.wait()
    for step in range(_FLIPS):
        found = tierckpt.read(root, step=step)
        assert all((found[name] == step + 1).all() for name in ("w", "large", *[f"s{i}" for i in range(20)]))
        own = found.get(f"own{rank}")
        assert held[step] == (None if own is None else float(own[0]))
    return tierckpt.steps(root)


@pytest.mark.parametrize("seed", [1, 4])
@pytest.mark.parametrize("agent", ["off", "auto"])
def test_structures_that_change_and_change_back_lose_no_save(tmp_path: Path, agent: str, seed: int) -> None:
    assert run_ranks(_flipping, 3, str(tmp_path / "s"), agent, seed) == [list(range(_FLIPS))] * 3


def _left_with_nothing(rank: int, root: str, agent: str) -> list[int]:
    """Rank 1 lets go of all that only it has: by itself it stages what rank 0 is then found to write."""
    state: dict[str, Any] = {"w": torch.arange(100.0), "n": 0}
    if rank == 1:
        state["own"] = torch.ones(5)
    with Checkpointer(root, agent=agent) as ckpt:
        ckpt.save(0, state).wait()
        state.pop("own", None)
        for step in range(1, 5):
            state["n"] = step
            ckpt.save(step, state).wait()
    assert all(tierckpt.read(root, step=step)["n"] == step for step in range(5))
    return tierckpt.steps(root)


@pytest.mark.parametrize("agent", ["off", "auto"])
def test_a_rank_that_has_staged_what_others_write_saves_nothing_in_its_slot(tmp_path: Path, agent: str) -> None:
    assert run_ranks(_left_with_nothing, 2, str(tmp_path / "s"), agent) == [list(range(5))] * 2


def _outgrown(rank: int, root: str) -> list[int]:
    """The large values of all ranks were rank 0's to write, until it alone had others."""
    state: dict[str, Any] = {"w": torch.arange(100.0), "v": torch.arange(70.0), "text": "x" * 1_000_000, "n": 0}
    with Checkpointer(root, tiers=[Ram(slots=2, on_full="wait"), Disk()], timeout=30) as ckpt:
        ckpt.save(0, state).wait()
        handles = []
        for step in range(1, 8):
            if rank == 0 and step == 3:
                state["own"] = torch.ones(5)
            state["n"] = step
            handles.append(ckpt.save(step, state))
        for handle in handles:
            handle.wait()
    assert all(tierckpt.read(root, step=step)["text"] == state["text"] for step in range(8))
    return tierckpt.steps(root)


def test_a_part_that_outgrows_its_slot_waits_for_no_other(tmp_path: Path) -> None:
    """The others are free once this very step is sealed."""
    assert run_ranks(_outgrown, 2, str(tmp_path / "s")) == [list(range(8))] * 2


def _drifting(rank: int, root: str) -> list[int]:
    """Structures change at other saves on each rank, some of them ahead of the others."""
    state: dict[str, Any] = {"w": torch.arange(100.0), "n": 0}
    with Checkpointer(root, agent="off") as ckpt:
        ckpt.save(0, state).wait()
        handles = []
        for step in range(1, 13):
            if step % 3 == rank:
                state[f"own{rank}.{step}"] = torch.full((5,), float(step))
            state["n"] = step
            handles.append(ckpt.save(step, state))
            if step % 4 == 2 * rank:
                handles[-1].wait()
        for handle in handles:
            handle.wait()
        for step in range(13):
            assert tierckpt.read(root, step=step)["n"] == step
    return tierckpt.steps(root)


def test_ranks_that_change_at_different_saves_lose_none(tmp_path: Path) -> None:
    assert run_ranks(_drifting, 3, str(tmp_path / "s")) == [list(range(13))] * 3
