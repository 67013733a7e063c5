"""The table of runs that ask for workers when they pay, against fixed numbers of workers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.project.benchmarks import load

pytestmark = pytest.mark.docs


@pytest.fixture(scope="module")
def runs() -> Any:
    return load("worker_runs")


def result(runs: Any, score: float, **other: Any) -> Any:
    given = {"steps": 100, "examples": 800, "workers": [[0.0, 1]], "gains_off": 0.0, "once": True, "seconds": 1.0}
    return runs.Result(score=score, **{**given, **other}, date="2026-11-25")


def test_the_table_pairs_the_runs_by_seed(runs: Any) -> None:
    one, three, follows = runs.KINDS
    results = {
        runs.Job(kind, seed, 50): result(runs, score, **(other if kind == follows else {}))
        for kind, scores in {one: (0.90, 0.94), three: (0.91, 0.91), follows: (0.92, 0.94)}.items()
        for seed, score, other in zip((1, 2), scores, ({"workers": [[0.0, 1], [20.4, 3]]}, {}), strict=True)
    }
    assert runs.table(results, "digits", [1, 2], 50).splitlines()[2:] == [
        "| 1 worker | 92.00 ± 2.00 |  | +1.00 ± 2.00 | 100 | 800 |  | yes |",
        "| 3 workers | 91.00 ± 0.00 | -1.00 ± 2.00 |  | 100 | 800 |  | yes |",
        "| as many as pay | 93.00 ± 1.00 | +1.00 ± 1.00 | +2.00 ± 1.00 | 100 | 800 "
        "| 1 at τ = 0 → 3 at τ = 20; 1 at τ = 0 | yes |",
    ]
    # A smaller error is better.
    errors = {runs.Job(kind, 1, 50, "tabular"): result(runs, 0.5 + i / 10) for i, kind in enumerate(runs.KINDS)}
    assert runs.table(errors, "tabular", [1], 50).splitlines()[3] == (
        "| 3 workers | 0.6000 | -0.1000 |  | 100 | 800 |  | yes |"
    )
    results[runs.Job(one, 2, 50)] = result(runs, 0.9, once=False)
    results[runs.Job(three, 2, 50)] = result(runs, 0.9, gains_off=1e-6)
    assert [line.endswith("| **no** |") for line in runs.table(results, "digits", [1, 2], 50).splitlines()[2:]] == [
        True,
        True,
        False,
    ]


def test_the_page_has_the_table_of_the_kept_runs(runs: Any) -> None:
    kept = load("study").read_runs(Path(runs.ROOT) / runs.KEPT, runs.Job, runs.Result)
    for name, case in runs.CASES.items():
        assert runs.table(kept, name, range(1, 6), case.total_steps) in runs.PAGE.read_text()
