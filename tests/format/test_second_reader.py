"""Protects docs/format.md: a reader written from it alone understands what the package writes, byte for byte.

It also protects the second reader itself, which every other test that makes a store relies on: a store that is
damaged anywhere must not pass it.
"""

from __future__ import annotations

import math
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import second_reader
from tests.second_reader import Bad, Other, PerRank, Tensor, read_store, verify_store
from tierckpt.format import blob, digest, names, paths, shard, values
from tierckpt.format.boxes import Box
from tierckpt.format.canonical import JSON
from tierckpt.format.chain import Chain, CheckpointRef, Link
from tierckpt.format.grid import REPLICATED, Cut, Mesh
from tierckpt.format.keys import SigningKey
from tierckpt.format.layout import Entry, Layout
from tierckpt.format.layout_plan import Tree
from tierckpt.format.manifest import Manifest
from tierckpt.format.receipt import Receipt
from tierckpt.format.store import StoreInfo

KEY = SigningKey.generate()
INFO = StoreInfo("run-1")
WORLD = 6
MESH = Mesh((3, 2), 0, (2, 1))
"""Tensors: (path, dtype, shape, cut or pieces)."""
TENSORS: list[tuple[tuple[Any, ...], str, tuple[int, ...], Any]] = [
    (("model", "w.0"), "bfloat16", (13, 5), (Cut(MESH, (0, 0), (1, 0)), 0, 1)),  # FSDP over TP, uneven
    (("model", "replicated"), "float32", (7, 3), (Cut(MESH, (REPLICATED, REPLICATED), ()), 4, 3)),
    (("model", "a/b#~"), "complex64", (4, 6), (Cut(MESH, (REPLICATED, 1), (1,)), 2, 2)),
    (("model", "step"), "int64", (), (Cut(MESH, (REPLICATED, REPLICATED), ()), 5, 6)),
    (("model", "empty"), "uint8", (0, 4), (Cut(MESH, (0, REPLICATED), (0,)), 0, 1)),
    (("opt", 0, True), "float8_e5m2fnuz", (9,), [(1, Box((0,), (4,))), (1, Box((6,), (3,))), (4, Box((4,), (2,)))]),
    (("opt", 1), "uint8", (16,), [(0, Box((0,), (16,)))]),
]
ALIAS = ("model", "tied")  # of model/w.0
SIZES = {name: size for name, (size, _) in shard.DTYPES.items()}
VALUE = {"lr": 0.1, 3: [None, 2**70, (b"x", {1})], "nan": math.inf}


def contents(seed: int) -> dict[str, bytes]:
    rng = random.Random(seed)
    return {names.join(path): rng.randbytes(math.prod(shape) * SIZES[dtype]) for path, dtype, shape, _ in TENSORS}


def tree() -> JSON:
    key: JSON = True
    model: list[JSON] = [["w.0", ["tensor"]], ["a/b#~", ["tensor"]], ["replicated", ["tensor"]], ["step", ["tensor"]]]
    model += [["empty", ["tensor"]], ["tied", ["tensor"]], ["value", ["value"]]]
    opt: JSON = ["list", [["dict", [[key, ["tensor"]]]], ["array", "<i8", [2]]]]
    return ["dict", [["opt", opt], ["model", ["OrderedDict", model]], ["rng", ["per_rank"]]]]


def layout() -> Layout:
    entries = []
    for path, dtype, shape, where in TENSORS:
        name = names.join(path)
        if isinstance(where, tuple):
            cut, writer, split = where
            entries.append(Entry(name, dtype, shape, cut=cut, writer=writer, split=split))
        else:
            entries.append(Entry(name, dtype, shape, pieces=where))
    entries.append(Entry(names.join(ALIAS), "bfloat16", (13, 5), alias="model/w.0"))
    entries.sort(key=lambda entry: entry.name.encode())
    return Layout.build(WORLD, entries, [Tree([(0, WORLD - 1)], tree())], [(0, WORLD - 1)])


def cut_out(data: bytes, shape: tuple[int, ...], box: Box, item: int) -> bytes:
    """The elements of the box, in row-major order."""
    if not shape:
        return data
    row = math.prod(shape[1:]) * item
    inner = Box(box.offset[1:], box.size[1:])
    rows = range(box.offset[0], box.offset[0] + box.size[0])
    return b"".join(cut_out(data[i * row : (i + 1) * row], shape[1:], inner, item) for i in rows)


def write(root: Path, name: str, data: bytes) -> None:
    (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / name).write_bytes(data)


class Maker:
    """Makes a store with nothing but the modules of the format."""

    def __init__(self, root: Path) -> None:
        self.root, self.chain = root, Chain("run-1")
        write(root, paths.STORE, INFO.encode())
        self.publish(self.chain.begin(store=INFO.digest, origin=None))

    def publish(self, link: Link, key: SigningKey = KEY) -> None:
        data = link.sign(key).encode()
        write(self.root, paths.link(link.number), data)
        self.chain.append(data)

    def save(self, step: int) -> CheckpointRef:
        made, tensors = layout(), contents(step)
        encoded = made.encode()
        write(self.root, paths.layout(made.hash), encoded)
        receipts = [self.shard(made, tensors, step, rank) for rank in made.writers]
        manifest = Manifest.of(receipts)
        generation = self.chain.generation
        write(self.root, paths.manifest(generation, step), manifest.encode())
        ref = CheckpointRef(generation, step, manifest.id)
        self.publish(self.chain.commit(ref))
        return ref

    def shard(self, made: Layout, tensors: dict[str, bytes], step: int, rank: int) -> Receipt:
        items: dict[str, JSON] = {"rng": values.encode((rank, step))}
        if rank == 0:
            items["model/value"] = values.encode(VALUE)
        padded = blob.pad(blob.encode(items))
        header = shard.build(made.shard_pieces(rank), layout=made.hash, rank=rank, blob=len(padded))
        boxes: dict[str, list[Box]] = {}
        for index, _, box in made.rank_pieces(rank):
            boxes.setdefault(made.name(index), []).append(box)
        data = bytearray(header.data)
        for entry in header.entries:
            if entry.dtype is None:
                data += padded
                continue
            at = made.index(entry.tensor)
            assert at is not None
            box = sorted(boxes[entry.tensor])[max(entry.k, 0)]
            data += cut_out(tensors[entry.tensor], made.shape(at), box, SIZES[entry.dtype])
        assert len(data) == header.size
        receipt = Receipt(
            run="run-1",
            generation=self.chain.generation,
            step=step,
            rank=rank,
            world=WORLD,
            layout=made.hash,
            size=len(data),
            header_size=header.header_size,
            header_digest=digest.derive("header", header.data).hex(),
            chunks=digest.chunk_digest(data),
            metadata=values.encode({"loss": 0.5}) if rank == 0 else None,
        )
        write(self.root, receipt.name, bytes(data))
        write(self.root, paths.receipt(receipt.generation, step, rank), receipt.encode())
        return receipt


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Generations 1 and 2, steps 10 and 20 live, 5 retired, another key."""
    root = tmp_path_factory.mktemp("store")
    maker = Maker(root)
    five = maker.save(5)
    ten = maker.save(10)
    other = SigningKey.generate()
    maker.publish(maker.chain.introduce(other.public))
    maker.publish(maker.chain.begin(store=INFO.digest, origin=ten), other)
    maker.save(20)
    maker.publish(maker.chain.retire([five]), other)
    return root


def expected(step: int) -> dict[str, Any]:
    data = contents(step)
    tensors = {names.join(path): Tensor(d, shape, data[names.join(path)]) for path, d, shape, _ in TENSORS}
    model: dict[str, Any] = {
        key: tensors[names.join(("model", key))] for key in ("w.0", "a/b#~", "replicated", "step", "empty")
    }
    model |= {"tied": model["w.0"], "value": VALUE}
    opt = [{True: tensors["opt/0/~kdHJ1ZQ"]}, Other("array", ("<i8", (2,), data["opt/1"]))]
    return {"opt": opt, "model": model, "rng": PerRank({rank: (rank, step) for rank in range(WORLD)})}


def test_what_was_written_is_read(store: Path) -> None:
    assert read_store(store) == expected(20)
    assert read_store(store, step=10) == expected(10)
    assert read_store(store, trust=[KEY.public]) == expected(20)
    assert list(read_store(store)) == ["opt", "model", "rng"]
    assert verify_store(store) == []


def test_what_is_not_there_or_not_trusted_is_said(store: Path) -> None:
    cases: list[dict[str, Any]] = [{"step": 5}, {"step": 11}, {"trust": ["ab" * 32]}]
    for arguments in cases:
        with pytest.raises(Bad):
            read_store(store, **arguments)


def test_it_runs_as_a_program(store: Path) -> None:
    done = subprocess.run([sys.executable, second_reader.__file__, store], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"{store}: all is well\n"), done.stderr


def live_files(root: Path) -> list[Path]:
    retired = root / paths.step_dir(1, 5)
    return sorted(path for path in root.rglob("*") if path.is_file() and retired not in path.parents)


def test_a_flipped_bit_in_any_file_is_found(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(store, root)
    rng = random.Random(1)
    for path in live_files(root):
        good = path.read_bytes()
        for at in {0, len(good) - 1, rng.randrange(len(good))}:
            bad = bytearray(good)
            bad[at] ^= 1 << rng.randrange(8)
            path.write_bytes(bad)
            assert verify_store(root), f"{path.relative_to(root)}: byte {at}"
        path.write_bytes(good)
    assert verify_store(root) == []


def test_missing_cut_and_swapped_files_are_found(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(store, root)
    files = live_files(root)
    head = max(path for path in files if path.parent.name == "chain")
    for path in files:
        good = path.read_bytes()
        if path != head:  # a chain without its newest links is a valid older one
            path.unlink()
            assert verify_store(root), f"{path.relative_to(root)} removed"
        path.write_bytes(good[:-1])
        assert verify_store(root), f"{path.relative_to(root)} cut"
        path.write_bytes(good)
    for one, other in [
        (paths.shard(2, 20, 0), paths.shard(2, 20, 1)),
        (paths.shard(2, 20, 0), paths.shard(1, 10, 0)),
        (paths.receipt(2, 20, 0), paths.receipt(1, 10, 0)),
        (paths.manifest(2, 20), paths.manifest(1, 10)),
        (paths.link(1), paths.link(2)),
    ]:
        a, b = (root / one).read_bytes(), (root / other).read_bytes()
        (root / one).write_bytes(b)
        (root / other).write_bytes(a)
        assert verify_store(root), f"{one} and {other} swapped"
        (root / one).write_bytes(a)
        (root / other).write_bytes(b)
    assert verify_store(root) == []


def test_files_that_belong_to_nothing_are_found(store: Path, tmp_path: Path) -> None:
    root = tmp_path / "store"
    shutil.copytree(store, root)
    write(root, "g0002/s000000000099/shard-00000.safetensors", b"of a save that did not finish")
    write(root, "chain/.000000000099.json.1.tmp", b"")
    assert verify_store(root) == []
    for stray in ("stray", f"{paths.step_dir(2, 20)}/shard-00009.safetensors"):
        write(root, stray, b"x")
        assert verify_store(root) == [f"{stray} belongs to nothing"]
        (root / stray).unlink()
    (root / "link").symlink_to(root / paths.STORE)
    assert verify_store(root) == ["link belongs to nothing"]
