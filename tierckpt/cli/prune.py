"""``tierckpt prune``: retire old checkpoints and remove what nothing refers to any more."""

from __future__ import annotations

from collections import Counter

import click

from tierckpt import inspection
from tierckpt.cli.history import name_of
from tierckpt.cli.output import count, say, say_json, size
from tierckpt.cli.target import json_option, place_at, reports_data_errors, root_argument
from tierckpt.config import READERS_GRACE


@click.command(short_help="Retire old checkpoints, remove left-overs.")
@root_argument
@click.option("--keep", type=click.IntRange(min=1), metavar="N", help="Retire all but the N newest.")
@click.option(
    "--grace",
    type=click.FloatRange(min=0),
    default=READERS_GRACE,
    show_default=True,
    metavar="SECONDS",
    help="How long the files of a retired checkpoint stay for readers.",
)
@click.option("--dry-run", is_flag=True, help="Say what would be done and do nothing.")
@click.option("--key", metavar="PATH", help="The private key that signs, if not TIERCKPT_KEY or the run's own.")
@json_option
@reports_data_errors()
def command(root: str, keep: int | None, grace: float, dry_run: bool, key: str | None, as_json: bool) -> int:
    """Retire old checkpoints of the store at ROOT and remove files that nothing refers to any more.

    Without --keep nothing is retired; only left-overs go: of retired checkpoints, of saves that were never
    committed, of writes that did not finish, and layouts that no checkpoint uses.
    """
    place = place_at(root)
    done = inspection.prune(place.root, keep, grace=grace, dry_run=dry_run, key=key)
    if as_json:
        say_json(done.to_json())
        return 0
    would = "would be " if dry_run else ""
    for ref in done.retired:
        say(f"{name_of(ref)} {would}retired")
    for folder, files in _by_folder(done.removed):
        say(f"{folder}: {count(files, 'file')} {would}removed")
    say(f"{count(len(done.removed), 'file')} ({size(done.size)}) {would}removed")
    if done.waiting:
        say(f"{count(len(done.waiting), 'file')} of retired checkpoints {would}kept for readers, {grace:g} s")
    return 0


def _by_folder(names: list[str]) -> list[tuple[str, int]]:
    return sorted(Counter(name.rpartition("/")[0] or "." for name in names).items())
