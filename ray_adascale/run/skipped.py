"""Warnings of the first step that was skipped, because its gradient is not finite.

AdaScale itself raises an error after too many such steps in a row.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from .._warn import warn_on_first_worker
from ..optim.step_sums import StepResult

_MOST_OVERFLOWS = 40
"""Skipped steps in a row that a loss scale may need to adapt: it begins at 2¹⁶ and
halves.
"""


class SkippedSteps:
    """Warns of skipped steps.

    Args:
        module: The bare model.
        scaler: The loss scaler; None without one.
        by_recipe: Whether the learning rate is a recipe's.
        by_units: Whether micro-batches are weighted by their units.
    """

    def __init__(
        self,
        module: nn.Module,
        scaler: torch.amp.GradScaler | None,
        *,
        by_recipe: bool,
        by_units: bool,
    ) -> None:
        self._module = module
        self._scaler = scaler
        if by_recipe:
            slower = "Search for a recipe with a lower learning rate"
        else:
            slower = "Lower the learning rate"
        self._remedy = f"{slower}, clip gradients, or check the data of this step."
        if by_units:
            self._remedy += (
                " A micro-batch without units (weight_of returned 0) needs a finite "
                "loss as well: divide by max(units, 1)."
            )
        self._warned = self._warned_of_buffers = False

    def warn(self, number: int, step: StepResult) -> None:
        """Warn of the first skipped step, unless it is an overflow of the loss scale,
        which then adapts.

        Args:
            number: Number of the step.
            step: Its numbers.
        """
        loss = step.shared["loss"]
        adapts = (
            self._scaler is not None
            and math.isfinite(loss)
            and step.skips < _MOST_OVERFLOWS
        )
        if not self._warned and not adapts:
            self._warned = True
            warn_on_first_worker(
                f"Step {number} was skipped, because its gradient is not finite (loss "
                f"{loss:g}). Weights and effective steps stay as they were. Further "
                "ones are not warned of: summary() and the report count skipped steps. "
                f"{self._remedy}"
            )
        if not self._warned_of_buffers and (
            names := [n for n, b in self._module.named_buffers() if b.isnan().any()]
        ):
            self._warned_of_buffers = True
            warn_on_first_worker(
                f"Step {number} was skipped, and left NaN in the buffer {names[0]!r} "
                f"(one of {len(names)}). It stays there, so evaluations return NaN. "
                "Keep such examples out of the data, or set the buffers anew in the "
                "loop (batch norm: module.reset_running_stats())."
            )
