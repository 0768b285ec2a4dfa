"""Warnings that tell and never break what they are told in the middle of, and ranks in words."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Sequence

_log = logging.getLogger("tierckpt")


def warn(message: str, *, category: type[Warning] = RuntimeWarning, stacklevel: int = 2) -> None:
    """Warn. Where warnings are errors, log: one rank must not leave a step in which the others wait for it."""
    try:
        warnings.warn(message, category, stacklevel=stacklevel + 1)
    except Warning:
        _log.warning(message)


def ranks(numbers: Sequence[int]) -> str:
    """Ascending ranks, such as "0-3, 7"."""
    text: list[str] = []
    for rank in numbers:
        if text and rank == int(text[-1].split("-")[-1]) + 1:
            text[-1] = f"{text[-1].split('-')[0]}-{rank}"
        else:
            text.append(str(rank))
    return ", ".join(text)


def by_rank(said: Sequence[object]) -> str:
    """What the ranks said, in rank order; those together that said the same."""
    found: dict[object, list[int]] = {}
    for rank, one in enumerate(said):
        found.setdefault(one, []).append(rank)
    return "; ".join(f"rank{'s' if len(who) > 1 else ''} {ranks(who)}: {one}" for one, who in found.items())
