"""``tierckpt explain``: what a restore would take, from where, and why nothing newer."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import click

from tierckpt.agent.coordinator import check_present
from tierckpt.agent.listing import agents
from tierckpt.cli.history import history, name_of
from tierckpt.cli.mesh import Job, Reading, parse, readings
from tierckpt.cli.output import count, moment, progress, say, say_json, size, spans, table
from tierckpt.cli.target import (
    DATA_ERRORS,
    Problem,
    json_option,
    open_store,
    problem_of,
    reports_data_errors,
    root_argument,
    say_problems,
    trust_problems,
)
from tierckpt.config import MAX_RESTARTS
from tierckpt.errors import TierckptError
from tierckpt.format import paths
from tierckpt.format.chain import Chain, CheckpointRef
from tierckpt.format.receipt import SIZE_LIMIT, Receipt
from tierckpt.restore.locate import candidates
from tierckpt.tiers import leftovers
from tierckpt.tiers.base import FileInfo
from tierckpt.tiers.content import Content
from tierckpt.tiers.store import Store
from tierckpt.tiers.verify import check_layout

#: As :class:`tierckpt.Checkpointer` has it by default.


@dataclass
class _Candidate:
    """A checkpoint that a restore would try, and why it would not do. ``size`` is in bytes."""

    ref: CheckpointRef
    size: int = 0
    problems: list[Problem] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        return {**_ref(self.ref), "usable": not self.problems, "problems": self.problems}


@dataclass
class _Other:
    """A step that a restore would not look at. ``generation`` and ``step`` name it."""

    generation: int
    step: int
    state: str
    reason: str

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "generation": self.generation, "state": self.state, "reason": self.reason}


@dataclass(frozen=True)
class _Held:
    """A step that all ranks have sealed, in the memory of an agent of this user on this machine."""

    generation: int
    step: int
    node: str

    def to_json(self) -> dict[str, Any]:
        return {"step": self.step, "generation": self.generation, "node": self.node}


@click.command(short_help="Say what a restore would take, and why nothing newer.")
@root_argument
@click.option("--mesh", metavar="NAME=N,…", help="Say which rank of such a job would read what, say dp=4,tp=2.")
@click.option(
    "--placements",
    multiple=True,
    metavar="GLOB=SPEC,…",
    help="With --mesh: how tensors are cut, say '*.weight=Shard(0):tp,Shard(0):dp' (tp cuts first) or '*=Replicate'.",
)
@json_option
@reports_data_errors(head=None, restore=None, candidates=[], others=[])
def command(root: str, mesh: str | None, placements: tuple[str, ...], as_json: bool) -> int:
    """Say which checkpoint of the store at ROOT a restore would take, from where, and why no newer one.

    With --mesh also what each rank of a job would read of it. Ranks are numbered in row-major order; a tensor that no
    glob of --placements matches is cut along its first dimension over the first one of the mesh.

    Reads documents, names and sizes, no tensor bytes: `tierckpt verify` does that. Asks this user's agents on this machine
    what they hold in memory, none elsewhere.
    """
    if mesh is None and placements:
        raise click.UsageError("--placements needs --mesh")
    job = None if mesh is None else parse(mesh, placements)
    store = open_store(root)
    problems = trust_problems(store)
    tried, notes = _try(store)
    chosen = tried[-1] if tried and not tried[-1].problems and not problems else None
    others = _others(store)
    held = [] if problems else _held(store, chosen)  # what is not trusted is not looked for in memory either
    problems += [problem for candidate in tried for problem in candidate.problems]
    told = []
    if job is not None and chosen is not None:
        with progress("planning", of_bytes=False) as show:
            told = list(readings(Content.open(store, chosen.ref), job, show))
    if as_json:
        say_json(
            {
                "root": store.url,
                "run": store.run,
                "head": store.chain.links[-1].digest,
                "generation": store.chain.generation,
                "restore": None if chosen is None else _source(store, chosen),
                **({} if job is None else {"mesh": _mesh(job, told)}),
                "candidates": [candidate.to_json() for candidate in tried],
                "memory": [one.to_json() for one in held],
                "lineage": [_ref(ref) for ref in store.chain.lineage()],
                "others": [other.to_json() for other in others],
                "notes": notes,
                "problems": problems,
            }
        )
    else:
        _say(store, chosen, held, tried, others, notes, problems)
        if job is not None:
            _say_mesh(job, told)
    return 1 if problems else 0


def _try(store: Store) -> tuple[list[_Candidate], list[str]]:
    """Candidates in the order of a restore, up to the first that is usable; and why some come last."""
    if not store.chain.lineage():
        return [], []
    refs, notes = candidates(store, step=None, max_restarts=MAX_RESTARTS)
    tried = []
    for ref in refs:
        candidate = _Candidate(ref)
        tried.append(candidate)
        try:
            manifest = store.manifest(ref)
            candidate.size = sum(shard.size for shard in manifest.shards)
            check_layout(store, manifest, store.layout(manifest.layout))
            check_present(store, manifest)
        except DATA_ERRORS as error:
            candidate.problems.append(problem_of(error))
        else:
            break
    return tried, notes


def _held(store: Store, chosen: _Candidate | None) -> list[_Held]:
    """What a restore on this machine would look at before the disk, newest first."""
    found = {
        _Held(generation["generation"], step["step"], agent["node"])
        for agent in agents()
        if agent.get("run") == store.run
        for generation in agent["generations"]
        if (generation["root"], generation["generation"]) == (store.url, store.chain.generation)
        for step in generation["steps"]
        if step["complete"] and (chosen is None or step["step"] >= chosen.ref.step)
    }
    return sorted(found, key=lambda held: (-held.step, held.node))


def _others(store: Store) -> list[_Other]:
    """Every step that is no candidate, with the reason: newest first."""
    chain = store.chain
    found = []
    for one in history(chain):
        if one.state == "abandoned":
            found.append(_Other(one.ref.generation, one.ref.step, one.state, _why_abandoned(chain, one.ref)))
        elif one.state == "retired":
            reason = f"retired at {moment(chain.retired[one.ref].time)} UTC"
            found.append(_Other(one.ref.generation, one.ref.step, one.state, reason))
    unfinished = leftovers.find(store, grace=0.0)
    for files, going in ((unfinished.underway, True), (unfinished.dead, False)):
        by_step: dict[tuple[int, int], list[FileInfo]] = {}
        for info in files:
            key = leftovers.step_of(info.name)
            if key is not None:
                by_step.setdefault(key, []).append(info)
        for (generation, step), mine in by_step.items():
            reason = _why_uncommitted(store, (generation, step), mine, going=going)
            found.append(_Other(generation, step, "uncommitted", reason))
    return sorted(found, key=lambda other: (other.step, other.generation), reverse=True)


def _why_abandoned(chain: Chain, ref: CheckpointRef) -> str:
    """Which restart left ``ref`` out of the lineage."""
    generation, origin = chain.generation, chain.begins[chain.generation].origin
    while origin is not None and origin.generation > ref.generation:
        generation, origin = origin.generation, chain.begins[origin.generation].origin
    start = "from nothing" if origin is None else f"from {name_of(origin)}"
    return f"abandoned: generation {generation} began {start}"


def _why_uncommitted(store: Store, step: tuple[int, int], files: list[FileInfo], *, going: bool) -> str:
    """How far a save came that no link commits."""
    names = [info.name for info in files]
    receipts = sorted(found.rank for name in names if (found := paths.parse_receipt(name)) is not None)
    shards = sorted(found.rank for name in names if (found := paths.parse_shard(name)) is not None)
    text = "never committed: the save " + ("may still be under way" if going else "did not finish")
    text += f"; shards of ranks {spans(shards)}" if shards else "; no shards"
    if receipts:
        world = _world(store, paths.receipt(*step, receipts[0]))
        text += f", receipts of ranks {spans(receipts)}" + (f" of {world}" if world else "")
    else:
        text += ", no receipts"
    return f"{text}, {size(sum(info.size for info in files))}"


def _world(store: Store, receipt: str) -> int | None:
    """How many ranks saved together, as a receipt says; None if that cannot be read."""
    try:
        return Receipt.decode(store.place.read(receipt, SIZE_LIMIT), what=receipt).world
    except (TierckptError, FileNotFoundError):
        return None


def _say(
    store: Store,
    chosen: _Candidate | None,
    held: list[_Held],
    tried: list[_Candidate],
    others: list[_Other],
    notes: list[str],
    problems: list[Problem],
) -> None:
    chain = store.chain
    lineage = chain.lineage()
    say(f"run {store.run}, generation {chain.generation}, head {chain.links[-1].digest}")
    it = "a restore"
    if held:
        first, *more = dict.fromkeys(f"step {one.step} (generation {one.generation})" for one in held)
        say(f"a restore would take {first}")
        say("from memory of this machine's agents" + (f", which also hold {', '.join(more)}" if more else ""))
        it = "where a node of the job has lost its memory, it"
    if chosen is not None:
        say(f"{it} would take {name_of(chosen.ref)}, {size(chosen.size)}")
        say(f"from disk: {_folder(store, chosen.ref)}")
    elif not lineage:
        say(f"{it} would find nothing: no checkpoint of this lineage has been committed")
    else:
        say(f"{it} would fail")
    for note in notes:
        say(f"put last: {note}")
    for candidate in tried:
        for problem in candidate.problems:
            say(f"{name_of(candidate.ref)} cannot be used:")
            say_problems([problem])
    say_problems([problem for problem in problems if not any(problem in one.problems for one in tried)])
    newer = [other for other in others if chosen is None or other.step > chosen.ref.step]
    for other in newer:
        say(f"step {other.step} (generation {other.generation}): {other.reason}")
    if chosen is not None and not newer and not held and chosen.ref == chain.newest:
        say("nothing newer is in this store")
    older = [ref for ref in lineage if all(ref != candidate.ref for candidate in tried)]
    if older:
        steps = ", ".join(str(ref.step) for ref in older[:10]) + (", …" if len(older) > 10 else "")
        say(f"behind it: {count(len(older), 'older checkpoint')}: {steps}")


def _mesh(job: Job, told: list[Reading]) -> dict[str, Any]:
    dimensions = [{"name": name, "size": n} for name, n in zip(job.dimensions, job.shape, strict=True)]
    return {"dimensions": dimensions, "readings": [reading.to_json(job.dimensions) for reading in told]}


def _say_mesh(job: Job, told: list[Reading]) -> None:
    if not told:
        return
    rows = [
        (
            spans(reading.ranks),
            *("*" if c is None else str(c) for c in reading.coordinate),
            size(reading.needed),
            size(reading.read),
            str(reading.chunks),
            spans(list(reading.shards)),
        )
        for reading in told
    ]
    say()
    columns = ("ranks", *job.dimensions, "needed, each", "read", "chunks", "of the shards of ranks")
    table(columns, rows, right=columns[1:-1])


def _ref(ref: CheckpointRef) -> dict[str, Any]:
    return {"step": ref.step, "generation": ref.generation, "id": ref.id}


def _source(store: Store, chosen: _Candidate) -> dict[str, Any]:
    return {**_ref(chosen.ref), "tier": "disk", "place": _folder(store, chosen.ref), "size": chosen.size}


def _folder(store: Store, ref: CheckpointRef) -> str:
    return f"{store.url}/{paths.step_dir(ref.generation, ref.step)}"
