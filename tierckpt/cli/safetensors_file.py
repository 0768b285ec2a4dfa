"""A checkpoint as ``.safetensors`` files of whole tensors, laid out as by Hugging Face, with a JSON file beside them.

Tensors are streamed: memory stays bounded, whatever the size of a tensor.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO

from tierckpt import _native
from tierckpt.cli.checkpoint import described
from tierckpt.errors import StoreError
from tierckpt.format import names, shard
from tierckpt.format.boxes import Box
from tierckpt.format.display import to_plain
from tierckpt.tiers.content import BATCH, Content, batches, blocks

Progress = Callable[[int, int], None]

SIDECAR = "model.values.json"
INDEX = "model.safetensors.index.json"


@dataclass
class _File:
    """Tensors of one file; ``data`` is the number of their bytes."""

    tensors: list[_Tensor] = field(default_factory=list)
    data: int = 0


@dataclass(frozen=True)
class _Tensor:
    """Number ``index`` of the layout, under the name that it gets."""

    name: str
    index: int
    dtype: str
    shape: tuple[int, ...]

    @property
    def item(self) -> int:
        return shard.dtype(self.dtype).size

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.item

    def entry(self, offset: int) -> dict[str, Any]:
        """Its entry in a header. Dtypes that not every reader knows are bytes, in one more dimension."""
        stored = shard.dtype(self.dtype).stored
        shape = list(self.shape)
        if stored == "U8" and self.dtype != "uint8":
            shape.append(self.item)
        return {"dtype": stored, "shape": shape, "data_offsets": [offset, offset + self.nbytes]}


@dataclass
class Exported:
    """What was written: names of files, tensors, and their bytes."""

    files: list[str]
    tensors: int
    bytes: int


def export(
    content: Content, folder: Path, *, keys: Sequence[str] | None, limit: int, progress: Progress | None = None
) -> Exported:
    """Write ``model.safetensors``, or parts of at most ``limit`` bytes of tensors and an index; and ``SIDECAR``.

    Args:
        folder: an empty one.
        keys: globs over dotted names; None: everything.

    Raises:
        IntegrityError, IncompleteError: the checkpoint is damaged.
        StoreError: nothing matches, or the files cannot be written.
    """
    chosen = [i for i, name in enumerate(content.layout) if _matches(name, keys)]
    values = [name for name in content.homes if _matches(name, keys)]
    own = {rank: [name for name in known if _matches(name, keys)] for rank, known in content.own.items()}
    if keys is not None and not (chosen or values or any(own.values())):
        raise StoreError(f"--keys {' '.join(keys)}: nothing in {content.store.url} matches")
    called = exported_names(content, chosen)
    tensors, aliases = _tensors(content, chosen, called)
    files = _packed(tensors, limit)
    total = sum(file.data for file in files)
    written = ["model.safetensors"]
    if len(files) > 1:
        written = [f"model-{number:05}-of-{len(files):05}.safetensors" for number in range(1, len(files) + 1)]
    memory = _native.Buffer(BATCH)
    done = 0
    for name, file in zip(written, files, strict=True):
        with open(folder / name, "xb") as out:
            for nbytes in _write(content, file, aliases, out, memory):
                done += nbytes
                if progress is not None:
                    progress(done, total)
    if len(files) > 1:
        places = {t.name: name for name, file in zip(written, files, strict=True) for t in file.tensors}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(places.items()))}
        written.append(_write_json(folder, INDEX, index))
    sidecar = _sidecar(content, tensors, aliases, called, values, own)
    written.append(_write_json(folder, SIDECAR, sidecar))
    return Exported(written, len(tensors), total)


def _matches(name: str, keys: Sequence[str] | None) -> bool:
    return keys is None or names.matches(names.split(name), keys)


def exported_names(content: Content, chosen: Sequence[int]) -> dict[int, str]:
    """The names that these tensors get: dotted, where that says which tensor it is; else as in the store.

    Names as in the store all differ, but one may be the dotted name of another tensor: then all are as in the store.
    """
    return dict(zip(chosen, _called([content.layout.name(i) for i in chosen], _RESERVED), strict=True))


#: What a file of safetensors cannot have as the name of a tensor.
_RESERVED = frozenset({"", "__metadata__"})


def _called(stored: Sequence[str], reserved: frozenset[str] = frozenset()) -> list[str]:
    dotted = [names.dotted(names.split(name)) for name in stored]
    seen = Counter([*dotted, *reserved])
    found = [key if seen[key] == 1 else name for key, name in zip(dotted, stored, strict=True)]
    return found if len(set(found)) == len(found) else list(stored)


def _tensors(content: Content, chosen: Sequence[int], called: dict[int, str]) -> tuple[list[_Tensor], dict[str, str]]:
    """Tensors to write, and for names that share the bytes of another tensor the name of that one."""
    layout = content.layout
    first: dict[int, int] = {}
    for i in chosen:
        owner = layout.alias(i)
        if owner == i or owner not in first:
            first[owner] = i
    tensors = [_Tensor(called[i], i, layout.dtype(i), layout.shape(i)) for i in sorted(first.values())]
    aliases = {called[i]: called[first[layout.alias(i)]] for i in chosen if first[layout.alias(i)] != i}
    return tensors, aliases


def _packed(tensors: Sequence[_Tensor], limit: int) -> list[_File]:
    """In the order of the tensors, each file as full as ``limit`` allows; a larger tensor has one of its own."""
    files = [_File()]
    for tensor in tensors:
        if files[-1].tensors and files[-1].data + tensor.nbytes > limit:
            files.append(_File())
        files[-1].tensors.append(tensor)
        files[-1].data += tensor.nbytes
    for file in files:
        # Every tensor is then aligned to its items, and those of a dtype come in the order of the store.
        file.tensors.sort(key=lambda tensor: (-tensor.item, tensor.index))
    return files


def _write(
    content: Content, file: _File, aliases: dict[str, str], out: BinaryIO, memory: _native.Buffer
) -> Iterator[int]:
    """Write one file durably; yields the number of bytes of tensors that were written."""
    out.write(_header(file, aliases))

    def boxes() -> Iterator[tuple[int, Box]]:
        for tensor in file.tensors:
            for box in blocks(tensor.shape, BATCH // tensor.item):
                yield tensor.index, box

    view = memoryview(memory)
    for batch in batches(content.layout, boxes(), BATCH):
        content.fill(batch, memory)
        for region in batch:
            out.write(view[region.start : region.start + region.nbytes])
        yield sum(region.nbytes for region in batch)
    out.flush()
    os.fsync(out.fileno())


def _header(file: _File, aliases: dict[str, str]) -> bytes:
    """Aliases stand in the metadata, where ``safetensors.torch.load_model`` looks for them."""
    here = {tensor.name for tensor in file.tensors}
    tied = {name: kept for name, kept in sorted(aliases.items()) if kept in here}
    entries: dict[str, Any] = {"__metadata__": {**tied, "format": "pt"}}
    at = 0
    for tensor in file.tensors:
        entries[tensor.name] = tensor.entry(at)
        at += tensor.nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > shard.HEADER_LIMIT:
        raise StoreError(
            f"the header of a file of {len(file.tensors):,} tensors would have {len(text):,} bytes, but readers of "
            f"safetensors take {shard.HEADER_LIMIT:,}: lower --max-shard-size"
        )
    return len(text).to_bytes(8, "little") + text


def _sidecar(
    content: Content,
    tensors: Sequence[_Tensor],
    aliases: dict[str, str],
    called: dict[int, str],
    values: Sequence[str],
    own: dict[int, list[str]],
) -> dict[str, Any]:
    """What is no tensor, as plain JSON, by dotted name; and what safetensors cannot say of the tensors."""
    blobs = {rank: content.values(rank) for rank in sorted({content.homes[name] for name in values})}
    plain = [(name, content.pick(blobs[content.homes[name]], name, content.homes[name])) for name in values]
    del blobs
    per_rank: dict[str, Any] = {}
    for rank, mine in own.items():
        if mine:
            found = content.values(rank)
            per_rank[str(rank)] = _by_key([(name, content.pick(found, name, rank)) for name in mine])
    arrays = {}
    for i, name in called.items():
        node = content.nodes.get(content.layout.name(i), [""])
        if node[0] == "array":
            arrays[name] = {"dtype": node[1], "shape": node[2]}
    return {
        "checkpoint": described(content),
        "metadata": to_plain(content.manifest.metadata),
        "values": _by_key(plain),
        "per_rank": per_rank,
        "aliases": aliases,
        "dtypes": {
            tensor.name: tensor.dtype
            for tensor in tensors
            if shard.dtype(tensor.dtype).stored == "U8" and tensor.dtype != "uint8"
        },
        "arrays": arrays,
    }


def _by_key(found: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    """By dotted name, or where two have the same one by that in the store; see :func:`exported_names`."""
    called = _called([name for name, _ in found])
    return {key: to_plain(value, what=key) for key, (_, value) in zip(called, found, strict=True)}


def _write_json(folder: Path, name: str, value: Any) -> str:
    with open(folder / name, "x", encoding="utf-8") as out:
        json.dump(value, out, indent=2, ensure_ascii=False, allow_nan=False)
        out.write("\n")
        out.flush()
        os.fsync(out.fileno())
    return name
