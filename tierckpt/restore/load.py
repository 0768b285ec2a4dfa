"""Bring a checkpoint into live state, on all ranks the same one, or say on all of them why not."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tierckpt.errors import IncompleteError, IntegrityError, LayoutError, StoreError
from tierckpt.format import names, values
from tierckpt.format.boxes import Box
from tierckpt.format.canonical import JSON
from tierckpt.format.chain import CheckpointRef
from tierckpt.format.layout import Layout
from tierckpt.format.manifest import Manifest
from tierckpt.group import Group
from tierckpt.restore.fetch import ShardFetch
from tierckpt.restore.locate import candidates
from tierckpt.restore.plan import Wanted, plan
from tierckpt.state.layout import Describer, Destination, destination
from tierckpt.state.tree import Saved, Target, build, names_of, unexpected_problems
from tierckpt.tiers.base import Place
from tierckpt.tiers.store import Store
from tierckpt.tiers.verify import check_layout

#: Faults of one candidate, after which an older one may be tried. What else goes wrong concerns all of them.
_FALL_BACK = (IntegrityError, IncompleteError, StoreError)


@dataclass(frozen=True)
class LoadInfo:
    """What a load brought back.

    Attributes:
        step, generation, id: which checkpoint; id is the hex digest of its manifest.
        world: ranks that saved it.
        metadata: as passed to ``save``.
        head: hex digest of the chain's newest link when it was read.
        sources: where the bytes came from, ``{tier: bytes read by this rank}``.
        skipped: checkpoints that were to come first, and why they could not be used.
        untouched: leaves of one rank each (``PerRank``) that were left alone since the world has another size.
        seconds: how long it took.
    """

    step: int
    generation: int
    id: str
    world: int
    head: str
    metadata: Any = None
    sources: Mapping[str, int] = field(default_factory=dict)
    skipped: Sequence[str] = ()
    untouched: Sequence[str] = ()
    seconds: float = 0.0


@dataclass
class _Choice:
    """Rank 0's decision, told to all."""

    run: str
    head: str
    refs: list[CheckpointRef]
    skipped: list[str]

    def encode(self) -> bytes:
        refs = [[ref.generation, ref.step, ref.id] for ref in self.refs]
        return json.dumps([self.run, self.head, refs, self.skipped]).encode()

    @classmethod
    def decode(cls, data: bytes) -> _Choice:
        run, head, refs, skipped = json.loads(data)
        return cls(run, head, [CheckpointRef(*ref) for ref in refs], skipped)


def load(
    group: Group,
    place: Place,
    state: Any,
    *,
    step: int | None,
    keys: Sequence[str] | None,
    strict: bool,
    cast: bool,
    fallback: bool,
    staged: bool,
    believe: Callable[[Store], None],
    run: str | None = None,
    max_restarts: int | None = None,
    may_be_empty: bool = False,
) -> LoadInfo | None:
    """Fill ``state`` in place. Collective; see :func:`tierckpt.load` for the arguments.

    Args:
        believe: raises unless the chain of a store is trusted.
        run: the run that the store must hold.
        max_restarts: see :func:`tierckpt.restore.locate.candidates`.
        may_be_empty: None is returned, not raised, when nothing was ever committed.
    """
    began = time.perf_counter()
    choice = _choose(group, place, step, believe, run, max_restarts, may_be_empty)
    if choice is None:
        return None
    store = Store.bare(place, choice.run)
    skipped = list(choice.skipped)
    failures: list[Exception] = []
    touched = False
    for ref in choice.refs:
        try:
            attempt = _Attempt(group, store, ref, state, keys=keys, strict=strict, cast=cast, staged=staged)
            attempt.fit()
            touched = touched or not staged
            attempt.fetch()
        except _FALL_BACK as error:
            if not fallback or step is not None:
                raise
            failures.append(error)
            skipped.append(f"step {ref.step} (generation {ref.generation}): {error}")
            continue
        attempt.finish()
        for line in skipped:
            warnings.warn(f"{place.url}: not restored: {line}", RuntimeWarning, stacklevel=3)
        return LoadInfo(
            step=ref.step,
            generation=ref.generation,
            id=ref.id,
            world=attempt.manifest.world,
            head=choice.head,
            metadata=decode_metadata(attempt.manifest),
            sources={"disk": attempt.bytes},
            skipped=tuple(skipped),
            untouched=tuple(attempt.untouched()),
            seconds=time.perf_counter() - began,
        )
    state_of_it = " What was to be filled is now undefined." if touched else ""
    damaged = all(isinstance(error, IntegrityError) for error in failures)
    kind = IntegrityError if damaged else IncompleteError
    raise kind(f"{place.url}: no checkpoint could be restored.{state_of_it} " + "; ".join(skipped))


def decode_metadata(manifest: Manifest) -> Any:
    """The user's metadata of a checkpoint, None if there is none."""
    return None if manifest.metadata is None else values.decode(manifest.metadata, what="metadata")


def _choose(
    group: Group,
    place: Place,
    step: int | None,
    believe: Callable[[Store], None],
    run: str | None,
    max_restarts: int | None,
    may_be_empty: bool,
) -> _Choice | None:
    def part() -> bytes:
        if group.rank != 0:
            return b""
        try:
            store = Store.open(place)
        except IncompleteError:
            if may_be_empty:
                return b"null"
            raise
        store.must_hold(run)
        believe(store)
        if may_be_empty and not store.chain.committed:
            return b"null"
        refs, left_out = candidates(store, step=step, max_restarts=max_restarts)
        return _Choice(store.run, store.chain.links[-1].digest, refs, left_out).encode()

    told = group.vote(f"the choice of a checkpoint in {place.url}", part)[0]
    return None if told == b"null" else _Choice.decode(told)


class _Attempt:
    """One candidate: fits it to the template, then reads it. Each step is a vote."""

    def __init__(
        self,
        group: Group,
        store: Store,
        ref: CheckpointRef,
        state: Any,
        *,
        keys: Sequence[str] | None,
        strict: bool,
        cast: bool,
        staged: bool,
    ) -> None:
        self._group, self._store, self._ref, self._state = group, store, ref, state
        self._keys, self._strict, self._cast, self._staged = keys, strict, cast, staged
        self._wanted: list[Wanted] = []
        self._values: dict[str, JSON] = {}
        self._per_rank: dict[str, JSON] = {}
        self.bytes = 0

    def fit(self) -> None:
        """Read the documents and the values, and find a place for everything; nothing live is touched."""

        def part() -> bytes:
            self.manifest = self._store.manifest(self._ref)
            self.layout = self._store.layout(self.manifest.layout)
            check_layout(self._store, self.manifest, self.layout)
            self._find_places()
            return json.dumps(sorted(self._target.unexpected)).encode()

        told = self._group.vote(f"fitting step {self._ref.step} of {self._store.url}", part)
        unexpected = set.intersection(*(set(json.loads(names)) for names in told))
        if unexpected and self._strict:
            raise self._misfit(unexpected_problems(unexpected))

    def _misfit(self, problems: Sequence[str]) -> LayoutError:
        listed = "".join(f"\n  {problem}" for problem in problems)
        return LayoutError(f"step {self._ref.step} of {self._store.url} does not fit the state:{listed}")

    def _find_places(self) -> None:
        layout = self.layout
        self._saved = Contents(layout, self._group.rank)
        target = self._target = Target(
            self._state, self._saved.saved, keys=self._keys, strict=self._strict, cast=self._cast
        )
        if not target.problems:
            self._read_values()
            target.check(self._values, self._per_rank)
        if target.problems:
            raise self._misfit(target.problems)
        describer = Describer(self._group.global_ranks)
        for name, value in target.tensors.items():
            index = layout.index(name)
            assert index is not None
            dtype = getattr(torch, layout.dtype(index))
            pieces = describer.describe(value, name=name).pieces
            self._wanted.append(
                Wanted(index, [self._place(box, tensor, dtype, name) for box, tensor in pieces])
            )

    def _read_values(self) -> None:
        """From the blobs of the ranks that have what is needed."""
        rank = self._group.rank
        blobs = self._saved.blobs_for(self._target.values)
        if self._target.per_rank and self.layout.world == self._group.size:
            blobs.setdefault(rank, [])
        for number, wanted in sorted(blobs.items()):
            with self._open(number) as shard:
                found = shard.values()
            self._values.update((name, _pick(found, name, number)) for name in wanted)
            if number == rank and self.layout.world == self._group.size:
                self._per_rank = {name: _pick(found, name, rank) for name in self._target.per_rank}

    def _open(self, rank: int) -> ShardFetch:
        return ShardFetch.open(self._store, self.manifest, self.layout, rank)

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

        def part() -> bytes:
            self._fetch()
            if self._cast:
                self._check_casts()
            return b""

        self._group.vote(f"reading step {self._ref.step} of {self._store.url}", part)

    def _fetch(self) -> None:
        for rank, wanted in sorted(plan(self.layout, self._wanted).items()):
            with self._open(rank) as shard:
                shard.read(wanted)
                self.bytes += shard.bytes

    def _check_casts(self) -> None:
        problems = []
        for want in self._wanted:
            for place in want.destinations:
                if place.target is not None and place.target.dtype != place.memory.dtype and _loses(place):
                    problems.append(
                        f"{self.layout.name(want.index)}: saved as {place.memory.dtype}, it has values that "
                        f"{place.target.dtype} cannot hold"
                    )
        if problems:
            raise LayoutError("cast=True: " + "; ".join(sorted(set(problems))))

    def finish(self) -> None:
        """All ranks have everything: hand it over."""

        def part() -> bytes:
            for want in self._wanted:
                for place in want.destinations:
                    place.finish()
            self._target.commit(self._values, self._per_rank)
            return b""

        self._group.vote(f"restoring step {self._ref.step} of {self._store.url}", part)


def _loses(place: Destination) -> bool:
    """Whether an integer would overflow (or a fraction be cut) on its way into an integer type."""
    assert place.target is not None
    wanted = place.target.dtype
    if wanted.is_floating_point or wanted.is_complex or wanted == torch.bool:
        return False
    return not bool((place.memory.to(wanted).to(place.memory.dtype) == place.memory).all())


def _pick(found: Mapping[str, JSON], name: str, rank: int) -> JSON:
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
        self._homes: dict[str, int] = {}
        self.tensors: dict[str, None] = {}
        self.per_rank: dict[str, None] = {}
        for tree in ordered:
            tensors, named, own_leaves = names_of(tree.tree)
            self.tensors.update(dict.fromkeys(tensors))
            self.per_rank.update(dict.fromkeys(own_leaves))
            for name in named:
                self._homes.setdefault(name, tree.ranks[0][0])
        kinds = {name: (layout.dtype(i), layout.shape(i)) for i, name in enumerate(layout)}
        self.saved = Saved(kinds, [tree.tree for tree in ordered], self._homes.keys(), self.per_rank.keys())

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


def read(
    group: Group,
    place: Place,
    *,
    step: int | None,
    keys: Sequence[str] | None,
    fallback: bool,
    believe: Callable[[Store], None],
    run: str | None = None,
) -> Any:
    """The state of a checkpoint without a template, whole tensors nested as saved. See :func:`tierckpt.read`."""
    choice = _choose(group, place, step, believe, run, None, False)
    assert choice is not None
    store = Store.bare(place, choice.run)
    skipped: list[str] = []
    for ref in choice.refs:
        found: list[Any] = []

        def part(ref: CheckpointRef = ref, found: list[Any] = found) -> bytes:
            found.append(_read(store, ref, keys, group.rank))
            return b""

        try:
            group.vote(f"reading step {ref.step} of {place.url}", part)
        except _FALL_BACK as error:
            if not fallback or step is not None:
                raise
            skipped.append(f"step {ref.step} (generation {ref.generation}): {error}")
            continue
        for line in skipped:
            warnings.warn(f"{place.url}: not read: {line}", RuntimeWarning, stacklevel=3)
        return found[0]
    raise IncompleteError(f"{place.url}: no checkpoint could be read. " + "; ".join(skipped))


def _read(store: Store, ref: CheckpointRef, keys: Sequence[str] | None, rank: int) -> Any:
    manifest = store.manifest(ref)
    layout = store.layout(manifest.layout)
    check_layout(store, manifest, layout)
    described = Contents(layout, rank)
    wanted: list[Wanted] = []
    tensors: dict[str, torch.Tensor] = {}
    owners: dict[int, torch.Tensor] = {}
    leaves = (list(described.tensors), described.values, list(described.per_rank))
    chosen, chosen_values, chosen_own = (_select(known, keys) for known in leaves)
    if keys is not None and not (chosen or chosen_values or chosen_own):
        raise LayoutError(f"keys={list(keys)!r}: nothing in step {ref.step} of {store.url} matches")
    for name in chosen:
        index = layout.index(name)
        if index is None:
            raise IntegrityError(
                f"{store.url}: the layout of step {ref.step} has no tensor {name!r}, its tree has"
            )
        owner = layout.alias(index)
        tensor = owners.get(owner)
        if tensor is None:
            shape = layout.shape(index)
            tensor = owners[owner] = torch.empty(shape, dtype=getattr(torch, layout.dtype(index)))
            wanted.append(Wanted(owner, [Destination(Box((0,) * len(shape), shape), tensor, None)]))
        tensors[name] = tensor
    reads = plan(layout, wanted)
    blobs = described.blobs_for(chosen_values)
    per_rank: dict[str, JSON] = {}
    found_values: dict[str, JSON] = {}
    if chosen_own and rank < layout.world:
        blobs.setdefault(rank, [])
    for number in sorted({*reads, *blobs}):
        with ShardFetch.open(store, manifest, layout, number) as shard:
            if number in reads:
                shard.read(reads[number])
            if number in blobs:
                blob = shard.values()
                found_values.update((name, _pick(blob, name, number)) for name in blobs[number])
                if number == rank:
                    per_rank = {name: blob[name] for name in chosen_own if name in blob}
    return build(described.saved.trees, tensors, found_values, per_rank)


def _select(names_: Sequence[str], keys: Sequence[str] | None) -> list[str]:
    """Those of the leaves' names that match ``keys`` (globs over dotted names; None: all)."""
    return [name for name in names_ if keys is None or names.matches(names.split(name), keys)]
