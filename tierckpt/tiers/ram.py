"""The RAM tier as a place to read from: shards in the memory of the node's agent, with the documents that go with them."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from tierckpt import _native
from tierckpt.errors import IntegrityError, StoreError, of_system
from tierckpt.tiers.base import FileInfo, Place, Reader, Writer

if TYPE_CHECKING:
    from typing_extensions import Buffer


class RamPlace(Place):
    """One checkpoint in memory. Nothing can be written to it.

    Args:
        url: how messages call it.
        sizes: of the shards that are in this node's memory, by name, in bytes.
        documents: what else is there, by name; each is fetched when it is asked for.
        fetch: a descriptor of a shard's memory, to be closed by whoever asks.
        elsewhere: names that are read from other places, since what had them in memory is gone.
    """

    def __init__(
        self,
        url: str,
        sizes: Mapping[str, int],
        documents: Mapping[str, Callable[[], bytes]],
        fetch: Callable[[str], int],
        elsewhere: Mapping[str, Place] = MappingProxyType({}),
    ) -> None:
        self.url, self.elsewhere = url, elsewhere
        self._sizes, self._documents, self._fetch = sizes, documents, fetch

    def prepare(self) -> None:
        raise StoreError(f"{self.url} cannot be written to")

    def exists(self) -> bool:
        return True

    def read(self, name: str, limit: int) -> bytes:
        if name in self.elsewhere:
            return self.elsewhere[name].read(name, limit)
        if name not in self._documents:
            raise FileNotFoundError(errno.ENOENT, "not in memory", f"{self.url}/{name}")
        data = self._documents[name]()
        if len(data) > limit:
            raise IntegrityError(f"{self.url}/{name}: {len(data)} bytes, but such a file has at most {limit}")
        return data

    def open(self, name: str) -> Reader:
        if name in self.elsewhere:
            return self.elsewhere[name].open(name)
        if name not in self._sizes:
            raise FileNotFoundError(errno.ENOENT, "not in memory", f"{self.url}/{name}")
        return _RamReader(name, self._fetch(name), self._sizes[name], self.url)

    def size(self, name: str) -> int | None:
        return self.elsewhere[name].size(name) if name in self.elsewhere else self._sizes.get(name)

    def create(self, name: str, data: bytes) -> bool:
        raise StoreError(f"{self.url} cannot be written to")

    def writer(self, name: str, size: int) -> Writer:
        raise StoreError(f"{self.url} cannot be written to")

    def list(self, folder: str = "") -> Iterator[FileInfo]:
        under = f"{folder}/" if folder else ""
        yield from (FileInfo(name, size, 0.0) for name, size in self._sizes.items() if name.startswith(under))

    def remove(self, names: Iterable[str]) -> None:
        raise StoreError(f"{self.url} cannot be written to")

    def free(self) -> int | None:
        return 0


class _RamReader(Reader):
    """Reads by copying: what was verified is what is used, whoever else has the memory mapped."""

    def __init__(self, name: str, descriptor: int, size: int, url: str) -> None:
        self.name, self.size = name, size
        self._descriptor, self._url = descriptor, url

    def read_into(self, offset: int, buffer: Buffer) -> int:
        view = memoryview(buffer).cast("B")
        try:
            # The slot may be larger than the shard.
            return _native.read_at(self._descriptor, view[: max(0, self.size - offset)], offset)
        except OSError as error:
            if not of_system(error):
                raise
            raise StoreError(f"cannot read {self._url}/{self.name}: {error.strerror}") from error

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1
