"""Shards: the header of the ``.safetensors`` file that one rank saves (docs/format.md, section 4).

The header is a pure function of the layout, so a reader that knows the layout knows every byte of it.
"""

from __future__ import annotations

import math
import re
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from json.decoder import scanstring  # type: ignore[attr-defined]
from json.encoder import encode_basestring
from operator import lt
from typing import NamedTuple, NoReturn

from tierckpt.errors import IntegrityError, LayoutError
from tierckpt.format import blob as blobs

ALIGNMENT = 4096
"""Bytes of which the header size is a multiple."""

HEADER_LIMIT = 100_000_000
"""Bytes of JSON in a header, padding included. Other readers of safetensors have the same limit."""


class DType(NamedTuple):
    """A logical dtype: bytes of an item, and the dtype under which safetensors readers see it."""

    size: int
    stored: str


DTYPES: dict[str, DType] = {
    "bool": DType(1, "BOOL"),
    "uint8": DType(1, "U8"),
    "int8": DType(1, "I8"),
    "uint16": DType(2, "U16"),
    "int16": DType(2, "I16"),
    "uint32": DType(4, "U32"),
    "int32": DType(4, "I32"),
    "uint64": DType(8, "U64"),
    "int64": DType(8, "I64"),
    "float16": DType(2, "F16"),
    "bfloat16": DType(2, "BF16"),
    "float32": DType(4, "F32"),
    "float64": DType(8, "F64"),
    "float8_e5m2": DType(1, "F8_E5M2"),
    "float8_e4m3fn": DType(1, "F8_E4M3"),
    # Not every reader of safetensors knows these, so they are stored as bytes.
    "float8_e4m3fnuz": DType(1, "U8"),
    "float8_e5m2fnuz": DType(1, "U8"),
    "float8_e8m0fnu": DType(1, "U8"),
    "float4_e2m1fn_x2": DType(1, "U8"),
    "complex32": DType(4, "U8"),
    "complex64": DType(8, "U8"),
    "complex128": DType(16, "U8"),
}
"""By the names that torch uses."""

_STORED_SIZES = {dtype.stored: dtype.size for dtype in DTYPES.values() if dtype.stored != "U8"} | {"U8": 1}


def dtype(name: str) -> DType:
    """Raises ``LayoutError`` for a dtype that this version cannot store."""
    found = DTYPES.get(name)
    if found is None:
        raise LayoutError(f"dtype {name} cannot be stored; known are {', '.join(DTYPES)}")
    return found


Piece = tuple[str, int, str, tuple[int, ...]]
"""Tensor, k (-1: the only piece of the tensor in this shard), logical dtype, shape of the box."""


class Entry(NamedTuple):
    """One piece in a shard: ``nbytes`` bytes at ``offset`` from the start of the file.

    ``dtype`` is logical and ``shape`` that of the piece's box; the dtype of the blob is ``None``. ``k`` is -1
    for the only piece of its tensor.
    """

    name: str
    tensor: str
    k: int
    dtype: str | None
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class Header:
    """The header of a shard that is written.

    Attributes:
        data: all of it.
        pieces: in the order of the shard.
        offsets: the bytes of the file at which they begin; the last one, where the blob begins or the shard ends.
        blob: the capacity of the blob in bytes; None if there is none.
    """

    data: bytes
    pieces: Sequence[Piece]
    offsets: Sequence[int]
    blob: int | None

    @property
    def header_size(self) -> int:
        return len(self.data)

    @property
    def size(self) -> int:
        """Bytes of the whole shard."""
        return self.offsets[-1] + (self.blob or 0)

    @cached_property
    def entries(self) -> tuple[Entry, ...]:
        """Of all pieces and of the blob."""
        found = [
            Entry(_name(tensor, k), tensor, k, kind, shape, at, end - at)
            for (tensor, k, kind, shape), (at, end) in zip(self.pieces, pairwise(self.offsets), strict=True)
        ]
        if self.blob is not None:
            found.append(Entry(blobs.NAME, blobs.NAME, -1, None, (self.blob,), self.offsets[-1], self.blob))
        return tuple(found)


class StoredEntry(NamedTuple):
    """One piece as a header that was read describes it: dtype and shape are those of safetensors."""

    name: str
    tensor: str
    k: int
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


@dataclass(frozen=True)
class StoredHeader:
    """A header that was read. It contradicts neither itself nor the size of the shard."""

    data: bytes
    entries: tuple[StoredEntry, ...]
    size: int
    layout: str
    rank: int

    @property
    def header_size(self) -> int:
        return len(self.data)

    @property
    def blob(self) -> StoredEntry | None:
        """The entry of the blob, the last one, if there is a blob."""
        return self.entries[-1] if self.entries[-1].name == blobs.NAME else None


def build(pieces: Iterable[Piece], *, layout: str, rank: int, blob: int | None) -> Header:
    """The header of the shard of ``rank`` that holds these pieces, given in any order, and a blob.

    ``layout`` is the layout hash, ``blob`` the capacity of the blob in bytes, ``None`` if there is none.
    Raises ``LayoutError`` for dtypes that cannot be stored, pieces without elements, names that occur twice,
    a shard without bytes, and a header above the limit of safetensors.
    """
    pieces = _ordered(list(pieces))
    known: dict[tuple[str, tuple[int, ...]], tuple[int, str]] = {}
    lines = [_metadata(layout, rank)]
    offsets = [0]
    at, begin = 0, "0"
    last_kind: object = None
    last_shape: object = None
    nbytes, shown = 0, ""
    for tensor, k, kind, shape in pieces:
        if shape is not last_shape or kind is not last_kind:  # neighbours are often alike
            last_kind, last_shape = kind, shape
            form = known.get((kind, shape))
            if form is None:
                form = known[kind, shape] = _form(tensor, kind, shape)
            nbytes, shown = form
        at += nbytes
        end = str(at)
        lines.append(f"{encode_basestring(tensor if k < 0 else _name(tensor, k))}{shown}{begin},{end}]}}")
        offsets.append(at)
        begin = end
    if blob is not None:
        if blob != blobs.capacity(blob):
            raise LayoutError(f"a blob cannot have a capacity of {blob} bytes")
        lines.append(f'"{blobs.NAME}":{{"dtype":"U8","shape":[{blob}],"data_offsets":[{at},{at + blob}]}}')
    if len(lines) == 1:
        raise LayoutError(f"rank {rank} stores nothing, so it has no shard")
    data = _pad(("{" + ",".join(lines) + "}").encode("utf-8"))
    if len(data) - 8 > HEADER_LIMIT:
        raise LayoutError(
            f"the header of the shard of rank {rank} would take {len(data) - 8} bytes for {len(lines) - 1} "
            f"pieces, but at most {HEADER_LIMIT} are allowed; store fewer or larger tensors"
        )
    start = len(data)
    return Header(data, pieces, array("q", [offset + start for offset in offsets]), blob)


def _ordered(pieces: list[Piece]) -> list[Piece]:
    """In the order of the shard: by descending size of the items, then by name and k."""
    names = [piece[0] for piece in pieces]
    # A layout gives them by name already, most often with one dtype: then nothing has to be sorted.
    if not all(map(lt, names, names[1:])):
        pieces = sorted(pieces, key=lambda piece: (piece[0].encode("utf-8"), piece[1]))
        for one, other in pairwise(pieces):
            if one[:2] == other[:2]:
                raise LayoutError(f"{_name(*one[:2])}: the shard holds two pieces of one name")
    sizes = {kind: dtype(kind).size for kind in {piece[2] for piece in pieces}}
    if len(set(sizes.values())) > 1:
        pieces = sorted(pieces, key=lambda piece: -sizes[piece[2]])
    return pieces


def _form(tensor: str, kind: str, shape: tuple[int, ...]) -> tuple[int, str]:
    """Bytes of a piece, and what stands in its entry between its name and its offsets."""
    size, stored = DTYPES[kind]
    nbytes = math.prod(shape) * size
    if nbytes <= 0:
        raise LayoutError(f"{tensor}: a piece of shape {list(shape)} has no elements and is not stored")
    as_bytes = (size,) if stored == "U8" and kind != "uint8" else ()
    shown = ",".join(map(str, (*shape, *as_bytes)))
    return nbytes, f':{{"dtype":"{stored}","shape":[{shown}],"data_offsets":['


def _name(tensor: str, k: int) -> str:
    return tensor if k < 0 else f"{tensor}#{k}"


def _metadata(layout: str, rank: int) -> str:
    return f'"__metadata__":{{"format":"pt","tierckpt":"shard 1","layout":"{layout}","rank":"{rank}"}}'


def _pad(text: bytes) -> bytes:
    size = -(-(8 + len(text)) // ALIGNMENT) * ALIGNMENT
    return (size - 8).to_bytes(8, "little") + text.ljust(size - 8, b" ")


def header_size(first: bytes, *, name: str, size: int) -> int:
    """The header size that the first 8 bytes of a shard of ``size`` bytes say.

    Raises ``IntegrityError`` naming the shard if no header can have that size.
    """
    length = int.from_bytes(first[:8], "little")
    if len(first) < 8 or length > HEADER_LIMIT or (8 + length) % ALIGNMENT or 8 + length >= size:
        raise IntegrityError(f"{name}: a shard of {size} bytes cannot have a header of {length} bytes")
    return 8 + length


_NUMBER = r"(?:0|[1-9][0-9]{0,15})"
_START = re.compile(
    r'\{"__metadata__":\{"format":"pt","tierckpt":"shard 1","layout":"([0-9a-f]{64})","rank":"(' + _NUMBER + r')"\}'
)
_ENTRY = re.compile(
    rf':\{{"dtype":"([A-Z0-9_]{{1,16}})","shape":\[((?:{_NUMBER}(?:,{_NUMBER}){{0,255}})?)\],'
    rf'"data_offsets":\[({_NUMBER}),({_NUMBER})\]\}}'
)
_PIECE = re.compile(rf"([^#]+)(?:#({_NUMBER}))?")


def parse(data: bytes, *, name: str, size: int) -> StoredHeader:
    """The header of a shard of ``size`` bytes, from its first `header_size` bytes.

    Raises ``IntegrityError`` naming the shard for anything that `build` does not return, as far as that can
    be told without the layout; `check` tells the rest. Safe for hostile bytes, in linear time and memory.
    """
    if header_size(data, name=name, size=size) != len(data):
        raise IntegrityError(f"{name}: {len(data)} bytes are not the whole header")
    try:
        return _parse(data, size)
    except ValueError as error:  # of UTF-8, of strings, and those raised below
        raise IntegrityError(f"{name}: malformed header: {error}") from None


def _parse(data: bytes, size: int) -> StoredHeader:
    text = data[8:].decode("utf-8")
    start = _START.match(text)
    if start is None:
        raise ValueError("it does not start as that of a shard of format 1")
    entries: list[StoredEntry] = []
    at = len(data)
    position = start.end()
    while text.startswith(',"', position):
        begin = position + 1
        name, position = scanstring(text, begin + 1)
        found = _ENTRY.match(text, position)
        if found is None or encode_basestring(name) != text[begin:position]:
            raise ValueError(f"entry {len(entries)}, {name[:200]!r}, is not written as it should be")
        position = found.end()
        entry = _entry(name, found, at, len(data))
        _follows(entry, entries)
        entries.append(entry)
        at += entry.nbytes
    _ends(entries)
    if at != size:
        raise ValueError(f"its entries end at byte {at} of {size}")
    if _pad(text[: position + 1].encode("utf-8")) != data or not text.startswith("}", position):
        raise ValueError("it is not padded as it should be, or goes on after its end")
    if len({entry.tensor for entry in entries}) != sum(entry.k <= 0 for entry in entries):
        raise ValueError("a name occurs twice")
    return StoredHeader(data, tuple(entries), size, start[1], int(start[2]))


def _entry(name: str, found: re.Match[str], at: int, start: int) -> StoredEntry:
    kind, dimensions = found[1], found[2]
    low, high = int(found[3]), int(found[4])
    shape = tuple(map(int, dimensions.split(","))) if dimensions else ()
    item = _STORED_SIZES.get(kind)
    piece = _PIECE.fullmatch(name)
    if item is None or piece is None:
        raise ValueError(f"{name[:200]!r} has dtype {kind} or a name that no entry has")
    if low != at - start:
        raise ValueError(f"{name[:200]!r} starts at {low} of the data, the entry before it ends at {at - start}")
    if high <= low or math.prod(shape) * item != high - low:
        raise ValueError(f"{name[:200]!r}: {kind} of shape {list(shape)[:20]} does not take {high - low} bytes")
    return StoredEntry(name, piece[1], int(piece[2]) if piece[2] else -1, kind, shape, at, high - low)


def _follows(entry: StoredEntry, before: Sequence[StoredEntry]) -> None:
    """Raise unless the pieces of each tensor are together, numbered from 0, and at least two if numbered."""
    last = before[-1] if before else None
    if last is not None and last.name == blobs.NAME:
        raise ValueError(f"{entry.name[:200]!r} comes after the blob")
    same = last is not None and last.tensor == entry.tensor
    if last is not None and last.k == 0 and not (same and entry.k == 1):
        raise ValueError(f"{last.name[:200]!r} is the only piece of its tensor")
    if entry.k != (last.k + 1 if same and last is not None else min(entry.k, 0)):
        raise ValueError(f"{entry.name[:200]!r} is out of order")


def _ends(entries: Sequence[StoredEntry]) -> None:
    if not entries:
        raise ValueError("it has no entries")
    last = entries[-1]
    if last.k == 0:
        raise ValueError(f"{last.name[:200]!r} is the only piece of its tensor")
    if last.name == blobs.NAME and (last.dtype != "U8" or last.shape != (blobs.capacity(last.nbytes),)):
        raise ValueError("its blob is not one")


_BLOB_CAPACITY = re.compile(
    rb'"~values":\{"dtype":"U8","shape":\[([0-9]{1,16})\],"data_offsets":\[[0-9]+,[0-9]+\]\}\} *'
)


def check(data: bytes, pieces: Iterable[Piece], *, layout: str, rank: int, blob: bool, name: str, size: int) -> Header:
    """The header that was read (all of it), if its entries are exactly these pieces, and a blob if ``blob``.

    ``size``: bytes of the shard. Raises ``IntegrityError`` naming the shard and the first entry that differs.
    """
    pieces = list(pieces)
    # The layout says every byte but the capacity of the blob: what is as it should be need not be parsed.
    tail = data.rfind(b'"~values"', -_TAIL if len(data) > _TAIL else 0)
    found = _BLOB_CAPACITY.fullmatch(data, tail) if blob and tail >= 0 else None
    if found is not None or not blob:
        capacity = int(found[1]) if found is not None else None
        if capacity is None or capacity == blobs.capacity(capacity):
            wanted = build(pieces, layout=layout, rank=rank, blob=capacity)
            if wanted.data == data and wanted.size == size:
                return wanted
    _explain(parse(data, name=name, size=size), pieces, layout=layout, rank=rank, blob=blob, name=name)
    raise AssertionError("unreachable")


_TAIL = 16384  # bytes from the end of a header in which the entry of the blob is found


def _explain(
    header: StoredHeader, pieces: Iterable[Piece], *, layout: str, rank: int, blob: bool, name: str
) -> NoReturn:
    """Raise ``IntegrityError`` saying how a header differs from what it should be."""
    if (header.layout, header.rank) != (layout, rank):
        raise IntegrityError(
            f"{name}: the header is of rank {header.rank} and layout {header.layout}, "
            f"not of rank {rank} and layout {layout}"
        )
    stored = header.blob
    if (stored is not None) != blob:
        raise IntegrityError(f"{name}: the layout says that there is {'a' if blob else 'no'} blob")
    wanted = build(pieces, layout=layout, rank=rank, blob=stored.nbytes if stored else None)
    for expected, found in zip(wanted.entries, header.entries, strict=False):
        if expected.name != found.name:
            raise IntegrityError(f"{name}: expected the entry {expected.name!r}, found {found.name!r}")
        if expected.offset != found.offset or expected.nbytes != found.nbytes:
            raise IntegrityError(f"{name}: the entry {found.name!r} is not where the layout says")
    raise IntegrityError(
        f"{name}: {len(header.entries)} entries that differ in dtype, shape or number from the "
        f"{len(wanted.entries)} of the layout"
    )
