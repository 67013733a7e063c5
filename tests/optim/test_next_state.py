"""A step through the pure functions: σ² and μ², averages, gain, the rule's output,
and the clock, with hand-worked numbers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from ray_adascale.batch import StepPlan
from ray_adascale.optim.next_state import (
    AdaScaleState,
    Averaging,
    RuleOutput,
    apply_rule,
    averaged,
    estimate,
    gains_of,
    next_state,
    result,
    skipped,
)
from ray_adascale.optim.rules import AdaScaleMemoryRule, AdaScaleRule, RuleInput
from ray_adascale.optim.saved_state import check_tensors, tensors_of
from ray_adascale.optim.step_sums import StepResult, StepSums

SCALE = 4.0


def averaging(**settings: Any) -> Averaging:
    fields = {
        "smoothing": 0.75,
        "window": None,
        "debias": True,
        "clip_samples": False,
        "variance_floor": 0.0,
    }
    return Averaging(**(fields | settings))  # type: ignore[arg-type]


def sample(
    *moments: tuple[float, float], shape: StepPlan | None = None, seen: bool = True
) -> StepSums:
    """Return the sums of a step with σ² and μ² of each group: C = μ² + σ²/S, A = C +
    (n − 1)·σ²/S.
    """
    step = StepPlan(passes=2, given_scale=SCALE) if shape is None else shape
    c = torch.tensor([m + v / step.scale for v, m in moments], dtype=torch.float64)
    a = c + torch.tensor(
        [(step.num_samples - 1) * v / step.scale for v, _ in moments],
        dtype=torch.float64,
    )
    complete = torch.full((1,), float(seen), dtype=torch.float64)
    return StepSums(
        step,
        {"c": c * step.multiple_of_mean**2, "a": a, "complete": complete},
        None,
        True,
        seen,
    )


def after(state: AdaScaleState, how: Averaging, *samples: StepSums) -> AdaScaleState:
    for one in samples:
        state = replace(state, averages=estimate(state, one, how).averages)
    return state


def readout(state: AdaScaleState, how: Averaging, scale: float = SCALE) -> StepResult:
    gains = gains_of(state.averages, scale, how, non_negative=state.non_negative)
    return averaged(
        {
            "gains": gains.tolist(),
            "averages": state.averages.packed.reshape(-1).tolist(),
        }
    )


def test_total_moments_clip_each_group_and_then_sum() -> None:
    read = StepResult(group_sigma2=[-1.0, 2.0, 3.0], group_mu2=[4.0, -2.0, 1.0])
    assert read.total_moments() == (5.0, 5.0)
    # no sample of the second yet
    added = StepResult(group_sigma2=[2.0, math.nan], group_mu2=[4.0, math.nan])
    assert added.total_moments() == (2.0, 4.0)
    assert all(
        math.isnan(x)
        for x in StepResult(
            group_sigma2=[math.nan], group_mu2=[math.nan]
        ).total_moments()
    )


def test_a_gain_that_comes_later_starts_without_a_sample() -> None:
    how = averaging()
    state = after(AdaScaleState.empty(1, how), how, sample((8.0, 2.0)))
    state = replace(state, averages=how.with_gain(state.averages, StepPlan(passes=2)))
    known = readout(state, how)
    assert known.group_sigma2[0] == 8.0
    assert math.isnan(known.group_sigma2[1])
    assert known.group_gains == [2.5, 1.0]  # (8 + 2) / (8/4 + 2)
    assert known.gain == 2.5
    state = after(state, how, sample((8.0, 2.0), (4.0, 6.0)))
    # The weights of the two groups differ, and the whole has the sum of their averages.
    assert readout(state, how).gain == pytest.approx(
        (8 + 2 + 4 + 6) / (12 / 4 + 8), rel=1e-15
    )
    with pytest.raises(ValueError, match="of 1 gains, this optimizer has 2"):
        check_tensors(tensors_of(AdaScaleState.empty(1, how), 0, 0), state)


@pytest.mark.parametrize(
    ("before", "sigma2", "mu2"),
    [(2, 12 / 3, 6 / 3), (3, 12 / 4, (3 + 6) / 4), (4, 12 / 4, (3 + 6) / 4)],
)
def test_without_debiasing_a_later_gain_begins_at_one_if_its_first_sample_is_averaged_with_theta(
    before: int, sigma2: float, mu2: float
) -> None:
    how = averaging(debias=False)
    state = after(
        AdaScaleState.empty(1, how), how, *(sample((8.0, 2.0)) for _ in range(before))
    )
    state = replace(state, averages=how.with_gain(state.averages, StepPlan(passes=2)))
    known = readout(after(state, how, sample((8.0, 2.0), (12.0, 6.0))), how)
    # 1/(1 − 0.75) = 4: the third sample is in a plain mean of three, the fourth and
    # fifth have the weight 1/4. All in binary but 1/3, which costs an ulp or two.
    assert (known.group_sigma2[1], known.group_mu2[1]) == pytest.approx(
        (sigma2, mu2), rel=1e-15
    )


def host(numbers: Mapping[str, Tensor]) -> dict[str, list[float]]:
    return {name: number.reshape(-1).tolist() for name, number in numbers.items()}


def test_two_steps_by_hand_from_their_sums_to_the_clock() -> None:
    """S = 4, n = 2, window 2: θ = exp(−Δτ/2)."""
    how = averaging(window=2.0)
    start = AdaScaleState.empty(1, how)
    assert (start.last.effective_steps, start.last.steps, start.since_sample) == (
        0.0,
        0,
        1.0,
    )

    first = sample((8.0, 2.0))
    # C = 2 + 8/4, A = C + 8/4
    assert (first.numbers["c"].item(), first.numbers["a"].item()) == (4.0, 6.0)
    of = estimate(start, first, how)
    numbers = host(of.numbers)
    step = result(of, numbers, averaged(numbers))
    # Only one sample is in the averages, so they are the sample's: r = (8 + 2) / (8/4 +
    # 2)
    assert (step.sigma2, step.mu2, step.squared_norm, step.gain) == (8.0, 2.0, 4.0, 2.5)

    def rule(now: RuleInput) -> tuple[float, float]:
        assert (now.gain, now.scale, now.total_steps) == (2.5, 4.0, 100.0)
        return now.gain, now.gain + (0.0 if now.group is None else 1.0)

    whole = RuleInput(
        gain=step.gain,
        scale=4.0,
        effective_steps=0.0,
        total_steps=100.0,
        base_batch_size=8.0,
    )
    output = apply_rule(rule, whole, step.group_gains, [False, False])
    assert (output.lr_factors, output.group_increments) == ((2.5, 2.5), (3.5, 3.5))
    assert (output.lr_factor, output.increment) == (2.5, 2.5)
    one = next_state(start, of.averages, step, output.lr_factor, output.increment)
    assert (
        one.last.effective_steps,
        one.last.steps,
        one.last.lr_factor,
        one.since_sample,
    ) == (2.5, 1, 2.5, 2.5)
    # what it was made of stays
    assert (start.last.effective_steps, start.averages.weight.item()) == (0.0, 0.0)

    # A step between has no sample: the averages say r, and Δτ grows.
    between = StepSums(first.plan, {"c": torch.tensor([9.0], dtype=torch.float64)})
    of = estimate(one, between, how)
    assert of.gains is None
    assert of.averages is one.averages
    step = result(of, host(of.numbers), readout(one, how))
    assert (step.gain, step.squared_norm, math.isnan(step.sigma2)) == (2.5, 9.0, True)
    two = next_state(one, of.averages, step, 2.5, 2.5)
    assert (two.last.effective_steps, two.last.steps, two.since_sample) == (5.0, 2, 5.0)

    of = estimate(two, sample((2.0, 6.0)), how)
    theta, before = math.exp(-5.0 / 2), 1 - math.exp(-1.0 / 2)
    weight = theta * before + 1 - theta
    numbers = host(of.numbers)
    step = result(of, numbers, averaged(numbers))
    assert step.group_sigma2 == pytest.approx(
        [(theta * before * 8 + (1 - theta) * 2) / weight], rel=1e-14
    )
    assert step.group_mu2 == pytest.approx(
        [(theta * before * 2 + (1 - theta) * 6) / weight], rel=1e-14
    )
    (sigma2,), (mu2,) = step.group_sigma2, step.group_mu2
    assert step.gain == pytest.approx((sigma2 + mu2) / (sigma2 / 4 + mu2), rel=1e-14)


def test_a_step_that_is_not_finite_leaves_averages_and_clock() -> None:
    how = averaging(window=2.0)
    state = next_state(
        AdaScaleState.empty(1, how),
        AdaScaleState.empty(1, how).averages,
        StepResult(gain=2.0),
        2.0,
        2.0,
    )
    bad = sample((math.inf, 2.0))
    of = estimate(state, bad, how)
    assert not of.finite
    assert torch.equal(of.averages.packed, state.averages.packed)
    numbers = host(of.numbers)
    assert result(of, numbers, averaged(numbers)).skipped
    left = skipped(state, {"loss": 3.0})
    assert (
        left.last.skipped,
        left.last.shared,
        left.last.effective_steps,
        left.last.steps,
    ) == (
        True,
        {"loss": 3.0},
        2.0,
        1,
    )
    assert (left.since_sample, left.averages) == (state.since_sample, state.averages)


def test_the_rule_is_asked_for_each_group_with_its_gain() -> None:
    output = apply_rule(
        AdaScaleRule(),
        RuleInput(gain=3.0, scale=4.0, effective_steps=0.0),
        [2.0, 4.0],
        [False, False],
    )
    assert (output.lr_factors, output.group_increments) == ((2.0, 4.0), (2.0, 4.0))
    assert (output.lr_factor, output.increment) == (3.0, 3.0)


def test_a_group_that_normalizes_has_the_root_of_the_gain_on_the_same_clock() -> None:
    output = apply_rule(
        AdaScaleMemoryRule(),
        RuleInput(gain=9.0, scale=16.0, effective_steps=0.0),
        [9.0],
        [False, True],
    )
    assert (output.lr_factors, output.group_increments) == ((9.0, 3.0), (9.0, 9.0))
    assert output.increment == 9.0


@pytest.mark.parametrize(
    ("factors", "increments", "is_base"),
    [
        ([1.0], [1.0], True),
        ([1.0, 0.0], [1.0, 1.0], True),  # a factor of 0 changes no weight
        ([1.0, 1.0], [1.0, 2.0], False),
        ([2.0], [1.0], False),
        ([1.0], [2.0], False),
    ],
)
def test_a_base_step_leaves_betas(
    factors: list[float], increments: list[float], is_base: bool
) -> None:
    output = RuleOutput(factors, increments, factors[0], increments[0])
    assert output.is_base_step == is_base
