"""A store: a durable place with its chain of signed links, its layouts and its checkpoints.

Reading and publishing only; who may publish what, and when, is the coordinator's business (:mod:`tierckpt.agent`).
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable
from functools import lru_cache

from tierckpt.errors import FencedError, IncompleteError, IntegrityError, StoreError, UntrustedError
from tierckpt.format import paths
from tierckpt.format.chain import Chain, CheckpointRef, KeyLink, Link
from tierckpt.format.digest import CHUNK, derive
from tierckpt.format.keys import SigningKey
from tierckpt.format.layout import Layout
from tierckpt.format.links import link_digest
from tierckpt.format.manifest import Manifest
from tierckpt.format.receipt import Receipt
from tierckpt.format.store import StoreInfo
from tierckpt.tiers.base import Place, Reader

_DOCUMENT_LIMIT = 64 << 20
_RECEIPT_LIMIT = 1 << 30
_LAYOUT_LIMIT = 1 << 30
#: Attempts to find a free number while others publish at the same time.
_RACES = 1000


class Store:
    """An existing store whose chain has been read and whose signatures are valid (not: trusted; see ``trust``)."""

    def __init__(self, place: Place, info: StoreInfo, chain: Chain) -> None:
        self.place, self.info, self.chain = place, info, chain
        self._lock = threading.Lock()
        self.layout = lru_cache(maxsize=4)(self._layout)

    @property
    def run(self) -> str:
        return self.info.run

    @property
    def url(self) -> str:
        return self.place.url

    @classmethod
    def bare(cls, place: Place, run: str) -> Store:
        """A store whose chain somebody else has read and believed: only what is named by a digest can be read."""
        return cls(place, StoreInfo(run=run), Chain(run))

    @classmethod
    def open(cls, place: Place) -> Store:
        """Read ``tierckpt.json`` and the chain.

        Raises:
            IncompleteError: there is no store, or one in which nothing was ever begun.
            IntegrityError, UntrustedError: the chain is broken.
        """
        store = cls.find(place)
        if store is None or not store.chain.links:
            raise no_store(place)
        return store

    @classmethod
    def create(cls, place: Place, run: str) -> Store:
        """Open the store at ``place``, made for ``run`` if there is none.

        Raises:
            StoreError: the place holds another run's store, or files that are none.
        """
        store = cls.find(place)
        if store is None:
            place.prepare()
            foreign = next(
                (f.name for f in place.list() if f.name != paths.STORE and not paths.is_temporary(f.name)),
                None,
            )
            if foreign is not None and place.size(paths.STORE) is None:
                raise StoreError(
                    f"{place.url} is no checkpoint store and is not empty (it holds {foreign}): choose a new or empty folder"
                )
            place.create(paths.STORE, StoreInfo(run=run).encode())
            store = cls.find(place)
            assert store is not None
        return store

    @classmethod
    def find(cls, place: Place) -> Store | None:
        """The store at ``place``, with an empty chain if nothing was ever begun in it; None if there is none."""
        try:
            data = place.read(paths.STORE, _DOCUMENT_LIMIT)
        except FileNotFoundError:
            if any(paths.parse_link(f.name) is not None for f in place.list(paths.CHAIN)):
                raise IntegrityError(f"{place.url}/{paths.STORE} is missing, but there is a chain") from None
            return None
        info = StoreInfo.decode(data, what=f"{place.url}/{paths.STORE}")
        store = cls(place, info, Chain(info.run))
        numbers = {number for f in place.list(paths.CHAIN) if (number := paths.parse_link(f.name)) is not None}
        store.refresh()
        following = len(store.chain.links)
        beyond = sorted(number for number in numbers if number >= following)
        if beyond:
            raise IntegrityError(
                f"{place.url}/{paths.link(following)} is missing, but there is {paths.link(beyond[0])}"
            )
        if store.chain.links and store.chain.store != info.digest:
            raise IntegrityError(f"{place.url}/{paths.STORE} is not the one that the chain began with")
        return store

    def refresh(self) -> list[Link]:
        """Read the links that others have published meanwhile; those that are new."""
        new: list[Link] = []
        with self._lock:
            while True:
                name = paths.link(len(self.chain.links))
                try:
                    data = self.place.read(name, _DOCUMENT_LIMIT)
                except FileNotFoundError:
                    return new
                new.append(self._append(data))

    def _append(self, data: bytes) -> Link:
        return self.chain.append(data, what=f"{self.url}/{paths.link(len(self.chain.links))}")

    def publish(self, build: Callable[[Chain], Link | None], key: SigningKey) -> Link | None:
        """Append the link that ``build`` makes of the newest chain, signed with ``key``.

        ``build`` is asked again each time somebody else was faster; None means that nothing is left to publish.
        """
        for _ in range(_RACES):
            self.refresh()
            unsigned = build(self.chain)
            if unsigned is None:
                return None
            self._must_be_there()
            link = unsigned.sign(key)
            introduces = isinstance(link.body, KeyLink) and link.body.introduces == key.public
            if self.chain.links and key.public not in self.chain.keys and not introduces:
                raise UntrustedError(
                    f"{self.url}: key {key.public} is not one that may sign here; no link introduces it"
                )
            self.place.create(paths.link(link.number), link.encode())
            self.refresh()  # reads back what is there: it may be our own even if it existed
            if len(self.chain.links) <= link.number:
                raise StoreError(
                    f"{self.url}/{paths.link(link.number)} was written and cannot be found: is this file system sound?"
                )
            if self.chain.links[link.number].digest == link.digest:
                return link
        raise StoreError(f"{self.url}: others publish without end; gave up after {_RACES} attempts")

    def _must_be_there(self) -> None:
        """Raise unless the newest link that was read is still what the place has: else a link after it would lead nowhere."""
        if self.place.size(paths.STORE) is None:
            raise IntegrityError(
                f"{self.url}: {paths.STORE} is gone: the store was removed or replaced under this process"
            )
        head = self.chain.head
        if head is not None:
            try:
                found = link_digest(self.place.read(paths.link(head.number), _DOCUMENT_LIMIT))
            except FileNotFoundError:
                found = "nothing"
            if found != head.digest:
                raise IntegrityError(
                    f"{self.url}/{paths.link(head.number)} is not the link that was there before: the store was removed or "
                    "replaced under this process"
                )

    def must_hold(self, run: str | None) -> None:
        """Raise StoreError when the store is another run's than ``run`` (None: any)."""
        if run and self.run != run:
            raise StoreError(f"{self.url} holds run {self.run!r}, not {run!r}: each run needs a root of its own")

    def endorse(self, key: SigningKey) -> bool:
        """Introduce ``key`` if the chain does not know it; whether that was needed. Nobody else has endorsed it then."""
        if key.public in self.chain.keys:
            return False
        self.publish(lambda chain: None if key.public in chain.keys else chain.introduce(key.public), key)
        return True

    def must_be_current(self, generation: int) -> None:
        """Raise FencedError when a newer generation than ``generation`` has begun."""
        if self.chain.generation > generation:
            raise FencedError(
                f"{self.url}: generation {self.chain.generation} of run {self.run} has begun; this process, of generation "
                f"{generation}, can commit nothing any more. If two jobs save to it, end one, or give it a root of its own"
            )

    def must_have_begun(self, generation: int, begin: str) -> None:
        """Raise FencedError unless the link of digest ``begin`` began ``generation`` here."""
        started = self.chain.begins.get(generation)
        if started is None or started.digest != begin:
            raise FencedError(
                f"{self.url}: the store was removed, replaced or rolled back since generation {generation} began"
            )

    def manifest(self, ref: CheckpointRef) -> Manifest:
        """The manifest of a committed checkpoint, checked against its id."""
        return self.parse_manifest(ref, self.manifest_bytes(ref))

    def manifest_bytes(self, ref: CheckpointRef) -> bytes:
        """The bytes of a manifest, unchecked."""
        name = paths.manifest(ref.generation, ref.step)
        return self._document(name, _DOCUMENT_LIMIT, f"the manifest of step {ref.step}")

    def parse_manifest(self, ref: CheckpointRef, data: bytes) -> Manifest:
        """The manifest in ``data``, wherever that is from, checked against its id."""
        name = paths.manifest(ref.generation, ref.step)
        found = derive("manifest", data).hex()
        if found != ref.id:
            raise IntegrityError(f"{self.url}/{name}: digest {found}, but the chain committed {ref.id}")
        manifest = Manifest.decode(data, what=f"{self.url}/{name}")
        if (manifest.run, manifest.generation, manifest.step) != (self.run, ref.generation, ref.step):
            raise IntegrityError(f"{self.url}/{name}: it is the manifest of another checkpoint")
        return manifest

    def _layout(self, digest: str) -> Layout:
        return self.parse_layout(digest, self.layout_bytes(digest))

    def layout_bytes(self, digest: str) -> bytes:
        """The bytes of a layout, unchecked."""
        return self._document(paths.layout(digest), _LAYOUT_LIMIT, "the layout")

    def parse_layout(self, digest: str, data: bytes) -> Layout:
        """The layout in ``data``, wherever that is from, checked against its hash."""
        name = f"{self.url}/{paths.layout(digest)}"
        found = derive("layout", data).hex()
        if found != digest:
            raise IntegrityError(f"{name}: digest {found}, not that of its name")
        return Layout.decode(data, what=name)

    def receipt(self, manifest: Manifest, rank: int) -> Receipt:
        """The receipt of one shard of a checkpoint, checked against its manifest."""
        name = paths.receipt(manifest.generation, manifest.step, rank)
        data = self._document(name, _RECEIPT_LIMIT, f"the receipt of rank {rank}, step {manifest.step}")
        receipt = Receipt.decode(data, what=f"{self.url}/{name}")
        if receipt.rank != rank:
            raise IntegrityError(f"{self.url}/{name}: it is the receipt of rank {receipt.rank}")
        try:
            manifest.check(receipt)
        except IntegrityError as error:
            raise IntegrityError(f"{self.url}/{name}: {error}") from None
        return receipt

    def ranks_here(self, manifest: Manifest) -> list[int]:
        """The ranks whose shards must be in this folder.

        All, or with node-local roots those of one node: of the node whose files are here, at least.
        """
        listed = [part.rank for part in manifest.shards]
        roots = self.chain.roots.get(CheckpointRef(manifest.generation, manifest.step, manifest.id), ())
        if not roots:
            return listed
        spans = sorted((first, last, number) for number, ranges in enumerate(roots) for first, last in ranges)
        firsts = [first for first, _, _ in spans]

        def root(rank: int) -> int | None:
            at = bisect_right(firsts, rank)
            return spans[at - 1][2] if at and rank <= spans[at - 1][1] else None

        own = {root(rank) for rank in listed if self._has_any(manifest, rank)}
        # A rank that no root is said to have is looked for here.
        return [rank for rank in listed if not own or root(rank) in own or root(rank) is None]

    def _has_any(self, manifest: Manifest, rank: int) -> bool:
        key = (manifest.generation, manifest.step, rank)
        return any(self.place.size(name) is not None for name in (paths.shard(*key), paths.receipt(*key)))

    def open_shard(self, receipt: Receipt) -> Reader:
        """A reader of a shard's bytes; its size is that of the receipt."""
        try:
            reader = self.place.open(receipt.name)
        except FileNotFoundError:
            raise IncompleteError(f"{self.url}/{receipt.name} is missing") from None
        if reader.size != receipt.size:
            reader.close()
            raise IntegrityError(f"{self.url}/{receipt.name}: {reader.size} bytes, expected {receipt.size}")
        return reader

    def _document(self, name: str, limit: int, what: str) -> bytes:
        try:
            return self.place.read(name, limit)
        except FileNotFoundError:
            raise IncompleteError(f"{self.url}/{name} ({what}) is missing") from None


def no_store(place: Place) -> IncompleteError:
    """Nothing was ever begun at ``place``, or what is there is none of our stores."""
    found = place.instead() or ("nothing was ever saved" if place.exists() else "there is no such folder")
    return IncompleteError(f"{place.url}: no checkpoint store here: {found}")


def put(place: Place, name: str, data: bytes) -> None:
    """Make a document durable under ``name``; one that is there already must be the same."""
    if not place.create(name, data) and place.read(name, max(len(data), CHUNK)) != data:
        raise StoreError(f"{place.url}/{name} exists with other contents")
