"""The texts of the package's errors, warnings and log lines, from its source: the
site's page of messages is made from them.

``docs/conf.py`` appends the list to docs/reference/messages.md when the site is built,
and writes the texts and their anchors to a script for the search page:
``docs/static/messages.js`` shows the entry of a pasted message first.
"""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ray_adascale"
PAGE = "docs/reference/messages"
GROUPS = {
    "Settings and commands": "cli config _fields _errors batch recipe",
    "Building a workload or a run": "workload chain data run.assemble run.build "
    "optim.schedule optim.scheduler_checks "
    "optim.curves optim.rules optim.betas "
    "optim.wrapper optim.workers __init__",
    "In the loop": "run optim gain measure _torch _hooks _warn",
    "Checkpoints and resumes": "checkpoint run.boundary optim.bias_correction _files",
    "A search": "search run.base.base_run run.base.base_noise",
    "A run on Ray": "train",
    "Sharding": "sharding",
    "Lightning, transformers, Accelerate, timm": "integrations run.base.attach "
    "optim.tau_schedule",
    "FairScale's and AdaptDL's names": "compat scaling_rules",
    "Forecast, report, check, describe": "forecast analysis",
}
"""What the reader was doing, and the modules whose messages come then. The longest
name that fits counts.
"""
SAY = {
    "warn",
    "warning",
    "info",
    "error",
    "log",
    "warn_once",
    "warn_at_user",
    "warn_on_first_worker",
    "tell",
    "print",
    "add_note",
    "noted",
}
COMMON = {
    "an",
    "the",
    "of",
    "is",
    "are",
    "be",
    "must",
    "invalid",
    "for",
    "in",
    "it",
    "or",
    "and",
    "to",
    "no",
    "not",
    "this",
    "that",
}


@dataclass(frozen=True)
class Message:
    """A message.

    Attributes:
        text: The text, with ``...`` for each value in it.
        kind: What is raised, else empty.
        anchor: The entry's anchor on the page.
    """

    text: str
    kind: str
    anchor: str


def text_of(node: ast.expr) -> str | None:
    """Return the text of a message, with ``...`` for each value in it; None for an
    expression that is no text.
    """
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "..." for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "..."
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = text_of(node.left), text_of(node.right)
        return None if left is right is None else f"{left or '...'}{right or '...'}"
    return None


def texts(node: ast.AST, kind: str = "") -> Iterator[tuple[str, str]]:
    """Yield the texts below a node and what they are raised as: what says something,
    and other texts that are sentences.
    """
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
            continue  # a docstring
        if isinstance(child, ast.Raise) and isinstance(child.exc, ast.Call):
            yield from texts(child, ast.unparse(child.exc.func).rpartition(".")[2])
        elif isinstance(child, ast.keyword) and child.arg in (
            "help",
            "title",
            "description",
            "epilog",
            "pattern",
            "metavar",
        ):
            continue
        elif isinstance(child, ast.expr) and (text := text_of(child)) is not None:
            if kind or is_sentence(text):
                yield text, kind
            yield from (
                more
                for part in ast.walk(child)
                if isinstance(part, ast.FormattedValue)
                for more in texts(part)
            )
        else:
            says = (
                isinstance(child, ast.Call)
                and ast.unparse(child.func).rpartition(".")[2].lstrip("_") in SAY
            )
            yield from texts(child, "say" if says and not kind else kind)


def is_sentence(text: str) -> bool:
    """Return whether a text that is handed on is a message: some words, a full stop,
    and a capital letter or a value first.
    """
    enough = 5 if re.match(r"[A-Z.{%]", text) else 10 + 1000 * text.startswith("#")
    return (
        re.search(r"[a-z.)\]'`]\.( |$)", text) is not None
        and len(text.split()) >= enough
    )


def plain(text: str) -> str:
    """Return the text in one line, with ``...`` for placeholders of every kind."""
    text = re.sub(r"%[sdrg]|%\.\d[a-z]|\{\}", "...", " ".join(text.split()))
    return re.sub(r"(?<!\.)\.\.\.(?: ?\.\.\.)+(?!\.)", "...", text)


def words(text: str) -> list[str]:
    """Return the words of a text that tell it from others."""
    return [
        word for word in re.findall(r"[a-z_]{2,}", text.lower()) if word not in COMMON
    ]


def group_of(module: str) -> str:
    """Return the group of a module's messages."""
    fits = [
        (len(name), group)
        for group, names in GROUPS.items()
        for name in names.split()
        if f"{module}.".startswith(f"{name}.")
    ]
    return max(fits)[1]


def messages() -> dict[str, list[Message]]:
    """Return the messages of each group in alphabetical order."""
    found: dict[str, dict[str, str]] = {group: {} for group in GROUPS}
    for path in sorted(PACKAGE.rglob("*.py")):
        module = (
            path.relative_to(PACKAGE)
            .with_suffix("")
            .as_posix()
            .replace("/", ".")
            .removesuffix(".__init__")
        )
        for text, kind in texts(ast.parse(path.read_text(encoding="utf-8"))):
            text = plain(text)
            if len(set(words(text))) >= 3 and not any(
                text in group for group in found.values()
            ):
                found[group_of(module)][text] = kind if kind[:1].isupper() else ""
    taken: set[str] = set()
    return {
        group: [
            Message(text, kind, anchor_of(text, taken))
            for text, kind in sorted(each.items(), key=sort_key)
        ]
        for group, each in found.items()
    }


def sort_key(item: tuple[str, str]) -> str:
    return item[0].lower().lstrip(". ")


def anchor_of(text: str, taken: set[str]) -> str:
    """Return an anchor of the text's first words that is not taken."""
    name = "-".join(["message", *re.findall(r"[a-z0-9]+", text.lower())[:8]])
    while name in taken:
        name += "-"
        name = f"{name}2"
    taken.add(name)
    return name


def page() -> str:
    """Return the list of messages in Markdown: a heading for each group, an anchor
    and the verbatim text of each message.
    """
    lines = []
    for group, each in messages().items():
        lines.append(f"\n## {group}\n")
        for message in each:
            said = f"{message.kind}: {message.text}" if message.kind else message.text
            lines += [
                f"({message.anchor})=",
                f"{verbatim(said)} [#](#{message.anchor})",
                "",
            ]
    return "\n".join(lines)


def verbatim(text: str) -> str:
    """Return the text as code, with more backticks around it than are in it."""
    fence = "`" * (1 + max(map(len, re.findall("`+", text)), default=0))
    pad = " " if text.startswith("`") or text.endswith("`") else ""
    return f"{fence}{pad}{text}{pad}{fence}"


def script() -> str:
    """Return the script that holds the texts for the search page."""
    entries = [
        [message.anchor, message.text]
        for each in messages().values()
        for message in each
    ]
    return (
        f"window.ray_adascale_messages = {json.dumps(entries, ensure_ascii=False)};\n"
    )
