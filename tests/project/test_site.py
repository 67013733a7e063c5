"""What the site adds to the pages when it is built: the table of public names, and
typeset symbols.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

import ray_adascale

pytestmark = pytest.mark.docs

DOCS = Path(__file__).parents[2] / "docs"
sys.path.insert(0, str(DOCS))
import names  # noqa: E402  (a script beside the docs)

sys.path.pop(0)


def test_the_table_has_every_public_name_with_a_line_and_begins_with_the_run() -> None:
    rows = re.findall(
        r"^\| \{py:obj\}`(\S+) <ray_adascale\.\S+>` \| (.+) \|$",
        names.table(),
        flags=re.MULTILINE,
    )
    of_others = re.findall(
        r"ray_adascale\.(\w+)$",
        (DOCS / "reference/api/compat.md").read_text(),
        flags=re.MULTILINE,
    )
    assert {*ray_adascale.__all__} - {"__version__", *of_others} <= {
        name for name, _ in rows
    }
    assert rows[0][0] == "Run"
    assert all(text.endswith(".") and len(text) < 200 for _, text in rows), rows


def test_symbols_are_typeset_and_words_are_not() -> None:
    pytest.importorskip("sphinx", reason="the extra docs is not installed")
    sys.path.insert(0, str(DOCS))
    import symbols

    sys.path.pop(0)
    assert (
        symbols.typeset("r/S at B_noise")
        == "<em>r</em>/<em>S</em> at <em>B</em><sub>noise</sub>"
    )
    assert (
        symbols.typeset("σ²/μ² of B0, τ;")
        == "<em>σ²</em>/<em>μ²</em> of <em>B</em><sub>0</sub>, <em>τ</em>;"
    )
    for words in ("s3://bucket", "a T-shirt", "S&amp;P", "3.5 ms", "n't", "T's"):
        assert symbols.typeset(words) == words
