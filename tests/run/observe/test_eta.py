"""What is left of a run, against numbers worked by hand, and in a run that is
stopped and resumed.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ray_adascale import AdaScaleConfig, LocalBackend, Run, read_trace
from ray_adascale.checkpoint.rng import seed_everything
from ray_adascale.forecast.replay import Forecaster
from ray_adascale.recipe import Recipe
from ray_adascale.run.base.base_run import record_recipe
from ray_adascale.run.observe import eta as module
from ray_adascale.run.observe.eta import (
    Eta,
    EtaTracker,
    clock_time,
    forecast_run,
    steps_left,
)
from ray_adascale.run.observe.step import Listener, Step

from ...samples_of import recipe, regression, step_of


def test_where_there_is_nothing_to_forecast_from() -> None:
    noisy, config = recipe([(0, 3, 1)]), AdaScaleConfig(base_batch_size=8)
    assert forecast_run(None, config, 4.0) is None
    assert forecast_run(recipe([]), config, 4.0) is None
    assert forecast_run(noisy, config, 1.0) is None
    assert forecast_run(noisy, replace(config, rule="adamscale"), 4.0) is None
    assert forecast_run(noisy, config, 4.0) == Forecaster(noisy).at(4.0).expected
    linear = forecast_run(noisy, replace(config, rule="linear"), 4.0)
    assert linear is not None
    assert linear.steps_left(50) == pytest.approx(12.5)  # of T = 100


def test_without_a_forecast_the_mean_gain_stays() -> None:
    given: dict[str, Any] = {"total_steps": 100, "taken": 10}
    assert steps_left(None, tau=25, scale=4, **given) == pytest.approx(30)  # r̄ = 2.5
    assert steps_left(None, tau=0, scale=4, **given) == math.inf
    assert steps_left(None, tau=25, scale=1, **given) == 75
    assert (
        steps_left(None, tau=101, scale=4, **given)
        == steps_left(None, tau=101, scale=1, **given)
        == 0
    )


def test_seconds_leave_the_first_steps_out(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    tracker = EtaTracker(None)
    assert tracker.seconds_per_step == math.inf

    def took(seconds: float) -> float:
        clock[0] += seconds
        tracker.after_step(step_of())
        return tracker.seconds_per_step

    assert [took(8), took(2)] == [8, 5]
    took(2)
    assert [took(1), took(1), took(4)] == [1, 1, 2]


def test_in_words() -> None:
    assert str(Eta(10, 65, False)) == "1:05 left"
    assert str(Eta(10, 65, True)) == "~1:05 left"
    assert str(Eta(10, math.inf, True)) == "? left"
    assert Eta.from_metrics({"gain": 2.0}) == Eta(math.inf, math.inf, True)
    assert Eta.from_metrics(Eta(3.0, 4.0, False).as_metrics()) == Eta(3.0, 4.0, False)
    assert clock_time(3661) == "1:01:01"


# ---- in a run ------------------------------------------------------------------------


class Watched(LocalBackend, Listener):
    """Keeps what is left of the run after each step."""

    def __init__(self, folder: Path | None = None) -> None:
        super().__init__(folder)
        self.seen: list[Eta] = []

    def listeners(self, tracker: EtaTracker) -> list[Listener]:
        self.tracker = tracker
        return [self]

    def after_step(self, step: Step) -> None:
        self.seen.append(self.tracker.eta)


@pytest.fixture(scope="module")
def found() -> Recipe:
    return record_recipe(
        regression, {}, base_batch_size=8, total_steps=400, seed=1, probe_every=5
    )


def make(backend: LocalBackend, recipe: Recipe | None, scale: int) -> tuple[Run, Any]:
    seed_everything(3)
    built = regression({})
    settings: dict[str, Any] = (
        {} if recipe is not None else {"base_batch_size": 8, "total_steps": 400}
    )
    config = AdaScaleConfig(
        per_worker_batch_size=scale * 8 // 2, accumulation=2, seed=3, **settings
    )
    return Run.of(built, config, recipe=recipe, backend=backend), built.loss_fn


def drive(run: Run, loss_fn: Any, until: float = math.inf) -> None:
    for batch in run:
        run.backward(loss_fn(run.model, batch))
        if run.step() and run.effective_steps >= until:
            run.save_checkpoint()
            break


@pytest.mark.filterwarnings("ignore:The batch of")
def test_a_run_tells_what_is_left_from_its_first_step_on(
    found: Recipe, tmp_path: Path
) -> None:
    backend = Watched(tmp_path / "whole")
    run, loss_fn = make(backend, found, 8)
    drive(run, loss_fn)
    steps = run.optimizer.steps
    for i, eta in enumerate(backend.seen, start=1):
        assert not eta.rough
        assert eta.steps == pytest.approx(steps - i, abs=0.3 * steps)
        if i != 3:  # the first ones are left out, and then there is none
            assert math.isfinite(eta.seconds)
    assert backend.seen[-1].steps == backend.seen[-1].seconds == 0
    rows = read_trace(tmp_path / "whole")
    assert [row["steps_left"] for row in rows] == [
        round(eta.steps, 1) for eta in backend.seen
    ]

    # Stopped amid the run and resumed, it tells the same.
    drive(*make(LocalBackend(tmp_path / "parts"), found, 8), until=200)
    drive(*make(LocalBackend(tmp_path / "parts"), found, 8))
    again = read_trace(tmp_path / "parts")
    assert [row["attempt"] for row in again][-1] == 1
    assert [row["steps_left"] for row in again] == [row["steps_left"] for row in rows]


@pytest.mark.filterwarnings("ignore:The batch of")
def test_without_a_forecast_it_is_rough_and_at_the_base_batch_exact(
    found: Recipe, tmp_path: Path
) -> None:
    backend = Watched(tmp_path)
    run, loss_fn = make(backend, None, 8)
    drive(run, loss_fn, until=100)
    steps, tau = run.optimizer.steps, run.effective_steps
    assert backend.seen[-1].rough
    assert backend.seen[-1].steps == pytest.approx((400 - tau) * steps / tau)
    backend = Watched()
    run, loss_fn = make(backend, found, 1)
    drive(run, loss_fn, until=100)
    assert not backend.seen[-1].rough
    assert backend.seen[-1].steps == 300
