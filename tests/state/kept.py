"""A store in memory: what `flatten` gave, as a checkpoint would have it, and back through `Target`."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tierckpt.errors import LayoutError
from tierckpt.format import canonical, values
from tierckpt.state.marks import Pieces
from tierckpt.state.nodes import merge
from tierckpt.state.tree import Saved, Target, build, flatten, names_of, unexpected_problems


@dataclass
class Kept:
    """One checkpoint. Nothing in it is shared with the state that it was made of."""

    trees: list[Any]
    tensors: dict[str, torch.Tensor]
    values: dict[str, Any]
    per_rank: dict[str, Any]

    @staticmethod
    def of(state: Any) -> Kept:
        flat = flatten(state)
        tree = json.loads(canonical.encode(flat.tree))
        kept = Kept(
            [tree],
            {name: _copy(tensor) for name, tensor in flat.tensors.items()},
            {name: _through_json(values.encode(value, path=name)) for name, value in flat.values.items()},
            {name: _through_json(values.encode(value, path=name)) for name, value in flat.per_rank.items()},
        )
        assert names_of(tree) == (list(kept.tensors), list(kept.values), list(kept.per_rank))
        return kept

    @staticmethod
    def of_ranks(*states: Any) -> Kept:
        """Several ranks with trees of their own, as pipeline stages have them."""
        kept = Kept([], {}, {}, {})
        for one in map(Kept.of, states):
            kept.trees += one.trees
            kept.tensors.update(one.tensors)
            for name, value in one.values.items():
                kept.values.setdefault(name, value)
        return kept

    def target(self, state: Any, **keywords: Any) -> Target:
        saved = Saved(
            {n: (str(t.dtype).removeprefix("torch."), tuple(t.shape)) for n, t in self.tensors.items()},
            merge(self.trees),
        )
        return Target(state, saved, **keywords)

    def problems(self, state: Any, **keywords: Any) -> list[str]:
        """Everything that does not fit, unexpected keys as well."""
        target = self.target(state, **keywords)
        problems = list(target.check({name: self.values[name] for name in target.values}, self.per_rank))
        return problems + (unexpected_problems(target.unexpected) if keywords.get("strict", True) else [])

    def load(self, state: Any, *, same_world: bool = True, **keywords: Any) -> Target:
        """Fill ``state``. Raises ``LayoutError`` before touching it when something does not fit."""
        problems = self.problems(state, **keywords)
        if problems:
            raise LayoutError("\n".join(problems))
        target = self.target(state, **keywords)
        with torch.no_grad():
            for name, live in target.tensors.items():
                if isinstance(live, Pieces):
                    for offset, tensor in live.pieces:
                        box = tuple(slice(o, o + n) for o, n in zip(offset, tensor.shape, strict=True))
                        tensor.copy_(self.tensors[name][box])
                else:
                    live.copy_(self.tensors[name])
        found = {name: self.values[name] for name in target.values}
        target.commit(found, self.per_rank if same_world else {})
        return target

    def read(self, keys: Sequence[str] | None = None) -> Any:
        assert keys is None
        return build(self.trees, self.tensors, self.values, self.per_rank)


def _copy(tensor: torch.Tensor | Pieces) -> torch.Tensor:
    if not isinstance(tensor, Pieces):
        return tensor.detach().clone()
    whole = torch.zeros(tensor.global_shape, dtype=tensor.dtype)
    for offset, piece in tensor.pieces:
        whole[tuple(slice(o, o + n) for o, n in zip(offset, piece.shape, strict=True))] = piece.detach()
    return whole


def _through_json(encoded: Any) -> Any:
    data = canonical.encode(encoded)
    return canonical.decode(data, what="test", depth=values.DEPTH_LIMIT)
