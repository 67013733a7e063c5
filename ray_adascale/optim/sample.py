"""The sample of one optimizer step: what was summed over workers, and σ² and μ² that follow from it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from .. import gain as gain_math
from ..gain import Average
from .example_noise import ExampleNoise, ExampleSums
from .numbers import Numbers
from .step_shape import StepShape


@dataclass(frozen=True)
class Outcome:
    """The numbers of one step's sample on the host.

    Attributes:
        skipped: Whether the step's gradient is not finite.
        sigma2: σ² of the sample, over all groups; NaN where the step yields none.
        mu2: μ² of the sample, over all groups; NaN where the step yields none.
        payload: The payload, summed over workers.
    """

    skipped: bool
    sigma2: float
    mu2: float
    payload: Sequence[float]


def unpack_outcome(numbers: Sequence[float], payloads: int) -> tuple[Outcome, list[float]]:
    """Return an outcome from numbers on the host, and the numbers that follow it.

    Args:
        numbers: A number that is finite if the gradient is, σ², μ² and the payload; further numbers.
        payloads: Length of the payload.
    """
    check, sigma2, mu2, *rest = numbers
    return Outcome(not math.isfinite(check), sigma2, mu2, rest[:payloads]), rest[payloads:]


@dataclass
class Sample:
    """The statistics of one complete optimizer step, summed over workers, before they are averaged.

    Attributes:
        shape: The step's shape.
        moments: σ² and μ², ``[2, groups]``, unclipped; None where the step yields none.
        usable: Whether ``moments`` are valid; bool, 0-dim.
        check: A number that is finite if the step's gradient is; float64, 0-dim.
        payload: The payload, summed over workers; None without one.
        averages: The averages with this sample in them, once they were computed.
    """

    shape: StepShape
    moments: Tensor | None
    usable: Tensor
    check: Tensor
    payload: Tensor | None
    averages: Average | None = None

    @property
    def finite(self) -> Tensor:
        """Whether the step's gradient is finite; bool, 0-dim."""
        return torch.isfinite(self.check)

    @property
    def payloads(self) -> int:
        """Length of the payload."""
        return 0 if self.payload is None else len(self.payload)

    def outcome(self) -> list[Tensor]:
        """Return the numbers of an :class:`Outcome`, float64, 1-D; :func:`unpack_outcome` reads them on the host."""
        if self.moments is None:
            moments = torch.full((2,), math.nan, dtype=torch.float64, device=self.check.device)
        else:
            moments = self.moments.sum(dim=1).masked_fill(~self.usable, math.nan)
        return [self.check.view(1), moments, *([] if self.payload is None else [self.payload])]

    def on_host(self) -> Outcome:
        """Return the outcome; waits for the device."""
        if self.moments is None and self.check.is_cpu:  # a step of a base run: two numbers at most, and no wait
            payload = [] if self.payload is None else self.payload.tolist()
            return Outcome(not math.isfinite(self.check.item()), math.nan, math.nan, payload)
        return unpack_outcome(torch.cat(self.outcome()).tolist(), self.payloads)[0]


@dataclass(frozen=True)
class Gathered:
    """What the backward passes of one complete step left, summed over workers.

    Attributes:
        shape: The step's shape.
        num_gains: Gains: one for each group, or one for all.
        numbers: On the device of the statistics: "c" and "a" per group as measured, "complete" (workers that saw all passes);
            "examples" (an :class:`ExampleSums`), "payload", "loss_scale" where there are such.
        examples: Measures the noise by single examples; None: gradient samples do.
        watched: Whether every gradient of the step was watched. Else "c" has a gradient that "a" lacks.
        seen_here: Whether this worker saw all passes, so that "complete" is not 0.
    """

    shape: StepShape
    num_gains: int
    numbers: Numbers
    examples: ExampleNoise | None
    watched: bool
    seen_here: bool

    @property
    def by_samples(self) -> bool:
        """Whether σ² and μ² follow from several gradient samples."""
        return self.watched and self.examples is None and self.shape.num_samples > 1

    def sample(self, *, on_host: bool) -> Sample:
        """Return the sample. Call it once: the examples keep the σ² of a measured step.

        Args:
            on_host: Compute it on the CPU, after one copy of all numbers, which waits for the device. Else on the device.
        """
        numbers = self.numbers.on_host() if on_host else self.numbers
        shape = self.shape
        a, c, groups = numbers["a"], numbers["c"], len(numbers["a"])
        if shape.multiple_of_mean != 1:
            c = c / shape.multiple_of_mean**2
        scale, unscale = numbers.part("loss_scale"), None
        if scale is not None:
            unscale = scale.reciprocal().square()
            a, c = a * unscale, c * unscale
        a, c = self._by_gain(a), self._by_gain(c)
        usable = numbers["complete"][0] > 0
        moments = None
        if not self.watched:
            pass
        elif self.examples is not None:
            sums, found = None, numbers.part("examples")
            if found is not None:
                sums = ExampleSums.of(found)
                sq_norms = sums.sq_norms if unscale is None else sums.sq_norms * unscale
                sums = replace(sums, sq_norms=sq_norms.sum(dim=0, keepdim=True) if len(c) < groups else sq_norms)
            moments, measured = self.examples.moments(sums, c, shape)
            usable = usable & measured
        elif shape.num_samples > 1:
            moments = torch.stack(gain_math.gradient_moments(a, c, scale=shape.scale, count=shape.num_samples))
        return Sample(shape, moments, usable, (a + c).sum(), numbers.part("payload"))

    def _by_gain(self, of_groups: Tensor) -> Tensor:
        return of_groups if len(of_groups) == self.num_gains else of_groups.sum(dim=0, keepdim=True)
