"""README and the guides: each measured figure stands on the page that is linked;
README's claims follow from the kept runs.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.project.benchmarks import ROOT, load
from tests.project.test_results import numbers

pytest.importorskip("mlxtend")
pytestmark = pytest.mark.docs

PAGES = [
    ROOT / "README.md",
    *sorted(page for page in ROOT.glob("docs/*/*.md") if page.name != "messages.md"),
]
LINK = re.compile(r"\]\(([^)#\s]*(?:results\.md|studies/pages/[\w-]+\.md))[^)]*\)")
NO_FIGURES = re.compile(r"\]\([^)]*\)|`[^`]*`|2026-\d\d-\d\d|\d+\.\d+\.\d+")
"""Targets of links, code, dates and versions."""


def pieces(text: str) -> Iterator[str]:
    """Yield each paragraph, bullet and row of a table."""
    for paragraph in re.split(
        r"\n\s*\n", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)
    ):
        if paragraph.lstrip().startswith("|"):
            yield from paragraph.splitlines()
        else:
            yield from re.split(r"\n(?=\s*(?:- |\d+\. ))", paragraph)


@pytest.mark.parametrize(
    "page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix()
)
def test_each_figure_stands_on_a_page_that_its_sentence_links(page: Path) -> None:
    for piece in pieces(page.read_text()):
        linked = [(page.parent / link).resolve() for link in LINK.findall(piece)]
        if linked:
            there = {
                number for other in linked for number in numbers(other.read_text())
            }
            assert numbers(NO_FIGURES.sub("", piece)) <= there, piece


@pytest.fixture(scope="module")
def studies() -> list[tuple[Any, Any]]:
    """Plan and kept runs of the two studies with SGD."""
    transfer, at_size, read = load("transfer"), load("at_size"), load("comparison").read
    cases, seeds = tuple(at_size.LONGER.cases), (1, 2, 3, 4, 5)
    longer = at_size.Plan(at_size.LONGER, cases, (1, 4, 16, 64), seeds, 1, ("warmup",))
    return [
        (plan, read(ROOT / study.KEPT))
        for study, plan in ((transfer, transfer.parse([])[1]), (at_size, longer))
    ]


def found(
    studies: list[tuple[Any, Any]], scale: int, method: str
) -> dict[str, dict[int, Any]]:
    """The runs of a method by workload and seed."""
    seeds_of = load("comparison").seeds_of
    return {
        w: seeds_of(plan, results, w, scale, method)
        for plan, results in studies
        for w in plan.workloads
    }


def verdicts(
    studies: list[tuple[Any, Any]], scale: int, method: str, other: tuple[int, str]
) -> dict[str, str]:
    """How a method compares with another one, by workload."""
    cases = {w: plan.case(w) for plan, _ in studies for w in plan.workloads}
    own, others = found(studies, scale, method), found(studies, *other)
    difference = load("comparison_page").difference
    return {
        workload: difference(case, own[workload], others[workload]).verdict
        for workload, case in cases.items()
    }


def steps(runs: dict[int, Any]) -> float:
    return mean(run.optimizer_steps for run in runs.values())


DEFAULT = "m^√r"
ROWS = re.compile(r"<!-- rows: S=(\d+): ([\w,-]+) -->")
RANGE = re.compile(r"(\d+\.\d) to (\d+\.\d) times (fewer|the examples)")
COUNTS = dict(
    enumerate(
        [
            "zero",
            "one",
            "two",
            "three",
            "four",
            "five",
            "six",
            "seven",
            "eight",
            "nine",
            "ten",
        ]
    )
)


def wrong_ranges(text: str, studies: list[tuple[Any, Any]]) -> Iterator[str]:
    """Yield what is wrong with each list of claims.

    A list with a range names its workloads in a comment before it. Its ranges are those
    of these workloads, and none of them is worse than its base run where the list says
    "no worse".
    """
    for block in re.split(r"\n\s*\n", text):
        ranges, named = RANGE.findall(block), ROWS.search(block)
        if ranges and named is None:
            yield f"no rows: {ranges}"
        if named is None:
            continue
        scale, names = int(named[1]), named[2].replace("-", " ").split(",")
        base, own = found(studies, 1, "AdaScale"), found(studies, scale, DEFAULT)
        fewer = {name: steps(base[name]) / steps(own[name]) for name in names}
        factors = {
            "fewer": fewer,
            "the examples": {name: scale / by for name, by in fewer.items()},
        }
        for low, high, what in ranges:
            of = factors[what].values()
            if (low, high) != (f"{min(of):.1f}", f"{max(of):.1f}"):
                yield f"{low} to {high} times {what}: {min(of):.1f} to {max(of):.1f}"
        against_base = verdicts(studies, scale, DEFAULT, (1, "AdaScale"))
        if re.search("no worse|not clearly worse|none of [a-z]+ workloads", block):
            yield from (
                f"{name} is worse"
                for name in names
                if against_base[name].startswith("worse")
            )
            counted = f"{COUNTS[len(names)]} of {COUNTS[len(own)]} workloads"
            if len(names) == len(own):
                counted = f"none of {COUNTS[len(own)]} workloads"
            if counted not in block:
                yield f"{len(names)} of {len(own)} workloads"


@pytest.mark.parametrize(
    "page",
    [*PAGES, ROOT / "docs" / "results.md"],
    ids=lambda page: page.relative_to(ROOT).as_posix(),
)
def test_a_claim_with_a_range_names_its_rows_and_has_their_figures(
    page: Path, studies: list[tuple[Any, Any]]
) -> None:
    assert not list(wrong_ranges(page.read_text(), studies))


def test_a_mixture_of_rows_in_a_claim_is_found(studies: list[tuple[Any, Any]]) -> None:
    """The largest saving is that of batch norm."""
    said = (
        "seven workloads took 2.2 to 9.3 times fewer steps; six of seven workloads "
        "ended no worse"
    )
    six = "vision,text,tabular,smiles,group-norm,flights"
    assert list(wrong_ranges(said, studies)) == ["no rows: [('2.2', '9.3', 'fewer')]"]
    (wrong,) = wrong_ranges(f"<!-- rows: S=16: {six} -->\n{said}", studies)
    assert wrong == "2.2 to 9.3 times fewer: 2.2 to 5.8"
    (wrong,) = wrong_ranges(f"<!-- rows: S=16: {six},batch-norm -->\n{said}", studies)
    assert wrong == "7 of 7 workloads"  # none of seven


def test_a_worse_row_in_a_claim_is_found(studies: list[tuple[Any, Any]]) -> None:
    """With a fixed momentum batch norm is worse."""
    fixed = [
        (
            plan,
            {
                replace(job, method=DEFAULT) if job.method == "AdaScale" else job: run
                for job, run in runs.items()
                if job.method != DEFAULT
            }
            | {job: run for job, run in runs.items() if job.scale == 1},
        )
        for plan, runs in studies
    ]
    said = "<!-- rows: S=16: batch-norm -->\n1 of seven workloads ended no worse"
    assert "batch norm is worse" in wrong_ranges(said, fixed)


def section(page: Path, anchor: str) -> str:
    """The part of a page below the heading with this anchor."""
    for part in re.split(r"^#+ ", page.read_text(), flags=re.MULTILINE):
        if (
            re.sub(r"[^\w -]", "", part.partition("\n")[0].lower()).replace(" ", "-")
            == anchor
        ):
            return part
    raise AssertionError(f"{page}#{anchor}")


def with_words(text: str) -> set[str]:
    """The numbers of a text, also those that are written as words."""
    words = set(re.findall(r"[a-z]+", text.lower()))
    return numbers(NO_FIGURES.sub("", text)) | {
        str(value) for value, word in COUNTS.items() if word in words
    }


def test_each_figure_of_the_readmes_table_stands_in_the_section_that_its_row_links() -> (
    None
):
    text = (ROOT / "README.md").read_text()
    rows = re.findall(
        r"^\| \[.+\]\(([^)#]+)#([^)]+)\) \| (.+) \|$", text, flags=re.MULTILINE
    )
    assert len(rows) == 4
    for page, anchor, said in rows:
        said = said.replace("a second", "")  # what the checkpoints were apart
        assert with_words(said) <= with_words(section(ROOT / page, anchor)), said


def test_what_the_readme_says_first(studies: list[tuple[Any, Any]]) -> None:
    text = (ROOT / "README.md").read_text()
    against_base = verdicts(studies, 16, DEFAULT, (1, "AdaScale"))
    assert len(against_base) == 7
    runs = found(studies, 16, DEFAULT).values()
    assert all(len(each) == 5 for each in runs)  # "five seeds"
    assert not [w for w, verdict in against_base.items() if "worse" in verdict]
    first = " ".join(text.partition("\n## ")[0].split())
    assert "none of seven workloads ended clearly worse" in first
    assert "≤ 1.25 M parameters" in first
    # What it gives, what it costs and what is not known stand in the first screen,
    # before the picture.
    marks = [
        f"**{word}**"
        for word in (
            "Gain",
            "Price",
            "Overhead",
            "Not measured",
            "Use it if",
            "Don't if",
        )
    ]
    assert sorted([*marks, "!["], key=text.index) == [*marks, "!["]
    assert len(text[: text.index("![")].splitlines()) <= 18


def test_the_readmes_rows(studies: list[tuple[Any, Any]]) -> None:
    text = (ROOT / "README.md").read_text()
    assert (
        f"in {steps(found(studies, 16, DEFAULT)['smiles']):.0f} steps, not 1,000"
        in text
    )
    as_good = {
        scale: sum(
            v == "no clear difference"
            for v in verdicts(studies, scale, DEFAULT, (scale, "√")).values()
        )
        for scale in (4, 16)
    }
    assert as_good == {4: 4, 16: 3}
    assert (
        "does as well on four of seven workloads at S = 4, on three at S = 16" in text
    )
    at_size, (plan, results) = load("at_size"), studies[1]
    worse = [
        w
        for w in plan.workloads
        if load("comparison_page")
        .difference(
            plan.case(w),
            at_size.of_examples(plan, results, w, 16, "AdaScale, T·B0"),
            at_size.of_examples(plan, results, w, 1, "AdaScale"),
        )
        .verdict.startswith("worse")
    ]
    assert len(worse) == 3
    assert "three of four are worse" in text


def test_adamw_is_worse_on_as_many_workloads_as_the_guide_says() -> None:
    optimizers, comparison = load("optimizers"), load("comparison")
    plan = optimizers.parse(["adamw"])[1]
    results = comparison.read(ROOT / optimizers.STUDIES["adamw"].kept)
    text = " ".join((ROOT / "docs/guides/choosing.md").read_text().split())
    for scale in (16, 4):
        cells = [
            load("comparison_page").standing_of(
                plan.case(w),
                comparison.seeds_of(plan, results, w, scale, "AdaScale"),
                comparison.seeds_of(plan, results, w, 1, "AdaScale"),
            )
            for w in plan.workloads
        ]
        ran = [cell for cell in cells if cell != "not run"]
        worse = sum(cell.startswith("**") for cell in ran)
        number = COUNTS[worse] if worse else "none"
        assert f"on {number} of {COUNTS[len(ran)]} at S = {scale}" in text


def test_the_counts_over_every_workload_are_those_of_the_kept_runs() -> None:
    every = load("every_workload")
    rows = every.every_row()
    assert every.counts(rows) in every.PAGE.read_text()
    results = (ROOT / "docs/results.md").read_text()
    of_others = re.findall(
        r"steps: (\d+ of \d+), where AdaScale is worse on (\d+) of", every.counts(rows)
    )
    assert len(of_others) == len(every.OTHERS)
    for lost, own in of_others:
        assert f"worse on {lost} | AdaScale on {own} of these |" in results
    assert f"better than LR × S on {every.ahead_of_linear(rows)} " in results
    said = f"worse on {sum(row.worse for row in rows)} of {len(rows)}"
    assert said in results
    said = said.removeprefix("worse ")
    assert f"worse than the base run {said}" in (ROOT / "README.md").read_text()


def test_the_page_of_momentum_has_what_the_kept_runs_say() -> None:
    momentum = load("momentum")
    rows = momentum.every_row()
    text = momentum.PAGE.read_text()
    for scale in momentum.SCALES:
        assert momentum.summary(rows, scale) in text
    further = momentum.further_rows()
    short = momentum.every_row(changed=False)
    assert all(" | ".join(row.cells()) in text for row in [*rows, *further, *short])
    assert all(momentum.aim([*rows, *further], s) in text for s in momentum.AIMED)
    assert (len(rows), len(short)) == (3 * 21, 2 * 3)
    assert further
