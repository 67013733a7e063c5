"""The commands of ``ray-adascale`` with their options, from the parsers: the end of the
site's page of commands.

``docs/conf.py`` appends it to docs/reference/commands.md when the site is built, so
that the site's search finds each option.
"""

from __future__ import annotations

import argparse
import inspect
import re
from collections.abc import Iterator

from ray_adascale.cli.main import COMMANDS


def page() -> str:
    """Return a section for each command, in Markdown."""
    return "\n".join(line for name in COMMANDS for line in section(name))


def section(name: str) -> Iterator[str]:
    """Yield the lines of a command's section: what it does, its arguments and
    options, and the settings of a run.
    """
    parser = argparse.ArgumentParser()
    COMMANDS[name].add_options(parser)
    yield from ("", f"## ray-adascale {name}", "")
    text = (
        inspect.cleandoc(COMMANDS[name].__doc__ or "")
        .partition("Attributes:")[0]
        .strip()
    )
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph.startswith("ray-adascale "):
            yield from (
                "```text",
                *(line.strip() for line in paragraph.splitlines()),
                "```",
                "",
            )
        else:
            yield from (prose(" ".join(paragraph.split())), "")
    # argparse has no public list of a parser's options. The first two groups are its
    # own.
    _, _, *others = parser._action_groups
    settings = [action for group in others for action in group._group_actions]
    # without --help
    own = [action for action in parser._actions[1:] if action not in settings]
    yield from table(sorted(own, key=lambda action: bool(action.option_strings)))
    for group in others:
        yield from (
            prose(f"{(group.title or '')[:1].upper()}{(group.title or '')[1:]}:"),
            "",
        )
        yield from table(group._group_actions)


def table(actions: list[argparse.Action]) -> Iterator[str]:
    """Yield a table of options, without the hidden ones."""
    yield from ("| option | meaning |", "| --- | --- |")
    for action in actions:
        if action.help != argparse.SUPPRESS:
            yield (
                f"| {spelling(action)} | "
                f"{prose((action.help or '').replace('%%', '%'))} |"
            )
    yield ""


def spelling(action: argparse.Action) -> str:
    """Return an option as it is typed, with the placeholder of its value."""
    value = (
        "|".join(map(str, action.choices))
        if action.choices and not action.metavar
        else action.metavar
    )
    words = [f"{flag} {value or ''}".strip() for flag in action.option_strings] or [
        str(value or action.dest)
    ]
    return ", ".join("`{}`".format(word.replace("|", "\\|")) for word in words)


def prose(text: str) -> str:
    """Return a text for a cell, with options as code."""
    parts = text.replace("|", "\\|").split("`")
    parts[::2] = [
        re.sub(r"(?<!\w)(--[a-z][\w-]*)", r"`\1`", part).replace("<", "\\<")
        for part in parts[::2]
    ]
    return "`".join(parts)
