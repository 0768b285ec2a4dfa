"""Does a store hold what it says? Checks the chain and the bytes, and names everything that is wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tierckpt.errors import IncompleteError, IntegrityError, StoreError, TierckptError, UntrustedError
from tierckpt.format import paths, shard
from tierckpt.format.chain import CheckpointRef
from tierckpt.format.digest import chunk_count
from tierckpt.format.layout import Layout
from tierckpt.format.layout_plan import Ranges, ranges
from tierckpt.format.manifest import Manifest
from tierckpt.format.receipt import Receipt
from tierckpt.tiers import leftovers
from tierckpt.tiers.base import Place, Reader
from tierckpt.tiers.chunks import check_header, read_chunks, read_header
from tierckpt.tiers.store import Store
from tierckpt.tiers.trust import Pins, Trust, pins_of, remember


@dataclass
class Report:
    """What a verification found.

    Attributes:
        root: what was verified.
        head: digest of the chain's newest link, and its number.
        checked: (generation, step) of the checkpoints looked at.
        bytes: of shards that were read and hashed.
        problems: everything that is wrong: ``{"kind": "damaged" | "incomplete" | "untrusted" | "foreign" | "unread",
            "message": …}``. What is unread may be sound: whoever looked was not permitted to.
        notes: what is worth knowing and no fault.
    """

    root: str
    run: str | None = None
    head: str | None = None
    head_number: int = -1
    checked: list[tuple[int, int]] = field(default_factory=list)
    bytes: int = 0
    problems: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return not self.problems

    def add(self, error: Exception) -> None:
        """Record an error as a problem."""
        kind = "untrusted" if isinstance(error, UntrustedError) else "damaged"
        if isinstance(error, IncompleteError):
            kind = "incomplete"
        elif isinstance(error, StoreError) and isinstance(error.__cause__, PermissionError):
            kind = "unread"
        self.problems.append({"kind": kind, "message": str(error)})

    def to_json(self) -> dict[str, Any]:
        """As ``tierckpt verify --json`` prints it."""
        return {
            "root": self.root,
            "run": self.run,
            "head": self.head,
            "ok": self.ok,
            "checked": [{"generation": generation, "step": step} for generation, step in self.checked],
            "bytes": self.bytes,
            "problems": self.problems,
            "notes": self.notes,
        }


Progress = Callable[[int, int], None]
"""Called with bytes done and bytes in all."""


def verify(
    place: Place,
    *,
    step: int | None = None,
    every: bool = False,
    quick: bool = False,
    trust: frozenset[str] | None = None,
    expect_head: str | None = None,
    allow_extra: bool = False,
    run: str | None = None,
    progress: Progress | None = None,
) -> Report:
    """Check the chain, and every byte of one checkpoint: the newest, ``step``, or with ``every`` all that are live.

    Args:
        quick: read no shard bytes; documents, names and sizes only.
        trust: keys that are trusted; None: those pinned, else the chain's own.
        expect_head: digest of a link that must be in the chain.
        allow_extra: files that do not belong to the store are no fault.

    Raises:
        StoreError: the store cannot be reached.
    """
    report = Report(place.url)
    try:
        store = Store.open(place)
        pins = pins_of(store)
    except (IntegrityError, UntrustedError, IncompleteError) as error:
        report.add(error)
        return report
    store.must_hold(run)
    chain = store.chain
    assert chain.head is not None
    report.run, report.head, report.head_number = store.run, chain.head.digest, chain.head.number
    _check_trust(store, Trust(trust, frozenset(), expect_head), pins, report)
    found = []
    for ref in _chosen(store, step, every, report):
        report.checked.append((ref.generation, ref.step))
        one = _Checkpoint(store, ref, report)
        if one.read():
            found.append(one)
    shards = _Shards(report, sum(one.size for one in found), progress, quick=quick)
    for one in found:
        for rank in one.ranks:
            shards.check(one, rank)
    _check_files(store, report, allow_extra=allow_extra)
    return report


def damaged(store: Store, ref: CheckpointRef) -> list[str]:
    """What is wrong with one checkpoint; every byte of it that belongs here is read."""
    report = Report(store.url)
    one = _Checkpoint(store, ref, report)
    if one.read():
        shards = _Shards(report, one.size, None, quick=False)
        for rank in one.ranks:
            shards.check(one, rank)
    return [problem["message"] for problem in report.problems]


def _check_trust(store: Store, trust: Trust, pins: Pins, report: Report) -> None:
    chain = store.chain
    found = trust.problems(chain, store.url, pins)
    for message in found:
        report.problems.append({"kind": "untrusted", "message": message})
    base = trust.base(pins)
    if base is None:
        report.notes.append(f"key {chain.links[0].key} is trusted on first use; pass --trust to pin it explicitly")
    believed = chain.trusted_by(base) if base is not None else frozenset()
    for key, endorsed in chain.keys.items():
        if not endorsed and key not in believed and not any(key in message for message in found):
            number = next(link.number for link in chain.links if link.key == key)
            report.problems.append(
                {
                    "kind": "untrusted",
                    "message": f"{store.url}/{paths.link(number)}: key {key} was introduced without the endorsement of the key "
                    "before it; if that was you (a lost key), trust it: --trust " + key,
                }
            )
    if report.ok:
        remember(chain, store.url, pins, trust.keys)


def _chosen(store: Store, step: int | None, every: bool, report: Report) -> list[CheckpointRef]:
    chain = store.chain
    if every:
        refs = sorted(chain.live.values(), key=lambda ref: (ref.generation, ref.step))
    elif step is not None:
        refs = sorted((ref for ref in chain.live.values() if ref.step == step), key=lambda ref: -ref.generation)[:1]
        if not refs:
            report.problems.append({"kind": "incomplete", "message": why_absent(store, step)})
    else:
        refs = [chain.newest] if chain.newest is not None else []
    if not refs and step is None:
        report.notes.append("no checkpoint has been committed")
    return refs


def why_absent(store: Store, step: int) -> str:
    """Why ``step`` is no checkpoint of this store."""
    chain = store.chain
    if any(ref.step == step for ref in chain.retired):
        reason = "it was retired"
    elif any(key is not None and key[1] == step for key in (leftovers.step_of(f.name) for f in store.place.list())):
        reason = "it was never committed (there are files of it, of a save that did not finish)"
    else:
        reason = "it was never saved, or only to memory"
    there = ", ".join(str(ref.step) for ref in reversed(chain.lineage()[:20])) or "none"
    return f"{store.url}: there is no checkpoint of step {step}: {reason}. Committed: {there}"


def _attempt(report: Report, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except TierckptError as error:
        report.add(error)
        return None


def check_layout(store: Store, manifest: Manifest, layout: Layout) -> None:
    """Raise IncompleteError unless the manifest lists the shards that its layout calls for, IntegrityError unless they have
    room for its tensors."""
    listed = [ref.rank for ref in manifest.shards]
    # A hostile layout can have so many writers that only counting them is too much.
    many = layout.world > 4 * len(listed) + 1024 and layout.fewest_writers > len(listed)
    wanted = [] if many else list(layout.writers)
    if layout.world != manifest.world or listed != wanted:
        raise IncompleteError(
            f"{store.url}/{paths.manifest(manifest.generation, manifest.step)}: it lists the shards of ranks "
            f"{_shown(ranges(listed))} of {manifest.world}, its layout those of {_shown(ranges(wanted)) or 'more ranks'} "
            f"of {layout.world}"
        )
    needed, stored = layout.nbytes, sum(ref.size for ref in manifest.shards)
    if needed > stored:
        raise IntegrityError(
            f"{store.url}/{paths.layout(manifest.layout)}: its tensors take {needed:,} bytes, but the shards of step "
            f"{manifest.step} have {stored:,}"
        )


def _shown(spans: Ranges) -> str:
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in spans[:20]) + (", …" if len(spans) > 20 else "")


class _Checkpoint:
    """The documents of one checkpoint."""

    def __init__(self, store: Store, ref: CheckpointRef, report: Report) -> None:
        self.store, self._ref, self._report = store, ref, report
        self.layout: Layout | None = None
        #: Ranks whose shards must be in this folder.
        self.ranks: list[int] = []
        self.size = 0

    def read(self) -> bool:
        """Read them and report what is wrong; False if the manifest cannot be used."""
        manifest = _attempt(self._report, lambda: self.store.manifest(self._ref))
        if manifest is None:
            return False
        self.manifest: Manifest = manifest
        self.layout = _attempt(self._report, self._checked_layout)
        self._find_ranks()
        here = set(self.ranks)
        self.size = sum(part.size for part in manifest.shards if part.rank in here)
        return True

    def _checked_layout(self) -> Layout:
        layout = self.store.layout(self.manifest.layout)
        check_layout(self.store, self.manifest, layout)
        return layout

    def _find_ranks(self) -> None:
        self.ranks = self.store.ranks_here(self.manifest)
        elsewhere = sorted({part.rank for part in self.manifest.shards} - set(self.ranks))
        if elsewhere:
            self._report.notes.append(
                f"step {self.manifest.step}: the shards of ranks {_shown(ranges(elsewhere))} are held by other nodes"
            )


class _Shards:
    """Checks shards, and counts."""

    def __init__(self, report: Report, total: int, progress: Progress | None, *, quick: bool) -> None:
        self._report, self._total, self._progress, self._quick = report, total, progress, quick
        self._lock = threading.Lock()

    def check(self, one: _Checkpoint, rank: int) -> None:
        """Receipt, size, header, and unless it is to be quick every chunk."""
        store = one.store
        try:
            receipt = store.receipt(one.manifest, rank)
            with store.open_shard(receipt) as reader:
                _attempt(self._report, lambda: self._check_header(reader, receipt, one))
                if not self._quick:
                    chunks = range(chunk_count(receipt.size))
                    read_chunks(reader, receipt, chunks, self._seen, url=store.url, damaged=self._damaged)
        except TierckptError as error:
            self._report.add(error)

    def _check_header(self, reader: Reader, receipt: Receipt, one: _Checkpoint) -> None:
        header = read_header(reader, receipt, url=one.store.url)
        if one.layout is not None:
            check_header(header, one.layout, receipt, url=one.store.url)
        else:
            shard.parse(header, name=f"{one.store.url}/{receipt.name}", size=receipt.size)

    def _seen(self, lo: int, hi: int, data: memoryview) -> None:
        with self._lock:
            self._report.bytes += hi - lo
            if self._progress is not None:
                self._progress(self._report.bytes, self._total)

    def _damaged(self, error: IntegrityError) -> None:
        with self._lock:
            self._report.add(error)


def _check_files(store: Store, report: Report, *, allow_extra: bool) -> None:
    found = leftovers.find(store, grace=0.0)
    for name in sorted({info.name for info in found.foreign} | _unlisted(store)):
        message = f"{store.url}/{name} does not belong to the store"
        if allow_extra:
            report.notes.append(message)
        else:
            report.problems.append({"kind": "foreign", "message": message})
    for files, what in (
        (found.retired, "of retired checkpoints"),
        (found.dead + found.underway, "of saves that were not committed"),
        (found.temporary, "of writes that did not finish"),
        (found.layouts, "of layouts that no checkpoint uses"),
    ):
        if files:
            report.notes.append(
                f"{len(files)} files {what} ({sum(f.size for f in files):,} bytes) wait for prune: {_few(f.name for f in files)}"
            )


def _unlisted(store: Store) -> set[str]:
    """Shards and receipts in the folders of live checkpoints whose manifests do not list them."""
    refs = {(ref.generation, ref.step): ref for ref in store.chain.live.values()}
    manifests: dict[CheckpointRef, Manifest | None] = {}
    found = set()
    for info in store.place.list():
        shard = paths.parse_shard(info.name) or paths.parse_receipt(info.name)
        ref = refs.get((shard.generation, shard.step)) if shard is not None else None
        if shard is None or ref is None:
            continue
        if ref not in manifests:
            try:
                manifests[ref] = store.manifest(ref)
            except TierckptError:  # named where checkpoints are checked; nobody knows what belongs here
                manifests[ref] = None
        manifest = manifests[ref]
        if manifest is not None and manifest.shard(shard.rank) is None:
            found.add(info.name)
    return found


def _few(names: Iterable[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:5]) + (", …" if len(listed) > 5 else "")
