"""Making one rank's shard of one step durable: in this process, or in the agent. Both go through :func:`write`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any, Protocol

from tierckpt.format import paths
from tierckpt.format.canonical import JSON
from tierckpt.format.receipt import Receipt
from tierckpt.tiers.base import Place
from tierckpt.tiers.chunks import retried, write_shard
from tierckpt.tiers.pipeline import Source, TakeDigest, chunk_digest_of
from tierckpt.tiers.store import put


@dataclass
class Shard:
    """What one rank saves of one step.

    Attributes:
        source: its bytes; None when this rank writes nothing, or when the agent has them.
        size: of the shard in bytes, 0 when this rank writes nothing.
        header_size: bytes of the safetensors header in front.
        header_digest: of these.
        layout_hash, layout: hex, and the layout file.
        total: bytes that all ranks together are about to write, roughly.
        metadata: the user's, as an encoded value; rank 0's counts.
    """

    source: Source | None
    size: int
    header_size: int
    header_digest: str
    layout_hash: str
    layout: bytes
    total: int
    metadata: Any


@dataclass(frozen=True)
class Title:
    """Whose shard it is."""

    run: str
    generation: int
    step: int
    rank: int
    world: int


class Writer(Protocol):
    """Whoever makes a shard durable for the drain."""

    def write(self, place: Place, title: Title, shard: Shard) -> bytes:
        """Write shard and receipt; what the coordinator needs to know of them, empty if the rank writes nothing."""


class OwnWriter:
    """Writes in this process."""

    def write(self, place: Place, title: Title, shard: Shard) -> bytes:
        if shard.source is None:
            return b""
        return entry(
            write(
                place,
                title,
                shard.source,
                header_size=shard.header_size,
                header_digest=shard.header_digest,
                layout=shard.layout_hash,
                metadata=shard.metadata,
            )
        )


def write(
    place: Place,
    title: Title,
    source: Source,
    *,
    header_size: int,
    header_digest: str,
    layout: str,
    metadata: JSON,
    digest: TakeDigest = chunk_digest_of,
) -> Receipt:
    """Make a shard and then its receipt durable.

    Raises:
        StoreError: the place refused.
    """
    name = paths.shard(title.generation, title.step, title.rank)
    chunks = write_shard(place, name, source, digest)
    receipt = Receipt(
        run=title.run,
        generation=title.generation,
        step=title.step,
        rank=title.rank,
        world=title.world,
        layout=layout,
        size=source.size,
        header_size=header_size,
        header_digest=header_digest,
        chunks=chunks,
        metadata=metadata if title.rank == 0 else None,
    )
    data = receipt.encode()

    def told() -> bytes:
        put(place, paths.receipt(title.generation, title.step, title.rank), data)
        return b""

    retried(told)
    return receipt


def entry(receipt: Receipt) -> bytes:
    """What the coordinator needs of a receipt to make the manifest."""
    return json.dumps([receipt.size, receipt.shard_digest, receipt.layout, receipt.metadata]).encode()
