"""Steps whose gradient is not finite: a warning of the first one, and the end of the
run after too many in a row.
"""

from __future__ import annotations

import math

import torch
from torch import nn

from .._warn import warn_on_first_worker
from ..optim.next_state import MOST_SKIPPED
from .boundary.stage import LoopState

_MOST_OVERFLOWS = 40
"""Skipped steps in a row that a loss scale may need to adapt: it begins at 2¹⁶ and
halves.
"""


class SkippedSteps:
    """Counts skipped steps in a row.

    Args:
        module: The bare model.
        state: Has the count.
        scaler: The loss scaler; None without one.
        total_steps: T.
        by_recipe: Whether the learning rate is a recipe's.
    """

    def __init__(
        self,
        module: nn.Module,
        state: LoopState,
        scaler: torch.amp.GradScaler | None,
        *,
        total_steps: int,
        by_recipe: bool,
    ) -> None:
        self._module = module
        self._state = state
        self._scaler = scaler
        self._total_steps = total_steps
        if by_recipe:
            slower = "Search for a recipe with a lower learning rate"
        else:
            slower = "Lower the learning rate"
        self._remedy = f"{slower}, clip gradients, or check the data of this step."
        self._warned = self._warned_of_buffers = False

    def count(self, loss: float, step: int, effective_steps: float) -> None:
        """Count a skipped step. Warn of the first one, unless it is an overflow of the
        loss scale, which then adapts.

        Args:
            loss: Mean loss of the step.
            step: Its number.
            effective_steps: τ.

        Raises:
            FloatingPointError: It is one too many in a row.
        """
        self._state.nonfinite += 1
        in_a_row = self._state.nonfinite
        adapts = (
            self._scaler is not None
            and math.isfinite(loss)
            and in_a_row < _MOST_OVERFLOWS
        )
        if not self._warned and not adapts:
            self._warned = True
            warn_on_first_worker(
                f"Step {step} was skipped, because its gradient is not finite (loss "
                f"{loss:g}). Weights and effective steps stay as they were. Further "
                "ones are not warned of: summary() and the report count skipped steps. "
                f"{self._remedy}"
            )
        if not self._warned_of_buffers and (
            names := [n for n, b in self._module.named_buffers() if b.isnan().any()]
        ):
            self._warned_of_buffers = True
            warn_on_first_worker(
                f"Step {step} was skipped, and left NaN in the buffer {names[0]!r} "
                f"(one of {len(names)}). It stays there, so evaluations return NaN. "
                "Keep such examples out of the data, or set the buffers anew in the "
                "loop (batch norm: module.reset_running_stats())."
            )
        if in_a_row >= MOST_SKIPPED:
            loss_scale = 1.0 if self._scaler is None else self._scaler.get_scale()
            raise FloatingPointError(
                f"The gradient was not finite in {in_a_row} optimizer steps in a row, "
                f"up to step {step} at effective step {effective_steps:.1f} of "
                f"{self._total_steps} (loss {loss:g}, loss scale {loss_scale:g}). "
                f"These steps left the weights as they were. {self._remedy}"
            )
