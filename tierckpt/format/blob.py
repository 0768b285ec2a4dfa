"""The blob: the values of a shard that are not tensors, as its last entry (docs/format.md, section 7)."""

from __future__ import annotations

from collections.abc import Mapping

from tierckpt.errors import IntegrityError, StateError
from tierckpt.format import canonical, values
from tierckpt.format.canonical import JSON

NAME = "~values"
"""The name of the blob's entry in a shard. No tensor can have it."""

_SMALLEST = 1024  # bytes


def capacity(length: int) -> int:
    """Bytes that a blob of ``length`` bytes takes in a shard: a power of two, so that layouts rarely change."""
    return max(_SMALLEST, 1 << (length - 1).bit_length())


def encode(items: Mapping[str, JSON]) -> bytes:
    """The bytes of the blob that holds these encoded values by name, without the padding.

    Raises ``StateError`` when they are longer than a document may be.
    """
    pairs: list[JSON] = [[name, items[name]] for name in sorted(items, key=lambda name: name.encode("utf-8"))]
    data = canonical.encode(pairs)
    if len(data) > canonical.SIZE_LIMIT:
        raise StateError(
            f"the values of this state that are not tensors take {len(data)} bytes, but at most "
            f"{canonical.SIZE_LIMIT} may be stored; make tensors or numpy arrays of the large ones"
        )
    return data


def pad(data: bytes, size: int | None = None) -> bytes:
    """The blob padded to ``size`` bytes, by default to its `capacity`."""
    return data.ljust(capacity(len(data)) if size is None else size, b" ")


def decode(data: bytes, *, what: str) -> dict[str, JSON]:
    """The encoded values by name. Raises ``IntegrityError`` naming ``what`` if ``data`` is no padded blob."""
    bare = data.rstrip(b" ")
    if len(data) != capacity(len(bare)):
        raise IntegrityError(f"{what}: {len(bare)} bytes of values padded to {len(data)}, not {capacity(len(bare))}")
    pairs = canonical.decode(bare, what=what, depth=values.DEPTH_LIMIT + 2)
    if type(pairs) is not list:
        raise IntegrityError(f"{what}: expected an array of pairs")
    found: dict[str, JSON] = {}
    for pair in pairs:
        if type(pair) is not list or len(pair) != 2 or type(pair[0]) is not str:
            raise IntegrityError(f"{what}: expected pairs of a name and a value")
        found[pair[0]] = pair[1]
    names = [name.encode("utf-8") for name in found]
    if len(found) != len(pairs) or names != sorted(names):
        raise IntegrityError(f"{what}: the names of the values are not in order, or not different")
    return found
