"""The checkpoint that a command is about: chosen, and whether a restore by this user would believe it."""

from __future__ import annotations

from typing import Any

from tierckpt.cli.target import Problem, open_store, trust_problems
from tierckpt.errors import IncompleteError
from tierckpt.format.chain import CheckpointRef
from tierckpt.restore.locate import candidates
from tierckpt.tiers.content import Content
from tierckpt.tiers.store import Store


def choose(store: Store, step: int | None) -> CheckpointRef:
    """The newest checkpoint of the lineage, or that of ``step``. Raises ``IncompleteError`` if there is none."""
    if step is None and not store.chain.lineage():
        raise IncompleteError(f"{store.url}: no checkpoint has been committed in this lineage")
    return candidates(store, step=step)[0][0]


def open_content(root: str, step: int | None) -> tuple[Content, list[Problem]]:
    """The checkpoint of the store at ROOT, and why a restore would not believe the store.

    Raises:
        StoreError: there is no store.
        IntegrityError, IncompleteError, UntrustedError: it is damaged, or has no such checkpoint.
    """
    store = open_store(root)
    return Content.open(store, choose(store, step)), trust_problems(store)


def described(content: Content) -> dict[str, Any]:
    """Which checkpoint, for ``--json``."""
    manifest = content.manifest
    return {
        "root": content.store.url,
        "run": manifest.run,
        "step": manifest.step,
        "generation": manifest.generation,
        "id": manifest.id,
        "world": manifest.world,
    }
