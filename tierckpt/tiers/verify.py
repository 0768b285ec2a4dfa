"""Does a store hold what it says? Checks the chain and the bytes, and names everything that is wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from tierckpt.errors import IncompleteError, IntegrityError, TierckptError, UntrustedError
from tierckpt.format import paths
from tierckpt.format.chain import CheckpointRef
from tierckpt.format.digest import chunk_count
from tierckpt.format.layout import Layout
from tierckpt.format.layout_plan import Ranges, ranges
from tierckpt.format.manifest import Manifest
from tierckpt.tiers import leftovers
from tierckpt.tiers.base import Place
from tierckpt.tiers.chunks import check_header, read_chunks, read_header
from tierckpt.tiers.store import Store
from tierckpt.tiers.trust import Pins, Trust, remember


@dataclass
class Report:
    """What a verification found.

    Attributes:
        root: what was verified.
        head: digest of the chain's newest link, and its number.
        checked: (generation, step) of the checkpoints looked at.
        bytes: of shards that were read and hashed.
        problems: everything that is wrong: ``{"kind": "damaged" | "incomplete" | "untrusted" | "foreign", "message": …}``.
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
    except (IntegrityError, UntrustedError, IncompleteError) as error:
        report.add(error)
        return report
    store.must_hold(run)
    chain = store.chain
    assert chain.head is not None
    report.run, report.head, report.head_number = store.run, chain.head.digest, chain.head.number
    _check_trust(store, Trust(trust, frozenset(), expect_head), report)
    refs = _chosen(store, step, every, report)
    total = 0
    work: list[tuple[Manifest, Layout | None]] = []
    for ref in refs:
        report.checked.append((ref.generation, ref.step))
        manifest = _attempt(report, lambda ref=ref: store.manifest(ref))  # type: ignore[misc]
        if manifest is None:
            continue
        layout = _attempt(report, lambda m=manifest: _checked_layout(store, m))  # type: ignore[misc]
        work.append((manifest, layout))
        total += sum(ref.size for ref in manifest.shards)
    for manifest, layout in work:
        for part in manifest.shards:
            _check_shard(store, manifest, layout, part.rank, report, quick=quick, total=total, progress=progress)
    _check_files(store, report, allow_extra=allow_extra)
    return report


def _check_trust(store: Store, trust: Trust, report: Report) -> None:
    chain = store.chain
    pins = Pins.load(store.run)
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
        reason = "it was never saved"
    there = ", ".join(str(ref.step) for ref in reversed(chain.lineage()[:20])) or "none"
    return f"{store.url}: there is no checkpoint of step {step}: {reason}. Committed: {there}"


def _attempt(report: Report, work: Callable[[], Any]) -> Any:
    try:
        return work()
    except TierckptError as error:
        report.add(error)
        return None


def _checked_layout(store: Store, manifest: Manifest) -> Layout:
    layout = store.layout(manifest.layout)
    check_layout(store, manifest, layout)
    layout.check_tiling()
    return layout


def check_layout(store: Store, manifest: Manifest, layout: Layout) -> None:
    """Raise IncompleteError unless the manifest lists the shards that its layout calls for."""
    listed, wanted = [ref.rank for ref in manifest.shards], list(layout.writers)
    if layout.world != manifest.world or listed != wanted:
        raise IncompleteError(
            f"{store.url}/{paths.manifest(manifest.generation, manifest.step)}: it lists the shards of ranks "
            f"{_shown(ranges(listed))} of {manifest.world}, its layout those of {_shown(ranges(wanted))} of {layout.world}"
        )


def _shown(spans: Ranges) -> str:
    return ", ".join(str(a) if a == b else f"{a}–{b}" for a, b in spans[:20]) + (", …" if len(spans) > 20 else "")


def _check_shard(
    store: Store,
    manifest: Manifest,
    layout: Layout | None,
    rank: int,
    report: Report,
    *,
    quick: bool,
    total: int,
    progress: Progress | None,
) -> None:
    try:
        receipt = store.receipt(manifest, rank)
        with store.open_shard(receipt) as reader:
            header = _attempt(report, lambda: read_header(reader, receipt, url=store.url))
            if header is not None and layout is not None:
                _attempt(
                    report,
                    lambda: check_header(header, layout, manifest.layout, rank, name=f"{store.url}/{receipt.name}"),
                )
            if quick:
                return

            def seen(lo: int, hi: int, data: memoryview) -> None:
                report.bytes += hi - lo
                if progress is not None:
                    progress(report.bytes, total)

            read_chunks(reader, receipt, range(chunk_count(receipt.size)), seen, url=store.url, damaged=report.add)
    except TierckptError as error:
        report.add(error)


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
