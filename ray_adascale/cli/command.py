"""What the commands have in common: options, and the settings, hyperparameters and
search space that are given by them.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from .._fields import refuse_credentials
from .._files import without_credentials
from ..config import AdaScaleConfig, EarlyStop
from .options import add_options, option
from .source import resolve


@dataclass(kw_only=True)
class Command(ABC):
    """A command of ``ray-adascale``. Its options are its fields; its docstring, up to
    the fields, begins its help.

    Attributes:
        settings: The options of ``others`` that were typed, by name, without defaults.
            Some mean something because they were typed: they contradict a recipe, or
            change what a run was started with.

    Fields of the class:
        others: Dataclasses whose fields are options as well. The given ones are in
        ``settings``.
        shown: Those of them that the help lists.
    """

    settings: dict[str, Any] = option(hidden=True)
    others: ClassVar[tuple[type, ...]] = ()
    shown: ClassVar[Collection[str]] = ()

    @classmethod
    def add_options(cls, parser: argparse.ArgumentParser) -> None:
        """Add the command's options to its parser."""
        parser.set_defaults(command=cls)
        add_options(parser, cls)
        if AdaScaleConfig in cls.others:
            every = len(cls.shown) == len(dataclasses.fields(AdaScaleConfig))
            more = (
                ""
                if every
                else "; the others that `ray-adascale train --help` lists are options "
                "here as well"
            )
            add_options(
                parser.add_argument_group(f"settings{more}"),
                AdaScaleConfig,
                shown=cls.shown,
            )

    def given(self, names: Iterable[str]) -> dict[str, Any]:
        """Return the given ones of these settings."""
        return {name: self.settings[name] for name in names if name in self.settings}

    @property
    def config(self) -> AdaScaleConfig:
        """The settings of a run that are given."""
        patience = self.settings.get("early_stop")
        stop = None if patience is None else EarlyStop(patience=patience)
        given = self.given(field.name for field in dataclasses.fields(AdaScaleConfig))
        return AdaScaleConfig(**given | {"early_stop": stop})

    @abstractmethod
    def __call__(self) -> int:
        """Run the command, and return its exit code."""


def parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> Command:
    """Return the command with its options, from a parser that has them."""
    args, rest = parser.parse_known_args(argv)
    given = vars(args)
    command: type[Command] = given.pop("command")
    own = {field.name for field in dataclasses.fields(command)}
    # argparse accepts positional arguments in one sequence only; key=value may also
    # stand after options.
    if rest and not (
        "overrides" in own
        and all("=" in item and not item.startswith("-") for item in rest)
    ):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if "overrides" in own:
        given["overrides"] = [*given.get("overrides", ()), *rest]
    settings = {name: given.pop(name) for name in list(given) if name not in own}
    return command(**given, settings=settings)


@dataclass(kw_only=True)
class OfWorkload(Command):
    """A command with a workload.

    Attributes:
        workload: A function, path/to/file.py:function or package.module:function.
        overrides: Hyperparameters, which replace those of a recipe or of the search
            space.
    """

    workload: str = option()
    overrides: list[str] = option(nargs="*", metavar="key=value")
    others: ClassVar[tuple[type, ...]] = (AdaScaleConfig,)

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """The hyperparameters that are given. A later value replaces an earlier one,
        as with options.
        """
        return dict(map(key_and_value, self.overrides))


def key_and_value(text: str) -> tuple[str, Any]:
    """Return key and value of ``key=value``: a JSON value, or a string if the text is
    no JSON.

    Raises:
        ValueError: The text does not have that form, or has credentials.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ValueError(f"Invalid override {text!r}. Must be key=value.")
    refuse_credentials(f"override {key}", value)
    try:
        return key, json.loads(value)
    except json.JSONDecodeError:
        return key, value


def file_and_function(name: str) -> tuple[str, str]:
    """Return the name of a workload's file or module without folders and packages,
    and the function's name.
    """
    where, _, function = name.rpartition(":")
    return Path(where).stem if where.endswith(".py") else where.rpartition(".")[
        2
    ], function


def search_space(named: str | None, workload: str) -> Any:
    """Return the search space that is named, else ``param_space`` beside the workload;
    None if there is none.

    Raises:
        ValueError: The named one does not exist, or an import failed.
    """
    try:
        return resolve(
            named or f"{workload.rpartition(':')[0]}:param_space", "--param-space"
        )
    except ValueError as e:
        if named or not isinstance(e.__cause__, AttributeError):
            raise
        return None


def tell(text: str) -> None:
    """Print a line to standard error, without credentials."""
    print(f"ray-adascale: {without_credentials(text)}", file=sys.stderr)
