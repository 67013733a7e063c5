"""Savings of an adaptive batch: the fixed batch that takes as many steps, measured or forecast, and the examples it needs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from ..recipe import Recipe
from ..replay import Forecaster
from .runs import RunTrace

LARGEST = 4096
"""Largest fixed scale of the comparison."""

_WIDEST = 4.0
"""Largest ratio of two measured scales between which steps are interpolated."""


@dataclass(frozen=True)
class FixedScale:
    """The scale at which a fixed batch takes a given number of steps.

    Attributes:
        scale: The expected scale.
        low: Lower end of the scale's interval.
        high: Upper end; infinite where no scale below ``LARGEST`` takes as few steps.
        measured: Whether the scale was interpolated between runs. If not, it was forecast from a recipe's noise.
    """

    scale: float
    low: float
    high: float
    measured: bool


@dataclass(frozen=True)
class Savings:
    """The examples of a run with an adaptive batch, compared with a fixed batch that takes as many steps.

    Attributes:
        steps: Optimizer steps of the run.
        examples: Examples of the run.
        base_batch_size: B0.
        fixed: The scale of the fixed batch.
    """

    steps: int
    examples: int
    base_batch_size: int
    fixed: FixedScale

    def examples_at(self, scale: float) -> float:
        """Return the examples of as many steps at a fixed scale."""
        return scale * self.base_batch_size * self.steps

    def share_at(self, scale: float) -> float:
        """Return the saved share of the examples at a fixed scale; negative where the run needed more."""
        return 1 - self.examples / self.examples_at(scale)

    def in_words(self) -> str:
        """Return the saved share, with its interval where the fixed scale is a forecast: "12%, from −3 to 25%"."""
        text = f"{self.share_at(self.fixed.scale):.0%}"
        if self.fixed.measured:
            return text
        return f"{text}, from {self.share_at(self.fixed.low):.0%} to {self.share_at(self.fixed.high):.0%}"


def fixed_scale_measured(runs: Iterable[RunTrace], recipe: Recipe, steps: int) -> FixedScale | None:
    """Return the fixed scale with as many steps by measured runs, log-linear between the two next scales.

    The base run counts: S = 1 takes T steps. Scales more than a factor of 4 apart are not interpolated.

    Args:
        runs: Finished runs of the recipe, each at one scale throughout.
        recipe: Their recipe.
        steps: Optimizer steps of the run that is compared.

    Returns:
        The scale; None where the runs do not enclose ``steps``.
    """
    taken: dict[float, list[int]] = {1.0: [recipe.total_steps]}
    for run in runs:
        if run.last["scale"] > 1:
            taken.setdefault(float(run.last["scale"]), []).append(run.last["optimizer_steps"])
    means = sorted((scale, sum(counts) / len(counts)) for scale, counts in taken.items())
    for (small, most), (large, fewest) in itertools.pairwise(means):
        if fewest <= steps <= most and fewest < most and large <= _WIDEST * small:
            part = math.log(most / steps) / math.log(most / fewest)
            scale = small * (large / small) ** part
            return FixedScale(scale, scale, scale, measured=True)
    return None


def fixed_scale_forecast(forecaster: Forecaster, steps: int) -> FixedScale | None:
    """Return the fixed scale with as many steps by the forecast; None where no scale below ``LARGEST`` takes as few."""
    scale = _solve(lambda at: forecaster.at(at).expected.exact_steps, steps)
    if scale is None:
        return None
    low = _solve(lambda at: forecaster.at(at).low, steps)
    high = _solve(lambda at: forecaster.at(at).high, steps)
    return FixedScale(
        scale, scale if low is None else min(low, scale), math.inf if high is None else max(high, scale), measured=False
    )


def _solve(steps_at: Callable[[float], float], steps: int) -> float | None:
    """Return the scale at which a falling function of the scale has this value, to 0.5 %; None if it is above ``LARGEST``."""
    low, high = 1.0, float(LARGEST)
    if steps_at(high) > steps:
        return None
    while high > 1.005 * low:
        middle = math.sqrt(low * high)
        if steps_at(middle) > steps:
            low = middle
        else:
            high = middle
    return math.sqrt(low * high)
