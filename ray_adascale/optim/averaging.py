"""How samples of σ² and μ² are averaged: the weight of the past, and what an average
begins with.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import gain
from ..batch import StepPlan
from ..gain import Average

Smoothing = float | Callable[[StepPlan], float]
"""θ of a moving average over steps: a constant, or a function of the step's plan."""


def check_averaging(
    clip: str,
    smoothing: Smoothing | None,
    window: float | None,
    total_steps: float | None,
    variance_floor: float,
) -> None:
    """Check the arguments of :class:`ray_adascale.AdaScale` that concern the averages.

    Raises:
        ValueError: An argument is out of its range, or contradicts another.
    """
    if clip not in ("samples", "averages"):
        raise ValueError(f"Invalid {clip=}. Must be 'samples' or 'averages'.")
    if window is not None and (smoothing is not None or total_steps is None):
        raise ValueError(
            f"averaging_window={window} needs total_steps, and excludes smoothing (got "
            f"{smoothing=})."
        )
    if (
        window is not None
        and total_steps is not None
        and not (0 < window < math.inf and 0 < total_steps < math.inf)
    ):
        raise ValueError(
            f"Invalid averaging_window={window}, {total_steps=}. Both must be positive "
            "and finite."
        )
    if smoothing is not None and not callable(smoothing) and not 0 <= smoothing < 1:
        raise ValueError(f"Invalid {smoothing=}. Must be in [0, 1).")
    if not 0 <= variance_floor < math.inf:
        raise ValueError(
            f"Invalid {variance_floor=}. Must be a number ≥ 0, the lower bound on each "
            "σ²; 0 for none."
        )


@dataclass(frozen=True)
class CountDecay:
    """FairScale's θ = max(1 − n/1000, 0), with n = workers × ``passes``. A shortened
    step has the θ of a full one.

    Attributes:
        passes: Backward passes of a full step.
    """

    passes: int

    def __call__(self, plan: StepPlan) -> float:
        return gain.count_decay(plan.workers * self.passes)


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """Settings of the moving averages of σ² and μ².

    Attributes:
        smoothing: θ of a moving average over steps.
        window: Width of averages over effective time, in effective steps; None for
            averages over steps.
        debias: Debiased moving average, else the paper's.
        clip_samples: Enforce σ², μ² ≥ 0 on each sample, and not only on the averages
            when they are read.
        variance_floor: Lower bound on σ².
    """

    smoothing: Smoothing
    window: float | None
    debias: bool
    clip_samples: bool
    variance_floor: float

    def theta(self, plan: StepPlan) -> float:
        """Return θ of the moving average over steps, for a step of this plan."""
        return self.smoothing(plan) if callable(self.smoothing) else self.smoothing

    def decay(self, plan: StepPlan, since_sample: float) -> float:
        """Return θ for a sample of a step of this plan.

        Args:
            plan: The plan.
            since_sample: Effective steps since the last sample.
        """
        return (
            self.theta(plan)
            if self.window is None
            else gain.plain_effective_decay(since_sample, self.window)
        )

    def floors(self, device: torch.device) -> Tensor:
        """Return the lower bounds on σ², μ² and the weight of a sample, ``[3, 1]``,
        on a device.
        """
        key = self.variance_floor, device
        if key not in _FLOORS:
            _FLOORS[key] = torch.tensor(
                [[self.variance_floor], [0.0], [1.0]],
                dtype=torch.float64,
                device=device,
            )
        return _FLOORS[key]

    def with_gain(self, averages: Average, plan: StepPlan) -> Average:
        """Return averages with one more gain, of a new parameter group, which starts
        without a sample.

        FairScale has a single count for the plain means of ``debias=False``, also for a
        group that comes later: its first sample is then divided by the number of all
        steps, or, if the average moves already, added to σ² = 0 and μ² = 1.

        Args:
            averages: They are left unchanged.
            plan: Plan of a full step.
        """
        out = Average.empty((2, averages.count.numel() + 1), averages.packed.device)
        out.packed[:, :-1], out.count[:-1] = averages.packed, averages.count
        count = int(averages.count.max())
        if not self.debias and self.window is None and count > 0:
            out.count[-1], out.weight[-1] = count, 1.0
            if count + 1 >= 1 / (1 - self.theta(plan)):
                out.total[1, -1] = 1.0
        return out


_FLOORS: dict[tuple[float, torch.device], Tensor] = {}  # to make a tensor is a launch
