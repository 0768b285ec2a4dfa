"""Finds the tensors of a state that was taken apart before, as long as its structure lasts.

Taking a state apart costs some microseconds for each tensor, and from the second save on it nearly always says
the same. A `Recall` knows what it said: types and keys of all containers, which parameters a module and an optimizer have,
how each tensor looked. It looks at a state, perhaps a new dict with the same modules in it, and either finds in
it exactly what taking it apart would find, or says no.

It never takes a thing for another because of where it lay in memory: whatever `live.walk` looks at is looked at again, and
parameters of optimizers are told by being the tensors found elsewhere in the same state. So it refers to no tensor, module or
optimizer, and keeps none alive; only to classes, keys and device meshes.
"""

from __future__ import annotations

from array import array
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from tierckpt import _native
from tierckpt.format import values
from tierckpt.format.boxes import Box
from tierckpt.state import arrays, live, modules, optimizers, stepping
from tierckpt.state.devices import COPIED, place
from tierckpt.state.flat import Flat
from tierckpt.state.layout import Described
from tierckpt.state.live import Branch, Leaf, ModuleBranch, Node, OptimizerBranch, StatefulBranch
from tierckpt.state.marks import LiveTensor, Pieces, is_stateful
from tierckpt.state.naming import readable
from tierckpt.state.tensors import PLAIN, is_dtensor

_Step = tuple[Any, ...]
_UNUSED = -1
_NONE: _Step = ("none",)
_ANYTHING: _Step = ("anything",)
_EMPTY: _Step = ("empty",)
_VALUE: _Step = ("value", _UNUSED)
_NO_HOOKS, _SHARDING_HOOKS, _OWN_HOOKS = range(3)


@dataclass
class Recalled:
    """What was found.

    ``tensors`` are in the order of ``Flat.tensors``, ``values`` and ``per_rank`` as there. ``addresses``,
    ``versions`` and ``storages`` have an item for each local tensor (``Recall.places``): where its first element is, its version
    counter, -1 if it has none (made in inference mode), and what keeps its memory.
    """

    recall: Recall
    tensors: list[LiveTensor]
    extra: list[torch.Tensor]
    addresses: array[int]
    versions: array[int]
    storages: list[object]
    values: dict[str, Any]
    per_rank: dict[str, Any]

    def by_name(self) -> Mapping[str, LiveTensor]:
        """The live tensors as in ``Flat.tensors``."""
        return _Named(self)

    def changed(self) -> list[str]:
        """Names of tensors that are elsewhere by now, or whose version counter is another."""
        recall = self.recall
        rows = recall._looks.changed(self.tensors, self.extra, self.addresses, self.versions)
        return sorted({recall.names[recall._owners[row]] for row in rows})

    def described(self) -> Mapping[str, Described]:
        """The tensors as ``Describer`` describes them, each when it is asked for."""
        return _Current(self)


class _Named(Mapping[str, LiveTensor]):
    def __init__(self, found: Recalled) -> None:
        self._found = found

    def __getitem__(self, name: str) -> LiveTensor:
        return self._found.tensors[self._found.recall._forms[name][0]]

    def __iter__(self) -> Iterator[str]:
        return iter(self._found.recall.names)

    def __len__(self) -> int:
        return len(self._found.recall.names)


class _Current(Mapping[str, Described]):
    def __init__(self, found: Recalled) -> None:
        self._found = found

    def __getitem__(self, name: str) -> Described:
        i, dtype, shape, cut, boxes = self._found.recall._forms[name]
        value = self._found.tensors[i]
        local = _local_tensors(value)
        return Described(dtype, shape, cut, [(box, local[number]) for box, number in boxes], value)

    def __iter__(self) -> Iterator[str]:
        return iter(self._found.recall.names)

    def __len__(self) -> int:
        return len(self._found.recall.names)


class _Unknown(Exception):
    """Something that a recall does not know how to find again."""


class Recall:
    """Made from a state that was just taken apart (see ``of``); then ``again`` finds it.

    ``names`` are those of ``Flat.tensors``, ``optimizer_storages`` as there. ``places`` has for a name and the number of a
    local tensor with elements (as in ``Described.pieces``) the index of its row in ``Recalled.addresses``.
    """

    def __init__(self, root: Node, flat: Flat, described: Mapping[str, Described]) -> None:
        made = _Maker(flat)
        steps = made.step(root)
        if made.tensors != list(flat.tensors) or made.values != list(flat.values):
            raise _Unknown("steps in another order than the tree")
        self.names = made.tensors
        self.optimizer_storages = flat.optimizer_storages
        self.places: dict[tuple[str, int], int] = {}
        self._value_names, self._per_rank_names = made.values, made.per_rank
        self._special, self._rewritten = made.special, made.rewritten
        self._owners: list[int] = []
        # What `Described` has of each tensor but the live tensors, and its number.
        self._forms: dict[str, tuple[int, torch.dtype, tuple[int, ...], Any, list[tuple[Box, int]]]] = {}
        self._native = _native.Recall(
            steps,
            _SCALARS,
            _is_value,
            _is_sharded,
            leaves=len(self.names),
            values=len(made.values),
            per_rank=len(made.per_rank),
        )
        self._look(list(flat.tensors.values()), described)

    @classmethod
    def of(cls, root: Node, flat: Flat, described: Mapping[str, Described]) -> Recall | None:
        """Of a state as it is now: its live tree, what was made of that, and its tensors described.

        None for what cannot be found again: tensor subclasses that are taken apart, tensors that torch has to copy
        (`tierckpt.state.devices.place`), ``ShardedTensor``, FSDP1, modules with state dicts of their own, and some rare forms of
        containers.
        """
        try:
            recall = cls(root, flat, described)
        except _Unknown:
            return None
        return recall if recall._looks.usable else None

    def again(self, state: Any) -> Recalled | None:
        """What taking ``state`` apart would find, if that would find the same structure as before; else None.

        Hooks of FSDP2 and ``state_dict()`` of objects that are neither modules nor optimizers are called, so they
        are called twice in a save for which this is None. Raises ``StateError`` for values of a ``PerRank`` that
        cannot be captured.
        """
        found = self._native.find(state)
        if found is None:
            return None
        tensors, values, per_rank = found
        captured = {name: leaf.capture() for name, leaf in zip(self._per_rank_names, per_rank, strict=True)}
        extra: list[torch.Tensor] = []
        for special in self._special:
            if not special.renew(tensors, extra):
                return None
        count = len(self._owners)
        addresses, versions = array("Q", bytes(8 * count)), array("q", bytes(8 * count))
        storages: list[object] = []
        if not self._looks.look(tensors, extra, addresses, versions, storages):
            return None
        for number, rewrite in self._rewritten:
            values[number] = rewrite(values[number])
        return Recalled(
            self,
            tensors,
            extra,
            addresses,
            versions,
            storages,
            dict(zip(self._value_names, values, strict=True)),
            captured,
        )

    def _look(self, tensors: list[Any], described: Mapping[str, Described]) -> None:
        """Learn how the local tensors look, and which of them have the pieces of each tensor."""
        sources: list[int] = []
        inside: list[bool] = []
        present: list[bool] = []
        extra: list[torch.Tensor] = []
        for i, (name, value) in enumerate(zip(self.names, tensors, strict=True)):
            dtype, shape, cut, pieces, _ = described[name]
            boxes: list[tuple[Box, int]] = []
            for number, tensor in enumerate(_local_tensors(value)):
                if type(tensor) not in PLAIN:
                    raise _Unknown(f"a {type(tensor).__name__} inside of a tensor")
                if place(tensor) == COPIED:
                    raise _Unknown("values that are not in memory as they are")
                # Those with elements, in the same order.
                piece = len(boxes)
                has_piece = piece < len(pieces) and pieces[piece][1] is tensor
                if has_piece:
                    self.places[name, piece] = len(sources)
                    boxes.append((pieces[piece][0], number))
                if isinstance(value, Pieces):
                    sources.append(~len(extra))
                    extra.append(tensor)
                else:
                    sources.append(i)
                inside.append(type(value) not in PLAIN and is_dtensor(value))
                present.append(has_piece)
                self._owners.append(i)
            if len(boxes) != len(pieces):
                raise _Unknown("pieces that are in no local tensor")
            self._forms[name] = i, dtype, shape, cut, boxes
        self._looks = _native.Looks(torch.Tensor, tensors, extra, sources, inside, present)


def _local_tensors(value: LiveTensor) -> Sequence[Any]:
    if type(value) in PLAIN:
        return (value,)
    if isinstance(value, Pieces):
        return [tensor for _, tensor in value.pieces]
    return (value._local_tensor,)  # type: ignore[attr-defined]


# Asked by the native side


_SCALARS = tuple(sorted(live.SCALARS, key=lambda kind: kind not in (int, float, str, bool, type(None))))


def _is_value(value: Any, depth: int) -> bool:
    """Whether ``value``, inside of ``depth`` containers, holds no tensors."""
    return live.is_value(value, depth)


def _is_sharded(module: nn.Module) -> bool:
    """Brings a module of FSDP2 into its sharded state; False if it has other hooks by now."""
    return not modules.has_foreign_hooks(module)


def _is_as_heard(optimizer: Optimizer) -> bool:
    """Whether what was to be copied while training goes on may still be."""
    return optimizers.is_walkable(optimizer) and stepping.is_heard(optimizer)


def _state_of(value: Any) -> Any:
    """``NotImplemented`` for what is not saved as its ``state_dict()`` any more."""
    if not is_stateful(value) or (isinstance(value, Optimizer) and optimizers.is_walkable(value)):
        return NotImplemented
    return live.state_of(value)


# What is more than a plain tensor or a DTensor


class _Array:
    """A numpy array, of which a tensor is made at each save."""

    def __init__(self, number: int, name: str, live: arrays.Array) -> None:
        self._number, self._name, self._dtype, self._shape = number, name, live.dtype.str, live.shape

    def renew(self, tensors: list[Any], extra: list[torch.Tensor]) -> bool:
        found = tensors[self._number]
        if found.dtype.str != self._dtype or found.shape != self._shape:
            return False
        tensors[self._number] = arrays.to_tensor(found, what=readable(self._name))
        return True


class _Boxes:
    """``Pieces``, which may be new ones of the same boxes."""

    def __init__(self, number: int, pieces: Pieces) -> None:
        self._number = number
        self._boxes = self._of(pieces)

    def renew(self, tensors: list[Any], extra: list[torch.Tensor]) -> bool:
        found = tensors[self._number]
        if self._of(found) != self._boxes:
            return False
        extra.extend(tensor for _, tensor in found.pieces)
        return True

    @staticmethod
    def _of(pieces: Pieces) -> tuple[Any, ...]:
        return pieces.global_shape, [offset for offset, _ in pieces.pieces]


class _Group:
    """A parameter group as it is stored: with the names of its parameters, and without what is no hyperparameter."""

    def __init__(self, names: Sequence[Any]) -> None:
        self._names = values.encoded(list(names))

    def __call__(self, group: Mapping[str, Any]) -> dict[str, Any]:
        return optimizers.written_group(group, self._names)


class _Always:
    """A value that the structure alone decides."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __call__(self, found: Any) -> Any:
        return self._value


def _nothing(found: Any) -> OrderedDict[str, Any]:
    """What a module without parameters is stored as."""
    return OrderedDict()


# Making the steps


class _Maker:
    """The steps in which a state is looked at, in the order in which its tree is taken apart."""

    def __init__(self, flat: Flat) -> None:
        self.tensors: list[str] = []
        self.values: list[str] = []
        self.per_rank: list[str] = []
        self.special: list[Any] = []
        self.rewritten: list[tuple[int, Any]] = []
        self._flat = flat
        # Of tensors by identity, all alive now: the first leaf of each.
        self._leaves: dict[int, int] = {}
        for i, value in enumerate(flat.tensors.values()):
            self._leaves.setdefault(id(value), i)

    def step(self, node: Node) -> _Step:
        if isinstance(node, Leaf):
            return self._leaf(node)
        if isinstance(node, ModuleBranch):
            return self._module(node)
        if isinstance(node, OptimizerBranch):
            return self._optimizer(node)
        if isinstance(node, StatefulBranch):
            return ("call", type(node.live), _state_of, self.step(node.children[0]))
        if node.kind in ("list", "tuple", "namedtuple"):
            kind = type(node.live)
            if not issubclass(kind, (list, tuple)) or kind.__iter__ not in (list.__iter__, tuple.__iter__):
                raise _Unknown("a sequence that iterates in its own way")
            return ("sequence", kind, tuple([self.step(child) for child in node.children]))
        if node.kind in ("dict", "OrderedDict", "defaultdict"):
            return self._mapping(type(node.live), node)
        raise _Unknown(f"a node of kind {node.kind}")

    def _mapping(self, kind: type, node: Branch) -> _Step:
        if kind not in live.MAPPINGS:
            raise _Unknown("a dict of another class")
        # Most children are plain tensors.
        children = tuple([self.step(child) for child in node.children])
        return ("mapping", kind, tuple(node.keys), children, _UNUSED)

    def _leaf(self, leaf: Leaf) -> _Step:
        value = leaf.live
        kind = type(value)
        if leaf.kind == "tensor":
            if kind is Pieces:
                self.special.append(_Boxes(len(self.tensors), value))
            elif kind not in PLAIN and not is_dtensor(value):
                raise _Unknown(f"a {kind.__name__}")
            return self._tensor(leaf.name, value)
        if leaf.kind == "array":
            self.special.append(_Array(len(self.tensors), leaf.name, value))
            self.tensors.append(leaf.name)
            return ("tensor", kind, len(self.tensors) - 1)
        if leaf.kind == "per_rank":
            self.per_rank.append(leaf.name)
            return ("per_rank", kind, len(self.per_rank) - 1)
        return ("value", self._value(leaf.name))

    def _tensor(self, name: str, value: Any) -> _Step:
        if self._flat.tensors[name] is not value:
            raise _Unknown("a tensor that stands for another")
        self.tensors.append(name)
        return ("tensor", type(value), len(self.tensors) - 1)

    def _value(self, name: str) -> int:
        self.values.append(name)
        return len(self.values) - 1

    # Modules

    def _module(self, node: ModuleBranch) -> _Step:
        if node.parts:
            raise _Unknown("a module with a state dict of its own")
        if node.is_valueless:
            if node.children:
                raise _Unknown("a module of values")
            self.rewritten.append((self._value(node.name), _nothing))
        items = iter(zip(node.keys, node.children, strict=True))
        step = self._walk(node.live, "", items)
        if next(items, None) is not None:
            raise _Unknown("a module that has more than it holds")
        return step

    def _walk(self, module: nn.Module, prefix: str, items: Iterator[tuple[str, Node]]) -> _Step:
        """As ``modules.contents`` walks; ``items`` are what that has found."""
        kind: Any = type(module)
        trait = modules.trait(kind)
        if trait == "wrapper":
            return ("wrapper", kind, "module", self._walk(module.module, prefix, items))  # type: ignore[arg-type]
        attributes = module.__dict__
        dicts = [attributes.get(name) for name in ("_parameters", "_buffers", "_modules")]
        if trait not in ("plain", "transparent") or kind.__getattribute__ is not object.__getattribute__:
            raise _Unknown(f"a {kind.__name__}")
        own = (module._parameters, module._buffers, module._modules)
        if any(a is not b or type(a) not in live.MAPPINGS for a, b in zip(own, dicts, strict=True)):
            raise _Unknown("a module that keeps its parameters elsewhere")
        hooks = _OWN_HOOKS if trait == "transparent" else _SHARDING_HOOKS if modules.has_hooks(module) else _NO_HOOKS
        transient = module._non_persistent_buffers_set
        persistent = tuple([name not in transient for name in module._buffers])
        return (
            "module",
            kind,
            hooks,
            self._held(module._parameters, prefix, (), items),
            self._held(module._buffers, prefix, transient, items),
            self._submodules(module, prefix, items),
            persistent,
        )

    def _held(self, found: Mapping[str, Any], prefix: str, transient: Any, items: Iterator[tuple[str, Node]]) -> _Step:
        children = []
        for name, value in found.items():
            if name in transient:
                children.append(_ANYTHING)
            elif value is None:
                children.append(_NONE)
            else:
                key, node = next(items, (None, None))
                if (
                    key != prefix + name
                    or not isinstance(node, Leaf)
                    or node.live is not value
                    or node.kind != "tensor"
                ):
                    raise _Unknown("a parameter or buffer that is not found as it stands")
                children.append(self._leaf(node))
        return ("mapping", type(found), tuple(found), tuple(children), _UNUSED)

    def _submodules(self, module: nn.Module, prefix: str, items: Iterator[tuple[str, Node]]) -> _Step:
        children = [
            _NONE
            if child is None
            else self._walk(child, prefix if name in modules.TRANSPARENT else f"{prefix}{name}.", items)
            for name, child in module._modules.items()
        ]
        return ("mapping", type(module._modules), tuple(module._modules), tuple(children), _UNUSED)

    # Optimizers

    def _optimizer(self, node: OptimizerBranch) -> _Step:
        optimizer, groups = node.live, node.groups
        if groups.flat:
            raise _Unknown("FSDP1")
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        numbers = {id(parameter): i for i, parameter in enumerate(parameters)}
        if len(numbers) != len(parameters):
            raise _Unknown("a parameter that an optimizer has twice")
        called = [name for names in groups.names for name in names]
        states, written, *positions = node.children
        assert isinstance(states, Branch) and isinstance(written, Branch)
        entries = {name: self._entry(entry) for name, entry in zip(states.keys, states.children, strict=True)}
        order, children = [], []
        for parameter, entry in optimizer.state.items():
            number = numbers.get(id(parameter), _UNUSED)
            step = entries.get(called[number]) if number >= 0 else None
            if step is None and (type(entry) is not dict or entry):
                raise _Unknown("state of an unknown kind")
            order.append(number)
            children.append(_EMPTY if step is None else step)
        kind = type(optimizer.state)
        if kind not in live.MAPPINGS or kind is OrderedDict or type(optimizer.param_groups) is not list:
            raise _Unknown("an optimizer that keeps its state in its own way")
        listed = [
            self._group(group, names, child)
            for group, names, child in zip(optimizer.param_groups, groups.names, written.children, strict=True)
        ]
        index = _UNUSED
        for leaf in positions:
            index = self._value(leaf.name)
            self.rewritten.append((index, optimizers.positions))
        return (
            "optimizer",
            type(optimizer),
            _is_as_heard if id(optimizer) in self._flat.heard else optimizers.is_walkable,
            index,
            ("sequence", list, tuple(listed)),
            ("states", kind, tuple(order), tuple(children)),
        )

    def _entry(self, entry: Node) -> _Step:
        """The state of one parameter: a dict that is not empty, else it would not count."""
        if type(entry.live) is not dict or not entry.live:
            raise _Unknown("state that is no dict")
        if isinstance(entry, Branch):
            return self._mapping(dict, entry)
        return ("mapping", dict, tuple(entry.live), (_VALUE,) * len(entry.live), self._value(entry.name))

    def _group(self, group: dict[str, Any], called: list[Any], node: Node) -> _Step:
        """One group: what of it is stored under ``node``."""
        parts: dict[str, Node] = {}
        index = _UNUSED
        if isinstance(node, Branch):
            parts = dict(zip(node.keys, node.children, strict=True))
            number = self._value(parts["params"].name)
            self.rewritten.append((number, _Always(called)))
        else:
            index = self._value(node.name)
            self.rewritten.append((index, _Group(called)))
        if type(group) is not dict or next(iter(parts), "params") != "params":
            raise _Unknown("a group of another kind")
        children: dict[str, _Step] = {}
        for key, value in group.items():
            if key == "params":
                leaves = tuple([self._leaves.get(id(parameter), _UNUSED) for parameter in value])
                if type(value) is not list:
                    raise _Unknown("parameters that are in no list")
                children[key] = ("parameters", leaves)
            elif key == "param_names":
                if type(value) is not list:
                    raise _Unknown("names that are in no list")
                children[key] = ("names", tuple(value))
            elif key not in parts:
                children[key] = _VALUE
        for key, child in parts.items():
            if key != "params":
                children[key] = self.step(child)
        return ("mapping", dict, tuple(group), tuple([children[key] for key in group]), index)


__all__ = ["Recall", "Recalled"]
