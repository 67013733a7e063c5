"""Steps and time left of a run: by the forecast, or by the mean gain so far."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...config import AdaScaleConfig
from ...forecast.replay import Forecaster, PredictedRun
from ...optim.rules import make_rule, metric_of
from ...recipe import Recipe
from .step import Listener, Step


@dataclass(frozen=True)
class Eta:
    """Steps and time left of a run.

    Attributes:
        steps: Optimizer steps left, not rounded; ∞ if unknown.
        seconds: Seconds left; ∞ if unknown.
        rough: Whether the estimate has no forecast, and assumes that the mean gain so
            far stays.
    """

    steps: float
    seconds: float
    rough: bool

    def __str__(self) -> str:
        """Return "1:05 left"; "~1:05 left" for a rough estimate; "? left" if
        unknown.
        """
        return (
            f"{'~' if self.rough and math.isfinite(self.seconds) else ''}{clock_time(self.seconds)} "
            "left"
        )

    def as_metrics(self) -> dict[str, Any]:
        """Return the estimate as metrics under the keys :data:`LEFT`."""
        return {
            "steps_left": self.steps,
            "seconds_left": self.seconds,
            "left_is_rough": self.rough,
        }

    @classmethod
    def from_metrics(cls, metrics: Mapping[str, Any]) -> Eta:
        """Return the estimate from the metrics of :meth:`as_metrics`."""
        steps = metrics.get("steps_left", math.inf)
        seconds = metrics.get("seconds_left", math.inf)
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
    if hours:
        return f"{hours}:{minutes:02d}:{seconds:02d}"
    return f"{minutes}:{seconds:02d}"


def steps_left(
    forecast: PredictedRun | None,
    *,
    tau: float,
    total_steps: float,
    taken: int,
    scale: float,
) -> float:
    """Return the optimizer steps left at τ: the forecast's, or (T − τ)/r̄ without a
    forecast; ∞ if unknown.

    Args:
        forecast: The replay of the whole run, see :func:`forecast_run`.
        tau: τ.
        total_steps: T.
        taken: Optimizer steps so far.
        scale: S.
    """
    if forecast is not None:
        return forecast.steps_left(tau)
    left = max(total_steps - tau, 0.0)
    if scale > 1:
        return left * taken / tau if tau > 0 else math.inf
    return left


class EtaTracker(Listener):
    """Estimates the steps and the time left after each step, from the forecast and the
    pace of this start.

    Args:
        forecast: The forecast of the whole run; None without one.

    Attributes:
        eta: The estimate after the last step.
    """

    _FIRST = 3
    """Steps that don't count in the pace, because the first steps are slow."""

    def __init__(self, forecast: PredictedRun | None) -> None:
        self._forecast = forecast
        self.eta = UNKNOWN
        self._timed = 0
        self._since = time.monotonic()

    def after_step(self, step: Step) -> None:
        """Update :attr:`eta`, unknown after a skipped step. With a forecast, add the
        remaining steps to the trace's row.
        """
        scale = step.plan.scale
        taken = step.metrics["optimizer_steps"]
        left = steps_left(
            self._forecast,
            tau=step.result.effective_steps,
            total_steps=step.total_steps,
            taken=taken,
            scale=scale,
        )
        if self._forecast is not None:
            step.row["steps_left"] = round(left, 1)
        rough = self._forecast is None and scale > 1
        self._timed += 1
        if self._timed == self._FIRST:
            self._since = time.monotonic()
        if step.result.skips:
            self.eta = UNKNOWN
        else:
            self.eta = Eta(left, left * self.seconds_per_step if left else 0.0, rough)

    @property
    def seconds_per_step(self) -> float:
        """Seconds per optimizer step of this start, with all work between steps; ∞
        while unknown.
        """
        elapsed = time.monotonic() - self._since
        if self._timed > self._FIRST:
            return elapsed / (self._timed - self._FIRST)
        return elapsed / self._timed if 0 < self._timed < self._FIRST else math.inf


def forecast_run(
    recipe: Recipe | None, config: AdaScaleConfig, scale: float, workers: int = 1
) -> PredictedRun | None:
    """Return the forecast of a run; None at S = 1, without a recipe that has noise, and
    for a rule with Adam's metric.

    Args:
        recipe: The recipe. The noise of all its seeds counts.
        config: The rule, and the window of the averages; the batch, if it changes.
        scale: S, if it does not change.
        workers: Workers of a run that changes its batch.
    """
    rule = make_rule(config.rule)
    if recipe is None or not recipe.noise_by_seed or metric_of(rule) != "euclidean":
        return None
    forecaster = Forecaster(recipe, rule=rule, averaging_window=config.averaging_window)
    if config.batch.changes:
        return forecaster.following(config.batch, workers).expected
    return forecaster.at(scale).expected if scale > 1 else None
