"""What some commands need that the base install has not."""

from __future__ import annotations

import importlib.util

from tierckpt.errors import TierckptError


class MissingError(TierckptError):
    """A package that a command needs is not installed."""


def needs_torch(what: str) -> None:
    """Raise :class:`MissingError` unless PyTorch is installed. Imports nothing."""
    if importlib.util.find_spec("torch") is None:
        raise MissingError(f"{what} needs PyTorch, which is not installed: pip install 'tierckpt[torch]'")
