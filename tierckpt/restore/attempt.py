"""One candidate: is it whole, does it fit, and then its bytes."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import compress, count, islice
from operator import add, is_, le, not_
from typing import Any

import torch

from tierckpt.errors import IntegrityError, LayoutError, StateError
from tierckpt.format import canonical, names
from tierckpt.format.boxes import Box, intersection, whole
from tierckpt.format.canonical import JSON
from tierckpt.format.chain import CheckpointRef
from tierckpt.format.layout import Layout
from tierckpt.format.manifest import Manifest
from tierckpt.group import Group
from tierckpt.restore.plan import Runs, Wanted, add_runs, plan
from tierckpt.restore.shards import Shards
from tierckpt.state.layout import PLAIN, Describer, Destination, are_dense, destination, local
from tierckpt.state.mapping import Mapping as NameMapping
from tierckpt.state.marks import LiveTensor
from tierckpt.state.naming import readable
from tierckpt.state.nodes import merge
from tierckpt.state.rows import host
from tierckpt.state.spelling import dotted
from tierckpt.state.tree import Saved, Target, unexpected_problems
from tierckpt.state.view import Part, View
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


#: How a line about what has no place in the state ends; and of so many names it is told beside other problems.
_NOT_IN_STATE, _UNEXPECTED = ": in the checkpoint, not in the state", 10
_SOME = 3  # names that tell what the others are like


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
        mapping: NameMapping | None,
        named: bool = False,
    ) -> None:
        """``named``: the caller has named the checkpoint."""
        self._group, self._store, self._ref, self._state = group, store, ref, state
        self._mapping, self._named = mapping, named
        self._keys, self._strict, self._cast, self._staged = keys, strict, cast, staged
        self._what = f"step {ref.step} of {store.url}"
        self.manifest, self.layout = documents(group, store, ref, source)
        self._shards = Shards(group, store, self.manifest, self.layout)
        self._describer = Describer(group.global_ranks)
        self._early: list[Wanted] = []  # may be refused once its elements are known: read before anything is touched
        self._wanted: list[Wanted] = []
        self._runs = Runs()
        self._run_names: list[str] = []
        self._places: list[tuple[str, Destination]] = []
        self._values: dict[str, JSON] = {}
        self._per_rank: dict[str, JSON] = {}

    @property
    def bytes_read(self) -> int:
        """Bytes that this rank has read, each counted once."""
        return self._shards.bytes

    def sources(self, tier: str) -> dict[str, int]:
        """From which tier they came, when the store is of ``tier``."""
        elsewhere = self._shards.elsewhere
        return {tier: self.bytes_read - elsewhere, **({"disk": elsewhere} if elsewhere else {})}

    @torch.inference_mode(False)  # what is allocated for an optimizer must be of use outside of it
    def fit(self) -> None:
        """Read the values, and find a place for everything; nothing live is touched.

        What only the elements of a tensor can tell (a cast that would lose, one memory that was saved with different
        values) is read here, too: from here on only the bytes of the store can be at fault.

        Raises:
            LayoutError: lists everything that does not fit.
        """
        what = f"fitting {self._what}"
        blobs: dict[int, list[str]] = {}

        @memory_for(self._what)
        def match() -> bytes:
            contents = self._contents = Contents(self.layout, self._group.rank)
            self._target = Target(
                self._state,
                contents.saved,
                keys=self._keys,
                strict=self._strict,
                cast=self._cast,
                mapping=self._mapping,
                named=self._named,
            )
            self._refuse(self._target.problems, self._target.unexpected if self._strict else ())
            names_of = self._names_of = self._target.view.names_of
            blobs.update(contents.blobs_for([origin for name in self._target.values for origin in names_of(name)]))
            if self._target.per_rank and self._same_world:
                blobs.setdefault(self._group.rank, [])
            wanted = len(self._target.tensors) + len(self._target.values) + len(self._target.per_rank)
            given = [self._keys is not None, self._mapping is not None]
            met, unmet = bool(self._target.tensors), self._target.unmet[: _SOME + 1]
            return json.dumps([wanted, self._unused(), met, unmet, *given]).encode()

        told = [json.loads(said) for said in self._group.vote(what, match)]
        # Keys and mappings are a rank's own, as stages of a pipeline need them; that there are any concerns all.
        self._mapped = any(mapped for *_, mapped in told)
        if any(keyed for *_, keyed, _ in told) and not any(wanted for wanted, *_ in told):
            raise LayoutError(f"keys={self._keys!r}: nothing in {self._what} that the state has matches")
        met = any(met for _, _, met, *_ in told)
        self._unmet: list[str] = [] if met else next((unmet for _, _, _, unmet, *_ in told if unmet), [])
        unused = [unused for _, unused, *_ in told]
        unexpected = {
            name
            for name in self._target.unexpected
            if any(
                all(origin in parts and (parts[origin] is None or name in parts[origin]) for parts in unused)
                for origin in self._names_of(name)
            )
        }
        if self._strict:
            self._refuse(unexpected_problems(unexpected, self._target.view))
        self.ignored = sorted(unexpected)
        found = self._shards.values(blobs)

        @memory_for(self._what)
        def check() -> bytes:
            told = {name: pick(found[rank], name, rank) for rank, wanted in blobs.items() for name in wanted}
            self._values = {name: told[self._names_of(name)[0]] for name in self._target.values}
            if self._target.per_rank and self._same_world:
                mine, own = self._group.rank, self._target.per_rank
                self._per_rank = {name: pick(found[mine], self._names_of(name)[0], mine) for name in own}
            self._refuse(self._target.check(self._values, self._per_rank))
            if self._mapping is not None:
                self._refuse(disagreeing(self._target.view, self._target.values, told))
            self._find_places()
            return b"early" if self._early else b""

        early = any(self._group.vote(what, check))
        if self._mapped:
            agree(self._group, what, self._shards, self._contents, self._target.view, self._target.tensors)
        if early:
            self._shards.fill(plan(self.layout, self._early))
            self._group.vote(what, self._check_early)

    def _unused(self) -> dict[str, list[str] | None]:
        """What of the checkpoint this rank's state has no place for: None for all of it, or names of what it is split into.

        Another rank may have a place for the rest.
        """
        target, names_of = self._target, self._names_of
        found: dict[str, list[str]] = {}
        for name in sorted(target.unexpected):
            for origin in names_of(name):
                found.setdefault(origin, []).append(name)
        used = {origin for name in (target.tensors if found and target.view.parts else ()) for origin in names_of(name)}
        return {origin: parts if origin in used else None for origin, parts in found.items()}

    @property
    def _same_world(self) -> bool:
        return self.layout.world == self._group.size

    def _refuse(self, problems: Sequence[str], unexpected: Collection[str] = ()) -> None:
        """``unexpected``: what only this rank is known to have no place for, told if there are ``problems``."""
        if problems:
            names = sorted(unexpected)
            also = unexpected_problems(set(names[:_UNEXPECTED]), self._target.view)
            if len(names) > _UNEXPECTED:
                also.append(f"and {len(names) - _UNEXPECTED:,} more of the checkpoint")
            listed = "".join(f"\n  {problem}" for problem in [*problems, *also])
            raise LayoutError(f"{self._what} does not fit the state:{listed}{self._hint(problems)}")

    def _hint(self, problems: Sequence[str]) -> str:
        """What to do about a misfit that everybody meets once."""
        target = self._target
        lies_below = target.lies_below
        if lies_below:
            places = " and below ".join(repr(readable(name)) for name in lies_below)
            return f"\nThe checkpoint has all of these below {places}: pass {_nested(lies_below[0])}"
        if target.lacking:
            return (
                "\nTo leave what the checkpoint lacks as it is, pass strict=False, or say what to load (keys=[…]); what it has "
                "under another name takes a mapping="
            )
        unexpected = [problem for problem in problems if problem.endswith(_NOT_IN_STATE)]
        if not unexpected:
            return ""
        optimizers = {problem.partition(".state.")[0] for problem in unexpected if ".state." in problem}
        if any(dotted(name).startswith(f"{one}.") for one in optimizers for name in (*target.tensors, *target.values)):
            return (
                "\nThe state_dict() of a fresh optimizer has no place for the optimizer's state: put the optimizer itself into "
                "the state, or use tierckpt.read() and optimizer.load_state_dict()"
            )
        return '\nTo load a part say which (keys=["model.*"]), or pass strict=False to leave out what has no place'

    def _find_places(self) -> None:
        layout, numbers = self.layout, self._contents.numbers
        known, runs, others = self._find_runs()
        rows = [self._row(name) for name in others]
        marks = touching(runs, rows)
        if True in marks:
            rows += [self._row(name) for name in compress(known, marks)]
            alone = [not mark for mark in marks]
            known, runs = list(compress(known, alone)), runs.chosen(alone)
        self._shared = apart(
            [(name, layout.alias(index) if parts is None else -1, p) for name, index, parts, p in rows]
        )
        shared = {name for cluster in self._shared for name, _ in cluster}
        self._refuse(sorted({line for row in rows for place in row[3] for line in _obstacle(row[0], place)}))
        for name, index, parts, places in rows:
            self._places += [(name, place) for place in places]
            wanted = [Wanted(index, places)] if parts is None else parted(parts, numbers, places)
            early = name in shared or any(map(_may_lose, places))
            (self._early if early else self._wanted).extend(wanted)
        self._runs, self._run_names = runs, known

    def _find_runs(self) -> tuple[list[str], Runs, list[str]]:
        """The tensors that are filled by copying one range of one shard, with their names; and the names of the others."""
        layout, parts_of, tensors = self.layout, self._target.view.parts, self._target.tensors
        names, values = list(tensors), list(tensors.values())
        marks: Sequence[bool] = [False] * len(values) if self._staged else are_dense(values)
        if parts_of:
            marks = [mark and name not in parts_of for mark, name in zip(marks, names, strict=True)]
        others: list[str] = []
        if not all(marks):
            others += compress(names, map(not_, marks))
            names, values = list(compress(names, marks)), list(compress(values, marks))
        dense: list[torch.Tensor] = values  # type: ignore[assignment]
        numbers = list(map(self._contents.numbers.__getitem__, names))
        kinds, homes = layout.kinds, layout.homes
        saved = map({name: torch_dtype(name) for name in layout.dtypes}.__getitem__, [kinds[i] for i in numbers])
        marks = list(map(is_, saved, [value.dtype for value in dense]))
        if min(homes, default=0) < 0:
            marks = [mark and homes[i] >= 0 for mark, i in zip(marks, numbers, strict=True)]
        runs = Runs(numbers, [value.data_ptr() for value in dense], [value.nbytes for value in dense])
        if all(marks):
            return names, runs, others
        others += compress(names, map(not_, marks))
        return list(compress(names, marks)), runs.chosen(marks), others

    def _row(self, name: str) -> tuple[str, int, list[Part] | None, list[Destination]]:
        """Name, number of the stored tensor (of its first part), parts, destinations."""
        parts = self._target.view.parts.get(name)
        index = self._contents.numbers[name if parts is None else parts[0].name]
        dtype = torch_dtype(self.layout.dtype(index))
        pieces = self._describer.describe(self._target.tensors[name], name=name).pieces
        return name, index, parts, [self._place(box, tensor, dtype, name) for box, tensor in pieces]

    @property
    def names(self) -> set[str]:
        """Names of the tensors of this rank that are filled."""
        return {*self._run_names, *[name for name, _ in self._places]}

    def untouched(self) -> list[str]:
        """Names of leaves that stayed as they were."""
        return self._target.untouched

    def unmet(self) -> str:
        """What to tell, by one rank, if the state has tensors and the checkpoint has, but none of the same name; else empty."""
        saved = self._contents.saved.tensors
        if not self._unmet or not saved or self._group.rank:
            return ""
        return (
            f"{self._what} has none of the state's tensors, and strict=False left them all as they are: the state has "
            f"{_some(self._unmet)}, the checkpoint {_some(list(islice(saved, _SOME + 1)))}. Pass the state nested as it was "
            "saved, or a mapping= of the names"
        )

    def _place(self, box: Box, tensor: torch.Tensor, dtype: torch.dtype, name: str) -> Destination:
        found = destination(box, tensor, name=name)
        if self._staged or tensor.dtype != dtype:
            return Destination(box, torch.empty(box.size, dtype=dtype), found.target or tensor.detach())
        return found

    def _check_early(self) -> bytes:
        """Refuse what would not arrive as it was saved. Everything is still in memory of its own."""
        lost = {
            f"{readable(name)}: saved as {place.memory.dtype}, it has values that {place.target.dtype} cannot hold"
            for name, place in self._places
            if place.target is not None and _may_lose(place) and _loses(place)
        }
        if lost:
            raise LayoutError(f"{self._what}: cast=True: " + "; ".join(sorted(lost)))
        torn = [line for cluster in self._shared for line in _torn(cluster)]
        if torn:
            raise LayoutError(
                f"{self._what} does not fit the state:{''.join(sorted(torn))}\n"
                "Untie them, or load with keys= those that are right"
            )
        return b""

    def fetch(self) -> None:
        """Read, verify and put everything where it belongs; values are kept for :meth:`finish`."""
        reads = plan(self.layout, self._wanted)
        add_runs(reads, self.layout, self._runs)
        if not self._staged:
            mark_changed(self._target.tensors.values())
        self._shards.fill(reads)

    def finish(self) -> None:
        """All ranks have everything: hand it over."""

        def part() -> bytes:
            if self._staged:
                mark_changed(self._target.tensors.values())
            for name, place in self._places:
                try:
                    place.finish()
                except Exception as error:
                    raise StateError(
                        f"{readable(name)}: what was read could not be copied to {_where(place)}: {type(error).__name__}: "
                        f"{error}; what was to be filled is now undefined"
                    ) from error
            self._target.commit(self._values, self._per_rank)
            return b""

        self._group.vote(f"restoring {self._what}", part)


def mark_changed(values: Iterable[LiveTensor]) -> None:
    """Tell autograd that these are written to: what a graph has kept of them is not what it was.

    Bytes come past torch, which would not know. One call for all of them, since there may be many.
    """
    values = list(values)
    found: list[torch.Tensor] = []
    if set(PLAIN).issuperset(map(type, values)):
        found, values = values, []  # type: ignore[assignment]
    for value in values:
        if type(value) in PLAIN:
            found.append(value)  # type: ignore[arg-type]
        else:
            found += local(value)
            if isinstance(value, torch.Tensor):  # a DTensor counts apart from what it holds
                found.append(value)
    if _counts_many():
        torch.autograd.graph.increment_version(found)
        return
    for tensor in found:
        if not tensor.is_inference():  # they have no version
            torch.autograd.graph.increment_version(tensor)


@cache
def _counts_many() -> bool:
    """Whether this torch takes several tensors at once there; older ones take one."""
    try:
        torch.autograd.graph.increment_version([])
    except (TypeError, RuntimeError):
        return False
    return True


def _nested(name: str) -> str:
    """A state of which one leaf is called ``name``, as it is written down."""
    return "".join(f"{{{component!r}: " for component in names.split(name)) + "…" + "}" * len(names.split(name))


def _where(place: Destination) -> str:
    assert place.target is not None
    return f"a tensor of {place.target.dtype} on {place.target.device}"


def touching(runs: Runs, rows: Sequence[tuple[Any, Any, Any, list[Destination]]]) -> list[bool]:
    """Which of ``runs`` share memory with another of them or with a destination of ``rows``."""
    spans = [_span(place) for *_, places in rows for place in places]
    begins, stops = runs.addresses, list(map(add, runs.addresses, runs.sizes))
    starts = sorted([*begins, *[start for start, _ in spans]])
    ends = sorted([*stops, *[end for _, end in spans]])
    found = [False] * len(runs)
    # Ranges are apart if and only if their ends and starts, each sorted, alternate.
    if all(map(le, ends, starts[1:])):
        return found
    every = sorted([*zip(begins, stops, count()), *[(*span, -1) for span in spans]])
    highest = every[0][1]
    for i, (start, end, number) in enumerate(every):
        before = i > 0 and start < highest
        highest = max(highest, end) if i else end
        after = i + 1 < len(every) and every[i + 1][0] < highest
        if number >= 0 and (before or after):
            found[number] = True
    return found


def _span(place: Destination) -> tuple[int, int]:
    """Addresses of the first byte of what is filled in the end, and after the last."""
    tensor = place.memory if place.target is None else place.target
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True)) + 1
    start = tensor.data_ptr()
    return start, start + reach * tensor.element_size()


def apart(rows: Sequence[tuple[str, int, list[Destination]]]) -> list[list[tuple[str, Destination]]]:
    """Give destinations that share memory memory of their own first; those that have to be compared, by what they share.

    ``rows``: name, number of the stored tensor (−1: several), destinations; these lists are changed. Several names of the
    same memory and the same stored tensor, as tied parameters are, become one.
    """
    spans = [(*_span(place), row, at) for row, (_, _, places) in enumerate(rows) for at, place in enumerate(places)]
    spans.sort()
    clusters: list[list[tuple[int, int]]] = []
    end = -1
    for start, stop, row, at in spans:
        if start < end:
            clusters[-1].append((row, at))
        else:
            clusters.append([(row, at)])
        end = max(end, stop)
    shared: list[list[tuple[str, Destination]]] = []
    dropped: set[tuple[int, int]] = set()
    for cluster in clusters:
        if len(cluster) == 1:
            continue
        seen: dict[object, tuple[int, int]] = {}
        for row, at in cluster:
            place, stored = rows[row][2][at], rows[row][1]
            tensor = place.memory if place.target is None else place.target
            key = (stored, place.box, tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if stored >= 0 and seen.setdefault(key, (row, at)) != (row, at):
                dropped.add((row, at))
        left = [member for member in cluster if member not in dropped]
        if len(left) == 1:
            continue
        shared.append([])
        for row, at in left:
            name, _, places = rows[row]
            place = places[at]
            if place.target is None:
                place = places[at] = Destination(
                    place.box, torch.empty(place.box.size, dtype=place.memory.dtype), place.memory
                )
            shared[-1].append((name, place))
    for row, at in sorted(dropped, reverse=True):
        del rows[row][2][at]
    return shared


def _torn(cluster: Sequence[tuple[str, Destination]]) -> list[str]:
    """A line for each that would not hold what was read for it once all of ``cluster`` were put where they belong.

    That is rehearsed in other memory, in which they overlap alike.
    """
    targets = [place.target for _, place in cluster]
    widest = max((target for target in targets if target is not None), key=torch.Tensor.element_size)
    spans = [_span(place) for _, place in cluster]
    low = min(start for start, _ in spans)
    # Views of wider elements need an address that is a multiple of them.
    low -= (low - widest.data_ptr()) % widest.element_size()
    scratch = torch.empty(max(end for _, end in spans) - low, dtype=torch.uint8)
    rehearsed: list[tuple[str, Destination]] = []
    for name, place in cluster:
        target = place.target
        assert target is not None
        at, rest = divmod(target.data_ptr() - low, target.element_size())
        if rest:
            raise LayoutError(
                f"{readable(name)}: it shares memory with others, at an address that is no multiple of the size of its "
                "elements; load it alone, with keys="
            )
        view = torch.empty(0, dtype=target.dtype)
        view.set_(scratch.untyped_storage(), at, target.shape, target.stride())
        view = view.conj() if target.is_conj() else view
        rehearsed.append((name, place._replace(target=torch._neg_view(view) if target.is_neg() else view)))
    for _, place in rehearsed:
        place.finish()
    torn = sorted({name for name, place in rehearsed if not _arrived(place)})
    others = sorted({name for name, _ in cluster})
    listed = ", ".join(map(readable, others[:10])) + (f" and {len(others) - 10} more" if len(others) > 10 else "")
    return [
        f"\n  {readable(name)}: these share memory in the state, but were saved with different values: {listed}"
        for name in torn
    ]


def _arrived(place: Destination) -> bool:
    """Whether the destination holds, bit for bit, what was read for it."""
    assert place.target is not None
    found = host(place.target).reshape(-1).view(torch.uint8)
    return torch.equal(found, place.memory.to(place.target.dtype).contiguous().reshape(-1).view(torch.uint8))


def _some(names: Sequence[str]) -> str:
    return ", ".join([*map(readable, names[:_SOME]), *(["…"] if len(names) > _SOME else [])])


def parted(parts: Sequence[Part], numbers: Mapping[str, int], places: Sequence[Destination]) -> list[Wanted]:
    """What is wanted of each tensor of the checkpoint, so that ``places`` of a tensor made of ``parts`` are filled."""
    found = []
    for part in parts:
        wanted = Wanted(numbers[part.name], [])
        for place in places:
            box = intersection(place.box, Box(part.offset, part.box.size))
            if box is None:
                continue
            memory = place.memory
            if box != place.box:
                cuts = zip(box.offset, box.size, place.box.offset, strict=True)
                memory = memory[tuple([slice(o - d, o - d + n) for o, n, d in cuts])]
            moved = zip(part.box.offset, box.offset, part.offset, strict=True)
            wanted.destinations.append(
                Destination(Box(tuple([p + o - d for p, o, d in moved]), box.size), memory, None)
            )
        found.append(wanted)
    return found


def disagreeing(view: View, values: Sequence[str], told: Mapping[str, JSON]) -> list[str]:
    """A line for each of ``values`` that several values of the checkpoint become, if those differ."""
    found = []
    for name in values:
        first, *others = view.names_of(name)
        if any(canonical.encode(told[other]) != canonical.encode(told[first]) for other in others):
            found.append(f"{dotted(name)}: these become one, but differ: {', '.join(map(dotted, (first, *others)))}")
    return found


def agree(group: Group, what: str, shards: Shards, contents: Contents, view: View, names: Iterable[str]) -> None:
    """Read the single elements of which several become one of the tensors ``names``, and compare them. Collective.

    Raises ``LayoutError`` that names those that differ.
    """
    numbers, kinds = contents.numbers, contents.saved.tensors
    wanted = {name: view.agreeing[name] for name in names if len(view.agreeing.get(name, ())) > 1}
    read = {
        origin: torch.empty(kinds[origin][1], dtype=torch_dtype(kinds[origin][0]))
        for origins in wanted.values()
        for origin in origins
    }
    elements = [
        Wanted(numbers[name], [Destination(whole(tuple(tensor.shape)), tensor, None)]) for name, tensor in read.items()
    ]
    shards.fill(plan(contents.layout, elements))

    def compare() -> bytes:
        problems = []
        for name, origins in wanted.items():
            found = {bytes(read[origin].reshape(-1).view(torch.uint8).numpy()) for origin in origins}
            if len(found) != 1:
                listed = ", ".join(f"{dotted(origin)} is {read[origin].item()}" for origin in origins)
                problems.append(f"{dotted(name)}: these become one, but differ: {listed}")
        if problems:
            raise LayoutError("the mapping does not fit:" + "".join(f"\n  {problem}" for problem in problems))
        return b""

    group.vote(what, compare)


def _obstacle(name: str, place: Destination) -> Iterator[str]:
    """Why a destination cannot be filled from memory of its own, if so."""
    if place.target is not None:
        saved, wanted = place.memory.dtype, place.target.dtype
        if saved.is_complex and not wanted.is_complex:
            yield f"{readable(name)}: saved as {saved}, it has imaginary parts that {wanted} cannot hold"
        elif not _can_copy(saved, wanted, place.target.device):
            yield f"{readable(name)}: saved as {saved}, which torch cannot convert to {wanted}"


@cache
def _can_copy(saved: torch.dtype, wanted: torch.dtype, device: torch.device) -> bool:
    """Whether torch copies elements of the one dtype on the CPU to the other: it does not say so before it is tried."""
    try:
        torch.empty(1, dtype=wanted, device=device).copy_(torch.empty(1, dtype=saved))
    except (RuntimeError, TypeError):
        return False
    return True


def _may_lose(place: Destination) -> bool:
    """Whether an integer may overflow or a fraction be cut on the way: then the elements have to be looked at."""
    if place.target is None:
        return False
    saved, wanted = place.memory.dtype, place.target.dtype
    if saved in (wanted, torch.bool) or wanted == torch.bool or wanted.is_floating_point or wanted.is_complex:
        return False
    if saved.is_floating_point:
        return True
    (low, high), (least, most) = _bounds(saved), _bounds(wanted)
    return low < least or high > most


def _bounds(dtype: torch.dtype) -> tuple[int, int]:
    """The least and the greatest integer of a dtype."""
    found = torch.iinfo(dtype)
    return found.min, 2**64 - 1 if dtype == torch.uint64 else found.max


def _loses(place: Destination) -> bool:
    """Whether an integer does overflow or a fraction is cut."""
    assert place.target is not None
    memory = place.memory
    least, most = _bounds(place.target.dtype)
    if not memory.numel():
        return False
    if memory.dtype.is_floating_point:
        # Not there and back: beyond the bounds a conversion does what the processor likes, and a dtype without a zero
        # takes the way back for the truth. Bounds are powers of two, which floats have.
        wide = memory if memory.dtype in (torch.float32, torch.float64) else memory.to(torch.float32)
        return not bool(((wide.trunc() == wide) & (wide >= float(least)) & (wide < float(most + 1))).all())
    # Converting there and back would wrap twice: compare the extremes as what they are.
    if memory.dtype == torch.uint64:
        as_signed = memory.view(torch.int64)
        low, high = 0, 2**64 - 1 if int(as_signed.min()) < 0 else int(as_signed.max())
    else:
        wide = memory.to(torch.int64)
        low, high = int(wide.min()), int(wide.max())
    return low < least or high > most


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
        self.layout = layout
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
        self.numbers = layout.numbers
        names = layout.names
        tensors = dict(zip(names, zip(layout.kinds, layout.shapes, strict=True), strict=True))
        aliases = enumerate(layout.aliases if layout.has_aliases else ())
        ties = {names[i]: names[owner] for i, owner in aliases if owner != i}
        self.saved = Saved(tensors, merged[0] if len(merged) == 1 else merge(self.trees), ties)

    def blobs_for(self, names: Sequence[str]) -> dict[int, list[str]]:
        """Which blobs to read for these values, and which of them from each."""
        found: dict[int, list[str]] = {}
        for name in names:
            found.setdefault(self._homes[name], []).append(name)
        return found
