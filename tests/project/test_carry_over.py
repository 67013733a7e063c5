"""The study of what a search recommends: its draws and stops are the search's, and
its tables are those of the kept runs.
"""

from __future__ import annotations

import json
import math
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.project.benchmarks import ROOT, load
from tests.release import STUDIES

pytest.importorskip("mlxtend")

pytestmark = pytest.mark.release(STUDIES)


@pytest.fixture(scope="module")
def study() -> Any:
    return load("carry_over")


def result(study: Any, scores: list[float], **changes: Any) -> Any:
    """Return the result of a run of 100 steps with these metrics, evaluated at equal
    distances.
    """
    rows = [[round((i + 1) / len(scores), 4), score] for i, score in enumerate(scores)]
    made = study.Result(scores[-1], rows, 1.0, 100, 0, 0, 0.0, "")
    return replace(made, **changes)


def test_the_draws_are_those_of_a_search(study: Any) -> None:
    # The search of this workload, with the command line's seed 0, found this
    # LR.
    assert json.loads(study.draws("sorting", 0)[0]) == {
        "lr": pytest.approx(0.188, abs=5e-4),
        "warmup": 0.1,
    }


def test_trials_stop_where_tunes_scheduler_stops_them(study: Any) -> None:
    from ray.tune.schedulers import AsyncHyperBandScheduler

    scheduler = AsyncHyperBandScheduler(
        time_attr="tau", metric="score", mode="max", max_t=1.0, grace_period=1 / 8
    )
    generator = torch.Generator().manual_seed(0)
    trials: list[Any] = []
    for number in range(30):
        scores = [
            float(x)
            for x in torch.rand(10, generator=generator) + torch.arange(10) / 10
        ]
        all_of_them = result(study, scores)
        trial: Any = SimpleNamespace(trial_id=str(number))
        scheduler.on_trial_add(None, trial)  # type: ignore[arg-type]
        found, ends = [], study.cutoffs(trials)
        for tau, score in all_of_them.scores:
            found.append([tau, score])
            answer = scheduler.on_trial_result(
                None, trial, {"tau": tau, "score": score}
            )  # type: ignore[arg-type]
            stopped = answer == scheduler.STOP and tau < 1
            assert study.below(ends, found) == stopped
            if stopped:
                break
        trials.append(replace(all_of_them, scores=found))
    assert len({len(trial.scores) for trial in trials}) == 3


def test_the_page_has_the_shares_of_the_kept_runs(study: Any) -> None:
    kept = load("study").read_runs(study.KEPT, study.Job, study.Result)
    page = (
        (ROOT / "benchmarks/studies/pages/carry-over.md")
        .read_text()
        .replace("*", "")
        .splitlines()
    )
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in page
        if line.startswith("| ")
    ][2:]
    for length, shown in ((1, rows[:3]), (3, rows[3:6])):
        cells = study.cells_of(kept.__getitem__, list(study.CASES), length)
        for line, row in zip(
            study.survival_table(cells).splitlines()[2:], shown, strict=True
        ):
            _, _, at_8, at_16, one, two = line.strip("| ").split(" | ")
            assert [
                at_8,
                at_16,
                *(each.partition(" ")[0] for each in (one, two)),
            ] == row[-4:]


def test_the_threshold_is_a_multiple_of_the_expected_norm(study: Any) -> None:
    assert study.threshold(2.0, 0.5 * 9.0, 0.5, 10) == pytest.approx(6.0)
    assert study.threshold(2.0, 4.5, 0.5, 9) == math.inf


def test_a_recipe_survives_within_an_error_of_its_base_run(study: Any) -> None:
    def cell(*at_16: float | None) -> Any:
        return study.Cell(0.1, {1: [1.0] * 3, 8: [1.0] * 3, 16: list(at_16)}, [], {})

    error = 0.1 * math.sqrt(2 / 3)
    assert study.survives(cell(*3 * [1.0 - 0.9 * error]), 0.1, 1)
    assert not study.survives(cell(*3 * [1.0 - 1.1 * error]), 0.1, 1)
    assert study.survives(cell(*3 * [1.0 - 1.1 * error]), 0.1, 2)
    assert not study.survives(cell(1.0, 1.0, None), 0.1, 2)


def test_a_trial_is_the_base_run_of_the_package(study: Any) -> None:
    from ray_adascale import record_recipe

    case = replace(study.CASES["regression"], total_steps=20)
    study.CASES["short"] = case
    try:
        found = study.train(study.Job("short", json.dumps({"lr": 0.02}), 3))
    finally:
        del study.CASES["short"]
    recipe = record_recipe(
        case.workload,
        {"lr": 0.02},
        base_batch_size=case.base_batch_size,
        total_steps=20,
        seed=3,
    )
    assert found.score == pytest.approx(-recipe.score, abs=1e-6)
    assert found.steps == 20
