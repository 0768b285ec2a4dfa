"""What was broken once by hard use: states that make temporaries, saves in flight, threads, forks, roots that vanish."""

from __future__ import annotations

import contextlib
import enum
import gc
import shutil
import subprocess
import sys
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

import tierckpt
from tests.forking import forked
from tests.harness import run_ranks
from tierckpt import Checkpointer, Disk, IntegrityError, LayoutError, StateError, StepExistsError, StoreError
from tierckpt.tiers.disk import DiskPlace


class _Shadow:
    """Its state_dict() makes new tensors each time."""

    def __init__(self, value: float) -> None:
        self.value = torch.full((5000,), value)

    def state_dict(self) -> dict[str, torch.Tensor]:
        return {"shadow": self.value * 2}

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        self.value = state["shadow"] / 2


def test_tensors_that_live_only_for_the_save(tmp_path: Path) -> None:
    array = np.arange(5000.0)
    array.setflags(write=False)
    state = {"a": _Shadow(1), "b": _Shadow(2), "array": array, "turned": np.arange(6000.0)[::-1]}
    tierckpt.save(state, tmp_path / "s", step=1)
    found = tierckpt.read(tmp_path / "s")
    assert (found["a"]["shadow"] == 2).all() and (found["b"]["shadow"] == 4).all()
    assert np.array_equal(found["array"], array) and np.array_equal(found["turned"], state["turned"])


def test_a_restore_waits_for_saves_in_flight(tmp_path: Path) -> None:
    for attempt in range(5):
        root = tmp_path / f"s{attempt}"
        state = {"w": torch.zeros(300_000)}
        with Checkpointer(root, agent="off") as ckpt:
            ckpt.save(0, state).wait()
            handles = []
            for step in (1, 2, 3):
                state["w"].fill_(step)
                handles.append(ckpt.save(step, state))
            info = ckpt.restore(state, step=0)
            assert info is not None and info.step == 0 and not state["w"].any()
            assert [handle.wait().generation for handle in handles] == [1, 1, 1]  # type: ignore[union-attr]
            state["w"].fill_(10)
            ckpt.save(1, state).wait()  # the same step again, in the new generation
        assert tierckpt.verify(root, every=True).ok
        assert tierckpt.load(state, root).step == 1 and (state["w"] == 10).all()


def _damage(root: Path, step: int, offset: int) -> None:
    shard = root / f"g0001/s{step:012d}/shard-00000.safetensors"
    data = bytearray(shard.read_bytes())
    data[offset] ^= 1
    shard.write_bytes(data)


def test_falling_back_never_mixes_two_checkpoints(tmp_path: Path) -> None:
    root = tmp_path / "s"
    big = 3 << 20
    tierckpt.save({"w": torch.zeros(big)}, root, step=0)
    tierckpt.save({"w": torch.ones(big), "a": torch.ones(1)}, root, step=1)
    _damage(root, 1, 9 << 20)
    state = {"w": torch.full((big,), -1.0), "a": torch.full((1,), -1.0)}
    for strict in (True, False):
        with pytest.raises(tierckpt.TierckptError, match="undefined"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tierckpt.load(state, root, strict=strict)
    kept = {"w": torch.full((big,), -1.0), "a": torch.full((1,), -1.0)}
    with pytest.warns(RuntimeWarning, match="step 1"):
        tierckpt.load(kept, root, strict=False, staged=True)
    assert not kept["w"].any() and kept["a"].item() == -1


def test_memory_that_two_names_share_takes_no_two_values(tmp_path: Path) -> None:
    root = tmp_path / "s"
    tierckpt.save({"a": torch.tensor([1.0, 1, 1, 1]), "b": torch.tensor([2.0, 2, 2, 2])}, root, step=1)
    shared = torch.zeros(6)
    for state in ({"a": shared[:4], "b": shared[:4]}, {"a": shared[:4], "b": shared[2:]}):
        with pytest.raises(LayoutError, match="share memory"):
            tierckpt.load(state, root)
    same = torch.tensor([1.0, 1, 1, 1])
    tierckpt.save({"a": same, "b": same.clone()}, root, step=2)
    tied = torch.zeros(4)
    tierckpt.load({"a": tied, "b": tied}, root)
    assert tied.tolist() == [1, 1, 1, 1]
    base = torch.zeros(4, 2)
    tierckpt.load({"a": base[:, 0], "b": base[:, 1]}, root, step=1)  # side by side, not the same
    assert base.tolist() == [[1, 2]] * 4


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (torch.tensor([-1]), torch.uint64),
        (torch.tensor([2**63], dtype=torch.uint64), torch.int64),
        (torch.tensor([300]), torch.int8),
        (torch.tensor([0.5]), torch.int64),
        (torch.tensor([float("nan")]), torch.int64),
        (torch.tensor([1 + 2j]), torch.float32),
    ],
)
def test_casts_that_lose_are_refused(tmp_path: Path, saved: torch.Tensor, wanted: torch.dtype) -> None:
    tierckpt.save({"x": saved}, tmp_path / "s", step=1)
    with pytest.raises(LayoutError, match="cannot hold"):
        tierckpt.load({"x": torch.zeros(1, dtype=wanted)}, tmp_path / "s", cast=True)


class _Key(enum.IntEnum):
    A = 1


@pytest.mark.parametrize("key", [_Key.A, float("nan"), (1, float("nan")), np.int64(3)])
def test_keys_that_would_not_come_back_are_refused(tmp_path: Path, key: Any) -> None:
    with pytest.raises(StateError, match="cannot name tensors"):
        tierckpt.save({"heads": {key: torch.ones(1)}}, tmp_path / "s", step=1)
    assert tierckpt.latest(tmp_path / "s") is None


def test_metadata_has_a_limit(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="metadata of"):
        tierckpt.save({"w": torch.ones(1)}, tmp_path / "s", step=1, metadata="x" * (2 << 20))


_FORGOTTEN = """
import sys, torch
from tierckpt import Checkpointer
def main():
    ckpt = Checkpointer(sys.argv[1], agent="off")
    for step in range(3):
        ckpt.save(step, {"w": torch.full((2_000_000,), float(step))})
main()
"""


def test_a_checkpointer_that_is_forgotten_finishes_its_saves(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", _FORGOTTEN, str(tmp_path / "s")], check=True, timeout=50)
    assert tierckpt.steps(tmp_path / "s") == [0, 1, 2]


def test_forgotten_checkpointers_give_their_threads_back(tmp_path: Path) -> None:
    def one(number: int) -> threading.Thread:
        ckpt = Checkpointer(tmp_path / f"s{number}", agent="off")
        ckpt.save(0, {"w": torch.ones(1)}).wait()
        thread = ckpt._drain._line._worker
        assert thread is not None
        return thread

    threads = [one(number) for number in range(5)]
    gc.collect()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_a_root_that_was_removed_or_replaced_takes_no_more_saves(tmp_path: Path) -> None:
    root, older = tmp_path / "s", tmp_path / "older"
    state = {"w": torch.ones(1)}
    with Checkpointer(root, agent="off") as ckpt:
        ckpt.save(0, state).wait()
        shutil.copytree(root, older)
        ckpt.save(1, state).wait()
        shutil.rmtree(root)
        shutil.copytree(older, root)
        with pytest.raises(IntegrityError, match="removed or replaced"):
            ckpt.save(2, state).wait()
    with pytest.raises(tierckpt.UntrustedError, match="rolled back"):
        tierckpt.load(state, root)
    with Checkpointer(tmp_path / "t", agent="off") as ckpt:
        ckpt.save(0, state).wait()
        shutil.rmtree(tmp_path / "t")
        (tmp_path / "t").mkdir()
        with pytest.raises(IntegrityError, match="removed or replaced"):
            ckpt.save(1, state).wait()


def test_threads_may_save_at_once(tmp_path: Path) -> None:
    root = tmp_path / "s"
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for step in range(number, 12, 4):
                tierckpt.save({"w": torch.full((1000,), float(step))}, root, step=step)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert tierckpt.steps(root) == list(range(12)) and tierckpt.verify(root, every=True).ok


def test_a_forked_child_saves_by_itself(tmp_path: Path) -> None:
    root = tmp_path / "s"
    tierckpt.save({"w": torch.ones(3)}, root, step=1)
    assert forked(lambda: tierckpt.save({"w": torch.full((3,), 7.0)}, root, step=7)) == 0
    assert tierckpt.read(root)["w"].tolist() == [7, 7, 7]


def test_a_step_that_failed_may_be_saved_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"w": torch.ones(3)}
    with Checkpointer(tmp_path / "s", agent="off", tiers=[Disk(every=10)]) as ckpt:
        ckpt.save(0, state).wait()
        with monkeypatch.context() as patched:
            patched.setattr(DiskPlace, "writer", _refuse)
            with pytest.raises(StoreError, match="no more"):
                ckpt.save(10, state).wait()
        ckpt.save(10, state).wait()
        with pytest.raises(StepExistsError):
            ckpt.save(10, state)
    assert tierckpt.steps(tmp_path / "s") == [0, 10]


def _refuse(*_: object) -> Any:
    raise StoreError("no more")


def test_optimizer_state_made_while_loading_is_of_use_afterwards(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2)).sum().backward()
    optimizer.step()
    tierckpt.save({"m": model, "o": optimizer}, tmp_path / "s", step=1)
    fresh = torch.optim.AdamW(model.parameters())
    with torch.inference_mode():
        tierckpt.load({"m": model, "o": fresh}, tmp_path / "s")
    model(torch.ones(2)).sum().backward()
    fresh.step()


def _failures_on_all(rank: int, root: str) -> list[int]:
    """The steps in whose call this rank raised."""
    raised = []
    state = {"w": torch.ones(3)}
    with Checkpointer(root, agent="off", on_error="raise") as ckpt:
        for step in range(8):
            failing = rank == 0 and step in (2, 5)
            original = DiskPlace.writer
            if failing:
                DiskPlace.writer = _refuse  # type: ignore[method-assign]
            try:
                handle = ckpt.save(step, state)
                handle._ended.wait()
            except StoreError:
                raised.append(step)
            finally:
                DiskPlace.writer = original  # type: ignore[method-assign]
    return raised


def test_all_ranks_raise_in_the_same_call(tmp_path: Path) -> None:
    first, second = run_ranks(_failures_on_all, 2, str(tmp_path / "s"))
    assert first == second == [3, 6]


def _before_and_after(rank: int, root: str) -> list[int]:
    found = []
    if rank == 0:
        found.append(tierckpt.save({"w": torch.ones(2)}, f"{root}/s", step=1).world)
    dist.init_process_group("gloo", init_method=f"file://{root}/meet", rank=rank, world_size=2)
    found.append(tierckpt.save({"w": torch.ones(2)}, f"{root}/s", step=2).world)
    dist.destroy_process_group()
    return found


def test_ranks_that_saved_alone_before_save_together(tmp_path: Path) -> None:
    assert run_ranks(_before_and_after, 2, str(tmp_path), group=False) == [[1, 2], [2]]


def _interrupted(rank: int, root: str) -> list[str]:
    """A rank that is interrupted between agreeing and handing over must not put its drain out of step."""
    said = []
    state = {"w": torch.full((3,), 1.0)}
    with Checkpointer(root, agent="off") as ckpt:
        ckpt.save(0, state).wait()
        stage = ckpt._stage

        def interrupted(*_: Any, **__: Any) -> Any:
            raise KeyboardInterrupt

        if rank == 1:
            ckpt._stage = interrupted  # type: ignore[method-assign]
        try:
            ckpt.save(1, state).wait()
        except (KeyboardInterrupt, StoreError) as error:
            said.append(type(error).__name__)
        ckpt._stage = stage  # type: ignore[method-assign]
        ckpt.save(2, state).wait()
    return said


def test_an_interrupt_on_one_rank_costs_that_save_only(tmp_path: Path) -> None:
    assert run_ranks(_interrupted, 2, str(tmp_path / "s")) == [["StoreError"], ["KeyboardInterrupt"]]
    assert tierckpt.steps(tmp_path / "s") == [0, 2]
    assert tierckpt.verify(tmp_path / "s", every=True).ok


def _different_arguments(rank: int, root: str) -> list[str]:
    state = {"a": torch.arange(4.0)}
    with Checkpointer(root, agent="off") as ckpt:
        ckpt.save(1, state).wait()
        ckpt.save(2, state).wait()
        found = []
        odd: dict[str, Any] = {"cast": True, "strict": False, "fallback": False, "staged": True, "step": 1}
        for name, value in odd.items():
            state["a"].zero_()
            with pytest.raises(StateError, match=f"{name}= must be the same on all ranks") as caught:
                ckpt.restore(state, **({name: value} if rank else {}))
            assert not state["a"].any()
            found.append(str(caught.value))
        # What belongs to a rank may differ; contact was not lost by any of it.
        ckpt.restore(state, keys=["nothing*"] if rank else None)
        assert state["a"].tolist() == ([0.0] * 4 if rank else [0.0, 1.0, 2.0, 3.0])
        info = ckpt.save(3, state).wait()
        assert info is not None
        assert info.step == 3
    with pytest.raises(StateError, match="max_restarts= must be the same"):
        Checkpointer(root, agent="off", max_restarts=3 + rank)
    return found


def test_ranks_that_pass_different_arguments_are_told(tmp_path: Path) -> None:
    first, second = run_ranks(_different_arguments, 2, str(tmp_path / "s"))
    assert first == second


def _mapping_on_one_rank(rank: int, root: str) -> list[list[float]]:
    """Rank 0 has given its tensors new names since it saved, rank 1 has not."""
    tierckpt.save({"a": torch.arange(3.0), "b": torch.ones(2)}, root, step=1)
    first, second = ("x", "y") if rank == 0 else ("a", "b")
    mapping = tierckpt.Mapping([tierckpt.Rename("a", "x"), tierckpt.Rename("b", "y")]) if rank == 0 else None
    state = {first: torch.zeros(3), second: torch.zeros(2)}
    tierckpt.load(state, root, mapping=mapping)
    with pytest.raises(LayoutError, match="b: in the checkpoint, not in the state"):
        tierckpt.load({first: torch.zeros(3)}, root, mapping=mapping)
    return [tensor.tolist() for tensor in state.values()]


def test_a_mapping_may_be_one_ranks_own(tmp_path: Path) -> None:
    first, second = run_ranks(_mapping_on_one_rank, 2, str(tmp_path / "s"))
    assert first == second == [[0.0, 1.0, 2.0], [1.0, 1.0]]


def _one_failure(rank: int, root: str) -> tuple[int, list[int]]:
    """Rank 1 has a save that cannot be encoded, and both ranks go on whatever is raised."""
    state: dict[str, Any] = {"w": torch.ones(3)}
    raised = 0
    with Checkpointer(root, agent="off", on_error="raise") as ckpt:
        ckpt.save(0, state).wait()
        for step in range(1, 12):
            if step == 2 and rank == 1:
                state["bad"] = object()
            try:
                ckpt.save(step, state)
                if rank == 0 or step % 2:
                    ckpt.wait()
            except tierckpt.TierckptError:
                raised += 1
            state.pop("bad", None)
        ckpt.wait()
        try:
            ckpt.save(20, state).wait()
        except tierckpt.TierckptError:
            raised += 1
            ckpt.save(21, state).wait()
    return raised, tierckpt.steps(root)


def test_one_failure_that_is_raised_does_not_make_others(tmp_path: Path) -> None:
    (first, steps), (second, _) = run_ranks(_one_failure, 2, str(tmp_path / "s"))
    assert 1 <= first <= 2 and 1 <= second <= 2
    assert len(steps) >= 8


def test_a_thread_that_the_system_refuses_once_costs_one_save_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, []

    def refuse_once(thread: threading.Thread) -> None:
        if thread.name == "tierckpt-drain" and not refused:
            refused.append(thread)
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse_once)
    state = {"w": torch.ones(3)}
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        with contextlib.suppress(RuntimeError):
            ckpt.save(1, state)
        ckpt.save(2, state).wait()
    assert refused
    assert tierckpt.steps(tmp_path / "s")[-1] == 2


class _Counting(torch.nn.Linear):
    """Its extra state makes the state one that is taken apart at each save."""

    def get_extra_state(self) -> int:
        return self.in_features

    def set_extra_state(self, state: int) -> None:
        self.in_features = state


def _empty_groups(kind: type[torch.nn.Linear], count: int, part: int = 0) -> dict[str, Any]:
    """A stage whose optimizer has one group with parameters between ``count`` without."""
    model = torch.nn.ModuleDict({str(part): kind(2, 2)})
    groups: list[dict[str, Any]] = [{"params": [], "lr": 9.0} for _ in range(count)]
    groups.insert(1, {"params": list(model.parameters())})
    return {"model": model, "optim": torch.optim.AdamW(groups, lr=9.0)}


def _hyper(state: dict[str, Any]) -> list[tuple[float, float]]:
    return [(group["lr"], group["weight_decay"]) for group in state["optim"].param_groups]


def _save_empty_groups(rank: int, root: str, kind: type[torch.nn.Linear], stages: bool, counts: list[int]) -> None:
    part = rank if stages else 0
    state = _empty_groups(kind, 1, part)
    expected = {}
    with Checkpointer(root, agent="off") as ckpt:
        for step, count in enumerate(counts):
            while len(state["optim"].param_groups) < count + 1:
                state["optim"].add_param_group({"params": []})
            for number, group in enumerate(state["optim"].param_groups):
                group.update(lr=float(number + 10 * step), weight_decay=number / 8)
            expected[step] = _hyper(state)
            ckpt.save(step, state).wait()
    for step, count in enumerate(counts):
        fresh = _empty_groups(kind, count, part)
        assert not tierckpt.load(fresh, root, step=step).untouched
        assert _hyper(fresh) == expected[step]
        assert [group["lr"] for group in tierckpt.read(root, step=step)["optim"]["param_groups"][: count + 1]] == [
            lr for lr, _ in expected[step]
        ]


@pytest.mark.parametrize("kind", [torch.nn.Linear, _Counting])
def test_groups_without_parameters_keep_what_is_their_own(tmp_path: Path, kind: type[torch.nn.Linear]) -> None:
    """Several have the same parameters, none; one more may come while training."""
    _save_empty_groups(0, str(tmp_path / "s"), kind, False, [3, 3, 3, 4, 4])
    _save_empty_groups(0, str(tmp_path / "added"), kind, False, [1, 1, 2, 2, 2])


@pytest.mark.parametrize("stages", [False, True])
def test_groups_without_parameters_on_several_ranks(tmp_path: Path, stages: bool) -> None:
    for number, counts in enumerate(([1, 1, 2], [2, 2, 2])):
        run_ranks(_save_empty_groups, 2, str(tmp_path / f"s{number}"), torch.nn.Linear, stages, counts)


def test_groups_without_parameters_under_a_mapping(tmp_path: Path) -> None:
    state = _empty_groups(torch.nn.Linear, 2, 0)
    for number, group in enumerate(state["optim"].param_groups):
        group.update(lr=float(number))
    tierckpt.save(state, tmp_path / "s", step=1)
    fresh = _empty_groups(torch.nn.Linear, 2, 1)
    mapping = tierckpt.Mapping([tierckpt.Rename("model.0", "model.1")])
    tierckpt.load(fresh, tmp_path / "s", mapping=mapping)
    assert _hyper(fresh) == _hyper(state)
