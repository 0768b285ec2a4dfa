"""Names of leaves, as this package makes and shows them."""

from __future__ import annotations

from tierckpt.format import names


def below(name: str) -> str:
    """The prefix of the names of what a container called ``name`` holds."""
    return "" if name == names.ROOT else name + "/"


def readable(name: str) -> str:
    """The dotted form of a name, for messages."""
    return names.dotted(names.split(name)) or "the state"
