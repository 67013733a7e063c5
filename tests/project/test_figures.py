"""README and the guides: each measured figure stands on the page that is linked; README's claims follow from the kept runs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from statistics import mean
from typing import Any

import pytest

from tests.project.benchmarks import ROOT, load
from tests.project.test_results import numbers

pytest.importorskip("mlxtend")
pytestmark = pytest.mark.docs

PAGES = [ROOT / "README.md", *sorted(page for page in ROOT.glob("docs/*/*.md") if page.name != "messages.md")]
LINK = re.compile(r"\]\(([^)#\s]*(?:results\.md|studies/pages/[\w-]+\.md))[^)]*\)")
NO_FIGURES = re.compile(r"\]\([^)]*\)|`[^`]*`|2026-\d\d-\d\d|\d+\.\d+\.\d+")
"""Targets of links, code, dates and versions."""


def pieces(text: str) -> Iterator[str]:
    """Yield each paragraph, bullet and row of a table."""
    for paragraph in re.split(r"\n\s*\n", re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        if paragraph.lstrip().startswith("|"):
            yield from paragraph.splitlines()
        else:
            yield from re.split(r"\n(?=\s*(?:- |\d+\. ))", paragraph)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.relative_to(ROOT).as_posix())
def test_each_figure_stands_on_a_page_that_its_sentence_links(page: Path) -> None:
    for piece in pieces(page.read_text()):
        linked = [(page.parent / link).resolve() for link in LINK.findall(piece)]
        if linked:
            there = {number for other in linked for number in numbers(other.read_text())}
            assert numbers(NO_FIGURES.sub("", piece)) <= there, piece


@pytest.fixture(scope="module")
def studies() -> list[tuple[Any, Any]]:
    """Plan and kept runs of the two studies with SGD."""
    transfer, at_size, read = load("transfer"), load("at_size"), load("comparison").read
    cases, seeds = tuple(at_size.LONGER.cases), (1, 2, 3, 4, 5)
    return [
        (transfer.parse([])[1], read(ROOT / transfer.KEPT)),
        (at_size.Plan(at_size.LONGER, cases, (1, 4, 16, 64), seeds, 1, ("warmup",)), read(ROOT / at_size.KEPT)),
    ]


def found(studies: list[tuple[Any, Any]], scale: int, method: str) -> dict[str, dict[int, Any]]:
    """The runs of a method by workload and seed."""
    seeds_of = load("comparison").seeds_of
    return {w: seeds_of(plan, results, w, scale, method) for plan, results in studies for w in plan.workloads}


def verdicts(studies: list[tuple[Any, Any]], scale: int, method: str, other: tuple[int, str]) -> dict[str, str]:
    """How a method compares with another one, by workload."""
    cases = {w: plan.case(w) for plan, _ in studies for w in plan.workloads}
    own, others = found(studies, scale, method), found(studies, *other)
    difference = load("comparison_page").difference
    return {workload: difference(case, own[workload], others[workload]).verdict for workload, case in cases.items()}


def steps(runs: dict[int, Any]) -> float:
    return mean(run.optimizer_steps for run in runs.values())


def test_what_the_readme_says_first(studies: list[tuple[Any, Any]]) -> None:
    text = (ROOT / "README.md").read_text()
    base, own = found(studies, 1, "AdaScale"), found(studies, 16, "AdaScale")
    fewer = sorted(steps(base[workload]) / steps(own[workload]) for workload in own)
    against_base = verdicts(studies, 16, "AdaScale", (1, "AdaScale"))
    assert (len(fewer), [w for w, verdict in against_base.items() if verdict == "worse"]) == (7, ["batch norm"])
    first = " ".join(text.partition("\n## ")[0].split())
    assert f"at 16 times the batch seven workloads took {fewer[0]:.1f} to {fewer[-1]:.1f} times fewer steps" in first
    lost = mean(base["batch norm"][seed].score - own["batch norm"][seed].score for seed in own["batch norm"])
    assert f"six ended no worse, one (batch norm) lost {100 * lost:.2f} points of accuracy" in first
    assert "up to 1.25 M parameters" in first
    assert "**Not measured**: two or more GPUs" in first
    # What is proven and what is not stands in the first screen, before the picture.
    assert text.index("**Measured**") < text.index("**Not measured**") < text.index("![")
    assert len(text[: text.index("![")].splitlines()) <= 12


def test_the_readmes_rows(studies: list[tuple[Any, Any]]) -> None:
    text = (ROOT / "README.md").read_text()
    assert f"in {steps(found(studies, 16, 'AdaScale')['smiles']):.0f} steps, not 1,000" in text
    as_good = {
        scale: sum(v == "no clear difference" for v in verdicts(studies, scale, "AdaScale", (scale, "√")).values())
        for scale in (4, 16)
    }
    assert as_good == {4: 5, 16: 3}
    assert "ends as well on five of seven workloads at S = 4, on three at S = 16" in text
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
    assert "AdaScale is worse on three of four workloads at S = 16" in text


def test_the_price_of_betas_on_the_effective_clock() -> None:
    optimizers, comparison = load("optimizers"), load("comparison")
    plan = optimizers.parse(["adamw"])[1]
    results = comparison.read(ROOT / optimizers.STUDIES["adamw"].kept)
    more = [
        steps(comparison.seeds_of(plan, results, w, 16, "β^r"))
        / steps(comparison.seeds_of(plan, results, w, 16, "AdaScale"))
        - 1
        for w in plan.workloads
    ]
    said = f"{100 * min(more):.0f} to {100 * max(more):.0f} % more steps"
    assert said in " ".join((ROOT / "docs/guides/choosing.md").read_text().split())
