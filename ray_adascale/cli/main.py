"""Find a learning-rate schedule at a small batch, cheaply; then run that very schedule
on any number of Ray workers.

The usual way:
  ray-adascale check    my/file.py:workload
  ray-adascale tune     my/file.py:workload --base-batch-size 32 --total-steps 2000 --repeats 2
  ray-adascale forecast recipe.json --workers 1,2,4,8,16
  ray-adascale train    my/file.py:workload --recipe recipe.json --num-workers 8
  ray-adascale report   ~/ray_results/NAME --recipe recipe.json

A workload is a function of yours, from a config (a dict of hyperparameters) to a
ray_adascale.Workload: model, optimizer, scheduler, data and loss in plain torch. Name
it path/to/file.py:function or package.module:function.

Options may come from a file, some on each line: ray-adascale train @options.txt
--num-workers 8

Exit codes: 0 done; 1 the run or search failed, or what was described is damaged; 2 a
mistake in the command; 130 interrupted. `ray-adascale COMMAND --help` says more about
each.
"""

# The text above is the help of the command line: its first line, and what follows the
# list of commands.

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import warnings
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

from .._errors import SettingError, typed
from .._version import __version__
from ..train.connection import check_address
from .checking import Check
from .command import Command, parse, tell
from .options import OptionParser
from .reading import Describe, Report, ShowForecast
from .train import Resume, Train
from .tune import Tune

COMMANDS: dict[str, type[Command]] = {
    "check": Check,
    "tune": Tune,
    "forecast": ShowForecast,
    "train": Train,
    "resume": Resume,
    "report": Report,
    "describe": Describe,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0 for success, 1 for a failed run or search, 2 for a mistake in
        the command, 130 for an interrupt.
    """
    _cache_bytecode()
    command = parse(make_parser(), argv)
    try:
        Path.cwd()
    except FileNotFoundError:
        tell("the current directory was deleted. Change to one that exists.")
        return 2
    try:
        with warnings.catch_warnings():
            warnings.showwarning = lambda message, *_, **__: tell(f"warning: {message}")
            if hasattr(command, "address"):
                check_address(command.address)
            return command()
    except (
        ValueError,
        FileNotFoundError,
        IsADirectoryError,
        NotADirectoryError,
        PermissionError,
    ) as e:
        tell(error_text(e, command))
        return 2
    except KeyboardInterrupt as e:
        tell(f"interrupted. {e}" if e.args else "interrupted")
        return 130
    except (RuntimeError, OSError) as e:
        tell(error_text(e, command))
        return 1


def make_parser() -> argparse.ArgumentParser:
    """Return the parser. It loads no torch and no Ray, so that help, completion and
    mistyped options are quick.
    """
    parser = OptionParser(
        prog="ray-adascale",
        description=(__doc__ or "").partition("\n")[0],
        epilog=(__doc__ or "").partition("\n")[2],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    parser.commands = tuple(COMMANDS)
    added = parser.add_subparsers(required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        text = "\n".join(
            line.strip()
            for line in (command.__doc__ or "").partition("Attributes:")[0].splitlines()
        )
        sub = added.add_parser(
            name,
            help=text.partition("\n")[0],
            description=text,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_options(sub)
    with contextlib.suppress(ImportError):  # an extra
        import argcomplete

        # does nothing unless the shell asks for completion
        argcomplete.autocomplete(parser)
    return parser


def error_text(error: Exception, command: Command) -> str:
    """Return an error's message for the command line: ``--accumulation 0`` for
    ``AdaScaleConfig(accumulation=0)``.

    Args:
        error: The error.
        command: The command, whose options are named in place of settings.
    """
    if isinstance(error, SettingError):
        options = {
            "patience",
            *(
                field.name
                for owner in (type(command), *command.others)
                for field in fields(owner)
            ),
        }
        if error.settings.keys() <= options:
            return error.with_settings_as(
                " ".join(
                    typed(*setting, between=" ") for setting in error.settings.items()
                )
            )
    if isinstance(error, OSError) and error.strerror and error.filename:
        # without Python's brackets and numbers
        return f"{error.strerror}: {error.filename}"
    return str(error)


def _cache_bytecode() -> None:
    """Keep compiled bytecode in the user's cache where ``PYTHONDONTWRITEBYTECODE`` is
    set, in child processes too.

    Without bytecode each of Ray's processes would compile torch and Ray again. That
    takes minutes, and Ray's start may time out. The cache keeps the bytecode away from
    the code.
    """
    if os.environ.pop("PYTHONDONTWRITEBYTECODE", None):
        folder = os.environ.setdefault(
            "PYTHONPYCACHEPREFIX",
            str(Path.home() / ".cache" / "ray_adascale" / "bytecode"),
        )
        sys.dont_write_bytecode = False
        sys.pycache_prefix = folder
