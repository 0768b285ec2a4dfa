"""The fence: what is copied while training goes on is what was there when ``save()`` was called, or the save fails loudly.

Copies are held at a gate that the test opens, so that every order of events is one that the test chose.
"""

from __future__ import annotations

import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.forking import forked
from tests.harness import run_ranks
from tierckpt import Checkpointer, TornSnapshotError
from tierckpt.snapshot import fence
from tierckpt.snapshot.arena import Slot
from tierckpt.snapshot.stager import Stager
from tierckpt.snapshot.staging import Staging


class Gate:
    """What threads in the background copy waits until it is open, or until the test's own thread lends a hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.open = threading.Event()
        self.arrived = threading.Event()
        self.threads: set[str] = set()
        copy, mine = fence.Late._copy, threading.current_thread()

        def gated(self_: fence.Late, lo: int, hi: int) -> None:
            self.threads.add(threading.current_thread().name)
            if threading.current_thread() is not mine:
                self.arrived.set()
                self.open.wait()
            else:
                self.open.set()
            copy(self_, lo, hi)

        monkeypatch.setattr(fence.Late, "_copy", gated)
        monkeypatch.setattr(fence, "COPY_BLOCK", 64)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    gate = Gate(monkeypatch)
    yield gate
    gate.open.set()
    fence.wait()


def model_and_optimizer(kind: Any = torch.optim.AdamW, **more: Any) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    return model, kind(model.parameters(), lr=0.1, **more)


def step(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(4, 8)).square().sum().backward()
    optimizer.step()


def clone(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in module.state_dict().items()}


OPTIMIZERS = [
    pytest.param(torch.optim.AdamW, {}, id="adamw"),
    pytest.param(torch.optim.AdamW, {"foreach": True}, id="foreach"),
    pytest.param(torch.optim.AdamW, {"fused": True}, id="fused"),
    pytest.param(torch.optim.SGD, {"momentum": 0.9}, id="sgd"),
    pytest.param(torch.optim.Adagrad, {}, id="adagrad"),
]


@pytest.mark.parametrize(("kind", "more"), OPTIMIZERS)
def test_an_optimizers_step_waits_for_the_copy(tmp_path: Path, gate: Gate, kind: Any, more: dict[str, Any]) -> None:
    """The step does most of the copy itself: others are held at the gate, with one block each."""
    model, optimizer = model_and_optimizer(kind, **more)
    step(model, optimizer)
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        before = clone(model)
        moments = {name: dict(entry) for name, entry in enumerate(optimizer.state.values())}
        moments = {n: {k: torch.as_tensor(v).clone() for k, v in entry.items()} for n, entry in moments.items()}
        handle = ckpt.save(1, {"model": model, "optimizer": optimizer})
        assert not handle._staged.is_set()
        model(torch.randn(4, 8))  # buffers change without an optimizer; they were copied before save() returned
        gate.arrived.wait()
        step(model, optimizer)
        assert handle._staged.is_set()
        handle.wait()
        assert handle.timings["fence"] > 0
    found = tierckpt.read(tmp_path / "s")
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in before.items())
    states = list(found["optimizer"]["state"].values())
    assert all(torch.equal(torch.as_tensor(states[n][k]), v) for n, entry in moments.items() for k, v in entry.items())
    assert all(not torch.equal(before[name], tensor) for name, tensor in clone(model).items() if "weight" in name)


def test_a_change_without_a_step_is_torn_and_never_saved(tmp_path: Path, gate: Gate) -> None:
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    ckpt = Checkpointer(tmp_path / "s", agent="off")
    handle = ckpt.save(1, {"model": model, "optimizer": optimizer})
    gate.arrived.wait()
    with torch.no_grad():
        next(model.parameters()).add_(1)
    gate.open.set()
    with pytest.raises(TornSnapshotError, match=r"model\.0\.weight: changed while being copied"):
        handle.wait()
    step(model, optimizer)
    ckpt.save(2, {"model": model, "optimizer": optimizer}).wait()
    ckpt.close()
    assert tierckpt.steps(tmp_path / "s") == [2]


@pytest.mark.parametrize("how", ["data", "step count"])
def test_changes_that_bump_no_version_are_found(tmp_path: Path, gate: Gate, how: str) -> None:
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    ckpt = Checkpointer(tmp_path / "s", agent="off")
    handle = ckpt.save(1, {"model": model, "optimizer": optimizer})
    gate.arrived.wait()
    parameter = next(model.parameters())
    if how == "data":
        parameter.data = parameter.data.clone()
    else:
        # As fused kernels do: the memory is written, no counter of torch moves.
        count = optimizer.state[parameter]["step"]
        memory = torch.frombuffer(memoryview(count.numpy()).cast("B"), dtype=torch.float32)
        memory += 1
    gate.open.set()
    with pytest.raises(TornSnapshotError):
        handle.wait()
    ckpt.close()


def _through_data(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.data.add_(1)


def _through_numpy(parameters: list[torch.nn.Parameter]) -> None:
    for parameter in parameters:
        parameter.detach().numpy()[:] += 1


@pytest.mark.parametrize("write", [_through_data, _through_numpy])
@pytest.mark.parametrize("when", ["before", "between", "between, and back", "after"])
def test_writes_that_tell_of_nothing_are_found_in_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, write: Callable[[list[torch.nn.Parameter]], None], when: str
) -> None:
    """Averaged weights that take the place of the model's for an evaluation, say."""
    copies: list[fence.Copy] = []
    monkeypatch.setattr(fence, "_copiers", lambda: type("", (), {"put": lambda self, copy: copies.append(copy)})())
    monkeypatch.setattr(fence, "COPY_BLOCK", 1 << 12)
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    parameters = list(model.parameters())
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        handle = ckpt.save(1, {"model": model, "optimizer": optimizer})
        (copy,) = copies
        before = [parameter.detach().clone() for parameter in parameters]
        if when == "before":
            write(parameters)
        elif when != "after":
            write(parameters[:4])
            for task in [copy._tasks.popleft() for _ in range(len(copy._tasks) // 2)]:
                task()
                copy._left.discard(task)
            if when == "between":
                write(parameters[4:])
            else:
                for parameter, value in zip(parameters, before, strict=True):
                    parameter.data.copy_(value)
        copy.work()
        if when == "after":
            write(parameters)
        copy.confirm()
        with pytest.raises(TornSnapshotError, match=r"model\.\d\.(weight|bias).*: changed while being copied"):
            handle.wait()
    assert not tierckpt.steps(tmp_path / "s")


@pytest.mark.parametrize("saves", [1, 2])
def test_memory_that_a_parameter_lets_go_of_while_it_is_copied_stays(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, saves: int
) -> None:
    """Weights that are swapped in for an evaluation: the old memory would be unmapped under the copy."""
    monkeypatch.setattr(fence, "COPY_BLOCK", 1 << 20)
    model = torch.nn.Linear(1 << 11, 1 << 11, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = {"model": model, "optimizer": optimizer}
    ckpt = Checkpointer(tmp_path / "s", agent="off")
    for step_ in range(1, saves):
        ckpt.save(step_, state)
        ckpt.fence()
        ckpt.wait()
        gate.open.clear()
        gate.arrived.clear()
    handle = ckpt.save(saves, state)
    gate.arrived.wait()
    model.weight.data = torch.zeros(1 << 11, 1 << 11)
    gate.open.set()
    with pytest.raises(TornSnapshotError, match=r"model\.weight"):
        handle.wait()
    ckpt.close()


def test_a_write_that_ends_after_the_copy_is_found(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch counts a version after the kernel: while the thread that saved is inside of one, nothing is confirmed."""
    monkeypatch.setattr(fence, "ASLEEP_SECONDS", 1000.0)  # the lock stands for a kernel
    monkeypatch.setattr(fence, "KERNEL_SECONDS", 1000.0)
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    ckpt = Checkpointer(tmp_path / "s", agent="off")
    kernel, handles = threading.Lock(), []
    kernel.acquire()

    def train() -> None:
        handles.append(ckpt.save(1, {"model": model, "optimizer": optimizer}))
        kernel.acquire()  # as in a long kernel: not one instruction further

    thread = threading.Thread(target=train)
    thread.start()
    gate.arrived.wait()
    while not handles or sys._current_frames()[thread.ident or 0].f_code is not train.__code__:
        continue
    (copy,) = fence._active
    gate.open.set()
    copy._ended.wait()
    assert not copy._confirmed.is_set()
    with torch.no_grad():
        next(model.parameters()).add_(1)
    assert not copy._confirmed.is_set()
    kernel.release()
    thread.join()
    copy._confirmed.wait()
    with pytest.raises(TornSnapshotError):
        handles[0].wait()
    ckpt.close()


def test_a_thread_that_waits_for_others_is_waited_for_no_longer(tmp_path: Path) -> None:
    """It may wait for this very save: a barrier after it, a lock, the next order."""
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        order = threading.Lock()
        order.acquire()
        handles = []

        def train() -> None:
            handles.append(ckpt.save(1, {"model": model, "optimizer": optimizer}))
            order.acquire()

        thread = threading.Thread(target=train)
        thread.start()
        while not handles:
            continue
        handles[0].wait("disk", 30)
        assert thread.is_alive()
        order.release()
        thread.join()


def _barrier(rank: int, root: str) -> list[int]:
    model = torch.nn.Linear(2000, 2000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Checkpointer(root, agent="off", timeout=30) as ckpt:
        for number in range(4):
            handle = ckpt.save(number, {"model": model, "optimizer": optimizer})
            if rank == 0:
                handle.wait("disk")
            torch.distributed.barrier()
    return tierckpt.steps(root)


def test_a_barrier_after_a_save_that_one_rank_waits_for(tmp_path: Path) -> None:
    assert run_ranks(_barrier, 2, str(tmp_path / "s")) == [[0, 1, 2, 3]] * 2


def test_a_child_forked_in_the_middle_of_a_copy_trains_on(tmp_path: Path, gate: Gate) -> None:
    """Whoever held the lock is not in the child."""
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        handle = ckpt.save(1, {"model": model, "optimizer": optimizer})
        gate.arrived.wait()
        with fence._lock:
            code = forked(optimizer.step)
        gate.open.set()
        assert code == 0
        handle.wait()


def test_a_thread_that_has_ended_is_waited_for_no_longer(tmp_path: Path, gate: Gate) -> None:
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        thread = threading.Thread(target=lambda: ckpt.save(1, {"model": model, "optimizer": optimizer}))
        thread.start()
        thread.join()
        (copy,) = fence._active
        gate.open.set()
        assert copy._confirmed.wait(30)
    assert tierckpt.steps(tmp_path / "s") == [1]


class _Interrupt(BaseException):
    """What a signal handler raises."""


def test_an_interrupt_at_the_fence_loses_nothing(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever lends a hand may be called away: what he had begun is done by another, and nobody waits for ever."""
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    before = clone(model)
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        handle = ckpt.save(1, {"model": model, "optimizer": optimizer})
        gate.arrived.wait()
        (copy,) = fence._active
        assert copy._late is not None
        gather, mine, calls = copy._late._copy, threading.current_thread(), []

        def interrupted(lo: int, hi: int) -> None:
            if threading.current_thread() is mine and not calls:
                calls.append(lo)
                raise _Interrupt
            gather(lo, hi)

        copy._tasks = deque(partial(interrupted, *task.args) for task in copy._tasks)  # type: ignore[attr-defined]
        with pytest.raises(_Interrupt):
            optimizer.step()
        gate.open.set()
        handle.wait()
        optimizer.step()
    found = tierckpt.read(tmp_path / "s", keys=["model.*"])["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("place", ["acquire", "gather", "begin", "timings"])
def test_an_interrupt_in_a_save_gives_its_slot_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    """Ctrl-C that the caller catches, again and again: the slots are few."""
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    where: dict[str, tuple[Any, str]] = {
        "acquire": (Slot, "__init__"),
        "gather": (Stager, "copy_behind_fence"),
        "begin": (fence.Copy, "start"),
        "timings": (Staging, "stage"),
    }
    with Checkpointer(tmp_path / "s", agent="off", timeout=20) as ckpt:
        ckpt.save(0, state).wait()
        owner, name = where[place]
        original = getattr(owner, name)

        def interrupted(*args: Any, **more: Any) -> Any:
            original(*args, **more)
            raise _Interrupt

        for number in range(1, 6):
            with monkeypatch.context() as patched:
                patched.setattr(owner, name, interrupted)
                with pytest.raises(_Interrupt):
                    ckpt.save(number, state)
            ckpt.wait()
        before = clone(model)
        handle = ckpt.save(6, state)
        step(model, optimizer)
        handle.wait()
    found = tierckpt.read(tmp_path / "s", keys=["model.*"])["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())


def test_fence_waits_for_what_no_optimizer_does(tmp_path: Path, gate: Gate) -> None:
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        before = clone(model)
        handle = ckpt.save(1, {"model": model, "optimizer": optimizer})
        gate.arrived.wait()
        ckpt.fence()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        handle.wait()
    found = tierckpt.read(tmp_path / "s", keys=["model.*"])["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())


def test_a_load_into_the_same_state_waits(tmp_path: Path, gate: Gate) -> None:
    """A load writes through addresses: it bumps no version, so it must not come in between."""
    model, optimizer = model_and_optimizer()
    tierckpt.save({"model": model}, tmp_path / "old", step=1)
    step(model, optimizer)
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        before = clone(model)
        handle = ckpt.save(1, {"model": model, "optimizer": optimizer})
        gate.arrived.wait()
        tierckpt.load({"model": model}, tmp_path / "old")
        handle.wait()
    found = tierckpt.read(tmp_path / "s", keys=["model.*"])["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())


def test_what_no_optimizer_owns_is_copied_before_save_returns(tmp_path: Path, gate: Gate) -> None:
    """EMA weights, buffers, and everything of async_save."""
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    ema = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        handle = ckpt.save(1, {"model": model, "optimizer": optimizer, "ema": ema})
        kept = {name: tensor.clone() for name, tensor in ema.items()}
        for tensor in ema.values():
            tensor.zero_()
        gate.open.set()
        handle.wait()
    found = tierckpt.read(tmp_path / "s", keys=["ema.*"])["ema"]
    assert all(torch.equal(found[name], tensor) for name, tensor in kept.items())
    gate.open.clear()
    before = clone(model)
    handle = tierckpt.async_save({"model": model, "optimizer": optimizer}, tmp_path / "t", step=1)
    assert handle._staged.is_set()
    with torch.no_grad():
        next(model.parameters()).zero_()
    handle.wait()
    found = tierckpt.read(tmp_path / "t", keys=["model.*"])["model"]
    assert all(torch.equal(found[name], tensor) for name, tensor in before.items())


def test_tensors_made_anew_at_each_step_are_found_anew(tmp_path: Path) -> None:
    """A plan is kept, addresses are not: the bytes of the first step must never come again."""
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        for number in range(4):
            ckpt.save(number, {"w": torch.full((1000,), float(number)), "n": number}).wait()
            found = tierckpt.read(tmp_path / "s")
            assert found["n"] == number
            assert (found["w"] == number).all()


def test_an_optimizer_that_may_be_replayed_is_copied_at_once(tmp_path: Path, gate: Gate) -> None:
    """A step replayed from a CUDA graph runs no hooks, bumps no versions."""
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    optimizer.param_groups[0]["capturable"] = True
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        handle = ckpt.save(1, {"model": model, "optimizer": optimizer})
        assert handle._staged.is_set()
        optimizer.param_groups[0]["capturable"] = False
        handle = ckpt.save(2, {"model": model, "optimizer": optimizer})
        assert not handle._staged.is_set()
        optimizer.param_groups[0]["capturable"] = True
        gate.open.set()
        handle.wait()
        gate.open.clear()
        assert ckpt.save(3, {"model": model, "optimizer": optimizer})._staged.is_set()


def test_a_forked_child_does_not_wait_for_its_parents_copies(tmp_path: Path, gate: Gate) -> None:
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        ckpt.save(1, {"model": model, "optimizer": optimizer})
        code = forked(fence.wait)
        gate.open.set()
        assert code == 0


def test_nothing_is_left_of_a_copy(tmp_path: Path) -> None:
    model, optimizer = model_and_optimizer()
    step(model, optimizer)
    with Checkpointer(tmp_path / "s", agent="off", tiers=[tierckpt.Disk(keep=1)]) as ckpt:
        for number in range(20):
            ckpt.save(number, {"model": model, "optimizer": optimizer})
            step(model, optimizer)
    assert fence._active == []
