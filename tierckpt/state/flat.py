"""A live state taken apart: its tree as JSON, and its leaves by name."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

from tierckpt.format import values
from tierckpt.format.canonical import JSON
from tierckpt.state import arrays, live
from tierckpt.state.live import Branch, Leaf, ModuleBranch, Node, OptimizerBranch, StatefulBranch
from tierckpt.state.marks import LiveTensor
from tierckpt.state.naming import readable
from tierckpt.state.nodes import MAPPINGS
from tierckpt.state.stepping import is_heard
from tierckpt.state.tensors import type_name


@dataclass
class Flat:
    """A state taken apart. All mappings are in the order of the tree; names are those of ``format.names``.

    ``tensors`` are the live tensors themselves (parameters are not detached). ``values`` are live: encode
    them before the state may change. ``per_rank`` was captured during `flatten`. ``optimizer_storages`` names
    the tensors that are parameters or state of an ``Optimizer`` in the state: nothing but its step changes
    them. Optimizers that may be replayed from a CUDA graph (``capturable``) run no hooks and do not
    count, nor do those whose steps are not heard of for other reasons (see `stepping`). ``heard`` are the others, by id.
    """

    tree: JSON
    tensors: dict[str, LiveTensor] = field(default_factory=dict)
    values: dict[str, Any] = field(default_factory=dict)
    per_rank: dict[str, Any] = field(default_factory=dict)
    optimizer_storages: set[str] = field(default_factory=set)
    heard: set[int] = field(default_factory=set)


def flatten(state: Any) -> Flat:
    """Take ``state`` apart.

    Raises ``StateError`` naming the path for what cannot be saved; values are looked at only when they are
    encoded.
    """
    return flat_of(live.walk(state))


def flat_of(root: Node) -> Flat:
    """The same of a live tree."""
    return _Emitter().run(root)


_TENSOR: JSON = ["tensor"]
_VALUE: JSON = ["value"]
_PER_RANK: JSON = ["per_rank"]


class _Emitter:
    def __init__(self) -> None:
        self.flat = Flat(None)
        self.parameters: set[int] = set()  # of optimizers, by id
        self.wrapped: list[tuple[int, list[str]]] = []  # tensor subclasses and the names of what they hold

    def run(self, root: Node) -> Flat:
        flat, parameters = self.flat, self.parameters
        flat.tree = self.emit(root)
        if parameters:
            fenced = flat.optimizer_storages
            fenced.update([name for name, tensor in flat.tensors.items() if id(tensor) in parameters])
            for identity, names in self.wrapped:
                if identity in parameters:
                    fenced.update(names)
        return flat

    def emit(self, node: Node) -> JSON:
        if isinstance(node, Leaf):
            return self._leaf(node)
        if isinstance(node, StatefulBranch):
            return self.emit(node.children[0])
        if isinstance(node, ModuleBranch) and node.is_valueless:
            self.flat.values[node.name] = OrderedDict(
                (key, child.live) for key, child in zip(node.keys, node.children, strict=True)
            )
            return _VALUE
        if isinstance(node, OptimizerBranch):
            return self._optimizer(node)
        before = len(self.flat.tensors)
        children = self._children(node)
        if node.kind == "subclass":
            self.wrapped.append((id(node.live), list(islice(self.flat.tensors, before, None))))
        return self._branch(node, children)

    def _children(self, node: Branch) -> list[JSON]:
        tensors = self.flat.tensors
        found: list[JSON] = []
        for child in node.children:
            if child.kind == "tensor":
                tensors[child.name] = child.live
                found.append(_TENSOR)
            else:
                found.append(self.emit(child))
        return found

    def _branch(self, node: Branch, children: list[JSON]) -> JSON:
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

    def _optimizer(self, node: OptimizerBranch) -> JSON:
        before = len(self.flat.tensors)
        states = self.emit(node.children[0])
        if is_heard(node.live) and not any(group.get("capturable") for group in node.live.param_groups):
            self.flat.heard.add(id(node.live))
            for group in node.live.param_groups:
                self.parameters.update(map(id, group["params"]))
            self.flat.optimizer_storages.update(islice(self.flat.tensors, before, None))
        return self._branch(node, [states, *(self.emit(child) for child in node.children[1:])])

    def _leaf(self, leaf: Leaf) -> JSON:
        flat = self.flat
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
