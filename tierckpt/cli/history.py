"""All that a chain says of its checkpoints, committed in this order."""

from __future__ import annotations

from typing import NamedTuple

from tierckpt.format.chain import Chain, CheckpointRef


class Committed(NamedTuple):
    """A checkpoint that was ever committed.

    ``time`` is that of its commit link. ``state``: ``"newest"``; ``"retired"``; ``"abandoned"``, live but not
    in the lineage; ``"pinned"``, never to be retired; else ``"live"``. Newest and abandoned ones may be
    pinned, too.
    """

    ref: CheckpointRef
    time: str
    state: str
    pinned: bool


def history(chain: Chain) -> list[Committed]:
    """In the order of their commit links."""
    lineage = set(chain.lineage())
    commits = (link for link in chain.links if link.action == "commit")
    found = []
    for link, ((generation, step), id) in zip(commits, chain.committed.items(), strict=True):
        ref = CheckpointRef(generation, step, id)
        pinned = ref in chain.pinned
        if ref in chain.retired:
            state = "retired"
        elif ref == chain.newest:
            state = "newest"
        elif ref not in lineage:
            state = "abandoned"
        else:
            state = "pinned" if pinned else "live"
        found.append(Committed(ref, link.time, state, pinned))
    return found


def name_of(ref: CheckpointRef) -> str:
    """``step 3 (generation 1)``."""
    return f"step {ref.step} (generation {ref.generation})"
