"""docs/results.md: each figure stands on the page of its study, which the study's
own tests compare with the kept runs.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.docs

PAGE = Path(__file__).parents[2] / "docs" / "results.md"
LINK = re.compile(r"\]\((\.\./benchmarks/studies/pages/[\w-]+\.md)")
NUMBER = re.compile(r"\d*\.?\d+(?:,\d{3})*(?:\.\d+)?")


def numbers(text: str) -> set[str]:
    """The numbers of a text, with a zero before the point and without commas."""
    return {
        re.sub(r"^\.", "0.", number.replace(",", "")) for number in NUMBER.findall(text)
    }


def test_each_figure_stands_on_the_page_of_its_study() -> None:
    """Of a paragraph or a row: on the page that it links, else on the one that was
    linked last.
    """
    page, rows, missing = "", 0, []
    for line in PAGE.read_text().splitlines():
        if line.startswith("#"):
            page = ""
        page = ([page, *LINK.findall(line)])[-1]
        if not line.startswith("| ") or line.startswith(
            ("| claim", "| client", "| kind", "| ---")
        ):
            continue
        assert page, line
        rows += 1
        there = numbers((PAGE.parent / page).read_text())
        said = numbers(re.sub(r"\]\([^)]*\)|`[^`]*`|2026-\d\d-\d\d", "", line))
        missing += [f"{page}: {number}: {line}" for number in sorted(said - there)]
    assert not missing, "\n".join(missing)
    assert rows > 40


def test_each_section_has_a_command_a_date_and_a_link() -> None:
    sections = re.split(r"^## ", PAGE.read_text(), flags=re.MULTILINE)[1:]
    for section in sections[:-1]:
        name = section.splitlines()[0]
        assert re.search(r"`(python|make|benchmarks/)[^`]*`", section), name
        assert "2026-" in section, name
        assert LINK.search(section), name


def test_the_times_of_steps_are_those_of_the_kinds_that_are_named() -> None:
    cells = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in PAGE.read_text().splitlines()
    ]
    (start,) = (i for i, row in enumerate(cells) if row[0] == "kind")
    table = cells[start + 2 : start + 10]
    overhead = (PAGE.parents[1] / "benchmarks/studies/pages/overhead.md").read_text()
    for name, *ratios in table:
        kind = re.findall(r"\(`(.+)`\)$", name)[0]
        for model, ratio in zip(("narrow", "wide", "resnet"), ratios, strict=True):
            (first, *_) = re.findall(
                rf"^\| {model} +\| 1 +\| {re.escape(kind)} +\| [\d.]+ +\| ([\d.]+) ",
                overhead,
                re.MULTILINE,
            )
            assert ratio == first, (model, kind)


def test_a_difference_says_what_is_better() -> None:
    """No figure of a table has a sign but a seconds' range or a share: "+0.39 bits"
    reads as worse.
    """
    text = PAGE.read_text()
    assert (
        "Lower is better for bits, loss and error; higher for accuracy"
        in text.partition("\n## ")[0]
    )
    signed = re.findall(
        r"[+-]\d[\d.]* (?:± \S+ )?(?:bits|accuracy)", "\n".join(text.splitlines()[10:])
    )
    assert not signed
