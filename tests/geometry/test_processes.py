"""Protects resharding of real parallel models: what FSDP2, tensor parallelism, pipelines and experts hold in real
processes of torch comes back in any other form, sizes that do not divide included, with its optimizer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierckpt
from tests import lacks
from tests.geometry import layers
from tests.geometry.layers import LEARNING_RATE, SIZES, Form, Layers
from tests.harness import run_ranks

PLAIN: Form = ("plain",)
MESHES: list[Form] = [("fsdp_tp", dp, tp) for dp in range(1, 11) for tp in range(1, 11) if dp * tp <= 10]
OTHERS: list[Form] = [
    ("fsdp", 3),
    ("fsdp", 7),
    ("tp", 2),
    ("tp", 5),
    ("hsdp", 2, 2),
    ("hsdp", 2, 3),
    ("hsdp_tp", 2, 2, 2),
    ("hsdp_tp", 2, 1, 3),
]


def job(form: Form, sizes: Sequence[int], save: Path | None = None, loads: Sequence[Path] = ()) -> None:
    """One job of torch: see `layers.save_and_load`."""
    args = (form, sizes, None if save is None else str(save), [str(root) for root in loads])
    if form == PLAIN:
        wrong = [layers.save_and_load(0, *args)]
    else:
        wrong = run_ranks(layers.save_and_load, layers.world_of(form), *args, timeout=150.0)
    assert not any(wrong), "\n".join(line for lines in wrong for line in lines)


def reads(root: Path, sizes: Sequence[int]) -> None:
    """Without a template, too, the whole parameters are there."""
    assert tierckpt.verify(root).ok
    found = tierckpt.read(root)["model"]
    right = Layers(sizes, true=True).state_dict()
    assert list(found) == list(right)
    assert all(torch.equal(found[name], right[name]) for name in right)


@lacks.fsdp2_cuts_unevenly
def test_sizes_that_do_not_divide_over_fsdp_and_tp(tmp_path: Path) -> None:
    first, second = tmp_path / "dp3tp2", tmp_path / "dp2tp2"
    sizes = (1, 5, 13, 19, 25)
    job(("fsdp_tp", 3, 2), sizes, save=first)
    reads(first, sizes)
    job(PLAIN, sizes, loads=[first])
    job(("fsdp_tp", 2, 2), sizes, save=second, loads=[first, second])
    reads(second, sizes)
    job(PLAIN, sizes, loads=[second])


def test_replicas_and_tensor_parallelism_alone(tmp_path: Path) -> None:
    plain, hsdp, tp = tmp_path / "plain", tmp_path / "hsdp", tmp_path / "tp"
    sizes = (2, 3, 7)
    job(PLAIN, sizes, save=plain)
    job(("hsdp", 2, 2), sizes, save=hsdp, loads=[plain])
    job(("tp", 3), sizes, save=tp, loads=[plain, hsdp])
    job(PLAIN, sizes, loads=[hsdp, tp])


CHUNKS = 7


@pytest.mark.acceptance
@pytest.mark.limit(600)
@lacks.fsdp2_cuts_unevenly
@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_every_mesh_of_up_to_ten_ranks(tmp_path: Path, chunk: int) -> None:
    """All FSDP2 × TP meshes and some others, with sizes from 1 to 25: each is saved, read plainly, loaded by others."""
    forms = [*MESHES, *OTHERS]
    random.Random(20).shuffle(forms)
    forms = forms[chunk::CHUNKS]
    roots = [tmp_path / "x".join(map(str, form)) for form in forms]
    for number, form in enumerate(forms):
        job(form, SIZES, save=roots[number], loads=roots[max(0, number - 2) : number])
        reads(roots[number], SIZES)
    job(PLAIN, SIZES, loads=roots)
    # Those which came first have not seen the others.
    for form in forms[:2]:
        job(form, SIZES, loads=roots[-2:])


# Dimensions other than the first


def _columns(rank: int, shapes: list[list[int]], sizes: tuple[int, ...], save: str | None, load: str | None) -> None:
    """Tensors cut along their last dimension, and along all dimensions of the mesh in turn."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", sizes)
    placements: list[list[Any]] = [
        [Shard(-1)] * len(sizes),
        [Shard(d % 2) for d in range(len(sizes))],
        [Shard(1), *[Replicate()] * (len(sizes) - 1)],
    ]

    def tensors(true: bool) -> dict[str, Any]:
        found = {}
        for shape in shapes:
            whole = torch.arange(1, 1 + torch.Size(shape).numel()).reshape(shape) * true
            for number, placed in enumerate(placements):
                found[f"{shape}/{number}"] = distribute_tensor(whole, mesh, placed)
        return found

    right = tensors(True)
    if save is not None:
        tierckpt.save(right, save, 1)
    if load is not None:
        found = tensors(False)
        tierckpt.load(found, load)
        assert all(torch.equal(layers.local(found[name]), layers.local(right[name])) for name in right)


def test_uneven_cuts_of_other_dimensions(tmp_path: Path) -> None:
    shapes = [[3, 7], [1, 5], [2, 1], [5, 3, 2]]
    first, second = str(tmp_path / "1"), str(tmp_path / "2")
    run_ranks(_columns, 3, shapes, (3,), first, None)
    run_ranks(_columns, 4, shapes, (2, 2), second, first)
    run_ranks(_columns, 3, shapes, (3,), None, second)
    for name, tensor in tierckpt.read(second).items():
        assert torch.equal(tensor.flatten(), torch.arange(1, 1 + tensor.numel())), name


# Pipelines: stages hold different modules, and their optimizers' groups have the same positions

LAYERS = 4


def _pipeline(stages: Sequence[Sequence[int]], stage: int, dp: int, *, true: bool) -> dict[str, Any]:
    """Stage number ``stage`` over ``dp`` ranks of FSDP2 (0: plain); each layer has a group with a rate of its own."""
    model = nn.Module()
    for number in stages[stage]:
        model.add_module(f"layer{number}", nn.Linear(3, 5 + number))
        layers.number_parameters(model.get_submodule(f"layer{number}"), true=true, start=100 * number)
    if dp:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (len(stages), dp), mesh_dim_names=("pp", "dp"))
        for layer in model.children():
            fully_shard(layer, mesh=mesh["dp"])
    groups = [{"params": list(layer.parameters())} for layer in model.children()]
    optimizer = torch.optim.AdamW(groups, lr=0.0, weight_decay=0.0)
    layers.step(model, optimizer)
    if true:
        layers.mark(optimizer)
        for number, group in zip(stages[stage], optimizer.param_groups, strict=True):
            group["lr"] = LEARNING_RATE * (number + 1)
    return {"model": model, "optimizer": optimizer}


def _pipelined(
    rank: int, stages: Sequence[Sequence[int]], dp: int, save: str | None, loads: Sequence[str]
) -> list[str]:
    stage = rank // max(dp, 1)
    right = _pipeline(stages, stage, dp, true=True)
    if save is not None:
        tierckpt.save(right, save, 1)
    wrong = []
    for root in loads:
        found = _pipeline(stages, stage, dp, true=False)
        tierckpt.load(found, root)
        wrong += layers.differences(found, right)
    return wrong


def test_pipeline_stages_split_otherwise(tmp_path: Path) -> None:
    halves, thirds, whole = [[0, 1], [2, 3]], [[0], [1, 2], [3]], [range(LAYERS)]
    first, second = str(tmp_path / "halves"), str(tmp_path / "thirds")
    assert run_ranks(_pipelined, 4, halves, 2, first, []) == [[]] * 4
    assert run_ranks(_pipelined, 3, thirds, 1, second, [first]) == [[]] * 3
    assert run_ranks(_pipelined, 2, halves, 0, None, [first, second]) == [[]] * 2
    assert _pipelined(0, whole, 0, None, [first, second]) == []


# Experts: each rank has some of them, the dense layers are everywhere

EXPERTS = 5


def _experts(ep: int, dp: int, rank: int, *, true: bool) -> dict[str, Any]:
    """Experts dealt out to ``ep`` groups of ``dp`` ranks of FSDP2 (ep=0: plain, all of them)."""
    mine = range(EXPERTS) if not ep else range(rank // dp, EXPERTS, ep)
    model = nn.Module()
    dense, experts = nn.Linear(3, 7), nn.ModuleDict({f"e{k}": nn.Linear(3, 1 + k) for k in mine})
    layers.number_parameters(dense, true=true)
    for k in mine:
        layers.number_parameters(experts[f"e{k}"], true=true, start=100 + 10 * k)
    model.add_module("dense", dense)
    model.add_module("experts", experts)
    stacked: Any = torch.arange(1.0, 1 + EXPERTS * 3 * 2).reshape(EXPERTS, 3, 2) * true
    if ep:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard
        from torch.distributed.tensor import Shard, distribute_tensor

        mesh = init_device_mesh("cpu", (ep, dp), mesh_dim_names=("ep", "dp"))
        for expert in experts.values():
            fully_shard(expert, mesh=mesh["dp"])
        fully_shard(dense, mesh=init_device_mesh("cpu", (ep * dp,)))
        stacked = distribute_tensor(stacked, mesh, [Shard(0), Shard(1)])
    model.register_parameter("stacked", nn.Parameter(stacked))
    return {"model": model, "optimizer": layers.optimizer_of(model, true=true)}


def _with_experts(rank: int, ep: int, dp: int, save: str | None, loads: Sequence[str]) -> list[str]:
    right = _experts(ep, dp, rank, true=True)
    if save is not None:
        tierckpt.save(right, save, 1)
    wrong = []
    for root in loads:
        found = _experts(ep, dp, rank, true=False)
        tierckpt.load(found, root)
        wrong += layers.differences(found, right)
    return wrong


def test_experts_dealt_out_otherwise(tmp_path: Path) -> None:
    first, second = str(tmp_path / "ep2dp2"), str(tmp_path / "ep3dp1")
    assert run_ranks(_with_experts, 4, 2, 2, first, []) == [[]] * 4
    assert run_ranks(_with_experts, 3, 3, 1, second, [first]) == [[]] * 3
    assert _with_experts(0, 0, 0, None, [first, second]) == []
    assert run_ranks(_with_experts, 4, 2, 2, None, [second]) == [[]] * 4
