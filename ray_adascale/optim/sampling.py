"""Which optimizer steps measure the noise: as many as the averages' window needs, by
a step's number and plan alone.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from .._errors import check_count
from ..batch import StepPlan

WINDOW_SAMPLES = 50
"""Fewest measured steps in the averages' window. The first 50 steps of a run are all
measured.
"""


@dataclass(frozen=True)
class MeasuredSteps:
    """Decides which steps measure the noise: one in :meth:`every`.

    The decision depends on the number of the step and on its plan. So all workers, and
    every resume, decide alike.

    Attributes:
        window: Effective steps that the averages reach back over; None where they are
            over steps, each of which is measured.
        given: k, if one step in k is to be measured. Default: as many as the window
            needs.

    Raises:
        ValueError: ``given`` is out of its range.
    """

    window: float | None = None
    given: int | None = None

    def __post_init__(self) -> None:
        if (
            self.given is not None
            and check_count("measure_every", self.given) > 1
            and self.window is None
        ):
            raise ValueError(
                f"Invalid measure_every={self.given} without averaging_window: an "
                "average over steps needs each step's sample. Give averaging_window "
                "and total_steps."
            )

    def every(self, number: int, plan: StepPlan) -> int:
        """Return k. It grows from 1 as the run does, so that the averages never rest on
        few samples.

        No step advances τ by more than S, so the window has :data:`WINDOW_SAMPLES` at
        least.

        Args:
            number: Steps that have ended.
            plan: Plan of a full step.
        """
        if self.given is not None or self.window is None:
            return self.given or 1
        return min(
            max(1, math.floor(self.window / (max(plan.scale, 1.0) * WINDOW_SAMPLES))),
            1 + number // WINDOW_SAMPLES,
        )

    def measures(self, number: int, plan: StepPlan) -> bool:
        """Return whether a step is measured. The arguments are those of
        :meth:`every`.
        """
        return number % self.every(number, plan) == 0
