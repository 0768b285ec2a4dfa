"""What a user passes, checked where it is passed: an argument that makes no sense is refused, not taken for another."""

from __future__ import annotations

import reprlib
from collections.abc import Collection, Iterable
from typing import Any

from tierckpt.errors import StateError


def takes(name: str, given: object, fits: bool, what: str) -> None:
    """Raise StateError unless ``given`` fits; ``what`` says what the argument takes."""
    if not fits:
        raise StateError(f"{name}={reprlib.repr(given)}: it takes {what}")


def one_of(name: str, given: object, known: Collection[str]) -> None:
    """Raise StateError unless ``given`` is among ``known``."""
    if given not in known:
        raise StateError(f"{name}={given!r} is not one of {', '.join(map(repr, known))}")


def flags(**given: object) -> None:
    """Raise StateError for each that is neither True nor False: ``"no"`` would count as True."""
    for name, value in given.items():
        takes(name, value, isinstance(value, bool), "True or False")


def patterns(given: object) -> list[str] | None:
    """The globs that ``keys=`` stands for: one, or several; None stands for all names."""
    if given is None:
        return None
    if isinstance(given, str):
        return [given]
    found: list[Any] = list(given) if isinstance(given, Iterable) else [given]
    takes("keys", given, all(isinstance(one, str) for one in found), 'a glob over dotted names ("model.*"), or several')
    return found
