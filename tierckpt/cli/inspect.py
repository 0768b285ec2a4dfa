"""``tierckpt inspect``: what one checkpoint holds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import islice
from math import prod
from typing import Any

import click

from tierckpt.cli.checkpoint import choose
from tierckpt.cli.history import history, name_of
from tierckpt.cli.output import compact, count, moment, say, say_json, size, spans, table
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
from tierckpt.format import names, shard
from tierckpt.format.chain import CheckpointRef
from tierckpt.format.display import to_plain
from tierckpt.format.grid import Cut
from tierckpt.format.layout import Layout
from tierckpt.format.manifest import Manifest
from tierckpt.tiers.content import Content
from tierckpt.tiers.store import Store

#: Rows of the table of tensors, and values, that are shown without being asked for.
_ROWS = 100
#: Characters of a value or of metadata in one line.
_SHORT = 200


@click.command(short_help="Show what a checkpoint holds.")
@root_argument
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="This step instead of the newest.")
@click.option("--tensors", "pattern", metavar="GLOB", help="All tensors whose dotted name matches, no others.")
@json_option
@reports_data_errors(head=None, checkpoint=None, tensors=[], values={})
def command(root: str, step: int | None, pattern: str | None, as_json: bool) -> int:
    """Show a checkpoint of the store at ROOT: tensors and how they are cut, other values, metadata.

    Of the shards only the values are read, and verified.
    """
    store = open_store(root)
    problems = trust_problems(store)
    ref = choose(store, step)
    content = Content.open(store, ref)
    manifest, layout = content.manifest, content.layout
    chosen = _matching(layout, pattern)
    values = _values(content, problems)
    if as_json:
        say_json(
            {
                **_head(store),
                "checkpoint": _checkpoint(store, ref, manifest),
                "layout": _summary(layout, manifest),
                "tensors": [_tensor(layout, i) for i in chosen],
                "values": values,
                "metadata": to_plain(manifest.metadata),
                "problems": problems,
            }
        )
    else:
        _say(store, ref, manifest, layout)
        _say_tensors(layout, chosen, pattern)
        _say_values(values)
        say_problems(problems)
    return 1 if problems else 0


def _matching(layout: Layout, pattern: str | None) -> list[int]:
    if pattern is None:
        return list(range(len(layout)))
    return [i for i, name in enumerate(layout) if names.matches(names.split(name), [pattern])]


# What there is, as plain data


def _head(store: Store) -> dict[str, Any]:
    chain = store.chain
    return {
        "root": store.url,
        "run": store.run,
        "head": chain.links[-1].digest,
        "links": len(chain.links),
        "generation": chain.generation,
        "keys": [{"key": key, "endorsed": endorsed} for key, endorsed in chain.keys.items()],
    }


def _checkpoint(store: Store, ref: CheckpointRef, manifest: Manifest) -> dict[str, Any]:
    one = next(one for one in history(store.chain) if one.ref == ref)
    return {
        "step": ref.step,
        "generation": ref.generation,
        "id": ref.id,
        "time": one.time,
        "state": one.state,
        "pinned": one.pinned,
        "world": manifest.world,
        "size": sum(part.size for part in manifest.shards),
        "shards": [{"rank": part.rank, "size": part.size, "digest": part.digest} for part in manifest.shards],
    }


def _summary(layout: Layout, manifest: Manifest) -> dict[str, Any]:
    dtypes: Counter[str] = Counter()
    nbytes: Counter[str] = Counter()
    for i in _owners(layout):
        dtypes[layout.dtype(i)] += 1
        nbytes[layout.dtype(i)] += _nbytes(layout, i)
    return {
        "hash": manifest.layout,
        "tensors": len(layout),
        "bytes": sum(nbytes.values()),
        "dtypes": {dtype: {"tensors": dtypes[dtype], "bytes": nbytes[dtype]} for dtype in sorted(dtypes)},
    }


def _dotted(name: str) -> str:
    return names.dotted(names.split(name))


def _owners(layout: Layout) -> Iterator[int]:
    """Tensors that have bytes of their own."""
    return (i for i in range(len(layout)) if layout.alias(i) == i)


def _nbytes(layout: Layout, i: int) -> int:
    return prod(layout.shape(i)) * shard.dtype(layout.dtype(i)).size


def _tensor(layout: Layout, i: int) -> dict[str, Any]:
    """``name`` is as stored, ``key`` as ``keys=`` takes it; ``shards`` are the ranks that store any of it."""
    name, dtype, shape = layout.tensor(i)
    owner = layout.alias(i)
    pieces = layout.stored_pieces(i)
    return {
        "name": name,
        "key": _dotted(name),
        "dtype": dtype,
        "shape": list(shape),
        "bytes": _nbytes(layout, i),
        "alias": None if owner == i else layout.name(owner),
        "cut": _cut_text(layout.cut(owner), len(pieces)),
        "pieces": len(pieces),
        "shards": sorted({piece.rank for piece in pieces}),
    }


def _cut_text(cut: Cut | None, pieces: int) -> str:
    """``dim 0 / 4, 2 replicas``: in four along the first dimension, each part held by two ranks."""
    if cut is None:
        return "listed" if pieces != 1 else "whole"
    parts = [f"dim {cut.placements[d]} / {cut.mesh.shape[d]}" for d in cut.order]
    if cut.replicas > 1:
        parts.append(f"{cut.replicas} replicas")
    return ", ".join(parts) or "whole"


def _values(content: Content, problems: list[Problem]) -> dict[str, dict[str, Any]]:
    """By rank, then by name: the values that the lowest rank of each tree keeps.

    Other ranks of the tree share them, but for ``PerRank`` ones.
    """
    found = {}
    for rank in sorted({tree.ranks[0][0] for tree in content.layout.trees}):
        if content.layout.has_blob(rank):
            try:
                items = content.values(rank)
                found[str(rank)] = {name: to_plain(item, what=name) for name, item in items.items()}
            except DATA_ERRORS as error:
                problems.append(problem_of(error))
    return found


# For people


def _say(store: Store, ref: CheckpointRef, manifest: Manifest, layout: Layout) -> None:
    head, found, summary = _head(store), _checkpoint(store, ref, manifest), _summary(layout, manifest)
    say(f"run {head['run']}, {count(head['links'], 'link')}, head {head['head']}")
    for key in head["keys"]:
        say(f"key {key['key']}{'' if key['endorsed'] else ' (not endorsed by the first one)'}")
    say(f"{name_of(ref)}, {found['state']}, committed {moment(found['time'])} UTC")
    say(f"id {ref.id}")
    say(f"{count(len(manifest.shards), 'shard')} of {count(manifest.world, 'rank')}, {size(found['size'])}")
    if manifest.metadata is not None:
        say(f"metadata {compact(to_plain(manifest.metadata), _SHORT)}")
    dtypes = ", ".join(
        f"{entry['tensors']:,} {dtype} ({size(entry['bytes'])})" for dtype, entry in summary["dtypes"].items()
    )
    say(f"layout {summary['hash']}")
    say(f"{count(summary['tensors'], 'tensor')}, {size(summary['bytes'])}{': ' + dtypes if dtypes else ''}")


def _say_tensors(layout: Layout, chosen: list[int], pattern: str | None) -> None:
    shown = chosen if pattern is not None else chosen[:_ROWS]
    rows = []
    for entry in (_tensor(layout, i) for i in shown):
        alias = entry["alias"]
        how = entry["cut"] if alias is None else f"the same as {_dotted(alias)}"
        shape = str(entry["shape"])
        rows.append((entry["key"], entry["dtype"], shape, size(entry["bytes"]), how, spans(entry["shards"])))
    if rows:
        say()
        table(("tensor", "dtype", "shape", "size", "cut", "shards"), rows, right=("size",))
    elif pattern is not None:
        say(f"no tensor matches {pattern!r}")
    if len(shown) < len(chosen):
        say(f"… and {count(len(chosen) - len(shown), 'more tensor')} (--tensors GLOB shows all that match)")


def _say_values(values: dict[str, dict[str, Any]]) -> None:
    for rank, items in values.items():
        if not items:
            continue
        say()
        rows = [(_dotted(name), compact(item, _SHORT)) for name, item in islice(items.items(), _ROWS)]
        table((f"value (rank {rank})", ""), rows)
        if len(items) > _ROWS:
            say(f"… and {count(len(items) - _ROWS, 'more value')} (--json shows all)")
