"""AdaScale on one page, as pure functions: from a step's sums to the averages, the gain
r and the clock τ.

The source and the symbols are those of :mod:`ray_adascale.gain`. A step goes through
four functions, in this order:

1. :func:`estimate`: A and C give σ² and μ², these move the averages σ̄² and μ̄², and
   these give r. It computes with tensors and waits for nothing: a fused optimizer steps
   with these tensors.
2. :func:`result`: the same numbers on the host.
3. :func:`apply_rule`: the rule turns r into the factor on the LR and the increment of
   τ.
4. :func:`next_state`: τ, the number of steps, and the effective steps since the last
   sample.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from .._errors import check_count
from ..batch import StepPlan
from ..gain import Average, advanced, gain_of_sums, plain_effective_decay
from .rules import RuleInput, ScalingRule
from .step_sums import Numbers, StepResult, StepSums, constant

_NO_SAMPLE = (math.nan, math.nan)
WINDOW_SAMPLES = 50
"""Fewest measured steps in the averages' window. The first 50 steps of a run are all
measured.
"""
MOST_SKIPPED = 50
"""Steps in a row that may not be skipped."""


_FLOORS: dict[tuple[float, torch.device], Tensor] = {}  # to make a tensor is a launch

Smoothing = float | Callable[[StepPlan], float]
"""θ of a moving average over steps: a constant, or a function of the step's plan."""


@dataclass(frozen=True, kw_only=True)
class Averaging:
    """Settings of the moving averages of σ² and μ², and which steps measure a sample
    for them.

    Which these are depends on a step's number and plan. So all workers, and every
    resume, decide alike.

    Attributes:
        window: Width of averages over effective time, in effective steps; None for
            averages over steps.
        smoothing: θ of averages over steps.
        debias: Debiased averages over steps, else the paper's.
        clip_samples: Enforce σ², μ² ≥ 0 on each sample, and not only on the averages
            when they are read.
        variance_floor: Lower bound on σ².
        measure_every: k, if one step in k is to be measured. Default: as many as the
            window needs.

    Raises:
        ValueError: ``measure_every`` is out of its range.
    """

    window: float | None = None
    smoothing: Smoothing = 0.0
    debias: bool = True
    clip_samples: bool = False
    variance_floor: float = 0.0
    measure_every: int | None = None

    def __post_init__(self) -> None:
        if (
            self.measure_every is not None
            and check_count("measure_every", self.measure_every) > 1
            and self.window is None
        ):
            raise ValueError(
                f"Invalid measure_every={self.measure_every} without averaging_window: "
                "an average over steps needs each step's sample. Give averaging_window "
                "and total_steps."
            )

    def theta(self, plan: StepPlan) -> float:
        """Return θ of the moving average over steps, for a step of this plan."""
        return self.smoothing(plan) if callable(self.smoothing) else self.smoothing

    def every(self, number: int, plan: StepPlan) -> int:
        """Return k. It grows from 1 as the run does, so that the averages never rest on
        few samples.

        No step advances τ by more than S, so the window has :data:`WINDOW_SAMPLES` at
        least.

        Args:
            number: Steps that have ended.
            plan: Plan of a full step.
        """
        if self.measure_every is not None or self.window is None:
            return self.measure_every or 1
        return min(
            max(1, math.floor(self.window / (max(plan.scale, 1.0) * WINDOW_SAMPLES))),
            1 + number // WINDOW_SAMPLES,
        )

    def measures(self, number: int, plan: StepPlan) -> bool:
        """Return whether a step is measured. The arguments are those of
        :meth:`every`.
        """
        return number % self.every(number, plan) == 0

    def decay(self, plan: StepPlan, since_sample: float) -> float:
        """Return θ for a sample of a step of this plan.

        Args:
            plan: The plan.
            since_sample: Effective steps since the last sample.
        """
        if self.window is None:
            return self.theta(plan)
        return plain_effective_decay(since_sample, self.window)

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


@dataclass(frozen=True)
class AdaScaleState:
    """What AdaScale keeps from step to step.

    Attributes:
        averages: σ̄² and μ̄² of each gain's group.
        last: The last step, with τ and the number of steps after it.
        since_sample: Effective steps since the last sample; before the first one 1.
        non_negative: Whether σ̄² ≥ the floor and μ̄² ≥ 0, because each sample was so.
    """

    averages: Average
    last: StepResult = field(default_factory=StepResult)
    since_sample: float = 1.0
    non_negative: bool = False

    @classmethod
    def empty(
        cls, num_gains: int, averaging: Averaging, device: torch.device | str = "cpu"
    ) -> AdaScaleState:
        """Return the state before the first step."""
        return cls(
            Average.empty((2, num_gains), device), non_negative=averaging.clip_samples
        )


@dataclass(frozen=True)
class Estimate:
    """The gain of a step and the averages after it, as tensors.

    Attributes:
        sums: The step's.
        averages: σ̄² and μ̄² after the step. They are those before it if it has no
            sample.
        finite: Whether the step's gradient is finite; bool, 0-dim.
        gains: r of each gain's group; then of the whole optimizer, if there are
            several. None if the step was not measured: the gains are those of the step
            before, which the host has.
        numbers: What the host reads: "check", which is finite if the gradient is, and
            what a caller has shared. Of a measured step also "moments", σ² and μ² of
            its sample, NaN where there is none; "gains"; "averages"; in some
            "identity" and "weights".
    """

    sums: StepSums
    averages: Average
    finite: Tensor
    gains: Tensor | None
    numbers: Numbers


def estimate(state: AdaScaleState, sums: StepSums, averaging: Averaging) -> Estimate:
    """Return the gain of a step, and the averages after it. No host synchronization."""
    # σ² and μ² from A and C
    sample = sums.sample(state.averages.count.numel())
    check = sample.check
    finite = check < math.inf
    numbers = {
        "check": check,
        **{name: sums.numbers[name] for name in sums.shared_names},
    }
    if not sums.measured:
        return Estimate(sums, state.averages, finite, None, numbers)
    averages = state.averages.to(check.device)
    moments = constant(math.nan, check.device).expand(2)
    rows = sample.rows
    if rows is not None:
        of_groups = rows[:2]
        if rows.shape[1] == 1:
            moments = of_groups.reshape(-1)
        else:
            moments = of_groups.sum(dim=1)
        use = finite
        if sample.valid is not None:
            moments = moments.masked_fill(~sample.valid, math.nan)
            use = finite & sample.valid
        if averaging.clip_samples:
            rows = torch.maximum(rows, averaging.floors(check.device))
        decay = averaging.decay(sums.plan, state.since_sample)
        averages = averages.update_packed(rows, decay, debias=averaging.debias, use=use)
    gains = gains_of(
        averages, sums.plan.scale, averaging, non_negative=state.non_negative
    )
    numbers |= {
        "moments": moments,
        "gains": gains,
        "averages": averages.packed.reshape(-1),
    }
    identity = sums.identity
    if identity is not None:
        numbers["identity"] = identity
    if "weights" in sums.numbers:
        numbers["weights"] = sums.numbers["weights"]
    return Estimate(sums, averages, finite, gains, numbers)


def gains_of(
    averages: Average, scale: float, averaging: Averaging, *, non_negative: bool
) -> Tensor:
    """Return r of each gain's group; then r of the whole optimizer, if there are
    several groups.

    Args:
        averages: σ̄² and μ̄².
        scale: S.
        averaging: How they were averaged.
        non_negative: As in :class:`AdaScaleState`.
    """
    total = averages.total
    weight = averages.packed[-1:]
    if total.shape[1] > 1:
        # The whole has the sum of the groups' averages. Their totals have unequal
        # weights if a group was added later.
        # 0/0 of a group without a sample
        whole = (total / weight).nan_to_num_(0.0).sum(dim=1, keepdim=True)
        total = torch.cat([total, whole], dim=1)
        weight = torch.cat([weight, weight.amax(dim=1, keepdim=True).sign()], dim=1)
    if not non_negative:
        total = torch.maximum(total, averaging.floors(total.device)[:2] * weight)
    return gain_of_sums(total[0], total[1], scale)


def averaged(numbers: Mapping[str, list[float]]) -> StepResult:
    """Return a step that has nothing but gains and averages.

    Args:
        numbers: On the host. "gains": those of :func:`gains_of`. "averages": the totals
            of each group's σ² and of its μ², and the weights.
    """
    gains, (sigma2, mu2) = numbers["gains"], means_of(numbers["averages"])
    return StepResult(
        gain=gains[-1],
        group_gains=gains[: len(mu2)],
        group_sigma2=sigma2,
        group_mu2=mu2,
    )


def means_of(averages: list[float]) -> tuple[list[float], list[float]]:
    """Return each group's σ̄² and μ̄², NaN before its first sample, from the
    averages as in :func:`averaged`.
    """
    count = len(averages) // 3
    weights = averages[2 * count :]
    means = [
        total / weight if weight > 0 else math.nan
        for total, weight in zip(averages, weights * 2, strict=False)
    ]
    return means[:count], means[count:]


def result(
    estimated: Estimate, numbers: Mapping[str, list[float]], gains: StepResult
) -> StepResult:
    """Return the step on the host. :func:`next_state` adds τ, the LR factor and the
    number of steps, :func:`skipped` the skipped steps before it.

    Args:
        estimated: The step's estimate.
        numbers: Its numbers on the host.
        gains: The gains and averages after the step: :func:`averaged`.
    """
    check, (sigma2, mu2) = numbers["check"][0], numbers.get("moments", _NO_SAMPLE)
    squared_norm = mu2 + sigma2 / estimated.sums.plan.scale
    if estimated.gains is None and "c" in estimated.sums.numbers:
        squared_norm = check
    return replace(
        gains,
        sigma2=sigma2,
        mu2=mu2,
        squared_norm=squared_norm,
        skips=0 if math.isfinite(check) else 1,
        identity=numbers["identity"][0] if "identity" in numbers else 0.0,
        shared={name: numbers[name][0] for name in estimated.sums.shared_names},
    )


@dataclass(frozen=True)
class RuleOutput:
    """Output of a scaling rule for one step.

    Attributes:
        lr_factors: Factor on the LR of each parameter group.
        group_increments: Increment of the clock of each parameter group, the exponent
            of its betas.
        lr_factor: Factor for the whole optimizer, which is reported.
        increment: Increment of τ.
    """

    lr_factors: Sequence[float]
    group_increments: Sequence[float]
    lr_factor: float
    increment: float

    @property
    def is_base_step(self) -> bool:
        """Whether the step is that of the base run, in which betas stay as they are."""
        return set(self.group_increments) == {1} and set(self.lr_factors) <= {0, 1}


def apply_rule(
    rule: ScalingRule,
    whole: RuleInput,
    group_gains: Sequence[float],
    normalizes: Sequence[bool],
) -> RuleOutput:
    """Return the output of a rule for a step with these gains.

    Args:
        rule: The rule.
        whole: Its input for the whole optimizer.
        group_gains: r of each gain's group.
        normalizes: As in :class:`.rules.RuleInput`, for each parameter group. Even with
            one gain, a rule may have another factor for each group.
    """
    inputs = [
        replace(
            whole,
            gain=group_gains[i % len(group_gains)],
            group=i,
            normalizes=normalized,
        )
        for i, normalized in enumerate(normalizes)
    ]
    lr_factors, group_increments = zip(*map(rule, inputs), strict=True)
    return RuleOutput(lr_factors, group_increments, *rule(whole))


def next_state(
    state: AdaScaleState,
    averages: Average,
    step: StepResult,
    lr_factor: float,
    increment: float,
) -> AdaScaleState:
    """Return the state after a step that was taken.

    Args:
        state: Before the step.
        averages: After the step.
        step: The step on the host.
        lr_factor: Factor on the LR, for the whole optimizer.
        increment: Of τ.
    """
    sampled = not math.isnan(step.sigma2)
    tau = advanced(state.last.effective_steps, increment)
    last = replace(
        step, effective_steps=tau, steps=state.last.steps + 1, lr_factor=lr_factor
    )
    since_sample = increment if sampled else increment + state.since_sample
    return AdaScaleState(averages, last, since_sample, state.non_negative)


def skipped(state: AdaScaleState, shared: Mapping[str, float]) -> AdaScaleState:
    """Return the state after a step that was left out: neither averages nor τ change.

    Args:
        state: Before the step.
        shared: What a caller has shared in the step.
    """
    last = replace(state.last, skips=state.last.skips + 1, shared=shared)
    return replace(state, last=last)
