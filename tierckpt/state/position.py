"""Where in the data a training run is, independent of how many ranks read it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from operator import index
from typing import Any, TypeAlias, TypeVar

import numpy
from numpy.typing import NDArray

from tierckpt.errors import StateError
from tierckpt.telling import a

_Item = TypeVar("_Item")
_Indices: TypeAlias = "NDArray[numpy.uint64]"

_KEYS = ("consumed", "epoch", "order", "seed", "shuffle", "size", "step")
#: Names the permutation in the state: one that is computed otherwise has another name, and is refused.
_ORDER = "tierckpt 1"
_ROUNDS = 8
#: Up to this size an order is sorted out and kept: a network has too few permutations of small domains.
_SMALL = 1 << 14
_LONGEST = 1 << 62


class DataPosition:
    """The position of a run in its data: epoch, step, samples consumed, seed. Not how it is spread over ranks.

    All data-parallel ranks hold the same position. In every epoch the samples have one global order; each *global
    batch* is the next ``global_batch`` samples of it, and each rank gets its part of that batch. So a change of the
    number of ranks (or of the batch size) in the middle of an epoch neither repeats nor skips a sample. It stands in
    the state like a scheduler does, without ``PerRank``::

        position = DataPosition(len(dataset), seed=7)
        batches = position.batches(global_batch=512, rank=dp_rank, world=dp_world)
        loader = DataLoader(dataset, batch_sampler=batches, num_workers=4)
        state = {"model": model, "data": position}
        checkpointer.restore(state)
        while position.epoch < epochs:
            for batch in batches.consume(loader):    # to the end of the epoch
                train(batch)
                checkpointer.save(position.step, state)

    ``consume`` moves the position when it hands a batch out, in the process that trains; what workers have fetched
    ahead is not counted. A save in the body of the loop therefore counts the batch of the body, and no other.

    The order is a keyed permutation that is computed index by index (a Feistel network, walked until it is inside the
    data set; data sets of up to 16,384 samples are sorted by a keyed hash): it takes no memory, whatever the size of
    the data set, begins at any sample at once, and stays the same in every version of torch and numpy, which
    ``torch.randperm`` does not promise.

    An epoch in which fewer samples are left than a batch takes may come from a run with smaller batches. With
    ``drop_last`` they are dropped: ``consume`` then gives nothing and goes to the next epoch, so that the loop above does
    what it does at the end of an epoch once for each.

    Args:
        size: samples of the data set.
        seed: any integer; another seed is another order. A load replaces it by the saved one.
        shuffle: whether each epoch has an order of its own; else it is that of the data set.
        drop_last: leave out the last samples of an epoch when they are fewer than a global batch. Else the last batch
            is smaller, and with fewer samples than ranks some ranks get an empty one.

    Attributes:
        epoch: complete passes over the data.
        step: global batches consumed, over all epochs.
        consumed: samples of this epoch that were consumed, by all ranks together.

    Raises:
        StateError: ``size`` is below 1, or it or ``seed`` is no integer.
    """

    def __init__(self, size: int, *, seed: int = 0, shuffle: bool = True, drop_last: bool = False) -> None:
        size, seed = _integer(size, "DataPosition(size=)"), _integer(seed, "DataPosition(seed=)")
        if not 1 <= size <= _LONGEST:
            raise StateError(f"DataPosition(size={size!r}): a data set has at least one sample, at most 2**62")
        self.size, self.seed, self.shuffle, self.drop_last = size, seed, bool(shuffle), bool(drop_last)
        self.epoch = self.step = self.consumed = 0

    def __repr__(self) -> str:
        where = f"epoch={self.epoch}, step={self.step}, consumed={self.consumed}"
        return f"DataPosition({self.size}, seed={self.seed}, {where})"

    def batches(self, *, global_batch: int, rank: int, world: int) -> Batches:
        """The batches of one of ``world`` data-parallel ranks.

        Args:
            global_batch: samples that all ranks together take in a step. It need not be a multiple of ``world``.
            rank: among the ranks that read different data; ranks of one tensor-parallel group share theirs.

        Raises:
            StateError: these numbers are impossible.
        """
        global_batch = _integer(global_batch, "batches(global_batch=)")
        rank, world = _integer(rank, "batches(rank=)"), _integer(world, "batches(world=)")
        if global_batch < 1 or not 0 <= rank < world:
            raise StateError(
                f"batches(global_batch={global_batch!r}, rank={rank!r}, world={world!r}): needs at least one sample and "
                "a rank below world"
            )
        if self.drop_last and global_batch > self.size:
            raise StateError(f"batches(global_batch={global_batch}): with drop_last {self.size} samples are no batch")
        return Batches(self, global_batch, rank, world)

    def advance(self, global_batch: int) -> None:
        """Count the next global batch of this size as consumed. After the last one of an epoch the next epoch begins.

        Raises:
            StateError: there is no batch of this size.
        """
        global_batch = _integer(global_batch, "advance(global_batch)")
        if global_batch < 1 or (self.drop_last and global_batch > self.size):
            raise StateError(f"advance({global_batch}): {self.size} samples have no such batch")
        self.epoch, self.consumed = self._next(global_batch, *self._start(global_batch, self.epoch, self.consumed))
        self.step += 1

    def indices(self, epoch: int, first: int, last: int) -> list[int]:
        """The samples [first, last) of an epoch, in its order, as indices into the data set.

        Raises:
            StateError: this is no range of the epoch.
        """
        epoch = _integer(epoch, "indices(epoch)")
        first, last = _integer(first, "indices(first)"), _integer(last, "indices(last)")
        if not 0 <= first <= last <= self.size:
            raise StateError(f"[{first}, {last}) is no range of the {self.size} samples of an epoch")
        if not self.shuffle:
            return list(range(first, last))
        permuted: list[int] = _permuted(first, last, self.size, f"{self.seed} {epoch}").tolist()
        return permuted

    def state_dict(self) -> dict[str, Any]:
        """Plain values, the same on all ranks."""
        return {
            "epoch": self.epoch,
            "step": self.step,
            "consumed": self.consumed,
            "seed": self.seed,
            "size": self.size,
            "shuffle": self.shuffle,
            "order": _ORDER,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go where the state was saved.

        Raises:
            StateError: :meth:`misfit` says why; nothing has changed.
        """
        wrong = self.misfit(state)
        if wrong is not None:
            raise StateError(f"DataPosition: {wrong}")
        self.epoch, self.step, self.consumed = index(state["epoch"]), index(state["step"]), index(state["consumed"])
        self.seed = index(state["seed"])

    def misfit(self, state: object) -> str | None:
        """Why this is no state for `load_state_dict`, None if it is one: another data set or another order, in which the
        position means nothing, or not what `state_dict` returns. A load asks before it touches anything.
        """
        if not isinstance(state, Mapping):
            return f"expected a dict, found {a(state)}"
        if set(state) != set(_KEYS):
            return f"expected the keys {', '.join(_KEYS)}, found {', '.join(map(str, state))}"
        for key in ("size", "epoch", "step", "consumed", "seed"):
            if not _is_integer(state[key]) or (key != "seed" and state[key] < 0):
                return f"{key} cannot be {state[key]!r}"
        for key, ours in (("size", self.size), ("shuffle", self.shuffle), ("order", _ORDER)):
            if state[key] != ours:
                return (
                    f"saved with {key} {state[key]!r}, here it is {ours!r}; samples would be repeated and skipped. Begin "
                    "with a new DataPosition if that is meant"
                )
        if state["consumed"] > self.size:
            return f"{state['consumed']} of {self.size} samples cannot have been consumed"
        return None

    def _start(self, global_batch: int, epoch: int, consumed: int) -> tuple[int, int]:
        """Where the next batch of this size begins: in the next epoch, if what is left is dropped."""
        left = self.size - consumed
        return (epoch + 1, 0) if left == 0 or (self.drop_last and left < global_batch) else (epoch, consumed)

    def _next(self, global_batch: int, epoch: int, consumed: int) -> tuple[int, int]:
        """Where the batch after the one that begins here begins."""
        return self._start(global_batch, epoch, min(consumed + global_batch, self.size))


class Batches:
    """One rank's batches from the position on to the end of its epoch. See :meth:`DataPosition.batches`.

    Iterating yields lists of indices and does not move the position, however far ahead a loader fetches: it is a
    ``batch_sampler`` for a ``DataLoader`` (for data sets that take a list of indices a ``sampler`` with
    ``batch_size=None``). Each iteration begins where the position is then. Only where no batch is left of the epoch, as
    when batches have grown, an iteration is empty and takes the position to the next epoch.
    """

    def __init__(self, position: DataPosition, global_batch: int, rank: int, world: int) -> None:
        self._position, self._global_batch, self._rank, self._world = position, global_batch, rank, world

    def __len__(self) -> int:
        """Batches that are left in the epoch."""
        position, size = self._position, self._global_batch
        left = position.size - position.consumed
        return left // size if position.drop_last else -(-left // size)

    def __iter__(self) -> Ahead:
        ended = self._goes_on()
        return Ahead(self, self._position.epoch, self._position.consumed, ended)

    def _goes_on(self) -> bool:
        """Whether no such batch is left of the epoch. Then the position goes to the next one."""
        position = self._position
        here = position.epoch, position.consumed
        position.epoch, position.consumed = position._start(self._global_batch, *here)
        return (position.epoch, position.consumed) != here

    def consume(self, loader: Iterable[_Item] | None = None) -> Iterator[Any]:
        """What ``loader`` makes of these batches (None: the indices themselves), to the end of the epoch.

        The position counts a batch as consumed from the moment in which it is handed out.

        Raises:
            StateError: the loader gives another number of batches than there are, or somebody else moved the position.
        """
        # What is left of an epoch and dropped ends that epoch, not one more.
        if self._goes_on():
            return
        position = self._position
        expected = len(self)
        here = position.epoch, position.consumed
        given = 0
        for item in self if loader is None else loader:
            given += 1
            if given > expected:
                raise StateError(
                    f"the loader gives more than the {expected} batches left: give it these as batch_sampler="
                )
            if here != (position.epoch, position.consumed):
                raise StateError("the data position was moved while its batches were consumed: begin a new iteration")
            position.advance(self._global_batch)
            here = position.epoch, position.consumed
            yield item
        if given < expected:
            raise StateError(f"the loader gave {given} batches, {expected} were left: give it these as batch_sampler=")

    def _part(self, epoch: int, consumed: int) -> list[int]:
        """This rank's samples of the global batch that begins there."""
        n = min(self._global_batch, self._position.size - consumed)
        lo, hi = self._rank * n // self._world, (self._rank + 1) * n // self._world
        return self._position.indices(epoch, consumed + lo, consumed + hi)


class Ahead:
    """An iteration over :class:`Batches`. Loaders that save their sampler (torchdata's) save and restore where it is."""

    def __init__(self, batches: Batches, epoch: int, consumed: int, ended: bool) -> None:
        self._batches, self._epoch, self._consumed = batches, epoch, consumed
        self._ended = ended

    def __iter__(self) -> Ahead:
        return self

    def __next__(self) -> list[int]:
        if self._ended:
            raise StopIteration
        batches = self._batches
        found = batches._part(self._epoch, self._consumed)
        epoch, self._consumed = batches._position._next(batches._global_batch, self._epoch, self._consumed)
        self._ended = epoch != self._epoch
        return found

    def state_dict(self) -> dict[str, Any]:
        return {"epoch": self._epoch, "consumed": self._consumed, "ended": self._ended}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._epoch, self._consumed, self._ended = state["epoch"], state["consumed"], state["ended"]


def _is_integer(value: object) -> bool:
    """Whether this is an integer, also one of numpy or torch, and no boolean."""
    try:
        index(value)  # type: ignore[arg-type]
    except TypeError:
        return False
    return not isinstance(value, bool)


def _integer(value: object, what: str) -> int:
    """``value`` as an ``int``: those of numpy count otherwise, and overflow."""
    if not _is_integer(value):
        raise StateError(f"{what} must be an integer, not {value!r}")
    return index(value)  # type: ignore[arg-type]


def _permuted(first: int, last: int, size: int, key: str) -> _Indices:
    """Where a permutation of ``range(size)`` takes the integers [first, last)."""
    if size <= _SMALL:
        return _sorted(size, key)[first:last]
    bits = (size - 1).bit_length()
    widths = numpy.uint64(bits - bits // 2), numpy.uint64(bits // 2)
    keys = _keys(key)
    found = numpy.arange(first, last, dtype=numpy.uint64)
    outside = numpy.ones(len(found), dtype=bool)
    # The domain is a power of two. Who lands outside goes on from there; that is a permutation of those inside.
    while outside.any():
        found[outside] = _network(found[outside], keys, widths)
        outside = found >= size
    return found


@lru_cache(maxsize=4)
def _sorted(size: int, key: str) -> _Indices:
    """A permutation of ``range(size)``: the integers sorted by a keyed hash, of which no two are equal."""
    hashed = numpy.arange(size, dtype=numpy.uint64)
    for number in _keys(key):
        hashed = _mixed(hashed ^ number)
    return numpy.argsort(hashed, kind="stable").astype(numpy.uint64)


def _keys(key: str) -> list[numpy.uint64]:
    """One number for each round."""
    texts = (f"tierckpt order {key} {i}".encode() for i in range(_ROUNDS))
    return [numpy.uint64(int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big")) for text in texts]


def _network(x: _Indices, keys: list[numpy.uint64], widths: tuple[numpy.uint64, numpy.uint64]) -> _Indices:
    """An unbalanced Feistel network: a permutation of the integers of ``sum(widths)`` bits."""
    one = numpy.uint64(1)
    masks = (one << widths[0]) - one, (one << widths[1]) - one
    left, right = x >> widths[1], x & masks[1]
    for i, key in enumerate(keys):
        # The halves change places in each round, and their widths with them.
        left, right = right, (left ^ _mixed(right ^ key)) & masks[i % 2]
    joined: _Indices = left << widths[1] | right
    return joined


def _mixed(x: _Indices) -> _Indices:
    """The finaliser of splitmix64."""
    x = (x ^ (x >> numpy.uint64(30))) * numpy.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> numpy.uint64(27))) * numpy.uint64(0x94D049BB133111EB)
    mixed: _Indices = x ^ (x >> numpy.uint64(31))
    return mixed
