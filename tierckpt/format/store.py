"""``tierckpt.json``: what a folder is, bound by the first link of its chain."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tierckpt.errors import IntegrityError, StoreError
from tierckpt.format import canonical, digest
from tierckpt.format.canonical import JSON

ALGORITHM = "blake3-256"

_RUN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
#: The same in words.
RUN_ID = "1 to 128 of A-Z a-z 0-9 . _ -, the first a letter or a digit"


def is_run_id(run: str) -> bool:
    """Whether ``run`` is 1 to 128 of A–Z a–z 0–9 . _ - and starts with a letter or digit."""
    return _RUN.fullmatch(run) is not None


def check_run_id(run: str) -> str:
    """``run`` itself. Raises ``StoreError`` if no run may be called that."""
    if not is_run_id(run):
        raise StoreError(f"run id {run[:140]!r}: use {RUN_ID}")
    return run


def read_run(fields: canonical.Fields) -> str:
    """The run id under ``run``. Raises ``IntegrityError``."""
    run = fields.string("run")
    if not is_run_id(run):
        raise fields.wrong("run", "a run id")
    return run


@dataclass(frozen=True)
class StoreInfo:
    """What ``tierckpt.json`` says."""

    run: str

    def encode(self) -> bytes:
        requires: list[JSON] = []
        return canonical.document(
            "store", chunk=digest.CHUNK, digest=ALGORITHM, requires=requires, run=check_run_id(self.run)
        )

    @staticmethod
    def decode(data: bytes, *, what: str) -> StoreInfo:
        """Raises ``IntegrityError`` for anything that `encode` does not return."""
        fields = canonical.read_document(data, "store", ("chunk", "digest", "requires", "run"), what=what)
        if fields.value("chunk") != digest.CHUNK or fields.value("digest") != ALGORITHM:
            raise IntegrityError(f"{what}: only {ALGORITHM} of chunks of {digest.CHUNK} bytes is known here")
        return StoreInfo(read_run(fields))

    @property
    def digest(self) -> str:
        """The store digest, hex."""
        return digest.derive("store", self.encode()).hex()
