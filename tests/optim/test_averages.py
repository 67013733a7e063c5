"""How averages move and what they say, with hand-worked numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ray_adascale.optim.averages import Averages, CountDecay, NoiseReadout
from ray_adascale.optim.step_shape import StepShape
from ray_adascale.optim.step_sums import StepSums

SCALE = 4.0


def averages(*, groups: int = 1, **settings: Any) -> Averages:
    fields = {
        "smoothing": 0.75,
        "variance_floor": 0.0,
        "clip_samples": False,
        "debias": True,
        "window": None,
        "total_steps": None,
    }
    return Averages(groups, **(fields | settings))  # type: ignore[arg-type]


def sample(*moments: tuple[float, float], shape: StepShape | None = None, seen: bool = True) -> StepSums:
    """Return the sums of a step with σ² and μ² of each group: C = μ² + σ²/S, A = C + (n − 1)·σ²/S."""
    step = StepShape(2, scale=SCALE) if shape is None else shape
    c = torch.tensor([m + v / step.scale for v, m in moments], dtype=torch.float64)
    a = c + torch.tensor([(step.num_samples - 1) * v / step.scale for v, _ in moments], dtype=torch.float64)
    complete = torch.full((1,), float(seen), dtype=torch.float64)
    return StepSums(step, {"c": c * step.multiple_of_mean**2, "a": a, "complete": complete}, None, None, True, seen)


def take(into: Averages, *samples: StepSums, previous_gain: float = 1.0) -> None:
    for one in samples:
        into.now = into.after(one, previous_gain).averages


def readout(of: Averages, scale: float = SCALE) -> NoiseReadout:
    return of.evaluate(of.now, scale)


def test_the_gain_is_that_of_the_debiased_averages() -> None:
    mine = averages()
    assert readout(mine).gain == 1.0  # before the first sample
    take(mine, sample((8.0, 2.0)), sample((4.0, 2.0)))
    known = readout(mine)
    # Weights 0.75·0.25 and 0.25 of 0.4375: σ² = (0.1875·8 + 0.25·4) / 0.4375, μ² = 2
    sigma2 = 2.5 / 0.4375
    assert known.sigma2 == pytest.approx([sigma2], rel=1e-15)
    assert known.mu2 == [2.0]
    assert known.gain == known.gains[0] == pytest.approx((sigma2 + 2) / (sigma2 / 4 + 2), rel=1e-15)


def test_over_effective_time_the_past_weighs_less_after_a_large_gain() -> None:
    for previous_gain in (1.0, 4.0):
        mine = averages(window=0.1, total_steps=20.0)
        take(mine, sample((1.0, 1.0)), sample((3.0, 1.0)), previous_gain=previous_gain)
        theta = math.exp(-previous_gain / 2)
        assert readout(mine).sigma2 == pytest.approx([(theta + 3) / (theta + 1)], rel=1e-14)


@pytest.mark.parametrize(("clip_samples", "sigma2"), [(False, 1.0), (True, 1.5)])
def test_negative_samples_count_as_they_are_unless_each_is_clipped(clip_samples: bool, sigma2: float) -> None:
    mine = averages(clip_samples=clip_samples, debias=False, smoothing=0.999)  # so far the plain mean
    take(mine, sample((-1.0, 1.0)), sample((3.0, 1.0)))
    assert readout(mine).sigma2 == pytest.approx([sigma2], rel=1e-15)


def test_total_moments_clip_each_group_and_then_sum() -> None:
    read = NoiseReadout([1.0] * 3, 1.0, sigma2=[-1.0, 2.0, 3.0], mu2=[4.0, -2.0, 1.0])
    assert read.total_moments() == (5.0, 5.0)
    added = NoiseReadout([2.0, 1.0], 2.0, sigma2=[2.0, math.nan], mu2=[4.0, math.nan])  # no sample of the second yet
    assert added.total_moments() == (2.0, 4.0)
    assert all(math.isnan(x) for x in NoiseReadout([1.0], 1.0, [math.nan], [math.nan]).total_moments())


@pytest.mark.parametrize("bad", [sample((math.inf, 5.0)), sample((math.nan, 5.0)), sample((2.0, 5.0), seen=False)])
def test_a_sample_that_says_nothing_moves_nothing(bad: StepSums) -> None:
    mine = averages()
    take(mine, sample((8.0, 2.0)))
    before = readout(mine)
    take(mine, bad)
    assert readout(mine) == before


def test_a_step_is_averaged_only_when_it_is_kept() -> None:
    mine = averages()
    step = mine.after(sample((8.0, 2.0)), 1.0)
    assert float(mine.now.weight) == 0.0
    mine.now = step.averages
    result, read = step.read(step.numbers.tolist())
    assert (result.skipped, result.sigma2, result.mu2, result.gain) == (False, 8.0, 2.0, 2.5)
    assert read == readout(mine)


def test_a_readout_is_kept_for_its_averages_and_scale() -> None:
    mine = averages()
    take(mine, sample((8.0, 2.0)))
    assert mine.cached(mine.now, SCALE) is None
    found = readout(mine)
    assert mine.cached(mine.now, SCALE) is found
    assert mine.cached(mine.now, 8.0) is None
    assert readout(mine, 8.0).gain == pytest.approx((8 + 2) / (8 / 8 + 2))


@pytest.mark.parametrize(("clip_samples", "gain"), [(True, (6 + 2) / (6 / 4 + 2)), (False, (5 + 2) / (5 / 4 + 2))])
def test_the_floor_is_of_each_sample_or_of_the_averages(clip_samples: bool, gain: float) -> None:
    mine = averages(variance_floor=4.0, clip_samples=clip_samples, smoothing=0.999, debias=False)
    take(mine, sample((2.0, 2.0)), sample((8.0, 2.0)))
    assert readout(mine).gain == pytest.approx(gain, rel=1e-15)


def test_theta_may_depend_on_the_shape_of_the_step() -> None:
    asked = []

    def smoothing(shape: StepShape) -> float:
        asked.append(shape)
        return 0.5 if shape.passes == 2 else 0.9

    mine = averages(smoothing=smoothing)
    long, short = StepShape(3, scale=6.0), StepShape(2, scale=4.0)
    take(mine, sample((1.0, 1.0), shape=long), sample((3.0, 1.0), shape=short))
    assert asked == [long, short]
    # Weights 0.1·0.5 and 0.5.
    assert readout(mine).sigma2 == pytest.approx([(0.05 * 1 + 0.5 * 3) / 0.55], rel=1e-15)


def test_fairscales_theta_is_of_a_full_step_of_all_workers() -> None:
    theta = CountDecay(3)
    assert theta(StepShape(3, workers=2)) == theta(StepShape(1, workers=2)) == 1 - 6 / 1000
    assert CountDecay(600)(StepShape(600, workers=2)) == 0.0


def test_a_gain_that_comes_later_starts_without_a_sample() -> None:
    mine = averages()
    take(mine, sample((8.0, 2.0)))
    mine.add_gain(StepShape(2))
    known = readout(mine)
    assert known.sigma2[0] == 8.0
    assert math.isnan(known.sigma2[1])
    assert known.gains == [2.5, 1.0]  # (8 + 2) / (8/4 + 2)
    assert known.gain == 2.5
    take(mine, sample((8.0, 2.0), (4.0, 6.0)))
    # The weights of the two groups differ, and the whole has the sum of their averages.
    assert readout(mine).gain == pytest.approx((8 + 2 + 4 + 6) / (12 / 4 + 8), rel=1e-15)
    with pytest.raises(ValueError, match="of 1 gains, this optimizer has 2"):
        mine.load(averages().state())


@pytest.mark.parametrize(
    ("before", "sigma2", "mu2"), [(2, 12 / 3, 6 / 3), (3, 12 / 4, (3 + 6) / 4), (4, 12 / 4, (3 + 6) / 4)]
)
def test_without_debiasing_a_later_gain_begins_at_one_if_its_first_sample_is_averaged_with_theta(
    before: int, sigma2: float, mu2: float
) -> None:
    mine = averages(debias=False)
    take(mine, *(sample((8.0, 2.0)) for _ in range(before)))
    mine.add_gain(StepShape(2))
    take(mine, sample((8.0, 2.0), (12.0, 6.0)))
    known = readout(mine)
    # 1/(1 − 0.75) = 4: the third sample is in a plain mean of three, the fourth and fifth have the weight 1/4. All in binary
    # but 1/3, which costs an ulp or two.
    assert (known.sigma2[1], known.mu2[1]) == pytest.approx((sigma2, mu2), rel=1e-15)
