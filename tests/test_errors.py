"""An error that goes to another process arrives as what it was, or as the nearest thing that can be caught there."""

from __future__ import annotations

import pytest

from tierckpt import errors
from tierckpt.errors import AgentLostError, StoreError, TierckptError, kind_of, named_kind

KINDS = [kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, TierckptError)]


@pytest.mark.parametrize("kind", KINDS)
def test_each_arrives_as_it_was(kind: type[TierckptError]) -> None:
    error = kind("why")
    assert named_kind(kind_of(error)) is kind and str(named_kind(kind_of(error))("why")) == "why"


def test_what_only_one_module_knows_arrives_as_what_it_is_one_of() -> None:
    class Inner(AgentLostError):
        pass

    assert named_kind(kind_of(Inner("why"))) is AgentLostError


@pytest.mark.parametrize("error", [OSError("why"), TimeoutError("why")])
def test_what_the_system_refuses_is_the_stores(error: OSError) -> None:
    assert named_kind(kind_of(error)) is StoreError


@pytest.mark.parametrize("error", [ValueError("why"), KeyError("why")])
def test_others_are_errors_of_this_package(error: Exception) -> None:
    assert named_kind(kind_of(error)) is TierckptError


@pytest.mark.parametrize("name", ["Sequence", "nothing", "annotations", None, 7, ["StoreError"]])
def test_a_name_from_elsewhere_makes_nothing_else(name: object) -> None:
    assert named_kind(name) is StoreError
