"""An optimizer step as listeners see it, and the base class of the listeners."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ...batch import StepPlan


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer step, with its numbers on the host.

    Attributes:
        number: Optimizer steps of the run so far, including this step and skipped steps.
        plan: The step's batch.
        total_steps: T.
        tau_before: τ before the step.
        tau: τ after the step.
        gain: r.
        skipped: Whether a gradient was not finite, so that weights and τ did not change.
        sigma2: σ² of this step alone, not averaged. NaN if the step had one gradient sample; meaningless if it was skipped.
        mu2: μ² of this step alone, not averaged. NaN if the step had one gradient sample; meaningless if it was skipped.
        metrics: The metrics to report: the run's, and the user's as last recorded. A listener may add keys.
        row: The step's row in the trace. A listener may add keys.
    """

    number: int
    plan: StepPlan
    total_steps: int
    tau_before: float
    tau: float
    gain: float
    skipped: bool
    sigma2: float
    mu2: float
    metrics: dict[str, Any]
    row: dict[str, Any]


class Listener:
    """Base class of the objects that observe a run on rank 0. A listener decides nothing and waits for no other worker."""

    def after_step(self, step: Step) -> None:
        """Process an optimizer step. Called for each step, in order."""

    def recorded(self, metrics: Mapping[str, Any]) -> None:
        """Process metrics that the user recorded after the last step."""

    def ended(self, why: str, metrics: Mapping[str, Any]) -> None:
        """Process the end of the run.

        Args:
            why: The reason, as in :attr:`ray_adascale.Run.stopped`.
            metrics: The metrics of the last report.
        """

    def left(self) -> None:
        """Process the end of the loop for this start, also by ``break`` or by an exception."""

    def failed(self) -> None:
        """Process the failure of the run on this worker, under an ``AdaScaleTrainer``."""
