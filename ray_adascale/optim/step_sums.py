"""The numbers of one optimizer step: its sums over the workers, as they travel in one
all-reduce; its sample of the noise, σ² and μ²; and what became of it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from ..batch import StepPlan
from ..gain import gradient_moments

Numbers = Mapping[str, Tensor]
"""Numbers by name: float64, 0-dim or 1-D, on one device."""


@dataclass(frozen=True)
class Packed:
    """Numbers in one tensor, so that they travel together.

    Attributes:
        tensor: All numbers, 1-D.
        sizes: How many numbers each name has, in the order of the tensor.
    """

    tensor: Tensor
    sizes: Mapping[str, int]

    @classmethod
    def of(cls, numbers: Numbers) -> Packed:
        """Return the numbers in one new tensor."""
        rows = {
            name: number if number.dim() else number.view(1)
            for name, number in numbers.items()
        }
        return cls(
            torch.cat([*rows.values()]),
            {name: row.numel() for name, row in rows.items()},
        )

    def apart(self, tensor: Tensor | None = None) -> dict[str, Tensor]:
        """Return the numbers by name, 1-D: views of the tensor, or of its copy
        elsewhere.
        """
        return dict(
            zip(
                self.sizes,
                (self.tensor if tensor is None else tensor).split(
                    [*self.sizes.values()]
                ),
                strict=True,
            )
        )


OWN = (
    "a",
    "c",
    "complete",
    "samples",
    "reduced",
    "identity",
    "loss_scale",
    "check",
    "late",
    "weights",
)
"""The names of the statistics' numbers, which a caller can't share."""


def mean_sq_norm(
    plan: StepPlan, norms: Sequence[Tensor], weights: Sequence[float] | None = None
) -> Tensor:
    """Return this worker's part of A = Σ w_i ‖g_i‖².

    Args:
        plan: The step's plan.
        norms: Squared norm of the gradient of each pass as measured, with the factor
            that its loss carried.
        weights: w of this worker's gradient sample in each pass. Default: all 1/n. A
            sample of weight 0 adds nothing.

    Raises:
        RuntimeError: There are more passes than weights.
    """
    if weights is not None and len(weights) < len(norms):
        raise RuntimeError(
            f"This step has {len(norms)} backward passes, and sample_weights are of "
            f"{len(weights)}. Set a weight for each pass before the step's last "
            "backward pass; and add the losses of one micro-batch: run.backward(loss + "
            "other_loss)."
        )
    n = plan.num_samples
    parts = []
    for i, measured in enumerate(norms):
        w = 1 / n if weights is None else weights[i]
        if w == 0:
            continue
        # The gradient carried the factor of its loss: w_i ‖g_i‖² = w_i/c² · ‖c·g_i‖².
        c = plan.loss_factor(w)
        parts.append(measured * (w / c**2))
    if not parts:
        return torch.zeros_like(norms[0])
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


def checked_weights(weights: Iterable[float | Tensor]) -> list[float]:
    """Return weights that a caller gives, as numbers.

    Raises:
        ValueError: They are no list of numbers, or one is negative or not finite.
    """
    try:
        numbers = [float(w) for w in weights]
    except (TypeError, ValueError, RuntimeError):
        raise ValueError(
            f"Invalid sample_weights={weights!r}. Must be a list of numbers, a weight "
            "for each backward pass of this worker."
        ) from None
    for number in numbers:
        if not 0 <= number < math.inf:
            raise ValueError(
                f"Invalid sample_weights={numbers}. Each must be at least 0: the share "
                "of a micro-batch in the units of the step. A weight of 0 leaves it "
                "out."
            )
    return numbers


def numbers_of_weights(
    plan: StepPlan, weights: Sequence[float] | None, device: torch.device
) -> Tensor:
    """Return what the workers compare of their weights: whether this worker has set
    any, their sum, and how many samples count because they are not 0; ``[3]``.
    """
    if weights is None:
        return constant(0.0, device).expand(3)
    of_step = weights[: plan.passes]
    count = sum(w != 0 for w in of_step)
    # Fills on the device: a copy from the host would wait for it.
    total = torch.full((1,), sum(of_step), dtype=torch.float64, device=device)
    return torch.cat([constant(1.0, device), total, constant(float(count), device)])


_CONSTANTS: dict[tuple[float, torch.device, torch.dtype], Tensor] = {}


def constant(
    number: float, device: torch.device, dtype: torch.dtype = torch.float64
) -> Tensor:
    """Return one of few numbers as a tensor ``[1]`` on a device. It is kept, since
    to make one is a launch in each step.
    """
    key = number, device, dtype
    if key not in _CONSTANTS:
        _CONSTANTS[key] = torch.full((1,), number, dtype=dtype, device=device)
    return _CONSTANTS[key]


class NoiseSample(NamedTuple):
    """A step's sample of the noise.

    Attributes:
        check: Finite if the step's gradient is, and else NaN or +∞, which makes it a
            skipped step, 0-dim; ‖ḡ‖² if the step was not measured.
        rows: σ² and μ², unclipped, and a row of ones, ``[3, num_gains]``; None where the
            step yields none.
        valid: Whether the rows are valid, bool, 0-dim; None if they are.
    """

    check: Tensor
    rows: Tensor | None = None
    valid: Tensor | None = None


@dataclass(frozen=True)
class StepSums:
    """What the backward passes of one complete step left, summed over workers.

    Attributes:
        plan: The step's plan.
        numbers: "c": C per parameter group, as measured. If the step was measured "a",
            A likewise, and "complete", the workers that saw all passes. "samples" and
            "reduced": Σ w_i⟨g_i, v⟩ and ⟨ḡ, v⟩, in a step that is checked. "loss_scale"
            where there is one. Without an observer "check", which is finite if the
            gradients are, in place of "c". "late", likewise, where the loop has changed
            gradients after the last pass. "weights": :func:`numbers_of_weights`, if the
            step was measured and its weights can be wrong. And what the caller shares,
            by its names.
        packed: All numbers in one tensor, where they travelled so; else None.
        all_measured: Whether the norm of every gradient of the step was measured. Else
            "c" has a gradient that "a" lacks.
        saw_all_passes: Whether this worker saw all passes, so that "complete" is not 0.
        weighted: Whether samples may have the weight 0: n is then the number of those
            that have not.
        shared_names: The names that a caller has shared.
    """

    plan: StepPlan
    numbers: Numbers
    packed: Packed | None = None
    all_measured: bool = False
    saw_all_passes: bool = False
    weighted: bool = False
    shared_names: tuple[str, ...] = ()

    @property
    def measured(self) -> bool:
        """Whether passes have measured the gradients."""
        return "a" in self.numbers

    @property
    def unobserved(self) -> bool:
        """Whether no observer has seen the step's gradients."""
        return "check" in self.numbers

    @property
    def sampled(self) -> bool:
        """Whether the step yields a sample of the noise."""
        return self.measured and self.all_measured and self.plan.num_samples > 1

    @property
    def identity(self) -> Tensor | None:
        """Difference between Σ w_i⟨g_i, v⟩ and ⟨ḡ, v⟩ over √A, ``[1]``; None in a
        step that is not checked.
        """
        if "samples" not in self.numbers or not self.sampled:
            return None
        difference = (
            self.numbers["samples"] - self.numbers["reduced"]
        ).abs() / self.plan.multiple_of_mean
        relative = difference / self.numbers["a"].sum().sqrt()
        if self.saw_all_passes:
            return relative
        return relative * (self.numbers["complete"] > 0)

    def on_host(self) -> StepSums:
        """Return the sums on the CPU, after one copy, which waits for the device;
        this object if they are there.
        """
        if next(iter(self.numbers.values())).is_cpu:
            return self
        packed = Packed.of(self.numbers) if self.packed is None else self.packed
        return replace(self, numbers=packed.apart(packed.tensor.cpu()), packed=None)

    def sample(self, num_gains: int) -> NoiseSample:
        """Return the step's sample of the noise. No host synchronization.

        Args:
            num_gains: One for each parameter group, or one for all.
        """
        if self.unobserved:
            return NoiseSample(self.numbers["check"][0])

        # C, with the mean in place of the sum, and without the loss scale.
        c = self.numbers["c"]
        groups = len(c)
        if self.plan.multiple_of_mean != 1:
            c = c / self.plan.multiple_of_mean**2
        scale = self.numbers.get("loss_scale")
        if scale is not None:
            squared = scale.square()
            c = c / squared
        if "late" in self.numbers:
            c = c + 0 * self.numbers["late"]  # NaN, and so a skipped step, if it is
        if not self.measured:
            return NoiseSample(c[0] if groups == 1 else c.sum())

        # A likewise.
        a = self.numbers["a"]
        if scale is not None:
            a = a / squared
        if num_gains < groups:
            a = a.sum(dim=0, keepdim=True)
            c = c.sum(dim=0, keepdim=True)
        if not self.sampled:
            return NoiseSample((a + c).sum())

        # σ² and μ², of the samples that count.
        valid = None
        if not self.saw_all_passes:
            valid = self.numbers["complete"][0] > 0
        count: int | Tensor = self.plan.num_samples
        if self.weighted:
            counted = self.numbers["weights"][2]
            several = counted > 1
            valid = several if valid is None else valid & several
            count = counted.clamp(min=2)
        moments = gradient_moments(a, c, scale=self.plan.scale, count=count)
        ones = constant(1.0, c.device).expand(num_gains)
        rows = torch.stack([*moments, ones])
        return NoiseSample(rows.sum(), rows, valid)


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
        skips: Steps in a row, up to this one, that were left out because a gradient
            was not finite; 0 if this one was taken. The shared numbers are of this step
            even so.
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
    skips: int = 0
    identity: float = 0.0
    shared: Mapping[str, float] = field(default_factory=dict)
    group_gains: Sequence[float] = ()
    group_sigma2: Sequence[float] = ()
    group_mu2: Sequence[float] = ()

    @property
    def skipped(self) -> bool:
        """Whether the step was left out because a gradient was not finite."""
        return self.skips > 0

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
