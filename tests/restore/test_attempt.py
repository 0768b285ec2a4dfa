"""Protects the state that is loaded into: what can be refused is refused before any of it is touched, staged or not, and by
an error that names the tensor; and autograd hears of what a load writes.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.harness import run_ranks
from tierckpt import LayoutError, Pieces, StateError, TierckptError
from tierckpt.restore import attempt

STAGED = pytest.mark.parametrize("staged", [False, True], ids=["", "staged"])

#: Saved values and a dtype that cannot hold them.
LOSSES = [
    (torch.tensor([300]), torch.int8),
    (torch.tensor([-1]), torch.uint8),
    (torch.tensor([2**63], dtype=torch.uint64), torch.int64),
    (torch.tensor([-1]), torch.uint64),
    (torch.tensor([0.5]), torch.int32),
    (torch.tensor([float("nan")]), torch.int32),
    (torch.tensor([float("inf")]), torch.int64),
    (torch.tensor([2.0**63]), torch.int64),
    (torch.tensor([-1.0]), torch.uint64),
    (torch.tensor([70000.0], dtype=torch.bfloat16), torch.int16),
    (torch.tensor([1 + 0j]), torch.float32),
]
if hasattr(torch, "float8_e8m0fnu"):
    # 2**-127, in a dtype without a zero.
    LOSSES.append((torch.zeros(1, dtype=torch.uint8).view(torch.float8_e8m0fnu), torch.int32))


def _bytes(tensor: torch.Tensor) -> bytes:
    return bytes(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy())


@STAGED
@pytest.mark.parametrize(("saved", "wanted"), LOSSES, ids=str)
def test_a_cast_that_loses_touches_nothing(
    tmp_path: Path, saved: torch.Tensor, wanted: torch.dtype, staged: bool
) -> None:
    tierckpt.save({"m": {"a": saved}, "z": torch.ones(2), "n": 5}, tmp_path, 1)
    state: dict[str, Any] = {"m": {"a": torch.zeros(1, dtype=wanted)}, "z": torch.zeros(2), "n": 0}
    with pytest.raises(LayoutError, match=r"m\.a: saved as torch\.\w+, it has .* that torch\.\w+ cannot hold"):
        tierckpt.load(state, tmp_path, cast=True, staged=staged)
    assert not any(_bytes(state["m"]["a"])) and not state["z"].any() and state["n"] == 0


@pytest.mark.parametrize(
    ("saved", "wanted"),
    [
        (torch.tensor([-128, 127]), torch.int8),
        (torch.tensor([2**64 - 1], dtype=torch.uint64), torch.uint64),
        (torch.tensor([-(2.0**63), 2.0**62]), torch.int64),
        (torch.tensor([2.0**63]), torch.uint64),
        (torch.tensor([3.0, -0.0], dtype=torch.float8_e4m3fn), torch.int32),
        (torch.tensor([True, False]), torch.int8),
        (torch.tensor([1.0, float("nan")], dtype=torch.float64), torch.float16),
        (torch.ones(0), torch.int8),
    ],
    ids=str,
)
def test_a_cast_that_loses_nothing_is_made(tmp_path: Path, saved: torch.Tensor, wanted: torch.dtype) -> None:
    tierckpt.save({"a": saved}, tmp_path, 1)
    state = {"a": torch.zeros(saved.shape, dtype=wanted)}
    tierckpt.load(state, tmp_path, cast=True)
    assert _bytes(state["a"]) == _bytes(saved.to(wanted))


@STAGED
@pytest.mark.skipif(not hasattr(torch, "float4_e2m1fn_x2"), reason="this torch has no such dtype")
def test_a_dtype_that_torch_cannot_copy_into_is_refused_by_name(tmp_path: Path, staged: bool) -> None:
    tierckpt.save({"a": torch.ones(2), "z": torch.ones(2)}, tmp_path, 1)
    state = {"a": torch.zeros(2), "z": torch.zeros(2, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)}
    with pytest.raises(LayoutError, match=r"z: saved as torch\.float32, which torch cannot convert to torch\.float4"):
        tierckpt.load(state, tmp_path, cast=True, staged=staged)
    assert not state["a"].any()


def _tied() -> dict[str, Any]:
    both = torch.zeros(2)
    return {"a": both, "b": both, "z": torch.zeros(2)}


def _overlapping() -> dict[str, Any]:
    flat = torch.zeros(3)
    return {"a": flat[:2], "b": flat[1:], "z": torch.zeros(2)}


def _conjugated() -> dict[str, Any]:
    both = torch.zeros(1, dtype=torch.complex64)
    return {"a": torch.view_as_real(both)[0], "b": both.conj(), "z": torch.zeros(2)}


@STAGED
@pytest.mark.parametrize(
    ("make", "saved"),
    [
        (_tied, {"a": torch.ones(2), "b": torch.ones(2) * 2}),
        (_overlapping, {"a": torch.ones(2), "b": torch.ones(2) * 2}),
        (_conjugated, {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([1 + 2j])}),
    ],
    ids=["tied", "overlapping", "conjugated"],
)
def test_one_memory_and_several_values_touch_nothing(
    tmp_path: Path, make: Callable[[], dict[str, Any]], saved: dict[str, torch.Tensor], staged: bool
) -> None:
    tierckpt.save({**saved, "z": torch.ones(2)}, tmp_path, 1)
    state = make()
    with pytest.raises(
        LayoutError, match=r"[ab]: these share memory in the state, but were saved with different values: a, b"
    ):
        tierckpt.load(state, tmp_path, staged=staged)
    assert not any(value.any() for value in state.values())


@STAGED
@pytest.mark.parametrize(
    ("make", "saved"),
    [
        (_tied, {"a": torch.tensor([float("nan"), 2.0]), "b": torch.tensor([float("nan"), 2.0])}),
        (_overlapping, {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([2.0, 3.0])}),
        (_conjugated, {"a": torch.tensor([1.0, -2.0]), "b": torch.tensor([1 + 2j])}),
    ],
    ids=["tied", "overlapping", "conjugated"],
)
def test_one_memory_takes_values_that_agree(
    tmp_path: Path, make: Callable[[], dict[str, Any]], saved: dict[str, torch.Tensor], staged: bool
) -> None:
    tierckpt.save({**saved, "z": torch.ones(2)}, tmp_path, 1)
    state = make()
    tierckpt.load(state, tmp_path, staged=staged)
    assert all(_bytes(state[name].resolve_conj()) == _bytes(saved[name]) for name in saved) and state["z"].all()


def _loads_what_one_rank_cannot_take(rank: int, root: str) -> None:
    state = {"a": torch.zeros(1, dtype=torch.int8 if rank else torch.int64), "z": torch.zeros(2)}
    with pytest.raises(LayoutError, match=r"a: saved as torch\.int64, .* torch\.int8 cannot hold"):
        tierckpt.load(state, root, cast=True, keys=["a", "z"])
    both = torch.zeros(2)
    other = {"z": both, "y": both if rank else torch.zeros(2)}
    with pytest.raises(LayoutError, match=r"saved with different values"):
        tierckpt.load(other, root, keys=["y", "z"])
    assert not any(value.any() for value in (*state.values(), *other.values()))
    # The ranks are still together.
    tierckpt.load({"z": state["z"]}, root, keys=["z"])
    assert state["z"].all()


def test_what_one_rank_refuses_touches_nothing_on_any(tmp_path: Path) -> None:
    tierckpt.save({"a": torch.tensor([300]), "y": torch.ones(2) * 2, "z": torch.ones(2)}, tmp_path, 1)
    run_ranks(_loads_what_one_rank_cannot_take, 2, str(tmp_path))


def test_what_fails_while_it_is_handed_over_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tierckpt.state.layout import Destination

    def finish(self: Destination) -> None:
        raise RuntimeError("the device is gone")

    tierckpt.save({"m": {"a": torch.ones(2)}}, tmp_path, 1)
    monkeypatch.setattr(Destination, "finish", finish)
    with pytest.raises(StateError, match=r"m\.a: .*the device is gone; what was to be filled is now undefined"):
        tierckpt.load({"m": {"a": torch.zeros(2)}}, tmp_path, staged=True)


# What autograd is told


class _Keeper:
    """Has no tensors before it is loaded."""

    def __init__(self, **state: Any) -> None:
        self.state = state

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


@STAGED
@pytest.mark.parametrize(
    "make",
    [
        lambda p: p,
        lambda p: p.detach(),
        lambda p: p.detach().t(),
        lambda p: Pieces((2, 3), [((0, 0), p.detach()[:1]), ((1, 0), p.detach()[1:])]),
    ],
    ids=["parameter", "detached", "strided", "pieces"],
)
def test_what_is_filled_counts_as_changed_in_place(tmp_path: Path, make: Callable[[Any], Any], staged: bool) -> None:
    parameter = torch.nn.Parameter(torch.zeros(2, 3))
    value = make(parameter)
    shape = value.global_shape if isinstance(value, Pieces) else value.shape
    tierckpt.save({"p": torch.ones(*shape)}, tmp_path, 1)
    out = (parameter * parameter).sum()
    tierckpt.load({"p": value}, tmp_path, staged=staged)
    assert parameter.detach().all()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()  # type: ignore[no-untyped-call]


def _loads_sharded(rank: int, root: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, zeros

    mesh = init_device_mesh("cpu", (2,))
    sharded = zeros((4,), device_mesh=mesh, placements=[Shard(0)], requires_grad=True)
    local = sharded.to_local()
    out, part = (sharded * sharded).sum().to_local(), (local * local).sum()
    tierckpt.load({"p": sharded}, root)
    for each in (out, part):
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation|has been modified inplace"):
            each.backward()


def test_what_is_sharded_counts_as_changed_in_place(tmp_path: Path) -> None:
    tierckpt.save({"p": torch.ones(4)}, tmp_path, 1)
    run_ranks(_loads_sharded, 2, str(tmp_path))


@pytest.mark.parametrize("many", [True, False])
def test_tensors_without_a_version_are_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, many: bool) -> None:
    monkeypatch.setattr(attempt, "_counts_many", lambda: many)
    tierckpt.save({"p": torch.ones(2), "q": torch.ones(2)}, tmp_path, 1)
    with torch.inference_mode():
        state = {"p": torch.zeros(2)}
    state["q"] = torch.zeros(2)
    tierckpt.load(state, tmp_path)
    assert state["p"].all() and state["q"]._version > 0


def test_what_is_left_out_and_what_is_refused_keeps_its_version(tmp_path: Path) -> None:
    tierckpt.save({"p": torch.ones(2), "q": torch.ones(2)}, tmp_path, 1)
    p, q = torch.zeros(2), torch.zeros(2)
    tierckpt.load({"p": p, "q": q}, tmp_path, keys=["p"])
    assert (p._version > 0, q._version) == (True, 0)
    with pytest.raises(TierckptError):
        tierckpt.load({"p": torch.zeros(3), "q": q}, tmp_path)
    assert q._version == 0


# Ties


class _Shared(torch.optim.Optimizer):
    """All its parameters have one count."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.1})

    def begin(self) -> None:
        count = torch.tensor(3.0)
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter] = {"step": count, "own": torch.ones(2)}


def test_new_tensors_are_tied_as_they_were_saved(tmp_path: Path) -> None:
    old, new = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    before, after = _Shared(old.parameters()), _Shared(new.parameters())
    before.begin()
    kept = torch.ones(2)
    keeper = _Keeper()
    tierckpt.save({"m": old, "o": before, "k": _Keeper(a=kept, b=kept, c=kept.clone())}, tmp_path, 1)
    tierckpt.load({"m": new, "o": after, "k": keeper}, tmp_path)
    states = [after.state[parameter] for parameter in new.parameters()]
    assert states[0]["step"] is states[1]["step"] and float(states[0]["step"]) == 3.0
    assert states[0]["own"] is not states[1]["own"]
    assert keeper.state["a"] is keeper.state["b"] and keeper.state["c"] is not keeper.state["a"]
    assert all(torch.equal(keeper.state[name], kept) for name in "abc")


def test_new_tensors_are_tied_under_other_names(tmp_path: Path) -> None:
    kept = torch.ones(2)
    tierckpt.save({"k": _Keeper(a=kept, b=kept), "t": torch.ones(1)}, tmp_path, 1)
    keeper = _Keeper()
    mapping = tierckpt.Mapping([tierckpt.Rename("k.a", "k.z")])
    tierckpt.load({"k": keeper, "t": torch.zeros(1)}, tmp_path, mapping=mapping)
    assert keeper.state["z"] is keeper.state["b"] and torch.equal(keeper.state["b"], kept)


def test_tensors_that_the_state_has_apart_stay_apart(tmp_path: Path) -> None:
    kept = torch.ones(2)
    tierckpt.save({"k": _Keeper(a=kept, b=kept)}, tmp_path, 1)
    keeper = _Keeper(a=torch.zeros(2), b=torch.zeros(2))
    tierckpt.load({"k": keeper}, tmp_path)
    assert keeper.state["a"] is not keeper.state["b"] and keeper.state["a"].all() and keeper.state["b"].all()
