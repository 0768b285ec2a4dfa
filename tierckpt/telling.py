"""Warnings that tell and never break what they are told in the middle of."""

from __future__ import annotations

import logging
import warnings

_log = logging.getLogger("tierckpt")


def warn(message: str, *, category: type[Warning] = RuntimeWarning, stacklevel: int = 2) -> None:
    """Warn. Where warnings are errors, log: one rank must not leave a step in which the others wait for it."""
    try:
        warnings.warn(message, category, stacklevel=stacklevel + 1)
    except Warning:
        _log.warning(message)
