"""``tierckpt export``: a checkpoint in a form that other programs read."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

import click

from tierckpt.cli import safetensors_file
from tierckpt.cli.checkpoint import described, open_content
from tierckpt.cli.needs import needs_torch
from tierckpt.cli.output import count, progress, say, say_json, size
from tierckpt.cli.target import json_option, reports_data_errors
from tierckpt.errors import StoreError, UntrustedError

_UNITS = {"": 1, "B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}


def _nbytes(ctx: click.Context, parameter: click.Parameter, value: str) -> int:
    found = re.fullmatch(r"\s*([0-9]{1,15}(?:\.[0-9]{1,6})?)\s*([A-Za-z]*)\s*", value)
    unit = _UNITS.get(found[2].upper()) if found else None
    if found is None or unit is None or (nbytes := int(float(found[1]) * unit)) < 1:
        raise click.BadParameter(f"{value!r} is no size like 5GB, 500MB or 2GiB")
    return nbytes


@click.command(short_help="Write a checkpoint as safetensors or for torch.load.")
@click.argument("root")
@click.option("--to", "form", type=click.Choice(["safetensors", "torch"]), required=True, help="The form to write.")
@click.option("--out", "folder", required=True, type=click.Path(path_type=Path), help="A folder, new or empty.")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="This step instead of the newest.")
@click.option("--keys", multiple=True, metavar="GLOB", help="Only what has such a dotted name, say 'model.*'.")
@click.option(
    "--max-shard-size",
    "limit",
    default="5GB",
    show_default=True,
    callback=_nbytes,
    metavar="SIZE",
    help="Of tensors in one file of safetensors; a larger tensor has a file of its own.",
)
@json_option
@reports_data_errors(files=[])
def command(
    root: str, form: str, folder: Path, step: int | None, keys: tuple[str, ...], limit: int, as_json: bool
) -> int:
    """Write a checkpoint of the store at ROOT into a new folder, with whole tensors, each byte verified on its way.

    safetensors: model.safetensors, or parts with model.safetensors.index.json, streamed in bounded memory. Names are
    dotted (model.layers.0.weight), but those that two tensors would share are written as in the store. Tied tensors
    are written once, the other names are in the file's metadata. Values, metadata, and the dtypes that safetensors
    lacks (written as bytes) are in model.values.json.

    torch: checkpoint.pt, the state as tierckpt.read() nests it, which torch.load(…, weights_only=True) reads. Needs
    PyTorch, and memory for the whole state. Kinds of values that torch.load would refuse are converted, and listed; so is
    what only other ranks than rank 0 have.
    """
    if form == "torch":
        needs_torch("tierckpt export --to torch")
    content, problems = open_content(root, step)
    if problems:
        raise UntrustedError("; ".join(problem["message"] for problem in problems))
    if Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(content.store.url)):
        raise click.UsageError(f"--out {folder} is in the store, where nothing else belongs")
    notes: list[str] = []
    with _new_folder(folder) as temporary:
        if form == "safetensors":
            with progress("exporting") as told:
                written = safetensors_file.export(content, temporary, keys=keys or None, limit=limit, progress=told)
        else:
            from tierckpt.cli import torch_file

            written = torch_file.export(content, temporary, keys=keys or None, notes=notes)
    if as_json:
        files = [str(folder / name) for name in written.files]
        say_json(
            {
                "checkpoint": described(content),
                "files": files,
                "tensors": written.tensors,
                "bytes": written.bytes,
                "notes": notes,
                "problems": [],
            }
        )
        return 0
    for note in notes:
        say(f"note: {note}")
    for name in written.files:
        say(str(folder / name))
    manifest = content.manifest
    what = f"step {manifest.step} (generation {manifest.generation})"
    say(f"{what}: {count(written.tensors, 'tensor')}, {size(written.bytes)}, all verified")
    return 0


@contextlib.contextmanager
def _new_folder(folder: Path) -> Iterator[Path]:
    """A temporary folder that becomes ``folder``, whole and durable, or goes away.

    Raises:
        StoreError: ``folder`` is there and not empty, or cannot be written.
    """
    target = Path(os.path.abspath(folder))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    try:
        if os.path.lexists(target) and (not target.is_dir() or any(target.iterdir())):
            raise StoreError(f"--out {folder}: it exists and is not an empty folder; choose another one")
        temporary.mkdir(parents=True)
        try:
            yield temporary
            _sync(temporary)
            # Takes the place of an empty folder, and of nothing else.
            os.rename(temporary, target)
            _sync(target.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
    except OSError as error:
        raise StoreError(f"cannot write to {folder}: {error.strerror or error}") from error


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
