"""What ranks read whose states were not alike: all the same, never less than there is without a word."""

from __future__ import annotations

import warnings
from collections import defaultdict, namedtuple
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierckpt
from tests.harness import run_ranks
from tierckpt import Checkpointer, IncompleteError, LayoutError, Mapping, PerRank, Rename

T = torch.ones(2)


def _read(rank: int, root: str, states: list[Any], **arguments: Any) -> Any:
    """What ranks read of what they saved, and which of them got an error."""
    tierckpt.save(states[rank], root, step=1)
    try:
        return tierckpt.read(root, **arguments)
    except LayoutError as error:
        return str(error)


@pytest.mark.parametrize(
    ("states", "expected"),
    [
        ([{"x": PerRank("own")}, {"x": 1}], [{"x": "own"}, {"x": 1}]),
        ([{"x": 1}, {"x": PerRank("own")}], [{"x": 1}, {"x": "own"}]),
        ([{"x": PerRank("own"), "n": 1}, {"n": 1}], [{"x": "own", "n": 1}, {"n": 1}]),
        ([{"x": PerRank("own")}, {}], [{"x": "own"}, {}]),
        ([{"x": PerRank(0)}, {"x": PerRank(1), "y": 2}], [{"x": 0, "y": 2}, {"x": 1, "y": 2}]),
        ([{"n": 1, "y": PerRank(2)}, {"n": 2, "x": PerRank(3)}], [{"n": 1, "y": 2}, {"n": 1, "x": 3}]),
    ],
)
@pytest.mark.parametrize("with_tensor", [False, True])
def test_each_rank_reads_its_own_and_the_lowest_ranks_values(
    tmp_path: Path, states: list[Any], expected: list[Any], with_tensor: bool
) -> None:
    if with_tensor:
        states = [{**state, "t": T} for state in states]
    found = run_ranks(_read, 2, str(tmp_path / "s"), states)
    for state in found:
        assert ("t" in state) == with_tensor
        state.pop("t", None)
    assert found == expected
    alone = tierckpt.read(tmp_path / "s")
    alone.pop("t", None)
    assert alone == expected[0]


class _Mode(Enum):
    FAST = 7


_Pair = namedtuple("_Pair", ["left", "right"])


def test_without_a_template_the_programs_own_classes_are_plain(tmp_path: Path) -> None:
    state = {"e": _Mode.FAST, "p": _Pair(T, 1), "d": defaultdict(list, {"k": [1]})}
    tierckpt.save(state, tmp_path / "s", step=1)
    found = tierckpt.read(tmp_path / "s")
    assert found["e"] == 7 and type(found["p"]) is tuple and type(found["d"]) is dict
    tierckpt.load(state, tmp_path / "s")
    assert state["e"] is _Mode.FAST and type(state["p"]) is _Pair and type(state["d"]) is defaultdict


def _refused(state: Any, root: Path) -> str:
    with pytest.raises(LayoutError, match="missing in the checkpoint") as caught:
        tierckpt.load(state, root)
    return str(caught.value)


def test_what_the_checkpoint_lacks_comes_with_what_to_do(tmp_path: Path) -> None:
    model, root = torch.nn.Sequential(torch.nn.Linear(2, 2)), tmp_path / "s"
    tierckpt.save({"run": {"model": model, "ema": model.state_dict()}, "n": 1}, root, step=1)
    told = _refused({"run": {"model": model}, "other": T}, root)
    assert "other: missing" in told and "pass strict=False" in told and "keys=" in told and "below" not in told
    told = _refused({"n": 1, "weight": T}, root)
    assert "strict=False" in told and "below" not in told
    for state in (model, model.state_dict()):
        told = _refused(state, root)
        assert "all of these below 'run.ema' and below 'run.model': pass {'run': {'ema': …}}" in told
    assert "strict=False" in _refused(torch.nn.Sequential(model, torch.nn.Linear(2, 2)), root)


@pytest.mark.parametrize(
    ("states", "name"),
    [
        ([{"x": PerRank("own"), "t": T}, {"x": T, "t": T}], "x: x is a PerRank value on other ranks"),
        ([{"x": {"a": T}, "t": T}, {"x": T, "t": T}], "x: x is a container on other ranks"),
        ([{"x": T, "t": T}, {"x": {"a": T, "b": 1}, "t": T}], "x.a: x is a tensor on other ranks"),
    ],
)
def test_what_does_not_fit_into_one_state_is_named_on_all_ranks(tmp_path: Path, states: list[Any], name: str) -> None:
    for said in run_ranks(_read, 2, str(tmp_path / "s"), states):
        assert f"\n  {name}" in said
        assert "keys=" in said
    with pytest.raises(LayoutError, match="cannot be read as one state"):
        tierckpt.read(tmp_path / "s")
    found = tierckpt.read(tmp_path / "s", keys=["t"])
    assert found.keys() == {"t"}


def _arguments_of_their_own(rank: int, root: str) -> list[Any]:
    tierckpt.save({"a": T, "b": 1, "c": T}, root, step=1)
    mapping = Mapping([Rename("a", "x")]) if rank else None
    found = tierckpt.read(root, keys=["x", "b"] if rank else None, mapping=mapping)
    with pytest.raises(LayoutError, match=r"rank 1: .*nothing in .* matches"):
        tierckpt.read(root, keys=["nothing"] if rank else None)
    return sorted(found)


def test_keys_and_mapping_are_a_ranks_own(tmp_path: Path) -> None:
    assert run_ranks(_arguments_of_their_own, 2, str(tmp_path / "s")) == [["a", "b", "c"], ["b", "x"]]


def _templates(rank: int, root: str) -> list[Any]:
    """Rank 1 had nothing of the kind, rank 2 a value; now all have a template for it."""
    saved: list[dict[str, Any]] = [{"x": PerRank("own")}, {}, {"x": 5}]
    tierckpt.save({**saved[rank], "t": T}, root, step=1)
    state: dict[str, Any] = {"x": PerRank("new"), "t": torch.zeros(2)}
    info = tierckpt.load(state, root)
    return [state["x"].value, state["t"].tolist(), list(info.untouched)]


def test_a_template_for_what_only_other_ranks_saved_stays_as_it_is(tmp_path: Path) -> None:
    found = run_ranks(_templates, 3, str(tmp_path / "s"))
    assert found == [["own", [1, 1], []], ["new", [1, 1], ["x"]], ["new", [1, 1], ["x"]]]


@pytest.mark.parametrize("arguments", [{}, {"cast": True}, {"staged": True}])
def test_a_chunk_that_is_read_twice_is_counted_once(tmp_path: Path, arguments: dict[str, Any]) -> None:
    state = {"t": torch.arange(5.0), "n": 1}
    tierckpt.save(state, tmp_path / "s", step=1)
    (shard,) = (tmp_path / "s").rglob("shard-*.safetensors")
    # A cast that may lose is read before anything is touched.
    into = {"t": torch.zeros(5, dtype=torch.int64 if "cast" in arguments else torch.float32), "n": 0}
    assert tierckpt.load(into, tmp_path / "s", **arguments).sources == {"disk": shard.stat().st_size}
    assert into["n"] == 1 and into["t"].tolist() == [0, 1, 2, 3, 4]


def _load_tied(rank: int, root: str) -> list[float]:
    tied = torch.full((1 << 20,), 9.0)
    others = {f"t{i}": torch.full((1 << 20,), float(i)) for i in range(6)}
    tierckpt.save({"a": tied, "b": tied, **others}, root, step=1)
    into = {name: torch.zeros(1 << 20) for name in ("a", "b", *others)}
    into["b"] = into["a"]
    tierckpt.load(into, root)
    return [float(value.mean()) for value in into.values()]


def test_tied_tensors_come_back_beside_others_of_their_shape(tmp_path: Path) -> None:
    """An alias is written by nobody: where it would be says nothing of other tensors."""
    found = run_ranks(_load_tied, 2, str(tmp_path / "s"))
    assert found == [[9.0, 9.0, *map(float, range(6))]] * 2


def test_a_root_that_is_no_store_says_what_it_is(tmp_path: Path) -> None:
    root = tmp_path / "s"
    tierckpt.save({"x": T}, root, 1)
    (tmp_path / "ck.pt").touch()
    (tmp_path / "empty").mkdir()
    inside = f"no checkpoint store here: the store is {root}: name that"
    for named, message in (
        (tmp_path / "ck.pt", "no checkpoint store here: it is a file, not the folder of a store"),
        (root / "g0001", inside),
        (root / "g0001/s000000000001", inside),
        (root / "g0002", inside),
        (tmp_path / "empty", "no checkpoint store here: nothing was ever saved"),
        (tmp_path / "mistyped", "no checkpoint store here: there is no such folder"),
    ):
        for reads in (lambda root: tierckpt.load({"x": T}, root), tierckpt.read):
            with pytest.raises(IncompleteError) as caught:
                reads(named)
            assert f"{named}: {message}" in str(caught.value)


def _told_that_nothing_met(how: str, state: Any, root: Path, **arguments: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        if how == "load":
            tierckpt.load(state, root, strict=False, **arguments)
        else:
            with Checkpointer(root, agent="off") as ckpt:
                ckpt.restore(state, strict=False, **arguments)
    return [str(one.message) for one in told if "strict=False" in str(one.message)]


@pytest.mark.parametrize("how", ["load", "restore"])
def test_a_state_of_which_no_tensor_is_in_the_checkpoint_is_told(tmp_path: Path, how: str) -> None:
    model, root = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)), tmp_path / "s"
    tierckpt.save({"model": model, "lr": 1.0}, root, step=4)
    state: dict[str, Any]
    for state in (model.state_dict(), {"net": model, "lr": 2.0}, {"n": 0, "net": {"array": np.zeros(4000)}}):
        (text,) = _told_that_nothing_met(how, state, root)
        assert str(root) in text and "step 4" in text and "mapping=" in text
        assert "the checkpoint model.0.bias, model.0.weight, model.1.bias, …" in text
    (text,) = _told_that_nothing_met(how, {"net": model, "lr": 2.0}, root, keys=["net.*", "lr"], step=4)
    assert "the state has net.0.weight, net.0.bias, net.1.weight, …" in text
    rename = Mapping([Rename("model", "net")])
    assert _told_that_nothing_met(how, {"net": model}, root, mapping=rename) == []


@pytest.mark.parametrize("how", ["load", "restore"])
def test_a_state_of_which_a_part_is_in_the_checkpoint_is_not_told_of(tmp_path: Path, how: str) -> None:
    model, root = torch.nn.Sequential(torch.nn.Linear(2, 2)), tmp_path / "s"
    tierckpt.save({"model": model, "lr": 1.0}, root, step=1)
    more = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    for state, keys in (
        ({"model": more, "other": T}, None),
        ({"net": model, "lr": 2.0}, ["lr"]),
        ({"lr": 2.0, "epoch": 3}, None),
        ({"other": T, "lr": 2.0}, ["l*", "epoch"]),
    ):
        assert _told_that_nothing_met(how, state, root, keys=keys) == []
    tierckpt.save({"own": PerRank(1)}, tmp_path / "values", step=1)
    assert _told_that_nothing_met(how, {"model": model, "own": PerRank(0)}, tmp_path / "values") == []


def _met_by_rank(rank: int, root: str, name: str) -> list[int]:
    own = {"a": T.clone()} if rank else {"b": T.clone()}
    tierckpt.save(own, root, step=1)
    states = {"here" if rank else name: T.clone()}, {f"no {name}": T.clone()}
    return [len(_told_that_nothing_met("load", state, Path(root))) for state in states]


def test_one_rank_tells_and_only_if_no_rank_has_a_tensor(tmp_path: Path) -> None:
    assert run_ranks(_met_by_rank, 2, str(tmp_path / "a"), "a") == [[0, 1], [0, 0]]
