"""The policies of a batch that follows the noise.

Decisions are made at step boundaries, at intervals in τ, from the averages of σ² and μ² alone. So all ranks decide alike without
a further collective, and a resumed run decides like one that was never stopped. "goodput" also needs a model of a step's seconds.
It is fitted once, to the run's first steps, and belongs to the run's state from then on.
"""

from __future__ import annotations

import math
import statistics
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ._errors import SettingError
from .batch_policy import BatchController, BatchLimits, BatchPlan, BatchPolicy, Position, nearest_plan
from .gain import plain_gain, scale_at_efficiency
from .throughput import Throughput

_INTERVAL = 0.25
"""Effective steps between decisions, as a share of the averages' window: the averages change no faster."""
_STEADY = 1.2
"""Hysteresis: keep the batch unless the target differs by this factor. It is more than the grid of plans is coarse."""
_GROWTH = 2.0
"""Largest growth of the batch in one decision, so that averages of a few samples can't throw it far."""
_BETTER = 1.05
"""Hysteresis for goodput: keep the batch unless another one makes this many times the progress a second."""
_TRIAL_STEPS, _WARM_UP = 8, 3
"""Steps that are timed with each plan, and the number of them that are left out as warm-up."""


def fit_step_time(times: Mapping[BatchPlan, float]) -> Throughput:
    """Fit the seconds of a step to measurements with up to three plans of one number of workers.

    The plans are: the first one, one with larger passes, and one with more passes. A negative share is measuring error and
    counts as none. Without a plan of more passes, all seconds that do not depend on the examples count for the step.

    Args:
        times: Seconds of a step by plan; at least one plan.
    """
    points = [(plan.accumulation, plan.global_batch_size / plan.world_size, t) for plan, t in times.items()]
    (passes, examples, seconds), *others = points
    pass_s = example_s = 0.0
    # At the same number of passes the difference is due to the examples. With more passes, the rest is due to them.
    for a, n, t in others:
        if a == passes and n > examples:
            example_s = max((t - seconds) / (n - examples), 0.0)
    for a, n, t in others:
        if a > passes:
            pass_s = max((t - seconds - (n - examples) * example_s) / (a - passes), 0.0)
    step_s = max(seconds - examples * example_s - passes * pass_s, 0.0)
    return Throughput(example_s=example_s, pass_s=pass_s, step_s=step_s)


def _fewest_passes(world_size: int) -> int:
    """Return the fewest passes of a step with at least two gradient samples."""
    return 2 if world_size == 1 else 1


@dataclass(frozen=True, kw_only=True)
class NoiseBatch(BatchPolicy):
    """Base class of the policies that choose the batch by the gradient noise. :class:`BatchSizeController` decides when.

    Attributes:
        limits: The batches that workers can make, and the bounds of the largest one.
    """

    limits: BatchLimits

    @property
    def changes_batch(self) -> bool:
        return True

    @property
    def follows_noise(self) -> bool:
        return True

    @property
    @abstractmethod
    def setting(self) -> dict[str, Any]:
        """The field of ``AdaScaleConfig`` that makes this policy, for error messages."""

    @property
    @abstractmethod
    def first_batch(self) -> float:
        """Examples of a step while the noise is unknown."""

    def plan(self, world_size: int) -> BatchPlan:
        return nearest_plan(self.plans(world_size), self.first_batch)

    def plans(self, world_size: int, largest: float = math.inf) -> list[BatchPlan]:
        """Return the batches to choose from, smallest first. Each is about a fifth larger than the one before.

        Each step has at least two gradient samples, since one sample tells nothing about the noise.

        Args:
            world_size: Workers.
            largest: Examples of the largest batch, beside the bounds of the limits. The smallest batch is always there.

        Raises:
            SettingError: The bounds leave no batch.
        """
        fewest = _fewest_passes(world_size)
        return self.limits.grid(self.limits.smallest(world_size, fewest, **self.setting), largest)

    def controller(
        self, world_size: int, *, total_steps: float, window: float, largest: float = math.inf
    ) -> BatchSizeController:
        return BatchSizeController(self, world_size, window=window, largest=largest)

    def largest_pass(self, world_size: int, *, window: float, largest: int) -> int:
        return self.limits.largest_pass(
            self.limits.largest_choice(window, largest), world_size, _fewest_passes(world_size)
        )

    def wanted(self, plans: Sequence[BatchPlan], now: BatchPlan, sigma2: float, mu2: float) -> float:
        """Return the examples of the next steps: the present batch, unless there is enough reason for another one.

        Args:
            plans: The plans to choose from, smallest first.
            now: The present plan, one of them.
            sigma2: Averaged gradient variance of one base batch; NaN where it is unknown.
            mu2: Averaged squared gradient norm; NaN where it is unknown.
        """
        known = not (math.isnan(sigma2) or math.isnan(mu2))
        return self._better(plans, now, sigma2, mu2) if known and len(plans) > 1 else now.global_batch_size

    @abstractmethod
    def _better(self, plans: Sequence[BatchPlan], now: BatchPlan, sigma2: float, mu2: float) -> float:
        """Return :meth:`wanted` of a known noise, among several plans."""


@dataclass(frozen=True, kw_only=True)
class EfficiencyBatch(NoiseBatch):
    """The policy of the largest batch with an expected efficiency r/S of at least a target.

    Attributes:
        target_efficiency: E, above 0 and at most 1. An E of 1 keeps the base batch.

    Raises:
        SettingError: The efficiency is out of its range.
    """

    target_efficiency: float

    def __post_init__(self) -> None:
        chosen: object = self.target_efficiency
        if isinstance(chosen, bool) or not isinstance(chosen, int | float) or not 0 < chosen <= 1:
            raise SettingError(
                "Invalid {}. Must be a number above 0 and at most 1 (0.6: the progress of a step is to be 60 % of the progress "
                "that its examples make at the base batch), 'goodput', or None.",
                target_efficiency=chosen,
            )

    @property
    def setting(self) -> dict[str, Any]:
        return {"target_efficiency": self.target_efficiency}

    @property
    def first_batch(self) -> float:
        """Examples of a step while the noise is unknown: the batch that reaches the target without any noise."""
        return self.limits.base_batch_size / self.target_efficiency

    def plans(self, world_size: int, largest: float = math.inf) -> list[BatchPlan]:
        if self.target_efficiency == 1:
            return [self.limits.smallest(world_size, 1, **self.setting)]
        return super().plans(world_size, largest)

    def _better(self, plans: Sequence[BatchPlan], now: BatchPlan, sigma2: float, mu2: float) -> float:
        batch = now.global_batch_size
        scale = scale_at_efficiency(sigma2, mu2, self.target_efficiency)
        wanted = min(scale * now.base_batch_size, plans[-1].global_batch_size, _GROWTH * batch)
        wanted = max(wanted, plans[0].global_batch_size)
        return wanted if max(wanted / batch, batch / wanted) >= _STEADY else batch


@dataclass(frozen=True, kw_only=True)
class GoodputBatch(NoiseBatch):
    """The policy of the batch with the most progress a second.

    Attributes:
        throughput: Seconds of a step; None: to be measured in the run's first steps.
    """

    throughput: Throughput | None = None

    @property
    def setting(self) -> dict[str, Any]:
        return {"target_efficiency": "goodput"}

    @property
    def needs_times(self) -> bool:
        return self.throughput is None

    @property
    def first_batch(self) -> float:
        """Examples of a step while the noise is unknown: the base batch."""
        return self.limits.base_batch_size

    def timed_by(self, throughput: Throughput | None) -> GoodputBatch:
        return replace(self, throughput=throughput) if self.needs_times else self

    def controller(
        self, world_size: int, *, total_steps: float, window: float, largest: float = math.inf
    ) -> GoodputController:
        return GoodputController(self, world_size, window=window, largest=largest)

    def _better(self, plans: Sequence[BatchPlan], now: BatchPlan, sigma2: float, mu2: float) -> float:
        batch, throughput = now.global_batch_size, self.throughput
        assert throughput is not None

        def goodput(plan: BatchPlan) -> float:
            return plain_gain(sigma2, mu2, plan.scale) / max(plan.seconds(throughput), 1e-12)

        best = max((plan for plan in plans if plan.global_batch_size <= _GROWTH * batch), key=goodput)
        return best.global_batch_size if goodput(best) > _BETTER * goodput(now) else batch


class BatchSizeController(BatchController):
    """Chooses the batch of each step at intervals in τ, for a run that follows the noise.

    Args:
        policy: Chooses the batch of a noise.
        world_size: Workers.
        window: Effective steps that the averages of σ² and μ² reach back over.
        largest: Examples of the largest batch, beside the policy's bounds.

    Attributes:
        plans: The plans to choose from, smallest batch first.
        plan: The plan of the next step.
    """

    def __init__(self, policy: NoiseBatch, world_size: int, *, window: float, largest: float = math.inf) -> None:
        self._policy = policy
        self._world_size = world_size
        self.plans = policy.plans(world_size, policy.limits.largest_choice(window, largest))
        self._interval = _INTERVAL * window
        self._wanted = policy.first_batch
        self._last_interval = 0
        self.plan = nearest_plan(self.plans, self._wanted)

    def due_by(self, at: Position) -> bool:
        return self._interval_of(at) > self._last_interval

    def _interval_of(self, at: Position) -> int:
        return math.floor(at.effective_steps / self._interval)

    def after_step(
        self,
        at: Position,
        moments: Callable[[], tuple[float, float]],
        seconds: float = 0.0,
        agree: Callable[[tuple[float, ...]], tuple[float, ...]] = tuple,
    ) -> BatchPlan:
        if self.due_by(at):
            self._last_interval = self._interval_of(at)
            self._decide(moments())
        return self.plan

    def _decide(self, moments: tuple[float, float]) -> None:
        wanted = self._policy.wanted(self.plans, self.plan, *moments)
        if wanted != self.plan.global_batch_size:
            self._wanted = wanted
            self.plan = nearest_plan(self.plans, wanted)

    def state(self) -> dict[str, Any]:
        return {"batch": self._wanted, "step_time": None, "world_size": self._world_size}

    def resume(self, state: Mapping[str, Any], at: Position, moments: tuple[float, float]) -> None:
        """Continue from a checkpoint. On another number of workers the run continues towards the same batch."""
        self._last_interval = self._interval_of(at)
        if state:
            self._wanted = state["batch"]
            self.plan = nearest_plan(self.plans, self._wanted)
        else:
            self._decide(moments)


class GoodputController(BatchSizeController):
    """Chooses the batch with the most progress a second. Without a model of a step's seconds, the run's first steps are timed.

    The arguments and attributes are those of :class:`BatchSizeController`.
    """

    _policy: GoodputBatch

    def __init__(self, policy: GoodputBatch, world_size: int, *, window: float, largest: float = math.inf) -> None:
        super().__init__(policy, world_size, window=window, largest=largest)
        self._trials = _trials(self.plans, policy.limits.max_accumulation) if policy.needs_times else []
        self._times: dict[BatchPlan, list[float]] = {}

    @property
    def step_time(self) -> Throughput | None:
        """Seconds of a step; None until they are measured."""
        return self._policy.throughput

    @property
    def measuring(self) -> bool:
        """Whether steps are still timed."""
        return bool(self._trials)

    def due_by(self, at: Position) -> bool:
        return self.measuring or super().due_by(at)

    def after_step(
        self,
        at: Position,
        moments: Callable[[], tuple[float, float]],
        seconds: float = 0.0,
        agree: Callable[[tuple[float, ...]], tuple[float, ...]] = tuple,
    ) -> BatchPlan:
        """Return the plan of the next step. ``agree`` is called once in a run, at the end of the measurement."""
        if not self.measuring:
            return super().after_step(at, moments)
        if self.plan == self._trials[0]:
            self._times.setdefault(self.plan, []).append(seconds)
        if len(self._times.get(self._trials[0], ())) >= _TRIAL_STEPS:
            del self._trials[0]
        if self._trials:
            self.plan = self._trials[0]
            return self.plan
        fitted = fit_step_time({plan: statistics.median(times[_WARM_UP:]) for plan, times in self._times.items()})
        self._policy = self._policy.timed_by(_from_numbers(agree(_as_numbers(fitted))))
        self.plan = nearest_plan(self.plans, self._wanted)
        self._last_interval = self._interval_of(at)
        self._decide(moments())
        return self.plan

    def state(self) -> dict[str, Any]:
        step_time = self.step_time
        return super().state() | {"step_time": None if step_time is None else list(_as_numbers(step_time))}

    def resume(self, state: Mapping[str, Any], at: Position, moments: tuple[float, float]) -> None:
        """Continue from a checkpoint. On another number of workers the seconds of a step are measured again."""
        if self._trials and state and state["step_time"] is not None and state["world_size"] == self._world_size:
            self._policy, self._trials = self._policy.timed_by(_from_numbers(state["step_time"])), []
        if state or not self._trials:  # while steps are timed, their plans are given
            super().resume(state, at, moments)
        else:
            self._last_interval = self._interval_of(at)


def _as_numbers(fitted: Throughput) -> tuple[float, float, float]:
    """Return the seconds of :func:`fit_step_time`, which are those of one number of workers."""
    return fitted.pass_s, fitted.example_s, fitted.step_s


def _from_numbers(numbers: Sequence[float]) -> Throughput:
    pass_s, example_s, step_s = numbers
    return Throughput(example_s=example_s, pass_s=pass_s, step_s=step_s)


def _trials(plans: list[BatchPlan], max_accumulation: int | None) -> list[BatchPlan]:
    """Return up to three plans to time, from which the times of all plans follow. They are small: the noise is unknown yet."""
    first = plans[0]
    found = [first]
    larger = [p for p in plans if p.accumulation == first.accumulation and p.scale <= 4 * first.scale]
    if larger[-1] is not first:
        found.append(larger[-1])
    passes = 2 * first.accumulation
    if max_accumulation is None or passes <= max_accumulation:
        size = max(first.global_batch_size // first.num_samples, 1)
        batch = size * first.world_size * passes
        if batch <= plans[-1].global_batch_size:
            found.append(BatchPlan(first.base_batch_size, batch, first.world_size, passes))
    return found if plans[1:] else []
