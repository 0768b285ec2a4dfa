"""The roots of one store: one folder that all ranks see, or one on each node's own disk.

Node-local roots hold the same ``tierckpt.json``, chain, layouts and manifests, each beside the shards of its node.
Whether two nodes see the same folder is found out when a generation begins: by whether the link that rank 0 has
published can be seen. A wrong "no" (a file system that shows new files late) does no harm, since everything that is
written twice is the same.
"""

from __future__ import annotations

import json
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from tierckpt.config import PROBE_SECONDS
from tierckpt.errors import StoreError
from tierckpt.format import paths
from tierckpt.format.links import Ranges, to_ranges
from tierckpt.tiers.base import Place
from tierckpt.tiers.store import Store, put


class Nodes(Protocol):
    """What is needed of the group of processes (see :class:`tierckpt.group.Group`)."""

    rank: int
    size: int
    leaders: list[int]
    node_of: list[int]

    def vote(self, what: str, part: Callable[[], bytes], *, tag: int = 0) -> list[bytes]: ...


@dataclass(frozen=True)
class Roots:
    """Which ranks share a folder.

    Attributes:
        leaders: the rank that keeps the documents of each folder, ascending; the first is 0.
        of: for each rank the leader of its folder.
    """

    leaders: Sequence[int]
    of: Sequence[int]

    def members(self, leader: int) -> list[int]:
        """The ranks whose shards are in the folder that ``leader`` keeps."""
        return [rank for rank, its in enumerate(self.of) if its == leader]

    def ranges(self) -> list[Ranges]:
        """For each folder its ranks, as a commit link says it: nothing when there is one folder."""
        return [to_ranges(self.members(leader)) for leader in self.leaders] if len(self.leaders) > 1 else []


def one_root(size: int) -> Roots:
    """All ranks share one folder."""
    return Roots([0], [0] * size)


def level(nodes: Nodes, place: Place) -> None:
    """Bring all roots to the state of the one with the longest chain of the highest generation. Collective.

    Raises:
        StoreError: a root has a history of its own beside that; it is named.
    """
    if len(nodes.leaders) == 1:
        return
    what = f"bringing together the roots at {place.url}"
    opened: list[Store] = []

    def look() -> bytes:
        if nodes.rank not in nodes.leaders:
            return b""
        store = Store.find(place)
        if store is None or store.chain.head is None:
            return b""
        opened.append(store)
        return json.dumps([store.chain.generation, store.chain.head.number, store.chain.head.digest]).encode()

    heads = {rank: json.loads(told) for rank, told in enumerate(nodes.vote(what, look)) if told}
    if not heads:
        return
    best = max(heads, key=lambda rank: (heads[rank][0], heads[rank][1], -rank))
    behind = [rank for rank in nodes.leaders if heads.get(rank) != heads[best]]
    if behind:
        told = nodes.vote(what, lambda: _pack(documents(opened[0])) if nodes.rank == best else b"")[best]
        nodes.vote(what, lambda: _take(place, told) if nodes.rank in behind else b"")


def documents(store: Store) -> dict[str, bytes]:
    """Everything that each root has: the chain from its start, and what the live checkpoints need."""
    read = store.place.read
    found = {paths.STORE: read(paths.STORE, _LIMIT)}
    for ref in store.chain.live.values():
        manifest = store.manifest(ref)
        found[paths.layout(manifest.layout)] = store.layout_bytes(manifest.layout)
        found[paths.manifest(ref.generation, ref.step)] = manifest.encode()
    found.update((paths.link(n), read(paths.link(n), _LIMIT)) for n in range(len(store.chain.links)))
    return found


def spread_begin(nodes: Nodes, place: Place, store: Store | None) -> tuple[Roots, Store | None]:
    """Give the chain of rank 0, which has just begun a generation, to the roots that do not show it. Collective.

    Args:
        store: rank 0's.

    Returns:
        The roots, and on the leader of each its store.
    """
    if len(nodes.leaders) == 1:
        return one_root(nodes.size), store
    what = f"bringing together the roots at {place.url}"

    def show() -> bytes:
        if store is None:
            return b""
        links = range(max(0, len(store.chain.links) - 16), len(store.chain.links))
        names = [paths.STORE, *(paths.link(number) for number in links)]
        return _pack({name: store.place.read(name, _LIMIT) for name in names})

    told = nodes.vote(what, show)[0]
    own: list[Store] = []

    def adopt() -> bytes:
        if nodes.rank == 0 or nodes.rank not in nodes.leaders or _shows(place, told):
            return b""
        place.prepare()
        _take(place, told)
        own.append(Store.open(place))
        return b"own"

    answers = nodes.vote(what, adopt)
    leaders = [0, *(rank for rank, answer in enumerate(answers) if answer == b"own")]
    of = [leader if leader in leaders else 0 for leader in nodes.node_of]
    return Roots(leaders, of), store if nodes.rank == 0 else (own[0] if own else None)


_LIMIT = 64 << 20


def _shows(place: Place, told: bytes) -> bool:
    """Whether the newest of the files can be seen here without our doing."""
    name = max(name for name in _unpack(told) if paths.parse_link(name) is not None)
    deadline = time.monotonic() + PROBE_SECONDS
    while place.size(name) is None:
        if time.monotonic() >= deadline:
            return False
        time.sleep(PROBE_SECONDS / 20)
    return True


def _pack(files: dict[str, bytes]) -> bytes:
    return json.dumps({name: b64encode(data).decode() for name, data in files.items()}).encode()


def _unpack(told: bytes) -> dict[str, bytes]:
    return {name: b64decode(data) for name, data in json.loads(told).items()}


def _take(place: Place, told: bytes) -> bytes:
    """Create the files here; those that are here already must be the same."""
    for name, data in _unpack(told).items():
        try:
            put(place, name, data)
        except StoreError as error:
            raise StoreError(
                f"{place.url} has another history than the roots of other nodes ({error}); move it away if it is not "
                "the one to go on with"
            ) from error
    return b""
