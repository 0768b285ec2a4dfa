"""Optimizer state lands on the right parameters, whole, with the types it had; nothing steps, nothing is invented."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, MultiStepLR, OneCycleLR, SequentialLR

from tests.state.kept import Kept
from tierckpt.errors import StateError
from tierckpt.state.tree import flatten


def model(sizes: Sequence[int] = (2, 3, 2)) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(a, b) for a, b in pairwise(sizes)))


def train(module: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        optimizer.zero_grad()
        module(torch.full((4, 2), float(step + 1))).square().sum().backward()
        optimizer.step()


def grouped(module: nn.Sequential, **keywords: Any) -> list[dict[str, Any]]:
    return [{"params": list(module[0].parameters()), **keywords}, {"params": list(module[1].parameters())}]


def assert_same_optimizer(a: torch.optim.Optimizer, b: torch.optim.Optimizer) -> None:
    """Groups and state agree in values and types, parameter by parameter."""
    for left, right in zip(a.param_groups, b.param_groups, strict=True):
        for key in left.keys() - {"params"}:
            assert type(left[key]) is type(right[key]), key
            assert left[key] == right[key], key
        for p, q in zip(left["params"], right["params"], strict=True):
            one, other = a.state.get(p) or {}, b.state.get(q) or {}
            assert list(one) == list(other)
            for key, value in one.items():
                assert type(value) is type(other[key]), key
                if isinstance(value, torch.Tensor):
                    assert value.dtype == other[key].dtype
                    assert torch.equal(value, other[key]), key


OPTIMIZERS: list[Callable[[Any], torch.optim.Optimizer]] = [
    lambda p: torch.optim.AdamW(p, lr=1e-2, betas=(0.8, 0.99)),
    lambda p: torch.optim.Adam(p, lr=1e-2, amsgrad=True),
    lambda p: torch.optim.AdamW(p, lr=torch.tensor(1e-2), foreach=False),
    lambda p: torch.optim.SGD(p, lr=1e-2),
    lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    lambda p: torch.optim.Adagrad(p, lr=1e-2),
    lambda p: torch.optim.ASGD(p, lr=1e-2),
    lambda p: torch.optim.Rprop(p, lr=1e-2),
    lambda p: torch.optim.Adafactor(p, lr=1e-2),
    lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
]


@pytest.mark.parametrize("make", OPTIMIZERS)
def test_a_fresh_optimizer_continues_bit_for_bit(make: Callable[[Any], torch.optim.Optimizer]) -> None:
    module = model()
    optimizer = make(module.parameters())
    train(module, optimizer)
    kept = Kept.of({"m": module, "o": optimizer})
    for used in (False, True):
        fresh = model()
        new = make(fresh.parameters())
        if used:
            train(fresh, new, 3)
        kept.load({"m": fresh, "o": new})
        assert_same_optimizer(optimizer, new)
        again = model()
        again.load_state_dict(module.state_dict())
        reference = make(again.parameters())
        reference.load_state_dict(deepcopy(optimizer.state_dict()))
        train(fresh, new, 1)
        train(again, reference, 1)
        for p, q in zip(fresh.parameters(), again.parameters(), strict=True):
            assert torch.equal(p, q)


def test_lbfgs_keeps_its_history() -> None:
    module = model()
    optimizer = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=4)
    data = torch.ones(4, 2)

    def closure() -> Any:
        optimizer.zero_grad()
        loss = module(data).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)
    fresh = model()
    new = torch.optim.LBFGS(fresh.parameters())
    Kept.of({"m": module, "o": optimizer}).load({"m": fresh, "o": new})
    old, got = optimizer.state[module[0].weight], new.state[fresh[0].weight]
    assert list(old) == list(got)
    assert len(got["old_dirs"]) == len(old["old_dirs"]) > 0
    assert all(torch.equal(a, b) for a, b in zip(old["old_dirs"], got["old_dirs"], strict=True))
    assert got["func_evals"] == old["func_evals"]
    assert new.param_groups[0]["lr"] == 0.1


def test_nothing_steps_and_the_optimizer_is_as_before_when_saved() -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters())
    before = [p.clone() for p in module.parameters()]
    flat = flatten({"m": module, "o": optimizer})
    assert not optimizer.state
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))
    assert not any(name.startswith("o/state/") for name in flat.tensors)


@pytest.mark.parametrize("lr", [1.25e-4, torch.tensor(1.25e-4)])
@pytest.mark.parametrize("default", [1e-3, torch.tensor(1e-3)])
def test_hyperparameters_come_back_with_their_types(lr: Any, default: Any) -> None:
    def make(module: nn.Sequential, lr: Any, **keywords: Any) -> torch.optim.AdamW:
        return torch.optim.AdamW(grouped(module, **keywords), lr=lr, foreach=False)

    module = model()
    optimizer = make(module, lr, weight_decay=0.1, betas=(0.8, 0.99))
    optimizer.param_groups[1]["extra"] = [1, (2,), None]
    train(module, optimizer)
    fresh = model()
    new = make(fresh, default)
    Kept.of({"m": module, "o": optimizer}).load({"m": fresh, "o": new})
    assert_same_optimizer(optimizer, new)
    assert new.param_groups[0]["betas"] == (0.8, 0.99)


def test_a_frozen_parameter_keeps_its_state_and_a_stateless_one_gets_none() -> None:
    def make() -> tuple[nn.ModuleList, torch.optim.AdamW]:
        layers = nn.ModuleList(nn.Linear(1, 1) for _ in range(3))
        return layers, torch.optim.AdamW(layers.parameters())

    layers, optimizer = make()
    for _ in range(2):
        (layers[0](torch.ones(1)) + layers[1](torch.ones(1))).backward()
        optimizer.step()
    layers[1].requires_grad_(False)
    fresh, new = make()
    fresh[1].requires_grad_(False)
    kept = Kept.of({"m": layers, "o": optimizer})
    kept.load({"m": fresh, "o": new})
    assert_same_optimizer(optimizer, new)
    assert not new.state.get(fresh[2].weight)
    # what the checkpoint does not have goes away
    new.state[fresh[2].weight] = {"step": torch.tensor(5.0), "exp_avg": torch.ones(1, 1)}
    kept.load({"m": fresh, "o": new})
    assert not new.state.get(fresh[2].weight)


def trained(names: Sequence[str] = ("p0", "p1", "p2")) -> tuple[nn.Module, torch.optim.AdamW]:
    module = nn.Module()
    for name in names:
        module.register_parameter(name, nn.Parameter(torch.ones(2)))
    optimizer = torch.optim.AdamW(module.parameters())
    for name in names[:2]:
        getattr(module, name).grad = torch.ones(2)
    optimizer.step()
    return module, optimizer


def test_state_that_is_partly_there_is_refused_by_name() -> None:
    module, optimizer = trained()
    del optimizer.state[module.p1]["exp_avg_sq"]
    kept = Kept.of({"m": module, "o": optimizer})
    fresh = nn.Module()
    for name in ("p0", "p1", "p2"):
        fresh.register_parameter(name, nn.Parameter(torch.zeros(2)))
    for state in (
        {"m": fresh, "o": torch.optim.AdamW(fresh.parameters())},
        dict(zip("mo", trained(), strict=True)),
    ):
        for strict in (True, False):
            [problem] = kept.problems(state, strict=strict)
            assert problem.startswith("o.state.p1.exp_avg_sq: missing in the checkpoint")


def test_other_optimizers_may_keep_less_for_some_parameters() -> None:
    class Mixed(torch.optim.SGD):
        pass

    module, _ = trained()
    optimizer = Mixed(module.parameters(), lr=0.1)
    optimizer.state[module.p0] = {"a": torch.ones(1), "b": torch.ones(1)}
    optimizer.state[module.p1] = {"a": torch.ones(1)}
    fresh, _ = trained()
    new = Mixed(fresh.parameters(), lr=0.1)
    Kept.of({"m": module, "o": optimizer}).load({"m": fresh, "o": new})
    assert_same_optimizer(optimizer, new)


def test_moments_of_another_shape_are_refused() -> None:
    module, optimizer = trained()
    kept = Kept.of({"o": optimizer, "m": module})
    state = dict(zip("mo", trained(), strict=True))
    state["o"].state[state["m"].p0]["exp_avg"] = torch.zeros(3)
    assert kept.problems(state) == ["o.state.p0.exp_avg: saved shape (2,), the state has (3,)"]


def test_parameters_match_by_name_not_by_position() -> None:
    module, optimizer = trained(("a", "b"))
    optimizer.state[module.a]["exp_avg"].fill_(1)
    optimizer.state[module.b]["exp_avg"].fill_(2)
    fresh, new = trained(("b", "a"))
    assert "group 0" not in str(Kept.of({"m": module, "o": optimizer}).problems({"m": fresh, "o": new}))
    Kept.of({"m": module, "o": optimizer}).load({"m": fresh, "o": new})
    assert new.state[fresh.a]["exp_avg"][0] == 1
    assert new.state[fresh.b]["exp_avg"][0] == 2


def test_groups_match_by_their_parameters() -> None:
    module, fresh = model(), model()
    optimizer = torch.optim.SGD(grouped(module, lr=0.5), lr=0.1)
    new = torch.optim.SGD(list(reversed(grouped(fresh))), lr=9.0)
    Kept.of({"m": module, "o": optimizer}).load({"m": fresh, "o": new})
    assert [group["lr"] for group in new.param_groups] == [0.1, 0.5]


def test_groups_that_are_cut_otherwise_are_refused() -> None:
    module = model()
    two = Kept.of({"m": module, "o": torch.optim.SGD(grouped(module), lr=0.1)})
    one = Kept.of({"m": module, "o": torch.optim.SGD(module.parameters(), lr=0.1)})
    fresh = model()
    assert two.problems({"m": fresh, "o": torch.optim.SGD(fresh.parameters(), lr=0.1)}) == [
        "o: group 0: the checkpoint has its parameters in several groups"
    ]
    problems = one.problems({"m": fresh, "o": torch.optim.SGD(grouped(fresh), lr=0.1)})
    assert problems == [
        f"o: group {i}: the checkpoint has its parameters in one group with those of group {1 - i}" for i in (0, 1)
    ]
    first = Kept.of({"m": module, "o": torch.optim.SGD(module[0].parameters(), lr=0.1)})
    assert first.problems({"m": fresh, "o": torch.optim.SGD(fresh.parameters(), lr=0.1)}) == [
        "o: group 0: parameters in no group of the checkpoint: 1.weight, 1.bias"
    ]


class Stage(nn.Module):
    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(1, 1))


def stages(lrs: Sequence[float]) -> list[dict[str, Any]]:
    found = []
    for index, lr in enumerate(lrs):
        module = Stage(f"l{index}")
        optimizer = torch.optim.AdamW(module.parameters(), lr=lr)
        for parameter in module.parameters():
            parameter.grad = torch.full_like(parameter, index + 1.0)
        optimizer.step()
        found.append({"m": module, "o": optimizer})
    return found


def merged(groups: int, lr: float = 9.0) -> dict[str, Any]:
    module = Stage("l0", "l1")
    parts = [{"params": list(part.parameters())} for part in module.children()]
    optimizer = torch.optim.AdamW(parts if groups == 2 else module.parameters(), lr=lr)
    return {"m": module, "o": optimizer}


def assert_moments(state: dict[str, Any], saved: list[dict[str, Any]]) -> None:
    for index, stage in enumerate(saved):
        old, new = getattr(stage["m"], f"l{index}"), getattr(state["m"], f"l{index}")
        assert torch.equal(stage["o"].state[old.weight]["exp_avg"], state["o"].state[new.weight]["exp_avg"]), index
        assert torch.equal(old.weight, new.weight)


def test_stages_do_not_share_names_and_load_into_one_process() -> None:
    saved = stages([0.1, 0.2])
    flats = [flatten(stage) for stage in saved]
    assert not (flats[0].tensors.keys() & flats[1].tensors.keys())
    assert not (flats[0].values.keys() & flats[1].values.keys())
    kept = Kept.of_ranks(*saved)
    state = merged(2)
    kept.load(state)
    assert [group["lr"] for group in state["o"].param_groups] == [0.1, 0.2]
    assert_moments(state, saved)
    assert kept.problems(merged(1)) == ["o: group 0: the groups it is to be merged from differ in lr"]


def test_stages_with_equal_hyperparameters_merge_into_one_group_and_part_again() -> None:
    saved = stages([0.1, 0.1])
    state = merged(1)
    Kept.of_ranks(*saved).load(state)
    assert state["o"].param_groups[0]["lr"] == 0.1
    assert_moments(state, saved)
    one = Kept.of(state)
    for index, stage in enumerate(stages([7.0, 7.0])):
        target = one.load(stage, strict=False)
        assert stage["o"].param_groups[0]["lr"] == 0.1
        assert {name.split("/")[1].split(".")[0] for name in target.unexpected if name.startswith("m/")} == {
            f"l{1 - index}"
        }
        assert not target.untouched
        name = f"l{index}"
        parameter = getattr(stage["m"], name).weight
        expected = saved[index]["o"].state[getattr(saved[index]["m"], name).weight]["exp_avg"]
        assert torch.equal(stage["o"].state[parameter]["exp_avg"], expected)


def test_each_stage_takes_its_own_back() -> None:
    saved = stages([0.1, 0.2])
    kept = Kept.of_ranks(*saved)
    for index, state in enumerate(stages([5.0, 5.0])):
        target = kept.target(state)
        assert not target.problems
        assert len(target.values) == 1  # the blob of the other stage is not needed
        kept.load(state, strict=False)
        assert state["o"].param_groups[0]["lr"] == [0.1, 0.2][index]


def test_several_modules_put_their_path_before_the_names() -> None:
    parts = [nn.Linear(1, 1), nn.Linear(1, 1)]
    optimizer = torch.optim.SGD([p for part in parts for p in part.parameters()], lr=0.1)
    [group] = [v for n, v in flatten({"m": parts, "o": optimizer}).values.items() if n.startswith("o/")]
    assert group["params"] == ["m.0.weight", "m.0.bias", "m.1.weight", "m.1.bias"]


def test_without_a_module_the_optimizers_own_names_count() -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.named_parameters())
    train(module, optimizer)
    kept = Kept.of({"o": optimizer})
    assert "o/state/0.weight/exp_avg" in kept.tensors
    fresh = model()
    new = torch.optim.AdamW(fresh.named_parameters())
    kept.load({"o": new})
    assert_same_optimizer(optimizer, new)
    kept.load({"o": torch.optim.AdamW(fresh.parameters()), "m": fresh}, keys=["o.*"])


def test_without_names_positions_count_and_must_fit() -> None:
    module = model()
    optimizer = torch.optim.AdamW(module.parameters())
    train(module, optimizer)
    kept = Kept.of({"o": optimizer})
    assert "o/state/0/exp_avg" in kept.tensors
    fresh = model()
    new = torch.optim.AdamW(fresh.parameters())
    kept.load({"o": new})
    assert_same_optimizer(optimizer, new)
    other = model((2, 4, 2))
    assert "saved by position, with shapes" in kept.problems({"o": torch.optim.AdamW(other.parameters())})[0]
    named = {"o": torch.optim.AdamW(fresh.parameters()), "m": fresh}
    assert "saved by position, the state has them by name" in kept.problems(named)[0]
    assert "saved by name" in Kept.of(named).problems({"o": new})[0]


def test_parameters_outside_the_modules_of_the_state_are_refused() -> None:
    module = nn.Linear(1, 1)
    loose = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD([{"params": [module.weight]}, {"params": [module.bias, loose]}], lr=0.1)
    with pytest.raises(StateError, match=r"o: .*in no module of the state: group 1, parameter 1"):
        flatten({"m": module, "o": optimizer})


def test_an_optimizer_may_stand_before_its_module_and_in_lists() -> None:
    module = model()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    flat = flatten([{"o": [optimizer]}, ({"m": module},)])
    [name] = [name for name in flat.values if "param_groups" in name]
    assert flat.values[name]["params"][0] == "0.weight"


def test_a_missing_optimizer_is_missing() -> None:
    module = model()
    state = {"m": model(), "o": torch.optim.SGD(module.parameters(), lr=0.1)}
    assert Kept.of({"m": module}).problems(state) == ["o: missing in the checkpoint, the state has an optimizer there"]
    assert Kept.of({"m": module}).load(state, strict=False).untouched == ["o"]
    assert "saved as something else" in Kept.of({"m": module, "o": 4}).problems(state)[0]


def test_keys_can_leave_the_optimizer_or_its_groups_alone() -> None:
    module, optimizer = trained()
    optimizer.param_groups[0]["lr"] = 0.5
    kept = Kept.of({"m": module, "o": optimizer})
    fresh, new = trained()
    new.state[fresh.p0]["exp_avg"].zero_()
    kept.load({"m": fresh, "o": new}, keys=["m.*"])
    assert new.param_groups[0]["lr"] == 1e-3
    kept.load({"m": fresh, "o": new}, keys=["o.state.*"])
    assert new.param_groups[0]["lr"] == 1e-3
    assert new.state[fresh.p0]["exp_avg"].any()
    kept.load({"m": fresh, "o": new}, keys=["o.param_groups.*"])
    assert new.param_groups[0]["lr"] == 0.5


def test_storages_of_an_optimizer_are_its_parameters_and_state() -> None:
    module = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1))
    optimizer = torch.optim.SGD(module.parameters(), lr=torch.tensor(0.1), momentum=0.9)
    module(torch.ones(2, 1)).sum().backward()
    optimizer.step()
    flat = flatten({"m": module, "o": optimizer, "t": torch.ones(1)})
    left_out = flat.tensors.keys() - flat.optimizer_storages
    assert {name for name in left_out if not name.startswith("o/param_groups")} == {
        "m/1.running_mean",
        "m/1.running_var",
        "m/1.num_batches_tracked",
        "t",
    }
    assert flatten({"m": module}).optimizer_storages == set()


def test_steps_follow_the_saved_hyperparameters() -> None:
    module, optimizer = trained()
    optimizer.param_groups[0]["capturable"] = True
    optimizer.state[module.p0]["step"] = torch.tensor(3.0, dtype=torch.float64)
    optimizer.state[module.p1]["step"] = torch.tensor(3.0, dtype=torch.float64)
    fresh = nn.Module()
    for name in ("p0", "p1", "p2"):
        fresh.register_parameter(name, nn.Parameter(torch.zeros(2)))
    new = torch.optim.AdamW(fresh.parameters())
    Kept.of({"m": module, "o": optimizer}).load({"m": fresh, "o": new})
    assert new.state[fresh.p0]["step"].dtype == torch.float32


def test_moments_keep_their_dtype_whatever_that_of_the_parameter() -> None:
    module = nn.Linear(2, 2).to(torch.bfloat16)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    optimizer.state[module.weight]["m"] = torch.full((2, 2), 1 / 3)
    fresh = nn.Linear(2, 2).to(torch.bfloat16)
    new = torch.optim.SGD(fresh.parameters(), lr=0.1)
    Kept.of({"m": module, "o": optimizer}).load({"m": fresh, "o": new})
    assert torch.equal(new.state[fresh.weight]["m"], torch.full((2, 2), 1 / 3))


def test_an_optimizer_with_a_state_dict_of_its_own_takes_it() -> None:
    class Own(torch.optim.SGD):
        secret = 0

        def state_dict(self) -> Any:
            return {**super().state_dict(), "secret": self.secret}

        def load_state_dict(self, state: Any) -> None:
            self.secret = state["secret"]
            super().load_state_dict({k: v for k, v in state.items() if k != "secret"})

    module = model()
    optimizer = Own(module.parameters(), lr=0.5, momentum=0.9)
    optimizer.secret = 4
    train(module, optimizer)
    fresh = model()
    new = Own(fresh.parameters(), lr=0.1, momentum=0.9)
    Kept.of({"m": module, "o": optimizer}).load({"m": fresh, "o": new})
    assert new.secret == 4
    assert_same_optimizer(optimizer, new)


@pytest.mark.parametrize(
    "make",
    [
        lambda o: MultiStepLR(o, [25, 5, 25], gamma=0.5),
        lambda o: OneCycleLR(o, max_lr=0.1, total_steps=50),
        lambda o: LambdaLR(o, lambda step: 0.9**step),
        lambda o: SequentialLR(o, [MultiStepLR(o, [3]), LambdaLR(o, lambda s: 0.5)], [4]),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_schedulers_continue(make: Callable[[Any], Any]) -> None:
    def state() -> dict[str, Any]:
        module = model()
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        return {"m": module, "o": optimizer, "s": make(optimizer)}

    saved, fresh = state(), state()
    for _ in range(3):
        saved["o"].step()
        saved["s"].step()
    kept = Kept.of(saved)
    for _ in range(3):  # and saving it again changes nothing
        kept.load(fresh)
        assert Kept.of(fresh).values == kept.values
    if isinstance(saved["s"], MultiStepLR):
        assert fresh["s"].milestones == saved["s"].milestones
        assert type(fresh["s"].milestones) is type(saved["s"].milestones)
        assert list(fresh["s"].milestones) == [25, 5]
    for _ in range(6):
        for one in (saved, fresh):
            one["o"].step()
            one["s"].step()
        assert saved["s"].get_last_lr() == fresh["s"].get_last_lr()


def test_a_grad_scaler_and_other_objects_take_their_state_dict() -> None:
    saved = torch.amp.GradScaler("cpu", init_scale=4.0)
    fresh = torch.amp.GradScaler("cpu")
    Kept.of({"s": saved}).load({"s": fresh})
    assert fresh.state_dict() == saved.state_dict()
    with pytest.raises(StateError, match="s: load_state_dict of GradScaler failed"):
        Kept.of({"s": torch.amp.GradScaler("cpu", enabled=False)}).load({"s": fresh})


class Average:
    """Lazily created tensors, as an EMA or a data loader has them."""

    def __init__(self, **shadow: torch.Tensor) -> None:
        self.shadow = shadow
        self.loads = 0

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "decay": 0.9}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]
        self.loads += 1


def test_an_object_gets_what_was_saved_whatever_it_holds_now() -> None:
    kept = Kept.of({"a": Average(w=torch.ones(3), buffer=torch.arange(5)), "t": torch.ones(1)})
    live = torch.zeros(3)
    for fresh in (Average(), Average(w=live, buffer=torch.arange(2))):
        kept.load({"a": fresh, "t": torch.zeros(1)})
        assert torch.equal(fresh.shadow["w"], torch.ones(3))
        assert torch.equal(fresh.shadow["buffer"], torch.arange(5))
        assert fresh.loads == 1
    assert fresh.shadow["w"] is live
    assert "a.shadow.more: missing" in kept.problems({"a": Average(more=live), "t": torch.zeros(1)})[0]
    untouched = Average()
    kept.load({"a": untouched, "t": torch.zeros(1)}, keys=["t"])
    assert untouched.loads == 0
