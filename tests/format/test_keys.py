"""Protects keys: private ones are only their owner's and never lost to an overwrite; anything else is no key."""

from __future__ import annotations

import os
import stat
import warnings
from pathlib import Path

import pytest

from tierckpt.errors import StoreError, UntrustedError
from tierckpt.format import keys
from tierckpt.format.keys import SigningKey

# The example of RFC 8410, section 10.3.
RFC_8410 = """-----BEGIN PRIVATE KEY-----
MC4CAQAwBQYDK2VwBCIEINTuctv5E1hK1bbY8fdp+K06/nwoy/HU++CXqI9EdVhC
-----END PRIVATE KEY-----
"""
RFC_8410_PUBLIC = "19bf44096984cdfe8541bac167dc3b96c85086aa30b6b6cb0c5c38ad703166e1"


def private_file(path: Path, text: str = RFC_8410) -> Path:
    path.write_text(text)
    path.chmod(0o600)
    return path


def test_golden(tmp_path: Path) -> None:
    key = SigningKey.load(private_file(tmp_path / "key"))
    assert key.public == RFC_8410_PUBLIC
    half = "9ad3924b587fa6ebd8f930d8a5b243e5041a32f65384bcb5096d6a2a2ca6916e"
    assert key.sign(b"tierckpt").hex() == half + "5e57f8e3672148d0977b5e98e43d473071e04d1de80955a2905541804309240a"


def test_signatures() -> None:
    key, other = SigningKey.generate(), SigningKey.generate()
    signature = key.sign(b"data")
    assert len(signature) == 64 and signature == key.sign(b"data")
    assert keys.verify(key.public, signature, b"data")
    assert not keys.verify(key.public, signature, b"Data")
    assert not keys.verify(other.public, signature, b"data")
    assert not keys.verify(key.public, signature[:-1], b"data")
    assert not keys.verify(key.public, b"", b"data")
    assert not keys.verify("ab", signature, b"data")
    assert not keys.verify("ff" * 32, signature, b"data")


def test_files_are_private_and_never_overwritten(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        key, path = SigningKey.generate(), tmp_path / "key"
        key.save(path)
        key.write_public(tmp_path / "key.pub")
    finally:
        os.umask(before)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    data = path.read_bytes()
    with pytest.raises(StoreError, match="key: cannot create"):
        SigningKey.generate().save(path)
    with pytest.raises(StoreError, match=r"key\.pub: cannot create"):
        key.write_public(tmp_path / "key.pub")
    assert path.read_bytes() == data
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert SigningKey.load(path).public == key.public


def test_a_symlink_is_not_followed_when_a_key_is_made(tmp_path: Path) -> None:
    (tmp_path / "key").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreError):
        SigningKey.generate().save(tmp_path / "key")
    assert not (tmp_path / "elsewhere").exists()


def test_a_key_that_others_can_read_is_warned_of(tmp_path: Path) -> None:
    path = private_file(tmp_path / "key")
    path.chmod(0o640)
    with pytest.warns(UserWarning, match=r"key can be read by other users; chmod 600"):
        SigningKey.load(path)


def test_public_keys_come_from_hex_and_from_both_halves(tmp_path: Path) -> None:
    path = private_file(tmp_path / "key")
    SigningKey.load(path).write_public(tmp_path / "key.pub")
    (tmp_path / "hex").write_text(RFC_8410_PUBLIC + "\n")
    for source in (RFC_8410_PUBLIC, RFC_8410_PUBLIC.upper(), path, str(path), tmp_path / "key.pub", tmp_path / "hex"):
        assert keys.read_public(source) == RFC_8410_PUBLIC


@pytest.mark.parametrize(
    "text",
    [
        "",
        "abc",
        "-----BEGIN PRIVATE KEY-----\nMC4C\n-----END PRIVATE KEY-----\n",
        "-----BEGIN PUBLIC KEY-----\nMC4C\n-----END PUBLIC KEY-----\n",
        RFC_8410.replace("MC4CAQAwBQYDK2Vw", "MC4CAQAwBQYDK2Vu"),  # X25519
    ],
)
def test_other_files_are_no_keys(tmp_path: Path, text: str) -> None:
    path = private_file(tmp_path / "key", text)
    with pytest.raises(StoreError, match="key"):
        SigningKey.load(path)
    with pytest.raises(UntrustedError, match="key"):
        keys.read_public(path)


def test_what_is_not_there_is_said(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="absent: cannot read the key"):
        SigningKey.load(tmp_path / "absent")
    for source in (tmp_path / "absent", "a\0b", "0" * 63, tmp_path):
        with pytest.raises(UntrustedError, match="neither 64 hex digits nor a file"):
            keys.read_public(source)
    SigningKey.generate().write_public(tmp_path / "pub")
    with pytest.raises(StoreError, match="not a private key"):
        SigningKey.load(tmp_path / "pub")
