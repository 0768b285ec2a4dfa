"""The ranks of one job, and the one collective step they share: a vote.

Coordination moves a few bytes on the CPU and never through an accelerator's process group. Every step in which ranks
meet is a :meth:`Group.vote`: each rank does its part, and either all get all results or all raise, so that no rank
waits in a step which another has left.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

from tierckpt import config
from tierckpt.config import ANSWER_SECONDS
from tierckpt.errors import LostContactError, OutOfStepError, StateError, TierckptError, kind_of, named_kind
from tierckpt.telling import by_rank, named, warn

#: Bytes in front of what a rank says in a vote: what tells the place from others, and the tag.
_LABEL, _TAG = 8, 8
#: Up to so many ranks that have something to say are heard one after the other.
_FEW = 4


class Group:
    """Ranks that save and load together. Without ``torch.distributed``: one rank.

    Args:
        process_group: the user's group; None is the default group when one is initialised.
        timeout: seconds after which a vote that is not complete fails on the ranks that wait.
    """

    def __init__(self, process_group: Any = None, *, timeout: float) -> None:
        self.timeout = timeout
        self._pg: Any = None
        self._store: Any = None
        self.rank, self.size = 0, 1
        self.global_ranks: list[int] = [0]
        #: For each rank the lowest rank of its node, and these in ascending order.
        self.node_of: list[int] = [0]
        self.leaders: list[int] = [0]
        dist = _distributed()
        if dist is None or (process_group is None and not dist.is_initialized()):
            if os.environ.get("WORLD_SIZE", "1") not in ("", "1"):
                warn(
                    f"this process is one of {os.environ['WORLD_SIZE']} (WORLD_SIZE), but torch.distributed is not "
                    "initialised: it saves and loads by itself. Call torch.distributed.init_process_group() first",
                )
            return
        if not isinstance(process_group, (dist.ProcessGroup, type(None))):
            raise StateError(
                f"group={process_group!r}: it takes a process group of torch.distributed (of a mesh: mesh.get_group(name))"
            )
        if process_group is not None and dist.get_rank(process_group) < 0:
            raise TierckptError("group=: this process is not a member of the group it passed")
        self.rank, self.size = dist.get_rank(process_group), dist.get_world_size(process_group)
        self.global_ranks = dist.get_process_group_ranks(process_group or dist.group.WORLD)
        self._meet()
        nodes = self.exchange(config.node().encode())
        first = {node: rank for rank, node in reversed(list(enumerate(nodes)))}
        self.node_of = [first[node] for node in nodes]
        self.leaders = sorted(set(self.node_of))

    def _meet(self) -> None:
        """Open channels of our own over these ranks: with our time-out, and for one thread of ours. Collective.

        Not a group of ``torch.distributed``: those sort their ranks, and the names of groups that only some ranks make
        depend on what other groups each of them is in.
        """
        if self.size == 1:
            return
        import torch.distributed as dist
        from torch.distributed.distributed_c10d import _get_default_store

        shared = _get_default_store()
        members = hashlib.sha256(",".join(map(str, self.global_ranks)).encode()).hexdigest()[:16]
        # The store counts how often each rank has met these others, so that all mean the same meeting.
        number = shared.add(f"tierckpt/{members}/{self.rank}", 1)
        self._store = dist.PrefixStore(f"tierckpt/{members}/{number}", shared)  # type: ignore[attr-defined]
        try:
            self._pg = dist.ProcessGroupGloo(self._store, self.rank, self.size, timedelta(seconds=self.timeout))
        except RuntimeError as error:
            raise LostContactError(
                f"rank {self.rank}: the ranks of the group could not be reached, or did not all come within "
                f"{self.timeout:g} s (TIERCKPT_TIMEOUT): {error}"
            ) from error

    def clone(self) -> Group:
        """The same ranks on channels of their own, for use in a thread. Collective."""
        other = Group.__new__(Group)
        other.__dict__.update(self.__dict__)
        other._meet()
        return other

    def close(self) -> None:
        """Give the channels back. Not collective; the group is unusable afterwards."""
        self._pg = None

    def exchange(self, payload: bytes) -> list[bytes]:
        """What every rank passed, in rank order. Collective.

        Raises:
            LostContactError: a rank is gone, or did not come within the time-out.
        """
        if self.size == 1:
            return [payload]
        import torch

        with self._contact():
            counts = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
            self._open.allgather([counts], [torch.tensor([len(payload)])]).wait()
            sizes = [int(count) for count in counts]
            speakers = [rank for rank, size in enumerate(sizes) if size]
            if len(speakers) <= _FEW:
                # A large word of one rank must not take room for as much from every rank.
                told = {rank: self._spread(payload, rank, sizes[rank]) for rank in speakers}
                return [told.get(rank, b"") for rank in range(self.size)]
            width = max(sizes)
            mine = torch.zeros(width, dtype=torch.uint8)
            if payload:
                mine[: len(payload)] = torch.frombuffer(bytearray(payload), dtype=torch.uint8)
            gathered = [torch.empty(width, dtype=torch.uint8) for _ in range(self.size)]
            self._open.allgather([gathered], [mine]).wait()
        return [ctypes.string_at(t.data_ptr(), size) for t, size in zip(gathered, sizes, strict=True)]

    def _spread(self, payload: bytes, source: int, size: int) -> bytes:
        import torch

        data = torch.empty(size, dtype=torch.uint8)
        if source == self.rank:
            ctypes.memmove(data.data_ptr(), payload, size)
        self._open.broadcast(data, source).wait()
        return payload if source == self.rank else ctypes.string_at(data.data_ptr(), size)

    def send(self, data: memoryview, to: int) -> None:
        """Give bytes to rank ``to``, which must be in :meth:`receive`. Not collective."""
        import torch

        with self._contact():
            self._open.send([torch.frombuffer(data, dtype=torch.uint8)], to, 0).wait()

    def receive(self, into: memoryview, source: int) -> None:
        """Take ``into.nbytes`` bytes from rank ``source``, which must be in :meth:`send`. Not collective."""
        import torch

        with self._contact():
            self._open.recv([torch.frombuffer(into, dtype=torch.uint8)], source, 0).wait()

    @property
    def _open(self) -> Any:
        """The channels. Not to be kept: they are closed once nobody has them, and another thread may give them up at any time."""
        channels = self._pg
        if channels is None:
            raise LostContactError(
                f"rank {self.rank}: contact with the other ranks of the group was lost or given up before"
            )
        return channels

    @contextmanager
    def _contact(self) -> Iterator[None]:
        """What goes wrong between the ranks becomes an error of ours, on all of them."""
        try:
            yield
        except RuntimeError as error:
            self.close()  # so that those who wait for us notice at once
            raise LostContactError(
                f"rank {self.rank}: {self._who_is_gone()}; a rank has died, or did not come within {self.timeout:g} s "
                f"(TIERCKPT_TIMEOUT): {error}"
            ) from error
        except BaseException:
            # An interrupt: the answers that are under way would be taken for those to another question.
            self.close()
            raise

    def _who_is_gone(self) -> str:
        """Every rank that lost contact says in the rendezvous store that it is there; the others are gone."""
        try:
            self._store.set(f"there/{self.rank}", b"")
            self._store.add("answers", 1)
            deadline = time.monotonic() + ANSWER_SECONDS
            while time.monotonic() < deadline and self._store.add("answers", 0) < self.size:
                time.sleep(0.05)  # a wait of the store's would keep its connection from all other threads
            gone = self._absent(range(self.size))
        except RuntimeError:
            return "lost contact with another rank and with the rendezvous store, which could tell with which"
        if not gone:
            return "lost contact with another rank, although all of them are there"
        return f"lost contact with {named(gone)}"

    def _absent(self, ranks: range) -> list[int]:
        """Those that have not said that they are there, found by halving: few are missing as a rule."""
        if self._store.check([f"there/{rank}" for rank in ranks]):
            return []
        if len(ranks) == 1:
            return [ranks[0]]
        half = len(ranks) // 2
        return self._absent(ranks[:half]) + self._absent(ranks[half:])

    def agree(self, what: str, *, root: str, **arguments: Any) -> None:
        """Make sure that all ranks were given the same: what one rank does, the others wait for. Collective.

        Args:
            root: the folder of a store. Nodes may have it in different places, the ranks of one node may not.
            arguments: JSON values.

        Raises:
            StateError: names the arguments that differ, with what each rank was given.
        """
        told = self.vote(what, lambda: json.dumps([root, arguments], default=str).encode())
        roots, given = zip(*map(json.loads, told), strict=True)
        self._must_share([str(each) for each in roots])
        for name in arguments:
            said = [each[name] for each in given]
            if any(value != said[0] for value in said):
                rank = next(rank for rank, value in enumerate(said) if value != said[0])
                raise StateError(
                    f"{what}: {name}= must be the same on all ranks: rank 0 was given {said[0]!r}, rank {rank} {said[rank]!r}"
                )

    def _must_share(self, roots: Sequence[str]) -> None:
        """Raise StateError where ranks of one node were given different folders."""
        for leader in self.leaders:
            here = {rank: root for rank, root in enumerate(roots) if self.node_of[rank] == leader}
            if len(set(here.values())) > 1:
                raise StateError(
                    f"the ranks of one node were given different roots ({by_rank(here)}): each would hold only a part of each "
                    "checkpoint. Give all ranks of a node the same folder; a relative path begins at each rank's own current "
                    "directory"
                )

    def vote(self, what: str, part: Callable[[], bytes], *, tag: int = 0) -> list[bytes]:
        """Run ``part`` on every rank; all get every result, or all raise. Collective.

        Args:
            what: names the step in messages.
            part: this rank's part; what it raises is raised here on all ranks.
            tag: must be the same on all ranks: that they mean the same step. Below 2^64.

        Raises:
            OutOfStepError: tags differ; it outranks what else has failed.
            TierckptError: the error of the lowest rank that failed, by its own type, naming all ranks that failed.
            LostContactError: a rank is gone; whether others got every result is not known.
        """
        mine: Exception | None = None
        place = _label(part) + tag.to_bytes(_TAG, "little")
        try:
            message = b"+" + place + part()
        except Exception as error:
            mine = error
            message = b"-" + place + _error_to_json(error)
        results = self.exchange(message)
        failed = [rank for rank, result in enumerate(results) if result[:1] == b"-"]
        other = [rank for rank, result in enumerate(results) if result[1 : 1 + _LABEL] != _label(part)]
        words = 1 + _LABEL + _TAG
        if other and not failed:
            raise StateError(
                f"{what}: {named(other)} {'is' if len(other) == 1 else 'are'} in another call: all ranks must make "
                "the same calls in the same order"
            )
        if not other:
            tags = [int.from_bytes(result[1 + _LABEL : words], "little") for result in results]
            if len(set(tags)) > 1:
                raise OutOfStepError(f"{what}: ranks are in different steps: {by_rank(tags)}", tags) from mine
        if not failed:
            return [result[words:] for result in results]
        if self.size == 1:
            assert mine is not None
            raise mine
        raise _combined(what, {rank: results[rank][words:] for rank in failed}, mine)


def _label(part: Callable[[], bytes]) -> bytes:
    """Bytes that tell one place where ranks vote from another, so that votes that cross do not read each other's words."""
    name = f"{part.__module__}.{part.__qualname__}"
    return hashlib.blake2b(name.encode(), digest_size=_LABEL).digest()


def _distributed() -> Any:
    try:
        import torch.distributed as dist
    except ImportError:
        return None
    return dist if dist.is_available() else None


def _error_to_json(error: Exception) -> bytes:
    text = str(error) or type(error).__name__
    if not isinstance(error, TierckptError):
        text = f"{type(error).__name__}: {text}"
    return json.dumps([kind_of(error), text]).encode()


def _combined(what: str, failures: dict[int, bytes], mine: Exception | None) -> TierckptError:
    told = {rank: json.loads(data) for rank, data in failures.items()}
    kinds = [kind for kind, _ in told.values()]
    # A fault of the data outranks what other ranks suffered because of it; else the lowest rank speaks.
    kind = named_kind(kinds[0])
    same = len({text for _, text in told.values()}) == 1 and len(told) > 1
    if same:
        lines = [f"{named(sorted(told))}: {next(iter(told.values()))[1]}"]
    else:
        lines = [f"rank {rank}: {text}" for rank, (_, text) in sorted(told.items())]
    error = kind(f"{what} failed: " + "; ".join(lines))
    error.__cause__ = mine
    return error
