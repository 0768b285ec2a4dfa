"""``tierckpt keygen``: a key pair that signs a run."""

from __future__ import annotations

from pathlib import Path

import click

from tierckpt.cli.output import say
from tierckpt.errors import StoreError
from tierckpt.format.keys import SigningKey


@click.command(short_help="Make a key pair that signs a run.")
@click.argument("path", type=click.Path(path_type=Path))
def command(path: Path) -> int:
    """Write a new private key to PATH, readable by you alone, and its public half to PATH.pub.

    Prints the public key; overwrites nothing. Sign with key= or TIERCKPT_KEY=PATH, trust with trust= or
    TIERCKPT_TRUST=PATH.pub.
    """
    public = path.with_name(path.name + ".pub")
    for one in (path, public):
        if one.exists() or one.is_symlink():
            raise StoreError(f"{one} exists and is not overwritten: choose another path")
    key = SigningKey.generate()
    key.save(path)
    try:
        key.write_public(public)
    except StoreError:
        path.unlink()
        raise
    say(key.public)
    return 0
