"""K08: what does not have the saved shape and dtype is refused by name before anything is touched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt
from tests.harness import run_ranks
from tierckpt import LayoutError

_SAVED = torch.arange(12.0).reshape(3, 4)
_SHAPES = [(4, 4), (2, 4), (4, 3), (12,), (3, 4, 1)]


@pytest.mark.parametrize("shape", _SHAPES, ids=str)
@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("cast", [True, False])
def test_c39_another_shape_is_refused(tmp_path: Path, shape: tuple[int, ...], strict: bool, cast: bool) -> None:
    tierckpt.save({"w": _SAVED, "v": torch.ones(2)}, tmp_path, 1)
    template = {"w": torch.zeros(shape), "v": torch.zeros(2)}
    with pytest.raises(LayoutError) as caught:
        tierckpt.load(template, tmp_path, strict=strict, cast=cast)
    text = str(caught.value)
    assert "w" in text and "(3, 4)" in text and str(shape) in text
    assert not template["w"].any() and not template["v"].any()


def _shards_do_not_fit(rank: int, root: str) -> list[tuple[str, bool]]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    tierckpt.save({"w": distribute_tensor(_SAVED, mesh, [Shard(0)]), "v": torch.ones(2)}, root, 1)
    found = []
    for shape in _SHAPES:
        template: dict[str, Any] = {"w": distribute_tensor(torch.zeros(shape), mesh, [Shard(0)]), "v": torch.zeros(2)}
        with pytest.raises(LayoutError) as caught:
            tierckpt.load(template, root)
        clean = not template["w"].to_local().any() and not template["v"].any()
        found.append((str(caught.value), bool(clean)))
    return found


def test_c39_another_shape_is_refused_on_all_ranks(tmp_path: Path) -> None:
    first, second = run_ranks(_shards_do_not_fit, 2, str(tmp_path))
    assert first == second
    for (text, clean), shape in zip(first, _SHAPES, strict=True):
        assert clean
        assert "w" in text and "(3, 4)" in text and str(shape) in text


def _one_rank_does_not_fit(rank: int, root: str) -> tuple[str, bool]:
    tierckpt.save({"w": _SAVED}, root, 1)
    template = {"w": torch.zeros(3, 4) if rank else torch.zeros(4, 3)}
    with pytest.raises(LayoutError) as caught:
        tierckpt.load(template, root)
    return str(caught.value), bool(template["w"].any())


def test_c39_a_misfit_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    for text, touched in run_ranks(_one_rank_does_not_fit, 2, str(tmp_path)):
        assert "rank 0" in text and "(3, 4)" in text and "(4, 3)" in text
        assert not touched


_WIDE = {
    "w64": torch.tensor([16777217.0], dtype=torch.float64),
    "i": torch.tensor([300]),
    "f": torch.tensor([1e-8, 65504 * 2], dtype=torch.float32),
}
_DTYPES = [torch.float32, torch.int8, torch.float16, torch.bfloat16, torch.bool]


def _templates(name: str, dtype: torch.dtype) -> dict[str, Any]:
    return {name: torch.zeros(_WIDE[name].shape, dtype=dtype)}


@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, saved in _WIDE.items() for dtype in _DTYPES if dtype != saved.dtype]
)
def test_c41_another_dtype_is_refused_by_default(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    tierckpt.save(_WIDE, tmp_path, 1)
    template = _templates(name, dtype)
    with pytest.raises(LayoutError) as caught:
        tierckpt.load(template, tmp_path, keys=[name])
    text = str(caught.value)
    saved, wanted = (str(kind).removeprefix("torch.") for kind in (_WIDE[name].dtype, dtype))
    assert name in text and saved in text and wanted in text
    assert not template[name].any()


#: (name, dtype) of what an integer type cannot hold.
_REFUSED = {("w64", torch.int8), ("i", torch.int8), ("f", torch.int8)}


@pytest.mark.parametrize("dtype", _DTYPES, ids=str)
@pytest.mark.parametrize("name", list(_WIDE))
def test_c41_cast_is_what_torch_does_but_never_wraps_an_integer(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    tierckpt.save(_WIDE, tmp_path, 1)
    template = _templates(name, dtype)
    if (name, dtype) in _REFUSED:
        with pytest.raises(LayoutError, match=f"(?s){name}.*int8 cannot hold"):
            tierckpt.load(template, tmp_path, keys=[name], cast=True)
        assert not template[name].any()
    else:
        tierckpt.load(template, tmp_path, keys=[name], cast=True)
        assert torch.equal(template[name], _WIDE[name].to(dtype))


def _casts(rank: int, root: str) -> tuple[str, bool, bool]:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    big = torch.tensor([1, 2, 3, 300])  # only rank 1 holds what overflows
    tierckpt.save({"i": distribute_tensor(big, mesh, [Shard(0)])}, root, 1)
    narrow = distribute_tensor(torch.zeros(4, dtype=torch.int8), mesh, [Shard(0)])
    with pytest.raises(LayoutError) as caught:
        tierckpt.load({"i": narrow}, root, cast=True)
    wide = distribute_tensor(torch.zeros(4, dtype=torch.float16), mesh, [Shard(0)])
    tierckpt.load({"i": wide}, root, cast=True)
    right = torch.equal(wide.to_local(), big.half()[2 * rank : 2 * rank + 2])
    return str(caught.value), bool(narrow.to_local().any()), right


def test_c41_an_overflow_on_one_rank_touches_nothing_on_any(tmp_path: Path) -> None:
    for text, touched, right in run_ranks(_casts, 2, str(tmp_path)):
        assert "rank 1" in text and "i" in text and "int8" in text
        assert not touched and right
