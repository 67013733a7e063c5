"""One optimizer step as values: the passes that it consists of, the pass that ends it, and its numbers afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from torch import Tensor

from .._errors import check_count


@dataclass(frozen=True)
class StepShape:
    """What one optimizer step consists of.

    Attributes:
        passes: Backward passes of each worker.
        workers: Workers that share the batch.
        scale: S, global batch size / base batch size.
        loss_divisor: Number that the loss of each pass was divided by.
        to_mean: Whether AdaScale divides the gradient, after the last pass, so that it is the mean over the passes. False where
            the loop does so by itself.

    Raises:
        ValueError: A number is out of its range.
    """

    passes: int
    workers: int = 1
    scale: float = 1.0
    loss_divisor: int = 1
    to_mean: bool = True

    def __post_init__(self) -> None:
        for name in ("passes", "workers", "loss_divisor"):
            object.__setattr__(self, name, check_count(name, getattr(self, name)))
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(
                f"Invalid scale={self.scale}. Must be a positive number: global batch size / base batch size."
            )

    @cached_property
    def num_samples(self) -> int:
        """n, gradient samples in the step: workers × passes."""
        return self.workers * self.passes

    @cached_property
    def multiple_of_mean(self) -> float:
        """The gradient that the passes add up to, divided by ḡ."""
        return self.passes / self.loss_divisor

    def shortened(self, passes: int, scale: float | None = None, loss_divisor: int | None = None) -> StepShape:
        """Return the shape of a step that ends after fewer passes, as the last step of an epoch may.

        Args:
            passes: At most the passes of this shape.
            scale: S of the shorter step. Default: in proportion to the passes.
            loss_divisor: Number that the loss was divided by. Default: the passes of the shorter step, if this shape divides by
                its own passes; else as in this shape.

        Raises:
            ValueError: ``passes`` is out of its range.
        """
        if not 1 <= passes <= self.passes:
            raise ValueError(f"Invalid {passes=}. Must be between 1 and {self.passes}, the passes of a full step.")
        if scale is None:
            scale = self.scale if passes == self.passes else self.scale * passes / self.passes
        if loss_divisor is None:
            loss_divisor = passes if self.loss_divisor == self.passes else self.loss_divisor
        return replace(self, passes=passes, scale=float(scale), loss_divisor=loss_divisor)

    def mean_sq_norm(self, norms: Sequence[Tensor], weights: Sequence[float] | None = None) -> Tensor:
        """Return this worker's part of A = Σ w_i ‖g_i‖².

        Args:
            norms: Squared norm of the gradient of each pass as measured, with the factor that its loss carried.
            weights: w of this worker's gradient sample in each pass. Default: all 1/n.

        Raises:
            RuntimeError: There are more passes than weights.
        """
        if weights is not None and len(weights) < len(norms):
            raise RuntimeError(
                f"This step has {len(norms)} backward passes, and sample_weights are of {len(weights)}. Add the losses of a "
                "micro-batch, and run one backward pass for it: run.backward(loss + other_loss)."
            )
        n = self.num_samples
        parts = []
        for i, measured in enumerate(norms):
            w = 1 / n if weights is None else weights[i]
            # The loss, and so the gradient, carried the factor c = n·w_i / divisor: w_i ‖g_i‖² = w_i/c² · ‖c·g_i‖².
            c = n * w / self.loss_divisor
            parts.append(measured * (w / c**2))
        total = parts[0]
        for part in parts[1:]:
            total = total + part
        return total


StepEnd = Callable[[int], StepShape | None]
"""Called as backward pass i of a step begins (i = 1, 2, ...): returns the step's shape if pass i is its last, else None."""


@dataclass(frozen=True)
class StepResult:
    """The last optimizer step, as numbers on the host. A skipped step has the numbers of the step before it.

    Attributes:
        gain: r of the whole optimizer.
        effective_steps: τ after the step.
        steps: Optimizer steps taken up to this one, without those that were skipped.
        sigma2: σ² of the step's own gradient samples, summed over groups, unaveraged; NaN where they yield none.
        mu2: μ² of the step's own gradient samples, summed over groups, unaveraged; NaN where they yield none.
        lr_factor: Factor on the LR, by the rule, for the whole optimizer.
        skipped: Whether the step was left out because a gradient was not finite. The payload is of this step even so.
        payload: The step's payload, summed over workers; empty if none was set.
    """

    gain: float = 1.0
    effective_steps: float = 0.0
    steps: int = 0
    sigma2: float = math.nan
    mu2: float = math.nan
    lr_factor: float = 1.0
    skipped: bool = False
    payload: Sequence[float] = ()
