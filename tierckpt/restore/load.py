"""Bring a checkpoint into live state, on all ranks the same one, or say on all of them why not."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tierckpt.arguments import flags, patterns, takes
from tierckpt.collector import paused_collector
from tierckpt.errors import IncompleteError, IntegrityError, LayoutError, StoreError
from tierckpt.format import names, values
from tierckpt.format.boxes import whole
from tierckpt.format.chain import CheckpointRef
from tierckpt.format.manifest import Manifest
from tierckpt.group import Group
from tierckpt.restore.attempt import (
    Attempt,
    Contents,
    agree,
    disagreeing,
    documents,
    memory_for,
    parted,
    pick,
    torch_dtype,
)
from tierckpt.restore.choice import choose
from tierckpt.restore.held import Candidate, all_candidates, memories
from tierckpt.restore.plan import Wanted, plan
from tierckpt.restore.shards import Shards
from tierckpt.snapshot import fence
from tierckpt.state import mapped
from tierckpt.state.layout import Destination
from tierckpt.state.mapping import Mapping as NameMapping
from tierckpt.state.nodes import build_nodes, merge
from tierckpt.state.spelling import dotted
from tierckpt.state.view import View
from tierckpt.telling import warn
from tierckpt.tiers.base import Place
from tierckpt.tiers.store import Store

#: Faults of one candidate, after which an older one may be tried. What else goes wrong concerns all of them.
_FALL_BACK = (IntegrityError, IncompleteError, StoreError)


@dataclass(frozen=True)
class LoadInfo:
    """What a load brought back.

    Attributes:
        step, generation, id: which checkpoint; id is the hex digest of its manifest.
        world: ranks that saved it.
        run: of the store.
        metadata: as passed to ``save``.
        head: hex digest of the chain's newest link when it was read.
        sources: where the bytes came from, ``{tier: bytes read by this rank}``.
        skipped: checkpoints that were to come first, and why they could not be used.
        ignored: names in the checkpoint for which the state has no place (``strict=False``).
        untouched: leaves that were left alone: the checkpoint lacks them (``strict=False``), or they are of one rank each
            (``PerRank``) and the world has another size.
        seconds: how long it took.
    """

    step: int
    generation: int
    id: str
    world: int
    head: str
    run: str = ""
    metadata: Any = None
    sources: Mapping[str, int] = field(default_factory=dict)
    skipped: Sequence[str] = ()
    untouched: Sequence[str] = ()
    ignored: Sequence[str] = ()
    seconds: float = 0.0


@paused_collector()
def load(
    group: Group,
    place: Place,
    state: Any,
    *,
    step: int | None,
    keys: Sequence[str] | str | None,
    strict: bool,
    cast: bool,
    fallback: bool,
    staged: bool,
    believe: Callable[[Store], None],
    mapping: NameMapping | None = None,
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
    fence.wait()  # what is filled here may still be being copied
    how = {"strict": strict, "cast": cast, "fallback": fallback, "staged": staged}
    must_be_right(step, mapping, **how)
    keys = patterns(keys)
    group.agree(
        f"loading from {place.url}",
        root=place.identity,
        step=step,
        run=run,
        **how,
    )
    choice = choose(
        group, place, step=step, believe=believe, run=run, max_restarts=max_restarts, may_be_empty=may_be_empty
    )
    if choice is None:
        return None
    with memories(group, place, choice.run, timeout=group.timeout, beyond=choice.newest) as held:
        tries = all_candidates(choice, held, place, step)
        if not tries:
            if choice.problem:
                raise IncompleteError(choice.problem)
            return None
        passed = _Passed(list(choice.skipped))
        for one in tries:
            ref = one.ref
            try:
                attempt = Attempt(
                    group,
                    one.store,
                    ref,
                    state,
                    source=one.source,
                    keys=keys,
                    strict=strict,
                    cast=cast,
                    staged=staged,
                    mapping=mapping,
                    named=step is not None,
                )
                attempt.fit()
                passed.cover(group, attempt)
                passed.touched = passed.touched or not staged
                attempt.fetch()
            except _FALL_BACK as error:
                if _is_last(one, tries, older=fallback and step is None):
                    raise
                passed.over(ref, error)
                continue
            except LayoutError as error:
                # The first one that does not fit is the caller's mistake; after a failure it is one more that cannot be used.
                if not passed.errors:
                    raise
                passed.over(ref, error)
                continue
            attempt.finish()
            passed.warn(place)
            unmet = attempt.unmet()
            if unmet:
                warn(unmet)
            return LoadInfo(
                step=ref.step,
                generation=ref.generation,
                id=ref.id,
                world=attempt.manifest.world,
                head=choice.head,
                run=choice.run,
                metadata=decode_metadata(attempt.manifest),
                sources=attempt.sources(one.tier),
                skipped=tuple(passed.lines),
                untouched=tuple(attempt.untouched()),
                ignored=tuple(attempt.ignored),
                seconds=time.perf_counter() - began,
            )
        raise passed.error(place)


@dataclass
class _Passed:
    """Checkpoints that could not be used, and why."""

    lines: list[str]
    errors: list[Exception] = field(default_factory=list)
    touched: bool = False
    names: set[str] = field(default_factory=set)

    def cover(self, group: Group, attempt: Attempt) -> None:
        """Refuse a candidate that would leave bytes of one that failed before in place. Collective."""
        if self.touched:

            def part() -> bytes:
                left = sorted(self.names - attempt.names)
                if left:
                    raise IncompleteError(
                        f"it lacks {', '.join(left[:10])}, of which a newer checkpoint has filled a part"
                    )
                return b""

            group.vote("falling back", part)
        self.names |= attempt.names

    def over(self, ref: CheckpointRef, error: Exception) -> None:
        self.errors.append(error)
        self.lines.append(f"step {ref.step} (generation {ref.generation}): {error}")

    def warn(self, place: Place) -> None:
        for line in self.lines:
            warn(f"{place.url}: not restored: {line}")

    def error(self, place: Place) -> Exception:
        damaged = all(isinstance(error, IntegrityError) for error in self.errors)
        undefined = " What was to be filled is now undefined." if self.touched else ""
        kind = IntegrityError if damaged else IncompleteError
        return kind(f"{place.url}: no checkpoint could be restored.{undefined} " + "; ".join(self.lines))


def decode_metadata(manifest: Manifest) -> Any:
    """The user's metadata of a checkpoint, None if there is none."""
    return None if manifest.metadata is None else values.decode(manifest.metadata, what="metadata")


@paused_collector()
def read(
    group: Group,
    place: Place,
    *,
    step: int | None,
    keys: Sequence[str] | str | None,
    fallback: bool,
    believe: Callable[[Store], None],
    mapping: NameMapping | None = None,
    run: str | None = None,
) -> Any:
    """The state of a checkpoint without a template, whole tensors nested as saved. See :func:`tierckpt.read`."""
    must_be_right(step, mapping, fallback=fallback)
    keys = patterns(keys)
    group.agree(f"reading from {place.url}", root=place.identity, step=step, fallback=fallback, run=run)
    choice = choose(group, place, step=step, believe=believe, run=run)
    assert choice is not None
    with memories(group, place, choice.run, timeout=group.timeout, beyond=choice.newest) as held:
        tries = all_candidates(choice, held, place, step)
        if not tries:
            raise IncompleteError(choice.problem)
        passed = _Passed(list(choice.skipped))
        for one in tries:
            try:
                found = _read(group, one.store, one.ref, keys, one.source, mapping, named=step is not None)
            except _FALL_BACK as error:
                if _is_last(one, tries, older=fallback and step is None):
                    raise
                passed.over(one.ref, error)
                continue
            passed.warn(place)
            return found
        raise passed.error(place)


def must_be_right(step: object, mapping: object, **given: object) -> None:
    """Arguments of other types than are taken would show as errors of something else, or not at all.

    Args:
        given: what is True or False.
    """
    is_step = step is None or (isinstance(step, int) and not isinstance(step, bool))
    takes("step", step, is_step, "an integer; without it the newest is taken")
    takes("mapping", mapping, mapping is None or isinstance(mapping, NameMapping), "a tierckpt.Mapping of rules")
    flags(**given)


def _is_last(one: Candidate, tries: Sequence[Candidate], *, older: bool) -> bool:
    """Whether nothing else may be tried after ``one``: another copy of the same checkpoint always may, ``older`` ones too."""
    return not older and not any(other.ref == one.ref for other in tries[tries.index(one) + 1 :])


def _read(
    group: Group,
    store: Store,
    ref: CheckpointRef,
    keys: Sequence[str] | None,
    source: int,
    mapping: NameMapping | None,
    *,
    named: bool,
) -> Any:
    manifest, layout = documents(group, store, ref, source)
    shards = Shards(group, store, manifest, layout)
    what = f"step {ref.step} of {store.url}"
    # Not as this rank saw it: all get the same, but for what is a rank's own.
    contents = Contents(layout, _NOBODY)
    chosen = _Chosen()
    wanted: list[Wanted] = []
    tensors: dict[str, torch.Tensor] = {}
    owners: dict[int, torch.Tensor] = {}

    def select() -> bytes:
        chosen.select(contents, group.rank, keys, mapping, what, named=named)
        return b"mapped" if mapping is not None else b""

    mapped_anywhere = any(group.vote(f"reading {what}", select))
    view = chosen.view

    @memory_for(what)
    def allocate() -> bytes:
        for name in chosen.tensors:
            origin = view.names_of(name)[0]
            index = contents.numbers.get(origin)
            if index is None:
                raise IntegrityError(
                    f"{store.url}: the layout of step {ref.step} has no tensor {origin!r}, its tree has"
                )
            dtype = torch_dtype(layout.dtype(index))
            if not view.is_whole(name):
                shape = view.tensors[name][1]
                tensors[name] = torch.empty(shape, dtype=dtype)
                place = Destination(whole(shape), tensors[name], None)
                wanted.extend(parted(view.parts[name], contents.numbers, [place]))
                continue
            owner = layout.alias(index)
            tensor = owners.get(owner)
            if tensor is None:
                shape = layout.shape(index)
                tensor = owners[owner] = torch.empty(shape, dtype=dtype)
                wanted.append(Wanted(owner, [Destination(whole(shape), tensor, None)]))
            tensors[name] = tensor
        return b""

    group.vote(f"reading {what}", allocate)
    blobs = contents.blobs_for([origin for name in chosen.values for origin in view.names_of(name)])
    if chosen.own:
        blobs.setdefault(group.rank, [])
    told = shards.values(blobs)
    shards.fill(plan(layout, wanted))
    found = {name: pick(told[rank], name, rank) for rank, picked in blobs.items() for name in picked}
    if mapped_anywhere:

        def compare() -> bytes:
            _refuse(f"{what} does not fit the mapping", disagreeing(view, chosen.values, found))
            return b""

        group.vote(f"reading {what}", compare)
        agree(group, f"reading {what}", shards, contents, view, chosen.tensors)
    own = told.get(group.rank, {})
    return build_nodes(
        view.nodes,
        tensors,
        {name: view.value(name, found[view.names_of(name)[0]]) for name in chosen.values},
        {name: pick(own, view.names_of(name)[0], group.rank) for name in chosen.own},
    )


_NOBODY = -1
"""No rank."""


@dataclass
class _Chosen:
    """Names of what is read, as a state has them: of tensors, of values, and of values that are this rank's own."""

    view: View = field(default_factory=View)
    tensors: list[str] = field(default_factory=list)
    values: list[str] = field(default_factory=list)
    own: list[str] = field(default_factory=list)

    def select(
        self,
        contents: Contents,
        rank: int,
        keys: Sequence[str] | None,
        mapping: NameMapping | None,
        what: str,
        *,
        named: bool,
    ) -> None:
        """Those that match ``keys`` (globs over dotted names; None: all).

        Raises ``LayoutError``: nothing matches, or what matches does not fit the mapping, or not into one state.
        """
        left_out: dict[str, str] = {}
        nodes = contents.saved.nodes if len(contents.trees) == 1 else merge(contents.trees, left_out)
        view = self.view = mapped.view(mapping, nodes, contents.saved.tensors, None, named=named)
        _refuse(f"{what} does not fit the mapping", view.problems)
        for node in view.nodes.values():
            if keys is not None and not names.matches(names.split(node.name), keys):
                continue
            if node.kind in ("tensor", "array"):
                self.tensors.append(node.name)
            elif node.is_value:
                self.values.append(node.name)
            if node.kind == "per_rank":
                self.own.append(node.name)
        _refuse(f"{what} does not fit the mapping", view.doubts_of([*self.tensors, *self.values, *self.own]))
        _refuse(
            f"{what} cannot be read as one state: load() it into those of its ranks, or name with keys= what to read",
            [
                f"{dotted(name)}: {why}"
                for name, why in left_out.items()
                if keys is None or names.matches(names.split(name), keys)
            ],
        )
        if keys is not None and not (self.tensors or self.values or self.own):
            raise LayoutError(f"keys={list(keys)!r}: nothing in {what} matches")
        # Of the values that are a rank's own this one has those of its own tree.
        trees = contents.layout.trees
        mine = [n for n, tree in enumerate(trees) if any(first <= rank <= last for first, last in tree.ranks)]
        self.own = [name for name in self.own if mine and view.nodes[name].detail >> mine[0] & 1]


def _refuse(what: str, problems: Sequence[str]) -> None:
    if problems:
        raise LayoutError(f"{what}:" + "".join(f"\n  {problem}" for problem in problems))
