"""How much of a run is left: the forecast's remainder, corrected by the gains that the run itself has had."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..batch_policy import BatchPolicy
from ..optim.rules import AdaScaleRule, ScalingRule, make_rule, metric_of
from ..recipe import Recipe
from ..replay import Forecaster, Replay
from .step import Listener, Step

__all__ = ["LEFT", "UNKNOWN", "Eta", "EtaTracker", "RemainingSteps", "clock_time", "forecast_remaining_steps"]

CORRECT_FROM = 0.2
"""The share of the run from which its own gains correct the forecast; those before say little of the rest."""
TRUST = 0.5
"""How much of the difference that was seen is believed of the next steps."""
FADE = 0.25
"""Within this share of the run what is believed of it falls to 1/e."""

_BINS = 200  # in which a run's gains are gathered, and on whose borders the remainder is computed anew
_WIDEST = 1e3  # the ratio μ²/σ² is taken between this and its inverse: at r = 1 and r = S it has no bounds


@dataclass(frozen=True)
class Eta:
    """What is left of a run.

    Attributes:
        steps: Optimizer steps, not rounded; ∞ where nothing is known.
        seconds: Of the clock; ∞ where nothing is known.
        rough: Whether there was nothing to forecast from, so that the mean gain so far is taken for that of the rest.
    """

    steps: float
    seconds: float
    rough: bool

    def __str__(self) -> str:
        """As "1:05 left"; "~1:05 left" where it is rough, "? left" where it is not known."""
        return f"{'~' if self.rough and math.isfinite(self.seconds) else ''}{clock_time(self.seconds)} left"

    def as_metrics(self) -> dict[str, Any]:
        """What is told beside a step's metrics."""
        return {"steps_left": self.steps, "seconds_left": self.seconds, "left_is_rough": self.rough}

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, Any]) -> Eta:
        """What :meth:`as_metrics` told."""
        steps, seconds = metrics.get("steps_left", math.inf), metrics.get("seconds_left", math.inf)
        return cls(steps, seconds, bool(metrics.get("left_is_rough", True)))


UNKNOWN = Eta(math.inf, math.inf, True)

LEFT = tuple(UNKNOWN.as_metrics())
"""The keys of what is told of the time left."""


def clock_time(seconds: float) -> str:
    """h:mm:ss, without the hours where there are none; "?" for what never ends."""
    if not math.isfinite(seconds):
        return "?"
    minutes, seconds = divmod(max(round(seconds), 0), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{seconds:02d}" if hours else f"{minutes}:{seconds:02d}"


class RemainingSteps:
    """The optimizer steps left of a run at one scale, from a recipe's noise.

    The forecast's gains r(τ) give q = (1 − r/S)/(r − 1), what μ²/σ² it expects. From a fifth of the run on, the mean log-ratio c
    of the run's own q to it, over the last half of τ, corrects what is to come: q·exp(½·c·e^(−Δτ/(¼·T))), Δτ steps ahead.

    Args:
        forecast: The replay at this scale.
        scale: S > 1; not looked at where the run's gains don't correct the forecast.
        corrects: Whether the run's gains are those that its clock moves by, so that they correct the forecast.
    """

    def __init__(self, forecast: Replay, scale: float, *, corrects: bool = True) -> None:
        self._scale = scale
        self._corrects = corrects
        self._total = forecast.total_steps
        # τ at which each of the forecast's strides begins, and the end's.
        self._tau = np.array([*forecast.tau, forecast.effective_steps])
        self._ratio = np.array([_noise_ratio(r, scale) for r in forecast.gains]) if corrects else np.array([])
        self._rate = forecast.stride / np.diff(self._tau)  # optimizer steps an effective one
        self._log = np.zeros(_BINS)
        self._weight = np.zeros(_BINS)
        self._bin = -1
        self._left = self._remainder(0.0, 0.0)
        self.correction = 0.0
        """½·c: what is believed just now; above zero the gains are lower than forecast."""

    def observe(self, tau_before: float, tau: float, gain: float) -> None:
        """The run has taken a step of this gain, which moved τ from there to there."""
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
        """Optimizer steps from τ on."""
        return float(np.interp(tau, self._tau, self._left)) if tau < self._total else 0.0

    def _remainder(self, tau: float, correction: float) -> np.ndarray:
        """Optimizer steps from the beginning of each of the forecast's strides, and from its end, to T: ∫ dτ / r."""
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
    """μ²/σ², by which the gain is what it is."""
    above, below = 1 - gain / scale, gain - 1
    if below <= above / _WIDEST:
        return _WIDEST
    return max(above / below, 1 / _WIDEST)


class EtaTracker(Listener):
    """Estimates what is left of the run after each step, from the forecast and the pace of this start.

    Args:
        remaining: The forecast of the remaining steps; None where there is none.

    Attributes:
        remaining: As given.
        eta: What is left after the last step.
    """

    _FIRST = 3
    """Steps that are left out of the pace, because the first steps are slow."""

    def __init__(self, remaining: RemainingSteps | None) -> None:
        self.remaining = remaining
        self.eta = UNKNOWN
        self._timed = 0
        self._since = time.monotonic()

    def after_step(self, step: Step) -> None:
        """Update :attr:`eta`; add the remaining steps to the trace's row where there is a forecast."""
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
        self.eta = Eta(left, left * self.seconds_per_step if left else 0.0, rough)

    @property
    def seconds_per_step(self) -> float:
        """Seconds of an optimizer step of this start, with everything between steps; inf before the first step."""
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
    following: tuple[BatchPolicy, int] | None = None,
) -> RemainingSteps | None:
    """The steps left by the forecast; None where there is nothing to forecast from: no recipe, or one without noise.

    Args:
        recipe: Its noise, of all seeds.
        rows: The trace so far. Its rows at this scale correct the forecast, as if they were seen now.
        scale: S.
        rule: As in :class:`ray_adascale.AdaScaleConfig`.
        averaging_window: As there.
        following: Batch policy and workers of a run that chooses its scale. Its gains don't correct the forecast: where they are
            others than forecast, so is the scale.
    """
    made = make_rule(rule)
    if recipe is None or not recipe.noise or metric_of(made) != "euclidean":
        return None
    if following is not None:
        policy, workers = following
        if policy.target_efficiency == "goodput" and policy.throughput is None:
            return None  # what it will choose depends on seconds that are not measured yet
        forecaster = Forecaster(recipe, rule=made, averaging_window=averaging_window)
        return RemainingSteps(forecaster.following(policy, workers).expected, 1.0, corrects=False)
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
