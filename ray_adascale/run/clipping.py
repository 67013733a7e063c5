"""Clipping of each step's gradient: at a number, or at a multiple of the expected
norm, which means the same at every scale.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from .._errors import SettingError, clip_multiple
from ..batch import StepPlan
from ..config import AdaScaleConfig
from ..gain import plain_effective_decay
from ..optim.adascale import AdaScaleOptimizer
from ..optim.rules import make_rule, metric_of
from ..optim.step_sums import StepResult
from ..recipe import Recipe
from .observe.metrics import CLIPPED

OF_RECIPES = "3x"
"""``grad_clip`` of a run with a recipe, unless the recipe or the run has one:
docs/guides/carry-over.md.
"""

_FIRST = 10
"""Steps that are measured before one may be clipped."""


class ExpectedNorm:
    """Keeps the average of ‖ḡ‖² over effective time at S > 1. Its root is the expected
    norm, since E‖ḡ‖² = μ² + σ²/S.

    A clipped step counts with the norm that it was clipped to. With its own norm, steps
    that diverge would raise the threshold. A change of B multiplies the average by the
    ratio of μ̄² + σ̄²/S.

    Args:
        multiple: κ. A norm above κ times the expected one is clipped.
        window: Memory of the average in effective steps, as that of the gain's
            averages.
    """

    def __init__(self, multiple: float, window: float) -> None:
        self._multiple = multiple
        self._window = window
        self._total = self._weight = 0.0
        self._count = 0
        self._batch: int | None = None
        """B of the average, in examples: S is of another unit after a change of the
        base batch.
        """
        self._scale = 1.0
        self._limit = math.inf
        """S and the largest norm of the step that :meth:`limit` was called for."""

    def limit(
        self, scale: float, batch: int, moments: Callable[[], tuple[float, float]]
    ) -> float:
        """Return the largest norm of the next step; ∞ at S = 1, which is the base run,
        and for the first steps.

        Args:
            scale: S of the step.
            batch: B of the step, in examples.
            moments: Returns σ̄² and μ̄², to convert the average of another batch; NaN
                where they are unknown.
        """
        self._scale = scale
        self._limit = math.inf
        if scale <= 1:
            return self._limit
        if self._batch is not None and batch != self._batch:
            sigma2, mu2 = moments()
            noise = sigma2 / scale  # of the mean over B examples
            self._total *= (
                (mu2 + noise) / (mu2 + noise * batch / self._batch)
                if mu2 + sigma2 > 0
                else 1.0
            )
        self._batch = batch
        if self._count >= _FIRST and self._total > 0:
            self._limit = self._multiple * math.sqrt(self._total / self._weight)
        return self._limit

    def add(self, step: StepResult) -> bool:
        """Add the step that :meth:`limit` was for. Return whether it was clipped.

        A step of which ‖ḡ‖² is unknown is left out, and so is one that was skipped.
        """
        square = step.squared_norm
        if self._scale <= 1 or step.skips or not math.isfinite(square):
            return False
        past = plain_effective_decay(step.gain, self._window)
        self._total = past * self._total + (1 - past) * min(square, self._limit**2)
        self._weight = past * self._weight + (1 - past)
        self._count += 1
        return square > self._limit**2

    def state_dict(self) -> dict[str, Any]:
        return {"expected_norm": [self._total, self._weight, self._count, self._batch]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state.get("expected_norm")
        if saved is not None:  # else the run did not clip so when it was saved
            self._total, self._weight, self._count, self._batch = saved


class Clipping:
    """Clips by the setting ``grad_clip``.

    Args:
        config: The settings of the run.
        recipe: Its recipe. Without a ``grad_clip`` of either it is :data:`OF_RECIPES`;
            with one of the recipe alone nothing is clipped.
        total_steps: T.

    Attributes:
        expected: The expected norm, if the setting is a multiple of it.

    Raises:
        ValueError: A multiple, and a rule that measures gradients in Adam's metric.
    """

    def __init__(
        self, config: AdaScaleConfig, recipe: Recipe | None, *, total_steps: int
    ) -> None:
        setting = config.grad_clip
        in_metric_of_adam = metric_of(make_rule(config.rule)) == "adam"
        if setting is None and recipe is not None and not in_metric_of_adam:
            if (recipe.settings or {}).get("grad_clip") is None:
                setting = OF_RECIPES
            else:
                setting = None
        multiple = clip_multiple(setting)
        if multiple is not None and in_metric_of_adam:
            raise SettingError(
                "Invalid {}. The rule AdamScale measures gradients divided as Adam "
                "does, which does not tell their norm. Give a number.",
                grad_clip=setting,
            )
        self._number = setting if isinstance(setting, float | int) else None
        self.expected: ExpectedNorm | None = None
        if multiple is not None:
            self.expected = ExpectedNorm(
                multiple, config.averaging_window * total_steps
            )

    def clip(
        self,
        optimizer: AdaScaleOptimizer,
        plan: StepPlan,
        moments: Callable[[], tuple[float, float]],
    ) -> None:
        """Clip the gradient of a step. Collective.

        Args:
            optimizer: The optimizer of the run.
            plan: The batch of the step.
            moments: As in :meth:`ExpectedNorm.limit`.
        """
        limit = self._number
        if self.expected is not None:
            limit = self.expected.limit(plan.scale, plan.global_batch_size, moments)
        if limit is not None and limit < math.inf:
            optimizer.clip_grad_norm(limit)

    def read(self, step: StepResult) -> dict[str, Any]:
        """Use the numbers of the step that was clipped last. Return what its row in
        the trace then has.
        """
        if self.expected is not None and self.expected.add(step):
            return {CLIPPED: True}
        return {}
