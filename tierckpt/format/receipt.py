"""Receipts: what a store knows of one shard that it holds."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from functools import cached_property

from tierckpt.errors import IntegrityError
from tierckpt.format import canonical, digest, paths, store, values
from tierckpt.format.canonical import JSON
from tierckpt.format.display import to_plain

SIZE_LIMIT = 1024 * 1024 * 1024  # bytes of one receipt
_ALIGNMENT = 4096  # bytes; of a shard's header
_KEYS = (
    "chunks",
    "generation",
    "header",
    "layout",
    "metadata",
    "name",
    "rank",
    "run",
    "size",
    "step",
    "stored",
    "world",
)


@dataclass(frozen=True)
class Receipt:
    """One shard as a store holds it. Sizes are in bytes, digests of documents in hex.

    ``chunks`` is the concatenation of the chunk digests, 32 bytes each; ``metadata`` an encoded value,
    ``None`` on all ranks but 0.
    """

    run: str
    generation: int
    step: int
    rank: int
    world: int
    layout: str
    size: int
    header_size: int
    header_digest: str
    chunks: bytes
    metadata: JSON = None

    @property
    def name(self) -> str:
        """The path of the shard in its store."""
        return paths.shard(self.generation, self.step, self.rank)

    def chunk(self, index: int) -> bytes:
        """The digest of chunk ``index``, 32 bytes. Raises ``IndexError`` if the shard has no such chunk."""
        if not 0 <= index * digest.SIZE < len(self.chunks):
            raise IndexError(f"chunk {index} of {self.name}, which has {len(self.chunks) // digest.SIZE}")
        return self.chunks[index * digest.SIZE : (index + 1) * digest.SIZE]

    @cached_property
    def shard_digest(self) -> str:
        """The shard digest, hex: it binds name, size, header and chunks."""
        name = self.name.encode("ascii")
        numbers = (len(name), self.size, self.header_size)
        length, size, header_size = (number.to_bytes(8, "little") for number in numbers)
        header = bytes.fromhex(self.header_digest)
        return digest.derive("shard", length, name, size, header_size, header, self.chunks).hex()

    def encode(self) -> bytes:
        return canonical.document(
            "receipt",
            chunks=base64.b64encode(self.chunks).decode("ascii"),
            generation=self.generation,
            header={"digest": self.header_digest, "size": self.header_size},
            layout=self.layout,
            metadata=self.metadata,
            name=self.name,
            rank=self.rank,
            run=store.check_run_id(self.run),
            size=self.size,
            step=self.step,
            stored={"form": "plain"},
            world=self.world,
        )

    @staticmethod
    def decode(data: bytes, *, what: str) -> Receipt:
        """Raises ``IntegrityError`` for anything that `encode` does not return or that contradicts itself."""
        depth = values.DEPTH_LIMIT + 1
        fields = canonical.read_document(data, "receipt", _KEYS, what=what, depth=depth, limit=SIZE_LIMIT)
        world = fields.integer("world", low=1)
        size = fields.integer("size", low=1)
        header = fields.fields("header", ("digest", "size"))
        header_size = header.integer("size", low=_ALIGNMENT, high=size)
        if header_size % _ALIGNMENT:
            raise header.wrong("size", f"a multiple of {_ALIGNMENT}")
        if fields.fields("stored", ("form",)).string("form") != "plain":
            raise IntegrityError(f"{what}: the stored form is unknown here; a newer tierckpt is needed")
        receipt = Receipt(
            run=store.read_run(fields),
            generation=fields.integer("generation", low=1),
            step=fields.integer("step"),
            rank=fields.integer("rank", high=world - 1),
            world=world,
            layout=fields.hex("layout"),
            size=size,
            header_size=header_size,
            header_digest=header.hex("digest"),
            chunks=_digests(fields.string("chunks"), size, what),
            metadata=read_metadata(fields),
        )
        if receipt.rank and receipt.metadata is not None:
            raise fields.wrong("metadata", "null on every rank but 0")
        if fields.string("name") != receipt.name:
            raise fields.wrong("name", receipt.name)
        return receipt


def read_metadata(fields: canonical.Fields) -> JSON:
    """The encoded value under ``metadata``; it must be one that can be shown, which needs no package."""
    metadata = fields.value("metadata")
    to_plain(metadata, what=f"{fields.what}: metadata")
    return metadata


def _digests(text: str, size: int, what: str) -> bytes:
    """The digests that base64 says, one for each chunk of ``size`` bytes."""
    wanted = digest.chunk_count(size) * digest.SIZE
    found = b""
    if len(text) == (wanted + 2) // 3 * 4:
        try:
            found = base64.b64decode(text, validate=True)
        except (ValueError, binascii.Error):
            found = b""
    if len(found) != wanted or base64.b64encode(found) != text.encode("utf-8"):
        raise IntegrityError(f"{what}: chunks must be the base64 of {wanted} bytes, for a shard of {size} bytes")
    return found
