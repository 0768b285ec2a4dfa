"""Saves of state on a GPU: in which order to training it is copied, and what becomes of errors.

Streams are held at gates that the test opens, so that every order is one that the test chose.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.cuda.conftest import install
from tests.cuda.driver import Adds, Gpu
from tests.harness import run_ranks
from tierckpt import Checkpointer, Handle, TornSnapshotError
from tierckpt.errors import DeviceError, StateError
from tierckpt.snapshot import device as device_module
from tierckpt.snapshot import fence
from tierckpt.snapshot.stager import Stager


def model_of(*sizes: int) -> torch.nn.Module:
    torch.manual_seed(0)
    return torch.nn.ParameterDict({f"p{i}": torch.nn.Parameter(torch.rand(size)) for i, size in enumerate(sizes)})


def training(gpu: Gpu, *sizes: int) -> tuple[torch.nn.Module, Adds, dict[str, Any]]:
    model = model_of(*(sizes or (3, 1000, 200_000)))
    optimizer = Adds(gpu, list(model.parameters()))
    return model, optimizer, {"model": model, "optimizer": optimizer}


def clone(module: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in module.named_parameters()}


def same(root: Path, step: int, expected: dict[str, torch.Tensor]) -> bool:
    found = tierckpt.read(root, step=step)["model"]
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def save_under_way(ckpt: Checkpointer, gpu: Gpu, state: dict[str, Any]) -> Handle:
    """A save whose copies wait until the gate of their stream opens; the slot was made, and pinned, before."""
    ckpt.save(0, state).wait()
    gpu.open_gate(gpu.copies, False)
    return ckpt.save(1, state)


@pytest.mark.parametrize("agent", ["off", "auto"])
def test_what_training_has_enqueued_comes_first_and_nobody_waits(tmp_path: Path, gpu: Gpu, agent: str) -> None:
    model, optimizer, state = training(gpu)
    with Checkpointer(tmp_path / "s", agent=agent) as ckpt:
        for step in range(4):
            gpu.open_gate(gpu.compute, False)
            expected = {name: tensor + 1 for name, tensor in clone(model).items()}
            optimizer.step()
            handle = ckpt.save(step, state)  # returns although nothing of this has run
            assert not handle._staged.is_set()
            optimizer.step()
            gpu.open_gate(gpu.compute)
            handle.wait()
            gpu.settle(gpu.compute)
            assert same(tmp_path / "s", step, expected)


def test_an_optimizers_kernels_wait_for_the_copy_but_its_step_does_not(tmp_path: Path, gpu: Gpu) -> None:
    model, optimizer, state = training(gpu)
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        before = clone(model)
        handle = save_under_way(ckpt, gpu, state)
        optimizer.step()
        assert gpu.busy(gpu.compute)
        assert all(torch.equal(tensor, before[name]) for name, tensor in clone(model).items())
        assert not handle._staged.is_set()
        gpu.open_gate(gpu.copies)
        handle.wait()
        gpu.settle(gpu.compute)
        assert same(tmp_path / "s", 1, before)
        assert all(torch.equal(tensor, before[name] + 1) for name, tensor in clone(model).items())


def test_what_no_optimizer_owns_is_copied_before_later_work(tmp_path: Path, gpu: Gpu) -> None:
    """Buffers, averages: no hook tells of their change, so the stream of training itself waits."""
    average = torch.rand(5000)
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        before = average.clone()
        handle = save_under_way(ckpt, gpu, {"average": average})
        gpu.add(average, 3.0)
        assert gpu.busy(gpu.compute)
        gpu.open_gate(gpu.copies)
        handle.wait()
        gpu.settle(gpu.compute)
    assert torch.equal(tierckpt.read(tmp_path / "s", step=1)["average"], before)
    assert torch.equal(average, before + 3)


def test_a_change_without_a_step_is_torn(tmp_path: Path, gpu: Gpu) -> None:
    model, optimizer, state = training(gpu)
    ckpt = Checkpointer(tmp_path / "s", agent="off")
    handle = save_under_way(ckpt, gpu, state)
    with torch.no_grad():
        next(model.parameters()).add_(1)
    gpu.open_gate(gpu.copies)
    with pytest.raises(TornSnapshotError, match="p0"):
        handle.wait()
    optimizer.step()
    ckpt.save(2, state).wait()
    ckpt.close()
    assert tierckpt.steps(tmp_path / "s") == [0, 2]


def test_fence_orders_what_no_optimizer_does(tmp_path: Path, gpu: Gpu) -> None:
    model, _, state = training(gpu)
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        before = clone(model)
        handle = save_under_way(ckpt, gpu, state)
        ckpt.fence()
        for parameter in model.parameters():
            gpu.add(parameter.detach(), 7.0)
        gpu.open_gate(gpu.copies)
        handle.wait()
        assert same(tmp_path / "s", 1, before)


@pytest.mark.parametrize("delay", [0, 300])
def test_a_save_at_every_step_beside_a_racing_optimizer(tmp_path: Path, gpu: Gpu, delay: int) -> None:
    """Thousands of small tensors and some large ones, strided ones too, copied while the next step is under way."""
    torch.manual_seed(1)
    sizes = [7] * 300 + [40_000] * 3
    model = model_of(*sizes)
    model["t"] = torch.nn.Parameter(torch.rand(30, 50).t())  # type: ignore[operator]
    optimizer = Adds(gpu, [p for p in model.parameters() if p.is_contiguous()])
    state = {"model": model, "optimizer": optimizer, "mean": torch.zeros(3), "n": 0}
    gpu.delay(delay)
    with Checkpointer(tmp_path / "s", agent="off", tiers=tierckpt.Disk()) as ckpt:
        for step in range(8):
            state["n"] = step
            gpu.add(state["mean"], 1.0)  # type: ignore[arg-type]
            ckpt.save(step, state)
            optimizer.step()
        ckpt.wait()
    first = clone(model_of(*sizes))
    assert tierckpt.steps(tmp_path / "s") == list(range(8))
    for step in range(8):
        found = tierckpt.read(tmp_path / "s", step=step)
        assert found["n"] == step and (found["mean"] == step + 1).all()
        assert torch.equal(found["model"]["t"], model["t"])  # type: ignore[index]
        for name, tensor in first.items():
            expected = tensor
            for _ in range(step):
                expected = expected + 1
            assert torch.equal(found["model"][name], expected), (step, name)


CALLS = [
    "cuEventRecord",
    "cuStreamWaitEvent",
    "cuMemcpyDtoHAsync",
    "cuLaunchKernel",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer",
    "cuEventSynchronize",
    "cuStreamIsCapturing",
    "cuEventCreate",
]


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_call_that_fails_is_an_error_of_that_save_only(tmp_path: Path, gpu: Gpu, call: str, after: int) -> None:
    model, optimizer, state = training(gpu)
    ckpt = Checkpointer(tmp_path / "s", agent="off")
    expected = {}
    for step in range(1 if after else 0):  # else it fails in the first save
        ckpt.save(step, state).wait()
        expected[step] = clone(model)
    gpu.fail(call, after)
    handle = ckpt.save(10, state)
    optimizer.step()  # is never stopped
    handle._ended.wait(30)
    gpu.fail(call, code=0)
    error = handle.error
    gpu.settle(gpu.compute)
    if error is not None:
        assert isinstance(error, DeviceError), error
        assert "CUDA_ERROR_INVALID_VALUE" in str(error) and call in str(error)
        handle._told = True
    optimizer.step()
    gpu.settle(gpu.compute)
    expected[11] = clone(model)
    ckpt.save(11, state).wait()
    ckpt.close()
    assert tierckpt.steps(tmp_path / "s") == [*range(1 if after else 0), *([10] if error is None else []), 11]
    for step, values in expected.items():
        assert same(tmp_path / "s", step, values)


def test_memory_is_given_back_when_nothing_writes_to_it_whatever_the_driver_refused(
    tmp_path: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The copies are under way when the mark behind them is refused."""
    _, _, state = training(gpu)
    ckpt = Checkpointer(tmp_path / "s", agent="off")
    ckpt.save(0, state).wait()
    gpu.open_gate(gpu.copies, False)
    wrote: list[bool] = []
    settle, conclude = device_module.Jobs.settle, fence.Copy._conclude

    def settles(jobs: device_module.Jobs) -> None:
        gpu.open_gate(gpu.copies)
        settle(jobs)

    def concludes(copy: fence.Copy) -> None:
        wrote.append(gpu.busy(gpu.copies))
        conclude(copy)

    monkeypatch.setattr(device_module.Jobs, "settle", settles)
    monkeypatch.setattr(fence.Copy, "_conclude", concludes)
    gpu.fail("cuEventRecord", 1)  # the first one is for what training has enqueued
    handle = ckpt.save(1, state)
    handle._ended.wait(30)
    gpu.fail("cuEventRecord", code=0)
    assert isinstance(handle.error, DeviceError)
    with pytest.warns(RuntimeWarning, match="cuEventRecord"):
        ckpt.close()
    assert wrote and not any(wrote)


def test_a_gpu_that_has_failed_stops_no_step_and_no_end(tmp_path: Path, gpu: Gpu) -> None:
    _, optimizer, state = training(gpu)
    ckpt = Checkpointer(tmp_path / "s", agent="off")
    ckpt.save(0, state).wait()
    handle = ckpt.save(1, state)
    gpu.break_down()
    optimizer.step()
    handle._ended.wait(30)
    later = ckpt.save(2, state)
    optimizer.step()
    with pytest.warns(RuntimeWarning, match="CUDA_ERROR_LAUNCH_FAILED"):
        ckpt.close()
    assert isinstance(later.error, DeviceError)
    assert handle.error is None or isinstance(handle.error, DeviceError)
    gpu.break_down(0)


def test_memory_that_cannot_be_pinned_makes_torch_copy(tmp_path: Path, gpu: Gpu) -> None:
    model, optimizer, state = training(gpu)
    ckpt = Checkpointer(tmp_path / "s", agent="off")
    gpu.fail("cuMemHostRegister")
    with pytest.raises(DeviceError, match=r"cannot be pinned.*torch copies"):
        ckpt.save(0, state).wait()
    for step in range(1, 4):
        before = clone(model)
        ckpt.save(step, state).wait()
        optimizer.step()
        gpu.settle(gpu.compute)
        assert same(tmp_path / "s", step, before)
    ckpt.close()
    gpu.fail("cuMemHostRegister", code=0)


def test_where_there_are_no_kernels_only_what_lies_together_is_copied_beside(tmp_path: Path, gpu: Gpu) -> None:
    gpu.fail("cuModuleGetFunction")
    model, optimizer, state = training(gpu)
    strided = torch.rand(20, 30).t()
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        for step in range(3):
            before, lain = clone(model), strided.clone()
            handle = ckpt.save(step, {**state, "strided": strided})
            optimizer.step()
            gpu.add(strided.t(), 1.0)
            handle.wait()
            assert same(tmp_path / "s", step, before)
            assert torch.equal(tierckpt.read(tmp_path / "s", step=step)["strided"], lain)
            gpu.settle(gpu.compute)
    gpu.fail("cuModuleGetFunction", code=0)


def test_a_graph_that_is_captured_at_the_fence_is_not_disturbed(tmp_path: Path, gpu: Gpu) -> None:
    """What is captured must not wait for an event from outside: the fence waits itself."""
    model, optimizer, state = training(gpu)
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        before = clone(model)
        handle = save_under_way(ckpt, gpu, state)
        gpu.capture(True)
        passed = threading.Event()

        def train() -> None:
            optimizer.step()
            passed.set()

        thread = threading.Thread(target=train)
        thread.start()
        (copy,) = tierckpt.snapshot.fence._active
        while copy._met is None:
            continue
        assert not passed.is_set()
        gpu.open_gate(gpu.copies)
        thread.join(30)
        gpu.capture(False)
        handle.wait()
        assert same(tmp_path / "s", 1, before)


def test_a_save_inside_of_a_capture_is_refused(tmp_path: Path, gpu: Gpu) -> None:
    _, _, state = training(gpu)
    ckpt = Checkpointer(tmp_path / "s", agent="off")
    gpu.capture(True)
    with pytest.raises(DeviceError, match="captured"):
        ckpt.save(0, state).wait()
    gpu.capture(False)
    ckpt.save(1, state).wait()
    ckpt.close()


@pytest.mark.parametrize("sync", [True, False])
def test_saves_without_an_object(tmp_path: Path, gpu: Gpu, sync: bool) -> None:
    """``async_save`` has copied everything when it returns, ``save`` has it on the disk."""
    model, _, state = training(gpu)
    for step in range(3):
        before = clone(model)
        if sync:
            tierckpt.save(state, tmp_path / "s", step=step)
        else:
            handle = tierckpt.async_save(state, tmp_path / "s", step=step)
            assert handle._staged.is_set() and not gpu.busy(gpu.copies)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1
        if not sync:
            handle.wait()
        assert same(tmp_path / "s", step, before)


class _Interrupt(BaseException):
    """What a signal handler raises."""


def test_an_interrupt_leaves_nothing_under_way(tmp_path: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot goes to the next save: no copy may still be writing to it."""
    model, optimizer, state = training(gpu)
    with Checkpointer(tmp_path / "s", agent="off", timeout=20) as ckpt:
        ckpt.save(0, state).wait()
        state["more"] = torch.rand(1000)
        main = threading.current_thread()
        for number, (owner, name) in enumerate(
            [(device_module.Jobs, "gather"), (device_module.Jobs, "hold"), (Stager, "copy_behind_fence")] * 2, 1
        ):
            original = getattr(owner, name)

            def interrupted(*args: Any, original: Any = original, **more: Any) -> Any:
                found = original(*args, **more)
                if threading.current_thread() is main:
                    raise _Interrupt
                return found

            with monkeypatch.context() as patched:
                patched.setattr(owner, name, interrupted)
                with pytest.raises(_Interrupt):
                    ckpt.save(number, state)
                assert not gpu.busy(gpu.copies)
            with pytest.warns(RuntimeWarning, match="interrupted"):
                ckpt.wait()
                ckpt.save(100 + number, state).wait()
        before = clone(model)
        handle = ckpt.save(50, state)
        optimizer.step()
        handle.wait()
    assert same(tmp_path / "s", 50, before)


def test_nothing_pinned_grows(tmp_path: Path, gpu: Gpu) -> None:
    _, optimizer, state = training(gpu)
    counts, before = [], gpu.pinned
    with Checkpointer(tmp_path / "s", agent="off", tiers=tierckpt.Disk(keep=1, grace=0)) as ckpt:
        for step in range(12):
            ckpt.save(step, state).wait()
            optimizer.step()
            counts.append(gpu.pinned)
    assert counts[4] == counts[-1], counts
    assert counts[-1] - before <= 8


def test_from_the_second_save_on_tensors_are_found_again(tmp_path: Path, gpu: Gpu) -> None:
    _, optimizer, state = training(gpu)
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        for step in range(3):
            ckpt.save(step, state).wait()
            optimizer.step()
        assert ckpt._planner._places is not None
        assert ckpt._planner._split is not None
        assert {part.place for part in ckpt._planner._split.parts} == {-1, 0}


def _replicas(rank: int, root: str) -> list[list[str]]:
    gpu = Gpu()
    with pytest.MonkeyPatch.context() as patched:
        install(patched, gpu)
        state = {"same": torch.arange(50.0), "large": torch.zeros(1 << 15), "own": torch.arange(10.0)}
        told = []
        with Checkpointer(root, agent="off", on_disagreement="refuse") as ckpt:
            for step, value in enumerate((0.0, 1.0, -1.0)):
                if rank == 1:
                    gpu.add(state["own"], value)
                try:
                    ckpt.save(step, state).wait()
                    told.append([])
                except StateError as error:
                    told.append([line.strip() for line in str(error).splitlines() if "hold different" in line])
        gpu.check()
    return told


def test_replicas_on_gpus_are_compared(tmp_path: Path) -> None:
    for told in run_ranks(_replicas, 2, str(tmp_path / "s")):
        assert told == [[], ["own: ranks 0 | 1 hold different replicas; saves take that of rank 0"], []]


def _settles(rank: int, root: str) -> bool:
    """State that appears on one rank only is cut out of what was staged: that is memory of the host."""
    gpu = Gpu()
    with pytest.MonkeyPatch.context() as patched:
        install(patched, gpu)
        state: dict[str, Any] = {"w": torch.arange(60_000.0), "n": 1}
        with Checkpointer(root, agent="off") as ckpt:
            ckpt.save(0, state).wait()
            if rank == 1:
                state["more"] = torch.full((3000,), 2.0)
            for step in (1, 2):
                ckpt.save(step, state).wait()
        gpu.check()
    return all((tierckpt.read(root, step=step)["more"] == 2).all() for step in (1, 2))


def test_a_layout_that_changes_on_one_rank(tmp_path: Path) -> None:
    assert run_ranks(_settles, 2, str(tmp_path / "s")) == [True, True]


def test_what_was_enqueued_before_a_call_failed_is_waited_for(
    tmp_path: Path, gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The slot goes to the next save: no copy may still be writing to it."""
    _, _, state = training(gpu)
    original = device_module.Jobs.gather

    def gather(self: Any, *args: Any) -> None:
        if threading.current_thread() is not threading.main_thread():
            gpu.settle(gpu.copies)  # what `save` has enqueued is done; what comes now takes its time
            gpu.open_gate(gpu.copies, False)
        original(self, *args)

    ckpt = Checkpointer(tmp_path / "s", agent="off")
    ckpt.save(0, state).wait()
    monkeypatch.setattr(device_module.Jobs, "gather", gather)
    gpu.fail("cuLaunchKernel")
    handle = ckpt.save(1, state)
    assert not handle._ended.wait(0.3)  # the copy is under way until the gate opens
    gpu.open_gate(gpu.copies)
    gpu.fail("cuLaunchKernel", code=0)
    with pytest.raises(DeviceError, match="cuLaunchKernel"):
        handle.wait()
    ckpt.close()
