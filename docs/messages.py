"""The texts of the package's errors and warnings, collected from its source: the site's page of messages is made from them.

``docs/conf.py`` appends the list to docs/reference/messages.md when the site is built, so that its search finds each text.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "ray_adascale"
WARN = ("warn", "warning", "warn_once")


def text_of(node: ast.expr) -> str | None:
    """Return the text of a message, with ``...`` for each value in it; None for an expression that is no text."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(text_of(part) or "..." for part in node.values)
    if isinstance(node, ast.FormattedValue):
        return "..."
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return f"{text_of(node.left) or '...'}{text_of(node.right) or '...'}"
    return None


def calls(tree: ast.AST) -> Iterator[ast.Call]:
    """Yield what is raised, and the calls that warn."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            yield node.exc
        elif isinstance(node, ast.Call):
            name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            if name.lstrip("_") in WARN:
                yield node


def messages() -> dict[str, list[str]]:
    """Return the messages of each module, in the order of the source."""
    found = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        texts = [text for call in calls(tree) for argument in call.args[:2] if (text := text_of(argument))]
        long = [text for text in dict.fromkeys(" ".join(text.split()) for text in texts) if len(text) > 20]
        if long:
            found[path.relative_to(PACKAGE).with_suffix("").as_posix().replace("/", ".")] = long
    return found


def page() -> str:
    """Return the list of messages in Markdown."""
    lines = []
    for module, texts in messages().items():
        lines += [f"\n## {module}\n", *(f"- {escaped(text)}" for text in texts)]
    return "\n".join(lines)


def escaped(text: str) -> str:
    """Return the text with a backslash before each character that Markdown reads."""
    return "".join(f"\\{letter}" if letter in "\\`*_[]<>#$~|{}" else letter for letter in text)
