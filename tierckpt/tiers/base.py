"""The contract of a durable place: what a store needs of the storage under it, and nothing more.

Names are paths relative to the place, with ``/`` (docs/format.md section 1). A place knows no format: it keeps bytes
under names. ``tests/conformance`` is this contract as an inheritable suite.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from typing_extensions import Buffer


@dataclass(frozen=True)
class FileInfo:
    """One name in a place.

    Attributes:
        size: in bytes.
        modified: seconds since the epoch.
        kind: ``"file"``, ``"link"`` (symbolic) or ``"other"``.
    """

    name: str
    size: int
    modified: float
    kind: str = "file"


class Reader(ABC):
    """An open file. Reads may come from several threads at once."""

    name: str
    size: int
    #: Whether a read waits for a device rather than copies what is in memory: then others are made ahead.
    waits: bool = False

    @abstractmethod
    def read_into(self, offset: int, buffer: Buffer) -> int:
        """Fill ``buffer`` from ``offset`` on; the number of bytes read, less than asked only at the end of the file.

        Raises:
            StoreError: the storage refused.
        """

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Writer(ABC):
    """A file being written. It counts for nothing until :meth:`commit` has returned."""

    name: str
    #: Bytes to which ``offset`` and the address and length of buffers must be aligned, except for the end of the file.
    alignment: int

    @abstractmethod
    def write(self, offset: int, buffer: Buffer) -> None:
        """Write ``buffer`` at ``offset``. May be called from several threads, in any order.

        The last block may be padded up to the alignment: :meth:`commit` cuts the file to its size.
        """

    @abstractmethod
    def commit(self) -> None:
        """Make the file durable. Afterwards it survives the loss of power."""

    @abstractmethod
    def abort(self) -> None:
        """Remove what was written. Never raises for a file that is not there."""


class Place(ABC):
    """A durable place."""

    #: How a user names it.
    url: str

    @property
    def identity(self) -> str:
        """What tells it from the other places that processes of this node name."""
        return self.url

    @abstractmethod
    def prepare(self) -> None:
        """Make the place itself exist (a folder, say), durably."""

    @abstractmethod
    def exists(self) -> bool:
        """Whether the place itself exists."""

    def instead(self) -> str:
        """Where there is no store here: what there is, if that helps who looked for one; else nothing."""
        return ""

    @abstractmethod
    def read(self, name: str, limit: int) -> bytes:
        """All bytes of a file.

        Raises:
            FileNotFoundError: no such name.
            IntegrityError: it is no regular file, or larger than ``limit``.
            StoreError: the storage refused.
        """

    @abstractmethod
    def open(self, name: str) -> Reader:
        """Open for reading. Raises as :meth:`read` does."""

    @abstractmethod
    def size(self, name: str) -> int | None:
        """Size in bytes of a file, None if there is no regular file of that name."""

    @abstractmethod
    def create(self, name: str, data: bytes) -> bool:
        """Make ``data`` visible and durable under ``name`` if the name is free, all at once; False if it is taken.

        Of several that try, one wins. Folders on the way are made.
        """

    @abstractmethod
    def writer(self, name: str, size: int) -> Writer:
        """Begin to write a file of ``size`` bytes, which has that name from :meth:`Writer.commit` on, instead of another."""

    @abstractmethod
    def list(self, folder: str = "") -> Iterator[FileInfo]:
        """Every file below ``folder`` (all levels), in no particular order. An absent folder has none."""

    @abstractmethod
    def remove(self, names: Iterable[str]) -> None:
        """Remove files, and folders that became empty. Names that are gone are no error."""

    @abstractmethod
    def free(self) -> int | None:
        """Bytes that can still be written, None if unknowable."""
