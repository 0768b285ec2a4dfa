"""Questions to a store, and its clean-up: no torch, no group of processes."""

from __future__ import annotations

import os
from typing import Any

from tierckpt.agent.prune import Pruned
from tierckpt.agent.prune import prune as prune_place
from tierckpt.config import READERS_GRACE, Retention, retention
from tierckpt.errors import IncompleteError
from tierckpt.tiers import trust as trusting
from tierckpt.tiers import verify as verifying
from tierckpt.tiers.disk import DiskPlace
from tierckpt.tiers.store import Store
from tierckpt.tiers.verify import Report


def latest(root: str | os.PathLike[str], *, run: str | None = None) -> int | None:
    """The step that a restore would take if its bytes verify; None if nothing was ever committed."""
    found = steps(root, run=run)
    return found[-1] if found else None


def steps(root: str | os.PathLike[str], *, run: str | None = None) -> list[int]:
    """Steps that can be restored, ascending: the live checkpoints of the lineage."""
    place = DiskPlace.at(root)
    try:
        store = Store.open(place)
    except IncompleteError:
        return []
    store.must_hold(run)
    return sorted({ref.step for ref in store.chain.lineage()})


def verify(
    root: str | os.PathLike[str],
    step: int | None = None,
    *,
    every: bool = False,
    quick: bool = False,
    deep: bool = False,
    trust: Any = None,
    expect_head: str | None = None,
    allow_extra: bool = False,
    run: str | None = None,
    progress: verifying.Progress | None = None,
) -> Report:
    """Check the chain, and every byte of one checkpoint: the newest, or ``step``, or with ``every`` all of them.

    Args:
        quick: read no shard bytes.
        deep: also every further copy of the bytes; a folder has none, so it is the same as the default there.
        trust: public keys (hex or paths) to trust instead of those pinned.
        expect_head: digest of a link that the chain must contain.
        allow_extra: files that do not belong to the store are no fault.
        progress: called with bytes done and bytes in all.

    Returns:
        A report; ``.ok`` and ``.problems``.

    Raises:
        StoreError: the store cannot be reached.
    """
    return verifying.verify(
        DiskPlace.at(root),
        step=step,
        every=every,
        quick=quick,
        trust=trusting.trusted_keys(trust),
        expect_head=expect_head,
        allow_extra=allow_extra,
        run=run,
        progress=progress,
    )


def prune(
    root: str | os.PathLike[str],
    keep: int | Retention | None = None,
    *,
    grace: float = READERS_GRACE,
    dry_run: bool = False,
    key: Any = None,
    trust: Any = None,
    run: str | None = None,
) -> Pruned:
    """Retire checkpoints that ``keep`` lets go, and remove files that nothing refers to any more.

    Args:
        keep: how many checkpoints stay, or a policy; None retires none and only removes left-overs.
        grace: seconds since its retirement for which a checkpoint's files stay, for readers.
        dry_run: say what would be done, and do nothing.
        key: the private key that signs, or its path.

    Raises:
        IncompleteError, IntegrityError: a checkpoint that is to stay is not whole; nothing was retired.
        UntrustedError: the store is not to be believed.
    """
    place = DiskPlace.at(root)
    return prune_place(
        place,
        retention(keep),
        grace=grace,
        dry_run=dry_run,
        key=key,
        trusted=trusting.trusted_keys(trust),
        run=run,
    )
