"""Digests: BLAKE3 over chunks, and its derive-key mode, one context per use, for everything above them."""

from __future__ import annotations

from typing import TypeAlias

from blake3 import blake3

from tierckpt.errors import IntegrityError

Buffer: TypeAlias = bytes | bytearray | memoryview

CHUNK = 4 * 1024 * 1024
"""Bytes of a chunk, the unit of verification. The last chunk of a shard may be shorter."""

SIZE = 32
"""Bytes of a digest."""


def derive(domain: str, *parts: Buffer) -> bytes:
    """H(domain, the concatenation of ``parts``), 32 bytes. Parts must be contiguous."""
    hasher = blake3(derive_key_context="tierckpt 1 " + domain)
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def chunk_digest(chunk: Buffer) -> bytes:
    """The digest of one chunk, 32 bytes. The GIL is released while a large chunk is hashed."""
    return blake3(chunk).digest()


def chunk_count(size: int) -> int:
    """How many chunks ``size`` bytes have."""
    return -(-size // CHUNK)


def chunk_range(index: int, size: int) -> tuple[int, int]:
    """The bytes [lo, hi) of chunk ``index`` in a shard of ``size`` bytes. ``IndexError`` if there is none."""
    low = index * CHUNK
    if not 0 <= low < size:
        raise IndexError(f"chunk {index} of a shard of {size} bytes")
    return low, min(low + CHUNK, size)


def parse_hex(text: str, *, what: str) -> bytes:
    """The 32 bytes that 64 lower-case hex digits say. Raises ``IntegrityError`` naming ``what``."""
    try:
        value = bytes.fromhex(text)
    except ValueError:
        value = b""
    if len(value) != SIZE or value.hex() != text:
        raise IntegrityError(f"{what}: expected 64 lower-case hex digits, found {text[:80]!r}")
    return value
