"""Protects loads into other names: tensors and values land where the mapping says and nowhere else, fused and split ones
in any layout, with the optimizer's state of their parameters; and what a mapping cannot mean is refused with all that is
wrong.
"""

from __future__ import annotations

import re
from itertools import pairwise, product
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

import tierckpt
from tests.harness import run_ranks
from tierckpt import Fuse, LayoutError, Mapping, PerRank, Pieces, Rename, Split, StateError

RULES = Mapping(
    [
        Rename("model.layers.*.attn.wo", "model.blocks.*.proj"),
        Rename("model.layers.*.norm", "model.blocks.*.norm"),
        Fuse([f"model.layers.*.attn.{x}.weight" for x in "qkv"], "model.blocks.*.qkv.weight"),
        Split("model.layers.*.gate_up.weight", ["model.blocks.*.gate.weight", "model.blocks.*.up.weight"]),
    ]
)


class Old(nn.Module):
    """Two layers in the checkpoint's names. Key and value are smaller than the query, gate and up differ."""

    def __init__(self, *, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(5, 4))
        self.layers = nn.ModuleList()
        for _ in range(layers):
            layer = nn.Module()
            layer.attn = nn.Module()
            for name, size in (("q", 4), ("k", 2), ("v", 2)):
                layer.attn.add_module(name, nn.Linear(4, size, bias=False))
            layer.attn.wo = nn.Linear(4, 4)
            layer.gate_up = nn.Linear(4, 9, bias=False)
            layer.norm = nn.LayerNorm(4)
            self.layers.append(layer)


class New(nn.Module):
    """The same in the state's names."""

    def __init__(self, *, layers: int = 2) -> None:
        super().__init__()
        self.embed = nn.Parameter(torch.randn(5, 4))
        self.blocks = nn.ModuleList()
        for _ in range(layers):
            block = nn.Module()
            block.qkv = nn.Linear(4, 8, bias=False)
            block.proj = nn.Linear(4, 4)
            block.gate = nn.Linear(4, 6, bias=False)
            block.up = nn.Linear(4, 3, bias=False)
            block.norm = nn.LayerNorm(4)
            self.blocks.append(block)


def trained(model: nn.Module, make: Any = torch.optim.AdamW, steps: int = 2, **hyper: Any) -> torch.optim.Optimizer:
    """An optimizer with state for all parameters, one group for matrices and one for the rest."""
    groups = [
        {"params": [p for p in model.parameters() if p.ndim > 1], "weight_decay": 0.1},
        {"params": [p for p in model.parameters() if p.ndim == 1], "weight_decay": 0.0},
    ]
    optimizer: torch.optim.Optimizer = make(groups, **{"lr": 0.1, **hyper})
    for _ in range(steps):
        for parameter in model.parameters():
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
    return optimizer


def as_new(old: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """By hand: what tensors by the names of `Old` are by the names of `New`."""
    found = {}
    for name, tensor in old.items():
        layer = re.match(r"layers\.(\d+)\.(.*)", name)
        if layer is None:
            found[name] = tensor
            continue
        block, rest = f"blocks.{layer[1]}.", layer[2]
        if rest.startswith("attn.wo."):
            found[block + "proj." + rest[8:]] = tensor
        elif rest == "attn.q.weight":
            parts = [old[name.replace(".q.", f".{x}.")] for x in "qkv"]
            found[block + "qkv.weight"] = torch.cat(parts)
        elif rest == "gate_up.weight":
            found[block + "gate.weight"], found[block + "up.weight"] = tensor[:6], tensor[6:]
        elif rest.startswith("norm"):
            found[block + rest] = tensor
    return found


def moments(model: nn.Module, optimizer: torch.optim.Optimizer, key: str) -> dict[str, torch.Tensor]:
    return {name: optimizer.state[parameter][key] for name, parameter in model.named_parameters()}


def same(found: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> bool:
    return found.keys() == right.keys() and all(torch.equal(found[name], right[name]) for name in right)


def problems(error: pytest.ExceptionInfo[Exception]) -> str:
    return str(error.value)


# Declared


def test_what_is_wrong_with_a_mapping_is_listed_when_it_is_declared() -> None:
    with pytest.raises(StateError) as error:
        Mapping(
            [
                Rename("a.*.b", "c"),
                Rename("a..b", "c.d"),
                Rename("x.*y*", "z.*.*"),
                Fuse(["one"], "two"),
                Fuse(["u", "v"], "w", sizes=[1]),
                Split("s", ["t", "r"], dim=0.5),  # type: ignore[arg-type]
            ]
        )
    for words in (
        "rule 0: its patterns have different numbers of stars",
        "rule 1: 'a..b' is not a name",
        "rule 2: 'x.*y*' has several stars",
        "rule 3:",
        "rule 4: sizes=(1,) must be 2",
        "rule 5: dim=0.5",
    ):
        assert words in problems(error)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (Rename("a", "x"), Rename("a", "y")),
        (Rename("a", "x"), Rename("a.b", "y")),
        (Rename("a.*", "x.*"), Rename("a.b.c", "y")),
        (Rename("a.l*", "x.*"), Rename("a.*r", "y.*")),
        (Fuse(["a", "b"], "x"), Split("b", ["y", "z"])),
        (Rename("a", "x"), Rename("b", "x")),
        (Fuse(["a.*", "b.*"], "x.*"), Rename("c", "x.1")),
        (Rename("a", "x"), Split("b", ["x.y", "z"])),
    ],
)
def test_no_name_is_claimed_by_two_rules(first: Any, second: Any) -> None:
    with pytest.raises(StateError, match=r"rule 0 \(.*\) and rule 1 \(.*\) speak of the same names"):
        Mapping([first, second])


def test_names_next_to_each_other_are_not_the_same() -> None:
    Mapping(
        [
            Rename("a", "x"),
            Rename("ab", "y"),
            Rename("c.*.d", "z.*"),
            Rename("c.*.e", "w.*"),
            Fuse(["d.*.q", "d.*.k"], "d.*.qk"),
            Rename("e", "f"),
            Rename("f", "e"),
        ]
    )


_word = st.text("abxy", min_size=1, max_size=2)
_name = st.lists(_word, min_size=1, max_size=4).map(".".join)


@settings(max_examples=150)
@given(_name)
def test_there_and_back_is_the_identity(name: str) -> None:
    mapping = Mapping(
        [
            Rename("a.*.b", "x.y.*"),
            Rename("b", "a.b"),
            Fuse(["x.*.a", "x.*.b"], "b.*"),
            Split("y.a*", ["y.*.x", "y.*.b"]),
        ]
    )
    back = mapping.inverse()
    assert back.inverse() == mapping
    covered = mapping.claim(name) is not None
    for target in mapping.targets(name):
        assert name in mapping.sources(target) or (not covered and mapping.claim_after(name) is not None)
        assert name in back.targets(target) or not covered
    for source in back.targets(name):
        assert name in mapping.targets(source) or mapping.claim_after(name) is None


# Loaded


@pytest.mark.parametrize("fresh", [True, False], ids=["fresh optimizer", "with state"])
def test_a_model_and_its_optimizer_take_other_names(tmp_path: Path, fresh: bool) -> None:
    old, new = Old(), New()
    before = trained(old, lr=0.3)
    after = trained(new, steps=0 if fresh else 1)
    tierckpt.save({"model": old, "optimizer": before, "step": 7}, tmp_path, 1)
    state = {"model": new, "optimizer": after, "step": 0}
    tierckpt.load(state, tmp_path, mapping=RULES)
    assert state["step"] == 7
    assert same(dict(new.named_parameters()), as_new(dict(old.named_parameters())))
    for key in ("exp_avg", "exp_avg_sq"):
        assert same(moments(new, after, key), as_new(moments(old, before, key)))
    assert {float(value) for value in moments(new, after, "step").values()} == {2.0}
    assert [(group["lr"], group["weight_decay"]) for group in after.param_groups] == [(0.3, 0.1), (0.3, 0.0)]
    after.step()


def test_the_inverse_goes_back(tmp_path: Path) -> None:
    old: Any = Old()
    new = New()
    before = trained(new)
    tierckpt.save({"model": new, "optimizer": before}, tmp_path, 1)
    after = trained(old, steps=1)
    tierckpt.load({"model": old, "optimizer": after}, tmp_path, mapping=RULES.inverse())
    assert same(as_new(dict(old.named_parameters())), dict(new.named_parameters()))
    assert same(as_new(moments(old, after, "exp_avg")), moments(new, before, "exp_avg"))
    assert float(after.state[old.layers[0].attn.q.weight]["step"]) == 2.0


def test_hyperparameters_that_are_tensors_are_filled_in_place(tmp_path: Path) -> None:
    old, new = Old(), New()
    before = trained(old, lr=torch.tensor(0.25))
    after = trained(new, lr=torch.tensor(0.5))
    rates = [group["lr"] for group in after.param_groups]
    tierckpt.save({"model": old, "optimizer": before}, tmp_path, 1)
    tierckpt.load({"model": new, "optimizer": after}, tmp_path, mapping=RULES)
    assert [group["lr"] for group in after.param_groups] == [torch.tensor(0.25)] * 2
    assert all(group["lr"] is rate for group, rate in zip(after.param_groups, rates, strict=True))


def test_optimizers_follow_the_module_that_they_train(tmp_path: Path) -> None:
    """A copy of the model with the same names is left alone; both, and the optimizer itself, may change their names."""
    old, average, new, new_average = Old(), Old(), New(), Old()
    before, after = trained(old), trained(new, steps=0)
    tierckpt.save({"average": average, "model": old, "optimizer": before}, tmp_path, 1)
    mapping = Mapping([*RULES.rules, Rename("optimizer", "optim"), Rename("average", "ema")])
    tierckpt.load({"ema": new_average, "model": new, "optim": after}, tmp_path, mapping=mapping)
    assert same(dict(new_average.named_parameters()), dict(average.named_parameters()))
    assert same(moments(new, after, "exp_avg"), as_new(moments(old, before, "exp_avg")))


def test_an_optimizer_of_several_modules(tmp_path: Path) -> None:
    def make(name: str) -> tuple[dict[str, Any], list[nn.Parameter]]:
        first, second = nn.Linear(3, 2), nn.Linear(2, 2)
        parameters = [*first.parameters(), *second.parameters()]
        optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        return {name: first, "second": second, "optimizer": optimizer}, parameters

    (before, olds), (after, news) = make("first"), make("other")
    tierckpt.save(before, tmp_path, 1)
    tierckpt.load(after, tmp_path, mapping=Mapping([Rename("first", "other")]))
    for old, new in zip(olds, news, strict=True):
        assert torch.equal(old, new)
        states = before["optimizer"].state[old], after["optimizer"].state[new]
        assert torch.equal(*(state["momentum_buffer"] for state in states))


def test_values_of_ranks_and_keys(tmp_path: Path) -> None:
    tierckpt.save({"a": {"n": 3, "w": torch.ones(2)}, "seed": PerRank([1]), "c": {"x": [1]}}, tmp_path, 1)
    mapping = Mapping([Rename("a", "b.c"), Rename("seed", "s"), Rename("c", "a")])
    mark = PerRank([0])
    state: Any = {"b": {"c": {"n": 0, "w": torch.zeros(2)}}, "s": mark, "a": {"x": None}}
    tierckpt.load(state, tmp_path, mapping=mapping, keys=["b.*"], strict=False)
    assert state["b"]["c"]["n"] == 3 and torch.equal(state["b"]["c"]["w"], torch.ones(2))
    assert mark.value == [0] and state["a"] == {"x": None}
    tierckpt.load(state, tmp_path, mapping=mapping)
    assert mark.value == [1] and state["a"] == {"x": [1]}


def test_names_can_be_exchanged(tmp_path: Path) -> None:
    tierckpt.save({"a": torch.tensor([1]), "b": torch.tensor([2])}, tmp_path, 1)
    state = {"a": torch.zeros(1, dtype=torch.int64), "b": torch.zeros(1, dtype=torch.int64)}
    tierckpt.load(state, tmp_path, 1, mapping=Mapping([Rename("a", "b"), Rename("b", "a")]))
    assert state == {"a": torch.tensor([2]), "b": torch.tensor([1])}


@pytest.mark.parametrize("staged", [True, False])
def test_fused_and_split_along_other_dimensions_and_cast(tmp_path: Path, staged: bool) -> None:
    q, k = torch.arange(6).reshape(2, 3), torch.arange(10, 14).reshape(2, 2)
    both = torch.arange(24).reshape(2, 4, 3)
    tierckpt.save({"q": q, "k": k, "both": both}, tmp_path, 1)
    mapping = Mapping([Fuse(["q", "k"], "qk", dim=-1, sizes=[3, 2]), Split("both", ["x", "y"], dim=1)])
    wide = torch.zeros(5, 4, dtype=torch.float64)
    state = {"qk": wide.t()[1:3], "x": torch.zeros(2, 1, 3), "y": torch.zeros(2, 3, 3)}
    tierckpt.load(state, tmp_path, mapping=mapping, cast=True, staged=staged)
    assert torch.equal(state["qk"], torch.cat([q, k], 1).double())
    assert not wide[:, [0, 3]].any()
    assert torch.equal(state["x"], both[:, :1].float()) and torch.equal(state["y"], both[:, 1:].float())


def test_read_gives_the_names_of_the_state(tmp_path: Path) -> None:
    old = Old()
    before = trained(old)
    nested = {"h": [{"w": torch.ones(1), "n": 1}, {"w": torch.zeros(1), "n": 2}]}
    tierckpt.save({"model": old, "optimizer": before, "nested": nested}, tmp_path, 1)
    others = [Rename("nested.h.*.w", "nested.g.*.x.y"), Rename("model.embed", "model.tok.weight")]
    mapping = Mapping([*RULES.rules[:3], *others])
    found = tierckpt.read(tmp_path, mapping=mapping)
    right = as_new(dict(old.named_parameters()))
    right["tok.weight"] = right.pop("embed")
    for name, tensor in found["model"].items():
        if "gate_up" not in name:
            assert torch.equal(tensor, right[name])
    states = found["optimizer"]["state"]
    assert states.keys() == found["model"].keys()
    averages = as_new(moments(old, before, "exp_avg"))
    assert torch.equal(states["blocks.1.qkv.weight"]["exp_avg"], averages["blocks.1.qkv.weight"])
    assert float(states["blocks.1.qkv.weight"]["step"]) == 2.0
    groups = found["optimizer"]["param_groups"]
    assert {name for group in groups for name in group["params"]} == states.keys()
    assert found["nested"]["g"] == [{"x": {"y": torch.ones(1)}}, {"x": {"y": torch.zeros(1)}}]
    assert found["nested"]["h"] == [{"n": 1}, {"n": 2}]
    some = tierckpt.read(tmp_path, mapping=mapping, keys=["model.blocks.0.qkv*"])
    assert list(some["model"]) == ["blocks.0.qkv.weight"]


def test_read_cuts_evenly_unless_it_is_told(tmp_path: Path) -> None:
    tierckpt.save({"w": torch.arange(6), "u": torch.arange(5)}, tmp_path, 1)
    halves = Mapping([Split("w", ["a", "b"]), Split("u", ["c", "d"], sizes=[1, 4])])
    found = tierckpt.read(tmp_path, mapping=halves)
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        "a": [0, 1, 2],
        "b": [3, 4, 5],
        "c": [0],
        "d": [1, 2, 3, 4],
    }
    with pytest.raises(
        LayoutError, match=r"u of shape \[5\] cannot be split.*equal parts are not possible; give sizes="
    ):
        tierckpt.read(tmp_path, mapping=Mapping([Split("u", ["c", "d"])]))


# Refused


def test_what_does_not_fit_is_listed_and_nothing_is_touched(tmp_path: Path) -> None:
    saved = {
        "q": torch.ones(2, 3),
        "k": torch.ones(2, 4),
        "p": torch.ones(2),
        "r": torch.ones(2, dtype=torch.int32),
        "lone": torch.ones(1),
        "w": torch.ones(7),
        "taken": torch.ones(1),
        "n": 5,
        "a": torch.ones(1),
    }
    tierckpt.save(saved, tmp_path, 1)
    mapping = Mapping(
        [
            Fuse(["q", "k"], "qk"),
            Fuse(["p", "r"], "pr"),
            Fuse(["lone", "gone"], "two"),
            Split("w", ["x", "y"]),
            Split("n", ["n1", "n2"]),
            Rename("a", "taken"),
            Rename("nothing", "at.all"),
        ]
    )
    state = {"qk": torch.zeros(4, 3), "x": torch.zeros(3), "y": torch.zeros(3), "taken": torch.zeros(1)}
    with pytest.raises(LayoutError) as error:
        tierckpt.load(state, tmp_path, mapping=mapping)
    for words in (
        "qk: these cannot be fused along dimension 0: q float32 [2, 3], k float32 [2, 4]",
        "pr: these cannot be fused along dimension 0: p float32 [2], r int32 [2]",
        "two: the checkpoint has lone, but not gone",
        "w of shape [7] cannot be split along dimension 0 into x [3], y [3]: the sizes (3, 3) are not 7 together",
        "n is not a tensor",
        "the checkpoint has taken already, which in the state is a of the checkpoint",
        "a rule speaks of nothing in the checkpoint",
    ):
        assert words in problems(error), problems(error)
    assert not any(tensor.any() for tensor in state.values())


def test_unexpected_names_are_those_of_the_checkpoint(tmp_path: Path) -> None:
    tierckpt.save({"a": torch.ones(1), "q": torch.ones(1), "k": torch.ones(1), "w": torch.ones(2)}, tmp_path, 1)
    mapping = Mapping([Rename("a", "b"), Fuse(["q", "k"], "qk"), Split("w", ["u", "v"])])
    with pytest.raises(LayoutError) as error:
        tierckpt.load({"c": torch.zeros(1)}, tmp_path, mapping=mapping)
    assert "c: missing in the checkpoint" in problems(error)
    with pytest.raises(LayoutError) as error:
        tierckpt.load({}, tmp_path, mapping=mapping)
    for old, new in (("a", "b"), ("q, k", "qk"), ("w", "u"), ("w", "v")):
        assert f"{old}: in the checkpoint, not in the state, where it would be {new}\n" in problems(error) + "\n"


def test_step_counts_that_differ_cannot_be_fused(tmp_path: Path) -> None:
    old: Any = Old(layers=1)
    new: Any = New(layers=1)
    before = trained(old)
    before.state[old.layers[0].attn.k.weight]["step"] += 1
    tierckpt.save({"model": old, "optimizer": before}, tmp_path, 1)
    state = {"model": new, "optimizer": trained(new, steps=0)}
    kept = new.embed.detach().clone()
    with pytest.raises(LayoutError, match=r"blocks\.0\.qkv\.weight\.step.*differ.*q\.weight\.step is 2.0.*k.*is 3.0"):
        tierckpt.load(state, tmp_path, mapping=RULES)
    assert torch.equal(new.embed, kept)
    with pytest.raises(LayoutError, match=r"these become one, but differ"):
        tierckpt.read(tmp_path, mapping=Mapping(RULES.rules[:3]))


def test_state_of_other_shapes_and_partial_state_cannot_be_fused(tmp_path: Path) -> None:
    old: Any = Old(layers=1)
    new: Any = New(layers=1)
    before = trained(old, torch.optim.Adafactor)
    tierckpt.save({"model": old, "optimizer": before}, tmp_path / "a", 1)
    state = {"model": new, "optimizer": trained(new, torch.optim.Adafactor, steps=0)}
    with pytest.raises(LayoutError, match=r"qkv\.weight\.\w+: optimizer state that has not the shape of its parameter"):
        tierckpt.load(state, tmp_path / "a", mapping=RULES)
    before = trained(old)
    del before.state[old.layers[0].attn.k.weight]
    tierckpt.save({"model": old, "optimizer": before}, tmp_path / "b", 1)
    state = {"model": new, "optimizer": trained(new, steps=0)}
    with pytest.raises(LayoutError, match=r"qkv\.weight\.exp_avg: .* no exp_avg for layers\.0\.attn\.k\.weight"):
        tierckpt.load(state, tmp_path / "b", mapping=RULES)


def test_parameters_of_one_element_and_of_several_modules(tmp_path: Path) -> None:
    """One element of a moment is not a count that has to agree."""
    one, two, both = (nn.Linear(1, size, bias=False) for size in (1, 1, 2))

    def optimizer(*modules: nn.Module) -> torch.optim.Optimizer:
        parameters = [parameter for module in modules for parameter in module.parameters()]
        found = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
        for number, parameter in enumerate(parameters):
            parameter.grad = torch.full_like(parameter, number + 1)
        found.step()
        return found

    mapping = Mapping([Fuse(["one.weight", "two.weight"], "both.weight")])
    tierckpt.save({"one": one, "two": two, "optimizer": optimizer(one, two)}, tmp_path / "a", 1)
    after = optimizer(both)
    tierckpt.load({"both": both, "optimizer": after}, tmp_path / "a", mapping=mapping)
    assert torch.equal(both.weight, torch.cat([one.weight, two.weight]))
    assert after.state[both.weight]["momentum_buffer"].tolist() == [[1.0], [2.0]]
    tierckpt.save({"one": one, "two": two, "optimizer": optimizer(one)}, tmp_path / "b", 1)
    with pytest.raises(LayoutError, match=r"the optimizer has some of these.* but not all: one\.weight, two\.weight"):
        tierckpt.load({"both": both, "optimizer": after}, tmp_path / "b", mapping=mapping)


def test_parameters_of_several_groups_cannot_be_fused_unless_these_agree(tmp_path: Path) -> None:
    def groups(model: Any, *, decay: float) -> torch.optim.Optimizer:
        attn = model.layers[0].attn
        rest: Any = [p for p in model.parameters() if p is not attn.k.weight]
        return torch.optim.SGD([{"params": [attn.k.weight], "weight_decay": decay}, {"params": rest}], lr=0.1)

    old: Any = Old(layers=1)
    new: Any = New(layers=1)
    tierckpt.save({"model": old, "optimizer": groups(old, decay=0.5)}, tmp_path, 1)
    state = {"model": new, "optimizer": torch.optim.SGD(new.parameters(), lr=0.2)}
    with pytest.raises(LayoutError, match=r"group 0: the checkpoint has its parameters in several groups"):
        tierckpt.load(state, tmp_path, mapping=RULES)


# Rules that speak of nothing


def _tensor_of_two(value: float) -> Any:
    two_tensor = pytest.importorskip("torch.testing._internal.two_tensor")
    return two_tensor.TwoTensor(torch.full((2,), value), torch.full((2,), value + 1))


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (Rename("tt", "z"), ""),
        (Rename("tt.a", "z"), ""),
        (Split("tt", ["u", "v"]), ""),
        (Rename("k.*.y", "k.*.z"), ""),
        (Rename("cfg.a", "cfg.b"), "; cfg has no tensors, and is one value"),
        (Fuse(["x", "y"], "z"), r"; x is a torch\..*TwoTensor, whose tensors are x\.a, x\.b"),
        (Rename("o.state.weight", "o.state.w"), "; the state of o follows its parameters"),
    ],
    ids=str,
)
def test_a_rule_that_speaks_of_nothing_is_named(tmp_path: Path, rule: Any, why: str) -> None:
    model = nn.Linear(2, 2)
    saved = {"x": _tensor_of_two(1.0), "y": _tensor_of_two(3.0), "cfg": {"a": 1}, "t": torch.ones(1), "m": model}
    tierckpt.save({**saved, "o": trained(model)}, tmp_path, 1)
    mapping = Mapping([Rename("t", "s"), rule])
    fresh = nn.Linear(2, 2)
    state = {"x": _tensor_of_two(0.0), "y": _tensor_of_two(0.0), "cfg": {"b": 0}, "s": torch.zeros(1), "m": fresh}
    state["o"] = trained(fresh, steps=0)
    expected = rf"a rule speaks of nothing in the checkpoint: {re.escape(str(rule))}{why}"
    with pytest.raises(LayoutError, match=expected):
        tierckpt.load(state, tmp_path, mapping=mapping)
    with pytest.raises(LayoutError, match=expected):
        tierckpt.read(tmp_path, mapping=mapping)
    assert state["cfg"] == {"b": 0} and not state["s"].any()
    tierckpt.load(state, tmp_path, mapping=mapping, strict=False)
    assert state["s"].all()


def test_nothing_takes_the_place_of_a_value(tmp_path: Path) -> None:
    """A container without tensors is one value: a tensor cannot join it."""
    saved = {"cfg": {"a": 1, "lr": 0.5}, "l": [1, 2], "t": torch.ones(1), "u": torch.ones(1)}
    tierckpt.save(saved, tmp_path, 1)
    for rules, container, leaf in (
        ([Rename("t", "cfg.t")], "cfg", "cfg.t"),
        ([Rename("t", "l.2")], "l", "l.2"),
        ([Fuse(["t", "u"], "cfg.x.y")], "cfg", "cfg.x"),
    ):
        expected = (
            rf"{container} has no tensors in the checkpoint, and is one value there: {leaf} cannot be put into it"
        )
        with pytest.raises(LayoutError, match=expected):
            tierckpt.read(tmp_path, mapping=Mapping(rules))
        state = {"cfg": {"a": 0, "lr": 0.0, "t": torch.zeros(1)}, "l": [0, 0], "u": torch.zeros(1)}
        with pytest.raises(LayoutError, match=expected):
            tierckpt.load(state, tmp_path, mapping=Mapping(rules))
    found = tierckpt.read(tmp_path, mapping=Mapping([Rename("cfg", "t"), Rename("t", "cfg")]), step=1)
    assert found["t"] == {"a": 1, "lr": 0.5} and torch.equal(found["cfg"], torch.ones(1))


# Which module an optimizer trains


def _pair(value: float) -> Any:
    module = nn.Module()
    for number, name in enumerate("ab"):
        module.register_parameter(name, nn.Parameter(torch.full((2, 2), value + number)))
    return module


def _stepped(module: Any) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(module.parameters())
    for parameter in module.parameters():
        parameter.grad = parameter.detach().clone()
    optimizer.step()
    return optimizer


def _swap(name: str) -> Mapping:
    return Mapping([Rename(f"{name}.a", f"{name}.b"), Rename(f"{name}.b", f"{name}.a")])


def test_rules_about_a_copy_do_not_move_the_optimizer(tmp_path: Path) -> None:
    module = _pair(1.0)
    optimizer = _stepped(module)
    copy = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    tierckpt.save({"ema": copy, "m": module, "o": optimizer}, tmp_path, 1)
    new = _pair(50.0)
    after = torch.optim.Adam(new.parameters())
    tierckpt.load(
        {"ema": dict.fromkeys("ab", torch.zeros(2, 2)), "m": new, "o": after}, tmp_path, 1, keys=["m.*", "o.*"]
    )
    right = moments(new, after, "exp_avg")
    for mapping in (_swap("ema"), Mapping([Rename("ema.a", "ema.c")]), Mapping([Fuse(["ema.a", "ema.b"], "ema.ab")])):
        new = _pair(50.0)
        after = torch.optim.Adam(new.parameters())
        state = {"m": new, "o": after, "ema": {name: torch.zeros(2, 2) for name in "ab"}}
        tierckpt.load(state, tmp_path, 1, keys=["m.*", "o.*"], mapping=mapping)
        assert same(moments(new, after, "exp_avg"), right)
        assert same(moments(new, after, "exp_avg"), moments(module, optimizer, "exp_avg"))


@pytest.mark.parametrize("stateless", [False, True])
def test_rules_about_one_module_move_its_optimizer_alone(tmp_path: Path, stateless: bool) -> None:
    def make(value: float) -> Any:
        module = _pair(value)
        # Two groups: their names, too, are those of the right module.
        groups = [{"params": [module.a], "lr": 0.1}, {"params": [module.b], "lr": 0.2}]
        return module, torch.optim.SGD(groups, momentum=0.0 if stateless else 0.9)

    (x, ox), (y, oy) = make(1.0), make(10.0)
    for module, optimizer in ((x, ox), (y, oy)):
        for parameter in module.parameters():
            parameter.grad = parameter.detach().clone()
        optimizer.step()
    tierckpt.save({"x": x, "y": y, "ox": ox, "oy": oy}, tmp_path, 1)
    (x2, ox2), (y2, oy2) = make(50.0), make(60.0)
    for optimizer in (ox2, oy2):
        for group in optimizer.param_groups:
            group["lr"] = 0.0
    tierckpt.load({"x": x2, "y": y2, "ox": ox2, "oy": oy2}, tmp_path, 1, mapping=_swap("x"))
    assert torch.equal(x2.a, x.b) and torch.equal(y2.a, y.a)
    assert [group["lr"] for group in ox2.param_groups] == [0.2, 0.1]
    assert [group["lr"] for group in oy2.param_groups] == [0.1, 0.2]
    if not stateless:
        assert same(moments(y2, oy2, "momentum_buffer"), moments(y, oy, "momentum_buffer"))
        found, saved = moments(x2, ox2, "momentum_buffer"), moments(x, ox, "momentum_buffer")
        assert torch.equal(found["a"], saved["b"]) and torch.equal(found["b"], saved["a"])


def test_read_gives_the_groups_of_an_optimizer_without_state_other_names(tmp_path: Path) -> None:
    x, y = _pair(1.0), nn.Linear(2, 2)
    for name, parameters in (("one", [*x.parameters()]), ("both", [*x.parameters(), *y.parameters()])):
        state = {"x": x, "y": y, "o": torch.optim.SGD(parameters, lr=0.1)}
        if name == "one":
            del state["y"]
        tierckpt.save(state, tmp_path / name, 1)
        [group] = tierckpt.read(tmp_path / name, mapping=Mapping([Rename("x.a", "x.c")]))["o"]["param_groups"]
        assert group["params"] == (["c", "b"] if name == "one" else ["x.c", "x.b", "y.weight", "y.bias"])


def test_what_nothing_decides_is_refused_by_name(tmp_path: Path) -> None:
    module = _pair(1.0)
    tierckpt.save({"ema": module.state_dict(), "m": module, "o": _stepped(module)}, tmp_path, 1)
    for mapping in (
        Mapping([Rename("ema.a", "ema.c")]),
        Mapping([Rename("m.a", "m.c")]),
        Mapping([Fuse(["ema.a", "ema.b"], "ema.ab")]),
        Mapping([Rename("ema.a", "ema.c"), Rename("m.a", "m.d")]),
    ):
        with pytest.raises(
            LayoutError, match=r"o: the parameters of this optimizer may be those of (ema|m) or of (ema|m)"
        ):
            tierckpt.read(tmp_path, mapping=mapping)
        found = tierckpt.read(tmp_path, mapping=mapping, keys=["ema.*", "m.*"])
        assert set(found) == {"ema", "m"}
        # The state has the optimizer, but not what it trains.
        with pytest.raises(LayoutError, match=r"o: .* put the module that it trains beside it into the state"):
            tierckpt.load(
                {"o": {"state": {"a": {"exp_avg": torch.zeros(2, 2)}}}}, tmp_path, mapping=mapping, strict=False
            )
    # Alike in both, it does not matter which.
    alike = Mapping([Rename("ema.a", "ema.c"), Rename("m.a", "m.c")])
    assert set(tierckpt.read(tmp_path, mapping=alike)["o"]["state"]) == {"c", "b"}
    whole = Mapping([Rename("ema", "average"), Rename("m", "n")])
    assert set(tierckpt.read(tmp_path, mapping=whole)["o"]["state"]) == {"a", "b"}


# In other layouts


def _heads() -> dict[str, torch.Tensor]:
    return {
        "q": torch.arange(21).reshape(7, 3),
        "k": 100 + torch.arange(9).reshape(3, 3),
        "v": 200 + torch.arange(12).reshape(4, 3),
        "gu": 300 + torch.arange(33).reshape(11, 3),
    }


def _saves_cut(rank: int, root: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (3,))
    tierckpt.save({name: distribute_tensor(t, mesh, [Shard(0)]) for name, t in _heads().items()}, root, 1)


def _loads_cut(rank: int, root: str, dim: int) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    shapes = {"qkv": (14, 3), "g": (4, 3), "u": (7, 3)}
    state: Any = {
        name: zeros(shape, dtype=torch.int64, device_mesh=mesh, placements=[Shard(dim)])
        for name, shape in shapes.items()
    }
    mapping = Mapping([Fuse(["q", "k", "v"], "qkv"), Split("gu", ["g", "u"])])
    keys = ["qkv", "g", "u"]
    tierckpt.load(state, root, mapping=mapping, keys=keys)
    saved = _heads()
    right = {"qkv": torch.cat([saved[x] for x in "qkv"]), "g": saved["gu"][:4], "u": saved["gu"][4:]}
    for name, tensor in right.items():
        assert torch.equal(state[name].full_tensor(), tensor), name
    # Each stage of a pipeline has one half of what is split, and cannot know the other's size; one is enough.
    half = {"g" if rank == 0 else "u": torch.zeros(4 if rank == 0 else 7, 3, dtype=torch.int64)}
    tierckpt.load(half, root, mapping=Mapping([Split("gu", ["g", "u"])]), keys=["g", "u"])
    assert all(torch.equal(half[name], right[name]) for name in half)


def test_fused_and_split_tensors_in_other_layouts(tmp_path: Path) -> None:
    run_ranks(_saves_cut, 3, str(tmp_path))
    for dim in (0, 1):
        run_ranks(_loads_cut, 2, str(tmp_path), dim)


def test_restore_takes_a_mapping(tmp_path: Path) -> None:
    tierckpt.save({"a": torch.ones(2)}, tmp_path, 1)
    state = {"b": torch.zeros(2)}
    with tierckpt.Checkpointer(tmp_path, agent="off") as checkpointer:
        checkpointer.restore(state, mapping=Mapping([Rename("a", "b")]))
    assert torch.equal(state["b"], torch.ones(2))


@settings(max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(st.data())
def test_any_pieces_of_what_is_fused_and_split(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    """Tensors of random sizes make one, cut anywhere into the pieces of the state; and the other way round."""
    shape = data.draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    dim = data.draw(st.integers(0, len(shape) - 1))
    sizes = data.draw(st.lists(st.integers(0, 5), min_size=2, max_size=4).filter(any))
    shape[dim] = sum(sizes)
    whole = torch.arange(float(prod(shape))).reshape(shape)
    names = [f"a{i}" for i in range(len(sizes))]
    fuse = Mapping([Fuse(names, "f", dim=dim)])

    def pieces(tensor: torch.Tensor) -> Pieces:
        cuts = [sorted(data.draw(st.sets(st.integers(0, n), max_size=2)) | {0, n}) for n in tensor.shape]
        boxes = [list(pairwise(edges)) or [(0, 0)] for edges in cuts]
        return Pieces(
            tensor.shape,
            [([lo for lo, _ in box], torch.zeros([hi - lo for lo, hi in box])) for box in product(*boxes)],
        )

    def filled(found: Pieces, right: torch.Tensor) -> bool:
        return all(
            torch.equal(piece, right[tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))])
            for offset, piece in found.pieces
        )

    root = tmp_path_factory.mktemp("root")
    parts = dict(zip(names, torch.split(whole, sizes, dim), strict=True))
    tierckpt.save(parts, root / "parts", 1)
    state: Any = {"f": pieces(whole)}
    tierckpt.load(state, root / "parts", mapping=fuse)
    assert filled(state["f"], whole)
    tierckpt.save({"f": whole}, root / "whole", 1)
    state = {name: pieces(part) for name, part in parts.items()}
    tierckpt.load(state, root / "whole", mapping=fuse.inverse())
    assert all(filled(state[name], part) for name, part in parts.items())


def _loads_a_stage(rank: int, root: str) -> None:
    new: Any = New()
    new.blocks = nn.ModuleDict({str(rank): new.blocks[rank]})
    if rank:
        del new.embed
    optimizer = trained(new, steps=rank)  # with state on one stage only
    tierckpt.load({"model": new, "optimizer": optimizer}, root, mapping=RULES)
    saved = tierckpt.read(root)
    right = as_new(saved["model"])
    averages = as_new({name: state["exp_avg"] for name, state in saved["optimizer"]["state"].items()})
    for name, parameter in new.named_parameters():
        assert torch.equal(parameter, right[name]), name
        assert torch.equal(optimizer.state[parameter]["exp_avg"], averages[name]), name
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    assert [group["lr"] for group in optimizer.param_groups] == [0.3, 0.3]


def test_the_stages_of_a_pipeline_take_what_is_theirs(tmp_path: Path) -> None:
    old = Old()
    tierckpt.save({"model": old, "optimizer": trained(old, lr=0.3)}, tmp_path, 1)
    run_ranks(_loads_a_stage, 2, str(tmp_path))
