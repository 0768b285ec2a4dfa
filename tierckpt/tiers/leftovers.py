"""Which files of a store nothing refers to: retired checkpoints, saves that died, unfinished writes, unused layouts.

Deleting them is the only way in which anything ever leaves a store, and this module the only place that says what may go.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from tierckpt.format import paths
from tierckpt.format.links import parse_time
from tierckpt.tiers.base import FileInfo, Place
from tierckpt.tiers.disk import DiskPlace
from tierckpt.tiers.store import Store


@dataclass
class Leftovers:
    """What can be removed, and why.

    Attributes:
        retired: names of files of retired checkpoints whose grace has passed.
        waiting: those of retired checkpoints that readers may still use.
        dead: of saves that were never committed and never will be.
        underway: of saves that may still be going on.
        temporary: writes that did not finish.
        layouts: layouts that no manifest in the store names.
        foreign: files that do not belong to a store at all (never removed).
    """

    retired: list[FileInfo] = field(default_factory=list)
    waiting: list[FileInfo] = field(default_factory=list)
    dead: list[FileInfo] = field(default_factory=list)
    underway: list[FileInfo] = field(default_factory=list)
    temporary: list[FileInfo] = field(default_factory=list)
    layouts: list[FileInfo] = field(default_factory=list)
    foreign: list[FileInfo] = field(default_factory=list)

    @property
    def size(self) -> int:
        """Bytes of the removable files."""
        return sum(info.size for info in (*self.retired, *self.dead, *self.temporary, *self.layouts))

    @property
    def removable(self) -> list[str]:
        """Names of what can be removed, in the order in which to do it."""
        return in_order(info.name for info in (*self.retired, *self.dead, *self.temporary, *self.layouts))


def in_order(names: Iterable[str]) -> list[str]:
    """An order of removal in which a crash in between leaves no receipt without its shard."""
    return sorted(names, key=lambda name: (not name.endswith(".json"), name))


def find(
    store: Store, *, grace: float, sparing: Iterable[tuple[int, int]] = (), given_up: Iterable[tuple[int, int]] = ()
) -> Leftovers:
    """Look through the whole store.

    Args:
        grace: seconds since its retirement for which a checkpoint's files stay.
        sparing: (generation, step) that are being saved by this process, or are left alone for another reason.
        given_up: those of which this process, which had them saved, knows that they have failed.

    All other saves of the newest generation count as under way while their files are younger than ten minutes: besides the
    trainers the agents of their nodes write for it.
    """
    chain, now = store.chain, time.time()
    live = {(ref.generation, ref.step) for ref in chain.live.values()}
    retired = {(ref.generation, ref.step): parse_time(gone.time).timestamp() for ref, gone in chain.retired.items()}
    spared, failed = set(sparing), set(given_up)
    found = Leftovers()
    steps: dict[tuple[int, int], list[FileInfo]] = {}
    layouts: list[FileInfo] = []
    full: set[str] = set()
    for info in store.place.list():
        key = step_of(info.name)
        if key is not None:
            full.add(info.name.rpartition("/")[0])
        if paths.is_temporary(info.name) and info.kind == "file" and (key is None or key in live or key in spared):
            if now - info.modified >= max(grace, _UNDER_WAY):
                found.temporary.append(info)
        elif info.kind != "file" or (key is not None and not belongs(info.name)):
            found.foreign.append(info)
        elif key is not None:
            steps.setdefault(key, []).append(info)
        elif paths.parse_layout(info.name) is not None:
            layouts.append(info)
        elif info.name != paths.STORE and paths.parse_link(info.name) is None:
            found.foreign.append(info)
    for folder in _empty(store.place, full):
        if _abandoned(folder, chain.generation, failed):
            found.dead.append(FileInfo(folder, 0, now, "folder"))
    kept = []
    for key, files in steps.items():
        if key in live or key in spared:
            kept.append(key)
        elif key in retired:
            (found.retired if now - retired[key] >= grace else found.waiting).extend(files)
        elif key[0] > chain.generation or (key[0] == chain.generation and key not in failed and _young(files, now)):
            found.underway.extend(files)
        else:
            found.dead.extend(files)
    busy = bool(spared) or bool(found.underway) or bool(found.waiting)
    if layouts and not busy:
        found.layouts = _unused(store, layouts, kept)
    return found


def written_lately(store: Store) -> set[tuple[int, int]]:
    """Steps of the newest generation, beyond what it has committed, of which some rank's part was written within a day.

    The next start may put them together with what other agents hold. Who saves itself knows better what has failed.
    """
    chain, now = store.chain, time.time()
    last = max((step for generation, step in chain.committed if generation == chain.generation), default=-1)
    found = set()
    for info in store.place.list():
        part = paths.parse_receipt(info.name)
        beyond = part is not None and part.generation == chain.generation and part.step > last
        if part is not None and beyond and now - info.modified < _LATELY:
            found.add((part.generation, part.step))
    return found


def _empty(place: Place, full: set[str]) -> Iterator[str]:
    """Folders for checkpoints that hold nothing: who made or cleared them died. Only a file system has such."""
    if not isinstance(place, DiskPlace):
        return
    for generation in place.folders():
        if paths.parse_generation_dir(generation) is not None:
            steps = list(place.folders(generation))
            yield from (step for step in steps if step not in full) if steps else (generation,)


def _abandoned(folder: str, generation: int, failed: set[tuple[int, int]]) -> bool:
    """Whether an empty folder was made for a checkpoint that nobody saves any more."""
    step = paths.parse_step_dir(folder)
    made_by = step.generation if step is not None else paths.parse_generation_dir(folder)
    return made_by is not None and (made_by < generation or step in failed)


def step_of(name: str) -> tuple[int, int] | None:
    """(generation, step) of the checkpoint's folder in which a file lies; None if it lies elsewhere."""
    parts = name.split("/")
    return paths.parse_step_dir("/".join(parts[:2])) if len(parts) == 3 else None


def belongs(name: str) -> bool:
    """Whether a file in a checkpoint's folder has a name that such files have, finished or not."""
    parsers = (paths.parse_manifest, paths.parse_shard, paths.parse_receipt)
    return paths.is_temporary(name) or any(parse(name) is not None for parse in parsers)


#: Seconds without a write after which an uncommitted save of somebody else's is taken to be dead.
_UNDER_WAY = 600.0
#: The same of one that others may still hold the rest of.
_LATELY = 86400.0


def _young(files: list[FileInfo], now: float) -> bool:
    return any(now - info.modified < _UNDER_WAY for info in files)


def _unused(store: Store, layouts: list[FileInfo], steps: list[tuple[int, int]]) -> list[FileInfo]:
    """Layouts that no live checkpoint names. If a manifest cannot be read nothing is unused, to be safe."""
    from tierckpt.errors import TierckptError

    used = set()
    refs = {(ref.generation, ref.step): ref for ref in store.chain.live.values()}
    for key in steps:
        try:
            used.add(store.manifest(refs[key]).layout)
        except TierckptError:
            return []
    return [info for info in layouts if paths.parse_layout(info.name) not in used]
