"""One shard on its way into a place, and out of it: chunks, each digested once on the way in and checked on the way out."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from tierckpt import _native
from tierckpt.config import WRITE_ATTEMPTS, WRITE_BACKOFF
from tierckpt.errors import IntegrityError, StoreError
from tierckpt.format import shard
from tierckpt.format.digest import chunk_digest, chunk_range, derive
from tierckpt.format.layout import Layout
from tierckpt.format.receipt import Receipt
from tierckpt.tiers.base import Place, Reader
from tierckpt.tiers.pipeline import Intake, Pipeline, Source, TakeDigest, chunk_digest_of
from tierckpt.tiers.workers import workers

if TYPE_CHECKING:
    from typing_extensions import Buffer

#: Errors after which the same write may well succeed.
PASSING = frozenset(
    {
        errno.EAGAIN,
        errno.EINTR,
        errno.EBUSY,
        errno.ETIMEDOUT,
        errno.ENETDOWN,
        errno.ENETUNREACH,
        errno.ECONNRESET,
        errno.ESTALE,
        errno.ENOENT,  # an empty folder was cleared away before the file was in it
    }
)


def write_shard(place: Place, name: str, source: Source, digest: TakeDigest = chunk_digest_of) -> bytes:
    """Write a shard durably; its chunk digests, one after the other. Passing errors are retried.

    Args:
        digest: gives the digest of a chunk; one that was taken before is not taken again.

    Raises:
        StoreError: the place refused; what had been written is removed.
    """

    def attempt() -> bytes:
        writer = place.writer(name, source.size)
        try:
            found = Pipeline(writer, source, digest).run()
            writer.commit()
        except BaseException:
            writer.abort()
            raise
        return found

    return retried(attempt)


def retried(attempt: Callable[[], bytes]) -> bytes:
    """The result of ``attempt``, made again a few times after errors that pass by themselves."""
    for number in range(WRITE_ATTEMPTS):
        try:
            return attempt()
        except StoreError as error:
            cause = error.__cause__
            if not isinstance(cause, OSError) or cause.errno not in PASSING or number == WRITE_ATTEMPTS - 1:
                raise
        time.sleep(WRITE_BACKOFF * 2**number)
    raise AssertionError("unreachable")


def read_chunks(
    reader: Reader,
    receipt: Receipt,
    indices: Sequence[int],
    use: Callable[[int, int, memoryview], None],
    *,
    url: str,
    damaged: Callable[[IntegrityError], None] | None = None,
) -> None:
    """Read chunks of a shard, check each against the receipt, and only then hand it to ``use(lo, hi, bytes)``.

    ``use`` is called from several threads. ``damaged`` is told of chunks that are wrong instead of the first being raised.

    Raises:
        IntegrityError: names the file, the chunk, what was expected and what was found.
    """

    def check(number: int, memory: memoryview, got: int) -> None:
        index = indices[number]
        lo, hi = chunk_range(index, receipt.size)
        try:
            data = _checked(receipt, index, memory, got, url=url)
        except IntegrityError as error:
            if damaged is None:
                raise
            damaged(error)
        else:
            use(lo, hi, data)

    def work(number: int, scratch: _native.Buffer) -> None:
        lo, _ = chunk_range(indices[number], receipt.size)
        check(number, memoryview(scratch), reader.read_into(lo, scratch))

    if reader.waits:
        Intake(reader, [chunk_range(index, receipt.size)[0] for index in indices], check).run()
    else:
        workers().each(len(indices), work)


def read_chunk(reader: Reader, receipt: Receipt, index: int, scratch: Buffer, *, url: str) -> memoryview:
    """One verified chunk, in ``scratch`` (page-aligned memory of one chunk)."""
    got = reader.read_into(chunk_range(index, receipt.size)[0], scratch)
    return _checked(receipt, index, memoryview(scratch), got, url=url)


def _checked(receipt: Receipt, index: int, memory: memoryview, got: int, *, url: str) -> memoryview:
    """The bytes of a chunk, of which ``got`` were read into ``memory``, if they are what the receipt says."""
    lo, hi = chunk_range(index, receipt.size)
    if got < hi - lo:
        raise IntegrityError(f"{url}/{receipt.name}: chunk {index} ends after {got} of {hi - lo} bytes")
    data = memory[: hi - lo]
    found, expected = chunk_digest(data), receipt.chunk(index)
    if found != expected:
        raise IntegrityError(
            f"{url}/{receipt.name}: chunk {index} (bytes {lo}–{hi}) is damaged: expected {expected.hex()}, found {found.hex()}"
        )
    return data


def read_header(reader: Reader, receipt: Receipt, *, url: str) -> bytes:
    """The header of a shard, all its bytes, verified against the receipt.

    Raises:
        IntegrityError: it is damaged.
    """
    data = bytearray(receipt.header_size)
    got = reader.read_into(0, data)
    found = derive("header", memoryview(data)[:got]).hex()
    if found != receipt.header_digest:
        raise IntegrityError(
            f"{url}/{receipt.name}: the header (chunk 0) is damaged: expected {receipt.header_digest}, found {found}"
        )
    return bytes(data)


def check_header(header: bytes, layout: Layout, receipt: Receipt, *, url: str) -> shard.Header:
    """The header of a shard, whose entries must be those that its layout says.

    Raises:
        IntegrityError: names the first that differs.
    """
    return shard.check(
        header,
        layout.shard_pieces(receipt.rank),
        layout=receipt.layout,
        rank=receipt.rank,
        blob=layout.has_blob(receipt.rank),
        name=f"{url}/{receipt.name}",
        size=receipt.size,
    )
