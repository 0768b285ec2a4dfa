"""A process that has imported everything once and forks a child for each task, under the shim that sees system calls.

Started anew for each crash point a process would spend two seconds on importing torch; forked it costs
milliseconds.

Run as a script it is the server: one JSON object a line on stdin, one answer a line on stdout.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import select
import signal
import subprocess
import sys
import time
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
#: What happens at the chosen call; the order is the shim's.
RECORD, KILL, TEAR, FAIL, SHORTEN = range(5)
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Outcome:
    """What became of a task.

    Attributes:
        signal: that ended it, 0 if none did.
        value: what it returned.
        error: the traceback of what it raised, or what it wrote before it died.
    """

    signal: int
    value: Any
    error: str


class Shim:
    """The preloaded library, in the process under test."""

    def __init__(self) -> None:
        self._library = ctypes.CDLL(None)
        self._library.crash_disarm.restype = ctypes.c_long
        self._log = -1

    def arm(
        self,
        root: str,
        mode: int = RECORD,
        at: int = -1,
        error: int = 0,
        log: str | None = None,
        *,
        sync: bool = False,
    ) -> None:
        """Count calls below ``root`` from now on; do what ``mode`` says at number ``at``."""
        if log is not None:
            self._log = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._library.crash_arm(os.fsencode(root), mode, ctypes.c_long(at), error, self._log, int(sync))

    def disarm(self) -> int:
        """How many calls there were."""
        count = int(self._library.crash_disarm())
        if self._log >= 0:
            os.close(self._log)
            self._log = -1
        return count


def compile_shim(folder: Path) -> Path:
    """Build the shim into ``folder``."""
    target = folder / "shim.so"
    compiler = os.environ.get("CC", "cc")
    command = [
        compiler,
        "-shared",
        "-fPIC",
        "-O1",
        "-Wall",
        "-o",
        str(target),
        str(HERE / "shim.c"),
        "-ldl",
        "-pthread",
    ]
    subprocess.run(command, check=True)
    return target


class Workshop:
    """The client's side. ``prefix`` is put before the server's command line (strace, say)."""

    def __init__(self, folder: Path, shim: Path, prefix: tuple[str, ...] = ()) -> None:
        self._errors = folder / "server.log"
        # The shim is set by `env`, so that strace as a prefix is not under it.
        command = [*prefix, "env", f"LD_PRELOAD={shim}", sys.executable, str(HERE / "workshop.py")]
        with open(self._errors, "w") as errors:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                cwd=HERE.parent.parent,
                env={**os.environ, "OMP_NUM_THREADS": "1"},
            )

    def run(self, task: str, *, user: Path, timeout: float = 60.0, **arguments: Any) -> Outcome:
        """Call a function of :mod:`scenarios` in a child of its own.

        Args:
            user: the child's ``XDG_CONFIG_HOME``.
            arguments: of the function; plain values.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        order = {"task": task, "arguments": arguments, "user": str(user), "timeout": timeout}
        self._process.stdin.write(json.dumps(order) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            raise AssertionError(f"the server has died: {self._errors.read_text()}")
        return Outcome(**json.loads(line))

    def do(self, task: str, *, user: Path, timeout: float = 60.0, **arguments: Any) -> Any:
        """As :meth:`run`, for a task that must succeed; what it returned."""
        outcome = self.run(task, user=user, timeout=timeout, **arguments)
        if outcome.signal or outcome.error:
            raise AssertionError(f"{task}({arguments}): signal {outcome.signal}\n{outcome.error}")
        return outcome.value

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        self._process.wait(timeout=30)


def _serve() -> None:
    sys.path.insert(0, str(HERE.parent.parent))
    # What the package imports late, it would import anew in each child.
    for name in ("asymmetric.ed25519", "serialization"):
        importlib.import_module(f"cryptography.hazmat.primitives.{name}")
    import torch

    from tests.crash import scenarios

    torch.set_num_threads(1)
    for line in sys.stdin:
        order = json.loads(line)
        receiver, sender = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(receiver)
            _child(order, sender, scenarios)
        os.close(sender)
        message = _receive(receiver, order["timeout"])
        os.close(receiver)
        if message is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGABRT)
        _, status = os.waitpid(child, 0)
        answer: dict[str, Any] = {"signal": os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0}
        if message is None:
            answer |= {"value": None, "error": f"not done within {order['timeout']} s"}
        else:
            answer |= json.loads(message) if message else {"value": None, "error": ""}
        print(json.dumps(answer), flush=True)


def _receive(descriptor: int, seconds: float) -> bytes | None:
    """All that the child sends; None if it takes too long."""
    deadline, message = time.monotonic() + seconds, b""
    while select.select([descriptor], [], [], max(0.0, deadline - time.monotonic()))[0]:
        part = os.read(descriptor, 1 << 16)
        if not part:
            return message
        message += part
    return None


def _child(order: dict[str, Any], sender: int, scenarios: Any) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    os.dup2(2, 1)  # stdout belongs to the answers
    os.environ["XDG_CONFIG_HOME"] = order["user"]
    answer: dict[str, Any] = {"value": None, "error": ""}
    try:
        answer["value"] = getattr(scenarios, order["task"])(**order["arguments"])
    except BaseException:
        answer["error"] = traceback.format_exc()
    message = json.dumps(answer).encode()
    while message:
        message = message[os.write(sender, message) :]
    os._exit(0)


if __name__ == "__main__":
    _serve()
