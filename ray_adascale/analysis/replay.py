"""The replay: a run at a larger scale, step by step, over the noise that the search saw at the base batch.

The noise goes through the loop's own arithmetic: the moving averages over effective time, clipping on reading, the rule's pair
(LR factor, clock increment). In the limit of no averaging the number of steps is ``N(S) = ∫ dτ / r(τ; S)``.

What the replay leaves out, on purpose: the sampling noise of a step's own σ² and μ². Runs of one batch cut into 2 and into
16 gradient samples differ by about 5 % in steps at most, because the averages reach over many of them (docs/forecast.md).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..gain import plain_effective_decay, plain_gain
from ..optim.rules import RuleInput, ScalingRule, make_rule
from ..recipe import NoiseProbe, Recipe

__all__ = ["NoiseCurve", "Replay", "limit_steps", "noise_curves", "replay"]

SHRINK = 0.25
"""Exponent of μ²'s dependence on the efficiency r/S; see :func:`replay`. Empirical: docs/forecast.md."""

_GRID = 400  # points of a smoothed curve at most: twenty within the width of what smooths it


@dataclass(frozen=True)
class NoiseCurve:
    """σ² and μ² over a base run, smoothed; linear between the points, constant beyond them.

    Attributes:
        tau: Effective steps, increasing.
        sigma2: Gradient variance of one base batch.
        mu2: Squared norm of the true gradient. May be negative where it is lost in the noise.
    """

    tau: np.ndarray
    sigma2: np.ndarray
    mu2: np.ndarray

    @classmethod
    def from_probes(cls, probes: Iterable[NoiseProbe], total_steps: float, *, window: float = 0.05) -> NoiseCurve:
        """Local lines through the raw probes, weighted by a Gaussian of ``window · T`` effective steps.

        Means, not medians: the loop's averages are means too, and single probes have long tails.

        Args:
            probes: Those of one run, or of several with the same schedule, which then count as one.
            total_steps: T.
            window: Width of the Gaussian (its σ) as a share of the run.

        Raises:
            ValueError: There are no probes.
        """
        rows = sorted((p.effective_steps, p.sigma2, p.mu2) for p in probes)
        if not rows:
            raise ValueError(
                "There are no noise probes to forecast from. Search again with probe_every at most total_steps, or record "
                "a base run with record_recipe."
            )
        points = np.array(rows, dtype=np.float64)
        tau = np.unique(points[:, 0])
        if len(tau) > _GRID:
            tau = np.linspace(tau[0], tau[-1], _GRID)
        smooth = np.array([_local_line(points, at, window * total_steps) for at in tau])
        return cls(tau, smooth[:, 0], smooth[:, 1])

    def at(self, tau: Any) -> tuple[Any, Any]:
        """``(σ², μ²)`` at τ, a number or an array of them."""
        return np.interp(tau, self.tau, self.sigma2), np.interp(tau, self.tau, self.mu2)


def _local_line(points: np.ndarray, at: float, width: float) -> np.ndarray:
    """The value at ``at`` of weighted least-squares lines through the columns after the first."""
    x = points[:, 0] - at
    weight = np.exp(-0.5 * (x / width) ** 2)
    s0, s1, s2 = weight.sum(), weight @ x, weight @ (x * x)
    determinant = s0 * s2 - s1 * s1
    if determinant <= 1e-9 * s0 * s2:  # one probe within reach: its value
        return weight @ points[:, 1:] / s0
    return (weight * (s2 - s1 * x)) @ points[:, 1:] / determinant


def noise_curves(recipe: Recipe) -> list[NoiseCurve]:
    """The noise of all the recipe's seeds pooled; then that of each alone, where there are several.

    Raises:
        ValueError: The recipe holds no noise.
    """
    seeds = [recipe.noise, *(repeat.noise for repeat in recipe.repeats if repeat.noise)]
    pooled = [probe for noise in seeds for probe in noise]
    alone = seeds if len(seeds) > 1 else []
    return [NoiseCurve.from_probes(noise, recipe.total_steps) for noise in (pooled, *alone)]


@dataclass(frozen=True)
class Replay:
    """A run as it was replayed.

    Attributes:
        steps: Optimizer steps until τ ≥ T.
        effective_steps: τ at the end.
        progress: Σ r over the steps: equal to τ under AdaScale's own rule.
        tau: τ before each step.
        gains: r of each step.
        total_steps: T.
    """

    steps: int
    effective_steps: float
    progress: float
    tau: tuple[float, ...]
    gains: tuple[float, ...]
    total_steps: float

    @property
    def exact_steps(self) -> float:
        """The steps until τ = T, of the last one the share that was needed; at least 1. It has no jumps where ``steps`` has."""
        last = self.effective_steps - self.tau[-1]
        return max(self.steps - (self.effective_steps - self.total_steps) / last, 1.0)

    @property
    def mean_gain(self) -> float:
        return self.progress / self.steps


def replay(
    curve: NoiseCurve,
    *,
    scale: float,
    count: int,
    total_steps: float,
    base_batch_size: float | None = None,
    rule: str | ScalingRule = "adascale",
    averaging_window: float = 0.05,
    shrink: float = SHRINK,
) -> Replay:
    """Take a run's steps over a noise curve, with the loop's arithmetic.

    Part of μ² at the base batch is the weights' trembling, kept up by the very noise that a larger batch has less of: there
    lr·r·σ²/S drives it, r/S of the base run's. How large that part is, the probes don't tell. So
    ``μ²(τ; S) = μ²(τ; 1) · (r/S)^shrink``: with ``shrink=0`` μ² is the same at every scale, and with 1 all of it trembles.
    σ² is per base batch, and stays.

    Args:
        curve: σ²(τ), μ²(τ) of the base run.
        scale: S ≥ 1.
        count: n, gradient samples a step. With one, the first step has no sample yet, and its gain is 1.
        total_steps: T.
        base_batch_size: B0, for rules that ask for it.
        rule: The rule, as in :class:`ray_adascale.AdaScaleConfig`.
        averaging_window: The averages' width as a share of the run, as there.
        shrink: The exponent above.

    Raises:
        ValueError: An argument is out of its range, or the rule's clock stands still.
    """
    if not scale >= 1:
        raise ValueError(f"Invalid {scale=}. Must be at least 1: the batch may not be smaller than the base batch.")
    if count < 1:
        raise ValueError(f"Invalid {count=}. Must be at least 1 gradient sample a step.")
    advance = copy.deepcopy(make_rule(rule))  # LEGW's remembers the scale it saw
    grid = [values.tolist() for values in curve.at(np.arange(math.ceil(total_steps)))]
    variance, square, weight = 0.0, 0.0, 0.0
    tau, progress, r, efficiency = 0.0, 0.0, 1.0, 1.0
    taus: list[float] = []
    gains: list[float] = []
    while tau < total_steps:
        if count > 1 or taus:
            # Raw samples averaged, debiased, clipped on reading: gain.Average in plain numbers.
            theta = plain_effective_decay(r, window=averaging_window, total_steps=total_steps)
            now = int(tau)
            variance = theta * variance + (1 - theta) * grid[0][now]
            square = theta * square + (1 - theta) * grid[1][now] * efficiency**shrink
            weight = theta * weight + (1 - theta)
            r = plain_gain(variance / weight, square / weight, scale)
        seen = RuleInput(
            gain=r,
            scale=scale,
            effective_steps=tau,
            total_steps=total_steps,
            base_batch_size=base_batch_size,
        )
        increment = advance(seen)[1]
        if not increment > 0:
            raise ValueError(f"Invalid rule: its clock increment is {increment!r} at effective step {tau:g}.")
        taus.append(tau)
        gains.append(r)
        tau, progress, efficiency = tau + increment, progress + r, r / scale
    return Replay(len(taus), tau, progress, tuple(taus), tuple(gains), total_steps)


def limit_steps(curve: NoiseCurve, *, scale: float, total_steps: float) -> float:
    """``N(S) = ∫ dτ / r(τ; S)``: AdaScale's steps without averaging, by the midpoint rule over base steps.

    It is a check on :func:`replay` with ``shrink=0``, whose averages lag behind and which can't end between two steps.
    """
    width = total_steps / max(1, math.ceil(total_steps))
    sigma2, mu2 = curve.at((np.arange(math.ceil(total_steps)) + 0.5) * width)
    return width * sum(1 / plain_gain(s, m, scale) for s, m in zip(sigma2.tolist(), mu2.tolist(), strict=True))
