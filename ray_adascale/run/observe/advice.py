"""What may be wrong in a run's steps: a listener for each warning."""

from __future__ import annotations

from ..._warn import warn_at_user
from ...forecast.replay import PredictedRun
from ...workload import ConfigAccessLog, unread_warning
from .step import Listener, Step

_WINDOWS = 3
_STEPS = 20
"""Windows of the averages, and optimizer steps, after which the averages are
reliable enough for a warning.
"""


class NoiseWarning(Listener):
    """Warns once if the batch is larger than the noise scale, unless the whole run is
    efficient, so far or by the forecast.

    Args:
        window: Window of the averages, in effective steps.
        forecast: The forecast of the whole run; None without one.
        warmed_up: τ at which the schedule's LR is highest. The noise scale grows while
            the LR rises, so there is no warning within one window of the averages after
            this τ.
    """

    def __init__(
        self, window: float, forecast: PredictedRun | None, warmed_up: float = 0.0
    ) -> None:
        self._window = window
        self._forecast = forecast
        self._warmed_up = warmed_up
        self._gains = self._scales = 0.0  # Σ r and Σ S of this start's steps
        # τ; None while the batch is small enough
        self._too_large_since: float | None = None
        self._warned = False

    def after_step(self, step: Step) -> None:
        """Warn if the batch has been too large for one window of the averages."""
        if self._warned:
            return
        if not step.result.skips:
            self._gains += step.metrics["gain"]
            self._scales += step.plan.scale
        noise_scale = step.metrics["noise_scale"]
        plan = step.plan
        # which may be NaN
        if plan.scale <= 1 or not plan.global_batch_size > noise_scale:
            self._too_large_since = None
            return
        if self._too_large_since is None:
            since = step.result.effective_steps
        else:
            since = self._too_large_since
        self._too_large_since = since
        # Noise at the beginning of a run seldom lasts, and averages of a few samples
        # vary.
        settled = max(_WINDOWS * self._window, self._warmed_up + self._window)
        reliable = (
            step.result.effective_steps >= settled
            and step.metrics["optimizer_steps"] >= _STEPS
        )
        if (
            reliable
            and step.result.effective_steps - since >= self._window
            and not self._efficient_as_a_whole(step)
        ):
            self._warned = True
            warn_at_user(
                f"The batch of {plan.global_batch_size} exceeds the gradient noise "
                f"scale of {noise_scale:.0f} examples over the last "
                f"{self._window:,.0f} effective steps (gain {step.metrics['gain']:.2f} "
                f"at scale {plan.scale:g}): more workers now buy less than half."
            )

    def _efficient_as_a_whole(self, step: Step) -> bool:
        """Return whether r/S is at least one half on average, over the steps so far
        or over the whole run by the forecast.
        """
        if 2 * self._gains >= self._scales:
            return True
        if self._forecast is None:
            return False
        steps = step.metrics["optimizer_steps"] + self._forecast.steps_left(
            step.result.effective_steps
        )
        return 2 * step.total_steps >= step.plan.scale * steps


class UnreadHyperparameters(Listener):
    """Warns of hyperparameters that the workload has not read.

    The check comes after the first optimizer step, so that keys read lazily (in
    ``loss_fn``) count as read.

    Args:
        reads: The record of the keys that were read.
    """

    def __init__(self, reads: ConfigAccessLog) -> None:
        self._reads: ConfigAccessLog | None = reads

    def after_step(self, step: Step) -> None:
        """Warn if this is the first step and keys are unread."""
        reads = self._reads
        self._reads = None
        if reads is not None and reads.unread:
            warn_at_user(unread_warning(reads.unread))
