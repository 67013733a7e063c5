"""A scale that follows the noise: which batch is wanted, from the averages of σ² and μ², when, and how many workers pay.

It is decided at step boundaries, at intervals in τ, from the averages alone: so all ranks decide alike without a further
collective, and a resumed run as one that was never stopped. For "goodput" there is a model of a step's seconds beside them,
which is measured once, over the run's first steps, and from then on belongs to the run's state.
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Callable, Mapping
from dataclasses import astuple, dataclass, replace
from typing import Any, Literal

from .config import AdaScaleConfig, BatchPlan, StepSeconds, nearest_plan
from .gain import plain_gain, scale_at_efficiency

__all__ = [
    "BatchSizeController",
    "StepTime",
    "controller_of",
    "max_useful_workers",
    "useful_workers",
    "useful_workers_over",
    "wanted_batch",
]

PAYS = 0.5
"""Adding workers pays while each adds at least this share of the first worker's speed."""

_INTERVAL = 0.25
"""Between decisions, of the window that the averages reach back over: what they say changes no faster."""
_STEADY = 1.2
"""A batch stays that is wanted larger or smaller by less than so much; more than the grid of plans is coarse."""
_GROWTH = 2.0
"""A batch grows so much at most in one decision, so that averages of a few samples can't throw it far."""
_BETTER = 1.05
"""For another batch to be taken, it must make so many times the progress a second."""
_ROOM = 8.0
"""Scales up to this one are allowed in a run however short."""
_TRIAL_STEPS, _WARM_UP = 8, 3
"""Steps with each plan that is timed, and how many of them are not counted."""


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step on a fixed number of workers: ``passes · (pass_s + m · example_s) + step_s``.

    Attributes:
        pass_s: Of each pass, whatever its size.
        example_s: Of each example of a pass on one worker.
        step_s: Of the optimizer's step and what the workers send each other.
    """

    pass_s: float
    example_s: float
    step_s: float

    def of(self, plan: BatchPlan) -> float:
        """Seconds of a step with this plan."""
        size = math.ceil(plan.global_batch_size / plan.num_samples)
        return plan.accumulation * (self.pass_s + size * self.example_s) + self.step_s

    @classmethod
    def from_model(cls, model: StepSeconds, workers: int) -> StepTime:
        """What a model of any number of workers says of so many; it is taken to be linear in passes and in their size."""
        one, larger, twice = (model.step_seconds(workers, a, m) for a, m in ((1, 1), (1, 2), (2, 1)))
        return cls(pass_s=twice - larger, example_s=larger - one, step_s=2 * one - twice)

    @classmethod
    def fit(cls, times: Mapping[BatchPlan, float]) -> StepTime:
        """Through measured seconds of a step with up to three plans: the first, one with larger passes, and one with more.

        A negative share, which is measuring error, counts as none. What was not varied can't be told apart: without a plan
        of more passes all that isn't per example counts for the step.

        Args:
            times: At least one plan.
        """
        points = [(plan.accumulation, plan.global_batch_size / plan.world_size, t) for plan, t in times.items()]
        (passes, examples, seconds), *others = points
        pass_s = example_s = 0.0
        # With as many passes, what more examples take; with more passes, what is left.
        for a, n, t in others:
            if a == passes and n > examples:
                example_s = max((t - seconds) / (n - examples), 0.0)
        for a, n, t in others:
            if a > passes:
                pass_s = max((t - seconds - (n - examples) * example_s) / (a - passes), 0.0)
        return cls(pass_s, example_s, max(seconds - examples * example_s - passes * pass_s, 0.0))


def wanted_batch(
    target_efficiency: float | Literal["goodput"],
    plans: list[BatchPlan],
    now: BatchPlan,
    sigma2: float,
    mu2: float,
    step_time: StepTime | None = None,
) -> float:
    """Examples that a step is to have from here on: ``now``'s, unless there is enough reason for others.

    Args:
        target_efficiency: As in :class:`ray_adascale.AdaScaleConfig`.
        plans: What the workers can run, smallest first.
        now: One of them.
        sigma2: Averaged gradient variance of one base batch; NaN where nothing is known.
        mu2: Averaged squared gradient.
        step_time: For "goodput".
    """
    batch = now.global_batch_size
    if math.isnan(sigma2) or math.isnan(mu2):
        return batch
    if target_efficiency != "goodput":
        scale = scale_at_efficiency(sigma2, mu2, target_efficiency)
        wanted = min(scale * now.base_batch_size, plans[-1].global_batch_size, _GROWTH * batch)
        wanted = max(wanted, plans[0].global_batch_size)
        return wanted if max(wanted / batch, batch / wanted) >= _STEADY else batch
    assert step_time is not None

    def goodput(plan: BatchPlan) -> float:
        return plain_gain(sigma2, mu2, plan.scale) / max(step_time.of(plan), 1e-12)

    best = max((plan for plan in plans if plan.global_batch_size <= _GROWTH * batch), key=goodput)
    return best.global_batch_size if goodput(best) > _BETTER * goodput(now) else batch


class BatchSizeController:
    """The batch of a run that chooses its scale, from step to step.

    Args:
        config: ``target_efficiency`` and the bounds.
        world_size: Workers.
        total_steps: T.
        largest: Examples of the largest batch, beside what the config says.

    Attributes:
        plan: The one to run with now.
        step_time: How long steps take, for "goodput"; None until that is measured.
    """

    def __init__(
        self, config: AdaScaleConfig, world_size: int, *, total_steps: float, largest: float = math.inf
    ) -> None:
        assert config.target_efficiency is not None
        assert config.base_batch_size is not None
        self._efficiency: float | Literal["goodput"] = config.target_efficiency
        self._world_size = world_size
        window = config.averaging_window * total_steps
        if config.max_global_batch_size is None and config.max_accumulation is None:
            # r ≤ S: so no step moves the clock by more than the averages reach back.
            largest = min(largest, max(window, _ROOM) * config.base_batch_size)
        self.plans = config.plans(world_size, largest)
        self._interval = _INTERVAL * window
        self._wanted = config.first_batch
        self._looked = 0
        self.step_time: StepTime | None = None
        self._trials: list[BatchPlan] = []
        self._times: dict[BatchPlan, list[float]] = {}
        if config.throughput is not None:
            self.step_time = StepTime.from_model(config.throughput, world_size)
        elif self._efficiency == "goodput":
            self._trials = _trials(self.plans, config)
        self.plan = nearest_plan(self.plans, self._wanted)

    @property
    def measuring(self) -> bool:
        """Whether steps are still timed."""
        return bool(self._trials)

    def due_by(self, effective_steps: float) -> bool:
        """Whether τ, when it has come so far, asks for a decision at this boundary."""
        return self.measuring or math.floor(effective_steps / self._interval) > self._looked

    def after_step(
        self,
        effective_steps: float,
        moments: Callable[[], tuple[float, float]],
        seconds: float = 0.0,
        agree: Callable[[tuple[float, ...]], tuple[float, ...]] = tuple,
    ) -> BatchPlan:
        """The plan of the next step.

        Args:
            effective_steps: τ after the last one.
            moments: Gives the averaged σ² and μ².
            seconds: That the last step took here.
            agree: Returns rank 0's numbers; all workers together. Called once in a run, when all is measured.
        """
        if not self.due_by(effective_steps):
            return self.plan
        if self.measuring:
            return self._after_trial_step(effective_steps, moments, seconds, agree)
        self._looked = math.floor(effective_steps / self._interval)
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
        medians = {plan: statistics.median(times[_WARM_UP:]) for plan, times in self._times.items()}
        self.step_time = StepTime(*agree(astuple(StepTime.fit(medians))))
        self.plan = nearest_plan(self.plans, self._wanted)
        self._looked = math.floor(effective_steps / self._interval)
        self._decide(moments())
        return self.plan

    # ---- state ---------------------------------------------------------------------------------------------------

    def state(self) -> dict[str, Any]:
        """JSON values, the same on every worker."""
        return {
            "batch": self._wanted,
            "step_time": None if self.step_time is None else list(astuple(self.step_time)),
            "world_size": self._world_size,
        }

    def resume(self, state: Mapping[str, Any], effective_steps: float, moments: tuple[float, float]) -> None:
        """Go on as if never stopped; on another number of workers towards the same batch, with their own seconds of a step.

        Args:
            state: What :meth:`state` returned; empty where the run did not choose its scale so far.
            effective_steps: τ.
            moments: The averages as they were saved.
        """
        self._looked = math.floor(effective_steps / self._interval)
        if state:
            self._wanted = state["batch"]
            if self._trials and state["step_time"] is not None and state["world_size"] == self._world_size:
                self.step_time, self._trials = StepTime(*state["step_time"]), []
            self.plan = nearest_plan(self.plans, self._wanted)
        elif not self._trials:
            self._decide(moments)


def _trials(plans: list[BatchPlan], config: AdaScaleConfig) -> list[BatchPlan]:
    """Up to three plans whose times tell those of all others, and whose batches are small: the noise is not known yet."""
    first = plans[0]
    found = [first]
    larger = [p for p in plans if p.accumulation == first.accumulation and p.scale <= 4 * first.scale]
    if larger[-1] is not first:
        found.append(larger[-1])
    passes = 2 * first.accumulation
    if config.max_accumulation is None or passes <= config.max_accumulation:
        size = max(first.global_batch_size // first.num_samples, 1)
        batch = size * first.world_size * passes
        if batch <= plans[-1].global_batch_size:
            found.append(BatchPlan(first.base_batch_size, batch, first.world_size, passes))
    return found if plans[1:] else []


def controller_of(
    config: AdaScaleConfig, world_size: int, *, total_steps: float, largest: float = math.inf
) -> BatchSizeController | None:
    """What chooses the scale of a run; None where its settings do."""
    if config.target_efficiency is None:
        return None
    return BatchSizeController(config, world_size, total_steps=total_steps, largest=largest)


# ---- how many workers pay --------------------------------------------------------------------------------------------


def max_useful_workers(speedup: Callable[[int], float], most: int) -> int | None:
    """The first number of workers from which further ones, up to twice as many, add less than ``PAYS · speedup(1)`` each.

    What they add is averaged over them, as with a fixed batch three workers may need as many passes as two; where each worker
    adds less than the one before, the number is that of the last worker to add so much. It is exact up to 64 workers, above
    them to a sixteenth, and None above ``most``.

    Args:
        speedup: Speed on so many workers, in any unit.
        most: Workers among which the number is looked for.
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


def useful_workers(config: AdaScaleConfig, sigma2: float, mu2: float, *, most: int) -> int:
    """Up to how many workers adding one pays, at the present noise: each further one adds less than half as much as the first.

    The speed of k workers is r(S) over the time of a step: by ``config.throughput``, or without one the number of its passes,
    as in a forecast. S is what k workers make up, or choose.

    Args:
        config: Of the run, with its base batch size.
        sigma2: Averaged gradient variance of one base batch.
        mu2: Averaged squared gradient.
        most: It looks no further.
    """
    elastic = config if config.target_efficiency is not None else replace(config, elastic=True)

    def speed(plan: BatchPlan) -> float:
        size = math.ceil(plan.global_batch_size / plan.num_samples)
        model = config.throughput
        seconds = plan.accumulation if model is None else model.step_seconds(plan.world_size, plan.accumulation, size)
        return plain_gain(sigma2, mu2, plan.scale) / seconds

    @functools.cache
    def speed_of(workers: int) -> float:
        try:
            if config.target_efficiency is None:
                return speed(elastic.plan(workers))
            plans = config.plans(workers)
        except ValueError:  # more of them than the bounds allow
            return 0.0
        if config.target_efficiency == "goodput":
            return max(map(speed, plans))
        assert config.base_batch_size is not None
        wanted = scale_at_efficiency(sigma2, mu2, config.target_efficiency) * config.base_batch_size
        return speed(nearest_plan(plans, wanted))

    return max_useful_workers(speed_of, most) or most


def useful_workers_over(
    config: AdaScaleConfig, noise: Callable[[float], tuple[float, float]], total_steps: float, *, most: int
) -> list[tuple[float, int]]:
    """From which share of a run on how many workers pay, by a noise that is known beforehand; each twentieth is looked at.

    Args:
        config: As for :func:`useful_workers`.
        noise: σ² and μ² at τ.
        total_steps: T.
        most: It looks no further.
    """
    found: list[tuple[float, int]] = []
    for share in (i / 20 for i in range(20)):
        pays = useful_workers(config, *noise(share * total_steps), most=most)
        if not found or found[-1][1] != pays:
            found.append((share, pays))
    return found
