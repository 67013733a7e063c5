"""Steps and time left of a run: those of the forecast, corrected by the gains of the run."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ...batch import BatchSettings
from ...forecast.replay import Forecaster, Replay
from ...optim.rules import AdaScaleRule, ScalingRule, make_rule, metric_of
from ...recipe import Recipe
from .step import Listener, Step

CORRECT_FROM = 0.2
"""Share of the run from which its own gains correct the forecast. Earlier gains predict little of the rest."""
TRUST = 0.5
"""Share of the observed difference that is expected of the next steps."""
FADE = 0.25
"""Share of the run in which the expected difference falls to 1/e."""

_BINS = 200  # of τ, in which gains are collected; the remainder is computed anew at the beginning of each
_WIDEST = 1e3  # bound of μ²/σ² and of its inverse: as r nears 1 or S the ratio has no bound


@dataclass(frozen=True)
class Eta:
    """Steps and time left of a run.

    Attributes:
        steps: Optimizer steps left, not rounded; ∞ if unknown.
        seconds: Seconds left; ∞ if unknown.
        rough: Whether the estimate has no forecast, and assumes that the mean gain so far stays.
    """

    steps: float
    seconds: float
    rough: bool

    def __str__(self) -> str:
        """Return "1:05 left"; "~1:05 left" for a rough estimate; "? left" if unknown."""
        return f"{'~' if self.rough and math.isfinite(self.seconds) else ''}{clock_time(self.seconds)} left"

    def as_metrics(self) -> dict[str, Any]:
        """Return the estimate as metrics under the keys :data:`LEFT`."""
        return {"steps_left": self.steps, "seconds_left": self.seconds, "left_is_rough": self.rough}

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, Any]) -> Eta:
        """Return the estimate from the metrics of :meth:`as_metrics`."""
        steps, seconds = metrics.get("steps_left", math.inf), metrics.get("seconds_left", math.inf)
        return cls(steps, seconds, bool(metrics.get("left_is_rough", True)))


UNKNOWN = Eta(math.inf, math.inf, True)

LEFT = tuple(UNKNOWN.as_metrics())
"""The keys of :meth:`Eta.as_metrics`."""


def clock_time(seconds: float) -> str:
    """Return h:mm:ss; m:ss below one hour; "?" for ∞."""
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class RemainingSteps:
    """The optimizer steps left of a run at one scale, from a recipe's noise.

    The forecast's gains r(τ) give its ratio μ²/σ² = q = (1 − r/S)/(r − 1). From a fifth of the run on, c is the mean log-ratio of
    the run's own q to the forecast's, over the last half of τ. It corrects the forecast Δτ steps ahead: q·exp(½·c·e^(−Δτ/(¼·T))).

    Args:
        forecast: The replay at this scale.
        scale: S > 1; unused if the run's gains don't correct the forecast.
        corrects: Whether the run's gains correct the forecast. They must be those that advance τ.
    """

    def __init__(self, forecast: Replay, scale: float, *, corrects: bool = True) -> None:
        self._scale = scale
        self._corrects = corrects
        self._total = forecast.total_steps
        # τ at the beginning of each stride of the forecast, and at its end
        self._tau = np.array([*forecast.tau, forecast.effective_steps])
        self._ratio = np.array([_noise_ratio(r, scale) for r in forecast.gains]) if corrects else np.array([])
        self._rate = forecast.stride / np.diff(self._tau)  # optimizer steps per effective step
        self._log = np.zeros(_BINS)
        self._weight = np.zeros(_BINS)
        self._bin = -1
        self._left = self._remainder(0.0, 0.0)
        self.correction = 0.0
        """½·c, the present correction. It is positive if gains are lower than forecast."""

    def observe(self, tau_before: float, tau: float, gain: float) -> None:
        """Add an optimizer step of the run: its gain, and τ before and after it."""
        if not self._corrects or not tau > tau_before:
            return
        i = min(int(tau_before / self._total * _BINS), _BINS - 1)
        expected = self._ratio[max(int(np.searchsorted(self._tau[:-1], tau_before, side="right")) - 1, 0)]
        self._log[i] += math.log(_noise_ratio(gain, self._scale) / expected) * (tau - tau_before)
        self._weight[i] += tau - tau_before
        now = min(int(tau / self._total * _BINS), _BINS - 1)
        if now != self._bin and tau >= CORRECT_FROM * self._total:
            self._bin = now
            half = slice(now // 2, now + 1)
            weight = self._weight[half].sum()
            self.correction = TRUST * float(self._log[half].sum() / weight) if weight > 0 else 0.0
            self._left = self._remainder(tau, self.correction)

    def at(self, tau: float) -> float:
        """Return the optimizer steps left at τ."""
        return float(np.interp(tau, self._tau, self._left)) if tau < self._total else 0.0

    def _remainder(self, tau: float, correction: float) -> np.ndarray:
        """Return the optimizer steps left at the beginning of each stride of the forecast, and at its end: ∫ dτ / r up to T."""
        rate = self._rate
        if correction:
            ratio = self._ratio * np.exp(
                correction * np.exp(-(self._tau[:-1] - tau).clip(min=0) / (FADE * self._total))
            )
            gain = (1 + ratio) / (1 / self._scale + ratio)
            rate = 1 / gain
        ends = np.minimum(self._tau[1:], self._total)
        steps = rate * (ends - self._tau[:-1]).clip(min=0)
        return np.append(np.cumsum(steps[::-1])[::-1], 0.0)


def _noise_ratio(gain: float, scale: float) -> float:
    """Return the ratio μ²/σ² at which the gain has this value, within its bounds."""
    above, below = 1 - gain / scale, gain - 1
    if below <= above / _WIDEST:
        return _WIDEST
    return max(above / below, 1 / _WIDEST)


class EtaTracker(Listener):
    """Estimates the steps and the time left after each step, from the forecast and the pace of this start.

    Args:
        remaining: The forecast of the remaining steps; None without a forecast.

    Attributes:
        remaining: As given.
        eta: The estimate after the last step.
    """

    _FIRST = 3
    """Steps that don't count in the pace, because the first steps are slow."""

    def __init__(self, remaining: RemainingSteps | None) -> None:
        self.remaining = remaining
        self.eta = UNKNOWN
        self._timed = 0
        self._since = time.monotonic()

    def after_step(self, step: Step) -> None:
        """Update :attr:`eta`, unknown after a skipped step. With a forecast, add the remaining steps to the trace's row."""
        left = max(step.total_steps - step.tau, 0.0)
        rough = False
        if self.remaining is not None:
            self.remaining.observe(step.tau_before, step.tau, step.gain)
            left = self.remaining.at(step.tau)
            step.row["steps_left"] = round(left, 1)
        elif step.plan.scale > 1:
            rough = True
            left = left * step.metrics["optimizer_steps"] / step.tau if step.tau > 0 else math.inf
        self._timed += 1
        if self._timed == self._FIRST:
            self._since = time.monotonic()
        self.eta = UNKNOWN if step.skipped else Eta(left, left * self.seconds_per_step if left else 0.0, rough)

    @property
    def seconds_per_step(self) -> float:
        """Seconds per optimizer step of this start, with all work between steps; ∞ while unknown."""
        elapsed = time.monotonic() - self._since
        if self._timed > self._FIRST:
            return elapsed / (self._timed - self._FIRST)
        return elapsed / self._timed if 0 < self._timed < self._FIRST else math.inf


def forecast_remaining_steps(
    recipe: Recipe | None,
    rows: Iterable[Mapping[str, Any]],
    *,
    scale: float,
    rule: str | ScalingRule,
    averaging_window: float,
    following: tuple[BatchSettings, int] | None = None,
) -> RemainingSteps | None:
    """Return the forecast of the remaining steps; None without a recipe that has noise.

    Args:
        recipe: The recipe. The noise of all its seeds counts.
        rows: The rows of the trace so far. Those at this scale correct the forecast.
        scale: S.
        rule: The scaling rule, as in :class:`ray_adascale.AdaScaleConfig`.
        averaging_window: The window of the averages, as in :class:`ray_adascale.AdaScaleConfig`.
        following: Settings and workers of a run that changes its batch; else None. Gains of such a run don't correct the
            forecast, because other gains than forecast lead to another scale.
    """
    made = make_rule(rule)
    if recipe is None or not recipe.noise or metric_of(made) != "euclidean":
        return None
    if following is not None:
        forecaster = Forecaster(recipe, rule=made, averaging_window=averaging_window)
        return RemainingSteps(forecaster.following(*following).expected, 1.0, corrects=False)
    if scale <= 1:
        return None
    forecast = Forecaster(recipe, rule=made, averaging_window=averaging_window).at(scale).expected
    left = RemainingSteps(forecast, scale, corrects=isinstance(made, AdaScaleRule))
    before = 0.0
    for row in rows:
        tau, gain = row.get("effective_steps"), row.get("gain")
        if isinstance(tau, int | float) and isinstance(gain, int | float) and math.isfinite(tau + gain):
            if row.get("scale") == scale:
                left.observe(before, float(tau), float(gain))
            before = float(tau)
    return left
