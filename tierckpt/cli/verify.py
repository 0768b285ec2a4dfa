"""``tierckpt verify``: does a store hold what it says?"""

from __future__ import annotations

import contextlib
import re

import click

from tierckpt import inspection
from tierckpt.cli.output import count, progress, say, say_json, size
from tierckpt.cli.target import json_option, place_at, root_argument, say_problems, usage, verdict
from tierckpt.errors import AbsentError, StoreError
from tierckpt.tiers.trust import trusted_keys


def _digest(ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not re.fullmatch(r"[0-9a-fA-F]{64}", value):
        raise click.BadParameter("a head is 64 hex digits, as `tierckpt ls` and save() show it")
    return value.lower() if value is not None else None


@click.command(short_help="Check the chain and every byte.")
@root_argument
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="This step instead of the newest.")
@click.option("--all", "every", is_flag=True, help="Check every checkpoint.")
@click.option("--quick", is_flag=True, help="Read no shard bytes: documents, names and sizes only.")
@click.option("--deep", is_flag=True, help="Check every further copy of the bytes, too.")
@click.option(
    "--trust",
    multiple=True,
    metavar="KEY",
    help="Trust this public key (hex or file), not those pinned.",
)
@click.option("--expect-head", metavar="DIGEST", callback=_digest, help="A link that the chain must contain.")
@click.option("--allow-extra", is_flag=True, help="Files that do not belong to the store are no fault.")
@json_option
def command(
    root: str,
    step: int | None,
    every: bool,
    quick: bool,
    deep: bool,
    trust: tuple[str, ...],
    expect_head: str | None,
    allow_extra: bool,
    as_json: bool,
) -> int:
    """Check the chain and every byte of the newest checkpoint of the store at ROOT."""
    if every and step is not None:
        raise click.UsageError("--step and --all exclude each other")
    if quick and deep:
        raise click.UsageError("--quick and --deep exclude each other")
    place = place_at(root)
    keys = usage(lambda: trusted_keys(trust or None))
    with contextlib.nullcontext() if quick else progress("verifying") as told:
        report = inspection.verify(
            place.root,
            step,
            every=every,
            quick=quick,
            deep=deep,
            trust=keys,
            expect_head=expect_head,
            allow_extra=allow_extra,
            progress=told,
        )
    if step is not None and report.head is not None and not report.checked and len(report.problems) == 1:
        raise AbsentError(report.problems[0]["message"])  # a wrong command: nothing is wrong with what is there
    unread = [problem["message"] for problem in report.problems if problem["kind"] == "unread"]
    if unread and len(unread) == len(report.problems):  # nothing is wrong with what could be read
        more = f", and {len(unread) - 1} more files" if len(unread) > 1 else ""
        raise StoreError(f"not verified: {unread[0]}{more}")
    if as_json:
        say_json(report.to_json())
        return 0 if report.ok else 1
    say(report.root)
    if report.head is not None:
        say(f"run {report.run}, {count(report.head_number + 1, 'link')}, head {report.head}")
    for generation, number in report.checked:
        say(f"checked step {number} (generation {generation})")
    if report.checked:
        read = f"{size(report.bytes)} of shards read and hashed"
        say("no shard bytes were read (--quick)" if quick else read)
    for note in report.notes:
        say(f"note: {note}")
    say_problems(report.problems)
    say(verdict(report.problems))
    return 0 if report.ok else 1
