"""All ranks agree on what to restore: the chain that is followed, and the checkpoints to try."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tierckpt.errors import IncompleteError, IntegrityError, TierckptError
from tierckpt.format.chain import CheckpointRef
from tierckpt.group import Group
from tierckpt.restore.locate import candidates
from tierckpt.tiers.base import Place
from tierckpt.tiers.store import Store, no_store


@dataclass(frozen=True)
class Choice:
    """Told to all ranks.

    Attributes:
        run: of the store.
        head: digest of the newest link.
        refs: checkpoints to try, best first.
        skipped: why others were left out.
        generation, begin: the newest of the chain, and the digest of the link that began it.
        last: the highest step that this generation ever committed; −1: none.
        problem: why there is nothing to try, if so.
        source: a rank whose root has this chain, and so the documents of these checkpoints.
    """

    run: str
    head: str
    refs: Sequence[CheckpointRef]
    skipped: Sequence[str]
    generation: int
    begin: str = ""
    last: int = -1
    problem: str = ""
    source: int = 0

    @property
    def newest(self) -> tuple[int, int]:
        """The newest generation, and the highest step that it ever committed."""
        return self.generation, self.last

    def encode(self) -> bytes:
        refs = [[ref.generation, ref.step, ref.id] for ref in self.refs]
        told = [self.run, self.head, refs, list(self.skipped), self.generation, self.begin, self.last, self.problem]
        return json.dumps(told).encode()

    @classmethod
    def decode(cls, data: bytes, source: int) -> Choice:
        run, head, refs, skipped, generation, begin, last, problem = json.loads(data)
        chosen = [CheckpointRef(*ref) for ref in refs]
        return cls(run, head, chosen, skipped, generation, begin, last, problem, source)


def choose(
    group: Group,
    place: Place,
    *,
    step: int | None,
    believe: Callable[[Store], None],
    run: str | None,
    max_restarts: int | None = None,
    may_be_empty: bool = False,
) -> Choice | None:
    """What to restore; None when there is no store and that ``may_be_empty``. Collective.

    There may be nothing to try: something may still be in memory. ``may_be_empty``, an empty ``problem`` says that nothing
    was ever committed, and that this is no fault.

    With node-local roots each node has a chain; the longest of the highest generation is followed.

    Raises:
        IncompleteError: there is no store.
        UntrustedError, IntegrityError: the chain is broken, or not to be believed.
    """
    what = f"the choice of a checkpoint in {place.url}"
    opened: list[Store] = []
    head = _follow(group, place, what, opened)

    def part() -> bytes:
        if group.rank != head.rank:
            return b""
        if len(group.leaders) == 1:
            _open(place, opened)  # here, so that what goes wrong is told to all
        if not opened:
            if may_be_empty:
                believe(_nothing(place, run))  # there must be a chain if one was seen here, or is expected
                return b"null"
            raise no_store(place)
        store = opened[0]
        store.must_hold(run)
        believe(store)
        chain = store.chain
        refs: list[CheckpointRef] = []
        left_out: list[str] = []
        problem = ""
        try:
            if chain.committed or not may_be_empty:
                refs, left_out = candidates(store, step=step, max_restarts=max_restarts)
        except IncompleteError as error:
            problem = str(error)
        assert chain.head is not None
        last = max((step for generation, step in chain.committed if generation == chain.generation), default=-1)
        diverged = [
            f"rank {rank}: its root has another history, which ends with {digest}; it is not followed"
            for rank, digest in head.others
            if digest not in {link.digest for link in store.chain.links}
        ]
        skipped = [*left_out, *diverged]
        begin = chain.begins[chain.generation].digest
        return Choice(store.run, chain.head.digest, refs, skipped, chain.generation, begin, last, problem).encode()

    told = group.vote(what, part)[head.rank]
    return None if told == b"null" else Choice.decode(told, head.rank)


@dataclass(frozen=True)
class Followed:
    """The rank whose chain is followed, and the heads of the other nodes' chains."""

    rank: int
    others: Sequence[tuple[int, str]] = ()


def _follow(group: Group, place: Place, what: str, opened: list[Store]) -> Followed:
    """Which rank's chain to follow. One rank of each node looks; its store is left in ``opened``."""
    if len(group.leaders) == 1:
        return Followed(0)

    def part() -> bytes:
        if group.rank not in group.leaders:
            return b""
        try:
            _open(place, opened)
        except (IntegrityError, TierckptError) as error:
            return json.dumps(str(error)).encode()
        if not opened:
            return b"null"
        chain = opened[0].chain
        assert chain.head is not None
        return json.dumps([chain.generation, chain.head.number, chain.head.digest]).encode()

    heads: list[tuple[int, int, int, str]] = []
    broken: list[str] = []
    for rank, told in enumerate(group.vote(what, part)):
        said = json.loads(told) if told else None
        if isinstance(said, str):
            broken.append(f"rank {rank}: {said}")
        elif said is not None:
            generation, number, digest = said
            heads.append((generation, number, -rank, digest))
    if not heads:
        if broken:
            raise IntegrityError("; ".join(broken))
        return Followed(0)
    _, _, rank, digest = max(heads)
    return Followed(-rank, [(-other, its) for _, _, other, its in heads if its != digest])


def _open(place: Place, opened: list[Store]) -> None:
    try:
        opened.append(Store.open(place))
    except IncompleteError:
        opened.clear()


def _nothing(place: Place, run: str | None) -> Store:
    """The store at ``place`` if it has at least a ``tierckpt.json``, else one as empty as the place is."""
    return Store.find(place) or Store.bare(place, run or "none")
