"""Links of a chain: what each kind says, and its signed bytes (docs/format.md, section 3)."""

from __future__ import annotations

import base64
import binascii
import itertools
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from functools import cached_property
from typing import NamedTuple, TypeAlias

from tierckpt.errors import IntegrityError, UntrustedError
from tierckpt.format import canonical, digest, keys, store
from tierckpt.format.canonical import JSON, MAX_INTEGER, Fields

_PREFIX = b"tierckpt 1 link\0"  # of what is signed
_SIGNATURE = 64  # bytes
_TIME = re.compile(r"\d{4}-\d{2}-\d{2}T\d{2}:\d{2}:\d{2}\.\d{6}Z", re.ASCII)


Ranges: TypeAlias = tuple[tuple[int, int], ...]
"""Numbers as ascending, disjoint, non-adjacent ranges [first, last]."""


class CheckpointRef(NamedTuple):
    """A checkpoint of a run: its name and its id, 64 hex digits."""

    generation: int
    step: int
    id: str

    def encode(self) -> dict[str, JSON]:
        return {"generation": self.generation, "id": self.id, "step": self.step}

    @staticmethod
    def decode(value: JSON, *, what: str) -> CheckpointRef:
        """Raises ``IntegrityError`` naming ``what``."""
        fields = Fields(value, ("generation", "id", "step"), what=what)
        return CheckpointRef(fields.integer("generation", low=1), fields.integer("step"), fields.hex("id"))


@dataclass(frozen=True)
class Begin:
    """A (re)start of the run: ``origin`` is the checkpoint it continues, ``store`` the store digest."""

    generation: int
    origin: CheckpointRef | None
    store: str


@dataclass(frozen=True)
class Commit:
    """A checkpoint is complete and durable here. Retention keeps it for ever if it is ``pinned``.

    ``roots``: the ranks whose shards are in one folder, for each folder; empty when all are in the same.
    """

    checkpoint: CheckpointRef
    pinned: bool = False
    roots: tuple[Ranges, ...] = ()


@dataclass(frozen=True)
class Retire:
    """Checkpoints that are no longer to be used."""

    checkpoints: tuple[CheckpointRef, ...]


@dataclass(frozen=True)
class KeyLink:
    """A public key, 64 hex digits, may sign from this link on."""

    introduces: str


Body: TypeAlias = Begin | Commit | Retire | KeyLink

ACTIONS: dict[type, str] = {Begin: "begin", Commit: "commit", Retire: "retire", KeyLink: "key"}
_KEYS = {
    "begin": ("generation", "from", "store"),
    "commit": ("checkpoint", "pinned", "roots"),
    "retire": ("checkpoints",),
    "key": ("introduces",),
}
_COMMON = ("action", "key", "live", "number", "previous", "run", "time")


def to_ranges(numbers: Iterable[int]) -> Ranges:
    """The ranges of these numbers, which may come in any order."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if ranges and number <= ranges[-1][1] + 1:
            ranges[-1] = (ranges[-1][0], number)
        else:
            ranges.append((number, number))
    return tuple(ranges)


def from_ranges(ranges: Ranges) -> Iterator[int]:
    """The numbers in the ranges, ascending."""
    for first, last in ranges:
        yield from range(first, last + 1)


def encode_ranges(ranges: Iterable[tuple[int, int]]) -> list[JSON]:
    return [[first, last] for first, last in ranges]


def decode_ranges(value: JSON, *, what: str, below: int) -> Ranges:
    """Ranges of numbers less than ``below``. Raises ``IntegrityError`` naming ``what``."""
    found: list[tuple[int, int]] = []
    free = 0  # the smallest number that the next range may start with
    for item in value if type(value) is list else [None]:
        first, last = item if type(item) is list and len(item) == 2 else (None, None)
        if type(first) is not int or type(last) is not int or not free <= first <= last < below:
            raise IntegrityError(f"{what}: expected ascending, disjoint, non-adjacent ranges below {below}")
        found.append((first, last))
        free = last + 2
    return tuple(found)


def timestamp(moment: datetime | None = None) -> str:
    """The moment, by default now, as links write it. It must know its time zone."""
    utc = (moment or datetime.now(timezone.utc)).astimezone(timezone.utc)
    return utc.strftime("%Y-%m-%dT%H:%M:%S.%fZ").rjust(27, "0")  # %Y alone does not pad years before 1000


def parse_time(text: str) -> datetime:
    """The moment that a link's time says. Raises ``ValueError`` if it is not written as `timestamp` does."""
    if not _TIME.fullmatch(text):
        raise ValueError(f"{text[:40]!r} is not a time such as 2026-01-31T23:59:59.000000Z")
    return datetime.fromisoformat(text[:-1]).replace(tzinfo=timezone.utc)


@dataclass(frozen=True)
class Link:
    """One link. ``previous`` is the digest of the link before it, ``key`` the public key that signs, in hex.

    ``live`` are the numbers of the commit links in force after this one. A link is built without ``key`` and
    ``signature``; `sign` gives it both.
    """

    number: int
    previous: str | None
    run: str
    live: Ranges
    time: str
    body: Body
    key: str = ""
    signature: bytes = b""

    @property
    def action(self) -> str:
        return ACTIONS[type(self.body)]

    def sign(self, key: keys.SigningKey) -> Link:
        """This link, signed."""
        unsigned = replace(self, key=key.public)
        return replace(unsigned, signature=key.sign(unsigned.signed_bytes()))

    def signed_bytes(self) -> bytes:
        """What the signature is over."""
        return _PREFIX + canonical.encode(self._body())

    def check_signature(self, *, what: str) -> None:
        """Raises ``UntrustedError`` naming ``what`` unless the signature is that of ``key``."""
        if not keys.verify(self.key, self.signature, self.signed_bytes()):
            raise UntrustedError(f"{what}: the signature is not that of key {self.key}")

    def encode(self) -> bytes:
        """The bytes of the link's file. The link must be signed."""
        if len(self.signature) != _SIGNATURE:
            raise ValueError("a link must be signed before it is encoded")
        return canonical.document("link", body=self._body(), signature=base64.b64encode(self.signature).decode("ascii"))

    @cached_property
    def digest(self) -> str:
        """The link digest, hex."""
        return link_digest(self.encode())

    def _body(self) -> dict[str, JSON]:
        return {
            "action": self.action,
            "key": self.key,
            "live": encode_ranges(self.live),
            "number": self.number,
            "previous": self.previous,
            "run": self.run,
            "time": self.time,
            **_encode_body(self.body),
        }

    @staticmethod
    def decode(data: bytes, *, what: str) -> Link:
        """Raises ``IntegrityError`` naming ``what`` for anything that `encode` does not return.

        The signature is not checked here.
        """
        document = canonical.read_document(data, "link", ("body", "signature"), what=what)
        body = document.value("body")
        action = body.get("action") if type(body) is dict else None
        own = _KEYS.get(action) if type(action) is str else None
        if own is None:
            raise IntegrityError(f"{what}: action {str(action)[:40]!r} is unknown")
        fields = Fields(body, (*_COMMON, *own), what=what)
        number = fields.integer("number")
        try:
            parse_time(time := fields.string("time"))
        except ValueError as error:
            raise IntegrityError(f"{what}: {error}") from None
        if fields.value("previous") is None and number == 0:
            previous = None
        else:
            previous = fields.hex("previous")
        return Link(
            number=number,
            previous=previous,
            run=store.read_run(fields),
            live=decode_ranges(fields.value("live"), what=f"{what}: live", below=number + 1),
            time=time,
            body=_decode_body(str(action), fields),
            key=fields.hex("key"),
            signature=_signature(document),
        )


def link_digest(data: bytes) -> str:
    """The digest of a link whose file holds these bytes, hex."""
    return digest.derive("link", data).hex()


def _signature(document: Fields) -> bytes:
    text = document.string("signature")
    try:
        signature = base64.b64decode(text, validate=True) if len(text) == 88 else b""
    except (ValueError, binascii.Error):
        signature = b""
    if len(signature) != _SIGNATURE or base64.b64encode(signature).decode("ascii") != text:
        raise document.wrong("signature", f"the base64 of {_SIGNATURE} bytes")
    return signature


def _encode_body(body: Body) -> dict[str, JSON]:
    if isinstance(body, Begin):
        origin = body.origin.encode() if body.origin else None
        return {"generation": body.generation, "from": origin, "store": body.store}
    if isinstance(body, Commit):
        roots: list[JSON] = [encode_ranges(ranges) for ranges in body.roots]
        return {"checkpoint": body.checkpoint.encode(), "pinned": body.pinned, "roots": roots}
    if isinstance(body, Retire):
        return {"checkpoints": [checkpoint.encode() for checkpoint in body.checkpoints]}
    return {"introduces": body.introduces}


def _decode_roots(fields: Fields) -> tuple[Ranges, ...]:
    what = f"{fields.what}: roots"
    roots = tuple([decode_ranges(item, what=what, below=MAX_INTEGER) for item in fields.array("roots")])
    spans = sorted(span for ranges in roots for span in ranges)
    disjoint = all(before[1] < after[0] for before, after in itertools.pairwise(spans))
    if len(roots) == 1 or not all(roots) or not disjoint:
        raise fields.wrong("roots", "nothing, or at least two disjoint lists of ranks")
    return roots


def _decode_body(action: str, fields: Fields) -> Body:
    what = fields.what
    if action == "begin":
        origin = fields.value("from")
        return Begin(
            fields.integer("generation", low=1),
            None if origin is None else CheckpointRef.decode(origin, what=f"{what}: from"),
            fields.hex("store"),
        )
    if action == "commit":
        checkpoint = CheckpointRef.decode(fields.value("checkpoint"), what=f"{what}: checkpoint")
        return Commit(checkpoint, fields.boolean("pinned"), _decode_roots(fields))
    if action == "retire":
        items = fields.array("checkpoints")
        if not items:
            raise fields.wrong("checkpoints", "a non-empty array")
        return Retire(tuple([CheckpointRef.decode(item, what=f"{what}: checkpoints") for item in items]))
    return KeyLink(fields.hex("introduces"))
