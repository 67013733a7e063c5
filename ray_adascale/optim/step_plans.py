"""Which plan holds for a step, and whether the step is measured."""

from __future__ import annotations

from ..batch import StepPlan
from .sampling import MeasuredSteps
from .step_result import StepEnd


class StepPlans:
    """The plan of the step under way or, between steps, of the next one.

    Args:
        declared: Plan of a full step.
        sampling: Decides which steps are measured.

    Attributes:
        declared: Plan of a full step.
        current: The step's plan, as known so far.
        ended: Steps that have ended, with those that were left out.
        step_end: Decides which pass is a step's last, for loops that do not tell; None: the declared number of passes does.
        unsampled: Measured steps in a row, up to now, that have yielded no sample. The next step is then measured too.
        measured: Whether the step is measured.
    """

    def __init__(self, declared: StepPlan, sampling: MeasuredSteps) -> None:
        self._sampling = sampling
        self.step_end: StepEnd | None = None
        self.ended = self.unsampled = 0
        self.declare(declared)

    @property
    def lacks_samples(self) -> bool:
        """Whether the steps to come can't measure their noise: they have one gradient sample at S ≠ 1."""
        return self.declared.scale != 1 and self.declared.num_samples == 1

    def declare(self, plan: StepPlan) -> None:
        """Set the plan of the steps from the next one on. At a step boundary."""
        self.declared = plan
        self.resume(self.ended, self.unsampled)

    def expect(self, plan: StepPlan | None) -> None:
        """Set the plan of this step alone; None: that of a full step."""
        self.current = self.declared if plan is None else plan

    def if_last(self, number: int) -> StepPlan | None:
        """Return the step's plan if this backward pass, counted from 1, is its last; else None."""
        if number >= self.current.passes:
            return self.current
        return None if self.step_end is None else self.step_end(number)

    def resume(self, ended: int, unsampled: int) -> None:
        """Begin the step after a number of steps that have ended."""
        self.ended, self.unsampled, self.current = ended, unsampled, self.declared
        self.measured = unsampled > 0 or self._sampling.measures(ended, self.declared)

    def end(self, *, sampled: bool) -> None:
        """End the step, and begin the next one.

        Args:
            sampled: Whether the step has yielded a sample, if it was measured.
        """
        unsampled = self.unsampled + 1 if self.measured and not sampled else 0
        self.ended, self.unsampled, self.current = self.ended + 1, unsampled, self.declared
        self.measured = unsampled > 0 or self._sampling.measures(self.ended, self.declared)
