"""K09: keys and containers keep type and order, whatever is in them, and a cycle of save and load changes nothing.

The arm of C48 on an object store waits for that tier.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tierckpt
from tests.cases.common import files, shard_of


def _scheduler() -> torch.optim.lr_scheduler.MultiStepLR:
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, milestones=[25, 25, 40], gamma=0.5)


def _typed(value: Any) -> Any:
    """``value`` so that equality sees types and order too."""
    if isinstance(value, dict):
        return type(value).__name__, [(_typed(k), _typed(v)) for k, v in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [_typed(item) for item in value]
    return type(value).__name__, value


_ODD: dict[str, Any] = {
    "keys": {1: "x", -3: "y", (1, 2): "t", None: "n", 2.5: "f"},
    "true": {True: "z"},
    "counter": Counter({25: 2, 3: 1}),
    "ordered": OrderedDict([("b", 1), ("a", 2)]),
    "empty": [{}, [], (), set(), OrderedDict(), Counter()],
    "with a tensor": {2: torch.ones(2), "2": torch.zeros(3), -1: {}, None: [], True: OrderedDict()},
}


def test_c44_keys_and_containers_keep_their_types(tmp_path: Path) -> None:
    scheduler = _scheduler()
    for _ in range(30):
        scheduler.optimizer.step()
        scheduler.step()
    state: dict[str, Any] = {"scheduler": scheduler, "odd": _ODD}
    shards = []
    for cycle in range(3):
        tierckpt.save(state, tmp_path, cycle)
        shards.append(shard_of(tmp_path, cycle).read_bytes())
        found = tierckpt.read(tmp_path, step=cycle)
        tensors = found["odd"].pop("with a tensor")
        assert _typed(found["odd"]) == _typed({k: v for k, v in _ODD.items() if k != "with a tensor"})
        assert [_typed(key) for key in tensors] == [_typed(key) for key in _ODD["with a tensor"]]
        assert torch.equal(tensors[2], torch.ones(2)) and torch.equal(tensors["2"], torch.zeros(3))
        assert _typed([tensors[-1], tensors[None], tensors[True]]) == _typed([{}, [], OrderedDict()])
        assert _typed(found["scheduler"]) == _typed(scheduler.state_dict())
        fresh = _scheduler()
        odd = {**_ODD, "with a tensor": {2: torch.zeros(2), "2": torch.ones(3), -1: 0, None: 0, True: 0}}
        odd["keys"] = {}
        state = {"scheduler": fresh, "odd": odd}
        tierckpt.load(state, tmp_path, step=cycle)
        assert _typed(fresh.state_dict()) == _typed(scheduler.state_dict())
        assert type(fresh.state_dict()["milestones"]) is Counter
        assert _typed(odd["keys"]) == _typed(_ODD["keys"])
    assert shards[0] == shards[1] == shards[2]


def test_c46_plain_values_are_updated_in_the_dict_given(tmp_path: Path) -> None:
    saved = {
        "epoch": 20,
        "name": "a",
        "t": torch.ones(2),
        "nested": {"lr": 0.1, "done": True, "none": None},
    }
    tierckpt.save(saved, tmp_path, 1)
    nested = {"lr": 0.0, "done": False, "none": 1}  # no tensors in it: replaced as a whole
    given: dict[str, Any] = {"epoch": 0, "name": "", "t": torch.zeros(2), "nested": nested}
    tensor = given["t"]
    tierckpt.load(given, tmp_path)
    assert given["t"] is tensor and torch.equal(tensor, torch.ones(2))
    given.pop("t"), saved.pop("t")
    assert _typed(given) == _typed(saved)


_KEYS = [
    "a/b",
    "../x",
    "/abs",
    "~",
    ".",
    "..",
    "CON",
    "k\u00fc\u4e2d\U0001f600",
    "a\nb",
    "%2F",
    "k" * 300,
    "A",
    "a",
    "",
    "a.b",
    "#",
    "1",
    "~s1",
    "__metadata__",
    "~values",
]


def test_c48_odd_keys_name_nothing_but_leaves(tmp_path: Path) -> None:
    tree = {key: torch.full((3,), number) for number, key in enumerate(_KEYS)}
    values = {key: number for number, key in enumerate(_KEYS)}
    nested = {"a": {"b": torch.full((2,), 7)}}
    root = tmp_path / "in" / "store"
    tierckpt.save({"tree": tree, "values": values, "nested": nested}, root, 1)
    found = tierckpt.read(root)
    assert list(found["tree"]) == _KEYS
    assert all(torch.equal(found["tree"][key], tree[key]) for key in _KEYS)
    assert _typed(found["values"]) == _typed(values)
    template = {key: torch.zeros(3, dtype=torch.int64) for key in _KEYS}
    tierckpt.load({"tree": template}, root, strict=False)
    assert all(torch.equal(template[key], tree[key]) for key in _KEYS)
    assert sorted(path.name for path in tmp_path.rglob("*") if path.is_file() and root not in path.parents) == []
    assert len(files(root)) == 7  # what the store is, the layout, two links, manifest, shard, receipt
    assert tierckpt.verify(root).ok


@pytest.mark.parametrize("value", [torch.ones(1), 5], ids=["tensor", "value"])
def test_c48_a_key_with_nul_is_refused_by_name(tmp_path: Path, value: Any) -> None:
    with pytest.raises(tierckpt.StateError, match=r"a.*x00.*b"):
        tierckpt.save({"a\x00b": value, "t": torch.ones(1)}, tmp_path / "store", 1)
    assert tierckpt.latest(tmp_path / "store") is None
