"""`tierckpt explain --mesh`: what it says a rank reads is what holds the bytes of that rank, element by element."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import tierckpt
from tierckpt.cli import mesh
from tierckpt.format import shard as shards
from tierckpt.format.digest import CHUNK
from tierckpt.format.layout import Layout
from tierckpt.tiers.content import Content
from tierckpt.tiers.disk import DiskPlace
from tierckpt.tiers.store import Store

from .conftest import SHAPES, Branched, Cli, whole


def _explain(cli: Cli, root: Path, *arguments: object) -> list[dict[str, Any]]:
    ran = cli("explain", root, *arguments, "--json")
    assert (ran.status, ran.stderr) == (0, ""), ran
    found: list[dict[str, Any]] = json.loads(ran.stdout)["mesh"]["readings"]
    return found


def _chunks_of(root: Path, held: dict[str, torch.Tensor]) -> tuple[int, dict[int, set[int]]]:
    """Bytes, and the chunks of each shard, that hold the elements marked in ``held``: from the headers themselves."""
    store = Store.open(DiskPlace(root))
    assert store.chain.newest is not None
    content = Content.open(store, store.chain.newest)
    chunks: dict[int, set[int]] = {}
    nbytes = 0
    for rank in content.layout.writers:
        [path] = root.glob(f"g*/s*/shard-{rank:05}.safetensors")
        data = path.read_bytes()
        size = shards.header_size(data[:8], name="", size=len(data))
        entries = {(e.tensor, e.k): e for e in shards.parse(data[:size], name="", size=len(data)).entries}
        for i, k, box in content.layout.rank_pieces(rank):
            name = content.layout.name(i)
            entry = entries[name, k]
            marks = held[name]
            for d, (o, n) in enumerate(zip(box.offset, box.size, strict=True)):
                marks = marks.narrow(d, o, n)
            item = entry.nbytes // marks.numel()
            places = np.flatnonzero(marks.numpy())
            nbytes += len(places) * item
            chunks.setdefault(rank, set()).update(np.unique((entry.offset + places * item) // CHUNK).tolist())
        if rank == 0:  # the values
            chunks.setdefault(0, set()).add((len(data) - 1) // CHUNK)
    return nbytes, {rank: found for rank, found in chunks.items() if found}


def _marks(cuts: dict[str, list[tuple[int, int, int]]]) -> dict[str, torch.Tensor]:
    """For each tensor the elements that are left of it after these cuts: (dimension, parts, which)."""
    held = {}
    for name, shape in SHAPES.items():
        marks = torch.zeros(shape, dtype=torch.bool)
        part = marks
        for d, parts, which in cuts.get(name, []):
            found = part.chunk(parts, d)
            part = found[which] if which < len(found) else part.narrow(d, 0, 0)
        part.fill_(True)
        held[name] = marks
    return held


def _check(root: Path, reading: dict[str, Any], cuts: dict[str, list[tuple[int, int, int]]]) -> None:
    nbytes, chunks = _chunks_of(root, _marks(cuts))
    assert reading["needed"] == nbytes
    assert {one["rank"]: one["chunks"] for one in reading["shards"]} == {r: len(c) for r, c in chunks.items()}
    assert reading["chunks"] == sum(map(len, chunks.values()))
    sizes = {r: next(root.glob(f"g*/s*/shard-{r:05}.safetensors")).stat().st_size for r in chunks}
    expected = {r: sum(min(CHUNK, sizes[r] - i * CHUNK) for i in found) for r, found in chunks.items()}
    assert {one["rank"]: one["bytes"] for one in reading["shards"]} == expected
    assert reading["read"] == sum(expected.values())


def test_by_default_the_first_dimension_is_cut_over_the_first_of_the_mesh(cli: Cli, sharded: Path) -> None:
    readings = _explain(cli, sharded, "--mesh", "dp=3,tp=2")
    assert [(one["ranks"], one["coordinate"]) for one in readings] == [
        ([2 * dp, 2 * dp + 1], {"dp": dp, "tp": None}) for dp in range(3)
    ]
    for dp, reading in enumerate(readings):
        _check(sharded, reading, {name: [(0, 3, dp)] for name in SHAPES})


def test_placements_cut_in_the_order_in_which_they_stand(cli: Cli, sharded: Path) -> None:
    placements = ("*=Shard(0):tp,Shard(0):dp", "grid=Shard(1):dp,l*=Replicate,w*=Replicate:tp")
    # The first glob that matches counts, so the narrow ones have to come first.
    readings = _explain(
        cli, sharded, "--mesh", "dp=2,tp=2", "--placements", placements[1], "--placements", placements[0]
    )
    assert [one["ranks"] for one in readings] == [[0], [1], [2], [3]]
    for reading in readings:
        dp, tp = reading["coordinate"]["dp"], reading["coordinate"]["tp"]
        cuts = [(0, 2, tp), (0, 2, dp)]
        _check(sharded, reading, {"grid": [(1, 2, dp)], "strided": cuts, "pieces": cuts})


def test_ranks_that_have_nothing_still_read_the_values(cli: Cli, sharded: Path) -> None:
    readings = _explain(cli, sharded, "--mesh", "dp=9")
    assert readings[8]["needed"] == 0
    assert [one["rank"] for one in readings[8]["shards"]] == [0]
    assert sum(one["needed"] for one in readings) == sum(whole(name).nbytes for name in SHAPES)


def test_no_byte_of_a_shard_is_read(cli: Cli, sharded: Path) -> None:
    before = _explain(cli, sharded, "--mesh", "dp=2")
    for path in sharded.glob("g*/s*/shard-*.safetensors"):
        path.write_bytes(bytes(path.stat().st_size))
    assert _explain(cli, sharded, "--mesh", "dp=2") == before


def test_tied_tensors_count_once_and_match_by_either_name(cli: Cli, branched: Branched) -> None:
    for name in ("weight", "tied"):
        [one, other] = _explain(
            cli, branched.root, "--mesh", "tp=2", "--placements", f"*.{name}=Shard(1):tp,*=Replicate"
        )
        assert one["needed"] == other["needed"] == 3 * 2 * 4 + 4 * 2


def test_people_see_a_row_for_ranks_that_hold_the_same(cli: Cli, sharded: Path) -> None:
    lines = cli("explain", sharded, "--mesh", "dp=2,tp=2").lines
    assert [line.split()[:3] for line in lines[-2:]] == [["0-1", "0", "*"], ["2-3", "1", "*"]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--placements", "*=Replicate"), "needs --mesh"),
        (("--mesh", "dp"), "like dp=4,tp=2"),
        (("--mesh", "dp=2,tp=0"), "'tp=0' is not a name and a size of at least 1"),
        (("--mesh", "dp=2,dp=2"), "different names"),
        (("--mesh", "dp=1000000"), "at most"),
        (("--mesh", "dp=2", "--placements", "Shard(0):dp"), "expected GLOB="),
        (("--mesh", "dp=2", "--placements", "*=Shard(0)"), "neither"),
        (("--mesh", "dp=2", "--placements", "*=Shard(0):tp"), "no dimension tp, it has: dp"),
        (("--mesh", "dp=2", "--placements", "*=Partial:dp"), "neither"),
        (("--mesh", "dp=2", "--placements", "*=Shard(0):dp,Shard(1):dp"), "only once"),
        (("--mesh", "dp=2", "--placements", "*=Replicate,foo*=Shard(0):dp"), "foo*=…: no tensor has such a name (see"),
        (("--mesh", "dp=2", "--placements", "model.wieght=Replicate"), "close to it: model.weight"),
        (("--mesh", "dp=2", "--placements", "*=Shard(1):dp"), "Shard(1) cannot cut model.bias"),
    ],
)
def test_what_makes_no_sense_is_status_2(
    cli: Cli, branched: Branched, arguments: tuple[str, ...], message: str
) -> None:
    ran = cli("explain", branched.root, *arguments)
    assert (ran.status, ran.stdout) == (2, "")
    assert message in ran.stderr


def test_too_many_pieces_are_refused_before_any_is_looked_at(
    cli: Cli, sharded: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mesh, "_PIECES_LIMIT", 100)
    assert cli("explain", sharded, "--mesh", "dp=2").status == 0
    monkeypatch.setattr(mesh, "_reading", None)
    ran = cli("explain", sharded, "--mesh", "dp=64,tp=64", "--placements", "grid=Shard(0):tp")
    assert (ran.status, ran.stdout) == (2, "")
    assert "pieces; at most 100 can be explained. Take a smaller mesh" in ran.stderr


def test_work_is_done_for_each_kind_of_tensor_not_for_each_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    met: list[int] = []
    shown: list[tuple[int, ...]] = []
    pieces_in = Layout.pieces_in

    def spy(self: Layout, i: int, box: Any) -> Any:
        met.append(i)
        return pieces_in(self, i, box)

    looked = []
    for number in (1, 200):
        tensors = {f"{i}": torch.full((8, 3), float(i)) for i in range(number)}
        tierckpt.save({**tensors, "one": torch.ones(())}, tmp_path / str(number), 1)
        store = Store.open(DiskPlace(tmp_path / str(number)))
        assert store.chain.newest is not None
        content = Content.open(store, store.chain.newest)
        met.clear()
        shown.clear()
        with monkeypatch.context() as patch:
            patch.setattr(Layout, "pieces_in", spy)
            found = list(mesh.readings(content, mesh.parse("dp=4", ()), lambda *done: shown.append(done)))
        looked.append(len(met))
        assert shown == [(0, 4), (1, 4), (2, 4), (3, 4)]
        assert [reading.needed for reading in found] == [number * 2 * 3 * 4 + 4] * 4
    assert looked[0] == looked[1]


def test_progress_is_shown_on_a_terminal_only(sharded: Path) -> None:
    command = [sys.executable, "-m", "tierckpt", "explain", str(sharded), "--mesh", "dp=2"]
    subprocess.run(command, stdout=subprocess.DEVNULL, check=True)  # pins the key, which is worth a note once
    piped = subprocess.run(command, capture_output=True, check=True)
    assert piped.stderr == b""
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm"}
    shown = subprocess.run(command, stdout=subprocess.PIPE, stderr=theirs, env=environment, check=True)
    os.close(theirs)
    with open(ours, "rb", buffering=0) as terminal:
        assert b"planning" in terminal.read(1 << 16)
    assert shown.stdout == piped.stdout


def test_boxes_with_gaps_over_many_chunks(cli: Cli, tmp_path: Path) -> None:
    """A part that has a byte in every third chunk only."""
    rows = CHUNK // 4 * 3
    tierckpt.save({"a": torch.zeros(3, rows), "b": torch.zeros(3, rows)}, tmp_path, 1)
    readings = _explain(cli, tmp_path, "--mesh", "tp=1024", "--placements", "*=Shard(1):tp")
    [path] = tmp_path.glob("g*/s*/shard-00000.safetensors")
    data = path.read_bytes()
    size = shards.header_size(data[:8], name="", size=len(data))
    entries = [e for e in shards.parse(data[:size], name="", size=len(data)).entries if e.tensor in ("a", "b")]
    width = rows // 1024 * 4
    for part in (0, 500, 1023):
        starts = [e.offset + row * rows * 4 + part * width for e in entries for row in range(3)]
        expected = {chunk for start in starts for chunk in (start // CHUNK, (start + width - 1) // CHUNK)}
        assert readings[part]["chunks"] == len(expected)
