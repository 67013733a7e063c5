"""A batch that follows the noise, and the number of workers that is useful at that noise.

Decisions are made at step boundaries, at intervals in τ, from the averages of σ² and μ² alone. So all ranks decide alike without
a further collective, and a resumed run decides like one that was never stopped. "goodput" also needs a model of a step's seconds.
It is fitted once, to the run's first steps, and belongs to the run's state from then on.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from .batch_policy import BatchPlan, BatchPolicy, nearest_plan
from .gain import plain_gain, scale_at_efficiency
from .throughput import Throughput

__all__ = [
    "BatchSizeController",
    "controller_of",
    "fit_step_time",
    "max_useful_workers",
    "useful_workers",
    "useful_workers_over",
    "wanted_batch",
]

PAYS = 0.5
"""Further workers are useful while each adds at least this share of the first worker's speed."""

_INTERVAL = 0.25
"""Effective steps between decisions, as a share of the averages' window: the averages change no faster."""
_STEADY = 1.2
"""Hysteresis: keep the batch unless the target differs by this factor. It is more than the grid of plans is coarse."""
_GROWTH = 2.0
"""Largest growth of the batch in one decision, so that averages of a few samples can't throw it far."""
_BETTER = 1.05
"""Hysteresis for goodput: keep the batch unless another one makes this many times the progress a second."""
_ROOM = 8.0
"""Scales up to this one are allowed in any run, however short."""
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


def _seconds(model: Throughput, plan: BatchPlan) -> float:
    return model.step_seconds(plan.world_size, plan.accumulation, plan.largest_pass)


def wanted_batch(
    target_efficiency: float | Literal["goodput"],
    plans: list[BatchPlan],
    now: BatchPlan,
    sigma2: float,
    mu2: float,
    step_time: Throughput | None = None,
) -> float:
    """Return the examples of the next steps: the present batch, unless there is enough reason for another one.

    Args:
        target_efficiency: As in :class:`ray_adascale.AdaScaleConfig`.
        plans: The plans that the workers can run, smallest first.
        now: The present plan, one of them.
        sigma2: Averaged gradient variance of one base batch; NaN where it is unknown.
        mu2: Averaged squared gradient norm; NaN where it is unknown.
        step_time: Seconds of a step, for "goodput".
    """
    batch = now.global_batch_size
    if not plans[1:] or math.isnan(sigma2) or math.isnan(mu2):
        return batch
    if target_efficiency != "goodput":
        scale = scale_at_efficiency(sigma2, mu2, target_efficiency)
        wanted = min(scale * now.base_batch_size, plans[-1].global_batch_size, _GROWTH * batch)
        wanted = max(wanted, plans[0].global_batch_size)
        return wanted if max(wanted / batch, batch / wanted) >= _STEADY else batch
    assert step_time is not None

    def goodput(plan: BatchPlan) -> float:
        return plain_gain(sigma2, mu2, plan.scale) / max(_seconds(step_time, plan), 1e-12)

    best = max((plan for plan in plans if plan.global_batch_size <= _GROWTH * batch), key=goodput)
    return best.global_batch_size if goodput(best) > _BETTER * goodput(now) else batch


class BatchSizeController:
    """Chooses the batch of each step, for a run that follows the noise.

    Args:
        policy: The target efficiency and the bounds.
        world_size: Workers.
        window: Effective steps that the averages of σ² and μ² reach back over.
        largest: Examples of the largest batch, beside the policy's bounds.

    Attributes:
        plan: The plan of the next step.
        step_time: Seconds of a step, for "goodput"; None until they are measured.
    """

    def __init__(self, policy: BatchPolicy, world_size: int, *, window: float, largest: float = math.inf) -> None:
        assert policy.target_efficiency is not None
        self._efficiency: float | Literal["goodput"] = policy.target_efficiency
        self._world_size = world_size
        if policy.max_global_batch_size is None and policy.max_accumulation is None:
            # r ≤ S, so no step advances the clock by more than the averages reach back.
            largest = min(largest, max(window, _ROOM) * policy.base_batch_size)
        self.plans = policy.plans(world_size, largest)
        self._interval = _INTERVAL * window
        self._wanted = policy.first_batch
        self._last_interval = 0
        self.step_time = policy.throughput
        self._trials: list[BatchPlan] = []
        self._times: dict[BatchPlan, list[float]] = {}
        if self._efficiency == "goodput" and self.step_time is None:
            self._trials = _trials(self.plans, policy.max_accumulation)
        self.plan = nearest_plan(self.plans, self._wanted)

    @property
    def measuring(self) -> bool:
        """Whether steps are still timed."""
        return bool(self._trials)

    def due_by(self, effective_steps: float) -> bool:
        """Return whether a decision is due at the boundary where τ has reached this value."""
        return self.measuring or math.floor(effective_steps / self._interval) > self._last_interval

    def after_step(
        self,
        effective_steps: float,
        moments: Callable[[], tuple[float, float]],
        seconds: float = 0.0,
        agree: Callable[[tuple[float, ...]], tuple[float, ...]] = tuple,
    ) -> BatchPlan:
        """Return the plan of the next step.

        Args:
            effective_steps: τ after the last step.
            moments: Returns the averaged σ² and μ².
            seconds: Duration of the last step on this worker.
            agree: Returns rank 0's numbers on all workers, a collective. Called once in a run, at the end of the measurement.
        """
        if not self.due_by(effective_steps):
            return self.plan
        if self.measuring:
            return self._after_trial_step(effective_steps, moments, seconds, agree)
        self._last_interval = math.floor(effective_steps / self._interval)
        self._decide(moments())
        return self.plan

    def _decide(self, moments: tuple[float, float]) -> None:
        wanted = wanted_batch(self._efficiency, self.plans, self.plan, *moments, self.step_time)
        if wanted != self.plan.global_batch_size:
            self._wanted = wanted
            self.plan = nearest_plan(self.plans, wanted)

    def _after_trial_step(
        self,
        effective_steps: float,
        moments: Callable[[], tuple[float, float]],
        seconds: float,
        agree: Callable[[tuple[float, ...]], tuple[float, ...]],
    ) -> BatchPlan:
        if self.plan == self._trials[0]:
            self._times.setdefault(self.plan, []).append(seconds)
        if len(self._times.get(self._trials[0], ())) >= _TRIAL_STEPS:
            del self._trials[0]
        if self._trials:
            self.plan = self._trials[0]
            return self.plan
        fitted = fit_step_time({plan: statistics.median(times[_WARM_UP:]) for plan, times in self._times.items()})
        self.step_time = _from_numbers(agree(_as_numbers(fitted)))
        self.plan = nearest_plan(self.plans, self._wanted)
        self._last_interval = math.floor(effective_steps / self._interval)
        self._decide(moments())
        return self.plan

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values, the same on every worker."""
        return {
            "batch": self._wanted,
            "step_time": None if self.step_time is None else list(_as_numbers(self.step_time)),
            "world_size": self._world_size,
        }

    def resume(self, state: Mapping[str, Any], effective_steps: float, moments: tuple[float, float]) -> None:
        """Continue from a checkpoint, on the same workers exactly.

        On another number of workers the run continues towards the same batch, and measures the seconds of a step again.

        Args:
            state: The result of :meth:`state`; empty where the run did not choose its scale so far.
            effective_steps: τ.
            moments: The averages in the checkpoint.
        """
        self._last_interval = math.floor(effective_steps / self._interval)
        if state:
            self._wanted = state["batch"]
            if self._trials and state["step_time"] is not None and state["world_size"] == self._world_size:
                self.step_time, self._trials = _from_numbers(state["step_time"]), []
            self.plan = nearest_plan(self.plans, self._wanted)
        elif not self._trials:
            self._decide(moments)


def _as_numbers(fitted: Throughput) -> tuple[float, float, float]:
    """Return the seconds of :func:`fit_step_time`, which are those of one number of workers."""
    return fitted.pass_s, fitted.example_s, fitted.step_s


def _from_numbers(numbers: Sequence[float]) -> Throughput:
    pass_s, example_s, step_s = numbers
    return Throughput(example_s=example_s, pass_s=pass_s, step_s=step_s)


def _trials(plans: list[BatchPlan], max_accumulation: int | None) -> list[BatchPlan]:
    """Return up to three plans to time. Their times tell those of all plans. They are small, since the noise is unknown yet."""
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


def controller_of(
    policy: BatchPolicy, world_size: int, *, window: float, largest: float = math.inf
) -> BatchSizeController | None:
    """Return the controller of a run that follows the noise; None where the settings fix the scale."""
    return BatchSizeController(policy, world_size, window=window, largest=largest) if policy.follows_noise else None


# ---- how many workers are useful -------------------------------------------------------------------------------------


def max_useful_workers(speedup: Callable[[int], float], most: int) -> int | None:
    """Return the largest number of workers at which the last ones added still add ``PAYS · speedup(1)`` each.

    The increase is averaged over up to twice as many workers: with a fixed batch, three workers may need as many passes as two.
    The number is exact up to 64 workers and to a sixteenth above them. It is None where even ``most`` workers are useful.

    Args:
        speedup: Speed by the number of workers, in any unit.
        most: Largest number of workers to try.
    """
    share = PAYS * speedup(1)
    tried = list(range(1, min(64, most) + 1))
    while tried[-1] < most:
        tried.append(tried[-1] + tried[-1] // 16)
    here = 1
    while here <= most:
        more = (k for k in tried if here < k <= 2 * here and speedup(k) - speedup(here) >= share * (k - here))
        found = next(more, None)
        if found is None:
            return here
        here = found
    return None


def useful_workers(policy: BatchPolicy, sigma2: float, mu2: float, *, most: int) -> int:
    """Return the number of workers up to which each one adds at least half as much as the first, at the present noise.

    The speed of k workers is r(S) over the time of a step: by ``policy.throughput``, or without one the number of its passes,
    as in a forecast. S is the scale of k workers.

    Args:
        policy: Of the run.
        sigma2: Averaged gradient variance of one base batch.
        mu2: Averaged squared gradient norm.
        most: Largest number to try.
    """
    model, elastic = policy.throughput, replace(policy, elastic=True)

    def speed(plan: BatchPlan) -> float:
        return plain_gain(sigma2, mu2, plan.scale) / (plan.accumulation if model is None else _seconds(model, plan))

    @functools.cache
    def speed_of(workers: int) -> float:
        try:
            if policy.target_efficiency is None:
                return speed(elastic.plan(workers))
            plans = policy.plans(workers)
        except ValueError:  # more workers than the bounds allow
            return 0.0
        if policy.target_efficiency == "goodput":
            return max(map(speed, plans))
        wanted = scale_at_efficiency(sigma2, mu2, policy.target_efficiency) * policy.base_batch_size
        return speed(nearest_plan(plans, wanted))

    return max_useful_workers(speed_of, most) or most


def useful_workers_over(
    policy: BatchPolicy, noise: Callable[[float], tuple[float, float]], total_steps: float, *, most: int
) -> list[tuple[float, int]]:
    """Return the useful number of workers over a run as (share of the run, workers), one pair for each change.

    Args:
        policy: As for :func:`useful_workers`.
        noise: Returns σ² and μ² at τ. It is asked at each twentieth of the run.
        total_steps: T.
        most: Largest number to try.
    """
    found: list[tuple[float, int]] = []
    for share in (i / 20 for i in range(20)):
        useful = useful_workers(policy, *noise(share * total_steps), most=most)
        if not found or found[-1][1] != useful:
            found.append((share, useful))
    return found
