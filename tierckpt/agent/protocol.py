"""Frames between the agent and the processes of its node: canonical JSON, and file descriptors (docs/agent-protocol.md)."""

from __future__ import annotations

import os
import select
import socket
import stat
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from types import TracebackType

from tierckpt.errors import IntegrityError, StoreError, TierckptError, kind_of, named_kind
from tierckpt.format import canonical
from tierckpt.format.canonical import JSON, Fields

VERSION = 1
FRAME_LIMIT = 4 << 20  # bytes of one frame
DOCUMENT_LIMIT = 1 << 30  # bytes of a document that travels as a memfd
_DESCRIPTORS = 2  # with one frame
_LENGTH = struct.Struct(">I")
_CREDENTIALS = struct.Struct("3i")  # pid, uid, gid
_WHAT = "the agent's socket"


@dataclass
class Message:
    """One frame. Descriptors belong to whoever holds this; leaving its ``with`` block closes those not taken."""

    fields: dict[str, JSON]
    descriptors: list[int] = field(default_factory=list)

    def take(self) -> int:
        """The next descriptor, from now on the caller's.

        Raises:
            IntegrityError: there is none.
        """
        if not self.descriptors:
            raise IntegrityError(f"{_WHAT}: a file descriptor is missing")
        return self.descriptors.pop(0)

    def only(self, *keys: str) -> Fields:
        """The fields, which must be exactly ``keys``."""
        return Fields(self.fields, keys, what=_WHAT)

    def __enter__(self) -> Message:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for descriptor in self.descriptors:
            os.close(descriptor)
        self.descriptors.clear()


class Channel:
    """One end of a connection; one thread at a time uses it."""

    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock

    @property
    def user(self) -> int:
        """Who is at the other end, as the kernel says."""
        size = _CREDENTIALS.size
        found: int = _CREDENTIALS.unpack(self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size))[1]
        return found

    @property
    def ended(self) -> bool:
        """Whether the other end has closed the connection; to be asked while it has nothing to say."""
        # Between a reply and the next request neither end sends anything: what can be read is the end.
        return self.waits(0.0)

    def waits(self, seconds: float) -> bool:
        """Whether there is something to read, or the end, within ``seconds``."""
        poll = select.poll()
        poll.register(self.sock, select.POLLIN)
        return bool(poll.poll(seconds * 1000))

    @property
    def hung_up(self) -> bool:
        """Whether the other end is gone, whatever it has left to be read."""
        poll = select.poll()
        poll.register(self.sock, 0)
        return bool(poll.poll(0))

    def send(self, fields: dict[str, JSON], descriptors: Sequence[int] = ()) -> None:
        """Send one frame.

        Raises:
            StoreError: it would be too long.
            OSError: the other end is gone.
        """
        data = canonical.encode(fields)
        if len(data) > FRAME_LIMIT:
            raise StoreError(f"{_WHAT}: a message of {len(data):,} bytes; at most {FRAME_LIMIT:,} are sent at once")
        frame = _LENGTH.pack(len(data)) + data
        sent = socket.send_fds(self.sock, [frame], list(descriptors)) if descriptors else 0
        if sent < len(frame):  # to send nothing fails too once the other end, which may have read it all, is gone
            self.sock.sendall(memoryview(frame)[sent:])

    def receive(self) -> Message:
        """The next frame.

        Raises:
            EOFError: the other end has closed the connection.
            IntegrityError: it sent what is no frame.
        """
        head = b""
        message = Message({})
        try:
            while len(head) < _LENGTH.size:
                data, fds, flags, _ = socket.recv_fds(
                    self.sock, _LENGTH.size - len(head), _DESCRIPTORS, socket.MSG_CMSG_CLOEXEC
                )
                message.descriptors += fds
                if not data:
                    if head:
                        raise IntegrityError(f"{_WHAT}: a message ends in its length")
                    raise EOFError
                if flags & socket.MSG_CTRUNC or len(message.descriptors) > _DESCRIPTORS:
                    raise IntegrityError(f"{_WHAT}: more than {_DESCRIPTORS} file descriptors with one message")
                head += data
            (size,) = _LENGTH.unpack(head)
            if size > FRAME_LIMIT:
                raise IntegrityError(f"{_WHAT}: a message of {size} bytes; at most {FRAME_LIMIT} are taken")
            value = canonical.decode(self._exactly(size), what=_WHAT, limit=FRAME_LIMIT, depth=80)
            if type(value) is not dict:
                raise IntegrityError(f"{_WHAT}: a message must be an object")
            message.fields = value
        except BaseException:
            message.__exit__(None, None, None)
            raise
        return message

    def _exactly(self, size: int) -> bytes:
        # Grows as bytes arrive: a length alone takes no memory.
        found = bytearray()
        while len(found) < size:
            data = self.sock.recv(min(size - len(found), 1 << 16))
            if not data:
                raise IntegrityError(f"{_WHAT}: a message ends after {len(found)} of {size} bytes")
            found += data
        return bytes(found)

    def close(self) -> None:
        self.sock.close()


def document(data: bytes) -> int:
    """A memfd that holds ``data``; the caller closes it."""
    descriptor = os.memfd_create("tierckpt-document", os.MFD_CLOEXEC)
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(descriptor, view) :]
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def read_document(descriptor: int) -> bytes:
    """All bytes of a document that came as a descriptor, which may be anything.

    Raises:
        IntegrityError: it is no file, or too large.
    """
    info = os.fstat(descriptor)
    if not stat.S_ISREG(info.st_mode):
        raise IntegrityError(f"{_WHAT}: a document must be a regular file")
    if info.st_size > DOCUMENT_LIMIT:
        raise IntegrityError(f"{_WHAT}: a document of {info.st_size} bytes; at most {DOCUMENT_LIMIT} are taken")
    found = bytearray()
    while data := os.pread(descriptor, min(1 << 20, info.st_size - len(found)), len(found)):
        found += data
    return bytes(found)


def refusal(error: Exception) -> dict[str, JSON]:
    """The reply that says why not."""
    text = str(error) or type(error).__name__
    if isinstance(error, TierckptError):
        return {"error": [kind_of(error), _sendable(text)]}
    return {"error": ["StoreError", _sendable(f"the agent failed: {type(error).__name__}: {text}")]}


def raise_refusal(fields: dict[str, JSON]) -> None:
    """Raise what a reply says went wrong, if it does."""
    said = fields.get("error")
    if said is None:
        return
    if type(said) is not list or len(said) != 2 or not all(type(part) is str for part in said):
        raise IntegrityError(f"{_WHAT}: a refusal without a reason")
    raise named_kind(said[0])(said[1])


def _sendable(text: str) -> str:
    """Without what canonical JSON does not take, and not too long."""
    return text.encode("utf-8", "replace").decode("utf-8")[: 1 << 16]
