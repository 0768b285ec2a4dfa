"""Warnings that tell and never break what they are told in the middle of, and ranks and classes in words."""

from __future__ import annotations

import logging
import sys
import warnings
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

_log = logging.getLogger("tierckpt")

#: Between the caller's program and what warns; and what calls us by itself.
_BETWEEN, _ITSELF = ("tierckpt", "contextlib", "torch"), ("threading", "weakref")
_told: dict[Any, Any] = {}  # where no line of the caller's has led, as the interpreter notes it


def warn(message: str, *, category: type[Warning] = RuntimeWarning) -> None:
    """Warn, at the line of the caller's program that led here. Where warnings are errors, log: one rank must not leave a step in
    which the others wait for it."""
    frame: FrameType | None = sys._getframe()
    level = 1
    while frame is not None and _module(frame) in _BETWEEN:
        frame, level = frame.f_back, level + 1
    try:
        if frame is None or _module(frame) in _ITSELF:
            warnings.warn_explicit(message, category, "tierckpt", 0, registry=_told)
        else:
            warnings.warn(message, category, stacklevel=level)
    except Warning:
        _log.warning(message)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]


def ranks(numbers: Sequence[int]) -> str:
    """Ascending ranks, such as "0-3, 7"."""
    text: list[str] = []
    for rank in numbers:
        if text and rank == int(text[-1].split("-")[-1]) + 1:
            text[-1] = f"{text[-1].split('-')[0]}-{rank}"
        else:
            text.append(str(rank))
    return ", ".join(text)


def named(numbers: Sequence[int]) -> str:
    """Ascending ranks, such as "rank 3" or "ranks 0-3, 7"."""
    return f"rank{'s' if len(numbers) > 1 else ''} {ranks(numbers)}"


def by_rank(said: Sequence[object] | Mapping[int, object]) -> str:
    """What the ranks said, in rank order; those together that said the same."""
    found: dict[object, list[int]] = {}
    for rank, one in said.items() if isinstance(said, Mapping) else enumerate(said):
        found.setdefault(one, []).append(rank)
    return "; ".join(f"{named(who)}: {one}" for one, who in found.items())


def a(value: object) -> str:
    """The class of a value, such as "a dict" or "an int"."""
    name = type(value).__name__
    return f"an {name}" if name[0] in "aeioAEIO" else f"a {name}"
