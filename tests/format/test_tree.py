"""Trees are walked without torch; hostile ones are refused, not followed."""

from __future__ import annotations

from typing import Any

import pytest

from tierckpt.errors import IntegrityError
from tierckpt.format import tree


def test_every_node_has_its_name() -> None:
    found = {
        name: node[0]
        for name, node in tree.walk(
            [
                "dict",
                [
                    ["a/b", ["list", [["tensor"], ["value"]]]],
                    [1, ["namedtuple", "T", ["x"], [["per_rank"]]]],
                    ["s", ["subclass", "S", [["inner", ["array", "<f4", [3]]]], None]],
                ],
            ]
        )
    }
    assert found == {
        "~r": "dict",
        "a~1b": "list",
        "a~1b/0": "tensor",
        "a~1b/1": "value",
        "1": "namedtuple",
        "1/0": "per_rank",
        "s": "subclass",
        "s/inner": "array",
    }


@pytest.mark.parametrize(
    "wrong", [None, [], ["what", []], ["tensor", 1], ["dict", 3], ["dict", [["a"]]], ["list", ["tensor"]], {"a": 1}]
)
def test_what_is_no_tree_is_refused(wrong: Any) -> None:
    with pytest.raises(IntegrityError, match="malformed"):
        list(tree.walk(wrong))
