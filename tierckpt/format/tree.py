"""Trees: the structure of a state as a layout keeps it (docs/format.md, section 6, "Tree"), read without torch."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tierckpt.errors import IntegrityError
from tierckpt.format import names, values
from tierckpt.format.canonical import JSON

Node = list[Any]
"""As in the file: the kind, then what that kind has."""

_KEYED = ("dict", "OrderedDict", "defaultdict")
_LENGTHS = {"tensor": 1, "value": 1, "per_rank": 1, "array": 3, "namedtuple": 4, "subclass": 4}


def walk(tree: JSON) -> Iterator[tuple[str, Node]]:
    """Every node with its name, containers before what they hold. Raises ``IntegrityError`` for what is no tree."""
    try:
        yield from _walk(tree, names.ROOT)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise IntegrityError(f"a tree of the layout is malformed: {error}") from None


def _walk(node: Any, name: str) -> Iterator[tuple[str, Node]]:
    kind = node[0]
    if type(node) is not list or len(node) != _LENGTHS.get(kind, 2):
        raise ValueError(f"node {str(node)[:60]}")
    yield name, node
    prefix = "" if name == names.ROOT else name + "/"
    for key, child in _children(kind, node):
        yield from _walk(child, prefix + names.join((key,)))


def _children(kind: str, node: Node) -> Iterator[tuple[Any, Any]]:
    if kind in _KEYED:
        for key, child in node[1]:
            yield (key if type(key) is str else values.decode(key, what="a key of the tree")), child
    elif kind in ("list", "tuple"):
        yield from enumerate(node[1])
    elif kind == "namedtuple":
        yield from enumerate(node[3])
    elif kind == "subclass":
        yield from ((attribute, child) for attribute, child in node[2])
    elif kind not in _LENGTHS:
        raise ValueError(f"node {kind!r:.60}")
