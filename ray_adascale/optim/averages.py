"""The averages of σ² and μ² over steps: how each step moves them, and the gain that follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import gain as gain_math
from ..batch import StepPlan
from ..gain import Average
from .step_result import StepResult
from .step_sums import StepSums, constant

Smoothing = float | Callable[[StepPlan], float]
"""θ of a moving average over steps: a constant, or a function of the step's plan."""


def check_averaging(
    clip: str, smoothing: Smoothing | None, window: float | None, total_steps: float | None, variance_floor: float
) -> None:
    """Check the arguments of :class:`ray_adascale.AdaScale` that concern the averages.

    Raises:
        ValueError: An argument is out of its range, or contradicts another.
    """
    if clip not in ("samples", "averages"):
        raise ValueError(f"Invalid {clip=}. Must be 'samples' or 'averages'.")
    if window is not None and (smoothing is not None or total_steps is None):
        raise ValueError(f"averaging_window={window} needs total_steps, and excludes smoothing (got {smoothing=}).")
    if window is not None and total_steps is not None and not (0 < window < math.inf and 0 < total_steps < math.inf):
        raise ValueError(f"Invalid averaging_window={window}, {total_steps=}. Both must be positive and finite.")
    if smoothing is not None and not callable(smoothing) and not 0 <= smoothing < 1:
        raise ValueError(f"Invalid {smoothing=}. Must be in [0, 1).")
    if not 0 <= variance_floor < math.inf:
        raise ValueError(f"Invalid {variance_floor=}. Must be a number ≥ 0, the lower bound on each σ²; 0 for none.")


@dataclass(frozen=True)
class CountDecay:
    """FairScale's θ = max(1 − n/1000, 0), with n = workers × ``passes``. A shortened step has the θ of a full one.

    Attributes:
        passes: Backward passes of a full step.
    """

    passes: int

    def __call__(self, plan: StepPlan) -> float:
        return gain_math.count_decay(plan.workers * self.passes)


@dataclass(frozen=True)
class NoiseReadout:
    """The numbers of some averages at a scale, on the host.

    Attributes:
        gains: r of each group.
        gain: r of the whole optimizer.
        sigma2: Averaged σ² of each group, unclipped; NaN before the first sample.
        mu2: Averaged μ² of each group, unclipped; NaN before the first sample.
    """

    gains: list[float]
    gain: float
    sigma2: list[float]
    mu2: list[float]

    def total_moments(self) -> tuple[float, float]:
        """Return the averaged (σ², μ²), each group's clipped to non-negative, summed; NaN before the first sample.

        A group without a sample, added later, counts as zero, as in the gain.
        """
        if all(math.isnan(x) for x in self.sigma2):
            return math.nan, math.nan
        return sum((x for x in self.sigma2 if x > 0), 0.0), sum((x for x in self.mu2 if x > 0), 0.0)


@dataclass(frozen=True)
class StepNumbers:
    """The numbers of a step, on the device of its sums.

    Attributes:
        scale: S of the step.
        averages: The averages with the step's sample in them.
        finite: Whether the step's gradient is finite; bool, 0-dim.
        gains: r of each gain's group, float64; then r of the whole optimizer, if there are several groups.
        numbers: What the host reads, float64, 1-D: a number that is finite if the gradient is, σ² and μ² of the step's sample
            (NaN where there is none), the gains, the averages, the payload.
    """

    scale: float
    averages: Average
    finite: Tensor
    gains: Tensor
    numbers: Tensor

    def read(self, numbers: list[float]) -> tuple[StepResult, NoiseReadout]:
        """Return the step and the averages on the host. The step's clock, factor and count are not set.

        Args:
            numbers: :attr:`numbers` on the host.
        """
        count, size = self.averages.total.shape[1], len(self.gains)
        check, sigma2, mu2, *rest = numbers
        gains, averages = rest[:size], rest[size : size + 3 * count]
        weights = averages[2 * count :]
        values = [x / w if w > 0 else math.nan for x, w in zip(averages, weights * 2, strict=False)]
        readout = NoiseReadout(gains[:count], gains[-1], values[:count], values[count:])
        skipped, payload = not math.isfinite(check), rest[size + 3 * count :]
        step = StepResult(gain=readout.gain, sigma2=sigma2, mu2=mu2, skipped=skipped, payload=payload)
        return step, readout


class Averages:
    """Moving averages of σ² and μ² over steps, and the gains that follow from them.

    Args:
        num_gains: Gains that are kept: one for each parameter group, or one for all.
        device: Device of the statistics.
        smoothing: θ of the moving average over steps.
        variance_floor: Lower bound on σ².
        clip_samples: Enforce σ², μ² ≥ 0 on each sample, and not only on the averages when they are evaluated.
        debias: Debiased moving average, else the paper's.
        window: Average over effective time, with this share of the run as the width; None: over steps, with θ.
        total_steps: T, for ``window``.

    Attributes:
        now: The averages. They are replaced and never changed in place.
        non_negative: Whether the averages are known to be σ² ≥ the floor and μ² ≥ 0.
    """

    def __init__(
        self,
        num_gains: int,
        device: torch.device | str = "cpu",
        *,
        smoothing: Smoothing,
        variance_floor: float,
        clip_samples: bool,
        debias: bool,
        window: float | None,
        total_steps: float | None,
    ) -> None:
        self.smoothing = smoothing
        self.variance_floor = variance_floor
        self.clip_samples = clip_samples
        self.debias = debias
        self._window = window
        self._total_steps = total_steps
        # One weight for each gain, since a group may be added later.
        self.now = Average.empty((2, num_gains), device)
        self.non_negative = clip_samples
        self._floors = torch.tensor([[variance_floor], [0.0], [1.0]], dtype=torch.float64)
        self._cached: tuple[Average, float, NoiseReadout] | None = None  # a step reads the same averages several times

    def _empty(self, num_gains: int | None = None) -> Average:
        groups = self.now.total.shape[1] if num_gains is None else num_gains
        return Average.empty((2, groups), self.now.total.device)

    # ---- how they move -------------------------------------------------------------------------------------------

    def theta(self, plan: StepPlan) -> float:
        """Return θ of the moving average over steps, for a step of this plan."""
        return self.smoothing(plan) if callable(self.smoothing) else self.smoothing

    def after(self, sums: StepSums, previous_gain: float) -> StepNumbers:
        """Return the numbers of a step, with the averages after it. No host synchronization. Call it once for a step.

        Args:
            sums: The step's.
            previous_gain: r of the step before.
        """
        check, sample, usable = sums.sample(self.now.total.shape[1])
        finite = check < math.inf
        now, device = self.now.to(check.device), check.device
        moments = constant(math.nan, device).expand(2)
        if sample is not None:
            moments = sample[:2].reshape(-1) if sample.shape[1] == 1 else sample[:2].sum(dim=1)
            if usable is not None:
                moments = moments.masked_fill(~usable, math.nan)
            if self.clip_samples:
                sample = torch.maximum(sample, self._floors_on(device))
            use = finite if usable is None else finite & usable
            decay = self.decay(sums.plan, previous_gain)
            now = now.update_packed(sample, decay, debias=self.debias, use=use)
        return self._numbers(now, sums.plan.scale, check, finite, moments, sums.payload)

    def decay(self, plan: StepPlan, previous_gain: float) -> float:
        """Return θ for a step of this plan.

        Args:
            plan: The plan.
            previous_gain: r of the step before.
        """
        if self._window is None or self._total_steps is None:
            return self.theta(plan)
        return gain_math.plain_effective_decay(previous_gain, window=self._window, total_steps=self._total_steps)

    def restart(self) -> None:
        """Remove all samples."""
        self.now = self._empty()

    def add_gain(self, plan: StepPlan) -> None:
        """Add a gain, of a new parameter group, which starts without a sample.

        FairScale has a single count for the plain means of ``debias=False``, also for a group that comes later: its first sample
        is then divided by the number of all steps, or, if the average moves already, added to σ² = 0 and μ² = 1.

        Args:
            plan: Plan of a full step.
        """
        old = self.now
        self.now = self._empty(old.total.shape[1] + 1)
        for name in ("total", "weight", "count"):
            getattr(self.now, name)[..., :-1] = getattr(old, name)
        count = int(old.count.max())
        if not self.debias and self._window is None and count > 0:
            self.now.count[-1], self.now.weight[-1] = count, 1.0
            if count + 1 >= 1 / (1 - self.theta(plan)):
                self.now.total[1, -1] = 1.0

    # ---- the gains that follow -----------------------------------------------------------------------------------

    def _floors_on(self, device: torch.device) -> Tensor:
        if self._floors.device != device:
            self._floors = self._floors.to(device)
        return self._floors

    def _numbers(
        self, averages: Average, scale: float, check: Tensor, finite: Tensor, moments: Tensor, payload: Tensor | None
    ) -> StepNumbers:
        total, weight = averages.total, averages.packed[-1:]
        if total.shape[1] > 1:
            # The whole has the sum of the groups' averages. Their totals have unequal weights if a group was added later.
            whole = (total / weight).nan_to_num_(0.0).sum(dim=1, keepdim=True)  # 0/0 of a group without a sample
            total = torch.cat([total, whole], dim=1)
            weight = torch.cat([weight, weight.amax(dim=1, keepdim=True).sign()], dim=1)
        if not self.non_negative:
            total = torch.maximum(total, self._floors_on(total.device)[:2] * weight)
        gains = gain_math.gain_of_sums(total[0], total[1], scale)
        parts = [check.view(1), moments, gains, averages.packed.reshape(-1)]
        numbers = torch.cat(parts if payload is None else [*parts, payload])
        return StepNumbers(scale, averages, finite, gains, numbers)

    def cache(self, averages: Average, scale: float, readout: NoiseReadout) -> None:
        """Keep the readout of averages at a scale."""
        self._cached = averages, scale, readout

    def cached(self, averages: Average, scale: float) -> NoiseReadout | None:
        """Return the readout of averages at a scale, if it was kept."""
        if self._cached is None:
            return None
        of, at, readout = self._cached
        return readout if of is averages and at == scale else None

    def evaluate(self, averages: Average, scale: float) -> NoiseReadout:
        """Return the readout of averages at a scale; waits for the device unless it was kept."""
        readout = self.cached(averages, scale)
        if readout is None:
            zero = constant(0.0, averages.packed.device)
            found = self._numbers(averages, scale, zero, zero, zero.expand(2), None)
            readout = found.read(found.numbers.tolist())[1]
            self.cache(averages, scale, readout)
        return readout

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Tensor]:
        """Return copies on the CPU."""
        return {name: getattr(self.now, name).detach().cpu().clone() for name in ("total", "weight", "count")}

    def check(self, state: dict[str, Tensor]) -> None:
        """Raise if a :meth:`state` has another number of gains.

        Raises:
            ValueError: It has.
        """
        expected, found = tuple(self.now.total.shape), tuple(state["total"].shape)
        if expected != found:
            raise ValueError(
                f"The AdaScale statistics in the state dict are of {found[1]} gains, this optimizer has {expected[1]}. "
                "Parameter groups (or single_gain) differ."
            )

    def load(self, state: dict[str, Tensor]) -> None:
        """Load a :meth:`state`, which is left unchanged."""
        self.check(state)
        device = self.now.total.device
        sigma2, mu2 = state["total"]
        self.non_negative = self.clip_samples and bool(
            (sigma2 >= self.variance_floor * state["weight"]).all() and (mu2 >= 0).all()
        )
        self.now = Average.of(*(state[name].to(device, copy=True) for name in ("total", "weight", "count")))
