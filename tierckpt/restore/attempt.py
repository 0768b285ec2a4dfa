"""One candidate: is it whole, does it fit, and then its bytes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from tierckpt.errors import IntegrityError, LayoutError, StateError
from tierckpt.format.boxes import Box
from tierckpt.format.canonical import JSON
from tierckpt.format.chain import CheckpointRef
from tierckpt.format.layout import Layout
from tierckpt.format.manifest import Manifest
from tierckpt.group import Group
from tierckpt.restore.plan import Wanted, plan
from tierckpt.restore.shards import Shards
from tierckpt.state.layout import Describer, Destination, destination
from tierckpt.state.nodes import merge
from tierckpt.state.tree import Saved, Target, unexpected_problems
from tierckpt.tiers.store import Store
from tierckpt.tiers.verify import check_layout


def documents(group: Group, store: Store, ref: CheckpointRef, source: int) -> tuple[Manifest, Layout]:
    """Manifest and layout of a checkpoint, read by rank ``source`` and checked by every rank. Collective."""

    def read() -> bytes:
        if group.rank != source:
            return b""
        manifest = store.manifest_bytes(ref)
        layout = store.layout_bytes(store.parse_manifest(ref, manifest).layout)
        return len(manifest).to_bytes(8, "little") + manifest + layout

    what = f"reading step {ref.step} of {store.url}"
    told = group.vote(what, read)[source]
    found: list[tuple[Manifest, Layout]] = []

    def parse() -> bytes:
        end = 8 + int.from_bytes(told[:8], "little")
        manifest = store.parse_manifest(ref, told[8:end])
        layout = store.parse_layout(manifest.layout, told[end:])
        check_layout(store, manifest, layout)
        found.append((manifest, layout))
        return b""

    group.vote(what, parse)
    return found[0]


def torch_dtype(name: str) -> torch.dtype:
    """The dtype that torch calls ``name``. Raises ``LayoutError`` if it has none."""
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise LayoutError(f"this version of torch has no dtype {name[:40]!r}; use a newer one")
    return dtype


@contextlib.contextmanager
def memory_for(what: str) -> Iterator[None]:
    """Host memory that cannot be had is an error that names ``what``: how much is wanted is for the checkpoint to say."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, MemoryError) or "alloc" in str(error):
            raise StateError(f"{what}: there is not enough memory: {error}") from error
        raise


class Attempt:
    """A checkpoint on its way into a template. Its methods are collective, to be called in their order."""

    def __init__(
        self,
        group: Group,
        store: Store,
        ref: CheckpointRef,
        state: Any,
        *,
        source: int,
        keys: Sequence[str] | None,
        strict: bool,
        cast: bool,
        staged: bool,
    ) -> None:
        self._group, self._store, self._ref, self._state = group, store, ref, state
        self._keys, self._strict, self._cast, self._staged = keys, strict, cast, staged
        self._what = f"step {ref.step} of {store.url}"
        self.manifest, self.layout = documents(group, store, ref, source)
        self._shards = Shards(group, store, self.manifest, self.layout)
        self._wanted: list[Wanted] = []
        self._values: dict[str, JSON] = {}
        self._per_rank: dict[str, JSON] = {}

    @property
    def bytes_read(self) -> int:
        """Bytes that this rank has read."""
        return self._shards.bytes

    def fit(self) -> None:
        """Read the values, and find a place for everything; nothing live is touched.

        Raises:
            LayoutError: lists everything that does not fit.
        """
        what = f"fitting {self._what}"
        blobs: dict[int, list[str]] = {}

        @memory_for(self._what)
        def match() -> bytes:
            contents = self._contents = Contents(self.layout, self._group.rank)
            self._target = Target(self._state, contents.saved, keys=self._keys, strict=self._strict, cast=self._cast)
            self._refuse(self._target.problems)
            blobs.update(contents.blobs_for(self._target.values))
            if self._target.per_rank and self._same_world:
                blobs.setdefault(self._group.rank, [])
            return json.dumps(sorted(self._target.unexpected)).encode()

        told = self._group.vote(what, match)
        if self._strict:
            self._refuse(unexpected_problems(set.intersection(*(set(json.loads(names)) for names in told))))
        found = self._shards.values(blobs)

        @memory_for(self._what)
        def check() -> bytes:
            for rank, wanted in blobs.items():
                self._values.update((name, pick(found[rank], name, rank)) for name in wanted)
            if self._target.per_rank and self._same_world:
                mine = self._group.rank
                self._per_rank = {name: pick(found[mine], name, mine) for name in self._target.per_rank}
            self._refuse(self._target.check(self._values, self._per_rank))
            self._find_places()
            return b""

        self._group.vote(what, check)

    @property
    def _same_world(self) -> bool:
        return self.layout.world == self._group.size

    def _refuse(self, problems: Sequence[str]) -> None:
        if problems:
            listed = "".join(f"\n  {problem}" for problem in problems)
            raise LayoutError(f"{self._what} does not fit the state:{listed}")

    def _find_places(self) -> None:
        layout = self.layout
        describer = Describer(self._group.global_ranks)
        for name, value in self._target.tensors.items():
            index = self._contents.numbers[name]
            dtype = torch_dtype(layout.dtype(index))
            pieces = describer.describe(value, name=name).pieces
            places = [self._place(box, tensor, dtype, name) for box, tensor in pieces]
            self._wanted.append(Wanted(index, places))

    def untouched(self) -> list[str]:
        """Names of leaves that stayed as they were."""
        return self._target.untouched

    def _place(self, box: Box, tensor: torch.Tensor, dtype: torch.dtype, name: str) -> Destination:
        found = destination(box, tensor, name=name)
        if self._staged or tensor.dtype != dtype:
            return Destination(box, torch.empty(box.size, dtype=dtype), found.target or tensor.detach())
        return found

    def fetch(self) -> None:
        """Read, verify and put everything where it belongs; values are kept for :meth:`finish`."""
        self._shards.fill(plan(self.layout, self._wanted))
        if self._cast:
            self._group.vote(f"casting {self._what}", self._check_casts)

    def _check_casts(self) -> bytes:
        problems = {
            f"{self.layout.name(want.index)}: saved as {place.memory.dtype}, it has values that {target.dtype} cannot hold"
            for want in self._wanted
            for place in want.destinations
            if (target := place.target) is not None and target.dtype != place.memory.dtype and _loses(place)
        }
        if problems:
            raise LayoutError("cast=True: " + "; ".join(sorted(problems)))
        return b""

    def finish(self) -> None:
        """All ranks have everything: hand it over."""

        def part() -> bytes:
            for want in self._wanted:
                for place in want.destinations:
                    place.finish()
            self._target.commit(self._values, self._per_rank)
            return b""

        self._group.vote(f"restoring {self._what}", part)


def _loses(place: Destination) -> bool:
    """Whether an integer would overflow (or a fraction be cut) on its way into an integer type."""
    assert place.target is not None
    wanted = place.target.dtype
    if wanted.is_floating_point or wanted.is_complex or wanted == torch.bool:
        return False
    return not bool((place.memory.to(wanted).to(place.memory.dtype) == place.memory).all())


def pick(found: Mapping[str, JSON], name: str, rank: int) -> JSON:
    """One value of a rank's blob."""
    try:
        return found[name]
    except KeyError:
        raise IntegrityError(
            f"the values of rank {rank} do not have {name!r}, which its layout says they have"
        ) from None


class Contents:
    """What a checkpoint holds, as a rank that loads sees it, and which rank's blob has which value."""

    def __init__(self, layout: Layout, rank: int) -> None:
        trees = list(layout.trees)
        # The rank's own tree first, should the layout that loads be that which saved; then the lowest.
        own = [tree for tree in trees if any(first <= rank <= last for first, last in tree.ranks)]
        ordered = own + [tree for tree in trees if tree not in own]
        self.trees = [tree.tree for tree in ordered]
        merged = [merge([tree]) for tree in self.trees]
        self._homes: dict[str, int] = {}
        for tree, nodes in zip(ordered, merged, strict=True):
            for node in nodes.values():
                if node.is_value:
                    self._homes.setdefault(node.name, tree.ranks[0][0])
        #: Numbers of the tensors in the layout, by name.
        self.numbers = {name: i for i, name in enumerate(layout)}
        kinds = {name: (layout.dtype(i), layout.shape(i)) for name, i in self.numbers.items()}
        self.saved = Saved(kinds, merged[0] if len(merged) == 1 else merge(self.trees))

    def leaves(self, *kinds: str) -> list[str]:
        """Names of the leaves of these kinds of node, in order."""
        return [node.name for node in self.saved.nodes.values() if node.kind in kinds]

    @property
    def values(self) -> list[str]:
        """Names of all values that are no rank's own."""
        return list(self._homes)

    def blobs_for(self, names: Sequence[str]) -> dict[int, list[str]]:
        """Which blobs to read for these values, and which of them from each."""
        found: dict[int, list[str]] = {}
        for name in names:
            found.setdefault(self._homes[name], []).append(name)
        return found
