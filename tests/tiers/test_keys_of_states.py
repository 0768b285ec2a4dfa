"""C48: keys of a state are never paths of files."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import tierckpt

KEYS = [
    *("a/b", "../x", "/abs", "~", ".", "..", "CON", "kü中😀", "a\nb", "%2F", "x" * 300, "A", "a", "", "0", "-1", "#1"),
    *("a#0", "~values", "__metadata__", "a.b", " ", "~r", "~0", "\x1b[2J", "tierckpt.json"),
]


def test_hard_keys_come_back_and_nothing_is_written_elsewhere(tmp_path: Path) -> None:
    root = tmp_path / "in" / "store"
    state: dict[Any, Any] = {key: {"t": torch.full((3,), float(i)), "v": i} for i, key in enumerate(KEYS)}
    state |= {str(i): {"t": torch.ones(1)} for i in range(1, 3)}
    with tierckpt.Checkpointer(root, agent="off") as checkpointer:
        checkpointer.save(1, {**state, 0: {"t": torch.zeros(2)}}).wait()
    found = tierckpt.read(root)
    assert list(found) == [*state, 0]
    for i, key in enumerate(KEYS):
        assert torch.equal(found[key]["t"], state[key]["t"])
        assert found[key]["v"] == i
    assert [path.name for path in tmp_path.iterdir()] == ["in"]
    assert [path.name for path in (tmp_path / "in").iterdir()] == ["store"]
    assert tierckpt.verify(root).ok


def test_a_key_with_nul_is_refused_by_name(tmp_path: Path) -> None:
    with (
        tierckpt.Checkpointer(tmp_path / "store", agent="off") as checkpointer,
        pytest.raises(tierckpt.StateError, match=r"a\\x00b.*NUL"),
    ):
        checkpointer.save(1, {"a\x00b": torch.ones(1)})
