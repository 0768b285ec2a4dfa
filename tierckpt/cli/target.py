"""The store that a command is about: found, opened, and what is wrong with it put into words."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import click

from tierckpt.cli.output import count, say, say_json
from tierckpt.errors import AbsentError, IncompleteError, IntegrityError, StoreError, UntrustedError
from tierckpt.format import paths
from tierckpt.tiers import trust
from tierckpt.tiers.disk import DiskPlace
from tierckpt.tiers.store import Store
from tierckpt.tiers.verify import Report

#: What is wrong with data, not with the command.
DATA_ERRORS = (IntegrityError, UntrustedError, IncompleteError)

Problem = dict[str, str]
"""``{"kind": "damaged" | "incomplete" | "untrusted" | "foreign" | "unread", "message": …}``, as in `Report.problems`."""

_Command = TypeVar("_Command", bound=Callable[..., Any])

root_argument = click.argument("root")
json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document on stdout.")


def place_at(root: str) -> DiskPlace:
    """The place that ROOT names, which must hold a store, be it a damaged one.

    Raises:
        StoreError: it cannot be reached, or is no store.
    """
    place = DiskPlace.at(root)
    try:
        if not place.exists():
            raise StoreError(f"{place.url}: {place.instead() or 'no such folder'}")
    except OSError as error:
        raise StoreError(f"cannot look at {place.url}: {error.strerror}") from error
    if place.size(paths.STORE) is None and not _was_store(place):
        reason = place.instead() or f"there is no {paths.STORE} in this folder"
        raise StoreError(f"{place.url}: no checkpoint store: {reason}")
    return place


def _was_store(place: DiskPlace) -> bool:
    """Whether only a store has such files: one without its ``tierckpt.json`` is damaged, not absent."""
    parsers = (paths.parse_link, paths.parse_layout, paths.parse_manifest, paths.parse_shard)
    folders = (
        paths.CHAIN,
        paths.LAYOUTS,
        paths.generation_dir(1),
    )  # not all: it may be anything, of any size
    names = (info.name for folder in folders for info in place.list(folder))
    return any(parse(name) is not None for name in names for parse in parsers)


def open_store(root: str) -> Store:
    """The store at ROOT, its chain read and its signatures checked.

    Raises:
        StoreError: see :func:`place_at`.
        IntegrityError, UntrustedError, IncompleteError: the chain is damaged or empty.
    """
    return Store.open(place_at(root))


def trust_problems(store: Store) -> list[Problem]:
    """Why a restore by this user would not believe the store. Nothing is pinned."""
    trusted = usage(lambda: trust.trusted_keys(None))
    believed = trust.Trust(trusted, trust.held_keys(store.run, None))
    pins = trust.pins_of(store)
    found = believed.problems(store.chain, store.url, pins)
    return [{"kind": "untrusted", "message": message} for message in found]


def usage(keys: Callable[[], frozenset[str] | None]) -> frozenset[str] | None:
    """The keys that a user named; that one cannot be read is a wrong command, not wrong data."""
    try:
        return keys()
    except UntrustedError as error:
        raise click.UsageError(str(error)) from None


def problem_of(error: Exception) -> Problem:
    """An error as a problem."""
    report = Report("")
    report.add(error)
    return report.problems[0]


def say_problems(problems: list[Problem]) -> None:
    """One line each."""
    for problem in problems:
        say(f"{problem['kind']}: {problem['message']}")


def reports_data_errors(**skeleton: Any) -> Callable[[_Command], _Command]:
    """For commands with ``--json``: errors in the data end them with status 1 and are printed on stdout. That there is
    no checkpoint of the step that was named is none of these.

    Args:
        skeleton: what the JSON document has besides ``problems`` when there is nothing to tell.
    """

    def wrap(function: _Command) -> _Command:
        @functools.wraps(function)
        def run(*args: Any, as_json: bool, **options: Any) -> Any:
            try:
                return function(*args, as_json=as_json, **options)
            except AbsentError:  # a wrong command, not wrong data
                raise
            except DATA_ERRORS as error:
                problems = [problem_of(error)]
                if as_json:
                    say_json({**skeleton, "problems": problems})
                else:
                    say_problems(problems)
                return 1

        return run  # type: ignore[return-value]

    return wrap


def verdict(problems: list[Problem]) -> str:
    """The last line: ``ok`` or how many problems there are."""
    return count(len(problems), "problem") if problems else "ok"
