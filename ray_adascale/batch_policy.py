"""The batch policy: which batch a number of workers makes, fixed by the settings or chosen as the run goes on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from ._errors import SettingError
from .data.order import BatchSplit
from .throughput import Throughput

__all__ = ["BatchPlan", "BatchPolicy", "nearest_plan"]

_RATIO = 2**0.25
"""Ratio of neighbouring pass sizes in the grid: few sizes, and one of them near to any wanted size."""
_NEAR = 2**0.125
"""Smallest ratio of neighbouring batches in the grid."""


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

    def split(self, rank: int) -> BatchSplit:
        """Return the micro-batches of one worker."""
        return BatchSplit(self.global_batch_size, rank=rank, world_size=self.world_size, accumulation=self.accumulation)


@dataclass(frozen=True, kw_only=True)
class BatchPolicy:
    """The fields of :class:`ray_adascale.AdaScaleConfig` that decide about the batch, with their names and meanings.

    Raises:
        SettingError: A field is out of its range, or two fields contradict each other.
    """

    base_batch_size: int
    per_worker_batch_size: int | None = None
    accumulation: int = 1
    global_batch_size: int | None = None
    min_examples_per_worker: int = 1
    target_efficiency: float | Literal["goodput"] | None = None
    max_global_batch_size: int | None = None
    max_accumulation: int | None = None
    throughput: Throughput | None = None
    elastic: bool = False

    def __post_init__(self) -> None:
        for name in (
            "base_batch_size",
            "per_worker_batch_size",
            "accumulation",
            "global_batch_size",
            "min_examples_per_worker",
            "max_global_batch_size",
            "max_accumulation",
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise SettingError("Invalid {}. Must be a positive integer.", **{name: value})
        if self.per_worker_batch_size is not None and self.per_worker_batch_size < self.min_examples_per_worker:
            raise SettingError(
                f"Invalid {{}}: more than per_worker_batch_size={self.per_worker_batch_size}.",
                min_examples_per_worker=self.min_examples_per_worker,
            )
        self._check_target_efficiency()

    def _check_target_efficiency(self) -> None:
        chosen = self.target_efficiency
        if chosen is None:
            for name in ("max_global_batch_size", "max_accumulation"):
                if getattr(self, name) is not None:
                    raise SettingError(
                        "Invalid {}: it bounds the batch that target_efficiency chooses. Give target_efficiency as well, or "
                        "per_worker_batch_size, accumulation or global_batch_size instead.",
                        **{name: getattr(self, name)},
                    )
        elif chosen != "goodput" and (
            isinstance(chosen, bool | str) or not isinstance(chosen, int | float) or not 0 < chosen <= 1
        ):
            raise SettingError(
                "Invalid {}. Must be a number above 0 and at most 1 (0.6: the progress of a step is to be 60 % of the progress "
                "that its examples make at the base batch), 'goodput', or None.",
                target_efficiency=chosen,
            )
        elif self.global_batch_size is not None:
            raise SettingError(
                "Invalid {}. Give one of them, not both: target_efficiency changes the batch as the run goes on, and "
                "max_global_batch_size bounds it.",
                target_efficiency=chosen,
                global_batch_size=self.global_batch_size,
            )
        if self.throughput is not None and chosen != "goodput":
            raise SettingError("{} is for target_efficiency='goodput'. Leave it out.", throughput=...)
        if self.max_accumulation is not None and self.max_accumulation < self.accumulation:
            raise SettingError(
                f"Invalid {{}}: fewer than accumulation={self.accumulation}, the fewest passes.",
                max_accumulation=self.max_accumulation,
            )

    @property
    def follows_noise(self) -> bool:
        """Whether the run chooses its batch as it goes on."""
        return self.target_efficiency is not None

    @property
    def batch_may_change(self) -> bool:
        """Whether the batch or the number of workers may change while the run goes on."""
        return self.elastic or self.follows_noise

    @property
    def _per_pass(self) -> int:
        """Most examples of one pass on one worker."""
        return self.base_batch_size if self.per_worker_batch_size is None else self.per_worker_batch_size

    @property
    def first_batch(self) -> float:
        """Examples of a step while the noise is unknown: the batch that reaches the target efficiency without any noise."""
        assert self.target_efficiency is not None
        return self.base_batch_size / (1.0 if self.target_efficiency == "goodput" else self.target_efficiency)

    def plan(self, world_size: int) -> BatchPlan:
        """Return the batch of this number of workers. With ``target_efficiency``, the batch at the start of the run.

        Raises:
            SettingError: The base batch is larger than the global batch, or the bounds leave no batch.
        """
        if self.target_efficiency is not None:
            return nearest_plan(self.plans(world_size), self.first_batch)
        base, per_worker, accumulation = self.base_batch_size, self._per_pass, self.accumulation
        if self.global_batch_size is not None:
            return self._fixed_plan(self.global_batch_size, world_size)
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

    def _fixed_plan(self, batch: int, world_size: int) -> BatchPlan:
        """Return the plan of ``global_batch_size``, in as few passes as possible."""
        base = self.base_batch_size
        if batch < base:
            raise SettingError(
                f"Invalid {{}}: smaller than base_batch_size={base}, so the scale would be below 1.",
                global_batch_size=batch,
            )
        accumulation = max(self.accumulation, math.ceil(batch / (self._per_pass * world_size)))
        smallest = self.min_examples_per_worker * world_size * accumulation
        return BatchPlan(base, max(batch, smallest), world_size, accumulation)

    def plans(self, world_size: int, largest: float = math.inf) -> list[BatchPlan]:
        """Return the batches among which ``target_efficiency`` chooses, smallest first. Each is about a fifth larger.

        Each batch is made in as few passes as ``per_worker_batch_size`` allows. The sizes of a pass lie on a grid of their own,
        so that few of them occur. A larger batch takes larger passes first, and then more of them. Where the scale may grow,
        each step has at least two gradient samples, since one sample tells nothing about the noise.

        Args:
            world_size: Workers.
            largest: Examples of the largest batch, beside the bounds of the fields. The smallest batch is always there.

        Raises:
            SettingError: The bounds leave no batch.
        """
        base, per_worker = self.base_batch_size, self._per_pass
        fewest, least = self.accumulation, self.min_examples_per_worker
        if world_size == 1 and self.target_efficiency != 1:
            fewest = max(fewest, 2)
        most = math.inf if self.max_accumulation is None else self.max_accumulation
        bound = math.inf if self.max_global_batch_size is None else self.max_global_batch_size
        passes = max(fewest, math.ceil(base / (per_worker * world_size)))
        smallest = BatchPlan(base, max(base, least * world_size * passes), world_size, passes)
        if smallest.global_batch_size > bound or passes > most:
            raise SettingError(
                f"The bounds of {{}} leave no batch on {world_size} workers: the smallest is {smallest.global_batch_size} "
                f"examples in {passes} passes a worker (base_batch_size={base}, per_worker_batch_size={per_worker}, "
                f"min_examples_per_worker={least}, accumulation={self.accumulation}), the largest {bound:g} in {most:g} "
                "(max_global_batch_size, max_accumulation). Raise these, or per_worker_batch_size.",
                target_efficiency=self.target_efficiency,
            )
        if self.target_efficiency == 1:
            return [smallest]
        largest = min(largest, bound, base * 1e6)  # no run reaches a millionfold batch
        plans, sizes = [smallest], _grid_below(per_worker, least)
        while passes <= most and plans[-1].global_batch_size * _NEAR < largest:
            for size in sizes:
                batch = size * world_size * passes
                if plans[-1].global_batch_size * _NEAR < batch <= largest:
                    plans.append(BatchPlan(base, batch, world_size, passes))
            if passes * world_size * per_worker >= largest:
                break
            passes = max(passes, math.floor(plans[-1].global_batch_size * _NEAR / (world_size * per_worker))) + 1
        return plans


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
