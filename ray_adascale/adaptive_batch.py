"""The policy of a batch that follows the noise.

Decisions are made at step boundaries, at intervals in τ, from the averages of σ² and μ² alone. So all ranks decide alike without
a further collective, and a resumed run decides like one that was never stopped.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ._errors import SettingError
from .batch_policy import BatchController, BatchLimits, BatchPlan, BatchPolicy, Position, nearest_plan
from .gain import scale_at_efficiency

_INTERVAL = 0.25
"""Effective steps between decisions, as a share of the averages' window: the averages change no faster."""
_STEADY = 1.2
"""Hysteresis: keep the batch unless the target differs by this factor. It is more than the grid of plans is coarse."""
_GROWTH = 2.0
"""Largest growth of the batch in one decision, so that averages of a few samples can't throw it far."""


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
                "that its examples make at the base batch), or None.",
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
        self.plans = policy.plans(world_size, policy.limits.largest_choice(window, largest))
        self._interval = _INTERVAL * window
        self._wanted = policy.first_batch
        self._last_interval = 0
        self.plan = nearest_plan(self.plans, self._wanted)

    def due_by(self, at: Position) -> bool:
        return self._interval_of(at) > self._last_interval

    def _interval_of(self, at: Position) -> int:
        return math.floor(at.effective_steps / self._interval)

    def after_step(self, at: Position, moments: Callable[[], tuple[float, float]]) -> BatchPlan:
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
        return {"batch": self._wanted}

    def resume(self, state: Mapping[str, Any], at: Position, moments: tuple[float, float]) -> None:
        """Continue from a checkpoint. On another number of workers the run continues towards the same batch."""
        self._last_interval = self._interval_of(at)
        if state:
            self._wanted = state["batch"]
            self.plan = nearest_plan(self.plans, self._wanted)
        else:
            self._decide(moments)
