"""Which plan holds for a step, and whether the step is measured."""

from __future__ import annotations

from ..batch import StepPlan
from .sampling import Sampling
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
        measured: Whether the step is measured. Steps that may end early are, so that passes are counted.
    """

    def __init__(self, declared: StepPlan, sampling: Sampling) -> None:
        self._sampling = sampling
        self._step_end: StepEnd | None = None
        self.ended = 0
        self.declare(declared)

    def _decide(self, plan: StepPlan | None = None) -> None:
        """Decide once for the step that begins."""
        self.current = self.declared if plan is None else plan
        self.measured = self._step_end is not None or self._sampling.measures(self.ended, self.declared)

    @property
    def step_end(self) -> StepEnd | None:
        """Decides which pass is a step's last, for loops that do not tell; None: the declared number of passes does."""
        return self._step_end

    @step_end.setter
    def step_end(self, step_end: StepEnd | None) -> None:
        self._step_end = step_end
        self._decide(self.current)

    @property
    def steps_of_sample(self) -> int:
        """Steps for which the sample of the step stands, if it is measured."""
        return 1 if self._step_end is not None else self._sampling.gap(self.ended, self.declared)

    @property
    def lacks_samples(self) -> bool:
        """Whether the steps to come can't measure their noise: they have one gradient sample at S ≠ 1."""
        return self.declared.scale != 1 and self.declared.num_samples == 1

    def declare(self, plan: StepPlan) -> None:
        """Set the plan of the steps from the next one on. At a step boundary."""
        self.declared = plan
        self._decide()

    def expect(self, plan: StepPlan | None) -> None:
        """Set the plan of this step alone; None: that of a full step."""
        self.current = self.declared if plan is None else plan

    def if_last(self, number: int) -> StepPlan | None:
        """Return the step's plan if this backward pass, counted from 1, is its last; else None."""
        if number >= self.current.passes:
            return self.current
        return None if self._step_end is None else self._step_end(number)

    def begin(self, ended: int) -> None:
        """Begin the step after a number of steps that have ended."""
        self.ended = ended
        self._decide()
