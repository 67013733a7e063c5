"""The averages of σ² and μ² over steps: how each step moves them, and the gain that follows from them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from .. import gain as gain_math
from ..batch import StepPlan
from ..gain import Average
from .exchange import Numbers, Packed
from .sampling import MeasuredSteps
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


class Averages:
    """Moving averages of σ² and μ² over steps, and the gains that follow from them.

    Args:
        num_gains: Gains that are kept: one for each parameter group, or one for all.
        device: Device of the statistics.
        smoothing: θ of the moving average over steps.
        variance_floor: Lower bound on σ².
        clip_samples: Enforce σ², μ² ≥ 0 on each sample, and not only on the averages when they are evaluated.
        debias: Debiased moving average, else the paper's.
        sampling: Its window is the width of averages over effective time; without one they are over steps, with θ.

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
        sampling: MeasuredSteps,
    ) -> None:
        self.smoothing = smoothing
        self.variance_floor = variance_floor
        self.clip_samples = clip_samples
        self.debias = debias
        self._sampling = sampling
        # One weight for each gain, since a group may be added later.
        self.now = Average.empty((2, num_gains), device)
        self.non_negative = clip_samples
        self._floors = torch.tensor([[variance_floor], [0.0], [1.0]], dtype=torch.float64)
        self._cached: tuple[Average, float, StepResult] | None = None  # a step reads the same averages several times
        self._known: tuple[Average, float, Numbers] | None = None  # gains and averages among the numbers of a step

    def _empty(self, num_gains: int | None = None) -> Average:
        groups = self.now.total.shape[1] if num_gains is None else num_gains
        return Average.empty((2, groups), self.now.total.device)

    # ---- how they move -------------------------------------------------------------------------------------------

    def theta(self, plan: StepPlan) -> float:
        """Return θ of the moving average over steps, for a step of this plan."""
        return self.smoothing(plan) if callable(self.smoothing) else self.smoothing

    def updated_by(self, sums: StepSums, advance: float) -> tuple[Average, Tensor, Packed]:
        """Return the averages after a step, and its numbers, without host synchronization.

        Args:
            sums: The step's.
            advance: Of τ since the last sample.

        Returns:
            The averages. Whether the step's gradient is finite: bool, 0-dim. The numbers for :meth:`read`.
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
            decay = self.decay(sums.plan, advance)
            now = now.update_packed(sample, decay, debias=self.debias, use=use)
        others = sums.shared if (identity := sums.identity) is None else {**sums.shared, "identity": identity}
        return now, finite, self._numbers(now, sums.plan.scale, check, moments, others)

    def decay(self, plan: StepPlan, advance: float) -> float:
        """Return θ for a step of this plan.

        Args:
            plan: The plan.
            advance: Of τ since the last sample.
        """
        window = self._sampling.window
        return self.theta(plan) if window is None else gain_math.plain_effective_decay(advance, window)

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
        if not self.debias and self._sampling.window is None and count > 0:
            self.now.count[-1], self.now.weight[-1] = count, 1.0
            if count + 1 >= 1 / (1 - self.theta(plan)):
                self.now.total[1, -1] = 1.0

    # ---- the gains that follow -----------------------------------------------------------------------------------

    def _floors_on(self, device: torch.device) -> Tensor:
        if self._floors.device != device:
            self._floors = self._floors.to(device)
        return self._floors

    def _numbers(self, averages: Average, scale: float, check: Tensor, moments: Tensor, shared: Numbers) -> Packed:
        known = self._known  # after a step that was not measured they are those of the step before
        if known is None or known[0] is not averages or known[1] != scale:
            gains = {"gains": self._gains(averages, scale), "averages": averages.packed.reshape(-1)}
            known = self._known = averages, scale, gains
        return Packed.of({"check": check, "moments": moments, **known[2], **shared})

    def _gains(self, averages: Average, scale: float) -> Tensor:
        """Return r of each gain's group; then r of the whole optimizer, if there are several groups."""
        total, weight = averages.total, averages.packed[-1:]
        if total.shape[1] > 1:
            # The whole has the sum of the groups' averages. Their totals have unequal weights if a group was added later.
            whole = (total / weight).nan_to_num_(0.0).sum(dim=1, keepdim=True)  # 0/0 of a group without a sample
            total = torch.cat([total, whole], dim=1)
            weight = torch.cat([weight, weight.amax(dim=1, keepdim=True).sign()], dim=1)
        if not self.non_negative:
            total = torch.maximum(total, self._floors_on(total.device)[:2] * weight)
        return gain_math.gain_of_sums(total[0], total[1], scale)

    def gains_of(self, numbers: Packed) -> Tensor:
        """Return r of each gain's group from the numbers of :meth:`updated_by`."""
        return numbers.apart()["gains"][: self.now.packed.shape[1]]

    def read(self, numbers: Mapping[str, list[float]], averages: Average, sums: StepSums) -> StepResult:
        """Return a step, but for its clock, factor and count, and keep what it says of the averages.

        Args:
            numbers: Those of :meth:`updated_by`, on the host. "check": finite if the gradient is. "moments": σ² and μ² of the
                step's sample, NaN where there is none. "gains": that of the whole optimizer last. "averages". The shared numbers.
            averages: Those of :meth:`updated_by`.
            sums: The step's.
        """
        scale, count = sums.plan.scale, averages.packed.shape[1]
        (check,), (sigma2, mu2), gains, packed = (numbers[name] for name in ("check", "moments", "gains", "averages"))
        weights = packed[2 * count :]
        values = [x / w if w > 0 else math.nan for x, w in zip(packed, weights * 2, strict=False)]
        step = StepResult(
            gain=gains[-1],
            sigma2=sigma2,
            mu2=mu2,
            squared_norm=mu2 + sigma2 / scale if sums.measured else check,
            skipped=not math.isfinite(check),
            shared={name: numbers[name][0] for name in sums.shared_names},
            identity=numbers["identity"][0] if "identity" in numbers else 0.0,
            group_gains=gains[:count],
            group_sigma2=values[:count],
            group_mu2=values[count:],
        )
        self._cached = averages, scale, step
        return step

    def evaluate(self, averages: Average, scale: float) -> StepResult:
        """Return a step's result as far as it follows from averages at a scale; waits for the device unless it was read."""
        if self._cached is not None and self._cached[0] is averages and self._cached[1] == scale:
            return self._cached[2]
        zero = constant(0.0, averages.packed.device)
        numbers = self._numbers(averages, scale, zero, zero.expand(2), {})
        read = numbers.named(numbers.tensor.tolist())
        return self.read(read, averages, StepSums(StepPlan().at_scale(scale), {}))

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
