"""Walks a live state. Finds the leaves, names them, and remembers where each stands."""

from __future__ import annotations

from collections import Counter, OrderedDict, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy
import torch
from torch import nn
from torch.optim.swa_utils import SWALR

from tierckpt.errors import StateError
from tierckpt.format import names, values
from tierckpt.format.canonical import JSON
from tierckpt.state import adapters, arrays, modules, optimizers
from tierckpt.state.marks import PerRank, Pieces, is_stateful
from tierckpt.state.naming import below, readable
from tierckpt.state.tensors import PLAIN, is_dtensor, is_uninitialized, kind_of_subclass, obstacle
from tierckpt.telling import a

DEPTH_LIMIT = 64
"""Containers within containers down to a tensor. Each takes three levels of the JSON of a layout, which has 64."""


class Leaf:
    """``kind`` is "tensor" (a tensor or ``Pieces``), "array", "value" or "per_rank", ``live`` the object."""

    __slots__ = ("kind", "live", "name")

    def __init__(self, kind: str, name: str, live: Any) -> None:
        self.kind = kind
        self.name = name
        self.live = live


class Branch:
    """A container that holds tensors.

    ``kind`` is that of the tree's node. ``keys`` has the key, index or attribute of each child. ``context``
    is the encoded context of a "subclass".
    """

    __slots__ = ("children", "context", "keys", "kind", "live", "name")

    def __init__(
        self,
        kind: str,
        name: str,
        live: Any,
        keys: Sequence[Any],
        children: Sequence[Node],
        context: JSON = None,
    ) -> None:
        self.kind = kind
        self.name = name
        self.live = live
        self.keys = keys
        self.children = children
        self.context = context


class ModuleBranch(Branch):
    """An ``nn.Module``. ``parts`` are its submodules that take and load their own state dict."""

    __slots__ = ("parts",)

    def __init__(
        self,
        name: str,
        live: nn.Module,
        keys: Sequence[str],
        children: Sequence[Node],
        parts: list[modules.Part],
    ) -> None:
        super().__init__("OrderedDict", name, live, keys, children)
        self.parts = parts

    @property
    def is_valueless(self) -> bool:
        """Whether it holds no tensors, and so is stored as one value."""
        return all(child.kind == "value" for child in self.children)


class OptimizerBranch(Branch):
    """An ``Optimizer``. ``groups`` names its parameters."""

    __slots__ = ("groups",)

    def __init__(
        self,
        name: str,
        live: torch.optim.Optimizer,
        keys: Sequence[str],
        children: Sequence[Node],
        groups: optimizers.Groups,
    ) -> None:
        super().__init__("dict", name, live, keys, children)
        self.groups = groups


class StatefulBranch(Branch):
    """An object that is saved as its ``state_dict()``; the only child is that dict, under the same name."""

    __slots__ = ()

    def __init__(self, name: str, live: Any, child: Node) -> None:
        super().__init__("stateful", name, live, ("",), (child,))


Node: TypeAlias = Leaf | Branch


def walk(state: Any, *, meta: bool = False) -> Node:
    """The live tree of ``state``. ``meta`` lets tensors on the meta device pass.

    A container without tensors is one value. Raises ``StateError`` naming the path for cycles and for tensors
    and containers that cannot be saved.
    """
    walker = _Walker(state, meta=meta)
    node = walker.visit(state, names.ROOT)
    return Leaf("value", names.ROOT, state) if node is None else node


def is_value(value: Any, depth: int) -> bool:
    """Whether ``value``, inside of ``depth`` containers, holds no tensors and so is one value, or part of one.

    Raises ``StateError`` as `walk` does.
    """
    walker = _Walker(value, meta=False)
    walker.enter(depth)
    return walker.visit(value, names.ROOT) is None


SCALARS = frozenset(
    {type(None), bool, int, float, complex, str, bytes, bytearray, set, frozenset, Counter, torch.Size}
    | {torch.dtype, torch.device}
)
"""Types of which no value holds a tensor."""
MAPPINGS: dict[type, str] = {dict: "dict", OrderedDict: "OrderedDict", defaultdict: "defaultdict"}
"""Dicts that may hold tensors, and how a tree calls them."""


class _Walker:
    def __init__(self, root: Any, *, meta: bool) -> None:
        self._root = root
        self._meta = meta
        self._open: set[int] = set()  # containers on the way from the root, by id
        self._contents: dict[int, modules.Contents] = {}
        self._modules: list[tuple[str, nn.Module]] | None = None

    def enter(self, depth: int) -> None:
        """Begin inside of so many containers."""
        self._open.update(range(-depth, 0))

    def visit(self, value: Any, name: str) -> Node | None:
        """The node of ``value``, None if it holds no tensors and so is part of a larger value."""
        kind = type(value)
        if kind in SCALARS:
            return None
        if kind in PLAIN:
            self._check(value, name)
            return Leaf("tensor", name, value)
        if kind in MAPPINGS:
            return self._mapping(value, name, MAPPINGS[kind])
        if kind is list or kind is tuple:
            return self._sequence(value, name, "list" if kind is list else "tuple")
        if isinstance(value, torch.Tensor):
            return self._special_tensor(value, name)
        if isinstance(value, nn.Module):
            return self._module(value, name)
        if isinstance(value, torch.optim.Optimizer) and optimizers.is_walkable(value):
            return self._optimizer(value, name)
        return self._other(value, name)

    def _other(self, value: Any, name: str) -> Node | None:
        if isinstance(value, PerRank):
            return Leaf("per_rank", name, value)
        if isinstance(value, Pieces):
            for _, tensor in value.pieces:
                self._check(tensor, name)
            return Leaf("tensor", name, value)
        if isinstance(value, numpy.ndarray):
            if type(value) is not numpy.ndarray:
                # Of any size: a mask, say, would be lost.
                raise StateError(
                    f"{readable(name)}: a numpy array of class {type(value).__name__} would come back as a plain one; "
                    "convert it with numpy.asarray"
                )
            return Leaf("array", name, value) if arrays.is_large(value) else None
        if is_stateful(value):
            return self._stateful(value, name)
        if values.is_namedtuple(value):
            return self._sequence(value, name, "namedtuple")
        if isinstance(value, dict):
            self._refuse(self._mapping(value, name, "dict"), value, name)
        elif isinstance(value, (list, tuple)):
            self._refuse(self._sequence(value, name, "list"), value, name)
        return None

    def _refuse(self, found: Node | None, value: Any, name: str) -> None:
        """Containers of other classes would come back as something else."""
        if found is not None:
            raise StateError(
                f"{readable(name)}: {a(value)} that holds tensors is not supported; use a dict, "
                "an OrderedDict, a list, a tuple or a named tuple"
            )

    def _check(self, tensor: torch.Tensor, name: str) -> None:
        reason = obstacle(tensor, meta=self._meta)
        if reason is not None:
            raise StateError(f"{readable(name)}: {reason}")

    def _special_tensor(self, tensor: torch.Tensor, name: str) -> Node:
        kind = type(tensor)
        if is_uninitialized(tensor):
            raise StateError(f"{readable(name)}: the parameter of a lazy module is not initialised; run it once")
        if adapters.is_sharded_tensor(tensor):
            return self._other(adapters.of_sharded_tensor(tensor), name)  # type: ignore[return-value]
        if is_dtensor(tensor):
            self._check(tensor, name)
            local = tensor._local_tensor  # type: ignore[attr-defined]
            if type(local) not in PLAIN and kind_of_subclass(local) != "plain":
                raise StateError(f"{readable(name)}: unsupported subclass {type(local).__name__} inside a DTensor")
            return Leaf("tensor", name, tensor)
        what = kind_of_subclass(tensor)
        if what == "waiting":
            return Leaf("tensor", name, tensor.wait())  # type: ignore[attr-defined]
        if tensor.is_nested or what == "opaque":
            raise StateError(f"{readable(name)}: unsupported subclass {kind.__name__}: it holds no plain storage")
        if what == "plain":
            self._check(tensor, name)
            return Leaf("tensor", name, tensor)
        attributes, context = tensor.__tensor_flatten__()  # type: ignore[attr-defined]
        try:
            encoded = values.encode(context, path="its context")
        except StateError as error:
            raise StateError(f"{readable(name)}: unsupported subclass {kind.__name__}: {error}") from None
        children = []
        for attribute in attributes:
            child = self.visit(getattr(tensor, attribute), below(name) + names.component(attribute))
            if child is None or child.kind not in ("tensor", "subclass"):
                raise StateError(f"{readable(name)}: unsupported subclass {kind.__name__}: {attribute} is no tensor")
            children.append(child)
        return Branch("subclass", name, tensor, attributes, children, encoded)

    def _mapping(self, value: dict[Any, Any], name: str, kind: str) -> Node | None:
        if set(map(type, value.values())) <= SCALARS:
            return None
        return self._container(kind, name, value, list(value), list(value.values()))

    def _sequence(self, value: Sequence[Any], name: str, kind: str) -> Node | None:
        if set(map(type, value)) <= SCALARS:
            return None
        return self._container(kind, name, value, range(len(value)), value)

    def _container(self, kind: str, name: str, live: Any, keys: Sequence[Any], items: Sequence[Any]) -> Branch | None:
        identity = id(live)
        if identity in self._open:
            raise StateError(f"{readable(name)}: a container that contains itself cannot be saved")
        if len(self._open) >= DEPTH_LIMIT:
            raise StateError(f"{readable(name)}: nested deeper than {DEPTH_LIMIT} containers")
        self._open.add(identity)
        children = self._children(name, keys, items)
        self._open.discard(identity)
        return Branch(kind, name, live, keys, children) if children else None

    def _children(self, name: str, keys: Iterable[Any], items: Sequence[Any]) -> list[Node]:
        """Nodes of the items; none if they hold no tensors."""
        prefix = below(name)
        found: list[Node] = []
        plain = True
        for component, item in zip(names.components(keys), items, strict=True):
            path = prefix + component
            # Most leaves of large states are plain tensors; the rest takes the long way.
            if type(item) in PLAIN and obstacle(item, meta=self._meta) is None:
                found.append(Leaf("tensor", path, item))
                plain = False
                continue
            node = self.visit(item, path)
            if node is None:
                found.append(Leaf("value", path, item))
            else:
                found.append(node)
                plain = False
        return [] if plain else found

    def _module(self, module: nn.Module, name: str) -> Branch:
        contents = self._contents_of(module, name)
        children = self._children(name, contents.keys, contents.items)
        if not children:
            prefix = below(name)
            children = [
                Leaf("value", prefix + names.component(key), item)
                for key, item in zip(contents.keys, contents.items, strict=True)
            ]
        return ModuleBranch(name, module, contents.keys, children, contents.parts)

    def _contents_of(self, module: nn.Module, name: str) -> modules.Contents:
        found = self._contents.get(id(module))
        if found is None:
            found = self._contents[id(module)] = modules.contents(module, what=lambda: readable(name))
        return found

    def _optimizer(self, optimizer: torch.optim.Optimizer, name: str) -> Branch:
        groups = optimizers.name_groups(optimizer, self._all_modules(), what=lambda: readable(name))
        prefix = below(name)
        states = self._forced(prefix + "state", optimizers.states(optimizer, groups, what=lambda: readable(name)))
        if groups.flat:
            self._unflatten(optimizer, groups, states)
        written = self._forced(prefix + "param_groups", optimizers.written_groups(optimizer, groups))
        keys = ["state", "param_groups"]
        children: list[Node] = [states, written]
        if groups.by_position:
            keys.append("positions")
            children.append(Leaf("value", prefix + "positions", optimizers.positions(optimizer)))
        return OptimizerBranch(name, optimizer, keys, children, groups)

    def _unflatten(self, optimizer: torch.optim.Optimizer, groups: optimizers.Groups, states: Branch) -> None:
        """State of parameters that FSDP1 has flattened is cut as they are."""
        parts = {
            called: groups.flat.get(id(parameter))
            for group, named in zip(optimizer.param_groups, groups.names, strict=True)
            for parameter, called in zip(group["params"], named, strict=True)
        }
        for called, entry in zip(states.keys, states.children, strict=True):
            part = parts[called]
            if part is None or not isinstance(entry, Branch):
                continue
            for leaf in entry.children:
                if part.fits(leaf.live):
                    leaf.live = part.pieces(leaf.live)
                elif leaf.kind != "value" and tuple(leaf.live.shape) not in ((), (1,)):
                    raise StateError(
                        f"{readable(leaf.name)}: state of a parameter that FSDP1 has flattened must be one number, or one for "
                        f"each of the {part.count} elements held here; it has shape {list(leaf.live.shape)}"
                    )

    def _forced(self, name: str, live: dict[Any, Any]) -> Branch:
        """A dict that is a container even without tensors. Its items are leaves, or containers in turn."""
        children: list[Node] = []
        prefix = below(name)
        for key, item in live.items():
            path = prefix + names.component(key)
            node = self.visit(item, path)
            children.append(Leaf("value", path, item) if node is None else node)
        return Branch("dict", name, live, list(live), children)

    def _all_modules(self) -> list[tuple[str, modules.Contents]]:
        """All modules of the state with the dotted path of each; needed only where there is an optimizer."""
        if self._modules is None:
            self._modules = []
            _find_modules(self._root, names.ROOT, self._modules, set())
        return [(names.dotted(names.split(name)), self._contents_of(module, name)) for name, module in self._modules]

    def _stateful(self, value: Any, name: str) -> Branch:
        identity = id(value)
        if identity in self._open:
            raise StateError(f"{readable(name)}: the state_dict of {a(value)} contains itself")
        self._open.add(identity)
        try:
            state = state_of(value)
        except Exception as error:
            raise StateError(
                f"{readable(name)}: state_dict of {type(value).__name__} failed: {type(error).__name__}: {error}"
            ) from error
        node = self.visit(state, name)
        self._open.discard(identity)
        return StatefulBranch(name, value, Leaf("value", name, state) if node is None else node)


def state_of(value: Any) -> Any:
    """Its ``state_dict()``. SWALR of older torch puts a function into it, which follows from how it was made."""
    state = value.state_dict()
    if isinstance(value, SWALR) and callable(state.get("anneal_func")):
        return {key: item for key, item in state.items() if key != "anneal_func"}
    return state


def _find_modules(value: Any, name: str, found: list[tuple[str, nn.Module]], seen: set[int]) -> None:
    if isinstance(value, nn.Module):
        found.append((name, value))
        return
    if isinstance(value, dict):
        items: Iterable[tuple[Any, Any]] = value.items()
    elif type(value) in (list, tuple) or values.is_namedtuple(value):
        items = enumerate(value)
    else:
        return
    if id(value) in seen:
        return
    seen.add(id(value))
    for key, item in items:
        if isinstance(item, (nn.Module, dict, list, tuple)):
            _find_modules(item, below(name) + names.component(key), found, seen)
