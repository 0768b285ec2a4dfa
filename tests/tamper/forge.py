"""What somebody who holds a key, or only the disk, can make of a store."""

from __future__ import annotations

import base64
import os
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from tierckpt.format import blob, canonical, paths
from tierckpt.format.canonical import JSON
from tierckpt.format.chain import Chain, CheckpointRef
from tierckpt.format.digest import chunk_count, chunk_digest, chunk_range, derive
from tierckpt.format.keys import SigningKey
from tierckpt.format.layout import Entry, Layout
from tierckpt.format.layout_plan import Tree
from tierckpt.format.links import Link, link_digest
from tierckpt.format.shard import build
from tierckpt.format.store import StoreInfo

RUN = "forged"


def links(root: Path) -> list[Path]:
    """The files of the links, in order."""
    return sorted((root / "chain").iterdir())


def read_chain(root: Path) -> Chain:
    """The chain of a store, read without asking who signed it."""
    chain = Chain()
    for path in links(root):
        chain.append(path.read_bytes())
    return chain


def append(root: Path, build_link: Callable[[Chain], Link], key: SigningKey) -> str:
    """Add a link as its holder would; its digest."""
    chain = read_chain(root)
    link = build_link(chain).sign(key)
    (root / paths.link(link.number)).write_bytes(link.encode())
    return link.digest


def sign_again(root: Path, key: SigningKey) -> None:
    """The same history, as if ``key`` had signed all of it."""
    previous = None
    for path in links(root):
        link = Link.decode(path.read_bytes(), what=path.name)
        data = replace(link, previous=previous).sign(key).encode()
        path.unlink()
        path.write_bytes(data)
        previous = link_digest(data)


def document(data: bytes, **changes: Any) -> bytes:
    """A document with some of its keys changed; ``None`` is a value, ``...`` removes the key."""
    value = canonical.decode(data, what="document", depth=1000, limit=1 << 30)
    assert isinstance(value, dict)
    changed: dict[str, Any] = value | changes
    return canonical.encode({key: item for key, item in changed.items() if item is not ...})


class Forger:
    """Makes a store of one checkpoint whose digests and signatures all match, whatever its documents say.

    Args:
        root: a folder, made here.
        key: signs; by default a new one.
    """

    def __init__(self, root: Path, key: SigningKey | None = None, step: int = 1) -> None:
        self.root, self.step, self.generation = root, step, 1
        self.key = key or SigningKey.generate()
        self.store = StoreInfo(run=RUN).encode()
        self.world = 1
        self.layout = Layout.build(1, [], [Tree([(0, 0)], ["dict", []])], [(0, 0)]).encode()
        self.shards: dict[int, bytes] = {}
        #: Called with the manifest's digest when all files but the links are there.
        self.sign: Callable[[str], None] = self.begin_and_commit
        self.receipt_changes: dict[int, dict[str, Any]] = {}
        self.manifest_changes: dict[str, Any] = {}
        self.sizes: dict[int, int] = {}
        self.roots: list[tuple[tuple[int, int], ...]] = []
        self.extend = 0  # bytes to which the file of rank 0's shard is extended by a hole

    @property
    def layout_hash(self) -> str:
        return derive("layout", self.layout).hex()

    def describe(
        self,
        entries: Iterable[Entry],
        tree: JSON,
        values: dict[str, JSON] | None = None,
        data: dict[int, bytes] | None = None,
        world: int = 1,
    ) -> None:
        """A layout with these tensors and this tree, shards that fit to it, zeros in all tensors unless given in ``data``."""
        self.world = world
        layout = Layout.build(world, entries, [Tree([(0, world - 1)], tree)], [(0, 0)])
        self.layout = layout.encode()
        text = blob.pad(blob.encode(values or {}))
        for rank in layout.writers:
            header = build(
                layout.shard_pieces(rank),
                layout=self.layout_hash,
                rank=rank,
                blob=len(text) if layout.has_blob(rank) else None,
            )
            body = (data or {}).get(rank)
            tail = text if layout.has_blob(rank) else b""
            if body is None:
                body = bytes(header.size - header.header_size - len(tail))
            self.shards[rank] = header.data + body + tail

    def write(self) -> Path:
        """Write the store out, every digest and signature recomputed from the bytes."""
        root = self.root
        folder = root / paths.step_dir(self.generation, self.step)
        folder.mkdir(parents=True)
        (root / "chain").mkdir()
        (root / "layouts").mkdir()
        (root / paths.STORE).write_bytes(self.store)
        (root / paths.layout(self.layout_hash)).write_bytes(self.layout)
        listed: list[JSON] = []
        for rank, data in sorted(self.shards.items()):
            (root / paths.shard(self.generation, self.step, rank)).write_bytes(data)
            if self.extend and rank == 0:
                os.truncate(root / paths.shard(self.generation, self.step, rank), self.extend)
            receipt = self.receipt(rank, data)
            (root / paths.receipt(self.generation, self.step, rank)).write_bytes(receipt)
            listed.append({"digest": self.shard_digest(receipt), "rank": rank, "size": self.sizes.get(rank, len(data))})
        manifest = document(
            canonical.document(
                "manifest",
                generation=self.generation,
                layout=self.layout_hash,
                metadata=None,
                requires=[],
                run=RUN,
                shards=listed,
                step=self.step,
                world=self.world,
            ),
            **self.manifest_changes,
        )
        (root / paths.manifest(self.generation, self.step)).write_bytes(manifest)
        self.sign(derive("manifest", manifest).hex())
        return root

    def begin_and_commit(self, manifest: str) -> None:
        """The two links of an honest store."""
        chain = Chain(RUN)
        ref = CheckpointRef(self.generation, self.step, manifest)
        for number in range(2):
            if number == 0:
                unsigned = chain.begin(store=derive("store", self.store).hex(), origin=None)
            else:
                unsigned = chain.commit(ref, roots=self.roots)
            data = unsigned.sign(self.key).encode()
            (self.root / paths.link(number)).write_bytes(data)
            chain.append(data)

    def receipt(self, rank: int, data: bytes) -> bytes:
        """The receipt of a shard, its header as long as its first bytes say."""
        length = 8 + int.from_bytes(data[:8], "little")
        length = length if length <= len(data) else 4096
        ranges = (chunk_range(i, len(data)) for i in range(chunk_count(len(data))))
        chunks = b"".join(chunk_digest(data[lo:hi]) for lo, hi in ranges)
        plain = canonical.document(
            "receipt",
            chunks=base64.b64encode(chunks).decode(),
            generation=self.generation,
            header={"digest": derive("header", data[:length]).hex(), "size": length},
            layout=self.layout_hash,
            metadata=None,
            name=paths.shard(self.generation, self.step, rank),
            rank=rank,
            run=RUN,
            size=self.sizes.get(rank, len(data)),
            step=self.step,
            stored={"form": "plain"},
            world=self.world,
        )
        return document(plain, **self.receipt_changes.get(rank, {}))

    @staticmethod
    def shard_digest(receipt: bytes) -> str:
        """As format.md defines it, of what the receipt says; a receipt that says nonsense has one of zeros."""
        value = canonical.decode(receipt, what="receipt", depth=1000, limit=1 << 30)
        try:
            assert isinstance(value, dict)
            fields: Any = value
            name = fields["name"].encode()
            numbers = [n.to_bytes(8, "little") for n in (len(name), fields["size"], fields["header"]["size"])]
            header = bytes.fromhex(fields["header"]["digest"])
            return derive(
                "shard", numbers[0], name, numbers[1], numbers[2], header, base64.b64decode(fields["chunks"])
            ).hex()
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError):
            return "0" * 64
