"""A live state taken apart: its tree as JSON, and its leaves by name."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any

from tierckpt.format import values
from tierckpt.format.canonical import JSON
from tierckpt.state import arrays, live
from tierckpt.state.live import Branch, Leaf, ModuleBranch, Node, OptimizerBranch, StatefulBranch
from tierckpt.state.marks import LiveTensor
from tierckpt.state.naming import readable
from tierckpt.state.nodes import MAPPINGS
from tierckpt.state.tensors import type_name


@dataclass
class Flat:
    """A state taken apart. All mappings are in the order of the tree; names are those of ``format.names``.

    ``tensors`` are the live tensors themselves (parameters are not detached). ``values`` are live: encode
    them before the state may change. ``per_rank`` was captured during `flatten`. ``optimizer_storages`` names
    the tensors that are parameters or state of an ``Optimizer`` in the state: nothing but its step changes
    them."""

    tree: JSON
    tensors: dict[str, LiveTensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[str, Any] = field(default_factory=dict)
    optimizer_storages: set[str] = field(default_factory=set)


def flatten(state: Any) -> Flat:
    """Take ``state`` apart.

    Raises ``StateError`` naming the path for what cannot be saved; values are looked at only when they are
    encoded."""
    root = live.walk(state)
    flat = Flat(None)
    fenced: set[int] = set()
    flat.tree = _emit(root, flat, fenced, inside=False)
    if fenced:
        _mark(root, flat.optimizer_storages, fenced, inside=False)
    return flat


_TENSOR: JSON = ["tensor"]
_VALUE: JSON = ["value"]
_PER_RANK: JSON = ["per_rank"]


def _emit(node: Node, flat: Flat, fenced: set[int], *, inside: bool) -> JSON:
    if type(node) is Leaf:
        return _emit_leaf(node, flat)
    assert isinstance(node, Branch)
    if isinstance(node, StatefulBranch):
        return _emit(node.children[0], flat, fenced, inside=inside)
    if isinstance(node, OptimizerBranch):
        for group in node.live.param_groups:
            fenced.update(map(id, group["params"]))
    elif isinstance(node, ModuleBranch) and node.is_valueless:
        flat.values[node.name] = OrderedDict(
            (key, child.live) for key, child in zip(node.keys, node.children, strict=True)
        )
        return _VALUE
    children = [_emit(child, flat, fenced, inside=inside) for child in node.children]
    if node.kind in MAPPINGS:
        pairs: list[JSON] = [
            [key if type(key) is str else values.encode(key, path=readable(node.name)), child]
            for key, child in zip(node.keys, children, strict=True)
        ]
        return [node.kind, pairs]
    if node.kind == "namedtuple":
        return [node.kind, type(node.live).__name__, list(node.live._fields), children]
    if node.kind == "subclass":
        attributes: list[JSON] = [list(pair) for pair in zip(node.keys, children, strict=True)]
        return [node.kind, type_name(node.live), attributes, node.context]
    return [node.kind, children]


def _emit_leaf(leaf: Leaf, flat: Flat) -> JSON:
    if leaf.kind == "tensor":
        flat.tensors[leaf.name] = leaf.live
        return _TENSOR
    if leaf.kind == "value":
        flat.values[leaf.name] = leaf.live
        return _VALUE
    if leaf.kind == "per_rank":
        flat.per_rank[leaf.name] = leaf.live.capture()
        return _PER_RANK
    flat.tensors[leaf.name] = arrays.to_tensor(leaf.live, what=readable(leaf.name))
    return ["array", leaf.live.dtype.str, list(leaf.live.shape)]


def _mark(node: Node, found: set[str], fenced: set[int], *, inside: bool) -> None:
    """Collect the names of tensors that an optimizer owns: by identity, or because they are in its state."""
    if type(node) is Leaf:
        if node.kind == "tensor" and (inside or id(node.live) in fenced):
            found.add(node.name)
        return
    assert isinstance(node, Branch)
    if isinstance(node, OptimizerBranch):
        _mark(node.children[0], found, fenced, inside=True)
        return
    inside = inside or (node.kind == "subclass" and id(node.live) in fenced)
    for child in node.children:
        _mark(child, found, fenced, inside=inside)
