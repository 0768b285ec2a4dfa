"""What people train with, saved at every iteration while training goes on: a checkpoint has the bits of the moment of its save.

The background copy stands still at a gate until training comes to the fence, or, where it never does, until the iteration
is over. So whatever changes the state without waiting is copied too late, and seen.
"""

from __future__ import annotations

import copy
import functools
import threading
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.optim.swa_utils import SWALR, AveragedModel, get_ema_multi_avg_fn

import tierckpt
from tests import lacks
from tests.harness import run_ranks
from tierckpt import Checkpointer
from tierckpt.snapshot import fence
from tierckpt.state import stepping


class Gate:
    """Threads that copy in the background wait here until it is open, or until another thread comes to the fence."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self._copy = fence.Late._copy

    def __enter__(self) -> Gate:
        gate, copy_ = self, self._copy

        def gated(self_: fence.Late, lo: int, hi: int) -> None:
            if threading.current_thread().name == "tierckpt-copy":
                gate.open.wait()
            else:
                gate.open.set()
            copy_(self_, lo, hi)

        fence.Late._copy = gated  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self.open.set()
        fence.wait()
        fence.Late._copy = self._copy  # type: ignore[method-assign]


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fence, "COPY_BLOCK", 64)
    monkeypatch.setattr(stepping, "_compiled", False)


@dataclass
class Run:
    """A training script: what it saves, and one iteration of it."""

    state: dict[str, Any]
    advance: Callable[[int], object]


def kept(state: Any) -> Any:
    """A copy of all that ``state`` holds, as the objects themselves would have it saved."""
    if hasattr(state, "state_dict"):
        state = state.state_dict()
    if isinstance(state, dict):
        return {key: kept(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [kept(value) for value in state]
    if isinstance(state, torch.Tensor):
        state = state.detach()
        return (state.to_local() if hasattr(state, "to_local") else state).clone()
    return copy.deepcopy(state)


def same(one: Any, other: Any) -> bool:
    """Bit by bit, with types."""
    if isinstance(one, torch.Tensor):
        return (
            isinstance(other, torch.Tensor)
            and (one.dtype, one.shape) == (other.dtype, other.shape)
            and one.contiguous().flatten().view(torch.uint8).tolist()
            == other.contiguous().flatten().view(torch.uint8).tolist()
        )
    if isinstance(one, dict):
        return type(other) is dict and one.keys() == other.keys() and all(same(v, other[k]) for k, v in one.items())
    if isinstance(one, list):
        return type(other) is list and len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


ITERATIONS = 5


def check(make: Callable[[], Run], root: Path, *, overlaps: bool | None, agent: str = "off") -> None:
    """Train and save, then load every step into a new script's state.

    Args:
        overlaps: whether a part is copied while training goes on; None: nobody cares.
    """
    torch.manual_seed(0)
    run = make()
    run.advance(0)
    wanted = {}
    with Gate() as gate, Checkpointer(root, agent=agent) as ckpt:
        for step in range(1, ITERATIONS + 1):
            gate.open.clear()
            wanted[step] = kept(run.state)
            handle = ckpt.save(step, run.state)
            if overlaps is not None:
                assert handle._staged.is_set() != overlaps
            run.advance(step)
            gate.open.set()
            handle.wait()
    assert not same(wanted[1], wanted[2])
    for step, right in wanted.items():
        fresh = make()
        tierckpt.load(fresh.state, root, step=step)
        assert same(kept(fresh.state), right), step


def net(**more: Any) -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 2), **more)


def loss(model: nn.Module) -> torch.Tensor:
    return model(torch.randn(4, 6)).square().mean()  # type: ignore[no-any-return]


def trains(model: nn.Module, optimizer: torch.optim.Optimizer, *more: Callable[[], object]) -> Callable[[int], None]:
    """The plain iteration, and what follows it."""

    def advance(step: int) -> None:
        loss(model).backward()
        optimizer.step()
        optimizer.zero_grad()
        for one in more:
            one()

    return advance


def plain(kind: Any = torch.optim.AdamW, **more: Any) -> Run:
    model = net()
    optimizer = kind(model.parameters(), lr=0.05, **more)
    return Run({"model": model, "optimizer": optimizer}, trains(model, optimizer))


# Optimizers

OPTIMIZERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "for loop": (torch.optim.Adam, {"foreach": False}),
    "foreach": (torch.optim.AdamW, {"foreach": True}),
    "fused": (torch.optim.AdamW, {"fused": True, "amsgrad": True}),
    "fused SGD": (torch.optim.SGD, {"fused": True, "momentum": 0.9}),
    "fused Adagrad": (torch.optim.Adagrad, {"fused": True}),
    "tensor lr": (torch.optim.RMSprop, {"foreach": True, "centered": True, "momentum": 0.5}),
    "NAdam": (torch.optim.NAdam, {}),
    "Adafactor": (torch.optim.Adafactor, {}),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers(tmp_path: Path, name: str) -> None:
    kind, more = OPTIMIZERS[name]
    check(lambda: plain(kind, **more), tmp_path / "s", overlaps=True)


def test_with_the_agent(tmp_path: Path) -> None:
    check(lambda: plain(fused=True), tmp_path / "s", overlaps=True, agent="auto")


def test_lbfgs_steps_with_a_closure(tmp_path: Path) -> None:
    def make() -> Run:
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3, history_size=4)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            found = loss(model)
            found.backward()
            return found

        return Run({"model": model, "optimizer": optimizer}, lambda step: optimizer.step(closure))  # type: ignore[arg-type]

    check(make, tmp_path / "s", overlaps=None)


def test_sparse_adam(tmp_path: Path) -> None:
    def make() -> Run:
        table, head = nn.Embedding(20, 6, sparse=True), nn.Linear(6, 2)
        sparse, dense = torch.optim.SparseAdam(table.parameters()), torch.optim.SGD(head.parameters(), lr=0.1)

        def advance(step: int) -> None:
            head(table(torch.tensor([step, step + 3, 1]))).square().sum().backward()
            for optimizer in (sparse, dense):
                optimizer.step()
                optimizer.zero_grad()

        return Run({"table": table, "head": head, "sparse": sparse, "dense": dense}, advance)

    check(make, tmp_path / "s", overlaps=True)


def test_one_optimizer_for_each_parameter_that_steps_in_the_backward_pass(tmp_path: Path) -> None:
    def make() -> Run:
        model = net()
        optimizers = {name: torch.optim.AdamW([(name, p)], lr=0.1) for name, p in model.named_parameters()}
        for name, parameter in model.named_parameters():

            def step(p: torch.Tensor, optimizer: torch.optim.Optimizer = optimizers[name]) -> None:
                optimizer.step()
                optimizer.zero_grad()

            parameter.register_post_accumulate_grad_hook(step)
        return Run({"model": model, "optimizers": optimizers}, lambda step: loss(model).backward())

    check(make, tmp_path / "s", overlaps=True)


# Steps that are no longer torch's own: what the hook does not see must not be copied late


class Old(torch.optim.Optimizer):
    """As optimizers were written once: ``.data`` tells nobody, and there is no count of steps."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.change()

    def change(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    entry = self.state[parameter]
                    entry.setdefault("sum", torch.zeros_like(parameter)).data.add_(parameter.grad)
                    parameter.data.add_(entry["sum"].data, alpha=-group["lr"])


class Younger(Old):
    """A class whose step is another's."""


class Wrapping(Old):
    """Looks as if hooks were called first, since everything about the inner function is copied."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr)


def _wrapping(step: Any) -> Any:
    @functools.wraps(step)
    def wrapped(self: Any, *args: Any, **more: Any) -> Any:
        self.change()
        return step(self, *args, **more)

    return wrapped


Old(nn.Linear(1, 1).parameters(), lr=0.1)  # torch marks the step of a class when the first of its kind is made
Wrapping.step = _wrapping(Old.step)  # type: ignore[method-assign]
assert Wrapping.step.hooked  # type: ignore[attr-defined]


def test_classes_of_ones_own(tmp_path: Path) -> None:
    """Classes are given their hooks when their first instance is made, also when ours is there already."""
    fence.install()
    check(lambda: plain(Old), tmp_path / "a", overlaps=True)
    check(lambda: plain(Younger), tmp_path / "b", overlaps=True)

    class Later(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            for group in self.param_groups:
                for parameter in group["params"]:
                    parameter.data.mul_(0.9)
            return super().step(closure)

    check(lambda: plain(Later, momentum=0.9), tmp_path / "c", overlaps=True)


def _own_function(optimizer: Any) -> None:
    optimizer.step = optimizer.change


def _wrapper(optimizer: Any) -> None:
    optimizer.step = types.MethodType(_wrapping(type(optimizer).step), optimizer)


def _wrapper_then_scheduler(optimizer: Any) -> None:
    _wrapper(optimizer)
    LambdaLR(optimizer, lambda step: 0.9**step)


def _scheduler_then_wrapper(optimizer: Any) -> None:
    LambdaLR(optimizer, lambda step: 0.9**step)
    inner, change = optimizer.step, optimizer.change

    @functools.wraps(inner)
    def step(*args: Any) -> Any:
        change()
        return inner(*args)

    optimizer.step = step


@pytest.mark.parametrize("replace", [_own_function, _wrapper, _wrapper_then_scheduler, _scheduler_then_wrapper])
@pytest.mark.filterwarnings("ignore:.*lr_scheduler")
def test_a_step_that_was_replaced_is_not_waited_for(tmp_path: Path, replace: Callable[[Any], None]) -> None:
    def make() -> Run:
        run = plain(Old)
        replace(run.state["optimizer"])
        return run

    check(make, tmp_path / "s", overlaps=False)


def test_a_class_whose_step_only_looks_hooked(tmp_path: Path) -> None:
    check(lambda: plain(Wrapping), tmp_path / "s", overlaps=False)


def test_a_step_that_is_replaced_between_two_saves(tmp_path: Path) -> None:
    """What is known of a state from an earlier save holds no longer."""
    run = plain(Old)
    optimizer = run.state["optimizer"]
    run.advance(0)
    with Gate() as gate, Checkpointer(tmp_path / "s", agent="off") as ckpt:
        for step, overlaps in enumerate([True, True, False, False, True], 1):
            gate.open.clear()
            if step == 3:
                optimizer.step = optimizer.change
            elif step == 5:
                del optimizer.step
                LambdaLR(optimizer, lambda step: 0.5)
            handle = ckpt.save(step, {**run.state, "new key": 1} if step == 5 else run.state)
            assert handle._staged.is_set() != overlaps
            run.advance(step)
            gate.open.set()


@pytest.mark.parametrize("where", ["closure", "hook", "global hook"])
def test_a_save_in_the_middle_of_a_step(tmp_path: Path, where: str) -> None:
    """The fence lies behind it already."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, fused=True)
    advance = trains(model, optimizer)
    state = {"model": model, "optimizer": optimizer}
    advance(0)
    wanted: dict[int, Any] = {}

    def save(*_: object) -> None:
        step = len(wanted) + 1
        wanted[step] = kept(state)
        gate.open.clear()
        assert ckpt.save(step, state)._staged.is_set()

    with Gate() as gate, Checkpointer(tmp_path / "s", agent="off") as ckpt:
        if where == "closure":
            for _ in range(3):
                loss(model).backward()
                optimizer.step(lambda: (save(), 0.0)[1])
        else:
            register: Any = optimizer.register_step_pre_hook if where == "hook" else register_optimizer_step_pre_hook
            fence.install()
            handle = register(save)
            for step in range(3):
                advance(step)
            handle.remove()
    for step, right in wanted.items():
        fresh = plain(torch.optim.SGD, momentum=0.9, fused=True).state
        tierckpt.load(fresh, tmp_path / "s", step=step)
        assert same(kept(fresh), right)
    assert len(wanted) == 3


# Around the optimizer


@pytest.mark.parametrize("name", ["OneCycleLR", "LambdaLR", "SWALR"])
def test_schedulers(tmp_path: Path, name: str) -> None:
    """They put a function of theirs before the step, which counts."""
    kinds: dict[str, Callable[[Any], Any]] = {
        "OneCycleLR": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=50),
        "LambdaLR": lambda o: LambdaLR(o, lambda step: 0.9**step),
        "SWALR": lambda o: SWALR(o, swa_lr=0.01),
    }

    def make() -> Run:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        scheduler = kinds[name](optimizer)
        state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
        return Run(state, trains(model, optimizer, scheduler.step))

    check(make, tmp_path / "s", overlaps=True)


def test_gradients_that_are_accumulated(tmp_path: Path) -> None:
    """Saves between the passes of one step."""

    def make() -> Run:
        run = plain()
        model, optimizer = run.state["model"], run.state["optimizer"]

        def advance(step: int) -> None:
            (loss(model) / 2).backward()
            if step % 2 == 0:
                optimizer.step()
                optimizer.zero_grad()

        return Run(run.state, advance)

    check(make, tmp_path / "s", overlaps=True)


def test_averaged_models_and_buffers(tmp_path: Path) -> None:
    def make() -> Run:
        run = plain()
        model = run.state["model"]
        ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
        swa = AveragedModel(model)
        advance = run.advance

        def averages(step: int) -> None:
            loss(model)  # moves the statistics of BatchNorm before any fence
            advance(step)
            ema.update_parameters(model)
            swa.update_parameters(model)

        return Run({**run.state, "ema": ema, "swa": swa}, averages)

    check(make, tmp_path / "s", overlaps=True)


@pytest.mark.parametrize("fused", [False, True], ids=["", "fused"])
def test_grad_scaler(tmp_path: Path, fused: bool) -> None:
    """It leaves steps out, or tells a fused one to."""

    def make() -> Run:
        run = plain(fused=fused)
        model, optimizer = run.state["model"], run.state["optimizer"]
        scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=2)

        def advance(step: int) -> None:
            scaler.scale(loss(model) * (float("inf") if step == 3 else 1.0)).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()

        return Run({**run.state, "scaler": scaler}, advance)

    check(make, tmp_path / "s", overlaps=True)


def test_tensors_made_in_inference_mode(tmp_path: Path) -> None:
    """They count no versions: nothing tells that they change, so they are never copied late."""

    def make() -> Run:
        run = plain()
        with torch.inference_mode():
            cache = torch.zeros(40)
        advance = run.advance

        def infers(step: int) -> None:
            with torch.inference_mode():
                cache.add_(1)
            advance(step)

        return Run({**run.state, "cache": cache}, infers)

    check(make, tmp_path / "s", overlaps=True)


# The compiler


def compiled_model(backend: str) -> Run:
    model = torch.compile(net(), backend=backend)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    return Run({"model": model, "optimizer": optimizer}, trains(model, optimizer))


def test_compiled_modules(tmp_path: Path) -> None:
    check(lambda: compiled_model("eager"), tmp_path / "s", overlaps=True)


@pytest.mark.acceptance
@pytest.mark.limit(300)
def test_modules_compiled_to_machine_code(tmp_path: Path) -> None:
    check(lambda: compiled_model("inductor"), tmp_path / "s", overlaps=True)


def compiled_step(kind: Any, more: dict[str, Any], **how: Any) -> Run:
    torch._dynamo.reset()
    model = net()
    optimizer = kind(model.parameters(), lr=0.05, **more)
    step = torch.compile(optimizer.step, **how)

    def advance(_: int) -> None:
        loss(model).backward()
        step()
        optimizer.zero_grad()

    return Run({"model": model, "optimizer": optimizer}, advance)


COMPILED = [
    pytest.param(torch.optim.AdamW, {"foreach": True}, {}, id="foreach"),
    pytest.param(torch.optim.AdamW, {"foreach": False}, {}, id="for loop"),
    pytest.param(torch.optim.SGD, {"momentum": 0.9}, {}, id="sgd"),
    pytest.param(Old, {}, {}, id="own"),
    # Those of torch allow it only where they are differentiable. A graph that must not break cannot wait in its middle.
    pytest.param(Old, {}, {"fullgraph": True}, id="own in one graph"),
]


@pytest.mark.parametrize(("kind", "more", "how"), COMPILED)
@pytest.mark.filterwarnings("error:.*tierckpt")
def test_compiled_optimizers(tmp_path: Path, kind: Any, more: dict[str, Any], how: dict[str, Any]) -> None:
    """No hook runs in what the compiler makes of a step: it waits when it is traced, and then nothing is copied late any more."""
    check(lambda: compiled_step(kind, more, backend="eager", **how), tmp_path / "s", overlaps=None)
    assert stepping._compiled


def test_a_step_that_is_compiled_between_two_saves(tmp_path: Path) -> None:
    """Whether our hook was there already or not, what is traced waits for what is being copied."""
    run = plain(Old)
    optimizer = run.state["optimizer"]
    with Gate() as gate, Checkpointer(tmp_path / "s", agent="off") as ckpt:
        for step, overlaps in enumerate([True, True, False], 1):
            gate.open.clear()
            handle = ckpt.save(step, run.state)
            assert handle._staged.is_set() != overlaps
            if step == 2:
                torch._dynamo.reset()
                loss(run.state["model"]).backward()
                torch.compile(optimizer.step, backend="eager", fullgraph=True)()
                assert handle._staged.is_set()
            else:
                run.advance(step)
            gate.open.set()
            handle.wait()


def test_an_iteration_that_is_compiled_as_a_whole(tmp_path: Path) -> None:
    def make() -> Run:
        torch._dynamo.reset()
        run = plain()
        return Run(run.state, torch.compile(run.advance, backend="eager"))

    # Whether the compiler takes the step too, or leaves it as it is at a break, is its own affair.
    check(make, tmp_path / "s", overlaps=None)


@pytest.mark.acceptance
@pytest.mark.limit(300)
def test_optimizers_compiled_to_machine_code(tmp_path: Path) -> None:
    check(lambda: compiled_step(torch.optim.AdamW, {}, backend="inductor"), tmp_path / "s", overlaps=None)


# Sharded, with parameters that lie in the memory of the host


def _offloaded(rank: int, root: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

    def make() -> Run:
        torch.manual_seed(1)
        model = nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 3))
        mesh, policy = init_device_mesh("cpu", (2,)), CPUOffloadPolicy(pin_memory=False)
        for layer in (model[0], model[2]):
            fully_shard(layer, mesh=mesh, offload_policy=policy)
        fully_shard(model, mesh=mesh, offload_policy=policy)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        return Run({"model": model, "optimizer": optimizer}, trains(model, optimizer))

    fence.COPY_BLOCK = 64
    check(make, Path(root), overlaps=True)


@lacks.fsdp2_trains_on_cpu
def test_fully_sharded_with_offload_to_the_cpu(tmp_path: Path) -> None:
    run_ranks(_offloaded, 2, str(tmp_path / "s"))


@pytest.fixture(autouse=True)
def _nothing_left() -> Iterator[None]:
    yield
    assert fence._active == []
