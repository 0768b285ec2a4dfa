"""Where the agents of a user are: the runtime folder, its sockets, and the lock under which an agent starts and ends."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket as sockets
import stat
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tierckpt.config import AGENT_LOG_BYTES
from tierckpt.errors import StoreError
from tierckpt.telling import warn

#: Runtime folders that could not be used, of which somebody was told.
_told: set[str] = set()


def unusable() -> str:
    """Why ``XDG_RUNTIME_DIR`` is not used although it is set; else empty."""
    base = os.environ.get("XDG_RUNTIME_DIR")
    if not base or os.access(base, os.W_OK | os.X_OK):
        return ""
    return f"XDG_RUNTIME_DIR={base} {'cannot be written to' if os.path.isdir(base) else 'is no folder'}"


def runtime_folder(*, make: bool) -> Path | None:
    """The user's folder for sockets; None if it is not there and not to be made.

    Raises:
        StoreError: somebody else's, or open to others; or it cannot be made.
    """
    base, why = os.environ.get("XDG_RUNTIME_DIR"), unusable()
    if base and not why:
        folder = Path(base) / "tierckpt"
    else:
        folder = Path(tempfile.gettempdir()) / f"tierckpt-{os.getuid()}"
    if make:
        _tell(why, folder)
        try:
            with contextlib.suppress(FileExistsError):
                folder.mkdir(mode=0o700)
        except OSError as error:
            raise StoreError(f"the folder for the sockets of agents cannot be made: {error}") from error
    try:
        info = folder.lstat()
    except FileNotFoundError:
        return None
    # In a folder that all may write to somebody else may have been first.
    if not stat.S_ISDIR(info.st_mode) or info.st_uid != os.getuid() or stat.S_IMODE(info.st_mode) & 0o077:
        raise StoreError(
            f"{folder} is no folder of this user that is closed to others (mode 0700): agents are not started there. Remove "
            "it, or set XDG_RUNTIME_DIR"
        )
    return folder


def _tell(why: str, folder: Path) -> None:
    """Warn once of a runtime folder that is not used. A login by su or sudo may leave another user's: that is no error."""
    if why and why not in _told:
        _told.add(why)
        warn(
            f"{why}: the socket of the agent lies in {folder} instead. A process that uses another folder, such as `tierckpt "
            "agent` in another container, does not find it. Make that folder for this user, or unset XDG_RUNTIME_DIR for all"
        )


@dataclass(frozen=True)
class Home:
    """The files of one agent.

    Attributes:
        folder: the runtime folder.
        name: of the agent of one node and one run.
    """

    folder: Path
    name: str

    @classmethod
    def of(cls, node: str, run: str, *, make: bool) -> Home | None:
        """Those of the agent of ``run`` on ``node``; None if the user has no runtime folder and none is to be made."""
        folder = runtime_folder(make=make)
        name = hashlib.sha256(f"{node}\0{run}".encode()).hexdigest()[:20]
        return cls(folder, name) if folder is not None else None

    @property
    def socket(self) -> Path:
        return self.folder / f"{self.name}.sock"

    @property
    def log(self) -> Path:
        return self.folder / f"{self.name}.log"

    @property
    def lock(self) -> Path:
        return self.folder / f"{self.name}.lock"

    def connect(self, timeout: float) -> sockets.socket | None:
        """A connection to the agent; None if none runs.

        Raises:
            StoreError: somebody else listens there, or nobody answers.
        """
        sock = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        try:
            sock.settimeout(timeout)
            with _short(self.socket) as path:
                sock.connect(path)
            return sock
        except (FileNotFoundError, ConnectionRefusedError, ConnectionResetError):
            sock.close()
            return None
        except OSError as error:
            sock.close()
            raise StoreError(f"the agent at {self.socket} cannot be reached: {error}") from error

    def listen(self) -> sockets.socket:
        """The agent's socket, in the place of what a dead one left. To be called under :meth:`locked`."""
        with contextlib.suppress(FileNotFoundError):
            self.socket.unlink()
        sock = sockets.socket(sockets.AF_UNIX, sockets.SOCK_STREAM)
        try:
            with _short(self.socket) as path:
                sock.bind(path)
            os.chmod(self.socket, 0o600)
            sock.listen(512)
        except OSError as error:
            sock.close()
            raise StoreError(f"cannot listen on {self.socket}: {error}") from error
        return sock

    @contextlib.contextmanager
    def locked(self, timeout: float) -> Iterator[None]:
        """Alone in starting or ending this agent.

        Raises:
            StoreError: not within ``timeout`` seconds.
        """
        deadline = time.monotonic() + timeout
        while True:
            descriptor = os.open(self.lock, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            try:
                if _lock(descriptor, deadline) and _is(descriptor, self.lock):
                    yield
                    return
            finally:
                os.close(descriptor)
            if time.monotonic() >= deadline:
                raise StoreError(f"{self.lock} was held by another process for {timeout:g} s")

    def clear(self) -> None:
        """Take the files of an agent that ends away. Under :meth:`locked`, whose file goes last."""
        with contextlib.suppress(FileNotFoundError):
            self.socket.unlink()
        with contextlib.suppress(FileNotFoundError):
            if not self.log.stat().st_size:
                self.log.unlink()
        with contextlib.suppress(FileNotFoundError):
            self.lock.unlink()

    def open_log(self) -> int:
        """Where the agent's errors go; an older one that has grown too long begins anew."""
        with contextlib.suppress(FileNotFoundError):
            if self.log.stat().st_size > AGENT_LOG_BYTES:
                self.log.unlink()
        return os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)

    def last_words(self) -> str:
        """The end of the log, in one line."""
        try:
            text = self.log.read_bytes()[-2000:].decode("utf-8", "replace")
        except OSError:
            return ""
        return " ".join(text.split())


def homes(folder: Path | None = None) -> list[Home]:
    """Those of all agents that have a socket in ``folder``, by default the user's."""
    folder = folder or runtime_folder(make=False)
    if folder is None:
        return []
    return [Home(folder, path.stem) for path in sorted(folder.glob("*.sock"))]


def _lock(descriptor: int, deadline: float) -> bool:
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)


def _is(descriptor: int, path: Path) -> bool:
    """Whether the locked file still has its name: an agent that ended may have taken it away meanwhile."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.lstat())
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _short(path: Path) -> Iterator[str]:
    """A name for the socket that is short enough: addresses have 107 bytes, folders may be deeper."""
    if len(os.fsencode(path)) < 108:
        yield str(path)
        return
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)
