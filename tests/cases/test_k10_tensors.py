"""K10: a tensor's logical value is saved, bit by bit, whatever its view, dtype or class.

The arms with copies on peers and with erasure codes wait for these tiers.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.testing._internal.two_tensor import TwoTensor

import tierckpt
from tests.harness import run_ranks


def bits(tensor: torch.Tensor) -> bytes:
    """Equal for tensors whose logical values have equal bits."""
    plain = tensor.detach().resolve_conj().resolve_neg().contiguous()
    if plain.numel() == 0:
        return b""
    flat = torch.empty(0, dtype=torch.uint8).set_(plain.untyped_storage())
    begin = plain.storage_offset() * plain.element_size()
    return flat[begin : begin + plain.numel() * plain.element_size()].numpy().tobytes()


def same(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return found.dtype == wanted.dtype and found.shape == wanted.shape and bits(found) == bits(wanted)


def payload(root: Path) -> int:
    """Bytes of all shards."""
    return sum(path.stat().st_size for path in root.rglob("shard-*.safetensors"))


@pytest.mark.parametrize("blocking", [True, False], ids=["save", "async_save"])
def test_c50_conjugate_and_negative_views(tmp_path: Path, blocking: bool) -> None:
    conj = torch.tensor([1 + 2j, 3 - 4j]).conj()
    negative = torch._neg_view(torch.tensor([1.0, 3.0]))
    assert conj.is_conj() and negative.is_neg()
    state = {"c": conj, "n": negative, "both": torch._neg_view(conj)}
    if blocking:
        tierckpt.save(state, tmp_path, 1)
    else:
        tierckpt.async_save(state, tmp_path, 1).wait()
    found = tierckpt.read(tmp_path)
    assert found["c"].tolist() == [1 - 2j, 3 + 4j]
    assert found["n"].tolist() == [-1, -3]
    assert found["both"].tolist() == [-1 + 2j, -3 - 4j]
    assert not found["c"].is_conj() and not found["n"].is_neg()
    into = {
        "c": torch.zeros(2, dtype=torch.complex64).conj(),
        "n": torch._neg_view(torch.zeros(2)),
        "both": torch.zeros(2, dtype=torch.complex64),
    }
    tierckpt.load(into, tmp_path)
    assert into["c"].tolist() == [1 - 2j, 3 + 4j] and into["n"].tolist() == [-1, -3]
    assert into["both"].tolist() == [-1 + 2j, -3 - 4j]


def test_c52_empty_tensors_are_no_aliases(tmp_path: Path) -> None:
    base = torch.zeros(10, 10)
    state = {
        "a": torch.empty(0),
        "b": torch.empty(0),
        "c": torch.zeros(2, 0),
        "d": torch.zeros(0, 3, dtype=torch.int64),
        "e": base[:0],
    }
    tierckpt.save(state, tmp_path, 1)
    found = tierckpt.read(tmp_path)
    assert all(same(found[name], tensor) for name, tensor in state.items())
    assert len({id(tensor) for tensor in found.values()}) == 5
    into = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    tierckpt.load(into, tmp_path)
    assert all(same(into[name], tensor) for name, tensor in state.items())
    assert tierckpt.verify(tmp_path).ok


def test_c54_strides_are_followed_on_the_way_out_and_in(tmp_path: Path) -> None:
    state = {
        "t": torch.arange(12).reshape(3, 4).t(),
        "step": torch.arange(12).reshape(3, 4)[::2],
        "permuted": torch.arange(24).reshape(2, 3, 4).permute(2, 0, 1),
        "expanded": torch.ones(1, 1).expand(1000, 1000),
        "windows": torch.arange(6).as_strided((4, 3), (1, 1)),
    }
    tierckpt.save(state, tmp_path, 1)
    assert payload(tmp_path) <= 4_000_000 + (64 << 10)
    found = tierckpt.read(tmp_path)
    assert all(same(found[name], tensor) for name, tensor in state.items())

    base = torch.full((4, 6), -1)
    wide = torch.full((2, 8), -1)
    cube = torch.full((3, 4, 2), -1)
    into = {
        "t": base[:, ::2],
        "step": wide[:, 1::2],
        "permuted": cube.permute(1, 2, 0),
        "expanded": torch.zeros(1000, 1000).t(),
        "windows": torch.zeros(3, 4, dtype=torch.int64).t(),
    }
    tierckpt.load(into, tmp_path)
    for name, tensor in state.items():
        assert torch.equal(into[name], tensor), name
    assert bool((base[:, 1::2] == -1).all()) and bool((wide[:, ::2] == -1).all())
    shared = {**into, "expanded": torch.zeros(1, 1).expand(1000, 1000)}
    with pytest.raises(tierckpt.LayoutError, match="expanded"):
        tierckpt.load(shared, tmp_path)


def test_c56_a_small_view_costs_its_own_size(tmp_path: Path) -> None:
    base = torch.randn(5_000_000)
    tierckpt.save({"v": base[10:20]}, tmp_path / "view", 1)
    assert payload(tmp_path / "view") < 64 << 10
    assert torch.equal(tierckpt.read(tmp_path / "view")["v"], base[10:20])
    chunk = base.chunk(10)[3]
    tierckpt.save({"c": chunk}, tmp_path / "chunk", 1)
    assert 2_000_000 <= payload(tmp_path / "chunk") < 2_000_000 + (64 << 10)
    assert torch.equal(tierckpt.read(tmp_path / "chunk")["c"], chunk)


_ALL_DTYPES = """
    bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex32 complex64
    complex128 float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu float4_e2m1fn_x2
"""
#: The newest are not in every torch that is supported.
_DTYPES = [name for name in _ALL_DTYPES.split() if hasattr(torch, name)]


def _patterns(name: str) -> torch.Tensor:
    """6 rows with every byte, and so NaN payloads, −0.0 and subnormals."""
    dtype = getattr(torch, name)
    raw = torch.arange(6 * 256 * 16).to(torch.uint8).reshape(6, -1)
    if name == "bool":
        raw = raw % 2
    if dtype.itemsize > 1:
        # Rotated, so that the high bytes of an item take every value too.
        raw = torch.stack([row.roll(shift) for shift, row in enumerate(raw)]) ^ (raw // 7)
    return raw.view(dtype)


def test_c57_every_dtype_bit_by_bit(tmp_path: Path) -> None:
    state = {name: _patterns(name) for name in _DTYPES}
    state |= {f"{name} scalar": _patterns(name)[3, 5] for name in _DTYPES}
    tierckpt.save(state, tmp_path, 1)
    found = tierckpt.read(tmp_path)
    assert [name for name in state if not same(found[name], state[name])] == []
    into = {name: torch.zeros_like(t.view(torch.uint8) if t.ndim else t) for name, t in state.items()}
    into = {name: t.view(state[name].dtype) if t.ndim else t for name, t in into.items()}
    tierckpt.load(into, tmp_path)
    assert [name for name in state if not same(into[name], state[name])] == []
    assert tierckpt.verify(tmp_path).ok


def _cut_dtypes(*, zero: bool) -> dict[str, Any]:
    """Shard(0) by hand: gloo refuses to scatter some of these."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    world, rank = dist.get_world_size(), dist.get_rank()
    mesh = init_device_mesh("cpu", (world,))
    found = {}
    for name in _DTYPES:
        if name.startswith("float4"):
            continue
        whole = _patterns(name)
        local = whole[rank * 6 // world : (rank + 1) * 6 // world].clone()
        if zero:
            local.view(torch.uint8).zero_()
        found[name] = DTensor.from_local(
            local, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
        )
    return found


def _saves_dtypes(rank: int, root: str) -> None:
    tierckpt.save(_cut_dtypes(zero=False), root, 1)


def _loads_dtypes(rank: int, root: str) -> list[str]:
    found, wanted = _cut_dtypes(zero=True), _cut_dtypes(zero=False)
    tierckpt.load(found, root)
    return [name for name in found if not same(found[name].to_local(), wanted[name].to_local())]


def test_c57_every_dtype_in_another_layout(tmp_path: Path) -> None:
    run_ranks(_saves_dtypes, 2, str(tmp_path))
    assert run_ranks(_loads_dtypes, 3, str(tmp_path)) == [[]] * 3


class _Scaled(torch.Tensor):
    """An int8 tensor and a scale behind one name."""

    data8: torch.Tensor
    scale: torch.Tensor

    @staticmethod
    def __new__(cls, data8: torch.Tensor, scale: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, data8.shape, dtype=torch.float32)

    def __init__(self, data8: torch.Tensor, scale: torch.Tensor) -> None:
        self.data8, self.scale = data8, scale

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data8", "scale"], None

    @staticmethod
    def __tensor_unflatten__(inner: Any, context: Any, size: Any, stride: Any) -> _Scaled:
        return _Scaled(inner["data8"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{function}")


class _Hollow(torch.Tensor):
    """A wrapper that tells nobody what is in it."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{function}")


def _two(a: torch.Tensor, b: torch.Tensor) -> Any:
    return TwoTensor(a, b)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("blocking", [True, False], ids=["save", "async_save"])
def test_c59_wrapper_subclasses(tmp_path: Path, blocking: bool) -> None:
    two = _two(torch.arange(6.0), torch.arange(6.0) * -2)
    scaled = _Scaled(torch.arange(-5, 5, dtype=torch.int8), torch.tensor([0.25]))
    state = {"two": two, "scaled": scaled}
    if blocking:
        tierckpt.save(state, tmp_path, 1)
    else:
        tierckpt.async_save(state, tmp_path, 1).wait()
    into = {
        "two": _two(torch.zeros(6), torch.zeros(6)),
        "scaled": _Scaled(torch.zeros(10, dtype=torch.int8), torch.zeros(1)),
    }
    tierckpt.load(into, tmp_path)
    assert type(into["two"]) is TwoTensor and type(into["scaled"]) is _Scaled
    assert torch.equal(into["two"].a, two.a) and torch.equal(into["two"].b, two.b)
    assert torch.equal(into["scaled"].data8, scaled.data8) and torch.equal(into["scaled"].scale, scaled.scale)
    # Without a template their classes do not come back, their inner tensors do.
    found = tierckpt.read(tmp_path)
    assert torch.equal(found["two"]["a"], two.a) and torch.equal(found["two"]["b"], two.b)
    assert torch.equal(found["scaled"]["data8"], scaled.data8)


def test_c59_a_wrapper_without_flatten_is_refused_by_name(tmp_path: Path) -> None:
    hollow = _Hollow(torch.ones(3))
    for save in (tierckpt.save, tierckpt.async_save):
        with pytest.raises(tierckpt.StateError, match=r"a\.h.*_Hollow"):
            save({"a": {"h": hollow}, "t": torch.ones(1)}, tmp_path / "store", 1)
    assert tierckpt.latest(tmp_path / "store") is None


def _scalars(*, zero: bool) -> dict[str, Any]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    scale = 0 if zero else 1
    return {
        "s": torch.tensor(3.5) * scale,
        "i": torch.tensor(7) * scale,
        "b": torch.tensor(not zero),
        "dt": distribute_tensor(torch.tensor(2.0) * scale, mesh, [Replicate()]),
    }


def _model(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(3, 2)
    return model, torch.optim.AdamW(model.parameters())


def _saves_scalars(rank: int, root: str) -> None:
    model, optimizer = _model(0)
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
        optimizer.step()
    handle = tierckpt.async_save({**_scalars(zero=False), "model": model, "optim": optimizer}, root, 1)
    handle.wait()


def _loads_scalars(rank: int, root: str) -> None:
    model, optimizer = _model(1)
    found = _scalars(zero=True)
    tierckpt.load({**found, "model": model, "optim": optimizer}, root)
    for name, wanted in _scalars(zero=False).items():
        left, right = (t.to_local() if name == "dt" else t for t in (found[name], wanted))
        assert left.shape == () and same(left, right), name
    for state in optimizer.state.values():
        assert isinstance(state["step"], torch.Tensor) and state["step"].shape == () and state["step"] == 2


def test_c61_scalars_stay_0_dim_tensors(tmp_path: Path) -> None:
    run_ranks(_saves_scalars, 2, str(tmp_path))
    for world in (1, 2, 3):
        run_ranks(_loads_scalars, world, str(tmp_path))
    found = tierckpt.read(tmp_path)
    assert all(isinstance(found[name], torch.Tensor) and found[name].shape == () for name in ("s", "i", "b", "dt"))
    assert found["b"].dtype == torch.bool
