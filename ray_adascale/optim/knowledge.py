"""What the host gets to know of a step: gains, averages and outcome as plain numbers, from one small tensor."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import gain as gain_math
from ..gain import Average

__all__ = ["Known", "LastStep", "numbers_of"]


@dataclass(frozen=True)
class Known:
    """What some averages say at a scale.

    Attributes:
        gains: r of each group.
        gain: r of the whole.
        sigma2: Averaged σ² of each group, unclipped; NaN before the first sample.
        mu2: Averaged μ², likewise.
    """

    averages: Average
    scale: float
    gains: list[float]
    gain: float
    sigma2: list[float]
    mu2: list[float]

    @classmethod
    def from_numbers(cls, averages: Average, scale: float, numbers: list[float]) -> Known:
        """From what :func:`numbers_of` returned for these averages, now on the host."""
        count = averages.total.shape[1]
        gains, (gain, *values) = numbers[:count], numbers[count:]
        return cls(averages, scale, gains, gain, values[:count], values[count:])

    def of(self, averages: Average, scale: float) -> bool:
        """Whether it is of just these averages, at this scale."""
        return self.averages is averages and self.scale == scale

    def total_moments(self) -> tuple[float, float]:
        """Averaged (σ², μ²), each group's clipped to non-negative, summed; NaN before the first sample."""
        if all(math.isnan(x) for x in self.sigma2):
            return math.nan, math.nan
        return sum(0.0 if x < 0 else x for x in self.sigma2), sum(0.0 if x < 0 else x for x in self.mu2)


@dataclass(frozen=True)
class LastStep:
    """What became of the last step; where it was skipped, the rest is of the one before."""

    skipped: bool = False
    lr_factor: float = 1.0
    sigma2: float = math.nan
    mu2: float = math.nan


def numbers_of(averages: Average, scale: float, variance_floor: float) -> Tensor:
    """r of each group, r of the whole, averaged σ² and μ² of each group; float64 ``[3 · groups + 1]``, on the device."""
    unknown = ~(averages.weight > 0)
    sigma2, mu2 = (averages.total / averages.weight.masked_fill(unknown, 1.0)).masked_fill(unknown, 0.0)
    each = gain_math.gain(sigma2, mu2, scale, variance_floor=variance_floor).masked_fill(unknown, 1.0)
    whole = each
    if len(each) > 1:
        whole = gain_math.gain(sigma2.sum(), mu2.sum(), scale, variance_floor=variance_floor)
        whole = whole.masked_fill(unknown.all(), 1.0).reshape(1)
    return torch.cat([each, whole, averages.value.reshape(-1)])
