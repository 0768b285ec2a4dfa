"""What only a real GPU can show. Skipped where there is none; ``benchmarks/gpu.py`` runs it before it measures."""

from __future__ import annotations

import subprocess
import sys
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierckpt
from tierckpt import Checkpointer, TornSnapshotError, _native
from tierckpt.snapshot import fence
from tierckpt.state.devices import COPIED, HOST, gpus, place
from tierckpt.state.layout import describe
from tierckpt.state.rows import LocalRows, Wanted

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    device = gpus.device(0)
    assert device is not None, "the driver could not be used"
    assert device.has_kernels, "built without nvcc, or the kernels do not load on this GPU"
    yield
    fence.wait()
    torch.cuda.synchronize()


def model_of(layers: int = 4, width: int = 512) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(layers)]).cuda()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, width: int = 512) -> None:
    optimizer.zero_grad()
    model(torch.randn(32, width, device="cuda")).square().mean().backward()
    optimizer.step()


def copy_of(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """On the GPU and in the order of training: no wait."""
    found = {f"model/{name}": tensor.clone() for name, tensor in state["model"].state_dict().items()}
    for i, entry in enumerate(state["optimizer"].state.values()):
        found |= {f"{i}/{key}": value.clone() for key, value in entry.items() if isinstance(value, torch.Tensor)}
    return found


def read(root: Path, step: int) -> dict[str, torch.Tensor]:
    saved = tierckpt.read(root, step=step)
    found = {f"model/{name}": tensor for name, tensor in saved["model"].items()}
    for i, entry in enumerate(saved["optimizer"]["state"].values()):
        found |= {f"{i}/{key}": value for key, value in entry.items() if isinstance(value, torch.Tensor)}
    return found


OPTIMIZERS = [
    pytest.param(torch.optim.AdamW, {"fused": True}, id="fused"),
    pytest.param(torch.optim.AdamW, {"foreach": True}, id="foreach"),
    pytest.param(torch.optim.AdamW, {"capturable": True}, id="capturable"),
    pytest.param(torch.optim.SGD, {"momentum": 0.9}, id="sgd"),
]


@pytest.mark.parametrize(("kind", "more"), OPTIMIZERS)
@pytest.mark.parametrize("agent", ["off", "auto"])
def test_a_racing_optimizer_never_tears(tmp_path: Path, kind: Any, more: dict[str, Any], agent: str) -> None:
    model = model_of()
    optimizer = kind(model.parameters(), lr=1e-3, **more)
    state = {"model": model, "optimizer": optimizer}
    train(model, optimizer)
    kept = {}
    with Checkpointer(tmp_path / "s", agent=agent) as ckpt:
        for step in range(20):
            kept[step] = copy_of(state)
            ckpt.save(step, state)
            train(model, optimizer)
        ckpt.wait()
    steps = tierckpt.steps(tmp_path / "s")
    assert steps
    for step in steps:
        found = read(tmp_path / "s", step)
        assert found.keys() == kept[step].keys()
        for name, tensor in kept[step].items():
            assert torch.equal(found[name], tensor.cpu()), (step, name)


VIEWS = {
    "dense": lambda: torch.randn(1000, device="cuda"),
    "large": lambda: torch.randn(3 << 20, device="cuda"),
    "transposed": lambda: torch.randn(300, 500, device="cuda").t(),
    "sliced": lambda: torch.randn(100, 64, device="cuda")[:, 3:17:2],
    "misaligned": lambda: torch.randn(1001, device="cuda").view(torch.uint8)[3:2001],
    "bfloat16": lambda: torch.randn(333, device="cuda", dtype=torch.bfloat16),
    "float8": lambda: torch.randn(77, device="cuda").to(torch.float8_e4m3fn),
    "bool": lambda: torch.rand(55, device="cuda") > 0.5,
    "expanded": lambda: torch.randn(1, 40, device="cuda").expand(30, 40),
    "scalar": lambda: torch.tensor(2.5, device="cuda"),
    "permuted": lambda: torch.randn(3, 4, 5, 6, device="cuda").permute(3, 1, 0, 2),
    "many dimensions": lambda: torch.randn(2, 3, 2, 3, 2, 3, 2, 3, device="cuda").permute(7, 5, 3, 1, 6, 4, 2, 0),
    "conjugate": lambda: torch.randn(50, device="cuda", dtype=torch.complex64).conj(),
    "empty": lambda: torch.empty(0, 4, device="cuda"),
}


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.cpu().resolve_conj().reshape(-1).view(torch.uint8)


def test_every_kind_of_tensor_arrives(tmp_path: Path) -> None:
    state = {name: make() for name, make in VIEWS.items()}
    assert place(state["many dimensions"]) == place(state["conjugate"]) == COPIED
    assert place(state["permuted"]) == 0 and place(torch.ones(1)) == HOST
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items() if name != "expanded"}
    tierckpt.save(state, tmp_path / "sync", step=1)
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        for step in range(3):
            ckpt.save(step, state).wait()
    for root in (tmp_path / "s", tmp_path / "sync"):
        found = tierckpt.read(root)
        for name, tensor in state.items():
            assert found[name].shape == tensor.shape
            assert torch.equal(_bytes(found[name]), _bytes(tensor)), name
    tierckpt.load(into, tmp_path / "s", strict=False)
    for name, tensor in into.items():
        assert torch.equal(_bytes(tensor), _bytes(state[name])), name


def test_ten_thousand_small_tensors(tmp_path: Path) -> None:
    state = {f"t{i}": torch.full((i % 50 + 1,), float(i), device="cuda") for i in range(10_000)}
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        for step in range(3):
            ckpt.save(step, state).wait()
    found = tierckpt.read(tmp_path / "s")
    assert all((found[name] == float(name[1:])).all() for name in state)


def test_fingerprints_are_those_of_the_host() -> None:
    others = ("empty", "conjugate", "many dimensions", "expanded")
    tensors = {name: make() for name, make in VIEWS.items() if name not in others}
    same = {name: torch.empty_strided(t.shape, t.stride(), dtype=t.dtype).copy_(t) for name, t in tensors.items()}

    def rows(held: dict[str, torch.Tensor]) -> tuple[_native.CopyTable, array[int]]:
        wanted, at = [], 0
        for name, tensor in held.items():
            wanted.append(Wanted(name, 0, at, None))
            at += tensor.nbytes
        local = LocalRows({name: describe(tensor, name=name) for name, tensor in held.items()}, wanted)
        return local.rows.table(), local.pointers(held)[0]

    device = gpus.device(0)
    assert device is not None
    job = device.job(gpus.stream(0))
    number = job.fingerprint(*rows(tensors))
    job.mark()
    job.wait()
    assert job.sums(number) == _native.fingerprints(*rows(same))


def test_what_no_optimizer_owns_is_copied_before_later_work(tmp_path: Path) -> None:
    average = torch.zeros(32 << 20, device="cuda")
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        handles = []
        for step in range(6):
            average += 1
            handles.append(ckpt.save(step, {"average": average}))
        for step, handle in enumerate(handles):
            handle.wait()
            assert (tierckpt.read(tmp_path / "s", step=step)["average"] == step + 1).all()


def test_a_change_without_a_step_is_torn(tmp_path: Path) -> None:
    model = nn.Linear(4096, 4096, device="cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    ckpt = Checkpointer(tmp_path / "s", agent="off")
    state = {"model": model, "optimizer": optimizer}
    ckpt.save(0, state).wait()
    torch.cuda._sleep(200_000_000)  # the copy comes after it
    handle = ckpt.save(1, state)
    with torch.no_grad():
        model.weight.add_(1)
    with pytest.raises(TornSnapshotError):
        handle.wait()
    ckpt.close()


def test_a_step_that_is_captured_and_replayed(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(1e-3, device="cuda"), capturable=True)
    state = {"model": model, "optimizer": optimizer}
    data = torch.randn(32, 512, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            model(data).square().mean().backward()
            optimizer.step()
    torch.cuda.current_stream().wait_stream(side)
    kept = {}
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        kept[0] = copy_of(state)
        ckpt.save(0, state)  # under way while the graph is captured
        graph = torch.cuda.CUDAGraph()
        optimizer.zero_grad(set_to_none=True)
        with torch.cuda.graph(graph):
            model(data).square().mean().backward()
            optimizer.step()
        for step in range(1, 8):
            graph.replay()
            kept[step] = copy_of(state)
            ckpt.save(step, state)
        ckpt.wait()
    for step in tierckpt.steps(tmp_path / "s"):
        found = read(tmp_path / "s", step)
        assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in kept[step].items()), step


def test_training_on_another_stream(tmp_path: Path) -> None:
    model = model_of()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    state = {"model": model, "optimizer": optimizer}
    kept = {}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream), Checkpointer(tmp_path / "s", agent="off") as ckpt:
        for step in range(10):
            train(model, optimizer)
            kept[step] = copy_of(state)
            ckpt.save(step, state)
        ckpt.wait()
        stream.synchronize()
    for step in tierckpt.steps(tmp_path / "s"):
        found = read(tmp_path / "s", step)
        assert all(torch.equal(found[name], tensor.cpu()) for name, tensor in kept[step].items()), step


TRAINER = """
import sys, torch, tierckpt
from tests.gpu.test_gpu import model_of, train
root = sys.argv[1]
model = model_of(width=256)
optimizer = torch.optim.AdamW(model.parameters(), fused=True)
ckpt = tierckpt.Checkpointer(root, tiers=[tierckpt.Ram(), tierckpt.Disk(every=1_000_000)])
for step in range(1_000_000):
    train(model, optimizer, 256)
    torch.save(model.state_dict(), f"{root}-{step}.pt")
    ckpt.save(step, {"model": model, "optimizer": optimizer}).wait("ram")
    print(step, flush=True)
"""


def test_a_trainer_that_is_killed_is_restored_from_memory(tmp_path: Path) -> None:
    root = tmp_path / "s"
    with subprocess.Popen([sys.executable, "-c", TRAINER, str(root)], stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        for line in trainer.stdout:
            if int(line) == 5:
                break
        trainer.kill()
    for path in root.rglob("*.safetensors"):
        path.unlink()  # only memory has it
    model = model_of(width=256)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    with Checkpointer(root) as ckpt:
        info = ckpt.restore({"model": model, "optimizer": optimizer})
    assert info is not None and info.step >= 5 and "ram" in info.sources
    expected = torch.load(f"{root}-{info.step}.pt", weights_only=True)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in model.state_dict().items())


def test_no_memory_of_the_gpu_is_taken(tmp_path: Path) -> None:
    state = {"w": torch.ones(64 << 20, device="cuda"), "s": torch.ones(50, 40, device="cuda").t()}
    with Checkpointer(tmp_path / "s", agent="off") as ckpt:
        ckpt.save(0, state).wait()
        torch.cuda.synchronize()
        before, allocated = torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated()
        for step in range(1, 5):
            ckpt.save(step, state).wait()
        assert torch.cuda.memory_allocated() == allocated
        assert before - torch.cuda.mem_get_info()[0] < 16 << 20
