"""Copies of tensors, direct file I/O and page-aligned memory, in C++ and without the GIL.

All functions take any contiguous object with the buffer protocol; a buffer stays exported, so that it can be
neither resized nor freed, until the call returns.
"""

from typing import final

from typing_extensions import Buffer as _Readable

@final
class Buffer:
    """Page-aligned anonymous memory, on huge pages where the system has them.

    Supports the writable buffer protocol (one-dimensional, format ``B``). It is freed when the object and all
    ``memoryview``s of it are gone.
    """

    def __init__(self, nbytes: int, *, populate: bool = False) -> None:
        """Map ``nbytes`` of zeros; with ``populate`` all pages are made present at once, in parallel.

        Raises:
            MemoryError: the system refused; the message names the size.
            ValueError: ``nbytes`` is negative.
        """

    @property
    def address(self) -> int:
        """Address of the first byte; never 0, even if ``nbytes`` is."""

    @property
    def nbytes(self) -> int:
        """Size in bytes."""

    def __len__(self) -> int: ...
    def __buffer__(self, flags: int, /) -> memoryview: ...

@final
class CopyTable:
    """Geometry of many strided boxes between one linear byte range, the *shard*, and *tensors* in memory.

    Immutable; any number of threads may use one table at once.
    """

    def __init__(
        self,
        offsets: _Readable,
        itemsizes: _Readable,
        ndims: _Readable,
        shapes: _Readable,
        shard_strides: _Readable,
        tensor_strides: _Readable,
    ) -> None:
        """Take the columns of the table, each a buffer of 64-bit integers (``array('q')``, or 8 bytes each).

        Args:
            offsets: for each box the byte in the shard where its first element begins.
            itemsizes: for each box the bytes of one element, 1 to 16.
            ndims: for each box its number of dimensions, 0 to 64.
            shapes: the sizes of all dimensions of all boxes, one after the other, in elements.
            shard_strides: likewise the strides in the shard, in *bytes*, not negative. The boxes of a shard
                are rows of rows: inside one index of a dimension nothing reaches into the next index.
            tensor_strides: likewise the strides in memory, in *bytes*, of any sign, or 0.

        Raises:
            ValueError: a column has the wrong length or type, or an entry (named) is out of range, overflows
                64 bits, or has elements that overlap in the shard.
        """

    def __len__(self) -> int:
        """Number of boxes, those without elements too."""

    @property
    def nbytes(self) -> int:
        """Bytes that all boxes hold together."""

    @property
    def span(self) -> tuple[int, int]:
        """First byte of the shard that is in a box, and the byte after the last; (0, 0) if there is none."""

    def covered(self, lo: int, hi: int) -> int:
        """Bytes of the boxes that lie in ``[lo, hi)``; where boxes overlap they count once for each."""

    def gather(
        self,
        pointers: _Readable,
        lo: int,
        hi: int,
        dst: _Readable,
        threads: int = 1,
        *,
        stream: bool | None = None,
    ) -> None:
        """Copy what lies in the range ``[lo, hi)`` of the shard from the tensors into ``dst``.

        A box that is only partly inside is cut at the exact byte, also in the middle of an element. Bytes
        that no box covers are left alone; where boxes overlap, the one that begins later wins, of those that
        begin together the later in the table.

        Args:
            pointers: for each box the address of its first element, as 64-bit integers (``array('Q')``), in
                the order of the table. Only those of boxes that touch the range are looked at.
            lo, hi: the range, in bytes of the shard.
            dst: writable, of exactly ``hi - lo`` bytes; its first byte is byte ``lo`` of the shard. It must
                not overlap the tensors.
            threads: at most so many work on it, by bytes; small ranges use fewer.
            stream: whether to write past the caches; by default ranges of 16 MiB and more are.

        Raises:
            ValueError: a wrong size, range or number of threads, or a null pointer; nothing was copied then.
        """

    def scatter(
        self,
        pointers: _Readable,
        lo: int,
        hi: int,
        src: _Readable,
        threads: int = 1,
        *,
        stream: bool | None = None,
    ) -> None:
        """Copy the range ``[lo, hi)`` of the shard from ``src`` to the tensors; the inverse of `gather`.

        By default ranges of 1 MiB and more are written past the caches: nothing hashes the tensors then.
        Where several elements of boxes are the same memory, one of them wins.
        """

def populate(buffer: _Readable) -> None:
    """Make all pages of a writable buffer present and writable, in parallel, without changing them.

    For mappings of shared memory too: each process pays for the first touch of its own mapping.
    """

def open_direct(dir_fd: int, name: str | bytes, flags: int, mode: int = 0o666) -> tuple[int, bool]:
    """Open a file past the page cache (O_DIRECT), where its file system allows it, and closed on exec.

    With ``O_CREAT | O_EXCL`` the file is this call's own or the call fails.

    Returns:
        The descriptor, and whether it is direct. Direct I/O wants memory, size and offset in multiples of
        4096.

    Raises:
        OSError: with the name.
    """

def reserve(fd: int, size: int) -> bool:
    """Allocate the first ``size`` bytes of a file, which then has at least that size.

    Returns:
        Whether it did: many file systems cannot.

    Raises:
        OSError: there is no room (ENOSPC, EDQUOT, EFBIG), or the device failed (EIO).
    """

def write_at(fd: int, buffer: _Readable, offset: int) -> None:
    """Write the whole buffer at ``offset``.

    Raises:
        OSError: the system's, or EIO when it reports neither progress nor an error.
    """

def read_at(fd: int, buffer: _Readable, offset: int) -> int:
    """Read at ``offset`` until the (writable) buffer is full or the file ends; return the bytes read."""

def cached(fd: int, offset: int, length: int) -> float | None:
    """Fraction of the pages of a range that are in the page cache; 1.0 if the range has none in the file.

    None where the system cannot tell: before Linux 6.5, or for a file of another user.
    """

def stream_kernels() -> list[str]:
    """The non-temporal copies that this machine runs, best first: of avx512, avx2, sse2, memcpy (none)."""

def stream_copy(dst: _Readable, src: _Readable, kernel: str | None = None) -> None:
    """Copy ``src`` to ``dst``, of the same size, past the caches, by the best or the named kernel.

    Raises:
        ValueError: the sizes differ, or this machine does not run the kernel.
    """
