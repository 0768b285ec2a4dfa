"""The agents of a test: what they say, and their end."""

from __future__ import annotations

import contextlib
import os
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tierckpt import Checkpointer
from tierckpt.agent.protocol import Channel
from tierckpt.agent.runtime import homes


def statuses() -> list[dict[str, Any]]:
    """What each agent of this test says of itself."""
    found = []
    for home in homes():
        sock = home.connect(10.0)
        if sock is None:
            continue
        with sock:
            channel = Channel(sock)
            with contextlib.suppress(EOFError, OSError):  # it is just ending
                channel.send({"op": "status"})
                found.append(channel.receive().fields["status"])
    return found  # type: ignore[return-value]


def status() -> dict[str, Any]:
    """That of the only agent."""
    (found,) = statuses()
    return found


def until(true: Callable[[], Any], seconds: float = 30.0) -> Any:
    """What ``true`` returns once that is true."""
    deadline = time.monotonic() + seconds
    while not (found := true()):
        assert time.monotonic() < deadline, "it never came"
        time.sleep(0.002)
    return found


def gone(pid: int, seconds: float = 30.0) -> bool:
    """Whether the process ends within ``seconds``."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], seconds)[0])
    finally:
        os.close(descriptor)


def kill(pid: int) -> None:
    """SIGKILL, and wait for it."""
    os.kill(pid, signal.SIGKILL)
    assert gone(pid)


def slot_ahead(ckpt: Checkpointer) -> bool:
    """Wait for the slot for the next save, so that what is done to the agent then is done under no request of this process.

    Whether there is one: none is if the agent was still busy with those before.
    """
    assert ckpt._ram_tier is not None
    arena = ckpt._ram_tier.arena
    ahead = until(lambda: arena._ahead)
    ahead.wait()
    return ahead.slot is not None


def at_the_next_write(ckpt: Checkpointer, act: Callable[[], object]) -> None:
    """Have ``act`` done when the agent is next asked to write, before it is."""
    assert ckpt._ram_tier is not None
    arena = ckpt._ram_tier.arena
    write = arena.write

    def first(*arguments: Any) -> bytes:
        arena.write = write  # type: ignore[method-assign]
        act()
        return write(*arguments)

    arena.write = first  # type: ignore[method-assign]


def end_all() -> None:
    """Kill every agent of this test."""
    for one in statuses():
        kill(one["pid"])


def tell(path: Path, text: str) -> None:
    """Whoever finds the file finds all of it."""
    path.with_suffix(".new").write_text(text)
    path.with_suffix(".new").rename(path)
