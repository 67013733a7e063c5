"""The replay, against numbers worked by hand and against the loop whose arithmetic it repeats."""

from __future__ import annotations

import math
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ray_adascale import AdaScaleConfig, LEGWRule, Recipe, Run
from ray_adascale.analysis.forecast import forecast_recipe
from ray_adascale.analysis.replay import NoiseCurve, limit_steps, replay
from ray_adascale.checkpoint.rng import seed_everything
from ray_adascale.gain import plain_gain
from ray_adascale.run.base_run import record_recipe

from ..samples_of import probes, regression


def curve(*points: tuple[float, float, float]) -> NoiseCurve:
    return NoiseCurve(*np.array(points, dtype=float).T)


def test_constant_noise_takes_total_steps_over_the_gain() -> None:
    # r = (3 + 1) / (3/4 + 1) = 16/7: seven steps make 16 ≥ 15, six make 13.7.
    again = replay(curve((0, 3, 1)), scale=4, count=2, total_steps=15, shrink=0)
    assert again.steps == 7
    assert again.gains == pytest.approx([16 / 7] * 7)
    assert again.effective_steps == again.progress == pytest.approx(16)
    assert again.tau == pytest.approx([16 / 7 * t for t in range(7)])
    assert again.exact_steps == pytest.approx(15 * 7 / 16)  # of the seventh step only what was left
    assert limit_steps(curve((0, 3, 1)), scale=4, total_steps=15) == pytest.approx(15 * 7 / 16)


def test_limit_is_the_integral_of_one_over_the_gain() -> None:
    # Half of the run at 16/7, half at r = (3 + 4)/(3/4 + 4) = 28/19; the line in between is one step long.
    halves = curve((0, 3, 1), (499.5, 3, 1), (500.5, 3, 4), (1000, 3, 4))
    assert limit_steps(halves, scale=4, total_steps=1000) == pytest.approx(500 * 7 / 16 + 500 * 19 / 28, abs=1)
    # The replay's averages lag by their memory, here a thousandth of the run.
    again = replay(halves, scale=4, count=2, total_steps=1000, averaging_window=0.001, shrink=0)
    assert again.steps == pytest.approx(500 * 7 / 16 + 500 * 19 / 28, abs=2)


def test_averages_run_over_effective_time() -> None:
    # window·T = 1. θ_1 = e^−1 (r before the first step is 1), θ_2 = e^−16/7 = 0.1017.
    # μ̄² = (0.1017·0.6321·1 + 0.8983·4) / (0.1017·0.6321 + 0.8983) = 3.7997, so r = 6.7997 / 4.5497.
    jump = curve((0, 3, 1), (1, 3, 4))
    again = replay(jump, scale=4, count=2, total_steps=10, averaging_window=0.1, shrink=0)
    assert again.gains[:2] == pytest.approx([16 / 7, 1.49454], rel=1e-5)


def test_raw_samples_are_averaged_and_clipped_on_reading() -> None:
    # The second μ̄² is (0.0643·1 − 0.8983·5)/0.9626 < 0, so r = S; samples clipped at 0 would leave 0.0668 and r = 3.75.
    negative = curve((0, 3, 1), (1, 3, -5))
    again = replay(negative, scale=4, count=2, total_steps=10, averaging_window=0.1, shrink=0)
    assert again.gains[1] == 4


def test_a_lone_sample_has_no_gain_at_the_first_step() -> None:
    # 1 + 6.125 further steps of 16/7 make 15.
    again = replay(curve((0, 3, 1)), scale=4, count=1, total_steps=15, shrink=0)
    assert again.gains[:2] == pytest.approx([1, 16 / 7])
    assert again.steps == 8


def test_gain_without_any_gradient_is_one() -> None:
    assert plain_gain(0, 0, 8) == 1
    assert plain_gain(-1, -1, 8) == 1
    assert plain_gain(2, 0, 8) == 8


def test_trembling_weights_have_less_to_tremble_with() -> None:
    # With shrink 1 the gain settles where r = (3 + r/4)/(3/4 + r/4): r² + 2r − 12 = 0, r = √13 − 1.
    settled = replay(curve((0, 3, 1)), scale=4, count=2, total_steps=1000, averaging_window=1e-3, shrink=1)
    assert settled.gains[-1] == pytest.approx(math.sqrt(13) - 1, rel=1e-3)
    assert settled.gains[0] == pytest.approx(16 / 7)


@pytest.mark.parametrize(("rule", "steps"), [("linear", 25), ("sqrt", 25), ("unscaled", 25), ("adascale", 44)])
def test_the_rules_clock_decides(rule: str, steps: int) -> None:
    # S = 4 a step, or 16/7: ⌈100/4⌉, ⌈100·7/16⌉ = 44. Σ r is another number than τ under another rule.
    again = replay(curve((0, 3, 1)), scale=4, count=2, total_steps=100, rule=rule, shrink=0)
    assert again.steps == steps
    assert again.progress == pytest.approx(steps * 16 / 7)


def test_rules_that_remember_are_not_disturbed() -> None:
    legw = LEGWRule(1, 800)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scale in (2, 4):  # the rule itself would warn that the scale changed
            again = replay(
                curve((0, 3, 1)), scale=scale, count=2, total_steps=800, base_batch_size=8, rule=legw, shrink=0
            )
            assert again.steps == 800 / scale


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": 0.5}, "Invalid scale=0.5"),
        ({"count": 0}, "Invalid count=0"),
        ({"rule": lambda now: (1.0, 0.0)}, "clock increment is 0.0 at effective step 0"),
        ({"rule": "lars"}, "Known rules"),
    ],
)
def test_replays_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(curve((0, 3, 1)), **{"scale": 4, "count": 2, "total_steps": 10} | changes)


# ---- against the loop ------------------------------------------------------------------------------------------------


def run_scaled(found: Recipe, scale: int, seed: int = 5) -> tuple[list[tuple[int, float, float]], list[float]]:
    """(⌊τ⌋, σ², μ²) and the gain of each step of a run with two passes."""
    seed_everything(seed)
    built = regression({})
    run = Run(
        built.model,
        built.optimizer,
        built.scheduler,
        built.train_dataset,
        AdaScaleConfig(per_worker_batch_size=scale * 8 // 2, accumulation=2, seed=seed),
        recipe=found,
    )
    seen, gains = [], []
    for batch in run:
        before = int(run.effective_steps)
        run.backward(built.loss_fn(run.model, batch))
        if run.step():
            seen.append((before, run.optimizer.last_sigma2, run.optimizer.last_mu2))
            gains.append(run.gain)
    return seen, gains


@pytest.fixture(scope="module")
def found() -> Recipe:
    return record_recipe(regression, {}, base_batch_size=8, total_steps=400, seed=1, probe_every=5)


@pytest.mark.filterwarnings("ignore:The batch of")
def test_replay_of_a_runs_own_noise_is_the_run(found: Recipe) -> None:
    seen, gains = run_scaled(found, 8)
    again = replay(curve(*seen), scale=8, count=2, total_steps=400, shrink=0)
    assert again.gains == pytest.approx(gains, rel=1e-12)  # the same arithmetic, in another order at most


@pytest.mark.filterwarnings("ignore:The batch of")
def test_forecast_of_a_short_run(found: Recipe) -> None:
    """benchmarks/forecast.py in small. 15 %: one base run of 80 probes in place of three."""
    for scale in (4, 16):
        predicted = forecast_recipe(
            found, workers=[1], config=AdaScaleConfig(per_worker_batch_size=scale * 4, accumulation=2)
        ).rows[0]
        actual = [len(run_scaled(found, scale, seed)[1]) for seed in (5, 6)]
        assert predicted.steps == pytest.approx(sum(actual) / 2, rel=0.15)


def test_recorded_base_run_is_a_recipe(found: Recipe, tmp_path: Path) -> None:
    found.save(tmp_path / "recipe.json")
    assert Recipe.load(tmp_path / "recipe.json") == found
    assert [probe.effective_steps for probe in found.noise] == list(range(0, 400, 5))
    assert found.total_steps == len(found.lr_curve[0]) == 400
    assert found.metric == "error"
    assert 3.5 < found.score < 4.5  # the noise's variance is 4
    with pytest.raises(ValueError, match="Invalid probe_every=0"):
        record_recipe(regression, {}, base_batch_size=8, total_steps=4, probe_every=0)


def test_smoothing_keeps_lines_and_pools_seeds() -> None:
    line = probes([(tau, 1 + 0.01 * tau, 5 - 0.02 * tau) for tau in range(0, 100, 10)])
    smooth = NoiseCurve.from_probes(line, 100)
    assert smooth.at(40.0) == pytest.approx((1.4, 4.2))
    assert smooth.at(0.0) == pytest.approx((1.0, 5.0))  # also at the ends, where a plain kernel mean would be off
    assert smooth.at(95.0) == pytest.approx((1.9, 3.2))  # constant beyond the last
    other = probes([(tau, 3 + 0.01 * tau, 7 - 0.02 * tau) for tau in range(0, 100, 10)])
    assert NoiseCurve.from_probes(line + other, 100).at(40.0) == pytest.approx((2.4, 5.2))
    long = NoiseCurve.from_probes(probes([(tau, 1 + 0.01 * tau, 5.0) for tau in range(2000)]), 2000)
    assert len(long.tau) == 400
    assert long.at(1999.0) == pytest.approx((20.99, 5.0))
    assert NoiseCurve.from_probes(line[:1], 100).at(50.0) == pytest.approx((1.0, 5.0))
