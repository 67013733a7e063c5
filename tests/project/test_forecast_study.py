"""The study of forecasts: its page shows the runs that it keeps."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from tests.project.benchmarks import ROOT, STUDIES, module
from tests.release import STUDIES as STUDY_FILES

pytestmark = pytest.mark.release(STUDY_FILES)

forecast = module("forecast")


@pytest.mark.parametrize(
    ("group", "title", "runs"),
    [
        ("fresh", "## Twelve fresh workloads", 5),
        ("chosen later", "## Twelve more workloads", 2),
    ],
)
def test_the_page_has_the_steps_of_the_kept_runs(
    forecast: Any, group: str, title: str, runs: int
) -> None:
    found = forecast.read_runs(ROOT / forecast.KEPT, forecast.Job, forecast.Scaled)
    names = [case.name for case in forecast.cases()[group]]
    assert {(job.case, job.scale) for job in found} >= {
        (name, scale) for name in names for scale in forecast.SCALES
    }
    page = (
        (STUDIES / "pages/forecast.md")
        .read_text()
        .partition(title)[2]
        .partition("\n- ")[0]
    )
    rows = [
        line.strip("| ").split(" | ")
        for line in page.splitlines()
        if line.startswith("|")
    ][2:]
    assert len(rows) == 36
    for name, scale, steps, _, actual, each, *_ in rows:
        taken = [
            run.steps
            for job, run in found.items()
            if (job.case, job.scale) == (name, int(scale))
        ]
        assert len(taken) == runs
        assert actual == f"{statistics.mean(taken):.0f}"
        assert each == f"{min(taken)}–{max(taken)}"
        assert int(steps) > 0


def test_where_a_run_passes_shares_of_its_length(forecast: Any) -> None:
    assert forecast.SHARES == (0.05, 0.1, 0.2, 0.3, 0.5)
    # τ is 4, 8, 12 ... of 40: 5 % is 2, and 30 % is 12. The last step ends the run.
    assert forecast.passed([4.0] * 10, 40) == [
        [1, 4.0],
        [1, 4.0],
        [2, 8.0],
        [3, 12.0],
        [5, 20.0],
    ]
    assert forecast.passed([30.0, 30.0], 40) == [[1, 30.0]] * 5
    assert forecast.passed([40.0], 40) == []
