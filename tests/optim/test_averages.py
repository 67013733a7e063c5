"""How averages move and what they say, with hand-worked numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from ray_adascale.batch import StepPlan
from ray_adascale.optim.averages import Averages
from ray_adascale.optim.sampling import MeasuredSteps
from ray_adascale.optim.step_result import StepResult
from ray_adascale.optim.step_sums import StepSums

SCALE = 4.0


def averages(*, groups: int = 1, **settings: Any) -> Averages:
    fields = {
        "smoothing": 0.75,
        "variance_floor": 0.0,
        "clip_samples": False,
        "debias": True,
        "sampling": MeasuredSteps(),
    }
    return Averages(groups, **(fields | settings))  # type: ignore[arg-type]


def sample(*moments: tuple[float, float], shape: StepPlan | None = None, seen: bool = True) -> StepSums:
    """Return the sums of a step with σ² and μ² of each group: C = μ² + σ²/S, A = C + (n − 1)·σ²/S."""
    step = StepPlan(passes=2, given_scale=SCALE) if shape is None else shape
    c = torch.tensor([m + v / step.scale for v, m in moments], dtype=torch.float64)
    a = c + torch.tensor([(step.num_samples - 1) * v / step.scale for v, _ in moments], dtype=torch.float64)
    complete = torch.full((1,), float(seen), dtype=torch.float64)
    return StepSums(step, {"c": c * step.multiple_of_mean**2, "a": a, "complete": complete}, None, True, seen)


def take(into: Averages, *samples: StepSums, previous_gain: float = 1.0) -> None:
    for one in samples:
        into.now = into.updated_by(one, previous_gain)[0]


def readout(of: Averages, scale: float = SCALE) -> StepResult:
    return of.evaluate(of.now, scale)


def test_total_moments_clip_each_group_and_then_sum() -> None:
    read = StepResult(group_sigma2=[-1.0, 2.0, 3.0], group_mu2=[4.0, -2.0, 1.0])
    assert read.total_moments() == (5.0, 5.0)
    added = StepResult(group_sigma2=[2.0, math.nan], group_mu2=[4.0, math.nan])  # no sample of the second yet
    assert added.total_moments() == (2.0, 4.0)
    assert all(math.isnan(x) for x in StepResult(group_sigma2=[math.nan], group_mu2=[math.nan]).total_moments())


def test_a_gain_that_comes_later_starts_without_a_sample() -> None:
    mine = averages()
    take(mine, sample((8.0, 2.0)))
    mine.add_gain(StepPlan(passes=2))
    known = readout(mine)
    assert known.group_sigma2[0] == 8.0
    assert math.isnan(known.group_sigma2[1])
    assert known.group_gains == [2.5, 1.0]  # (8 + 2) / (8/4 + 2)
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
    mine.add_gain(StepPlan(passes=2))
    take(mine, sample((8.0, 2.0), (12.0, 6.0)))
    known = readout(mine)
    # 1/(1 − 0.75) = 4: the third sample is in a plain mean of three, the fourth and fifth have the weight 1/4. All in binary
    # but 1/3, which costs an ulp or two.
    assert (known.group_sigma2[1], known.group_mu2[1]) == pytest.approx((sigma2, mu2), rel=1e-15)
