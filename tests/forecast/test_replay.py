"""The replay, against numbers worked by hand and against the loop whose arithmetic
it repeats.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, NamedTuple

import numpy as np
import pytest

from ray_adascale import (
    AdaScaleConfig,
    AdaScaleMemoryRule,
    BetaRule,
    LEGWRule,
    Recipe,
    Run,
)
from ray_adascale.analysis.forecast import forecast_recipe
from ray_adascale.batch import BatchFollower
from ray_adascale.checkpoint.rng import seed_everything
from ray_adascale.forecast.replay import (
    Forecaster,
    Law,
    NoiseCurve,
    StepForecast,
    auto_rule_of,
    replay,
)
from ray_adascale.recipe import Repeat
from ray_adascale.run.base.base_run import record_recipe

from ..samples_of import probes, recipe, regression


def curve(*points: tuple[float, float, float]) -> NoiseCurve:
    return NoiseCurve(*np.array(points, dtype=float).T)


def test_constant_noise_takes_total_steps_over_the_gain() -> None:
    # r = (3 + 1) / (3/4 + 1) = 16/7: seven steps make 16 ≥ 15, six make 13.7.
    again = replay(curve((0, 3, 1)), law=None, scale=4, total_steps=15)
    assert again.steps == 7
    assert again.gains == pytest.approx([16 / 7] * 7)
    assert again.effective_steps == again.progress == pytest.approx(16)
    assert again.tau == pytest.approx([16 / 7 * t for t in range(7)])
    # of the seventh step only what was left
    assert again.exact_steps == pytest.approx(15 * 7 / 16)


def test_steps_left_are_those_from_tau_to_the_end() -> None:
    # r = 16/7 throughout, T = 15: 7/16 of a step for each effective one, and in the
    # middle of a step its share.
    again = replay(curve((0, 3, 1)), law=None, scale=4, total_steps=15)
    left = [again.steps_left(tau) for tau in (0, 1, 16 / 7, 14.9, 15, 15.5, 17)]
    assert left == pytest.approx(
        [15 * 7 / 16, 14 * 7 / 16, 15 * 7 / 16 - 1, 0.1 * 7 / 16, 0, 0, 0]
    )
    # Strides of ten steps.
    long = replay(curve((0, 3, 1)), law=None, scale=4, total_steps=1500, most_steps=150)
    assert [long.steps_left(tau) for tau in (0, 500, 1500)] == pytest.approx(
        [1500 * 7 / 16, 1000 * 7 / 16, 0]
    )


def test_limit_is_the_integral_of_one_over_the_gain() -> None:
    # Half of the run at 16/7, half at r = (3 + 4)/(3/4 + 4) = 28/19; the line in
    # between is one step long.
    halves = curve((0, 3, 1), (499.5, 3, 1), (500.5, 3, 4), (1000, 3, 4))
    # The replay's averages lag by their memory, here a thousandth of the run.
    again = replay(halves, law=None, scale=4, total_steps=1000, averaging_window=0.001)
    assert again.steps == pytest.approx(500 * 7 / 16 + 500 * 19 / 28, abs=2)


def test_averages_run_over_effective_time() -> None:
    # window·T = 1. θ_1 = e^−1 (r before the first step is 1), θ_2 = e^−16/7 = 0.1017.
    # μ̄² = (0.1017·0.6321·1 + 0.8983·4) / (0.1017·0.6321 + 0.8983) = 3.7997, so r =
    # 6.7997 / 4.5497.
    jump = curve((0, 3, 1), (1, 3, 4))
    again = replay(jump, law=None, scale=4, total_steps=10, averaging_window=0.1)
    assert again.gains[:2] == pytest.approx([16 / 7, 1.49454], rel=1e-5)


def test_raw_samples_are_averaged_and_clipped_on_reading() -> None:
    # The second μ̄² is (0.0643·1 − 0.8983·5)/0.9626 < 0, so r = S; samples clipped at 0
    # would leave 0.0668 and r = 3.75.
    negative = curve((0, 3, 1), (1, 3, -5))
    again = replay(negative, law=None, scale=4, total_steps=10, averaging_window=0.1)
    assert again.gains[1] == 4


def test_the_laws_factor() -> None:
    # f = 0.4 + 0.6·2/4 + 2·0.5·(2 − 1) = 1.7; with m = 0.9 the last term is a
    # nineteenth: 0.7 + 0.1/1.9.
    assert Law().factor(0.5, 2, 4) == pytest.approx(1.7)
    assert Law(momentum=0.9).factor(0.5, 2, 4) == pytest.approx(0.7 + 0.1 / 1.9)
    assert Law().factor(3, 16, 16) == pytest.approx(3)  # 2·3·15 counts as 2
    # no signal: nothing to shake, and less to tremble
    assert Law().factor(0, 2, 8) == pytest.approx(0.55)
    for momentum in (0.0, 0.5, 0.95):
        assert Law(momentum=momentum).factor(1.3, 1, 1) == 1  # the base run is itself


@pytest.mark.parametrize(("momentum", "settled"), [(0.0, 2.04489), (0.9, 2.43684)])
def test_the_gain_settles_where_the_law_says(momentum: float, settled: float) -> None:
    # r = (3 + f)/(3/4 + f) with f = 0.4 + 0.15·r + ⅔·(r − 1)·(1 − m)/(1 + m), since q =
    # ⅓: for m = 0 0.81667·r² − 0.33333·r − 2.73333 = 0, for m = 0.9 0.18509·r² +
    # 0.92982·r − 3.36491 = 0.
    noise = NoiseCurve(
        np.array([0.0]), np.array([3.0]), np.array([1.0]), np.array([1 / 3])
    )
    again = replay(
        noise,
        law=Law(momentum=momentum),
        scale=4,
        total_steps=1000,
        averaging_window=1e-3,
    )
    assert again.gains[-1] == pytest.approx(settled, rel=1e-5)
    # the weights begin as those of the base run
    assert again.gains[0] == pytest.approx(16 / 7)


def test_under_betas_on_the_clock_momentum_averages_less_and_nothing_lags() -> None:
    noise = NoiseCurve(
        np.array([0.0]), np.array([3.0]), np.array([1.0]), np.array([1 / 3])
    )
    given: dict[str, Any] = {"scale": 4, "total_steps": 1000, "averaging_window": 1e-3}
    r = replay(noise, law=Law(momentum=0.9), rule="adascale_memory", **given).gains[-1]
    m = 0.9**r
    # Adam's random motion does not disappear with the noise
    f = 1 + 4 / 3 * (r - 1) * (1 - m) / (1 + m)
    assert r == pytest.approx((3 + f) / (3 / 4 + f), rel=1e-5)
    # A momentum that is not a β1 has SGD's law, with m^r.
    law = Law(momentum=0.9, momentum_is_beta=False)
    r = replay(
        noise, law=law, rule=AdaScaleMemoryRule(BetaRule(momentum=1)), **given
    ).gains[-1]
    m = 0.9**r
    f = 0.4 + 0.15 * r + 2 / 3 * (r - 1) * (1 - m) / (1 + m)
    assert r == pytest.approx((3 + f) / (3 / 4 + f), rel=1e-5)
    # between the gains without momentum and with that of the base run
    assert 2.04 < r < 2.43
    # The default rule has m^√r, and lowers no momentum below one half.
    for m, floor in ((0.9, 0.0), (0.6, 0.5)):
        law = Law(momentum=m, momentum_is_beta=False)
        r = replay(noise, law=law, rule="adascale_memory", **given).gains[-1]
        m = max(m**r**0.5, floor)
        f = 0.4 + 0.15 * r + 2 / 3 * (r - 1) * (1 - m) / (1 + m)
        assert r == pytest.approx((3 + f) / (3 / 4 + f), rel=1e-5)
    law = Law(momentum=0.5, momentum_is_beta=False)
    assert (
        replay(noise, law=law, rule="adascale_memory", **given)
        == replay(noise, law=law, rule="adascale", **given)
    )  # fmt: skip
    ends = curve((0, 1, 0), (19, 1, 0), (20, 0, 1))
    given = {"scale": 4, "total_steps": 40, "averaging_window": 1e-9}
    again = replay(ends, law=Law(momentum=0.5), rule="adascale_memory", **given)
    # as without momentum, where τ is 20
    assert again.gains[:6] == pytest.approx([4.0] * 5 + [1.0])


@pytest.mark.parametrize(
    ("momentum", "search", "rule"),
    [
        (0.9, {"optimizer_class": "SGD"}, "adascale_memory"),
        (0.5, {"optimizer_class": "SGD"}, "adascale"),
        (0.9, {"optimizer_class": "RMSprop"}, "adascale"),
        (0.9, {"optimizer_class": "AdamW"}, "adascale_memory"),
        (0.9, {}, "adascale"),
        # what the search has stored goes first: of a chain it knows all parts
        (0.95, {"optimizer_class": "Muon", "auto_rule": "adascale_memory"}, None),
        (0.9, {"optimizer_class": "SGD", "auto_rule": ""}, "adascale_memory"),
    ],
)
def test_the_rule_of_a_forecast_is_that_of_a_run(
    momentum: float, search: dict[str, Any], rule: str | None
) -> None:
    found = recipe([(0, 3, 1)], momentum=momentum, search=search)
    assert auto_rule_of(found) == (rule or search["auto_rule"])
    assert found.momentum_is_beta == (search.get("optimizer_class") != "SGD")


def test_a_momentum_that_a_rule_for_betas_leaves_is_forecast_as_it_is() -> None:
    noise = curve((0, 1, 0.5), (200, 1, 0.1))
    given: dict[str, Any] = {"scale": 4, "total_steps": 200}
    plain = replay(noise, law=Law(momentum=0.9), **given).gains
    both, betas = (AdaScaleMemoryRule(BetaRule(momentum=m)) for m in (1, 0))
    for rule, is_beta, kept in (
        (betas, False, True),
        (betas, True, False),
        (both, False, False),
        (both, True, False),
    ):
        gains = replay(
            noise, law=Law(momentum=0.9, momentum_is_beta=is_beta), rule=rule, **given
        ).gains
        assert (gains == plain) == kept


def test_weights_lag_behind_the_clock_by_the_momentums_memory() -> None:
    # Nothing but noise until 20, and then none, so r = 4 and then 1, with averages of a
    # single step. For m = ½, L = 1: u = 2, 3, 3.5, ..., so before the sixth and seventh
    # step p = 16.125 and 20.0625, and k = ⌊p + 1 − e^−p⌋ = 17 and 21.
    ends = curve((0, 1, 0), (19, 1, 0), (20, 0, 1))
    for momentum, fours in ((0.0, 5), (0.5, 6)):
        law = Law(momentum=momentum)
        again = replay(ends, law=law, scale=4, total_steps=40, averaging_window=1e-9)
        assert again.gains[: fours + 1] == pytest.approx([4.0] * fours + [1.0])
    # Without momentum nothing lags; the base run's own weights lag as well, so at r = 1
    # nothing does either.
    at_base = replay(curve((0, 1, 0)), law=Law(momentum=0.9), scale=1, total_steps=50)
    assert at_base.steps == 50


def test_longer_strides_take_as_many_steps() -> None:
    # A long run is replayed in fewer, longer steps: the same to what those round off.
    noise = NoiseCurve.from_probes(
        probes([(tau, 3 + tau / 1e4, 1 - tau / 3e4) for tau in range(0, 20_000, 100)]),
        20_000,
    )
    whole = replay(noise, law=Law(momentum=0.9), scale=8, total_steps=20_000)
    short = replay(
        noise, law=Law(momentum=0.9), scale=8, total_steps=20_000, most_steps=2000
    )
    assert len(whole.tau) > 9 * len(short.tau)
    assert short.exact_steps == pytest.approx(whole.exact_steps, rel=5e-3)
    assert short.steps == math.ceil(short.exact_steps)
    assert short.mean_gain == pytest.approx(whole.mean_gain, rel=5e-3)
    assert short.effective_steps == short.progress == pytest.approx(20_000, abs=80)
    # Fewer strides than one: 15/4096 of the run's only step.
    assert (
        replay(
            curve((0, 1, 0)), law=None, scale=4096, total_steps=15, most_steps=5
        ).exact_steps
        == 1
    )


@pytest.mark.parametrize(
    ("rule", "steps"),
    [("linear", 25), ("sqrt", 25), ("unscaled", 25), ("adascale", 44)],
)
def test_the_rules_clock_decides(rule: str, steps: int) -> None:
    # S = 4 a step, or 16/7: ⌈100/4⌉, ⌈100·7/16⌉ = 44. Σ r is another number than τ
    # under another rule.
    again = replay(curve((0, 3, 1)), law=None, scale=4, total_steps=100, rule=rule)
    assert again.steps == steps
    assert again.progress == pytest.approx(steps * 16 / 7)


def test_rules_that_remember_are_not_disturbed() -> None:
    legw = LEGWRule(1, 800)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for scale in (2, 4):  # the rule itself would warn that the scale changed
            again = replay(
                curve((0, 3, 1)),
                law=None,
                scale=scale,
                total_steps=800,
                base_batch_size=8,
                rule=legw,
            )
            assert again.steps == 800 / scale


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scale": 0.5}, "Invalid scale=0.5"),
        (
            {"rule": lambda now: (1.0, 0.0)},
            "clock increment is 0.0 at effective step 0",
        ),
        ({"rule": "lars"}, "Known rules"),
    ],
)
def test_replays_that_cannot_be(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replay(
            curve((0, 3, 1)), **{"scale": 4, "total_steps": 10, "law": None} | changes
        )


# ---- against the loop ----------------------------------------------------------------


class Scaled(NamedTuple):
    """A run with two passes: (⌊τ⌋, σ², μ²) and the gain of each step, and the metric
    at its end.
    """

    seen: list[tuple[int, float, float]]
    gains: list[float]
    score: float


def run_scaled(found: Recipe, scale: int, seed: int = 5) -> Scaled:
    seed_everything(seed)
    built = regression(found.hyperparameters)
    run = Run(
        built.model,
        built.optimizer,
        built.scheduler,
        built.train_dataset,
        AdaScaleConfig(
            per_worker_batch_size=scale * 8 // 2,
            accumulation=2,
            seed=seed,
            rule="adascale",
        ),
        recipe=found,
        evaluate=built.evaluate,
    )
    seen, gains = [], []
    for batch in run:
        before = int(run.effective_steps)
        run.backward(built.loss_fn(run.model, batch))
        if run.step():
            seen.append(
                (before, run.optimizer.last_step.sigma2, run.optimizer.last_step.mu2)
            )
            gains.append(run.gain)
    return Scaled(seen, gains, run.summary()["error"])


@pytest.fixture(scope="module", params=[{}, {"adamw": True}], ids=["sgd", "adamw"])
def found(request: pytest.FixtureRequest) -> Recipe:
    return record_recipe(
        regression,
        request.param,
        base_batch_size=8,
        total_steps=400,
        seed=1,
        probe_every=1,
    )


@pytest.mark.filterwarnings("ignore:With rule=.adascale. the averages of AdamW")
@pytest.mark.filterwarnings("ignore:The batch of")
def test_replay_of_a_runs_own_noise_is_the_run(found: Recipe) -> None:
    seen, gains, score = run_scaled(found, 8)
    assert score == pytest.approx(found.score, rel=0.05)  # the schedule transfers
    again = replay(curve(*seen), law=None, scale=8, total_steps=400)
    # the same arithmetic, in another order at most
    assert again.gains == pytest.approx(gains, rel=1e-12)


@pytest.mark.filterwarnings("ignore:With rule=.adascale. the averages of AdamW")
@pytest.mark.filterwarnings("ignore:The batch of")
def test_forecast_of_a_short_run(found: Recipe) -> None:
    """benchmarks/studies/forecast.py in small. 15 %: one base run in place of three."""
    for scale in (4, 16):
        predicted = forecast_recipe(
            found,
            workers=[1],
            config=AdaScaleConfig(
                per_worker_batch_size=scale * 4, accumulation=2, rule="adascale"
            ),
        ).rows[0]
        actual = [len(run_scaled(found, scale, seed).gains) for seed in (5, 6)]
        assert predicted.steps == pytest.approx(sum(actual) / 2, rel=0.15)


def test_smoothing_keeps_lines_and_pools_seeds() -> None:
    line = probes([(tau, 1 + 0.01 * tau, 5 - 0.02 * tau) for tau in range(0, 100, 10)])
    smooth = NoiseCurve.from_probes(line, 100)
    assert smooth.at(40.0) == pytest.approx((1.4, 4.2), rel=1e-3)
    # also at the ends, where a plain kernel mean would be off
    assert smooth.at(0.0) == pytest.approx((1.0, 5.0))
    assert smooth.at(95.0) == pytest.approx((1.9, 3.2))  # constant beyond the last
    assert smooth.ratio_at(60.0) == pytest.approx(3.8 / 1.6, rel=1e-3)
    assert smooth.ratio_at(20.0) == 3  # and not 4.6/1.2
    assert smooth.ratio_at(90.0) == pytest.approx(3.2 / 1.9)
    other = probes([(tau, 3 + 0.01 * tau, 7 - 0.02 * tau) for tau in range(0, 100, 10)])
    assert NoiseCurve.from_probes(line + other, 100).at(40.0) == pytest.approx(
        (2.4, 5.2), rel=1e-3
    )
    assert NoiseCurve.from_probes(line[:1], 100).at(50.0) == pytest.approx((1.0, 5.0))
    # Probes a quarter of the run apart: between them what is nearest, and never
    # nothing.
    few = NoiseCurve.from_probes(probes([(0, 1, 1), (500, 2, 2), (999, 3, 3)]), 1000)
    assert np.isfinite(few.sigma2).all()
    assert few.sigma2.min() >= 0.9


def test_smoothing_is_narrow_where_noise_changes_fastest() -> None:
    # A jump from 1 to 2 at τ = 30 of T = 1000: the Gaussian there is max(0.3·30, 6) = 9
    # wide. At τ = 630 it is 50.
    def jump(at: float) -> NoiseCurve:
        return NoiseCurve.from_probes(
            probes([(tau, 1.0 + (tau >= at), 0.0) for tau in range(1000)]), 1000
        )

    early, late = jump(30), jump(630)
    assert early.at(15.0)[0] == pytest.approx(1, abs=0.02)  # 15 = 2.5 widths of 6
    assert early.at(60.0)[0] == pytest.approx(2, abs=0.1)
    # Φ(−30/50) = 0.27 of it is on the other side
    assert late.at(600.0)[0] == pytest.approx(1.27, abs=0.03)
    assert (early.tau < 80).sum() >= 150


def test_noise_without_signal_or_spread_has_a_ratio() -> None:
    assert NoiseCurve.from_probes(probes([(0, 3, -1)]), 10).ratio_at(0.0) == 0
    assert NoiseCurve.from_probes(probes([(0, 0, 1)]), 10).ratio_at(0.0) == 3
    assert NoiseCurve.from_probes(probes([(0, 0, 0)]), 10).ratio_at(0.0) == 0


# ---- the interval --------------------------------------------------------------------


def test_the_interval_is_wider_than_the_seeds_by_its_constant() -> None:
    noise = [(0, 3, 1)]
    alone, again = (
        recipe(noise, 1000),
        [Repeat(seed=1, score=0.5, noise=probes([(0, 3, 1)]))],
    )
    for scale, doublings in ((4, 2), (16, 4), (64, 6)):
        one = Forecaster(alone).at(scale)
        two = Forecaster(recipe(noise, 1000, repeats=again)).at(scale)
        assert two.high / two.expected.exact_steps == pytest.approx(
            math.exp(0.06 * doublings)
        )
        assert two.low / two.expected.exact_steps == pytest.approx(
            math.exp(-0.06 * doublings)
        )
        assert one.high / one.expected.exact_steps == pytest.approx(
            math.exp(0.1 * doublings)
        )
    assert Forecaster(alone).at(1) == StepForecast(
        Forecaster(alone).at(1).expected, 1000, 1000
    )


def test_the_interval_holds_each_seed_and_ends_where_gains_do() -> None:
    # r = 4 at one seed, and at the other 1.
    twice = recipe(
        [(0, 3, 0)], repeats=[Repeat(seed=1, score=0.5, noise=probes([(0, 0, 2)]))]
    )
    found = Forecaster(twice).at(4)
    assert (found.low, found.high) == (25, 100)
    assert 25 < found.expected.exact_steps < 100


def test_the_momentum_is_the_recipes() -> None:
    plain, with_momentum = (
        Forecaster(recipe([(0, 3, 1)], 1000, momentum=m)).at(16) for m in (0.0, 0.9)
    )
    assert plain.high > with_momentum.high


def test_a_rough_forecast_leaves_a_later_exact_one_alone() -> None:
    noise = [(0, 30, 1), (200, 3, 1), (1000, 1, 1)]
    both = Forecaster(recipe(noise, 1000))
    rough, exact = both.at(8, most_steps=50), both.at(8)
    assert exact == Forecaster(recipe(noise, 1000)).at(8)
    assert (exact.expected.stride, rough.expected.stride) == (1, 20)
    assert both.at(8, most_steps=50) is rough  # each is replayed once


def test_a_rule_that_measures_nothing_has_no_interval() -> None:
    found = Forecaster(recipe([(0, 3, 1)]), rule="sqrt").at(4)
    assert found.low == found.high == found.expected.exact_steps == 25
    assert Forecaster(
        recipe([(0, 3, 1)]), rule=lambda now: (1.0, (1 + now.gain) / 2)
    ).measures


# ---- a run that chooses its scale ----------------------------------------------------


def following(efficiency: float = 0.5) -> BatchFollower:
    config = AdaScaleConfig(
        base_batch_size=8, target_efficiency=efficiency, max_global_batch_size=64
    )
    return BatchFollower(config.batch, 2, total_steps=100, window=5)


def test_a_run_that_follows_the_noise_is_replayed_as_it_runs() -> None:
    # ν = 3 throughout: S = 5 is wanted. It begins at 1/E = 2; a decision is due at
    # every 1.25 of T = 100, and doubles it at most: τ = 1.6 (r = 4/(3/2 + 1)) → S = 4;
    # τ = 1.6 + 16/7 → 42 examples, the nearest to 40: S = 5.25, r = 4/(3/5.25 + 1) =
    # 2.545.
    found = replay(
        curve((0, 3, 1)), scale=1, total_steps=100, law=None, follower=following()
    )
    assert [plan.global_batch_size for plan in found.plans] == [16, 32] + [42] * 38
    assert found.gains[:3] == pytest.approx((1.6, 16 / 7, 4 / (3 / 5.25 + 1)))
    assert found.tau[2] == pytest.approx(1.6 + 16 / 7)
    assert found.steps == 40
    assert found.mean_batch == pytest.approx((16 + 32 + 38 * 42) / 40)

    # Nothing but noise: r = S, which doubles to the largest; no noise: 1/E is as
    # efficient as asked.
    assert [
        plan.global_batch_size
        for plan in replay(
            curve((0, 1, 0)), scale=1, total_steps=100, law=None, follower=following()
        ).plans
    ] == [16, 32] + [64] * 12
    clean = replay(
        curve((0, 0, 1)), scale=1, total_steps=100, law=None, follower=following()
    )
    assert [plan.scale for plan in clean.plans] == [2] * 100
    # E = 1 is the base run.
    base = replay(
        curve((0, 3, 1)), scale=1, total_steps=100, law=None, follower=following(1)
    )
    assert (base.steps, {plan.scale for plan in base.plans}, set(base.gains)) == (
        100,
        {1.0},
        {1.0},
    )


def test_the_law_takes_the_scale_of_the_step_that_was_taken() -> None:
    """The gain of a step and the scale of the next make no efficiency: r/S could be
    above 1 where the batch shrinks.
    """
    seen = []

    class Watching(Law):
        def factor(self, ratio: float, gain: float, scale: float) -> float:
            seen.append((gain, scale))
            return super().factor(ratio, gain, scale)

    found = replay(
        curve((0, 30, 1), (50, 30, 1), (51, 0.1, 1), (100, 0.1, 1)),
        scale=1,
        total_steps=100,
        law=Watching(),
        follower=following(),
    )
    scales = [plan.scale for plan in found.plans]
    assert max(scales) == 8
    assert scales[-1] < 4
    assert seen == list(zip(found.gains[:-1], scales[:-1], strict=True))
