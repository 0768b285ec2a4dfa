"""A module saves what its ``state_dict()`` has, without the cost, and takes it back wherever it is wrapped."""

from __future__ import annotations

import socket
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import spectral_norm

from tests import lacks
from tests.state.kept import Kept
from tierckpt.errors import StateError
from tierckpt.state.tree import flatten


def model() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Sequential(nn.Linear(3, 2)))


def randomised(module: nn.Module) -> nn.Module:
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.normal_()
            else:
                tensor.add_(7)
    return module


def assert_same_state(a: nn.Module, b: nn.Module) -> None:
    left, right = a.state_dict(), b.state_dict()
    assert list(left) == list(right)
    for key in left:
        assert torch.equal(left[key], right[key]), key


class WithExtraState(nn.Linear):
    calls: int = 0

    def get_extra_state(self) -> Any:
        return {"seen": self.calls, "scale": torch.tensor([float(self.calls)])}

    def set_extra_state(self, state: Any) -> None:
        self.calls = state["seen"]
        self.scale = state["scale"].clone()


class Renames(nn.Linear):
    """Its state dict is not its parameters: a hook stores the weight transposed."""

    def __init__(self) -> None:
        super().__init__(2, 3)
        self.register_state_dict_post_hook(self._turn)
        self.register_load_state_dict_pre_hook(self._turn_back)

    @staticmethod
    def _turn(module: nn.Module, state: Any, prefix: str, metadata: Any) -> None:
        state[prefix + "turned"] = state.pop(prefix + "weight").detach().t().clone()

    @staticmethod
    def _turn_back(module: nn.Module, state: Any, prefix: str, *args: Any) -> None:
        state[prefix + "weight"] = state.pop(prefix + "turned").t()


@pytest.mark.parametrize(
    "make",
    [
        model,
        lambda: nn.Sequential(nn.Linear(1, 1), WithExtraState(2, 2), nn.Linear(1, 1)),
        lambda: nn.Sequential(nn.Linear(1, 1), Renames()),
        lambda: spectral_norm(nn.Linear(3, 3)),
        lambda: nn.utils.parametrizations.weight_norm(nn.Linear(3, 3)),
        lambda: nn.MultiheadAttention(4, 2),
        lambda: nn.LSTM(2, 3, num_layers=2),
    ],
)
def test_names_are_those_of_the_state_dict_and_all_come_back(make: Any) -> None:
    saved = randomised(make())
    for part in saved.modules():
        if isinstance(part, WithExtraState):
            part.calls = 4
    flat = flatten({"m": saved})
    assert {name.split("/")[1] for name in (*flat.tensors, *flat.values)} == set(saved.state_dict())
    kept = Kept.of({"m": saved})
    fresh = make()
    kept.load({"m": fresh})
    left, right = saved.state_dict(), fresh.state_dict()
    for key in left:
        if isinstance(left[key], torch.Tensor):
            assert torch.equal(left[key], right[key]), key
        else:
            assert left[key]["seen"] == right[key]["seen"] == 4
    # and from and to the equivalent dict
    as_dict = {"m": make().state_dict()}
    kept.load(as_dict)
    Kept.of(as_dict).load({"m": fresh})


def test_plain_modules_are_filled_in_place_without_load_state_dict(monkeypatch: pytest.MonkeyPatch) -> None:
    fresh = model()
    kept = Kept.of({"m": randomised(model())})
    weight = fresh[0].weight
    monkeypatch.setattr(nn.Module, "state_dict", None)
    target = kept.target({"m": fresh})
    assert target.tensors["m/0.weight"] is weight
    assert "m/1.num_batches_tracked" in target.tensors
    assert not target.problems


def test_only_the_part_that_asks_for_it_takes_its_state_dict() -> None:
    whole = nn.Sequential(nn.Linear(1, 1), WithExtraState(2, 2))
    flat = flatten(whole)
    assert flat.tensors["0.weight"] is whole[0].weight
    assert flat.tensors["1.weight"] is whole[1].weight
    assert "1._extra_state/seen" in flat.values
    assert "1._extra_state/scale" in flat.tensors


def test_a_whole_module_may_override_state_dict() -> None:
    class Own(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros(2))
            self.loaded: Any = None

        def state_dict(self) -> Any:  # type: ignore[override]
            return {"mine": self.w.detach(), "version": 3}

        def load_state_dict(self, state: Any) -> None:  # type: ignore[override]
            self.loaded = state

    saved, fresh = Own(), Own()
    nn.init.ones_(saved.w)
    Kept.of({"m": saved}).load({"m": fresh})
    assert fresh.loaded["version"] == 3
    assert torch.equal(fresh.w, torch.ones(2))


def test_non_persistent_buffers_are_left_out() -> None:
    module = nn.Module()
    module.register_buffer("kept", torch.ones(1))
    module.register_buffer("dropped", torch.ones(1), persistent=False)
    module.register_buffer("none", None)
    module.register_parameter("nothing", None)
    assert list(flatten(module).tensors) == ["kept"]


def test_tied_parameters_have_both_names() -> None:
    tied = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    tied[1].weight = tied[0].weight
    flat = flatten({"m": tied})
    assert flat.tensors["m/0.weight"] is flat.tensors["m/1.weight"]
    untied = nn.Sequential(nn.Embedding(4, 2), nn.Linear(2, 4, bias=False))
    kept = Kept.of({"m": tied})
    kept.load({"m": untied})
    assert torch.equal(untied[0].weight, untied[1].weight)
    assert torch.equal(untied[0].weight, tied[0].weight)
    before = tied[0].weight
    kept.load({"m": tied})
    assert tied[0].weight is tied[1].weight is before


def test_a_module_without_tensors_is_one_value() -> None:
    kept = Kept.of({"m": nn.ReLU(), "t": torch.ones(1)})
    assert kept.values["m"] == ["OrderedDict", []]
    kept.load({"m": nn.ReLU(), "t": torch.zeros(1)})
    kept.load({"m": OrderedDict(), "t": torch.zeros(1)})
    assert kept.problems({"m": nn.Linear(1, 1), "t": torch.zeros(1)})


def test_a_module_with_only_extra_state() -> None:
    class Counter(nn.Module):
        n = 0

        def get_extra_state(self) -> Any:
            return self.n

        def set_extra_state(self, state: Any) -> None:
            self.n = state

    saved, fresh = Counter(), Counter()
    saved.n = 5
    Kept.of({"m": saved, "t": torch.ones(1)}).load({"m": fresh, "t": torch.ones(1)})
    assert fresh.n == 5
    assert "missing" in Kept.of({"m": nn.ReLU()}).problems({"m": Counter()})[0]


def test_keys_leave_a_custom_part_alone() -> None:
    saved = nn.Sequential(nn.Linear(1, 1), WithExtraState(2, 2))
    saved[1].calls = 9
    fresh = nn.Sequential(nn.Linear(1, 1), WithExtraState(2, 2))
    before = fresh[1].weight.clone()
    Kept.of({"m": saved}).load({"m": fresh}, keys=["m.0.*"])
    assert torch.equal(fresh[0].weight, saved[0].weight)
    assert fresh[1].calls == 0
    assert torch.equal(fresh[1].weight, before)


def test_the_state_may_be_the_module_itself() -> None:
    saved, fresh = randomised(model()), model()
    Kept.of(saved).load(fresh)
    assert_same_state(saved, fresh)


def test_missing_and_unexpected_names_are_listed() -> None:
    kept = Kept.of({"m": nn.Linear(2, 3)})
    assert kept.problems({"m": nn.Sequential(nn.Linear(2, 3))}) == [
        "m.0.weight: missing in the checkpoint",
        "m.0.bias: missing in the checkpoint",
        "m.bias: in the checkpoint, not in the state",
        "m.weight: in the checkpoint, not in the state",
    ]


def test_compiled_and_checkpointed_modules_have_the_names_of_what_they_wrap() -> None:
    plain = randomised(model())
    for wrap in (torch.compile, checkpoint_wrapper):
        inner = model()
        inner[2] = wrap(inner[2])
        wrapped = wrap(inner)
        Kept.of({"m": plain}).load({"m": wrapped})
        assert list(flatten({"m": wrapped}).tensors) == list(flatten({"m": plain}).tensors)
        fresh = model()
        Kept.of({"m": wrapped}).load({"m": fresh})
        assert_same_state(fresh, plain)


def test_a_custom_part_of_a_compiled_module() -> None:
    saved, fresh = WithExtraState(2, 2), WithExtraState(2, 2)
    saved.calls = 3
    holder = nn.Sequential(torch.compile(fresh))
    Kept.of({"m": nn.Sequential(saved)}).load({"m": holder})
    assert fresh.calls == 3
    assert torch.equal(fresh.weight, saved.weight)


def test_hooks_that_only_run_after_a_load_run() -> None:
    fresh = nn.Linear(1, 1)
    ran: list[int] = []
    fresh.register_load_state_dict_post_hook(lambda module, keys: ran.append(1))
    Kept.of({"m": nn.Linear(1, 1)}).load({"m": fresh})
    assert ran == [1]


def test_what_load_state_dict_raises_names_the_module() -> None:
    class Refuses(nn.Linear):
        def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
            raise RuntimeError("not today")

    with pytest.raises(StateError, match=r"m: load_state_dict of Refuses failed: RuntimeError: not today"):
        Kept.of({"m": nn.Linear(1, 1)}).load({"m": Refuses(1, 1)})


def test_lazy_parameters_are_refused() -> None:
    with pytest.raises(StateError, match=r"m\.weight: the parameter of a lazy module"):
        flatten({"m": nn.LazyLinear(2)})


@pytest.fixture
def one_process() -> Iterator[None]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ddp_has_the_names_of_what_it_wraps(one_process: None) -> None:
    saved = randomised(model())
    fresh = nn.parallel.DistributedDataParallel(model())
    optimizer = torch.optim.SGD(fresh.parameters(), lr=0.1, momentum=0.9)
    kept = Kept.of({"m": saved})
    kept.load({"m": fresh})
    assert_same_state(fresh.module, saved)
    assert flatten({"m": fresh, "o": optimizer}).values["o/param_groups/" + _only_group(fresh, optimizer)][
        "params"
    ] == [name for name, _ in saved.named_parameters()]


def _only_group(module: nn.Module, optimizer: Any) -> str:
    [name] = [n for n in flatten({"m": module, "o": optimizer}).values if n.startswith("o/param_groups/")]
    return name.rsplit("/", 1)[1]


@lacks.fsdp2_trains_on_cpu
def test_fully_sharded_modules_are_walked_and_brought_into_their_sharded_state(
    one_process: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    def make() -> nn.Module:
        module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        mesh = dist.init_device_mesh("cpu", (1,))
        fully_shard(module[0], mesh=mesh)
        return fully_shard(module, mesh=mesh, reshard_after_forward=False)

    saved = make()
    optimizer = torch.optim.AdamW(saved.parameters())
    saved(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    with torch.no_grad():
        saved(torch.ones(2, 4))  # leaves the root unsharded
    monkeypatch.setattr(nn.Module, "state_dict", None)  # nothing may take the slow way
    flat = flatten({"m": saved, "o": optimizer})
    assert all(isinstance(flat.tensors[f"m/{i}.{n}"], DTensor) for i in (0, 1) for n in ("weight", "bias"))
    fresh = make()
    new = torch.optim.AdamW(fresh.parameters())
    kept = Kept.of({"m": saved, "o": optimizer})
    kept.load({"m": fresh, "o": new})
    moment = new.state[fresh[0].weight]["exp_avg"]
    assert isinstance(moment, DTensor)
    assert moment.placements == fresh[0].weight.placements
    assert torch.equal(moment.full_tensor(), optimizer.state[saved[0].weight]["exp_avg"].full_tensor())
    assert torch.equal(fresh[1].weight.full_tensor(), saved[1].weight.full_tensor())
    fresh(torch.ones(2, 4)).sum().backward()
    new.step()
