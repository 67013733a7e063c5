"""The study of forecasts: its page shows the runs that it keeps."""

from __future__ import annotations

import math
import statistics
from types import SimpleNamespace
from typing import Any

import pytest

from tests.project.benchmarks import ROOT, STUDIES, module
from tests.release import STUDIES as STUDY_FILES

pytestmark = pytest.mark.release(STUDY_FILES)

forecast = module("forecast")
every_workload = module("every_workload")


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


def test_the_runs_beside_adascale_have_its_seeds_and_steps(
    forecast: Any, every_workload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    paced = forecast.read_runs(ROOT / forecast.KEPT, forecast.Job, forecast.Scaled)
    kept = every_workload.read_runs(
        ROOT / every_workload.KEPT, every_workload.Job, every_workload.Ended
    )
    assert kept
    for job in kept:
        assert job.steps == paced[forecast.Job(job.case, 16, job.seed)].steps
    hot = {job for job in kept if job.method == every_workload.HOT_BASE}
    of_rules = {job for seed in (10, 11) for job in every_workload.jobs(seed)}
    assert set(kept) - hot == of_rules
    assert hot >= set(every_workload.hot_jobs())
    assert {job.case for job in every_workload.hot_jobs()}

    given = []

    def run(of: Any, data: Any, base_seed: int, rule: Any, job: Any) -> Any:
        given.append((type(rule).__name__, rule.steps, job))
        if len(given) == 2:
            raise FloatingPointError
        return forecast.Scaled(rule.steps, 0.5, [])

    monkeypatch.setattr(every_workload.forecast, "scaled_run", run)
    first, second, third = every_workload.jobs(10)[:3]
    assert every_workload.train(first).score == 0.5
    assert every_workload.train(second).score is None
    assert every_workload.train(third).score == 0.5
    at = forecast.Job(first.case, 16, 10)
    assert given == [
        ("LinearRule", first.steps, at),
        ("SquareRootRule", first.steps, at),
        ("UnscaledRule", first.steps, at),
    ]


def test_a_base_run_has_the_sum_of_the_lrs_of_a_run_with_lr_times_scale(
    every_workload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = []

    def run(case: Any, seed: int) -> Any:
        given.append((case.hyperparameters, case.total_steps, seed))
        if len(given) == 2:
            raise FloatingPointError
        return SimpleNamespace(score=math.inf if len(given) == 3 else 0.7)

    monkeypatch.setattr(every_workload.forecast, "base_run", run)
    job = every_workload.Job("images, m 0.9", every_workload.HOT_BASE, 10, 250)
    ended = [every_workload.train(job).score for _ in range(3)]
    assert ended == [0.7, None, None]
    lr = pytest.approx(16 * 250 * 0.02 / 2000)
    assert given[0] == ({"net": "dense", "lr": lr, "momentum": 0.9}, 2000, 10)


def test_a_workload_of_which_a_run_failed_says_so(
    every_workload: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = every_workload.Job("digits", "LR × S", 10, 239)
    runs = {job: every_workload.Ended(0.98)}
    monkeypatch.setattr(every_workload, "read_runs", lambda path, *of: runs)

    def row() -> Any:
        (found,) = (r for r in every_workload.forecast_rows() if r.workload == "digits")
        return found

    assert set(row().others) == {"LR × S", every_workload.FIXED}
    assert row().others["LR × S"].steps == 239
    base = statistics.mean(
        every_workload.forecast.base_scores(ROOT / every_workload.forecast.KEPT_BASES)[
            "digits"
        ].values()
    )
    assert row().others["LR × S"].by == pytest.approx(0.98 - base)
    runs[every_workload.Job("digits", "LR × S", 11, 240)] = every_workload.Ended(None)
    assert row().others["LR × S"].cell(1.0) == "**failed**"
