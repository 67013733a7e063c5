"""The parser of the command line: files of options, and the names of mistyped commands and options."""

from __future__ import annotations

import argparse
import difflib
import shlex
import sys
from collections.abc import Iterable, Sequence
from typing import Any


class OptionParser(argparse.ArgumentParser):
    """Reads files of options like a shell: several options on a line, quotes, comments. Names a mistyped command or option.

    Attributes:
        commands: The commands of the main parser; empty in the parser of a command.
    """

    commands: tuple[str, ...] = ()

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Check the spelling first: argparse would name what is missing, and the value of a mistyped option."""
        given = sys.argv[1:] if args is None else list(args)
        if not self.commands:
            self._check_options(given)
        elif given and given[0][:1] not in ("-", "@") and given[0] not in self.commands:
            near = _meant(given[0], self.commands)
            self.error(f"unknown command {given[0]!r}{near}. The commands are {', '.join(self.commands)}")
        return super().parse_known_args(given, namespace)

    def _check_options(self, given: Sequence[str]) -> None:
        # argparse has no public list of a parser's options. It accepts the beginning of an option for the option.
        options = [option for action in self._actions for option in action.option_strings]
        for word in given[: given.index("--")] if "--" in given else given:
            name = word.partition("=")[0]
            if name.startswith("--") and not any(option.startswith(name) for option in options):
                self.error(f"unknown option {name}{_meant(name, options)}. `{self.prog} --help` lists the options")

    def convert_arg_line_to_args(self, arg_line: str) -> list[str]:
        try:
            return shlex.split(arg_line, comments=True)
        except ValueError as e:
            self.error(f"invalid line in a file of options: {arg_line!r} ({e})")


def _meant(word: str, words: Iterable[str]) -> str:
    """Return a question for the word that is nearly this one; empty without one."""
    near = difflib.get_close_matches(word, list(words), n=1, cutoff=0.75)
    return f" (is {near[0]} meant?)" if near else ""
