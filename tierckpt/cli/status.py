"""``tierckpt status``: the agents of this user on this machine."""

from __future__ import annotations

import sys
import time
from typing import Any

import click

from tierckpt.agent.listing import agents
from tierckpt.agent.runtime import runtime_folder, unusable
from tierckpt.cli.output import count, say, say_json, size, table
from tierckpt.cli.target import json_option


@click.command(short_help="Show this user's agents and what they hold.")
@json_option
@click.option("--watch", type=click.FloatRange(min=0.1), metavar="SECONDS", help="Show it again every so many seconds.")
def command(as_json: bool, watch: float | None) -> int:
    """Show the agents of this user on this machine: runs, steps held, memory, how far the disk lags, last errors.

    Status 1 when an agent does not answer.
    """
    while True:
        found = agents()
        if as_json:
            say_json({"agents": found})
        else:
            if watch is not None and sys.stdout.isatty():
                click.clear()
            _show(found)
        if watch is None:
            return 1 if any("problem" in one for one in found) else 0
        time.sleep(watch)


def _show(found: list[dict[str, Any]]) -> None:
    if not found:
        folder, why = runtime_folder(make=False), unusable()
        say(f"no agent of this user runs here{'' if folder is None else f': there is no socket in {folder}'}")
        if why:
            say(f"{why}; agents that can use it are not seen here")
    for number, one in enumerate(found):
        if number:
            say()
        if "problem" in one:
            say(f"{one['socket']}: {one['problem']}")
            continue
        service = (", a service" if one["service"] else "") + (", told to end" if one["ending"] else "")
        say(f"run {one['run']} on node {one['node']}: process {one['pid']}, up {one['seconds']} s{service}")
        say(f"memory: {size(one['held'])} of {size(one['budget'])} in {count(_slots(one), 'slot')}")
        if one["metrics"]:
            say(f"metrics at http://127.0.0.1:{one['metrics']}/metrics")
        rows = [_row(generation) for generation in one["generations"]]
        if rows:
            columns = ("generation", "ranks", "sealed", "on disk", "lag", "held", "root")
            table(columns, rows, right=("generation", "sealed", "on disk", "lag"))
        for error in one["errors"][-3:]:
            say(f"error: {error}")


def _slots(one: dict[str, Any]) -> int:
    return sum(len(generation["slots"]) for generation in one["generations"])


def _row(generation: dict[str, Any]) -> tuple[str, ...]:
    ranks = list(generation["ranks"].values())
    alive = ranks.count("alive")
    state = "fenced" if generation["fenced"] else f"{alive} of {len(ranks)} alive"
    sealed, durable = generation["sealed"], generation["durable"]
    lag = "" if sealed is None else str(sealed - durable) if durable is not None else "all"
    held = ", ".join(
        f"{step['step']}{'' if step['complete'] else '?'}{' → disk' if step['due'] else ''}"
        for step in generation["steps"]
    )
    return (
        str(generation["generation"]),
        state,
        "" if sealed is None else str(sealed),
        "" if durable is None else str(durable),
        lag,
        held,
        generation["root"],
    )
