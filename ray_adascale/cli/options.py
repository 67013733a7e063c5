"""Options from the fields of a dataclass: an option's name, type, default and help
stand in the class and its docstring.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import inspect
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from .._errors import flag_of

_NUMBERS: dict[str, tuple[Callable[[str], Any], str, str]] = {
    "int": (int, "N", "a whole number"),
    "float": (float, "X", "a number"),
    "EarlyStop": (float, "STEPS", "a number of effective steps"),
}
"""Types of fields that are numbers on the command line: how one is read, its
placeholder in the help, and its name in errors.
"""


def option(default: Any = dataclasses.MISSING, **more: Any) -> Any:
    """Return a field of a command with further arguments for ``add_argument``. A field
    without a default is positional.

    Args:
        default: The default.
        **more: The arguments. Beside them, ``pattern`` is a regular expression that the
            value must match, and ``hidden`` a field without an option.
    """
    if isinstance(default, list):
        return dataclasses.field(default_factory=list, metadata=more)
    return dataclasses.field(default=default, metadata=more)


def add_options(
    parser: argparse._ActionsContainer,
    owner: type,
    names: Iterable[str] | None = None,
    *,
    shown: Iterable[str] | None = None,
    default: str | None = None,
) -> None:
    """Add an option for each field of a dataclass. Only options that are given are in
    the parsed arguments.

    Args:
        parser: The parser, or a group of it.
        owner: The dataclass. Its annotations are strings
            (``from __future__ import annotations``). An option's help is the first
            sentence of the field's entry in the docstring (``Attributes:``) of the
            class or its base, and its "Default: ...".
        names: The fields. Default: all.
        shown: The fields that the help lists. Default: all of ``names``.
        default: What the help shows as each default, in place of the class's own.
    """
    texts = _texts(owner)
    for field in dataclasses.fields(owner):
        if not field.metadata.get("hidden") and (names is None or field.name in names):
            text = (
                _help(field, texts, default)
                if shown is None or field.name in shown
                else argparse.SUPPRESS
            )
            flags, more = _arguments(field)
            parser.add_argument(
                *flags, **{"default": argparse.SUPPRESS, "help": text} | more
            )


def _texts(owner: type) -> dict[str, str]:
    """Return the text of each field from the docstrings of a dataclass and its
    bases.
    """
    found: dict[str, str] = {}
    for each in reversed(owner.__mro__[:-1]):
        entries = (
            inspect.cleandoc(each.__doc__ or "")
            .partition("Attributes:\n")[2]
            .partition("\n\n")[0]
        )
        _, *parts = re.split(r"^    (\w+): ", entries, flags=re.MULTILINE)
        found |= {
            name: " ".join(text.split())
            for name, text in zip(parts[::2], parts[1::2], strict=True)
        }
    return found


def _help(
    field: dataclasses.Field[Any], texts: Mapping[str, str], default: str | None
) -> str:
    """Return the help text of the option for a field."""
    first, *others = re.split(r"(?<=\.) (?=[A-Z])", texts.get(field.name, ""))
    defaults = [
        text.removeprefix("Default: ").removesuffix(".")
        for text in others
        if text.startswith("Default: ")
    ]
    if not defaults and not any(
        field.default is none for none in (None, False, dataclasses.MISSING)
    ):
        default_text = (
            f"{field.default:g}"
            if isinstance(field.default, float)
            else str(field.default)
        )
        defaults = ["yes" if field.default is True else default_text]
    shown = [default] if default is not None else defaults
    text = (
        f"{first.removesuffix('.')} (default: {shown[0]})"
        if shown
        else first.removesuffix(".")
    )
    text = re.sub(r":\w+:`([^`]+)`", r"\1", text)
    text = re.sub(
        r"``([^`]+)``",
        lambda found: flag_of(found[1]) if found[1] in texts else f"`{found[1]}`",
        text,
    )
    return text.replace("%", "%%").replace("None", "none")


def _arguments(field: dataclasses.Field[Any]) -> tuple[list[str], dict[str, Any]]:
    """Return the arguments of ``add_argument`` that follow from a field's name, type
    and metadata.
    """
    more, (kind, _, rest) = dict(field.metadata), str(field.type).partition(" | ")
    pattern = more.pop("pattern", None)
    _ = more.pop("check", None)
    if field.default is field.default_factory is dataclasses.MISSING:
        return [field.name], more
    flags = ["-o", "--output"] if field.name == "output" else [flag_of(field.name)]
    if kind == "bool":
        return flags, {"action": argparse.BooleanOptionalAction} | more
    placeholder: str | None = field.name.rpartition("_")[2].upper()
    if kind.startswith("Literal"):
        more["choices"], placeholder = re.findall(r"['\"](\w+)['\"]", kind), None
        # else None means that the option is not given
        if rest.endswith("None") and field.default is not None:
            more["choices"].append("none")
    elif kind in _NUMBERS:
        convert, placeholder, words = _NUMBERS[kind]
        more["type"] = _reader(convert, words, optional=rest.endswith("None"))
    elif pattern is not None:
        more["type"] = _reader(
            lambda text: re.fullmatch(pattern, text)[0],  # type: ignore[index]
            more["metavar"],
        )
    return flags, {
        "dest": field.name,
        "metavar": "SECONDS" if field.name.endswith("_s") else placeholder,
    } | more


def _reader(
    convert: Callable[[str], Any], words: str, *, optional: bool = False
) -> Callable[[str], Any]:
    """Return the function that reads a value and names what it must be; where the
    field may be None, it reads "none" too.
    """

    expected = f"{words} or none" if optional else words

    def read(text: str) -> Any:
        try:
            return None if optional and text == "none" else convert(text)
        except (ValueError, TypeError):
            raise argparse.ArgumentTypeError(
                f"invalid value {text!r}. Must be {expected}"
            ) from None

    return read


class OptionParser(argparse.ArgumentParser):
    """Reads files of options like a shell: several options on a line, quotes, comments.
    Names a mistyped command or option.

    Attributes:
        commands: The commands of the main parser; empty in the parser of a command.
    """

    commands: Sequence[str] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Check the spelling first: argparse would name what is missing, and the
        value of a mistyped option.
        """
        given = sys.argv[1:] if args is None else list(args)
        if not self.commands:
            self._check_options(given)
            return super().parse_known_args(given, namespace)
        given = [word for each in given for word in self._words(each)]
        if given and given[0][:1] != "-" and given[0] not in self.commands:
            near = _meant(given[0], self.commands)
            self.error(
                f"unknown command {given[0]!r}{near}. The commands are "
                f"{', '.join(self.commands)}"
            )
        return super().parse_known_args(given, namespace)

    def _check_options(self, given: Sequence[str]) -> None:
        # argparse has no public list of a parser's options. It accepts the beginning of
        # an option for the option.
        options = [flag for action in self._actions for flag in action.option_strings]
        for word in given[: given.index("--")] if "--" in given else given:
            name = word.partition("=")[0]
            if name.startswith("--") and not any(
                flag.startswith(name) for flag in options
            ):
                self.error(
                    f"unknown option {name}{_meant(name, options)}. `{self.prog} "
                    "--help` lists the options"
                )

    def error(self, message: str) -> NoReturn:
        """Exit without the usage, which would be longer than a screen."""
        self.exit(2, f"{self.prog}: error: {message}\n")

    def _words(self, word: str) -> list[str]:
        if not word.startswith("@"):
            return [word]
        try:
            return shlex.split(
                Path(word[1:]).read_text(encoding="utf-8"), comments=True
            )
        except (OSError, ValueError) as e:
            self.error(f"invalid file of options {word[1:]}: {e}")


def _meant(word: str, words: Iterable[str]) -> str:
    """Return a question for the word that is nearly this one; empty without one."""
    near = difflib.get_close_matches(word, list(words), n=1, cutoff=0.75)
    return f" (is {near[0]} meant?)" if near else ""
