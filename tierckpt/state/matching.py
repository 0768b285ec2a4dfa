"""Holds a live state against a checkpoint's trees: what fits, what does not, and how values get back in
place.

Nothing live is touched here; a match returns a *plan*, a function of the decoded values by name that puts
them in place and returns the object that then belongs there. None instead of a plan means that the live
object stays, its tensors being filled where they are.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from typing import Any, TypeAlias

import numpy
import torch

from tierckpt.errors import StateError
from tierckpt.format import names
from tierckpt.state import arrays, optimizer_match
from tierckpt.state.live import Branch, Leaf, ModuleBranch, Node, OptimizerBranch, StatefulBranch
from tierckpt.state.marks import LiveTensor, PerRank, Pieces, original
from tierckpt.state.naming import below, readable
from tierckpt.state.nodes import ABSENT, MAPPINGS, SEQUENCES, SavedNode, array_of, container_of
from tierckpt.state.position import DataPosition
from tierckpt.state.rng import Generators
from tierckpt.state.tensors import PLAIN, obstacle, type_name
from tierckpt.telling import a

Decoded: TypeAlias = Mapping[str, Any]
Plan: TypeAlias = Callable[[Decoded], Any]
Allocate: TypeAlias = Callable[[str, torch.dtype, tuple[int, ...]], LiveTensor]

#: Classes whose objects say before a load whether they take what was saved.
_OURS = (DataPosition, Generators)

_WORDS = {
    "tensor": "a tensor",
    "array": "a numpy array",
    "value": "a value without tensors",
    "per_rank": "a PerRank value",
    "subclass": "a tensor subclass",
}


class Matcher:
    """One state, one checkpoint. The attributes collect what a match finds; ``Target`` explains them."""

    def __init__(
        self,
        nodes: Mapping[str, SavedNode],
        tensors: Mapping[str, tuple[str, tuple[int, ...]]],
        *,
        keys: Sequence[str] | None,
        strict: bool,
        cast: bool,
    ) -> None:
        self.nodes = nodes
        self.saved = tensors
        self.keys = keys
        self.strict = strict
        self.cast = cast
        self.tensors: dict[str, LiveTensor] = {}
        self.needed: dict[str, Any] = {}  # name of a value -> live value that serves as template for its types
        self.marks: dict[str, PerRank] = {}
        self.problems: list[str] = []
        self.lacking: list[
            str
        ] = []  # leaves that are among the problems because the checkpoint has nothing of their names
        self.untouched: list[str] = []
        self.seen: set[str] = set()  # saved leaves that the state has
        self.checks: list[Callable[[Decoded], list[str]]] = []  # what only the values can tell
        self.parameters: Mapping[str, Mapping[Any, tuple[Any, ...]]] = {}  # of optimizers: names in the checkpoint
        self.ties: Mapping[str, str] = {}  # saved tensors that are one with another -> that one
        self._made: dict[str, torch.Tensor] = {}  # new tensors, by the one that was saved

    def wanted(self, name: str) -> bool:
        """Whether ``keys`` includes this leaf."""
        return self.keys is None or names.matches(names.split(name), self.keys)

    def problem(self, name: str, text: str) -> None:
        self.problems.append(f"{readable(name)}: {text}")

    def missing(self, node: Node) -> None:
        """Report every wanted leaf below ``node`` as missing, or as untouched unless strict."""
        for leaf in leaves(node):
            if not self.wanted(leaf.name):
                continue
            if self.strict:
                self.lacking.append(leaf.name)
                self.problem(leaf.name, "missing in the checkpoint")
            else:
                self.untouched.append(leaf.name)

    def match(self, node: Node) -> Plan | None:
        """Fit ``node``, the template deciding what there has to be."""
        if isinstance(node, Leaf):
            return self._leaf(node)
        if isinstance(node, OptimizerBranch):
            return optimizer_match.match(self, node)
        if isinstance(node, StatefulBranch):
            return self._stateful(node)
        saved = self.nodes.get(node.name)
        if isinstance(node, ModuleBranch) and node.is_valueless and (saved is None or saved.is_value):
            return self._valueless_module(node, saved)
        if saved is None:
            self.missing(node)
            return None
        if node.kind == "subclass":
            return self._subclass(node, saved)
        family = MAPPINGS if node.kind in MAPPINGS else SEQUENCES
        if saved.kind not in family:
            self.differ(node, saved)
            return None
        if isinstance(node, ModuleBranch):
            plans = [self._module_entry(key, child) for key, child in zip(node.keys, node.children, strict=True)]
            return _module_plan(node, plans, self._touched)
        return _container_plan(node, self._match_all(node.children))

    def _match_all(self, children: Sequence[Node]) -> list[Plan | None]:
        """Fit all of them."""
        if self.keys is not None:
            return [self.match(child) for child in children]
        nodes, saved, tensors = self.nodes, self.saved, self.tensors
        seen: list[str] = []
        found: list[Plan | None] = []
        for child in children:
            name = child.name
            if child.kind == "tensor" and name in nodes and nodes[name].kind == "tensor":
                # Most leaves of large states: the short way.
                seen.append(name)
                live = child.live
                if type(live) in PLAIN and (dtype_name(live.dtype), live.shape) == saved[name] and not live.is_meta:
                    tensors[name] = live
                else:
                    self._fit_tensor(name, live)
                found.append(None)
            else:
                found.append(self.match(child))
        self.seen.update(seen)
        return found

    def _module_entry(self, key: str, child: Node) -> Plan | None:
        """Extra state may look any way; its module takes what was saved."""
        if key.rsplit(".", 1)[-1] == "_extra_state" and child.name in self.nodes:
            return self.grow(child.name, child, self.allocate_cpu)
        return self.match(child)

    def differ(self, node: Node, saved: SavedNode) -> None:
        """Report that the kinds differ, unless ``keys`` wants nothing here."""
        wanted = any(self.wanted(leaf.name) for leaf in leaves(node))
        self.see_below(saved)
        if wanted:
            live = _WORDS.get(node.kind, f"a {node.kind} with tensors")
            if node.kind == "value":
                live = f"a plain value ({type(node.live).__name__})"
            self.problem(
                node.name,
                f"saved as {_WORDS.get(saved.kind, f'a {saved.kind} with tensors')}, the state has {live}",
            )

    def see_below(self, saved: SavedNode) -> None:
        """Count all leaves of ``saved`` as known to the state."""
        self.seen.add(saved.name)
        for child in saved.children:
            self.see_below(self.nodes[child])

    def _touched(self, node: Node) -> bool:
        return any(leaf.name in self.seen and self.wanted(leaf.name) for leaf in leaves(node))

    def need(self, name: str, like: Any) -> Plan:
        """Ask for a value and return the plan that is just that value."""
        self.needed[name] = like
        return lambda got: got[name]

    def _leaf(self, leaf: Leaf) -> Plan | None:
        name = leaf.name
        saved = self.nodes.get(name)
        if leaf.kind == "value" and saved is not None and saved.children and not saved.is_value:
            return self._descend(leaf, saved)
        if not self.wanted(name):
            return None
        if saved is None:
            self.missing(leaf)
            return None
        if leaf.kind == "tensor" and saved.kind == "tensor":
            self.seen.add(name)
            self._fit_tensor(name, leaf.live)
            return None
        if leaf.kind == "per_rank" and saved.kind == "per_rank":
            self.seen.add(name)
            self.marks[name] = leaf.live
            return None
        if leaf.kind in ("value", "array"):
            if saved.is_value:
                self.seen.add(name)
                return self.need(name, leaf.live)
            if saved.kind == "array":
                self.seen.add(name)
                return self._array(leaf, saved)
        self.differ(leaf, saved)
        return None

    def _descend(self, leaf: Leaf, saved: SavedNode) -> Plan | None:
        """The live container has no tensors, the saved one has: go on item by item."""
        live = leaf.live
        if isinstance(live, dict) and saved.kind in MAPPINGS:
            kind, keys, items = "dict", list(live), list(live.values())
        elif isinstance(live, (list, tuple)) and saved.kind in SEQUENCES:
            kind, keys, items = (
                "list" if isinstance(live, list) else "tuple",
                list(range(len(live))),
                list(live),
            )
        else:
            self.differ(leaf, saved)
            return None
        prefix = below(leaf.name)
        children = [Leaf("value", prefix + names.join((key,)), item) for key, item in zip(keys, items, strict=True)]
        return self.match(Branch(kind, leaf.name, live, keys, children))

    def _fit_tensor(self, name: str, live: LiveTensor) -> None:
        """Take ``live`` as destination; report a wrong shape or dtype."""
        dtype, shape = self.saved[name]
        if (
            isinstance(live, torch.Tensor)
            and type(live) in PLAIN
            and not live.is_meta
            and (live.shape == shape and dtype_name(live.dtype) == dtype)
        ):
            self.tensors[name] = live
            return
        tensors = [tensor for _, tensor in live.pieces] if isinstance(live, Pieces) else [live]
        for tensor in tensors:
            reason = obstacle(tensor)
            if reason is not None:
                self.problem(name, reason)
                return
        fits = True
        if tuple(live.shape) != tuple(shape):
            self.problem(name, f"saved shape {tuple(shape)}, the state has {tuple(live.shape)}")
            fits = False
        if dtype_name(live.dtype) != dtype and not self.cast:
            self.problem(name, f"saved dtype {dtype}, the state has {dtype_name(live.dtype)} (cast=True converts)")
            fits = False
        if fits:
            self.tensors[name] = live

    def _array(self, leaf: Leaf | None, saved: SavedNode) -> Plan | None:
        """Fill a large numpy array, or make one where a small array or another value stands."""
        name = saved.name
        dtype, shape = saved.detail
        live = leaf.live if leaf is not None and leaf.kind == "array" else None
        if live is not None:
            if list(live.shape) != shape:
                self.problem(name, f"saved shape {tuple(shape)}, the state has {live.shape}")
                return None
            if live.dtype.str != dtype:
                self.problem(name, f"saved numpy dtype {dtype}, the state has {live.dtype.str}")
                return None
            if arrays.shares_memory(live):
                self.tensors[name] = arrays.to_tensor(live, what=readable(name))
                return None
        tensor = self.tensors[name] = self.allocate_cpu(name, *self._geometry(name))

        def install(got: Decoded) -> Any:
            found = array_of(tensor, saved)
            if live is None or not live.flags.writeable:
                return found
            live[...] = found
            return live

        return install

    def _subclass(self, node: Branch, saved: SavedNode) -> Plan | None:
        if saved.kind != "subclass" or saved.detail[0] != type_name(node.live):
            self.see_below(saved)
            found = saved.detail[0] if saved.kind == "subclass" else _WORDS.get(saved.kind, f"a {saved.kind}")
            self.problem(node.name, f"saved as {found}, the state has the subclass {type_name(node.live)}")
        elif saved.detail[2] != node.context:
            self.see_below(saved)
            self.problem(node.name, f"saved with the context {saved.detail[2]}, the state has {node.context}")
        else:
            for child in node.children:
                self.match(child)
        return None

    def _valueless_module(self, node: ModuleBranch, saved: SavedNode | None) -> Plan | None:
        """A module without tensors is one value: what its parts' state dicts have."""
        if saved is None:
            self.missing(node)
            return None
        self.seen.add(saved.name)
        if not node.children or not any(self.wanted(child.name) for child in node.children):
            return None
        keys = list(node.keys)
        plan = self.need(
            node.name, OrderedDict((key, child.live) for key, child in zip(keys, node.children, strict=True))
        )

        def check(got: Decoded) -> list[str]:
            found = plan(got)
            if not isinstance(found, dict):
                return [f"{readable(node.name)}: saved as {a(found)}, the state has a module"]
            absent = [key for key in keys if key not in found] if self.strict else []
            return [f"{readable(node.name)}.{key}: missing in the checkpoint" for key in absent]

        def load(got: Decoded) -> Any:
            found = plan(got)
            items = [found.get(key, child.live) for key, child in zip(keys, node.children, strict=True)]
            _load_parts(node, items, node.parts)
            return node.live

        self.checks.append(check)
        return load

    def _stateful(self, node: StatefulBranch) -> Plan | None:
        """An object's own ``load_state_dict`` gets what was saved, whatever its state looks like now."""
        inner = node.children[0]
        if node.name not in self.nodes:
            self.missing(inner)
            return None
        plan = self.grow(node.name, inner, self.allocate_cpu)
        if not any(self.wanted(name) for name in self.leaves_below(self.nodes[node.name])):
            return None
        if type(node.live) in _OURS:
            self.checks.append(lambda got: misfits(node.live, plan(got), node.name))

        def load(got: Decoded) -> Any:
            state = plan(got)
            call_load_state_dict(node.live, state, node.name)
            return node.live

        return load

    def leaves_below(self, saved: SavedNode) -> Iterator[str]:
        """Names of the saved leaves at or below ``saved``."""
        if saved.is_value or not saved.children:
            yield saved.name
        for child in saved.children:
            yield from self.leaves_below(self.nodes[child])

    def _geometry(self, name: str) -> tuple[torch.dtype, tuple[int, ...]]:
        written, shape = self.saved[name]
        dtype = getattr(torch, written, None)
        if not isinstance(dtype, torch.dtype):
            raise StateError(f"{readable(name)}: this version of torch has no dtype {written}; use a newer one")
        return dtype, tuple(shape)

    @staticmethod
    def allocate_cpu(name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> torch.Tensor:
        """New memory where nothing says where the tensor should live."""
        return torch.empty(shape, dtype=dtype)

    def grow(self, name: str, node: Node | None, allocate: Allocate, *, fixed: bool = False) -> Plan:
        """A plan for the complete object saved under ``name``; the checkpoint decides what there is.

        Live tensors of ``node`` are filled where they have the saved shape and dtype; for others ``allocate``
        makes memory. ``fixed``: live tensors must fit, and the caller reports what is missing. The plan returns
        ``ABSENT`` for a leaf that ``keys`` leaves out and the state does not have.
        """
        saved = self.nodes[name]
        if saved.children and not (saved.is_value and (node is None or node.kind == "value")):
            return self._grow_container(saved, node, allocate, fixed)
        live = ABSENT if node is None else original(node.live)
        if not self.wanted(name):
            return lambda got: live
        self.seen.add(name)
        if saved.is_value:
            return self.need(name, None if node is None else live)
        if saved.kind == "tensor":
            return self._grow_tensor(name, node, allocate, fixed)
        if saved.kind == "array":
            leaf = node if isinstance(node, Leaf) else None
            plan = self._array(leaf, saved)
            return plan if plan is not None else lambda got: live
        if saved.kind == "per_rank":
            mark = live if isinstance(live, PerRank) else PerRank(None)
            self.marks[name] = mark
            return lambda got: mark
        empty = container_of(saved, [])
        return lambda got: empty

    def _grow_tensor(self, name: str, node: Node | None, allocate: Allocate, fixed: bool) -> Plan:
        dtype, shape = self._geometry(name)
        if node is not None and node.kind == "tensor":
            tensor = node.live
            same = tuple(tensor.shape) == shape and (tensor.dtype == dtype or self.cast)
            if fixed or same or isinstance(tensor, Pieces):
                self._fit_tensor(name, tensor)
                return lambda got: original(tensor)
        fresh = self.tensors[name] = self._tied(name, allocate(name, dtype, shape))
        return lambda got: original(fresh)

    def _tied(self, name: str, fresh: LiveTensor) -> LiveTensor:
        """``fresh``, or the same tensor as was made for another name of what was saved: tied tensors come back tied."""
        if not self.ties or type(fresh) is not torch.Tensor:
            return fresh
        made = self._made.setdefault(self.ties.get(name, name), fresh)
        alike = made.device == fresh.device and made.shape == fresh.shape and made.dtype == fresh.dtype
        return made if alike and made.stride() == fresh.stride() else fresh

    def _grow_container(self, saved: SavedNode, node: Node | None, allocate: Allocate, fixed: bool) -> Plan:
        if saved.kind == "subclass":
            if not isinstance(node, Branch):
                self.see_below(saved)
                self.problem(saved.name, f"saved as the subclass {saved.detail[0]}, of which the state has none")
                return lambda got: ABSENT
            self._subclass(node, saved)
            live = node.live
            return lambda got: live
        likes: dict[str, Node] = {}
        if isinstance(node, Branch):
            # By last component: a group of an optimizer may have another name in the checkpoint.
            likes = {below(saved.name) + child.name[len(below(node.name)) :]: child for child in node.children}
        elif node is not None and isinstance(node.live, dict):
            prefix = below(saved.name)
            likes = {
                path: Leaf("value", path, item)
                for path, item in ((prefix + names.join((key,)), item) for key, item in node.live.items())
            }
        plans = [
            (key, self.grow(child, likes.get(child), allocate, fixed=fixed)) for child, key in saved.children.items()
        ]
        kept: list[tuple[Any, Any]] = []
        if isinstance(node, Branch) and not fixed:
            for key, (path, child) in zip(node.keys, likes.items(), strict=True):
                if path not in saved.children and child.kind != "value":
                    self.missing(child)
                    kept.append((key, original(child.live)))
        like = None if node is None else node.live

        def make(got: Decoded) -> Any:
            return _retype(container_of(saved, [*((key, plan(got)) for key, plan in plans), *kept]), like)

        return make


def _retype(made: Any, like: Any) -> Any:
    """``made`` as the class that only the live object knows: a named tuple or a defaultdict."""
    if isinstance(made, tuple) and hasattr(type(like), "_make") and len(like) == len(made):
        return type(like)._make(made)
    if isinstance(like, defaultdict) and type(made) is dict:
        return defaultdict(like.default_factory, made)
    return made


def leaves(node: Node) -> Iterator[Leaf]:
    """The leaves at or below ``node``, in order."""
    if isinstance(node, Leaf):
        yield node
    else:
        for child in node.children:
            yield from leaves(child)


def misfits(target: object, state: object, name: str) -> list[str]:
    """Why the ``load_state_dict`` of an object of ours would not take this state.

    No other object is asked, nor one of a class derived from ours: only its ``load_state_dict`` knows what it takes.
    """
    wrong = target.misfit(state) if isinstance(target, _OURS) and type(target) in _OURS else None
    return [] if wrong is None else [f"{readable(name)}: {wrong}"]


def call_load_state_dict(target: Any, state: Any, name: str) -> None:
    """``target.load_state_dict(state)``, after all tensors were filled.

    What it raises becomes a ``StateError`` that names the place.
    """
    try:
        target.load_state_dict(state)
    except Exception as error:
        raise StateError(
            f"{readable(name)}: load_state_dict of {type(target).__name__} failed: {type(error).__name__}: {error}; "
            "what was to be filled is now undefined"
        ) from error


def _container_plan(node: Branch, plans: Sequence[Plan | None]) -> Plan | None:
    if not any(plans):
        return None
    changes = [(key, plan) for key, plan in zip(node.keys, plans, strict=True) if plan is not None]
    live = node.live

    def set_items(got: Decoded) -> Any:
        for key, plan in changes:
            live[key] = plan(got)
        return live

    def make_tuple(got: Decoded) -> Any:
        items = list(live)
        for index, plan in changes:
            items[index] = plan(got)
        return type(live)._make(items) if hasattr(type(live), "_make") else tuple(items)

    return make_tuple if isinstance(live, tuple) else set_items


def _module_plan(node: ModuleBranch, plans: Sequence[Plan | None], touched: Callable[[Node], bool]) -> Plan | None:
    parts = [part for part in node.parts if any(touched(node.children[index]) for _, index in part.entries)]
    if not parts:
        return None

    def load(got: Decoded) -> Any:
        items = [
            original(child.live) if plan is None else plan(got)
            for child, plan in zip(node.children, plans, strict=True)
        ]
        _load_parts(node, items, parts)
        return node.live

    return load


def _load_parts(node: ModuleBranch, items: Sequence[Any], parts: Sequence[Any]) -> None:
    for part in parts:
        state = part.state([items[index] for _, index in part.entries])
        call_load_state_dict(part.module, state, node.name)


@cache
def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def replace_root(live: Any, saved: Any) -> bool:
    """Give a root that is one value its saved contents in place. False if its class does not allow that."""
    if isinstance(live, (dict, set)) and isinstance(saved, type(live)):
        live.clear()
        live.update(saved)
    elif isinstance(live, (list, bytearray)) and isinstance(saved, type(live)):
        live[:] = saved
    elif isinstance(live, numpy.ndarray) and isinstance(saved, numpy.ndarray) and live.shape == saved.shape:
        live[...] = saved
    else:
        return False
    return True
