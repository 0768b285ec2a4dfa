"""What belongs to one rank comes back to it, tensors included; boxes that cannot be are refused when made."""

from __future__ import annotations

from collections import namedtuple
from typing import Any

import pytest
import torch

from tests.state.kept import Kept
from tierckpt.errors import IntegrityError, StateError
from tierckpt.state.marks import PerRank, Pieces, rebuild

Pair = namedtuple("Pair", ["left", "right"])


def test_a_value_of_one_rank_is_set() -> None:
    state = {"r": PerRank({"seen": 0})}
    Kept.of({"r": PerRank({"seen": 3, "by": (1, 2)})}).load(state)
    assert state["r"].value == {"seen": 3, "by": (1, 2)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_tensors_of_one_rank_come_back_as_tensors(dtype: torch.dtype) -> None:
    values = torch.tensor([0, 1, 2]).to(dtype)
    state: dict[str, Any] = {"r": PerRank({"a": values, "b": [1, (values[:1], Pair(torch.tensor(7), 4))]})}
    kept = Kept.of(state)
    assert not kept.tensors
    found = kept.read()["r"]
    assert torch.equal(found["a"], values)
    assert found["a"].dtype == dtype
    assert found["b"][1][1][0].item() == 7
    template: dict[str, Any] = {
        "r": PerRank({"a": torch.zeros(3, dtype=dtype), "b": [0, (None, Pair(torch.tensor(0), 0))]})
    }
    live = template["r"].value["a"]
    kept.load(template)
    assert template["r"].value["a"] is live
    assert torch.equal(live, values)
    assert isinstance(template["r"].value["b"][1][1], Pair)
    assert torch.equal(template["r"].value["b"][1][0], values[:1])


def test_a_bare_tensor_and_an_empty_one() -> None:
    for tensor in (torch.arange(3.0), torch.zeros(0, 2), torch.tensor(3.5), torch.tensor([1 + 2j]).conj()):
        found = Kept.of({"r": PerRank(tensor)}).read()["r"]
        assert found.shape == tensor.shape
        assert torch.equal(found, tensor)


def test_a_value_that_looks_like_a_captured_one_is_no_confusion() -> None:
    captured = PerRank({"a": torch.ones(1)}).capture()
    found = Kept.of({"r": PerRank(captured)}).read()["r"]
    assert found == captured


def test_an_object_with_a_state_dict_is_captured_through_it() -> None:
    class Loader:
        def __init__(self) -> None:
            self.at = 0

        def state_dict(self) -> dict[str, Any]:
            return {"at": self.at, "shuffle": torch.arange(3)}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.at = state["at"]
            self.shuffle = state["shuffle"]

    saved, state = Loader(), Loader()
    saved.at = 7
    Kept.of({"r": PerRank(saved)}).load({"r": PerRank(state)})
    assert state.at == 7
    assert torch.equal(state.shuffle, torch.arange(3))


def test_what_is_not_a_captured_value_is_refused() -> None:
    for value in (5, (1,), (1, [((), torch.float32, (3,), b"xx")]), (1, 2), ([], [((4,), 1, (1,), b"")])):
        with pytest.raises(IntegrityError, match="r: not a value that was saved per rank"):
            rebuild(value, what="r")


def test_saved_per_rank_and_wanted_otherwise() -> None:
    assert Kept.of({"r": PerRank(1)}).problems({"r": 1}) == [
        "r: saved as a PerRank value, the state has a plain value (int)"
    ]
    assert "the state has a PerRank value" in Kept.of({"r": torch.ones(1)}).problems({"r": PerRank(1)})[0]


def test_pieces_are_filled() -> None:
    saved = {"w": Pieces((4, 2), [((0, 0), torch.zeros(2, 2)), ((2, 0), torch.ones(2, 2))])}
    state = {"w": Pieces((4, 2), [((1, 0), torch.full((2, 2), 9.0))])}
    target = Kept.of(saved).load(state)
    assert target.tensors["w"] is state["w"]
    assert torch.equal(state["w"].pieces[0][1], torch.tensor([[0.0, 0.0], [1.0, 1.0]]))
    assert Kept.of(saved).problems({"w": Pieces((4, 3), [((0, 0), torch.zeros(1, 3))])}) == [
        "w: saved shape (4, 2), the state has (4, 3)"
    ]


@pytest.mark.parametrize(
    ("pieces", "words"),
    [
        ([], "at least one piece"),
        ([((0,), torch.ones(2, 2))], "needs 2 dimensions"),
        ([((3, 0), torch.ones(2, 2))], "does not lie in"),
        ([((-1, 0), torch.ones(2, 2))], "does not lie in"),
        ([((0, 0), torch.ones(2, 2)), ((2, 0), torch.ones(2, 2).int())], "all pieces must agree"),
        ([((0, 0), torch.ones(2, 2).to_sparse())], "not a plain, strided tensor"),
        ([((0, 0), [1, 2])], "give plain tensors"),
    ],
)
def test_pieces_that_cannot_be_are_refused(pieces: Any, words: str) -> None:
    with pytest.raises(StateError, match=words):
        Pieces((4, 2), pieces)
