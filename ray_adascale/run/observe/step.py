"""An optimizer step as listeners see it, and the base class of the listeners."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from ...batch import StepPlan
from ...optim.step_sums import StepResult

_UNKNOWN = StepResult()


OF_FIRST = "_of_first"
"""The end of the name of rank 0's shared number, which the other workers send as
zero.
"""


@dataclass
class Step:
    """One optimizer step of a run: first what is known as it is taken, and once the
    host has its numbers those as well.

    Attributes:
        number: Optimizer steps of the run so far, including this step and skipped
            steps.
        plan: What the step consists of.
        total_steps: T.
        tau_before: τ before the step.
        lr: lr(⌊τ⌋) of the first parameter group, before the gain.
        position: Examples of the run so far.
        flags: This worker's flags, if it is the only one. Flags of several workers
            arrive with the step's numbers.
        user_metrics: The user's metrics of this step.
        recorded: The user's metrics so far.
        result: The step's numbers; those of a fresh run until the host has them.
        metrics: The metrics to report: the run's, and the user's as last recorded. A
            listener may add keys.
        row: The step's row in the trace. A listener may add keys.
    """

    number: int
    plan: StepPlan
    total_steps: int
    tau_before: float
    lr: float = math.nan
    position: int = 0
    flags: int = 0
    user_metrics: dict[str, Any] = field(default_factory=dict)
    recorded: dict[str, Any] = field(default_factory=dict)
    result: StepResult = _UNKNOWN
    metrics: dict[str, Any] = field(default_factory=dict)
    row: dict[str, Any] = field(default_factory=dict)


class Listener:
    """Base class of the objects that observe a run on rank 0. A listener decides
    nothing and waits for no other worker.
    """

    def after_step(self, step: Step) -> None:
        """Process an optimizer step. Called for each step, in order."""

    def after_record(self, metrics: Mapping[str, Any]) -> None:
        """Process metrics that the user recorded after the last step."""

    def ended(self, why: str, metrics: Mapping[str, Any]) -> None:
        """Process the end of the run.

        Args:
            why: The reason, as in :attr:`ray_adascale.Run.stopped`.
            metrics: The metrics of the last report.
        """

    def after_loop(self) -> None:
        """Process the end of the loop for this start, also by ``break`` or by an
        exception.
        """

    def failed(self) -> None:
        """Process the failure of the run on this worker, under an
        ``AdaScaleTrainer``.
        """
