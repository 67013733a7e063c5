"""The stage that changes the batch of a run. A controller of the batch policy decides; the stage acts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..batch_policy import BatchController, BatchPlan, Position
from ..data.source import BatchSource
from ..optim.adascale import AdaScale
from .step import BoundaryFlags, RunAtBoundary, Stage


class AdaptiveBatch(Stage):
    """Sets the batch of the next step.

    Args:
        controller: Decides, from the optimizer's averages.
        optimizer: The optimizer of the run.
        source: The data of the run.
    """

    def __init__(self, controller: BatchController, optimizer: AdaScale, source: BatchSource) -> None:
        self.controller = controller
        self._optimizer = optimizer
        self._source = source

    def plan_of(self, plan: BatchPlan) -> BatchPlan:
        """Return the controller's plan, in place of this one."""
        return self.controller.plan

    def due_by(self, effective_steps: float) -> bool:
        return self.controller.due_by(self._at(effective_steps))

    def act(self, run: RunAtBoundary, flags: BoundaryFlags) -> str | None:
        plan = self.controller.after_step(
            self._at(run.effective_steps),
            self._optimizer.average_moments,
        )
        if plan != run.plan:
            run.set_plan(plan)
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"following": self.controller.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this stage's part of a checkpoint's state, after optimizer and data have loaded theirs."""
        at, moments = self._at(self._optimizer.effective_steps), self._optimizer.average_moments()
        self.controller.resume(state.get("following", {}), at, moments)

    def _at(self, effective_steps: float) -> Position:
        return Position(effective_steps, self._source.position)
