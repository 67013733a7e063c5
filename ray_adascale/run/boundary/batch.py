"""The stage that sets the batch of the next step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ...batch import BatchFollower
from ...optim.adascale import AdaScaleOptimizer
from .stage import RunAtBoundary, Stage


class ChooseBatch(Stage):
    """Sets the batch of the next step: the plan that the follower chooses.

    Args:
        follower: Chooses the plan.
        optimizer: The optimizer of the run.
    """

    def __init__(self, follower: BatchFollower, optimizer: AdaScaleOptimizer) -> None:
        self.follower = follower
        self._optimizer = optimizer

    def next_tau(self) -> float:
        return self.follower.next_tau()

    def act(self, run: RunAtBoundary, flags: int) -> str | None:
        if self.follower.due_by(run.effective_steps):
            plan = self.follower.next_plan(
                run.effective_steps, self._optimizer.average_moments
            )
            if plan != run.plan:
                run.set_plan(plan)
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"following": self.follower.state()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this stage's part of a checkpoint's state, after the optimizer has
        loaded its own.
        """
        self.follower.resume(
            state.get("following", {}),
            self._optimizer.effective_steps,
            self._optimizer.average_moments,
        )
