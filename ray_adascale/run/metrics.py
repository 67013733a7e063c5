"""What a run reports of an optimizer step: keys and values, what may stand under a key of the user's, the noise in words."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ..config import BatchPlan
from ..gain import plain_noise_scale
from ..optim.adascale import AdaScale

__all__ = ["METRICS", "plain_numbers", "step_metrics", "too_large_for_the_noise"]

METRICS = (
    "gain",
    "scale",
    "effective_steps",
    "progress",
    "lr",
    "loss",
    "sigma2",
    "mu2",
    "noise_scale",
    "efficiency",
    "examples_per_s",
    "optimizer_steps",
    "world_size",
)
"""The keys of every report, beside what the user adds. ``lr`` is the schedule's lr(⌊τ⌋) of the first parameter group, before
the gain, so that it lies on one curve over effective steps at every scale."""


def step_metrics(
    optimizer: AdaScale,
    plan: BatchPlan,
    *,
    loss: float,
    lr: float,
    progress: float,
    examples_per_s: float,
    probed: tuple[float, float] | None,
) -> dict[str, Any]:
    """The values of the last step under :data:`METRICS`; waits for the device where the host doesn't know the step yet.

    Args:
        optimizer: It has taken the step.
        plan: How the step's batch was made up.
        loss: Of all workers.
        lr: The schedule's.
        progress: Σ r.
        examples_per_s: Over all workers.
        probed: σ² and μ² of a probe, for where the steps show none.
    """
    sigma2, mu2 = optimizer.average_moments()
    if math.isnan(sigma2) and probed is not None:
        sigma2, mu2 = probed
    gain, scale = optimizer.last_gain, plan.scale
    return {
        "gain": gain,
        "scale": scale,
        "effective_steps": optimizer.effective_steps,
        "progress": progress,
        "lr": lr,
        "loss": loss,
        "sigma2": sigma2,
        "mu2": mu2,
        "noise_scale": plain_noise_scale(sigma2, mu2, plan.base_batch_size),
        "efficiency": gain / scale,
        "examples_per_s": examples_per_s,
        "optimizer_steps": optimizer.steps,
        "world_size": plan.world_size,
    }


def plain_numbers(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """The user's metrics as Python numbers; one-element tensors and NumPy scalars are read out.

    Raises:
        ValueError: A name that the run reports itself.
        TypeError: A value that is neither number nor string.
    """
    out = {key: value.item() if hasattr(value, "item") else value for key, value in metrics.items()}
    for key, value in out.items():
        if key in METRICS and key != "loss":
            raise ValueError(f"Invalid metric {key!r}: the run reports it itself. Choose another name.")
        if not isinstance(value, bool | int | float | str):
            raise TypeError(f"Invalid metric {key!r} of type {type(value).__name__}. Must be a number or a string.")
    return out


def too_large_for_the_noise(plan: BatchPlan, noise_scale: float, gain: float) -> str | None:
    """A sentence where the batch is beyond the noise scale (examples), so that r/S is below one half; else None."""
    if plan.scale <= 1 or not plan.global_batch_size > noise_scale:
        return None
    return (
        f"The batch of {plan.global_batch_size} exceeds the gradient noise scale of {noise_scale:.0f} examples "
        f"(gain {gain:.2f} at scale {plan.scale:g}): more workers now buy less than half."
    )
