"""All agents of this user on this machine, asked how they are."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from tierckpt.agent.protocol import Channel
from tierckpt.agent.runtime import homes
from tierckpt.errors import TierckptError

_ANSWER = 5.0  # seconds that an agent may take
_KILLED = (
    "no process listens: an agent was killed here; this is told until its run starts another or the file is removed"
)


def agents(folder: Path | None = None) -> list[dict[str, Any]]:
    """What each says of itself; of one that does not answer, ``{"socket": …, "problem": …}``.

    Args:
        folder: with their sockets; by default the user's runtime folder.

    Raises:
        StoreError: the runtime folder is not this user's alone.
    """
    found: list[dict[str, Any]] = []
    for home in homes(folder):
        told: dict[str, Any] = {"socket": str(home.socket)}
        try:
            sock = home.connect(_ANSWER)
            if sock is None:
                told["problem"] = f"{_KILLED}. {home.last_words()}".strip()
            else:
                with contextlib.closing(Channel(sock)) as channel:
                    if channel.user != os.getuid():
                        continue
                    channel.send({"op": "status"})
                    said = channel.receive().fields.get("status")
                told.update(said if isinstance(said, dict) else {"problem": "it does not say how it is"})
        except (EOFError, OSError, TierckptError) as error:
            told["problem"] = f"it does not answer: {error or 'the connection ended'}"
        found.append(told)
    return found
