"""The stage that sets the batch of the next step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from ..._warn import warn_at_user
from ...batch import BatchFollower, BatchPlan
from ...optim.adascale import AdaScale
from .stage import RunAtBoundary, Stage


class StepBatch(Stage):
    """Sets the batch of the next step: the plan that the follower chooses.

    Its pass is split in two, if the step has one gradient sample at S > 1 and its examples can't be measured. Only the first
    measured step shows this of some models, so it may happen as the run goes on. A resume splits passes again.

    Args:
        follower: Chooses the plan.
        optimizer: The optimizer of the run.
        splits: Whether the data can be split in other passes: not where they come in batches.

    Attributes:
        split: Whether passes were split, in this start or an earlier one.
    """

    def __init__(self, follower: BatchFollower, optimizer: AdaScale, *, splits: bool) -> None:
        self.follower = follower
        self.split = False
        self._optimizer = optimizer
        self._splits = splits

    def plan(self) -> BatchPlan:
        """Return the plan of the next step.

        Raises:
            ValueError: Its pass must be split, and the data come in batches.
        """
        plan = self.follower.plan
        if plan.num_samples > 1 or plan.scale == 1 or not (self.split or self._optimizer.lacks_samples):
            return plan
        why = (
            f"One gradient sample a step at scale {plan.scale:g} tells nothing of the noise, and the single examples of this "
            "model can't be measured."
        )
        if not self._splits:
            half = plan.global_batch_size // 2
            raise ValueError(
                f"{why} Make two passes of half the size: AdaScaleConfig(accumulation=2, per_worker_batch_size={half}), with "
                f"batches of {half} examples. A map-style dataset is split by the run itself."
            )
        if not self.split:
            self.split = True
            warn_at_user(f"{why} So a step has two passes of half the size from now on, as with accumulation=2.")
        return replace(plan, accumulation=2)

    def due_by(self, effective_steps: float) -> bool:
        return self._optimizer.lacks_samples or self.follower.due_by(effective_steps)

    def act(self, run: RunAtBoundary, flags: int) -> str | None:
        if self.due_by(run.effective_steps):
            self.follower.after_step(run.effective_steps, self._optimizer.average_moments)
            plan = self.plan()
            if plan != run.plan:
                run.set_plan(plan)
        return None

    def state_dict(self) -> dict[str, Any]:
        return {"following": self.follower.state(), "two_passes": self.split}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load this stage's part of a checkpoint's state, after the optimizer has loaded its own."""
        self.split = state.get("two_passes", False)
        self.follower.resume(
            state.get("following", {}), self._optimizer.effective_steps, self._optimizer.average_moments
        )
