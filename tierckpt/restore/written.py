"""The rest of a step that is only partly in memory: what agents have made durable before they were told to end.

A receipt is written when its shard is durable, so it says of its rank what a seal says. What vouches for the step itself, its
generation and its layout, is the part that is still in memory: receipts alone are not signed, and nothing is made of them.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from tierckpt.errors import TierckptError
from tierckpt.format import paths
from tierckpt.format.canonical import JSON
from tierckpt.format.layout import Layout
from tierckpt.format.receipt import SIZE_LIMIT, Receipt
from tierckpt.group import Group
from tierckpt.telling import warn
from tierckpt.tiers.base import Place


class Written(NamedTuple):
    """The shard of one rank in a store: its bytes (0: the rank writes nothing), its digest, and the user's metadata."""

    size: int
    digest: str
    metadata: JSON = None


@dataclass(frozen=True)
class Lack:
    """A step of which some ranks' parts are in no memory.

    Attributes:
        generation, step, world, layout: of it.
        source: a rank whose node has something of it, and so the layout.
        ranks: whose parts are in no memory, ascending.
    """

    generation: int
    step: int
    world: int
    layout: str
    source: int
    ranks: Sequence[int]


def written(
    group: Group, place: Place, run: str, lacks: Sequence[Lack], layout: Callable[[str], bytes]
) -> dict[tuple[int, int], dict[int, Written]]:
    """What the stores have of ``lacks``, by generation and step, then by rank. Collective.

    Args:
        layout: the layout file of a hash; asked where that is.
    """
    what = f"what agents have written of what is in memory of {place.url}"
    found: dict[tuple[int, int], dict[int, Written]] = {(lack.generation, lack.step): {} for lack in lacks}

    def ask(looks: Collection[int]) -> None:
        def part() -> bytes:
            said = []
            for lack in lacks:
                with _tolerant(lack, place):
                    known = found[lack.generation, lack.step]
                    ranks = [rank for rank in lack.ranks if rank not in known]
                    told = _look(place, run, lack, ranks) if group.rank in looks else {}
                    if group.rank == lack.source and 0 in looks:
                        writers = set(Layout.decode(layout(lack.layout), what="the layout").writers)
                        told.update({rank: Written(0, "") for rank in ranks if rank not in writers})
                    said += [[lack.generation, lack.step, rank, *one] for rank, one in told.items()]
            return json.dumps(said).encode() if said else b""

        for told in group.vote(what, part):
            for generation, step, rank, *one in json.loads(told or b"[]"):
                found[generation, step].setdefault(rank, Written(*one))

    ask([0])
    # On a shared root that was all; else each node may have its own.
    if len(group.leaders) > 1 and any(set(lack.ranks) - found[lack.generation, lack.step].keys() for lack in lacks):
        ask(group.leaders[1:])
    return found


@contextlib.contextmanager
def _tolerant(lack: Lack, place: Place) -> Iterator[None]:
    try:
        yield
    except TierckptError as error:
        # What cannot be put together costs this step; an older one is restored.
        warn(f"{place.url}: what was written of step {lack.step} is not looked at: {error}")


def _look(place: Place, run: str, lack: Lack, ranks: Sequence[int]) -> dict[int, Written]:
    """Of ``ranks`` what this rank's root has whole, with its receipt."""
    generation, step = lack.generation, lack.step
    there = {info.name for info in place.list(paths.step_dir(generation, step))}
    found = {}
    for rank in ranks:
        name = paths.receipt(generation, step, rank)
        if name not in there:
            continue
        try:
            receipt = Receipt.decode(place.read(name, SIZE_LIMIT), what=f"{place.url}/{name}")
        except FileNotFoundError:
            continue
        its = receipt.run, receipt.generation, receipt.step, receipt.rank, receipt.world, receipt.layout
        is_of_it = its == (run, generation, step, rank, lack.world, lack.layout)
        if is_of_it and place.size(receipt.name) == receipt.size:
            found[rank] = Written(receipt.size, receipt.shard_digest, receipt.metadata)
    return found
