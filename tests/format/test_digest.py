"""Protects the digests: the same bytes have the same digest for ever, and uses never share one."""

from __future__ import annotations

from itertools import pairwise

import pytest
from blake3 import blake3

from tierckpt.errors import IntegrityError
from tierckpt.format import digest
from tierckpt.format.digest import CHUNK


def test_golden() -> None:
    assert digest.chunk_digest(b"").hex() == "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
    assert digest.derive("shard", b"ab", b"c") == digest.derive("shard", memoryview(b"abc"))
    assert digest.derive("shard", b"abc").hex() == GOLDEN_SHARD
    assert digest.derive("link", b"abc").hex() != GOLDEN_SHARD
    assert digest.derive("shard", b"abc") == blake3(b"abc", derive_key_context="tierckpt 1 shard").digest()


GOLDEN_SHARD = "5ed9b10c9459ab8a3d0f7b1e0d60fee0517285955ebd91e8a180463b960394f2"


@pytest.mark.parametrize("size", [1, CHUNK - 1, CHUNK, CHUNK + 1, 3 * CHUNK])
def test_chunks_tile_the_shard(size: int) -> None:
    ranges = [digest.chunk_range(i, size) for i in range(digest.chunk_count(size))]
    assert ranges[0][0] == 0 and ranges[-1][1] == size
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    assert all(0 < high - low <= CHUNK for low, high in ranges)
    for index in (-1, len(ranges)):
        with pytest.raises(IndexError):
            digest.chunk_range(index, size)


def test_nothing_has_no_chunks() -> None:
    assert digest.chunk_count(0) == 0


@pytest.mark.parametrize("text", ["", "0" * 63, "0" * 65, "A" * 64, " " + "0" * 63, "é" * 64, "0" * 62 + "0x"])
def test_parse_hex_takes_one_spelling(text: str) -> None:
    assert digest.parse_hex("0a" * 32, what="x") == b"\n" * 32
    with pytest.raises(IntegrityError, match="the digest"):
        digest.parse_hex(text, what="the digest")
