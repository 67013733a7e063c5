"""The batch policy: which batch a number of workers makes. This module has the policy of a fixed batch.

Policies that change the batch as the run goes on are in :mod:`ray_adascale.adaptive_batch` and
:mod:`ray_adascale.batch_schedule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from ._errors import SettingError
from .data.order import BatchSplit
from .throughput import Throughput

_RATIO = 2**0.25
"""Ratio of neighbouring pass sizes in the grid: few sizes, and one of them near to any wanted size."""
_NEAR = 2**0.125
"""Smallest ratio of neighbouring batches in the grid."""
_ROOM = 8.0
"""Scales up to this one are allowed in any run, however short."""


@dataclass(frozen=True)
class BatchPlan:
    """How one optimizer step's batch is made up.

    Attributes:
        base_batch_size: B0, examples.
        global_batch_size: B, examples.
        world_size: Workers.
        accumulation: Backward passes a worker.
    """

    base_batch_size: int
    global_batch_size: int
    world_size: int
    accumulation: int

    @property
    def scale(self) -> float:
        """S = B / B0."""
        return self.global_batch_size / self.base_batch_size

    @property
    def num_samples(self) -> int:
        """n, gradient samples in one optimizer step."""
        return self.world_size * self.accumulation

    @property
    def largest_pass(self) -> int:
        """Examples in the largest micro-batch of the step."""
        return math.ceil(self.global_batch_size / self.num_samples)

    def seconds(self, throughput: Throughput) -> float:
        """Return the seconds of a step by a model. The workers wait for the one with the largest passes."""
        return throughput.step_seconds(self.world_size, self.accumulation, self.largest_pass)

    def split(self, rank: int) -> BatchSplit:
        """Return the micro-batches of one worker."""
        return BatchSplit(self.global_batch_size, rank=rank, world_size=self.world_size, accumulation=self.accumulation)


@dataclass(frozen=True)
class Position:
    """The place of a run at a step boundary.

    Attributes:
        effective_steps: τ.
        examples: Examples that the run has taken.
    """

    effective_steps: float
    examples: float


def check_positive(**settings: object) -> None:
    """Check settings that are positive integers.

    Raises:
        SettingError: A setting is something else.
    """
    for name, value in settings.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise SettingError("Invalid {}. Must be a positive integer.", **{name: value})


@dataclass(frozen=True, kw_only=True)
class BatchLimits:
    """The fields of :class:`ray_adascale.AdaScaleConfig` that say which batches workers can make, with their meanings there.

    Raises:
        SettingError: A field is out of its range, or two fields contradict each other.
    """

    base_batch_size: int
    per_worker_batch_size: int | None = None
    accumulation: int = 1
    min_examples_per_worker: int = 1
    max_global_batch_size: int | None = None
    max_accumulation: int | None = None

    def __post_init__(self) -> None:
        optional = {field.name for field in fields(self) if field.default is None}
        check_positive(**{k: v for k, v in vars(self).items() if v is not None or k not in optional})
        if self.per_worker_batch_size is not None and self.per_worker_batch_size < self.min_examples_per_worker:
            raise SettingError(
                f"Invalid {{}}: more than per_worker_batch_size={self.per_worker_batch_size}.",
                min_examples_per_worker=self.min_examples_per_worker,
            )
        if self.max_accumulation is not None and self.max_accumulation < self.accumulation:
            raise SettingError(
                f"Invalid {{}}: fewer than accumulation={self.accumulation}, the fewest passes.",
                max_accumulation=self.max_accumulation,
            )

    @property
    def per_pass(self) -> int:
        """Most examples of one pass on one worker."""
        return self.base_batch_size if self.per_worker_batch_size is None else self.per_worker_batch_size

    def largest_choice(self, window: float, largest: float) -> float:
        """Return the examples of the largest batch that a policy may choose which is not given its batches.

        Where no field bounds the batch, no step advances the clock by more than the averages reach back, because r ≤ S.

        Args:
            window: Effective steps that the averages of σ² and μ² reach back over.
            largest: Examples of the largest sensible batch.
        """
        if self.max_global_batch_size is not None or self.max_accumulation is not None:
            return largest
        return min(largest, max(window, _ROOM) * self.base_batch_size)

    def plan(self, batch: int, world_size: int, fewest: int = 1) -> BatchPlan:
        """Return the plan of this batch in as few passes as possible; of a larger batch where a pass would be too small.

        Args:
            batch: Examples.
            world_size: Workers.
            fewest: Fewest passes, beside the field.
        """
        accumulation = max(self.accumulation, fewest, math.ceil(batch / (self.per_pass * world_size)))
        smallest = self.min_examples_per_worker * world_size * accumulation
        return BatchPlan(self.base_batch_size, max(batch, smallest), world_size, accumulation)

    def bounded_plan(self, batch: int, world_size: int, fewest: int = 1) -> BatchPlan:
        """Return :meth:`plan` of this batch, or of the largest one within the bounds. The smallest plan is within them.

        Args:
            batch: Examples.
            world_size: Workers.
            fewest: Fewest passes, beside the field.
        """
        full = self.per_pass * world_size
        passes = math.inf if self.max_accumulation is None else self.max_accumulation
        bound = math.inf if self.max_global_batch_size is None else self.max_global_batch_size
        plan = self.plan(int(min(batch, bound, full * passes)), world_size, fewest)
        if plan.global_batch_size <= bound:
            return plan
        # The last pass would be too small for the workers, and the batch has grown: full passes without the last one.
        return self.plan(full * (plan.accumulation - 1), world_size, fewest)

    def smallest(self, world_size: int, fewest: int, **setting: Any) -> BatchPlan:
        """Return the plan of the base batch, or of the next larger batch that the workers can make.

        Args:
            world_size: Workers.
            fewest: Fewest passes, beside the field.
            **setting: The setting that needs the bounds, for the message.

        Raises:
            SettingError: The bounds leave no batch.
        """
        most = math.inf if self.max_accumulation is None else self.max_accumulation
        bound = math.inf if self.max_global_batch_size is None else self.max_global_batch_size
        plan = self.plan(self.base_batch_size, world_size, fewest)
        if plan.global_batch_size > bound or plan.accumulation > most:
            raise SettingError(
                f"The bounds of {{}} leave no batch on {world_size} workers: the smallest is {plan.global_batch_size} "
                f"examples in {plan.accumulation} passes a worker (base_batch_size={self.base_batch_size}, "
                f"per_worker_batch_size={self.per_pass}, min_examples_per_worker={self.min_examples_per_worker}, "
                f"accumulation={self.accumulation}), the largest {bound:g} in {most:g} "
                "(max_global_batch_size, max_accumulation). Raise these, or per_worker_batch_size.",
                **setting,
            )
        return plan

    def grid(self, smallest: BatchPlan, largest: float = math.inf) -> list[BatchPlan]:
        """Return batches from the smallest one on, each about a fifth larger than the one before.

        Each batch is made in as few passes as ``per_worker_batch_size`` allows. The sizes of a pass lie on a grid of their own,
        so that few of them occur. A larger batch takes larger passes first, and then more of them.

        Args:
            smallest: The smallest plan, which is always there.
            largest: Examples of the largest batch, beside the bounds of the fields.
        """
        base, per_worker, world_size = self.base_batch_size, self.per_pass, smallest.world_size
        most = math.inf if self.max_accumulation is None else self.max_accumulation
        bound = math.inf if self.max_global_batch_size is None else self.max_global_batch_size
        largest = min(largest, bound, base * 1e6)  # no run reaches a millionfold batch
        plans, passes = [smallest], smallest.accumulation
        sizes = _grid_below(per_worker, self.min_examples_per_worker)
        while passes <= most and plans[-1].global_batch_size * _NEAR < largest:
            for size in sizes:
                batch = size * world_size * passes
                if plans[-1].global_batch_size * _NEAR < batch <= largest:
                    plans.append(BatchPlan(base, batch, world_size, passes))
            if passes * world_size * per_worker >= largest:
                break
            passes = max(passes, math.floor(plans[-1].global_batch_size * _NEAR / (world_size * per_worker))) + 1
        return plans


class BatchController(Protocol):
    """Chooses the batch of each step of one run, and resumes. All workers choose alike.

    Attributes:
        plans: The plans to choose from.
        plan: The plan of the next step.
    """

    plans: Sequence[BatchPlan]
    plan: BatchPlan

    def due_by(self, at: Position) -> bool:
        """Return whether a decision is due at a boundary at this position."""
        ...

    def after_step(self, at: Position, moments: Callable[[], tuple[float, float]]) -> BatchPlan:
        """Return the plan of the next step.

        Args:
            at: The position after the last step.
            moments: Returns the averaged σ² and μ²; NaN where they are unknown.
        """
        ...

    def state(self) -> dict[str, Any]:
        """Return the state as JSON values, the same on every worker."""
        ...

    def resume(self, state: Mapping[str, Any], at: Position, moments: tuple[float, float]) -> None:
        """Continue from a checkpoint, on the same workers exactly.

        Args:
            state: The result of :meth:`state`; empty where the run did not choose its batch so far.
            at: The position of the checkpoint.
            moments: The averages in the checkpoint.
        """
        ...


class BatchPolicy(Protocol):
    """Decides which batch a number of workers makes. :attr:`ray_adascale.AdaScaleConfig.batch_policy` makes it.

    The members with a body are those of a policy that keeps one batch.
    """

    @property
    def changes_batch(self) -> bool:
        """Whether the batch may change while the number of workers stays."""
        return False

    @property
    def follows_noise(self) -> bool:
        """Whether the batch is chosen by the measured gain, so that the clock must follow the gain as well."""
        return False

    def plan(self, world_size: int) -> BatchPlan:
        """Return the batch of this number of workers at the start of a run.

        Raises:
            SettingError: The workers can't make the batch.
        """
        ...

    def controller(
        self, world_size: int, *, total_steps: float, window: float, largest: float = math.inf
    ) -> BatchController | None:
        """Return a fresh controller for a run; None for a policy that keeps one batch.

        Args:
            world_size: Workers.
            total_steps: T.
            window: Effective steps that the averages of σ² and μ² reach back over.
            largest: Examples of the largest sensible batch: those of an epoch.
        """
        return None


@dataclass(frozen=True, kw_only=True)
class FixedBatch(BatchPolicy):
    """The policy of one batch throughout: each worker's share of it stays, or the whole batch.

    Attributes:
        limits: The batches that workers can make.
        global_batch_size: B on any number of workers; None: B grows with the workers.
        elastic: As in :class:`ray_adascale.AdaScaleConfig`.
    """

    limits: BatchLimits
    global_batch_size: int | None = None
    elastic: bool = False

    def plan(self, world_size: int) -> BatchPlan:
        base, per_worker, accumulation = self.limits.base_batch_size, self.limits.per_pass, self.limits.accumulation
        if self.global_batch_size is not None:
            if self.global_batch_size < base:
                raise SettingError(
                    f"Invalid {{}}: smaller than base_batch_size={base}, so the scale would be below 1.",
                    global_batch_size=self.global_batch_size,
                )
            return self.limits.plan(self.global_batch_size, world_size)
        if self.elastic:
            accumulation = max(accumulation, math.ceil(base / (per_worker * world_size)))
        batch = per_worker * world_size * accumulation
        if batch < base:
            raise SettingError(
                f"Invalid {{}}: larger than the global batch of {batch} = {per_worker} per worker × {world_size} workers × "
                f"{accumulation} passes. Raise per_worker_batch_size, accumulation or num_workers, so that the scale is at "
                "least 1.",
                base_batch_size=base,
            )
        return BatchPlan(base, batch, world_size, accumulation)


def _grid_below(largest: int, smallest: int) -> list[int]:
    """Return integers from ``smallest`` to ``largest``, neighbours in a ratio of about :data:`_RATIO`, in ascending order."""
    sizes, size = [largest], largest
    while size > smallest:
        size = max(min(round(largest / _RATIO ** len(sizes)), size - 1), smallest)
        sizes.append(size)
    return sizes[::-1]


def nearest_plan(plans: list[BatchPlan], batch: float) -> BatchPlan:
    """Return the plan with the nearest batch by ratio; of two at the same distance, the smaller one.

    Args:
        plans: Smallest batch first.
        batch: Examples; may be infinite.
    """
    wanted = min(batch, plans[-1].global_batch_size)
    return min(plans, key=lambda plan: abs(math.log(plan.global_batch_size / wanted)))
