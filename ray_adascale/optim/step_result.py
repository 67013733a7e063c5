"""One optimizer step: the pass that ends it, and its numbers afterwards."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from ..batch import StepPlan

StepEnd = Callable[[int], StepPlan | None]
"""Called as backward pass i of a step begins (i = 1, 2, ...): returns the step's
plan if pass i is its last, else None.
"""


@dataclass(frozen=True)
class StepResult:
    """The last optimizer step, as numbers on the host. A skipped step has the numbers
    of the step before it.

    Attributes:
        gain: r of the whole optimizer.
        effective_steps: τ after the step.
        steps: Optimizer steps taken up to this one, without those that were skipped.
        sigma2: σ² of the step's own gradient samples, summed over groups, unaveraged;
            NaN where they yield none.
        mu2: μ² of the step's own gradient samples, summed over groups, unaveraged; NaN
            where they yield none.
        squared_norm: ‖ḡ‖² of the step's own gradient; NaN where it was not taken.
        lr_factor: Factor on the LR, by the rule, for the whole optimizer.
        group_gains: r of each gain's group.
        group_sigma2: Averaged σ² of each gain's group, unclipped; NaN before the first
            sample.
        group_mu2: Averaged μ² likewise.
        skipped: Whether the step was left out because a gradient was not finite. The
            shared numbers are of this step even so.
        identity: Difference between Σ w_i⟨g_i, v⟩ and ⟨ḡ, v⟩ over √A; 0 where the step
            was not checked.
        shared: The numbers that a caller has shared in this step, summed over workers,
            by name.
    """

    gain: float = 1.0
    effective_steps: float = 0.0
    steps: int = 0
    sigma2: float = math.nan
    mu2: float = math.nan
    squared_norm: float = math.nan
    lr_factor: float = 1.0
    skipped: bool = False
    identity: float = 0.0
    shared: Mapping[str, float] = field(default_factory=dict)
    group_gains: Sequence[float] = ()
    group_sigma2: Sequence[float] = ()
    group_mu2: Sequence[float] = ()

    def total_moments(self) -> tuple[float, float]:
        """Return the averaged (σ², μ²), each group's clipped to non-negative, summed;
        NaN before the first sample.

        A group without a sample, added later, counts as zero, as in the gain.
        """
        sampled = [x for x in self.group_sigma2 if not math.isnan(x)]
        if not sampled:
            return math.nan, math.nan
        sigma2 = sum([x for x in sampled if x > 0], 0.0)
        mu2 = sum([x for x in self.group_mu2 if x > 0], 0.0)
        return sigma2, mu2
