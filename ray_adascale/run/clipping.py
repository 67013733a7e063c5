"""Clipping at a multiple of the expected norm of the gradient, which means the same at every scale."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from ..gain import plain_effective_decay
from .boundary.stage import Stage

_FIRST = 10
"""Steps that are measured before one may be clipped."""


class ExpectedNorm(Stage):
    """Keeps the average of ‖ḡ‖² over effective time. Its root is the expected norm, since E‖ḡ‖² = μ² + σ²/S.

    A clipped step counts with the norm that it was clipped to. With its own norm, steps that diverge would raise the threshold.
    A change of S multiplies the average by the ratio of μ̄² + σ̄²/S.

    Args:
        multiple: κ. A norm above κ times the expected one is clipped.
        window: Memory of the average as a share of the run, as that of the gain's averages.
        total_steps: T.
    """

    def __init__(self, multiple: float, *, window: float, total_steps: float) -> None:
        self._multiple, self._window, self._total_steps = multiple, window, total_steps
        self._total = self._weight = 0.0
        self._count = 0
        self._scale: float | None = None

    def limit(self, scale: float, moments: Callable[[], tuple[float, float]]) -> float:
        """Return the largest norm of the next step; ∞ for the first steps.

        Args:
            scale: S of the step.
            moments: Returns σ̄² and μ̄², to convert the average of another scale; NaN where they are unknown.
        """
        if self._scale is not None and scale != self._scale:
            sigma2, mu2 = moments()
            ratio = (mu2 + sigma2 / scale) / (mu2 + sigma2 / self._scale) if mu2 + sigma2 > 0 else 1.0
            self._total *= ratio
        self._scale = scale
        if self._count < _FIRST or not self._total > 0:
            return math.inf
        return self._multiple * math.sqrt(self._total / self._weight)

    def add(self, norm: float, limit: float, previous_gain: float) -> bool:
        """Add the norm of a step. Return whether it was clipped. A norm that is not finite is left out.

        Args:
            norm: ‖ḡ‖ before clipping.
            limit: The largest norm of the step.
            previous_gain: r of the step before.
        """
        if not math.isfinite(norm):
            return False
        past = plain_effective_decay(previous_gain, window=self._window, total_steps=self._total_steps)
        self._total = past * self._total + (1 - past) * min(norm, limit) ** 2
        self._weight = past * self._weight + (1 - past)
        self._count += 1
        return norm > limit

    def state_dict(self) -> dict[str, Any]:
        return {"expected_norm": [self._total, self._weight, self._count, self._scale]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        saved = state.get("expected_norm")
        if saved is not None:  # else the run did not clip so when it was saved
            self._total, self._weight, self._count, self._scale = saved
