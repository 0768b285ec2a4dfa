"""Protects tensors that other libraries have cut: each element goes to its place of the logical tensor and comes back from
there, in place and into any other layout; and what cannot be placed for certain is refused by name.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

import tierckpt
from tests.harness import run_ranks
from tierckpt import LayoutError, Mapping, Pieces, Rename, StateError

# Partial sums


def _saves_partial(rank: int, root: str) -> str:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Partial

    mesh = init_device_mesh("cpu", (2,))
    state = {"model": {"bias": DTensor.from_local(torch.ones(3), mesh, [Partial()])}}
    messages = []
    for act in (tierckpt.save, lambda state, root, step: tierckpt.load(state, root)):
        with pytest.raises(LayoutError) as error:
            act(state, root, 2)
        messages.append(str(error.value))
    assert tierckpt.steps(root) == [1]
    return "\n".join(messages)


def test_partial_sums_are_refused_by_name(tmp_path: Path) -> None:
    tierckpt.save({"model": {"bias": torch.zeros(3)}}, tmp_path, 1)
    for messages in run_ranks(_saves_partial, 2, str(tmp_path)):
        assert messages.count("model/bias: Partial(sum) cannot be saved, only Shard and Replicate") == 2, messages


# torch's ShardedTensor


def _sharded(rank: int, value: torch.Tensor | None) -> Any:
    """Three rows and four rows; rank 2 has nothing."""
    from torch.distributed._shard import sharded_tensor
    from torch.distributed._shard.sharding_spec import (  # type: ignore[attr-defined]
        EnumerableShardingSpec,
        ShardMetadata,
    )

    spec = EnumerableShardingSpec(
        [
            ShardMetadata(shard_offsets=[0, 0], shard_sizes=[3, 2], placement="rank:1/cpu"),
            ShardMetadata(shard_offsets=[3, 0], shard_sizes=[4, 2], placement="rank:0/cpu"),
        ]
    )
    found = sharded_tensor.zeros(spec, 7, 2)
    if value is not None:
        for shard in found.local_shards():
            start = shard.metadata.shard_offsets[0]
            shard.tensor.copy_(value[start : start + shard.metadata.shard_sizes[0]])
    return found


_ROWS = torch.arange(14.0).reshape(7, 2)


class _Holder:
    """Saves and loads through its own state dict."""

    def __init__(self, tensor: Any) -> None:
        self.tensor, self.loaded = tensor, False

    def state_dict(self) -> dict[str, Any]:
        return {"t": self.tensor, "n": 1}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loaded = state["t"] is self.tensor


def _round_trip_of_sharded_tensors(rank: int, root: str) -> None:
    tierckpt.save(
        {"w": _sharded(rank, _ROWS), "x": [_sharded(rank, _ROWS + 1)], "o": _Holder(_sharded(rank, -_ROWS))}, root, 1
    )
    state: Any = {"w": _sharded(rank, None), "x": [_sharded(rank, None)], "o": _Holder(_sharded(rank, None))}
    adapted = tierckpt.pieces_of({"w": state["w"], "x": state["x"]})
    assert isinstance(adapted["w"], Pieces) and isinstance(adapted["x"][0], Pieces)
    kept = state["w"]
    tierckpt.load(state, root)
    assert state["w"] is kept and state["o"].loaded
    for found, right in ((state["w"], _ROWS), (state["x"][0], _ROWS + 1), (state["o"].tensor, -_ROWS)):
        for shard in found.local_shards():
            start = shard.metadata.shard_offsets[0]
            assert torch.equal(shard.tensor, right[start : start + len(shard.tensor)])


def test_sharded_tensors_of_torch(tmp_path: Path) -> None:
    run_ranks(_round_trip_of_sharded_tensors, 3, str(tmp_path))
    found = tierckpt.read(tmp_path)
    assert torch.equal(found["w"], _ROWS) and torch.equal(found["x"][0], _ROWS + 1)
    assert torch.equal(found["o"]["t"], -_ROWS)


# Megatron-core


@dataclass
class ShardedTensor:
    """The attributes by which those of Megatron-core are told."""

    key: str
    data: torch.Tensor | None
    local_shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    axis_fragmentations: tuple[int, ...] | None = None
    replica_id: Any = 0
    prepend_axis_num: int = 0
    flattened_range: slice | None = None


@dataclass
class ShardedObject:
    key: str
    data: Any

    @property
    def unique_key(self) -> str:
        return f"{self.key}/shard_0_1"


@dataclass
class ShardedTensorFactory:
    key: str


_STACK = torch.arange(4 * 6 * 5.0).reshape(4, 6, 5)  # four layers
_WORDS = torch.arange(35.0).reshape(7, 5)


def _megatron(rank: int, *, zero: bool, tp: int = 2, pp: int = 2) -> dict[str, Any]:
    """What a rank has in a pipeline of ``pp`` stages of layers that are one stack, each cut over ``tp`` along dim 1."""
    stage, shard = divmod(rank, tp)
    layers, rows = 4 // pp, 6 // tp
    decoder: dict[str, Any] = {}
    momentum: list[Any] = []
    for i in range(layers):
        at = (stage * layers + i, shard * rows, 0)
        data = _STACK[at[0], at[1] : at[1] + rows].clone()
        decoder[f"layers.{i}.weight"] = ShardedTensor(
            "decoder.layers.weight", data, (rows, 5), (4, 6, 5), at, (4, tp, 1), 0, prepend_axis_num=1
        )
        # The distributed optimizer cuts each local tensor over data-parallel ranks; here one rank has both ranges.
        flat = (data + 1000).reshape(-1)
        for lo, hi in ((0, 7), (7, rows * 5)):
            momentum.append(
                ShardedTensor(
                    "optimizer.exp_avg.decoder.layers.weight",
                    flat[lo:hi].clone(),
                    (rows, 5),
                    (4, 6, 5),
                    at,
                    (4, tp, 1),
                    prepend_axis_num=1,
                    flattened_range=slice(lo, hi),
                )
            )
    words = ShardedTensor("embedding", _WORDS.clone(), (7, 5), (7, 5), (0, 0), (1, 1), replica_id=rank)
    tree: dict[str, Any] = OrderedDict(
        model=OrderedDict(decoder, embedding=words, extra=ShardedObject("extra", {"scale": [1, 2]})),
        optimizer={"state": momentum, "lr": 0.5},
        iteration=7,
    )
    if zero:
        for tensor in (*(v for v in tree["model"].values() if isinstance(v, ShardedTensor)), *momentum):
            tensor.data.zero_()
    return tree


def _saves_megatron(rank: int, root: str) -> None:
    tierckpt.save(tierckpt.pieces_of(_megatron(rank, zero=False)), root, 1)


def _loads_megatron(rank: int, root: str, tp: int, pp: int) -> None:
    tree = _megatron(rank, zero=True, tp=tp, pp=pp)
    state = tierckpt.pieces_of(tree)
    assert sorted(state) == [
        "decoder.layers.weight",
        "embedding",
        "extra/shard_0_1",
        "iteration",
        "optimizer",
        "optimizer.exp_avg.decoder.layers.weight",
    ]
    tierckpt.load(state, root)
    right = _megatron(rank, zero=False, tp=tp, pp=pp)
    for name, tensor in tree["model"].items():
        if name != "extra":
            assert torch.equal(tensor.data, right["model"][name].data), name
    for tensor, other in zip(tree["optimizer"]["state"], right["optimizer"]["state"], strict=True):
        assert torch.equal(tensor.data, other.data)
    assert state["optimizer"] == {"lr": 0.5} and state["iteration"] == 7


def test_megatron_tensors_go_by_their_keys(tmp_path: Path) -> None:
    """The same local name is another layer on each stage of a pipeline."""
    run_ranks(_saves_megatron, 4, str(tmp_path))
    found = tierckpt.read(tmp_path)
    assert torch.equal(found["decoder.layers.weight"], _STACK)
    assert torch.equal(found["optimizer.exp_avg.decoder.layers.weight"], _STACK + 1000)
    assert torch.equal(found["embedding"], _WORDS) and found["extra/shard_0_1"] == {"scale": [1, 2]}
    run_ranks(_loads_megatron, 3, str(tmp_path), 3, 1)


def test_a_flat_range_is_few_boxes_that_share_its_memory() -> None:
    data = torch.arange(3.0, 17.0)
    tensor = ShardedTensor("m", data, (2, 3, 4), (4, 3, 4), (2, 0, 0), flattened_range=slice(3, 17))
    pieces = tierckpt.pieces_of(tensor)
    assert len(pieces.pieces) <= 5
    whole = torch.zeros(4, 3, 4)
    for offset, piece in pieces.pieces:
        whole[tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))] = piece
        piece.add_(100)
    assert whole[2:].reshape(-1).tolist() == [0.0] * 3 + list(range(3, 17)) + [0.0] * 7
    assert torch.equal(data, torch.arange(103.0, 117.0))


def test_what_cannot_be_converted_is_refused_by_name() -> None:
    empty = ShardedTensor("decoder.w", None, (2,), (4,), (0,))
    some = ShardedTensor("decoder.w", torch.ones(2), (2,), (4,), (0,))
    for value, words in (
        (empty, "decoder.w: it has no data"),
        ({"a": ShardedTensorFactory("mlp.fc1")}, "mlp.fc1: a ShardedTensorFactory.*apply_factories"),
        ({"decoder.w": 1, "b": some}, "'decoder.w' is both"),
        ({"a": [some, 1]}, "a list has both sharded tensors and other things"),
        ({"a": some, "b": ShardedTensor("decoder.w", torch.ones(2), (2,), (6,), (2,))}, "global shape is"),
        (ShardedTensor("m", torch.ones(3), (4,), (4,), (0,), flattened_range=slice(0, 4)), "is not its range"),
    ):
        with pytest.raises(StateError, match=words):
            tierckpt.pieces_of(value)


def test_other_trees_stay_as_they_are() -> None:
    tree = {"a": [torch.ones(1), {"b": (1, None)}], "c": {}}
    assert tierckpt.pieces_of(tree) is tree
    assert tierckpt.pieces_of({"a": {}, "l": []}) == {"a": {}, "l": []}


# FSDP1


class _Model(nn.Module):
    """Sizes that do not divide, two units, a tied weight, a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(5, 3)
        self.inner = nn.Sequential(nn.Linear(3, 7), nn.Linear(7, 3, bias=False))
        self.last = nn.Linear(5, 3, bias=False)
        self.last.weight = self.first.weight
        self.register_buffer("seen", torch.tensor([seed]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(self.first(x)) + self.last(x)  # type: ignore[no-any-return]


def _fsdp1(seed: int, **options: Any) -> Any:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model: Any = _Model(seed)
    plain = {"use_orig_params": True, "device_id": torch.device("cpu"), **options}
    model.inner = FullyShardedDataParallel(model.inner, **plain)
    return FullyShardedDataParallel(model, **plain)


def _trained(model: Any, steps: int) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    for step in range(steps):
        model(torch.arange(10.0).reshape(2, 5) + step).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


def _saves_fsdp1(rank: int, root: str) -> dict[str, torch.Tensor]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = _fsdp1(1)
    optimizer = _trained(model, 2)
    loss = model(torch.ones(2, 5)).sum()
    tierckpt.save({"model": model, "optimizer": optimizer}, root, 1)  # with what the forward pass has gathered
    loss.backward()
    with FullyShardedDataParallel.summon_full_params(model):
        with pytest.raises(StateError, match="has them summoned"):
            tierckpt.save({"model": model}, root, 2)
        return {
            name.replace("_fsdp_wrapped_module.", ""): parameter.detach().clone()
            for name, parameter in model.named_parameters(remove_duplicate=False)
        }


def _loads_fsdp1(rank: int, root: str, steps: int, options: dict[str, Any]) -> None:
    model = _fsdp1(5, **options)
    x = torch.arange(10.0).reshape(2, 5)
    if not options.get("use_orig_params", True):
        model(x)
        tierckpt.load({"model": model}, root, keys=["model.*"])
        right = _Model(2)
        tierckpt.load({"model": right}, root, keys=["model.*"])
        assert torch.equal(model(x), right(x))
        with pytest.raises(StateError, match=r"optimizer has flat parameters of FSDP1.*use_orig_params=True"):
            tierckpt.save({"model": model, "optimizer": torch.optim.SGD(model.parameters())}, root, 9)
        return
    optimizer = _trained(model, steps)
    if steps:
        model(x)  # what this gathers must not be used after the load
    tierckpt.load({"model": model, "optimizer": optimizer}, root)
    other = _Model(2)
    right_optimizer = torch.optim.AdamW(other.parameters(), lr=0.5)
    tierckpt.load({"model": other, "optimizer": right_optimizer}, root)
    for _ in range(2):
        found, right = model(x), other(x)
        assert torch.equal(found, right)
        found.sum().backward()
        right.sum().backward()
        optimizer.step()
        right_optimizer.step()


def test_fsdp1_is_saved_under_the_names_and_shapes_of_the_model(tmp_path: Path) -> None:
    full, *_ = run_ranks(_saves_fsdp1, 3, str(tmp_path))
    found = tierckpt.read(tmp_path)
    assert found["model"].pop("seen").tolist() == [1]
    assert found["model"].keys() == full.keys()
    assert all(torch.equal(found["model"][name], tensor) for name, tensor in full.items())
    assert found["model"]["last.weight"] is found["model"]["first.weight"]
    states = found["optimizer"]["state"]
    assert {name: tuple(state["exp_avg"].shape) for name, state in states.items()} == {
        name: tuple(tensor.shape) for name, tensor in full.items() if name != "last.weight"
    }
    assert {float(state["step"]) for state in states.values()} == {2.0}


@pytest.mark.parametrize("steps", [0, 1], ids=["fresh optimizer", "with state"])
def test_fsdp1_goes_on_in_other_layouts(tmp_path: Path, steps: int) -> None:
    run_ranks(_saves_fsdp1, 3, str(tmp_path))
    run_ranks(_loads_fsdp1, 2, str(tmp_path), steps, {})
    if steps:
        run_ranks(_loads_fsdp1, 1, str(tmp_path), steps, {})
        run_ranks(_loads_fsdp1, 2, str(tmp_path), steps, {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP})
        run_ranks(_loads_fsdp1, 2, str(tmp_path), steps, {"use_orig_params": False})


class _Custom(nn.Linear):
    def state_dict(self, *args: Any, **more: Any) -> Any:
        return super().state_dict(*args, **more)


def _refuses(rank: int, root: str) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    options: Any = {"use_orig_params": True, "device_id": torch.device("cpu")}
    model = FullyShardedDataParallel(nn.Sequential(_Custom(4, 4)), **options)
    with pytest.raises(StateError, match="model: 0 has a state dict of its own, with parameters that FSDP1"):
        tierckpt.save({"model": model}, root, 1)
    model = FullyShardedDataParallel(nn.Sequential(nn.Linear(4, 4)), **options)
    optimizer: Any = torch.optim.Adafactor(model.parameters())
    model(torch.ones(1, 4)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["row_var"] = torch.ones(4, 1)
    with pytest.raises(StateError, match=r"optimizer\.state.*row_var: state of a parameter that FSDP1 has flattened"):
        tierckpt.save({"model": model, "optimizer": optimizer}, root, 1)


def test_what_fsdp1_makes_unclear_is_refused_by_name(tmp_path: Path) -> None:
    run_ranks(_refuses, 2, str(tmp_path))


def test_names_of_pieces_can_be_mapped(tmp_path: Path) -> None:
    tierckpt.save({"decoder.w": torch.arange(6.0)}, tmp_path, 1)
    tensor = ShardedTensor("w", torch.zeros(6), (6,), (6,), (0,))
    tierckpt.load(tierckpt.pieces_of({"any": tensor}), tmp_path, mapping=Mapping([Rename("decoder.w", "w")]))
    assert tensor.data is not None and tensor.data.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]
