"""The site's page of messages: every error and warning, word for word, and found by
a pasted text.
"""

from __future__ import annotations

import itertools
import json
import random
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.docs

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
sys.path.insert(0, str(DOCS))
import messages  # noqa: E402  (a script beside the docs)

sys.path.pop(0)


@pytest.fixture(scope="module")
def entries() -> list[Any]:
    return [message for group in messages.messages().values() for message in group]


def test_errors_and_warnings_stand_on_the_page_word_for_word(
    entries: list[Any],
) -> None:
    """Found by a way of its own: the literals of raise and of the functions that
    warn.
    """
    source = "".join(
        path.read_text() for path in sorted((ROOT / "ray_adascale").rglob("*.py"))
    )
    said = re.findall(
        r"(?:raise \w+Error|warn_at_user|warn_on_first_worker|_log\.\w+)\(\s*f?\"([^\"{}\\%]{25,})",
        source,
    )
    assert len(said) > 150
    page = messages.page()
    missing = [
        text
        for text in said
        if text.strip() not in page and len(set(messages.words(text))) >= 3
    ]
    assert not missing
    assert (
        "The batch of ... exceeds the gradient noise scale" in page
    )  # a warning that is made elsewhere than it is given


def test_the_symptoms_of_troubleshooting_are_on_the_page() -> None:
    page = re.sub(r"\s*\.\.\.\s*", " ", messages.page())
    others = (
        "401",
        "Gloo ",
        "Duplicate GPU",
        "No available agent",
        "No such file",
        "Requesting",
    )
    for quote in re.findall(
        r"^\| `([^`]+)` \|",
        (DOCS / "reference/troubleshooting.md").read_text(),
        re.MULTILINE,
    ):
        if not quote.startswith(others):
            for piece in re.split(
                r"\s*\.\.\.\s*|50", quote.removeprefix("CheckpointError: ")
            ):
                assert piece.strip() in page, quote


def test_an_entry_is_verbatim_and_says_something(entries: list[Any]) -> None:
    assert len(entries) > 500
    for message in entries:
        assert not re.search(
            r"[\u2013\u2018\u2019\u201c\u201d]|\{\}|%s|%d", message.text
        ), message.text
        assert len(set(messages.words(message.text))) >= 3
    page = messages.page()
    assert page.count("\n(message-") == len(entries)
    assert len({message.anchor for message in entries}) == len(entries)
    assert "smartquotes = False" in (DOCS / "conf.py").read_text()


def test_every_module_belongs_to_what_the_reader_was_doing() -> None:
    named = {name for names in messages.GROUPS.values() for name in names.split()}
    for name in named:
        path = ROOT / "ray_adascale" / name.replace(".", "/")
        assert path.is_dir() or path.with_suffix(".py").exists(), name
    assert [group for group, each in messages.messages().items() if not each] == []


@pytest.mark.skipif(
    shutil.which("node") is None, reason="the search page's script runs in node"
)
def test_a_pasted_message_finds_its_entry_first(
    entries: list[Any], tmp_path: Path
) -> None:
    values = itertools.cycle(
        [
            "32",
            "'layers.0.weight'",
            "0.0125",
            "Linear",
            "128 examples",
            "AdamW",
            "/data/runs/big",
        ]
    )
    chosen = random.Random(0).sample(entries, 60)
    pasted = [
        "ray_adascale._warn.AdaScaleWarning: "
        + re.sub(r"\.\.\.", lambda _: next(values), message.text)
        for message in chosen
    ]
    program = tmp_path / "find.js"
    program.write_text(
        "globalThis.window = globalThis;\n"
        + messages.script()
        + (DOCS / "static/messages.js").read_text()
        + "\n"
        f"const found = {json.dumps(pasted)}.map((text) => "
        "ray_adascale_find(ray_adascale_messages, text)[0]?.anchor);"
        + "\nconsole.log(JSON.stringify(found));\n"
    )
    said = subprocess.run(
        ["node", program], capture_output=True, text=True, check=True, timeout=60
    ).stdout
    assert json.loads(said) == [message.anchor for message in chosen]
