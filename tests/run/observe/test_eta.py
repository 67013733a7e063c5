"""What is left of a run, against numbers worked by hand, and in a run that is stopped and resumed."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest

from ray_adascale import AdaScaleConfig, LocalBackend, Run
from ray_adascale.checkpoint.rng import seed_everything
from ray_adascale.forecast.replay import Replay, replay
from ray_adascale.recipe import Recipe
from ray_adascale.run.base.base_run import record_recipe
from ray_adascale.run.observe import eta as module
from ray_adascale.run.observe.eta import Eta, EtaTracker, RemainingSteps, clock_time, forecast_remaining_steps
from ray_adascale.run.observe.step import Listener, Step

from ...samples_of import recipe, regression, step_of


def constant(gain: float, total: float, scale: float = 4.0) -> RemainingSteps:
    """The steps left where each is forecast to have this gain."""
    steps = math.ceil(total / gain)
    replayed = Replay(steps * gain, steps * gain, tuple(gain * i for i in range(steps)), (gain,) * steps, total)
    return RemainingSteps(replayed, scale)


def by_hand(tau: float, total: float, scale: float, forecast: float, correction: float) -> float:
    """∫ dτ / r(τ) with q·e^(c·e^(−Δτ/(¼·T))), by midpoints."""
    ratio = (1 - forecast / scale) / (forecast - 1)
    width = (total - tau) / 20_000
    steps = 0.0
    for i in range(20_000):
        ahead = (i + 0.5) * width
        q = ratio * math.exp(correction * math.exp(-ahead / (0.25 * total)))
        steps += width * (1 / scale + q) / (1 + q)
    return steps


def test_the_remainder_is_the_forecasts() -> None:
    left = constant(2.0, 1000)
    assert [left.at(tau) for tau in (0, 1, 500, 999)] == pytest.approx([500, 499.5, 250, 0.5])
    assert left.at(1000) == left.at(1001.5) == 0
    # The last step goes beyond T; only what is needed of it counts.
    assert constant(3.0, 1000).at(0) == pytest.approx(1000 / 3)


def test_gains_other_than_forecast_correct_what_is_to_come() -> None:
    # Forecast r = 2 of S = 4: q = (1 − ½)/1 = ½. The run has r = 2.5: q = 0.375/1.5 = ¼. Half of ln ½ is believed.
    left = constant(2.0, 1000)
    taus = [0.0]
    while taus[-1] < 199:
        taus.append(taus[-1] + 2.5)
        left.observe(taus[-2], taus[-1], 2.5)
        if taus[-1] < 200:
            assert left.correction == 0  # not in the first fifth
    assert taus[-1] == 200
    assert left.correction == pytest.approx(0.5 * math.log(0.5))
    # Bins of the forecast's own steps: 0.1 % of the run each.
    assert left.at(200) == pytest.approx(by_hand(200, 1000, 4, 2.0, left.correction), rel=2e-3)
    assert 320 < left.at(200) < 400  # by the forecast 400, at r = 2.5 throughout 320


def test_only_the_last_half_counts() -> None:
    # r = 3.9 up to τ = 200, and then as forecast: at 400 the last half knows nothing of it.
    left = constant(2.0, 1000)
    tau = 0.0
    while tau < 400:
        gain = 3.9 if tau < 200 else 2.0
        left.observe(tau, tau + gain, gain)
        tau += gain
        if 200 <= tau < 210:
            assert left.correction < -0.5
    assert left.correction == pytest.approx(0, abs=0.03)  # one bin of 5 lies across 200


def test_gains_at_their_bounds_have_bounds() -> None:
    for gain in (1.0, 4.0):
        left = constant(2.0, 1000)
        tau = 0.0
        while tau < 300:
            left.observe(tau, tau + gain, gain)
            tau += gain
        assert math.isfinite(left.correction)
        assert (1000 - tau) / 4 < left.at(tau) < 1000 - tau
    assert constant(4.0, 1000).at(0) == 250
    assert constant(1.0, 1000).at(0) == 1000


def test_skipped_steps_and_other_rules_correct_nothing() -> None:
    left = constant(2.0, 1000)
    left.observe(300, 300, 3.0)
    assert left.correction == 0
    noisy = recipe([(0, 3, 1)], 1000)
    given: dict[str, Any] = {"scale": 4.0, "averaging_window": 0.05}
    linear = forecast_remaining_steps(noisy, [], rule="linear", **given)
    assert linear is not None
    linear.observe(0, 500, 1.5)
    assert linear.at(500) == pytest.approx(125)


def test_steps_at_another_scale_correct_nothing_and_their_share_of_the_run_is_not_the_next_steps() -> None:
    # Nothing but noise: r = S is forecast, whose q = 0 counts as 1/1000. The trace has 100 steps of r = 2 at S = 4 (q = ½, 500
    # times as much) up to τ = 200, 40 of r = 1.25 at S = 2 up to 250, and 14 as forecast, r = 4 at S = 4, up to 306.
    rows: list[dict[str, Any]] = []
    tau = 0.0
    for count, scale, gain in ((100, 4.0, 2.0), (40, 2.0, 1.25), (14, 4.0, 4.0)):
        for _ in range(count):
            tau += gain
            rows.append({"effective_steps": tau, "gain": gain, "scale": scale})
    left = forecast_remaining_steps(recipe([(0, 1, 0)], 1000), rows, scale=4.0, rule="adascale", averaging_window=0.05)
    assert left is not None
    # The last half of 306, in bins of 5, begins at 150: 50 effective steps of the first kind and 56 of the last. Those 50 at
    # S = 2 are nobody's; were they the next step's, the sum would be over 156.
    assert left.correction == pytest.approx(0.5 * 50 * math.log(500) / 106, rel=1e-9)  # sums in another order


def test_where_there_is_nothing_to_forecast_from() -> None:
    given: dict[str, Any] = {"rule": "adascale", "averaging_window": 0.05}
    assert forecast_remaining_steps(None, [], scale=4, **given) is None
    assert forecast_remaining_steps(recipe([]), [], scale=4, **given) is None
    assert forecast_remaining_steps(recipe([(0, 3, 1)]), [], scale=1, **given) is None
    assert forecast_remaining_steps(recipe([(0, 3, 1)]), [], scale=4, **given | {"rule": "adamscale"}) is None


def test_a_long_run_is_forecast_in_longer_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    noisy = recipe([(tau, 3 + tau / 300, 1) for tau in range(0, 3000, 10)], 3000)
    given: dict[str, Any] = {"scale": 8.0, "rule": "adascale", "averaging_window": 0.05}
    whole = forecast_remaining_steps(noisy, [], **given)
    monkeypatch.setattr(
        "ray_adascale.forecast.replay.replay", lambda *args, **rest: replay(*args, **rest | {"most_steps": 500})
    )
    coarse = forecast_remaining_steps(noisy, [], **given)
    assert whole is not None
    assert coarse is not None
    for tau in (0, 300, 1500, 2900):
        assert coarse.at(tau) == pytest.approx(whole.at(tau), rel=0.02, abs=1)


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


# ---- in a run --------------------------------------------------------------------------------------------------------


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
    return record_recipe(regression, {}, base_batch_size=8, total_steps=400, seed=1, probe_every=5)


def make(backend: LocalBackend, recipe: Recipe | None, scale: int) -> tuple[Run, Any]:
    seed_everything(3)
    built = regression({})
    settings: dict[str, Any] = {} if recipe is not None else {"base_batch_size": 8, "total_steps": 400}
    config = AdaScaleConfig(per_worker_batch_size=scale * 8 // 2, accumulation=2, seed=3, **settings)
    return Run.of(built, config, recipe=recipe, backend=backend), built.loss_fn


def drive(run: Run, loss_fn: Any, until: float = math.inf) -> None:
    for batch in run:
        run.backward(loss_fn(run.model, batch))
        if run.step() and run.effective_steps >= until:
            run.save_checkpoint()
            break


@pytest.mark.filterwarnings("ignore:The batch of")
def test_a_run_tells_what_is_left_from_its_first_step_on(found: Recipe, tmp_path: Path) -> None:
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
    rows = [json.loads(line) for line in (tmp_path / "whole" / "trace.jsonl").read_text().splitlines()]
    assert [row["steps_left"] for row in rows] == [round(eta.steps, 1) for eta in backend.seen]

    # Stopped amid the run and resumed, it tells the same: the trace in the checkpoint has the gains so far.
    drive(*make(LocalBackend(tmp_path / "parts"), found, 8), until=200)
    drive(*make(LocalBackend(tmp_path / "parts"), found, 8))
    again = [json.loads(line) for line in (tmp_path / "parts" / "trace.jsonl").read_text().splitlines()]
    assert [row["attempt"] for row in again][-1] == 1
    assert [row["steps_left"] for row in again] == [row["steps_left"] for row in rows]


@pytest.mark.filterwarnings("ignore:The batch of")
def test_without_a_forecast_it_is_rough_and_at_the_base_batch_exact(found: Recipe, tmp_path: Path) -> None:
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
