"""Names of the files of a store, relative to its root, with ``/`` everywhere (docs/format.md, section 1).

Numbers are padded with zeros to a minimal width and grow beyond it. The parsers take only what the writers
write: for any other name they return ``None``, since a store may hold files that are not its own.
"""

from __future__ import annotations

import re
from typing import NamedTuple

STORE = "tierckpt.json"
CHAIN = "chain"
LAYOUTS = "layouts"
MANIFEST = "manifest.json"

_LARGEST = 2**53 - 1  # of any number in a name: documents cannot say larger ones


class Step(NamedTuple):
    """Which step of which generation a folder holds."""

    generation: int
    step: int


class Shard(NamedTuple):
    """Which shard a file belongs to."""

    generation: int
    step: int
    rank: int


def link(number: int) -> str:
    return f"{CHAIN}/{number:012d}.json"


def layout(digest: str) -> str:
    """``digest`` is the layout hash, 64 hex digits."""
    return f"{LAYOUTS}/{digest}.safetensors"


def generation_dir(generation: int) -> str:
    return f"g{generation:04d}"


def step_dir(generation: int, step: int) -> str:
    return f"g{generation:04d}/s{step:012d}"


def manifest(generation: int, step: int) -> str:
    return f"g{generation:04d}/s{step:012d}/{MANIFEST}"


def shard(generation: int, step: int, rank: int) -> str:
    return f"g{generation:04d}/s{step:012d}/shard-{rank:05d}.safetensors"


def receipt(generation: int, step: int, rank: int) -> str:
    return f"g{generation:04d}/s{step:012d}/shard-{rank:05d}.receipt.json"


def is_temporary(name: str) -> bool:
    """Whether the last part of a path is the name of a write that did not finish."""
    last = name.rpartition("/")[2]
    return last.startswith(".") and last.endswith(".tmp")


_LINK = re.compile(r"chain/([0-9]{12,16})\.json")
_LAYOUT = re.compile(r"layouts/([0-9a-f]{64})\.safetensors")
_GENERATION = re.compile(r"g([0-9]{4,16})")
_STEP_DIR = re.compile(r"g([0-9]{4,16})/s([0-9]{12,16})")
_MANIFEST = re.compile(_STEP_DIR.pattern + r"/manifest\.json")
_SHARD = re.compile(_STEP_DIR.pattern + r"/shard-([0-9]{5,16})\.safetensors")
_RECEIPT = re.compile(_STEP_DIR.pattern + r"/shard-([0-9]{5,16})\.receipt\.json")


def parse_link(name: str) -> int | None:
    """The number of the link that this file holds."""
    found = _LINK.fullmatch(name)
    return int(found[1]) if found and link(int(found[1])) == name else None


def parse_layout(name: str) -> str | None:
    """The hash of the layout that this file holds."""
    found = _LAYOUT.fullmatch(name)
    return found[1] if found else None


def parse_generation_dir(name: str) -> int | None:
    found = _GENERATION.fullmatch(name)
    return int(found[1]) if found and int(found[1]) and generation_dir(int(found[1])) == name else None


def parse_step_dir(name: str) -> Step | None:
    numbers = _numbers(_STEP_DIR, name)
    return Step(*numbers) if numbers and step_dir(*numbers) == name else None


def parse_manifest(name: str) -> Step | None:
    numbers = _numbers(_MANIFEST, name)
    return Step(*numbers) if numbers and manifest(*numbers) == name else None


def parse_shard(name: str) -> Shard | None:
    numbers = _numbers(_SHARD, name)
    return Shard(*numbers) if numbers and shard(*numbers) == name else None


def parse_receipt(name: str) -> Shard | None:
    numbers = _numbers(_RECEIPT, name)
    return Shard(*numbers) if numbers and receipt(*numbers) == name else None


def _numbers(pattern: re.Pattern[str], name: str) -> tuple[int, ...] | None:
    """The numbers in the name, the first of them a generation, if none is too large."""
    found = pattern.fullmatch(name)
    numbers = tuple(map(int, found.groups())) if found else ()
    return numbers if numbers and numbers[0] >= 1 and max(numbers) <= _LARGEST else None
