"""A state of plain containers comes back as it was: keys, types, order, and the user's own objects in place."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict, namedtuple
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

from tests.state.kept import Kept
from tierckpt.errors import IntegrityError, LayoutError, StateError
from tierckpt.state.marks import PerRank
from tierckpt.state.nodes import merge
from tierckpt.state.tree import flatten, names_of

Pair = namedtuple("Pair", ["left", "right"])


class Mode(Enum):
    FAST = 1
    SLOW = 2


def same(a: Any, b: Any) -> bool:
    """Equal, with types, order of keys and tensors' bits."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if isinstance(a, dict):
        return list(a) == list(b) and all(type(x) is type(y) and same(a[x], b[y]) for x, y in zip(a, b, strict=True))
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


NESTED = {
    "epoch": 20,
    "name": "a",
    "t": torch.arange(6.0).reshape(2, 3),
    "nested": {"lr": 0.1, "done": True, "none": None},
    "list": [torch.ones(2), 5, (torch.zeros(1, dtype=torch.int64), "x")],
    "ordered": OrderedDict([("b", torch.ones(1)), ("a", 3)]),
    "counter": Counter({25: 2}),
    "keys": {1: "x", -3: "y", (1, 2): "t", None: "n", 2.5: "f"},
    "other keys": {True: "z", 0: torch.ones(1), 0.5: torch.zeros(1), (1, "a"): 4},
    "empty": {},
    "empties": [[], ()],
    "scalar": torch.tensor(3.5),
}


def test_nested_containers_come_back_without_a_template() -> None:
    assert same(Kept.of(NESTED).read(), NESTED)


def test_saving_what_was_read_is_a_fixed_point() -> None:
    kept = Kept.of(NESTED)
    for _ in range(3):
        again = Kept.of(kept.read())
        assert (again.trees, again.values, list(again.tensors)) == (
            kept.trees,
            kept.values,
            list(kept.tensors),
        )


def test_plain_values_are_updated_with_their_types() -> None:
    template = {
        "epoch": 0,
        "name": "",
        "t": torch.zeros(2),
        "nested": {"lr": 0.0, "done": False, "none": 1},
    }
    saved = {
        "epoch": 20,
        "name": "a",
        "t": torch.ones(2),
        "nested": {"lr": 0.1, "done": True, "none": None},
    }
    tensor = template["t"]
    Kept.of(saved).load(template)
    assert same(template, saved)
    assert template["t"] is tensor


def test_containers_with_tensors_stay_the_same_objects() -> None:
    inner = [torch.zeros(2), 1]
    state = {"a": inner, "pair": (torch.zeros(1), 0)}
    first = state["pair"][0]
    Kept.of({"a": [torch.ones(2), 7], "pair": (torch.ones(1), 9)}).load(state)
    assert state["a"] is inner
    assert same(inner, [torch.ones(2), 7])
    assert state["pair"][1] == 9
    assert state["pair"][0] is first
    assert same(first, torch.ones(1))


def test_a_container_without_tensors_is_one_value_and_replaced_whole() -> None:
    saved = Kept.of({"t": torch.ones(1), "log": {"a": [1, 2]}})
    assert names_of(saved.trees[0])[1] == ["log"]
    state = {"t": torch.zeros(1), "log": {"b": 1, "c": 2}}
    saved.load(state)
    assert state["log"] == {"a": [1, 2]}


def test_a_template_without_tensors_may_take_part_of_what_was_saved() -> None:
    saved = Kept.of({"meta": {"epoch": 3, "w": torch.ones(1)}})
    state: dict[str, Any] = {"meta": {"epoch": 0}}
    assert saved.problems(state) == ["meta.w: in the checkpoint, not in the state"]
    saved.load(state, strict=False)
    assert state == {"meta": {"epoch": 3}}


def test_classes_come_back_through_a_template_only() -> None:
    saved = {
        "t": torch.ones(1),
        "mode": Mode.SLOW,
        "pair": Pair(torch.ones(2), 3),
        "plain": Pair(1, 2),
        "d": defaultdict(list, {"a": torch.ones(1)}),
    }
    kept = Kept.of(saved)
    read = kept.read()
    assert (read["mode"], read["plain"], type(read["pair"]), type(read["d"])) == (2, (1, 2), tuple, dict)
    state = {
        "t": torch.zeros(1),
        "mode": Mode.FAST,
        "pair": Pair(torch.zeros(2), 0),
        "plain": Pair(0, 0),
        "d": defaultdict(list, {"a": torch.zeros(1)}),
    }
    kept.load(state)
    assert same(state, saved)


def test_dicts_and_lists_take_the_place_of_their_relatives() -> None:
    state = {"d": {"a": torch.zeros(1)}, "l": (torch.zeros(1),)}
    Kept.of({"d": OrderedDict(a=torch.ones(1)), "l": [torch.ones(1)]}).load(state)
    assert same(state, {"d": {"a": torch.ones(1)}, "l": (torch.ones(1),)})


@pytest.mark.parametrize("name", ["a/b", "~", "", "12", "A", "a", "kü中\U0001f600", "a\nb", "x" * 300])
def test_awkward_keys_round_trip(name: str) -> None:
    state = {name: torch.ones(1), "other": {name: 5, "t": torch.zeros(1)}}
    assert same(Kept.of(state).read(), state)


def test_keys_that_look_alike_are_told_apart() -> None:
    state = {"a.b": torch.ones(1), "a": {"b": torch.zeros(2), "1": torch.ones(3), 1: torch.ones(4)}}
    kept = Kept.of(state)
    assert len(kept.tensors) == 4
    assert same(kept.read(), state)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(3.0),
        lambda: [torch.ones(2), 4],
        lambda: {"epoch": 3, "l": [1]},
        lambda: [1, 2, 3],
    ],
)
def test_the_root_may_be_anything_that_can_be_filled_in_place(make: Any) -> None:
    saved = make()
    kept = Kept.of(saved)
    assert same(kept.read(), saved)
    state = make()
    if isinstance(state, torch.Tensor):
        state.zero_()
    elif isinstance(state, list):
        state[-1] = 0
    else:
        state["epoch"] = 0
    kept.load(state)
    assert same(state, saved)


def test_a_tuple_at_the_root_cannot_take_values() -> None:
    kept = Kept.of((torch.ones(1), 4))
    assert "the state is a tuple" in kept.problems((torch.zeros(1), 0))[0]
    whole = torch.zeros(1)
    Kept.of((torch.ones(1),)).load((whole,))
    assert whole.item() == 1


def test_every_difference_is_listed_and_nothing_is_touched() -> None:
    kept = Kept.of(
        {
            "shape": torch.ones(3, 4),
            "dtype": torch.tensor([300]),
            "number": torch.ones(1),
            "tensor": 5,
            "extra": torch.ones(1),
            "extra_value": 1,
            "box": {"w": torch.ones(1)},
        }
    )
    state = {
        "shape": torch.zeros(4, 4),
        "dtype": torch.zeros(1, dtype=torch.int8),
        "number": 0.0,
        "tensor": torch.zeros(1),
        "absent": torch.zeros(1),
        "absent_value": 7,
        "box": [torch.zeros(1)],
        "meta": torch.empty(1, device="meta"),
    }
    with pytest.raises(LayoutError) as caught:
        kept.load(state)
    assert str(caught.value).splitlines() == [
        "shape: saved shape (3, 4), the state has (4, 4)",
        "dtype: saved dtype int64, the state has int8 (cast=True converts)",
        "number: saved as a tensor, the state has a plain value (float)",
        "tensor: saved as a value without tensors, the state has a tensor",
        "absent: missing in the checkpoint",
        "absent_value: missing in the checkpoint",
        "box: saved as a dict with tensors, the state has a list with tensors",
        "meta: missing in the checkpoint",
        "extra: in the checkpoint, not in the state",
        "extra_value: in the checkpoint, not in the state",
    ]
    assert state["number"] == 0.0
    assert not state["shape"].any()


@pytest.mark.parametrize("shape", [(4, 4), (2, 4), (4, 3), (12,), (3, 4, 1)])
def test_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    kept = Kept.of({"w": torch.arange(12).reshape(3, 4)})
    [problem] = kept.problems({"w": torch.zeros(shape, dtype=torch.int64)}, cast=True)
    assert problem == f"w: saved shape (3, 4), the state has {shape}"


def test_cast_lets_other_dtypes_pass() -> None:
    state = {"w": torch.zeros(1, dtype=torch.float32)}
    Kept.of({"w": torch.tensor([1.5], dtype=torch.float64)}).load(state, cast=True)
    assert state["w"].item() == 1.5


def test_a_template_on_the_meta_device_is_a_problem_and_cannot_be_saved() -> None:
    state = {"w": torch.empty(2, device="meta")}
    assert "w: a tensor on the meta device" in Kept.of({"w": torch.ones(2)}).problems(state)[0]
    with pytest.raises(StateError, match=r"w: a tensor on the meta device"):
        flatten(state)


def test_keys_choose_leaves_and_leave_the_others_alone() -> None:
    kept = Kept.of({"m": {"w": torch.ones(1), "b": torch.ones(1)}, "epoch": 3})
    state = {"m": {"w": torch.zeros(1), "b": torch.zeros(1)}, "epoch": 0, "new": 5}
    target = kept.load(state, keys=["m.w"])
    assert list(target.tensors) == ["m/w"]
    assert same(state, {"m": {"w": torch.ones(1), "b": torch.zeros(1)}, "epoch": 0, "new": 5})
    kept.load(state, keys=["e*"])
    assert state["epoch"] == 3
    assert kept.problems(state, keys=["ne*"]) == ["new: missing in the checkpoint"]


def test_not_strict_ignores_missing_and_unexpected_keys_only() -> None:
    kept = Kept.of({"a": torch.ones(1), "b": torch.ones(1), "v": 1})
    state: dict[str, Any] = {"a": torch.zeros(1), "c": torch.zeros(1), "d": 4}
    target = kept.load(state, strict=False)
    assert target.untouched == ["c", "d"]
    assert same(state, {"a": torch.ones(1), "c": torch.zeros(1), "d": 4})
    assert kept.problems({"a": torch.zeros(2)}, strict=False)


@pytest.mark.parametrize("dtype", ["<f8", ">f8", "<i2", "<u4", "<M8[s]", "<U3", "|b1", "<c16"])
def test_large_numpy_arrays_are_tensors_and_come_back_as_arrays(dtype: str) -> None:
    saved = {"a": np.arange(2000).astype(dtype).reshape(2, 1000), "small": np.arange(3)}
    kept = Kept.of(saved)
    assert list(kept.tensors) == ["a"]
    assert same(kept.read(), saved)
    state = {"a": np.zeros_like(saved["a"]), "small": np.zeros(3, dtype=np.int64)}
    array = state["a"]
    kept.load(state)
    assert same(state, saved)
    assert state["a"] is array


def test_arrays_in_views_and_read_only_arrays() -> None:
    saved = {"a": np.arange(4000.0)[::-2], "frozen": np.arange(2000.0)}
    saved["frozen"].flags.writeable = False
    kept = Kept.of(saved)
    base = np.zeros(4000)
    state = {"a": base[::2], "frozen": np.zeros(2000)}
    state["frozen"].flags.writeable = False
    kept.load(state)
    assert np.array_equal(base[::2], saved["a"])
    assert not base[1::2].any()
    assert np.array_equal(state["frozen"], saved["frozen"])


def test_arrays_may_grow_past_the_size_at_which_they_become_tensors() -> None:
    small, large = {"t": torch.ones(1), "a": np.arange(3)}, {"t": torch.ones(1), "a": np.arange(5000)}
    for saved, template in ((small, large), (large, small)):
        state = {"t": torch.zeros(1), "a": template["a"].copy()}
        Kept.of(saved).load(state)
        assert same(state, saved)


@pytest.mark.parametrize("array", [np.zeros(200, dtype=[("a", "f8")]), np.zeros(200, dtype=object)])
def test_arrays_of_objects_are_refused(array: Any) -> None:
    with pytest.raises(StateError, match=r"x\.a: a numpy array of dtype"):
        flatten({"x": {"a": array}})


@pytest.mark.parametrize("count", [2, 5000])
@pytest.mark.parametrize("kind", ["masked", "memmap", "record", "own"])
@pytest.mark.parametrize("wrap", [lambda a: a, lambda a: [1, {"x": a}], lambda a: Shelf(a)])
def test_arrays_of_other_classes_are_refused_at_every_size(kind: str, count: int, wrap: Any, tmp_path: Path) -> None:
    plain = np.arange(float(count))
    array: Any = {
        "masked": lambda: np.ma.array(plain, mask=plain > 0),
        "memmap": lambda: np.memmap(tmp_path / "a", "f8", "w+", shape=(count,)),
        "record": lambda: plain.view(np.recarray),
        "own": lambda: plain.view(Array),
    }[kind]()
    state = {"t": torch.zeros(1), "a": wrap(array)}
    message = f"a.*: a numpy array of class {type(array).__name__} would come back as a plain one"
    with pytest.raises(StateError, match=message):
        flatten(state)
    kept = Kept.of({"t": torch.ones(1), "a": wrap(plain)})
    with pytest.raises(StateError, match=message):
        kept.load(state)
    assert state["t"].item() == 0


class Array(np.ndarray[Any, Any]):
    """A class of the user."""


class Shelf:
    """An object that holds one thing."""

    def __init__(self, held: Any) -> None:
        self.held = held

    def state_dict(self) -> dict[str, Any]:
        return {"held": self.held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if isinstance(state["held"], str):
            raise ValueError(state["held"])
        self.held = state["held"]


class Plain(torch.Tensor):
    """Has storage of its own."""


class Opaque(torch.Tensor):
    """Wraps a tensor and does not say how to take it apart."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Opaque:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)  # type: ignore

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


class Scaled(torch.Tensor):
    """int8 data with a scale; the block size is part of the type."""

    @staticmethod
    def __new__(cls, data: torch.Tensor, scale: torch.Tensor, block: int) -> Scaled:
        return torch.Tensor._make_wrapper_subclass(cls, data.shape, dtype=torch.float32)  # type: ignore

    def __init__(self, data: torch.Tensor, scale: torch.Tensor, block: int) -> None:
        self.inner_data, self.inner_scale, self.block = data, scale, block

    def __tensor_flatten__(self) -> Any:
        return ["inner_data", "inner_scale"], {"block": self.block}

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError(func)


def test_wrapper_subclasses_are_opened() -> None:
    saved = {"w": TwoTensor(torch.ones(3), torch.full((3,), 2.0))}
    kept = Kept.of(saved)
    assert same(kept.read(), {"w": {"a": torch.ones(3), "b": torch.full((3,), 2.0)}})
    state = {"w": TwoTensor(torch.zeros(3), torch.zeros(3))}
    wrapper = state["w"]
    kept.load(state)
    assert state["w"] is wrapper
    assert same(wrapper.a, torch.ones(3))
    assert same(wrapper.b, torch.full((3,), 2.0))


def test_the_context_of_a_wrapper_must_agree() -> None:
    def make(block: int) -> dict[str, Any]:
        return {"w": Scaled(torch.arange(4, dtype=torch.int8), torch.ones(1), block)}

    kept = Kept.of(make(32))
    kept.load(make(32))
    assert "w: saved with the context" in kept.problems(make(64))[0]
    assert "the state has the subclass" in Kept.of({"w": torch.ones(4)}).problems(make(32))[0]


def test_subclasses_with_storage_are_plain_tensors() -> None:
    kept = Kept.of({"w": torch.ones(2).as_subclass(Plain)})
    assert same(kept.read()["w"].as_subclass(torch.Tensor), torch.ones(2))


@pytest.mark.filterwarnings("ignore")
def test_tensors_that_cannot_be_saved_are_named() -> None:
    for tensor, words in (
        (Opaque(torch.ones(2)), "unsupported subclass Opaque"),
        (torch.eye(2).to_sparse(), "sparse"),
        (torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8), "quantized"),
        (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)]), "nested"),
        (torch.nested.nested_tensor([torch.ones(1), torch.ones(2)], layout=torch.jagged), "NestedTensor"),
    ):
        with pytest.raises(StateError, match=rf"a\.0: .*{words}"):
            flatten({"a": [tensor]})


def test_cycles_and_odd_containers_are_refused() -> None:
    loop: dict[str, Any] = {"t": torch.ones(1)}
    loop["again"] = [loop]
    with pytest.raises(StateError, match=r"again\.0: a container that contains itself"):
        flatten(loop)

    class Mine(dict):  # type: ignore[type-arg]
        pass

    with pytest.raises(StateError, match="x: a Mine that holds tensors is not supported"):
        flatten({"x": Mine(t=torch.ones(1))})
    shared = [torch.ones(1)]
    assert len(flatten({"a": shared, "b": shared}).tensors) == 2


def test_live_tensors_are_handed_out_as_they_are() -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    view = torch.arange(12).reshape(3, 4).t()
    flat = flatten({"p": parameter, "v": view})
    assert flat.tensors["p"] is parameter
    assert flat.tensors["v"] is view


def test_trees_that_are_none_are_refused() -> None:
    for tree in (["nothing"], ["dict"], 5, ["array", "<f8"], ["dict", [["a"]]], []):
        with pytest.raises(IntegrityError):
            names_of(tree)  # type: ignore[arg-type]


def test_ranks_with_trees_of_their_own_are_read_as_one() -> None:
    kept = Kept.of_ranks(
        {"m": OrderedDict(a=torch.ones(1)), "n": 1, "l": [torch.ones(1)]},
        {"m": OrderedDict(b=torch.zeros(1)), "n": 1, "l": [torch.ones(1), 4]},
    )
    expected = {"m": OrderedDict(a=torch.ones(1), b=torch.zeros(1)), "n": 1, "l": [torch.ones(1), 4]}
    assert same(kept.read(), expected)


def test_a_value_gives_way_to_what_holds_tensors_and_adds_what_that_lacks() -> None:
    alone = {"x": 5, "none": None, "d": {"a": 1, "t": 2}, "l": [1, 2], "t": torch.ones(1)}
    other = {
        "x": torch.ones(1),
        "none": {"w": torch.ones(2)},
        "d": {"t": torch.zeros(1), "n": 7},
        "l": [torch.ones(3)],
        "t": torch.ones(1),
    }
    both = {**other, "d": {"t": torch.zeros(1), "n": 7, "a": 1}}
    for states in ((alone, other), (other, alone)):
        found = Kept.of_ranks(*states).read()
        assert same({name: found[name] for name in both}, both)


def test_a_value_stands_in_for_the_per_rank_value_that_a_rank_has_not() -> None:
    for states in (({"x": PerRank(2), "t": torch.ones(1)}, {"x": 1}), ({"x": 1}, {"x": PerRank(2)})):
        kept = Kept.of_ranks(*states)
        kept.values["x"] = 1
        assert kept.read()["x"] == 1
        kept.per_rank = Kept.of({"x": PerRank(2)}).per_rank
        assert kept.read()["x"] == 2


def test_what_other_trees_lose_is_told() -> None:
    tensor, rows = torch.ones(1), np.zeros(500)
    for first, second, lost in (
        ({"x": tensor}, {"x": {"a": tensor, "b": [tensor, 1]}}, ["x/a", "x/b/0", "x/b/1"]),
        ({"x": {"a": tensor}}, {"x": tensor}, ["x"]),
        ({"x": [tensor]}, {"x": {"k": tensor}}, ["x/k"]),
        ({"x": PerRank(1)}, {"x": tensor}, ["x"]),
        ({"x": tensor}, {"x": PerRank(1)}, ["x"]),
        # These have one form, or are values.
        ({"x": tensor}, {"x": rows}, []),
        ({"x": tensor}, {"x": 5}, []),
        ({"x": {"a": 5}}, {"x": OrderedDict(a=tensor)}, []),
        ({"x": [tensor]}, {"x": (tensor, 5)}, []),
    ):
        left_out: dict[str, str] = {}
        merge([flatten(state).tree for state in (first, second)], left_out)
        assert list(left_out) == lost


def test_a_state_of_which_nothing_was_read_is_empty_and_never_none() -> None:
    kept = Kept.of({"x": PerRank(1), "t": torch.ones(1)})
    kept.per_rank, kept.tensors = {}, {}
    assert same(kept.read(), {})
    kept = Kept.of(PerRank(1))
    kept.per_rank = {}
    with pytest.raises(LayoutError, match="the state is a PerRank value, and this rank has none"):
        kept.read()


def test_a_per_rank_leaf_that_only_other_ranks_saved_is_left_untouched() -> None:
    for saved in ({"t": torch.ones(1)}, {"t": torch.ones(1), "r": 5}):
        kept = Kept.of_ranks(saved, {"t": torch.ones(1), "r": PerRank(6)})  # the first is that of this rank
        state = {"r": PerRank(1), "t": torch.zeros(1)}
        assert kept.target(state).per_rank == []
        assert kept.load(state).untouched == ["r"]
        assert (state["r"].value, state["t"].item()) == (1, 1)


@pytest.mark.parametrize("mark", [lambda shelf: shelf, PerRank])
def test_an_object_that_does_not_take_its_state_leaves_the_state_undefined(mark: Any) -> None:
    kept = Kept.of({"s": mark(Shelf("not this")), "t": torch.ones(1)})
    with pytest.raises(StateError, match=r"s: load_state_dict of Shelf failed: ValueError: not this; .* now undefined"):
        kept.load({"s": mark(Shelf(1)), "t": torch.zeros(1)})


def test_an_object_that_does_not_give_its_state_is_named() -> None:
    class Broken(Shelf):
        def state_dict(self) -> dict[str, Any]:
            raise ValueError("nope")

    with pytest.raises(StateError, match=r"a\.b: state_dict of Broken failed: ValueError: nope"):
        flatten({"a": {"b": Broken(1)}})


def test_leaves_that_were_not_read_are_left_out() -> None:
    kept = Kept.of({"a": {"x": torch.ones(1)}, "b": {"y": torch.ones(1), "v": 4}, "l": [torch.ones(1), 3], "e": {}})
    kept.tensors = {name: tensor for name, tensor in kept.tensors.items() if name == "b/y"}
    kept.values = {name: value for name, value in kept.values.items() if name in ("l/1", "e")}
    assert same(kept.read(), {"b": {"y": torch.ones(1)}, "l": [None, 3], "e": {}})


def test_a_per_rank_leaf_of_another_world_is_left_untouched() -> None:
    state = {"r": PerRank(1), "t": torch.zeros(1)}
    target = Kept.of({"r": PerRank(5), "t": torch.ones(1)}).load(state, same_world=False)
    assert target.untouched == ["r"]
    assert state["r"].value == 1
