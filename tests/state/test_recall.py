"""A state that is found again is what taking it apart would find, to the last address; whatever differs is told.

A recall that says yes wrongly writes wrong bytes into a checkpoint that verifies. So every yes here is compared with a fresh
`flatten` and its pointers.
"""

from __future__ import annotations

import copy
import gc
import json
import weakref
from array import array
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from tests import lacks
from tests.harness import run_ranks
from tierckpt.errors import LayoutError, StateError
from tierckpt.format import canonical, values
from tierckpt.group import Group
from tierckpt.state import live
from tierckpt.state.description import local_description
from tierckpt.state.flat import Flat, flat_of
from tierckpt.state.layout import Described, Describer
from tierckpt.state.marks import PerRank, Pieces
from tierckpt.state.plan import WritePlan, compose
from tierckpt.state.planner import Planned, Planner, Prepared
from tierckpt.state.recall import Recall, Recalled

Point = namedtuple("Point", "at tag")


class Full:
    """A state taken apart in full."""

    def __init__(self, state: Any, world: int = 1) -> None:
        self.root = live.walk(state)
        self.flat: Flat = flat_of(self.root)
        describe = Describer().describe
        self.described = {name: describe(tensor, name=name) for name, tensor in self.flat.tensors.items()}
        self.description = local_description(
            self.described, tree=self.flat.tree, per_rank=bool(self.flat.per_rank), world=world
        )

    def recall(self) -> Recall | None:
        return Recall.of(self.root, self.flat, self.described)

    def plan(self) -> WritePlan:
        layout = compose([self.description], [[0]], 1)
        return WritePlan(layout, 0, self.described, 0)


def encoded(found: dict[str, Any]) -> list[tuple[str, bytes]]:
    return [(name, canonical.encode(values.encode(value, path=name))) for name, value in found.items()]


def same_piece(one: Described, other: Described) -> bool:
    return (
        (one.dtype, one.shape, one.cut) == (other.dtype, other.shape, other.cut)
        and [box for box, _ in one.pieces] == [box for box, _ in other.pieces]
        and all(
            a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.dtype == b.dtype and a.shape == b.shape
            for (_, a), (_, b) in zip(one.pieces, other.pieces, strict=True)
        )
    )


def check(before: Full, found: Recalled, state: Any, world: int = 1) -> None:
    """What was found is what taking ``state`` apart finds, and that says the same as before."""
    now = Full(state, world)
    assert now.description == before.description
    assert now.flat.optimizer_storages == before.flat.optimizer_storages == found.recall.optimizer_storages
    assert list(found.by_name()) == list(now.flat.tensors) == found.recall.names
    for name, tensor in now.flat.tensors.items():
        mine = found.by_name()[name]
        assert mine is tensor or (type(mine) is torch.Tensor and mine.data_ptr() == tensor.data_ptr()), name
        assert same_piece(found.described()[name], now.described[name]), name
    assert list(found.values) == list(now.flat.values)
    assert encoded(found.values) == encoded(now.flat.values)
    assert encoded(found.per_rank) == encoded(now.flat.per_rank)
    rows = found.recall.places
    assert rows.keys() == {(name, k) for name, row in now.described.items() for k in range(len(row.pieces))}
    for (name, k), row in rows.items():
        tensor = now.described[name].pieces[k][1]
        assert found.addresses[row] == tensor.data_ptr(), name
        assert found.versions[row] == (-1 if tensor.is_inference() else tensor._version), name


def ask(before: Full, recall: Recall, state: Any) -> bool:
    """Whether the recall says yes; then it is checked."""
    found = recall.again(state)
    if found is None:
        return False
    check(before, found, state)
    plan = before.plan()
    one, _ = plan.pointers(Full(state).flat.tensors, b"")
    two, _ = plan.pointers_at(found.addresses, plan.places(recall.places), b"")
    # The first and last are memory of the plan's and of the call's own.
    assert one[:-1] == two[:-1]
    return True


# A state of everything


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.body = nn.Sequential(
            nn.Linear(4, 4), nn.ReLU(), nn.BatchNorm1d(4), nn.Sequential(nn.Linear(4, 4, bias=False))
        )
        self.last = nn.Linear(4, 4)
        self.last.weight = self.first.weight
        self.register_parameter("none", None)
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.register_buffer("kept", torch.ones(2, 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.body(self.first(x)))


class World:
    """Live objects of a training job; ``state()`` puts them into new containers as a user does at each save."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = Net()
        self.frozen = {"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)}
        body = [p for n, p in self.net.named_parameters() if n.startswith("body")]
        rest = [p for n, p in self.net.named_parameters() if not n.startswith("body")]
        self.optim = torch.optim.AdamW([{"params": body, "lr": 0.1, "amsgrad": True}, {"params": rest}], lr=0.01)
        self.sched = torch.optim.lr_scheduler.StepLR(self.optim, 3)
        self.alone = nn.Parameter(torch.ones(3))
        self.other = torch.optim.SGD([self.alone], lr=0.1, momentum=0.9)
        self.step()
        self.ema: Any = OrderedDict((name, tensor.clone()) for name, tensor in self.net.state_dict().items())
        self.odd: dict[Any, Any] = {1: torch.zeros(2), None: torch.zeros(2, 3), ("a", 2): torch.zeros(0, 4)}
        self.listed: Any = [
            torch.zeros(2, 2),
            (torch.zeros(3, dtype=torch.complex64), 5),
            {},
            Point(torch.zeros(1), "x"),
        ]
        self.progress: Any = {"epoch": 3, "seen": [1, 2, (3, None)], "name": "run", "ratio": 0.5}
        self.array = numpy.zeros(300)
        self.pieces = Pieces((4, 4), [((0, 0), torch.ones(2, 4)), ((2, 0), torch.ones(2, 4))])
        self.random = PerRank({"seed": 5, "noise": torch.zeros(2)})
        self.more: dict[str, Any] = {}
        self.order: Callable[[dict[str, Any]], dict[str, Any]] = dict

    def step(self) -> None:
        self.net(torch.randn(8, 4)).sum().backward()
        self.optim.step()
        self.sched.step()
        self.optim.zero_grad()
        self.alone.sum().backward()
        self.other.step()

    def state(self) -> dict[str, Any]:
        return self.order(
            {
                "optim": self.optim,
                "model": self.net,
                "frozen": dict(self.frozen),
                "sched": self.sched,
                "alone": self.alone,
                "other": self.other,
                "ema": self.ema,
                "odd": self.odd,
                "listed": self.listed,
                "progress": self.progress,
                "array": self.array,
                "pieces": self.pieces,
                "random": self.random,
                "empty": nn.ReLU(),
                **self.more,
            }
        )


def put(owner: Any, key: Any, value: Callable[[Any], Any]) -> None:
    owner[key] = value(owner[key])


def strided(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.t().contiguous().t()


def reregister(world: World) -> None:
    bias = world.net.first._parameters.pop("bias")
    weight = world.net.first._parameters.pop("weight")
    world.net.first.register_parameter("bias", bias)
    world.net.first.register_parameter("weight", weight)


def reorder(found: Any, key: Any) -> None:
    found[key] = found.pop(key)


def set_data(tensor: torch.Tensor, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    tensor.data = make(tensor.data)


def free(tensor: torch.Tensor) -> None:
    tensor.untyped_storage().resize_(0)


def reload(world: World) -> None:
    world.optim.load_state_dict(copy.deepcopy(world.optim.state_dict()))


def forget(world: World) -> None:
    del world.optim.state[world.net.first.weight]


def reorder_state(world: World) -> None:
    entry = world.optim.state.pop(world.net.first.weight)
    world.optim.state[world.net.first.weight] = entry


def swap_parameters(world: World) -> None:
    """The two biases of one shape change places in the optimizer, and so their state."""
    listed = world.optim.param_groups[1]["params"]
    i = next(i for i, p in enumerate(listed) if p is world.net.first.bias)
    j = next(j for j, p in enumerate(listed) if p is world.net.last.bias)
    listed[i], listed[j] = listed[j], listed[i]


def inference() -> torch.Tensor:
    with torch.inference_mode():
        return torch.zeros(2, 2)


def wrong_name(world: World) -> None:
    """A parameter of the optimizer becomes one of the frozen modules', too, under an alias of the same memory."""
    world.frozen["a"].weight = nn.Parameter(torch.zeros(2, 2))


def cycle(world: World) -> None:
    seen: list[Any] = [1]
    seen.append(seen)
    world.progress["seen"] = seen


def instance_state_dict(world: World) -> None:
    world.net.body.state_dict = lambda *args, **kwargs: {}  # type: ignore[method-assign]


CHANGES: dict[str, tuple[Callable[[World], object], bool]] = {
    # Name: what changes, and whether it must be found again.
    "nothing": (lambda w: None, True),
    "step": (lambda w: w.step(), True),
    "new memory": (lambda w: put(w.ema, "kept", torch.clone), True),
    "new memory of a parameter": (lambda w: set_data(w.net.first.bias, torch.clone), True),
    "other shape": (lambda w: put(w.ema, "kept", lambda t: torch.zeros(3, 2)), False),
    "more dimensions": (lambda w: put(w.ema, "kept", lambda t: t.view(2, 1, 2)), False),
    "other dtype": (lambda w: put(w.ema, "kept", lambda t: t.double()), False),
    "dtype of the same size": (lambda w: put(w.ema, "kept", lambda t: t.view(torch.int32)), False),
    "other strides": (lambda w: put(w.ema, "kept", strided), False),
    "other strides of a parameter": (lambda w: set_data(w.net.body[0].weight, strided), False),
    "transposed in place": (lambda w: set_data(w.net.body[0].weight, torch.t), False),
    "other shape in place": (lambda w: set_data(w.net.kept, lambda t: t.view(4)), False),
    "other shape of an empty tensor": (lambda w: put(w.odd, ("a", 2), lambda t: torch.zeros(0, 5)), False),
    "freed": (lambda w: free(w.ema["kept"]), False),
    "negated": (lambda w: put(w.ema, "kept", torch._neg_view), False),
    "negated in place": (lambda w: set_data(w.ema["kept"], torch._neg_view), False),
    "conjugated": (lambda w: put(w.listed, 1, lambda pair: (pair[0].conj(), 5)), False),
    "meta": (lambda w: put(w.ema, "kept", lambda t: t.to("meta")), False),
    "meta, empty": (lambda w: put(w.odd, ("a", 2), lambda t: t.to("meta")), False),
    "sparse": (lambda w: put(w.ema, "kept", lambda t: t.to_sparse()), False),
    "mkldnn": (lambda w: put(w.ema, "kept", lambda t: t.to_mkldnn()), False),
    "made in inference mode": (lambda w: put(w.listed, 0, lambda t: inference()), True),
    "parameter for tensor": (lambda w: put(w.ema, "kept", nn.Parameter), False),
    "value for tensor": (lambda w: put(w.ema, "kept", lambda t: 3), False),
    "new key": (lambda w: w.ema.update(new=torch.zeros(1)), False),
    "new value": (lambda w: w.more.update(new=1), False),
    "removed key": (lambda w: w.ema.pop("kept"), False),
    "renamed key": (lambda w: w.ema.update(new=w.ema.pop("kept")), False),
    "other order": (lambda w: reorder(w.odd, 1), False),
    "other order of an OrderedDict": (lambda w: w.ema.move_to_end("kept"), False),
    "other order of the root": (lambda w: setattr(w, "order", lambda s: dict(reversed(s.items()))), False),
    "True for 1": (
        lambda w: w.odd.update({True: w.odd.pop(1)}) or reorder(w.odd, None) or reorder(w.odd, ("a", 2)),
        False,
    ),
    "equal keys": (lambda w: setattr(w, "ema", OrderedDict(("." + k, v) for k, v in w.ema.items())) or rename(w), True),
    "dict for OrderedDict": (lambda w: setattr(w, "ema", dict(w.ema)), False),
    "defaultdict for dict": (lambda w: setattr(w, "odd", defaultdict(int, w.odd)), False),
    "tuple for list": (lambda w: setattr(w, "listed", tuple(w.listed)), False),
    "tuple for namedtuple": (lambda w: put(w.listed, 3, tuple), False),
    "longer list": (lambda w: w.listed.append(1), False),
    "new list": (lambda w: setattr(w, "listed", list(w.listed)), True),
    "tied": (lambda w: w.ema.update({"kept": w.net.kept}), False),
    "tied in place": (lambda w: set_data(w.ema["kept"], lambda t: w.net.kept), False),
    "untied": (lambda w: setattr(w.net.last, "weight", nn.Parameter(torch.zeros(4, 4))), False),
    "untied in place": (lambda w: put(w.net.last._parameters, "weight", lambda t: nn.Parameter(t.detach())), False),
    "tied to a frozen one": (lambda w: setattr(w.frozen["a"], "weight", w.frozen["b"].weight), False),
    "parameter replaced": (lambda w: setattr(w.net.first, "bias", nn.Parameter(torch.zeros(4))), False),
    "frozen parameter replaced": (lambda w: setattr(w.frozen["a"], "bias", nn.Parameter(torch.zeros(2))), True),
    "parameter there": (lambda w: setattr(w.net, "none", nn.Parameter(torch.zeros(1))), False),
    "parameter gone": (lambda w: setattr(w.frozen["a"], "bias", None), False),
    "parameter at another place": (reregister, False),
    "new parameter": (lambda w: w.net.register_parameter("new", nn.Parameter(torch.zeros(1))), False),
    "submodule replaced": (lambda w: setattr(w.net, "last", nn.Linear(4, 4)), False),
    "frozen module replaced": (lambda w: w.frozen.update(a=nn.Linear(2, 2)), True),
    "frozen module of another class": (lambda w: w.frozen.update(a=nn.Bilinear(1, 2, 2)), False),
    "frozen modules swapped": (lambda w: w.frozen.update(a=w.frozen["b"], b=w.frozen["a"]), True),
    "frozen modules the same": (lambda w: w.frozen.update(a=w.frozen["b"]), False),
    "submodule without parameters": (lambda w: put(w.net.body._modules, "1", lambda m: nn.GELU()), False),
    "submodule gone": (lambda w: put(w.net.body._modules, "1", lambda m: None), False),
    "new submodule": (lambda w: w.net.body.append(nn.ReLU()), False),
    "buffer not persistent": (lambda w: w.net.body[2]._non_persistent_buffers_set.add("running_mean"), False),
    "buffer persistent": (lambda w: w.net._non_persistent_buffers_set.discard("scratch"), False),
    "scratch replaced": (lambda w: setattr(w.net, "scratch", torch.zeros(7)), True),
    "buffer gone": (lambda w: setattr(w.net, "kept", None), False),
    "state-dict hook": (lambda w: w.net.body._register_state_dict_hook(lambda *a: None), False),
    "state-dict pre-hook": (lambda w: w.net.body.register_state_dict_pre_hook(lambda *a: None), False),
    "load pre-hook": (lambda w: w.net.first.register_load_state_dict_pre_hook(lambda *a: None), False),
    "load post-hook": (lambda w: w.frozen["a"].register_load_state_dict_post_hook(lambda *a: None), False),
    "patched state_dict": (instance_state_dict, False),
    "optimizer hook": (lambda w: w.optim.register_state_dict_post_hook(lambda *a: None), False),
    "optimizer loaded": (reload, False),  # which puts "params" behind the hyperparameters; what is stored is the same
    "optimizer forgot": (lambda w: w.optim.state.clear(), False),
    "optimizer forgot one": (forget, False),
    "state in another order": (reorder_state, False),
    "empty state": (lambda w: w.optim.state[torch.zeros(1)], False),
    "state of a stranger": (lambda w: w.optim.state.update({torch.zeros(1): {"step": 1}}), False),
    "state emptied": (lambda w: w.optim.state[w.net.first.bias].clear(), False),
    "other state": (lambda w: w.optim.state[w.net.first.bias].update(extra=torch.zeros(1)), False),
    "parameters of an optimizer swapped": (swap_parameters, False),
    "parameter group added": (lambda w: w.optim.add_param_group({"params": [nn.Parameter(torch.zeros(1))]}), False),
    "parameter list replaced": (lambda w: put(w.optim.param_groups[0], "params", list), True),
    "hyperparameter": (lambda w: put(w.optim.param_groups[0], "lr", lambda lr: lr / 2), True),
    "hyperparameter of another type": (lambda w: put(w.optim.param_groups[0], "betas", list), True),
    "hyperparameter that is a tensor": (lambda w: put(w.optim.param_groups[0], "lr", torch.tensor), False),
    "new hyperparameter": (lambda w: w.optim.param_groups[0].update(new=1), False),
    "names in a group": (lambda w: w.optim.param_groups[0].update(param_names=["x"]), False),
    "stranger becomes a leaf": (lambda w: setattr(w, "alone", torch.nn.Parameter(w.alone.detach())), False),
    "value of another type": (lambda w: w.progress.update(epoch={"a": [1, 2]}), True),
    "values of another kind": (lambda w: setattr(w, "progress", [1, 2]), True),
    "set": (lambda w: w.progress.update(seen={1, 2}), True),
    "small array": (lambda w: w.progress.update(seen=numpy.zeros(3)), True),
    "large array": (lambda w: w.progress.update(seen=numpy.zeros(300)), False),
    "tensor among values": (lambda w: w.progress.update(seen=[1, [torch.zeros(1)]]), False),
    "module among values": (lambda w: w.progress.update(seen=nn.ReLU()), False),
    "optimizer among values": (lambda w: w.progress.update(seen=w.other), False),
    "object among values": (lambda w: w.progress.update(seen=w.sched), False),
    "per rank among values": (lambda w: w.progress.update(seen=PerRank(1)), False),
    "pieces among values": (lambda w: w.progress.update(seen=w.pieces), False),
    "value in itself": (cycle, False),
    "array": (lambda w: setattr(w, "array", numpy.ones(300)), True),
    "array of another shape": (lambda w: setattr(w, "array", numpy.ones((2, 150))), False),
    "array of another dtype": (lambda w: setattr(w, "array", numpy.ones(300, dtype=numpy.int64)), False),
    "array that is not writable": (lambda w: w.array.setflags(write=False), True),
    "new pieces": (lambda w: setattr(w, "pieces", Pieces((4, 4), w.pieces.pieces)), True),
    "other boxes": (
        lambda w: setattr(w, "pieces", Pieces((4, 4), [((0, 0), torch.ones(2, 4)), ((1, 0), torch.ones(2, 4))])),
        False,
    ),
    "other global shape": (lambda w: setattr(w, "pieces", Pieces((5, 4), w.pieces.pieces)), False),
    "pieces for a tensor": (lambda w: setattr(w, "pieces", torch.zeros(4, 4)), False),
    "per rank": (lambda w: setattr(w.random, "value", [1, torch.zeros(3)]), True),
    "value for per rank": (lambda w: setattr(w, "random", 3), False),
    "other object": (lambda w: setattr(w, "sched", torch.optim.lr_scheduler.ExponentialLR(w.optim, 0.5)), False),
    "attribute of an object": (lambda w: setattr(w.sched, "note", torch.zeros(1)), False),
}


def rename(world: World) -> None:
    """Keys that are equal to those before, but other objects."""
    world.ema = OrderedDict((key[1:], tensor) for key, tensor in world.ema.items())


@pytest.mark.parametrize("name", CHANGES)
def test_change(name: str) -> None:
    change, expected = CHANGES[name]
    world = World()
    before = Full(world.state())
    recall = before.recall()
    assert recall is not None
    assert ask(before, recall, world.state())
    change(world)
    if name == "array that is not writable":
        # It is copied then, at each save: only the values can be compared.
        found = recall.again(world.state())
        assert found is not None
        assert torch.equal(found.by_name()["array"], torch.from_numpy(numpy.zeros(300)))  # type: ignore[arg-type]
        return
    assert ask(before, recall, world.state()) is expected


@given(st.lists(st.sampled_from([name for name in CHANGES if name != "array that is not writable"]), max_size=4))
@settings(max_examples=150, deadline=None)
def test_changes(names: list[str]) -> None:
    """Several changes in a row: a yes is right after each, and a state that can be saved can be recalled anew."""
    if "freed" in names:
        del names[names.index("freed") + 1 :]  # other changes would read memory that is not there any more
    world = World()
    before = Full(world.state())
    recall = before.recall()
    for name in names:
        try:
            CHANGES[name][0](world)
        except Exception:  # a change may need what an earlier one has taken away
            break
        try:
            now = Full(world.state())
            now.plan()
        except (StateError, LayoutError):
            assert recall is None or recall.again(world.state()) is None
            continue
        if recall is not None and ask(before, recall, world.state()):
            assert now.description == before.description
        else:
            before, recall = now, now.recall()
            assert recall is None or ask(before, recall, world.state())


leaves = st.one_of(
    st.integers(0, 3).map(lambda n: ("tensor", n)),
    st.integers(4, 5).map(lambda n: ("new", n)),
    st.sampled_from([("value", 0), ("value", "x"), ("value", None)]),
)
keys = st.sampled_from(["a", "b", "a.b", 1, 2, True, None, 1.5, ("a", 1)])
shapes = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: ("list", items)),
        st.lists(inner, max_size=3).map(lambda items: ("tuple", items)),
        st.lists(st.tuples(keys, inner), max_size=3).map(lambda items: ("dict", items)),
        st.lists(st.tuples(keys, inner), max_size=3).map(lambda items: ("OrderedDict", items)),
    ),
    max_leaves=8,
)
pool = [torch.zeros(2, 2), torch.zeros(2, 2), nn.Parameter(torch.zeros(2, 2)), torch.zeros(3)]


def build(shape: Any) -> Any:
    kind, found = shape
    if kind == "tensor":
        return pool[found]
    if kind == "new":
        return torch.zeros(2, 2) if found == 4 else torch.zeros(2, 2).t()
    if kind == "value":
        return found
    if kind in ("list", "tuple"):
        items = [build(item) for item in found]
        return items if kind == "list" else tuple(items)
    pairs = [(key, build(item)) for key, item in found]
    return OrderedDict(pairs) if kind == "OrderedDict" else dict(pairs)


@given(shapes, shapes)
@settings(max_examples=300, deadline=None)
def test_containers(one: Any, other: Any) -> None:
    """Of any two states: the second is found by what knows the first only if it is the same."""
    state = {"s": build(one)}
    before = Full(state)
    recall = before.recall()
    assert recall is not None
    assert ask(before, recall, state)
    assert ask(before, recall, {"s": build(one)}) or "new" in str(one)
    ask(before, recall, {"s": build(other)})


# What is refused


class Custom(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"a": 1}

    def set_extra_state(self, state: Any) -> None:
        pass


class Wrapping(torch.Tensor):
    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    def __tensor_flatten__(self) -> Any:
        return ["inner"], None

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotImplementedError


def twice() -> dict[str, Any]:
    parameter = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([parameter], lr=0.1)
    optimizer.param_groups[0]["params"].append(parameter)
    return {"o": optimizer, "p": parameter}


@pytest.mark.parametrize(
    "make",
    [
        lambda: {"m": Custom(2, 2)},
        lambda: {"m": nn.Sequential(Custom(2, 2))},
        lambda: {"t": Wrapping(torch.zeros(2))},
        lambda: {"t": torch.zeros(2, dtype=torch.complex64).conj()},
        lambda: {"t": torch._neg_view(torch.zeros(2))},
        twice,
    ],
    ids=["extra state", "extra state inside", "subclass", "conjugated", "negated", "a parameter twice"],
)
def test_refused(make: Callable[[], Any]) -> None:
    assert Full(make()).recall() is None


def test_optimizer_loaded_again() -> None:
    world = World()
    reload(world)
    before = Full(world.state())
    recall = before.recall()
    assert recall is not None
    reload(world)
    assert ask(before, recall, world.state())


def test_wrappers() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    net = nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(nn.Linear(2, 2)))
    state = {"m": torch.compile(net), "d": nn.DataParallel(net[0])}
    before = Full(state)
    recall = before.recall()
    assert recall is not None
    assert ask(before, recall, dict(state))
    net[1]._checkpoint_wrapped_module.weight.data = torch.ones(2, 2)
    assert ask(before, recall, dict(state))
    net[1]._checkpoint_wrapped_module.register_state_dict_pre_hook(lambda *a: None)
    assert not ask(before, recall, dict(state))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam, torch.optim.LBFGS, torch.optim.Adagrad])
@pytest.mark.parametrize("where", ["module", "names", "position", "position, leaves"])
def test_optimizers(kind: Any, where: str) -> None:
    net = nn.Linear(3, 3)
    given_ = net.named_parameters() if where == "names" else net.parameters()
    optimizer = kind(given_, lr=torch.tensor(0.1) if kind is torch.optim.Adam else 0.1)

    def state() -> dict[str, Any]:
        held = {"module": {"m": net}, "position, leaves": {"p": list(net.parameters())}}
        return {"o": optimizer, **held.get(where, {})}

    def step() -> None:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = net(torch.ones(2, 3)).square().sum()
            loss.backward()
            return loss

        optimizer.step(closure)

    answers = []
    before = Full(state())
    recall = before.recall()
    for _ in range(4):
        assert recall is not None
        assert ask(before, recall, state())
        step()
        answers.append(ask(before, recall, state()))
        before = Full(state())
        recall = before.recall()
    assert kind is torch.optim.LBFGS or answers[1:] == [True] * 3
    assert recall is not None
    if where.startswith("position"):
        net.weight.data = torch.zeros(9)[:9].view(3, 3)
        assert ask(before, recall, state())
    if where == "names":
        optimizer.param_groups[0]["param_names"][0] = "other"
        assert not ask(before, recall, state())


def test_parameter_of_two_names() -> None:
    """A parameter gets another name when a module that comes first has it too, though all memory is shared as before."""
    weight = nn.Parameter(torch.zeros(2, 2))
    one, two = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
    two.weight = weight
    one.weight = nn.Parameter(weight.detach())
    optimizer = torch.optim.SGD([weight], lr=0.1)
    state = {"one": one, "two": two, "optim": optimizer}
    before = Full(state)
    recall = before.recall()
    assert recall is not None
    assert ask(before, recall, state)
    one.weight = weight
    assert not ask(before, recall, state)


# What may go wrong


class Object:
    def __init__(self, state: Callable[[], Any]) -> None:
        self._state = state

    def state_dict(self) -> Any:
        return self._state()

    def load_state_dict(self, state: Any) -> None:
        pass


def test_errors_of_the_users_code() -> None:
    raised: list[BaseException] = []

    def make() -> dict[str, Any]:
        if raised:
            raise raised[0]
        return {"a": 1}

    state = {"o": Object(make), "t": torch.zeros(2)}
    recall = Full(state).recall()
    assert recall is not None
    raised.append(ValueError("bad"))
    assert recall.again(state) is None
    raised[0] = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        recall.again(state)
    raised.clear()
    assert recall.again(state) is not None


def test_containers_that_change_while_they_are_walked() -> None:
    """The user's code runs in the middle: it may empty the containers around it, and recall something itself."""
    tensors = [torch.zeros(2) for _ in range(50)]
    inner: dict[str, Any] = {}
    state: dict[str, Any] = {"l": [], "d": {}}
    recalls: list[Recall] = []
    harm: list[bool] = []

    def make() -> Any:
        if harm:
            assert recalls[0].again({"l": [1, *tensors], "d": {}, "n": None}) is None
            state["l"].clear()
            state["d"].clear()
            inner.clear()
            tensors.clear()
        return {"t": torch.zeros(1)}

    def fill() -> None:
        inner.update({str(i): [torch.zeros(1), 1] for i in range(20)})
        state["l"][:] = [Object(make), *[torch.zeros(2) for _ in range(50)], inner]
        state["d"].update({"o": Object(make), "x": [inner, {"y": torch.ones(1)}]})

    fill()
    recall = Full(state).recall()
    assert recall is not None
    recalls.append(recall)
    assert recall.again(state) is not None
    harm.append(True)
    found = recall.again(state)
    gc.collect()
    # Containers were matched before or after; what was found is alive and was there.
    assert found is None or all(isinstance(tensor, torch.Tensor) for tensor in found.tensors)


def test_under_a_torch_function_mode() -> None:
    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return func(*args, **(kwargs or {}))

    world = World()
    before = Full(world.state())
    recall = before.recall()
    assert recall is not None
    with Mode():
        assert ask(before, recall, world.state())
    with torch.device("meta"):
        found = recall.again(world.state())
    assert found is not None


def test_changed() -> None:
    world = World()
    recall = Full(world.state()).recall()
    assert recall is not None
    found = recall.again(world.state())
    assert found is not None
    assert found.changed() == []
    world.ema["kept"].add_(1)
    assert found.changed() == ["ema/kept"]
    world.net.kept.data = torch.zeros(2, 2)
    assert found.changed() == ["ema/kept", "model/kept"]
    free(world.ema["first.bias"])
    assert found.changed() == ["ema/first.bias", "ema/kept", "model/kept"]


# What it keeps


def test_keeps_nothing_alive() -> None:
    world = World()
    recall = Full(world.state()).recall()
    assert recall is not None
    recall.again(world.state())
    watched = [
        weakref.ref(each)
        for each in (world.net, world.net.body[0], world.optim, world.sched, world.net.kept, world.ema["kept"])
    ]
    del world
    gc.collect()
    assert [ref() for ref in watched] == [None] * len(watched)


def test_is_collected_in_a_cycle() -> None:
    class Local(nn.Linear):
        recall: Recall | None = None

    Local.recall = Full({"m": Local(2, 2)}).recall()
    assert Local.recall is not None
    watched = weakref.ref(Local)
    del Local
    live_cache_clear()
    gc.collect()
    assert watched() is None


def live_cache_clear() -> None:
    from tierckpt.state import modules

    modules.trait.cache_clear()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.limit(120)
def test_memory_does_not_grow() -> None:
    world = World()
    state = world.state()
    recall = Full(state).recall()
    assert recall is not None
    wrong = {**state, "listed": [*world.listed[:3], Point(torch.zeros(2), "x")]}
    for _ in range(200):
        recall.again(state), recall.again(wrong)
    gc.collect()
    watched = [
        world.net.first.weight,
        world.ema["kept"],
        world.optim,
        None,
        torch.float32,
        nn.Linear,
        "first",
        torch.Tensor,
    ]
    counts = [_references(each) for each in watched]
    objects = len(gc.get_objects())
    growth = []
    for _ in range(4):
        memory = resident()
        for _ in range(2500):
            recall.again(state), recall.again(wrong)
        gc.collect()
        growth.append(resident() - memory)
    after = [_references(each) for each in watched]
    assert all(abs(a - b) < 100 for a, b in zip(counts, after, strict=True)), (counts, after)
    assert counts[:3] == after[:3]
    assert abs(len(gc.get_objects()) - objects) < 200
    # What leaks does so in each round; the heap of the tests before settles in one.
    assert min(growth) < 64 << 10, growth


def _references(value: Any) -> int:
    import sys

    return sys.getrefcount(value)


# Plans


def test_planner() -> None:
    """A second save writes from where the tensors are then, with the values of then; a layout that changed is planned anew."""
    world = World()
    planner = Planner(Group(None, timeout=10))
    fresh = Planner(Group(None, timeout=10))

    def prepared(planner: Planner) -> tuple[Prepared, bool]:
        planned = planner.plan(world.state(), "the save", lambda: b"", 1)
        return planner.prepared(planned), planned.taken.found is not None

    def contents(found: Prepared) -> bytes:
        assert found.table is not None and found.plan.header is not None
        data = bytearray(found.plan.size)
        found.table.gather(found.pointers, 0, len(data), data)
        return bytes(data)

    def save() -> bool:
        one, recalled = prepared(planner)
        fresh._recall = None
        two, in_full = prepared(fresh)
        assert not in_full
        assert contents(one) == contents(two)
        return recalled

    assert [save(), save(), save()] == [False, True, True]
    world.step()
    world.net.first.bias.data = torch.randn(4)
    assert save()
    world.progress["seen"] = list(range(5000))  # outgrows the blob
    assert save()
    assert save()
    world.ema["kept"] = strided(world.ema["kept"])
    assert [save(), save()] == [False, True]
    world.more["new"] = torch.zeros(5)
    assert [save(), save()] == [False, True]
    world.net.kept.fill_(7)
    assert save()


def test_a_state_that_cannot_be_saved_is_told_each_time() -> None:
    world = World()
    planner = Planner(Group(None, timeout=10))
    planner.prepare(world.state())
    world.ema["kept"] = world.ema["kept"].to("meta")
    for _ in range(2):
        with pytest.raises(StateError, match="kept"):
            planner.prepare(world.state())


# Ranks


def test_dtensors() -> None:
    run_ranks(_dtensors, 2)


def _dtensors(rank: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2,))
    other = init_device_mesh("cpu", (1, 2))
    make = distribute_tensor
    held = {
        "rows": make(torch.arange(12.0).reshape(4, 3), mesh, [Shard(0)]),
        "whole": make(torch.ones(3), mesh, [Replicate()]),
        "uneven": make(torch.ones(1, 2), mesh, [Shard(0)]),
        "same": make(torch.ones(1, 2), mesh, [Shard(0)]),
    }
    held["tied"] = held["uneven"]
    before = Full(dict(held), 2)
    recall = before.recall()
    assert recall is not None

    def asked() -> bool:
        found = recall.again(dict(held))
        if found is not None:
            check(before, found, dict(held), 2)
        return found is not None

    assert asked()
    held["rows"] = make(torch.zeros(4, 3), mesh, [Shard(0)])
    assert asked()
    rows = held["rows"]
    for wrong in (
        make(torch.zeros(4, 3), mesh, [Replicate()]),
        make(torch.zeros(4, 4), mesh, [Shard(0)]),
        make(torch.zeros(4, 3), other, [Replicate(), Shard(0)]),
        torch.zeros(4, 3),
        torch.zeros(2, 3),
    ):
        held["rows"] = wrong
        assert not asked()
    held["rows"] = rows
    assert asked()
    held["tied"] = held["same"]
    assert not asked()
    held["tied"] = held["uneven"]
    rows._local_tensor = rows._local_tensor.clone()
    assert asked()
    rows._local_tensor = strided(rows._local_tensor)
    assert not asked()
    rows._local_tensor = rows._local_tensor.contiguous().double()
    assert not asked()


@lacks.fsdp2_trains_on_cpu
def test_fsdp2() -> None:
    """Its hooks shard the parameters again before they are read."""
    run_ranks(_fsdp2, 2)


def _fsdp2(rank: int) -> None:
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 3), nn.ReLU()))
    fully_shard(net[1], reshard_after_forward=False)
    fully_shard(net, reshard_after_forward=False)
    optimizer = torch.optim.AdamW(net.parameters())

    def step() -> None:
        net(torch.ones(2, 4)).sum().backward()
        optimizer.step()

    def state() -> dict[str, Any]:
        return {"model": net, "optim": optimizer}

    step()
    before = Full(state(), 2)
    recall = before.recall()
    assert recall is not None
    for _ in range(3):
        with torch.no_grad():
            net(torch.ones(2, 4))
        assert type(net[0]._parameters["weight"]) is not type(before.flat.tensors["model/0.weight"])
        found = recall.again(state())
        assert found is not None
        check(before, found, state(), 2)
        step()


def test_replicas_are_compared() -> None:
    run_ranks(_replicas, 2)


def _replicas(rank: int) -> None:
    net = nn.BatchNorm1d(3)
    state = {"model": net, "step": 1}
    group = Group(None, timeout=20)
    planner = Planner(group)

    def disagreements(planned: Planned) -> list[str]:
        assert planned.sample is not None and planned.replicas is not None
        told = group.exchange(json.dumps(planned.sample.summary()).encode())
        return planned.replicas.compare(group, "the save", planned.sample, [json.loads(each) for each in told])

    for number in range(3):
        planned = planner.plan(dict(state), "the save", lambda: b"", 1)
        assert disagreements(planned) == []
        assert (planned.taken.found is not None) == (number > 0)
    net.running_mean = torch.full((3,), float(rank))
    planned = planner.plan(dict(state), "the save", lambda: b"", 1)
    assert planned.taken.found is not None
    assert ["running_mean" in line for line in disagreements(planned)] == [True]
    assert array("Q", planned.taken.found.addresses)
