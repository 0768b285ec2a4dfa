"""A second, independent reader of stores, written from docs/format.md alone: no code of the package is used.

Only for tests, and for whoever wants to know that the page suffices: ``python tests/second_reader.py STORE``.
It favours shortness over speed; bytes are right or `Bad` is raised.
"""

from __future__ import annotations

import base64
import json
import math
import struct
import sys
from collections import Counter, OrderedDict, namedtuple
from datetime import date, datetime, time, timedelta
from itertools import pairwise, product
from pathlib import Path
from typing import Any

from blake3 import blake3
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

Tensor = namedtuple("Tensor", "dtype shape data")
PerRank = namedtuple("PerRank", "values")  # by rank
Other = namedtuple(
    "Other", "kind args"
)  # values of torch and numpy, and the containers of tensors without a plain kind
C = 4194304
SIZES = {
    "bool": 1,
    "uint8": 1,
    "int8": 1,
    "uint16": 2,
    "int16": 2,
    "uint32": 4,
    "int32": 4,
    "uint64": 8,
    "int64": 8,
}
SIZES |= {
    "float16": 2,
    "bfloat16": 2,
    "float32": 4,
    "float64": 8,
    "complex32": 4,
    "complex64": 8,
    "complex128": 16,
}
SIZES |= dict.fromkeys(["float8_e5m2", "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu"], 1)
SIZES |= {"float4_e2m1fn_x2": 1}
STORED = {"bool": "BOOL", "bfloat16": "BF16", "float8_e5m2": "F8_E5M2", "float8_e4m3fn": "F8_E4M3"}
STORED |= {f"{a}{n}": f"{b}{n}" for a, b in (("uint", "U"), ("int", "I")) for n in (8, 16, 32, 64)}
STORED |= {f"float{n}": f"F{n}" for n in (16, 32, 64)}


class Bad(Exception):
    """The store is not what the page says."""


def need(condition, *message):
    if not condition:
        raise Bad(" ".join(map(str, message)))


def H(domain, data):  # noqa: N802 - the page calls it so
    return blake3(data, derive_key_context="tierckpt 1 " + domain).digest()


def canonical(value):
    return json.dumps(value, ensure_ascii=False, sort_keys=True, separators=(",", ":")).encode()


def file(store, name):
    path = Path(store, name)
    need(path.is_file() and not path.is_symlink(), name, "is missing")
    return path.read_bytes()


def document(store, name, kind, keys):
    data = file(store, name)
    try:
        value = json.loads(data)
        same = canonical(value) == data
    except (ValueError, RecursionError) as error:
        raise Bad(f"{name}: {error}") from None
    need(same, name, "is not canonical")
    need(type(value) is dict and set(value) == {"format", "kind", *keys.split()}, name, "has other keys")
    need(value["format"] == 1 and value["kind"] == kind, name, "is not of this kind or format")
    need(value.get("requires", []) == [], name, "requires more than this reader knows")
    return value, data


def ranges(value):
    """The numbers of a list of ranges."""
    need(
        all(a <= b for a, b in value) and all(x[1] + 1 < y[0] for x, y in pairwise(value)),
        "ranges",
        value,
    )
    return [number for first, last in value for number in range(first, last + 1)]


def link_name(number):
    return f"chain/{number:012d}.json"


def step_dir(checkpoint):
    return f"g{checkpoint['generation']:04d}/s{checkpoint['step']:012d}"


# The chain: section 3


class Chain:
    def __init__(self, store, trust=None):
        info, data = document(store, "tierckpt.json", "store", "chunk digest requires run")
        need(info["chunk"] == C and info["digest"] == "blake3-256", "tierckpt.json: unknown chunks")
        self.run, self.store = info["run"], H("store", data).hex()
        self.live, self.committed, self.begins, self.keys, self.generation = {}, set(), {}, {}, 0
        self.roots = {}
        names = {path.name for path in Path(store, "chain").glob("*.json") if not path.name.startswith(".")}
        need(names == {link_name(n)[6:] for n in range(len(names))} and names, "chain/: numbers are missing")
        self.head = None
        for number in range(len(names)):
            self.head = self.take(store, number)
        if trust is not None:
            trusted, before = set(trust), None
            while trusted != before:
                before = set(trusted)
                trusted |= {key for key, by in self.keys.items() if by & trusted}
            need(self.signer in trusted, "the head is signed by", self.signer, "which is not trusted")

    def take(self, store, number):
        name = link_name(number)
        value, data = document(store, name, "link", "body signature")
        body, action = value["body"], value["body"]["action"]
        own = {"begin": "generation from store", "commit": "checkpoint pinned roots", "retire": "checkpoints"}
        own["key"] = "introduces"
        need(set(body) == set(f"action key live number previous run time {own[action]}".split()), name, "keys")
        need(body["number"] == number and body["run"] == self.run, name, "is not of this place or run")
        need(body["previous"] == self.head, name, "does not follow the link before it")
        try:
            key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(body["key"]))
            key.verify(base64.b64decode(value["signature"], validate=True), b"tierckpt 1 link\0" + canonical(body))
        except (InvalidSignature, ValueError):
            raise Bad(f"{name}: wrong signature") from None
        unendorsed = action == "key" and body["introduces"] == body["key"]
        need(number == 0 or (body["key"] in self.keys) != unendorsed, name, "signed by an unknown key")
        need(number or action == "begin", name, "is not a begin link")
        if number == 0:
            self.keys[body["key"]] = set()
        here = {self.id(c): n for n, c in self.live.items()}
        if action == "begin":
            need(body["generation"] == self.generation + 1 and body["store"] == self.store, name, "wrong begin")
            need(body["from"] is None or self.id(body["from"]) in here, name, "continues what is not live")
            self.generation += 1
            self.begins[self.generation] = body["from"]
        elif action == "commit":
            generation, step, _ = self.id(body["checkpoint"])
            need(
                generation <= self.generation and (generation, step) not in self.committed,
                name,
                "wrong commit",
            )
            self.committed.add((generation, step))
            self.live[number] = body["checkpoint"]
            self.roots[self.id(body["checkpoint"])] = body["roots"]
        elif action == "retire":
            gone = [self.id(checkpoint) for checkpoint in body["checkpoints"]]
            need(gone and len(set(gone)) == len(gone) and set(gone) <= set(here), name, "wrong retire")
            for checkpoint in gone:
                del self.live[here[checkpoint]]
        else:
            self.keys.setdefault(body["introduces"], set()).update([] if unendorsed else [body["key"]])
        need(ranges(body["live"]) == sorted(self.live), name, "live is wrong")
        self.signer = body["key"]
        return H("link", data).hex()

    @staticmethod
    def id(checkpoint):
        need(set(checkpoint) == {"generation", "step", "id"}, "checkpoint", checkpoint)
        return checkpoint["generation"], checkpoint["step"], checkpoint["id"]

    def lineage(self):
        found, generation, last = [], self.generation, math.inf
        while generation:
            found += [c for c in self.live.values() if c["generation"] == generation and c["step"] <= last]
            origin = self.begins[generation]
            generation, last = (origin["generation"], origin["step"]) if origin else (0, 0)
        return sorted(found, key=lambda c: (c["step"], c["generation"]), reverse=True)


# Layouts: section 6


class Layout:
    def __init__(self, store, digest):
        name = f"layouts/{digest}.safetensors"
        data = file(store, name)
        need(H("layout", data).hex() == digest, name, "is not what its name says")
        n = int.from_bytes(data[:8], "little")
        header, at, columns = json.loads(data[8 : 8 + n]), 8 + n, {}
        need(at % 8 == 0 and header.pop("__metadata__") == {"tierckpt": "layout 1"}, name, "header")
        for column, entry in header.items():
            low, high = entry["data_offsets"]
            code, size = {"U8": ("B", 1), "U32": ("I", 4), "I64": ("q", 8)}[entry["dtype"]]
            need(at == 8 + n + low and entry["shape"] == [(high - low) // size], name, column)
            columns[column] = struct.unpack(f"<{(high - low) // size}{code}", data[at : at + high - low])
            at += high - low
        order = "plan shapes piece_offsets piece_sizes name_ends aliases cuts writers splits piece_tensors"
        need(
            list(columns) == [*order.split(), "piece_ranks", "dtypes", "ndims", "names"] and at == len(data),
            name,
            "columns",
        )
        plan = bytes(columns["plan"])
        self.plan = json.loads(plan)
        need(canonical(self.plan) == plan, name, "plan is not canonical")
        self.world, self.blobs = self.plan["world"], set(ranges(self.plan["blobs"]))
        self.tensors = {}  # name: (dtype, shape, name of the tensor that has the bytes)
        self.pieces = {}  # name: [(rank, offset, size)]
        names, start, dims = [], 0, iter(columns["shapes"])
        for end in columns["name_ends"]:
            names.append(bytes(columns["names"][start:end]).decode())
            start = end
        need(start == len(columns["names"]) and names == sorted(set(names), key=str.encode), name, "names")
        offsets, sizes = iter(columns["piece_offsets"]), iter(columns["piece_sizes"])
        listed = {}
        for t, rank in zip(columns["piece_tensors"], columns["piece_ranks"], strict=True):
            d = range(columns["ndims"][t])
            listed.setdefault(t, []).append((rank, [next(offsets) for _ in d], [next(sizes) for _ in d]))
        for t, tensor in enumerate(names):
            shape = [next(dims) for _ in range(columns["ndims"][t])]
            target = columns["aliases"][t]
            self.tensors[tensor] = (self.plan["dtypes"][columns["dtypes"][t]], shape, names[target])
            if target != t:
                need(columns["aliases"][target] == target and t not in listed, tensor, "is a wrong alias")
                continue
            if columns["cuts"][t] == 2**32 - 1:
                pieces = listed.get(t, [])
            else:
                pieces = self.grid(
                    self.plan["cuts"][columns["cuts"][t]], shape, columns["writers"][t], columns["splits"][t]
                )
            self.pieces[tensor] = [piece for piece in pieces if 0 not in piece[2]]
            self.tiled(tensor, shape)
        for tensor, (dtype, shape, target) in self.tensors.items():
            need(self.tensors[target][:2] == (dtype, shape), tensor, "differs from what it is an alias of")
        self.writers = sorted(self.blobs | {piece[0] for pieces in self.pieces.values() for piece in pieces})
        need(0 in self.blobs and self.writers[-1] < self.world, name, "ranks")

    def grid(self, cut, shape, writer, split):
        mesh, placements = self.plan["meshes"][cut["mesh"]], cut["placements"]
        cells = list(product(*map(range, mesh["shape"])))
        if "ranks" in mesh:
            ranks = dict(zip(cells, mesh["ranks"], strict=True))
        else:
            ranks = {c: mesh["first"] + sum(map(int.__mul__, c, mesh["strides"])) for c in cells}
        need(sorted(cut["order"]) == [m for m, d in enumerate(placements) if d >= 0], "order of a cut")
        replicas = {}
        for c in cells:  # row-major, so replicas of one box come in the order in which they are numbered
            replicas.setdefault(tuple(c[m] for m in sorted(cut["order"])), []).append(c)
        for same in replicas.values():
            offset, size, c = [0] * len(shape), list(shape), same[0]
            for m in cut["order"]:
                d, s = placements[m], mesh["shape"][m]
                n, q = size[d], -(-size[d] // s)
                low, high = min(c[m] * q, n), min((c[m] + 1) * q, n)
                offset[d], size[d] = offset[d] + low, high - low
            need(1 <= split <= len(same) and writer < len(same), "writers of a cut")
            d = next((d for d, m in enumerate(size) if m >= split), None)
            for i in range(split if d is not None else 1):
                o, s = list(offset), list(size)
                if d is not None:
                    low, high = i * size[d] // split, (i + 1) * size[d] // split
                    o[d], s[d] = offset[d] + low, high - low
                yield ranks[same[(writer + i) % len(same)]], o, s

    def tiled(self, tensor, shape):
        boxes = [(tuple(o), tuple(s)) for _, o, s in self.pieces[tensor]]
        inside = all(o >= 0 and s > 0 and o + s <= n for b in boxes for o, s, n in zip(*b, shape, strict=True))
        need(inside and sum(math.prod(s) for _, s in boxes) == math.prod(shape), tensor, "is not tiled")
        boxes.sort()
        for i, (o, s) in enumerate(boxes):
            for p, t in boxes[i + 1 :]:
                if o and p[0] >= o[0] + s[0]:
                    break
                need(
                    any(a + b <= c or c + d <= a for a, b, c, d in zip(o, s, p, t, strict=True)),
                    tensor,
                    "is stored twice",
                )

    def header(self, rank, digest, blob):
        """The bytes of the header, and where each piece lies: (tensor, offset, size, first byte, bytes)."""
        mine = []
        for tensor, pieces in self.pieces.items():
            boxes = sorted((o, s) for r, o, s in pieces if r == rank)
            mine += [(tensor, k if len(boxes) > 1 else None, o, s) for k, (o, s) in enumerate(boxes)]
        mine.sort(key=lambda p: (-SIZES[self.tensors[p[0]][0]], p[0].encode(), p[1] or 0))
        meta = {"format": "pt", "tierckpt": "shard 1", "layout": digest, "rank": str(rank)}
        entries, places, at = {"__metadata__": meta}, [], 0
        for tensor, k, o, s in mine:
            dtype = self.tensors[tensor][0]
            n = math.prod(s) * SIZES[dtype]
            shape = s if dtype in STORED else [*s, SIZES[dtype]]
            entry = {"dtype": STORED.get(dtype, "U8"), "shape": shape, "data_offsets": [at, at + n]}
            entries[tensor if k is None else f"{tensor}#{k}"] = entry
            places.append((tensor, o, s, at, n))
            at += n
        if blob is not None:
            entries["~values"] = {"dtype": "U8", "shape": [blob], "data_offsets": [at, at + blob]}
        text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
        n = -(-(8 + len(text)) // 4096) * 4096 - 8
        return struct.pack("<Q", n) + text.ljust(n), places, at


# Checkpoints: sections 2, 4 and 9


class Checkpoint:
    def __init__(self, store, chain, ref):
        run, roots = chain.run, chain.roots[chain.id(ref)]
        name = step_dir(ref) + "/manifest.json"
        keys = "generation layout metadata requires run shards step world"
        self.manifest, data = document(store, name, "manifest", keys)
        need(H("manifest", data).hex() == ref["id"], name, "is not what was committed")
        same = {"run": run, "generation": ref["generation"], "step": ref["step"]}
        need({key: self.manifest[key] for key in same} == same, name, "is of another checkpoint")
        self.layout = Layout(store, self.manifest["layout"])
        need(self.layout.world == self.manifest["world"], name, "world is not that of the layout")
        need(
            [s["rank"] for s in self.manifest["shards"]] == self.layout.writers,
            name,
            "ranks are not the writers",
        )
        self.blobs, self.bytes = {}, {tensor: bytearray() for tensor in self.layout.tensors}
        for tensor in self.layout.pieces:
            dtype, shape, _ = self.layout.tensors[tensor]
            self.bytes[tensor] = bytearray(math.prod(shape) * SIZES[dtype])
        here = {s["rank"] for s in self.manifest["shards"] if self.any_of(store, step_dir(ref), s["rank"])}
        own = [set(ranges(r)) for r in roots if set(ranges(r)) & here]
        for shard in self.manifest["shards"]:
            if not own or any(shard["rank"] in ranks for ranks in own):
                self.read(store, step_dir(ref), shard)

    def read(self, store, folder, shard):
        m, rank, name = self.manifest, shard["rank"], f"{folder}/shard-{shard['rank']:05d}.safetensors"
        keys = "chunks generation header layout metadata name rank run size step stored world"
        receipt, _ = document(store, name.replace(".safetensors", ".receipt.json"), "receipt", keys)
        wanted = {key: m[key] for key in ("run", "generation", "step", "world", "layout")}
        wanted |= {"name": name, "rank": rank, "size": shard["size"], "stored": {"form": "plain"}}
        wanted["metadata"] = m["metadata"] if rank == 0 else None
        need(
            {key: receipt[key] for key in wanted} == wanted,
            name,
            "has a receipt that is not of this manifest",
        )
        chunks, head = base64.b64decode(receipt["chunks"]), receipt["header"]
        bound = struct.pack("<Q", len(name)) + name.encode() + struct.pack("<QQ", receipt["size"], head["size"])
        found = H("shard", bound + bytes.fromhex(head["digest"]) + chunks).hex()
        need(found == shard["digest"], name, "has a receipt of another digest")
        data = file(store, name)
        size = receipt["size"]
        need(size and len(data) == size, name, "has", len(data), "bytes")
        digests = [blake3(data[i : i + C]).digest() for i in range(0, len(data), C)]
        wrong = [i for i, digest in enumerate(digests) if digest != chunks[32 * i : 32 * i + 32]]
        need(not wrong and len(chunks) == 32 * len(digests), name, "chunks", wrong, "are damaged")
        need(H("header", data[: head["size"]]).hex() == head["digest"], name, "has another header")
        entries = json.loads(data[8 : head["size"]])
        blob = entries["~values"]["shape"][0] if "~values" in entries else None
        need((blob is not None) == (rank in self.layout.blobs), name, "has or lacks a blob")
        header, places, end = self.layout.header(rank, m["layout"], blob)
        need(header == data[: head["size"]], name, "has a header that is not that of its layout")
        need(len(header) + end + (blob or 0) == len(data), name, "is longer than its entries")
        for tensor, offset, size, at, n in places:
            self.scatter(tensor, offset, size, memoryview(data)[len(header) + at : len(header) + at + n])
        if blob is not None:
            text = data[-blob:].rstrip(b" ")
            pairs = json.loads(text)
            need(
                canonical(pairs) == text and blob == max(1024, 1 << (len(text) - 1).bit_length()),
                name,
                "blob",
            )
            self.blobs[rank] = dict(pairs)
            need(
                list(self.blobs[rank]) == sorted({p[0] for p in pairs}, key=str.encode),
                name,
                "names in the blob",
            )

    def any_of(self, store, folder, rank):
        return any(Path(store, folder, f"shard-{rank:05d}.{end}").exists() for end in ("safetensors", "receipt.json"))

    def scatter(self, tensor, offset, size, data):
        dtype, shape, _ = self.layout.tensors[tensor]
        row, at = (size[-1] if size else 1) * SIZES[dtype], 0
        for index in product(*(range(o, o + s) for o, s in zip(offset[:-1], size[:-1], strict=True))):
            place = 0
            for i, n in zip((*index, *offset[-1:]), shape, strict=True):
                place = place * n + i
            place *= SIZES[dtype]
            self.bytes[tensor][place : place + row] = data[at : at + row]
            at += row

    def tree(self):
        trees = [(ranges(tree["ranks"]), tree["tree"]) for tree in self.layout.plan["trees"]]
        need(sorted(rank for ranks, _ in trees for rank in ranks) == list(range(self.layout.world)), "trees")
        found = [self.node(tree, "", ranks) for ranks, tree in trees]
        for other in found[1:]:
            found[0] = merged(found[0], other)
        return found[0]

    def node(self, node, name, ranks):
        kind, full = node[0], name or "~r"
        prefix = name + "/" if name else ""
        if kind in ("tensor", "array"):
            dtype, shape, target = self.layout.tensors[full]
            whole = Tensor(dtype, tuple(shape), bytes(self.bytes[target]))
            return whole if kind == "tensor" else Other("array", (node[1], tuple(node[2]), whole.data))
        if kind == "value":
            return decode(self.blobs[min(ranks)][full])
        if kind == "per_rank":
            return PerRank({rank: decode(self.blobs[rank][full]) for rank in ranks})
        if kind in ("dict", "OrderedDict", "defaultdict"):
            pairs = [(decode(key), self.node(n, prefix + component(key), ranks)) for key, n in node[1]]
            return (OrderedDict if kind == "OrderedDict" else dict)(pairs)
        if kind == "subclass":
            return {key: self.node(n, prefix + component(key), ranks) for key, n in node[2]}
        need(kind in ("list", "tuple", "namedtuple"), "node", kind)
        items = [self.node(n, f"{prefix}{i}", ranks) for i, n in enumerate(node[3 if kind == "namedtuple" else 1])]
        return items if kind == "list" else tuple(items)


def merged(one, other):
    """Both of two structures that different ranks saved."""
    if isinstance(one, dict) and isinstance(other, dict):
        both = [(key, merged(value, other[key]) if key in other else value) for key, value in one.items()]
        return type(one)([*both, *((key, value) for key, value in other.items() if key not in one)])
    if isinstance(one, PerRank) and isinstance(other, PerRank):
        return PerRank({**one.values, **other.values})
    if type(one) is type(other) and type(one) in (list, tuple):
        longer = one if len(one) > len(other) else other
        return type(one)(
            [merged(a, b) for a, b in zip(one, other, strict=False)] + list(longer[min(len(one), len(other)) :])
        )
    return one


# Names and values: sections 5 and 8


def component(key):
    """How the encoded key is written in a name."""
    if type(key) is int:
        return str(key)
    if type(key) is list and key[0] == "int":
        return str(int(key[1], 16))
    if type(key) is not str:
        return "~k" + base64.urlsafe_b64encode(canonical(key)).decode().rstrip("=")
    digits = key.removeprefix("-")
    if key == "__metadata__" or (digits.isascii() and digits.isdigit()):
        return "~s" + key
    return key.replace("~", "~0").replace("/", "~1").replace("#", "~2") or "~e"


def decode(value):
    if type(value) is not list:
        need(type(value) is not dict, "an object is no value")
        return value
    kind, args = value[0], value[1:]
    if kind in ("list", "tuple", "set", "frozenset"):
        return {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}[kind](map(decode, args[0]))
    if kind in ("dict", "OrderedDict", "Counter", "defaultdict"):
        made = {"OrderedDict": OrderedDict, "Counter": Counter}.get(kind, dict)()
        for key, item in args[0]:
            made[decode(key)] = decode(item)
        return made
    if kind == "float" and args[0].startswith("nan"):
        return struct.unpack(">d", bytes.fromhex(args[0][4:] or "7ff8000000000000"))[0]
    if kind in ("bytes", "bytearray"):
        return {"bytes": bytes, "bytearray": bytearray}[kind](base64.b64decode(args[0]))
    if kind in ("datetime", "date", "time"):
        made = {"datetime": datetime, "date": date, "time": time}[kind].fromisoformat(args[0])
        return made.replace(fold=1) if len(args) == 2 else made
    if kind in ("numpy", "ndarray"):
        return Other(kind, (args[0], tuple(args[1]) if kind == "ndarray" else (), base64.b64decode(args[-1])))
    if kind in ("torch.dtype", "torch.device", "torch.Size"):
        return Other(kind, args[0] if kind != "torch.Size" else tuple(args[0]))
    simple = {
        "int": lambda text: int(text, 16),
        "float": float,
        "complex": lambda real, imaginary: complex(decode(real), decode(imaginary)),
        "timedelta": timedelta,
        "enum": lambda path, name, written: decode(written),
        "namedtuple": lambda name, fields, items: tuple(map(decode, items)),
    }
    need(kind in simple, "an array that starts with", kind, "is no value")
    return simple[kind](*args)


def read_store(path: Any, step: int | None = None, trust: Any = None) -> Any:
    """The state of a step, by default the newest, as plain data with `Tensor`, `PerRank`, `Other` in it."""
    chain = Chain(path, trust)
    found = [ref for ref in chain.lineage() if step is None or ref["step"] == step]
    need(found, "there is no such checkpoint")
    return Checkpoint(path, chain, found[0]).tree()


def verify_store(path: Any) -> list[str]:
    """What is wrong with a store: all live checkpoints, all files that belong to nothing."""
    try:
        chain = Chain(path)
    except (Bad, KeyError, TypeError, ValueError) as error:
        return [f"chain: {error}"]
    problems, known = [], {"tierckpt.json"}
    for ref in chain.live.values():
        folder = step_dir(ref)
        try:
            checkpoint = Checkpoint(path, chain, ref)
        except (Bad, KeyError, TypeError, ValueError, LookupError, struct.error) as error:
            problems.append(f"{folder}: {error}")
            continue
        names = [f"shard-{rank:05d}." for rank in checkpoint.layout.writers]
        known |= {f"{folder}/{n}{end}" for n in names for end in ("safetensors", "receipt.json")}
        known |= {f"{folder}/manifest.json"}
    live = {step_dir(ref) for ref in chain.live.values()}
    for file in Path(path).rglob("*"):
        name = file.relative_to(path).as_posix()
        own = name.startswith(("chain/", "layouts/")) or name in known
        left_over = (
            name.startswith("g") and "/".join(name.split("/")[:2]) not in live
        )  # of uncommitted or retired steps
        if file.is_symlink() or not (file.is_dir() or own or left_over or file.name.endswith(".tmp") or problems):
            problems.append(f"{name} belongs to nothing")
    return problems


if __name__ == "__main__":
    wrong = verify_store(sys.argv[1])
    print("\n".join(wrong) or f"{sys.argv[1]}: all is well")
    sys.exit(bool(wrong))
