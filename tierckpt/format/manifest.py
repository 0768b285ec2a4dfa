"""Manifests: a pure function of the receipts of a step. Its digest is the checkpoint's id."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from tierckpt.errors import IntegrityError
from tierckpt.format import canonical, digest, store, values
from tierckpt.format.canonical import JSON
from tierckpt.format.receipt import Receipt, read_metadata

_KEYS = ("generation", "layout", "metadata", "requires", "run", "shards", "step", "world")
_COMMON = ("run", "generation", "step", "world", "layout")  # what all receipts of a step must agree in


@dataclass(frozen=True)
class ShardRef:
    """A shard in a manifest: ``size`` in bytes, ``digest`` in hex."""

    rank: int
    size: int
    digest: str


@dataclass(frozen=True)
class Manifest:
    """One checkpoint. ``shards`` are in ascending order of rank; ``metadata`` is an encoded value."""

    run: str
    generation: int
    step: int
    world: int
    layout: str
    shards: tuple[ShardRef, ...]
    metadata: JSON = None

    @staticmethod
    def of(receipts: Iterable[Receipt]) -> Manifest:
        """The manifest of the step whose receipts these are, in any order.

        Raises ``IntegrityError`` if there is none of rank 0, two of one rank, or two that disagree in run,
        generation, step, world or layout: all receipts of a step are from one save.
        """
        ordered = sorted(receipts, key=lambda receipt: receipt.rank)
        if not ordered or ordered[0].rank != 0:
            raise IntegrityError("a manifest needs the receipt of rank 0")
        first = ordered[0]
        for index, receipt in enumerate(ordered):
            if index and receipt.rank == ordered[index - 1].rank:
                raise IntegrityError(f"two receipts of rank {receipt.rank} for {receipt.name}")
            for key in _COMMON:
                if getattr(receipt, key) != getattr(first, key):
                    raise IntegrityError(
                        f"receipts of ranks 0 and {receipt.rank} disagree in {key}: "
                        f"{getattr(first, key)} and {getattr(receipt, key)}"
                    )
        return Manifest(
            run=first.run,
            generation=first.generation,
            step=first.step,
            world=first.world,
            layout=first.layout,
            shards=tuple(ShardRef(r.rank, r.size, r.shard_digest) for r in ordered),
            metadata=first.metadata,
        )

    def encode(self) -> bytes:
        shards: list[JSON] = [{"digest": shard.digest, "rank": shard.rank, "size": shard.size} for shard in self.shards]
        requires: list[JSON] = []
        return canonical.document(
            "manifest",
            generation=self.generation,
            layout=self.layout,
            metadata=self.metadata,
            requires=requires,
            run=store.check_run_id(self.run),
            shards=shards,
            step=self.step,
            world=self.world,
        )

    @cached_property
    def id(self) -> str:
        """The checkpoint's id, hex."""
        return digest.derive("manifest", self.encode()).hex()

    @staticmethod
    def decode(data: bytes, *, what: str) -> Manifest:
        """Raises ``IntegrityError`` for anything that `encode` does not return or that contradicts itself."""
        fields = canonical.read_document(data, "manifest", _KEYS, what=what, depth=values.DEPTH_LIMIT + 1)
        world = fields.integer("world", low=1)
        shards: list[ShardRef] = []
        for item in fields.array("shards"):
            shard = canonical.Fields(item, ("digest", "rank", "size"), what=f"{what}: shard {len(shards)}")
            rank = shard.integer("rank", low=shards[-1].rank + 1 if shards else 0, high=world - 1)
            shards.append(ShardRef(rank, shard.integer("size", low=1), shard.hex("digest")))
        if not shards or shards[0].rank != 0:
            raise IntegrityError(f"{what}: rank 0 is not among the shards")
        return Manifest(
            run=store.read_run(fields),
            generation=fields.integer("generation", low=1),
            step=fields.integer("step"),
            world=world,
            layout=fields.hex("layout"),
            shards=tuple(shards),
            metadata=read_metadata(fields),
        )

    @cached_property
    def _by_rank(self) -> dict[int, ShardRef]:
        return {shard.rank: shard for shard in self.shards}

    def shard(self, rank: int) -> ShardRef | None:
        """The shard of that rank; ``None`` if it wrote none."""
        return self._by_rank.get(rank)

    def check(self, receipt: Receipt) -> None:
        """Raises ``IntegrityError`` saying what differs, unless the receipt belongs to this manifest."""
        for key in _COMMON:
            ours, its = getattr(self, key), getattr(receipt, key)
            if ours != its:
                raise IntegrityError(f"receipt of {receipt.name}: {key} is {its}, the manifest says {ours}")
        shard = self.shard(receipt.rank)
        if shard is None:
            raise IntegrityError(f"receipt of {receipt.name}: rank {receipt.rank} is not in the manifest")
        if shard.size != receipt.size:
            raise IntegrityError(f"receipt of {receipt.name}: size is {receipt.size}, the manifest says {shard.size}")
        if shard.digest != receipt.shard_digest:
            raise IntegrityError(
                f"receipt of {receipt.name}: shard digest is {receipt.shard_digest}, the manifest says {shard.digest}"
            )
        if receipt.rank == 0 and canonical.encode(receipt.metadata) != canonical.encode(self.metadata):
            raise IntegrityError(f"receipt of {receipt.name}: metadata is not that of the manifest")
