"""Ed25519 keys: who may write the chain of a run. Private keys are PEM files that only their owner reads."""

from __future__ import annotations

import os
import re
import secrets
import stat
import warnings
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt.errors import StoreError, UntrustedError, of_system

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

# cryptography is imported where it is used: commands that check no signature start faster without it.

_LARGEST_FILE = 64 * 1024  # bytes; key files are far smaller


class SigningKey:
    """A private key and its public half."""

    def __init__(self, private: Ed25519PrivateKey) -> None:
        self._private = private
        self.public: str = private.public_key().public_bytes_raw().hex()
        """The public key: 64 hex digits of its 32 bytes."""

    @staticmethod
    def generate() -> SigningKey:
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return SigningKey(Ed25519PrivateKey.generate())

    @staticmethod
    def load(path: str | os.PathLike[str]) -> SigningKey:
        """The key in a PEM (PKCS 8) file. Warns if others than its owner can read the file.

        Raises ``StoreError`` when the file cannot be read or holds no unencrypted Ed25519 private key.
        """
        data = _read(path)
        if b"PRIVATE KEY" not in data:
            raise StoreError(f"{os.fspath(path)}: not a private key; give the file that keygen wrote")
        if Path(path).stat().st_mode & (stat.S_IRWXG | stat.S_IRWXO):
            warnings.warn(f"the private key {os.fspath(path)} can be read by other users; chmod 600 it", stacklevel=2)
        return SigningKey(_private(data, path))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the key as PEM to a new file of mode 0600. Raises ``StoreError``; never overwrites."""
        from cryptography.hazmat.primitives import serialization

        pem = self._private.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.PKCS8,
            serialization.NoEncryption(),
        )
        _write_new(path, pem, 0o600)

    def write_public(self, path: str | os.PathLike[str]) -> None:
        """Write the public half as PEM to a new file. Raises ``StoreError``; never overwrites."""
        from cryptography.hazmat.primitives import serialization

        pem = self._private.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        _write_new(path, pem, 0o666)

    def secret(self) -> str:
        """The private key, 64 hex digits: for memory and local sockets, never to be stored."""
        return self._private.private_bytes_raw().hex()

    @staticmethod
    def from_secret(secret: str) -> SigningKey:
        """The key that :meth:`secret` gave."""
        from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

        return SigningKey(Ed25519PrivateKey.from_private_bytes(bytes.fromhex(secret)))

    def sign(self, data: bytes) -> bytes:
        """The signature of ``data``, 64 bytes; always the same for the same data."""
        return self._private.sign(data)


def verify(public: str, signature: bytes, data: bytes) -> bool:
    """Whether ``signature`` is that of ``data`` by the key whose 64 hex digits are ``public``."""
    from cryptography.exceptions import InvalidSignature
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

    try:
        Ed25519PublicKey.from_public_bytes(bytes.fromhex(public)).verify(signature, data)
    except (InvalidSignature, ValueError):  # ValueError: not a key at all
        return False
    return True


def read_public(key: str | os.PathLike[str]) -> str:
    """A public key, 64 hex digits, from its hex digits or from the path of a PEM file of either half.

    Raises ``UntrustedError`` when it is neither.
    """
    text = os.fspath(key)
    if re.fullmatch(r"[0-9a-fA-F]{64}", text):
        return text.lower()
    try:
        data = _read(text)
    except StoreError as error:
        raise UntrustedError(f"not a public key: neither 64 hex digits nor a file that can be read: {error}") from None
    try:
        if b"PRIVATE KEY" in data:
            return SigningKey(_private(data, text)).public
        return _public(data, text)
    except StoreError as error:
        raise UntrustedError(str(error)) from None


def _private(data: bytes, path: str | os.PathLike[str]) -> Ed25519PrivateKey:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
    from cryptography.hazmat.primitives.serialization import load_pem_private_key

    try:
        key = load_pem_private_key(data, password=None)
    except (ValueError, TypeError, UnsupportedAlgorithm) as error:  # TypeError: encrypted
        raise StoreError(f"{os.fspath(path)}: cannot read the private key: {error}") from None
    if not isinstance(key, Ed25519PrivateKey):
        raise StoreError(f"{os.fspath(path)}: not an Ed25519 key")
    return key


def _public(data: bytes, path: str) -> str:
    from cryptography.exceptions import UnsupportedAlgorithm
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    hexadecimal = data.strip()
    if re.fullmatch(rb"[0-9a-fA-F]{64}", hexadecimal):
        return hexadecimal.decode("ascii").lower()
    try:
        key = load_pem_public_key(data)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise StoreError(f"{path}: cannot read the public key: {error}") from None
    if not isinstance(key, Ed25519PublicKey):
        raise StoreError(f"{path}: not an Ed25519 key")
    return key.public_bytes_raw().hex()


def _read(path: str | os.PathLike[str]) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read(_LARGEST_FILE)
    except OSError as error:
        if not of_system(error):
            raise
        raise StoreError(f"{os.fspath(path)}: cannot read the key: {error.strerror}") from None
    except ValueError as error:  # NUL in the path
        raise StoreError(f"{os.fspath(path)!r}: cannot read the key: {error}") from None


def _write_new(path: str | os.PathLike[str], data: bytes, mode: int) -> None:
    """Create the file with all of ``data`` at once, or leave nothing: another process may be waiting to read it."""
    final = Path(path)
    temporary = final.with_name(f".{final.name}.{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode)
        try:
            with os.fdopen(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.link(temporary, final)
        finally:
            temporary.unlink()
        sync_folder(final.parent)
    except OSError as error:
        if not of_system(error):
            raise
        raise StoreError(f"{os.fspath(path)}: cannot create the key file: {error.strerror}") from None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
