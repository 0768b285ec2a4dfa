"""Hostile documents that are signed by a good key and whose digests all match: absurd contents of headers, layouts, manifests,
receipts, links and values. Every reader must end with an error of ours, soon, and without taking much memory.

The cases run in processes that may map 2 GiB more than they had at the start.
"""

from __future__ import annotations

import base64
import contextlib
import io
import json
import resource
import tempfile
import time
import warnings
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import tierckpt
from tests.harness import run_ranks, spawn
from tests.tamper.forge import Forger, document
from tierckpt.cli import main
from tierckpt.errors import StateError, TierckptError
from tierckpt.format import canonical, columns, layout_plan, paths
from tierckpt.format.boxes import Box
from tierckpt.format.chain import Chain
from tierckpt.format.grid import Cut, Mesh
from tierckpt.format.keys import SigningKey
from tierckpt.format.layout import COLUMNS, KIND, Entry, Layout
from tierckpt.format.layout_plan import Tree
from tierckpt.format.links import Link

MEMORY = 2 << 30  # bytes that may be mapped beyond those at the start
RESIDENT = 400 << 20  # bytes that may really be used
SECONDS = 12.0  # for all readers together; the machine may be busy
BATCH = 24  # cases in one process

TREE: Any = ["dict", [["v", ["value"]], ["x", ["tensor"]]]]
VALUES: Any = {"v": "text"}


def entry(name: str = "x", dtype: str = "float32", shape: tuple[int, ...] = (4,), **more: Any) -> Entry:
    """A tensor that rank 0 stores whole."""
    more.setdefault("pieces", [(0, Box((0,) * len(shape), shape))])
    return Entry(name, dtype, shape, **more)


def good(forger: Forger) -> None:
    forger.describe([entry()], TREE, VALUES)


def change_columns(layout: bytes, change: Callable[[dict[str, Any]], None]) -> bytes:
    """A layout file with other numbers; ``plan`` is given decoded."""
    numbers: dict[str, Any] = columns.unpack(KIND, COLUMNS, layout, what="layout")
    numbers["plan"] = canonical.decode(numbers["plan"].tobytes(), what="plan", depth=layout_plan.PLAN_DEPTH)
    change(numbers)
    if not isinstance(numbers["plan"], bytes):
        numbers["plan"] = canonical.encode(numbers["plan"])
    return columns.pack(KIND, [(name, dtype, numbers[name]) for name, dtype in COLUMNS.items()])


def numbers(**new: list[int]) -> Callable[[Forger], None]:
    """Columns of a good layout replaced."""

    def work(forger: Forger) -> None:
        good(forger)
        codes = {"U8": "B", "U32": "I", "I64": "q"}

        def change(found: dict[str, Any]) -> None:
            found.update({name: array(codes[COLUMNS[name]], values) for name, values in new.items()})

        forger.layout = change_columns(forger.layout, change)

    return work


def plan(**new: Any) -> Callable[[Forger], None]:
    """Keys of the plan of a good layout replaced."""

    def work(forger: Forger) -> None:
        good(forger)
        forger.layout = change_columns(forger.layout, lambda found: found["plan"].update(new))

    return work


def raw_plan(data: bytes) -> Callable[[Forger], None]:
    def work(forger: Forger) -> None:
        good(forger)
        forger.layout = change_columns(forger.layout, lambda found: found.update(plan=data))

    return work


def pieces(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> Callable[[Forger], None]:
    def work(forger: Forger) -> None:
        forger.describe([entry(shape=shape, pieces=[(0, Box(*box)) for box in boxes])], TREE, VALUES)

    return work


def manifest(**new: Any) -> Callable[[Forger], None]:
    def work(forger: Forger) -> None:
        good(forger)
        forger.manifest_changes = new

    return work


def receipt(**new: Any) -> Callable[[Forger], None]:
    def work(forger: Forger) -> None:
        good(forger)
        forger.receipt_changes[0] = new

    return work


def store(**new: Any) -> Callable[[Forger], None]:
    def work(forger: Forger) -> None:
        good(forger)
        forger.store = document(forger.store, **new)

    return work


def header_size(length: int) -> Callable[[Forger], None]:
    def work(forger: Forger) -> None:
        good(forger)
        forger.shards[0] = length.to_bytes(8, "little") + forger.shards[0][8:]

    return work


def header(text: bytes) -> Callable[[Forger], None]:
    """Another header in front of the right data; ``HASH`` in it stands for the layout's."""

    def work(forger: Forger) -> None:
        good(forger)
        full = text.replace(b"HASH", forger.layout_hash.encode())
        size = -(-(8 + len(full)) // 4096) * 4096
        forger.shards[0] = (size - 8).to_bytes(8, "little") + full.ljust(size - 8) + forger.shards[0][4096:]

    return work


def blob(data: bytes, size: int | None = None) -> Callable[[Forger], None]:
    """Other bytes in place of the values."""

    def work(forger: Forger) -> None:
        forger.describe([entry()], TREE, {"v": "x" * max(0, (size or len(data)) * 3 // 4 - 20)})
        end = forger.shards[0][:-1024] if len(forger.shards[0]) < 6000 else forger.shards[0][: 4096 + 16]
        forger.shards[0] = end + data.ljust(len(forger.shards[0]) - len(end))

    return work


def value(encoded: Any) -> Callable[[Forger], None]:
    """A value of the state."""

    def work(forger: Forger) -> None:
        forger.describe([entry()], TREE, {"v": encoded})

    return work


def tree(node: Any, *more: Entry, values: Any = VALUES) -> Callable[[Forger], None]:
    def work(forger: Forger) -> None:
        forger.describe([entry(), *more], node, values)

    return work


def nested(depth: int, leaf: Any = None) -> Any:
    found: Any = leaf
    for _ in range(depth):
        found = [found]
    return found


def huge(forger: Forger) -> None:
    """A tensor of 4 TiB, in a small file."""
    forger.describe([entry()], TREE, VALUES)
    small = forger.shards[0]
    forger.describe([entry(shape=(1 << 40,))], TREE, VALUES, data={0: b""})
    forger.shards[0] = forger.shards[0][:4096] + small[4096:]


def huge_and_claimed(forger: Forger) -> None:
    """The same, with a manifest that says that the shard is that large."""
    huge(forger)
    forger.manifest_changes = {"shards": [{"digest": "0" * 64, "rank": 0, "size": 5 << 40}]}


def huge_and_sparse(forger: Forger) -> None:
    """The same, with a file and a receipt of that size."""
    size = 4096 + (1 << 42) + 1024
    forger.describe([entry(shape=(1 << 40,))], TREE, VALUES, data={0: b""})
    forger.sizes[0] = size
    count = -(-size // (4 << 20))
    forger.receipt_changes[0] = {"chunks": base64.b64encode(bytes(32 * count)).decode()}
    forger.extend = size


def crowd(shape: tuple[int, ...], tensors: int, world: int) -> Callable[[Forger], None]:
    """Tensors cut over a world that has no shards."""

    def work(forger: Forger) -> None:
        good(forger)
        cut = Cut(Mesh((world,), 0, (1,)), (0,), (0,))
        shapes = [tuple(n - i for n in shape) for i in range(tensors)]
        entries = [entry(f"x{i:05d}", shape=shape, cut=cut, pieces=()) for i, shape in enumerate(shapes)]
        named: list[Any] = [[item.name, ["tensor"]] for item in entries]
        forger.layout = Layout.build(world, entries, [Tree([(0, world - 1)], ["dict", named])], [(0, 0)]).encode()
        forger.world = world

    return work


def splinters(side: int) -> Callable[[Forger], None]:
    """A tensor in side² pieces of one element, in a file that says so honestly."""

    def work(forger: Forger) -> None:
        boxes = [(0, Box((i, j), (1, 1))) for i in range(side) for j in range(side)]
        forger.describe([entry(shape=(side, side), pieces=boxes)], TREE, VALUES)

    return work


def bricks(count: int) -> Callable[[Forger], None]:
    """Pieces that are no grid and do not tile: each row is shifted a little, one brick is missing."""

    def work(forger: Forger) -> None:
        boxes = [(0, Box((i, (7 * i + 10 * j) % 1000), (1, 10))) for i in range(count) for j in range(99)]
        boxes = [(rank, box) for rank, box in boxes if box.offset[1] <= 990]
        forger.describe([entry(shape=(count, 1000), pieces=boxes)], TREE, VALUES)

    return work


def link(make: Callable[[Chain], Link | None], **body: Any) -> Callable[[Forger], None]:
    """One more link, its body changed, signed as it then is."""

    def work(forger: Forger) -> None:
        good(forger)

        def sign(manifest_digest: str) -> None:
            forger.begin_and_commit(manifest_digest)
            chain = Chain()
            for number in range(2):
                chain.append((forger.root / paths.link(number)).read_bytes())
            made = make(chain)
            assert made is not None
            text = canonical.decode(made.sign(forger.key).encode(), what="link")
            assert isinstance(text, dict) and isinstance(text["body"], dict)
            text["body"].update(body)
            signed = b"tierckpt 1 link\0" + canonical.encode(text["body"])
            text["signature"] = base64.b64encode(forger.key.sign(signed)).decode()
            (forger.root / paths.link(2)).write_bytes(canonical.encode(text))

        forger.sign = sign

    return work


def roots(listed: Any, **changes: Any) -> Callable[[Forger], None]:
    """A commit that says which ranks' shards lie beside each other."""

    def work(forger: Forger) -> None:
        good(forger)
        forger.manifest_changes = changes
        forger.roots = [tuple((first, last) for first, last in ranges) for ranges in listed]

    return work


def begin(chain: Chain) -> Link:
    return chain.begin(store=chain.store or "", origin=None)


def retire(chain: Chain) -> Link:
    return chain.retire(chain.live.values())


START = b'{"__metadata__":{"format":"pt","tierckpt":"shard 1","layout":"HASH","rank":"0"}'
X = b'"x":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}'
V = b'"~values":{"dtype":"U8","shape":[1024],"data_offsets":[16,1040]}'

HOSTILE: dict[str, Callable[[Forger], None]] = {
    # Sizes
    "huge tensor": huge,
    "huge tensor, claimed": huge_and_claimed,
    "more elements than bits": numbers(shapes=[(1 << 62)]),
    "negative shape": numbers(shapes=[-4]),
    "shape without end": numbers(shapes=[4] * 100_000),
    "255 dimensions": numbers(shapes=[1] * 255, ndims=[255], piece_offsets=[0] * 255, piece_sizes=[1] * 255),
    # Pieces
    "overlapping pieces": pieces((4,), ((0,), (3,)), ((2,), (2,))),
    "gap between pieces": pieces((4,), ((0,), (1,)), ((2,), (2,))),
    "piece twice": pieces((4,), ((0,), (4,)), ((0,), (4,))),
    "pieces that overlap and miss": pieces((4, 4), ((0, 0), (2, 4)), ((1, 0), (2, 4))),
    "piece beyond the tensor": numbers(piece_sizes=[5]),
    "piece before the tensor": numbers(piece_offsets=[-1], piece_sizes=[5]),
    "piece without elements": numbers(piece_sizes=[0]),
    "piece of a huge size": numbers(piece_sizes=[(1 << 63) - 1]),
    "piece at the end of numbers": numbers(piece_offsets=[(1 << 63) - 1]),
    "no pieces": numbers(piece_tensors=[], piece_ranks=[], piece_offsets=[], piece_sizes=[]),
    "piece of no tensor": numbers(piece_tensors=[7]),
    "piece of no rank": numbers(piece_ranks=[(1 << 32) - 1]),
    "alias of itself by another": numbers(aliases=[1]),
    "cut that is not there": numbers(cuts=[0]),
    "no split": numbers(splits=[0]),
    "dtype that is not there": numbers(dtypes=[255]),
    "bricks": bricks(300),
    # Names
    "names that end nowhere": numbers(name_ends=[1 << 40]),
    "names that end before they begin": numbers(name_ends=[-1]),
    "name that is not UTF-8": numbers(names=[255]),
    "name with NUL": numbers(names=[0]),
    "name that is a number sign": numbers(names=list(b"#")),
    # Plan
    "dtype of no torch": plan(dtypes=["nonsense"]),
    "dtype that is a module": plan(dtypes=["os"]),
    "dtype that is a function": plan(dtypes=["load"]),
    "dtype of dots": plan(dtypes=["serialization.load"]),
    "huge world": plan(world=1 << 24),
    "impossible world": plan(world=2**53 - 1),
    "no world": plan(world=0),
    "no trees": plan(trees=[]),
    "trees twice": plan(trees=[{"ranks": [[0, 0]], "tree": TREE}] * 2),
    "blobs of no rank": plan(blobs=[[0, 2**53 - 1]]),
    "blobs without rank 0": plan(blobs=[]),
    "meshes of huge shapes": plan(meshes=[{"first": 0, "shape": [2**24] * 100, "strides": [1] * 100}]),
    "mesh of negative strides": plan(meshes=[{"first": 0, "shape": [1], "strides": [-1]}]),
    "deep plan": raw_plan(b"[" * 200_000 + b"]" * 200_000),
    "deep plan of objects": raw_plan(b'{"a":' * 100_000 + b"1" + b"}" * 100_000),
    "plan of nothing": raw_plan(b""),
    "plan that is no JSON": raw_plan(b"\xff" * 1000),
    "plan with huge numbers": raw_plan(b'{"world":' + b"9" * 5_000_000 + b"}"),
    "crowd of 2^24": crowd((1 << 24,), 1, 1 << 24),
    "crowds": crowd(((1 << 20) - 1,), 200, 1 << 20),
    # Shards
    **{f"header of {n} bytes": header_size(n) for n in (0, 1, 4088 + 1, 8184, 99_999_992, 1 << 40, (1 << 63) - 1)},
    "header with the entry twice": header(START + b"," + X + b"," + X + b"}"),
    "header without the values": header(START + b"," + X + b"}"),
    "header in another order": header(START + b"," + V + b"," + X + b"}"),
    "header with overlapping entries": header(
        START + b"," + X + b',"~values":{"dtype":"U8","shape":[1024],"data_offsets":[0,1024]}}'
    ),
    "header with huge shapes": header(
        START
        + b',"x":{"dtype":"F32","shape":['
        + b",".join([b"9" * 15] * 255)
        + b'],"data_offsets":[0,16]},'
        + V
        + b"}"
    ),
    "header with negative offsets": header(
        START + b',"x":{"dtype":"F32","shape":[4],"data_offsets":[-16,0]},' + V + b"}"
    ),
    "header of brackets": header(b"[" * 1_000_000),
    "header of objects": header(b'{"a":' * 200_000),
    "header of a long name": header(START + b',"' + b"a" * 5_000_000 + b'":{}}'),
    "header of backslashes": header(START + b',"' + b"\\" * 1_000_001),
    "header of another rank": header(START.replace(b'"0"', b'"1"') + b"," + X + b"," + V + b"}"),
    # Manifests
    "shard twice": manifest(shards=[{"digest": "0" * 64, "rank": 0, "size": 9000}] * 2),
    "no shards": manifest(shards=[]),
    "shards backwards": manifest(world=2, shards=[{"digest": "0" * 64, "rank": n, "size": 9000} for n in (1, 0)]),
    "shard of no rank": manifest(shards=[{"digest": "0" * 64, "rank": 2**53 - 1, "size": 9000}]),
    "shard of negative size": manifest(shards=[{"digest": "0" * 64, "rank": 0, "size": -1}]),
    "shard of gigantic size": manifest(shards=[{"digest": "0" * 64, "rank": 0, "size": 2**53 - 1}]),
    "many shards": manifest(world=5_000, shards=[{"digest": "0" * 64, "rank": n, "size": 1} for n in range(5_000)]),
    "manifest of a huge world": manifest(world=2**53 - 1),
    "manifest of another run": manifest(run="another"),
    "manifest of another step": manifest(step=2),
    "manifest with a feature": manifest(requires=["holograms"]),
    "manifest with an endless list of features": manifest(requires=["a" * 1000] * 10_000),
    "manifest with one key too many": manifest(more=1),
    "manifest with one key too few": manifest(step=...),
    "manifest with deep metadata": manifest(metadata=nested(255)),
    "manifest with deeper metadata": manifest(metadata=nested(900)),
    "manifest with unknown metadata": manifest(metadata=["os.system", "true"]),
    "layout that is a path": manifest(layout="../../../../etc/passwd"),
    "layout that is not there": manifest(layout="ab" * 32),
    # Receipts
    "receipt of another rank": receipt(rank=1, world=2),
    "receipt of gigantic size": receipt(size=2**53 - 1),
    "receipt of negative size": receipt(size=-1),
    "receipt of too few chunks": receipt(chunks=""),
    "receipt of too many chunks": receipt(chunks="A" * 4_000_000),
    "receipt of chunks that are no base64": receipt(chunks="*" * 44),
    "receipt with a header of nothing": receipt(header={"digest": "0" * 64, "size": 0}),
    "receipt with a header beyond the shard": receipt(header={"digest": "0" * 64, "size": 1 << 40}),
    "receipt with a path": receipt(name="../../shard-00000.safetensors"),
    "receipt with a form": receipt(stored={"form": "hologram"}),
    "receipt with a deep form": receipt(stored=nested(200)),
    "manifest whose shards lie elsewhere": roots([[[0, 0]], [[1, 2**52]]], world=2**53 - 1),
    # tierckpt.json
    "store of another chunk": store(chunk=1),
    "store of no chunk": store(chunk=0),
    "store of another digest": store(digest="md5"),
    "store with a feature": store(requires=["holograms"]),
    "store of a path": store(run="../../../home"),
    "store of no run": store(run=""),
    "store of a long run": store(run="a" * 1_000_000),
    "store of the future": store(format=2),
    "store of another kind": store(kind="link"),
    # Links
    "link of a huge number": link(begin, number=2**53 - 1),
    "link of a huge generation": link(begin, generation=2**53 - 1),
    "link of huge ranges": link(begin, live=[[0, 2**53 - 1]]),
    "link of endless ranges": link(begin, live=[[2 * i, 2 * i] for i in range(100_000)]),
    "link of no ranges": link(begin, live=[]),
    "link of no time": link(begin, time="9999-99-99T99:99:99.999999Z"),
    "link of year 0": link(begin, time="0000-00-00T00:00:00.000000Z"),
    "link of a path": link(begin, run="../../x"),
    "link from nowhere": link(begin, **{"from": {"generation": 1, "id": "0" * 64, "step": 5}}),
    "link that retires endlessly": link(
        retire, checkpoints=[{"generation": 1, "id": "0" * 64, "step": i} for i in range(20_000)]
    ),
    "link that retires nothing": link(retire, checkpoints=[]),
    "link of an unknown action": link(begin, action="explode"),
    "link with a deep body": link(begin, store=nested(60)),
    "link with a deeper body": link(begin, store=nested(900)),
}

#: Not what format.md says, in places that ``verify`` need not look into: what only a load decodes.
NONSENSE: dict[str, Callable[[Forger], None]] = {
    # Trees
    "tree that is no tree": tree(5),
    "tree of an unknown kind": tree(["os.system", ["x"]]),
    "tree that names no tensor": tree(["dict", [["x", ["tensor"]], ["y", ["tensor"]]]]),
    "tree without its value": tree(["dict", [["v", ["value"]], ["w", ["value"]], ["x", ["tensor"]]]]),
    "tree with a pair too long": tree(["dict", [["x", ["tensor"], 1]]]),
    "tree with a key that is a list": tree(["dict", [[["list", []], ["tensor"]]]]),
    "tree with an unknown key": tree(["dict", [[["os", "system"], ["tensor"]]]]),
    "deep tree": tree(["dict", [["x", ["tensor"]], ["d", nested(100, ["tensor"])]]]),
    "array of objects": tree(["dict", [["x", ["array", "|O", [4]]]]]),
    "array of another size": tree(["dict", [["x", ["array", "<f4", [1 << 40]]]]]),
    "array of nonsense": tree(["dict", [["x", ["array", "os.system", "x"]]]]),
    "named tuple that lies": tree(["namedtuple", "os.system", ["a"] * 5, [["tensor"]]]),
    "subclass": tree(["dict", [["x", ["subclass", "os.system", [[5, ["tensor"]]], ["os", "system"]]]]]),
    "tree that is a value": tree(["value"]),
    # Values
    "blob of spaces": blob(b""),
    "blob of nesting": blob(b"[" * 1000),
    "blob that is no JSON": blob(b"\0" * 1024),
    "blob of the wrong capacity": blob(b'[["v","x"]]', 1 << 20),
    "blob with the name twice": blob(b'[["v","x"],["v","y"]]'),
    "blob without the value": blob(b'[["w","x"]]'),
    "blob out of order": blob(b'[["v","x"],["a","y"]]'),
    "deep value": value(nested(250)),
    "endless integer": value(["int", "f" * 10_000_000]),
    "no integer": value(["int", "x"]),
    "float without end": value(["float", "1e" + "9" * 1_000_000]),
    "NaN of nonsense": value(["float", "nan:zz"]),
    "bytes of nonsense": value(["bytes", "????"]),
    "array value of objects": value(["ndarray", "|O", [1], "AAAAAAAA"]),
    "array value of another size": value(["ndarray", "<f8", [1 << 40], ""]),
    "huge empty array value": value(["ndarray", "<f8", [1 << 40, 0], ""]),
    "array value of no items": value(["ndarray", "|S0", [1 << 40], ""]),
    "torch size": value(["torch.Size", [-1, 2**53 - 1]]),
    "torch dtype": value(["torch.dtype", "load"]),
    "torch device": value(["torch.device", "cuda:999999"]),
    "date of nonsense": value(["datetime", "9999-99-99T99:99:99"]),
    "time of nonsense": value(["timedelta", 2**53 - 1, 0, 0]),
    "enum": value(["enum", "os.system", "x", ["enum", "os.system", None, 1]]),
    "set of lists": value(["set", [["list", []]]]),
    "dict with a list as key": value(["dict", [[["list", []], 1]]]),
    "counter of text": value(["Counter", [["a", "b"]]]),
    "unknown value": value(["os.system", "true"]),
}

#: Nonsense that a load may take, since it harms nobody.
ALLOWED = ("endless integer", "huge empty array value", "torch size", "enum", "counter of text")


def many_leaves(count: int) -> Any:
    return ["dict", [*TREE[1], *[[f"y{i:06d}", ["tensor"]] for i in range(count)]]]


#: Odd, but not wrong: they must be read without complaint.
HARMLESS: dict[str, Callable[[Forger], None]] = {
    "good": good,
    "splinters": splinters(100),
    "long name": lambda forger: forger.describe(
        [entry(), entry("y" * 1_000_000)],
        ["dict", [["x", ["tensor"]], ["v", ["value"]], ["y" * 1_000_000, ["tensor"]]]],
        VALUES,
    ),
    "many tensors": lambda forger: forger.describe(
        [entry(), *[entry(f"y{i:06d}", shape=(1,)) for i in range(20_000)]],
        many_leaves(20_000),
        VALUES,
    ),
    "name like a path": lambda forger: forger.describe(
        [entry("~0~1..~1..~1etc")], ["dict", [["~/../../etc", ["tensor"]], ["v", ["value"]]]], VALUES
    ),
}


def actions(root: Path) -> dict[str, Callable[[], Any]]:
    """All that reads a store."""
    return {
        "verify": lambda: tierckpt.verify(root, every=True),
        "read": lambda: tierckpt.read(root),
        "load": lambda: tierckpt.load({"v": "", "x": torch.zeros(4)}, root),
        "command": lambda: main(["verify", "--all", str(root)]),
        "inspect": lambda: main(["inspect", "--json", str(root)]),
    }


def limit_memory() -> None:
    torch.zeros(1)
    mapped = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (mapped + MEMORY, resource.RLIM_INFINITY))


def try_all(rank: int, stores: list[str]) -> None:
    """What became of each action on each store, in a file beside it."""
    limit_memory()
    warnings.simplefilter("ignore")
    for root in stores:
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.monotonic()
        outcome: dict[str, Any] = {}
        for name, action in actions(Path(root)).items():
            try:
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                    result = action()
            except TierckptError as error:
                outcome[name] = f"refused: {type(error).__name__}: {str(error)[:300]}"
            except BaseException as error:
                outcome[name] = f"UNTYPED: {type(error).__name__}: {str(error)[:300]}"
            else:
                outcome[name] = result if isinstance(result, int) else getattr(result, "ok", "done")
        outcome["seconds"] = time.monotonic() - began
        outcome["resident"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        with Path(root + ".outcome").open("w") as file:
            json.dump(outcome, file)


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], dict[str, Any]]:
    """What became of a case. Neighbours share a process; should it die, whoever has no outcome yet is to blame."""
    base = tmp_path_factory.mktemp("hostile")
    cases = HOSTILE | NONSENSE | HARMLESS
    names = list(cases)
    key = SigningKey.generate()  # one for all: the first use pins it
    tried: dict[str, str] = {}

    def outcome(case: str) -> dict[str, Any]:
        if case not in tried:
            begin = names.index(case) // BATCH * BATCH
            batch = {name: str(base / f"{begin}-{i}") for i, name in enumerate(names[begin : begin + BATCH])}
            for name, root in batch.items():
                forger = Forger(Path(root), key)
                cases[name](forger)
                forger.write()
            spawn(try_all, 1, list(batch.values()), group=False)
            tried.update(batch)
        path = Path(tried[case] + ".outcome")
        assert path.exists(), "the process died or hung here, or in a case of the same batch before it"
        found: dict[str, Any] = json.loads(path.read_text())
        assert not [text for text in found.values() if str(text).startswith("UNTYPED")], found
        assert "signed by key" not in str(found), found  # then nothing else would have been tried
        assert found["seconds"] < SECONDS, found
        assert found["resident"] < RESIDENT, found
        return found

    return outcome


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile(outcomes: Callable[[str], dict[str, Any]], case: str) -> None:
    found = outcomes(case)
    assert found["verify"] is False
    assert found["command"] == 1
    assert str(found["load"]).startswith("refused"), found
    assert str(found["read"]).startswith("refused"), found


def read_sparse(rank: int, root: str) -> str:
    limit_memory()
    with pytest.raises(StateError, match="not enough memory") as raised:
        tierckpt.read(root)
    return str(raised.value)


def test_a_file_that_is_as_huge_as_it_claims(tmp_path: Path) -> None:
    """Nothing lies but that nobody has that much memory: a hole in a file costs its writer nothing."""
    forger = Forger(tmp_path / "store")
    huge_and_sparse(forger)
    try:
        forger.write()
    except OSError:
        pytest.skip("this file system has no files of 4 TiB")
    (message,) = run_ranks(read_sparse, 1, str(forger.root), group=False)
    assert "step 1" in message


@pytest.mark.parametrize("case", NONSENSE)
def test_nonsense(outcomes: Callable[[str], dict[str, Any]], case: str) -> None:
    found = outcomes(case)
    assert str(found["load"]).startswith("refused") or case in ALLOWED, found
    assert str(found["read"]).startswith("refused") or case in ALLOWED, found


@pytest.mark.parametrize("case", HARMLESS)
def test_harmless(outcomes: Callable[[str], dict[str, Any]], case: str) -> None:
    found = outcomes(case)
    assert found["verify"] is True
    assert found["command"] == 0
    assert found["read"] == "done"


# Whatever else there may be

JSONS = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53) + 1, 2**53 - 1) | st.text(max_size=8) | st.just("0" * 64),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(["a", "kind", "rank", "size"]), inner, max_size=3)
    ),
    max_leaves=6,
)


def graft(draw: st.DrawFn, found: Any) -> Any:
    """``found`` with something else in one random place."""
    if isinstance(found, dict) and found and draw(st.integers(0, 9)):
        key = draw(st.sampled_from(sorted(found)))
        return {**found, key: graft(draw, found[key])}
    if isinstance(found, list) and found and draw(st.integers(0, 9)):
        index = draw(st.integers(0, len(found) - 1))
        return [*found[:index], graft(draw, found[index]), *found[index + 1 :]]
    return draw(JSONS)


@st.composite
def tampering(draw: st.DrawFn) -> tuple[str, Callable[[Forger], None]]:
    """One change to one document or column of a good store."""
    kind = draw(
        st.sampled_from(["store", "manifest", "receipt", "plan", "column", "tree", "value", "header", "blob", "layout"])
    )

    def data(bytes_: bytes) -> bytes:
        at = draw(st.integers(0, len(bytes_) - 1))
        return bytes_[:at] + draw(st.binary(min_size=1, max_size=4)) + bytes_[at + draw(st.integers(0, 3)) :]

    def work(forger: Forger) -> None:
        forger.describe(
            [entry(), entry("y", "int64", (2, 3), pieces=[(0, Box((0, 0), (1, 3))), (0, Box((1, 0), (1, 3)))])],
            graft(draw, ["dict", [["v", ["value"]], ["x", ["tensor"]], ["y", ["tensor"]]]]) if kind == "tree" else TREE,
            {"v": graft(draw, ["dict", [["k", ["float", "1.5"]], ["l", ["list", [1]]]]])}
            if kind == "value"
            else VALUES,
        )
        if kind == "store":
            forger.store = canonical.encode(graft(draw, canonical.decode(forger.store, what="store")))
        elif kind == "layout":
            forger.layout = data(forger.layout)
        elif kind == "header":
            forger.shards[0] = data(forger.shards[0][:400]) + forger.shards[0][400:]
        elif kind == "blob":
            forger.shards[0] = forger.shards[0][:-1024] + data(forger.shards[0][-1024:])
        elif kind == "manifest":
            key = draw(
                st.sampled_from(["generation", "layout", "metadata", "requires", "run", "shards", "step", "world"])
            )
            forger.manifest_changes = {key: draw(JSONS)}
        elif kind == "receipt":
            key = draw(
                st.sampled_from(["chunks", "header", "layout", "metadata", "name", "rank", "size", "stored", "world"])
            )
            forger.receipt_changes[0] = {key: draw(JSONS)}
        elif kind == "plan":
            forger.layout = change_columns(forger.layout, lambda found: found.update(plan=graft(draw, found["plan"])))
        elif kind == "column":
            name = draw(st.sampled_from([name for name in COLUMNS if name != "plan"]))
            low, high, code = {"U8": (0, 255, "B"), "U32": (0, 2**32 - 1, "I"), "I64": (-(2**63), 2**63 - 1, "q")}[
                COLUMNS[name]
            ]
            few = st.integers(max(low, -2), 5) | st.integers(low, high)
            column = array(code, draw(st.lists(few, max_size=8)))
            forger.layout = change_columns(forger.layout, lambda found: found.update({name: column}))

    return kind, work


@settings(max_examples=150, suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture])
@given(tampering())
def test_anything_signed(tmp_path_factory: pytest.TempPathFactory, case: tuple[str, Callable[[Forger], None]]) -> None:
    """No reader raises anything but errors of ours, whatever one document says."""
    with tempfile.TemporaryDirectory(dir=tmp_path_factory.getbasetemp()) as base:
        forger = Forger(Path(base, "store"), KEY)
        case[1](forger)
        forger.write()
        with (
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            for name, action in actions(forger.root).items():
                try:
                    result = action()
                except TierckptError:
                    continue
                assert not isinstance(result, int) or result in (0, 1), name


KEY = SigningKey.generate()
