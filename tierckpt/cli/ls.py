"""``tierckpt ls``: the checkpoints of a store."""

from __future__ import annotations

from typing import Any

import click

from tierckpt.cli.history import Committed, history
from tierckpt.cli.output import compact, count, moment, say, say_json, size, table
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
from tierckpt.errors import TierckptError
from tierckpt.format.display import to_plain
from tierckpt.format.manifest import Manifest
from tierckpt.tiers.store import Store

#: Characters of metadata in the table.
_SHORT = 60


@click.command(short_help="List the checkpoints.")
@root_argument
@json_option
@reports_data_errors(head=None, checkpoints=[])
def command(root: str, as_json: bool) -> int:
    """List the checkpoints of the store at ROOT, in the order in which they were committed.

    A checkpoint is the newest one, live, pinned (never retired), abandoned (the run went on from an earlier
    one) or retired (its files are gone or may go).
    """
    store = open_store(root)
    problems = trust_problems(store)
    entries = [(one, _manifest(store, one, problems)) for one in history(store.chain)]
    head = store.chain.links[-1]
    if as_json:
        checkpoints = [_to_json(one, manifest) for one, manifest in entries]
        say_json({"head": head.digest, "run": store.run, "checkpoints": checkpoints, "problems": problems})
    else:
        say(f"run {store.run}, {count(len(store.chain.links), 'link')}, head {head.digest}")
        if entries:
            columns = ("step", "generation", "time (UTC)", "size", "world", "state", "metadata")
            rows = [_to_row(one, manifest) for one, manifest in entries]
            table(columns, rows, right=("step", "generation", "size", "world"))
        else:
            say("no checkpoint has been committed")
        say_problems(problems)
    return 1 if problems else 0


def _manifest(store: Store, one: Committed, problems: list[Problem]) -> Manifest | None:
    """The manifest; None if a retired checkpoint has none any more. That a live one has none is a problem."""
    try:
        return store.manifest(one.ref)
    except DATA_ERRORS as error:
        if one.state != "retired":
            problems.append(problem_of(error))
    except TierckptError:
        if one.state != "retired":
            raise
    return None


def _to_json(one: Committed, manifest: Manifest | None) -> dict[str, Any]:
    return {
        "step": one.ref.step,
        "generation": one.ref.generation,
        "id": one.ref.id,
        "time": one.time,
        "state": one.state,
        "pinned": one.pinned,
        "size": None if manifest is None else sum(shard.size for shard in manifest.shards),
        "world": None if manifest is None else manifest.world,
        "metadata": None if manifest is None else to_plain(manifest.metadata),
    }


def _to_row(one: Committed, manifest: Manifest | None) -> tuple[str, ...]:
    entry = _to_json(one, manifest)
    state = f"{one.state}, pinned" if one.pinned and one.state != "pinned" else one.state
    return (
        str(one.ref.step),
        str(one.ref.generation),
        moment(one.time),
        "" if manifest is None else size(entry["size"]),
        "" if manifest is None else str(manifest.world),
        state,
        "" if entry["metadata"] is None else compact(entry["metadata"], _SHORT),
    )
