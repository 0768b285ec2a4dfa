"""The shards of one checkpoint, wherever among the ranks they are.

On a shared file system every rank reads what it needs. On node-local disks a rank may need shards that only another
node has: then a rank there reads and verifies them, and hands the chunks over through the process group. Both
verify: whoever receives trusts the digests of the receipt alone.
"""

from __future__ import annotations

import json
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, TypeAlias

from tierckpt import _native
from tierckpt.errors import IncompleteError, IntegrityError, TierckptError
from tierckpt.format import paths
from tierckpt.format.canonical import JSON
from tierckpt.format.digest import CHUNK, chunk_digest, chunk_range, derive
from tierckpt.format.layout import Layout
from tierckpt.format.manifest import Manifest
from tierckpt.format.placement import Placement
from tierckpt.format.receipt import Receipt
from tierckpt.restore.fetch import Job, LocalShard, ShardView
from tierckpt.restore.plan import ShardRead
from tierckpt.tiers.chunks import check_header, read_chunk
from tierckpt.tiers.ram import RamPlace
from tierckpt.tiers.store import Store

if TYPE_CHECKING:
    from tierckpt.group import Group

#: Given a shard's rank and what is known of it: what to read of it.
MakeJob: TypeAlias = Callable[[int, ShardView], Job]


class Shards:
    """Access to shards for all ranks of ``group``; every method is collective."""

    def __init__(self, group: Group, store: Store, manifest: Manifest, layout: Layout) -> None:
        self._group, self._store, self._manifest, self._layout = group, store, manifest, layout
        self._what = f"reading step {manifest.step} of {store.url}"
        self._counted: dict[int, set[int]] = {}
        #: Bytes that came from the store, each once: a chunk that holds values and tensors is read for both.
        self.bytes = 0
        #: Those of them that were not in memory, though the store is.
        self.elsewhere = 0
        self._elsewhere = store.place.elsewhere if isinstance(store.place, RamPlace) else {}

    def _count(self, receipt: Receipt, indices: Iterable[int]) -> None:
        known = self._counted.setdefault(receipt.rank, set())
        new = set(indices) - known
        known |= new
        read = sum(hi - lo for lo, hi in (chunk_range(index, receipt.size) for index in new))
        self.bytes += read
        if receipt.name in self._elsewhere:
            self.elsewhere += read

    def values(self, ranks: Iterable[int]) -> dict[int, dict[str, JSON]]:
        """The encoded values of the shards that this rank asks for."""
        found: dict[int, dict[str, JSON]] = {}
        finish = {}

        def job(rank: int, view: ShardView) -> Job:
            work, finish[rank] = view.values()
            return work

        self._run(dict.fromkeys(ranks, job))
        for rank, give in finish.items():
            found[rank] = give()
        return found

    def fill(self, reads: Mapping[int, ShardRead]) -> None:
        """Fill memory from the shards that this rank asks for."""
        self._run({rank: lambda rank, view: view.fill(reads[rank]) for rank in reads})

    def _run(self, wanted: Mapping[int, MakeJob]) -> None:
        ours: dict[int, MakeJob] = {}

        def local() -> bytes:
            lacking = [rank for rank in sorted(wanted) if not self._here(rank)]
            ours.update((rank, make) for rank, make in wanted.items() if rank not in lacking)
            return json.dumps(lacking).encode()

        lacking = [json.loads(told) for told in self._group.vote(self._what, local)]
        self._group.vote(self._what, lambda: self._read_ours(ours))
        elsewhere = sorted({rank for ranks in lacking for rank in ranks})
        if elsewhere:
            self._read_elsewhere(elsewhere, {rank: wanted[rank] for rank in lacking[self._group.rank]})

    def _here(self, rank: int) -> bool:
        """Whether anything of the shard is in this rank's root: what is damaged is found when it is read."""
        generation, step = self._manifest.generation, self._manifest.step
        names = (paths.receipt(generation, step, rank), paths.shard(generation, step, rank))
        return any(self._store.place.size(name) is not None for name in names)

    def _open(self, rank: int) -> LocalShard:
        return LocalShard(self._store, self._manifest, self._layout, rank)

    def _read_ours(self, wanted: Mapping[int, MakeJob]) -> bytes:
        for rank in sorted(wanted):
            with self._open(rank) as local:
                job = wanted[rank](rank, local.view)
                local.run(job)
                self._count(local.view.receipt, job.indices)
        return b""

    def _read_elsewhere(self, shards: Sequence[int], wanted: Mapping[int, MakeJob]) -> None:
        """Hand over chunks of ``shards``, which some rank lacks, from ranks that have them to those that want them."""
        group = self._group
        having = group.vote(self._what, lambda: json.dumps([rank for rank in shards if self._here(rank)]).encode())
        owners: dict[int, int] = {}
        for owner, told in enumerate(having):
            for rank in json.loads(told):
                owners.setdefault(rank, owner)
        gone = [rank for rank in shards if rank not in owners]
        if gone:
            step = self._manifest.step
            raise IncompleteError(f"{self._store.url}: no rank has the shards of step {step} of ranks {gone[:20]}")
        with ExitStack() as stack:
            opened: dict[int, LocalShard] = {}

            def show() -> bytes:
                for rank in shards:
                    if owners[rank] == group.rank:
                        opened[rank] = stack.enter_context(self._open(rank))
                documents = {rank: (shard.view.receipt.encode(), shard.header) for rank, shard in opened.items()}
                told = {rank: [b64encode(data).decode() for data in both] for rank, both in documents.items()}
                return json.dumps(told).encode() if told else b""

            shown = group.vote(self._what, show)
            jobs: dict[int, tuple[Receipt, Job]] = {}

            def ask() -> bytes:
                for rank, make in wanted.items():
                    receipt, header = map(b64decode, json.loads(shown[owners[rank]])[str(rank)])
                    view = self._view(rank, receipt, header)
                    jobs[rank] = view.receipt, make(rank, view)
                asked = {rank: list(job.indices) for rank, (_, job) in jobs.items()}
                return json.dumps(asked).encode() if asked else b""

            asked = [json.loads(told) if told else {} for told in group.vote(self._what, ask)]
            failed = self._hand_over(shards, owners, opened, jobs, asked)

        def report() -> bytes:
            if failed:
                raise failed[0]
            return b""

        group.vote(self._what, report)

    def _view(self, rank: int, receipt_bytes: bytes, header_bytes: bytes) -> ShardView:
        """What another rank showed of a shard, checked as if it had been read from a store."""
        name = paths.shard(self._manifest.generation, self._manifest.step, rank)
        receipt = Receipt.decode(receipt_bytes, what=f"the receipt of {name}, from another rank")
        self._manifest.check(receipt)
        if receipt.name != name or derive("header", header_bytes).hex() != receipt.header_digest:
            raise IntegrityError(f"{name}: another rank sent a receipt or a header that is not its own")
        header = check_header(header_bytes, self._layout, receipt, url="another rank")
        return ShardView(receipt, Placement.of(self._layout, header))

    def _hand_over(
        self,
        shards: Sequence[int],
        owners: Mapping[int, int],
        opened: Mapping[int, LocalShard],
        jobs: Mapping[int, tuple[Receipt, Job]],
        asked: Sequence[Mapping[str, list[int]]],
    ) -> list[TierckptError]:
        """All ranks go through the same list, so that each send meets its receive; what failed is returned."""
        group, me, failed = self._group, self._group.rank, []
        scratch = _native.Buffer(CHUNK + _STATUS)
        for rank in shards:
            takers = {taker: set(wants[str(rank)]) for taker, wants in enumerate(asked) if str(rank) in wants}
            for index in sorted(set().union(*takers.values())):
                mine = [taker for taker, indices in takers.items() if index in indices]
                if owners[rank] == me:
                    message, error = _message(opened[rank], index, scratch)
                    failed += [error] if error else []
                    for taker in mine:
                        group.send(message, taker)
                elif me in mine:
                    receipt, job = jobs[rank]
                    lo, hi = chunk_range(index, receipt.size)
                    message = memoryview(scratch)[: hi - lo + _STATUS]
                    group.receive(message, owners[rank])
                    data = message[_STATUS:]
                    if message[0] != _FINE:
                        continue  # the sender has the reason, and tells it
                    if chunk_digest(data) != receipt.chunk(index):
                        failed.append(IntegrityError(f"{receipt.name}: chunk {index} was damaged on its way here"))
                        continue
                    self._count(receipt, (index,))
                    job.use(lo, hi, data)
        return failed


_STATUS = 4096  # bytes in front of a chunk, so that it stays aligned
_FINE = 1


def _message(local: LocalShard, index: int, scratch: _native.Buffer) -> tuple[memoryview, TierckptError | None]:
    """A status and a verified chunk, to be sent."""
    receipt = local.view.receipt
    lo, hi = chunk_range(index, receipt.size)
    message = memoryview(scratch)[: hi - lo + _STATUS]
    try:
        read_chunk(local.reader, receipt, index, memoryview(scratch)[_STATUS:], url=local.url)
    except TierckptError as error:
        message[0] = 0
        return message, error
    message[0] = _FINE
    return message, None
