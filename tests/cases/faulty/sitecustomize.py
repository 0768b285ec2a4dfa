"""Storage faults for every process that has this folder on its path, agents above all: `tests.cases.common.Faults` says which.

Each file of the folder named by ``STORAGE_FAULTS`` is a rule about writes to files of which the path has a part.
"""

from __future__ import annotations

import contextlib
import json
import os
import time
from collections.abc import Callable
from typing import Any


def install(folder: str) -> Callable[[], None]:
    """Look at the rules in ``folder`` before every write to a file; the result puts things back."""
    from tierckpt import _native

    original = _native.write_at

    def write_at(fd: int, data: Any, offset: int) -> None:
        path = os.readlink(f"/proc/self/fd/{fd}")
        for name in sorted(os.listdir(folder)):
            if name.endswith(".rule"):
                _apply(os.path.join(folder, name), path)
        original(fd, data, offset)

    _native.write_at = write_at  # type: ignore[assignment]

    def undo() -> None:
        _native.write_at = original

    return undo


def _apply(rule: str, path: str) -> None:
    try:
        with open(rule) as file:
            told = json.load(file)
    except FileNotFoundError:
        return  # it has just been taken back
    if not all(part in path for part in told["parts"]):
        return
    if told["do"] == "hold":
        with contextlib.suppress(FileExistsError), open(f"{rule}.met", "x"):
            pass
        while os.path.exists(rule):
            time.sleep(0.002)
        return
    if told["do"] == "once":
        try:
            os.unlink(rule)
        except FileNotFoundError:
            return  # somebody else has met it
    raise OSError(told["errno"], os.strerror(told["errno"]), path)


if "STORAGE_FAULTS" in os.environ:
    install(os.environ["STORAGE_FAULTS"])
