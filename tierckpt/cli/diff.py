"""``tierckpt diff``: how two checkpoints differ, by value."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import islice
from math import isfinite
from typing import Any

import click

from tierckpt.cli.checkpoint import described, open_content
from tierckpt.cli.differences import ABSENT, Differences, Pair, differences
from tierckpt.cli.elements import Difference
from tierckpt.cli.output import compact, count, progress, say, say_json, size, table
from tierckpt.cli.target import json_option, reports_data_errors, say_problems
from tierckpt.format import names
from tierckpt.format.display import to_plain
from tierckpt.tiers.content import Content

#: Rows of each table that are shown; ``--json`` has all.
_ROWS = 100
#: Characters of a value in one line.
_SHORT = 80


@click.command(short_help="Compare two checkpoints by value.")
@click.argument("a")
@click.argument("b")
@click.option("--step-a", type=click.IntRange(min=0), metavar="N", help="Of A this step instead of the newest.")
@click.option("--step-b", type=click.IntRange(min=0), metavar="N", help="Of B this step instead of the newest.")
@json_option
@reports_data_errors(equal=False)
def command(a: str, b: str, step_a: int | None, step_b: int | None, as_json: bool) -> int:
    """Compare the checkpoints of two stores, or two steps of one: tensors bit by bit, values, metadata.

    The layouts may differ: what is compared are whole tensors, of any size. All that is read is verified. Under one
    layout, chunks with the same digest are equal and not read.

    Exit status: 0 they are equal, 1 they differ (or are damaged), 2 the command could not run.
    """
    one, problems = open_content(a, step_a)
    other, more = open_content(b, step_b)
    problems += [problem for problem in more if problem not in problems]
    with progress("comparing") as told:
        found = differences(one, other, told)
    found.problems = problems + found.problems
    if as_json:
        say_json(_to_json(one, other, found))
    else:
        _say(one, other, found)
    return 0 if found.none else 1


def _to_json(a: Content, b: Content, found: Differences) -> dict[str, Any]:
    return {
        "a": described(a),
        "b": described(b),
        "equal": found.none,
        "tensors": {
            "equal": found.equal,
            "only_a": [_named(name) for name in found.only_a],
            "only_b": [_named(name) for name in found.only_b],
            "kinds": [
                {**_named(name), "a": _kind(kinds[0]), "b": _kind(kinds[1])} for name, kinds in found.kinds.items()
            ],
            "different": [_tensor(a, name, difference) for name, difference in found.tensors.items()],
            "unread": [_named(name) for name in found.unread],
        },
        "values": [{**_named(name), **_plain(pair)} for name, pair in found.values.items()],
        "per_rank": [{**_named(name), "rank": rank, **_plain(pair)} for (rank, name), pair in found.own.items()],
        "structure": [{**_named(name), "a": kinds[0], "b": kinds[1]} for name, kinds in found.structure.items()],
        "metadata": None if found.metadata is None else _plain(found.metadata),
        "bytes_read": a.bytes_read + b.bytes_read,
        "problems": found.problems,
    }


def _named(name: str) -> dict[str, Any]:
    """``name`` is as stored, ``key`` as ``keys=`` takes it."""
    return {"name": name, "key": _dotted(name)}


def _dotted(name: str) -> str:
    return names.dotted(names.split(name))


def _kind(kind: tuple[str, tuple[int, ...]]) -> dict[str, Any]:
    return {"dtype": kind[0], "shape": list(kind[1])}


def _tensor(a: Content, name: str, difference: Difference) -> dict[str, Any]:
    """``first`` is an index with one number per dimension; infinite differences are ``"inf"``."""
    index = a.layout.index(name)
    assert index is not None
    _, dtype, shape = a.layout.tensor(index)
    largest = difference.largest
    return {
        **_named(name),
        "dtype": dtype,
        "shape": list(shape),
        "elements": difference.elements,
        "first": _unravelled(difference.first, shape),
        "max_abs_difference": largest if largest is None or isfinite(largest) else "inf",
        "nan_on_one_side": difference.nans if largest is not None else None,
    }


def _unravelled(position: int, shape: tuple[int, ...]) -> list[int]:
    index = []
    for n in reversed(shape):
        position, here = divmod(position, n)
        index.append(here)
    return index[::-1]


def _plain(pair: Pair) -> dict[str, Any]:
    """``a`` and ``b``; a side that has nothing of this name is left out.

    Values that differ but look alike (a list and a tuple) are shown as they are encoded.
    """
    sides = {side: value for side, value in zip("ab", pair, strict=True) if value is not ABSENT}
    plain = {side: to_plain(value) for side, value in sides.items()}
    alike = len(plain) == 2 and compact(plain["a"]) == compact(plain["b"])
    return sides if alike else plain


# For people


def _say(a: Content, b: Content, found: Differences) -> None:
    for side, content in (("A", a), ("B", b)):
        one = described(content)
        say(
            f"{side}: {one['root']}, step {one['step']} (generation {one['generation']}), {count(one['world'], 'rank')}"
        )
    told = _to_json(a, b, found)
    _say_tensors(told["tensors"])
    _say_pairs("value", {_dotted(name): pair for name, pair in found.values.items()})
    _say_pairs(
        "value of one rank", {f"{_dotted(name)} (rank {rank})": pair for (rank, name), pair in found.own.items()}
    )
    for entry in islice(told["structure"], _ROWS):
        say(f"{entry['key'] or 'the state'}: {entry['a']} in A, {entry['b']} in B")
    if found.metadata is not None:
        _say_pairs("", {"metadata": found.metadata})
    say_problems(found.problems)
    read = f"{size(told['bytes_read'])} read"
    stored = sum(part.size for content in (a, b) for part in content.manifest.shards)
    if a.manifest.layout == b.manifest.layout and told["bytes_read"] < stored:
        read += ", the rest compared by digests" if told["bytes_read"] else ", compared by digests"
    if found.none:
        say(f"equal: {count(found.equal, 'tensor')}, all values and metadata; {read}")
    else:
        different = len(found.tensors) + len(found.kinds)
        only = f"{len(found.only_a)} only in A, {len(found.only_b)} only in B"
        say(f"different: of the tensors {different} differ, {only}, {found.equal} are equal; {read}")


def _say_tensors(told: dict[str, Any]) -> None:
    for side in "ab":
        _say_names(f"only in {side.upper()}", told[f"only_{side}"])
    _say_names("not compared", told["unread"])
    for entry in islice(told["kinds"], _ROWS):
        sides = (f"{entry[side]['dtype']} {entry[side]['shape']} in {side.upper()}" for side in "ab")
        say(f"{entry['key']}: {', '.join(sides)}")
    rows = []
    for entry in told["different"][:_ROWS]:
        largest, elements = entry["max_abs_difference"], 1
        for n in entry["shape"]:
            elements *= n
        lone = f", {entry['nan_on_one_side']} NaN on one side" if entry["nan_on_one_side"] else ""
        rows.append(
            (
                entry["key"],
                entry["dtype"],
                str(entry["shape"]),
                f"{entry['elements']:,} of {elements:,}",
                str(entry["first"]),
                "" if largest is None else (largest if largest == "inf" else f"{largest:.6g}") + lone,
            )
        )
    if rows:
        say()
        table(("tensor", "dtype", "shape", "elements that differ", "first", "max |a-b|"), rows)
    _say_more(len(told["different"]), "tensor that differs")


def _say_names(what: str, entries: list[dict[str, Any]]) -> None:
    for entry in entries[:_ROWS]:
        say(f"{what}: {entry['key'] or 'the state'}")
    _say_more(len(entries), f"tensor {what}")


def _say_pairs(what: str, pairs: Mapping[str, Pair]) -> None:
    if not pairs:
        return
    say()
    shown = []
    for name, pair in islice(pairs.items(), _ROWS):
        plain = _plain(pair)
        shown.append((name, *(compact(plain[side], _SHORT) if side in plain else "(absent)" for side in "ab")))
    table((what, "A", "B"), shown)
    _say_more(len(pairs), what)


def _say_more(number: int, what: str) -> None:
    if number > _ROWS:
        say(f"… and {number - _ROWS:,} more: {what} (--json shows all)")
