"""What a run reports of an optimizer step: the keys, what may stand under a key of the user's, and the noise in words."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..config import BatchPlan

__all__ = ["METRICS", "plain_numbers", "too_large_for_the_noise"]

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
