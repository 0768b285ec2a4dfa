"""`Recall` and `Looks` against their plain forms, on states of any kind, with steps that fit and that do not."""

from __future__ import annotations

import gc
import sys
import threading
from array import array
from collections import OrderedDict, defaultdict
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests.native.plain_recall import PlainRecall, look
from tierckpt._native import Looks, Recall

SCALARS = (int, float, str, type(None))


class Marked:
    """An object of which ``is_value`` says what it holds."""

    def __init__(self, value: Any) -> None:
        self.value = value


def is_value(value: Any, depth: int) -> Any:
    if isinstance(value, Marked):
        if isinstance(value.value, Exception):
            raise value.value
        return value.value
    return False


def state_of(value: Any) -> Any:
    return value.value


OBJECTS: list[Any] = [
    0,
    1,
    True,
    1.0,
    None,
    "a",
    (),
    [1, "b"],
    {"a": [1, (2,)]},
    [[1], Marked(True)],
    Marked(True),
    Marked(False),
    Marked(ValueError()),
    Marked(NotImplemented),
    torch.zeros(1),
    torch.zeros(1),
    nn.Parameter(torch.zeros(1)),
    {},
    [],
    OrderedDict(a=1),
]
KEYS: list[Any] = ["a", "".join(["a", "b"]), 1, True, 1000, 2.5, None, b"x", ("a", 1), ("a", True)]

objects = st.recursive(
    st.sampled_from(OBJECTS),
    lambda inner: st.one_of(
        st.lists(inner, max_size=3),
        st.lists(inner, max_size=3).map(tuple),
        st.builds(
            lambda kind, keys, items: kind(zip(keys, items, strict=False)),
            st.sampled_from([dict, OrderedDict, lambda pairs: defaultdict(int, pairs)]),
            st.lists(st.sampled_from(KEYS), max_size=3),
            st.lists(inner, min_size=3, max_size=3),
        ),
        inner.map(Marked),
    ),
    max_leaves=8,
)


class Steps:
    """Draws steps that an object fits, mostly."""

    def __init__(self, draw: Any) -> None:
        self.draw, self.counts = draw, [0, 0, 0]

    def index(self, which: int) -> int:
        self.counts[which] += 1
        return self.counts[which] - 1

    def of(self, value: Any) -> tuple[Any, ...]:
        choice = self.draw(st.integers(0, 19))
        if choice == 0:
            return ("value", self.index(1))
        if choice == 1:
            return self.draw(
                st.sampled_from([("none",), ("anything",), ("empty",), ("names", ("a",)), ("parameters", (-1,))])
            )
        if choice == 2:
            return ("per_rank", type(value), self.index(2))
        if isinstance(value, torch.Tensor):
            return ("tensor", type(value), self.index(0))
        if isinstance(value, dict) and value:
            keys = tuple(value) if choice > 4 else tuple(reversed(value))
            if choice == 3:  # equal, and not the same objects
                keys = tuple("".join(list(key)) if type(key) is str else key for key in keys)
            index = self.index(1) if choice > 15 else -1
            return ("mapping", type(value), keys, tuple([self.of(value[key]) for key in keys]), index)
        if isinstance(value, (list, tuple)) and value:
            return ("sequence", type(value), tuple([self.of(item) for item in value]))
        if isinstance(value, Marked) and choice > 8:
            return ("call", Marked, state_of, self.of(value.value))
        return ("value", -1 if choice > 15 else self.index(1))


def same(one: Any, other: Any) -> bool:
    if one is None or other is None:
        return one is None and other is None
    return all(
        len(a) == len(b) and all(x is y for x, y in zip(a, b, strict=True)) for a, b in zip(one, other, strict=True)
    )


@given(st.data())
@settings(max_examples=600, deadline=None)
def test_find(data: st.DataObject) -> None:
    first = data.draw(objects)
    steps = Steps(data.draw)
    root = steps.of(first)
    leaves, values, per_rank = steps.counts
    arguments: Any = (root, SCALARS, is_value, is_value)
    native = Recall(*arguments, leaves=leaves, values=values, per_rank=per_rank)
    plain = PlainRecall(*arguments, leaves=leaves, values=values, per_rank=per_rank)
    for value in (first, data.draw(objects)):
        assert same(native.find(value), plain.find(value))


def test_keys() -> None:
    """A key is the same only if it is stored as the same: 1 and True are not, though a dict cannot tell them apart."""
    keys = [*KEYS, 1.0, 0, "A", "", 1001, -1, 1 << 70, b"", (1, "a"), ("a", 1.0), ("a",), (), 2.5 + 0, "é"]
    for known in keys:
        step = ("mapping", dict, (known,), (("value", 0),), -1)
        native = Recall(step, SCALARS, is_value, is_value, leaves=0, values=1, per_rank=0)
        plain = PlainRecall(step, SCALARS, is_value, is_value, leaves=0, values=1, per_rank=0)
        for key in (*keys, "".join(["a"]), int("1000"), 1 << 70, bytes(bytearray(b"x")), ("a", int("1"))):
            found = native.find({key: 0})
            assert same(found, plain.find({key: 0})), (known, key)
            assert found is None or (type(key) is type(known) and key == known)


class Optimizer:
    def __init__(self, groups: Any, state: Any) -> None:
        self.param_groups, self.state = groups, state


parameters = [nn.Parameter(torch.zeros(1)) for _ in range(4)]


@given(
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
    st.lists(st.tuples(st.integers(0, 3), st.sampled_from([{}, {"a": 1}])), max_size=3),
    st.lists(st.integers(-1, 2), min_size=3, max_size=3),
    st.lists(st.tuples(st.integers(-1, 3), st.sampled_from([("empty",), ("value", -1), ("anything",)])), max_size=3),
)
@settings(max_examples=600, deadline=None)
def test_optimizer(listed: Any, held: Any, leaves: Any, expected: Any) -> None:
    state = {
        "leaves": parameters[:3],
        "o": Optimizer([{"params": [parameters[i] for i in listed]}], {parameters[i]: entry for i, entry in held}),
    }
    children = tuple([("tensor", nn.Parameter, i) for i in range(3)])
    group = ("mapping", dict, ("params",), (("parameters", tuple(leaves)),), -1)
    states = ("states", dict, tuple([n for n, _ in expected]), tuple([child for _, child in expected]))
    optimizer = ("optimizer", Optimizer, lambda o: True, 0, ("sequence", list, (group,)), states)
    root = ("mapping", dict, ("leaves", "o"), (("sequence", list, children), optimizer), -1)
    arguments: Any = (root, SCALARS, is_value, is_value)
    native = Recall(*arguments, leaves=3, values=1, per_rank=0)
    assert same(native.find(state), PlainRecall(*arguments, leaves=3, values=1, per_rank=0).find(state))


def module_steps(module: nn.Module, hooks: int) -> tuple[Any, ...]:
    def held(found: Any) -> tuple[Any, ...]:
        children = tuple([("none",) if value is None else ("anything",) for value in found.values()])
        return ("mapping", type(found), tuple(found), children, -1)

    inner = tuple([module_steps(child, 0) for child in module.children()])
    persistent = tuple([int(name not in module._non_persistent_buffers_set) for name in module._buffers])
    submodules = ("mapping", type(module._modules), tuple(module._modules), inner, -1)
    return ("module", type(module), hooks, held(module._parameters), held(module._buffers), submodules, persistent)


@pytest.mark.parametrize("hooks", [0, 1, 2])
def test_module(hooks: int) -> None:
    def make() -> nn.Module:
        module = nn.Sequential(nn.BatchNorm1d(2), nn.Linear(2, 2, bias=False))
        module.register_buffer("b", torch.zeros(1), persistent=False)
        module.register_buffer("c", torch.zeros(1))
        return module

    def pre_hook(module: nn.Module) -> None:
        module.register_state_dict_pre_hook(lambda *a: None)

    def patch(module: Any) -> None:
        module.load_state_dict = None

    module = make()
    asked = []

    def is_sharded(found: Any) -> bool:
        asked.append(found)
        return not found._state_dict_hooks

    arguments: Any = (module_steps(module, hooks), SCALARS, is_value, is_sharded)
    native = Recall(*arguments, leaves=0, values=0, per_rank=0)
    plain = PlainRecall(*arguments, leaves=0, values=0, per_rank=0)
    answers = []
    for change in (
        lambda m: None,
        pre_hook,
        patch,
        lambda m: m._register_state_dict_hook(lambda *a: None),
        lambda m: m._non_persistent_buffers_set.add("c"),
        lambda m: m._non_persistent_buffers_set.clear(),
        lambda m: m[1].register_parameter("weight", None),  # any will do here
        lambda m: m.append(nn.ReLU()),
        lambda m: m[1].register_parameter("bias", nn.Parameter(torch.zeros(1))),
        lambda m: m.__dict__.pop("_buffers"),
        lambda m: setattr(m, "__class__", nn.ModuleList),
    ):
        changed = make()
        change(changed)
        assert same(native.find(changed), plain.find(changed))
        answers.append(native.find(changed) is not None)
    assert answers[0] and answers.count(True) == {0: 2, 1: 3, 2: 4}[hooks]
    assert bool(asked) == (hooks == 1)


def pool() -> list[torch.Tensor]:
    base = torch.arange(12.0)
    square = torch.zeros(2, 2)
    return [
        base[:4].view(2, 2),
        base[:4].view(2, 2),
        base[2:6].view(2, 2),
        square,
        square.t(),
        torch.zeros(2, 2),
        torch.zeros(2, 2, dtype=torch.float64),
        torch.zeros(2, 2, dtype=torch.complex64),
        torch.zeros(2, 2, dtype=torch.complex64).conj(),
        torch._neg_view(torch.zeros(2, 2)),
        nn.Parameter(torch.zeros(2, 2)),
        torch.zeros(4),
        torch.zeros(2, 2, device="meta"),
    ]


TENSORS = pool()
several = st.lists(st.integers(0, len(TENSORS) - 1), min_size=1, max_size=4)


@given(several, st.lists(several, max_size=4))
@settings(max_examples=500, deadline=None)
def test_look(first: list[int], later: list[list[int]]) -> None:
    before = [TENSORS[i] for i in first]
    count = len(before)
    looks = Looks(torch.Tensor, before, [], range(count), [False] * count, [True] * count)
    assert looks.usable == (not any(i in (8, 9, 12) for i in first))
    addresses, versions = array("Q", bytes(8 * count)), array("q", bytes(8 * count))
    for numbers in [first, *later]:
        now = [TENSORS[i] for i in numbers]
        expected = look(before, now) if looks.usable and len(now) == count else None
        if len(now) < count:
            continue
        found = looks.look(now[:count], [], addresses, versions, [])
        if len(now) == count:
            assert found == (expected is not None)
        if expected is not None:
            assert list(addresses) == expected
            assert list(versions) == [tensor._version for tensor in now]


def test_changed() -> None:
    leaves = [torch.zeros(2), torch.zeros(2)]
    extra = [torch.zeros(3)]
    looks = Looks(torch.Tensor, leaves, extra, [0, 1, ~0], [False] * 3, [True] * 3)
    addresses, versions = array("Q", bytes(24)), array("q", bytes(24))
    assert looks.look(leaves, extra, addresses, versions, [])
    assert looks.changed(leaves, extra, addresses, versions) == []
    extra[0].add_(1)
    leaves[0].data = torch.zeros(2)
    assert looks.changed(leaves, extra, addresses, versions) == [0, 2]
    # A version that is another is no other look.
    assert looks.look(leaves, extra, addresses, versions, [])
    assert looks.changed(leaves, extra, addresses, versions) == []


def test_wrong_arguments() -> None:
    with pytest.raises(ValueError, match="malformed step"):
        Recall(("unknown",), (), is_value, is_value, leaves=0, values=0, per_rank=0)
    with pytest.raises(ValueError, match="malformed step"):
        Recall(("mapping", dict, ("a",), (), -1), (), is_value, is_value, leaves=0, values=0, per_rank=0)
    with pytest.raises(ValueError, match="malformed step"):
        Recall(("sequence", dict, ()), (), is_value, is_value, leaves=0, values=0, per_rank=0)
    with pytest.raises(ValueError, match="index 1 of 1"):
        Recall(("tensor", torch.Tensor, 1), (), is_value, is_value, leaves=1, values=0, per_rank=0)
    with pytest.raises(ValueError, match="no such leaf"):
        Recall(("parameters", (1,)), (), is_value, is_value, leaves=1, values=0, per_rank=0)
    with pytest.raises(IndexError, match="no tensor 1"):
        Looks(torch.Tensor, [torch.zeros(1)], [], [1], [False], [True])
    with pytest.raises(ValueError, match="differ in length"):
        Looks(torch.Tensor, [torch.zeros(1)], [], [0], [], [True])
    looks = Looks(torch.Tensor, [torch.zeros(1)], [], [0], [False], [True])
    with pytest.raises(ValueError, match="64-bit"):
        looks.look([torch.zeros(1)], [], array("Q"), array("q", [0]), [])
    with pytest.raises(IndexError, match="no tensor 0"):
        looks.look([], [], array("Q", [0]), array("q", [0]), [])


def test_threads() -> None:
    """Threads that look at once, and one that changes what they look at: nobody crashes, and no answer mixes states."""
    tensors = [torch.zeros(2) for _ in range(100)]
    steps = ("sequence", list, tuple([("tensor", torch.Tensor, i) for i in range(100)]))
    recall = Recall(steps, SCALARS, is_value, is_value, leaves=100, values=0, per_rank=0)
    looks = Looks(torch.Tensor, tensors, [], range(100), [False] * 100, [True] * 100)
    state = list(tensors)
    wrong: list[str] = []
    stop = threading.Event()

    def work() -> None:
        addresses, versions = array("Q", bytes(800)), array("q", bytes(800))
        while not stop.is_set():
            found = recall.find(state)
            if found is not None:
                if not looks.look(found[0], [], addresses, versions, []):
                    wrong.append("looks different")
                if list(addresses) != [tensor.data_ptr() for tensor in found[0]]:
                    wrong.append("other addresses")

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    threads = [threading.Thread(target=work) for _ in range(3)]
    try:
        for thread in threads:
            thread.start()
        for i in range(300):
            state[i % 100] = torch.zeros(2)
            if i % 7 == 0:
                state.append(state.pop())
    finally:
        stop.set()
        for thread in threads:
            thread.join()
        sys.setswitchinterval(interval)
    assert wrong == []


def test_knows_the_collector() -> None:
    recall = Recall(("value", -1), SCALARS, is_value, is_value, leaves=0, values=0, per_rank=0)
    looks = Looks(torch.Tensor, [torch.zeros(1)], [], [0], [False], [True])
    assert gc.is_tracked(recall) and gc.is_tracked(looks)
    assert any(is_value in each for each in gc.get_referents(recall) if type(each) is tuple)
    assert any(torch.float32 in each for each in gc.get_referents(looks) if type(each) is list)
