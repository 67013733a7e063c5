"""The table of the public names on the API's first page, made from its pages and the
docstrings.
"""

from __future__ import annotations

import importlib
import inspect
import re
from pathlib import Path

PAGES = Path(__file__).parent / "reference" / "api"


def table() -> str:
    """Return the names of each page with the first sentence of their docstring, in
    the order of the API's list of pages.
    """
    lines = ["", "| name | what it is |", "| --- | --- |"]
    for page in re.findall(
        r"^- \[.+\]\((.+\.md)\)$",
        (PAGES / "index.md").read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    ):
        text = (PAGES / page).read_text(encoding="utf-8")
        for path in re.findall(
            r"^\.\. auto\w+:: (ray_adascale\.\S+)$", text, flags=re.MULTILINE
        ):
            lines.append(
                f"| {{py:obj}}`{path.removeprefix('ray_adascale.')} <{path}>` | "
                f"{first_sentence(path)} |"
            )
    return "\n".join([*lines, ""])


def first_sentence(path: str) -> str:
    """Return the first sentence of an object's docstring, as Markdown."""
    module, _, name = path.rpartition(".")
    text = inspect.getdoc(getattr(importlib.import_module(module), name)) or ""
    sentence = re.split(r"(?<=\.)\s", text.partition("\n\n")[0], maxsplit=1)[0]
    plain = re.sub(r":\w+:`~?([^`]+)`", r"`\1`", " ".join(sentence.split())).replace(
        "``", "`"
    )
    return plain.replace("|", "\\|")
