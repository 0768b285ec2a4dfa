"""Whose signature counts: the key that signs, the keys that are trusted, and the pins in the user's folder.

A run has a key. Its public half is pinned, like a host's in SSH, when a chain is first met; ``trust=`` (or
``TIERCKPT_TRUST``) pins explicitly. What is pinned lives below the user's configuration folder::

    keys/<run>.pem          the private key of a run that was given none (0600)
    known/<run>.json        {"keys": [public keys], "heads": {root: [number, digest]}}
"""

from __future__ import annotations

import json
import os
import random
import secrets
import stat
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tierckpt.config import config_dir
from tierckpt.errors import StateError, StoreError, TierckptError, UntrustedError, of_system, tolerating
from tierckpt.format import paths
from tierckpt.format.chain import Chain, LinkSummary
from tierckpt.format.keys import SigningKey, read_public, sync_folder
from tierckpt.telling import warn

if TYPE_CHECKING:
    from tierckpt.tiers.store import Store


class TrustWarning(UserWarning):
    """Something about keys that a user should know, but that stops nothing."""


def signing_key(run: str, given: str | os.PathLike[str] | SigningKey | None) -> SigningKey:
    """The key that signs for ``run``: as given, else from ``TIERCKPT_KEY``, else the run's own in the user's folder.

    When none exists one is made; if the folder cannot be written it lives in this process only, with a warning.
    """
    if isinstance(given, SigningKey):
        return given
    path = os.fspath(given) if given is not None else os.environ.get("TIERCKPT_KEY")
    if path:
        return SigningKey.load(path)
    own = config_dir() / "keys" / f"{run}.pem"
    if os.path.exists(own):  # Path.exists raises where the user's folder may not be entered
        return SigningKey.load(own)
    key = SigningKey.generate()
    try:
        own.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        key.save(own)
        for folder in (own.parent.parent, own.parent.parent.parent):
            sync_folder(folder)
    except (OSError, StoreError) as error:
        if isinstance(error, OSError) and not of_system(error):
            raise
        if os.path.exists(own):  # another process of this user was first
            return SigningKey.load(own)
        warn(
            f"the signing key of run {run} cannot be kept in {own} ({error}); it lives in this process only, and the next "
            "start will sign with another one. Pass key= or set TIERCKPT_KEY to keep one key.",
            category=TrustWarning,
        )
    return key


def held_keys(run: str, given: str | os.PathLike[str] | SigningKey | None) -> frozenset[str]:
    """Public halves of the private keys this user holds for ``run``."""
    held = set()
    if isinstance(given, SigningKey):
        held.add(given.public)
    paths = [given if not isinstance(given, SigningKey) else None, os.environ.get("TIERCKPT_KEY")]
    paths.append(config_dir() / "keys" / f"{run}.pem")
    for path in paths:
        if path and os.path.exists(path):
            with tolerating(TierckptError, OSError):
                held.add(SigningKey.load(path).public)
    return frozenset(held)


def trusted_keys(
    trust: str | os.PathLike[str] | Iterable[str | os.PathLike[str]] | None,
) -> frozenset[str] | None:
    """The keys named by ``trust=``, else by ``TIERCKPT_TRUST`` (separated by ``:`` or ``,``); None when nothing is named."""
    if trust is None:
        text = os.environ.get("TIERCKPT_TRUST")
        if not text:
            return None
        trust = [part for part in text.replace(",", ":").split(":") if part]
    if isinstance(trust, (str, os.PathLike)):
        trust = [trust]
    if not isinstance(trust, Iterable):
        raise StateError(f"trust={trust!r}: it takes public keys, hex or paths of files")
    return frozenset(read_public(one) for one in trust)


@dataclass
class Pins:
    """What this user has seen of one run: its keys, and the head of its chain at each root."""

    path: Path
    keys: list[str] = field(default_factory=list)
    heads: dict[str, tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def load(cls, run: str, folder: Path | None = None) -> Pins:
        """Those of ``run`` in ``folder``, by default the user's configuration folder."""
        pins = cls((folder or config_dir()) / "known" / f"{run}.json")
        try:
            data = pins.path.read_bytes()
        except OSError as error:
            if not of_system(error):
                raise
            return pins  # never seen, or a home that cannot be read: nothing is pinned
        try:
            known = json.loads(data)
            pins.keys = [str(key) for key in known["keys"]]
            pins.heads = {str(root): (int(number), str(digest)) for root, (number, digest) in known["heads"].items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise UntrustedError(
                f"{pins.path} is damaged ({error}); it says which keys of run {run} are trusted. Mend it, or remove it to "
                "trust on first use again."
            ) from error
        return pins

    def save(self) -> bool:
        """Write them; False if the user's folder cannot be written."""
        text = json.dumps({"keys": self.keys, "heads": self.heads}, indent=1, sort_keys=True)
        temporary = self.path.with_name(f".{self.path.name}.{secrets.token_hex(8)}.tmp")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            if not self.path.exists():
                _forget_temporary(self.path.parent)
            # Without the fsync a loss of power could leave an empty file, and with it a run that nobody trusts.
            with open(temporary, "w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, self.path)
        except OSError as error:
            with tolerating(OSError):
                temporary.unlink()
            if not of_system(error):
                raise
            return False
        return True


#: Pins that are looked at when new ones are made.
_LOOKED_AT = 100


def _forget_temporary(known: Path) -> None:
    """Remove pins of stores that lay in folders for temporary files and are gone, a few at a time.

    Of no others: a root that is not there may be one that is not mounted, and its pins what protects it when it comes back.
    In a folder for temporary files only its owner can have removed it. Private keys stay.
    """
    names = [entry.name for entry in os.scandir(known) if entry.name.endswith(".json")]
    for name in random.sample(names, min(_LOOKED_AT, len(names))):
        with tolerating(OSError, TierckptError):
            pins = Pins.load(name.removesuffix(".json"), known.parent)
            if pins.heads and all(_is_temporary(root) and not os.path.lexists(root) for root in pins.heads):
                pins.path.unlink(missing_ok=True)


def _temporary_folders() -> list[str]:
    return [tempfile.gettempdir(), "/tmp", "/dev/shm"]


def _is_temporary(root: str) -> bool:
    """Whether it lies in a folder for temporary files in which nobody can remove what is another's."""
    for folder in _temporary_folders():
        with tolerating(OSError):
            sticky = os.stat(folder).st_mode & stat.S_ISVTX
            if sticky and root.startswith(folder.rstrip("/") + "/"):
                return True
    return False


@dataclass(frozen=True)
class Trust:
    """How far a chain is to be believed.

    Args:
        keys: keys that are trusted; None: those pinned, else the chain's own on first use.
        held: keys whose private half this user has; they count as pinned.
        expect_head: digest of a link that the chain must contain.
    """

    keys: frozenset[str] | None = None
    held: frozenset[str] = frozenset()
    expect_head: str | None = None

    def problems(self, chain: Chain, root: str, pins: Pins) -> list[str]:
        """What is wrong with a chain whose signatures are valid; empty when it is to be believed."""
        found: list[str] = []
        base = self.base(pins)
        link = stranger(chain, chain.trusted_by(base)) if base is not None else None
        if base is not None and link is not None:
            where = "trust= (TIERCKPT_TRUST)" if self.keys is not None else f"what is pinned in {pins.path}"
            found.append(
                f"{root}/{paths.link(link.number)} is signed by key {link.key}, which is neither among {where} "
                f"({', '.join(sorted(base))}) nor endorsed by one of these. If it is yours (a lost key), trust it: "
                f"--trust {link.key}"
            )
        end = (
            f"the chain ends with link {chain.head.number}, {chain.head.digest}" if chain.head else "there is no chain"
        )
        digests = {link.digest for link in chain.links}
        if self.expect_head is not None and self.expect_head not in digests:
            found.append(
                f"{root}: no link of the chain has the expected digest {self.expect_head}; {end}: "
                "it was rolled back, truncated or replaced"
            )
        pinned = pins.heads.get(root)
        if pinned is not None and self.expect_head is None and pinned[1] not in digests:
            found.append(
                f"{root}: link {pinned[0]} with digest {pinned[1]}, seen here before, is not in the chain; {end}: it was "
                f"rolled back, truncated or replaced. If you did this yourself, remove {pins.path}"
            )
        return found

    def base(self, pins: Pins) -> frozenset[str] | None:
        """Keys to start from; None when nothing is known and the first use decides."""
        if self.keys is not None:
            return self.keys | self.held
        return frozenset(pins.keys) | self.held if pins.keys else None

    def check(self, store: Store) -> None:
        """Believe the chain of a store or raise; what is believed is pinned.

        Raises:
            UntrustedError: all that is wrong.
        """
        pins = pins_of(store)
        found = self.problems(store.chain, store.url, pins)
        if found:
            raise UntrustedError("; ".join(found))
        remember(store.chain, store.url, pins, self.keys)


def pins_of(store: Store) -> Pins:
    """What this user has seen of the run in a store.

    Its chain is read on: another process of the user may just have published and pinned what it did not have when it was
    read, and that is no roll-back.
    """
    pins = Pins.load(store.run)
    store.refresh()
    return pins


def stranger(chain: Chain, trusted: frozenset[str], since: int = 0) -> LinkSummary | None:
    """The first link from number ``since`` on that no trusted key answers for.

    What stands before the first link that a trusted key signed was there when its holder began to sign, and was believed
    then. Later links must be signed by trusted keys, each of them: a commit between two good links is not good.
    """
    began = next((link.number for link in chain.links if link.key in trusted), 0)
    later = chain.links[max(began, since) :]
    return next((link for link in later if link.key not in trusted), None)


def remember(chain: Chain, root: str, pins: Pins | None = None, trusted: frozenset[str] | None = None) -> None:
    """Pin the keys and the head of a chain that is believed.

    A key that nobody endorsed is pinned only if it is among those that the user trusts explicitly, ``trusted``; while a
    chain has another such key, its first use pins no keys.
    """
    if chain.run is None or chain.head is None:
        return
    pins = pins or Pins.load(chain.run)
    known = set(pins.keys) | (trusted or frozenset())
    if not known and all(chain.keys.values()):
        known = set(chain.keys)
    keys = sorted(set(pins.keys) | (chain.trusted_by(known) & chain.keys.keys()))
    head = (chain.head.number, chain.head.digest)
    if keys != pins.keys or pins.heads.get(root) != head:
        pins.keys, pins.heads[root] = keys, head
        pins.save()
