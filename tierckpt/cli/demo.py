"""``tierckpt demo``: train, kill, resume, compare."""

from __future__ import annotations

from pathlib import Path

import click

from tierckpt.cli.needs import MissingError, needs_torch


@click.command(short_help="Train, kill, resume, compare.")
@click.argument("folder", required=False, type=click.Path(file_okay=False, path_type=Path))
@click.option("--keep", is_flag=True, help="Leave the temporary folder.")
def command(folder: Path | None, keep: bool) -> int:
    """Train a small GPT on four processes, kill one in the middle of a save, and show that nothing was lost.

    Works in FOLDER (new or empty), by default in a temporary one.
    """
    needs_torch("tierckpt demo")
    import torch

    if not hasattr(torch.cpu.Stream, "record_event"):
        raise MissingError(
            f"the demo trains with FSDP2 without a GPU, which torch {torch.__version__} cannot: take a newer one"
        )
    from tierckpt.demo import report

    return report.main(folder, keep=keep)
