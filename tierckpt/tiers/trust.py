"""Whose signature counts: the key that signs, the keys that are trusted, and the pins in the user's folder.

A run has a key. Its public half is pinned, like a host's in SSH, when a chain is first met; ``trust=`` (or
``TIERCKPT_TRUST``) pins explicitly. What is pinned lives below the user's configuration folder::

    keys/<run>.pem          the private key of a run that was given none (0600)
    known/<run>.json        {"keys": [public keys], "heads": {root: [number, digest]}}
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from tierckpt.config import config_dir
from tierckpt.errors import StoreError, TierckptError, UntrustedError
from tierckpt.format.chain import Chain
from tierckpt.format.keys import SigningKey, read_public


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
    if own.exists():
        return SigningKey.load(own)
    key = SigningKey.generate()
    try:
        own.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        key.save(own)
    except FileExistsError:  # another process of this user was first
        return SigningKey.load(own)
    except (OSError, StoreError) as error:
        warnings.warn(
            f"the signing key of run {run} cannot be kept in {own} ({error}); it lives in this process only, and the next "
            "start will sign with another one. Pass key= or set TIERCKPT_KEY to keep one key.",
            TrustWarning,
            stacklevel=2,
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
            with contextlib.suppress(TierckptError, OSError):
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
    return frozenset(read_public(one) for one in trust)


@dataclass
class Pins:
    """What this user has seen of one run: its keys, and the head of its chain at each root."""

    path: Path
    keys: list[str] = field(default_factory=list)
    heads: dict[str, tuple[int, str]] = field(default_factory=dict)

    @classmethod
    def load(cls, run: str) -> Pins:
        pins = cls(config_dir() / "known" / f"{run}.json")
        try:
            text = pins.path.read_text()
        except OSError:  # never seen, or a home that cannot be read: nothing is pinned
            return pins
        try:
            known = json.loads(text)
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
            temporary.write_text(text)
            os.replace(temporary, self.path)
        except OSError:
            with contextlib.suppress(OSError):
                temporary.unlink()
            return False
        return True


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
        if chain.head is None:
            return found
        head, signer = chain.head, chain.links[-1].key
        digests = {link.digest for link in chain.links}
        base = self.base(pins)
        if base is not None:
            if signer not in chain.trusted_by(base):
                where = "trust= (TIERCKPT_TRUST)" if self.keys is not None else f"what is pinned in {pins.path}"
                found.append(
                    f"{root}: the newest link, {head.number}, is signed by key {signer}, which is neither "
                    f"among {where} ({', '.join(sorted(base))}) nor endorsed by one of these"
                )
        if self.expect_head is not None and self.expect_head not in digests:
            found.append(
                f"{root}: no link of the chain has the expected digest {self.expect_head}; the chain ends with link "
                f"{head.number}, {head.digest}: it was rolled back, truncated or replaced"
            )
        pinned = pins.heads.get(root)
        if pinned is not None and self.expect_head is None and pinned[1] not in digests:
            found.append(
                f"{root}: link {pinned[0]} with digest {pinned[1]}, seen here before, is not in the chain, which ends with "
                f"link {head.number}: it was rolled back, truncated or replaced. If you did this yourself, "
                f"remove {pins.path}"
            )
        return found

    def base(self, pins: Pins) -> frozenset[str] | None:
        """Keys to start from; None when nothing is known and the first use decides."""
        if self.keys is not None:
            return self.keys
        return frozenset(pins.keys) | self.held if pins.keys else None

    def check(self, chain: Chain, root: str, *, pin: bool = True) -> None:
        """Believe a chain or raise; what is believed is pinned.

        Raises:
            UntrustedError: all that is wrong.
        """
        pins = Pins.load(chain.run or "")
        found = self.problems(chain, root, pins)
        if found:
            raise UntrustedError("; ".join(found))
        if pin:
            remember(chain, root, pins)


def remember(chain: Chain, root: str, pins: Pins | None = None) -> None:
    """Pin the keys and the head of a chain that is believed."""
    if chain.run is None or chain.head is None:
        return
    pins = pins or Pins.load(chain.run)
    keys = sorted(chain.trusted_by([*pins.keys, chain.links[-1].key]))
    head = (chain.head.number, chain.head.digest)
    if keys != pins.keys or pins.heads.get(root) != head:
        pins.keys, pins.heads[root] = keys, head
        pins.save()
