"""Which checkpoints may be restored, in which order, and why not."""

from __future__ import annotations

from tierckpt.errors import AbsentError, IncompleteError
from tierckpt.format.chain import Chain, CheckpointRef
from tierckpt.tiers.store import Store
from tierckpt.tiers.verify import why_absent


def candidates(
    store: Store, *, step: int | None, max_restarts: int | None = None
) -> tuple[list[CheckpointRef], list[str]]:
    """Checkpoints to try, best first, and why some were left out.

    The lineage, newest first; an explicit ``step`` is the only candidate. A checkpoint from which the run was restarted
    ``max_restarts`` times in a row without reaching another one comes last: something in it stops progress.

    Raises:
        IncompleteError: there is none.
    """
    chain = store.chain
    if step is not None:
        return [_explicit(store, step)], []
    found = chain.lineage()
    if not found:
        raise IncompleteError(
            f"{store.url}: nothing complete to restore: no checkpoint was ever committed in this lineage{_beside(chain)}"
        )
    if max_restarts is None:
        return found, []
    stuck = _stuck(chain, max_restarts)
    left_out = [
        f"step {ref.step} (generation {ref.generation}): the run was restarted from it {count} times without reaching a new "
        "checkpoint"
        for ref, count in stuck.items()
        if ref in found
    ]
    better = [ref for ref in found if ref not in stuck]
    if not better:
        return found, []
    return better + [ref for ref in found if ref in stuck], left_out


def _beside(chain: Chain) -> str:
    """Checkpoints that an earlier start of the run left, if there are any."""
    steps = sorted({ref.step for ref in chain.live.values()}, reverse=True)
    if not steps:
        return ""
    return f"; an earlier start, which this one does not continue, left steps {', '.join(map(str, steps[:10]))} (pass step=)"


def _stuck(chain: Chain, max_restarts: int) -> dict[CheckpointRef, int]:
    """Checkpoints from which at least ``max_restarts`` of the generations since the last commit continued."""
    last_commit = next((link.number for link in reversed(chain.links) if link.action == "commit"), -1)
    counts: dict[CheckpointRef, int] = {}
    for begun in chain.begins.values():
        if begun.number > last_commit and begun.origin is not None:
            counts[begun.origin] = counts.get(begun.origin, 0) + 1
    return {ref: count for ref, count in counts.items() if count >= max_restarts}


def _explicit(store: Store, step: int) -> CheckpointRef:
    chain = store.chain
    for ref in chain.lineage():
        if ref.step == step:
            return ref
    others = sorted((ref for ref in chain.live.values() if ref.step == step), key=lambda ref: ref.generation)
    if others:
        return others[-1]
    raise AbsentError(why_absent(store, step))
