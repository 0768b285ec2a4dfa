"""What commands print: plain lines, tables, JSON and progress. rich is imported where it shows something."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import click

#: Columns of a table in a pipe, where nothing should be cut off.
_PIPE_WIDTH = 1 << 16


def clean(text: str) -> str:
    """``text`` in one line, without what steers a terminal: it may come from a hostile store."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)


def say(text: str = "") -> None:
    """Print one line on stdout."""
    click.echo(clean(text))


def say_json(value: Any) -> None:
    """Print one JSON document on stdout."""
    click.echo(json.dumps(value, indent=2, allow_nan=False))


def compact(value: Any, limit: int | None = None) -> str:
    """A plain value in one line, of at most ``limit`` characters."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(", ", ": "))
    return text if limit is None or len(text) <= limit else text[: limit - 1] + "…"


def size(nbytes: int | None) -> str:
    """A number of bytes for people; decimal units, as disks have."""
    if nbytes is None:
        return "?"
    value, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if value < 999.5 or unit == "PB":
            break
        value /= 1000
    return f"{nbytes} B" if unit == "B" else f"{value:.3g} {unit}"


def count(number: int, noun: str) -> str:
    """``1 file``, ``2 files``."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def spans(ranks: Sequence[int] | Sequence[tuple[int, int]], most: int = 4) -> str:
    """Ascending ranks, or ranges of them, as ``0-3, 8``; after ``most`` ranges comes an ellipsis."""
    found: list[tuple[int, int]] = []
    for rank in ranks:
        first, last = rank if isinstance(rank, tuple) else (rank, rank)
        if found and first == found[-1][1] + 1:
            found[-1] = (found[-1][0], last)
        else:
            found.append((first, last))
    texts = [str(first) if first == last else f"{first}-{last}" for first, last in found[:most]]
    return ", ".join([*texts, "…"] if len(found) > most else texts)


def moment(time: str) -> str:
    """The time of a link for people: UTC, without the fraction."""
    return f"{time[:10]} {time[11:19]}"


def table(columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[str] = ()) -> None:
    """Print a table on stdout: as wide as it needs to be in a pipe, folded to the width of a terminal.

    Args:
        right: names of the columns that are aligned to the right.
    """
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, width=None if terminal else _PIPE_WIDTH, highlight=False)
    shown = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for name in columns:
        shown.add_column(name, justify="right" if name in right else "left", overflow="fold")
    for row in rows:
        shown.add_row(*(Text(clean(cell)) for cell in row))
    if terminal:
        console.print(shown)
        return
    with console.capture() as captured:
        console.print(shown)
    for line in captured.get().splitlines():
        click.echo(line.rstrip())


@contextlib.contextmanager
def progress(what: str, *, of_bytes: bool = True) -> Iterator[Callable[[int, int], None] | None]:
    """A bar on stderr, if that is a terminal: call it with what is done and what there is in all. None in a pipe.

    Args:
        of_bytes: these are bytes; else a number of things.
    """
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        *((DownloadColumn(), TransferSpeedColumn()) if of_bytes else (MofNCompleteColumn(),)),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    with bar:
        task = bar.add_task(what, total=None)
        yield lambda done, total: bar.update(task, completed=done, total=total)
