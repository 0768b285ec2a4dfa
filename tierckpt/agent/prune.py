"""Clean-up from outside of the run: retire by policy, remove what is left over. The only deleter besides the coordinator."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

from tierckpt.agent.coordinator import check_present, to_retire
from tierckpt.config import Retention
from tierckpt.errors import IntegrityError, StoreError
from tierckpt.format.chain import Chain, CheckpointRef, Link
from tierckpt.format.keys import SigningKey
from tierckpt.tiers import leftovers, trust
from tierckpt.tiers.base import Place
from tierckpt.tiers.store import Store
from tierckpt.tiers.verify import damaged


@dataclass
class Pruned:
    """What was done, or with ``dry_run`` would be.

    Attributes:
        retired: checkpoints that are no longer to be used.
        removed: files that were removed; size: their bytes.
        waiting: files of retired checkpoints that stay until their grace has passed.
    """

    retired: list[CheckpointRef] = field(default_factory=list)
    removed: list[str] = field(default_factory=list)
    size: int = 0
    waiting: list[str] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        """As ``tierckpt prune --json`` prints it."""
        return {
            "retired": [{"generation": ref.generation, "step": ref.step, "id": ref.id} for ref in self.retired],
            "removed": self.removed,
            "bytes": self.size,
            "waiting": self.waiting,
        }


def prune(
    place: Place,
    policy: Retention | None,
    *,
    grace: float,
    dry_run: bool,
    key: str | os.PathLike[str] | SigningKey | None,
    trusted: frozenset[str] | None,
    run: str | None,
) -> Pruned:
    """See :func:`tierckpt.prune`."""
    store = Store.open(place)
    store.must_hold(run)
    trust.Trust(trusted, trust.held_keys(store.run, key)).check(store)
    done = Pruned(retired=_going(store.chain, policy))
    if done.retired:
        staying = [ref for ref in store.chain.lineage() if ref not in done.retired]
        for ref in staying:
            check_present(store, store.manifest(ref))
        # Whatever is to go, one checkpoint stays of which every byte was just read.
        found_damage: list[str] = []
        for ref in staying:
            damage = damaged(store, ref)
            if not damage:
                break
            found_damage += damage
        else:
            raise IntegrityError(
                f"{store.url}: nothing was retired, since nothing that is to stay is whole: " + "; ".join(found_damage)
            )
        if not dry_run:
            signer = _signer(store, key)
            store.publish(lambda chain: _retire(chain, policy), signer)
    found = leftovers.find(store, grace=grace, sparing=leftovers.written_lately(store))
    if dry_run:
        gone = {(ref.generation, ref.step) for ref in done.retired}
        files = found.waiting if grace > 0 else found.retired
        files += [info for info in place.list() if leftovers.step_of(info.name) in gone]
    else:
        place.remove(found.removable)
    done.removed = found.removable
    done.size = found.size
    done.waiting = sorted(info.name for info in found.waiting)
    return done


def _signer(store: Store, key: str | os.PathLike[str] | SigningKey | None) -> SigningKey:
    """A key that the chain knows: a stranger's signature would make it untrusted for everybody else."""
    if key is not None or trust.held_keys(store.run, None):
        signer = trust.signing_key(store.run, key)
        if signer.public in store.chain.keys:
            return signer
    raise StoreError(
        f"{store.url}: retiring checkpoints takes the private key that signs for run {store.run}, and it is not at hand: "
        "pass it (key=, --key, TIERCKPT_KEY)"
    )


def _going(chain: Chain, policy: Retention | None) -> list[CheckpointRef]:
    return to_retire(chain, policy, chain.newest) if policy is not None and chain.newest is not None else []


def _retire(chain: Chain, policy: Retention | None) -> Link | None:
    going = _going(chain, policy)
    return chain.retire(going) if going else None
