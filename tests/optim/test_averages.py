"""How averages move and what they say, with hand-worked numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ray_adascale.optim.averages import Averages
from ray_adascale.optim.gradient_statistics import Sample


class StandIn(SimpleNamespace):
    """Of a sampler whose steps all have the passes that were declared."""

    @property
    def usual_samples(self) -> int:
        return self.num_samples


def averages(*, groups: int = 1, num_samples: int = 2, scale: float = 4.0, **settings: Any) -> tuple[Averages, Any]:
    """Averages, and the stand-in for their sampler."""
    sampler = StandIn(
        num_gains=groups, num_samples=num_samples, scale=scale, world_size=num_samples, open_ended=None, device="cpu"
    )
    fields = {"variance_floor": 0.0, "clip_samples": False, "debias": True, "window": None, "total_steps": None}
    made = Averages(sampler, **(fields | settings))  # type: ignore[arg-type]
    made.smoothing = 0.75
    return made, sampler


def sample(sigma2: float, mu2: float, *, usable: bool = True, finite: bool = True) -> Sample:
    moments = torch.tensor([[sigma2], [mu2]], dtype=torch.float64)
    return Sample(moments, torch.tensor(usable), torch.tensor(finite), None)


def take(into: Averages, *samples: Sample, previous_gain: float = 1.0) -> None:
    for one in samples:
        into.keep(into.with_sample(one, previous_gain))


def test_the_gain_is_that_of_the_debiased_averages() -> None:
    mine, _ = averages()
    assert mine.know(mine.now).gain == 1.0  # before the first sample
    take(mine, sample(8.0, 2.0), sample(4.0, 2.0))
    known = mine.know(mine.now)
    # Weights 0.75·0.25 and 0.25 of 0.4375: σ² = (0.1875·8 + 0.25·4) / 0.4375, μ² = 2
    sigma2 = 2.5 / 0.4375
    assert known.sigma2 == pytest.approx([sigma2], rel=1e-15)
    assert known.mu2 == [2.0]
    assert known.gain == known.gains[0] == pytest.approx((sigma2 + 2) / (sigma2 / 4 + 2), rel=1e-15)


def test_over_effective_time_the_past_weighs_less_after_a_large_gain() -> None:
    for previous_gain in (1.0, 4.0):
        mine, _ = averages(window=0.1, total_steps=20.0)
        take(mine, sample(1.0, 1.0), sample(3.0, 1.0), previous_gain=previous_gain)
        theta = math.exp(-previous_gain / 2)
        assert mine.know(mine.now).sigma2 == pytest.approx([(theta + 3) / (theta + 1)], rel=1e-14)


@pytest.mark.parametrize(("clip_samples", "sigma2"), [(False, 1.0), (True, 1.5)])
def test_negative_samples_count_as_they_are_unless_each_is_clipped(clip_samples: bool, sigma2: float) -> None:
    mine, _ = averages(clip_samples=clip_samples, debias=False)
    mine.smoothing = 0.999  # so far the plain mean
    take(mine, sample(-1.0, 1.0), sample(3.0, 1.0))
    assert mine.know(mine.now).sigma2 == pytest.approx([sigma2], rel=1e-15)


@pytest.mark.parametrize("bad", [{"usable": False}, {"finite": False}])
def test_a_sample_that_says_nothing_moves_nothing(bad: dict[str, bool]) -> None:
    mine, _ = averages()
    take(mine, sample(8.0, 2.0))
    before = mine.know(mine.now)
    take(mine, sample(math.nan, 5.0, **bad))
    assert mine.know(mine.now) == before


def test_a_sample_counts_once_and_only_when_it_is_kept() -> None:
    mine, _ = averages()
    one = sample(8.0, 2.0)
    assert mine.with_sample(one, 1.0) is mine.with_sample(one, 1.0)
    assert float(mine.now.weight) == 0.0


@pytest.mark.parametrize(("before", "after", "kept"), [(2, 4, True), (2, 1, False), (1, 1, True), (1, 2, False)])
def test_averages_of_the_other_estimator_are_left(before: int, after: int, kept: bool) -> None:
    mine, sampler = averages(num_samples=before)
    take(mine, sample(8.0, 2.0))
    state = mine.state()
    sampler.num_samples = after
    mine.follow_sampler()
    assert (float(mine.now.weight) > 0) == kept
    other, _ = averages(num_samples=after)
    other.load(state)
    assert (float(other.now.weight) > 0) == kept
    assert other.num_samples == after


def test_what_is_known_is_of_these_averages_at_this_scale() -> None:
    mine, sampler = averages()
    take(mine, sample(8.0, 2.0))
    assert mine.known(mine.now) is None
    known = mine.know(mine.now)
    assert mine.known(mine.now) is known
    sampler.scale = 8.0
    assert mine.known(mine.now) is None
    assert mine.know(mine.now).gain == pytest.approx((8 + 2) / (8 / 8 + 2))


def test_a_gain_that_comes_later_starts_without_a_sample() -> None:
    mine, sampler = averages()
    take(mine, sample(8.0, 2.0))
    sampler.num_gains = 2
    mine.add_gain()
    known = mine.know(mine.now)
    assert known.sigma2[0] == 8.0
    assert math.isnan(known.sigma2[1])
    assert known.gains == [(8 + 2) / (8 / 4 + 2), 1.0]
    with pytest.raises(ValueError, match="of 1 gains, this optimizer has 2"):
        mine.load(averages()[0].state())
