"""What a load sees of a checkpoint: its tree and its tensors under the names of the state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeAlias

from tierckpt.format import values
from tierckpt.format.boxes import Box, whole
from tierckpt.format.canonical import JSON
from tierckpt.state.naming import below
from tierckpt.state.nodes import SavedNode

Kind: TypeAlias = tuple[str, tuple[int, ...]]
"""dtype and global shape of a tensor."""


class Part(NamedTuple):
    """What fills a box of a tensor of the state: ``box`` of the checkpoint's tensor ``name``, put at ``offset``."""

    name: str
    box: Box
    offset: tuple[int, ...]
    is_whole: bool = False
    """Whether the box is all of that tensor."""


@dataclass
class View:
    """A checkpoint under the names of the state.

    Attributes:
        nodes, tensors: as in ``Saved``.
        parts: what each tensor is made of; of those that are not here, all of that of the same name.
        origins: the names that values have in the checkpoint. Several must agree.
        agreeing: single elements made of several (the step counts of fused parameters), which must agree.
        parameters: for each optimizer, what its parameters are called in the checkpoint.
        doubts: why it is not known what the parameters of an optimizer are called.
        absent: parts of split tensors that cannot be placed, since this rank has nothing of them; and what has them.
        problems: a line for each thing that does not fit.
    """

    nodes: dict[str, SavedNode] = field(default_factory=dict)
    tensors: dict[str, Kind] = field(default_factory=dict)
    parts: dict[str, list[Part]] = field(default_factory=dict)
    origins: dict[str, list[str]] = field(default_factory=dict)
    agreeing: dict[str, list[str]] = field(default_factory=dict)
    parameters: dict[str, dict[object, tuple[object, ...]]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    doubts: dict[str, str] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def is_whole(self, name: str) -> bool:
        """Whether a tensor is all of one of the checkpoint."""
        parts = self.parts.get(name)
        return parts is None or (len(parts) == 1 and parts[0].is_whole)

    def names_of(self, name: str) -> list[str]:
        """The names in the checkpoint of what the state calls ``name``."""
        if name in self.agreeing:
            return self.agreeing[name]
        if name in self.parts:
            return list(dict.fromkeys(part.name for part in self.parts[name]))
        return [self.absent[name]] if name in self.absent else self.origins.get(name, [name])

    def doubts_of(self, wanted: Iterable[str]) -> list[str]:
        """A line for each optimizer of which one of the leaves ``wanted`` is, and whose parameters are in doubt."""
        return (
            [text for name, text in self.doubts.items() if any(leaf.startswith(below(name)) for leaf in wanted)]
            if self.doubts
            else []
        )

    def ties(self, saved: Mapping[str, str]) -> Mapping[str, str]:
        """``saved``, aliases and the tensors whose bytes they share, under the names of the state."""
        if not saved or not self.parts:
            return saved
        owners = {*saved.values()}
        first: dict[str, str] = {}
        found = {}
        for name in self.tensors:
            origin = self.names_of(name)[0]
            if (origin in saved or origin in owners) and self.is_whole(name):
                owner = saved.get(origin, origin)
                if first.setdefault(owner, name) != name:
                    found[name] = first[owner]
        return found

    def value(self, name: str, encoded: JSON) -> JSON:
        """The value ``name`` of the checkpoint; what a group of an optimizer calls its parameters is what the state does."""
        for optimizer, parameters in self.parameters.items():
            if not name.startswith(below(optimizer) + "param_groups/"):
                continue
            after: dict[object, list[object]] = {}
            for called, before in parameters.items():
                for key in before:
                    after.setdefault(key, []).append(called)
            found = values.decode(encoded, what=name)
            if type(found) is dict and "params" in found:
                found["params"] = _renamed(found["params"], after)
            elif name.endswith("/params"):
                found = _renamed(found, after)
            return values.encode(found)
        return encoded


def _renamed(parameters: Iterable[object], after: Mapping[object, list[object]]) -> list[object]:
    return list(dict.fromkeys(called for key in parameters for called in after.get(key, [key])))


def whole_part(name: str, shape: tuple[int, ...]) -> Part:
    """All of a tensor."""
    return Part(name, whole(shape), (0,) * len(shape), True)
