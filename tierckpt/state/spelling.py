"""How names are written with dots, and back, where only the dotted form is known to change."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

from tierckpt.format import names


def dotted(name: str) -> str:
    """The dotted form of a name."""
    return name.replace("/", ".") if "~" not in name else names.dotted(names.split(name))


def parent_of(name: str) -> tuple[str, str]:
    """The name of the container of ``name``, and its last component."""
    upper, _, last = name.rpartition("/")
    return upper or names.ROOT, last


def respelled(name: str, end: int, start: str, rest: str, flat: bool) -> str:
    """The name of what no live state names: ``start + rest`` instead of the first ``end`` characters of the dotted form.

    Components that the rule did not touch stay. A last component that is the qualified name of a parameter (``flat``)
    stays one; else what is between two dots is one.
    """
    parts = name.split("/")
    texts = parts if "~" not in name else [str(component) for component in names.split(name)]
    touched = 0
    at = -1
    while at < end and touched < len(parts):
        at += 1 + len(texts[touched])
        touched += 1
    head = _rehung("/".join(parts[:touched]), start + rest[: at - end], flat and touched == len(parts))
    return "/".join([head, *parts[touched:]])


@lru_cache(maxsize=4096)
def _rehung(name: str, words: str, flat: bool) -> str:
    """The name with the dotted form ``words`` that is as deep as ``name``; ``flat``: the last component may have dots."""
    path = names.split(name)
    pieces = words.split(".")
    found: list[names.Component] = []
    for number, component in enumerate(path):
        count = len(str(component).split("."))
        if flat and (number == len(path) - 1 or len(pieces) <= count):
            return names.join((*found, ".".join(pieces)))
        taken, pieces = pieces[:count], pieces[count:]
        found.append(_component(".".join(taken), path))
        if not pieces:
            break
    return names.join((*found, *(_component(piece, path) for piece in pieces)))


def _component(text: str, path: Sequence[names.Component]) -> names.Component:
    """What ``text`` is where it stood before; new integers are keys that are integers."""
    for component in path:
        if str(component) == text:
            return component
    return int(text) if text.isascii() and text.isdigit() and str(int(text)) == text else text
