"""A live state as the target of a load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tierckpt.errors import IntegrityError, LayoutError
from tierckpt.format import values as codec
from tierckpt.format.canonical import JSON
from tierckpt.state import live, mapped
from tierckpt.state.live import Leaf
from tierckpt.state.mapping import Mapping as NameMapping
from tierckpt.state.marks import LiveTensor, rebuild
from tierckpt.state.matching import Matcher, call_load_state_dict, leaves, misfits, replace_root
from tierckpt.state.naming import readable
from tierckpt.state.nodes import SavedNode
from tierckpt.state.rng import Generators
from tierckpt.state.view import View
from tierckpt.telling import a


@dataclass(frozen=True)
class Saved:
    """What a checkpoint's layout says.

    ``tensors``: dtype (as in torch, "bfloat16") and global shape by name, aliases included. ``nodes``: its trees, merged,
    that of the loading rank first if it has one. ``ties``: by the name of each alias, the tensor whose bytes it shares.
    """

    tensors: Mapping[str, tuple[str, tuple[int, ...]]]
    nodes: Mapping[str, SavedNode]
    ties: Mapping[str, str] = field(default_factory=dict)


class Target:
    """Holds ``state`` against ``saved`` without touching it, then puts the saved values into it.

    The way to use it: make one; read the values it names; `check` them; if there are no ``problems``, fill
    ``tensors`` (under ``torch.no_grad()``); `commit`.

    ``tensors``
        where the bytes of each tensor go: live tensors of the state, and new ones for optimizer state that it
        does not have yet.
    ``values``, ``per_rank``
        names of the encoded values that are needed. Those of ``per_rank`` may be left out of what `check`
        gets, as in a world of another size: then they stay as they are, and are listed in ``untouched``, as are
        those that only other ranks had.
    ``problems``
        everything that does not fit, one line each: missing keys, wrong shapes, wrong dtypes, kinds that
        differ, optimizer groups that do not match.
    ``unexpected``
        names of saved leaves that this state does not have. Not among the problems: another rank may have
        them, so what counts is the intersection over all ranks (see `unexpected_problems`).
    ``lacking``
        names of leaves of the state of which the checkpoint has nothing; among the problems.
    ``untouched``
        names of leaves of the state that stay as they are although ``keys`` includes them.
    ``unmet``
        those of them that are tensors, if no tensor is filled.

    ``keys`` are globs on the dotted names; leaves that match none stay as they are. ``strict=False`` ignores
    keys that are missing or unexpected. ``cast`` accepts other dtypes of tensors; whoever fills them
    converts. With a ``mapping`` all names here are the state's; ``view`` says what they are in the checkpoint. ``named``:
    the caller has named the checkpoint, see `tierckpt.state.mapped.view`.
    Raises ``StateError`` for a state that could not be saved either.
    """

    def __init__(
        self,
        state: Any,
        saved: Saved,
        *,
        keys: Sequence[str] | None = None,
        strict: bool = True,
        cast: bool = False,
        mapping: NameMapping | None = None,
        named: bool = True,
    ) -> None:
        self._state = state
        self._root = live.walk(state, meta=True)
        _check_saved(saved)
        self.view = view = mapped.view(mapping, saved.nodes, saved.tensors, self._root, strict=strict, named=named)
        nodes = view.nodes
        self._matcher = matcher = Matcher(nodes, view.tensors, keys=keys, strict=strict, cast=cast)
        matcher.problems += view.problems
        matcher.parameters = view.parameters
        matcher.ties = view.ties(saved.ties)
        self._plan = matcher.match(self._root)
        if self._plan is not None and isinstance(state, tuple):
            matcher.problem(self._root.name, "the state is a tuple, whose values cannot be replaced; use a list")
        self._decoded: dict[str, Any] | None = None
        self._marked: dict[str, Any] = {}
        self.unexpected = {
            name
            for name, node in nodes.items()
            if name not in matcher.seen and not node.children and matcher.wanted(name) and _is_leaf(node.kind)
        }
        self.unexpected.update(filter(matcher.wanted, view.absent))

    @property
    def tensors(self) -> dict[str, LiveTensor]:
        return self._matcher.tensors

    @property
    def values(self) -> list[str]:
        return list(self._matcher.needed)

    @property
    def per_rank(self) -> list[str]:
        # Where other ranks had a PerRank value, but the one of the first tree, that of this rank, had not.
        nodes = self.view.nodes
        return [name for name in self._matcher.marks if nodes[name].detail & 1]

    @property
    def problems(self) -> list[str]:
        return self._matcher.problems

    @property
    def untouched(self) -> list[str]:
        return self._matcher.untouched

    @property
    def unmet(self) -> list[str]:
        if self.tensors or not self.untouched:
            return []
        untouched = set(self.untouched)
        return [leaf.name for leaf in leaves(self._root) if leaf.kind in ("tensor", "array") and leaf.name in untouched]

    @property
    def lacking(self) -> list[str]:
        return self._matcher.lacking

    @property
    def lies_below(self) -> list[str]:
        """The names below which the checkpoint has all of this state, if it has nothing of it where it stands now."""
        lacking = self.lacking
        if not lacking or self.tensors or self.values or len(self.problems) > len(lacking):
            return []
        there = {name for name, node in self.view.nodes.items() if not node.children and _is_leaf(node.kind)}
        end = "/" + lacking[0]
        above = [name.removesuffix(end) for name in there if name.endswith(end)]
        return sorted(prefix for prefix in above if all(f"{prefix}/{name}" in there for name in lacking))

    def check(self, values: Mapping[str, JSON], per_rank: Mapping[str, JSON]) -> list[str]:
        """Decode the values and compare what only they can tell; touches nothing. Returns all ``problems``.

        Raises ``IntegrityError`` for values that are malformed.
        """
        matcher = self._matcher
        if self._decoded is not None:
            return self.problems
        decoded: dict[str, Any] = {}
        for name, like in matcher.needed.items():
            if name not in values:
                raise IntegrityError(f"{readable(name)}: its value is not among those that were read")
            decoded[name] = codec.decode(values[name], what=readable(name), template=like)
        for name, mark in matcher.marks.items():
            if name not in per_rank:
                matcher.untouched.append(name)
                continue
            template: Any = None if mark.stateful else (mark.value, [])
            captured = codec.decode(per_rank[name], what=readable(name), template=template)
            marked = self._marked[name] = rebuild(captured, what=readable(name))
            matcher.problems += misfits(mark.value, marked, name)
        for check in matcher.checks:
            matcher.problems += check(decoded)
        self._decoded = decoded
        return self.problems

    def commit(self, values: Mapping[str, JSON], per_rank: Mapping[str, JSON]) -> None:
        """Put everything that is not a tensor's bytes into the state; ``tensors`` must have been filled.

        Containers are changed in place; immutable ones are replaced in their parent. Objects that were saved
        through ``state_dict()`` get their ``load_state_dict()`` in the order of the tree, then per-rank
        leaves are set, the generators of `rng_state` last. Raises ``LayoutError`` if there are ``problems``,
        ``StateError`` for what an object's ``load_state_dict()`` raises; the state is then undefined.
        """
        if self.check(values, per_rank):
            raise LayoutError("\n".join(self.problems))
        assert self._decoded is not None
        if self._plan is not None:
            found = self._plan(self._decoded)
            if isinstance(self._root, Leaf) and found is not self._state and not replace_root(self._state, found):
                raise LayoutError(f"the state is {a(self._state)}, which cannot be changed in place; put it in a dict")
        marks = self._matcher.marks
        for name in sorted(self._marked, key=lambda name: isinstance(marks[name].value, Generators)):
            mark = marks[name]
            if mark.stateful:
                call_load_state_dict(mark.value, self._marked[name], name)
            else:
                mark.restore(self._marked[name])


def _check_saved(saved: Saved) -> None:
    for name, node in saved.nodes.items():
        if name not in saved.tensors and node.kind in ("tensor", "array"):
            raise IntegrityError(f"the layout has no tensor {name!r}, which its tree names")


def unexpected_problems(names: set[str], view: View | None = None) -> list[str]:
    """A line for each saved leaf that no rank's state has, in order; with a ``view``, what it is in the checkpoint."""
    found = []
    for name in sorted(names):
        origins = [name] if view is None else view.names_of(name)
        becomes = "" if origins == [name] else f", where it would be {readable(name)}"
        found.append(f"{', '.join(map(readable, origins))}: in the checkpoint, not in the state{becomes}")
    return found


def _is_leaf(kind: str) -> bool:
    return kind in ("tensor", "array", "value", "per_rank")
