"""The number of workers that pays: the plan by hand-worked prices, the decision, and no loop of restarts."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from ray_adascale import AdaScaleConfig, Throughput, WorkersFollow
from ray_adascale.batch_policy import BatchLimits, FixedBatch
from ray_adascale.replay import NoiseCurve
from ray_adascale.worker_policy import FLOOR, Situation, StepTimes, WorkerController, plan_workers

POLICY = FixedBatch(limits=BatchLimits(base_batch_size=8))


def now(**changes: Any) -> Situation:
    """A run of 10,000 s on 4 workers in its middle, with a noise of 16 times the signal."""
    fields: dict[str, Any] = {
        "workers": 4,
        "asked": 4,
        "effective_steps": 5_000.0,
        "total_steps": 10_000.0,
        "sigma2": 16.0,
        "mu2": 1.0,
        "batch": 32,
        "steps": 1000,
        "stay_s": 1e4,
        "restart_s": 10.0,
        "changes": 0,
    }
    return Situation(**(fields | changes))


def controller(least: int = 1, most: int = 64, *, pass_s: float = 10.0, **settings: Any) -> WorkerController:
    return WorkerController(WorkersFollow(**settings), POLICY, least, most, times=StepTimes({4: pass_s}))


# ---- the plan --------------------------------------------------------------------------------------------------------


def cheapest(now: int, costs: np.ndarray, restarts: np.ndarray) -> float:
    """The price of the best of all sequences, by trying each."""
    parts, count = costs.shape
    return min(
        sum(costs[i, k] for i, k in enumerate(path)) + sum(restarts[a, b] for a, b in itertools.pairwise((now, *path)))
        for path in itertools.product(range(count), repeat=parts)
    )


@pytest.mark.parametrize("seed", range(20))
def test_the_plan_is_the_best_of_all_sequences(seed: int) -> None:
    generator = np.random.default_rng(seed)
    costs = generator.uniform(1, 10, (5, 3))
    restarts = generator.uniform(0, 6, (3, 3))
    np.fill_diagonal(restarts, 0.0)
    found, saved = plan_workers([1, 2, 4], 2, costs, restarts)
    assert costs[:, 1].sum() - saved == pytest.approx(cheapest(1, costs, restarts))
    first = [restarts[1, k] + costs[0, k] + cheapest(k, costs[1:], restarts) for k in range(3)]
    assert found == [1, 2, 4][int(np.argmin(first))]


def test_a_change_waits_for_the_part_in_which_it_pays() -> None:
    restarts = np.array([[0.0, 1.0], [1.0, 0.0]])
    early_better = np.array([[1.0, 3.0], [5.0, 1.0]])
    assert plan_workers([1, 2], 1, early_better, restarts) == (1, 6.0 - 3.0)
    assert plan_workers([1, 2], 2, early_better[1:], restarts) == (2, 0.0)


# ---- the decision ----------------------------------------------------------------------------------------------------


def test_the_number_is_the_one_with_the_cheapest_effective_steps() -> None:
    # With ν the price (λ + k)·(1 + ν/k) is least at k = √(λν): 16 for λ = 64 and ν = 4, and the noise of a typical run grows to
    # four times that of its middle, where the number would be twice as large.
    control = controller(value_per_hour=64.0)
    found = control.decide(now(sigma2=4.0, workers=4, restart_s=0.01))
    assert 12 <= found.workers <= 32
    assert "4 times the signal" in found.reason
    assert control.decide(now(sigma2=400.0, restart_s=0.01)).workers == 64
    assert controller(value_per_hour=0.01).decide(now(restart_s=0.01)).workers == 1


def test_a_larger_value_of_time_asks_for_more() -> None:
    found = [controller(value_per_hour=value).decide(now(restart_s=0.01)).workers for value in (1.0, 8.0, 64.0)]
    assert found == sorted(set(found))


def test_the_price_per_worker_hour_counts_against_them() -> None:
    cheap, dear = (
        controller(value_per_hour=8.0, cost_per_worker_hour=cost).decide(now(restart_s=0.01)).workers
        for cost in (0.1, 10)
    )
    assert cheap > dear


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"changes": 20}, "all 20 changes are used up"),
        ({"stay_s": 49.0}, "the last change was 49 s ago, less than 50 s"),
        ({"steps": 19}, "the noise is not known yet"),
        ({"sigma2": math.nan}, "the noise is not known yet"),
        ({"effective_steps": 9_999.0}, "too few for a restart of 10 s"),
        ({"restart_s": 5_000.0, "stay_s": 1e9}, "too few for a restart of 5000 s"),
    ],
)
def test_the_number_stays_with_a_reason(changes: dict[str, Any], why: str) -> None:
    control = controller(value_per_hour=64.0)
    assert control.decide(now()).workers > 4
    found = control.decide(now(**changes))
    assert found.workers == 4
    assert why in found.reason


def test_one_worker_that_measures_no_noise_acts_on_the_expected_one() -> None:
    # One pass of the base batch on one worker is a single gradient sample at S = 1, so the number would stay 1 for ever.
    hidden = {"workers": 1, "asked": 1, "batch": 8, "sigma2": math.nan, "mu2": math.nan, "restart_s": 0.01}
    control = controller(value_per_hour=64.0)
    found = control.decide(now(**hidden))
    # A typical run has ν = 2·√30 = 11 in its middle.
    assert found.workers > 1
    assert "expected noise 11 times the signal" in found.reason
    assert control.decide(now(**hidden | {"steps": 19})).workers == 1
    # Two passes measure it, so an unknown noise is not known yet.
    two = WorkerController(
        WorkersFollow(value_per_hour=64.0), FixedBatch(limits=BatchLimits(base_batch_size=8, accumulation=2)), 1, 8
    )
    assert two.decide(now(**hidden)).reason == "the noise is not known yet"


def test_the_noise_that_was_measured_last_corrects_the_expected_one() -> None:
    hidden = {"workers": 1, "asked": 1, "batch": 8, "sigma2": math.nan, "mu2": math.nan, "restart_s": 0.01}
    control = controller(1, 2, value_per_hour=0.1)
    assert control.decide(now(workers=2, asked=2, sigma2=0.1)).workers == 1
    # λ·ν = 0.1·11 would ask for a worker and a half, and here the noise was a hundredth of that.
    found = control.decide(now(**hidden))
    assert found.workers == 1
    assert control._present_noise(now(**hidden)) == pytest.approx(0.1)
    # The correction fades as e^(−Δτ/(T/4)).
    later = control._present_noise(now(**hidden | {"effective_steps": 7_500.0}))
    expected = 2 * 30**0.75
    assert later == pytest.approx(expected * math.exp(math.log(0.1 / (2 * 30**0.5)) * math.exp(-1)))


def test_the_floor_counts_in_restarts() -> None:
    # 4 workers at ν = 16 make 4·17/20 = 3.4 effective steps in 10 s, so 5,000 of them take 14,706 s.
    price = 14_706 / FLOOR
    control = controller(value_per_hour=64.0)
    assert "too few" in control.decide(now(restart_s=price * 1.01, stay_s=1e9)).reason
    assert "too few" not in control.decide(now(restart_s=price * 0.99, stay_s=1e9)).reason


def test_a_saving_that_a_restart_costs_is_left() -> None:
    control = controller(value_per_hour=64.0)
    assert control.decide(now(restart_s=600.0, stay_s=1e9, workers=24, asked=24)).workers == 24


def test_a_restart_costs_its_time_on_the_larger_number_with_a_margin() -> None:
    prices = controller(value_per_hour=10.0, cost_per_worker_hour=2.0)._restart_prices([1, 4], 5.0)
    # 2 · 5 s · (10 + 2·4), in both directions.
    assert prices.tolist() == [[0.0, 180.0], [180.0, 0.0]]


def test_where_the_cluster_has_no_room_it_asks_for_no_more() -> None:
    control = controller(value_per_hour=64.0)
    assert control.decide(now(asked=8)).workers == 4
    assert controller(value_per_hour=0.01).decide(now(asked=8)).workers == 1


def test_the_bounds_hold() -> None:
    assert controller(2, 6, value_per_hour=1e6).decide(now(restart_s=0.01)).workers == 6
    assert controller(2, 6, value_per_hour=1e-6).decide(now(restart_s=0.01)).workers == 2


def test_a_slow_synchronisation_asks_for_fewer() -> None:
    quick = controller(value_per_hour=64.0, throughput=Throughput(pass_s=10.0))
    slow = controller(value_per_hour=64.0, throughput=Throughput(pass_s=10.0, hop_s=1.0))
    assert quick.decide(now(restart_s=0.01)).workers > slow.decide(now(restart_s=0.01)).workers


def test_with_given_times_the_price_is_that_of_the_batch_at_the_noise() -> None:
    # E = 0.5 and ν = 60: 62 base batches, 1,984 examples, on any number of workers, so r stays near 31. With 0.01 s an example
    # and a sync of up to 2 s, k workers take 19.84/k + 2·(k − 1)/k seconds. With λ = 8 the price (8 + k)·(…) is least on 8.
    policy = AdaScaleConfig(
        base_batch_size=32, per_worker_batch_size=256, target_efficiency=0.5, max_global_batch_size=10_000
    ).batch_policy
    settings = WorkersFollow(throughput=Throughput(example_s=0.01, volume_s=2.0))
    outlook = NoiseCurve(*(np.array([number]) for number in (0.0, 60.0, 1.0, 1 / 60)))
    control = WorkerController(settings, policy, 1, 8, outlook=outlook)
    found = control.decide(now(workers=1, asked=1, sigma2=60.0, batch=1984, restart_s=0.01))
    assert found.workers == 8
    # 5,000 effective steps of gain 31 on one worker, 19.84 s each: 3,200 s. A restart of 60 s is too long, one of 50 s is not.
    for restart_s, few in ((60.0, True), (50.0, False)):
        reason = control.decide(now(workers=1, asked=1, sigma2=60.0, batch=1984, restart_s=restart_s)).reason
        assert ("too few for a restart" in reason) == few


def test_the_first_number_follows_the_value_of_time_and_stays_in_bounds() -> None:
    found = [
        WorkerController(WorkersFollow(value_per_hour=value), POLICY, 2, 64).first(1000, 8, 60.0).workers
        for value in (0.01, 16.0, 1e6)
    ]
    assert found[0] == 2
    assert 8 <= found[1] <= 32
    assert found[2] == 64


@pytest.mark.parametrize("seed", range(5))
def test_a_noise_that_jumps_makes_no_loop_of_restarts(seed: int) -> None:
    generator = np.random.default_rng(seed)
    control = controller(value_per_hour=16.0)
    workers, changes, since, seconds, tau = 4, 0, 0.0, 0.0, 100.0
    while tau < 10_000:
        noise = float(np.exp(generator.normal(2, 1.5)))
        found = control.decide(
            now(
                workers=workers,
                asked=workers,
                effective_steps=tau,
                sigma2=noise,
                stay_s=seconds - since,
                changes=changes,
            )
        )
        if found.workers != workers:
            workers, changes, seconds = found.workers, changes + 1, seconds + 10.0
            since = seconds
        tau += 10 * workers * (noise + 1) / (noise + workers)
        seconds += 100.0
    assert changes <= 20
    assert changes * 10.0 < 0.02 * seconds


# ---- seconds of a pass -----------------------------------------------------------------------------------------------


def test_seconds_of_a_pass_are_measured_or_on_the_line_of_a_ring() -> None:
    times = StepTimes()
    assert times.at(8) == 1.0
    times.add(1, 2.0)
    assert times.at(8) == 2.0
    times.add(2, 3.0)  # t = 2 + 2·(k − 1)/k
    assert times.at(2) == 3.0
    assert times.at(4) == pytest.approx(3.5)
    times.add(2, 1.0)  # faster on two workers: a measuring error
    assert times.at(4) == pytest.approx(1.5)


# ---- settings --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"cost_per_worker_hour": 0}, r"WorkersFollow\(cost_per_worker_hour=0\). Must be a positive number"),
        ({"value_per_hour": -1.0}, "value_per_hour=-1.0"),
        ({"restart_s": True}, "restart_s=True"),
        ({"shortest_stay_s": math.inf}, "shortest_stay_s=inf"),
        ({"max_changes": 1.5}, "max_changes=1.5"),
        ({"throughput": 3.0}, "Must be a Throughput"),
    ],
)
def test_settings_out_of_range_are_refused(settings: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        WorkersFollow(**settings)
