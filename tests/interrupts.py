"""Interrupts at every moment at which Python lets a signal in, one after the other, without signals."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Collection
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

#: After these, and where a function begins, signals are let in.
LETS_IN = ("CALL", "RESUME", "JUMP_BACKWARD", "JUMP_ABSOLUTE")


class Interrupted(BaseException):
    """What the tests interrupt with, beside KeyboardInterrupt."""


def interrupted(
    number: int,
    files: Collection[str],
    work: Callable[[], object],
    *,
    kind: type[BaseException] = KeyboardInterrupt,
    first: Callable[[], None] | None = None,
    anywhere: bool = False,
) -> str:
    """Do ``work``, but for a ``kind`` at the ``number``-th such moment in this thread and functions of ``files``.

    Where that was; empty if there are fewer. ``first`` is called there. With ``anywhere`` every instruction is one.
    """
    trace = _Trace(number, files, kind, first, anywhere)
    before = sys.gettrace()
    try:
        sys.settrace(trace)
        work()
        sys.settrace(before)
    except kind:
        assert trace.where
    finally:
        sys.settrace(before)
    return trace.where


class _Trace:
    def __init__(
        self,
        number: int,
        files: Collection[str],
        kind: type[BaseException],
        first: Callable[[], None] | None,
        anywhere: bool,
    ) -> None:
        self.left, self.where = number, ""
        self._files, self._kind, self._first, self._anywhere = files, kind, first, anywhere
        # Where each frame was.
        self._last: dict[FrameType, int] = {}

    def __call__(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in self._files:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            if self._anywhere or self._is_moment(frame):
                self.left -= 1
                if self.left == 0:
                    self.where = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                    self._last.clear()
                    sys.settrace(None)
                    if self._first is not None:
                        self._first()
                    raise self._kind
            self._last[frame] = frame.f_lasti
        return self

    def _is_moment(self, frame: FrameType) -> bool:
        code, now = frame.f_code, frame.f_lasti
        last = self._last.get(frame)
        if last is None:
            return True
        name = dis.opname[code.co_code[last]]
        # What a signal raises after a call counts as raised by it, while a trace function's error does by the next instruction,
        # which other blocks may guard, or none: in `return call()` out of a `with` that has just ended.
        return name.startswith(LETS_IN) and not (name.startswith("CALL") and _guard(code, last) != _guard(code, now))


def _guard(code: CodeType, offset: int) -> int:
    """Where an error at an instruction goes; -1 if nothing in the function guards it, or blocks do as they run (Python 3.10)."""
    return next((target for start, end, target in _guards(code) if start <= offset < end), -1)


@cache
def _guards(code: CodeType) -> list[tuple[int, int, int]]:
    return [(entry.start, entry.end, entry.target) for entry in getattr(dis.Bytecode(code), "exception_entries", ())]
