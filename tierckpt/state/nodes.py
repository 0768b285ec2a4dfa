"""Trees of checkpoints (docs/format.md, "Tree"): merged, listed, and built without a template."""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tierckpt.errors import IntegrityError, LayoutError
from tierckpt.format import names, values
from tierckpt.format.canonical import JSON
from tierckpt.state import arrays
from tierckpt.state.marks import rebuild
from tierckpt.state.naming import below, readable

MAPPINGS = ("dict", "OrderedDict", "defaultdict")
SEQUENCES = ("list", "tuple", "namedtuple")


class SavedNode:
    """A node of one or several trees that were laid over each other.

    ``children`` pairs each key with the child's name. ``is_value``: some tree has a value here, though others
    may have something else. ``trees``: bit n is set if tree number n has the node. ``detail``: of a "per_rank"
    node, the same of those trees in which it is one; of others, what the tree says beside the kind.
    """

    __slots__ = ("children", "detail", "is_value", "kind", "name", "trees")

    def __init__(self, kind: str, name: str, detail: Any) -> None:
        self.kind = kind
        self.name = name
        self.detail = detail
        self.is_value = kind == "value"
        self.children: dict[str, Any] = {}  # name -> key
        self.trees = 0


def merge(trees: Sequence[JSON], left_out: dict[str, str] | None = None) -> dict[str, SavedNode]:
    """All nodes of ``trees`` by name, in order.

    Containers are united. Where kinds differ, a value gives way to anything else, and of the rest the first tree
    decides; ``left_out`` gets the names of the leaves that this costs, with a few words on why. Raises
    ``IntegrityError`` for what is not a tree.
    """
    nodes: dict[str, SavedNode] = {}
    lost: dict[str, str] = {} if left_out is None else left_out
    try:
        for number, tree in enumerate(trees):
            _merge(tree, names.ROOT, nodes, number, lost)
    except (TypeError, ValueError, IndexError, KeyError) as error:
        raise IntegrityError(f"a tree of the layout is malformed: {error}") from None
    return nodes


_DETAIL_LENGTHS = {"tensor": 1, "value": 1, "per_rank": 1, "array": 3, "namedtuple": 4, "subclass": 4}


def _merge(tree: Any, name: str, nodes: dict[str, SavedNode], number: int, left_out: dict[str, str]) -> None:
    kind = tree[0]
    if len(tree) != _DETAIL_LENGTHS.get(kind, 2) or not (
        kind in _DETAIL_LENGTHS or kind in MAPPINGS or kind in SEQUENCES
    ):
        raise ValueError(f"node {str(tree)[:60]}")
    node = nodes.get(name)
    pairs = list(_children(tree))
    if node is None:
        detail = tree[1:] if kind in ("array", "namedtuple", "subclass") else None
        node = nodes[name] = SavedNode(kind, name, detail)
    elif node.kind != kind:
        if kind == "value":
            node.is_value = True
            return
        if node.kind == "value":
            node.kind = kind
            node.detail = tree[1:]
        elif not (node.kind in MAPPINGS and kind in MAPPINGS) and not (node.kind in SEQUENCES and kind in SEQUENCES):
            if {node.kind, kind} != {"tensor", "array"}:  # these are the same bytes
                for lost in _leaves(tree, name):
                    left_out.setdefault(
                        lost, f"{readable(name)} is {_WORDS.get(node.kind, 'a container')} on other ranks"
                    )
            return
    if kind == "per_rank":
        node.detail = (node.detail or 0) | 1 << number
    node.trees |= 1 << number
    prefix = below(name)
    children = node.children
    for (key, child), component in zip(pairs, names.components(key for key, _ in pairs), strict=True):
        path = prefix + component
        if path not in children:
            children[path] = key
        if child == _TENSOR and path not in nodes:
            # Most leaves of large states: the short way.
            leaf = nodes[path] = SavedNode("tensor", path, None)
            leaf.trees = 1 << number
        else:
            _merge(child, path, nodes, number, left_out)


_TENSOR = ["tensor"]
_WORDS = {
    "tensor": "a tensor",
    "array": "a numpy array",
    "per_rank": "a PerRank value",
    "subclass": "a tensor subclass",
}


def _leaves(tree: Any, name: str) -> Iterator[str]:
    """Names of the leaves of a tree that stands under ``name``."""
    pairs = list(_children(tree))
    if not pairs:
        yield name
    for key, child in pairs:
        yield from _leaves(child, below(name) + names.component(key))


def _children(tree: Any) -> Iterator[tuple[Any, Any]]:
    kind = tree[0]
    if kind in MAPPINGS:
        for key, child in tree[1]:
            yield (key if type(key) is str else values.decode(key, what="a key of the tree")), child
    elif kind in ("list", "tuple"):
        yield from enumerate(tree[1])
    elif kind == "namedtuple":
        yield from enumerate(tree[3])
    elif kind == "subclass":
        for attribute, child in tree[2]:
            yield attribute, child


def names_of(tree: JSON) -> tuple[list[str], list[str], list[str]]:
    """Names of the tensors, the values and the per-rank values of a tree, each in the order of the tree."""
    nodes = merge([tree]).values()
    return (
        [node.name for node in nodes if node.kind in ("tensor", "array")],
        [node.name for node in nodes if node.is_value],
        [node.name for node in nodes if node.kind == "per_rank"],
    )


def build(
    trees: Sequence[JSON],
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, JSON],
    per_rank: Mapping[str, JSON],
) -> Any:
    """The state, nested as it was saved, without a template.

    ``tensors`` are whole CPU tensors by name; aliases are the same object twice. ``values`` and ``per_rank``
    are encoded. A leaf that is in none of the mappings is left out: of dicts without trace, in lists and
    tuples as None. Where some rank has a dict of tensors and another a value that is a dict, that adds what the
    first lacks; where some rank has a PerRank value and another a value, that is for those without the first.
    Modules, optimizers and other objects come back as the dicts that they were saved as (an optimizer's
    ``param_groups`` as a list, with names as ``params``), tensor subclasses as the dict of their inner tensors,
    named tuples as tuples, defaultdicts as dicts. Raises ``IntegrityError`` for malformed input,
    ``LayoutError`` if the state is one leaf and that is left out.
    """
    return build_nodes(merge(trees), tensors, values, per_rank)


def build_nodes(
    nodes: Mapping[str, SavedNode],
    tensors: Mapping[str, torch.Tensor],
    values: Mapping[str, JSON],
    per_rank: Mapping[str, JSON],
) -> Any:
    """The same from merged trees."""
    if names.ROOT not in nodes:
        raise IntegrityError("the layout has no tree")
    root = nodes[names.ROOT]
    found = _build(root, nodes, tensors, values, per_rank)
    if found is not ABSENT:
        return found
    if not root.children:
        raise LayoutError(f"the state is {_WORDS.get(root.kind, 'a value')}, and this rank has none")
    return container_of(root, [(key, ABSENT) for key in root.children.values()])


ABSENT: Any = object()
"""A leaf that is not there."""


def _build(
    node: SavedNode,
    nodes: Mapping[str, SavedNode],
    tensors: Mapping[str, torch.Tensor],
    encoded: Mapping[str, JSON],
    per_rank: Mapping[str, JSON],
) -> Any:
    kind, name = node.kind, node.name
    if kind == "tensor":
        return tensors.get(name, ABSENT)
    if kind == "array":
        return array_of(tensors[name], node) if name in tensors else ABSENT
    if kind == "per_rank" and name in per_rank:
        return rebuild(values.decode(per_rank[name], what=readable(name)), what=readable(name))
    value = values.decode(encoded[name], what=readable(name)) if name in encoded else ABSENT
    if kind in ("value", "per_rank"):
        return value
    items = [(key, _build(nodes[path], nodes, tensors, encoded, per_rank)) for path, key in node.children.items()]
    if kind in MAPPINGS and isinstance(value, dict):
        known = {key for key, item in items if item is not ABSENT}
        items += [(key, item) for key, item in value.items() if key not in known]
    if items and all(item is ABSENT for _, item in items):
        return ABSENT
    return _as_optimizer(container_of(node, items))


def _as_optimizer(found: Any) -> Any:
    """An optimizer's dicts as ``torch.optim.Optimizer.state_dict`` has them: groups in a list, not by their names' digest.

    Parameters are named where torch counts them; ``load_state_dict`` takes both.
    """
    if type(found) is dict and found.keys() == {"state", "param_groups"} and type(found["param_groups"]) is dict:
        groups = found["param_groups"]
        if groups and all(_GROUP.fullmatch(str(key)) and "params" in group for key, group in groups.items()):
            found["param_groups"] = list(groups.values())
    return found


_GROUP = re.compile("g[0-9a-f]{16}")


def container_of(node: SavedNode, items: Sequence[tuple[Any, Any]]) -> Any:
    """A new container of the kind of ``node``; absent items are left out of dicts, None in sequences."""
    if node.kind in SEQUENCES:
        sequence = [None if item is ABSENT else item for _, item in items]
        return sequence if node.kind == "list" else tuple(sequence)
    pairs = ((key, item) for key, item in items if item is not ABSENT)
    return OrderedDict(pairs) if node.kind == "OrderedDict" else dict(pairs)


def array_of(tensor: torch.Tensor, node: SavedNode) -> arrays.Array:
    """The numpy array of an "array" node."""
    dtype, shape = node.detail
    try:
        return arrays.from_tensor(tensor, dtype, tuple(shape))
    except (TypeError, ValueError) as error:
        raise IntegrityError(
            f"{readable(node.name)}: the layout describes no array of dtype {str(dtype)[:40]}: {error}"
        ) from None
