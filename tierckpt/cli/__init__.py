"""The command line: one file per command, imported when it is called.

Exit status: 0 all is well; 1 something is wrong with the data, named on stdout; 2 the command could not run,
said in one line on stderr. ``TIERCKPT_DEBUG`` adds the traceback.
"""

from __future__ import annotations

import importlib
import io
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from typing import Any, TextIO

import click

from tierckpt import __version__
from tierckpt.cli.output import clean
from tierckpt.errors import TierckptError

__all__ = ["main"]

#: In the order of the help; ``tierckpt.cli.<name>.command`` is the command.
COMMANDS = (
    "verify",
    "ls",
    "inspect",
    "diff",
    "explain",
    "export",
    "prune",
    "keygen",
    "agent",
    "status",
    "demo",
    "bench",
)

CANNOT_RUN = 2
INTERRUPTED = 130


class _Lazy(click.Group):
    """Commands are imported when they are asked for, so that each starts as fast as what it needs."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = importlib.import_module(f"tierckpt.cli.{cmd_name}").command
        return command

    def invoke(self, ctx: click.Context) -> Any:
        try:
            status = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # Whoever read our output has gone. That says nothing about the data, as click's status 1 would; and
            # nothing more may be flushed into that pipe when Python ends.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return CANNOT_RUN
        return status


@click.group(
    cls=_Lazy,
    no_args_is_help=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
    epilog="Exit status: 0 all is well, 1 something is wrong with the data, 2 the command could not run.",
)
@click.version_option(__version__, message="tierckpt %(version)s")
def tierckpt() -> None:
    """Checkpoints that are tiered, verified and signed: look into a store, check it, clean it up."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line (by default that of this process) and return its exit status."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a locale that lacks a character is no reason to fail
            stream.reconfigure(errors="backslashreplace")
    with warnings.catch_warnings():
        warnings.simplefilter("default")
        warnings.showwarning = _show_warning
        try:
            status = tierckpt.main(argv, prog_name="tierckpt", standalone_mode=False)
        except click.UsageError as error:
            path = error.ctx.command_path if error.ctx else "tierckpt"
            return _cannot_run(f"{path}: {_in_one_line(error)} (see {path} --help)")
        except (click.Abort, KeyboardInterrupt):
            _complain("tierckpt: interrupted")
            return INTERRUPTED
        except click.ClickException as error:
            return _cannot_run(f"tierckpt: {_in_one_line(error)}")
        except SystemExit as error:
            return _cannot_run(f"tierckpt: {error}") if isinstance(error.code, str) else int(error.code or 0)
        except (TierckptError, ImportError) as error:
            return _cannot_run(f"tierckpt: {error}")
        except Exception as error:
            kind = "" if isinstance(error, OSError) else f"unexpected error: {type(error).__name__}: "
            return _cannot_run(f"tierckpt: {kind}{error}")
    return status if isinstance(status, int) else 0


def _in_one_line(error: click.ClickException) -> str:
    """What click says in several lines: a list of choices, say."""
    return re.sub(r"\s*\n\s*", " ", error.format_message())


def _cannot_run(line: str) -> int:
    """Say why in one line; call it while the exception is being handled."""
    if os.environ.get("TIERCKPT_DEBUG"):
        traceback.print_exc()
    _complain(line)
    return CANNOT_RUN


def _complain(line: str) -> None:
    click.echo(clean(line), err=True)


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    _complain(f"tierckpt: warning: {message}")
