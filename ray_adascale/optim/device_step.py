"""A step that stays on the device: gains, averages and outcome from the sums of a step, in few launches.

On a GPU the launch of an operation on a few numbers takes as long as that of a large one. With the formulas of
:mod:`ray_adascale.gain` a step has about fifty such operations. Here it has two products with small constant matrices and a
dozen operations. The results differ by rounding only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from ..gain import Average
from .averages import Averages
from .sample import Gathered, Sample
from .step_shape import StepShape

_MOST_SHAPES = 64  # constants that are kept; a run has one or two shapes of a step, and few S


@dataclass(frozen=True)
class DeviceStep:
    """A step's numbers on the device.

    Attributes:
        gains: r of each group, float64, 0-dim; one for all groups if it has length 1.
        skip: 1 if the step must change nothing, else 0; float32, 0-dim.
        averages: The averages with the step in them.
        numbers: Outcome (:func:`unpack_outcome`) and averages (:meth:`Averages.cache`), float64, 1-D.
        payloads: Length of the payload.
    """

    gains: Sequence[Tensor]
    skip: Tensor
    averages: Average
    numbers: Tensor
    payloads: int

    @classmethod
    def of(cls, sample: Sample, averages: Averages, previous_gain: float) -> DeviceStep:
        """Return the numbers of any sample, by the formulas of :mod:`ray_adascale.gain`.

        Args:
            sample: Computed on the device.
            averages: The averages before the step.
            previous_gain: r of the step before.
        """
        after = averages.with_sample(sample, previous_gain)
        numbers = averages.numbers(after, sample.shape.scale)
        skip = (~sample.finite).float()
        together = torch.cat([*sample.outcome(), *numbers])
        return cls(numbers[0].unbind(), skip, after, together, sample.payloads)


@dataclass(frozen=True)
class _Constants:
    """Constants of steps of one shape.

    Attributes:
        moments: ``[3, 3]``: times (C, A, 1) gives (σ², μ², 1).
        gain: ``[2, 3]``: times averages (σ², μ², weight) gives ``(S − 1)·σ²`` and ``σ² + S·μ²``. Their ratio is r − 1.
        floor: ``[3, 1]``: lower bounds of (σ², μ², 1).
        ones: ``[gains]``.
        zero: float32, 0-dim.
        one: float32, 0-dim.
    """

    moments: Tensor
    gain: Tensor
    floor: Tensor
    ones: Tensor
    zero: Tensor
    one: Tensor

    @classmethod
    def of(cls, shape: StepShape, floor: float, gains: int, device: torch.device) -> _Constants:
        n, s, m2 = shape.num_samples, shape.scale, shape.multiple_of_mean**2
        # σ² = (A − C)·S/(n − 1) and μ² = C − σ²/S, of C/m².
        moments = [[-s / (n - 1) / m2, s / (n - 1), 0.0], [n / (n - 1) / m2, -1 / (n - 1), 0.0], [0.0, 0.0, 1.0]]
        numbers = (
            torch.tensor(moments, dtype=torch.float64),
            torch.tensor([[s - 1, 0.0, 0.0], [1.0, s, 0.0]], dtype=torch.float64),
            torch.tensor([[floor], [0.0], [1.0]], dtype=torch.float64),
            torch.ones(gains, dtype=torch.float64),
            torch.zeros(()),
            torch.ones(()),
        )
        return cls(*(x.to(device, non_blocking=True) for x in numbers))


class DeviceArithmetic:
    """The arithmetic of steps with several gradient samples, on the device; the constants of a shape are made once.

    Args:
        averages: Averages the samples.
    """

    def __init__(self, averages: Averages) -> None:
        self._averages = averages
        self._constants: dict[tuple[StepShape, int, torch.device], _Constants] = {}

    def applies(self, gathered: Gathered) -> bool:
        """Whether :meth:`step` has the formulas for this step."""
        # A floor on averages that may lie below it would be one more operation.
        return gathered.by_samples and self._averages.non_negative and self._averages.debias

    def step(self, gathered: Gathered, previous_gain: float) -> DeviceStep:
        """Return the numbers of a step; no host synchronization.

        Args:
            gathered: The sums of the step, for which this :meth:`applies`.
            previous_gain: r of the step before.
        """
        numbers, shape, gains = gathered.numbers, gathered.shape, gathered.num_gains
        groups, device = len(numbers["a"]), numbers.tensor.device
        constants = self._constants_of(shape, gains, device)
        c_and_a = numbers.tensor[: 2 * groups]  # the first two parts
        if gains < groups:
            c_and_a = c_and_a.view(2, groups).sum(1)
        scale = numbers.part("loss_scale")
        if scale is not None:
            c_and_a = c_and_a / scale.square()
        sample = constants.moments @ torch.cat([c_and_a, constants.ones]).view(3, gains)  # (σ², μ², 1)
        # If A or C is not finite, σ² + μ² is NaN or +∞. It is never −∞.
        check = sample.sum()
        finite = check < math.inf
        total = sample[:2].reshape(-1) if gains == 1 else sample[:2].sum(1)
        use = finite
        if not gathered.seen_here:
            # If no worker saw passes, the gradients were set by hand, or are those of the step before.
            seen = numbers["complete"][0] > 0
            use, total = finite & seen, total.masked_fill(~seen, math.nan)
        averages = self._averages
        after = averages.now.to(device).update_packed(
            torch.maximum(sample, constants.floor), averages.decay(shape, previous_gain), use=use
        )
        parts = constants.gain @ after.packed
        if gains > 1:
            # The whole has the sum of the groups' averages. Their totals have unequal weights if a group was added later.
            whole = (parts / after.packed[2]).nan_to_num_(0.0).sum(1, keepdim=True)  # 0/0 of a group without a sample
            parts = torch.cat([parts, whole], dim=1)
        excess = (parts[0] / parts[1]).nan_to_num_(0.0)  # 0/0 without noise and signal: r = 1
        r = (excess + 1).clamp_(min(1.0, shape.scale), max(1.0, shape.scale))
        payload = numbers.part("payload")
        outcome = [check.view(1), total, *([] if payload is None else [payload])]
        together = torch.cat([*outcome, r[:gains], r[-1:], after.packed.reshape(-1)])
        skip = torch.where(finite, constants.zero, constants.one)
        payloads = 0 if payload is None else len(payload)
        return DeviceStep(r[:gains].unbind(), skip, after, together, payloads)

    def _constants_of(self, shape: StepShape, gains: int, device: torch.device) -> _Constants:
        key = shape, gains, device
        if key not in self._constants:
            if len(self._constants) == _MOST_SHAPES:
                self._constants.clear()
            self._constants[key] = _Constants.of(shape, self._averages.variance_floor, gains, device)
        return self._constants[key]
